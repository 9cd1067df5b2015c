"""Memory columns: bytes that one GPU of a pipeline holds.

A column is a function of a `LayerContext` and of `PipelineRankLayers`, and a row of `COLUMNS`, which gives it a key
and a label. The same functions compute one GPU, and arrays over all ranks of thousands of layer splits.

Activations follow Korthikanti et al., arXiv 2205.05198, section 4, grouped by the degrees that divide them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial, wraps
from typing import TYPE_CHECKING, NamedTuple

from hpgo.llm.activation_offload import RESIDENT, offloaded_bytes
from hpgo.llm.adapters import base_weight_bytes, saved_by_adapters, unsaved_parts
from hpgo.llm.amounts import Amount, maximum, minimum
from hpgo.llm.cuda_graphs import graphs_layer
from hpgo.llm.experts import expert_weights, saved_by_experts
from hpgo.llm.layer_context import NARROW, VALUE
from hpgo.llm.layer_time import base_weights, layer_weights, trained_experts, trained_weights
from hpgo.llm.optimizer_state import (
    ADAM_MOMENTS,
    is_unfused,
    main_weight_bytes,
    moment_bytes,
    offloaded_weight_bytes,
    shard_bytes,
    widened_bytes,
)
from hpgo.llm.parallelism import MAX_ZERO
from hpgo.llm.recompute import dropped_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from hpgo.llm.layer_context import LayerContext
    from hpgo.llm.parallelism import CrossEntropyImpl
    from hpgo.model.transformer import Kind

_UNFUSED = 8
"""Bytes per parameter that the optimizer step allocates without fused Adam: the root of a moment and the denominator.
"""
_FLAT, _BUCKET = 4, 1e9
"""Bytes per parameter of flattened 16-bit gradients, and bytes of the reduction bucket. With ZeRO these are two copies
of the shard in 16 bits, one while it is reduced and one for the step; without it, one copy in 32 bits."""
_SAVED_LOGITS, _SHARDED_LOGITS = 14, 16
"""Bytes per logit at a loss of several kernels: the logit in 16 and 32 bits, the softmax, and the gradient in both
formats; or for DTensor's loss over a sharded vocabulary four values in 32 bits as its backward pass ends: the
log-softmax, its exponential, the gradient of the target words, and the sum of both."""
_FUSED_LOGITS: Mapping[CrossEntropyImpl, int] = {"native": 6, "te": 2, "compiled": 4}
"""Bytes per logit at a fused loss.

- `native`: the logit in 16 bits with its copy in 32 bits, which becomes the softmax; later the softmax with the
  gradient in 16 bits (Megatron-LM 0.17 to 0.19, `megatron/core/fusions/fused_cross_entropy.py`).
- `te`: the logit in 16 bits, over which the gradient is written (Transformer Engine up to 2.17,
  `transformer_engine/pytorch/triton/cross_entropy.py`). From 2.18 on, the gradient is beside it in 32 bits, and both
  need 6, as `native` does.
