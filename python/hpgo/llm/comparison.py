"""Why this way and not another: two prices beside each other, term by term, and what is next to a way."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from hpgo.base.checks import check_is
from hpgo.base.errors import ArgumentError
from hpgo.base.laws import difference
from hpgo.base.records import Record, check_fields
from hpgo.base.wording import near, shorten, shown
from hpgo.llm.estimate import LlmEstimate
from hpgo.llm.parallelism import ParallelismConfig

if TYPE_CHECKING:
    from collections.abc import Iterator

NAMES = tuple(field.name for field in fields(ParallelismConfig) if field.name != "dp")
"""Fields that may be asked for; the degree of data parallelism follows from them."""


@dataclass(frozen=True, slots=True)
class Comparison(Record):
    """Two ways of training one model on the same GPUs with one batch, by what they spend time and memory on.

    >>> import hpgo
    >>> one, other = (hpgo.estimate_llm("llama-3-8b", "h100:1", global_batch_size=8, seq_length=4096, tp=tp) for tp in (2, 8))
    >>> compared = hpgo.compare(one, other)
    >>> compared.longer_s > 0, compared.apart
    (True, True)
    """

    chosen: LlmEstimate
    other: LlmEstimate
    time_by_term_s: tuple[tuple[str, float, float], ...]
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


def compare(chosen: LlmEstimate, other: LlmEstimate) -> Comparison:
    """Sets two prices beside each other.

    Raises ArgumentError for those of different models, GPUs or batches, which tell nothing of each other.

    >>> import hpgo
    >>> cluster = hpgo.Cluster.preset("h100:1")
    >>> one, two = (hpgo.estimate_llm("llama-3-8b", cluster, global_batch_size=8, seq_length=8192, tp=tp) for tp in (2, 4))
    >>> found = compare(one, two)
    >>> abs(sum(there - here for _, here, there in found.time_by_term_s) - found.longer_s) < 1e-9
    True
    """
    for one in (chosen, other):
        check_is("a price", one, LlmEstimate, "make one, with `hpgo.estimate_llm`")
    for field in ("model", "cluster", "gpus", "seq_length", "global_batch_size"):
        here, there = getattr(chosen, field), getattr(other, field)
        if here != there:
            raise ArgumentError(f"{field} is {shown(here)} of one and {shown(there)} of the other", "price both alike")
    return Comparison(
        chosen,
        other,
        _beside(dict(chosen.time_by_term_s), dict(other.time_by_term_s)),
        _beside(*(dict(one.fullest.memory_bytes) for one in (chosen, other))),
    )


def _beside(here: Mapping[str, float], there: Mapping[str, float]) -> tuple[tuple[str, float, float], ...]:
    return tuple((name, here.get(name, 0.0), there.get(name, 0.0)) for name in dict.fromkeys([*here, *there]))


def changed(config: ParallelismConfig, changes: Mapping[str, object]) -> ParallelismConfig:
    """`way` with other degrees, by the names that `hpgo.estimate_llm` has for them; what goes with them follows.

    Those that share matrices share what lies between, too, as long as nothing else is asked for; one stage is not
    interleaved, and other numbers of stages run as 1F1B; layers of the first and the last rank are those of the
    pipeline that they were chosen for.

    Raises ArgumentError for a name that is none, and for what `ParallelismConfig` does.

    >>> from hpgo.llm.parallelism import ParallelismConfig
    >>> changed(ParallelismConfig(tp=4, sequence_parallel=True, pp=2, vpp=2), {"tp": 1, "pp": 1}).named()
    'micro-batch 1'
    """
    check_is("the changes", changes, Mapping, "give a mapping, like {'tp': 8}")
    for name in changes:
        if name not in NAMES:
            raise ArgumentError(f"a way has no {shown(name)}", near(name if isinstance(name, str) else "", NAMES))
    asked: dict[str, Any] = dict(changes)
    if "tp" in asked and "sequence_parallel" not in asked:
        asked["sequence_parallel"] = asked["tp"] != 1 and (config.sequence_parallel or config.tp == 1)
    if asked.get("pp") == 1 and "vpp" not in asked:
        asked["vpp"] = 1
    if "vpp" in asked and "pp_schedule" not in asked:
        asked["pp_schedule"] = "1f1b"
    if asked.get("pp_schedule", "1f1b") != "1f1b" and "vpp" not in asked and config.vpp == 1:
        asked["vpp"] = 2
    if "pp" in asked or "vpp" in asked:  # other ranks, or stages, have other layers
        asked = {"first_rank_layers": None, "last_rank_layers": None} | asked
    if "recompute" in asked and "recompute_num_layers" not in asked:
        asked["recompute_num_layers"] = None
    return replace(config, **asked)


def read_changes(text: str) -> dict[str, object]:
    """What `tp=8,pp=2` asks for. Raises ArgumentError for words that are no NAME=VALUE.

    >>> read_changes("tp=8, recompute=full, flash_attention=no")
    {'tp': 8, 'recompute': 'full', 'flash_attention': False}
    """
    found: dict[str, object] = {}
    for word in text.split(","):
        name, equals, value = (part.strip() for part in word.partition("="))
        name = _SHORT.get(name, name).replace("-", "_")
        if not equals or not value:
            raise ArgumentError(f"`{shorten(word)}` is no NAME=VALUE", "write degrees like `tp=8,pp=2`")
        if name not in NAMES:
            raise ArgumentError(f"there is no degree `{shorten(name)}`", near(name, NAMES))
        if name in found:
            raise ArgumentError(f"`{name}` is given twice", "keep one of them")
        found[name] = (
            int(value) if value.isascii() and value.isdigit() and len(value) <= 9 else _FLAGS.get(value, value)
        )
    return found


_SHORT = {"mbs": "micro_batch_size", "sp": "sequence_parallel"}
_FLAGS: dict[str, object] = {"yes": True, "true": True, "no": False, "false": False}


def differences(config: ParallelismConfig, other: ParallelismConfig) -> str:
    """In which degrees ways differ, as the other has them.

    >>> from hpgo.llm.parallelism import ParallelismConfig
    >>> differences(ParallelismConfig(tp=4, dp=2, zero_stage=1), ParallelismConfig(tp=2, dp=4, zero_stage=1))
    'tp 2, dp 4'
    """
    words = []
    for field in dict.fromkeys(("tp", "dp", *NAMES)):
        if field == "sequence_parallel":
            continue
        name = "micro-batch" if field == "micro_batch_size" else field
        here, there = getattr(config, field), getattr(other, field)
        if here != there and there is None:
            words += [_NONE[field]] if _said_apart(field, config, other) else []
        elif here != there:
            words.append(f"{'no ' if there is False else ''}{name}{'' if isinstance(there, bool) else f' {there}'}")
    if config.sequence_parallel != other.sequence_parallel and (config.tp > 1) == (other.tp > 1):
        words.append("sp" if other.sequence_parallel else "no sp")
    return ", ".join(words)


_NONE = {
    "first_rank_layers": "even first rank",
    "last_rank_layers": "even last rank",
    "recompute_num_layers": "all layers anew",
}
"""What it is called where a way has none of its own."""


def _said_apart(field: str, config: ParallelismConfig, other: ParallelismConfig) -> bool:
    """Whether that is more than what is said of the other pipeline, or of what is computed anew."""
    if field == "recompute_num_layers":
        return other.recompute == "full"
    return (config.pp, config.vpp) == (other.pp, other.vpp)


def neighbours(config: ParallelismConfig) -> Iterator[dict[str, object]]:
    """What is next to a way: each degree half, and twice, as large; sharing and recomputation one step on."""
    for name in ("tp", "cp", "ep", "pp", "vpp", "micro_batch_size"):
        degree = getattr(config, name)
        if degree % 2 == 0:
            yield {name: degree // 2}
        yield {name: 2 * degree}
    if config.dp_cp_size > 1:
        yield {"zero_stage": 1 - config.zero_stage if config.zero_stage < 2 else config.zero_stage - 1}
    yield {"recompute": "full" if config.recompute == "none" else "none"}
