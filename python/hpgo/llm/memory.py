"""What a GPU of a stage holds, by named columns.

A column is a function of a `LayerContext` and of a stage's `PipelineRankLayers`; `COLUMNS` lists them. A new one is a function and a row.
Activations are those of Korthikanti et al., arXiv 2205.05198, section 4, kept apart by who divides them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from hpgo.llm.amounts import Amount, maximum, minimum
from hpgo.llm.experts import expert_weights, kept_by_experts
from hpgo.llm.layer_context import NARROW, VALUE
from hpgo.llm.layer_time import layer_weights
from hpgo.llm.parallelism import MOST_ZERO

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from hpgo.llm.layer_context import LayerContext
    from hpgo.model.transformer import Kind

_MASTER = 12
"""Bytes a parameter of Adam's state: two moments and a copy of the weights in 32 bits."""
_WIDENED, _BETWEEN = 4, 8
"""Bytes a parameter of what is made for Adam, for a while: a gradient in 32 bits where they add up in 16, and where it
is several kernels the square root of a moment and the denominator."""
_FLAT, _BUCKET = 4, 1e9
"""Bytes a parameter where such gradients are copied together: twice in 16 bits, of a replica's share, once as they are
summed and once for the update; or once in 32, where replicas share nothing. And of what they are summed through."""
_KEPT_LOGITS, _FUSED_LOGITS, _SHARED_LOGITS = 14, 4, 16
"""Bytes a logit at the loss: in 16 and 32 bits, the softmax, and its gradient in both; or, of one kernel, in 16 bits
and its gradient in as many; or of DTensor's loss over parts of the vocabulary four in 32 bits as its backward ends: the
softmax's logarithm, its exponential, the gradient of the words asked for, and the sum of both."""


Layers = Mapping[tuple["Kind", bool], Amount]
"""An amount for the layers of each kind, by whether their forward is computed anew."""


@dataclass(frozen=True, slots=True)
class PipelineRankLayers:
    """What one GPU of a pipeline has, or all those of many ways: then amounts are arrays, ranks on the last axis."""

    layers: Layers
    """How many."""
    in_flight: Layers
    """How many micro-batches are between the forward and the backward of these, at most, added up over them."""
    embedding: Amount
    """Whether it has the embedding."""
    head: Amount
    waiting: Layers | None = None
    """How many micro-batches keep what was computed anew until gradients of weights are there, added up likewise, where
    backward passes are split; None says that they are not."""

    @classmethod
    def of(
        cls,
        kinds: Sequence[Kind],
        *,
        embedding: bool,
        head: bool,
        in_flight: Sequence[int],
        recomputed: Sequence[bool],
        waiting: int | None = None,
    ) -> PipelineRankLayers:
        """Of layers one by one: their kinds, and for each its micro-batches in flight, and whether it is computed anew.

        So many of them are `waiting` in each layer.
        """
        keys = list(zip(kinds, recomputed, strict=True))
        flying: Counter[tuple[Kind, bool]] = Counter()
        for key, count in zip(keys, in_flight, strict=True):
            flying[key] += count
        layers = Counter(keys)
        waits = None if waiting is None else {key: count * waiting for key, count in layers.items()}
        return cls(layers, flying, embedding, head, waits)

    @classmethod
    def together(cls, parts: Sequence[PipelineRankLayers]) -> PipelineRankLayers:
        """Those of one rank in one."""

        def added(held: Iterable[Layers]) -> Layers:
            found: dict[tuple[Kind, bool], Amount] = {}
            for one in held:
                for key, amount in one.items():
                    found[key] = found.get(key, 0) + amount
            return found

        return cls(
            added(part.layers for part in parts),
            added(part.in_flight for part in parts),
            any(part.embedding for part in parts),
            any(part.head for part in parts),
            None if parts[0].waiting is None else added(part.waiting or {} for part in parts),
        )


def _largest(layers: Layers, each: Callable[[Kind], float], *, recomputed: bool | None = None) -> Amount:
    """Of the layers that there are, or of those computed anew, what the largest has of something."""
    found: Amount = 0.0
    for (kind, again), count in layers.items():
        if recomputed in {None, again}:
            found = maximum(found, (count > 0) * each(kind))
    return found


def parameters(context: LayerContext, part: PipelineRankLayers) -> Amount:
    """Of a stage on one GPU, before replicas share any."""
    model = context.model
    words = model.vocab * model.hidden / context.config.tp
    held = sum(count * context.once(layer_weights, kind) for (kind, _), count in part.layers.items())
    held += part.embedding * (words + model.positions * model.hidden)
    return held + part.head * (model.norm_parameters + words * ((not model.tied) + context.holds_words_twice))


