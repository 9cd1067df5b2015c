"""A way of training on its cluster: machines are rows, GPUs cells in the colour of their layers, groups are framed."""

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
from hpgo.llm.estimate import LlmEstimate
from hpgo.machine.cluster import Cluster

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from hpgo.draw.options import Theme
    from hpgo.llm.parallelism import ParallelismConfig

_MARGIN, _WIDTH, _TOP = 16.0, 1040.0, 76.0
_GUTTER, _CELL, _LOW, _GAP = 92.0, 54.0, 34.0, 8.0
_LEAST, _NUMBERED, _RANKED, _LETTERED = 3.0, 19.0, 27.0, 46.0
"""Pixels of a cell: at least; to tell its number; its rank of the pipeline, too; and all of its groups."""
_FLAT = 22.0
"""Of narrow cells in rows that have the whole width."""
_TALLEST = 24
"""Machines below each other before they also stand beside each other."""
_MOST_GPUS = 2**15
_MOST_NAMED = 16
_COLOURS = len(palette.STAGE_COLOURS)


@dataclass(frozen=True, slots=True)
class Place:
    """Which part of a model a GPU has: its number in each of its groups."""

    tensor: int
    context: int
    data: int
    rank: int
    """Of the pipeline."""
    expert: int
    """Which of the groups of its stage that share experts."""


