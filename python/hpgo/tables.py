"""Rows and columns as text: plain, or Markdown."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

# 3, -1.5, 12 %, 3.1 GB, 25 Gbit/s, 2 × 8, 13.1 ×, 34–35; or nothing
_NUMBER = re.compile(r"[-+~]?[0-9][0-9.,]*(e[-+]?[0-9]+)?(–[0-9]+| ?×( ?[0-9]+)?)*( ?[a-zA-Zµ%][a-zA-Zµ/%]*)?|[-–—]?")


def plain(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    """One line for the names of `columns` and one for each row; numbers, with or without a unit, stand to the right.

    >>> for line in plain(["model", "step"], [("bert", "837 ms"), ("gnmt", "1.2 s")]):
    ...     print(line)
    model    step
    bert   837 ms
    gnmt    1.2 s
    """
    cells = [[printable(str(cell)) for cell in row] for row in rows]
    right = numeric(cells, len(columns))
    widths = [max(map(len, column)) for column in zip(columns, *cells, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if to_the_right else cell.ljust(width)
            for cell, width, to_the_right in zip(row, widths, right, strict=True)
        ).rstrip()
        for row in (list(columns), *cells)
    ]


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


def printable(text: str) -> str:
    """`text` on one line, without what would steer the terminal."""
    return "".join(letter if letter.isprintable() else " " for letter in text)
