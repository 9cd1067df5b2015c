"""Structure of nested inputs, targets and outputs: tuples, dicts, dataclasses and the like, with tensors as leaves.

Stages pass flat tensors. A `Tree` keeps how a model's own code nests them, as PyTorch's pytree does. Everything but a
tensor, such as None, is a constant of the structure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import is_dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree

from hpgo.base.messages import safe_repr, shorten
from hpgo.errors import ArgumentError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

_CONSTANTS = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device)
"""Types of leaves that may stand beside tensors. Other objects might hold tensors, which no stage would send."""


class _Place:
    """The place of a tensor in a structure."""

    def __repr__(self) -> str:
        return "a tensor"


_TENSOR = _Place()


class Tree:
    """A structure of nested containers, whose leaves are tensors and constants.

    >>> tree, tensors = Tree.of({"scores": torch.zeros(2), "cache": None})
    >>> [one.shape for one in tensors], tree.build([torch.ones(1)])
    ([torch.Size([2])], {'scores': tensor([1.]), 'cache': None})
    >>> tree.flatten("outputs", {"cache": None, "scores": torch.ones(3)})
    (tensor([1., 1., 1.]),)
    """

    __slots__ = ("_is_tuple", "_leaves", "_spec", "count", "is_flat", "is_single")

    def __init__(self, spec: Any, leaves: tuple[Any, ...]) -> None:
        """Store the structure, and its constants with the places of tensors between them. Created by `of`."""
        self._spec, self._leaves = spec, leaves
        self.count = sum(one is _TENSOR for one in leaves)
        """Number of tensors."""
        self.is_single = len(leaves) == 1 and spec.is_leaf() and self.count == 1
        """Whether it is a tensor alone."""
        # Nearly all layers return a tensor or a tuple of tensors, which need no walk through a structure.
        numbers = tuple(range(len(leaves)))
        has_places = self.count == len(leaves) and pytree.tree_unflatten(numbers, spec) == numbers
        self._is_tuple = spec.type is tuple and has_places
        self.is_flat = self.is_single or self._is_tuple
        """Whether it is a tensor, or a tuple of tensors."""

    @classmethod
    def of(cls, given: Any, what: str = "the result") -> tuple[Tree, tuple[Tensor, ...]]:
        """Return the structure of `given` and its tensors. `what` names it in errors.

        Raises ArgumentError for a leaf that is neither a tensor nor a number, a text or None.
        """
        try:
            leaves, spec = pytree.tree_flatten(given)
        except RecursionError:
            raise ArgumentError(f"{what} is nested too deeply", "give tensors in fewer containers") from None
        unknown = {type(one) for one in leaves if is_dataclass(one) and not isinstance(one, type)}
        if unknown:
            for kind in unknown:
                pytree.register_dataclass(kind)
            return cls.of(given, what)
        for one in leaves:
            if not isinstance(one, (torch.Tensor, *_CONSTANTS)):
                raise ArgumentError(
                    f"{what} has a {type(one).__name__} among its tensors",
                    "use tensors, numbers, texts and None, in tuples, lists, dicts and dataclasses",
                    code="user_code",
                )
        places = tuple(_TENSOR if isinstance(one, torch.Tensor) else one for one in leaves)
        return cls(spec, places), tuple(one for one in leaves if isinstance(one, torch.Tensor))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Tree) and (self._spec, self._leaves) == (other._spec, other._leaves)

    def __hash__(self) -> int:
        return hash(self._leaves)

    def __repr__(self) -> str:
        return repr(pytree.tree_unflatten(self._leaves, self._spec))

    def build(self, tensors: Sequence[Any]) -> Any:
        """Return the structure with these tensors in their places."""
        if self.is_single:
            return tensors[0]
        if self._is_tuple:
            return tuple(tensors)
        left = iter(tensors)
        return pytree.tree_unflatten([next(left) if one is _TENSOR else one for one in self._leaves], self._spec)

    def flatten(self, what: str, given: Any) -> tuple[Any, ...]:
        """Return the tensors of `given`, which has this structure. Keys of dicts may have another order.

        Raises ArgumentError for another structure or other constants. `what` names `given` there.
        """
        if self.is_single:
            return (given,)
        if self._is_tuple and isinstance(given, tuple) and len(given) == self.count:
            return given
        try:
            leaves = self._spec.flatten_up_to(given)
        except (ValueError, RecursionError) as error:
            raise ArgumentError(
                f"{what} {safe_repr(given)} differ from the example's {safe_repr(self)}:"
                f" {shorten(str(error).partition(chr(10))[0], 200)}",
                "give the same containers and keys as in the example",
            ) from None
        for one, held in zip(leaves, self._leaves, strict=True):
            if held is not _TENSOR and (isinstance(one, torch.Tensor) or one != held):
                raise ArgumentError(
                    f"{what} have {_kind(one)!r} where the example's have {held!r}",
                    "give the value of the example; only tensors may change",
                )
        return tuple(one for one, held in zip(leaves, self._leaves, strict=True) if held is _TENSOR)


def _kind(leaf: Any) -> Any:
    return _TENSOR if isinstance(leaf, torch.Tensor) else leaf


def plain(given: Any) -> Any:
    """Return data as a loss or a model gets it: a list as a tuple, one element without its tuple, a mapping as a dict.

    >>> plain([torch.zeros(1)]), plain([1, 2])
    (tensor([0.]), (1, 2))
    """
    if isinstance(given, list) or type(given) is tuple:
        return given[0] if len(given) == 1 else tuple(given)
    # Tokenizers return mappings that PyTorch's pytree does not know.
    return dict(given) if isinstance(given, Mapping) and type(given) not in pytree.SUPPORTED_NODES else given


def arguments(given: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return inputs as positional and keyword arguments: a tuple's elements, or a dict's items, or a single value."""
    if isinstance(given, Mapping):
        return (), dict(given)
    return (given if isinstance(given, tuple) else (given,)), {}


def tensors_in(given: Any) -> list[Tensor]:
    """Return the tensors of a structure."""
    return [one for one in pytree.tree_leaves(given) if isinstance(one, torch.Tensor)]
