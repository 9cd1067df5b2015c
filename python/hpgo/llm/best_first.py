"""Best-first search over groups of configurations: the fastest of each mesh, and the preferred of the equally fast.

Groups, the candidates of a group, and configurations have lower bounds on their step times. The lowest bound is refined
next, so the search simulates few configurations and returns what a simulation of all of them would.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from fractions import Fraction
from heapq import heapify, heappop, heappush, nsmallest
from itertools import count
from math import inf
from operator import itemgetter
from typing import TYPE_CHECKING

from hpgo.llm.bounds import ALL, NONE, SLACK, Candidate
from hpgo.llm.config_groups import ConfigGroup, min_recomputed
from hpgo.llm.estimate import max_memory_bytes, simulated_step_s

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from hpgo.llm.parallelism import ParallelismConfig
    from hpgo.llm.step_time import PipelineStages

    Rank = Callable[[ParallelismConfig], tuple[object, ...]]

Mesh = tuple[int, int, int, int, Fraction]
Found = tuple[float, "PipelineStages"]
"""Step time and stages of a configuration that was simulated."""


def mesh_of(config: ParallelismConfig) -> Mesh:
    """Return the key of the configurations that give each GPU the same matrices and tokens in a pass.

    They differ in how they order these passes and store their results: virtual stages, the schedule, layer splits,
    ZeRO, recomputation, and in whether GPUs share sequences (cp) or have separate ones (dp).

    >>> from hpgo.llm.parallelism import ParallelismConfig
    >>> one, other = ParallelismConfig(tp=2, dp=4, pp=2), ParallelismConfig(tp=2, cp=2, dp=2, pp=2, micro_batch_size=2)
    >>> mesh_of(one) == mesh_of(other)
    True
    """
    return config.tp, config.ep, config.pp, config.dp_cp_size, Fraction(config.micro_batch_size, config.cp)


@dataclass(slots=True)
class _Waiting:
    """The candidates of a group that have no bound of their own yet, the lowest group bound first."""

    group: ConfigGroup
    found: list[Candidate]
    next: int = 0


@dataclass(slots=True)
class BestFirst:
    """Best-first search over groups. Equal bounds are taken in the order of the search space."""

    groups: list[ConfigGroup]
    limit_bytes: float
    """Memory of a GPU that configurations may use."""
    top: int
    """Number of meshes to find."""
    below_s: float = inf
    """Step time from which on configurations are of no use."""
    best: dict[Mesh, Found] = field(default_factory=dict)
    """The fastest configuration of each mesh."""
    bounded: int = 0
    simulated: int = 0
    _heap: list[tuple[float, tuple[int, ...], ConfigGroup | _Waiting | PipelineStages]] = field(default_factory=list)
    _sorted: dict[tuple[int, float, float], list[tuple[tuple[object, ...], list[Candidate]]]] = field(
        default_factory=dict
    )

    def run(self) -> None:
        """Find the fastest configuration of each of the `top` fastest meshes."""
        # The heap holds groups, candidates and configurations together, so always the lowest bound of any kind is
        # refined next. The tuple in the middle breaks ties by position, which makes results reproducible.
        self._heap = [(group.bound_s, (at,), group) for at, group in enumerate(self.groups)]
        heapify(self._heap)
        while self._heap and self._heap[0][0] < self.below_s:
            bound_s, at, one = heappop(self._heap)
            # The list shows one configuration of each mesh, so nothing is left to find in a mesh with a faster one.
            mesh = mesh_of(self.groups[at[0]].plainest)
            if mesh in self.best and bound_s >= self.best[mesh][0]:
                continue
            # A group goes back once with its tighter bound. Many groups never come to the front again.
            if isinstance(one, ConfigGroup) and bound_s < one.min_s:
                heappush(self._heap, (one.min_s, at, one))
            elif isinstance(one, ConfigGroup):
                self._wait(_Waiting(one, one.candidates(self.limit_bytes)), at[0])
            elif isinstance(one, _Waiting):
                self._wait(one, at[0])
                self._bound(one.group, one.found[at[1]], at[0])
            else:
                self._keep(one, mesh)

    @property
    def fastest(self) -> list[Found]:
        """The fastest configurations of different meshes, at most `top`."""
        return nsmallest(self.top, self.best.values(), key=itemgetter(0))

    def _wait(self, waiting: _Waiting, group: int) -> None:
        """Queue the next candidate of a group."""
        if waiting.next < len(waiting.found):
            bound_s = waiting.found[waiting.next].bound_s
            heappush(self._heap, (bound_s, (group, waiting.next), waiting))
            waiting.next += 1

    def _bound(self, group: ConfigGroup, one: Candidate, at: int) -> None:
        """Queue a candidate by its bound if it fits."""
        if (stages := self._fitting(group, one, self.limit_bytes)) is not None:
            split = group.splits.found[one.split]
            place = at, split.fullest, int(one.recomputed == ALL), one.split, one.zero
            heappush(self._heap, (stages.bound_s * (1 - SLACK), place, stages))

    def _fitting(self, group: ConfigGroup, one: Candidate, limit_bytes: float) -> PipelineStages | None:
        """Return the stages of a candidate if it fits, with as few recomputed layers as fit; None otherwise."""
        stages: PipelineStages | None = group.stages(one)
        assert stages is not None  # noqa: S101
        if one.recomputed > 0:
            stages = min_recomputed(stages, limit_bytes, one.recomputed)
        elif max_memory_bytes(stages) > limit_bytes:
            # The group's bound on memory was too low for it. Recomputing some layers may still make it fit.
            some = one.recomputed == NONE and group.some
            return self._fitting(group, one._replace(recomputed=1), limit_bytes) if some else None
        self.bounded += stages is not None
        return stages

    def _keep(self, stages: PipelineStages, mesh: Mesh) -> None:
        """Simulate a configuration, and keep it if it is the fastest of its mesh."""
        self.simulated += 1
        found = simulated_step_s(stages), stages
        if mesh not in self.best or found[0] < self.best[mesh][0]:
            self.best[mesh] = found
            if len(self.best) >= self.top:
                self.below_s = min(self.below_s, self.fastest[-1][0])

    def preferred(self, max_s: float, limits_bytes: Sequence[float], rank: Rank, mesh: Mesh | None = None) -> Found:
        """Return the configuration with the lowest `rank` of those up to `max_s`; of equal ones, the fastest.

        `limits_bytes` are memory limits, each of which is tried only if no configuration fits into those before.
        `mesh` restricts the search to one mesh. At least one configuration must be in the search.
        """
        groups = [
            (at, group)
            for at, group in enumerate(self.groups)
            if group.bound_s <= max_s and (mesh is None or mesh_of(group.plainest) == mesh)
        ]
        tried = (self._preferred(groups, max_s, limit_bytes, rank) for limit_bytes in limits_bytes)
        return next(found for found in tried if found is not None)

    def _preferred(
        self, groups: Iterable[tuple[int, ConfigGroup]], max_s: float, limit_bytes: float, rank: Rank
    ) -> Found | None:
        """Return the preferred configuration within one memory limit; None if none is up to `max_s`."""
        # The same search with a lexicographic goal: a lower rank first, then a shorter step. The plainest configuration
        # of a group has a lower bound on the ranks of all its configurations, so most groups are never opened.
        order = count()
        heap: list[tuple[tuple[object, ...], float, int, ConfigGroup | _Waiting | PipelineStages, int]] = [
            (rank(group.plainest), group.bound_s, next(order), group, at) for at, group in groups
        ]
        heapify(heap)
        best: tuple[tuple[object, ...], float] | None = None
        chosen: Found | None = None
        while heap and (best is None or heap[0][:2] < best):
            key, bound_s, _, one, at = heappop(heap)
            if isinstance(one, ConfigGroup):
                for known, candidates in self._by_rank(at, limit_bytes, max_s, rank):
                    heappush(heap, (known, candidates[0].bound_s, next(order), _Waiting(one, candidates), at))
            elif isinstance(one, _Waiting):
                candidate = one.found[one.next]
                one.next += 1
                if one.next < len(one.found):
                    heappush(heap, (key, one.found[one.next].bound_s, next(order), one, at))
                stages = self._fitting(one.group, candidate, limit_bytes)
                if stages is not None and stages.bound_s <= max_s:
                    known = rank(stages.context.config)
                    heappush(heap, (known, stages.bound_s * (1 - SLACK), next(order), stages, at))
            elif best is None or (key, bound_s) < best:
                self.simulated += 1
                found = simulated_step_s(one), one
                if found[0] <= max_s and (best is None or (key, found[0]) < best):
                    best, chosen = (key, found[0]), found
        return chosen

    def _by_rank(
        self, at: int, limit_bytes: float, max_s: float, rank: Rank
    ) -> list[tuple[tuple[object, ...], list[Candidate]]]:
        """Return the candidates of a group up to `max_s` by their rank, each list by its bounds."""
        # The lists of several meshes and the choice among all ask for the same groups.
        if (at, limit_bytes, max_s) not in self._sorted:
            group = self.groups[at]
            found: dict[tuple[object, ...], list[Candidate]] = {}
            ranks: dict[tuple[object, ...], tuple[object, ...]] = {}
            candidates = group.candidates(limit_bytes) if group.min_s <= max_s else []
            for one in candidates:
                if one.bound_s > max_s:
                    break
                split = group.splits.found[one.split]
                # Nothing else of a candidate matters to its rank, and configurations are expensive to make.
                alike = split.vpp, split[1:3] == (None, None), one.zero, one.recomputed != NONE
                if alike not in ranks:
                    ranks[alike] = rank(group.config_of(one))
                found.setdefault(ranks[alike], []).append(one)
            self._sorted[at, limit_bytes, max_s] = list(found.items())
        return self._sorted[at, limit_bytes, max_s]
