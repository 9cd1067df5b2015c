"""Figure of the Pareto front of step time and memory, as a staircase."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from hpgo.base.checks import check_is, check_list
from hpgo.base.messages import printable
from hpgo.base.units import format_bytes, format_seconds
from hpgo.draw import still
from hpgo.draw.axis import number_text, time_unit
from hpgo.draw.scene import Boxes, Item, Line, Scene, Words
from hpgo.errors import ArgumentError
from hpgo.llm.estimate import LlmEstimate
from hpgo.llm.step_range import RELATIVE_ERROR

if TYPE_CHECKING:
    import os
    from collections.abc import Sequence
    from pathlib import Path

    from hpgo.draw.options import Theme

_MARGIN, _LEFT, _TOP, _WIDE, _TALL, _WIDTH = 16.0, 84.0, 92.0, 880.0, 300.0, 1040.0
_SIDE = 9.0


def draw_pareto_front(estimates: Sequence[LlmEstimate], path: str | os.PathLike[str], *, theme: Theme = "auto") -> Path:
    """Draw the estimates of `hpgo.llm_pareto_front` into a file that ends in .svg, .png, .pdf or .html.

    Raises ArgumentError for no estimates and for another ending; HpgoError if matplotlib is missing, which PNG and PDF
    need, or if the file can't be written.
    """
    still.check(path)
    return still.save(scene(estimates), path, theme=theme)


def scene(estimates: Sequence[LlmEstimate]) -> Scene:
    """Return the scene of the figure. Equal estimates give equal scenes."""
    hint = "give the result of `hpgo.llm_pareto_front`"
    held: list[LlmEstimate] = check_list("the estimates", estimates, hint=hint)
    for one in held:
        check_is("an estimate", one, LlmEstimate, hint)
    if not held:
        raise ArgumentError("there are no estimates to draw", hint)
    held.sort(key=lambda one: one.step_s)
    first = held[0]
    capacity = first.capacity_bytes
    unit, unit_s = time_unit(held[-1].step_s)
    low_x, high_x, marks_x = _span([one.fullest.peak_bytes / 1e9 for one in held] + [capacity / 1e9])
    low_y, high_y, marks_y = _span([one.step_s / unit_s for one in held])

    def x_of(size_bytes: float) -> float:
        return _LEFT + _WIDE * (size_bytes / 1e9 - low_x) / (high_x - low_x)

    def y_of(step_s: float) -> float:
        return _TOP + _TALL * (1 - (step_s / unit_s - low_y) / (high_y - low_y))

    title = printable(f"{first.model} on {first.cluster}: Pareto front of step time and memory")
    # The shaded band ends at the top of the plot if the error exceeds the range of the front.
    alike_s = min(first.step_s * (1 + RELATIVE_ERROR), high_y * unit_s)
    bottom = _TOP + _TALL
    items: list[Item] = [
        Words("title", [_MARGIN], [_MARGIN + 16], [title]),
        Words(
            "fact",
            [_MARGIN],
            [_MARGIN + 36],
            ["No configuration of the search is faster with less memory (estimated)."],
        ),
        _box("near", _LEFT, y_of(alike_s), _WIDE, y_of(first.step_s) - y_of(alike_s)),
    ]
    for mark in marks_x:
        at = _LEFT + _WIDE * (mark - low_x) / (high_x - low_x)
        items += [Line("grid", ((at, _TOP), (at, bottom))), Words("tick", [at], [bottom + 16], [number_text(mark)])]
    for mark in marks_y:
        at = _TOP + _TALL * (1 - (mark - low_y) / (high_y - low_y))
        items.append(Line("grid", ((_LEFT, at), (_LEFT + _WIDE, at))))
        items.append(Words("rank", [_LEFT - 8], [at + 4], [number_text(mark)]))
    items += [
        Line("axis", ((_LEFT, bottom), (_LEFT + _WIDE, bottom))),
        Line("axis", ((_LEFT, _TOP), (_LEFT, bottom))),
        Words("tick", [_LEFT + _WIDE / 2], [bottom + 34], ["memory of the fullest GPU (GB)"]),
        Words("legend", [_MARGIN], [_TOP - 10], [f"step time ({unit})"]),
        Line("cap", ((x_of(capacity), _TOP), (x_of(capacity), bottom))),
        Words("cell", [x_of(capacity) - 6], [_TOP + 12], [f"{format_bytes(capacity)} of a GPU"]),
        Line("curve-0", tuple(_stairs([(x_of(one.fullest.peak_bytes), y_of(one.step_s)) for one in held]))),
    ]
    y = bottom + 64
    for place, one in enumerate(held, start=1):
        at, high = x_of(one.fullest.peak_bytes), y_of(one.step_s)
        text = f"{format_seconds(one.step_s)}, {format_bytes(one.fullest.peak_bytes)}: {one.parallelism.named()}"
        items.append(_box("mark-0", at - _SIDE / 2, high - _SIDE / 2, _SIDE, _SIDE, tip=text))
        items.append(Words("cell", [at - 5], [high + 16], [str(place)]))
        items.append(Words("rank", [_MARGIN + 24], [y], [str(place)]))
        items.append(Words("legend", [_MARGIN + 34], [y], [text]))
        y += 18
    shaded = f"shaded: within {100 * RELATIVE_ERROR:.0f} % of the fastest, the error of such differences"
    items += [_box("near", _MARGIN + 8, y - 9, 16, 11), Words("legend", [_MARGIN + 34], [y], [shaded])]
    described = "; ".join(f"{format_seconds(one.step_s)} with {format_bytes(one.fullest.peak_bytes)}" for one in held)
    return Scene(_WIDTH, y + 20, title, described, tuple(items))


def _stairs(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the corners of a staircase through points, from the fastest to the one with the least memory.

    Between two points the line is at the slower one's time: with less memory than the faster one needs, the next
    configuration is the best.
    """
    found = []
    for (x, y), (_, following) in zip(points, [*points[1:], points[-1]], strict=True):
        found += [(x, y), (x, following)]
    return found[:-1]


def _span(values: Sequence[float]) -> tuple[float, float, list[float]]:
    """Return round ends of an axis around the values, and round marks between them."""
    low, high = min(values), max(values)
    # Equal or nearly equal values would make an axis without length, so show at least 5 % of the largest value.
    far = max(high - low, 0.05 * high)
    power = 10.0 ** math.floor(math.log10(far / 4))
    step = next(power * many for many in (1, 2, 5, 10) if far / (power * many) <= 6)
    start = max(0, math.floor((low - 0.04 * far) / step))
    end = math.ceil((high + 0.08 * far) / step)
    return start * step, end * step, [round(at * step, 12) for at in range(start, end + 1)]


def _box(style: str, x: float, y: float, width: float, height: float, *, tip: str = "") -> Boxes:
    left, top, wide, high = (np.array([side]) for side in (x, y, width, height))
    return Boxes(style, left, top, wide, high, tips=(tip,) if tip else ())
