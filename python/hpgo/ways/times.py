"""What a micro-batch takes in a layer, in the head and in the embedding, by named terms.

A term is a function of a `Site`; `LAYER`, `HEAD` and `EMBEDDING` list them by name. A new one is a function and a row.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

from hpgo.ways.experts import Pass, expert_exchange, expert_weights, experts, routing
from hpgo.ways.site import NARROW, VALUE, pairs_seen
from hpgo.ways.way import MOST_ZERO

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from hpgo.ways.amounts import Amount
    from hpgo.ways.site import Site


@dataclass(frozen=True)
class Times:
    """Terms of one layer, by name: forward, and backward with what is computed anew."""

    forward_s: Mapping[str, float]
    backward_s: Mapping[str, float]
    weights_s: float = 0.0
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


class Seconds(NamedTuple):
    """What a micro-batch takes in several layers: of one stage, or arrays of many."""

    forward_s: Amount
    backward_s: Amount
    weights_s: Amount
    """Of the backward, gradients of weights."""

    @classmethod
    def of(cls, parts: Iterable[tuple[Amount, Times]]) -> Seconds:
        """Those of so many layers each."""
        forward_s, backward_s, weights_s = 0.0, 0.0, 0.0
        for count, times in parts:
            forward_s = forward_s + count * times.total_forward_s
            backward_s = backward_s + count * times.total_backward_s
            weights_s = weights_s + count * times.weights_s
        return cls(forward_s, backward_s, weights_s)

    @property
    def inputs_s(self) -> Amount:
        """Of the backward, gradients of inputs."""
        return self.backward_s - self.weights_s


def matrices(site: Site) -> Pass:
    """Products with weights: four matrices, or five where one gates; backward twice, for inputs and for weights."""
    share, tokens, h, f = site.way.tensor, site.tokens, site.model.hidden, site.ffn
    forward_s = heads_s(site) + site.product_s(tokens, h, site.mixed / share)
    if f:
        forward_s += site.product_s(tokens, site.inner * f / share, h) + site.product_s(tokens, h, f / share)
    return Pass(forward_s, 2 * forward_s, weights_s=forward_s)


def heads_s(site: Site) -> float:
    """Seconds of the products that make queries, keys and values."""
    share, tokens, latent = site.way.tensor, site.tokens, site.model.latent
    if latent is None:
        return site.product_s(tokens, (site.queries + site.keys + site.values) / share, site.model.hidden)
    # Narrow vectors are made of each token once, and by all that share matrices where these share no tokens.
    made_s = site.product_s(tokens / site.between, site.narrow, site.model.hidden)
    plain = site.model.heads * (site.model.head_dim - latent.rope_dim)
    made_s += site.product_s(tokens, (plain + site.values) / share, latent.kv_rank)
    return made_s + site.product_s(tokens, site.queries / share, latent.q_rank or site.model.hidden)


def attention(site: Site) -> Pass:
    """Scores and what they weigh: 4·b·s²·q/(c·t) operations, half or less of them where masked ones are left out."""
    way, constants = site.way, site.constants
    pairs = way.micro_batch_size * site.seq * site.seq / way.context
    flop = 2 * pairs * (site.queries + site.mixed) / way.tensor
    if way.flash:
        flop *= pairs_seen(site.kind, site.seq)
        forward_s = flop / (site.gpus.attention_flop_per_s * constants.attention) + constants.kernel_s
        return Pass(forward_s, constants.attention_backward * forward_s)
    aligned = 1.0 if site.model.head_dim % 8 == 0 else constants.misaligned
    products_s = flop / (site.gpus.wide_flop_per_s * constants.scores * aligned) + 2 * constants.kernel_s
    # Of each score, forward: written, read and written by the softmax, and by dropout with its mask, read. Backward:
    # gradients of all these, and the softmax's result once more.
    scores = pairs * site.model.heads / way.tensor
    return Pass(products_s + site.moved_s(13 * scores), 2 * products_s + site.moved_s(17 * scores))


def elements(site: Site) -> Pass:
    """Norms, sums around, activations: what reads and writes each value a few times."""
    tokens, share = site.tokens, site.way.tensor
    outside = 20 * tokens * site.model.hidden / site.between
    inside = (4 + 2 * (site.inner - 1)) * tokens * site.ffn + 4 * tokens * (site.queries + site.keys + site.values)
    moved = outside + inside / share + 8 * tokens * site.narrow / site.between
    forward_s = site.moved_s(moved * (1.0 if site.way.fused else site.constants.elements_unfused))
    return Pass(forward_s, 1.5 * forward_s)


def casts(site: Site) -> Pass:
    """Inputs of products that are computed in fewer bits: read in 16, and written by rows and by columns."""
    each, share, tokens = NARROW.get(site.way.precision), site.way.tensor, site.tokens
    if each is None:
        return Pass(0.0, 0.0)
    h, moved = site.model.hidden, VALUE + 2 * each
    inputs = 2 * h / site.between + (site.mixed + site.ffn) / share
    # Backward, gradients of what products gave.
    outputs = 2 * h + (site.queries + site.keys + site.values + site.inner * site.ffn) / share
    return Pass(site.moved_s(moved * tokens * inputs), site.moved_s(moved * tokens * outputs))


def tensor_exchange(site: Site) -> Pass:
    """Two sums of 2·T·h bytes over those that share matrices, forward and backward; two halves each, with sequences."""
    moved = VALUE * site.tokens * site.model.hidden
    apart = site.way.sequence  # a scatter of sums and a gather, each for itself
    once_s = 2 * site.gather_s(site.tensor_ring, moved) if apart else site.sum_s(site.tensor_ring, moved)
    return Pass(2 * once_s, 2 * once_s)


def context_exchange(site: Site) -> Pass:
    """Keys and values on their way round those that share a sequence, as far as attention does not hide it."""
    way = site.way
    if way.context == 1:
        return Pass(0.0, 0.0)
    held = VALUE * site.tokens * (site.keys + site.values) / way.tensor
    ring_s = site.gather_s(site.context_ring, held * way.context)
    if site.kind.window:
        # Transformer Engine gathers keys and values before attention in layers with a window, so nothing hides it.
        return Pass(ring_s, 2 * ring_s)
    hiding = attention(site)
    return Pass(
        max(0.0, ring_s - site.constants.hidden * hiding.forward_s),
        max(0.0, 2 * ring_s - site.constants.hidden * hiding.backward_s),
    )


def weights_gather(site: Site) -> Pass:
    """Weights of a layer gathered from those that share them, and gradients summed back, as far as passes hide it."""
    way = site.way
    if not way.gathers:
        return Pass(0.0, 0.0)
    alone = expert_weights(site)
    gather_s = site.gather_s(site.data_ring, (layer_weights(site) - alone) * VALUE)
    gather_s += site.gather_s(site.expert_ring, alone * VALUE) if alone else 0.0
    hiding = [term(site) for term in (matrices, attention, elements, experts)]
    hidden = site.constants.hidden if way.overlap else 0.0
    # Backward gathers again, and sums.
    again_s = sum(one.again_s for one in hiding) if way.recompute == "full" else 0.0
    return Pass(
        max(0.0, gather_s - hidden * sum(one.forward_s for one in hiding)),
        max(0.0, 2 * gather_s - hidden * (again_s + sum(one.backward_s for one in hiding))),
        0.0,
    )


def accumulation(site: Site) -> Pass:
    """A 16-bit gradient added to the sum of those before it, behind each backward pass."""
    if site.way.zero == MOST_ZERO:
        return Pass(0.0, 0.0)
    each = 3 * VALUE if site.sums_narrow else site.constants.accumulation_bytes
    added_s = site.moved_s(each * layer_weights(site))
    return Pass(0.0, added_s, 0.0, weights_s=added_s)


def head(site: Site) -> Pass:
    """The product with the vocabulary, and the loss over all its words."""
    words = site.model.vocab / site.way.tensor
    product_s = site.product_s(site.tokens, words, site.model.hidden, wide=True)
    loss = site.tokens * words
    if site.way.fused_loss:
        # Written by the product, read and written once by the loss, its gradient read by both products.
        return Pass(product_s + site.moved_s(6 * loss), 2 * product_s + site.moved_s(4 * loss), weights_s=product_s)
    # Forward: 16 bits written, read and written in 32, read three times; backward: read and written in 32 and 16.
    return Pass(product_s + site.moved_s(22 * loss), 2 * product_s + site.moved_s(14 * loss), weights_s=product_s)


def embedding(site: Site) -> Pass:
    """A row a token, read and written."""
    moved = 2 * VALUE * site.tokens * site.model.hidden
    exchange_s = site.gather_s(site.tensor_ring, VALUE * site.tokens * site.model.hidden)
    return Pass(site.moved_s(moved) + exchange_s, site.moved_s(2 * moved), weights_s=site.moved_s(2 * moved))


def further_token(site: Site) -> Pass:
    """A token's embedding joined to what was made of those before it, and a head and a loss for the further token."""
    if not site.kind.further:
        return Pass(0.0, 0.0)
    tokens, h = site.tokens, site.model.hidden
    product_s = site.product_s(tokens, h / site.way.tensor, 2 * h)
    # Three norms read and write each value, and so does putting two of them side by side.
    moved_s = site.moved_s((12 + 8) * tokens * h / site.between)
    exchange_s = 2 * site.gather_s(site.tensor_ring, VALUE * tokens * h)
    again_s = product_s + moved_s + exchange_s
    ends = embedding(site), head(site)
    return Pass(
        again_s + sum(one.forward_s for one in ends),
        2 * product_s + 1.5 * moved_s + exchange_s + sum(one.backward_s for one in ends),
        again_s,
        weights_s=product_s + sum(one.weights_s for one in ends),
    )


