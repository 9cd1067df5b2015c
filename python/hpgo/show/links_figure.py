"""Picture of the rates between ranks: a matrix with squares whose area is the rate."""

from __future__ import annotations

from math import sqrt
from typing import TYPE_CHECKING

import numpy as np

from hpgo.base.messages import printable
from hpgo.base.units import format_bytes_per_s
from hpgo.draw.options import DrawOptions
from hpgo.draw.scene import Boxes, Item, Line, Scene, Words
from hpgo.draw.svg import svg as svg_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_MARGIN, _TOP, _LEFT, _CELL, _BOTTOM = 16.0, 88.0, 92.0, 76.0, 24.0


def svg(name: str, pairs: Mapping[tuple[int, int], float], node_of: Sequence[int]) -> str:
    """Return an SVG with a square for the rate of each pair of ranks in bytes/s; the highest rate has the largest.

    Lines separate the nodes. Equal rates give equal bytes.

    >>> svg("two", {(0, 1): 1e9}, [0, 0]).count("1 GB/s") > 1
    True
    """
    count = max(max(pair) for pair in pairs) + 1
    maximum = max(pairs.values())
    title = printable(f"{name}: rates between ranks, {format_bytes_per_s(min(pairs.values()))} to "
                      f"{format_bytes_per_s(maximum)}")  # fmt: skip
    items: list[Item] = [
        Words("title", [_MARGIN], [_MARGIN + 16], [title]),
        Words(
            "legend",
            [_MARGIN],
            [_MARGIN + 36],
            ["the area of a square is its rate in one direction, alone"],
        ),
    ]
    side = _CELL * count
    for rank in range(count):
        middle = (rank + 0.5) * _CELL
        items += [
            Words("tick", [_LEFT + middle], [_TOP - 6], [f"rank {rank}"]),
            Words("cell", [_LEFT - 8], [_TOP + middle + 4], [f"rank {rank}"]),
        ]
    for edge in range(count + 1):
        # Stronger lines mark the nodes, because rates differ most between them.
        is_border = edge in {0, count} or node_of[edge] != node_of[edge - 1]
        at, style = edge * _CELL, "axis" if is_border else "grid"
        items += [
            Line(style, ((_LEFT + at, _TOP), (_LEFT + at, _TOP + side))),
            Line(style, ((_LEFT, _TOP + at), (_LEFT + side, _TOP + at))),
        ]
    for (one, other), rate in sorted(pairs.items()):
        for row, column in ((one, other), (other, one)):
            items += _square(row, column, rate, maximum)
    shown = "; ".join(f"ranks {one} and {other}: {format_bytes_per_s(rate)}" for (one, other), rate in pairs.items())
    return svg_of(Scene(_LEFT + side + 120.0, _TOP + side + _BOTTOM, title, shown, tuple(items)), DrawOptions())


def _square(row: int, column: int, rate: float, maximum: float) -> list[Item]:
    # The area, not the side, is proportional to the rate.
    width = (_CELL - 22) * sqrt(rate / maximum)
    x, y = _LEFT + (column + 0.5) * _CELL, _TOP + (row + 0.5) * _CELL - 6
    tip = f"rank {row} to rank {column}: {format_bytes_per_s(rate)}"
    half = width / 2
    left, top, wide = (np.array([one]) for one in (x - half, y - half, width))
    return [
        Boxes("rate", left, top, wide, wide, tips=(tip,)),
        Words("tick", [x], [y + _CELL / 2 + 1], [format_bytes_per_s(rate)]),
    ]
