"""Backward passes in two halves: gradients of inputs at once, those of weights when somebody asks for them.

Linear layers and convolutions become functions of autograd whose backward pass returns the gradient of what they read
and puts that of their weights into a queue. All other parameters have theirs after the first half: little is to be
computed for them. Outside of `Queue.filling`, a backward pass is whole.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional

from hpgo.errors import ArgumentError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor


class Queue:
    """Gradients of weights that are still to be computed, by micro-batch."""

    def __init__(self) -> None:
        self._left: dict[int, list[Callable[[], None]]] = {}
        self._now: int | None = None

    def __deepcopy__(self, _: Any) -> Queue:
        return self  # modules that are copied stay in their part

    @contextmanager
    def filling(self, micro_batch: int) -> Iterator[None]:
        """Within it, backward passes leave gradients of weights for `run(micro_batch)`."""
        if micro_batch in self._left:
            raise ArgumentError(
                f"gradients of weights of micro-batch {micro_batch} are already waiting",
                "run them before they are new",
                code="wrong_state",
            )
        self._now, self._left[micro_batch] = micro_batch, []
        try:
            yield
        finally:
            self._now = None

    def run(self, micro_batch: int) -> None:
        """Computes what `filling(micro_batch)` left, and adds it to the `grad` of parameters."""
        if micro_batch not in self._left:
            raise ArgumentError(
                f"no gradients of weights of micro-batch {micro_batch} are waiting",
                "its half for inputs comes first",
                code="wrong_state",
            )
        for compute in self._left.pop(micro_batch):
            compute()

    def clear(self) -> None:
        """Drops what is left, after a step that failed."""
        self._left.clear()

    def later(self, compute: Callable[[], None]) -> bool:
        """Keeps `compute` and returns True, unless backward passes are whole now."""
        if self._now is None:
            return False
        self._left[self._now].append(compute)
        return True


def install(module: nn.Module, queue: Queue) -> None:
    """Makes the linear layers and convolutions in `module` leave gradients of weights to `queue`."""
    for found in module.modules():
        if type(found) is nn.Linear:
            found.__class__, found.queue = SplitLinear, queue
        elif type(found) is nn.Conv2d and found.padding_mode == "zeros" and not isinstance(found.padding, str):
            found.__class__, found.queue = SplitConv2d, queue
        elif isinstance(found, Addmm):
            found.queue = queue


class SplitLinear(nn.Linear):
    """What `install` makes of a linear layer."""

    queue: Queue

    def forward(self, given: Tensor) -> Tensor:
        """As before."""
        return linear(given, self.weight, self.bias, self.queue)


class SplitConv2d(nn.Conv2d):
    """What `install` makes of a convolution."""

    queue: Queue

    def forward(self, given: Tensor) -> Tensor:
        """As before."""
        options = {name: list(getattr(self, name)) for name in ("stride", "padding", "dilation")}
        return conv2d(given, self.weight, self.bias, self.queue, **options, groups=self.groups)


@dataclass(frozen=True, slots=True)
class _Operation:
    """An operation on an input, a weight and possibly a bias, and its three gradients."""

    run: Callable[[Tensor, Tensor, Tensor | None], Tensor]
    inputs: Callable[[Tensor, Tensor, Tensor], Tensor]
    """Of the output's gradient, the input and the weight; so is the next."""
    weights: Callable[[Tensor, Tensor, Tensor], Tensor]
    bias: Callable[[Tensor], Tensor]


_LINEAR = _Operation(
    functional.linear,
    lambda gradient, _, weight: gradient @ weight,
    lambda gradient, given, _: _flat(gradient).T @ _flat(given),
    lambda gradient: _flat(gradient).sum(0),
)
_ADDMM = _Operation(
    lambda given, weight, bias: torch.addmm(bias, given, weight),
    lambda gradient, _, weight: gradient @ weight.T,
    lambda gradient, given, _: given.T @ gradient,
    lambda gradient: gradient.sum(0),
)


def _convolution(stride: list[int], padding: list[int], dilation: list[int], groups: int) -> _Operation:
    def gradients(gradient: Tensor, given: Tensor, weight: Tensor, *wanted: bool) -> Any:
        mask = [*wanted, False]
        return torch.ops.aten.convolution_backward(
            gradient, given, weight, None, stride, padding, dilation, False, [0, 0], groups, mask
        )

    return _Operation(
        lambda given, weight, bias: functional.conv2d(given, weight, bias, stride, padding, dilation, groups),
        lambda gradient, given, weight: gradients(gradient, given, weight, True, False)[0],
        lambda gradient, given, weight: gradients(gradient, given, weight, False, True)[1],
        lambda gradient: gradient.sum((0, 2, 3)),
    )


def _flat(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1, tensor.shape[-1])


class Addmm(nn.Module):
    """A linear layer whose weight is kept transposed."""

    queue: Queue | None = None

    def __init__(self, bias: nn.Parameter, weight: nn.Parameter) -> None:
        super().__init__()
        self.bias, self.weight = bias, weight

    def forward(self, given: Tensor) -> Tensor:
        """`given @ weight + bias`."""
        if self.queue is None:
            return torch.addmm(self.bias, given, self.weight)
        return addmm(self.bias, given, self.weight, self.queue)


def linear(given: Tensor, weight: Tensor, bias: Tensor | None, queue: Queue) -> Tensor:
    """`torch.nn.functional.linear`; `weight` and `bias` are parameters."""
    made: Tensor = _Split.apply(given, weight, bias, queue, _LINEAR)
    return made


def addmm(bias: Tensor, given: Tensor, weight: Tensor, queue: Queue) -> Tensor:
    """`torch.addmm`; `weight` and `bias` are parameters."""
    made: Tensor = _Split.apply(given, weight, bias, queue, _ADDMM)
    return made


def conv2d(given: Tensor, weight: Tensor, bias: Tensor | None, queue: Queue, **options: Any) -> Tensor:
    """`torch.nn.functional.conv2d`; `weight` and `bias` are parameters, and `options` all that follows them."""
    made: Tensor = _Split.apply(given, weight, bias, queue, _convolution(**options))
    return made


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(  # noqa: PLR0917 -- as autograd calls it
        ctx: Any, given: Tensor, weight: Tensor, bias: Tensor | None, queue: Queue, operation: _Operation
    ) -> Tensor:
        ctx.save_for_backward(given, weight)
        ctx.weight, ctx.bias, ctx.queue, ctx.operation = weight, bias, queue, operation
        return operation.run(given, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        operation, weight, bias = ctx.operation, ctx.weight, ctx.bias
        given, held = (tensor.to(gradient.dtype) for tensor in ctx.saved_tensors)  # autocast may have left others
        for_given, for_weight, for_bias = ctx.needs_input_grad[:3]
        inputs = operation.inputs(gradient, given, held) if for_given else None

        def compute() -> tuple[Tensor | None, Tensor | None]:
            with torch.no_grad():
                return (
                    operation.weights(gradient, given, held).to(weight.dtype) if for_weight else None,
                    operation.bias(gradient).to(bias.dtype) if for_bias else None,
                )

        def add() -> None:
            for parameter, found in zip((weight, bias), compute(), strict=True):
                if found is not None:
                    parameter.grad = found if parameter.grad is None else parameter.grad.add_(found)

        if not (for_weight or for_bias) or ctx.queue.later(add):
            return inputs, None, None, None, None
        return inputs, *compute(), None, None
