"""Rows and columns as text: plain, or Markdown."""

from __future__ import annotations

import re
from itertools import zip_longest
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

# 3, -1.5, 12 %, 3.1 GB, 25 Gbit/s, 2 × 8, 13.1 ×, 34–35, 1-12; or nothing
_NUMBER = re.compile(
    r"[-+~]?[0-9][0-9.,]*(e[-+]?[0-9]+)?([–-][0-9]+| ?×( ?[0-9]+)?)*( ?[a-zA-Zµ%][a-zA-Zµ/%]*)?|[-–—]?"
)

_PIECE = re.compile(r"[^ /-]+[ /-]?|[ /-]")  # of a name: up to where it may be broken
_WORD = re.compile(r" *[^ ]+ ?")


def plain(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    """One line for the names of `columns` and one for each row; numbers, with or without a unit, stand to the right.

    >>> for line in plain(["model", "step"], [("bert", "837 ms"), ("gnmt", "1.2 s")]):
    ...     print(line)
    model    step
    bert   837 ms
    gnmt    1.2 s
    """
    head, body = within(None, columns, rows)
    return head + body


def within(
    width: int | None, columns: Sequence[str], rows: Iterable[Sequence[object]], *, fold: bool = False
) -> tuple[list[str], list[str]]:
    r"""Lines of names and lines of rows, as `plain`, at most `width` wide if that can be without losing anything.

    Where they would be wider, long names go on several lines; then, if `fold`, long texts in cells.

    >>> for lines in within(13, ["model", "micro-batch"], [("bert", 16), ("gnmt", 32)]):
    ...     print(*lines, sep="\n")
           micro-
    model   batch
    bert       16
    gnmt       32
    """
    cells = [[printable(str(cell)) for cell in row] for row in rows]
    right = numeric(cells, len(columns))
    contents = [max((len(row[at]) for row in cells), default=0) for at in range(len(columns))]
    widths = list(map(max, contents, map(len, columns)))
    names = [[name] for name in columns]

    def excess() -> int:
        return 0 if width is None else sum(widths) + 2 * (len(widths) - 1) - width

    if excess() > 0:
        names = [_folded(name, most, _PIECE) for name, most in zip(columns, contents, strict=True)]
        widths = [max(most, *map(len, name)) for most, name in zip(contents, names, strict=True)]
    if fold:
        for at in sorted(range(len(widths)), key=lambda at: -widths[at]):
            if excess() > 0 and not right[at]:
                words = [word for row in cells for word in row[at].split(" ")]
                widths[at] = max(widths[at] - excess(), *map(len, (*names[at], *words)))
    tall = max(map(len, names))
    head = [[""] * (tall - len(name)) + name for name in names]
    bodies = ([_folded(text, most, _WORD) for text, most in zip(row, widths, strict=True)] for row in cells)

    def lines(block: Sequence[Sequence[str]]) -> list[str]:
        return [
            "  ".join(
                text.rjust(most) if to_the_right else text.ljust(most)
                for text, most, to_the_right in zip(line, widths, right, strict=True)
            ).rstrip()
            for line in zip_longest(*block, fillvalue="")
        ]

    return lines(head), [line for body in bodies for line in lines(body)]


def _folded(text: str, width: int, pieces: re.Pattern[str]) -> list[str]:
    """`text` on lines of at most `width`, broken between `pieces` only."""
    lines = [""]
    for piece in pieces.findall(text):
        if lines[-1] and len((lines[-1] + piece).rstrip()) > width:
            lines[-1] = lines[-1].rstrip()
            lines.append("")
        lines[-1] += piece
    return lines


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
