"""Rows and columns as text: plain, or Markdown."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from hpgo.base.messages import printable

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

# 3, -1.5, 12 %, 3.1 GB, 25 Gbit/s, 2 × 8, 13.1 ×, 34–35, 1.5–0.2 GB, 1-12; or nothing
_NUMBER = re.compile(
    r"[-+~]?[0-9][0-9.,]*(e[-+]?[0-9]+)?([–-][0-9][0-9.,]*| ?×( ?[0-9]+)?)*( ?[a-zA-Zµ%][a-zA-Zµ/%]*)?|[-–—]?"
)

_PIECE = re.compile(r"[^ /-]+[ /-]?|[ /-]")  # of a name: up to where it may be broken


def plain(columns: Sequence[str], rows: Iterable[Sequence[object]], width: int | None = None) -> list[str]:
    r"""Lines of the names of `columns`, and one for each row; numbers, with or without a unit, stand to the right.

    Where a line would be longer than `width`, names go on several.

    >>> print("\n".join(plain(["model", "micro-batch"], [("bert", 16), ("gnmt", 8)])))
    model  micro-batch
    bert            16
    gnmt             8
    >>> print("\n".join(plain(["model", "micro-batch"], [("bert", 16), ("gnmt", 8)], width=13)))
           micro-
    model   batch
    bert       16
    gnmt        8
    """
    cells = cells_of(rows)
    right = numeric(cells, len(columns))
    names = folded(columns, cells, width)
    widths = [max(map(len, (*name, *(row[at] for row in cells)))) for at, name in enumerate(names)]
    tall = max(map(len, names))
    head = zip(*([""] * (tall - len(name)) + name for name in names), strict=True)
    return [
        "  ".join(
            text.rjust(most) if to_the_right else text.ljust(most)
            for text, most, to_the_right in zip(line, widths, right, strict=True)
        ).rstrip()
        for line in [*head, *cells]
    ]


def folded(columns: Sequence[str], cells: Sequence[Sequence[str]], width: int | None) -> list[list[str]]:
    """The lines of each column's name: one, unless the table would be wider than `width`.

    >>> folded(["model", "micro-batch"], [["bert", "16"]], width=13)
    [['model'], ['micro-', 'batch']]
    """
    contents = [max((len(row[at]) for row in cells), default=0) for at in range(len(columns))]
    needed = sum(map(max, contents, map(len, columns))) + 2 * (len(columns) - 1)
    if width is None or needed <= width:
        return [[name] for name in columns]
    return [_lines(name, most) for name, most in zip(columns, contents, strict=True)]


def _lines(name: str, width: int) -> list[str]:
    """`name` on lines of at most `width`, broken between its words only."""
    lines = [""]
    for piece in _PIECE.findall(name):
        if lines[-1] and len((lines[-1] + piece).rstrip()) > width:
            lines[-1] = lines[-1].rstrip()
            lines.append("")
        lines[-1] += piece
    return lines


def cells_of(rows: Iterable[Sequence[object]]) -> list[list[str]]:
    """What stands in `rows`, fit to be printed."""
    return [[printable(str(cell)) for cell in row] for row in rows]


def markdown(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    r"""A table as GitHub and most others render it.

    >>> print("\n".join(markdown(["model", "step"], [("bert", "837 ms")])))
    | model | step |
    |:---|---:|
    | bert | 837 ms |
    """
    cells = [[printable(str(cell)).replace("|", "\\|") for cell in row] for row in rows]
    ruler = ("---:" if right else ":---" for right in numeric(cells, len(columns)))
    lines = [f"| {' | '.join(row)} |" for row in (list(columns), *cells)]
    return [lines[0], f"|{'|'.join(ruler)}|", *lines[1:]]


def numeric(cells: Sequence[Sequence[str]], columns: int) -> list[bool]:
    """Which columns hold only numbers."""
    return [all(_NUMBER.fullmatch(row[index]) for row in cells) for index in range(columns)]
