"""Figure of cost and GPUs against the time of a training run, with a curve for each kind of node."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpgo.base.units import format_count
from hpgo.draw.curves import Panel, save
from hpgo.errors import ArgumentError

if TYPE_CHECKING:
    import os
    from pathlib import Path

    from hpgo.llm.size import LlmSizes


def draw_sizes(sizes: LlmSizes, path: str | os.PathLike[str], *, currency: str = "") -> Path:
    """Draw all clusters of `sizes` into a file that ends in .svg, .png, .pdf or .html.

    Raises ArgumentError if there are none and for another ending; HpgoError if matplotlib is missing, which PNG and PDF
    need, or if the file can't be written.
    """
    if not sizes.points:
        raise ArgumentError("there are no clusters to draw", "allow more GPUs, or other kinds of nodes")
    runs = {kind: sorted(sizes.of_kind(kind), key=lambda point: point.days) for kind in sizes.kinds}
    runs = {kind: points for kind, points in runs.items() if points}
    cost = f"cost ({currency})" if sizes.hour_prices else "GPU-hours"
    return save(
        [
            Panel(cost, {kind: [sizes.cost(point) for point in points] for kind, points in runs.items()}),
            Panel("GPUs", {kind: [point.gpus for point in points] for kind, points in runs.items()}),
        ],
        {kind: [float(f"{point.days:.3g}") for point in points] for kind, points in runs.items()},
        path,
        axis="days of the run (estimated)",
        title=f"{sizes.transformer.name}: {format_count(sizes.tokens)} tokens",
    )
