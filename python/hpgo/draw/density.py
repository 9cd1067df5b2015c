"""Shares of time: the fraction of each picture column that a rank spends on each kind of work.

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
"""Number of intervals that are processed together. It limits the memory for 100 million intervals, and the time until
Ctrl-C takes effect. Not tuned."""


@dataclass(frozen=True, slots=True)
class Intervals:
    """Intervals of time on ranks, sorted by rank and start. Intervals of one rank do not overlap."""

    rank: NDArray[np.integer]
    start_s: NDArray[np.floating]
    end_s: NDArray[np.floating]


def parts(count: int) -> Iterator[slice]:
    """Iterate over slices of a column of `count` numbers, each small enough to be processed at once."""
    return (slice(first, min(first + _AT_ONCE, count)) for first in range(0, count, _AT_ONCE))


def equals(column: NDArray[Any], value: int) -> Callable[[slice], NDArray[np.bool_]]:
    """Return a weight function for `shares`: for a slice of `column`, whether each entry is `value`."""
    return lambda part: column[part] == value


def median_s(start_s: NDArray[np.floating], end_s: NDArray[np.floating]) -> float:
    """Return the median length of intervals. Above a million intervals, it uses evenly spaced samples."""
    every = len(start_s) // _AT_ONCE | 1  # odd, because an even step would sample only forwards or only backwards
    return float(np.median(end_s[::every] - start_s[::every]))


def shares(
    intervals: Intervals,
    weight_of: Callable[[slice], NDArray[Any]],
    edges_s: NDArray[np.floating],
    ranks: int,
    ranks_per_row: int,
) -> NDArray[np.float64]:
    """Return the share of each column that intervals cover, averaged over the ranks of a row.

    Column i is from `edges_s[i]` to `edges_s[i + 1]`.

    `weight_of` returns the weight of each interval in a slice, as numbers or truth values. The result is an array
    [rows, columns] of values in 0..1.
    """
    rows = -(-ranks // ranks_per_row)
    covered = np.zeros((rows, len(edges_s) - 1))
    bounds = np.searchsorted(intervals.rank, np.arange(ranks + 1, dtype=intervals.rank.dtype)).tolist()
    for r in range(ranks):
        for part in parts(bounds[r + 1] - bounds[r]):
            here = slice(bounds[r] + part.start, bounds[r] + part.stop)
            # The covered time up to t grows inside intervals and is constant between them. So it is a polyline, and
            # interpolating it at the edges is exact and costs the same for any number of columns per interval.
            start_s, end_s = intervals.start_s[here], intervals.end_s[here]
            knots_s = np.column_stack((start_s, end_s)).ravel()
            growth_s = (end_s - start_s) * weight_of(here)
            levels_s = np.column_stack((np.zeros(len(growth_s)), growth_s)).ravel().cumsum()
            covered[r // ranks_per_row] += np.diff(np.interp(edges_s, knots_s, levels_s))
    ranks_in_row = np.bincount(np.arange(ranks) // ranks_per_row)
    widths_s = np.diff(edges_s)
    return covered / ranks_in_row[:, None] / np.where(widths_s > 0, widths_s, 1)[None, :]
