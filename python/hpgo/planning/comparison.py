"""Why this way and not another: two prices beside each other, term by term, and what is next to a way."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from hpgo.base.checks import check_is
from hpgo.base.errors import ArgumentError
from hpgo.base.laws import difference
from hpgo.base.records import Record, check_fields
from hpgo.base.wording import near, shorten, shown
from hpgo.planning.configured import Price

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hpgo.ways.way import Way

NAMES = {
    "tp": "tensor", "cp": "context", "ep": "expert", "pp": "pipeline", "vpp": "chunks",
    "first_layers": "first_layers", "last_layers": "last_layers", "schedule": "schedule",
    "micro_batch_size": "micro_batch_size", "zero": "zero", "recompute": "recompute",
    "recompute_layers": "recompute_layers", "sequence_parallel": "sequence", "precision": "precision",
    "flash": "flash", "fused": "fused", "overlap": "overlap",
    "fused_loss": "fused_loss", "fused_update": "fused_update", "flat_update": "flat_update",
    "dtensor": "dtensor",
    "narrow_gradients": "narrow_gradients",
    "offload_layers": "offload_layers",
}  # fmt: skip
"""What a way's fields are called where they are asked for; the degree of data parallelism follows from them."""


@dataclass(frozen=True, slots=True)
class Comparison(Record):
    """Two ways of training one model on the same GPUs with one batch, by what they spend time and memory on.

    >>> import hpgo
    >>> one, other = (hpgo.price("llama-3-8b", "h100:1", global_batch_size=8, seq=4096, tp=tp) for tp in (2, 8))
    >>> compared = hpgo.compare(one, other)
    >>> compared.longer_s > 0, compared.apart
    (True, True)
    """

    chosen: Price
    other: Price
    seconds: tuple[tuple[str, float, float], ...]
    """Each term of a step, of the chosen way and of the other; both columns add up to the steps."""
    memory_bytes: tuple[tuple[str, float, float], ...]
    """Each column of the fullest GPU of both."""

    def __post_init__(self) -> None:
        check_fields(self)

    @property
    def longer_s(self) -> float:
        """By how much the other step is longer; negative if it is shorter, 0 if rounding alone makes them differ."""
        return difference(self.other.step_s, self.chosen.step_s)

    @property
    def apart(self) -> bool:
        """Whether the steps are further apart than the error of what they are foretold with."""
        low, high = sorted((self.chosen.step_s, self.other.step_s))
        return high > low * (1 + self.chosen.error)


def compare(chosen: Price, other: Price) -> Comparison:
    """Sets two prices beside each other.

    Raises ArgumentError for those of different models, GPUs or batches, which tell nothing of each other.

    >>> import hpgo
    >>> cluster = hpgo.Cluster.preset("h100:1")
    >>> one, two = (hpgo.price("llama-3-8b", cluster, global_batch_size=8, seq=8192, tp=tp) for tp in (2, 4))
    >>> found = compare(one, two)
    >>> abs(sum(there - here for _, here, there in found.seconds) - found.longer_s) < 1e-9
    True
    """
    for one in (chosen, other):
        check_is("a price", one, Price, "make one, with `hpgo.price`")
    for field in ("model", "cluster", "gpus", "seq", "global_batch_size"):
        here, there = getattr(chosen, field), getattr(other, field)
        if here != there:
            raise ArgumentError(
                f"{field} is {shown(here)} of one and {shown(there)} of the other", "price both alike", code="mismatch"
            )
    return Comparison(
        chosen,
        other,
        _beside(dict(chosen.seconds), dict(other.seconds)),
        _beside(*(dict(one.fullest.memory_bytes) for one in (chosen, other))),
    )


def _beside(here: Mapping[str, float], there: Mapping[str, float]) -> tuple[tuple[str, float, float], ...]:
    return tuple((name, here.get(name, 0.0), there.get(name, 0.0)) for name in dict.fromkeys([*here, *there]))


