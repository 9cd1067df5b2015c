"""Measures at batch sizes that nobody measured."""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


def at_batch(sizes: Sequence[int], values: Sequence[float], batch_size: int) -> float:
    """A value for `batch_size` samples: on the line between the nearest two of `sizes`, or in proportion beyond them.

    `sizes` ascend, and have one of `values` each. The native planner follows the same rule, to the last digit.

    >>> at_batch([8, 16], [1.0, 3.0], 12), at_batch([8, 16], [1.0, 3.0], 32)
    (2.0, 6.0)
    """
    after = bisect_left(sizes, batch_size)
    if after in {0, len(sizes)}:
        nearest = min(after, len(sizes) - 1)
        return values[nearest] * (batch_size / sizes[nearest])
    low, high = after - 1, after
    weight = (batch_size - sizes[low]) / (sizes[high] - sizes[low])
    return values[low] * (1 - weight) + values[high] * weight
