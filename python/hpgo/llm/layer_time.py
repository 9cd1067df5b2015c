"""What a micro-batch takes in a layer, in the head and in the embedding, by named terms.

A term is a function of a `LayerContext`; `LAYER`, `HEAD` and `EMBEDDING` list them by name. A new one is a function and a row.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

from hpgo.llm.experts import PassTime, ep_all_to_all, expert_weights, experts, router
from hpgo.llm.layer_context import NARROW, VALUE, pairs_seen
from hpgo.llm.parallelism import MOST_ZERO

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from hpgo.llm.amounts import Amount
    from hpgo.llm.layer_context import LayerContext


@dataclass(frozen=True)
class LayerTime:
    """Terms of one layer, by name: forward, and backward with what is computed anew."""

    forward_s: Mapping[str, float]
    backward_s: Mapping[str, float]
    weight_grad_s: float = 0.0
    """Of the backward, gradients of weights."""

    @cached_property
    def total_forward_s(self) -> float:
        """All of the forward."""
        return sum(self.forward_s.values())

    @cached_property
    def total_backward_s(self) -> float:
        """All of the backward."""
        return sum(self.backward_s.values())

    @property
    def total_s(self) -> float:
        """Both."""
        return self.total_forward_s + self.total_backward_s


class PassTimes(NamedTuple):
    """What a micro-batch takes in several layers: of one stage, or arrays of many."""

    forward_s: Amount
    backward_s: Amount
    weight_grad_s: Amount
    """Of the backward, gradients of weights."""

    @classmethod
    def of(cls, parts: Iterable[tuple[Amount, LayerTime]]) -> PassTimes:
        """Those of so many layers each."""
        forward_s, backward_s, weight_grad_s = 0.0, 0.0, 0.0
        for count, times in parts:
            forward_s = forward_s + count * times.total_forward_s
            backward_s = backward_s + count * times.total_backward_s
            weight_grad_s = weight_grad_s + count * times.weight_grad_s
        return cls(forward_s, backward_s, weight_grad_s)

    @property
    def input_grad_s(self) -> Amount:
        """Of the backward, gradients of inputs."""
        return self.backward_s - self.weight_grad_s


def linear(context: LayerContext) -> PassTime:
    """Products with weights: four matrices, or five where one gates; backward twice, for inputs and for weights."""
    share, tokens, h, f = context.config.tp, context.tokens, context.model.hidden, context.ffn
    forward_s = heads_s(context) + context.product_s(tokens, h, context.mixed / share)
    if f:
        forward_s += context.product_s(tokens, context.inner * f / share, h) + context.product_s(tokens, h, f / share)
    return PassTime(forward_s, 2 * forward_s, weight_grad_s=forward_s)


def heads_s(context: LayerContext) -> float:
    """PassTimes of the products that make queries, keys and values."""
    share, tokens, latent = context.config.tp, context.tokens, context.model.latent
    if latent is None:
        return context.product_s(
            tokens, (context.queries + context.keys + context.values) / share, context.model.hidden
        )
    # Narrow vectors are made of each token once, and by all that share matrices where these share no tokens.
    made_s = context.product_s(tokens / context.between, context.narrow, context.model.hidden)
    plain = context.model.heads * (context.model.head_dim - latent.rope_dim)
    made_s += context.product_s(tokens, (plain + context.values) / share, latent.kv_rank)
    return made_s + context.product_s(tokens, context.queries / share, latent.q_rank or context.model.hidden)


def attention(context: LayerContext) -> PassTime:
    """Scores and what they weigh: 4·b·s²·q/(c·t) operations, half or less of them where masked ones are left out."""
    config, constants = context.config, context.constants
    pairs = config.micro_batch_size * context.seq_length * context.seq_length / config.cp
    flop = 2 * pairs * (context.queries + context.mixed) / config.tp
    if config.flash_attention:
        flop *= pairs_seen(context.kind, context.seq_length)
        forward_s = (
            flop / (context.gpus.attention_flop_per_s * constants.attention_efficiency) + constants.gemm_overhead_s
        )
        return PassTime(forward_s, constants.attention_backward_factor * forward_s)
    aligned = 1.0 if context.model.head_dim % 8 == 0 else constants.misaligned_head_factor
    products_s = (
        flop / (context.gpus.wide_flop_per_s * constants.unfused_attention_efficiency * aligned)
        + 2 * constants.gemm_overhead_s
    )
    # Of each score, forward: written, read and written by the softmax, and by dropout with its mask, read. Backward:
    # gradients of all these, and the softmax's result once more.
    scores = pairs * context.model.heads / config.tp
    return PassTime(products_s + context.moved_s(13 * scores), 2 * products_s + context.moved_s(17 * scores))


def elementwise(context: LayerContext) -> PassTime:
    """Norms, sums around, activations: what reads and writes each value a few times."""
    tokens, share = context.tokens, context.config.tp
    outside = 20 * tokens * context.model.hidden / context.between
    inside = (4 + 2 * (context.inner - 1)) * tokens * context.ffn + 4 * tokens * (
        context.queries + context.keys + context.values
    )
    moved = outside + inside / share + 8 * tokens * context.narrow / context.between
    forward_s = context.moved_s(
        moved * (1.0 if context.config.fused_elementwise else context.constants.unfused_elementwise_factor)
    )
    return PassTime(forward_s, 1.5 * forward_s)


def quantize(context: LayerContext) -> PassTime:
    """Inputs of products that are computed in fewer bits: read in 16, and written by rows and by columns."""
    each, share, tokens = NARROW.get(context.config.precision), context.config.tp, context.tokens
    if each is None:
        return PassTime(0.0, 0.0)
    h, moved = context.model.hidden, VALUE + 2 * each
    inputs = 2 * h / context.between + (context.mixed + context.ffn) / share
    # Backward, gradients of what products gave.
    outputs = 2 * h + (context.queries + context.keys + context.values + context.inner * context.ffn) / share
    return PassTime(context.moved_s(moved * tokens * inputs), context.moved_s(moved * tokens * outputs))


def tp_comm(context: LayerContext) -> PassTime:
    """Two sums of 2·T·h bytes over those that share matrices, forward and backward; two halves each, with sequences."""
    moved = VALUE * context.tokens * context.model.hidden
    apart = context.config.sequence_parallel  # a scatter of sums and a gather, each for itself
    once_s = 2 * context.gather_s(context.tensor_ring, moved) if apart else context.sum_s(context.tensor_ring, moved)
    return PassTime(2 * once_s, 2 * once_s)


def cp_comm(context: LayerContext) -> PassTime:
    """Keys and values on their way round those that share a sequence, as far as attention does not hide it."""
    config = context.config
    if config.cp == 1:
        return PassTime(0.0, 0.0)
    held = VALUE * context.tokens * (context.keys + context.values) / config.tp
    ring_s = context.gather_s(context.context_ring, held * config.cp)
    if context.kind.window:
        # Transformer Engine gathers keys and values before attention in layers with a window, so nothing hides it.
        return PassTime(ring_s, 2 * ring_s)
    hiding = attention(context)
    return PassTime(
        max(0.0, ring_s - context.constants.comm_overlap_fraction * hiding.forward_s),
        max(0.0, 2 * ring_s - context.constants.comm_overlap_fraction * hiding.backward_s),
    )


def param_all_gather(context: LayerContext) -> PassTime:
    """Weights of a layer gathered from those that share them, and gradients summed back, as far as passes hide it."""
    config = context.config
    if not config.gathers_weights:
        return PassTime(0.0, 0.0)
    alone = expert_weights(context)
    gather_s = context.gather_s(context.data_ring, (layer_weights(context) - alone) * VALUE)
    gather_s += context.gather_s(context.expert_ring, alone * VALUE) if alone else 0.0
    hiding = [term(context) for term in (linear, attention, elementwise, experts)]
    hidden = context.constants.comm_overlap_fraction if config.overlap_dp_comm else 0.0
    # Backward gathers again, and sums.
    recompute_s = sum(one.recompute_s for one in hiding) if config.recompute == "full" else 0.0
    return PassTime(
        max(0.0, gather_s - hidden * sum(one.forward_s for one in hiding)),
        max(0.0, 2 * gather_s - hidden * (recompute_s + sum(one.backward_s for one in hiding))),
        0.0,
    )


def grad_accumulation(context: LayerContext) -> PassTime:
    """A 16-bit gradient added to the sum of those before it, behind each backward pass."""
    if context.config.zero_stage == MOST_ZERO:
        return PassTime(0.0, 0.0)
    each = 3 * VALUE if context.reduces_in_16_bits else context.constants.accumulation_bytes
    added_s = context.moved_s(each * layer_weights(context))
    return PassTime(0.0, added_s, 0.0, weight_grad_s=added_s)


def head(context: LayerContext) -> PassTime:
    """The product with the vocabulary, and the loss over all its words."""
    words = context.model.vocab / context.config.tp
    product_s = context.product_s(context.tokens, words, context.model.hidden, wide=True)
    loss = context.tokens * words
    if context.config.fused_cross_entropy:
        # Written by the product, read and written once by the loss, its gradient read by both products.
        return PassTime(
            product_s + context.moved_s(6 * loss), 2 * product_s + context.moved_s(4 * loss), weight_grad_s=product_s
        )
    # Forward: 16 bits written, read and written in 32, read three times; backward: read and written in 32 and 16.
    return PassTime(
        product_s + context.moved_s(22 * loss), 2 * product_s + context.moved_s(14 * loss), weight_grad_s=product_s
    )


def embedding(context: LayerContext) -> PassTime:
    """A row a token, read and written."""
    moved = 2 * VALUE * context.tokens * context.model.hidden
    exchange_s = context.gather_s(context.tensor_ring, VALUE * context.tokens * context.model.hidden)
    return PassTime(
        context.moved_s(moved) + exchange_s, context.moved_s(2 * moved), weight_grad_s=context.moved_s(2 * moved)
    )


def mtp(context: LayerContext) -> PassTime:
    """A token's embedding joined to what was made of those before it, and a head and a loss for the further token."""
    if not context.kind.further:
        return PassTime(0.0, 0.0)
    tokens, h = context.tokens, context.model.hidden
    product_s = context.product_s(tokens, h / context.config.tp, 2 * h)
    # Three norms read and write each value, and so does putting two of them side by side.
    moved_s = context.moved_s((12 + 8) * tokens * h / context.between)
    exchange_s = 2 * context.gather_s(context.tensor_ring, VALUE * tokens * h)
    recompute_s = product_s + moved_s + exchange_s
    ends = embedding(context), head(context)
    return PassTime(
        recompute_s + sum(one.forward_s for one in ends),
        2 * product_s + 1.5 * moved_s + exchange_s + sum(one.backward_s for one in ends),
        recompute_s,
        weight_grad_s=product_s + sum(one.weight_grad_s for one in ends),
    )


