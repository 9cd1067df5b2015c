"""Pipeline stages with the times of their passes, of gradient reduction and of the optimizer step.

Nothing is simulated here. `passes_s` is a lower bound that no order of passes can beat, for one configuration or for
arrays of configurations.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import TYPE_CHECKING

from hpgo.llm.activation_offload import KEY as _OFFLOAD
from hpgo.llm.activation_offload import RESIDENT, exposed_s
from hpgo.llm.amounts import Amount, before_ranks, by_rank, maximum, over_ranks
from hpgo.llm.layer_context import VALUE
from hpgo.llm.layer_time import (
    BY_EP,
    EMBEDDING,
    HEAD,
    LAUNCH,
    LAYER,
    LayerTime,
    StagePasses,
    end_times,
    layer_passes,
    layer_times,
)
from hpgo.llm.memory import SAVED, PipelineRankLayers, trained_expert_parameters, trained_parameters
from hpgo.llm.optimizer_time import cpu_step_s, gpu_step_s

if TYPE_CHECKING:
    from hpgo.llm.experts import PassTime
    from hpgo.llm.layer_context import LayerContext
    from hpgo.model.transformer import Kind, Transformer

CPU_STEP = "cpu_optimizer"
LABELS = {key: term.label for key, term in {**LAYER, **HEAD, **EMBEDDING}.items()} | {
    LAUNCH: "kernel launch overhead",
    _OFFLOAD: "activation offloading",
    "grad_reduce": "DP gradient reduction",
    "optimizer_step": "optimizer step",
    CPU_STEP: "optimizer on the CPU",
    "bubble": "pipeline bubble",
}
"""Labels in reports, by the key of each term of a step."""
COMMUNICATION = frozenset(
    ("ep_all_to_all", "tp_comm", "cp_comm", "param_all_gather", _OFFLOAD, "grad_reduce", CPU_STEP)
)
"""Keys of the terms in which a GPU waits for bytes of its group or of the CPU. All others but the bubble compute."""


@dataclass(frozen=True, slots=True)
class LlmStage:
    """Consecutive layers on one group of GPUs of each replica. Pass times are for one micro-batch."""

    layers: range
    forward_s: float
    backward_s: float
    weight_grad_s: float
    """Part of `backward_s` that computes gradients of weights. It can run later if backward passes are split."""
    grad_reduce_s: float
    """Exposed gradient reduction and parameter all-gather after the stage's last backward pass."""
    optimizer_s: float
    """Optimizer step, with the time on the CPU."""
    cpu_optimizer_s: float = 0.0
    """Part of `optimizer_s` in which the GPU waits for transfers of the optimizer's state, or for the CPU."""


def transfer(context: LayerContext, *, dp: int) -> tuple[float, float]:
    """Return the seconds that activations occupy a link between pipeline ranks, and the additional latency."""
    config = context.config
    ring = context.gpus.ring(2, config.model_parallel_size * dp)
    share = context.constants.nic_efficiency if ring.across else context.constants.nvlink_efficiency
    # Each tensor-parallel GPU sends to its peer through its own NIC, so the ring's shared rate does not apply.
    together = context.gpus.adapter_bytes_per_s if ring.across else ring.bytes_per_s
    moved = VALUE * context.tokens * context.model.hidden
    # Tensor-parallel GPUs hold the same activations and send 1/tp of them each. The receivers gather the rest, unless
    # sequence parallelism needs only that part.
    gathered_s = 0.0 if config.sequence_parallel else context.all_gather_s(context.tensor_ring, moved)
    latency_s = ring.latency_s + context.constants.collective_overhead_s + gathered_s
    return moved / config.tp / (together * share), latency_s


@lru_cache(maxsize=64)
def kinds_of(model: Transformer) -> tuple[Kind, ...]:
    """Return the kind of every layer, and then of the layers for multi-token prediction."""
    return (*map(model.kind, range(model.layers)), *(model.further_kind,) * model.further_tokens)


