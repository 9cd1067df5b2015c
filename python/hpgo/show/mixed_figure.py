"""Figure of a plan for machines that differ: step time of each way, stages of the pipeline, and its simulated step.

A kind of GPUs has the same color in all parts of the figure.
"""

from __future__ import annotations

import textwrap
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from hpgo.base.checks import check_is
from hpgo.base.messages import pluralize, printable
from hpgo.base.units import format_bytes, format_seconds
from hpgo.draw import scene as timelines
from hpgo.draw import still
from hpgo.draw.fonts import fitted
from hpgo.draw.options import options_of
from hpgo.draw.scene import Boxes, Item, Line, Scene, Steps, Words
from hpgo.llm.mixed.plan import MixedPlanSearch
from hpgo.show.mixed_report import WAYS

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from hpgo.draw.options import Theme
    from hpgo.llm.parallelism import ParallelismConfig

_MARGIN, _WIDTH, _ROW, _HIGH = 16.0, 1040, 20.0, 12.0
_WAY_AT, _WAY_PX = 270.0, 640.0
"""Left end of the bars of step times, and the width of the longest one, in pixels."""
_GPUS_AT, _DEGREES_AT, _LAYERS_AT, _MEMORY_AT, _MEMORY_PX = 80.0, 180.0, 560.0, 640.0, 240.0
"""Left ends of the columns of a table, and the width of the memory of the largest GPU, in pixels."""


@dataclass(frozen=True, slots=True)
class _Row:
    """A stage of the pipeline, or the replicas on a kind of GPUs."""

    name: str
    kind: str
    gpus: int
    degrees: str
    amount: str
    """Layers of a stage, or sequences of replicas."""
    peak_bytes: float
    capacity_bytes: float


def draw_mixed_plan(found: MixedPlanSearch, path: str | os.PathLike[str], *, theme: Theme = "auto") -> Path:
    """Draw the answer of `plan_mixed_llm` into a file that ends in .svg, .png, .pdf or .html. Return its path.

    Raises ArgumentError for another ending or theme; HpgoError if matplotlib is missing, which PNG and PDF need, or if
    the file can't be written.
    """
    still.check(path)
    return still.save(scene(found), path, theme=theme)


def scene(found: MixedPlanSearch) -> Scene:
    """Return the scene of the figure. Equal answers give equal scenes."""
    check_is("the plan", found, MixedPlanSearch, "make one with `hpgo.plan_mixed_llm`")
    gpus = pluralize(found.cluster.devices, "GPU")
    title = printable(f"{found.transformer.name} on {found.cluster.name}: {gpus}")
    # The subtitle states that the time is estimated, because figures are shown without their report.
    ends = " to ".join(map(format_seconds, (found.low_s, found.high_s)))
    fastest = f"fastest: {WAYS.get(found.best, found.best)}, {format_seconds(found.step_s)}"
    asked = f"{found.seq_length} tokens per sequence, global batch {found.global_batch_size}, {found.precision}"
    facts = textwrap.wrap(printable(f"{fastest} (estimated, 90 % range {ends}) · {asked}"), 150)
    items: list[Item] = [
        Words("title", [_MARGIN], [_MARGIN + 16], [fitted(title, 16, _WIDTH - 2 * _MARGIN, bold=True)])
    ]
    items += [Words("fact", [_MARGIN], [_MARGIN + 36 + 15 * at], [line]) for at, line in enumerate(facts)]
    colors = {kind: f"stage-{at}" for at, (kind, _) in enumerate(found.alone)}
    y = _MARGIN + 36 + 15 * len(facts) + 14
    items += _ways(found, colors, y)
    y += 24 + _ROW * len(found.steps_s) + 18
    if found.pipeline is not None:
        rows = list(_stages(found))
        held = f"{pluralize(found.pipeline.micro_batches, 'micro-batch')} of"
        held += f" {pluralize(found.pipeline.samples_per_micro_batch, 'sequence')}, 1F1B"
        heading = f"One pipeline through several kinds: {format_seconds(found.pipeline.step_s)}, {held}"
        items += _table(heading, ("stage", "GPUs", "degrees of each stage", "layers"), rows, colors, y)
        y += 44 + _ROW * len(rows) + 10
        step = timelines.scene([found.pipeline.timeline()], options_of({"width_px": _WIDTH}, 1))
        items += [_lower(item, y) for item in step.items]
        y += step.height_px
    if found.shares:
        rows = list(_replicas(found))
        heading = f"Kinds apart: {format_seconds(found.apart_s or 0.0)}, with the sum of gradients over the kinds"
        items += _table(heading, ("", "GPUs", "degrees of each kind", "sequences"), rows, colors, y)
        y += 44 + _ROW * len(rows) + 10
    described = "; ".join(f"{WAYS.get(way, way)} {format_seconds(step_s)}" for way, step_s in found.steps_s.items())
    return Scene(_WIDTH, y + _MARGIN, title, printable(described), tuple(items))


