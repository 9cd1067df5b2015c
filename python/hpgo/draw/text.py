"""Timelines as plain text, for logs and terminals.

Each character is an equal share of the step. An action is its kind and micro-batch, stretched with `-` (F), `=` (B),
`~` (I) or `+` (W). If there is no space for the number, it is only the letter of its kind. Idle time is dots. A
character that several actions share shows the one with the largest share.
"""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

import numpy as np

from hpgo.base.units import format_seconds
from hpgo.draw.axis import drawn_span_s, number_text, ticks, time_unit
from hpgo.draw.density import Intervals, equals, shares
from hpgo.draw.facts import comparison, counted, definitions, names, rank_name, summary, title
from hpgo.programs.schedule import KINDS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hpgo.draw.options import DrawOptions
    from hpgo.timing.timeline import Timeline

# More rows than a terminal shows at once. Not tuned.
_MAX_ROWS = 64
_ASCII = str.maketrans({"·": "|", "×": "x", "–": "-", "…": "~"})
"""Replacements of characters outside ASCII, because logs are read in terminals of any encoding. The caller's labels are
not changed."""
_LETTERS = ("F", "B", "I", "W", "X")
_STRETCH = ("-", "=", "~", "+", "#")
_MEANINGS = (
    "F- forward",
    "B= backward",
    "I~ input gradient",
    "W+ weight gradient",
    "X# forward and backward fused (numbers: forward/backward)",
)


def text(timelines: Sequence[Timeline], options: DrawOptions) -> str:
    """Return the timelines below each other on one time axis. Each line has at most `options.columns` characters."""
    labels = names(timelines, options.labels)
    named = {id(timeline): _row_names(timeline, options.columns // 3) for timeline in timelines}
    gutter = max(len(name) for names in named.values() for name in names) + 2
    end_s = drawn_span_s(timelines)
    columns = _columns(timelines, end_s, options.columns - gutter - 1)
    titled = options.title or (title(timelines, labels) if any(timeline.title for timeline in timelines) else "")
    lines = [*(textwrap.wrap(titled, options.columns) or [""]), ""] if titled else []
    for timeline, label in zip(timelines, labels, strict=True):
        lines.append(f"{label}: {summary(timeline)}")
        lines += _rows(timeline, columns, end_s, named[id(timeline)], gutter)
        lines += [*_axis(columns, end_s, gutter), ""]
    with_table = options.table and len(timelines) > 1
    used = sorted({code for timeline in timelines for code in np.unique(timeline.kind).tolist()})
    lines.append(", ".join([_MEANINGS[code] for code in used] + [". idle"]))
    words = f"One character is {format_seconds(end_s / columns)}. {definitions(timelines, with_table=with_table)}"
    lines += textwrap.wrap(words, options.columns)
    if with_table:
        rows = comparison(timelines, labels)
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        lines.append("")
        for row in rows:
            first, *others = (
                cell.ljust(width) if i == 0 else cell.rjust(width)
                for i, (cell, width) in enumerate(zip(row, widths, strict=True))
            )
            lines.append("  ".join([first, *others]).rstrip())
    return "\n".join(line.rstrip() for line in lines).translate(_ASCII) + "\n"


def _columns(timelines: Sequence[Timeline], end_s: float, at_most: int) -> int:
    """Return the number of characters of the time axis.

    If possible, the shortest action takes a whole number of characters, so that equal actions look equal.
    """
    shortest_s = min(
        (float((timeline.end_s - timeline.start_s).min(initial=np.inf)) for timeline in timelines), default=np.inf
    )
    if not 0 < shortest_s < np.inf:
        return at_most
    actions = end_s / shortest_s
    return int(actions * (at_most // actions) + 0.5) if 0 < actions <= at_most else at_most


def _rows(timeline: Timeline, columns: int, end_s: float, named: Sequence[str], gutter: int) -> list[str]:
    per_row = -(-timeline.ranks // _MAX_ROWS)
    count = -(-timeline.ranks // per_row)
    edges_s = np.linspace(0, end_s, columns + 1)
    actions, kinds = Intervals(timeline.rank, timeline.start_s, timeline.end_s), timeline.kind
    by_kind = np.array(
        [shares(actions, equals(kinds, code), edges_s, timeline.ranks, per_row) for code in range(len(KINDS))]
    )
    # A character shows the kind with the largest share. It shows idle time only if that is more than half.
    busiest = by_kind.argmax(axis=0)
    letters = np.where(by_kind.sum(axis=0) >= 0.5, np.array(list(_LETTERS))[busiest], ".")
    characters = [list("".join(row)) for row in letters.tolist()]
    if per_row == 1:
        _write_actions(timeline, columns, end_s, characters)
    lines = [f"{named[row]:>{gutter - 2}} |{''.join(characters[row])}|" for row in range(count)]
    if per_row > 1:
        lines.append(f"({counted(timeline.ranks, timeline.row)}, {per_row} per row)")
    return lines


def _write_actions(timeline: Timeline, columns: int, end_s: float, characters: list[list[str]]) -> None:
    """Write name and stretch of each action with at least two characters over the letters."""
    scale = columns / end_s if end_s > 0 else 0.0
    first = np.rint(timeline.start_s * scale).astype(np.int64)
    last = np.rint(timeline.end_s * scale).astype(np.int64)
    for i in np.flatnonzero(last - first >= 2).tolist():
        code, room = int(timeline.kind[i]), int(last[i] - first[i])
        number = str(timeline.micro_batch[i] if KINDS[code] in {"F", "F‖B"} else timeline.backward_micro_batch[i])
        if KINDS[code] == "F‖B":
            number += f"/{timeline.backward_micro_batch[i]}"
        name = _LETTERS[code] + (number if len(number) + 1 <= room else "")
        characters[int(timeline.rank[i])][first[i] : last[i]] = name.ljust(room, _STRETCH[code])


def _axis(columns: int, end_s: float, gutter: int) -> list[str]:
    unit, unit_s = time_unit(end_s)
    marks, numbers = [" "] * (columns + 1), [" "] * (columns + 40)
    for position in ticks(end_s / unit_s, at_most=max(2, columns // 12)):
        at = round(position * unit_s / end_s * columns) if end_s > 0 else 0
        marks[min(at, columns)] = "^"
        for i, character in enumerate(number_text(position)):
            numbers[at + i] = character
    pad = " " * (gutter)
    return [pad + "".join(marks), f"{pad}{''.join(numbers).rstrip()}  {unit}"]


def _row_names(timeline: Timeline, room: int) -> list[str]:
    """Return the names of rows. If the longest has more than `room` characters, return the short names."""
    per_row = -(-timeline.ranks // _MAX_ROWS)
    found = [rank_name(timeline, rank, per_row) for rank in range(0, timeline.ranks, per_row)]
    return found if max(map(len, found)) <= room else [name.partition(" (")[0] for name in found]