- `compiled`: the logit and its gradient in 16 bits.
"""

LayerAmounts = Mapping[tuple["Kind", bool], Amount]
"""An amount for the layers of each kind, and of each kind whose forward pass is recomputed (True)."""


@dataclass(frozen=True, slots=True)
class PipelineRankLayers:
    """Layers of one GPU of a pipeline; or of the GPUs of many configurations, if amounts are arrays."""

    layers: LayerAmounts
    """Number of layers of each kind."""
    in_flight: LayerAmounts
    """Maximum number of micro-batches between the forward and the backward pass, summed over layers."""
    embedding: Amount
    """Whether the GPU holds the embedding, as a number."""
    head: Amount
    """Whether the GPU holds the LM head, as a number."""
    waiting: LayerAmounts | None = None
    """Number of micro-batches that keep recomputed activations until gradients of weights are computed, summed over
    layers. None means that backward passes are not split."""
    embedded_in_flight: Amount = 0
    """Maximum number of micro-batches between both passes of the embedding and of a tower in front of it."""
    accumulating: PipelineRankLayers | None = None
    """The part whose whole gradients exist at a time (`ParallelismConfig.reduces_by_stage`). None means all layers."""

    @classmethod
    def from_layers(
        cls,
        kinds: Sequence[Kind],
        *,
        embedding: bool,
        head: bool,
        in_flight: Sequence[int],
        recomputed: Sequence[bool],
        waiting: int | None = None,
        embedded_in_flight: int = 0,
    ) -> PipelineRankLayers:
        """Return the record of a stage, given its layers one by one. `waiting` applies to each of them."""
        flying: Counter[tuple[Kind, bool]] = Counter()
        for kind, again, count in zip(kinds, recomputed, in_flight, strict=True):
            flying[kind, again] += count
        layers = Counter(zip(kinds, recomputed, strict=True))
        waits = None if waiting is None else {key: count * waiting for key, count in layers.items()}
        return cls(layers, flying, embedding, head, waits, embedded_in_flight)

    @classmethod
    def from_stages(cls, stages: Sequence[PipelineRankLayers]) -> PipelineRankLayers:
        """Return the record of a rank, given the records of its stages."""

        def added(held: Iterable[LayerAmounts]) -> LayerAmounts:
            found: dict[tuple[Kind, bool], Amount] = {}
            for one in held:
                for key, amount in one.items():
                    found[key] = found.get(key, 0) + amount
            return found

        return cls(
            added(stage.layers for stage in stages),
            added(stage.in_flight for stage in stages),
            any(stage.embedding for stage in stages),
            any(stage.head for stage in stages),
            None if stages[0].waiting is None else added(stage.waiting or {} for stage in stages),
            sum(stage.embedded_in_flight for stage in stages),
        )


def _once(
    term: Callable[[LayerContext, PipelineRankLayers], Amount],
) -> Callable[[LayerContext, PipelineRankLayers], Amount]:
    """Return a term of a GPU's memory that computes the amount of each context and rank only once."""

    @wraps(term)
    def amount(context: LayerContext, held: PipelineRankLayers) -> Amount:
        return context.once_for_rank(term, held)

    return amount


def _largest(layers: LayerAmounts, each: Callable[[Kind], float], *, recomputed: bool | None = None) -> Amount:
    """Return the maximum of `each` over the layers that a GPU holds, or over those with or without recomputation."""
    # Multiplying by the comparison instead of branching makes this work on arrays of counts, too.
    found: Amount = 0.0
    for (kind, again), count in layers.items():
        if recomputed in {None, again}:
            found = maximum(found, (count > 0) * each(kind))
    return found


@_once
def parameters(context: LayerContext, held: PipelineRankLayers) -> Amount:
    """Return the parameters of a GPU before ZeRO shards them."""
    model = context.model
    words = model.vocab * model.hidden / context.config.tp
    embedded = context.embedding_rows * model.hidden
    found = sum(count * context.once(layer_weights, kind) for (kind, _), count in held.layers.items())
    # All but the rows of the vocabulary is copied to each tensor-parallel GPU. A tower is before the first layer.
    beside = model.embedding_parameters - model.embedding_rows * model.hidden
    beside += 0 if model.tower is None else model.tower.parameters
    found += held.embedding * (embedded + beside)
    own = 0 if model.tied else model.vocab * model.hidden
    found += held.head * (model.head_parameters - own + own / context.config.tp)
    if not context.holds_embedding_twice:
        return found
    # A tied LM head is a copy of the embedding, which multi-token prediction on the same stage reads, too.
    copy = held.head if model.tied else 0.0
    if model.further_tokens:
        further: Amount = sum((count for (kind, _), count in held.layers.items() if kind.further), 0.0)
        copy = maximum(copy, (further > 0) * 1.0)
    return found + copy * words


@_once
def expert_parameters(context: LayerContext, held: PipelineRankLayers) -> Amount:
    """Return the part of `parameters` that belongs to experts."""
    return _of_layers(expert_weights, context, held)


