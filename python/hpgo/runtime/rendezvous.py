"""How ranks find each other, and make sure that they run the same."""

from __future__ import annotations

import itertools
import os
import re
import threading
import time
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import torch
import torch.distributed as dist

from hpgo._core import __version__
from hpgo.errors import HpgoError, RunError
from hpgo.runtime import guards
from hpgo.runtime.failure_detection import LostRankError
from hpgo.runtime.progress import HERE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from hpgo.programs.program import Program
    from hpgo.runtime.failure_detection import Limits

LAUNCHED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""What launchers set for each process."""
_met: list[tuple[Any, int]] = []
"""The store of this process, and how often its ranks have joined by it."""
_watches = itertools.count()
_ANSWER_S = 0.05
"""How often rank 0 looks for ranks that ask for the name of their attempt."""
LOST = "another rank was lost, or took too long"


@contextmanager
def translate_errors(what: str, hint: str) -> Iterator[None]:
    """Makes an error of hpgo of what torch raises."""
    try:
        yield
    except HpgoError:
        raise
    except Exception as failure:
        lost = guards.lost() if is_of_others(failure) else None
        raise lost or RunError(f"{what}: {type(failure).__name__}: {first_line(failure)}", hint) from failure


def is_of_others(failure: Exception) -> bool:
    """Whether torch raises it because something is wrong with another rank."""
    return isinstance(failure, dist.DistError) or "gloo" in str(failure)


@contextmanager
def together(words: str) -> Iterator[None]:
    """What all ranks do together; raises RunError if another one is lost."""
    with HERE.meets(words), translate_errors(f"the ranks don't come together for {words}", LOST):
        yield


@contextmanager
def lost(where: str) -> Iterator[None]:
    """Makes a LostRankError of what torch raises where all that can go wrong is that another rank is gone."""
    try:
        yield
    except HpgoError:
        raise
    except RuntimeError as failure:
        said = f"{where}: {type(failure).__name__}: {first_line(failure)}"
        raise guards.lost() or LostRankError(said, LOST) from failure


def first_line(failure: BaseException) -> str:
    """What an exception says first, without the place in C++ that torch may put before it, and advice behind it."""
    line = str(failure).strip().partition("\n")[0]
    return re.sub(r"^\[[^]]*\.c(c|pp):[0-9]+\] ", "", line).partition(". This is typically")[0]


def is_launched() -> bool:
    """Whether a launcher has given this process a place among others."""
    return all(name in os.environ for name in LAUNCHED)


def place() -> tuple[int, int]:
    """The rank that a launcher has given this process, and how many there are. Raises RunError if they are none."""
    rank, size = os.environ["RANK"], os.environ["WORLD_SIZE"]
    if not (rank.isdecimal() and size.isdecimal() and int(rank) < int(size)):
        raise RunError(
            f"RANK is `{rank}` and WORLD_SIZE is `{size}`", "launchers set both to whole numbers, rank 0 first"
        )
    return int(rank), int(size)


def meet(timeout_s: float) -> Any:
    """The store that all ranks of this launch share, and none before them. Raises RunError if it can't be reached."""
    if not _met:
        rank, size = place()
        where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        with translate_errors(
            f"the ranks don't meet at {where}", "is the port free, the address that of rank 0, and do all start?"
        ):
            store = next(iter(dist.rendezvous("env://", timeout=timedelta(seconds=timeout_s))))[0]
            if _may_be_used_before():
                store = dist.PrefixStore(f"hpgo/{_attempt(store, rank, size)}", store)
            _met.append((store, 0))
    return _met[0][0]


def store_of_run(timeout_s: float) -> Any:
    """The part of that store which this run alone uses: a process may join one run after the other."""
    store = meet(timeout_s)
    _met[0] = store, _met[0][1] + 1
    return dist.PrefixStore(f"hpgo/{_met[0][1]}", store)


def _may_be_used_before() -> bool:
    """Whether the launcher keeps the store, and may start its ranks again."""
    return (
        os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)
        and os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0"
    )


def _attempt(store: Any, rank: int, size: int) -> str:
    """A name that the ranks which have been started together share, and none of those before them knew.

    How often torchrun has started them is none: each of its agents counts for itself. In a store that was used before,
    only what answers a question of one's own is new, so rank 0 draws the name, and tells it to those that ask.
    """
    if rank == 0:
        name = uuid4().hex
        threading.Thread(target=_answer, args=(store.clone(), name, size), daemon=True).start()
        return name
    question = uuid4().hex
    store.set(_asks(rank), question)
    name = store.get(_answers(question)).decode()
    store.set(_knows(name, rank), "")
    return name


def _answer(store: Any, name: str, size: int) -> None:
    """Tells all other ranks the name; what those before them have asked is answered, too, and nobody hears it."""
    left = set(range(1, size))
    with suppress(RuntimeError):  # torch's: whoever kept the store is gone
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


def guard(limits: Limits, tell: Callable[[RunError], None] = guards.say) -> bool:
    """Guards this process as a rank of its launch; returns whether `guards.end` must follow.

    `tell` says why the run is over where the main thread does not come to it.
    """
    if guards.are_there():
        return False
    if is_launched():
        rank, size = place()
        store = dist.PrefixStore(f"hpgo/watch/{next(_watches)}", meet(limits.timeout_s))
        HERE.begin(rank)
        return guards.begin(store.clone(), rank, size, limits, tell)
    HERE.begin(0)
    return guards.begin(None, 0, 1, limits, tell)


def check_place(program: Program) -> None:
    """Raises RunError unless this launch has a rank for each device of `program`; waits for nobody."""
    if dist.is_initialized():
        _check_size(program, dist.get_world_size())
    elif is_launched():
        _check_size(program, place()[1])
    elif program.world_size > 1:
        missing = ", ".join(name for name in LAUNCHED if name not in os.environ)
        raise RunError(
            f"the plan is for {program.world_size} ranks, and this process is alone: {missing} not set",
            f"start it with `torchrun --nproc-per-node {program.world_size}`, or run the plan with `hpgo run`",
        )


def _check_size(program: Program, size: int) -> None:
    if size != program.world_size:
        raise RunError(
            f"the plan is for {program.world_size} ranks, and {size} were started",
            f"start {program.world_size}: one for each device of its cluster, idle ones too",
            code="wrong_state",
        )


def leave() -> None:
    """Undoes `RankSession.join`."""
    if dist.is_initialized():
        dist.destroy_process_group()


def agree(facts: dict[str, str]) -> None:
    """Compares what the ranks are about to run with what rank 0 is; all of them raise RunError where one differs."""
    mine = {"version of hpgo": __version__, "version of torch": torch.__version__, **facts}
    everyone: list[Any] = [None] * dist.get_world_size()
    with together("the comparison of what they run"):
        dist.all_gather_object(everyone, mine)
    for rank, theirs in enumerate(everyone):
        for what, value in everyone[0].items():
            if theirs.get(what) != value:
                raise RunError(
                    f"rank {rank} has another {what} than rank 0: {theirs.get(what)}, not {value}",
                    "start all ranks with the same plan, options and versions",
                    code="mismatch",
                )
