"""Rendezvous: ranks find each other, and check that they run the same."""

from __future__ import annotations

import itertools
import os
import re
import socket
import sys
import threading
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import torch
import torch.distributed as dist

from hpgo._core import __version__
from hpgo.base.messages import pluralize, shorten
from hpgo.errors import HpgoError, RunError
from hpgo.runtime import guards
from hpgo.runtime.failure_detection import BEAT_S, LostRankError
from hpgo.runtime.progress import HERE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from hpgo.programs.program import Program
    from hpgo.runtime.failure_detection import Limits

LAUNCHED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""Environment variables that launchers set for each process."""
_met: list[tuple[Any, int]] = []
"""The store of this process, and the number of runs that it has joined."""
_watches = itertools.count()
_ANSWER_S = 0.05
"""Interval in seconds at which rank 0 checks for ranks that ask for the name of their attempt."""
LOST = "another rank was lost, or took too long"
_RUN = "hpgo/run"
"""The store's key of the description of the run that it belongs to."""
_RESOLVE_S = 5.0
"""Time in seconds to find the address of a host. Container platforms register names while the containers start."""
_ASK_S = 2.0
"""Time in seconds to ask the program that listens at a port whether it is a run. Not tuned."""


@dataclass(frozen=True, slots=True)
class AddressNames:
    """Names under which the user sets the address of rank 0: variables of launchers, or options of a command."""

    host: str = "MASTER_ADDR"
    port: str = "MASTER_PORT"


@contextmanager
def translate_errors(what: str, hint: str) -> Iterator[None]:
    """Convert errors of torch within this context to errors of hpgo."""
    try:
        yield
    except HpgoError:
        raise
    except Exception as failure:
        lost = guards.lost() if is_of_others(failure) else None
        raise lost or RunError(f"{what}: {type(failure).__name__}: {first_line(failure)}", hint) from failure


def is_of_others(failure: Exception) -> bool:
    """Return whether torch raises `failure` because something is wrong with another rank."""
    # Gloo raises a plain RuntimeError, so its name in the text is the only mark.
    return isinstance(failure, dist.DistError) or "gloo" in str(failure)


@contextmanager
def together(words: str) -> Iterator[None]:
    """Report a collective step within this context. Raise RunError if another rank is lost."""
    with HERE.meets(words), translate_errors(f"not all ranks reached {words}", LOST):
        yield


@contextmanager
def lost(where: str) -> Iterator[None]:
    """Convert RuntimeErrors of torch within this context to LostRankError.

    It is for code that can only fail because another rank is gone.
    """
    try:
        yield
    except HpgoError:
        raise
    except RuntimeError as failure:
        message = f"{where}: {type(failure).__name__}: {first_line(failure)}"
        raise guards.lost() or LostRankError(message, LOST) from failure


def first_line(failure: BaseException) -> str:
    """Return the first line of an exception's text, without the C++ location and the advice that torch may add."""
    line = str(failure).strip().partition("\n")[0]
    return re.sub(r"^\[[^]]*\.c(c|pp):[0-9]+\] ", "", line).partition(". This is typically")[0]


def is_launched() -> bool:
    """Return whether a launcher has given this process a place among others."""
    return all(name in os.environ for name in LAUNCHED)


def place() -> tuple[int, int]:
    """Return the rank that a launcher gave this process, and the number of ranks.

    Raise RunError if they are invalid.
    """
    rank, size = os.environ["RANK"], os.environ["WORLD_SIZE"]
    if not (rank.isdecimal() and size.isdecimal() and int(rank) < int(size)):
        raise RunError(
            f"RANK is `{rank}` and WORLD_SIZE is `{size}`, but RANK must be a number below WORLD_SIZE",
            "set RANK to a number from 0 to WORLD_SIZE - 1",
        )
    return int(rank), int(size)


