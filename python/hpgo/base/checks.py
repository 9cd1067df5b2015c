"""Checks of arguments, which report every kind of wrong value in the same words."""

from __future__ import annotations

import math
from itertools import islice
from numbers import Real
from types import UnionType  # noqa: TC003
from typing import TYPE_CHECKING, Any, TypeVar

from hpgo.base.messages import as_float, as_whole, did_you_mean, exactly, safe_repr
from hpgo.errors import ArgumentError, HpgoError

if TYPE_CHECKING:
    from collections.abc import Iterable

_Word = TypeVar("_Word", bound=str)

MAX_COUNT = 2**32 - 1
"""Largest count that is accepted. The Rust core stores counts in 32 bits."""
MAX_ITEMS = 2**20
"""Default limit on the items of a list. An iterable may be endless, so reading it has to stop somewhere."""
MAX_GPUS = 2**12
"""Largest number of GPUs that one device of a plan may represent."""


def check_int(
    what: str,
    value: object,
    *,
    minimum: int = 1,
    maximum: int = MAX_COUNT,
    error: type[HpgoError] = ArgumentError,
    hint: str = "",
) -> int:
    """Return `value` as an int. Integers of numpy are accepted, too.

    Raises `error`, which calls the value `what`, unless it is a whole number from `minimum` to `maximum`.

    >>> check_int("`ranks`", 4)
    4
    >>> check_int("`ranks`", 2.5)
    Traceback (most recent call last):
    hpgo.errors.ArgumentError: `ranks` is 2.5
    >>> check_int("devices", 9, maximum=8)
    Traceback (most recent call last):
    hpgo.errors.ArgumentError: devices is 9
    """
    number = as_whole(value)
    if number is None or not minimum <= number <= maximum:
        # Name the upper limit only if the caller set one or the value exceeds it: 2**32 - 1 means nothing to a user.
        beyond = maximum != MAX_COUNT or (number is not None and number > maximum)
        wanted = f"give a whole number from {minimum} {f'to {maximum}' if beyond else 'on'}"
        raise error(f"{what} is {exactly(value)}", hint or wanted, name=what)
    return number


def number(
    what: str,
    value: object,
    *,
    above: float | None = None,
    maximum: float = math.inf,
    infinite: bool = False,
    error: type[HpgoError] = ArgumentError,
    hint: str = "",
) -> float:
    """Return `value` as a float. Real numbers of other libraries are accepted, too.

    Raises `error`, which calls the value `what`, unless it is at least 0, or greater than `above` if that is given, and
    at most `maximum`. Infinity is accepted only with `infinite`, NaN never.

    >>> number("tolerance", 1)
    1.0
    >>> number("time_limit_s", 0, above=0)
    Traceback (most recent call last):
    hpgo.errors.ArgumentError: time_limit_s is 0
    """
    found = math.nan if isinstance(value, bool) or not isinstance(value, Real) else as_float(value)
    # Each comparison with NaN is false, so NaN fails the first test.
    if not (found >= 0 if above is None else found > above) or found > maximum or (found == math.inf and not infinite):
        wanted = "a number from 0" if above is None else f"a number above {above:g}"
        raise error(
            f"{what} is {safe_repr(value)}",
            hint or f"give {wanted}{'' if maximum == math.inf else f' to {maximum:g}'}",
            name=what,
        )
    return found


def check_flag(what: str, value: object) -> None:
    """Raise ArgumentError, which calls the value `what`, unless it is True or False.

    >>> check_flag("overlap", "yes")
    Traceback (most recent call last):
    hpgo.errors.ArgumentError: overlap is `yes`
    """
    if not isinstance(value, bool):
        raise ArgumentError(f"{what} is {safe_repr(value)}", "choose True or False", name=what)


def check_is(what: str, value: object, kind: type | UnionType, hint: str, *, or_none: bool = False) -> None:
    """Raise ArgumentError, which calls the value `what`, unless it is an instance of `kind`, or None with `or_none`.

    >>> check_is("the job", "train.py", dict, "make one")
    Traceback (most recent call last):
    hpgo.errors.ArgumentError: the job is `train.py`
    """
    if not isinstance(value, kind) and not (or_none and value is None):
        raise ArgumentError(f"{what} is {safe_repr(value)}", hint, name=what)


def choice(kind: str, value: object, known: Iterable[_Word], error: type[HpgoError] = ArgumentError) -> _Word:
    """Return `value` if it is one of the names `known`; raise `error`, which suggests similar names, if it is not.

    >>> choice("objective", "latncy", ["throughput", "latency"])
    Traceback (most recent call last):
    hpgo.errors.ArgumentError: there is no objective `latncy`
    """
    names = list(known)
    if not isinstance(value, str) or value not in names:
        raise error(
            f"there is no {kind} {safe_repr(value)}",
            did_you_mean(value if isinstance(value, str) else "", names),
            code="unknown_name",
            kind=kind,
        )
    return value


def check_progress(progress: object) -> None:
    """Raise ArgumentError unless `progress` is callable or None."""
    if progress is not None and not callable(progress):
        raise ArgumentError(f"progress is {safe_repr(progress)}", "give a function of the best value and the bound")


def check_list(
    name: str,
    values: Any,
    *,
    maximum: int = MAX_ITEMS,
    error: type[HpgoError] = ArgumentError,
    hint: str = "give a list",
) -> list[Any]:
    """Return `values` as a list.

    Raises `error`, which calls them `name`, if they are text, a single value, or more than `maximum`.

    >>> check_list("devices", range(3))
    [0, 1, 2]
    """
    are = "is" if name.startswith("`") else "are"
    # Text is iterable, but a list of its letters is never meant.
    if isinstance(values, str | bytes):
        raise error(f"{name} {are} {safe_repr(values)}", hint, name=name.strip("`"))
    try:
        found = list(islice(values, maximum + 1))
    except Exception as failure:  # noqa: BLE001 -- not iterable, or its iterator failed
        raise error(f"{name} {are} {safe_repr(values)}", hint, name=name.strip("`")) from (
            None if isinstance(failure, TypeError) else failure
        )
    if len(found) > maximum:
        raise error(f"{name} {are} more than {maximum}", "give fewer items", code="too_large", name=name.strip("`"))
    return found


def device_number(stage: int, value: object) -> int:
    """Return `value` as the number of a device of stage `stage`; raise ArgumentError if it is not a valid number.

    >>> device_number(2, -1)
    Traceback (most recent call last):
    hpgo.errors.ArgumentError: stage 2 names device -1
    """
    number = as_whole(value)
    if number is None or not 0 <= number <= MAX_COUNT:
        given = f"{value!r:.40}" if isinstance(value, str) else exactly(value)
        raise ArgumentError(f"stage {stage} names device {given}", "number devices from 0", code="unknown_name")
    return number


def check_text(what: str, value: object, error: type[HpgoError] = ArgumentError) -> str:
    r"""Return `value` if it is text that can be encoded in UTF-8.

    Raises `error`, which calls the value `what`, for other types and for text with an unpaired surrogate.

    >>> check_text("a profile's name", "bert")
    'bert'
    >>> check_text("a profile's name", "\ud800")
    Traceback (most recent call last):
    hpgo.errors.ArgumentError: a profile's name contains an unpaired surrogate
    """
    if not isinstance(value, str):
        raise error(f"{what} must be text, got {safe_repr(value)}", "give text, which may be empty", name=what)
    try:
        value.encode()
    except UnicodeEncodeError:
        raise error(
            f"{what} contains an unpaired surrogate",
            "write characters above U+FFFF as pairs of `\\u` escapes",
            code="damaged_file",
        ) from None
    return value
