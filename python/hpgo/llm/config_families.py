"""The search space as families of groups, with a lower bound on the step times of each family.

All groups of a family have the same tp, cp and micro-batch size, so a layer takes each of them a minimum of GPU time.
The search opens a family only if its bound comes to the front. Most families stay closed: their groups are only
counted.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import product
from math import inf
from typing import TYPE_CHECKING, NamedTuple, get_args

from hpgo.base.divisors import divisors
from hpgo.errors import ArgumentError
from hpgo.llm.bounds import SLACK
from hpgo.llm.config_groups import ConfigGroup
from hpgo.llm.layer_context import NARROW, VALUE
from hpgo.llm.layer_split import LayerSplits
from hpgo.llm.layer_time import BY_EP, BY_ETP, LAUNCH, LAYER
from hpgo.llm.memory import STATE, PipelineRankLayers, logits, stage_memory
from hpgo.llm.optimizer_time import min_cpu_step_s
from hpgo.llm.parallelism import MAX_ZERO, RecomputedModule, changed, check_degrees, has_whole_rounds
from hpgo.llm.recompute import MODULES, without_parts
from hpgo.llm.step_time import LayerCosts, kinds_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from hpgo.llm.layer_context import LayerContext
    from hpgo.llm.parallelism import CudaGraphImpl, ParallelismConfig, PipelineSchedule
    from hpgo.llm.search_space import SearchSpace
    from hpgo.model.transformer import Transformer

_BY_SHARDING = frozenset(("elementwise", "param_all_gather", "grad_accumulation"))
"""Keys of the terms that depend on ZeRO stage 3, on replicas or on fused operations."""


class Family(NamedTuple):
    """Groups that a search has not opened yet."""

    bound_s: float
    """Lower bound on the step times of all groups."""
    open: Callable[[], Iterable[Family | ConfigGroup]]
    """Function that returns the groups, or smaller families of them."""


class _Pipeline(NamedTuple):
    """The part of groups that their micro-batch size does not change."""

    order: tuple[int, ...]
    config: ParallelismConfig
    """Configuration as the framework runs it, with open ZeRO stage and micro-batch size."""
    recomputed: tuple[bool, ...]
    dp_replicate: int
    """Groups of replicas that each hold all shards."""
    zero_stages: tuple[tuple[int, ...], tuple[int, ...]]
    """ZeRO stages with several micro-batches, and with a single one."""
    splits: tuple[LayerSplits, LayerSplits]
    """Layer splits if interleaving can't run the number of micro-batches, and if it can (`has_whole_rounds`)."""