def trained_parameters(context: LayerContext, held: PipelineRankLayers) -> Amount:
    """Return the part of `parameters` that is trained: all, or those of adapters."""
    if context.config.lora_rank:
        return _of_layers(trained_weights, context, held)
    found, tower = parameters(context, held), context.model.tower
    return found - held.embedding * tower.parameters if tower is not None and tower.frozen else found


def trained_expert_parameters(context: LayerContext, held: PipelineRankLayers) -> Amount:
    """Return the part of `trained_parameters` that belongs to experts."""
    return _of_layers(trained_experts, context, held)


def _of_layers(each: Callable[[LayerContext], float], context: LayerContext, held: PipelineRankLayers) -> Amount:
    return sum((count * context.once(each, kind) for (kind, _), count in held.layers.items()), 0.0)


def _sharded(context: LayerContext, whole: Amount, alone: Amount) -> Amount:
    """Return a GPU's shard of parameters, of which those `alone` are of experts, which have fewer replicas."""
    return (whole - alone) / context.config.shard_size + alone / context.config.expert_shard_size


def sharded_parameters(context: LayerContext, held: PipelineRankLayers) -> Amount:
    """Return a GPU's shard of `parameters`."""
    return _sharded(context, parameters(context, held), expert_parameters(context, held))


def sharded_trained(context: LayerContext, held: PipelineRankLayers) -> Amount:
    """Return a GPU's shard of `trained_parameters`."""
    return _sharded(context, trained_parameters(context, held), trained_expert_parameters(context, held))


@_once
def updated_parameters(context: LayerContext, held: PipelineRankLayers) -> Amount:
    """Return the parameters that a GPU's optimizer updates: of all that it trains, the shard with ZeRO."""
    return (sharded_trained if context.config.zero_stage >= 1 else trained_parameters)(context, held)


def _narrow_layer_bytes(context: LayerContext) -> float:
    """Return the bytes that a layer's base weights in 4 or 8 bits save on 16 bits."""
    # In 4 bits, experts stay in 16: bitsandbytes converts single matrices, and models join all experts of a layer.
    kept = expert_weights(context) if context.config.base_weights_dtype == "nf4" else 0.0
    return (VALUE - base_weight_bytes(context.config)) * (base_weights(context) - kept)


def _stored_bytes(context: LayerContext) -> float:
    """Return the bytes of a layer's weights on one GPU, with adapters, as frozen ones are stored."""
    return VALUE * layer_weights(context) - _narrow_layer_bytes(context)


def _narrow_bytes(context: LayerContext, held: PipelineRankLayers) -> Amount:
    """Return the bytes that base weights in 4 or 8 bits save on 16 bits, before ZeRO shards them."""
    return _of_layers(_narrow_layer_bytes, context, held)


def weights(context: LayerContext, held: PipelineRankLayers) -> Amount:
    """Return the bytes of weights in 16 bits; with ZeRO stage 3 of the shard, and of gathered layers.

    Without a pipeline two layers are gathered at a time. With one, weights stay gathered for the whole step.
    """
    config, narrow = context.config, _narrow_bytes(context, held)
    whole = parameters(context, held) * VALUE - narrow
    if config.zero_stage < MAX_ZERO:
        return whole
    # A single replica computes with its shard, which is everything, and gathers nothing.
    gathered = whole if config.shard_size > 1 or config.offload_params else 0.0
    if config.gathers_weights or config.offload_params:
        # Two at a time: the layer that is computed, and the next one, which is prefetched.
        # Weights are gathered as they are stored. Kernels convert one frozen matrix of 4 bits at a time (torchao,
        # `NF4Tensor.fsdp_pre_all_gather` and `LinearNF4`).
        largest = max(context.once(_stored_bytes, kind) for kind in {context.kind, *(kind for kind, _ in held.layers)})
        words = context.embedding_rows * context.model.hidden * VALUE
        gathered = minimum(gathered, 2 * max(largest, words))
    if config.offload_params:
        return gathered
    # A shard in 32 bits also serves as the optimizer's copy (`optimizer`), which the CPU has if it updates the weights.
    moved = config.optimizer_offload_fraction
    each = (1 - moved) * shard_bytes(config) + moved * VALUE
    if not (config.lora_rank or (context.model.tower is not None and context.model.tower.frozen)):
        return each * sharded_parameters(context, held) + gathered
    # FSDP keeps frozen weights in 32 bits, too. DeepSpeed has a copy in 32 bits of trained ones only.
    frozen = shard_bytes(config) if config.dtensor and config.base_weights_dtype == "bf16" else VALUE
    trained = sharded_trained(context, held)
    return (
        frozen * (sharded_parameters(context, held) - trained) - narrow / config.shard_size + each * trained + gathered
    )


