"""Whole numbers that callers give, checked in one way and refused in the same words everywhere."""

from __future__ import annotations

from hpgo.base.errors import ArgumentError, HpgoError
from hpgo.base.wording import as_whole, shown

MOST = 2**32 - 1
"""What counts may be at most: the native side keeps them in 32 bits."""


def whole(
    what: str,
    value: object,
    *,
    least: int = 1,
    most: int = MOST,
    error: type[HpgoError] = ArgumentError,
    hint: str = "",
) -> int:
    """`value` as an int, numpy's integers too.

    Raises `error`, which calls the value `what`, unless it is a whole number from `least` to `most`.

    >>> whole("`ranks`", 4)
    4
    >>> whole("`ranks`", 2.5)
    Traceback (most recent call last):
    hpgo.ArgumentError: `ranks` must be a whole number from 1, got 2.5
    """
    number = as_whole(value)
    if number is None or not least <= number <= most:
        to = f" to {most}" if number is not None and number > most else ""
        raise error(
            f"{what} must be a whole number from {least}{to}, got {shown(value)}",
            hint or f"give a whole number from {least} on",
        )
    return number
