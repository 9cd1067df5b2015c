"""Layout of pictures: timelines become a scene of boxes, steps, lines and words, in pixels from the top left.

Only this module decides the layout; `svg`, `raster` and `tikz` only write it. A picture has, from top to bottom: the
title, a heading and one row per rank for each timeline, the shared time axis, the legend of what occurs, the comparison
table, and notes on what was omitted. A row may have a lane of transfers and a memory curve below it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from hpgo.base.units import format_bytes, format_seconds
from hpgo.draw import palette
from hpgo.draw.axis import drawn_span_s, number_text, ticks, time_unit
from hpgo.draw.density import Intervals, equals, median_s, parts, shares
from hpgo.draw.facts import (
    bar_of_stage,
    barred,
    comparison,
    counted,
    definitions,
    drawn_caps,
    far_cap,
    memory_top_bytes,
    names,
    peak_bytes,
    range_text,
    rank_name,
    summary,
    sync_rows,
    title,
)
from hpgo.draw.fonts import DIGIT_EM, fitted, text_px
from hpgo.programs.schedule import KINDS
from hpgo.timing.measures import CAUSES, TRANSFER_KINDS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from hpgo.draw.options import DrawOptions
    from hpgo.timing.timeline import Timeline

    Floats = NDArray[np.float64]

# Limits that keep pictures readable and files small: rows, arrows, and cells and points of areas. Not tuned.
_MAX_ROWS = 128
_MAX_ARROWS = 5_000
_MAX_DENSITY_CELLS = 60_000
_MAX_CURVE_POINTS = 60_000
_MARGIN_PX = 16.0
_NUMBER_PX = (6.5, 11.0)
"""Smallest and largest font size of the numbers in boxes, in pixels."""
_TALLEST_PX, _CURVE_PX, _BAR_PX = 34.0, 18.0, 3.0
"""Largest height of boxes, smallest height of memory curves, and height of bars that mark virtual stages, in pixels."""
_WIDEST_NAME = 0.32
"""Largest fraction of the picture's width for the names of rows."""


@dataclass(frozen=True, slots=True)
class Boxes:
    """Rectangles of one style, in pixels."""

    style: str
    x: Floats
    y: Floats
    width: Floats
    height: Floats
    tips: Sequence[str] = ()
    """Tooltips of the rectangles. Empty if there are none."""
    mark: Mapping[str, str] = field(default_factory=dict)
    """Attributes by which a web page finds the rectangles. Empty if there are none."""

    def where(self, chosen: NDArray[np.bool_], mark: Mapping[str, str]) -> Boxes:
        """Return some of the rectangles, with other attributes."""
        return Boxes(self.style, self.x[chosen], self.y[chosen], self.width[chosen], self.height[chosen], mark=mark)


@dataclass(frozen=True, slots=True)
class Steps:
    """The area below a step function: `tops[i]` between `edges[i]` and `edges[i + 1]`, down to `base`."""

    style: str
    edges: Floats
    tops: Floats
    base: float


@dataclass(frozen=True, slots=True)
class Line:
    """A polyline, with an arrow head at its end if `arrow`."""

    style: str
    points: tuple[tuple[float, float], ...]
    arrow: bool = False


@dataclass(frozen=True, slots=True)
class Words:
    """Texts in one font. `y` is the baseline. `on` and `size_px` override the font's color and size."""

    font: str
    x: Sequence[float]
    y: Sequence[float]
    texts: Sequence[str]
    on: str = ""
    """Style of the boxes behind the texts, which determines their color. Empty if there are none."""
    size_px: float | None = None
    mark: Mapping[str, str] = field(default_factory=dict)
    """Attributes by which a web page finds the texts, like the attributes of boxes."""


Item = Boxes | Steps | Line | Words


@dataclass(frozen=True, slots=True)
class Scene:
    """A picture with all its items, in drawing order."""

    width_px: float
    height_px: float
    title: str
    description: str
    items: tuple[Item, ...]


