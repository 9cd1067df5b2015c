"""What a GPU of a stage holds, by named columns.

A column is a function of a `Site` and of a stage's `Part`; `COLUMNS` lists them. A new one is a function and a row.
Activations are those of Korthikanti et al., arXiv 2205.05198, section 4, kept apart by who divides them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from hpgo.ways.amounts import Amount, maximum, minimum
from hpgo.ways.experts import expert_weights, kept_by_experts
from hpgo.ways.site import NARROW, VALUE
from hpgo.ways.times import layer_weights
from hpgo.ways.way import MOST_ZERO

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

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


Layers = Mapping[tuple["Kind", bool], Amount]
"""An amount for the layers of each kind, by whether their forward is computed anew."""


@dataclass(frozen=True, slots=True)
class Part:
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
        anew: Sequence[bool],
        waiting: int | None = None,
    ) -> Part:
        """Of layers one by one: their kinds, and for each its micro-batches in flight, and whether it is computed anew.

        So many of them are `waiting` in each layer.
        """
        keys = list(zip(kinds, anew, strict=True))
        flying: Counter[tuple[Kind, bool]] = Counter()
        for key, count in zip(keys, in_flight, strict=True):
            flying[key] += count
        layers = Counter(keys)
        waits = None if waiting is None else {key: count * waiting for key, count in layers.items()}
        return cls(layers, flying, embedding, head, waits)

    @classmethod
    def together(cls, parts: Sequence[Part]) -> Part:
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


def _largest(layers: Layers, each: Callable[[Kind], float], *, anew: bool | None = None) -> Amount:
    """Of the layers that there are, or of those computed anew, what the largest has of something."""
    found: Amount = 0.0
    for (kind, again), count in layers.items():
        if anew in {None, again}:
            found = maximum(found, (count > 0) * each(kind))
    return found


def parameters(site: Site, part: Part) -> Amount:
    """Of a stage on one GPU, before replicas share any."""
    model = site.model
    words = model.vocab * model.hidden / site.way.tensor
    held = sum(count * site.once(layer_weights, kind) for (kind, _), count in part.layers.items())
    held += part.embedding * (words + model.positions * model.hidden)
    return held + part.head * (model.norm_parameters + words * ((not model.tied) + site.holds_words_twice))


def expert_parameters(site: Site, part: Part) -> Amount:
    """Of these, those of experts."""
    return sum((count * site.once(expert_weights, kind) for (kind, _), count in part.layers.items()), 0.0)


def shared_parameters(site: Site, part: Part) -> Amount:
    """What a GPU has of them where replicas share all; experts have fewer replicas than the rest."""
    alone = expert_parameters(site, part)
    return (parameters(site, part) - alone) / site.way.shards + alone / site.way.expert_shards


def weights(site: Site, part: Part) -> Amount:
    """In 16 bits; where replicas share them in as many as gradients add up in, with two layers, or all, gathered."""
    held = parameters(site, part) * VALUE
    if site.way.zero < MOST_ZERO:
        return held
    gathered = held if site.way.shards > 1 else 0.0
    if site.way.gathers:
        largest = max(site.once(layer_weights, kind) for kind in {site.kind, *(kind for kind, _ in part.layers)})
        gathered = minimum(gathered, 2 * max(largest, site.model.vocab * site.model.hidden / site.way.tensor) * VALUE)
    return (VALUE if site.way.narrow_gradients else 2 * VALUE) * shared_parameters(site, part) + gathered


def gradients(site: Site, part: Part) -> Amount:
    """In the bytes that they are summed in; shared from stage 2 on, where no pipeline keeps them to add up."""
    way = site.way
    held = (shared_parameters if way.zero >= 2 and way.pipeline == 1 else parameters)(site, part)
    return held * (VALUE if site.sums_narrow else 2 * VALUE)


def optimizer(site: Site, part: Part) -> Amount:
    """Two moments and 32-bit weights, unless weights are in 32 bits anyway; shared from stage 1 on."""
    state = _MASTER if site.way.zero < MOST_ZERO or site.way.narrow_gradients else _MASTER - 4
    return state * (shared_parameters if site.way.zero >= 1 else parameters)(site, part)


def update(site: Site, part: Part) -> Amount:
    """What Adam needs besides, made when all passes are done: what of it outgrows these passes' values."""
    made = _made(site, part)
    return 0.0 if made is None else maximum(0.0, made - activations(site, part) - logits(site, part))


