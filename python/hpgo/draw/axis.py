"""The numbered time axis: its unit and its ticks at round numbers."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from hpgo.timing.timeline import Timeline

SHORTEST_S = 1e-280
"""Shortest span that can be drawn, in seconds. For shorter ones, the pixels per second would exceed the range of a
float."""

_TIME_UNITS = (("s", 1.0), ("ms", 1e-3), ("us", 1e-6), ("ns", 1e-9))


def drawn_span_s(timelines: Iterable[Timeline]) -> float:
    """Return the longest makespan in seconds, or 0 if it is too short to divide a picture by it.

    Actions of 0 s are drawn without a width.
    """
    span_s = max(timeline.makespan_s for timeline in timelines)
    return span_s if span_s > SHORTEST_S else 0.0


def time_unit(span_s: float) -> tuple[str, float]:
    """Return name and seconds of the unit for `span_s`: the largest one that keeps the number at or above 1.

    >>> time_unit(0.033)
    ('ms', 0.001)
    """
    for name, seconds in _TIME_UNITS:
        # Tolerate rounding, so that 0.001 s computed as a sum is still 1 ms.
        if span_s >= seconds * (1 - 1e-12):
            return name, seconds
    return _TIME_UNITS[-1] if span_s > 0 else _TIME_UNITS[0]


def number_text(value: float) -> str:
    """Return a number with at most four digits after rounding, thousands separators and no trailing zeros.

    Only extreme numbers get an exponent.

    >>> number_text(131072.0), number_text(2.50), number_text(2.5e-291)
    ('131,072', '2.5', '2.5e-291')
    """
    if not 1e-9 <= abs(value) < 1e15:
        return f"{value:.4g}"
    digits = max(0, 3 - math.floor(math.log10(abs(value))))
    text = f"{value:,.{digits}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def ticks(span: float, at_most: int) -> list[float]:
    """Return round positions from 0 to `span`: steps of 1, 2 or 5 times a power of ten, at most `at_most` positions.

    >>> ticks(33.0, at_most=8)
    [0.0, 5.0, 10.0, 15.0, 20.0, 25.0, 30.0]
    """
    if span <= 0:
        return [0.0]
    power = 10.0 ** math.floor(math.log10(span / max(at_most - 1, 1)))
    step = next(power * m for m in (1, 2, 5, 10) if span / (power * m) <= max(at_most - 1, 1) + 1e-9)
    count = math.floor(span / step + 1e-9)
    # `i * step` has rounding errors like 0.30000000000000004, which would show in the labels.
    return [round(i * step, 12) if step > 1e-9 else i * step for i in range(count + 1)]
