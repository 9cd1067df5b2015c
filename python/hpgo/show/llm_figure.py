"""Figure of a configuration on its cluster: nodes are rows, GPUs are cells in the color of their layers.

Frames show the GPUs of a tensor-, context- or expert-parallel group.
"""

from __future__ import annotations

import textwrap
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from hpgo.base.checks import check_is
from hpgo.base.messages import pluralize, printable
from hpgo.base.units import format_bytes, format_seconds
from hpgo.draw import palette, still
from hpgo.draw.scene import Boxes, Item, Scene, Words
from hpgo.errors import ArgumentError
from hpgo.hardware.cluster import Cluster
from hpgo.llm.estimate import LlmEstimate

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from hpgo.draw.options import Theme
    from hpgo.llm.parallelism import ParallelismConfig

_MARGIN, _WIDTH, _TOP = 16.0, 1040.0, 76.0
_GUTTER, _CELL, _LOW, _GAP = 92.0, 54.0, 34.0, 8.0
_MIN_WIDTH, _NUMBERED, _RANKED, _LETTERED = 3.0, 19.0, 27.0, 46.0
"""Width of a cell in pixels: the minimum; with room for the GPU's number; for its pipeline rank, too; for all ranks."""
_FLAT = 22.0
"""Height of narrow cells if a row has the whole width."""
_TALLEST = 24
"""Maximum number of nodes in a column. More nodes are drawn in several columns."""
_MAX_GPUS = 2**15
_MAX_NAMED = 16
_COLOURS = len(palette.STAGE_COLOURS)


@dataclass(frozen=True, slots=True)
class Place:
    """Ranks of a GPU in each of its groups, which determine its part of the model."""

    tensor: int
    context: int
    data: int
    rank: int
    """Pipeline rank of the GPU."""
    expert: int
    """Number of its expert-parallel group."""


