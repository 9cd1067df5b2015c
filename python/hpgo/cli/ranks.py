"""Run commands as one rank of a launcher, or in ranks that the command starts itself."""

from __future__ import annotations

import os
import socket
import sys
import time
from typing import TYPE_CHECKING

from hpgo.cli.terminal import say
from hpgo.errors import HpgoError

if TYPE_CHECKING:
    from collections.abc import Callable

    from hpgo.runtime.failure_detection import Limits
    from hpgo.runtime.rendezvous import AddressNames

_PAUSE_S = 1.0
"""Pause before the first failing rank exits. The launcher then kills the others, which may still report an error."""


def in_ranks(count: int, timeout_s: float, work: Callable[[], None]) -> None:
    """Run `work` as this rank of a launcher, or else in `count` new processes on this machine.

    Without a launcher, the error of the first failing rank is raised. Under a launcher, the first failing rank prints
    its error, and all ranks exit.
    """
    from hpgo.runtime.failure_detection import Limits
    from hpgo.runtime.launch import run_here
    from hpgo.runtime.rendezvous import is_launched

    limits = Limits(timeout_s, timeout_name="--timeout", silence_name="")
    if is_launched():
        take_part(limits, work)
    else:
        run_here(count, work, limits)


def take_part(limits: Limits, work: Callable[[], None], names: AddressNames | None = None) -> None:
    """Run `work` as one rank of a launcher, with failure detection and handling of preemption.

    `names` are the options that set the address of rank 0, if the command has such options.
    """
    from hpgo.runtime import guards
    from hpgo.runtime.preemption import Preempted
    from hpgo.runtime.rendezvous import guard

    try:
        guard(limits, _tell, names)
        work()
    except Preempted:
        guards.end()
        raise
    except HpgoError as error:
        guards.charge(error)
        if guards.is_first_to_tell():
            _tell(guards.named(error))
        if guards.are_there():
            time.sleep(_PAUSE_S)
        sys.stdout.flush()
        sys.stderr.flush()
        # A thread may still read the store, whose host exits. A regular exit would abort the process with a core dump.
        os._exit(1)
    except BaseException as error:
        guards.charge(error)
        raise
    guards.end()


def _tell(error: HpgoError) -> None:
    say("error", error.message)
    if error.hint:
        say("hint", error.hint)
    maximum = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")
    if maximum != "0" and os.environ.get("TORCHELASTIC_RESTART_COUNT") == maximum:
        say("note", f"`--max-restarts {maximum}` is reached on {socket.gethostname()}: torchrun restarts no rank there")
    sys.stderr.flush()
