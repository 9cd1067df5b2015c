"""Passes of a layer that only show what it returns: on meta tensors, or on real ones where these fail.

Meta tensors have no values and take no time. But sparse routing counts and gathers tokens by value, and some operations
have no meta version. Such a layer runs on real tensors with plausible values instead.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from math import sqrt
from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from hpgo.errors import HpgoError
from hpgo.runtime.trees import tensors_in

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor, nn

    Call = Callable[[nn.Module, list[Any]], Any]
    """Function that calls a module with arguments."""


@dataclass(frozen=True, slots=True)
class ShapePass:
    """What a pass showed of a layer."""

    output: Any
    """Its result as meta tensors. They share memory with the arguments as the real ones do."""
    mutates: tuple[int, ...]
    """Positions of the arguments that the layer changes in place."""
    needs_values: bool
    """Whether the layer ran on real tensors, because its operations depend on values or have no meta version."""


def run_for_shapes(module: nn.Module, arguments: list[Any], call: Call) -> ShapePass:
    """Run a module on the meta device with meta arguments: tensors, and containers of tensors.

    Raises what the module raises if it can run neither on meta nor on real tensors. A module that branches on a number
    that it computed does not run on real tensors: its result may follow from the micro-batch that a plan gives it.
    """
    last = _LastCall()
    try:
        with last:
            output, changed = _run(module, arguments, call)
    except HpgoError:
        raise
    except Exception:  # the user's module may raise any error
        if last.function is torch.Tensor.__bool__:
            raise
    else:
        return ShapePass(output, changed, needs_values=False)
    try:
        return _run_on_real(module, arguments, call, whole=0)
    except HpgoError:
        raise
    except Exception:  # noqa: BLE001 -- the user's module may raise any error
        # Any index may be 0, but lengths must not.
        return _run_on_real(module, arguments, call, whole=1)


def _run_on_real(module: nn.Module, arguments: list[Any], call: Call, *, whole: int) -> ShapePass:
    """Run the module on real tensors, in which whole numbers are `whole`."""
    # The values must not depend on what the user's program has drawn before, nor change what it draws next.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        stand_ins = _StandIns(whole)
        real = fill_module(copy.deepcopy(module).to_empty(device="cpu"))
        output, changed = _run(real, tree_map_only(torch.Tensor, stand_ins.real, arguments), call)
    return ShapePass(tree_map_only(torch.Tensor, stand_ins.on_meta, output), changed, needs_values=True)


def fill_plausibly(tensor: Tensor, name: str = "") -> Tensor:
    """Fill a tensor with values as weights and activations usually have, without overflow. Return it.

    `name` is that of a weight; it is empty for activations.
    """
    with torch.no_grad():
        if not tensor.is_floating_point():
            return tensor.zero_()
        if tensor.dim() < 2 and name:
            return tensor.fill_(1.0 if name.endswith(("weight", "var")) else 0.01)
        # Random numbers are slow to draw. Repeat a block of 2**20, since only their magnitude affects the time.
        block = torch.randn(min(tensor.numel(), 2**20), device=tensor.device)
        block = (block / sqrt(max(1, tensor.numel() // len(tensor))) if name else block).to(tensor.dtype)
        for at in range(0, tensor.numel(), len(block) or 1):
            part = tensor.view(-1)[at : at + len(block)]
            part.copy_(block[: len(part)])
        return tensor


def fill_module(module: nn.Module) -> nn.Module:
    """Fill the weights and buffers of a module plausibly. Return it."""
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        fill_plausibly(tensor, name)
    return module


def fresh_on_meta(tensor: Tensor) -> Tensor:
    """Return a new meta tensor with the same shape, strides and type."""
    fresh = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
    # `clone` makes it a non-leaf that requires a gradient, like the result of a layer. In-place changes of leaves would
    # raise.
    return fresh.requires_grad_().clone() if tensor.requires_grad else fresh


def _run(module: nn.Module, arguments: list[Any], call: Call) -> tuple[Any, tuple[int, ...]]:
    """Call the module. Return its result and the positions of the arguments that it changes in place."""
    # Autograd counts the in-place changes of each tensor. The counter shows what a module changes, which nothing
    # declares.
    versions = [[tensor._version for tensor in tensors_in(argument)] for argument in arguments]
    output = call(module, arguments)
    now = [[tensor._version for tensor in tensors_in(argument)] for argument in arguments]
    return output, tuple(at for at, (before, after) in enumerate(zip(versions, now, strict=True)) if before != after)


class _LastCall(TorchFunctionMode):
    """Context that stores the last function that was called with tensors."""

    function: Any = None

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.function = func
        return func(*args, **(kwargs or {}))


class _StandIns:
    """Real tensors for meta tensors, and back. Tensors that share memory do so on both sides."""

    def __init__(self, whole: int) -> None:
        """Begin without tensors. Whole numbers in new ones will be `whole`."""
        self._whole = whole
        self._memory: dict[int, Tensor] = {}
        """Real memory, as a flat tensor, by that of a meta tensor."""
        self._meta: dict[int, Tensor] = {}
        """A meta tensor by the memory of a real one."""

    def real(self, given: Tensor) -> Tensor:
        """Return a real tensor for a meta tensor."""
        place = given.untyped_storage()._cdata
        if place not in self._memory:
            flat = torch.empty(given.untyped_storage().nbytes() // given.element_size(), dtype=given.dtype)
            # `clone` makes a non-leaf, because in-place changes of leaves that require gradients raise.
            filled = fill_plausibly(flat) if flat.is_floating_point() else flat.fill_(self._whole)
            self._memory[place] = filled.requires_grad_(given.requires_grad).clone()
        flat = self._memory[place]
        self._meta.setdefault(flat.untyped_storage()._cdata, given)
        return flat.as_strided(given.shape, given.stride(), given.storage_offset())

    def on_meta(self, given: Tensor) -> Tensor:
        """Return a meta tensor for one that a layer returned."""
        base = self._meta.get(given.untyped_storage()._cdata)
        if base is None or base.dtype != given.dtype or (given.requires_grad and not base.requires_grad):
            fresh = fresh_on_meta(given)
            self._meta.setdefault(given.untyped_storage()._cdata, fresh)
            return fresh
        if base.shape == given.shape and base.stride() == given.stride() and base.requires_grad == given.requires_grad:
            return base
        view = base.as_strided(given.shape, given.stride(), given.storage_offset())
        return view if given.requires_grad else view.detach()
