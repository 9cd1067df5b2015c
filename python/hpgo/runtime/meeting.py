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
from hpgo.base.errors import HpgoError, RunError
from hpgo.runtime import guards
from hpgo.runtime.neighbours import Neighbours
from hpgo.runtime.progress import ALL, HERE, stages_of
from hpgo.runtime.watch import LostRankError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from hpgo.programs.program import Program
    from hpgo.runtime.watch import Limits

LAUNCHED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""What launchers set for each process."""
_met: list[tuple[Any, int]] = []
"""The store of this process, and how often its ranks have joined by it."""
_watches = itertools.count()
_ANSWER_S = 0.05
"""How often rank 0 looks for ranks that ask for the name of their attempt."""
LOST = "another rank was lost, or took too long"


@contextmanager
def told(what: str, hint: str) -> Iterator[None]:
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
    with HERE.meets(words), told(f"the ranks don't come together for {words}", LOST):
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
        with told(
            f"the ranks don't meet at {where}", "is the port free, the address that of rank 0, and do all start?"
        ):
            store = next(iter(dist.rendezvous("env://", timeout=timedelta(seconds=timeout_s))))[0]
            if _may_be_used_before():
                store = dist.PrefixStore(f"hpgo/{_attempt(store, rank, size)}", store)
            _met.append((store, 0))
    return _met[0][0]


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
    """Undoes `join`."""
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


class Ways:
    """What carries messages to higher ranks, and to lower ones; every rank makes it."""

    def __init__(self, device: torch.device, timeout_s: float, *, shared_memory: bool = True) -> None:
        """On CPUs, ranks of one machine pass tensors on in memory that they share, unless `shared_memory` is off."""
        world = dist.group.WORLD
        self._made: list[Any] = []
        self._neighbours: Neighbours | None = None
        if device.type == "cuda":
            # NCCL runs a group's messages between two ranks one after the other, so each direction has its own group;
            # gloo runs them as they come, and a group more would be a connection more between every two ranks.
            self._made = [dist.new_group() for _ in range(2)]
            self.up, self.down = self._made
        elif shared_memory:
            with together("the exchange of memory"):
                self.up = self.down = self._neighbours = Neighbours(world, timeout_s)
        else:
            self.up = self.down = world

    def to(self, peer: int) -> Any:
        """What carries messages to a rank."""
        return self.up if peer > dist.get_rank() else self.down

    def of(self, peer: int) -> Any:
        """What brings those from a rank."""
        return self.up if peer < dist.get_rank() else self.down

    def close(self) -> None:
        """Gives it back; the ranks stay together."""
        if self._neighbours is not None:
            self._neighbours.close()
        destroy(self._made)


def destroy(groups: Sequence[Any]) -> None:
    """Gives back process groups, as far as this rank is in them."""
    for one in groups:
        if one is not dist.GroupMember.NON_GROUP_MEMBER:
            dist.destroy_process_group(one)


class Groups:
    """Process groups for sums, and for torch's pipelining; every rank makes all of them, in one order."""

    def __init__(
        self,
        program: Program,
        sums: Sequence[tuple[int, ...]],
        joining: Sequence[int],
        *,
        pipelines: Sequence[tuple[int, ...]] = (),
    ) -> None:
        """`sums` are the ranks of each sum of gradients, `joining` the stages whose layers sum over their replicas.

        `pipelines` are the ranks of each replica, where torch passes tensors on.
        """
        everyone = tuple(range(program.world_size))
        world = dist.group.WORLD
        self.sums: dict[tuple[int, ...], Any] = {
            ranks: world if ranks == everyone else dist.new_group(list(ranks)) for ranks in sums
        }
        """Those that sum gradients, by ranks."""
        self.replicas: dict[int, Any] = {
            number: dist.new_group(list(program.stages[number].devices))
            for number in joining
            if len(program.stages[number].devices) > 1
        }
        """Those whose layers ask for sums over the replicas of their stage, by stage."""
        self.pipelines: dict[tuple[int, ...], Any] = {ranks: dist.new_group(list(ranks)) for ranks in pipelines}
        """Those that torch's pipelining passes tensors on in, by ranks."""
        made = (*self.sums.values(), *self.replicas.values(), *self.pipelines.values())
        self._made = [one for one in made if one is not world]

    def close(self) -> None:
        """Gives them back; the ranks stay together."""
        destroy(self._made)


class Seat:
    """The place of this process among the ranks of a run, from `join` to `close`; and what is given back with it."""

    def __init__(self, limits: Limits) -> None:
        """Guards this process, unless it is guarded already."""
        self._patience_s = limits.patience_s
        self._joined = False
        self._held: list[Groups | Ways] = []
        self.guards = guard(limits)
        """Whether the guards end with it."""

    def join(self, program: Program, device: torch.device) -> None:
        """Makes this process one of the ranks of `program`.

        It takes the place that the launcher's variables give it, or, where a process group is there already, its rank
        in that, which `check_place` has found to fit. Raises RunError if the ranks don't find each other.
        """
        self._joined = not dist.is_initialized()
        if self._joined:
            backend = "nccl" if device.type == "cuda" else "gloo"
            if is_launched():
                rank, size = place()
                store = meet(self._patience_s)
                _met[0] = store, _met[0][1] + 1
                own = dist.PrefixStore(f"hpgo/{_met[0][1]}", store)
            else:
                rank, size, own = 0, 1, dist.HashStore()
            HERE.stages = stages_of(program, rank)
            guards.tell_now()
            with (
                HERE.meets("the meeting of the ranks"),
                told("the ranks don't find each other", "did all start, and do their machines reach each other?"),
            ):
                timeout = timedelta(seconds=self._patience_s)
                dist.init_process_group(backend, store=own, rank=rank, world_size=size, timeout=timeout)
        HERE.rank, HERE.stages = dist.get_rank(), stages_of(program, dist.get_rank())

    def hold(self, given: Groups | Ways) -> None:
        """Gives that back, too, in the end, before what was held earlier."""
        self._held.append(given)

    def close(self) -> None:
        """Leaves the other ranks."""
        HERE.does("the end")
        with HERE.waiting(ALL):
            while self._held:
                self._held.pop().close()
            if self._joined:
                self._joined = False
                leave()
        if self.guards:
            self.guards = False
            guards.end()
