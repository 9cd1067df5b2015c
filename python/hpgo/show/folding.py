"""Rows that tables share: stages, groups or ranks whose figures are alike stand in one row."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

_LEAST = 3  # neighbours alike from which on they share a row
_NEAR = 0.02  # of their figures


def alike(places: range, of: Callable[[int], tuple[float | None, ...]]) -> list[range]:
    """Neighbours whose figures differ by rounding and little more, where there are three or more; others alone.

    >>> alike(range(5), lambda place: (1.0 if place < 4 else 2.0,))
    [range(0, 4), range(4, 5)]
    """
    runs: list[range] = []
    for place in places:
        first = runs[-1].start if runs else place
        if place > first and all(_is_near(one, other) for one, other in zip(of(first), of(place), strict=True)):
            runs[-1] = range(first, place + 1)
        else:
            runs.append(range(place, place + 1))
    folded = [[run] if len(run) >= _LEAST else [range(place, place + 1) for place in run] for run in runs]
    return [run for parts in folded for run in parts]


def _is_near(one: float | None, other: float | None) -> bool:
    if one is None or other is None:
        return one is other
    return abs(one - other) <= _NEAR * max(abs(one), abs(other))


def numbers(run: range, first: int = 0) -> object:
    """What a row is called, where the first of all is number `first`.

    >>> numbers(range(2, 3)), numbers(range(2, 5)), numbers(range(3), first=1)
    (2, '2–4', '1–3')
    """
    return ranged(run.start + first, run.stop - 1 + first)


def ranged(first: object, last: object) -> object:
    """What goes from one value to another, from the first of a row to its last.

    >>> ranged(4, 1), ranged(4, 4)
    ('4–1', 4)
    """
    return first if first == last else f"{first}–{last}"


def steps(counts: Iterable[int]) -> list[int]:
    """By how much each count differs from the one before: those that go on evenly may share a row.

    >>> steps([4, 3, 2, 1])
    [-1, -1, -1, -1]
    """
    found = list(counts)
    return [found[max(place, 1)] - found[max(place, 1) - 1] for place in range(len(found))] if found[1:] else [0]
