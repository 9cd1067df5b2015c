"""Shares of time: what fraction of each column of a picture a rank spends on each kind of work.

Pictures with more actions than pixels show these shares instead of boxes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Intervals:
    """Stretches of time on ranks, sorted by rank and start; those of one rank do not overlap."""

    rank: NDArray[np.integer]
    start_s: NDArray[np.floating]
    end_s: NDArray[np.floating]


def shares(
    intervals: Intervals, weight: NDArray[Any], edges_s: NDArray[np.floating], ranks: int, ranks_per_row: int
) -> NDArray[np.float64]:
    """Share of each column `edges_s[i] .. edges_s[i + 1]` that intervals cover, averaged over the ranks of a row.

    Each interval counts `weight` times (a number or a truth value). Returns an array [rows, columns] of values in 0..1.
    """
    rows = -(-ranks // ranks_per_row)
    covered = np.zeros((rows, len(edges_s) - 1))
    bounds = np.searchsorted(intervals.rank, np.arange(ranks + 1))
    for r in range(ranks):
        here = slice(bounds[r], bounds[r + 1])
        if here.start == here.stop:
            continue
        # Covered time up to t grows inside intervals and rests between them: a polyline, read off at the edges.
        start_s, end_s = intervals.start_s[here], intervals.end_s[here]
        knots_s = np.column_stack((start_s, end_s)).ravel()
        growth_s = (end_s - start_s) * weight[here]
        levels_s = np.column_stack((np.zeros(len(growth_s)), growth_s)).ravel().cumsum()
        covered[r // ranks_per_row] += np.diff(np.interp(edges_s, knots_s, levels_s))
    ranks_in_row = np.bincount(np.arange(ranks) // ranks_per_row)
    widths_s = np.diff(edges_s)
    return covered / ranks_in_row[:, None] / np.where(widths_s > 0, widths_s, 1)[None, :]
