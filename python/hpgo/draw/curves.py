"""Curves on axes that count something: how plans or runs change as it grows."""

from __future__ import annotations

import importlib.util
import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from hpgo.base.messages import printable
from hpgo.draw import palette, still
from hpgo.draw.axis import number_text, ticks
from hpgo.draw.fonts import text_px
from hpgo.draw.scene import Boxes, Item, Line, Scene, Words, legend
from hpgo.errors import ArgumentError

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping, Sequence

_MARGIN, _WIDTH, _TALL, _SIDE = 16.0, 760.0, 190.0, 6.0


@dataclass(frozen=True, slots=True)
class Panel:
    """What one set of axes shows."""

    label: str
    curves: Mapping[str, Sequence[float]]
    """By name, a value for each of the curve's places on the axis."""
    percent: bool = False
    places: Mapping[str, Sequence[int]] | None = None
    """Where on an axis of its own each curve has its values; None is the axis that all panels share."""


def check(path: str | os.PathLike[str]) -> None:
    """Raises ArgumentError if no figure can be drawn to `path`, for its ending or for want of matplotlib."""
    ending = Path(path).suffix.lower()
    if ending not in still.ENDINGS:
        raise ArgumentError(f"can't draw `{path}`", f"end it in {', '.join(still.ENDINGS)}", code="unsupported")
    if ending in {".png", ".pdf"} and importlib.util.find_spec("matplotlib") is None:
        raise ArgumentError(
            f"drawing {ending} needs matplotlib",
            "install it: `pip install matplotlib`, or end the name in .svg",
            code="missing_package",
        )


def save(
    panels: Sequence[Panel],
    places: Mapping[str, Sequence[int]],
    path: str | os.PathLike[str],
    *,
    axis: str,
    title: str,
    columns: int = 1,
) -> Path:
    """Writes the panels to `path`, `columns` of them beside each other, and returns it.

    `places` says where on the shared axis, which doubles from mark to mark, each curve has its values.

    Raises ArgumentError for another ending than those of `hpgo.draw.still`, or where matplotlib is missing, which PNG
    and PDF need; HpgoError where the file can't be written.
    """
    check(path)
    return still.save(scene(panels, places, axis=axis, title=title, columns=columns), path)


def scene(
    panels: Sequence[Panel], places: Mapping[str, Sequence[int]], *, axis: str, title: str, columns: int = 1
) -> Scene:
    """The picture; the same panels give the same one."""
    names = list(dict.fromkeys(name for panel in panels for name in panel.curves))
    style_of = {name: at % palette.CURVES for at, name in enumerate(names)}
    items: list[Item] = []
    y = _MARGIN
    if title:
        items.append(Words("title", [_MARGIN], [y + 16], [printable(title)]))
        y += 30
    if len(names) > 1:
        entries = [(f"curve-{style_of[name]}", printable(name)) for name in names]
        words, y = legend(entries, _MARGIN, y + 14, _WIDTH - 2 * _MARGIN)
        items += words
    gutter = max(text_px(text, 11) for panel in panels for _, text in _marks(panel)) + 8
    wide = (_WIDTH - 2 * _MARGIN - (columns - 1) * 14) / columns
    for at, panel in enumerate(panels):
        left, top = _MARGIN + at % columns * (wide + 14), y + 26 + at // columns * (_TALL + 64)
        items += _panel(panel, panel.places or places, style_of, (left, top, left + gutter, left + wide))
    y += -(-len(panels) // columns) * (_TALL + 64) + 8
    items.append(Words("tick", [_WIDTH / 2], [y], [axis]))
    described = "; ".join(" ".join(panel.label.split()) for panel in panels)
    return Scene(_WIDTH, y + _MARGIN, printable(title) or axis, printable(described), tuple(items))


def _high(panel: Panel) -> float:
    """What the height of its axes stands for."""
    most = max((value for values in panel.curves.values() for value in values), default=0.0)
    return 1.04 * most if 0 < most < math.inf else 1.0


def _marks(panel: Panel) -> list[tuple[float, str]]:
    """Round values of the axis at the left, and how they are written."""
    if panel.percent:
        return [(mark / 100, f"{number_text(mark)} %") for mark in ticks(100 * _high(panel), at_most=6)]
    return [(mark, number_text(mark)) for mark in ticks(_high(panel), at_most=6)]


def _panel(
    panel: Panel,
    places: Mapping[str, Sequence[int]],
    style_of: Mapping[str, int],
    where: tuple[float, float, float, float],
) -> list[Item]:
    """One set of axes: its label above, marks at its left and below, and its curves."""
    left, top, x0, right = where
    high, scale = _high(panel), 100 if panel.percent else 1
    counts = sorted({place for name in panel.curves for place in places[name]})
    low, far = math.log2(counts[0]), math.log2(counts[-1])
    bottom = top + _TALL

    def x_of(count: int) -> float:
        share = (math.log2(count) - low) / (far - low) if far > low else 0.5
        return x0 + 10 + (right - x0 - 24) * share

    def y_of(value: float) -> float:
        return bottom - _TALL * min(value / high, 1.0)

    items: list[Item] = [Words("legend", [left], [top - 10], [printable(" ".join(panel.label.split()))])]
    for mark, text in _marks(panel):
        y = y_of(mark)
        items.append(Line("axis" if mark == 0 else "grid", ((x0, y), (right, y))))
        items.append(Words("rank", [x0 - 6], [y + 4], [text]))
    shown_to = -math.inf
    for count in counts:
        x, text = x_of(count), number_text(count)
        items.append(Line("axis", ((x, bottom), (x, bottom + 4))))
        half = text_px(text, 11) / 2
        if x - half > shown_to + 5:
            items.append(Words("tick", [x], [bottom + 16], [text]))
            shown_to = x + half
    for name, values in panel.curves.items():
        points = tuple((x_of(count), y_of(value)) for count, value in zip(places[name], values, strict=True))
        if len(points) > 1:
            items.append(Line(f"curve-{style_of[name]}", points))
        xs, ys = (np.array(side) for side in zip(*points, strict=True))
        side = np.full(len(points), _SIDE)
        tips = [
            printable(f"{name}: {number_text(value * scale)}{' %' if panel.percent else ''} at {number_text(count)}")
            for count, value in zip(places[name], values, strict=True)
        ]
        items.append(Boxes(f"mark-{style_of[name]}", xs - _SIDE / 2, ys - _SIDE / 2, side, side, tips=tips))
    return items
