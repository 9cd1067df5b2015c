"""How ranks find each other, and make sure that they run the same."""

from __future__ import annotations

import os
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from hpgo._core import __version__
from hpgo.base.errors import HpgoError, RunError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from hpgo.programs.program import Program
    from hpgo.runtime.messages import Crossing
    from hpgo.runtime.parts import Part

LAUNCHED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""What launchers set for each process."""


@contextmanager
def told(what: str, hint: str) -> Iterator[None]:
    """Makes an error of hpgo of what torch raises."""
    try:
        yield
    except HpgoError:
        raise
    except Exception as failure:
        first = str(failure).strip().partition("\n")[0]
        raise RunError(f"{what}: {type(failure).__name__}: {first}", hint) from failure


def join(program: Program, device: torch.device, timeout_s: float) -> bool:
    """Makes this process one of the ranks of `program`; returns whether `leave` must follow.

    It takes the place that the launcher's variables give it, or, where a process group is there already, its rank in
    that. Raises RunError if it has none, or there are more ranks or fewer than the program has devices.
    """
    made = not dist.is_initialized()
    if made:
        _check_size(program, _asked_size(program))
        backend = "nccl" if device.type == "cuda" else "gloo"
        with told("the ranks don't find each other", "look at MASTER_ADDR and MASTER_PORT, and that all ranks start"):
            if program.world_size == 1 and "RANK" not in os.environ:
                dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
            else:
                dist.init_process_group(backend, timeout=timedelta(seconds=timeout_s))
    _check_size(program, dist.get_world_size())
    return made


def _asked_size(program: Program) -> int:
    missing = [name for name in LAUNCHED if name not in os.environ]
    if not missing:
        size = os.environ["WORLD_SIZE"]
        if not size.isdecimal() or not os.environ["RANK"].isdecimal():
            raise RunError(
                f"WORLD_SIZE is `{size}` and RANK is `{os.environ['RANK']}`", "launchers set both to whole numbers"
            )
        return int(size)
    if program.world_size > 1:
        raise RunError(
            f"the plan is for {program.world_size} ranks, and this process is alone: {', '.join(missing)} not set",
            f"start it with `torchrun --nproc-per-node {program.world_size}`, or run the plan with `hpgo run`",
        )
    return 1


def _check_size(program: Program, size: int) -> None:
    if size != program.world_size:
        raise RunError(
            f"the plan is for {program.world_size} ranks, and {size} were started",
            f"start {program.world_size}: one for each device of its cluster, idle ones too",
        )


def leave() -> None:
    """Undoes `join`."""
    if dist.is_initialized():
        dist.destroy_process_group()


def agree(facts: dict[str, str]) -> None:
    """Compares what the ranks are about to run with what rank 0 is; all of them raise RunError where one differs."""
    mine = {"version of hpgo": __version__, "version of torch": torch.__version__, **facts}
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    for rank, theirs in enumerate(everyone):
        for what, value in everyone[0].items():
            if theirs.get(what) != value:
                raise RunError(
                    f"rank {rank} has another {what} than rank 0: {theirs.get(what)}, not {value}",
                    "start all ranks with the same plan, options and versions",
                )


class Groups:
    """Process groups of a run; every rank makes all of them, in one order."""

    def __init__(
        self,
        program: Program,
        sums: Sequence[tuple[int, ...]],
        parts: Sequence[Part],
        cuts: Sequence[Sequence[Crossing]],
        device: torch.device,
    ) -> None:
        everyone = tuple(range(program.world_size))
        world = dist.group.WORLD
        # NCCL runs a group's messages between two ranks one after the other, so each direction has a group of its own;
        # gloo runs them as they come, and a group more would be a connection more between every two ranks.
        crosses = any(cuts) and program.world_size > 1
        self.ways = (
            tuple(dist.new_group(everyone) for _ in range(2)) if device.type == "cuda" and crosses else (world, world)
        )
        self.sums: dict[tuple[int, ...], Any] = {
            ranks: world if ranks == everyone else dist.new_group(list(ranks)) for ranks in sums
        }
        """Those that sum gradients, by ranks."""
        self.replicas: dict[int, Any] = {
            number: dist.new_group(list(stage.devices))
            for number, (stage, part) in enumerate(zip(program.stages, parts, strict=True))
            if len(stage.devices) > 1 and getattr(part, "joins", False)
        }
        """Those whose layers ask for sums over the replicas of their stage, by stage."""
        self._made = [one for one in (*self.ways, *self.sums.values(), *self.replicas.values()) if one is not world]

    def close(self) -> None:
        """Gives them back; the ranks stay together."""
        for one in self._made:
            if one is not dist.GroupMember.NON_GROUP_MEMBER:
                dist.destroy_process_group(one)
