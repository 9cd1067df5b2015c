"""Whole numbers that callers give, checked in one way and refused in the same words everywhere."""

from __future__ import annotations

from itertools import islice
from typing import Any

from hpgo.base.errors import ArgumentError, HpgoError
from hpgo.base.wording import as_whole, shown

MOST = 2**32 - 1
"""What counts may be at most: the native side keeps them in 32 bits."""
MOST_GPUS = 2**12
"""What a device of a plan may stand for at most."""


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
    hpgo.ArgumentError: `ranks` is 2.5
    >>> whole("devices", 9, most=8)
    Traceback (most recent call last):
    hpgo.ArgumentError: devices is 9
    """
    number = as_whole(value)
    if number is None or not least <= number <= most:
        beyond = most != MOST or (number is not None and number > most)
        short = isinstance(value, int) and value.bit_length() < 100
        wanted = f"give a whole number from {least} {f'to {most}' if beyond else 'on'}"
        raise error(f"{what} is {value if short else shown(value)}", hint or wanted)
    return number


def listed(name: str, values: Any, *, most: int | None = None) -> list[Any]:
    """`values` as a list of at most so many. Raises ArgumentError, which calls them `name`, for text and for one value.

    >>> listed("devices", range(3))
    [0, 1, 2]
    """
    if isinstance(values, str):
        raise ArgumentError(f"{name} are {shown(values)}", "give a list")
    try:
        found = list(islice(values, None if most is None else most + 1))
    except TypeError:
        raise ArgumentError(f"{name} are {shown(values)}", "give a list") from None
    if most is not None and len(found) > most:
        raise ArgumentError(f"{name} are more than {most}", "name each once")
    return found


def device_number(stage: int, value: object) -> int:
    """The number of a device that the stage of that number names; raises ArgumentError for what is none.

    >>> device_number(2, -1)
    Traceback (most recent call last):
    hpgo.ArgumentError: stage 2 names device -1
    """
    number = as_whole(value)
    if number is None or not 0 <= number <= MOST:
        raise ArgumentError(f"stage {stage} names device {value!r:.40}", "devices are numbered from 0")
    return number


def check_text(what: str, value: object, error: type[HpgoError] = ArgumentError) -> str:
    r"""`value`, if it is text that files and other programs can hold.

    Raises `error`, which calls the value `what`, for what is no text, or has half a character.

    >>> check_text("a profile's name", "bert")
    'bert'
    >>> check_text("a profile's name", "\ud800")
    Traceback (most recent call last):
    hpgo.ArgumentError: a profile's name holds half a character
    """
    if not isinstance(value, str):
        raise error(f"{what} must be text, got {shown(value)}", "an empty one will do")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise error(f"{what} holds half a character", "write it anew: large ones are pairs of `\\u` escapes") from None
    return value
