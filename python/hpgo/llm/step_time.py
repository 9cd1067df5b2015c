"""From terms to a step: stages of a pipeline, what they take for a micro-batch, and what follows the last one.

Nothing is simulated here: `PipelineStages.bound_s` is what no order of passes can be quicker than.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING

from hpgo.llm.amounts import Amount, before_ranks, by_rank, maximum, over_ranks
from hpgo.llm.layer_context import VALUE
from hpgo.llm.layer_time import EMBEDDING, HEAD, LayerTime, PassTimes, end_times, layer_times
from hpgo.llm.memory import SAVED, PipelineRankLayers, expert_parameters, parameters, shared_parameters
from hpgo.llm.parallelism import cut

if TYPE_CHECKING:
    from hpgo.llm.layer_context import LayerContext
    from hpgo.model.transformer import Kind, Transformer

OFFLOADING = "cpu_offload"
_UNFUSED_BYTES = 48
"""Read and written besides where Adam is several kernels: each of two moments thrice, the root and the quotient."""


@dataclass(frozen=True, slots=True)
class Stage:
    """Consecutive layers on one group of GPUs, of each replica."""

    layers: range
    forward_s: float
    backward_s: float
    weight_grad_s: float
    """Of that, gradients of weights, which may wait where backward passes are split."""
    sync_s: float
    """Left of summing its gradients, and of gathering its weights, when its last backward pass is done."""
    optimizer_s: float


def transfer(context: LayerContext, *, data: int) -> tuple[float, float]:
    """Between ranks of a pipeline: seconds that values occupy a link, and those until they are there besides."""
    config = context.config
    ring = context.gpus.ring(2, config.model_parallel_size * data)
    share = context.constants.nic_efficiency if ring.across else context.constants.nvlink_efficiency
    together = context.gpus.adapter_bytes_per_s if ring.across else ring.bytes_per_s
    moved = VALUE * context.tokens * context.model.hidden
    # Those that share matrices send a part each, and gather all where they don't share what lies between.
    gathered_s = 0.0 if config.sequence_parallel else context.gather_s(context.tensor_ring, moved)
    return moved / config.tp / (together * share), ring.latency_s + context.constants.collective_overhead_s + gathered_s


@lru_cache(maxsize=64)
def kinds_of(model: Transformer) -> tuple[Kind, ...]:
    """Of every layer, and of those behind them that predict further tokens."""
    return (*map(model.kind, range(model.layers)), *(model.further_kind,) * model.further_tokens)


@dataclass(frozen=True)
class LayerCosts:
    """What all ways of one shape have in common (`ParallelismConfig.shape`): a layer's times, and those of both ends."""

    context: LayerContext
    """Its way is a shape, so that no term can depend on what a shape leaves out."""
    like: LayerCosts | None = None
    """Of a shape that differs in nothing but how many GPUs share experts: without these, all is the same."""

    @classmethod
    def of(cls, context: LayerContext, like: LayerCosts | None = None) -> LayerCosts:
        """Those of the shape of a context's way."""
        return cls(replace(context, config=context.config.shape), like)

    @cached_property
    def kinds(self) -> tuple[Kind, ...]:
        """As `kinds_of`."""
        return kinds_of(self.context.model)

    @cached_property
    def layer(self) -> dict[tuple[Kind, bool], LayerTime]:
        """Of a layer of each kind, whose forward is computed anew or not."""
        found: dict[tuple[Kind, bool], LayerTime] = {}
        for kind in dict.fromkeys(self.kinds):
            if self.like is not None and not kind.experts:
                found |= {(kind, recomputed): self.like.layer[kind, recomputed] for recomputed in (False, True)}
            else:
                found |= zip(((kind, False), (kind, True)), layer_times(self.context.of(kind)), strict=True)
        return found

    @cached_property
    def head(self) -> LayerTime:
        """Of the head and the loss."""
        return end_times(self.context, HEAD) if self.like is None else self.like.head

    @cached_property
    def embedding(self) -> LayerTime:
        """Of the embedding."""
        return end_times(self.context, EMBEDDING) if self.like is None else self.like.embedding

    def offloading(self, kind: Kind) -> LayerTime:
        """Of a layer whose values wait in the host's memory: what passes do not hide of their way there and back."""
        context, passes = self.context.of(kind), self.layer[kind, False]
        moved_s = self.context.once(SAVED[False], kind) / (
            context.gpus.host_bytes_per_s * context.constants.nvlink_efficiency
        )
        hidden = context.constants.comm_overlap_fraction
        return LayerTime(
            {OFFLOADING: max(0.0, moved_s - hidden * passes.total_forward_s)},
            {OFFLOADING: max(0.0, moved_s - hidden * passes.total_backward_s)},
        )

    @cached_property
    def model_s(self) -> tuple[float, float]:
        """Of a micro-batch in the whole model, none of it computed anew, and with all layers computed anew."""
        counts = Counter(self.kinds).items()
        layers_s = (
            sum(count * self.layer[kind, recomputed].total_s for kind, count in counts) for recomputed in (False, True)
        )
        none_s, all_s = (found_s + self.head.total_s + self.embedding.total_s for found_s in layers_s)
        return none_s, all_s

    @cached_property
    def seconds(self) -> Amount:
        """For products with numbers of layers of each kind, of embeddings and of heads: `PassTimes` of each, by row.

        Six columns: none computed anew, and all; an embedding and a head never are.
        """
        import numpy as np  # alone searches need it

        kinds = dict.fromkeys(self.kinds)
        rows = [[self.layer[kind, recomputed] for recomputed in (False, True)] for kind in kinds]
        rows += [[end, end] for end in (self.embedding, self.head)]
        return np.array([[*PassTimes.of([(1, none)]), *PassTimes.of([(1, every)])] for none, every in rows])


