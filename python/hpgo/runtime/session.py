"""Session of one rank: it joins the other ranks, holds the process groups of a run, and releases them."""

from __future__ import annotations

from contextlib import nullcontext
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from hpgo.runtime import guards
from hpgo.runtime.progress import ALL, HERE, stages_of
from hpgo.runtime.rendezvous import guard, is_launched, leave, place, store_of_run, together, translate_errors
from hpgo.runtime.shared_memory import Neighbours

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from hpgo.programs.program import Program
    from hpgo.runtime.failure_detection import Limits


class NeighbourGroups:
    """Transport of messages to higher and to lower ranks. Every rank creates it."""

    def __init__(self, device: torch.device, timeout_s: float, *, shared_memory: bool = True) -> None:
        """Create the transport. On CPUs, ranks of one node use shared memory, unless `shared_memory` is False."""
        world = dist.group.WORLD
        self._made: list[Any] = []
        self._neighbours: Neighbours | None = None
        self.up: Any
        self.down: Any
        if device.type == "cuda":
            # NCCL runs a group's messages between two ranks one after the other, so each direction has its own group;
            # gloo runs them as they come, and a group more would be a connection more between every two ranks.
            self._made = [dist.new_group() for _ in range(2)]
            self.up, self.down = self._made
        else:
            with together("the setup of shared memory") if shared_memory else nullcontext():
                self.up = self.down = self._neighbours = Neighbours(world, timeout_s, is_used=shared_memory)

    def to(self, peer: int) -> Any:
        """Return the transport of messages to a rank."""
        return self.up if peer > dist.get_rank() else self.down

    def of(self, peer: int) -> Any:
        """Return the transport of messages from a rank."""
        return self.up if peer < dist.get_rank() else self.down

    def close(self) -> None:
        """Release the transport. The ranks stay together."""
        if self._neighbours is not None:
            self._neighbours.close()
        destroy(self._made)
        # Gloo's threads end with the last reference to their group, and must end before Python does.
        self.up = self.down = self._neighbours = None
        self._made.clear()


def destroy(groups: Sequence[Any]) -> None:
    """Release process groups, as far as this rank is a member."""
    for one in groups:
        if one is not dist.GroupMember.NON_GROUP_MEMBER:
            dist.destroy_process_group(one)


class Groups:
    """Process groups for reductions and for torch's pipelining. Every rank creates all of them, in the same order."""

    def __init__(
        self,
        program: Program,
        sums: Sequence[tuple[int, ...]],
        joining: Sequence[int],
        *,
        pipelines: Sequence[tuple[int, ...]] = (),
    ) -> None:
        """Create the groups. `sums` are the ranks of each gradient reduction.

        `joining` are the stages whose layers exchange sums with their replicas. `pipelines` are the ranks of each
        pipeline replica, for torch's pipelining.
        """
        everyone = tuple(range(program.world_size))
        world = dist.group.WORLD
        self.sums: dict[tuple[int, ...], Any] = {
            # The world group exists anyway. A second group of the same ranks would open another connection between all
            # of them.
            ranks: world if ranks == everyone else dist.new_group(list(ranks))
            for ranks in sums
        }
        """Groups of gradient reductions, by their ranks."""
        self.replicas: dict[int, Any] = {
            number: dist.new_group(list(program.stages[number].devices))
            for number in joining
            if len(program.stages[number].devices) > 1
        }
        """Groups of stages whose layers exchange sums with their replicas, by stage."""
        self.pipelines: dict[tuple[int, ...], Any] = {ranks: dist.new_group(list(ranks)) for ranks in pipelines}
        """Groups of torch's pipelining, by their ranks."""
        groups = (*self.sums.values(), *self.replicas.values(), *self.pipelines.values())
        self._made = [one for one in groups if one is not world]

    def close(self) -> None:
        """Release the groups. The ranks stay together."""
        destroy(self._made)
        for groups in (self.sums, self.replicas, self.pipelines):
            groups.clear()  # the reductions share these dicts, so no reference is left
        self._made.clear()


def _import_holders_of_the_world_group() -> None:
    """Import the module of torch whose functions keep the process group that exists when they are defined.

    Their arguments have the default `group=dist.group.WORLD`. Torch imports the module at the first operation on the
    meta device. The group then outlives `destroy_process_group`, and so do gloo's threads, which must not run while
    Python ends.
    """
    import torch.distributed.nn.functional  # noqa: F401


class RankSession:
    """One process as a rank of a run, from `join` to `close`, with the groups that it releases at the end."""

    def __init__(self, limits: Limits) -> None:
        """Guard this process, unless it is guarded already."""
        self._patience_s = limits.patience_s
        self._joined = False
        self._held: list[Groups | NeighbourGroups] = []
        self.guards = guard(limits)
        """Whether the guards end with this session."""

    def join(self, program: Program, device: torch.device) -> None:
        """Make this process one of the ranks of `program`.

        It takes the rank of the launcher's variables, or of an existing process group, which `check_place` has checked.
        Raises RunError if the ranks don't find each other.
        """
        # A user's own process group is used as it is, and stays after the session.
        self._joined = not dist.is_initialized()
        if self._joined:
            backend = "nccl" if device.type == "cuda" else "gloo"
            if is_launched():
                rank, size = place()
                own = store_of_run(self._patience_s)
            else:
                rank, size, own = 0, 1, dist.HashStore()
            HERE.stages = stages_of(program, rank)
            guards.tell_now()
            with (
                HERE.meets("the rendezvous of the ranks"),
                translate_errors(
                    "the ranks don't find each other", "check that all started, and that their nodes reach each other"
                ),
            ):
                _import_holders_of_the_world_group()
                timeout = timedelta(seconds=self._patience_s)
                dist.init_process_group(backend, store=own, rank=rank, world_size=size, timeout=timeout)
        HERE.rank, HERE.stages = dist.get_rank(), stages_of(program, dist.get_rank())

    def hold(self, given: Groups | NeighbourGroups) -> None:
        """Release `given` at the end, before everything that was held earlier."""
        self._held.append(given)

    def close(self) -> None:
        """Release everything held, and leave the other ranks."""
        HERE.does("the end")
        with HERE.waiting(ALL):
            # The reverse order of creation, on every rank, because destroying a group may be collective.
            while self._held:
                self._held.pop().close()
            if self._joined:
                self._joined = False
                leave()
        if self.guards:
            self.guards = False
            guards.end()
