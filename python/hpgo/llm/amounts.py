"""Arithmetic of amounts: a number of one configuration, or an array of many, with pipeline ranks on the last axis.

A term that uses only `+ - * /` and the functions here is written once and computes both.
"""

from __future__ import annotations

from typing import Any

Amount = Any
"""A number, or a numpy array of numbers whose last axis is pipeline ranks."""


def maximum(first: Amount, second: Amount) -> Amount:
    """Return the larger amount, element by element.

    >>> maximum(1.0, 2.0)
    2.0
    """
    # Numbers stay Python floats. One estimate without a pipeline then needs no numpy, which takes longer to import
    # than the estimate takes to compute.
    if isinstance(first, float | int) and isinstance(second, float | int):
        return max(first, second)
    import numpy as np

    return np.maximum(first, second)


def minimum(first: Amount, second: Amount) -> Amount:
    """Return the smaller amount, element by element.

    >>> import numpy as np
    >>> minimum(np.array([1.0, 3.0]), 2.0).tolist()
    [1.0, 2.0]
    """
    if isinstance(first, float | int) and isinstance(second, float | int):
        return min(first, second)
    return -maximum(-first, -second)


def by_rank(values: list[float]) -> Amount:
    """Return the amount of one configuration, given its value on each pipeline rank."""
    # A single rank is a number, not an array of one: `over_ranks` and `before_ranks` rely on that to skip numpy.
    if len(values) == 1:
        return values[0]
    import numpy as np

    return np.array(values)


def over_ranks(values: Amount) -> Amount:
    """Return the maximum over pipeline ranks. A number belongs to the only rank."""
    return values if isinstance(values, float | int) else values.max(axis=-1)


def before_ranks(values: Amount) -> Amount:
    """Return, for each pipeline rank, the sum over the ranks before it.

    >>> import numpy as np
    >>> before_ranks(np.array([1.0, 2.0, 3.0])).tolist(), before_ranks(5.0)
    ([0.0, 1.0, 3.0], 0.0)
    """
    return 0.0 if isinstance(values, float | int) else values.cumsum(axis=-1) - values