def expert_parameters(context: LayerContext, part: PipelineRankLayers) -> Amount:
    """Of these, those of experts."""
    return sum((count * context.once(expert_weights, kind) for (kind, _), count in part.layers.items()), 0.0)


def shared_parameters(context: LayerContext, part: PipelineRankLayers) -> Amount:
    """What a GPU has of them where replicas share all; experts have fewer replicas than the rest."""
    alone = expert_parameters(context, part)
    return (parameters(context, part) - alone) / context.config.dp_cp_size + alone / context.config.expert_dp_size


def weights(context: LayerContext, part: PipelineRankLayers) -> Amount:
    """In 16 bits; where replicas share them in as many as gradients add up in, with two layers, or all, gathered."""
    held = parameters(context, part) * VALUE
    if context.config.zero_stage < MOST_ZERO:
        return held
    gathered = held if context.config.dp_cp_size > 1 else 0.0
    if context.config.gathers_weights:
        largest = max(context.once(layer_weights, kind) for kind in {context.kind, *(kind for kind, _ in part.layers)})
        gathered = minimum(
            gathered, 2 * max(largest, context.model.vocab * context.model.hidden / context.config.tp) * VALUE
        )
    return (VALUE if context.config.grad_reduce_in_bf16 else 2 * VALUE) * shared_parameters(context, part) + gathered


def gradients(context: LayerContext, part: PipelineRankLayers) -> Amount:
    """In the bytes that they are summed in; shared from stage 2 on, where no pipeline keeps them to add up."""
    config = context.config
    held = (shared_parameters if config.zero_stage >= 2 and config.pp == 1 else parameters)(context, part)
    return held * (VALUE if context.reduces_in_16_bits else 2 * VALUE)


def optimizer(context: LayerContext, part: PipelineRankLayers) -> Amount:
    """Two moments and 32-bit weights, unless weights are in 32 bits anyway; shared from stage 1 on."""
    state = _MASTER if context.config.zero_stage < MOST_ZERO or context.config.grad_reduce_in_bf16 else _MASTER - 4
    return state * (shared_parameters if context.config.zero_stage >= 1 else parameters)(context, part)


def optimizer_workspace(context: LayerContext, part: PipelineRankLayers) -> Amount:
    """What Adam needs besides, made when all passes are done: what of it outgrows these passes' values."""
    made = _made(context, part)
    return 0.0 if made is None else maximum(0.0, made - activations(context, part) - logits(context, part))


def allocator_cached_bytes(context: LayerContext, part: PipelineRankLayers) -> Amount:
    """What PyTorch's allocator keeps of these values then: they were many, and what the update makes is large.

    It gives back what is free before memory runs out, so that a way fits without. `nvidia-smi` counts it.
    """
    made = _made(context, part)
    return 0.0 if made is None else minimum(made, activations(context, part) + logits(context, part))


def _made(context: LayerContext, part: PipelineRankLayers) -> Amount | None:
    """Bytes that the update makes; None if it makes nothing."""
    config, each = context.config, 0 if context.config.fused_adam else _BETWEEN
    flat = config.flatten_gradients and config.zero_stage < MOST_ZERO
    if context.reduces_in_16_bits:
        each += _WIDENED + (_FLAT if flat else 0)
    if each == 0:
        return None
    through = minimum(_BUCKET, VALUE * parameters(context, part)) if flat and config.zero_stage else 0.0
    return each * (shared_parameters if config.zero_stage >= 1 else parameters)(context, part) + through


