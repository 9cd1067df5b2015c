"""Step time, idle share and memory against the number of micro-batches, as curves."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpgo.base.errors import HpgoError
from hpgo.draw import palette

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hpgo.timing.runs import SweepPoint

# Okabe and Ito's colours, told apart by colour-blind readers; markers tell more.
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
_MARKERS = "os^Dv*P"


def save_sweep(points: Sequence[SweepPoint], path: str | Path) -> Path:
    """Writes the curves of `points` to a `.png`, `.svg` or `.pdf` and returns its path.

    Where bytes are not known, memory is counted in activations of a rank's whole part of the model.

    Raises HpgoError where matplotlib is missing or the file can't be written.
    """
    path = Path(path)
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
        from matplotlib.ticker import PercentFormatter, StrMethodFormatter
    except ImportError as error:
        raise HpgoError(
            "sweeps are drawn by matplotlib, which is not installed",
            "`pip install 'hpgo[plot]'`, or leave out `--output`",
        ) from error
    names = list(dict.fromkeys(point.schedule for point in points))
    with_bytes = all(point.peak_memory_bytes is not None for point in points)
    figure = Figure(figsize=(7.5, 8), layout="constrained")
    figure.set_facecolor(palette.PAPER[0])
    step, idle, memory = figure.subplots(3, 1, sharex=True)
    for at, name in enumerate(names):
        mine = [point for point in points if point.schedule == name]
        counts = [point.micro_batches for point in mine]
        look = {"color": _COLOURS[at % 7], "marker": _MARKERS[at % 7], "markersize": max(3.5, 6 - at), "linewidth": 1.6}
        look["dashes"] = (6, 2 * at) if at else (None, None)  # what lies behind another stays to be seen
        step.plot(counts, [point.makespan_s / point.micro_batches for point in mine], label=name, **look)
        idle.plot(counts, [point.idle_over_total for point in mine], **look)
        memory.plot(counts, [_memory(point) for point in mine], **look)
    step.set_ylabel("step time / micro-batches (s)")
    idle.set_ylabel("idle share of all ranks")
    idle.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    memory.set_ylabel(
        "peak memory (GB)" if with_bytes else "most activations held by a rank\n(micro-batches × its layers)"
    )
    memory.set_xlabel("micro-batches")
    for axes in (step, idle, memory):
        axes.set_ylim(bottom=0, top=1.04 * axes.get_ylim()[1])
        axes.set_xscale("log", base=2)
        axes.grid(visible=True, color="#d8dde3", linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
    memory.xaxis.set_major_formatter(StrMethodFormatter("{x:.0f}"))
    step.legend(frameon=False, ncols=min(4, len(names)), loc="upper right")
    kind = path.suffix.lower()
    dates: dict[str, Any] = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}.get(kind, {"Software": None})
    try:
        with rc_context({"pdf.fonttype": 42, "svg.fonttype": "none", "svg.hashsalt": "hpgo"}):
            figure.savefig(path, dpi=160, metadata=dates)
    except OSError as error:
        raise HpgoError(
            f"can't write `{path}`: {error.strerror}", "choose a folder that exists and is yours"
        ) from error
    return path


def _memory(point: SweepPoint) -> float:
    if point.peak_memory_bytes is None:
        return float(point.activations_held)
    return float(point.peak_memory_bytes) / 1e9
