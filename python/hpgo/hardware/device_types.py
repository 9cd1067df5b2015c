"""Device types of a cluster file: the rates that the file itself states, or the rates of a known card with changes."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING, Any

from hpgo.base.documents import Section
from hpgo.base.messages import join_words, nearest_names, safe_repr, shorten
from hpgo.base.units import parse_bytes, parse_bytes_per_s, parse_flop_per_s
from hpgo.errors import ArgumentError, ClusterError
from hpgo.hardware.rates import NAMES, RATES, Rates, key_of

if TYPE_CHECKING:
    from collections.abc import Callable

_WIDE = {"fp32": "float32", "tf32": "tf32", "fp16": "float16", "bf16": "bfloat16"}
_NARROW = ("fp8", "fp4")
_KEYS = "like source processors flops memory memory_bandwidth host_bandwidth reached attention_ramp_tokens scaled"
_REQUIRED = ("processors", "flops", "memory_bandwidth")


@dataclass(frozen=True, slots=True)
class DeviceType:
    """A device type as a cluster file states it."""

    rates: Rates
    memory_bytes: float | None
    """Memory of a node's device that states none."""


def read_types(top: Section) -> dict[str, DeviceType]:
    """Return the device types under the key `types` of a cluster file, by name.

    Raises ClusterError that names type and key.
    """
    if "types" not in top:
        # A misspelled `types` must not look like a device type without rates or memory.
        top.check_spelling()
        return {}
    types = top.within("types")
    found = {}
    for name in types:
        entry = Section(types.get(name), f"{types.where}, {shorten(str(name))}", ClusterError, keys=_KEYS)
        found[str(name)] = _device_type(str(name), entry)
    return found


def _device_type(name: str, entry: Section) -> DeviceType:
    base = _base(name, entry)
    if base is None and (missing := [key for key in _REQUIRED if key not in entry]):
        entry.check_spelling()
        entry.fail(
            f"{join_words([f'`{key}`' for key in missing])} of `{shorten(name)}`"
            f" {'is' if len(missing) == 1 else 'are'} missing",
            f"add {'it' if len(missing) == 1 else 'them'}, or name a similar card, such as `like: H100-80GB`",
            code="missing",
        )
    flops = _values(entry, "flops", (*_WIDE, *_NARROW), parse_flop_per_s)
    wide = {_WIDE[one]: rate for one, rate in flops.items() if one in _WIDE}
    narrow = {one: rate for one, rate in flops.items() if one in _NARROW}
    if base is not None:
        wide, narrow = {**base.flop_per_s, **wide}, {**base.narrow_flop_per_s, **narrow}
    if not {"float16", "bfloat16"} & {*wide}:
        entry.fail("`flops` has neither `bf16` nor `fp16`", "add one, such as `bf16: 312 TFLOP/s`", code="missing")
    stated = _values(entry, "reached", ("bf16", *_NARROW, "attention"), _share)
    for one in stated:
        if one in _NARROW and one not in narrow:
            entry.fail(f"`reached` has `{one}`, but `flops` does not", f"add `{one}` to `flops`", code="conflict")
    processors = entry.whole("processors", 0 if base is None else base.processors, minimum=1)
    memory_rate = _measure(entry, "memory_bandwidth", parse_bytes_per_s, None if base is None else base.bytes_per_s)
    host_rate = _measure(entry, "host_bandwidth", parse_bytes_per_s, inf if base is None else base.host_bytes_per_s)
    ramp = entry.amount("attention_ramp_tokens") if "attention_ramp_tokens" in entry else None
    ramp_tokens = (0.0 if base is None else base.attention_ramp_tokens) if ramp is None else ramp
    memory_bytes = _measure(entry, "memory", parse_bytes) if "memory" in entry else None
    # Shares belong to their peaks. If the file changes a peak, an inherited share is no measurement any more.
    inherited = base is not None and "bf16" not in stated and (base.scaled or not {"bf16", "fp16"}.isdisjoint(flops))
    scaled = entry.flag("scaled") if "scaled" in entry else inherited
    source = entry.text("source", "the cluster file" if base is None else f"the cluster file; {base.source}")
    entry.done()
    reached = {**(base.reached if base is not None else {}), **stated}
    return DeviceType(
        Rates(wide, memory_rate, source, processors, host_rate, narrow, reached, ramp_tokens, scaled), memory_bytes
    )


def _base(name: str, entry: Section) -> Rates | None:
    """Return the rates of the card under `like`, or of a known card of the type's own name."""
    if "like" not in entry:
        key = key_of(name)
        return None if key is None else RATES[key]
    like = entry.text("like")
    if (key := key_of(like)) is None:
        names = [one for listed in NAMES.values() for one in listed]
        near = nearest_names(like, names) or [listed[0] for listed in NAMES.values()]
        entry.fail(
            f"`like` is `{shorten(like)}`, but no card has this name",
            f"use one of {', '.join(near)}, or state all rates",
            code="unknown_name",
        )
    return RATES[key]


def _values(
    entry: Section, key: str, names: tuple[str, ...], parser: Callable[[str | float], float]
) -> dict[str, float]:
    """Return the values of a mapping by name. All must be above 0."""
    if key not in entry:
        return {}
    section = Section(entry.get(key), f"{entry.where}, {key}", ClusterError, keys=" ".join(names))
    found = {name: _measure(section, name, parser) for name in names if name in section}
    section.done()
    return found


def _measure(section: Section, key: str, parser: Callable[[str | float], float], default: float | None = None) -> float:
    """Return the value of a key in base units. It must be above 0."""
    if key not in section and default is not None:
        return default
    value: Any = section.get(key)
    try:
        found = parser(value)
    except ArgumentError as error:
        section.reraise(error, f"`{key}`: {error.message}")
    if not found > 0:
        section.fail(f"`{key}` is {safe_repr(value)}, but it must be above 0", "give another value", name=key)
    return found


def _share(value: str | float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1:
        raise ArgumentError(f"{safe_repr(value)} is no share", "give a number above 0 and at most 1, such as 0.8")
    return float(value)


def type_document(rates: Rates) -> dict[str, Any]:
    """Return rates as `read_types` reads them, in base units.

    >>> type_document(RATES["a10g"])["flops"]["bf16"]
    70000000000000.0
    """
    flops = {one: float(rates.flop_per_s[name]) for one, name in _WIDE.items() if name in rates.flop_per_s}
    flops |= {one: float(rates.narrow_flop_per_s[one]) for one in _NARROW if one in rates.narrow_flop_per_s}
    found: dict[str, Any] = {
        "source": rates.source,
        "processors": rates.processors,
        "flops": flops,
        "memory_bandwidth": float(rates.bytes_per_s),
    }
    # Without a limit, the rate is infinite, which JSON can't hold.
    if rates.host_bytes_per_s < inf:
        found["host_bandwidth"] = float(rates.host_bytes_per_s)
    if rates.reached:
        found["reached"] = {name: float(share) for name, share in rates.reached.items()}
    if rates.attention_ramp_tokens:
        found["attention_ramp_tokens"] = float(rates.attention_ramp_tokens)
    return found | ({"scaled": True} if rates.scaled else {})