@dataclass(frozen=True)
class LayerCosts:
    """Times of a layer of each kind, of the embedding and of the LM head, which all configurations of a shape share."""

    context: LayerContext
    """Inputs of the terms. The configuration is a shape (`ParallelismConfig.shape`), so no term can depend on other
    fields."""
    like: LayerCosts | None = None
    """Costs of a shape that differs in few terms. All others are taken from there."""
    differing: frozenset[str] = frozenset()
    """Keys of the terms that differ from those of `like`."""

    @classmethod
    def from_context(cls, context: LayerContext) -> LayerCosts:
        """Return the costs of the shape of a context's configuration."""
        return cls(replace(context, config=context.config.shape))

    @cached_property
    def kinds(self) -> tuple[Kind, ...]:
        """Kinds of all layers, in order."""
        return kinds_of(self.context.model)

    @cached_property
    def counts(self) -> dict[Kind, int]:
        """Number of layers of each kind."""
        return Counter(self.kinds)

    @cached_property
    def passes_by_kind(self) -> dict[Kind, dict[str, PassTime]]:
        """Terms of a layer by kind."""
        found = {}
        for kind in self.counts:
            known = {} if self.like is None else self.like.passes_by_kind[kind]
            known = {key: one for key, one in known.items() if key not in self.differing}
            found[kind] = layer_passes(self.context.of(kind), known)
        return found

    @cached_property
    def layer(self) -> dict[tuple[Kind, bool], LayerTime]:
        """Times of a layer by kind, and by whether its forward pass is recomputed."""
        found: dict[tuple[Kind, bool], LayerTime] = {}
        for kind, passes in self.passes_by_kind.items():
            found |= zip(((kind, False), (kind, True)), layer_times(self.context.of(kind), passes), strict=True)
        return found

    @cached_property
    def least_s(self) -> float:
        """Lower bound on `model_s` of all shapes with other `ep`, `etp` and CUDA graphs.

        Terms that only grow with `etp` are counted as they are here.
        """
        found_s = self.head.total_s + self.embedding.total_s
        for kind, count in self.counts.items():
            one = self.layer[kind, False]
            for key in one.forward_s:
                # Longer passes hide more transfers to the CPU.
                if key not in {LAUNCH, _OFFLOAD} and not (kind.experts and key in BY_EP):
                    found_s += count * (one.forward_s[key] + one.backward_s[key])
        return found_s

    @cached_property
    def head(self) -> LayerTime:
        """Times of the LM head and the loss, once more for each layer for multi-token prediction."""
        if self.like is not None:
            return self.like.head
        # Megatron-LM computes the losses of all tokens on the last stage, wherever the layers are.
        return end_times(self.context, HEAD).times(1 + self.context.model.further_tokens)

    @cached_property
    def embedding(self) -> LayerTime:
        """Times of the embedding."""
        # A tower's time depends on sharding, which is one of the fields in which shapes differ from `like`.
        known = None if self.context.tower is not None or self.like is None else self.like.embedding
        return end_times(self.context, EMBEDDING) if known is None else known

    def offloading(self, kind: Kind) -> LayerTime:
        """Return the exposed transfers of a layer whose activations wait in CPU memory."""
        # Activations move to the CPU during the forward pass and back during the backward pass, which hide part of it.
        context, passes = self.context, self.layer[kind, False]
        moved = context.once(SAVED[False], kind)
        return LayerTime(
            {_OFFLOAD: exposed_s(context, moved, passes.total_forward_s)},
            {_OFFLOAD: exposed_s(context, moved, passes.total_backward_s)},
        )

    @cached_property
    def model_s(self) -> tuple[float, float]:
        """Seconds of a micro-batch in the whole model, without recomputation and with all layers recomputed."""
        counts, ends_s = self.counts.items(), self.head.total_s + self.embedding.total_s
        none_s, all_s = (
            sum(count * self.layer[kind, again].total_s for kind, count in counts) for again in (False, True)
        )
        return none_s + ends_s, all_s + ends_s

    @cached_property
    def passes(self) -> Amount:
        """`StagePasses` of each kind of layer, of the embedding and of the LM head: a row each, to multiply by counts.

        Six columns: without recomputation and with it. The embedding and the LM head are never recomputed.
        """
        import numpy as np

        rows = [[self.layer[kind, again] for again in (False, True)] for kind in self.counts]
        rows += [[end, end] for end in (self.embedding, self.head)]
        return np.array([[part for time in row for part in StagePasses.from_layers([(1, time)])] for row in rows])


