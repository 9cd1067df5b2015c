"""The configurations of a search, in groups that divide matrices, sequences and the batch alike.

A group has a bound for all its configurations, and cheap bounds for each of them (`bounds`), so that the search
estimates few of them one by one.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from heapq import heapify, heappop, heappush
from itertools import product
from typing import TYPE_CHECKING

from hpgo.llm.bounds import ALL, NONE, SLACK, Candidate, GroupBounds
from hpgo.llm.estimate import max_memory_bytes
from hpgo.llm.parallelism import MAX_ZERO, ParallelismConfig, changed
from hpgo.llm.step_time import LayerCosts, PipelineStages, transfer

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from hpgo.llm.gpus import Gpus
    from hpgo.llm.layer_context import LayerContext
    from hpgo.llm.layer_split import LayerSplits

Mesh = tuple[int, int, int, int, int, float]


def mesh_of(config: ParallelismConfig) -> Mesh:
    """Return the key of the configurations that give each GPU the same matrices and tokens in a pass.

    They differ in how they order these passes and store their results: virtual stages, the schedule, layer splits,
    ZeRO, recomputation, and in whether GPUs share sequences (cp) or have separate ones (dp).

    >>> from hpgo.llm.parallelism import ParallelismConfig
    >>> one, other = ParallelismConfig(tp=2, dp=4, pp=2), ParallelismConfig(tp=2, cp=2, dp=2, pp=2, micro_batch_size=2)
    >>> mesh_of(one) == mesh_of(other)
    True
    """
    return config.tp, config.ep, config.etp, config.pp, config.dp_cp_size, config.micro_batch_size / config.cp


@dataclass(frozen=True)
class ConfigGroup:
    """Configurations that differ only in layer splits, in ZeRO stages, and in recomputation."""

    costs: LayerCosts
    gpus: Gpus
    """GPUs of the configurations. `costs` may have other GPUs, on which a layer takes the same time."""
    pp: int
    dp: int
    micro_batches: int
    splits: LayerSplits
    zero_stages: tuple[int, ...]
    recomputed: tuple[bool, ...]
    """Kinds of recomputation in the group: of no layers (False), of all layers (True), or both."""
    some: bool
    """Whether some layers of each stage may be recomputed."""
    dp_replicate: int = 1
    """Groups of replicas that each hold all shards."""
    group_size: int | None = None
    """Micro-batches that pass through a virtual stage before the turn of the next one; None means pp."""
    cpu_s: float = 0.0
    """Lower bound on the seconds in which CPUs update weights."""
    order: tuple[int, ...] = ()
    """Position in the search space."""

    @cached_property
    def bound_s(self) -> float:
        """Lower bound on all step times: some rank has at least 1/pp of the whole computation."""
        # No split is evaluated here: most groups are dropped by this bound alone. If the group has a configuration
        # without recomputation, the bound must not count recomputation.
        all_s = self.costs.model_s[all(self.recomputed)]
        return self.micro_batches * all_s / self.pp * (1 - 3 * SLACK) + self.cpu_s

    @cached_property
    def min_s(self) -> float:
        """Tighter lower bound on all step times, which evaluates every layer split."""
        return self.bound_s if self.pp == 1 else float(self._bounds.steps_s.min()) + self.cpu_s

    @cached_property
    def min_bytes(self) -> float:
        """Lower bound on the memory of the fullest GPU: the mean of all ranks' parameters and optimizer state."""
        context = self.costs.context
        stages = [self._context(self._config(2 if self.pp > 1 else 1, stage)) for stage in self.zero_stages]
        state_bytes = min(
            self.splits.mean_state_bytes(stage)
            - (self.splits.mean_reduced_bytes(stage) if stage.config.reduces_by_stage(self.micro_batches) else 0.0)
            for stage in stages
        )
        return (state_bytes + context.constants.framework_overhead_bytes) * (1 - SLACK)

    @property
    def leanest_bytes(self) -> float:
        """Tighter lower bound on the memory of all configurations, which evaluates every layer split."""
        return float(self._bounds.fullest_bytes[:, :, [int(again) for again in self.recomputed]].min())

    @cached_property
    def mesh(self) -> Mesh:
        """Mesh of all configurations of the group."""
        config = self.costs.context.config
        return config.tp, config.ep, config.etp, self.pp, config.cp * self.dp, config.micro_batch_size / config.cp

    @cached_property
    def plainest(self) -> ParallelismConfig:
        """A configuration with the fewest features of the group. It need not be in the group, nor run anywhere."""
        again = not self.some and all(self.recomputed)
        # Hybrid sharding needs a ZeRO stage, and the lowest one has the fewest features.
        zero_stage = 0 if self.dp_replicate == 1 else min(self.zero_stages)
        plain = self._config(min(one.vpp for one in self.splits.found), zero_stage)
        return changed(plain, recompute="full") if again else plain

    @property
    def count(self) -> int:
        """Number of configurations in the group, partial recomputation included."""
        some = self.splits.some if self.some else 0
        return len(self.zero_stages) * (len(self.splits.found) * len(self.recomputed) + some)

    def candidates(self, limit_bytes: float) -> list[Candidate]:
        """Return the configurations that may fit, the lowest bound first."""
        found = self._bounds.candidates(limit_bytes, self.recomputed, some=self.some)
        return [one._replace(bound_s=one.bound_s + self.cpu_s) for one in found] if self.cpu_s else found

    def leanest(self) -> list[tuple[float, Candidate]]:
        """Return configurations that recompute nothing or everything, with lower bounds on memory, the lowest first."""
        held = self._bounds.fullest_bytes
        places = product(range(len(self.splits.found)), range(len(self.zero_stages)), self.recomputed)
        return sorted(
            (float(held[split, zero, int(again)]), Candidate(0.0, split, zero, ALL if again else NONE))
            for split, zero, again in places
        )

    def stages(self, one: Candidate) -> PipelineStages:
        """Return the stages of a candidate, without recomputation unless it recomputes all layers."""
        config = self.config_of(one)
        if one.recomputed not in {NONE, ALL}:
            config = changed(config, recompute=self.costs.context.config.recompute)
        return PipelineStages(self._context(config), self.micro_batches, self.costs)

    def _context(self, config: ParallelismConfig) -> LayerContext:
        return self.costs.context.of_config(config, self.gpus)

    def config_of(self, one: Candidate) -> ParallelismConfig:
        """Return the configuration of a candidate. If it recomputes some layers, their number is still open."""
        split = self.splits.found[one.split]
        return changed(
            self._config(split.vpp, self.zero_stages[one.zero]),
            first_rank_layers=split.first_rank_layers,
            last_rank_layers=split.last_rank_layers,
            pipeline_layout=split.layout,
            recompute=self.costs.context.config.recompute if one.recomputed == NONE else "full",
        )

    def _config(self, vpp: int, zero_stage: int) -> ParallelismConfig:
        if (vpp, zero_stage) not in self._configs:
            self._configs[vpp, zero_stage] = changed(
                self.costs.context.config, pp=self.pp, vpp=vpp, pp_schedule=self.splits.schedule, dp=self.dp,
                zero_stage=zero_stage, dp_replicate=self.dp_replicate,
                micro_batch_group_size=self.group_size if vpp > 1 else None,
            )  # fmt: skip
        return self._configs[vpp, zero_stage]

    @cached_property
    def _configs(self) -> dict[tuple[int, int], ParallelismConfig]:
        return {}

    @cached_property
    def _bounds(self) -> GroupBounds:
        # The context holds a shape, whose dp is 1, but the distance between pipeline ranks depends on the real dp.
        edge_s = sum(transfer(self._context(self.costs.context.config), dp=self.dp)) if self.pp > 1 else 0.0
        return GroupBounds(self.costs, self.splits, self.micro_batches, edge_s, self._contexts, self.group_size)

    def _contexts(self) -> list[LayerContext]:
        """Return a context for each ZeRO stage, with the first layer split."""
        vpp = self.splits.found[0].vpp
        return [self._context(self._config(vpp, stage)) for stage in self.zero_stages]