def changed(way: Way, changes: Mapping[str, object]) -> Way:
    """`way` with other degrees, by the names that `hpgo.price` has for them; what goes with them follows.

    Those that share matrices share what lies between, too, as long as nothing else is asked for; one stage is not
    interleaved, and other numbers of stages run as 1F1B; layers of the first and the last rank are those of the
    pipeline that they were chosen for.

    Raises ArgumentError for a name that is none, and for what `Way` does.

    >>> from hpgo.ways.way import Way
    >>> changed(Way(tensor=4, sequence=True, pipeline=2, chunks=2), {"tp": 1, "pp": 1}).named()
    'micro-batch 1'
    """
    check_is("the changes", changes, Mapping, "give a mapping, like {'tp': 8}")
    for name in changes:
        if name not in NAMES:
            known = [name for name, field in NAMES.items() if hasattr(way, field)]
            raise ArgumentError(f"a way has no {shown(name)}", near(name if isinstance(name, str) else "", known))
    asked: dict[str, Any] = {NAMES[name]: value for name, value in changes.items()}
    if "tensor" in asked and "sequence" not in asked:
        asked["sequence"] = asked["tensor"] != 1 and (way.sequence or way.tensor == 1)
    if asked.get("pipeline") == 1 and "chunks" not in asked:
        asked["chunks"] = 1
    if "chunks" in asked and "schedule" not in asked:
        asked["schedule"] = "1f1b"
    if asked.get("schedule", "1f1b") != "1f1b" and "chunks" not in asked and way.chunks == 1:
        asked["chunks"] = 2
    if "pipeline" in asked or "chunks" in asked:  # other ranks, or stages, have other layers
        asked = {"first_layers": None, "last_layers": None} | asked
    if "recompute" in asked and "recompute_layers" not in asked:
        asked["recompute_layers"] = None
    return replace(way, **asked)


def read_changes(text: str) -> dict[str, object]:
    """What `tp=8,pp=2` asks for. Raises ArgumentError for words that are no NAME=VALUE.

    >>> read_changes("tp=8, recompute=full, flash=no")
    {'tp': 8, 'recompute': 'full', 'flash': False}
    """
    found: dict[str, object] = {}
    for word in text.split(","):
        name, equals, value = (part.strip() for part in word.partition("="))
        name = _SHORT.get(name, name).replace("-", "_")
        if not equals or not value:
            raise ArgumentError(f"`{shorten(word)}` is no NAME=VALUE", "write degrees like `tp=8,pp=2`")
        if name not in NAMES:
            raise ArgumentError(f"there is no degree `{shorten(name)}`", near(name, NAMES), code="unknown_name")
        if name in found:
            raise ArgumentError(f"`{name}` is given twice", "keep one of them", code="duplicate")
        found[name] = (
            int(value) if value.isascii() and value.isdigit() and len(value) <= 9 else _FLAGS.get(value, value)
        )
    return found


_SHORT = {"mbs": "micro_batch_size", "sp": "sequence_parallel"}
_FLAGS: dict[str, object] = {"yes": True, "true": True, "no": False, "false": False}


def differences(way: Way, other: Way) -> str:
    """In which degrees ways differ, as the other has them.

    >>> from hpgo.ways.way import Way
    >>> differences(Way(tensor=4, data=2, zero=1), Way(tensor=2, data=4, zero=1))
    'tp 2, dp 4'
    """
    said = {field: name for name, field in NAMES.items()} | {"data": "dp", "micro_batch_size": "micro-batch"}
    words = []
    for field, name in {"tensor": "tp", "data": "dp", **said}.items():
        if not hasattr(way, field) or field == "sequence":
            continue
        here, there = getattr(way, field), getattr(other, field)
        if here != there and there is None:
            words += [_NONE[field]] if _said_apart(field, way, other) else []
        elif here != there:
            words.append(f"{'no ' if there is False else ''}{name}{'' if isinstance(there, bool) else f' {there}'}")
    if way.sequence != other.sequence and (way.tensor > 1) == (other.tensor > 1):
        words.append("sp" if other.sequence else "no sp")
    return ", ".join(words)


_NONE = {"first_layers": "even first rank", "last_layers": "even last rank", "recompute_layers": "all layers anew"}
"""What it is called where a way has none of its own."""


def _said_apart(field: str, way: Way, other: Way) -> bool:
    """Whether that is more than what is said of the other pipeline, or of what is computed anew."""
    if field == "recompute_layers":
        return other.recompute == "full"
    return (way.pipeline, way.chunks) == (other.pipeline, other.chunks)


def neighbours(way: Way) -> Iterator[dict[str, object]]:
    """What is next to a way: each degree half, and twice, as large; sharing and recomputation one step on."""
    doubled = [name for name in ("tp", "cp", "ep", "pp", "vpp", "micro_batch_size") if hasattr(way, NAMES[name])]
    for name in doubled:
        degree = getattr(way, NAMES[name])
        if degree % 2 == 0:
            yield {name: degree // 2}
        yield {name: 2 * degree}
    if way.shards > 1:
        yield {"zero": 1 - way.zero if way.zero < 2 else way.zero - 1}
    yield {"recompute": "full" if way.recompute == "none" else "none"}
