"""Formulas over named values, such as `head_dim or hidden_size // num_attention_heads`.

A formula is an expression in a small part of Python: names, constants, arithmetic, comparisons, `and`, `or`, `not`,
conditional expressions, indexing, lists, mappings, comprehensions and the functions of `FUNCTIONS`. It has no
attributes and no other calls, so a file of formulas can't run code.
"""

from __future__ import annotations

import ast
import operator
from functools import cache
from math import ceil, sqrt
from typing import TYPE_CHECKING, Any

from hpgo.base.messages import join_words, safe_repr
from hpgo.errors import ArgumentError, HpgoError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_MAX_ITEMS = 100_000
"""Maximum length of a list. A configuration may state billions of layers, and each would be an item."""


class _LimitError(ValueError):
    """A value is beyond a limit of formulas, with the reason in words."""


def _range(*limits: int) -> range:
    numbers = range(*limits)
    if len(numbers) > _MAX_ITEMS:
        raise _LimitError(f"a range has {len(numbers)} numbers")
    return numbers


def _round_up(value: float, multiple: int) -> int:
    return ceil(value / multiple) * multiple


def _multiply(left: Any, right: Any) -> Any:
    if isinstance(left, (str, list)) or isinstance(right, (str, list)):
        raise TypeError("only numbers can be multiplied")
    return left * right


def _power(base: Any, exponent: Any) -> Any:
    # A stated size as an exponent would take memory without limit.
    if abs(exponent) > 8:
        raise _LimitError("an exponent is above 8")
    return base**exponent


FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "ceil": ceil, "int": int, "len": len, "max": max, "min": min, "range": _range, "round_up": _round_up,
    "sqrt": sqrt, "sum": sum,
}  # fmt: skip
"""Functions of formulas by name; `round_up(n, multiple)` is the smallest multiple that is at least *n*."""
_BINARY: Mapping[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: _multiply, ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod, ast.Pow: _power,
}  # fmt: skip
_COMPARE: Mapping[type, Callable[[Any, Any], bool]] = {
    ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt,
    ast.GtE: operator.ge, ast.In: lambda item, items: item in items, ast.NotIn: lambda item, items: item not in items,
    ast.Is: operator.is_, ast.IsNot: operator.is_not,
}  # fmt: skip
_UNARY: Mapping[type, Callable[[Any], Any]] = {ast.USub: operator.neg, ast.Not: operator.not_}
# Errors that wrong values in a formula raise.
_FAILURES = (TypeError, ValueError, ZeroDivisionError, IndexError, KeyError, OverflowError)


class _PartError(Exception):
    """The innermost part of a formula that has no value, with the error that it raised."""

    def __init__(self, part: ast.AST, failure: Exception) -> None:
        super().__init__(part, failure)
        self.part, self.failure = part, failure


class FormulaError(ArgumentError):
    """A formula has no value, because of values that a file states."""

    def __init__(self, message: str, names: tuple[str, ...] = (), **fields: Any) -> None:
        super().__init__(message, **fields)
        self.names = names
        """Names in the part that has no value; all names of the formula if that part has none."""

    # Exceptions are pickled by their positional arguments alone, which would lose `names` between processes.
    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.message, self.names)