@dataclass(frozen=True, slots=True)
class _Bars:
    """Boxes with times instead of pixels: start, end, top in pixels, and the height that all have in common."""

    start_s: Floats
    end_s: Floats
    y: Floats
    height_px: float

    def half(self, number: int) -> _Bars:
        """Return the upper (0) or lower (1) half of each box."""
        return _Bars(self.start_s, self.end_s, self.y + number * self.height_px / 2, self.height_px / 2)

    def where(self, chosen: NDArray[np.bool_]) -> _Bars:
        return _Bars(self.start_s[chosen], self.end_s[chosen], self.y[chosen], self.height_px)


@dataclass
class _Canvas:
    """The items drawn so far, and the entries for the legend and the notes."""

    options: DrawOptions
    x0: float
    """Left end of the time axis, in pixels."""
    px_per_s: float
    end_s: float
    memory_top_bytes: float
    top: float = math.inf
    """Top of the first row, in pixels."""
    items: list[Item] = field(default_factory=list)
    legend: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def x(self, time_s: Floats) -> Floats:
        return self.x0 + time_s * self.px_per_s

    def boxes(self, style: str, bars: _Bars) -> Boxes:
        x = self.x(bars.start_s)
        return Boxes(style, x, bars.y, self.x(bars.end_s) - x, np.full(len(x), bars.height_px))

    def parted(self, style: str, bars: _Bars) -> Boxes:
        """Return the boxes with thin gaps between neighbors. The gap is smaller for thin boxes."""
        boxes = self.boxes(style, bars)
        return replace(boxes, width=boxes.width - np.minimum(0.7, 0.12 * boxes.width))

    def word(self, font: str, x: float, y: float, text: str) -> None:
        self.items.append(Words(font, [x], [y], [text]))


