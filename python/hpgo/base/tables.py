"""Tables as plain text or Markdown."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from hpgo.base.messages import printable

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

# Matches 3, -1.5, 12 %, 3.1 GB, 25 Gbit/s, 2 × 8, 13.1 ×, 34–35, 1.5–0.2 GB, 1-12, and the empty text.
_NUMBER = re.compile(
    r"[-+~]?[0-9][0-9.,]*(e[-+]?[0-9]+)?([–-][0-9][0-9.,]*| ?×( ?[0-9]+)?)*( ?[a-zA-Zµ%][a-zA-Zµ/%]*)?|[-–—]?"
)

_PIECE = re.compile(r"[^ /-]+[ /-]?|[ /-]")  # part of a column name, up to a place for a line break


def plain(columns: Sequence[str], rows: Iterable[Sequence[object]], width: int | None = None) -> list[str]:
    r"""Return the lines of a table. Columns of numbers, with or without units, are aligned to the right.

    Column names take several lines if the table would be wider than `width`.

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
            text.rjust(maximum) if to_the_right else text.ljust(maximum)
            for text, maximum, to_the_right in zip(line, widths, right, strict=True)
        ).rstrip()
        for line in [*head, *cells]
    ]


def folded(columns: Sequence[str], cells: Sequence[Sequence[str]], width: int | None) -> list[list[str]]:
    """Return the lines of each column's name: one, unless the table would be wider than `width`.

    >>> folded(["model", "micro-batch"], [["bert", "16"]], width=13)
    [['model'], ['micro-', 'batch']]
    """
    contents = [max((len(row[at]) for row in cells), default=0) for at in range(len(columns))]
    needed = sum(map(max, contents, map(len, columns))) + 2 * (len(columns) - 1)
    if width is None or needed <= width:
        return [[name] for name in columns]
    return [_lines(name, maximum) for name, maximum in zip(columns, contents, strict=True)]


def _lines(name: str, width: int) -> list[str]:
    """Split `name` between words into lines of at most `width` characters. A longer word gets a line to itself."""
    lines = [""]
    for piece in _PIECE.findall(name):
        if lines[-1] and len((lines[-1] + piece).rstrip()) > width:
            lines[-1] = lines[-1].rstrip()
            lines.append("")
        lines[-1] += piece
    return lines


def cells_of(rows: Iterable[Sequence[object]]) -> list[list[str]]:
    """Return all cells as printable text."""
    return [[printable(str(cell)) for cell in row] for row in rows]


def markdown(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    r"""Return a Markdown table as GitHub and most other tools render it.

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
    """Return for each column whether it holds only numbers."""
    return [all(_NUMBER.fullmatch(row[index]) for row in cells) for index in range(columns)]
