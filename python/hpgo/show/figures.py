"""Several plans in one figure: how throughput and its efficiency grow with the batch or the cluster."""

from __future__ import annotations

import importlib.util
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

from hpgo.base.errors import ArgumentError

if TYPE_CHECKING:
    import os
    from collections.abc import Sequence

    from hpgo.planning.plans import Plan

_ENDINGS = (".svg", ".png", ".pdf")
# Okabe and Ito's palette, which colour-blind readers can tell apart
_COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#000000")
_MARKERS = "osD^vP*"


def check(path: str | os.PathLike[str]) -> None:
    """Raises ArgumentError if no figure can be drawn to `path`, for its ending or for want of matplotlib."""
    if Path(path).suffix not in _ENDINGS:
        raise ArgumentError(f"can't draw `{path}`", f"end it in {', '.join(_ENDINGS)}")
    if importlib.util.find_spec("matplotlib") is None:
        raise ArgumentError("drawing needs matplotlib", "install it: pip install 'hpgo[plot]'")


def draw_sweep(plans: Sequence[Plan], path: str | os.PathLike[str]) -> None:
    """Writes throughput and share of a perfect speed-up, over the batch size or the number of devices.

    The x axis is the batch size, with a line for each cluster, unless there is only one batch size.

    Raises ArgumentError for another ending than .svg, .png or .pdf, if matplotlib is missing, or if the file can't be
    written.
    """
    check(path)
    from matplotlib.figure import Figure
    from matplotlib.ticker import NullLocator, PercentFormatter

    over_batch = len({plan.global_batch_size for plan in plans}) > 1
    figure = Figure(figsize=(9, 4), layout="constrained")
    throughput, efficiency = figure.subplots(1, 2)
    lines = groupby(plans, key=lambda plan: plan.cluster if over_batch else "")
    ticks = sorted({plan.global_batch_size if over_batch else plan.devices for plan in plans})
    for at, (name, group) in enumerate(lines):
        line = sorted(group, key=lambda plan: (plan.global_batch_size, plan.devices))
        xs = [plan.global_batch_size if over_batch else plan.devices for plan in line]
        style = {"color": _COLOURS[at % len(_COLOURS)], "marker": _MARKERS[at % len(_MARKERS)], "label": name}
        throughput.plot(xs, [plan.samples_per_s for plan in line], **style)
        efficiency.plot(xs, [plan.speed_up / plan.devices for plan in line], **style)
    for axes, title in ((throughput, "samples per second"), (efficiency, "share of a perfect speed-up")):
        axes.set_title(title)
        axes.set_xscale("log", base=2)
        axes.set_xticks(ticks, [str(tick) for tick in ticks])
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set_xlabel("global batch size, samples" if over_batch else "devices")
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
    efficiency.yaxis.set_major_formatter(PercentFormatter(1.0))
    efficiency.set_ylim(0, 1.05)
    if over_batch:
        throughput.legend(frameon=False)
    first = plans[0]
    figure.suptitle(
        f"{first.profile} on {first.cluster}"
        if len({plan.cluster for plan in plans}) == 1
        else f"{first.profile}, by {'cluster' if over_batch else f'devices, batch {first.global_batch_size}'}"
    )
    try:
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise ArgumentError(f"can't write `{path}`: {error.strerror}", "name a file in a folder that exists") from None
