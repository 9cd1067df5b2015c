"""Equality of modules: which ones compute the same on tensors of the same shapes, as far as their settings show."""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING, Any

from torch import nn

if TYPE_CHECKING:
    from collections.abc import Iterator

_PLAIN = (bool, int, float, str, bytes, type(None))
_TORCH_ATTRIBUTES = frozenset(vars(nn.Module()))
"""Attributes of every module: tensors and children, which are described separately, and hooks."""


def described(module: nn.Module) -> Iterator[Any]:
    """Yield a description of what a module computes: its settings of plain types, and the shapes of its weights."""
    yield from _described(module, plain=True)


def equivalence_key(module: nn.Module) -> tuple[Any, ...] | None:
    """Return a key that is equal for modules that are sure to compute the same; None for a module with hooks.

    Settings that are no plain values must be the same objects. Hooks may do anything, so such modules equal no other.

    >>> equivalence_key(nn.Linear(2, 3)) == equivalence_key(nn.Linear(2, 3)) != equivalence_key(nn.Linear(2, 4))
    True
    """
    if any(one._forward_hooks or one._forward_pre_hooks for one in module.modules()):
        return None
    return tuple(_described(module, plain=False))


def _described(module: nn.Module, *, plain: bool) -> Iterator[Any]:
    settings = getattr(module, "settings", None)
    if settings is not None:
        yield repr(settings())
    else:
        yield type(module).__qualname__ if plain else type(module)
        for name, value in sorted(vars(module).items()):
            # `place` is the key of a dropout's generator. It differs between equal layers, and no shape or type depends
            # on it.
            if name == "place" or (name in _TORCH_ATTRIBUTES and name != "training"):
                continue
            if not plain:
                # Text can't show a function or another object, so exact keys use its identity.
                yield name, _hashable(value)
            elif isinstance(value, (*_PLAIN, tuple)) and value is not None and not name.startswith("_"):
                yield name, value
    # Steps of a graph compute the same regardless of the names of their tensors. Other modules look up theirs by name.
    for name, tensor in chain(module.named_parameters(recurse=False), module.named_buffers(recurse=False)):
        yield "" if settings else name, tuple(tensor.shape), str(tensor.dtype), tensor.requires_grad
    for name, child in module.named_children():
        yield "" if settings else name
        yield from _described(child, plain=plain)


def _hashable(value: Any) -> Any:
    """Return a key that is equal for equal plain values and lists of them, and for identical objects otherwise."""
    if isinstance(value, _PLAIN):
        return type(value), value
    if isinstance(value, (list, tuple)):
        return type(value), *map(_hashable, value)
    return _Itself(value)


class _Itself:
    """Wrapper that compares an object by identity, even if its class defines equality."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Itself) and other._value is self._value

    def __hash__(self) -> int:
        return id(self._value)
