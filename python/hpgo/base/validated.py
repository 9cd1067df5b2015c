"""Records that check their fields once, when they are created.

The type of a field determines its allowed values, so new fields need no checks. Numbers of other libraries are
converted to Python's, so files and reports handle no other types.
"""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from functools import cache
from itertools import starmap
from math import isfinite, isnan
from numbers import Real
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

from hpgo.base.checks import MAX_COUNT
from hpgo.base.messages import as_float, as_whole, safe_repr
from hpgo.errors import ArgumentError, HpgoError

if TYPE_CHECKING:
    from collections.abc import Callable


class Record:
    """Base of dataclasses whose fields are checked against their types.

    Integers must be at least 0, numbers must not be NaN but may be infinite, sequences must be tuples. Other values
    raise ArgumentError. A record with further checks defines `__post_init__` and calls `check_fields` in it.

    >>> from dataclasses import dataclass
    >>> @dataclass(frozen=True, slots=True)
    ... class Part(Record):
    ...     layers: tuple[str, ...]
    ...     seconds: float
    >>> Part(("a", "b"), 1)
    Part(layers=('a', 'b'), seconds=1)
    >>> Part("ab", 1)
    Traceback (most recent call last):
    hpgo.errors.ArgumentError: layers of a Part is `ab`
    """

    __slots__ = ()

    def __post_init__(self) -> None:
        check_fields(self)


def check_fields(record: object, error: type[HpgoError] = ArgumentError) -> None:
    """Raise `error` unless each field of the dataclass `record` matches its type; call it from `__post_init__`."""
    for name, kind in _kinds(type(record)):
        value = getattr(record, name)
        if not kind.holds(value):
            try:
                object.__setattr__(record, name, kind.convert(value))
            except _MismatchError:
                message = f"{name} of a {type(record).__name__} is {safe_repr(value)}"
                raise error(message, f"give {kind.wanted}") from None


class _MismatchError(Exception):
    """A value does not match the type of its field."""


class _Kind(NamedTuple):
    """Check and conversion for the values of a field."""

    holds: Callable[[Any], bool]
    """Function that returns whether a value is valid as it is. It must be fast."""
    convert: Callable[[Any], object]
    """Function that converts a value that is not valid as it is, or raises _MismatchError."""
    wanted: str


def _refused(_: object) -> object:
    raise _MismatchError


def _whole(value: object) -> int:
    number = as_whole(value)
    if number is None or not 0 <= number <= MAX_COUNT:
        raise _MismatchError
    return number


def _number(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise _MismatchError
    number = as_float(value)
    if isnan(number):
        raise _MismatchError
    return value if isinstance(value, int) and isfinite(number) else number


def _is_text(value: object) -> bool:
    if not isinstance(value, str):
        return False
    try:
        value.encode()
    except UnicodeEncodeError:  # an unpaired surrogate
        return False
    return True


_TEXT = _Kind(lambda value: (type(value) is str and value.isascii()) or _is_text(value), _refused, "text")
_FLAG = _Kind(lambda value: value is True or value is False, _refused, "True or False")
_WHOLE = _Kind(
    lambda value: type(value) is int and 0 <= value <= MAX_COUNT, _whole, f"a whole number from 0 to {MAX_COUNT}"
)
_NUMBER = _Kind(lambda value: type(value) is float and not isnan(value), _number, "a number")
_ANYTHING = _Kind(lambda _: True, _refused, "anything")
_SIMPLE = {str: _TEXT, bool: _FLAG, int: _WHOLE, float: _NUMBER, object: _ANYTHING}


def _read(record: type) -> tuple[tuple[str, _Kind], ...]:
    types = get_type_hints(record)
    return tuple((field.name, _kind(types[field.name])) for field in fields(record) if field.init)


_kinds: Callable[[type], tuple[tuple[str, _Kind], ...]] = cache(_read)


def _kind(declared: Any) -> _Kind:
    if declared in _SIMPLE:
        return _SIMPLE[declared]
    origin, inner = get_origin(declared), get_args(declared)
    if origin is Literal:
        return _Kind(lambda value: isinstance(value, str) and value in inner, _refused, f"one of {', '.join(inner)}")
    if origin is tuple:
        return _row(_kind(inner[0])) if inner[1:] == (...,) else _pair(tuple(map(_kind, inner)))
    if origin in {Union, UnionType}:
        return _either([_kind(one) for one in inner if one is not NoneType], or_none=NoneType in inner)
    called = "a record of hpgo" if is_dataclass(declared) else "a value"
    return _Kind(lambda value: isinstance(value, declared), _refused, f"{called}: {declared.__name__}")


def _row(inner: _Kind) -> _Kind:
    holds, convert = inner.holds, inner.convert

    def converted(value: object) -> tuple[object, ...]:
        if not isinstance(value, tuple):
            raise _MismatchError
        return tuple(one if holds(one) else convert(one) for one in value)

    return _Kind(
        lambda value: type(value) is tuple and all(map(holds, value)), converted, f"a tuple, and in it {inner.wanted}"
    )


def _pair(inner: tuple[_Kind, ...]) -> _Kind:
    def converted(value: object) -> tuple[object, ...]:
        if not isinstance(value, tuple) or len(value) != len(inner):
            raise _MismatchError
        return tuple(starmap(_accept, zip(inner, value, strict=True)))

    return _Kind(lambda _: False, converted, f"a tuple of {len(inner)}: {', '.join(one.wanted for one in inner)}")


def _either(kinds: list[_Kind], *, or_none: bool) -> _Kind:
    def converted(value: object) -> object:
        for kind in kinds:
            try:
                return kind.convert(value)
            except _MismatchError:
                continue
        raise _MismatchError

    wanted = ", or ".join([*(kind.wanted for kind in kinds), *(["None"] if or_none else [])])
    if len(kinds) == 1:  # the only alternative is None
        holds = kinds[0].holds
        return _Kind(lambda value: value is None or holds(value), converted, wanted)
    return _Kind(
        lambda value: (or_none and value is None) or any(kind.holds(value) for kind in kinds), converted, wanted
    )


def _accept(kind: _Kind, value: object) -> object:
    return value if kind.holds(value) else kind.convert(value)