@dataclass(frozen=True, slots=True)
class _Rows:
    """Vertical layout of the ranks of one timeline. Each row holds `per_row` ranks and has up to three strips."""

    top: float
    count: int
    per_row: int
    box_px: float
    lane_px: float
    curve_px: float
    gap_px: float

    @property
    def pitch_px(self) -> float:
        return self.box_px + self.lane_px + self.curve_px + self.gap_px

    @property
    def bottom(self) -> float:
        return self.top + self.count * self.pitch_px - self.gap_px

    def y(self, rank: NDArray[np.integer]) -> Floats:
        return self.top + (rank // self.per_row).astype(np.float64) * self.pitch_px


def scene(timelines: Sequence[Timeline], options: DrawOptions) -> Scene:
    """Lay out one or several timelines on one time axis."""
    end_s = drawn_span_s(timelines)
    labels = names(timelines, options.labels)
    # The names determine the left margin, so measure them before anything else is placed.
    widest_px = _WIDEST_NAME * options.width_px
    named_px = max(text_px(fitted(name, 11, widest_px), 11) for one in timelines for name in _row_names(one))
    left_px = _MARGIN_PX + named_px + 8
    right_px = _MARGIN_PX + (96 if options.memory else 60)
    plot_px = options.width_px - left_px - right_px
    top_bytes = memory_top_bytes(timelines) if options.memory else 0.0
    canvas = _Canvas(options, left_px, plot_px / end_s if end_s > 0 else 0.0, end_s, top_bytes)
    y = _MARGIN_PX
    heading = options.title or title(timelines, labels)
    if options.title or len(timelines) > 1 or timelines[0].title:
        for line in _wrapped(heading, options.width_px - 2 * _MARGIN_PX, 16, bold=True):
            canvas.word("title", _MARGIN_PX, y + 16, line)
            y += 22
        y += 4
    for timeline, label in zip(timelines, labels, strict=True):
        y = _panel(canvas, timeline, label, y, headed=len(timelines) > 1 or bool(options.title or not timeline.title))
    y = _axis(canvas, canvas.top, y)
    y = _legend(canvas, y + 30, barred(timelines))
    with_table = options.table and len(timelines) > 1
    if with_table:
        y = _table(canvas, comparison(timelines, labels), y + 14)
    for note in [*dict.fromkeys(canvas.notes), definitions(timelines, with_table=with_table)]:
        for line in _wrapped(note, options.width_px - 2 * _MARGIN_PX, 11):
            y += 16
            canvas.word("note", _MARGIN_PX, y, line)
    described = "; ".join(f"{label}: {summary(timeline)}" for label, timeline in zip(labels, timelines, strict=True))
    return Scene(options.width_px, y + _MARGIN_PX, heading, described, tuple(canvas.items))


def _panel(canvas: _Canvas, timeline: Timeline, label: str, y: float, *, headed: bool) -> float:
    """Draw one timeline below `y`, with its name unless the title has it. Return the y of its end."""
    options = canvas.options
    facts, x_facts = summary(timeline), _MARGIN_PX
    if headed:
        canvas.word("heading", _MARGIN_PX, y + 16, label)
        x_facts += text_px(label, 13, bold=True) + 14
    room_px = options.width_px - _MARGIN_PX
    if x_facts + text_px(facts, 11.5) > room_px:
        for line in _wrapped(facts, room_px - _MARGIN_PX, 11.5):
            y += 16
            canvas.word("fact", _MARGIN_PX, y + 16, line)
        x_facts, facts = room_px, ""
    else:
        canvas.word("fact", x_facts, y + 16, facts)
    per_row = -(-timeline.ranks // _MAX_ROWS)
    count = -(-timeline.ranks // per_row)
    box_px = min(_TALLEST_PX, max(5.0, 720 / count))
    has_curve = options.memory and timeline.memory is not None
    rows = _Rows(
        top=y + 26,
        count=count,
        per_row=per_row,
        box_px=box_px,
        lane_px=max(3.0, box_px / 4) if options.transfers == "lanes" else 0.0,
        curve_px=max(_CURVE_PX, box_px) if has_curve else 0.0,
        # Arrows need space to be visible between the rows.
        gap_px=1.0 if box_px <= 10 else 14.0 if options.transfers == "arrows" and not has_curve else 3.0,
    )
    canvas.top = min(canvas.top, rows.top)
    _rank_labels(canvas, timeline, rows)
    if options.linked:
        _row_marks(canvas, rows)
    crowded = _crowding(canvas, timeline)
    if crowded:
        columns = _density(canvas, timeline, rows)
        width = format_seconds(timeline.makespan_s / columns)
        banded = f" and {per_row} {timeline.row}s per row" if per_row > 1 else ""
        canvas.notes.append(
            f"{label}: {counted(len(timeline.rank), 'action')}, {crowded}, so heights are shares of time, "
            f"summed over columns of {width}{banded}; `hpgo view` shows each action."
        )
    else:
        _boxes(canvas, timeline, rows)
    if options.memory:
        _curves(canvas, timeline, rows, label)
    if options.transfers != "none":
        _transfers(canvas, timeline, rows, label)
    if options.critical_path:
        _critical(canvas, timeline, rows, crowded != "")
    x_end = float(canvas.x0 + timeline.makespan_s * canvas.px_per_s)
    canvas.items.append(Line("end", ((x_end, rows.top - 4), (x_end, rows.bottom + 3))))
    beside = x_end < x_facts + text_px(facts, 11.5)  # the facts are where the label of the end would be
    y_end = rows.top + min(box_px, 14.0) if beside else rows.top - 4
    canvas.word("end", x_end + 4, y_end, format_seconds(timeline.makespan_s))
    return rows.bottom + 8


def _row_names(timeline: Timeline) -> list[str]:
    per_row = -(-timeline.ranks // _MAX_ROWS)
    return [rank_name(timeline, rank, per_row) for rank in range(0, timeline.ranks, per_row)]


def _rank_labels(canvas: _Canvas, timeline: Timeline, rows: _Rows) -> None:
    every = max(1, int(np.ceil(13 / rows.pitch_px)))
    shown = range(0, rows.count, every)
    names, room_px = _row_names(timeline), canvas.x0 - 6 - _MARGIN_PX
    baseline = rows.box_px / 2 + 4
    canvas.items.append(
        Words(
            "rank",
            [canvas.x0 - 6] * len(shown),
            [rows.top + row * rows.pitch_px + baseline for row in shown],
            [fitted(names[row], 11, room_px) for row in shown],
        )
    )


def _row_marks(canvas: _Canvas, rows: _Rows) -> None:
    """Draw an invisible box behind each row that identifies its rank for a web page."""
    row = np.arange(rows.count)
    bars = _Bars(np.zeros(rows.count), np.full(rows.count, canvas.end_s), rows.y(row * rows.per_row), rows.box_px)
    boxes = canvas.boxes("row", bars)
    canvas.items += [boxes.where(row == at, {"rank": f"{at * rows.per_row}"}) for at in range(rows.count)]


def _crowding(canvas: _Canvas, timeline: Timeline) -> str:
    """Return the reason why single boxes would be invisible, or an empty string."""
    actions = len(timeline.rank)
    if actions > canvas.options.max_boxes:
        return f"more than the {canvas.options.max_boxes:,} drawn one by one"
    if timeline.ranks > _MAX_ROWS:
        return f"on more than {_MAX_ROWS} {timeline.row}s"
    if timeline.makespan_s > 0 and float(np.median(timeline.end_s - timeline.start_s)) * canvas.px_per_s < 1:
        return "most of them narrower than a pixel"
    return ""


def _boxes(canvas: _Canvas, timeline: Timeline, rows: _Rows) -> None:
    if canvas.options.bubbles:
        for cause, chosen in _by(CAUSES, timeline.idle_cause):
            ranks = timeline.idle_rank[chosen]
            idle = _Bars(timeline.idle_start_s[chosen], timeline.idle_end_s[chosen], rows.y(ranks), rows.box_px)
            boxes = canvas.boxes(f"idle-{cause}", idle)
            if canvas.options.linked:
                canvas.items += [boxes.where(ranks == rank, {"rank": f"{rank}"}) for rank in np.unique(ranks).tolist()]
            else:
                canvas.items.append(boxes)
            canvas.legend[f"idle-{cause}"] = palette.CAUSE_NAMES[cause]
    covered = bar_of_stage(timeline)
    for kind, chosen in _by(KINDS, timeline.kind):
        bars = _Bars(timeline.start_s[chosen], timeline.end_s[chosen], rows.y(timeline.rank[chosen]), rows.box_px)
        forward = timeline.stage[chosen], timeline.micro_batch[chosen]
        backward = timeline.backward_stage[chosen], timeline.backward_micro_batch[chosen]
        if kind == "F‖B":
            _kind_boxes(canvas, "F", bars.half(0), covered, forward)
            _kind_boxes(canvas, "B", bars.half(1), covered, backward)
        else:
            _kind_boxes(canvas, kind, bars, covered, forward if kind == "F" else backward)
    _sync(canvas, timeline, rows)


def _kind_boxes(
    canvas: _Canvas,
    kind: str,
    bars: _Bars,
    covered_of_stage: NDArray[np.floating],
    passes: tuple[NDArray[np.integer], NDArray[np.integer]],
) -> None:
    """Draw boxes of one kind, a bar over a part of each, and the number of its micro-batch if there is space."""
    stage, micro_batch = passes
    covered = covered_of_stage[stage]
    canvas.legend[kind] = palette.KIND_NAMES[kind]
    boxes = canvas.parted(kind, bars)
    if canvas.options.linked:
        for at in np.unique(stage).tolist():
            own = stage == at
            batches = " ".join(map(str, micro_batch[own].tolist()))
            canvas.items.append(boxes.where(own, {"stage": f"{at}", "batches": batches}))
    else:
        canvas.items.append(boxes)
    later = covered > 0
    has_bars = bool(later.any())
    bar_px = min(_BAR_PX, bars.height_px / 4)
    if has_bars:
        x, y, width = boxes.x[later], boxes.y[later], boxes.width[later] * covered[later]
        canvas.items.append(Boxes("virtual_stage", x, y, width, np.full(len(x), bar_px)))
    # All numbers of a kind have one size: the largest at which the longest number fits a typical box. If that is too
    # small, there are no numbers.
    room_px = bars.height_px - (bar_px if has_bars else 0)
    longest = len(str(micro_batch.max()))
    typical_px = float(np.median(bars.end_s - bars.start_s)) * canvas.px_per_s
    size_px = min(_NUMBER_PX[1], room_px * 0.85, (typical_px - 1.5) / (longest * DIGIT_EM))
    if size_px < _NUMBER_PX[0]:
        return
    texts = [str(number) for number in micro_batch.tolist()]
    fits = boxes.width >= np.array([len(text) for text in texts]) * DIGIT_EM * size_px + 1
    groups = [(fits & (stage == at), {"of": f"{at}"}) for at in np.unique(stage).tolist()]
    for shown, mark in groups if canvas.options.linked else [(fits, {})]:
        if shown.any():
            centre = (boxes.x + boxes.width / 2)[shown].tolist()
            baseline = ((boxes.y + boxes.height - room_px / 2)[shown] + size_px * 0.36).tolist()
            labels = [texts[at] for at in np.flatnonzero(shown).tolist()]
            canvas.items.append(Words("tick", centre, baseline, labels, kind, size_px, mark))


def _density(canvas: _Canvas, timeline: Timeline, rows: _Rows) -> int:
    """Draw shares of time as stacked areas, forward at the bottom and bubbles on top. Return the number of columns."""
    plot_px = timeline.makespan_s * canvas.px_per_s
    # Columns must be much wider than an action. Otherwise, their edges and the edges of actions make a moiré pattern.
    calm = timeline.makespan_s / (6 * median_s(timeline.start_s, timeline.end_s) or 1)
    columns = max(1, int(min(plot_px, _MAX_DENSITY_CELLS / rows.count, max(200, calm))))
    edges_s = np.linspace(0, timeline.makespan_s, columns + 1)
    kinds, fused = timeline.kind, KINDS.index("F‖B")
    layers: list[tuple[str, Floats]] = []

    def add(style: str, intervals: Intervals, weight_of: Callable[[slice], NDArray[Any]]) -> None:
        layers.append((style, shares(intervals, weight_of, edges_s, timeline.ranks, rows.per_row)))

    def or_half(number: int) -> Callable[[slice], NDArray[Any]]:
        return lambda part: (kinds[part] == number) + 0.5 * (kinds[part] == fused)

    actions = Intervals(timeline.rank, timeline.start_s, timeline.end_s)
    there = {number for part in parts(len(kinds)) for number in np.unique(kinds[part]).tolist()}
    for kind in ("F", "B", "I", "W"):
        number, is_half = KINDS.index(kind), fused in there and kind in {"F", "B"}
        if number in there or is_half:
            add(kind, actions, or_half(number) if is_half else equals(kinds, number))
            canvas.legend[kind] = palette.KIND_NAMES[kind]
    if canvas.options.bubbles:
        idle = Intervals(timeline.idle_rank, timeline.idle_start_s, timeline.idle_end_s)
        causes = timeline.idle_cause
        for number, cause in enumerate(CAUSES):
            if any((causes[part] == number).any() for part in parts(len(causes))):
                add(f"idle-{cause}", idle, equals(causes, number))
                canvas.legend[f"idle-{cause}"] = palette.CAUSE_NAMES[cause]
    stacked = np.cumsum([layer for _, layer in layers], axis=0)
    edges = canvas.x(edges_s)
    # Draw from the top of the stack to the bottom, so that each area only needs its upper edge.
    for (style, _), heights in reversed(list(zip(layers, stacked, strict=True))):
        for row in range(rows.count):
            base = rows.top + row * rows.pitch_px + rows.box_px
            canvas.items.append(Steps(style, edges, base - np.clip(heights[row], 0, 1) * rows.box_px, base))
    return columns


def _sync(canvas: _Canvas, timeline: Timeline, rows: _Rows) -> None:
    if not len(timeline.sync_stage):
        return
    syncs, ranks = sync_rows(timeline)
    height_px = max(3.0, rows.box_px / 4)
    y = rows.y(ranks) + rows.box_px - height_px
    bars = _Bars(timeline.sync_start_s[syncs], timeline.sync_end_s[syncs], y, height_px)
    canvas.items.append(canvas.boxes("sync", bars))
    canvas.legend["sync"] = "gradient reduction"


def _transfers(canvas: _Canvas, timeline: Timeline, rows: _Rows, label: str) -> None:
    count = len(timeline.transfer_from_rank)
    if count == 0:
        canvas.notes.append(f"{label}: no transfers between ranks.")
        return
    if canvas.options.transfers == "arrows" and (count > _MAX_ARROWS or rows.per_row > 1):
        canvas.notes.append(
            f"{label}: {counted(count, 'transfer')} not drawn: too many for arrows (`hpgo view` has them)."
        )
        return
    for name, chosen in _by(TRANSFER_KINDS, timeline.transfer_kind):
        start, end = timeline.transfer_start_s[chosen], timeline.transfer_end_s[chosen]
        sender = rows.y(timeline.transfer_from_rank[chosen])
        if canvas.options.transfers == "arrows":
            receiver = rows.y(timeline.transfer_to_rank[chosen])
            down = receiver > sender
            y0 = np.where(down, sender + rows.box_px, sender)
            y1 = np.where(down, receiver, receiver + rows.box_px)
            for xa, ya, xb, yb in zip(
                canvas.x(start).tolist(), y0.tolist(), canvas.x(end).tolist(), y1.tolist(), strict=True
            ):
                canvas.items.append(Line(name, ((xa, ya), (xb, yb)), arrow=True))
            canvas.legend[name] = f"{name} transfer"
        else:
            _lane(canvas, timeline, rows, name, chosen)
            canvas.legend[f"lane-{name}"] = f"sending {name}s"


def _lane(canvas: _Canvas, timeline: Timeline, rows: _Rows, name: str, chosen: NDArray[np.bool_]) -> None:
    """Draw the times at which each rank sends: activations in the upper half of the lane, gradients in the lower.

    Overlaps are merged.
    """
    rank, start, end = (
        timeline.transfer_from_rank[chosen], timeline.transfer_start_s[chosen], timeline.transfer_end_s[chosen]
    )  # fmt: skip
    order = np.lexsort((start, rank // rows.per_row))
    row, start, end = (rank // rows.per_row)[order], start[order], end[order]
    # Shift each row into a separate interval of time, so that one running maximum merges the overlaps of all rows.
    shift_s = row * (2 * canvas.end_s + 1)
    reach_s = np.maximum.accumulate(end + shift_s)
    opens = np.ones(len(row), bool)
    opens[1:] = (start[1:] + shift_s[1:] - reach_s[:-1]) * canvas.px_per_s > 0.3
    first = np.flatnonzero(opens)
    last = np.append(first[1:], len(row)) - 1
    half = (rows.lane_px - 1) / 2
    y = rows.top + row[first] * rows.pitch_px + rows.box_px + 1 + (half if name == "gradient" else 0)
    canvas.items.append(canvas.boxes(f"lane-{name}", _Bars(start[first], (reach_s - shift_s)[last], y, half)))


def _curves(canvas: _Canvas, timeline: Timeline, rows: _Rows, label: str) -> None:
    curves = timeline.memory
    if curves is None:
        canvas.notes.append(f"{label}: memory is unknown, so no curve is drawn.")
        return
    caps, top_bytes = drawn_caps(timeline), canvas.memory_top_bytes
    if not peak_bytes(timeline):
        canvas.notes.append(f"{label}: no memory in use.")
        return
    if timeline.memory_cap_bytes and not caps:
        canvas.notes.append(far_cap(timeline, label))
    if caps:
        peaks = [float(sizes.max(initial=0)) for _, sizes in curves]
        over = [rank for rank, peak in enumerate(peaks) if peak > caps[rank]]
        if over:
            worst = max(over, key=lambda rank: peaks[rank] / caps[rank])
            held, cap = format_bytes(peaks[worst]), format_bytes(caps[worst])
            above = f"{counted(len(over), timeline.row)} above the memory cap"
            canvas.notes.append(f"{label}: {above}, {timeline.row} {worst} by the most: {held} of {cap}.")
    usable_px = rows.curve_px - 2
    points_a_row = _MAX_CURVE_POINTS // rows.count
    every = max(1, int(np.ceil(12 / rows.pitch_px)))
    for row in range(rows.count):
        base = rows.top + row * rows.pitch_px + rows.box_px + rows.lane_px + rows.curve_px
        ranks = range(row * rows.per_row, min((row + 1) * rows.per_row, timeline.ranks))
        fullest = max(ranks, key=lambda rank: float(curves[rank][1].max(initial=0)))
        times_s, sizes = curves[fullest]
        edges_s, sizes = staircase(times_s, sizes, timeline.makespan_s, points_a_row)
        strip = _box("free", canvas.x0, base - usable_px, timeline.makespan_s * canvas.px_per_s, usable_px)
        canvas.items.append(strip)
        canvas.items.append(Steps("memory", canvas.x(edges_s), base - sizes / top_bytes * usable_px, base))
        if caps:
            y = base - caps[fullest] / top_bytes * usable_px
            x_end = canvas.x0 + timeline.makespan_s * canvas.px_per_s
            canvas.items.append(Line("cap", ((canvas.x0, y), (x_end, y))))
            canvas.legend["cap"] = f"memory cap ({range_text(caps)})"
        if row % every == 0:
            x = canvas.x0 + timeline.makespan_s * canvas.px_per_s + 4
            canvas.word("small", x, base - 1, f"peak {format_bytes(float(sizes.max(initial=0)))}")
    canvas.legend["memory"] = f"memory in use (strip height {format_bytes(top_bytes)})"


def staircase(
    times_s: NDArray[np.floating], sizes: NDArray[np.floating], end_s: float, at_most: int
) -> tuple[Floats, Floats]:
    """Return a step function as edges and values, with at most `at_most` columns.

    Each column has the maximum of its values.

    `sizes[i]` holds from `times_s[i]` to `times_s[i + 1]`, the last one to `end_s`.
    """
    if len(times_s) <= at_most:
        return np.append(times_s, max(end_s, float(times_s[-1]))), np.asarray(sizes, np.float64)
    edges_s = np.linspace(0, end_s, at_most + 1)
    # The maximum of a column covers the steps inside it, and the step that began before it.
    opening = np.clip(np.searchsorted(times_s, edges_s[:-1], side="right") - 1, 0, len(times_s) - 1)
    return edges_s, np.maximum.reduceat(np.asarray(sizes, np.float64), opening)


def _critical(canvas: _Canvas, timeline: Timeline, rows: _Rows, crowded: bool) -> None:
    chosen = np.flatnonzero(timeline.critical)
    if not len(chosen):
        canvas.notes.append("No critical path is known.")
        return
    canvas.legend["critical"] = "critical path"
    start, end, y = timeline.start_s[chosen], timeline.end_s[chosen], rows.y(timeline.rank[chosen])
    if not crowded:
        canvas.items.append(canvas.boxes("critical", _Bars(start, end, y, rows.box_px)))
        return
    order = np.argsort(start, kind="stable")
    middle = y[order] + rows.box_px / 2
    xs = np.column_stack((canvas.x(start[order]), canvas.x(end[order]))).ravel()
    points = np.column_stack((xs, np.repeat(middle, 2)))
    # Drop points that are closer than 0.3 pixels, which would only enlarge the file.
    keep = np.append(True, (np.abs(np.diff(points, axis=0)) > 0.3).any(axis=1))
    canvas.items.append(Line("critical", tuple(map(tuple, points[keep].tolist()))))


def _axis(canvas: _Canvas, top: float, bottom: float) -> float:
    """Draw grid lines behind all panels, and the numbered axis below them. Return the y of its end."""
    unit, unit_s = time_unit(canvas.end_s)
    width = canvas.end_s * canvas.px_per_s
    positions = ticks(canvas.end_s / unit_s, at_most=max(3, int(width / 90)))
    xs = [canvas.x0 + position * unit_s * canvas.px_per_s for position in positions]
    grid: list[Item] = [Line("grid", ((x, top), (x, bottom))) for x in xs]
    # Grid lines go first in the list, so that everything else is drawn over them.
    canvas.items[:0] = grid
    canvas.items.append(Line("axis", ((canvas.x0, bottom), (canvas.x0 + width, bottom))))
    canvas.items.extend(Line("axis", ((x, bottom), (x, bottom + 4))) for x in xs)
    canvas.items.append(Words("tick", xs, [bottom + 16] * len(xs), [number_text(p) for p in positions]))
    canvas.word("tick", canvas.x0 + width / 2, bottom + 31, f"time ({unit})")
    return bottom + 31


def _legend(canvas: _Canvas, y: float, bar: str) -> float:
    """Draw the legend with only those styles that the picture contains, in a fixed order. Return the y of its end."""
    if any(isinstance(item, Boxes) and item.style == "virtual_stage" for item in canvas.items):
        canvas.legend["virtual_stage"] = bar
    order = ["F", "B", "I", "W", "virtual_stage", *(f"idle-{cause}" for cause in CAUSES)]
    order += ["sync", *TRANSFER_KINDS, "lane-activation", "lane-gradient", "memory", "cap", "critical"]
    entries = [(style, canvas.legend[style]) for style in order if style in canvas.legend]
    items, y = legend(entries, _MARGIN_PX, y, canvas.options.width_px - 2 * _MARGIN_PX)
    canvas.items += items
    return y


def legend(entries: Sequence[tuple[str, str]], x: float, y: float, room_px: float) -> tuple[list[Item], float]:
    """Return the swatch and text of each entry, in columns as wide as the longest, and the y of their end.

    The first baseline is `y`.
    """
    if not entries:
        return [], y
    wide_px = max(text_px(text, 11.5) for _, text in entries) + 24 + 18
    columns = max(1, min(len(entries), int((room_px + 18) / wide_px)))
    rows = -(-len(entries) // columns)
    items: list[Item] = []
    for at, (style, text) in enumerate(entries):
        left, base = x + at // rows * wide_px, y + at % rows * 19
        items += [*_swatch(style, left, base), Words("legend", [left + 24], [base], [text])]
    return items, y + (rows - 1) * 19 + 6


def _swatch(style: str, x: float, y: float) -> list[Item]:
    if style == "virtual_stage":
        return [_box("F", x, y - 9, 18, 11), _box(style, x, y - 9, 18, 3)]
    if palette.look(style).fill is not None:
        return [_box(style, x, y - 9, 18, 11)]
    if style == "critical" or style.startswith("frame"):
        return [_box(style, x + 1, y - 8, 16, 9)]
    return [Line(style, ((x, y - 4), (x + 18, y - 4)), arrow=style in TRANSFER_KINDS)]


def _box(style: str, x: float, y: float, width: float, height: float) -> Boxes:
    return Boxes(style, np.array([x]), np.array([y]), np.array([width]), np.array([height]))


def _table(canvas: _Canvas, rows: list[list[str]], y: float) -> float:
    widths = [max(text_px(row[i], 11.5) for row in rows) + 22 for i in range(len(rows[0]))]
    rights = np.cumsum(widths) + _MARGIN_PX
    for number, row in enumerate(rows):
        y += 18
        if row[0]:
            canvas.word("legend", _MARGIN_PX, y, row[0])
        for right, text in zip(rights[1:].tolist(), row[1:], strict=True):
            canvas.word("cellhead" if number == 0 else "cell", right, y, text)
        if number == 0:
            canvas.items.append(Line("rule", ((_MARGIN_PX, y + 5), (float(rights[-1]), y + 5))))
    return y + 10


def _by(members: Sequence[str], codes: NDArray[np.integer]) -> Iterator[tuple[str, NDArray[np.bool_]]]:
    """Iterate over the members that occur in `codes`, each with the mask of its entries."""
    for code, member in enumerate(members):
        chosen = codes == code
        if chosen.any():
            yield member, chosen


def _wrapped(text: str, room_px: float, size_px: float, *, bold: bool = False) -> list[str]:
    """Return the text as lines of at most `room_px`, broken between words."""
    lines = [""]
    for word in text.split():
        longer = f"{lines[-1]} {word}".strip()
        if lines[-1] and text_px(longer, size_px, bold=bold) > room_px:
            lines.append(word)
        else:
            lines[-1] = longer
    return lines