def gradients(context: LayerContext, held: PipelineRankLayers) -> Amount:
    """Return the bytes of accumulated gradients. ZeRO stage 2 shards them, beside a pipeline after a stage's passes."""
    if (part := held.accumulating) is not None:
        # All other stages have reduced theirs, or have made none. Their shards count as if all had.
        others = sharded_trained(context, held) - sharded_trained(context, part)
        return _gradient_bytes(context) * (trained_parameters(context, part) + others)
    # Beside a pipeline, gradients are reduced once, after the last micro-batch. Until then each GPU accumulates all.
    sharded = context.config.zero_stage >= 2 and context.config.pp == 1
    count = (sharded_trained if sharded else trained_parameters)(context, held)
    # Shards of gradients move to the CPU where it updates the weights. Whole gradients stay, to be reduced once.
    count *= 1 - context.config.optimizer_offload_fraction if sharded else 1
    return count * _gradient_bytes(context)


def _gradient_bytes(context: LayerContext) -> int:
    """Return the bytes of an accumulated gradient per parameter."""
    return VALUE if context.accumulates_in_16_bits else 2 * VALUE


def optimizer(context: LayerContext, held: PipelineRankLayers) -> Amount:
    """Return the bytes of the optimizer's state and of its copy of the weights, unless `weights` counts the copy."""
    config = context.config
    kept = 1 - config.optimizer_offload_fraction
    found = kept * main_weight_bytes(config) * updated_parameters(context, held)
    return found if config.is_paged else found + kept * _moments(context, held)


def _moments(context: LayerContext, held: PipelineRankLayers) -> Amount:
    """Return the bytes of the optimizer's state without a copy of the weights, on the GPU and the CPU together."""
    config, updated = context.config, updated_parameters(context, held)
    if config.optimizer != "muon":
        return moment_bytes(config) * updated
    # Muon's momentum is one value for each weight of a matrix. Adam updates embeddings and the LM head.
    matrices, alone = _of_layers(trained_weights, context, held), trained_expert_parameters(context, held)
    matrices = _sharded(context, matrices, alone) if config.zero_stage >= 1 else matrices
    return moment_bytes(config) * matrices + ADAM_MOMENTS * (updated - matrices)


def cpu_bytes(context: LayerContext, held: PipelineRankLayers) -> Amount:
    """Return the bytes of CPU memory that one GPU's optimizer state and weights take.

    Offloaded state has a copy of the weights and of the gradients beside the moments. Pages of state count here, too.
    """
    config = context.config
    if config.is_paged:
        return _moments(context, held)
    if not config.optimizer_offload_fraction:
        return 0.0
    copies = 2 * offloaded_weight_bytes(config) * updated_parameters(context, held)
    found = config.optimizer_offload_fraction * (_moments(context, held) + copies)
    # FSDP's shards in 32 bits are the weights that are updated. DeepSpeed has shards in 16 bits besides.
    return found + VALUE * sharded_parameters(context, held) * (config.offload_params and not config.dtensor)


