"""Divisors of whole numbers."""

from __future__ import annotations

import math


def divisors(number: int) -> list[int]:
    """Return all divisors of a positive number in increasing order.

    >>> divisors(12)
    [1, 2, 3, 4, 6, 12]
    """
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})
