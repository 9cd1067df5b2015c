"""Checks of the laws that results must satisfy, and comparisons with a tolerance for rounding.

A law is a function of a result. Its docstring states the law. It returns a description of the place where the law is
broken, or an empty text.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn, TypeVar

from hpgo.errors import InternalError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hpgo.errors import HpgoError

    Result = TypeVar("Result")

ROUNDING = 1e-9
"""Relative difference that rounding may cause between two computations of one number.

Not tuned: sums of a million terms differ by 1e-10.
"""
_REPORT = "this is a fault of hpgo: report it with the input files and the command that led here"


def check(
    what: str,
    laws: Sequence[Callable[[Result], str]],
    result: Result,
    *,
    error: type[HpgoError] = InternalError,
    hint: str = _REPORT,
) -> Result:
    """Return `result` if it keeps all `laws`.

    Raise `error`, with the code `broken_law`, for the first law that it breaks. The message names the law and the place
    but no number. Pass another class than InternalError for results that users can edit, as in a file.

    >>> def is_even(number: int) -> str:
    ...     '''A sum of two odd numbers is even.'''
    ...     return "the last digit" if number % 2 else ""
    >>> check("the sum", [is_even], 3 + 5)
    8
    >>> check("the sum", [is_even], 3 + 4)
    Traceback (most recent call last):
    hpgo.errors.InternalError: the sum breaks the law `is_even` at the last digit: a sum of two odd numbers is even
    """
    for law in laws:
        if place := law(result):
            broken(what, law, place, error=error, hint=hint)
    return result


def broken(
    what: str, law: Callable[..., str], place: str, *, error: type[HpgoError] = InternalError, hint: str = _REPORT
) -> NoReturn:
    """Raise `error` for `what`, which breaks `law` at `place`."""
    message = f"{what} breaks the law `{law.__name__}` at {place}: {statement(law)}"
    raise error(message, hint, code="broken_law", law=law.__name__)


def statement(law: Callable[..., str]) -> str:
    """Return the first sentence of a law's docstring, as the end of a sentence."""
    text = " ".join((law.__doc__ or "").split("\n\n", 1)[0].split()).rstrip(".")
    return text[:1].lower() + text[1:]


def is_at_most(value: float, maximum: float, of: float = 0.0) -> bool:
    """Return whether `value` is at most `maximum`, but for rounding of both or of something as large as `of`.

    >>> is_at_most(1 + 1e-12, 1), is_at_most(1.001, 1), is_at_most(1e-12, 0), is_at_most(1e-12, 0, of=1)
    (True, False, False, True)
    """
    return value <= maximum + ROUNDING * max(abs(maximum), of)


def is_equal(one: float, other: float, of: float = 0.0) -> bool:
    """Return whether two numbers are equal, but for rounding of both or of something as large as `of`."""
    return is_at_most(one, other, of) and is_at_most(other, one, of)


def difference(value: float, base: float) -> float:
    """Return `value - base`, and 0 where rounding alone makes them differ.

    >>> difference(0.1 + 0.2, 0.3), difference(3.0, 2.0)
    (0.0, 1.0)
    """
    return 0.0 if is_equal(value, base) else value - base


def share_left(part: float, whole: float) -> float:
    """Return the share of `whole` that is not `part`, and 0 where rounding alone makes them differ or `whole` is 0.

    >>> share_left(0.1 + 0.2, 0.3), share_left(1.0, 4.0)
    (0.0, 0.75)
    """
    return 0.0 if not whole or is_equal(part, whole) else 1 - part / whole
