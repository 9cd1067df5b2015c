"""Parsing and formatting of seconds, bytes, rates and counts: `5 us`, `16 GiB`, `25 Gbit/s`, `312 TFLOP/s`, `15T`.

Prefixes are decimal (`k`, `M`, `G`, `T`) unless written `Ki`, `Mi`, `Gi`, `Ti`. A plain number is in base units:
seconds, bytes, bytes per second.
"""

from __future__ import annotations

import re
from numbers import Real

from hpgo.base.messages import shorten
from hpgo.errors import ArgumentError

_DECIMAL = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
_BINARY = {"Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40, "Pi": 2.0**50}
_PREFIXES = _DECIMAL | _BINARY

_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ns": 1e-9, "min": 60.0, "h": 3600.0}
_BYTES = {f"{prefix}B": factor for prefix, factor in _PREFIXES.items()} | {"KB": 1e3}
_RATES = (
    {f"{unit}/s": factor for unit, factor in _BYTES.items()}
    | {f"{prefix}bit/s": factor / 8 for prefix, factor in _PREFIXES.items()}
    | {f"{prefix}b{per}": factor / 8 for prefix, factor in _DECIMAL.items() for per in ("ps", "/s")}
)
_COUNTS = {"k": 1e3, "M": 1e6, "B": 1e9, "G": 1e9, "T": 1e12}
_FLOPS = {f"{prefix}{unit}": factor for unit in ("FLOP/s", "FLOPS", "FLOPs") for prefix, factor in _DECIMAL.items()}
_SHOWN_COUNTS = {"T": 1e12, "B": 1e9, "M": 1e6, "k": 1e3, "": 1.0}
# Units of formatted values, in descending order. `_format` takes the first that fits.
_SHOWN_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}
_SHOWN_BYTES = {f"{prefix}B": factor for prefix, factor in reversed(_DECIMAL.items())}
# Datasheets count in TFLOP/s, also above 1,000.
_SHOWN_FLOPS = {f"{prefix}FLOP/s": factor for prefix, factor in reversed(_DECIMAL.items()) if factor <= _DECIMAL["T"]}

_MAX_LENGTH = 100
_NUMBER = re.compile(r"\s*([-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?)\s*(\S*)\s*")


def parse_seconds(value: str | float) -> float:
    """Return a time in seconds; raise ArgumentError if `value` is not a time.

    >>> parse_seconds("5 us"), parse_seconds(0.25)
    (5e-06, 0.25)
    """
    return _parse(value, "time", _SECONDS, "write it like `5 us`, `20 ms` or `1.5 s`")


def parse_bytes(value: str | float) -> float:
    """Return a size in bytes; raise ArgumentError if `value` is not a size.

    >>> parse_bytes("16 GB"), parse_bytes("16 GiB")
    (16000000000.0, 17179869184.0)
    """
    return _parse(value, "size", _BYTES, "write it like `16 GB` (decimal) or `16 GiB` (binary)")


def parse_bytes_per_s(value: str | float) -> float:
    """Return a rate in bytes per second; raise ArgumentError if `value` is not a rate.

    >>> parse_bytes_per_s("25 Gbit/s"), parse_bytes_per_s("450 GB/s")
    (3125000000.0, 450000000000.0)
    """
    return _parse(value, "rate", _RATES, "write it like `25 Gbit/s` or `450 GB/s`")


def parse_flop_per_s(value: str | float) -> float:
    """Return floating-point operations per second; raise ArgumentError if `value` is no such rate.

    >>> parse_flop_per_s("989.5 TFLOP/s"), parse_flop_per_s(312e12)
    (989500000000000.0, 312000000000000.0)
    """
    return _parse(value, "rate", _FLOPS, "write it like `312 TFLOP/s`")


def parse_count(value: str | float) -> float:
    """Return a number of things, such as tokens; raise ArgumentError if `value` is no number.

    >>> parse_count("15T"), parse_count("300B"), parse_count(2048)
    (15000000000000.0, 300000000000.0, 2048.0)
    """
    return _parse(value, "number", _COUNTS, "write it like `15T`, `300B` or `4.2M`")


def format_count(count: float) -> str:
    """Return a number of things with a fitting suffix and at most four significant digits.

    >>> format_count(15e12), format_count(5070000), format_count(12)
    ('15T', '5.07M', '12')
    """
    return _format(count, _SHOWN_COUNTS).replace(" ", "")


def format_seconds(seconds: float) -> str:
    """Return a time in a fitting unit with at most four significant digits.

    >>> format_seconds(0.0123456), format_seconds(5e-6), format_seconds(0)
    ('12.35 ms', '5 us', '0 s')
    """
    return _format(seconds, _SHOWN_SECONDS)


def format_bytes(size_bytes: float) -> str:
    """Return a size in a fitting decimal unit with at most four significant digits.

    >>> format_bytes(16e9), format_bytes(2**30)
    ('16 GB', '1.074 GB')
    """
    return _format(size_bytes, _SHOWN_BYTES)


def format_bytes_per_s(bytes_per_s: float) -> str:
    """Return a rate in a fitting decimal unit with at most four significant digits.

    >>> format_bytes_per_s(25e9 / 8)
    '3.125 GB/s'
    """
    return f"{format_bytes(bytes_per_s)}/s"


def format_flop_per_s(flop_per_s: float) -> str:
    """Return a rate of floating-point operations in a fitting unit with at most four significant digits.

    >>> format_flop_per_s(989.5e12), format_flop_per_s(1.979e15)
    ('989.5 TFLOP/s', '1979 TFLOP/s')
    """
    return _format(flop_per_s, _SHOWN_FLOPS)


def _parse(value: object, what: str, factors: dict[str, float], example: str) -> float:
    number, unit = 0.0, ""
    if isinstance(value, str):
        found = _NUMBER.fullmatch(value) if len(value) <= _MAX_LENGTH else None
        if found is None or (found[2] and found[2] not in factors):
            raise ArgumentError(f"`{shorten(value)}` is no {what}", example)
        number, unit = float(found[1]), found[2]
    elif isinstance(value, Real) and not isinstance(value, bool):
        try:
            number = float(value)
        except OverflowError:
            number = float("inf")
    else:
        raise ArgumentError(f"a {what} can't be a {type(value).__name__}", example)
    factor = factors[unit] if unit else 1.0
    # 5 us are 5 / 1e6 s, which is rounded once. 5 * 1e-6 would be rounded twice.
    base = number * factor if factor >= 1 else number / round(1 / factor)
    if not 0 <= base < float("inf"):
        raise ArgumentError(f"the {what} is {base:g}, but it must be finite and at least 0", "give another value")
    return base


def _format(value: float, factors: dict[str, float]) -> str:
    """Format `value` in the largest unit of `factors` (descending) that leaves at least 1; 0 is in the base unit."""
    rounded = float(f"{value:.4g}")
    size = abs(rounded) or 1.0
    unit = next((unit for unit, factor in factors.items() if size >= factor), next(reversed(factors)))
    return f"{rounded / factors[unit]:.4g} {unit}"