def place(config: ParallelismConfig, gpu: int) -> Place:
    """Return the ranks of a GPU in the order of frameworks: tp first, then cp, dp, pp.

    >>> from hpgo.llm.parallelism import ParallelismConfig
    >>> place(ParallelismConfig(tp=2, dp=2, pp=2), 5)
    Place(tensor=1, context=0, data=0, rank=1, expert=5)
    """
    rest, tensor = divmod(gpu, config.tp)
    rest, context = divmod(rest, config.cp)
    rank, data = divmod(rest, config.dp)
    return Place(tensor, context, data, rank, gpu // config.expert_model_parallel_size)


def draw_llm_plan(
    estimate: LlmEstimate, cluster: Cluster, path: str | os.PathLike[str], *, theme: Theme = "auto"
) -> Path:
    """Draw an estimated configuration on its cluster into a file that ends in .svg, .png, .pdf or .html.

    Raises ArgumentError for a cluster with fewer GPUs, for more than 32,768 GPUs, and for another ending; HpgoError if
    matplotlib is missing, which PNG and PDF need, or if the file can't be written.
    """
    still.check(path)
    return still.save(scene(estimate, cluster), path, theme=theme)


def scene(estimate: LlmEstimate, cluster: Cluster) -> Scene:
    """Return the scene of the figure. Equal estimates give equal scenes."""
    check_is("the estimate", estimate, LlmEstimate, "make one with `hpgo.estimate_llm`")
    check_is("the cluster", cluster, Cluster, "give the cluster of the estimate")
    config = estimate.parallelism
    if estimate.gpus > cluster.devices:
        raise ArgumentError(
            f"the estimate is for {estimate.gpus} GPUs, but cluster `{cluster.name}` has {cluster.devices}",
            "give the cluster of the estimate",
        )
    if estimate.gpus > _MAX_GPUS:
        raise ArgumentError(
            f"the estimate is for {estimate.gpus} GPUs, but a figure shows at most {_MAX_GPUS}",
            f"draw a configuration of at most {_MAX_GPUS} GPUs",
            code="too_large",
        )
    counts = [node.count for node in cluster.first(estimate.gpus).nodes]
    grid = _Grid.of(counts)
    title = printable(f"{estimate.model} on {estimate.cluster}: {pluralize(estimate.gpus, 'GPU')}")
    # The subtitle states that the time is estimated, because figures are shown without their report.
    ends = " to ".join(map(format_seconds, (estimate.low_s, estimate.high_s)))
    subtitle = f"{config.named()} · step time {format_seconds(estimate.step_s)} (estimated, 90 % range {ends})"
    facts = textwrap.wrap(printable(subtitle), 150)
    items: list[Item] = [Words("title", [_MARGIN], [_MARGIN + 16], [title])]
    items += [Words("fact", [_MARGIN], [_MARGIN + 36 + 15 * at], [line]) for at, line in enumerate(facts)]
    items += [*_nodes(grid), *_cells(grid, estimate), *_frames(grid, config)]
    legend, bottom = _legend(estimate, counts, grid.bottom + 26)
    described = f"{config.named()}: {pluralize(len(counts), 'node')} of {counts[0]} GPUs"
    return Scene(_WIDTH, bottom, title, printable(described), (*items, *legend))


@dataclass(frozen=True, slots=True)
class _Grid:
    """Positions and sizes of the cells in pixels."""

    x: tuple[float, ...]
    """Left edge of each GPU's cell."""
    y: tuple[float, ...]
    """Upper edge of each GPU's cell."""
    width: float
    height: float
    rows: tuple[tuple[int, ...], ...]
    """GPUs of each node."""
    bottom: float

    @classmethod
    def of(cls, counts: Sequence[int]) -> _Grid:
        """Return the largest cells that fit for the GPU counts of the nodes, in one column of nodes or in several."""
        per = max(counts)
        available = _WIDTH - 2 * _MARGIN - _GUTTER
        beside = -(-len(counts) // _TALLEST)
        # Fewer columns make wider cells and a taller figure. Use the largest number that keeps the cells visible.
        while True:
            width = min(_CELL, (available - (beside - 1) * 2 * _GAP) / (beside * per))
            if width >= _MIN_WIDTH or beside == 1:
                break
            beside -= 1
        tall = -(-len(counts) // beside)
        height = _LOW if width >= _NUMBERED else min(_LOW, max(width, _MIN_WIDTH if beside > 1 else _FLAT))
        gap = min(_GAP, height / 2)
        x, y, rows, start = [], [], [], 0
        for node, count in enumerate(counts):
            column, row = divmod(node, tall)
            left = _MARGIN + _GUTTER + column * (per * width + 2 * _GAP)
            x += [left + at * width for at in range(count)]
            y += [_TOP + row * (height + gap)] * count
            rows.append(tuple(range(start, start + count)))
            start += count
        return cls(tuple(x), tuple(y), width, height, tuple(rows), _TOP + tall * (height + gap))


def _nodes(grid: _Grid) -> list[Item]:
    """Return the numbers of nodes, without those that would overlap the number above."""
    texts, ys = [], []
    tops: set[float] = set()
    last = -100.0
    for node, gpus in enumerate(grid.rows):
        top = grid.y[gpus[0]]
        # A label is 11 pixels high. Nodes beside each other share one label.
        if top in tops or top - last < 11:
            continue
        tops.add(top)
        last = top
        texts.append(f"node {node}")
        ys.append(top + grid.height / 2 + 4)
    return [Words("rank", [_MARGIN + _GUTTER - 10] * len(texts), ys, texts)]


def _cells(grid: _Grid, estimate: LlmEstimate) -> list[Item]:
    config = estimate.parallelism
    places = [place(config, gpu) for gpu in range(estimate.gpus)]
    items: list[Item] = []
    first = places[0]
    for colour in range(min(_COLOURS, config.pp)):
        mine = [gpu for gpu, one in enumerate(places) if one.rank % _COLOURS == colour]
        items.append(_boxes(f"stage-{colour}", grid, mine, [_tip(estimate, gpu, places[gpu]) for gpu in mine]))
        if grid.width >= _NUMBERED:
            texts = [_texts(config, gpu, places[gpu], grid.width) for gpu in mine]
            items += _words(grid, mine, texts, f"stage-{colour}")
    same = [gpu for gpu, one in enumerate(places) if (one.tensor, one.rank) == (first.tensor, first.rank)]
    if len(same) > 1:
        side = max(1.5, min(5.0, grid.width / 4))
        x = np.array([grid.x[gpu] + grid.width - side - 4 for gpu in same])
        y = np.array([grid.y[gpu] + 4 for gpu in same])
        if grid.width < _NUMBERED:
            x, y = (np.array([axis[gpu] for gpu in same]) + (size - side) / 2
                    for axis, size in ((grid.x, grid.width), (grid.y, grid.height)))  # fmt: skip
        items.append(Boxes("same-weights", x, y, np.full(len(same), side), np.full(len(same), side)))
    return items


def _boxes(style: str, grid: _Grid, gpus: Sequence[int], tips: Sequence[str]) -> Boxes:
    x, y = (np.array([axis[gpu] for gpu in gpus]) for axis in (grid.x, grid.y))
    return Boxes(style, x, y, np.full(len(gpus), grid.width), np.full(len(gpus), grid.height), tips=tuple(tips))


def _words(grid: _Grid, gpus: Sequence[int], texts: Sequence[Sequence[str]], on: str) -> Iterator[Words]:
    for line in range(max(map(len, texts))):
        lines = len(texts[0])
        size = 10.0 if line == 0 else 8.5
        x = [grid.x[gpu] + grid.width / 2 for gpu in gpus]
        y = [grid.y[gpu] + grid.height / 2 + (3.5 if lines == 1 else -2.5 if line == 0 else 9.5) for gpu in gpus]
        yield Words("tick", x, y, [one[line] for one in texts], on=on, size_px=size)


def _texts(config: ParallelismConfig, gpu: int, one: Place, width: float) -> list[str]:
    """Return the lines of a cell: the GPU's number, and its ranks if the cell is wide enough."""
    known = (("p", one.rank, config.pp), ("d", one.data, config.dp), ("c", one.context, config.cp))
    shown = len(known) if width >= _LETTERED else 1 if width >= _RANKED else 0
    groups = [f"{letter}{at}" for letter, at, degree in known[:shown] if degree > 1]
    return [str(gpu), " ".join(groups)] if groups else [str(gpu)]


def _tip(estimate: LlmEstimate, gpu: int, one: Place) -> str:
    config = estimate.parallelism
    facts = [f"GPU {gpu}: {_layers_of(estimate, one.rank)}"]
    facts += [f"tp rank {one.tensor} of {config.tp}"] if config.tp > 1 else []
    facts += [f"cp rank {one.context} of {config.cp}"] if config.cp > 1 else []
    facts += [f"replica {one.data} of {config.dp}"] if config.dp > 1 else []
    facts.append(f"{estimate.stages[one.rank].peak_bytes / 1e9:.1f} GB")
    return ", ".join(facts)


def _layers_of(estimate: LlmEstimate, rank: int) -> str:
    """Return the layers of a pipeline rank in a few words, or their number if there are many stages."""
    ranges = [(start, stop) for start, stop in estimate.stages[rank].layers if stop > start]
    named = [f"{start}" if stop == start + 1 else f"{start}–{stop - 1}" for start, stop in ranges]
    if len(named) > 3:
        count = sum(stop - start for start, stop in ranges)
        return f"{count} layers in {len(named)} stages, from {ranges[0][0]} on"
    one = sum(stop - start for start, stop in ranges) == 1
    return f"layer{'' if one else 's'} {', '.join(named)}" if named else "no layers"


def _frames(grid: _Grid, config: ParallelismConfig) -> list[Item]:
    """Return frames around the GPUs of each group inside a node. Larger groups have the outer frames."""
    # On cells narrower than 5 pixels, frames would cover the colors.
    if grid.width < 5:
        return []
    found: list[Item] = []
    narrow = min(1.0, grid.width / _RANKED)
    for style, size, wanted in (
        ("frame-context", config.model_parallel_size if config.cp > 1 else 1, 0.8),
        ("frame-tensor", config.tp, 2.6),
        ("frame-expert", config.expert_model_parallel_size, 4.6),
    ):
        inset = wanted * narrow
        if size == 1:
            continue
        left, top, wide = [], [], []
        for row in grid.rows:
            start = row[0]
            for gpu in row:
                if gpu == row[-1] or (gpu + 1) % size == 0:
                    left.append(grid.x[start] + inset)
                    top.append(grid.y[start] + inset)
                    wide.append((gpu - start + 1) * grid.width - 2 * inset)
                    start = gpu + 1
        high = np.full(len(left), grid.height - 2 * inset)
        found.append(Boxes(style, np.array(left), np.array(top), np.array(wide), high))
    return found


def _legend(estimate: LlmEstimate, counts: Sequence[int], top: float) -> tuple[list[Item], float]:
    config = estimate.parallelism
    items: list[Item] = []
    ranks = list(range(config.pp))
    # Keep the last rank in a long legend, because it has the LM head and other memory.
    named = ranks if len(ranks) <= _MAX_NAMED else [*ranks[: _MAX_NAMED - 1], ranks[-1]]
    columns = 1 if len(named) == 1 else 2
    for at, rank in enumerate(named):
        x = _MARGIN + at % columns * (_WIDTH - 2 * _MARGIN) / columns
        y = top + at // columns * 19
        peak = format_bytes(estimate.stages[rank].peak_bytes)
        skipped = rank - at
        who = "each GPU" if config.pp == 1 else f"p{rank}"
        more = f", after {pluralize(skipped, 'rank')} left out" if skipped else ""
        text = f"{who}: {_layers_of(estimate, rank)}, {peak} of {format_bytes(estimate.capacity_bytes)}{more}"
        items += [_swatch(f"stage-{rank % _COLOURS}", x, y - 9), Words("legend", [x + 24], [y], [text])]
    y = top + -(-len(named) // columns) * 19 + 6
    marks = []
    if config.tp > 1:
        marks.append(("frame-tensor", f"tensor-parallel group (tp {config.tp})"))
    if config.cp > 1:
        marks.append(("frame-context", f"context-parallel group (cp {config.cp}), rank c"))
    if config.expert_model_parallel_size > 1:
        divided = f", etp {config.etp}" if config.etp > 1 else ""
        marks.append(("frame-expert", f"expert-parallel group (ep {config.ep}{divided})"))
    if config.dp_cp_size > 1:
        shared = f"dp {config.dp}, replica d" + (f", × cp {config.cp}" if config.cp > 1 else "")
        same = (
            "same weights as GPU 0 except experts" if config.expert_model_parallel_size > 1 else "same weights as GPU 0"
        )
        marks.append(("same-weights", f"{same}: reduce gradients together ({shared})"))
    for at, (style, text) in enumerate(marks):
        x = _MARGIN + at % 2 * (_WIDTH - 2 * _MARGIN) / 2
        base = y - 9 + at // 2 * 19
        items += [
            _swatch("stage-0", x, base),
            _swatch(style, x, base),
            Words("legend", [x + 24], [y + at // 2 * 19], [text]),
        ]
    y += -(-len(marks) // 2) * 19
    sizes = (config.tp, config.model_parallel_size if config.cp > 1 else 1, config.expert_model_parallel_size)
    if any(node % size for size in sizes for node in counts):
        items.append(Words("note", [_MARGIN], [y + 2], ["frames end at the end of a node; a group may continue"]))
        y += 19
    return items, y + 6


def _swatch(style: str, x: float, y: float) -> Boxes:
    wide, high, shift = (5.0, 5.0, 5.0) if style == "same-weights" else (16.0, 11.0, 0.0)
    return Boxes(style, np.array([x + shift]), np.array([y + shift / 2]), np.array([wide]), np.array([high]))
