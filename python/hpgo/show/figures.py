"""Figures of sweeps: plans over batch size or devices, and schedules over the number of micro-batches."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING

from hpgo.draw.curves import Panel, save

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from hpgo.planning.plans import Plan
    from hpgo.timing.runs import SweepPoint


def draw_plans(plans: Sequence[Plan], path: str | os.PathLike[str]) -> Path:
    """Draw throughput and speed-up efficiency over the batch size or the number of devices into a file.

    The axis is the batch size, with a curve for each cluster, unless there is only one batch size.

    Raises ArgumentError for an ending other than .svg, .png, .pdf or .html, and HpgoError if matplotlib is missing,
    which PNG and PDF need, or if the file can't be written.
    """
    # With one batch size, the only axis left is the number of devices.
    over_batch = len({plan.global_batch_size for plan in plans}) > 1
    clusters = {plan.cluster for plan in plans}
    # Plans may come in any order, but a curve needs increasing values.
    lines: dict[str, list[Plan]] = {}
    for plan in sorted(plans, key=lambda plan: (plan.global_batch_size, plan.devices)):
        lines.setdefault(plan.cluster if over_batch else "", []).append(plan)

    def panel(label: str, value: Callable[[Plan], float], *, percent: bool = False) -> Panel:
        return Panel(label, {name: [value(plan) for plan in line] for name, line in lines.items()}, percent)

    first = plans[0]
    others = "cluster" if over_batch else f"devices, batch {first.global_batch_size}"
    return save(
        [
            panel("samples per second", lambda plan: plan.samples_per_s),
            panel("share of a perfect speed-up", lambda plan: plan.speed_up / plan.devices, percent=True),
        ],
        {
            name: [plan.global_batch_size if over_batch else plan.devices for plan in line]
            for name, line in lines.items()
        },
        path,
        axis="global batch size, samples" if over_batch else "devices",
        title=f"{first.profile} on {first.cluster}" if len(clusters) == 1 else f"{first.profile}, by {others}",
    )


def draw_runs(points: Sequence[SweepPoint], path: str | os.PathLike[str]) -> Path:
    """Draw step time, idle share and memory of schedules over the number of micro-batches into a file.

    Without sizes in bytes, the unit of memory is the activations of all layers of a rank for one micro-batch.

    Raises the errors of `draw_plans`.
    """
    lines = {name: list(line) for name, line in groupby(points, key=lambda point: point.schedule)}
    sizes = [point.peak_memory_bytes for point in points]

    def panel(label: str, value: Callable[[SweepPoint], float], *, percent: bool = False) -> Panel:
        return Panel(label, {name: [value(point) for point in line] for name, line in lines.items()}, percent)

    return save(
        [
            panel("step time / micro-batches (s)", lambda point: point.makespan_s / point.micro_batches),
            panel("idle share of all ranks", lambda point: point.idle_over_total, percent=True),
            panel("most activations held by a rank\n(micro-batches × its layers)", lambda point: point.activations_held)
            if None in sizes
            else panel("peak memory (GB)", lambda point: (point.peak_memory_bytes or 0.0) / 1e9),
        ],
        {name: [point.micro_batches for point in line] for name, line in lines.items()},
        path,
        axis="micro-batches",
        title="",
    )
