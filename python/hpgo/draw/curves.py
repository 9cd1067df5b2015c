"""Curves below each other on one axis that counts something: how plans or runs change as it grows. Needs matplotlib."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpgo.base.errors import ArgumentError
from hpgo.base.files import writing
from hpgo.base.signals import uninterrupted
from hpgo.base.wording import printable
from hpgo.draw import palette

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping, Sequence

ENDINGS = (".svg", ".png", ".pdf")
# Okabe and Ito's colours, told apart by colour-blind readers; markers tell more.
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
_MARKERS = "os^Dv*P"
_MOST_TICKS = 8


@dataclass(frozen=True, slots=True)
class Panel:
    """What one set of axes shows."""

    label: str
    curves: Mapping[str, Sequence[float]]
    """By name, a value for each of the curve's places on the axis that the panels share."""
    percent: bool = False


def check(path: str | os.PathLike[str]) -> None:
    """Raises ArgumentError if no figure can be drawn to `path`, for its ending or for want of matplotlib."""
    if Path(path).suffix.lower() not in ENDINGS:
        raise ArgumentError(f"can't draw `{path}`", f"end it in {', '.join(ENDINGS)}")
    if importlib.util.find_spec("matplotlib") is None:
        raise ArgumentError("drawing needs matplotlib", "install it: pip install 'hpgo[plot]'")


def save(
    panels: Sequence[Panel], places: Mapping[str, Sequence[int]], path: str | os.PathLike[str], *, axis: str, title: str
) -> Path:
    """Writes the panels to `path` and returns it.

    `places` says where on the shared axis, which doubles from mark to mark, each curve has its values.

    Raises ArgumentError for another ending than `ENDINGS`, if matplotlib is missing, or if the file can't be written.
    """
    check(path)
    with uninterrupted():
        from matplotlib import rc_context
        from matplotlib.figure import Figure
        from matplotlib.ticker import NullLocator, PercentFormatter, StrMethodFormatter

    path = Path(path)
    figure = Figure(figsize=(7.5, 2.6 * len(panels) + 0.2), layout="constrained")
    figure.set_facecolor(palette.PAPER[0])
    figure.suptitle(printable(title), parse_math=False)
    rows = figure.subplots(len(panels), 1, sharex=True)
    for axes, panel in zip(rows, panels, strict=True):
        for at, (name, values) in enumerate(panel.curves.items()):
            axes.plot(places[name], values, **_look(at))
        axes.set_ylabel(panel.label)
        axes.set_ylim(bottom=0, top=1.04 * axes.get_ylim()[1])
        axes.set_xscale("log", base=2)
        axes.grid(visible=True, color="#d8dde3", linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
        if panel.percent:
            axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    marks = sorted({place for places_of_curve in places.values() for place in places_of_curve})
    if len(marks) <= _MOST_TICKS:
        rows[-1].set_xticks(marks)
        rows[-1].xaxis.set_minor_locator(NullLocator())
    rows[-1].xaxis.set_major_formatter(StrMethodFormatter("{x:.0f}"))
    rows[-1].set_xlabel(axis)
    if len(places) > 1:
        # Named here, as a label that starts with `_` would be left out, and a `$` start a formula.
        legend = rows[0].legend(rows[0].lines, [" "] * len(rows[0].lines), frameon=False, ncols=min(4, len(places)))
        for words, name in zip(legend.get_texts(), panels[0].curves, strict=True):
            words.set(text=printable(name), parse_math=False)
    kind = path.suffix.lower()
    dates: dict[str, Any] = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}.get(kind, {"Software": None})
    with (
        rc_context({"pdf.fonttype": 42, "svg.fonttype": "none", "svg.hashsalt": "hpgo"}),
        writing(path, ArgumentError) as file,
    ):
        figure.savefig(file, format=kind[1:], dpi=160, metadata=dates)
    return path


def _look(at: int) -> dict[str, Any]:
    look = {"color": _COLOURS[at % 7], "marker": _MARKERS[at % 7], "markersize": max(3.5, 6 - at), "linewidth": 1.6}
    # What lies behind another curve stays to be seen.
    return look | {"dashes": (6, 2 * at) if at else (None, None)}