def cpu_activation_bytes(context: LayerContext, held: PipelineRankLayers, away: Iterable[Kind]) -> Amount:
    """Return the bytes of CPU memory that one GPU's offloaded activations take.

    `away` are the layers that are offloaded as a whole, which excludes a pipeline, so one micro-batch is in flight. The
    layers whose activations are on the GPU all the same count, too: their copies are deleted only after the transfer.
    """
    modules = sum((count * context.once(offloaded_bytes, kind) for (kind, _), count in held.in_flight.items()), 0.0)
    return modules + sum(context.once(SAVED[False], kind) for kind in away)


def optimizer_workspace(context: LayerContext, held: PipelineRankLayers) -> Amount:
    """Return the bytes that the optimizer step allocates, beyond what activations and logits have released by then."""
    # Activations and logits peak during passes and the workspace after them, so they share memory: only the excess
    # counts. Their columns stay as they are, and the sum of all columns is the maximum of both moments.
    allocated = _workspace(context, held)
    return 0.0 if allocated is None else maximum(0.0, allocated - _released(context, held))


def allocator_cached_bytes(context: LayerContext, held: PipelineRankLayers) -> Amount:
    """Return the bytes that PyTorch's allocator caches during the optimizer step.

    Activations leave many small free blocks, and the optimizer's tensors are large, so new blocks are allocated. The
    allocator releases cached blocks before memory runs out, so these bytes do not decide whether a configuration fits.
    `nvidia-smi` counts them.
    """
    allocated = _workspace(context, held)
    return 0.0 if allocated is None else minimum(allocated, _released(context, held))


def _released(context: LayerContext, held: PipelineRankLayers) -> Amount:
    """Return the bytes of passes that the optimizer step can use: those outside the memory pools of CUDA graphs."""
    impl = context.config.cuda_graph_impl
    # A graph replays kernels with fixed addresses, so its pool stays allocated between steps.
    found: Amount = 0.0 if impl == "full_iteration" else logits(context, held)
    return found + activations(context, held) if impl == "none" else found


def _workspace(context: LayerContext, held: PipelineRankLayers) -> Amount | None:
    """Return all bytes that the optimizer step allocates; None if it allocates nothing."""
    config, each = context.config, _UNFUSED if is_unfused(context.config) else 0
    flat = config.flatten_gradients and config.zero_stage < MAX_ZERO
    each += widened_bytes(context) + (_FLAT if flat and context.reduces_in_16_bits else 0)
    if each == 0:
        return None
    bucket = minimum(_BUCKET, VALUE * trained_parameters(context, held)) if flat and config.zero_stage else 0.0
    return (1 - config.optimizer_offload_fraction) * each * updated_parameters(context, held) + bucket


def saved_activation_bytes(context: LayerContext, *, recomputed: bool, cast: bool = True) -> float:
    """Return the bytes that one layer saves of one micro-batch from its forward to its backward pass.

    `cast` selects whether inputs of FP8 and FP4 GEMMs are saved in their narrow format.
    """
    model, config, tokens, block = context.model, context.config, context.tokens, context.block
    if recomputed:
        # A layer for MTP also saves the token's embedding, and the input of its last norm.
        return (3 if context.kind.further else 1) * VALUE * tokens * model.hidden / context.between
    each = NARROW.get(config.precision, VALUE) if cast else VALUE
    # Inputs of the norm and of the first GEMM of each part; and, in stacks that still have dropout, its mask.
    part = tokens * model.hidden * block.parts
    outside = (VALUE + (0 if config.flash_attention else 1)) * part / context.between
    # Only gradients of weights need inputs of GEMMs. Megatron-Bridge's adapters keep them gathered, as DTensor does.
    part -= tokens * model.hidden * unsaved_parts(context)
    outside += each * part / (1 if config.dtensor or config.lora_rank else context.between)
    if context.kind.further:  # both inputs of the joining GEMM, before and after their norms, and the last norm's input
        outside += (3 * VALUE + 2 * each) * tokens * model.hidden / context.between
    outside += 2 * VALUE * tokens * block.narrow / context.between + saved_by_experts(context, each)
    outside += saved_by_adapters(context)
    # Attention saves its result in 16 bits, so the GEMM after it saves another copy in a narrow format.
    kept = block.columns + block.channels + block.rows + block.inner * block.ffn
    inputs = block.ffn * context.saves_input("linear_fc2")
    inputs += block.rows * (each < VALUE and context.saves_input("linear_proj"))
    inside = tokens * (VALUE * kept + each * inputs) / config.tp - dropped_bytes(context, each)
    if config.recompute == "selective_op" and cast:
        # Saved are the layer's input and the results of attention, of every second GEMM and of reduce-scatters.
        inside = VALUE * tokens * (block.columns - block.keys + block.rows + block.ffn) / config.tp
        ends = (block.parts if block.ffn else 1) * VALUE * tokens * model.hidden / context.between
        return ends + inside + VALUE * tokens * block.narrow / context.between + saved_by_experts(context, each) / 2
    modules = config.recompute_modules
    if config.flash_attention or (config.recompute == "selective" and (not modules or "core_attn" in modules)):
        return outside + inside
    heads = sum(one.heads for one in block.attention)
    scores = heads * config.micro_batch_size * context.seq_length * context.seq_length / config.cp
    return outside + inside + 5 * scores / config.tp