class Formula:
    """A parsed formula. Raises ArgumentError for text that is no formula.

    >>> Formula("head_dim or hidden // heads").value({"head_dim": None, "hidden": 64, "heads": 4}.__getitem__)
    16
    >>> Formula("[i for i in range(n) if i % 2]").names
    ('n',)
    >>> Formula("open('file')")
    Traceback (most recent call last):
    hpgo.errors.ArgumentError: the formula `open('file')` calls something that is not a function of formulas
    """

    def __init__(self, text: str) -> None:
        """Parse the formula in `text`."""
        self.text = text
        try:
            self._tree = ast.parse(text, mode="eval").body
        except (SyntaxError, ValueError):
            raise ArgumentError(f"`{text}` is not a formula", "write an expression") from None
        self.names = tuple(dict.fromkeys(self._free(self._tree, frozenset())))
        """Names whose values the formula needs, in the order of the text."""

    def value(self, lookup: Callable[[str], Any]) -> Any:
        """Return the value, with the values of names from `lookup`. Raises FormulaError if there is none.

        >>> Formula("[{'M': 'mamba'}[letter] for letter in pattern]").value({"pattern": "MX"}.__getitem__)
        Traceback (most recent call last):
        hpgo.model.formulas.FormulaError: `pattern` has `X`, which is none of M
        """
        # A file can hold any value, so a formula that fails is the fault of the file, not of the program.
        try:
            return _evaluate(self._tree, lookup, {})
        except _PartError as error:
            part, failure = error.part, error.failure
        found = [node.id for node in ast.walk(part) if isinstance(node, ast.Name) and node.id in self.names]
        names = tuple(dict.fromkeys(found)) or self.names
        words = join_words([f"`{name}`" for name in names])
        if isinstance(failure, KeyError) and isinstance(part, ast.Subscript) and isinstance(part.value, ast.Dict):
            known = join_words([key.value for key in part.value.keys if isinstance(key, ast.Constant)], "or")
            raise FormulaError(f"{words} has {safe_repr(failure.args[0])}, which is none of {known}", names)
        if isinstance(failure, IndexError):
            raise FormulaError(f"{words} has too few entries", names)
        raise FormulaError(_reason(failure, {name: lookup(name) for name in names}, words), names)

    def _refuse(self, what: str) -> ArgumentError:
        return ArgumentError(f"the formula `{self.text}` {what}", f"use one of {', '.join(FUNCTIONS)}")

    def _free(self, node: ast.AST, bound: frozenset[str]) -> list[str]:
        """Return the free names of a part of the formula. Raise ArgumentError for anything that is not allowed."""
        match node:
            case ast.Name():
                return [] if node.id in bound else [node.id]
            case ast.Call():
                if not isinstance(node.func, ast.Name) or node.func.id not in FUNCTIONS or node.keywords:
                    raise self._refuse("calls something that is not a function of formulas")
                parts: list[ast.AST] = list(node.args)
            case ast.ListComp(generators=[ast.comprehension(target=ast.Name() as target) as loop]):
                within = bound | {target.id}
                inner = [name for part in (node.elt, *loop.ifs) for name in self._free(part, within)]
                return self._free(loop.iter, bound) + inner
            case ast.BinOp() if type(node.op) in _BINARY:
                parts = [node.left, node.right]
            case ast.UnaryOp() if type(node.op) in _UNARY:
                parts = [node.operand]
            case ast.Compare() if all(type(op) in _COMPARE for op in node.ops):
                parts = [node.left, *node.comparators]
            case ast.BoolOp():
                parts = list(node.values)
            case ast.IfExp():
                parts = [node.body, node.test, node.orelse]
            case ast.Subscript():
                parts = [node.value, node.slice]
            case ast.Slice():
                parts = [part for part in (node.lower, node.upper) if part is not None]
            case ast.List():
                parts = list(node.elts)
            case ast.Dict() if all(node.keys):
                parts = [part for part in (*node.keys, *node.values) if part is not None]
            case ast.Constant():
                parts = []
            case _:
                raise self._refuse("has a part that formulas do not have")
        return [name for part in parts for name in self._free(part, bound)]


def _reason(failure: Exception, values: Mapping[str, Any], words: str) -> str:
    """Return why a part of a formula has no value, given the values of its names and these names in words."""
    if isinstance(failure, TypeError) and values:
        # Python's own words name types of the program, not what the file should have.
        strange = {name: value for name, value in values.items() if not isinstance(value, (int, float))}
        needed = "a number" if strange else "a list"
        name, value = next(iter((strange or values).items()))
        return f"`{name}` is {safe_repr(value)}, but {needed} is needed"
    if isinstance(failure, ZeroDivisionError):
        return f"{words} can't be used: a number would be divided by 0"
    reason = str(failure) if isinstance(failure, _LimitError) else "their values are out of range"
    return f"{words or 'a formula'} can't be used: {reason}"


@cache
def formula(text: str) -> Formula:
    """Return the formula in `text`, which is parsed once.

    >>> formula("2 * n").value({"n": 3}.__getitem__)
    6
    """
    return Formula(text)


def _evaluate(node: ast.AST, lookup: Callable[[str], Any], bound: dict[str, Any]) -> Any:
    try:
        return _value(node, lookup, bound)
    except HpgoError:  # of a key that the formula needs
        raise
    except _FAILURES as failure:
        raise _PartError(node, failure) from None


def _value(node: ast.AST, lookup: Callable[[str], Any], bound: dict[str, Any]) -> Any:
    def inner(part: ast.AST) -> Any:
        return _evaluate(part, lookup, bound)

    match node:
        case ast.Constant():
            return node.value
        case ast.Name():
            return bound[node.id] if node.id in bound else lookup(node.id)
        case ast.BinOp():
            return _BINARY[type(node.op)](inner(node.left), inner(node.right))
        case ast.UnaryOp():
            return _UNARY[type(node.op)](inner(node.operand))
        case ast.BoolOp():
            stops = isinstance(node.op, ast.Or)
            value: Any = None
            for part in node.values:
                if bool(value := inner(part)) is stops:
                    break
            return value
        case ast.Compare():
            left = inner(node.left)
            for op, part in zip(node.ops, node.comparators, strict=True):
                right = inner(part)
                if not _COMPARE[type(op)](left, right):
                    return False
                left = right
            return True
        case ast.IfExp():
            return inner(node.body) if inner(node.test) else inner(node.orelse)
        case ast.Call(func=ast.Name(id=name)):
            return FUNCTIONS[name](*map(inner, node.args))
        case ast.Subscript():
            return inner(node.value)[inner(node.slice)]
        case ast.Slice():
            return slice(*(None if part is None else inner(part) for part in (node.lower, node.upper)))
        case ast.List():
            return list(map(inner, node.elts))
        case ast.Dict():
            return {inner(key): inner(value) for key, value in zip(node.keys, node.values, strict=True) if key}
        case ast.ListComp(generators=[ast.comprehension(target=ast.Name(id=name)) as loop]):
            items = []
            for item in inner(loop.iter):
                local = bound | {name: item}
                if all(_evaluate(part, lookup, local) for part in loop.ifs):
                    items.append(_evaluate(node.elt, lookup, local))
            return items
    raise TypeError("the formula has an unknown part")
