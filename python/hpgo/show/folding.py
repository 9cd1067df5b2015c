"""Merged table rows: adjacent stages, groups or ranks with nearly equal figures share a row."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

_MIN_ROWS = 3
"""Number of nearly equal neighbors from which on they share a row."""
_TOLERANCE = 0.02
"""Largest relative difference of nearly equal figures. Not tuned."""


def alike(places: range, of: Callable[[int], tuple[float | None, ...]]) -> list[range]:
    """Return ranges of three or more neighbors whose figures are equal within 2 %, and all other places alone.

    >>> alike(range(5), lambda place: (1.0 if place < 4 else 2.0,))
    [range(0, 4), range(4, 5)]
    """
    runs: list[range] = []
    # Compare with the first of a run, not with the neighbor: small differences must not add up along a row.
    for place in places:
        first = runs[-1].start if runs else place
        if place > first and all(_is_near(one, other) for one, other in zip(of(first), of(place), strict=True)):
            runs[-1] = range(first, place + 1)
        else:
            runs.append(range(place, place + 1))
    folded = [[run] if len(run) >= _MIN_ROWS else [range(place, place + 1) for place in run] for run in runs]
    return [run for parts in folded for run in parts]


def _is_near(one: float | None, other: float | None) -> bool:
    if one is None or other is None:
        return one is other
    return abs(one - other) <= _TOLERANCE * max(abs(one), abs(other))


def numbers(run: range, first: int = 0) -> object:
    """Return the label of a row, where the first of all rows has the number `first`.

    >>> numbers(range(2, 3)), numbers(range(2, 5)), numbers(range(3), first=1)
    (2, '2–4', '1–3')
    """
    return ranged(run.start + first, run.stop - 1 + first)


def ranged(first: object, last: object) -> object:
    """Return the first and the last value of a row, or one value if they are equal.

    >>> ranged(4, 1), ranged(4, 4)
    ('4–1', 4)
    """
    return first if first == last else f"{first}–{last}"


def steps(counts: Iterable[int]) -> list[int]:
    """Return the difference of each count from the count before; ranks with equal differences may share a row.

    >>> steps([4, 3, 2, 1])
    [-1, -1, -1, -1]
    """
    found = list(counts)
    return [found[max(place, 1)] - found[max(place, 1) - 1] for place in range(len(found))] if found[1:] else [0]
