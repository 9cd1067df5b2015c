"""Pictures of chain plans: compute and transfer time of each stage against the interval, and its memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from hpgo.base.messages import printable, short_names
from hpgo.base.units import format_seconds
from hpgo.draw.axis import number_text, ticks, time_unit
from hpgo.draw.fonts import fitted
from hpgo.draw.options import DrawOptions
from hpgo.draw.scene import Boxes, Item, Line, Scene, Words, legend
from hpgo.draw.svg import svg as svg_of
from hpgo.show.chain_report import megabytes, proof

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hpgo.planning.chain.plans import ChainPlan

_MARGIN, _TOP, _ROW, _BAR, _THIN = 16.0, 84.0, 44.0, 16.0, 8.0
_LEFT, _WIDE, _GAP, _MEMORY, _RIGHT = 240.0, 460.0, 56.0, 120.0, 56.0
_LEGEND = (("F", "computes"), ("lane-activation", "sends"), ("critical", "bottleneck"))


def svg(plan: ChainPlan) -> str:
    """Return an SVG with the stages as bars against the interval: compute above, transfer below, memory at the right.

    Equal plans give equal bytes.
    """
    return svg_of(_scene(plan), DrawOptions())


def _scene(plan: ChainPlan) -> Scene:
    every = f"one batch of {plan.batch_size} every {plan.interval_s:.4g} s"
    title = printable(f"{plan.model}: {every}, {plan.samples_per_s:.4g} samples/s")
    bottom = _TOP + _ROW * len(plan.stages)
    items = [*_head(title), *_axis(plan.interval_s, bottom)]
    hosts = short_names(host for stage in plan.stages for host in stage.hosts)
    for index in range(len(plan.stages)):
        items += _stage(plan, index, hosts)
    described = "; ".join(
        f"stage {number} on {', '.join(stage.hosts)}: {plan.utilization(stage):.0%} busy"
        for number, stage in enumerate(plan.stages, 1)
    )
    if plan.cuts != "all":
        described += f"; {proof(plan)}; {plan.cuts}"
    width = _LEFT + _WIDE + _GAP + _MEMORY + _RIGHT
    return Scene(width, bottom + 44, title, printable(described), tuple(items))


def _head(title: str) -> list[Item]:
    items: list[Item] = [Words("title", [_MARGIN], [_MARGIN + 16], [title])]
    at = _LEFT + _WIDE + _GAP
    items += legend(_LEGEND, _LEFT, _TOP - 22, _WIDE)[0]
    return [*items, *legend([("memory", "memory in use")], at, _TOP - 22, _MEMORY)[0]]


def _axis(pace_s: float, bottom: float) -> list[Item]:
    unit, unit_s = time_unit(pace_s)
    positions = ticks(pace_s / unit_s, at_most=6)
    xs = [_LEFT + _WIDE * (position * unit_s / pace_s if pace_s else 0.0) for position in positions]
    end = _LEFT + _WIDE
    return [
        *(Line("grid", ((x, _TOP - 8), (x, bottom))) for x in xs),
        Line("axis", ((_LEFT, bottom), (end, bottom))),
        Words("tick", xs, [bottom + 14] * len(xs), [number_text(position) for position in positions]),
        Words("tick", [_LEFT + _WIDE / 2], [bottom + 30], [f"time ({unit})"]),
        Line("end", ((end, _TOP - 8), (end, bottom))),
        Words("end", [end + 4], [_TOP - 4], [format_seconds(pace_s)]),
    ]


def _stage(plan: ChainPlan, index: int, short: Mapping[str, str]) -> list[Item]:
    stage, hop = plan.stages[index], plan.hops[index + 1]
    top = _TOP + _ROW * index + 4
    px_per_s = _WIDE / plan.interval_s if plan.interval_s else 0.0
    layers = f"layer {stage.first}" if stage.first == stage.last else f"layers {stage.first}–{stage.last}"
    layers = ", ".join(stage.layers) or layers
    others = f" +{len(stage.hosts) - 2}" if len(stage.hosts) > 2 else ""
    shown = ", ".join(short[host] for host in stage.hosts[:2]) + others
    at = _LEFT + _WIDE + _GAP
    held = stage.memory_bytes / stage.host_memory_bytes
    memory, capacity = megabytes(stage.memory_bytes, plan.units), megabytes(stage.host_memory_bytes, plan.units)
    items: list[Item] = [
        Words("legend", [_MARGIN], [top + 12], [fitted(printable(shown), 11.5, _LEFT - _MARGIN - 10)]),
        Words(
            "fact",
            [_MARGIN],
            [top + 27],
            [fitted(printable(f"{layers} · {stage.device_type}"), 11.5, _LEFT - _MARGIN - 10)],
        ),
        _box("F", _LEFT, top, px_per_s * stage.interval_s, _BAR, tip=f"computes {stage.compute_s:.6g} s"),
        Words("cell", [_LEFT + _WIDE + 38], [top + 12], [f"{plan.utilization(stage):.0%}"]),
    ]
    if hop.seconds:
        tip = f"sends {megabytes(hop.bytes, plan.units)} in {hop.seconds:.6g} s"
        items.append(_box("lane-activation", _LEFT, top + _BAR + 3, px_per_s * hop.interval_s, _THIN, tip=tip))
    if plan.slack_s(stage) == 0:
        items.append(_box("critical", _LEFT, top, px_per_s * stage.interval_s, _BAR))
    if hop.seconds and plan.slack_s(hop) == 0:
        items.append(_box("critical", _LEFT, top + _BAR + 3, px_per_s * hop.interval_s, _THIN))
    return [
        *items,
        _box("free", at, top, _MEMORY, _BAR, tip=f"{capacity} of memory"),
        _box("memory", at, top, _MEMORY * held, _BAR, tip=f"{memory} of {capacity}"),
        Words("legend", [at + _MEMORY + 6], [top + 12], [f"{held:.0%}"]),
    ]


def _box(style: str, x: float, y: float, width: float, height: float, *, tip: str = "") -> Boxes:
    left, top, wide, high = (np.array([side]) for side in (x, y, width, height))
    return Boxes(style, left, top, wide, high, tips=(tip,) if tip else ())
