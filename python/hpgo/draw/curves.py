"""Curves of plans or runs over a quantity that grows, for instance micro-batches or devices."""

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
    """One set of axes with its curves."""

    label: str
    curves: Mapping[str, Sequence[float]]
    """Values of each curve, by name: one for each of the curve's positions on the axis."""
    percent: bool = False
    places: Mapping[str, Sequence[float]] | None = None
    """Positions of each curve's values on a separate axis. None selects the axis that all panels share."""


def check(path: str | os.PathLike[str]) -> None:
    """Raise ArgumentError if no figure can be drawn to `path`: for its ending, or because matplotlib is missing."""
    ending = Path(path).suffix.lower()
    if ending not in still.ENDINGS:
        raise ArgumentError(
            f"can't draw `{path}`: its ending is no picture format",
            f"use one of {', '.join(still.ENDINGS)}",
            code="unsupported",
        )
    if ending in {".png", ".pdf"} and importlib.util.find_spec("matplotlib") is None:
        raise ArgumentError(
            f"drawing {ending} needs matplotlib",
            "run `pip install matplotlib`, or write .svg",
            code="missing_package",
        )


def save(
    panels: Sequence[Panel],
    places: Mapping[str, Sequence[float]],
    path: str | os.PathLike[str],
    *,
    axis: str,
    title: str,
    columns: int = 1,
) -> Path:
    """Write the panels to `path`, with `columns` panels beside each other. Return the path.

    `places` has the positions of each curve's values on the shared axis, which is logarithmic.

    Raises ArgumentError for an ending that `hpgo.draw.still` does not support, or if matplotlib is missing for PNG and
    PDF. Raises HpgoError if the file can't be written.
    """
    check(path)
    return still.save(scene(panels, places, axis=axis, title=title, columns=columns), path)


def scene(
    panels: Sequence[Panel], places: Mapping[str, Sequence[float]], *, axis: str, title: str, columns: int = 1
) -> Scene:
    """Return the picture. Equal panels give an equal picture."""
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
    # All panels share one gutter, so that their axes are aligned.
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
    """Return the value at the top of the panel's axis."""
    maximum = max((value for values in panel.curves.values() for value in values), default=0.0)
    # Leave 4 % above the highest point, so that its mark is not cut off.
    return 1.04 * maximum if 0 < maximum < math.inf else 1.0


def _marks(panel: Panel) -> list[tuple[float, str]]:
    """Return the round values of the left axis, each with its label."""
    if panel.percent:
        return [(mark / 100, f"{number_text(mark)} %") for mark in ticks(100 * _high(panel), at_most=6)]
    return [(mark, number_text(mark)) for mark in ticks(_high(panel), at_most=6)]


def _panel(
    panel: Panel,
    places: Mapping[str, Sequence[float]],
    style_of: Mapping[str, int],
    where: tuple[float, float, float, float],
) -> list[Item]:
    """Return the items of one panel: label above, marks at the left and below, and curves."""
    left, top, x0, right = where
    high, scale = _high(panel), 100 if panel.percent else 1
    counts = sorted({place for name in panel.curves for place in places[name]})
    low, far = math.log2(counts[0]), math.log2(counts[-1])
    bottom = top + _TALL

    def x_of(count: float) -> float:
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
        # Omit labels that would overlap the one before.
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