def _ways(found: MixedPlanSearch, colors: dict[str, str], y: float) -> Iterator[Item]:
    """Yield a bar for the step time of each way, and the bound as a line through all bars."""
    steps = sorted(found.steps_s.items(), key=lambda one: one[1])
    px_per_s = _WAY_PX / steps[-1][1]
    yield Words("heading", [_MARGIN], [y + 12], ["Step time of each way to train (estimated)"])
    top = y + 24
    for at, (way, step_s) in enumerate(steps):
        base = top + at * _ROW
        style = colors.get(way.removesuffix(" alone"), "rate")
        yield Words("legend", [_MARGIN], [base + 11], [fitted(printable(WAYS.get(way, way)), 11.5, _WAY_AT - 30)])
        yield _box(style, _WAY_AT, base + 1, px_per_s * step_s, _HIGH)
        yield Words("legend", [_WAY_AT + px_per_s * step_s + 8], [base + 11], [format_seconds(step_s)])
    bound = _WAY_AT + px_per_s * found.work_bound_s
    bottom = top + _ROW * len(steps)
    yield Line("end", ((bound, top - 3), (bound, bottom)))
    yield Words("note", [bound + 5], [bottom + 6], [f"{format_seconds(found.work_bound_s)}: no plan takes less"])


def _stages(found: MixedPlanSearch) -> Iterator[_Row]:
    at = 0
    for part in found.pipeline.stages if found.pipeline is not None else ():
        for layers, peak_bytes in zip(part.layers, part.peak_bytes, strict=True):
            gpus, degrees = part.gpus // len(part.layers), _degrees(part.parallelism)
            yield _Row(str(at), part.kind, gpus, degrees, str(layers), peak_bytes, part.capacity_bytes)
            at += 1


def _replicas(found: MixedPlanSearch) -> Iterator[_Row]:
    for share in found.shares:
        one = share.estimate
        peak_bytes, degrees = one.fullest.peak_bytes, one.parallelism.named()
        yield _Row("", share.kind, one.gpus, degrees, str(share.samples), peak_bytes, one.capacity_bytes)


def _degrees(config: ParallelismConfig) -> str:
    """Return the degrees inside a stage in words. The number of stages is visible in the table."""
    values = [("tp", config.tp), ("cp", config.cp), ("ep", config.ep), ("dp", config.dp)]
    words = [f"{name} {degree}" for name, degree in values if degree > 1 or name in {"tp", "dp"}]
    words += [f"micro-batch {config.micro_batch_size}"]
    return ", ".join([*words, *(["recompute full"] if config.recompute == "full" else [])])


def _table(
    heading: str, names: tuple[str, str, str, str], rows: Sequence[_Row], colors: dict[str, str], y: float
) -> Iterator[Item]:
    """Yield rows with their degrees, and the memory of a GPU as a bar inside the memory that it has."""
    starts = (_MARGIN, _GPUS_AT, _DEGREES_AT, _LAYERS_AT)
    memory = f"memory of a GPU{'' if names[0] else ', the fullest one'}"
    yield Words("heading", [_MARGIN], [y + 12], [heading])
    yield Words("fact", [*starts, _MEMORY_AT], [y + 32] * 5, [*names, memory])
    px_per_byte = _MEMORY_PX / max(row.capacity_bytes for row in rows)
    for at, row in enumerate(rows):
        base = y + 40 + at * _ROW
        # Kinds without a stage number start with their color alone.
        yield _box(colors[row.kind], _GPUS_AT - 24, base + 1, 16, _HIGH)
        texts = [row.name, f"{row.kind} × {row.gpus}", row.degrees, row.amount]
        rooms = [_GPUS_AT - 50, _DEGREES_AT - _GPUS_AT - 8, _LAYERS_AT - _DEGREES_AT - 8, _MEMORY_AT - _LAYERS_AT - 8]
        shown = [fitted(printable(text), 11.5, room) for text, room in zip(texts, rooms, strict=True)]
        yield Words("legend", starts, [base + 11] * 4, shown)
        yield _box("free", _MEMORY_AT, base + 1, px_per_byte * row.capacity_bytes, _HIGH)
        yield _box(colors[row.kind], _MEMORY_AT, base + 1, px_per_byte * row.peak_bytes, _HIGH)
        held = f"{format_bytes(row.peak_bytes)} of {format_bytes(row.capacity_bytes)}"
        yield Words("legend", [_MEMORY_AT + _MEMORY_PX + 8], [base + 11], [held])


def _lower(item: Item, by: float) -> Item:
    """Return an item of another scene, `by` pixels further down."""
    if isinstance(item, Boxes):
        return replace(item, y=item.y + by)
    if isinstance(item, Steps):
        return replace(item, tops=item.tops + by, base=item.base + by)
    if isinstance(item, Line):
        return replace(item, points=tuple((x, y + by) for x, y in item.points))
    return replace(item, y=[y + by for y in item.y])


def _box(style: str, x: float, y: float, width: float, height: float) -> Boxes:
    left, top, wide, high = (np.array([side]) for side in (x, y, width, height))
    return Boxes(style, left, top, wide, high)