def place(config: ParallelismConfig, gpu: int) -> Place:
    """Where a GPU stands, as frameworks place them: tensor first, then context, data, pipeline.

    >>> from hpgo.llm.parallelism import ParallelismConfig
    >>> place(ParallelismConfig(tp=2, dp=2, pp=2), 5)
    Place(tensor=1, context=0, data=0, rank=1, expert=5)
    """
    rest, tensor = divmod(gpu, config.tp)
    rest, context = divmod(rest, config.cp)
    rank, data = divmod(rest, config.dp)
    return Place(tensor, context, data, rank, gpu // config.ep)


def draw_llm_plan(
    estimate: LlmEstimate, cluster: Cluster, path: str | os.PathLike[str], *, theme: Theme = "auto"
) -> Path:
    """Draws a way on the cluster that it was priced on into a file that ends in .svg, .png, .pdf or .html.

    Raises ArgumentError for a cluster with fewer GPUs, for more than 32,768 of them, and for another ending; HpgoError
    where matplotlib is missing, which PNG and PDF need, or the file can't be written.
    """
    still.check(path)
    return still.save(scene(estimate, cluster), path, theme=theme)


def scene(estimate: LlmEstimate, cluster: Cluster) -> Scene:
    """The picture; the same way gives the same one."""
    check_is("the estimate", estimate, LlmEstimate, "make one, with `hpgo.estimate_llm`")
    check_is("the cluster", cluster, Cluster, "give the one that the way was priced on")
    config = estimate.parallelism
    if estimate.gpus > cluster.devices:
        raise ArgumentError(
            f"the way has {estimate.gpus} GPUs, and cluster `{cluster.name}` {cluster.devices}",
            "give the cluster that it was priced on",
        )
    if estimate.gpus > _MOST_GPUS:
        raise ArgumentError(
            f"{estimate.gpus} GPUs are more than a picture tells", f"draw {_MOST_GPUS} at most", code="too_large"
        )
    counts = [machine.count for machine in cluster.first(estimate.gpus).nodes]
    grid = _Grid.of(counts)
    title = printable(f"{estimate.model} on {estimate.cluster}: {pluralize(estimate.gpus, 'GPU')}")
    said = f"{config.named()} · a step of {format_seconds(estimate.step_s)} by terms"
    facts = textwrap.wrap(printable(said), 150)
    items: list[Item] = [Words("title", [_MARGIN], [_MARGIN + 16], [title])]
    items += [Words("fact", [_MARGIN], [_MARGIN + 36 + 15 * at], [line]) for at, line in enumerate(facts)]
    items += [*_machines(grid), *_cells(grid, estimate), *_frames(grid, config)]
    legend, bottom = _legend(estimate, counts, grid.bottom + 26)
    described = f"{config.named()}: {pluralize(len(counts), 'machine')} of {counts[0]} GPUs"
    return Scene(_WIDTH, bottom, title, printable(described), (*items, *legend))


@dataclass(frozen=True, slots=True)
class _Grid:
    """Where cells go."""

    x: tuple[float, ...]
    y: tuple[float, ...]
    """Of each GPU, its left and its upper edge."""
    width: float
    height: float
    rows: tuple[tuple[int, ...], ...]
    """GPUs of each machine."""
    bottom: float

    @classmethod
    def of(cls, counts: Sequence[int]) -> _Grid:
        """The largest cells that fit, machines one below the other, then in columns beside each other."""
        per = max(counts)
        room = _WIDTH - 2 * _MARGIN - _GUTTER
        beside = -(-len(counts) // _TALLEST)
        while True:
            width = min(_CELL, (room - (beside - 1) * 2 * _GAP) / (beside * per))
            if width >= _LEAST or beside == 1:
                break
            beside -= 1
        tall = -(-len(counts) // beside)
        height = _LOW if width >= _NUMBERED else min(_LOW, max(width, _LEAST if beside > 1 else _FLAT))
        gap = min(_GAP, height / 2)
        x, y, rows, start = [], [], [], 0
        for machine, count in enumerate(counts):
            column, row = divmod(machine, tall)
            left = _MARGIN + _GUTTER + column * (per * width + 2 * _GAP)
            x += [left + at * width for at in range(count)]
            y += [_TOP + row * (height + gap)] * count
            rows.append(tuple(range(start, start + count)))
            start += count
        return cls(tuple(x), tuple(y), width, height, tuple(rows), _TOP + tall * (height + gap))


def _machines(grid: _Grid) -> list[Item]:
    """Their numbers, where there is room for them."""
    texts, ys = [], []
    tops: set[float] = set()
    last = -100.0
    for machine, gpus in enumerate(grid.rows):
        top = grid.y[gpus[0]]
        if top in tops or top - last < 11:
            continue
        tops.add(top)
        last = top
        texts.append(f"machine {machine}")
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
    """What a cell says: the GPU's number; and below, where there is room, its groups."""
    known = (("p", one.rank, config.pp), ("d", one.data, config.dp), ("c", one.context, config.cp))
    room = len(known) if width >= _LETTERED else 1 if width >= _RANKED else 0
    groups = [f"{letter}{at}" for letter, at, degree in known[:room] if degree > 1]
    return [str(gpu), " ".join(groups)] if groups else [str(gpu)]


def _tip(estimate: LlmEstimate, gpu: int, one: Place) -> str:
    config = estimate.parallelism
    said = [f"GPU {gpu}: {_layers_of(estimate, one.rank)}"]
    said += [f"part {one.tensor} of {config.tp} of each matrix"] if config.tp > 1 else []
    said += [f"part {one.context} of {config.cp} of each sequence"] if config.cp > 1 else []
    said += [f"replica {one.data} of {config.dp}"] if config.dp > 1 else []
    said.append(f"{estimate.stages[one.rank].peak_bytes / 1e9:.1f} GB")
    return ", ".join(said)


def _layers_of(estimate: LlmEstimate, rank: int) -> str:
    """In few words, how many there may be."""
    ranges = [(start, stop) for start, stop in estimate.stages[rank].layers if stop > start]
    named = [f"{start}" if stop == start + 1 else f"{start}–{stop - 1}" for start, stop in ranges]
    if len(named) > 3:
        count = sum(stop - start for start, stop in ranges)
        return f"{count} layers in {len(named)} stages, from {ranges[0][0]} on"
    one = sum(stop - start for start, stop in ranges) == 1
    return f"layer{'' if one else 's'} {', '.join(named)}" if named else "no layers"


def _frames(grid: _Grid, config: ParallelismConfig) -> list[Item]:
    """Round neighbours in a machine that share something; further out, what more GPUs share."""
    if grid.width < 5:
        return []
    found: list[Item] = []
    narrow = min(1.0, grid.width / _RANKED)
    for style, size, wanted in (
        ("frame-context", config.model_parallel_size if config.cp > 1 else 1, 0.8),
        ("frame-tensor", config.tp, 2.6),
        ("frame-expert", config.ep, 4.6),
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
    named = ranks if len(ranks) <= _MOST_NAMED else [*ranks[: _MOST_NAMED - 1], ranks[-1]]
    columns = 1 if len(named) == 1 else 2
    for at, rank in enumerate(named):
        x = _MARGIN + at % columns * (_WIDTH - 2 * _MARGIN) / columns
        y = top + at // columns * 19
        peak = format_bytes(estimate.stages[rank].peak_bytes)
        skipped = rank - at
        who = "each GPU" if config.pp == 1 else f"p{rank}"
        more = f", after {pluralize(skipped, 'rank')} not named" if skipped else ""
        said = f"{who}: {_layers_of(estimate, rank)}, {peak} of {format_bytes(estimate.capacity_bytes)}{more}"
        items += [_swatch(f"stage-{rank % _COLOURS}", x, y - 9), Words("legend", [x + 24], [y], [said])]
    y = top + -(-len(named) // columns) * 19 + 6
    marks = []
    if config.tp > 1:
        marks.append(("frame-tensor", f"share each matrix (tp {config.tp})"))
    if config.cp > 1:
        marks.append(("frame-context", f"share each sequence (cp {config.cp}), by c"))
    if (expert := config.ep) > 1:
        marks.append(("frame-expert", f"share the experts of a layer (ep {expert})"))
    if config.dp_cp_size > 1:
        shared = f"dp {config.dp}, by d" + (f", times cp {config.cp}" if config.cp > 1 else "")
        same = "the same weights as GPU 0, but for experts," if expert > 1 else "the same weights as GPU 0,"
        marks.append(("same-weights", f"hold {same} and sum gradients ({shared})"))
    for at, (style, said) in enumerate(marks):
        x = _MARGIN + at % 2 * (_WIDTH - 2 * _MARGIN) / 2
        base = y - 9 + at // 2 * 19
        items += [
            _swatch("stage-0", x, base),
            _swatch(style, x, base),
            Words("legend", [x + 24], [y + at // 2 * 19], [said]),
        ]
    y += -(-len(marks) // 2) * 19
    sizes = (config.tp, config.model_parallel_size if config.cp > 1 else 1, config.ep)
    if any(machine % size for size in sizes for machine in counts):
        items.append(Words("note", [_MARGIN], [y + 2], ["a frame ends where a machine does; its group may go on"]))
        y += 19
    return items, y + 6


def _swatch(style: str, x: float, y: float) -> Boxes:
    wide, high, shift = (5.0, 5.0, 5.0) if style == "same-weights" else (16.0, 11.0, 0.0)
    return Boxes(style, np.array([x + shift]), np.array([y + shift / 2]), np.array([wide]), np.array([high]))
