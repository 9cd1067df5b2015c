"""Figures of the sweeps of PLANNER_REPRODUCTION.md: a small plot for each model."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING

from hpgo.base.documents import make_folder
from hpgo.draw.curves import Panel, save

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from hpgo.reproduce.answers import SweepPoint

_LINES: dict[str, Callable[[SweepPoint], float | None]] = {
    "DP, no overlap": lambda point: point.columns.no_overlap,
    "DP + P3": lambda point: point.columns.p3,
    "DP, normal overlap": lambda point: point.columns.overlap,
    "best hybrid (compatible)": lambda point: point.compatible.speedup,
    "modern plan": lambda point: point.modern.speed_up if point.modern else None,
}


def batches(points: Sequence[SweepPoint], path: Path) -> None:
    """Draw the speed-up over the global batch size. Raises ArgumentError where it can't be written."""
    _draw(points, path, "global batch size (samples)", lambda point: point.global_batch_size, list(_LINES))


def devices(points: Sequence[SweepPoint], path: Path) -> None:
    """Draw the speed-up over the number of devices. Raises ArgumentError where it can't be written."""
    _draw(points, path, "devices", lambda point: point.devices, list(_LINES)[3:])


def _draw(
    points: Sequence[SweepPoint], path: Path, axis: str, x: Callable[[SweepPoint], int], lines: Sequence[str]
) -> None:
    panels = []
    for model, group in groupby(points, key=lambda point: point.model):
        held = list(group)
        found = {
            name: [(x(point), value) for point in held if (value := _LINES[name](point)) is not None] for name in lines
        }
        curves = {name: [value for _, value in pairs] for name, pairs in found.items() if pairs}
        places = {name: [at for at, _ in pairs] for name, pairs in found.items() if pairs}
        label = f"{model}, batch {held[0].global_batch_size}" if len(lines) < len(_LINES) else model
        panels.append(Panel(label, curves, places=places))
    make_folder(path.parent)
    save(panels, {}, path, axis=axis, title="speed-up over one device", columns=3)