def meet(timeout_s: float, names: AddressNames | None = None) -> Any:
    """Return the store that all ranks of this launch share, without keys of earlier ones.

    Raise RunError if it can't be reached, or if it is the store of another run.
    """
    if not _met:
        rank, size = place()
        names = names or AddressNames()
        check_host(os.environ["MASTER_ADDR"], names.host)
        where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        with translate_errors(
            f"the ranks don't meet at {where}",
            "check that the port is free, that the address is that of rank 0, and that all ranks start",
        ):
            try:
                store = next(iter(dist.rendezvous("env://", timeout=timedelta(seconds=timeout_s))))[0]
            except dist.DistNetworkError as failure:
                raise ("EADDRINUSE" in str(failure) and _used_port(names)) or failure from failure
            if _may_be_used_before():
                store = dist.PrefixStore(f"hpgo/{_attempt(store, rank, size)}", store)
            # The store of torchrun's agent can't be another run's, and may have keys of ranks that torchrun restarted.
            elif not _is_agents():
                _take_place(store, rank, size, names)
            # Keep the store open for the whole process: if rank 0 closed it between runs, other ranks could not meet
            # again.
            _met.append((store, 0))
    return _met[0][0]


def store_of_run(timeout_s: float) -> Any:
    """Return the part of that store that only this run uses, because a process may join several runs in turn."""
    store = meet(timeout_s)
    _met[0] = store, _met[0][1] + 1
    return dist.PrefixStore(f"hpgo/{_met[0][1]}", store)


def check_host(host: str, name: str) -> None:
    """Raise RunError if the host name of rank 0, given as `name`, has no address within 5 s."""
    # Torch tries for its whole timeout, which is ten minutes by default.
    until_s = time.monotonic() + _RESOLVE_S
    while True:
        try:
            socket.getaddrinfo(host, None)
        except (OSError, UnicodeError) as failure:  # Python encodes names as IDNA, which has limits on lengths
            if time.monotonic() > until_s or not isinstance(failure, socket.gaierror):
                reason = getattr(failure, "strerror", None) or failure
                raise RunError(
                    f"the host of rank 0 is `{shorten(host, 80)}`, which has no address: {reason}",
                    f"set {name} to a name or address of the host of rank 0, as this host knows it",
                    code="not_found",
                ) from None
            time.sleep(BEAT_S)
        else:
            return


def _take_place(store: Any, rank: int, size: int, names: AddressNames) -> None:
    """Take the place of `rank` in the store of rank 0. Raise RunError if the store is that of another run."""
    mine = f"process {os.getpid()} on {socket.gethostname()}"
    if rank == 0:
        store.set(_RUN, f"{_program()} with {pluralize(size, 'rank')}, whose rank 0 is {mine}")
    # Before anything else is written: the heartbeats and reports of this process would end the other run.
    world = store.compare_set("hpgo/size", "", str(size)).decode()
    holder = store.compare_set(f"hpgo/place/{rank}", "", mine).decode() if world == str(size) else ""
    if holder != mine:
        other = store.get(_RUN).decode() if store.check([_RUN]) else f"a run of {pluralize(int(world), 'rank')}"
        taken = f"its rank {rank} is {holder}" if holder else f"this rank is one of {size}"
        raise RunError(
            f"port {os.environ['MASTER_PORT']} belongs to another run, {other}: {taken}",
            f"set {names.port} to another port, on all ranks of this run",
            code="conflict",
        )


def _used_port(names: AddressNames) -> RunError | None:
    """Return the error of rank 0 whose port another run uses. None: what listens there is not the store of a run."""
    host, port = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
    found: list[str] = []

    def ask() -> None:
        with suppress(RuntimeError):  # it is not a store
            store = dist.TCPStore(
                host, int(port), is_master=False, wait_for_workers=False, timeout=timedelta(seconds=_ASK_S)
            )  # fmt: skip
            known = store.check([_RUN])
            found.append(f"another run, {store.get(_RUN).decode()}" if known else "a run of another program")

    # A program that accepts connections and never answers holds up torch for longer than its timeout.
    asks = threading.Thread(target=ask, daemon=True)
    asks.start()
    asks.join(2 * _ASK_S)
    if not found:
        return None
    return RunError(
        f"port {port} belongs to {found[0]}",
        f"set {names.port} to another port, on all ranks of this run",
        code="conflict",
    )


def _program() -> str:
    """Return the name of the program that runs: that of its script, or of its package."""
    path = Path(sys.argv[0])
    return f"`{shorten(path.parent.name if path.stem == '__main__' else path.name)}`"