def passes_s(first: StagePasses, rank: StagePasses, micro_batches: int, edge_s: float, *, splits: bool) -> Amount:
    """Return a lower bound on the seconds until the last pass, given each rank's first stage and all its stages.

    A rank waits for the first micro-batch, computes all micro-batches, and the ranks before it finish the last one.
    `edge_s` is a transfer between ranks. If backward passes are split, gradients of weights can run after the ranks
    before have finished their gradients of inputs.
    """
    all_s = micro_batches * (rank.forward_s + rank.backward_s)
    # Nothing can start on a rank before one micro-batch has passed all ranks before it, nor end before the last one
    # has passed back. In between the rank is at best never idle.
    if not splits:
        return over_ranks(before_ranks(first.forward_s + first.backward_s + 2 * edge_s) + all_s)
    there_s = before_ranks(first.forward_s + edge_s)
    later_s = before_ranks(first.input_grad_s + edge_s) + first.weight_grad_s[..., :1]
    return over_ranks(there_s + all_s + maximum(0.0, later_s - micro_batches * rank.weight_grad_s))


@dataclass(frozen=True)
class PipelineStages:
    """All stages of a checked configuration. `ParallelismConfig.stages_of` maps ranks to stages."""

    context: LayerContext
    micro_batches: int
    shared: LayerCosts | None = None
    """Costs of the configuration's shape, if known."""

    @cached_property
    def costs(self) -> LayerCosts:
        """Costs of the configuration's shape."""
        return LayerCosts.from_context(self.context) if self.shared is None else self.shared

    @cached_property
    def counts(self) -> tuple[int, ...]:
        """Number of layers of each stage. Layers for multi-token prediction are not counted."""
        counts = self.context.config.stage_counts(self.context.model)
        assert counts is not None, "the configuration was checked"  # noqa: S101
        return counts

    @cached_property
    def ranges(self) -> tuple[range, ...]:
        """Layers of each stage, by number."""
        return tuple(range(end - count, end) for end, count in zip(accumulate(self.counts), self.counts, strict=True))

    def held(self, stage: int) -> tuple[Kind, ...]:
        """Return the kinds of a stage's layers, of which those for multi-token prediction are the last."""
        return self._held[stage]

    @cached_property
    def _held(self) -> tuple[tuple[Kind, ...], ...]:
        # The search asks for each stage several times.
        kinds, layers, last = self.costs.kinds, self.context.model.layers, self.context.config.further_stage
        return tuple(
            kinds[one.start : one.stop] + (kinds[layers:] if at == last else ()) for at, one in enumerate(self.ranges)
        )

    def recomputed(self, stage: int) -> int:
        """Return the number of layers of a stage that are recomputed."""
        config = self.context.config
        if config.recompute != "full":
            return 0
        if config.recompute_every is not None:
            return len(self.held(stage)) // config.recompute_every
        if config.recompute_num_layers is None:
            return len(self.held(stage))
        return min(self.counts[stage], config.recompute_num_layers)

    def parts_of(self, stage: int) -> list[tuple[int, LayerTime]]:
        """Return counts and times of a stage's layers, of its offloading, and of the embedding and the LM head."""
        # The first layers of a stage are recomputed: Megatron-LM's `--recompute-method block` does the same.
        again, costs, held = self.recomputed(stage), self.costs, self.held(stage)
        parts = [(count, costs.layer[kind, True]) for kind, count in Counter(held[:again]).items()]
        parts += [(count, costs.layer[kind, False]) for kind, count in Counter(held[again:]).items()]
        away = held[: self.context.config.cpu_offload_num_layers]
        parts += [(count, costs.offloading(kind)) for kind, count in Counter(away).items()]
        parts += [(1, costs.embedding)] if stage == 0 else []
        return parts + ([(1, costs.head)] if stage == len(self.counts) - 1 else [])

    @cached_property
    def transfer(self) -> tuple[float, float]:
        """Transfer between ranks, as the function `transfer` returns it; zero without a pipeline."""
        config = self.context.config
        return transfer(self.context, dp=config.dp) if config.pp > 1 else (0.0, 0.0)

    @cached_property
    def stages(self) -> tuple[LlmStage, ...]:
        """All stages, in the order of their layers."""
        last = len(self.counts) - 1
        # There may be hundreds of stages, but few different ones. Equal stages are computed once.
        known: dict[object, tuple[float, ...]] = {}
        found = []
        for at, layers in enumerate(self.ranges):
            what = self.held(at), at == 0, at == last
            if what not in known:
                known[what] = self._seconds(at)
            found.append(LlmStage(layers, *known[what]))
        return tuple(found)

    @cached_property
    def rank_optimizer_s(self) -> tuple[float, ...]:
        """Seconds of the optimizer step by stage. A rank updates all of its stages at once, after the last of them."""
        config, found = self.context.config, [0.0] * len(self.stages)
        for rank in range(config.pp):
            mine = config.stages_of(rank)
            total_s = sum(self.stages[at].optimizer_s for at in mine)
            for at in mine:
                found[at] = total_s
        return tuple(found)

    def _seconds(self, at: int) -> tuple[float, ...]:
        """Return the times of an `LlmStage`, in the order of its fields."""
        context, passes = self.context, StagePasses.from_layers(self.parts_of(at))
        held = self.rank_layers(at, 0)
        cpu_s = cpu_step_s(context, held, passes, self.micro_batches)
        return *passes, self._sync_s(at, held, passes), gpu_step_s(context, held) + cpu_s, cpu_s

    def rank_layers(self, at: int, in_flight: int, waiting: int = 0) -> PipelineRankLayers:
        """Return a stage for the memory columns, with `in_flight` micro-batches in flight in each of its layers.

        `waiting` is the number of them that wait for gradients of weights, if backward passes are split.
        """
        held, again = self.held(at), self.recomputed(at)
        count = len(held)
        away = max(0, min(count, self.context.config.cpu_offload_num_layers) - RESIDENT)
        return PipelineRankLayers.from_layers(
            held,
            embedding=at == 0,
            head=at == len(self.counts) - 1,
            in_flight=(0,) * away + (in_flight,) * (count - away),
            recomputed=(True,) * again + (False,) * (count - again),
            waiting=waiting if self.context.config.splits_backward else None,
            embedded_in_flight=in_flight if at == 0 else 0,
        )

    def _sync_s(self, at: int, held: PipelineRankLayers, passes: StagePasses) -> float:
        """Return the exposed seconds of gradient reduction and parameter all-gather after the last backward pass."""
        context, config = self.context, self.context.config
        left_s = 0.0
        if not config.gathers_weights:
            alone, others = trained_expert_parameters(context, held), trained_parameters(context, held)
            parts = [(context.shard_ring, context.group_ring, context.data_ring, others - alone)]
            if alone:
                parts.append((context.expert_shard_ring, context.expert_group_ring, context.expert_ring, alone))
            each, reduced_s, gathered_s = context.gradient_bytes, 0.0, 0.0
            # With ZeRO: a reduce-scatter of gradients before, and an all-gather of 16-bit weights after the optimizer
            # step. With hybrid sharding, the shards are also summed over its groups: of one bucket, while the next one
            # is reduced inside a group. Otherwise one all-reduce.
            for shards, groups, everyone, count in parts:
                if config.zero_stage:
                    gathered_s += context.all_gather_s(shards, count * VALUE)
                # Muon's replicas need whole gradients of their matrices, so all of them are summed everywhere
                # (Megatron-LM, `LayerWiseDistributedOptimizer`).
                if config.zero_stage and config.optimizer != "muon":
                    inside_s = context.all_gather_s(shards, count * each)
                    over_s = context.all_reduce_s(groups, count * each / shards.ranks)
                    reduced_s += max(inside_s, over_s) if config.overlap_dp_comm else inside_s + over_s
                else:
                    reduced_s += context.all_reduce_s(everyone, count * each)
            reduced_s *= context.constants.grad_reduce_time_factor
            gathered_s *= context.constants.grad_reduce_time_factor
            if config.overlap_dp_comm:
                # The gradient of the first layer is computed last, so nothing hides its reduction. The first
                # layer waits for its weights. Passes of one micro-batch hide each, the last and the first of a step.
                layers, hidden = max(1, self.counts[at]), context.constants.comm_overlap_fraction
                reduced_s = max(reduced_s / layers, reduced_s - hidden * passes.backward_s)
                gathered_s = max(gathered_s / layers, gathered_s - hidden * passes.forward_s)
            left_s = reduced_s + gathered_s
        # Both copies of a tied embedding need the sum of their gradients. Nothing hides this all-reduce, because both
        # ranks have to finish first.
        if context.holds_embedding_twice and at in self._copies and not config.lora_rank:
            words = context.model.vocab * context.model.hidden / config.tp
            ring = context.gpus.ring(2, config.model_parallel_size * config.dp * (config.pp - 1))
            summed_s = context.all_reduce_s(ring, words * context.gradient_bytes)
            left_s += summed_s * context.constants.grad_reduce_time_factor
        return left_s

    @property
    def _copies(self) -> set[int]:
        """Stages that hold a copy of the embedding, where there are several."""
        model = self.context.model
        last = {len(self.counts) - 1} if model.tied else set()
        return {0} | last | ({self.context.config.further_stage} if model.further_tokens else set())

    @cached_property
    def ranks_s(self) -> tuple[float, ...]:
        """Forward and backward seconds of one micro-batch on each rank."""
        ranks = map(self.of_rank, range(self.context.config.pp))
        return tuple(sum(stage.forward_s + stage.backward_s for stage in stages) for stages in ranks)

    def of_rank(self, rank: int) -> list[LlmStage]:
        """Return the stages of a rank."""
        return [self.stages[at] for at in self.context.config.stages_of(rank)]

    @property
    def slowest(self) -> int:
        """The rank with the most to compute; the first of equal ones."""
        return max(range(len(self.ranks_s)), key=lambda rank: self.ranks_s[rank])

    @property
    def bound_s(self) -> float:
        """Lower bound on the step time."""
        updates_s = zip(self.stages, self.rank_optimizer_s, strict=True)
        return self.passes_s + min(stage.grad_reduce_s + update_s for stage, update_s in updates_s)

    @cached_property
    def passes_s(self) -> float:
        """Lower bound on the seconds until the last pass. More recomputed layers never lower it."""
        ranks = [self.of_rank(rank) for rank in range(self.context.config.pp)]
        first, rank = (
            StagePasses(
                *(by_rank([sum(getattr(one, name) for one in held) for held in some]) for name in StagePasses._fields)
            )
            for some in ([held[:1] for held in ranks], ranks)
        )
        edge_s, splits = sum(self.transfer), self.context.config.splits_backward
        return float(passes_s(first, rank, self.micro_batches, edge_s, splits=splits))
