"""The configurations of a search, in groups that divide matrices, sequences and the batch alike.

A group has a bound for all its configurations, and cheap bounds for each of them (`bounds`), so that the search
estimates few of them one by one.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from heapq import heapify, heappop
from itertools import product
from math import inf
from typing import TYPE_CHECKING, get_args

from hpgo.base.divisors import divisors
from hpgo.errors import ArgumentError
from hpgo.llm.bounds import ALL, NONE, SLACK, Candidate, GroupBounds
from hpgo.llm.estimate import max_memory_bytes
from hpgo.llm.layer_context import NARROW, VALUE
from hpgo.llm.layer_split import LayerSplits
from hpgo.llm.layer_time import LAYER
from hpgo.llm.parallelism import MAX_ZERO, RecomputedModule, check_degrees
from hpgo.llm.recompute import MODULES, without_parts
from hpgo.llm.step_time import LayerCosts, PipelineStages, kinds_of, transfer

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from hpgo.llm.gpus import Gpus
    from hpgo.llm.layer_context import LayerContext
    from hpgo.llm.parallelism import ParallelismConfig, PipelineSchedule
    from hpgo.llm.search_space import SearchSpace


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

    @cached_property
    def bound_s(self) -> float:
        """Lower bound on all step times: some rank has at least 1/pp of the whole computation."""
        # No split is evaluated here: most groups are dropped by this bound alone. If the group has a configuration
        # without recomputation, the bound must not count recomputation.
        all_s = self.costs.model_s[all(self.recomputed)]
        return self.micro_batches * all_s / self.pp * (1 - 3 * SLACK)

    @cached_property
    def min_s(self) -> float:
        """Tighter lower bound on all step times, which evaluates every layer split."""
        return self.bound_s if self.pp == 1 else float(self._bounds.steps_s.min())

    @cached_property
    def plainest(self) -> ParallelismConfig:
        """A configuration with the fewest features of the group. It need not be in the group, nor run anywhere."""
        again = not self.some and all(self.recomputed)
        # Hybrid sharding needs a ZeRO stage, and the lowest one has the fewest features.
        zero_stage = 0 if self.dp_replicate == 1 else min(self.zero_stages)
        plain = self._config(min(one.vpp for one in self.splits.found), zero_stage)
        return replace(plain, recompute="full") if again else plain

    @property
    def count(self) -> int:
        """Number of configurations in the group, partial recomputation included."""
        some = self.splits.some if self.some else 0
        return len(self.zero_stages) * (len(self.splits.found) * len(self.recomputed) + some)

    def candidates(self, limit_bytes: float) -> list[Candidate]:
        """Return the configurations that may fit, the lowest bound first."""
        return self._bounds.candidates(limit_bytes, self.recomputed, some=self.some)

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
            config = replace(config, recompute=self.costs.context.config.recompute)
        return PipelineStages(self._context(config), self.micro_batches, self.costs)

    def _context(self, config: ParallelismConfig) -> LayerContext:
        return replace(self.costs.context, config=config, gpus=self.gpus)

    def config_of(self, one: Candidate) -> ParallelismConfig:
        """Return the configuration of a candidate. If it recomputes some layers, their number is still open."""
        split = self.splits.found[one.split]
        return replace(
            self._config(split.vpp, self.zero_stages[one.zero]),
            first_rank_layers=split.first_rank_layers,
            last_rank_layers=split.last_rank_layers,
            recompute=self.costs.context.config.recompute if one.recomputed == NONE else "full",
        )

    def _config(self, vpp: int, zero_stage: int) -> ParallelismConfig:
        return replace(
            self.costs.context.config, pp=self.pp, vpp=vpp, pp_schedule=self.splits.schedule, dp=self.dp,
            zero_stage=zero_stage, dp_replicate=self.dp_replicate,
        )  # fmt: skip

    @cached_property
    def _bounds(self) -> GroupBounds:
        # The context holds a shape, whose dp is 1, but the distance between pipeline ranks depends on the real dp.
        edge_s = sum(transfer(self._context(self.costs.context.config), dp=self.dp)) if self.pp > 1 else 0.0
        return GroupBounds(self.costs, self.splits, self.micro_batches, edge_s, self._contexts)

    def _contexts(self) -> list[LayerContext]:
        """Return a context for each ZeRO stage, with the first layer split."""
        vpp = self.splits.found[0].vpp
        return [self._context(self._config(vpp, stage)) for stage in self.zero_stages]


def config_groups(
    context: LayerContext, global_batch_size: int, space: SearchSpace, *,
    costs: SharedCosts | None = None, below_s: float = inf,
) -> Iterator[ConfigGroup]:  # fmt: skip
    """Yield the groups of the search that `hpgo.plan_llm` describes, for a context's model, GPUs and precision.

    Groups whose bound is not below `below_s` may be left out. `costs` are shared with searches on other GPU counts.
    """
    costs = SharedCosts() if costs is None else costs
    model, gpus, rules, takes = context.model, context.gpus, space.rules, space.takes
    context = replace(context, config=replace(context.config, **space.settings))
    base = context.config
    if space.fixed.get("recompute") == "selective" and not base.recompute_modules:
        for modules in _module_sets(context):
            part = replace(space, fixed={**space.fixed, "recompute_modules": modules})
            yield from config_groups(context, global_batch_size, part, costs=costs, below_s=below_s)
        return
    cps = [1 << power for power in range(gpus.count.bit_length())]
    # Flash attention saves no scores, so selective recomputation changes nothing.
    recomputed = [kind == "full" for kind in ("none", "full") if kind in rules.recompute and takes("recompute", kind)]
    if base.recompute_modules:
        recomputed = [False] if takes("recompute", "selective") else []
    # Graphs of layers exclude full recomputation.
    if base.cuda_graph_impl in {"local", "transformer_engine"}:
        recomputed = [again for again in recomputed if not again]
    dp_replicate = space.degree("dp_replicate")
    is_plain = not base.recompute_modules and base.cuda_graph_impl == "none"
    some = rules.recompute_num_layers and len(recomputed) > 1
    # Frameworks place the layers of models with experts stage by stage.
    make = partial(LayerSplits.from_kinds, kinds_of(model), uneven=rules.uneven_ends, laid_out=bool(model.experts))
    known: dict[tuple[int, PipelineSchedule, tuple[int, ...]], LayerSplits] = {}
    for tp, cp in product(divisors(gpus.gpus_per_node), cps):
        if not (takes("tp", tp) and takes("cp", cp)):
            continue
        shape = replace(context.config, tp=tp, sequence_parallel=tp > 1, cp=cp)
        if gpus.count % shape.model_parallel_size or not _divides(shape, context):
            continue
        if below_s < inf and costs.least_gpu_s(context, shape, global_batch_size, space) / gpus.count >= below_s:
            continue
        for pp in divisors(gpus.count // shape.model_parallel_size):
            dp = gpus.count // shape.model_parallel_size // pp
            if global_batch_size % dp or not (takes("pp", pp) and takes("dp", dp)):
                continue
            if (pp > 1 and model.tied and not rules.ties_piped) or dp % dp_replicate:
                continue
            # An even split may count the embedding and the LM head as a layer each, hence the 2 (`stage_layers`).
            max_vpp = (model.layers + 2) // pp if pp > 1 else 1
            vpps = [count for count in range(1, max_vpp + 1) if takes("vpp", count)]
            eps = [each for each in divisors(model.experts or 1) if gpus.count // pp % each == 0 and takes("ep", each)]
            sizes = [size for size in divisors(global_batch_size // dp) if takes("micro_batch_size", size)]
            schedules = [
                name
                for name in rules.pp_schedules
                if takes("pp_schedule", name) and (name == "1f1b" or (pp > 1 and is_plain))
            ]
            for ep, schedule in product(eps, schedules):
                splits_backward = schedule != "1f1b"
                vpp = 2 if splits_backward else 1
                placed = rules.as_run(replace(shape, ep=ep, pp=pp, dp=dp, vpp=vpp, pp_schedule=schedule))
                if space.settings and rules.broken_degrees(replace(placed, zero_stage=1), tied=model.tied):
                    continue
                # No framework recomputes a layer only once if backward passes are split.
                again = [one for one in recomputed if not (one and splits_backward)]
                for size in sizes:
                    micro_batches = global_batch_size // dp // size
                    fitting = tuple(_fitting(vpps, schedule, whole_rounds=micro_batches % pp == 0))
                    # Splits depend on the pipeline alone, so all tp, cp, dp and batches share them.
                    if (pp, schedule, fitting) not in known:
                        known[pp, schedule, fitting] = make(pp, fitting, schedule)
                    splits = known[pp, schedule, fitting]
                    if not (splits.found and again):
                        continue
                    zero_stages = rules.zero_stages_of(placed, micro_batches=micro_batches, experts=bool(model.experts))
                    zero_stages = tuple(stage for stage in zero_stages if takes("zero_stage", stage))
                    if dp_replicate > 1:
                        # Without experts, the number of replicas of an expert is not used.
                        whole = not model.experts or placed.expert_dp_size % dp_replicate == 0
                        zero_stages = tuple(stage for stage in zero_stages if whole and stage in rules.hybrid_stages)
                    # Of the settings, only the formats of the optimizer state depend on the ZeRO stage.
                    if base.has_narrow_state:
                        zero_stages = tuple(
                            stage for stage in zero_stages
                            if not rules.broken_degrees(replace(placed, zero_stage=stage), tied=model.tied)
                        )  # fmt: skip
                    group = partial(
                        ConfigGroup, gpus=gpus, pp=pp, dp=dp, micro_batches=micro_batches, splits=splits,
                        dp_replicate=dp_replicate,
                    )  # fmt: skip
                    if alike := tuple(stage for stage in zero_stages if stage < MAX_ZERO):
                        config = replace(
                            shape, ep=ep, micro_batch_size=size, overlap_dp_comm=placed.overlap_dp_comm,
                            fused_elementwise=placed.fused_elementwise,
                        )  # fmt: skip
                        one = group(
                            costs.of(replace(context, config=config)), zero_stages=alike, recomputed=tuple(again),
                            some=some and not splits_backward,
                        )  # fmt: skip
                        if below_s == inf or one.bound_s < below_s:
                            yield one
                    if MAX_ZERO not in zero_stages:
                        continue
                    # With ZeRO stage 3 a layer's time includes gathering weights, which depends on dp, on the pipeline
                    # and on recomputation (`ParallelismConfig.shape`). So each of these has its own costs and group.
                    # Beside a pipeline nothing is gathered, which bounds them all.
                    config = replace(placed, micro_batch_size=size, zero_stage=MAX_ZERO)
                    if below_s < inf:
                        ungathered = replace(context, config=replace(config, pp=2, dp=1))
                        least = group(
                            costs.of(ungathered), zero_stages=(MAX_ZERO,), recomputed=tuple(again), some=False
                        )
                        if least.bound_s >= below_s:
                            continue
                    for full in again:
                        recompute = "full" if full else base.recompute
                        own = replace(config, dp_replicate=dp_replicate, recompute=recompute)
                        yield group(
                            LayerCosts.from_context(replace(context, config=own)), zero_stages=(MAX_ZERO,),
                            recomputed=(full,), some=False,
                        )  # fmt: skip


@dataclass
class SharedCosts:
    """Costs of shapes, for groups on different numbers of GPUs."""

    _known: dict[tuple[object, ...], LayerCosts] = field(default_factory=dict)
    _dense: dict[tuple[object, ...], LayerCosts] = field(default_factory=dict)
    _least: dict[tuple[int, ParallelismConfig], float] = field(default_factory=dict)

    def of(self, context: LayerContext) -> LayerCosts:
        """Return the costs of a context's configuration. Layers without experts share them across ep, too."""
        config = context.config.shape
        context = replace(context, config=config)
        # All terms take the GPUs' rates from these rings, except for the all-to-all, which counts nodes.
        rings = context.tensor_ring, context.context_ring
        nodes = -(-config.ep // context.gpus.gpus_per_node)
        if (config, rings, nodes) not in self._known:
            like = replace(config, ep=1), rings
            found = self._known[config, rings, nodes] = LayerCosts(context, self._dense.get(like))
            self._dense.setdefault(like, found)
        return self._known[config, rings, nodes]

    def least_gpu_s(
        self, context: LayerContext, shape: ParallelismConfig, global_batch_size: int, space: SearchSpace
    ) -> float:
        """Return a lower bound on the GPU-seconds of a step with the tp and cp of a shape, and any other degrees.

        It holds on any number of nodes that equal the context's.
        """
        key = context.gpus.gpus_per_node, shape
        if key not in self._least:
            rules, model = space.rules, context.model
            # With ZeRO stage 3 gradients are not accumulated, and beside a pipeline no weights are gathered.
            if MAX_ZERO in rules.zero_stages:
                shape = replace(shape, zero_stage=MAX_ZERO, pp=2)
            found = inf
            for size, ep, fused in product(
                divisors(global_batch_size), divisors(model.experts or 1), {True, len(rules.pp_schedules) == 1}
            ):
                if space.takes("micro_batch_size", size) and space.takes("ep", ep):
                    config = replace(shape, micro_batch_size=size, ep=ep, fused_elementwise=fused)
                    one_s = self.of(replace(context, config=config)).model_s[0]
                    found = min(found, one_s * global_batch_size / size * shape.model_parallel_size)
            self._least[key] = found * (1 - 4 * SLACK)
        return self._least[key]


def _module_sets(context: LayerContext) -> Iterator[tuple[RecomputedModule, ...]]:
    """Yield sets of modules to recompute: each alone, and the best ones together.

    Modules are ordered by the bytes that a micro-batch saves per second of recomputation, over all layers.
    """
    saved: dict[RecomputedModule, float] = {}
    for name in get_args(RecomputedModule):
        saved_bytes = repeated_s = 0.0
        for kind, count in Counter(kinds_of(context.model)).items():
            one = context.of(kind)
            passes = {key: term.time(one) for key, term in LAYER.items()}
            saved_bytes += count * MODULES[name].saved(one, NARROW.get(context.config.precision, VALUE))
            repeated_s += count * sum(MODULES[name].repeated(one, passes).values())
        if saved_bytes:
            saved[name] = saved_bytes / repeated_s
    order = sorted(saved, key=lambda name: -saved[name])
    sets = [(name,) for name in order] + [tuple(order[:count]) for count in range(2, len(order) + 1)]
    for modules in dict.fromkeys(map(without_parts, sets)):
        try:
            replace(context.config, recompute="selective", recompute_modules=modules)
        except ArgumentError:  # CUDA graphs exclude some modules
            continue
        yield modules


def _fitting(vpps: Iterable[int], schedule: PipelineSchedule, *, whole_rounds: bool) -> Iterator[int]:
    """Yield the numbers of virtual stages per rank that a schedule can run.

    `whole_rounds` tells whether the number of micro-batches is a multiple of pp, which interleaving needs.
    """
    for vpp in vpps:
        if schedule == "zb_v":
            fits = vpp == 2
        elif schedule == "interleaved_zb":
            fits = vpp > 1 and whole_rounds
        else:
            fits = vpp == 1 or whole_rounds
        if fits:
            yield vpp


def leanest(groups: Iterable[ConfigGroup]) -> PipelineStages | None:
    """Return the configuration whose fullest GPU holds the least memory; None without groups."""
    # Best-first search over lower bounds: evaluate a group only while its bound is below the best exact value.
    waiting = [(group.leanest()[0][0], at, group) for at, group in enumerate(groups)]
    heapify(waiting)
    best: tuple[float, PipelineStages] | None = None
    while waiting:
        min_bytes, _, group = heappop(waiting)
        if best is not None and min_bytes >= best[0]:
            break
        for held_bytes, one in group.leanest():
            if best is not None and held_bytes >= best[0]:
                break
            stages = group.stages(one)
            needed = max_memory_bytes(stages)
            if best is None or needed < best[0]:
                best = needed, stages
    return None if best is None else best[1]


def min_recomputed(none: PipelineStages, limit_bytes: float, minimum: int) -> PipelineStages | None:
    """Return the configuration that fits with the fewest recomputed layers per stage.

    The search starts with `minimum` layers. It returns None if nothing below full recomputation fits.
    """
    context = none.context
    assert context.config.zero_stage < MAX_ZERO, "its costs would be others"  # noqa: S101
    # One by one: the largest layer that is recomputed needs memory, so one more layer may need more in total.
    for layers in range(minimum, max(none.counts)):
        config = replace(context.config, recompute="full", recompute_num_layers=layers)
        stages = PipelineStages(replace(context, config=config), none.micro_batches, none.costs)
        if max_memory_bytes(stages) <= limit_bytes:
            return stages
    return None


def _divides(config: ParallelismConfig, context: LayerContext) -> bool:
    try:
        check_degrees(context.model, config, seq_length=context.seq_length)
    except ArgumentError:
        return False
    return True