def layer_weights(context: LayerContext) -> float:
    """Parameters of a layer on one GPU: matrices in parts; norms and the like whole; of experts its own."""
    model = context.model
    norms = model.norms_per_layer + (3 if context.kind.further else 0)
    whole = norms * model.norm_parameters + model.latent_parameters
    all_experts = 0
    if context.kind.experts:
        whole += model.router_parameters
        all_experts = model.experts * model.expert_parameters
    shared = model.kind_parameters(context.kind) - whole - all_experts
    return shared / context.config.tp + whole + expert_weights(context)


LAYER: dict[str, Callable[[LayerContext], PassTime]] = {
    "linear": linear,
    "attention": attention,
    "elementwise": elementwise,
    "quantize": quantize,
    "experts": experts,
    "router": router,
    "ep_all_to_all": ep_all_to_all,
    "tp_comm": tp_comm,
    "cp_comm": cp_comm,
    "param_all_gather": param_all_gather,
    "grad_accumulation": grad_accumulation,
    "mtp": mtp,
}
HEAD: dict[str, Callable[[LayerContext], PassTime]] = {"lm_head": lm_head}
EMBEDDING: dict[str, Callable[[LayerContext], PassTime]] = {"embedding": embedding}
HOST = "launch_overhead"
"""How long a processor is still busy with launching a layer when its GPU has done all of it."""