SAVED = {recomputed: partial(saved_activation_bytes, recomputed=recomputed) for recomputed in (False, True)}
"""`saved_activation_bytes` by whether the layer is recomputed, for `LayerContext.once`."""
UNCAST = partial(saved_activation_bytes, recomputed=False, cast=False)
"""Bytes of the layer that is being recomputed, all of them in 16 bits: none of its values is cast."""


def _selected_bytes(context: LayerContext) -> float:
    """Return the bytes that recomputation of selected operations restores in a layer."""
    return max(0.0, UNCAST(context) - SAVED[False](context))


def saved_tower_bytes(context: LayerContext) -> float:
    """Return the bytes that a tower saves of one micro-batch until its backward pass; 0 if it has none."""
    inner, model = context.tower, context.model
    if inner is None or model.tower is None or not context.trains_tower:
        return 0.0
    found = sum(count * SAVED[False](inner.of(kind)) for kind, count in inner.model.kinds.items())
    linears = () if model.tower.ends is None else model.tower.ends.linears
    for place, one in enumerate(linears):
        found += VALUE * one.times * one.inputs * inner.tokens / (1 if place == 0 else model.tower.merge)
    return found


_RESTORED = partial(dropped_bytes, each=VALUE)
"""Bytes of the modules that are being recomputed, in the one layer whose backward pass runs."""


def _recomputed_bytes(context: LayerContext) -> float:
    """Return the bytes that recomputation of a layer restores beside its input."""
    return SAVED[False](context) - SAVED[True](context)


@_once
def activations(context: LayerContext, held: PipelineRankLayers) -> Amount:
    """Return the bytes of all micro-batches in flight, and of the largest layer that is being recomputed.

    If backward passes are split, recomputed activations stay until gradients of weights are computed, for each
    micro-batch that waits for that.
    """
    found = sum(count * context.once(SAVED[again], kind) for (kind, again), count in held.in_flight.items())
    if context.model.tower is not None:
        found += held.embedded_in_flight * context.once(saved_tower_bytes, context.kind)
    if context.config.offload_modules:
        away = sum(count * context.once(offloaded_bytes, kind) for (kind, _), count in held.in_flight.items())
        largest = _largest(held.layers, partial(context.once, offloaded_bytes))
        found = found - away + minimum(away, RESIDENT * largest)
    if context.config.recompute_modules:
        found += _largest(held.layers, partial(context.once, _RESTORED))
    # Layers are recomputed one at a time, so only the largest of them is counted with all its values.
    if context.config.recompute == "selective_op":
        return found + _largest(held.layers, partial(context.once, _selected_bytes))
    if held.waiting is None:
        return found + _largest(held.layers, partial(context.once, UNCAST), recomputed=True)
    waits = ((kind, count) for (kind, again), count in held.waiting.items() if again)
    return found + sum(count * context.once(_recomputed_bytes, kind) for kind, count in waits)


