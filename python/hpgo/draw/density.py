"""Shares of time: what fraction of each column of a picture a rank spends on each kind of work.

Pictures with more actions than pixels show these shares instead of boxes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numpy.typing import NDArray

_AT_ONCE = 2**20
"""So many intervals are summed up at a time, that a hundred million take no more memory, and Ctrl-C needn't wait."""


@dataclass(frozen=True, slots=True)
class Intervals:
    """Stretches of time on ranks, sorted by rank and start; those of one rank do not overlap."""

    rank: NDArray[np.integer]
    start_s: NDArray[np.floating]
    end_s: NDArray[np.floating]


def parts(count: int) -> Iterator[slice]:
    """Slices of a column of `count` numbers, of a size that is dealt with in an instant."""
    return (slice(first, min(first + _AT_ONCE, count)) for first in range(0, count, _AT_ONCE))


def equals(column: NDArray[Any], value: int) -> Callable[[slice], NDArray[np.bool_]]:
    """For a slice of `column`, where it is `value`: a weight of `shares`."""
    return lambda part: column[part] == value


def median_s(start_s: NDArray[np.floating], end_s: NDArray[np.floating]) -> float:
    """The median length of stretches of time; of about a million of them, evenly chosen, where there are more."""
    every = len(start_s) // _AT_ONCE | 1  # odd, since forward and backward take turns
    return float(np.median(end_s[::every] - start_s[::every]))


def shares(
    intervals: Intervals,
    weight_of: Callable[[slice], NDArray[Any]],
    edges_s: NDArray[np.floating],
    ranks: int,
    ranks_per_row: int,
) -> NDArray[np.float64]:
    """Share of each column `edges_s[i] .. edges_s[i + 1]` that intervals cover, averaged over the ranks of a row.

    Each interval counts as `weight_of` says for a slice of them (numbers or truth values). Returns an array
    [rows, columns] of values in 0..1.
    """
    rows = -(-ranks // ranks_per_row)
    covered = np.zeros((rows, len(edges_s) - 1))
    bounds = np.searchsorted(intervals.rank, np.arange(ranks + 1, dtype=intervals.rank.dtype)).tolist()
    for r in range(ranks):
        for part in parts(bounds[r + 1] - bounds[r]):
            here = slice(bounds[r] + part.start, bounds[r] + part.stop)
            # Covered time up to t grows inside intervals and rests between them: a polyline, read off at the edges.
            start_s, end_s = intervals.start_s[here], intervals.end_s[here]
            knots_s = np.column_stack((start_s, end_s)).ravel()
            growth_s = (end_s - start_s) * weight_of(here)
            levels_s = np.column_stack((np.zeros(len(growth_s)), growth_s)).ravel().cumsum()
            covered[r // ranks_per_row] += np.diff(np.interp(edges_s, knots_s, levels_s))
    ranks_in_row = np.bincount(np.arange(ranks) // ranks_per_row)
    widths_s = np.diff(edges_s)
    return covered / ranks_in_row[:, None] / np.where(widths_s > 0, widths_s, 1)[None, :]