def passes_s(first: PassTimes, rank: PassTimes, micro_batches: int, edge_s: float, *, splits: bool) -> Amount:
    """What no order of passes is quicker than, of a rank's `first` stage and of all stages of a `rank`.

    A rank waits for the first micro-batch, computes all, and those before it end the last one; `edge_s` is between
    ranks. Where backward passes are split, gradients of weights may come when those before have long ended theirs of
    inputs.
    """
    all_s = micro_batches * (rank.forward_s + rank.backward_s)
    if not splits:
        return over_ranks(before_ranks(first.forward_s + first.backward_s + 2 * edge_s) + all_s)
    there_s = before_ranks(first.forward_s + edge_s)
    later_s = (
        before_ranks(first.input_grad_s + edge_s) + first.weight_grad_s[..., :1] - micro_batches * rank.weight_grad_s
    )
    return over_ranks(there_s + all_s + maximum(0.0, later_s))


@dataclass(frozen=True)
class PipelineStages:
    """All of a pipeline, for a way that was checked. `ParallelismConfig.stages_of` says which rank has which."""

    context: LayerContext
    micro_batches: int
    shared: LayerCosts | None = None
    """Of the way's shape, where they are at hand."""

    @cached_property
    def rows(self) -> LayerCosts:
        """Of the way's shape."""
        return LayerCosts.of(self.context) if self.shared is None else self.shared

    @cached_property
    def counts(self) -> tuple[int, ...]:
        """Layers of each stage."""
        model, config = self.context.model, self.context.config
        ends = config.first_rank_layers, config.last_rank_layers
        counts = cut(model.layers, config.pp, config.vpp, ends, laid_out=bool(model.experts))
        assert counts is not None, "the way was checked"  # noqa: S101
        return counts

    @cached_property
    def ranges(self) -> tuple[range, ...]:
        """Layers of each stage, by number."""
        found, start = [], 0
        for count in self.counts:
            found.append(range(start, start + count))
            start += count
        return tuple(found)

    def held(self, stage: int) -> tuple[Kind, ...]:
        """Kinds of a stage's layers; the last one has those that predict further tokens."""
        layers = self.ranges[stage]
        return self.rows.kinds[layers.start : None if stage == len(self.counts) - 1 else layers.stop]

    def recomputed(self, stage: int) -> int:
        """How many layers of a stage are computed anew."""
        config = self.context.config
        if config.recompute != "full":
            return 0
        if config.recompute_num_layers is None:
            return len(self.held(stage))
        return min(self.counts[stage], config.recompute_num_layers)

    def parts_of(self, stage: int) -> list[tuple[int, LayerTime]]:
        """What a stage is made of: how many of which layers, the embedding and the head."""
        recomputed = self.recomputed(stage)
        rows, held = self.rows, self.held(stage)
        parts = [(count, rows.layer[kind, True]) for kind, count in Counter(held[:recomputed]).items()]
        parts += [(count, rows.layer[kind, False]) for kind, count in Counter(held[recomputed:]).items()]
        away = held[: self.context.config.cpu_offload_num_layers]
        parts += [(count, rows.offloading(kind)) for kind, count in Counter(away).items()]
        parts += [(1, rows.embedding)] if stage == 0 else []
        parts += [(1, rows.head)] if stage == len(self.counts) - 1 else []
        return parts

    @cached_property
    def transfer(self) -> tuple[float, float]:
        """As `transfer`, of its boundaries."""
        config = self.context.config
        return transfer(self.context, data=config.dp) if config.pp > 1 else (0.0, 0.0)

    @cached_property
    def stages(self) -> tuple[Stage, ...]:
        """In the order of the layers."""
        last = len(self.counts) - 1
        alike: dict[tuple[tuple[Kind, ...], bool, bool], tuple[float, float, float, float, float]] = {}
        found = []
        for at, layers in enumerate(self.ranges):
            what = self.held(at), at == 0, at == last
            if what not in alike:
                alike[what] = self._seconds(at)
            found.append(Stage(layers, *alike[what]))
        return tuple(found)

    def _seconds(self, at: int) -> tuple[float, float, float, float, float]:
        """What a `Stage` has beside its layers."""
        seconds = PassTimes.of(self.parts_of(at))
        context = self.context
        config = context.config
        part = self.part(at, 0)
        mine = (shared_parameters if config.zero_stage >= 1 else parameters)(context, part)
        return (
            *seconds,
            self._sync_s(at, part, seconds),
            context.moved_s(
                (context.constants.optimizer_bytes + (0.0 if config.fused_adam else _UNFUSED_BYTES)) * mine
            ),
        )

    def part(self, at: int, in_flight: int, waiting: int = 0) -> PipelineRankLayers:
        """A stage as memory sees it: `PipelineRankLayers` says what so many micro-batches are, of each of its layers."""
        held, recomputed = self.held(at), self.recomputed(at)
        count = len(held)
        # Of layers whose values wait elsewhere two have room: the one that is computed, and the next.
        away = max(0, min(count, self.context.config.cpu_offload_num_layers) - 2)
        return PipelineRankLayers.of(
            held,
            embedding=at == 0,
            head=at == len(self.counts) - 1,
            in_flight=(0,) * away + (in_flight,) * (count - away),
            recomputed=(True,) * recomputed + (False,) * (count - recomputed),
            waiting=waiting if self.context.config.splits_backward else None,
        )

    def _sync_s(self, at: int, part: PipelineRankLayers, seconds: PassTimes) -> float:
        context = self.context
        config, constants = context.config, context.constants
        left_s = 0.0
        if not config.gathers_weights:
            alone = expert_parameters(context, part)
            rings = [(context.data_ring, parameters(context, part) - alone)] + [(context.expert_ring, alone)] * (
                alone > 0
            )
            if config.zero_stage:
                summed_s = sum(context.gather_s(ring, held * context.gradient_bytes) for ring, held in rings)
                gathered_s = sum(context.gather_s(ring, held * VALUE) for ring, held in rings)
            else:
                summed_s = gathered_s = (
                    sum(context.sum_s(ring, held * context.gradient_bytes) for ring, held in rings) / 2
                )
            if config.overlap_dp_comm:
                # The first layer's gradient is there last, and nothing hides its sum.
                layers = max(1, self.counts[at])
                summed_s = max(summed_s / layers, summed_s - constants.comm_overlap_fraction * seconds.backward_s)
                gathered_s = max(gathered_s / layers, gathered_s - constants.comm_overlap_fraction * seconds.forward_s)
            left_s = summed_s + gathered_s
        if context.holds_words_twice and at in {0, len(self.counts) - 1}:
            words = context.model.vocab * context.model.hidden / config.tp
            left_s += context.sum_s(
                context.gpus.ring(2, config.model_parallel_size * config.dp * (config.pp - 1)),
                words * context.gradient_bytes,
            )
        return left_s

    @cached_property
    def ranks_s(self) -> tuple[float, ...]:
        """What each rank computes for a micro-batch."""
        return tuple(
            sum(stage.forward_s + stage.backward_s for stage in self.of_rank(rank))
            for rank in range(self.context.config.pp)
        )

    def of_rank(self, rank: int) -> list[Stage]:
        """Those that a rank has."""
        return [self.stages[at] for at in self.context.config.stages_of(rank)]

    @property
    def slowest(self) -> int:
        """The rank with the most to compute; of equal ones the first."""
        return max(range(len(self.ranks_s)), key=lambda rank: self.ranks_s[rank])

    @property
    def bound_s(self) -> float:
        """A step takes no less."""
        return self.passes_s + min(stage.sync_s + stage.optimizer_s for stage in self.stages)

    @cached_property
    def passes_s(self) -> float:
        """Until the last pass, at least. It does not fall where more layers are computed anew."""
        ranks = [self.of_rank(rank) for rank in range(self.context.config.pp)]
        first, rank = (
            PassTimes(
                *(by_rank([sum(getattr(one, name) for one in held) for held in some]) for name in PassTimes._fields)
            )
            for some in ([held[:1] for held in ranks], ranks)
        )
        found: float = passes_s(
            first, rank, self.micro_batches, sum(self.transfer), splits=self.context.config.splits_backward
        )
        return float(found)