def _is_agents() -> bool:
    """Return whether torchrun's agent keeps the store."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)


def _may_be_used_before() -> bool:
    """Return whether the launcher keeps the store and may restart its ranks."""
    return _is_agents() and os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0"


def _attempt(store: Any, rank: int, size: int) -> str:
    """Return a name that is shared by the ranks started together, and unknown to ranks started before them.

    The number of torchrun's restarts is no such name, because each of its agents counts separately. In a store with old
    keys, only the answer to a new question is certain to be new. So rank 0 draws the name and sends it to each rank
    that asks.
    """
    if rank == 0:
        name = uuid4().hex
        # A clone has its own connection. A thread that waits on a shared one would block the main thread's requests.
        threading.Thread(target=_answer, args=(store.clone(), name, size), daemon=True).start()
        return name
    question = uuid4().hex
    store.set(_asks(rank), question)
    name = store.get(_answers(question)).decode()
    store.set(_knows(name, rank), "")
    return name


def _answer(store: Any, name: str, size: int) -> None:
    """Send the name to all other ranks. Old questions get an answer, too, which no process reads."""
    left = set(range(1, size))
    with suppress(RuntimeError):  # torch raises it when the process that keeps the store is gone
        while left:
            for rank in [one for one in left if store.check([_asks(one)])]:
                store.set(_answers(store.get(_asks(rank)).decode()), name)
            left = {one for one in left if not store.check([_knows(name, one)])}
            time.sleep(_ANSWER_S)


def _asks(rank: int) -> str:
    return f"hpgo/asks/{rank}"


def _answers(question: str) -> str:
    return f"hpgo/answers/{question}"


def _knows(name: str, rank: int) -> str:
    return f"hpgo/knows/{name}/{rank}"


def guard(limits: Limits, tell: Callable[[RunError], None] = guards.say, names: AddressNames | None = None) -> bool:
    """Guard this process as a rank of its launch. Return whether `guards.end` must follow.

    `tell` reports why the run is over where the main thread can't. `names` are for messages.
    """
    if guards.are_there():
        return False
    if is_launched():
        rank, size = place()
        # Each run has its own prefix, so that a verdict on one run does not end the next.
        store = dist.PrefixStore(f"hpgo/watch/{next(_watches)}", meet(limits.timeout_s, names))
        HERE.begin(rank)
        return guards.begin(store.clone(), rank, size, limits, tell)
    HERE.begin(0)
    return guards.begin(None, 0, 1, limits, tell)


def check_place(program: Program) -> None:
    """Raise RunError unless this launch has a rank for each device of `program`. Does not wait for other ranks."""
    if dist.is_initialized():
        _check_size(program, dist.get_world_size())
    elif is_launched():
        _check_size(program, place()[1])
    elif program.world_size > 1:
        missing = ", ".join(name for name in LAUNCHED if name not in os.environ)
        raise RunError(
            f"the plan is for {program.world_size} ranks, but this process is alone: {missing} not set",
            f"start it with `torchrun --nproc-per-node {program.world_size}`, or run the plan with `hpgo run`",
        )


def _check_size(program: Program, size: int) -> None:
    if size != program.world_size:
        raise RunError(
            f"the plan is for {program.world_size} ranks, but {size} were started",
            f"start {program.world_size} ranks, one for each device of its cluster, idle ones included",
            code="wrong_state",
        )


def leave() -> None:
    """Leave the process group that `RankSession.join` created."""
    if dist.is_initialized():
        dist.destroy_process_group()


def agree(facts: dict[str, str]) -> None:
    """Compare the facts of all ranks with the facts of rank 0. All ranks raise RunError if one differs."""
    mine = {"version of hpgo": __version__, "version of torch": torch.__version__, **facts}
    everyone: list[Any] = [None] * dist.get_world_size()
    with together("the comparison of plans and options"):
        dist.all_gather_object(everyone, mine)
    for rank, theirs in enumerate(everyone):
        for what, value in everyone[0].items():
            if theirs.get(what) != value:
                raise RunError(
                    f"rank {rank} has another {what} than rank 0: {theirs.get(what)}, not {value}",
                    "start all ranks with the same plan, options and versions",
                    code="mismatch",
                )
