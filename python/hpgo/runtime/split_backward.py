"""Backward passes in two parts: input gradients at once, and weight gradients later.

Linear layers and convolutions become autograd functions. Their backward pass returns the gradient of their input, and
puts the computation of the weight gradient into a queue. All other parameters get their gradients in the first part,
because these cost little. Outside of `Queue.filling`, a backward pass is complete.
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
    """Queue of weight gradients that are still to be computed, by micro-batch."""

    def __init__(self) -> None:
        self._left: dict[int, list[Callable[[], None]]] = {}
        self._now: int | None = None

    def __deepcopy__(self, _: Any) -> Queue:
        return self  # copied modules must share the queue of their stage

    @contextmanager
    def filling(self, micro_batch: int) -> Iterator[None]:
        """Make backward passes within this context leave weight gradients for `run(micro_batch)`."""
        # A second pass would mix its gradients with the ones that are still queued.
        if micro_batch in self._left:
            raise ArgumentError(
                f"weight gradients of micro-batch {micro_batch} are already queued",
                "call `run` for this micro-batch first",
                code="wrong_state",
            )
        self._now, self._left[micro_batch] = micro_batch, []
        try:
            yield
        finally:
            self._now = None

    def run(self, micro_batch: int) -> None:
        """Compute the weight gradients that `filling(micro_batch)` left, and add them to the `grad` of parameters."""
        if micro_batch not in self._left:
            raise ArgumentError(
                f"no weight gradients of micro-batch {micro_batch} are queued",
                "run its input-gradient pass first",
                code="wrong_state",
            )
        for compute in self._left.pop(micro_batch):
            compute()

    def clear(self) -> None:
        """Drop all deferred computations, after a step that failed."""
        self._left.clear()

    def later(self, compute: Callable[[], None]) -> bool:
        """Queue `compute` and return True. If backward passes are complete now, do nothing and return False."""
        if self._now is None:
            return False
        self._left[self._now].append(compute)
        return True


def install(module: nn.Module, queue: Queue) -> None:
    """Make the linear layers and convolutions in `module` leave weight gradients to `queue`."""
    for found in module.modules():
        if type(found) is nn.Linear:
            found.__class__, found.queue = SplitLinear, queue
        # Other padding modes and padding by name compute the padding outside of the convolution.
        elif type(found) is nn.Conv2d and found.padding_mode == "zeros" and not isinstance(found.padding, str):
            found.__class__, found.queue = SplitConv2d, queue
        elif isinstance(found, Addmm):
            found.queue = queue


class SplitLinear(nn.Linear):
    """A linear layer after `install`."""

    queue: Queue

    def forward(self, given: Tensor) -> Tensor:
        """Compute the same result as torch's layer."""
        return linear(given, self.weight, self.bias, self.queue)


class SplitConv2d(nn.Conv2d):
    """A convolution after `install`."""

    queue: Queue

    def forward(self, given: Tensor) -> Tensor:
        """Compute the same result as torch's layer."""
        options = {name: list(getattr(self, name)) for name in ("stride", "padding", "dilation")}
        return conv2d(given, self.weight, self.bias, self.queue, **options, groups=self.groups)


@dataclass(frozen=True, slots=True)
class _Operation:
    """An operation on an input, a weight and possibly a bias, with its three gradients."""

    run: Callable[[Tensor, Tensor, Tensor | None], Tensor]
    inputs: Callable[[Tensor, Tensor, Tensor], Tensor]
    """Gradient of the input, from the output's gradient, the input and the weight. `weights` takes the same arguments.
    """
    weights: Callable[[Tensor, Tensor, Tensor], Tensor]
    bias: Callable[[Tensor], Tensor]
    reads_input: bool = False
    """Whether the gradient of the input needs the input itself, so that it is saved beside a frozen weight, too."""


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
        # The last flag is for the bias, whose gradient is a plain sum.
        mask = [*wanted, False]
        return torch.ops.aten.convolution_backward(
            gradient, given, weight, None, stride, padding, dilation, False, [0, 0], groups, mask
        )

    return _Operation(
        lambda given, weight, bias: functional.conv2d(given, weight, bias, stride, padding, dilation, groups),
        lambda gradient, given, weight: gradients(gradient, given, weight, True, False)[0],
        lambda gradient, given, weight: gradients(gradient, given, weight, False, True)[1],
        lambda gradient: gradient.sum((0, 2, 3)),
        reads_input=True,
    )


def _flat(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1, tensor.shape[-1])


class Addmm(nn.Module):
    """A linear layer whose weight is stored transposed."""

    queue: Queue | None = None

    def __init__(self, bias: nn.Parameter, weight: nn.Parameter) -> None:
        super().__init__()
        self.bias, self.weight = bias, weight

    def forward(self, given: Tensor) -> Tensor:
        """Return `given @ weight + bias`."""
        if self.queue is None:
            return torch.addmm(self.bias, given, self.weight)
        return addmm(self.bias, given, self.weight, self.queue)


def linear(given: Tensor, weight: Tensor, bias: Tensor | None, queue: Queue) -> Tensor:
    """Compute `torch.nn.functional.linear`. `weight` and `bias` are parameters."""
    output: Tensor = _Split.apply(given, weight, bias, queue, _LINEAR)
    return output


def addmm(bias: Tensor, given: Tensor, weight: Tensor, queue: Queue) -> Tensor:
    """Compute `torch.addmm`. `weight` and `bias` are parameters."""
    output: Tensor = _Split.apply(given, weight, bias, queue, _ADDMM)
    return output


def conv2d(given: Tensor, weight: Tensor, bias: Tensor | None, queue: Queue, **options: Any) -> Tensor:
    """Compute `torch.nn.functional.conv2d`. `weight` and `bias` are parameters, `options` all arguments after them."""
    output: Tensor = _Split.apply(given, weight, bias, queue, _convolution(**options))
    return output


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(  # noqa: PLR0917 -- as autograd calls it
        ctx: Any, given: Tensor, weight: Tensor, bias: Tensor | None, queue: Queue, operation: _Operation
    ) -> Tensor:
        # Only the gradient of the weight needs the input, so a frozen weight saves none, as in torch's own operation.
        is_saved = weight.requires_grad or operation.reads_input
        ctx.save_for_backward(given if is_saved else None, weight)
        # The parameters themselves, besides the saved tensors, because the deferred computation writes to their `grad`.
        ctx.weight, ctx.bias, ctx.queue, ctx.operation = weight, bias, queue, operation
        return operation.run(given, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        operation, weight, bias = ctx.operation, ctx.weight, ctx.bias
        # Autocast saves other types.
        given, held = (None if one is None else one.to(gradient.dtype) for one in ctx.saved_tensors)
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

        # Autograd accepts None as the gradient of a parameter. The queue adds the real one to `grad` later.
        if not (for_weight or for_bias) or ctx.queue.later(add):
            return inputs, None, None, None, None
        return inputs, *compute(), None, None