def layer_weights(site: Site) -> float:
    """Parameters of a layer on one GPU: matrices in parts; norms and the like whole; of experts its own."""
    model = site.model
    norms = model.norms_per_layer + (3 if site.kind.further else 0)
    whole = norms * model.norm_parameters + model.latent_parameters
    all_experts = 0
    if site.kind.experts:
        whole += model.router_parameters
        all_experts = model.experts * model.expert_parameters
    shared = model.kind_parameters(site.kind) - whole - all_experts
    return shared / site.way.tensor + whole + expert_weights(site)


LAYER: dict[str, Callable[[Site], Pass]] = {
    "matrices": matrices,
    "attention": attention,
    "elements": elements,
    "casts": casts,
    "experts": experts,
    "routing": routing,
    "expert exchange": expert_exchange,
    "tensor exchange": tensor_exchange,
    "context exchange": context_exchange,
    "weights gathered": weights_gather,
    "accumulation": accumulation,
    "further tokens": further_token,
}
HEAD: dict[str, Callable[[Site], Pass]] = {"head": head}
EMBEDDING: dict[str, Callable[[Site], Pass]] = {"embedding": embedding}
HOST = "host"
"""How long a processor is still busy with launching a layer when its GPU has done all of it."""


def layer_times(site: Site) -> tuple[Times, Times]:
    """Of a layer whose forward is not computed anew, but for scores where the way says so; and of one where it is."""
    passes = {name: term(site) for name, term in LAYER.items()}
    constants = site.constants
    floor_s = constants.host_s + (4 * constants.host_exchange_s if site.way.tensor > 1 else 0.0)
    floor_s += constants.host_experts_s if site.kind.experts else 0.0
    forward_s = {name: one.forward_s for name, one in passes.items()}
    forward_s[HOST] = floor_s - constants.launch_hidden * min(floor_s, sum(forward_s.values()))
    kept_s = {name: one.backward_s for name, one in passes.items()}
    anew_s = {name: one.backward_s + one.again_s for name, one in passes.items()}
    if site.way.recompute == "selective":
        # A kernel that keeps no scores computes them anew in any case.
        kept_s["attention"] += 0.0 if site.way.flash else passes["attention"].again_s
    for backward_s, again in ((kept_s, 0.0), (anew_s, 1.0)):
        behind_s = floor_s * (constants.host_backward + again)
        backward_s[HOST] = behind_s - constants.launch_hidden * min(behind_s, sum(backward_s.values()))
    weights_s = sum(one.weights_s for one in passes.values())
    return Times(forward_s, kept_s, weights_s), Times(forward_s, anew_s, weights_s)


def end_times(site: Site, terms: Mapping[str, Callable[[Site], Pass]]) -> Times:
    """Of the head or the embedding, which are never computed anew."""
    passes = {name: term(site) for name, term in terms.items()}
    return Times(
        {name: one.forward_s for name, one in passes.items()},
        {name: one.backward_s for name, one in passes.items()},
        sum(one.weights_s for one in passes.values()),
    )
