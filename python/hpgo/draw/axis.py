"""The numbered time axis: one unit, round ticks."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from hpgo.timing.timeline import Timeline

SHORTEST_S = 1e-280
"""Pixels for each second of shorter spans would be more than a float can hold."""

_TIME_UNITS = (("s", 1.0), ("ms", 1e-3), ("us", 1e-6), ("ns", 1e-9))


def drawn_span_s(timelines: Iterable[Timeline]) -> float:
    """The longest makespan; 0 if it is so short, below any clock's tick, that a picture can't be divided by it.

    What takes 0 s is drawn without a width.
    """
    span_s = max(timeline.makespan_s for timeline in timelines)
    return span_s if span_s > SHORTEST_S else 0.0


def time_unit(span_s: float) -> tuple[str, float]:
    """Name and seconds of the unit in which `span_s` reads best: the largest that keeps it at or above 1.

    >>> time_unit(0.033)
    ('ms', 0.001)
    """
    for name, seconds in _TIME_UNITS:
        if span_s >= seconds * (1 - 1e-12):
            return name, seconds
    return _TIME_UNITS[-1] if span_s > 0 else _TIME_UNITS[0]


def number_text(value: float) -> str:
    """At most four digits after rounding, thousands separated, no trailing zeros; an exponent only for extremes.

    >>> number_text(131072.0), number_text(2.50), number_text(2.5e-291)
    ('131,072', '2.5', '2.5e-291')
    """
    if not 1e-9 <= abs(value) < 1e15:
        return f"{value:.4g}"
    digits = max(0, 3 - math.floor(math.log10(abs(value))))
    text = f"{value:,.{digits}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def ticks(span: float, at_most: int) -> list[float]:
    """Round positions from 0 to `span`: steps of 1, 2 or 5 times a power of ten, at most `at_most` of them.

    >>> ticks(33.0, at_most=8)
    [0.0, 5.0, 10.0, 15.0, 20.0, 25.0, 30.0]
    """
    if span <= 0:
        return [0.0]
    power = 10.0 ** math.floor(math.log10(span / max(at_most - 1, 1)))
    step = next(power * m for m in (1, 2, 5, 10) if span / (power * m) <= max(at_most - 1, 1) + 1e-9)
    count = math.floor(span / step + 1e-9)
    return [round(i * step, 12) if step > 1e-9 else i * step for i in range(count + 1)]