class SharedCosts:
    """Costs of shapes, and layer splits, for searches of one space on different numbers of GPUs."""

    def __init__(self, limit_bytes: float = inf) -> None:
        self.limit_bytes = limit_bytes
        """Memory of a GPU that configurations may use."""
        self.spaces: list[tuple[SearchSpace, bool]] = []
        """Parts of the search space, one for each of its grids, and whether they add CUDA graphs to the one before."""
        self._rings: dict[tuple[int, ...], int] = {}
        self._numbers: dict[object, int] = {}
        self._costs: dict[object, LayerCosts] = {}
        self._splits: dict[object, LayerSplits] = {}
        self._families: dict[object, list[tuple[float, int, int, int]]] = {}
        self._by_ep: dict[object, list[tuple[float, int, int]]] = {}
        self.least: dict[object, LayerCosts] = {}
        """Lowest costs of groups by the GPUs of a node, the position of a grid, and degrees."""
        self._gpus = 0
        self._shapes: dict[object, dict[tuple[int, int], ParallelismConfig]] = {}

    def of(
        self, context: LayerContext, like: LayerCosts | None = None, differing: frozenset[str] = frozenset()
    ) -> LayerCosts:
        """Return the costs of the shape in `context`. `like` and `differing` are fields of `LayerCosts`."""
        # All terms take the GPUs' rates from these rings, except for the all-to-all, which counts nodes.
        config, gpus, spread = context.config, context.gpus, context.config.expert_model_parallel_size
        degrees = config.tp, config.cp, config.etp, spread, gpus.gpus_per_node
        if degrees not in self._rings:
            rings = context.tensor_ring, context.context_ring, gpus.ring(config.etp, 1), gpus.ring(spread, 1)
            # Equal rings have one number, because hashing them takes longer than all else here.
            self._rings[degrees] = self._numbers.setdefault(rings, len(self._numbers))
        key = config, self._rings[degrees], -(-spread // gpus.gpus_per_node)
        if key not in self._costs:
            self._costs[key] = LayerCosts(context, like, differing)
        return self._costs[key]

    def splits(
        self, grid: ConfigGrid, pp: int, schedule: PipelineSchedule, vpps: Iterable[int], *, whole_rounds: bool
    ) -> LayerSplits:
        """Return the layer splits of a pipeline. They do not depend on tp, cp, dp and batches."""
        key = pp, schedule, tuple(_fitting(vpps, schedule, whole_rounds=whole_rounds))
        if key not in self._splits:
            model, rules = grid.context.model, grid.space.rules
            # Frameworks place the layers of models with experts stage by stage.
            self._splits[key] = LayerSplits.from_kinds(
                kinds_of(model), pp, key[2], schedule, uneven=rules.uneven_ends, laid_out=bool(model.experts),
                layouts=rules.empty_stages,
            )  # fmt: skip
        return self._splits[key]

    def shapes(self, grid: ConfigGrid) -> dict[tuple[int, int], ParallelismConfig]:
        """Return the configurations of a grid by tp and cp. Some may not divide its number of GPUs."""
        gpus, context, takes = grid.context.gpus, grid.context, grid.space.takes
        # The first search has the most GPUs, so it has all shapes of the later ones.
        key = gpus.gpus_per_node, grid.at
        self._gpus = max(self._gpus, gpus.count)
        if key not in self._shapes:
            cps = [1 << power for power in range(self._gpus.bit_length()) if takes("cp", 1 << power)]
            tps = [tp for tp in divisors(gpus.gpus_per_node) if takes("tp", tp)]
            found = {
                (tp, cp): changed(context.config, tp=tp, sequence_parallel=grid.space.divides_norms(tp), cp=cp)
                for tp, cp in product(tps, cps)
                if tp * cp <= self._gpus
            }
            self._shapes[key] = {at: shape for at, shape in found.items() if _divides(shape, context)}
        return self._shapes[key]

    def families(self, grid: ConfigGrid) -> list[tuple[float, int, int, int]]:
        """Return lower bounds on GPU-seconds of a step, each with tp, cp and a micro-batch size, the lowest first.

        They hold on any number of nodes that equal the grid's. Some may not divide that number of GPUs.
        """
        key = grid.context.gpus.gpus_per_node, grid.at
        if key not in self._families:
            sizes = [size for size in divisors(grid.batch) if grid.space.takes("micro_batch_size", size)]
            found = [
                (grid.least_gpu_s(tp, cp, size), tp, cp, size)
                for (tp, cp), size in product(grid.shapes, sizes)
                if grid.min_bytes(tp, cp, size) <= self.limit_bytes and grid.may_gain(tp, cp, size)
            ]
            self._families[key] = sorted(found)
        return self._families[key]

    def by_ep(self, grid: ConfigGrid, tp: int, cp: int, size: int) -> list[tuple[float, int, int]]:
        """Return lower bounds on GPU-seconds of a step, each with an ep and an etp, on any number of such nodes."""
        key = grid.context.gpus.gpus_per_node, grid.at, tp, cp, size
        if key not in self._by_ep:
            pairs = [pair for pair in grid.expert_degrees if grid.may_gain(tp, cp, size, *pair)]
            self._by_ep[key] = [(grid.least_gpu_s(tp, cp, size, *pair), *pair) for pair in pairs]
        return self._by_ep[key]


@dataclass(frozen=True)
class ConfigGrid:
    """All groups of a search space on some GPUs, for one choice of the settings that the degrees leave open."""

    context: LayerContext
    """Model, GPUs, and the settings of all configurations."""
    batch: int
    """Sequences per step, over all replicas."""
    space: SearchSpace
    costs: SharedCosts
    at: int = 0
    """Position of the settings in the search space."""
    plain: ConfigGrid | None = None
    """Grid without CUDA graphs, if this one has the same settings with CUDA graphs."""
    faster: ConfigGrid | None = None
    """Grid without recomputed modules, if this one has the same settings with them. It has the families of this one,
    and its bounds hold here, too."""

    @cached_property
    def cpu_s(self) -> float:
        """Lower bound on the seconds in which CPUs update weights, which bounds of passes leave out."""
        return min_cpu_step_s(self.context, _all_layers(self.context.model)) * (1 - SLACK)

    @property
    def shapes(self) -> dict[tuple[int, int], ParallelismConfig]:
        """Configurations by tp and cp. Some may not divide the number of GPUs."""
        return self.costs.shapes(self)

    @cached_property
    def recomputed(self) -> tuple[bool, ...]:
        """Kinds of recomputation: of no layers (False), and of all layers (True)."""
        base, takes = self.context.config, self.space.takes
        if base.recompute_modules:
            return (False,) if takes("recompute", "selective") else ()
        # Flash attention saves no scores, so selective recomputation changes nothing.
        kinds = [kind for kind in ("none", "full") if kind in self.space.rules.recompute and takes("recompute", kind)]
        # Graphs of layers exclude full recomputation, and so do passes beside the exchange of experts, and offloading.
        if base.cuda_graph_impl in {"local", "transformer_engine"} or base.overlap_ep_comm or base.offload_modules:
            kinds = [kind for kind in kinds if kind != "full"]
        return tuple(kind == "full" for kind in kinds)

    @cached_property
    def expert_degrees(self) -> tuple[tuple[int, int], ...]:
        """Pairs of ep and etp, by every divisor of the experts and of the GPUs of a node.

        Experts are divided only by factors by which ep can't be higher: whole experts on the same number of GPUs
        need no more memory, compute the same rows with wider matrices, and gather nothing.
        """
        model, takes, base = self.context.model, self.space.takes, self.context.config.etp
        eps = [ep for ep in divisors(model.experts or 1) if takes("ep", ep)]
        if not (model.experts and self.space.rules.expert_settings) or "etp" in self.space.fixed:
            return tuple((ep, base) for ep in eps)
        etps = [etp for etp in divisors(self.context.gpus.gpus_per_node) if model.expert_ffn % etp == 0]
        return tuple(
            (ep, etp)
            for ep, etp in product(eps, etps)
            if takes("etp", etp) and not any(ep * factor in eps for factor in divisors(etp)[1:])
        )

    @property
    def count(self) -> int:
        """Number of configurations, partial recomputation included."""
        found = 0
        for tp, cp in self.shapes:
            for one in self._pipelines(tp, cp):
                samples, again = self.batch // one.config.dp, len(one.recomputed)
                for size in self._sizes(samples):
                    splits, stages, _ = self._of_size(one, samples // size)
                    found += len(stages) * len(splits.found) * again
                    if self._some(one):
                        found += sum(stage < MAX_ZERO for stage in stages) * splits.some
        return found

    def families(self, below_s: float = inf) -> Iterator[Family]:
        """Yield families with bounds below `below_s`, the lowest first."""
        count = self.context.gpus.count
        for gpu_s, tp, cp, size in self.costs.families(self.faster or self):
            bound_s = gpu_s / count + self.cpu_s
            if bound_s >= below_s:
                break
            if count % (tp * cp) == 0 and self._pipelines(tp, cp):
                yield Family(bound_s, partial(self._open, tp, cp, size))

    def groups(self) -> Iterator[ConfigGroup]:
        """Yield all groups in the order of the search space."""
        for (tp, cp), pipelines in ((key, self._pipelines(*key)) for key in self.shapes):
            for one in pipelines:
                for size in self._sizes(self.batch // one.config.dp):
                    yield from self._groups(one, tp, cp, size)

    def _open(self, tp: int, cp: int, size: int) -> Iterator[Family | ConfigGroup]:
        """Yield the groups of a family, or a family for each ep and etp."""
        fitting = [one for one in self._pipelines(tp, cp) if self.batch // one.config.dp % size == 0]
        if not self.context.model.experts:
            for one in fitting:
                yield from self._groups(one, tp, cp, size)
            return
        for gpu_s, ep, etp in self.costs.by_ep(self.faster or self, tp, cp, size) if fitting else ():
            if alike := [one for one in fitting if (one.config.ep, one.config.etp) == (ep, etp)]:
                bound_s = gpu_s / self.context.gpus.count + self.cpu_s
                yield Family(bound_s, partial(self._open_all, alike, tp, cp, size))

    def _open_all(self, pipelines: list[_Pipeline], tp: int, cp: int, size: int) -> Iterator[ConfigGroup]:
        for one in pipelines:
            yield from self._groups(one, tp, cp, size)

    def may_gain(self, tp: int, cp: int, size: int, ep: int | None = None, etp: int = 1) -> bool:
        """Return whether CUDA graphs of the grid may shorten the step with some ep and etp, or with any."""
        if self.plain is None or (ep is None and self.context.model.experts):
            return True
        # Graphs need no less memory. So where GPUs hide all launches, the same configuration without graphs is as fast
        # and simpler. ZeRO stage 3 and unfused operations add work, which hides more.
        times = self.plain._least_costs(tp, cp, size, ep or 1, etp).layer.values()
        return any(one.forward_s[LAUNCH] > 0 or one.backward_s[LAUNCH] > 0 for one in times)

    def min_bytes(self, tp: int, cp: int, size: int) -> float:
        """Return a lower bound on the memory of the GPU with the LM head, with any other degrees."""
        context = self.context.of_config(changed(self.shapes[tp, cp], micro_batch_size=size))
        held_bytes: float = logits(context, PipelineRankLayers({}, {}, embedding=0, head=1))
        return (held_bytes + context.constants.framework_overhead_bytes) * (1 - SLACK)

    def least_gpu_s(self, tp: int, cp: int, size: int, ep: int | None = None, etp: int = 1) -> float:
        """Return a lower bound on the GPU-seconds of a step with some ep and etp, or with any, and any other degrees.

        It holds on any number of nodes that equal the context's.
        """
        # A bound for any ep leaves launches out, so it is that without CUDA graphs.
        if self.plain is not None and ep is None and self.context.model.experts:
            return self.plain.least_gpu_s(tp, cp, size)
        found = inf
        for is_fused in {True, len(self.space.rules.pp_schedules) == 1}:
            costs = self._least_costs(tp, cp, size, ep or 1, etp, is_fused=is_fused)
            found = min(found, costs.least_s if ep is None and self.context.model.experts else costs.model_s[0])
        return found * self.batch / size * tp * cp * (1 - 4 * SLACK)

    def _least_costs(self, tp: int, cp: int, size: int, ep: int, etp: int, *, is_fused: bool = True) -> LayerCosts:
        """Return the lowest costs of all groups with these degrees. They hold on any number of nodes."""
        # Groups and bounds of families ask several times for each of them.
        known, key = self.costs.least, (self.context.gpus.gpus_per_node, self.at, tp, cp, size, ep, etp, is_fused)
        if key not in known:
            known[key] = self._new_least_costs(tp, cp, size, ep, etp, is_fused=is_fused)
        return known[key]

    def _new_least_costs(self, tp: int, cp: int, size: int, ep: int, etp: int, *, is_fused: bool) -> LayerCosts:
        config = changed(self.shapes[tp, cp], micro_batch_size=size, ep=ep, etp=etp, fused_elementwise=is_fused)
        # With ZeRO stage 3 gradients are not accumulated, and beside a pipeline no weights are gathered.
        if MAX_ZERO in self.space.rules.zero_stages:
            config = changed(config, zero_stage=MAX_ZERO, pp=2)
        context = self.context.of_config(config)
        # Graphs change no term but the launches, which are added to the terms.
        if self.plain is not None:
            return self.costs.of(context, self.plain._least_costs(tp, cp, size, ep, etp, is_fused=is_fused))
        if not is_fused:
            return self.costs.of(context, self._least_costs(tp, cp, size, ep, etp), _BY_SHARDING)
        if ep == etp == 1:
            return self.costs.of(context)
        differing = BY_EP if etp == 1 else BY_ETP
        return self.costs.of(context, self._least_costs(tp, cp, size, 1, 1), differing)

    @cached_property
    def _known(self) -> dict[tuple[int, int], list[_Pipeline]]:
        return {}

    def _pipelines(self, tp: int, cp: int) -> list[_Pipeline]:
        """Return all pipelines with a tp and a cp, in the order of the search space."""
        if (tp, cp) not in self._known:
            each = self._each_pipeline if self.plain is None else self._graphed_pipelines
            self._known[tp, cp] = list(each(tp, cp))
        return self._known[tp, cp]

    def _graphed_pipelines(self, tp: int, cp: int) -> Iterator[_Pipeline]:
        """Yield the pipelines of the grid without CUDA graphs that run with the graphs of this one."""
        assert self.plain is not None  # noqa: S101
        base = self.context.config
        for one in self.plain._pipelines(tp, cp):
            recomputed = tuple(again for again in one.recomputed if again in self.recomputed)
            runs = one.config.pp == 1 or self.space.rules.cuda_graphs_piped
            if recomputed and runs and not one.config.splits_backward:
                config = changed(
                    one.config, cuda_graph_impl=base.cuda_graph_impl, cuda_graph_modules=base.cuda_graph_modules
                )
                yield one._replace(order=(self.at, *one.order[1:]), config=config, recomputed=recomputed)

    def _each_pipeline(self, tp: int, cp: int) -> Iterator[_Pipeline]:
        model, gpus, rules, takes = self.context.model, self.context.gpus, self.space.rules, self.space.takes
        shape, base = self.shapes[tp, cp], self.context.config
        is_plain = not (base.recompute_modules or base.overlap_ep_comm or base.offload_modules or base.lora_rank)
        is_plain = is_plain and base.cuda_graph_impl == "none"
        by_backend = rules.by_backend(model)
        if gpus.count % (tp * cp):
            return
        place = list(self.shapes).index((tp, cp))
        for pp in divisors(gpus.count // (tp * cp)):
            dp = gpus.count // (tp * cp) // pp
            if self.batch % dp or not (takes("pp", pp) and takes("dp", dp)):
                continue
            if pp > 1 and model.tied and not rules.ties_piped:
                continue
            # An even split may count the embedding and the LM head as a layer each, hence the 2 (`stage_layers`).
            max_vpp = (model.layers + 2) // pp if pp > 1 else 1
            # Beside the exchange of experts, Megatron-LM runs no pipeline with one stage per rank.
            min_vpp, stage = 2 if base.overlap_ep_comm and pp > 1 else 1, gpus.count // pp
            if not (vpps := [count for count in range(min_vpp, max_vpp + 1) if takes("vpp", count)]):
                continue
            pairs = [(ep, etp) for ep, etp in self.expert_degrees if stage % (ep * etp) == 0]
            for (ep, etp), (after, schedule) in product(pairs, enumerate(rules.pp_schedules)):
                splits_backward = schedule != "1f1b"
                if not takes("pp_schedule", schedule) or (splits_backward and not (pp > 1 and is_plain)):
                    continue
                # No framework recomputes a layer only once if backward passes are split.
                recomputed = tuple(again for again in self.recomputed if not (again and splits_backward))
                vpp = 2 if splits_backward else min_vpp
                config = rules.as_run(changed(shape, ep=ep, etp=etp, pp=pp, dp=dp, vpp=vpp, pp_schedule=schedule))
                stage = rules.open_stage(config)
                # Only settings, other blocks than a decoder's, some tp and models of transformers break rules that the
                # loops do not know.
                divided = tp > 1 and (rules.tp_alone or (rules.tp_divides_experts and model.experts))
                checked = self.space.settings or model.blocks or divided or by_backend
                if checked and rules.broken_degrees(changed(config, zero_stage=stage), model=model):
                    continue
                if not recomputed:
                    continue
                rounds = [
                    self.costs.splits(self, pp, schedule, vpps, whole_rounds=whole_rounds)
                    for whole_rounds in (False, True)
                ]
                for groups in self._shard_groups(config):
                    several, single = (self._zero_stages(config, groups, micro_batches=count) for count in (2, 1))
                    if several or single:
                        order = self.at, place, pp, ep, etp, after, groups
                        yield _Pipeline(order, config, recomputed, groups, (several, single), (rounds[0], rounds[1]))

    def _shard_groups(self, config: ParallelismConfig) -> list[int]:
        """Return the numbers of groups of replicas that each hold all shards: one, or some groups of whole nodes."""
        rules, takes = self.space.rules, self.space.takes
        if config.tp > 1 and rules.tp_alone:
            return [1] if takes("dp_replicate", 1) else []
        if "dp_replicate" in self.space.fixed:
            fixed = self.space.degree("dp_replicate")
            return [fixed] if config.dp % fixed == 0 else []
        # Groups shorten the gathers of each pass. Where passes gather nothing, they gained less than 0.5 % on each of
        # 12 questions with Megatron-LM, and doubled the time of the search.
        if MAX_ZERO not in rules.hybrid_stages or config.pp > 1 or not takes("zero_stage", MAX_ZERO):
            return [1]
        # They save transfers between nodes, so a smaller group than a node would only need more memory.
        each, gpus = self.context.gpus.gpus_per_node, config.tp * config.dp_cp_size
        whole = [count for count in divisors(config.dp) if count > 1 and gpus % (count * each) == 0]
        return [count for count in (1, *whole) if takes("dp_replicate", count)]

    def _zero_stages(self, config: ParallelismConfig, groups: int, *, micro_batches: int) -> tuple[int, ...]:
        """Return the ZeRO stages of a configuration with some groups of shards."""
        model, rules = self.context.model, self.space.rules
        found = rules.zero_stages_of(config, micro_batches=micro_batches, experts=bool(model.experts))
        found = tuple(stage for stage in found if self.space.takes("zero_stage", stage))
        if groups > 1:
            # Without experts, the number of replicas of an expert is not used.
            whole = not model.experts or config.expert_dp_size % groups == 0
            known = rules.hybrid_stages if "dp_replicate" in self.space.fixed else (MAX_ZERO,)
            found = tuple(stage for stage in found if whole and stage in known)
        # Of the settings, only the formats of the optimizer state and its place depend on the ZeRO stage.
        if config.has_narrow_state or config.optimizer_offload_fraction or config.optimizer != "adam":
            found = tuple(
                stage for stage in found if not rules.broken_degrees(changed(config, zero_stage=stage), model=model)
            )
        return found

    def _sizes(self, samples: int) -> list[int]:
        """Return the micro-batch sizes of a replica with some samples."""
        if samples not in self._known_sizes:
            fitting = [size for size in divisors(samples) if self.space.takes("micro_batch_size", size)]
            self._known_sizes[samples] = fitting
        return self._known_sizes[samples]

    @cached_property
    def _known_sizes(self) -> dict[int, list[int]]:
        return {}

    def _some(self, one: _Pipeline) -> bool:
        """Return whether some layers of each stage may be recomputed."""
        return self.space.rules.recompute_num_layers and len(one.recomputed) > 1 and not one.config.splits_backward

    def _of_size(self, one: _Pipeline, micro_batches: int) -> tuple[LayerSplits, tuple[int, ...], int | None]:
        """Return the layer splits, the ZeRO stages and the micro-batch group size of a pipeline with micro-batches."""
        group_size = self._group_size(one.config, micro_batches)
        is_found = group_size != one.config.micro_batch_group_size
        splits = one.splits[is_found or has_whole_rounds(one.config, micro_batches)]
        return splits, one.zero_stages[micro_batches == 1], group_size

    def _group_size(self, config: ParallelismConfig, micro_batches: int) -> int | None:
        """Return the micro-batches of a group of interleaving: None, or the smallest group if pp leaves a rest.

        Larger groups need more memory, and shortened no step of five questions by more than 0.6 %.
        """
        base, pp = self.context.config.micro_batch_group_size, config.pp
        if base is not None or not self.space.rules.micro_batch_groups or config.splits_backward:
            return base
        if pp == 1 or micro_batches <= pp or micro_batches % pp == 0:
            return None
        key = pp, micro_batches
        if key not in self._known_groups:
            self._known_groups[key] = next(
                (
                    size
                    for size in range(pp + 1, micro_batches + 1)
                    if has_whole_rounds(changed(config, micro_batch_group_size=size), micro_batches)
                    and self.space.takes("micro_batch_group_size", size)
                ),
                None,
            )
        return self._known_groups[key]

    @cached_property
    def _known_groups(self) -> dict[tuple[int, int], int | None]:
        return {}

    def _groups(self, one: _Pipeline, tp: int, cp: int, size: int) -> Iterator[ConfigGroup]:
        """Yield the groups of a pipeline and a micro-batch size."""
        micro_batches = self.batch // one.config.dp // size
        splits, zero_stages, group_size = self._of_size(one, micro_batches)
        if not (splits.found and zero_stages):
            return
        placed = one.config
        group = partial(
            ConfigGroup, gpus=self.context.gpus, pp=placed.pp, dp=placed.dp, micro_batches=micro_batches, splits=splits,
            dp_replicate=one.dp_replicate, group_size=group_size, cpu_s=self.cpu_s,
        )  # fmt: skip
        least = self._least_costs(tp, cp, size, placed.ep, placed.etp)
        if alike := tuple(stage for stage in zero_stages if stage < MAX_ZERO):
            config = changed(
                self.shapes[tp, cp], ep=placed.ep, etp=placed.etp, micro_batch_size=size,
                overlap_dp_comm=placed.overlap_dp_comm, fused_elementwise=placed.fused_elementwise,
            )  # fmt: skip
            yield group(
                self.costs.of(self.context.of_config(config), least, _BY_SHARDING), zero_stages=alike,
                recomputed=one.recomputed, some=self._some(one), order=(*one.order, size, 0),
            )  # fmt: skip
        if MAX_ZERO in zero_stages:
            # With ZeRO stage 3 a layer's time includes gathering weights, which depends on dp, on the pipeline and on
            # recomputation (`ParallelismConfig.shape`). So each of these has its own group.
            config = changed(placed, micro_batch_size=size, zero_stage=MAX_ZERO, dp_replicate=one.dp_replicate).shape
            costs = LayerCosts(self.context.of_config(config), least, _BY_SHARDING)
            for again in one.recomputed:
                yield group(
                    costs, zero_stages=(MAX_ZERO,), recomputed=(again,), some=False,
                    order=(*one.order, size, 1 + again),
                )  # fmt: skip


def config_grids(
    context: LayerContext, global_batch_size: int, space: SearchSpace, *, costs: SharedCosts | None = None
) -> list[ConfigGrid]:
    """Return the grids of the search that `hpgo.plan_llm` describes, for a context's model, GPUs and precision.

    `costs` are shared with searches on other numbers of GPUs.
    """
    costs = SharedCosts() if costs is None else costs
    if not costs.spaces:
        costs.spaces = list(_spaces(context, space))
    grids: list[ConfigGrid] = []
    for at, (one, is_graphed) in enumerate(costs.spaces):
        settings = replace(context, config=replace(context.config, **one.settings))
        plain = next((grid for grid in reversed(grids) if grid.plain is None), None) if is_graphed else None
        has_modules = bool(settings.config.recompute_modules) and "recompute" not in space.fixed
        # A hidden exchange of experts may be shorter than one that is not, so their bounds differ.
        is_hidden = settings.config.overlap_ep_comm
        others = (grid for grid in grids if grid.plain is None and not grid.context.config.recompute_modules)
        faster = next((one for one in others if one.context.config.overlap_ep_comm == is_hidden), None)
        grids.append(ConfigGrid(settings, global_batch_size, one, costs, at, plain, faster if has_modules else None))
    return grids


def config_groups(
    context: LayerContext, global_batch_size: int, space: SearchSpace, *, graphs: bool = True
) -> Iterator[ConfigGroup]:
    """Yield all groups of a search space in their order.

    Without `graphs`, groups are left out that are in the space without CUDA graphs, too, where they need less memory.
    """
    for grid in config_grids(context, global_batch_size, space):
        if graphs or grid.plain is None:
            yield from grid.groups()


def _spaces(context: LayerContext, space: SearchSpace) -> Iterator[tuple[SearchSpace, bool]]:
    """Yield parts of a search space, each with one choice of the settings that it leaves open.

    Parts with CUDA graphs, which are marked by True, follow the same part without them.
    """
    config = replace(context.config, **space.settings)
    if config.packed_length is not None and space.rules.packed == "single":
        space = replace(space, fixed={**space.fixed, "micro_batch_size": 1})
    parts, context = [space], replace(context, config=config)
    if space.fixed.get("recompute") == "selective" and not config.recompute_modules:
        sets = _module_sets(context, alone=True)
        parts = [replace(space, fixed={**space.fixed, "recompute_modules": modules}) for modules in sets]
    for part in parts:
        if any(name in space.fixed for name in ("cuda_graph_impl", "cuda_graph_modules")):
            yield part, False
            continue
        has_plain = space.takes("cuda_graph_impl", "none")
        if has_plain:
            yield part, False
        for impl, modules in _cuda_graphs(context.model, space):
            graphed = replace(part, fixed={**part.fixed, "cuda_graph_impl": impl, "cuda_graph_modules": modules})
            try:
                replace(context.config, **graphed.settings)
            except ArgumentError:  # graphs exclude some recomputed modules
                continue
            yield graphed, has_plain
    # Modules of dense layers shortened no step of six questions: recomputing whole layers of a stage did as well.
    if context.model.experts and space.leaves_modules:
        for modules in _module_sets(context, alone=False):
            part = replace(space, fixed={**space.fixed, "recompute": "selective", "recompute_modules": modules})
            parts.append(part)
            yield part, False
    for part in parts if space.hides_exchange(context.model) else ():
        hidden = replace(part, fixed={**part.fixed, "overlap_ep_comm": True})
        try:
            replace(context.config, **hidden.settings)
        except ArgumentError:  # it excludes some recomputed modules
            continue
        yield hidden, False


def _cuda_graphs(model: Transformer, space: SearchSpace) -> list[tuple[CudaGraphImpl, tuple[str, ...]]]:
    """Return the CUDA graphs that the search tries, each with the modules of a layer in it; none means all."""
    if space.rules.by_backend(model):
        return []
    found: list[tuple[CudaGraphImpl, tuple[str, ...]]] = [("local", ()), ("full_iteration", ())]
    if model.experts:
        # Experts receive other numbers of tokens in each pass, so no graph holds a whole layer. All modules of fixed
        # shapes together launch the least, and Megatron-LM documents modules for Transformer Engine's graphs only.
        dense = ("mlp",) if model.dense_layers else ()
        found = [("transformer_engine", ("attn", *dense, "moe_preprocess", "moe_router"))]
    return [one for one in found if one[0] in space.rules.cuda_graphs and space.takes("cuda_graph_impl", one[0])]


def _all_layers(model: Transformer) -> PipelineRankLayers:
    """Return all layers of a model on one rank."""
    counts = Counter(kinds_of(model))
    return PipelineRankLayers({(kind, False): count for kind, count in counts.items()}, {}, embedding=1, head=1)


def min_state_bytes(context: LayerContext, space: SearchSpace) -> float:
    """Return a lower bound on the bytes of parameters, gradients and optimizer state, over all GPUs together.

    GPUs that divide them in any manner hold at least one copy of all.
    """
    context = replace(context, config=replace(context.config, **space.settings))
    whole = _all_layers(context.model)
    stages = {*space.rules.zero_stages, *space.rules.zero_stages_with_pp}
    contexts = [replace(context, config=changed(context.config, zero_stage=stage, etp=1)) for stage in stages]
    return min(sum(stage_memory(one, whole, STATE).values()) for one in contexts) * (1 - SLACK)


def _divides(config: ParallelismConfig, context: LayerContext) -> bool:
    try:
        check_degrees(context.model, config, seq_length=context.seq_length)
    except ArgumentError:
        return False
    return True


def _module_sets(context: LayerContext, *, alone: bool) -> Iterator[tuple[RecomputedModule, ...]]:
    """Yield sets of modules to recompute: each `alone` and the best ones together, or only the best, two and three.

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
    sets: list[tuple[RecomputedModule, ...]] = [(name,) for name in order[: len(order) if alone else 1]]
    sets += [tuple(order[:count]) for count in range(2, (len(order) if alone else 3) + 1)]
    for modules in dict.fromkeys(map(without_parts, sets)):
        try:
            replace(context.config, recompute="selective", recompute_modules=modules)
        except ArgumentError:  # CUDA graphs exclude some modules
            continue
        yield modules


def _fitting(vpps: Iterable[int], schedule: PipelineSchedule, *, whole_rounds: bool) -> Iterator[int]:
    """Yield the numbers of virtual stages per rank that a schedule can run.

    `whole_rounds` tells whether interleaving can run the number of micro-batches (`has_whole_rounds`).
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
