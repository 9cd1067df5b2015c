"""The sweeps as pictures: one small plot a model. Needs matplotlib (`pip install 'hpgo[plot]'`)."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING, Any

from hpgo.base.documents import make_folder
from hpgo.base.errors import ArgumentError
from hpgo.base.files import writing

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from hpgo.reproduce.answers import SweepPoint

# Okabe and Ito's colours, which colour-blind readers can tell apart.
_LINES: dict[str, tuple[str, str, Callable[[SweepPoint], float | None]]] = {
    "DP, no overlap": ("#999999", ":", lambda point: point.columns.no_overlap),
    "DP + P3": ("#E69F00", "--", lambda point: point.columns.p3),
    "DP, normal overlap": ("#56B4E9", "--", lambda point: point.columns.overlap),
    "best hybrid (compatible)": ("#0072B2", "-", lambda point: point.compatible.speedup),
    "modern plan": ("#D55E00", "-", lambda point: point.modern.speed_up if point.modern else None),
}


def batches(points: Sequence[SweepPoint], path: Path) -> None:
    """Speed-up over global batch size, to an SVG file. Raises ArgumentError if matplotlib is missing."""
    _draw(points, path, "global batch size (samples)", lambda point: point.global_batch_size, list(_LINES))


def devices(points: Sequence[SweepPoint], path: Path) -> None:
    """Speed-up over device count, to an SVG file. Raises ArgumentError if matplotlib is missing."""
    _draw(points, path, "devices", lambda point: point.devices, list(_LINES)[3:])


def _draw(
    points: Sequence[SweepPoint], path: Path, label: str, x: Callable[[SweepPoint], int], lines: Sequence[str]
) -> None:
    try:
        import matplotlib as mpl
        from matplotlib.figure import Figure
    except ImportError:
        raise ArgumentError("figures need matplotlib, which is not installed", "pip install 'hpgo[plot]'") from None
    models = [(model, list(group)) for model, group in groupby(points, key=lambda point: point.model)]
    columns = 3
    rows = -(-len(models) // columns)
    with mpl.rc_context({"svg.hashsalt": "hpgo", "font.size": 8, "svg.fonttype": "none"}):
        figure = Figure(figsize=(9, 2.3 * rows + 0.4), layout="constrained")
        axes = list(figure.subplots(rows, columns).flat)
        for axis, (model, group) in zip(axes, models, strict=False):
            _plot(axis, group, x, lines)
            axis.set_title(f"{model}, batch {group[0].global_batch_size}" if len(lines) < len(_LINES) else model)
        for axis in axes[len(models) :]:
            axis.axis("off")
        figure.legend(*axes[0].get_legend_handles_labels(), loc="outside upper center", ncols=len(lines))
        figure.supxlabel(label)
        figure.supylabel("speed-up over one device")
        make_folder(path.parent)
        with writing(path, ArgumentError) as file:
            figure.savefig(file, format=path.suffix[1:], metadata={"Date": None})


def _plot(axis: Any, group: Sequence[SweepPoint], x: Callable[[SweepPoint], int], lines: Sequence[str]) -> None:
    for name in lines:
        colour, style, y = _LINES[name]
        values = [(x(point), value) for point in group if (value := y(point)) is not None]
        axis.plot(*zip(*values, strict=True), color=colour, linestyle=style, marker=".", markersize=3, label=name)
    axis.set_xscale("log", base=2)
    axis.set_xticks([x(point) for point in group], labels=[str(x(point)) for point in group], rotation=45)
    axis.set_ylim(bottom=0)
    axis.grid(alpha=0.3)
