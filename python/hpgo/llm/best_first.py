"""Best-first search over groups of configurations: the fastest of each mesh, and the preferred of the equally fast.

Groups, the candidates of a group, and configurations have lower bounds on their step times. The lowest bound is refined
next, so the search simulates few configurations and returns what a simulation of all of them would.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush, nsmallest
from itertools import chain, count
from math import inf
from operator import itemgetter
from typing import TYPE_CHECKING

from hpgo.llm.bounds import ALL, NONE, SLACK, Candidate
from hpgo.llm.config_families import Family
from hpgo.llm.config_groups import ConfigGroup, Mesh, mesh_of, min_recomputed
from hpgo.llm.estimate import max_memory_bytes, simulated_step_s
from hpgo.llm.step_time import PipelineStages

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from hpgo.llm.parallelism import ParallelismConfig

    Rank = Callable[[ParallelismConfig], tuple[object, ...]]

Found = tuple[float, "PipelineStages"]
"""Step time and stages of a configuration that was simulated."""


@dataclass(slots=True)
class _Waiting:
    """The candidates of a group that have no bound of their own yet, the lowest group bound first."""

    group: ConfigGroup
    found: list[Candidate]
    next: int = 0

    @property
    def mesh(self) -> Mesh:
        """Mesh of the group."""
        return self.group.mesh


_Entry = tuple[float, tuple[int, ...], ConfigGroup | _Waiting | PipelineStages]
"""Lower bound, position in the search space, and what has the bound: configurations that are refined in three steps."""


@dataclass(slots=True)
class BestFirst:
    """Best-first search over families of groups. Equal bounds are taken in the order of the search space."""

    families: Iterable[Family]
    """All groups of the search, none of them opened."""
    limit_bytes: float
    """Memory of a GPU that configurations may use."""
    top: int
    """Number of meshes to find."""
    below_s: float = inf
    """Step time from which on configurations are of no use."""
    progress: Callable[[int, float], None] | None = None
    """Called often, with the number of configurations bounded so far and the shortest step time; inf without one."""
    best: dict[Mesh, Found] = field(default_factory=dict)
    """The fastest configuration of each mesh."""
    bounded: int = 0
    simulated: int = 0
    _closed: list[tuple[float, int, Family]] = field(default_factory=list)
    _groups: dict[Mesh, list[ConfigGroup]] = field(default_factory=dict)
    _heap: list[_Entry] = field(default_factory=list)
    _sorted: dict[tuple[tuple[int, ...], float, float], list[tuple[tuple[object, ...], list[Candidate]]]] = field(
        default_factory=dict
    )
    _plainest: dict[tuple[int, ...], tuple[object, ...]] = field(default_factory=dict)
    """Rank of each group's plainest configuration, by the group's position."""
    _steps_s: dict[ParallelismConfig, float] = field(default_factory=dict)
    _numbers: Iterator[int] = field(default_factory=count)

    def __post_init__(self) -> None:
        self._closed = [(family.bound_s, next(self._numbers), family) for family in self.families]
        heapify(self._closed)

    def run(self) -> None:
        """Find the fastest configuration of each of the `top` fastest meshes."""
        # The heap holds groups, candidates and configurations together, so always the lowest bound of any kind is
        # refined next. The tuple in the middle breaks ties by position, which makes results reproducible.
        while (lowest := self._lowest()) is not None:
            bound_s, _, one = lowest
            self._report()
            mesh = mesh_of(one.context.config) if isinstance(one, PipelineStages) else one.mesh
            # The list shows one configuration of each mesh, so nothing is left to find in a mesh with a faster one.
            if mesh in self.best and bound_s >= self.best[mesh][0]:
                continue
            if isinstance(one, ConfigGroup):
                self._refine(one, bound_s)
            elif isinstance(one, _Waiting):
                candidate = one.found[one.next]
                one.next += 1
                self._wait(one)
                self._bound(one.group, candidate)
            else:
                self._keep(one, mesh)

    def _report(self) -> None:
        """Call `progress`, which may raise to end the search."""
        # Simulations can be seconds apart, so each refinement is reported.
        if self.progress is not None:
            self.progress(self.bounded, min((found[0] for found in self.best.values()), default=inf))

    def _lowest(self) -> _Entry | None:
        """Remove the entry with the lowest bound from the queue and return it; None if no bound is below `below_s`."""
        while self._closed and self._closed[0][0] <= (self._heap[0][0] if self._heap else self.below_s):
            self._open()
        return heappop(self._heap) if self._heap and self._heap[0][0] < self.below_s else None

    def _open(self) -> None:
        """Open the family with the lowest bound, and queue its groups."""
        bound_s, _, family = heappop(self._closed)
        for one in family.open():
            if isinstance(one, Family):
                heappush(self._closed, (max(bound_s, one.bound_s), next(self._numbers), one))
            else:
                self._groups.setdefault(one.mesh, []).append(one)
                heappush(self._heap, (bound_s, one.order, one))

    def _refine(self, group: ConfigGroup, bound_s: float) -> None:
        """Queue a group with its next tighter bound, or its candidates after the tightest one."""
        # Many groups never come to the front again. Those that do not fit are dropped before their splits are
        # evaluated, which takes longest.
        if group.min_bytes > self.limit_bytes:
            return
        if bound_s < group.bound_s:
            heappush(self._heap, (group.bound_s, group.order, group))
        elif bound_s < group.min_s:
            heappush(self._heap, (group.min_s, group.order, group))
        else:
            self._wait(_Waiting(group, group.candidates(self.limit_bytes)))

    @property
    def fastest(self) -> list[Found]:
        """The fastest configurations of different meshes, at most `top`."""
        return nsmallest(self.top, self.best.values(), key=itemgetter(0))

    def _wait(self, waiting: _Waiting) -> None:
        """Queue the next candidate of a group."""
        if waiting.next < len(waiting.found):
            bound_s = waiting.found[waiting.next].bound_s
            heappush(self._heap, (bound_s, (*waiting.group.order, waiting.next), waiting))

    def _bound(self, group: ConfigGroup, one: Candidate) -> None:
        """Queue a candidate by its bound if it fits."""
        if (stages := self._fitting(group, one, self.limit_bytes)) is not None:
            split = group.splits.found[one.split]
            place = *group.order, split.fullest, int(one.recomputed == ALL), one.split, one.zero
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
        found = self._simulate(stages), stages
        if mesh not in self.best or found[0] < self.best[mesh][0]:
            self.best[mesh] = found
            if len(self.best) >= self.top:
                self.below_s = min(self.below_s, self.fastest[-1][0])

    def _simulate(self, stages: PipelineStages) -> float:
        """Return the simulated step time. No configuration is simulated twice."""
        config = stages.context.config
        if config not in self._steps_s:
            self.simulated += 1
            self._steps_s[config] = simulated_step_s(stages)
        return self._steps_s[config]

    def preferred(self, max_s: float, limits_bytes: Sequence[float], rank: Rank, mesh: Mesh | None = None) -> Found:
        """Return the configuration with the lowest `rank` of those up to `max_s`; of equal ones, the fastest.

        `limits_bytes` are memory limits, each of which is tried only if no configuration fits into those before.
        `mesh` restricts the search to one mesh. At least one configuration must be in the search.
        """
        while self._closed and self._closed[0][0] <= max_s:
            self._open()
        known = chain.from_iterable(self._groups.values()) if mesh is None else self._groups[mesh]
        groups = sorted((one for one in known if one.bound_s <= max_s), key=lambda one: one.order)
        tried = (self._preferred(groups, max_s, limit_bytes, rank) for limit_bytes in limits_bytes)
        return next(found for found in tried if found is not None)

    def _preferred(self, groups: Iterable[ConfigGroup], max_s: float, limit_bytes: float, rank: Rank) -> Found | None:
        """Return the preferred configuration within one memory limit; None if none is up to `max_s`."""
        # The same search with a lexicographic goal: a lower rank first, then a shorter step. The plainest configuration
        # of a group has a lower bound on the ranks of all its configurations, so most groups are never opened.
        order = count()
        heap: list[tuple[tuple[object, ...], float, int, ConfigGroup | _Waiting | PipelineStages]] = [
            (self._rank_of(group, rank), group.bound_s, next(order), group) for group in groups
        ]
        heapify(heap)
        best: tuple[tuple[object, ...], float] | None = None
        chosen: Found | None = None
        while heap and (best is None or heap[0][:2] < best):
            self._report()
            key, bound_s, _, one = heappop(heap)
            if isinstance(one, ConfigGroup):
                for known, candidates in self._by_rank(one, limit_bytes, max_s, rank):
                    heappush(heap, (known, candidates[0].bound_s, next(order), _Waiting(one, candidates)))
            elif isinstance(one, _Waiting):
                candidate = one.found[one.next]
                one.next += 1
                if one.next < len(one.found):
                    heappush(heap, (key, one.found[one.next].bound_s, next(order), one))
                stages = self._fitting(one.group, candidate, limit_bytes)
                if stages is not None and stages.bound_s <= max_s:
                    known = rank(stages.context.config)
                    heappush(heap, (known, stages.bound_s * (1 - SLACK), next(order), stages))
            elif best is None or (key, bound_s) < best:
                found = self._simulate(one), one
                if found[0] <= max_s and (best is None or (key, found[0]) < best):
                    best, chosen = (key, found[0]), found
        return chosen

    def _rank_of(self, group: ConfigGroup, rank: Rank) -> tuple[object, ...]:
        """Return a lower bound on the ranks of a group's configurations."""
        # The lists of several meshes and memory limits have the same groups.
        if group.order not in self._plainest:
            self._plainest[group.order] = rank(group.plainest)
        return self._plainest[group.order]

    def _by_rank(
        self, group: ConfigGroup, limit_bytes: float, max_s: float, rank: Rank
    ) -> list[tuple[tuple[object, ...], list[Candidate]]]:
        """Return the candidates of a group up to `max_s` by their rank, each list by its bounds."""
        # The lists of several meshes and the choice among all ask for the same groups.
        key = group.order, limit_bytes, max_s
        if key not in self._sorted:
            found: dict[tuple[object, ...], list[Candidate]] = {}
            ranks: dict[tuple[object, ...], tuple[object, ...]] = {}
            fits = group.min_bytes <= limit_bytes and group.min_s <= max_s
            candidates = group.candidates(limit_bytes) if fits else []
            for one in candidates:
                if one.bound_s > max_s:
                    break
                split = group.splits.found[one.split]
                # Nothing else of a candidate matters to its rank, and configurations are expensive to make.
                alike = split.vpp, (*split[1:3], split.layout) == (None, None, None), one.zero, one.recomputed != NONE
                if alike not in ranks:
                    ranks[alike] = rank(group.config_of(one))
                found.setdefault(ranks[alike], []).append(one)
            self._sorted[key] = list(found.items())
        return self._sorted[key]