@_once
def logits(context: LayerContext, held: PipelineRankLayers) -> Amount:
    """Return the bytes at the loss of one micro-batch, and at the losses of multi-token prediction."""
    config, model = context.config, context.model
    unfused = _SHARDED_LOGITS if config.dtensor and config.tp > 1 else _SAVED_LOGITS
    each = _FUSED_LOGITS[config.fused_loss] if config.fused_cross_entropy else unfused
    gathered = VALUE * context.tokens * model.hidden * (1 - 1 / context.between) if config.dtensor else 0.0
    return held.head * (1 + model.further_tokens) * (each * context.tokens * model.vocab / config.tp + gathered)


def grad_reduce_buffer(context: LayerContext, held: PipelineRankLayers) -> Amount:
    """Return the bytes of the buffer into which FSDP2 copies the largest layer's gradient to reduce it."""
    config = context.config
    if not (config.dtensor and config.zero_stage >= 2 and config.dp_cp_size > 1):
        return 0.0
    return _largest(held.layers, partial(context.once, trained_weights)) * (
        VALUE if config.grad_reduce_in_bf16 else 2 * VALUE
    )


def cuda_graph_buffers(context: LayerContext, held: PipelineRankLayers) -> Amount:
    """Return the bytes of the buffers from which Transformer Engine's graphs of layers read their inputs.

    Each layer has a graph for each micro-batch in flight, whose input is a copy of the layer's. All graphs share one
    buffer for the gradient of the result and one for the gradient of the input.
    """
    # Megatron-LM's own graphs write results where the next graph reads its input, and need no copies.
    if context.config.cuda_graph_impl != "transformer_engine":
        return 0.0
    each = VALUE * context.tokens * context.model.hidden / context.between
    found: Amount = 0.0
    graphed: Amount = 0.0
    for key, count in held.in_flight.items():
        if graphs_layer(context, key[0]):
            found += count * each
            graphed += held.layers[key]
    return found + 2 * each * (graphed > 0)


def framework_overhead(context: LayerContext, _: PipelineRankLayers) -> Amount:
    """Return the bytes of the CUDA context, library workspaces and fragmentation, which no term models."""
    return context.constants.framework_overhead_bytes


class Column(NamedTuple):
    """A row of the table of columns."""

    label: str
    """Name of the column in reports."""
    size: Callable[[LayerContext, PipelineRankLayers], Amount]
    """Function that computes the bytes of one GPU."""


COLUMNS: dict[str, Column] = {
    "weights": Column("weights", weights),
    "gradients": Column("gradients", gradients),
    "optimizer": Column("optimizer", optimizer),
    "activations": Column("activations", activations),
    "logits": Column("logits", logits),
    "optimizer_workspace": Column("optimizer workspace", optimizer_workspace),
    "grad_reduce_buffer": Column("gradient bucket", grad_reduce_buffer),
    "cuda_graph_buffers": Column("CUDA graphs", cuda_graph_buffers),
    "framework_overhead": Column("framework overhead", framework_overhead),
}
STATE = ("weights", "gradients", "optimizer")
"""Columns that depend only on parameters and the ZeRO stage."""
LATER = ("optimizer_workspace", "grad_reduce_buffer")
"""Columns of memory that is allocated as passes end. They are never negative, so bounds may leave them out."""
MOVING = tuple(key for key in COLUMNS if key not in (*STATE, *LATER))
"""Columns that all configurations with one shape (`ParallelismConfig.shape`) share."""


def stage_memory(context: LayerContext, held: PipelineRankLayers, keys: Iterable[str] = COLUMNS) -> dict[str, Amount]:
    """Return the bytes of one GPU by column key."""
    return {key: COLUMNS[key].size(context, held) for key in keys}
