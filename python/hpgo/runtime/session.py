"""One rank's session: it joins the other ranks, holds the process groups of a run, and gives them back."""

from __future__ import annotations

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


class RankSession:
    """One process as a rank of a run, from `join` to `close`, and the groups that it gives back at the end."""

    def __init__(self, limits: Limits) -> None:
        """Guards this process, unless it is guarded already."""
        self._patience_s = limits.patience_s
        self._joined = False
        self._held: list[Groups | NeighbourGroups] = []
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
                own = store_of_run(self._patience_s)
            else:
                rank, size, own = 0, 1, dist.HashStore()
            HERE.stages = stages_of(program, rank)
            guards.tell_now()
            with (
                HERE.meets("the meeting of the ranks"),
                translate_errors(
                    "the ranks don't find each other", "did all start, and do their machines reach each other?"
                ),
            ):
                timeout = timedelta(seconds=self._patience_s)
                dist.init_process_group(backend, store=own, rank=rank, world_size=size, timeout=timeout)
        HERE.rank, HERE.stages = dist.get_rank(), stages_of(program, dist.get_rank())

    def hold(self, given: Groups | NeighbourGroups) -> None:
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