def cached_bytes(site: Site, part: Part) -> Amount:
    """What PyTorch's allocator keeps of these values then: they were many, and what the update makes is large.

    It gives back what is free before memory runs out, so that a way fits without. `nvidia-smi` counts it.
    """
    made = _made(site, part)
    return 0.0 if made is None else minimum(made, activations(site, part) + logits(site, part))


def _made(site: Site, part: Part) -> Amount | None:
    """Bytes that the update makes; None if it makes nothing."""
    way, each = site.way, 0 if site.way.fused_update else _BETWEEN
    flat = way.flat_update and way.zero < MOST_ZERO
    if site.sums_narrow:
        each += _WIDENED + (_FLAT if flat else 0)
    if each == 0:
        return None
    through = minimum(_BUCKET, VALUE * parameters(site, part)) if flat and way.zero else 0.0
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


KEPT = {anew: partial(kept_bytes, anew=anew) for anew in (False, True)}
"""By whether the layer is computed anew."""
CAST_BACK = partial(kept_bytes, anew=False, cast=False)
"""What a layer keeps of the micro-batch that is computed anew, nothing of it cast."""


def _kept_for_weights(site: Site) -> float:
    """What of that is there beside the layer's input."""
    return kept_bytes(site, anew=False) - kept_bytes(site, anew=True)


def activations(site: Site, part: Part) -> Amount:
    """Of all micro-batches in flight; and, where layers are computed anew, of the one that is, nothing of it cast.

    Where backward passes are split, what is computed anew for gradients of inputs stays until those of weights are
    there, of each micro-batch that waits for that.
    """
    held = sum(count * site.once(KEPT[anew], kind) for (kind, anew), count in part.in_flight.items())
    if part.waiting is None:
        return held + _largest(part.layers, partial(site.once, CAST_BACK), anew=True)
    return held + sum(
        count * site.once(_kept_for_weights, kind) for (kind, anew), count in part.waiting.items() if anew
    )


def logits(site: Site, part: Part) -> Amount:
    """At the loss, of one micro-batch, and at those of further tokens."""
    way, model = site.way, site.model
    several = _SHARED_LOGITS if way.dtensor and way.tensor > 1 else _KEPT_LOGITS
    each = _FUSED_LOGITS if way.fused_loss else several
    gathered = VALUE * site.tokens * model.hidden * (1 - 1 / site.between) if way.dtensor else 0.0
    return part.head * (1 + model.further_tokens) * (each * site.tokens * model.vocab / way.tensor + gathered)


def sums(site: Site, part: Part) -> Amount:
    """Where FSDP2 lays out a layer's gradient once more, in the bytes that it is summed in."""
    way = site.way
    if not (way.dtensor and way.zero >= 2 and way.shards > 1):
        return 0.0
    return _largest(part.layers, partial(site.once, layer_weights)) * (VALUE if way.narrow_gradients else 2 * VALUE)


def reserve(site: Site, part: Part) -> float:
    """Context, libraries and fragments, which nobody models."""
    del part
    return site.constants.reserve_bytes


COLUMNS: dict[str, Callable[[Site, Part], Amount]] = {
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


def ranks_bytes(names: Iterable[str], site: Site, part: Part) -> Amount:
    """Bytes of some columns together."""
    return sum(COLUMNS[name](site, part) for name in names)


def stage_memory(site: Site, part: Part) -> dict[str, Amount]:
    """Bytes of one GPU, by column."""
    return {name: column(site, part) for name, column in COLUMNS.items()}
