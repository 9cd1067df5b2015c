"""What a GPU of a stage holds, by named columns.

A column is a function of a `Site` and of a stage's `Part`; `COLUMNS` lists them. A new one is a function and a row.
Activations are those of Korthikanti et al., arXiv 2205.05198, section 4, kept apart by who divides them.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hpgo.ways.experts import expert_weights, kept_by_experts
from hpgo.ways.site import NARROW, VALUE
from hpgo.ways.times import layer_weights
from hpgo.ways.way import MOST_ZERO

if TYPE_CHECKING:
    from collections.abc import Callable

    from hpgo.model.transformer import Kind
    from hpgo.ways.site import Site

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


@dataclass(frozen=True, slots=True)
class Part:
    """What one GPU of a pipeline has."""

    kinds: tuple[Kind, ...]
    """Of each of its layers."""
    embedding: bool
    head: bool
    in_flight: tuple[int, ...]
    """For each of its layers, how many micro-batches are between its forward and its backward at most."""
    anew: tuple[bool, ...]
    """For each of its layers, whether its forward is computed anew."""
    waiting: tuple[int, ...] = ()
    """For each of its layers, how many micro-batches keep what was computed anew until gradients of weights are there,
    where backward passes are split; none says that none does."""

    def __post_init__(self) -> None:
        assert len(self.kinds) == len(self.in_flight) == len(self.anew)  # noqa: S101 -- made here only
        assert len(self.waiting) in {0, len(self.kinds)}  # noqa: S101


def parameters(site: Site, part: Part) -> float:
    """Of a stage on one GPU, before replicas share any."""
    model, share = site.model, site.way.tensor
    words = model.vocab * model.hidden / share
    held = sum(count * layer_weights(site.of(kind)) for kind, count in Counter(part.kinds).items())
    if part.embedding:
        held += words + model.positions * model.hidden
    if part.head:
        held += model.norm_parameters + words * ((not model.tied) + site.holds_words_twice)
    return held


def expert_parameters(site: Site, part: Part) -> float:
    """Of these, those of experts."""
    return sum(count * expert_weights(site.of(kind)) for kind, count in Counter(part.kinds).items())


def shared_parameters(site: Site, part: Part) -> float:
    """What a GPU has of them where replicas share all; experts have fewer replicas than the rest."""
    alone = expert_parameters(site, part)
    return (parameters(site, part) - alone) / site.way.shards + alone / site.way.expert_shards


def weights(site: Site, part: Part) -> float:
    """In 16 bits; where replicas share them in as many as gradients add up in, with two layers, or all, gathered."""
    held = parameters(site, part) * VALUE
    if site.way.zero < MOST_ZERO:
        return held
    gathered = held if site.way.shards > 1 else 0.0
    if site.way.gathers:
        largest = max(layer_weights(site.of(kind)) for kind in {site.kind, *part.kinds})
        gathered = min(gathered, 2 * max(largest, site.model.vocab * site.model.hidden / site.way.tensor) * VALUE)
    return (VALUE if site.way.narrow_gradients else 2 * VALUE) * shared_parameters(site, part) + gathered


def gradients(site: Site, part: Part) -> float:
    """In the bytes that they are summed in; shared from stage 2 on, where no pipeline keeps them to add up."""
    way = site.way
    held = (shared_parameters if way.zero >= 2 and way.pipeline == 1 else parameters)(site, part)
    return held * (VALUE if site.sums_narrow else 2 * VALUE)


def optimizer(site: Site, part: Part) -> float:
    """Two moments and 32-bit weights, unless weights are in 32 bits anyway; shared from stage 1 on."""
    state = _MASTER if site.way.zero < MOST_ZERO or site.way.narrow_gradients else _MASTER - 4
    return state * (shared_parameters if site.way.zero >= 1 else parameters)(site, part)


def update(site: Site, part: Part) -> float:
    """What Adam needs besides, made when all passes are done: what of it outgrows these passes' values."""
    made = _made(site, part)
    return max(0.0, made - activations(site, part) - logits(site, part)) if made else 0.0


def cached_bytes(site: Site, part: Part) -> float:
    """What PyTorch's allocator keeps of these values then: they were many, and what the update makes is large.

    It gives back what is free before memory runs out, so that a way fits without. `nvidia-smi` counts it.
    """
    made = _made(site, part)
    return min(made, activations(site, part) + logits(site, part)) if made else 0.0


def _made(site: Site, part: Part) -> float:
    """Bytes that the update makes."""
    way, each = site.way, 0 if site.way.fused_update else _BETWEEN
    flat = way.flat_update and way.zero < MOST_ZERO
    if site.sums_narrow:
        each += _WIDENED + (_FLAT if flat else 0)
    if each == 0:
        return 0.0
    through = min(_BUCKET, VALUE * parameters(site, part)) if flat and way.zero else 0.0
    return each * (shared_parameters if way.zero >= 1 else parameters)(site, part) + through