def leanest(groups: Iterable[ConfigGroup]) -> PipelineStages | None:
    """Return the configuration whose fullest GPU holds the least memory; None without groups."""
    best: tuple[float, PipelineStages] | None = None
    for min_bytes, group in _by_memory(groups):
        if best is not None and min_bytes >= best[0]:
            break
        for held_bytes, one in group.leanest():
            if best is not None and held_bytes >= best[0]:
                break
            stages = group.stages(one)
            needed_bytes = max_memory_bytes(stages)
            if best is None or needed_bytes < best[0]:
                best = needed_bytes, stages
    return None if best is None else best[1]


def any_fits(groups: Iterable[ConfigGroup], limit_bytes: float) -> bool:
    """Return whether a configuration of the groups fits in memory."""
    for min_bytes, group in _by_memory(groups):
        if min_bytes > limit_bytes:
            break
        for held_bytes, one in group.leanest():
            if held_bytes > limit_bytes:
                break
            if max_memory_bytes(group.stages(one)) <= limit_bytes:
                return True
    return False


def _by_memory(groups: Iterable[ConfigGroup]) -> Iterator[tuple[float, ConfigGroup]]:
    """Yield groups with the lowest bound on the memory of their configurations, in the order of these bounds."""
    # A group waits with a cheap bound first. Most groups never come to the front with it.
    waiting = [(group.min_bytes, False, at, group) for at, group in enumerate(groups)]
    heapify(waiting)
    while waiting:
        min_bytes, is_exact, at, group = heappop(waiting)
        if is_exact:
            yield min_bytes, group
        else:
            heappush(waiting, (group.leanest_bytes, True, at, group))


def min_recomputed(none: PipelineStages, limit_bytes: float, minimum: int) -> PipelineStages | None:
    """Return the configuration that fits with the fewest recomputed layers per stage.

    The search starts with `minimum` layers. It returns None if nothing below full recomputation fits.
    """
    context = none.context
    assert context.config.zero_stage < MAX_ZERO, "its costs would be others"  # noqa: S101
    # One by one: the largest layer that is recomputed needs memory, so one more layer may need more in total.
    for layers in range(minimum, max(none.counts)):
        config = changed(context.config, recompute="full", recompute_num_layers=layers)
        stages = PipelineStages(context.of_config(config), none.micro_batches, none.costs)
        if max_memory_bytes(stages) <= limit_bytes:
            return stages
    return None
