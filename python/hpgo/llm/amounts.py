"""Arithmetic of amounts: numbers of one configuration, or arrays of as many as there are, ranks on the last axis.

A term that keeps to `+ - * /` and to the functions here is written once, and computes both.
"""

from __future__ import annotations

from typing import Any

Amount = Any
"""A float, or an array of floats, whose last axis is pipeline ranks."""


def maximum(first: Amount, second: Amount) -> Amount:
    """Return the larger of both, element by element.

    >>> maximum(1.0, 2.0)
    2.0
    """
    if isinstance(first, float | int) and isinstance(second, float | int):
        return max(first, second)
    import numpy as np  # a single configuration without a pipeline does without

    return np.maximum(first, second)


def minimum(first: Amount, second: Amount) -> Amount:
    """Return the smaller of both, element by element."""
    larger = maximum(first, second)
    return min(first, second) if isinstance(larger, float | int) else -maximum(-first, -second)


def by_rank(values: list[float]) -> Amount:
    """Return the amount of a configuration, of values by rank."""
    if len(values) == 1:
        return values[0]
    import numpy as np

    return np.array(values)


def over_ranks(values: Amount) -> Amount:
    """Return the largest value of all ranks; a number is of a single one."""
    return values if isinstance(values, float | int) else values.max(axis=-1)


def before_ranks(values: Amount) -> Amount:
    """Return the sum over the ranks before each rank.

    >>> import numpy as np
    >>> before_ranks(np.array([1.0, 2.0, 3.0])).tolist(), before_ranks(5.0)
    ([0.0, 1.0, 3.0], 0.0)
    """
    return 0.0 if isinstance(values, float | int) else values.cumsum(axis=-1) - values