def kept_bytes(site: Site, *, anew: bool, cast: bool = True) -> float:
    """What one layer keeps of one micro-batch from its forward to its backward.

    `cast` says whether inputs of products that are computed in fewer bits are kept in these.
    """
    model, way, tokens = site.model, site.way, site.tokens
    if anew:
        # A layer for a further token keeps the token's embedding, too, and what its last norm reads.
        return (3 if site.kind.further else 1) * VALUE * tokens * model.hidden / site.between
    each = NARROW.get(way.precision, VALUE) if cast else VALUE
    # Inputs of two norms and of two products; and, in stacks that still have dropout, its masks.
    outside = (2 * VALUE + (0 if way.flash else 2)) * tokens * model.hidden / site.between
    outside += 2 * each * tokens * model.hidden / (1 if way.dtensor else site.between)
    if site.kind.further:  # both inputs of what joins them, before and behind their norms, and that of the last norm
        outside += (3 * VALUE + 2 * each) * tokens * model.hidden / site.between
    outside += 2 * VALUE * tokens * site.narrow / site.between + kept_by_experts(site, each)
    # Attention keeps its result in 16 bits, so that the product behind it keeps another in fewer.
    kept = site.queries + site.keys + site.values + site.mixed + site.inner * site.ffn
    inputs = site.ffn + (site.mixed if each < VALUE else 0)
    inside = tokens * (VALUE * kept + each * inputs) / way.tensor
    if way.flash or way.recompute == "selective":
        return outside + inside
    scores = model.heads * way.micro_batch_size * site.seq * site.seq / way.context
    return outside + inside + 5 * scores / way.tensor


def activations(site: Site, part: Part) -> float:
    """Of all micro-batches in flight; and, where layers are computed anew, of the one that is, nothing of it cast.

    Where backward passes are split, what is computed anew for gradients of inputs stays until those of weights are
    there, of each micro-batch that waits for that.
    """
    each = {
        (kind, anew): kept_bytes(site.of(kind), anew=anew) for kind, anew in {*zip(part.kinds, part.anew, strict=True)}
    }
    layers = zip(part.kinds, part.anew, part.in_flight, strict=True)
    held = sum(count * each[kind, anew] for kind, anew, count in layers)
    again = {kind for kind, anew in zip(part.kinds, part.anew, strict=True) if anew}
    if not (again and part.waiting):
        return held + max((kept_bytes(site.of(kind), anew=False, cast=False) for kind in again), default=0.0)
    besides = {kind: kept_bytes(site.of(kind), anew=False) - each[kind, True] for kind in again}
    layers = zip(part.kinds, part.anew, part.waiting, strict=True)
    return held + sum(count * besides[kind] for kind, anew, count in layers if anew)


def logits(site: Site, part: Part) -> float:
    """At the loss, of one micro-batch, and at those of further tokens."""
    if not part.head:
        return 0.0
    way, model = site.way, site.model
    several = _SHARED_LOGITS if way.dtensor and way.tensor > 1 else _KEPT_LOGITS
    each = _FUSED_LOGITS if way.fused_loss else several
    gathered = VALUE * site.tokens * model.hidden * (1 - 1 / site.between) if way.dtensor else 0.0
    return (1 + model.further_tokens) * (each * site.tokens * model.vocab / way.tensor + gathered)


def sums(site: Site, part: Part) -> float:
    """Where FSDP2 lays out a layer's gradient once more, in the bytes that it is summed in."""
    way = site.way
    if not (way.dtensor and way.zero >= 2 and way.shards > 1):
        return 0.0
    largest = max((layer_weights(site.of(kind)) for kind in {*part.kinds}), default=0.0)
    return largest * (VALUE if way.narrow_gradients else 2 * VALUE)


def reserve(site: Site, part: Part) -> float:
    """Context, libraries and fragments, which nobody models."""
    del part
    return site.constants.reserve_bytes


COLUMNS: dict[str, Callable[[Site, Part], float]] = {
    "weights": weights,
    "gradients": gradients,
    "optimizer": optimizer,
    "activations": activations,
    "logits": logits,
    "update": update,
    "sums": sums,
    "reserve": reserve,
}
STATE = ("weights", "gradients", "optimizer")
LATER = ("update", "sums")
"""Columns of parameters, and those that need room when passes are done or end; the others depend on what a way has in
common with all others of its shape."""


def stage_memory(site: Site, part: Part) -> dict[str, float]:
    """Bytes of one GPU, by column."""
    return {name: column(site, part) for name, column in COLUMNS.items()}