def layer_times(context: LayerContext) -> tuple[LayerTime, LayerTime]:
    """Of a layer whose forward is not computed anew, but for scores where the way says so; and of one where it is."""
    passes = {name: term(context) for name, term in LAYER.items()}
    constants = context.constants
    floor_s = constants.layer_launch_s + (4 * constants.collective_launch_s if context.config.tp > 1 else 0.0)
    floor_s += constants.expert_launch_s if context.kind.experts else 0.0
    forward_s = {name: one.forward_s for name, one in passes.items()}
    forward_s[HOST] = floor_s - constants.launch_overlap_fraction * min(floor_s, sum(forward_s.values()))
    kept_s = {name: one.backward_s for name, one in passes.items()}
    recompute_s = {name: one.backward_s + one.recompute_s for name, one in passes.items()}
    if context.config.recompute == "selective":
        # A kernel that keeps no scores computes them anew in any case.
        kept_s["attention"] += 0.0 if context.config.flash_attention else passes["attention"].recompute_s
    for backward_s, again in ((kept_s, 0.0), (recompute_s, 1.0)):
        behind_s = floor_s * (constants.backward_launch_factor + again)
        backward_s[HOST] = behind_s - constants.launch_overlap_fraction * min(behind_s, sum(backward_s.values()))
    weight_grad_s = sum(one.weight_grad_s for one in passes.values())
    return LayerTime(forward_s, kept_s, weight_grad_s), LayerTime(forward_s, recompute_s, weight_grad_s)


def end_times(context: LayerContext, terms: Mapping[str, Callable[[LayerContext], PassTime]]) -> LayerTime:
    """Of the head or the embedding, which are never computed anew."""
    passes = {name: term(context) for name, term in terms.items()}
    return LayerTime(
        {name: one.forward_s for name, one in passes.items()},
        {name: one.backward_s for name, one in passes.items()},
        sum(one.weight_grad_s for one in passes.values()),
    )
