"""Commands that are one rank of a launcher's, or start ranks of their own."""

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

_PAUSE_S = 1.0
"""Before the first rank ends: launchers then end the others, who may keep what all share, or be about to speak."""


def in_ranks(count: int, timeout_s: float, work: Callable[[], None]) -> None:
    """Runs `work` as the rank that a launcher has made this process, or in `count` processes here.

    Raises what the first rank raised; of the ranks of a launcher the first one tells it, and all end.
    """
    from hpgo.runtime.failure_detection import Limits
    from hpgo.runtime.launch import run_here
    from hpgo.runtime.rendezvous import is_launched

    limits = Limits(timeout_s)
    if is_launched():
        take_part(limits, work)
    else:
        run_here(count, work, limits)


def take_part(limits: Limits, work: Callable[[], None]) -> None:
    """Runs `work` as one rank of a launcher's, guarded as that."""
    from hpgo.runtime import guards
    from hpgo.runtime.preemption import Preempted
    from hpgo.runtime.rendezvous import guard

    try:
        guard(limits, _tell)
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
        os._exit(1)  # a thread that still reads the store would abort the process as its host leaves
    except BaseException as error:
        guards.charge(error)
        raise
    guards.end()


def _tell(error: HpgoError) -> None:
    say("error", error.message)
    if error.hint:
        say("hint", error.hint)
    most = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")
    if most != "0" and os.environ.get("TORCHELASTIC_RESTART_COUNT") == most:
        say("note", f"`--max-restarts {most}` is used up on {socket.gethostname()}: no rank is started there again")
    sys.stderr.flush()