def saved_activation_bytes(context: LayerContext, *, recomputed: bool, cast: bool = True) -> float:
    """What one layer keeps of one micro-batch from its forward to its backward.

    `cast` says whether inputs of products that are computed in fewer bits are kept in these.
    """
    model, config, tokens = context.model, context.config, context.tokens
    if recomputed:
        # A layer for a further token keeps the token's embedding, too, and what its last norm reads.
        return (3 if context.kind.further else 1) * VALUE * tokens * model.hidden / context.between
    each = NARROW.get(config.precision, VALUE) if cast else VALUE
    # Inputs of two norms and of two products; and, in stacks that still have dropout, its masks.
    outside = (2 * VALUE + (0 if config.flash_attention else 2)) * tokens * model.hidden / context.between
    outside += 2 * each * tokens * model.hidden / (1 if config.dtensor else context.between)
    if context.kind.further:  # both inputs of what joins them, before and behind their norms, and that of the last norm
        outside += (3 * VALUE + 2 * each) * tokens * model.hidden / context.between
    outside += 2 * VALUE * tokens * context.narrow / context.between + kept_by_experts(context, each)
    # Attention keeps its result in 16 bits, so that the product behind it keeps another in fewer.
    kept = context.queries + context.keys + context.values + context.mixed + context.inner * context.ffn
    inputs = context.ffn + (context.mixed if each < VALUE else 0)
    inside = tokens * (VALUE * kept + each * inputs) / config.tp
    if config.flash_attention or config.recompute == "selective":
        return outside + inside
    scores = model.heads * config.micro_batch_size * context.seq_length * context.seq_length / config.cp
    return outside + inside + 5 * scores / config.tp


SAVED = {recomputed: partial(saved_activation_bytes, recomputed=recomputed) for recomputed in (False, True)}
"""By whether the layer is computed anew."""
CAST_BACK = partial(saved_activation_bytes, recomputed=False, cast=False)
"""What a layer keeps of the micro-batch that is computed anew, nothing of it cast."""


def _kept_for_weights(context: LayerContext) -> float:
    """What of that is there beside the layer's input."""
    return saved_activation_bytes(context, recomputed=False) - saved_activation_bytes(context, recomputed=True)


def activations(context: LayerContext, part: PipelineRankLayers) -> Amount:
    """Of all micro-batches in flight; and, where layers are computed anew, of the one that is, nothing of it cast.

    Where backward passes are split, what is computed anew for gradients of inputs stays until those of weights are
    there, of each micro-batch that waits for that.
    """
    held = sum(count * context.once(SAVED[recomputed], kind) for (kind, recomputed), count in part.in_flight.items())
    if part.waiting is None:
        return held + _largest(part.layers, partial(context.once, CAST_BACK), recomputed=True)
    return held + sum(
        count * context.once(_kept_for_weights, kind)
        for (kind, recomputed), count in part.waiting.items()
        if recomputed
    )


def logits(context: LayerContext, part: PipelineRankLayers) -> Amount:
    """At the loss, of one micro-batch, and at those of further tokens."""
    config, model = context.config, context.model
    several = _SHARED_LOGITS if config.dtensor and config.tp > 1 else _KEPT_LOGITS
    each = _FUSED_LOGITS if config.fused_cross_entropy else several
    gathered = VALUE * context.tokens * model.hidden * (1 - 1 / context.between) if config.dtensor else 0.0
    return part.head * (1 + model.further_tokens) * (each * context.tokens * model.vocab / config.tp + gathered)


def grad_reduce_buffer(context: LayerContext, part: PipelineRankLayers) -> Amount:
    """Where FSDP2 lays out a layer's gradient once more, in the bytes that it is summed in."""
    config = context.config
    if not (config.dtensor and config.zero_stage >= 2 and config.dp_cp_size > 1):
        return 0.0
    return _largest(part.layers, partial(context.once, layer_weights)) * (
        VALUE if config.grad_reduce_in_bf16 else 2 * VALUE
    )


def framework_overhead(context: LayerContext, part: PipelineRankLayers) -> float:
    """Context, libraries and fragments, which nobody models."""
    del part
    return context.constants.framework_overhead_bytes


COLUMNS: dict[str, Callable[[LayerContext, PipelineRankLayers], Amount]] = {
    "weights": weights,
    "gradients": gradients,
    "optimizer": optimizer,
    "activations": activations,
    "logits": logits,
    "optimizer_workspace": optimizer_workspace,
    "grad_reduce_buffer": grad_reduce_buffer,
    "framework_overhead": framework_overhead,
}
STATE = ("weights", "gradients", "optimizer")
LATER = ("optimizer_workspace", "grad_reduce_buffer")
"""Columns of parameters, and those that need room when passes are done or end; the others depend on what a way has in
common with all others of its shape."""


def ranks_bytes(names: Iterable[str], context: LayerContext, part: PipelineRankLayers) -> Amount:
    """Bytes of some columns together."""
    return sum(COLUMNS[name](context, part) for name in names)


def stage_memory(context: LayerContext, part: PipelineRankLayers) -> dict[str, Amount]:
    """Bytes of one GPU, by column."""
    return {name: column(context, part) for name, column in COLUMNS.items()}
