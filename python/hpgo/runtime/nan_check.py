"""Search for the layer that first makes a NaN or infinite value, forward or backward.

Every tensor is checked as soon as it exists. So the first finding is the first on this rank, and nothing computed from
it has been sent. Minus infinity is allowed in forward passes, because attention masks contain it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hpgo.errors import RunError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    import torch
    from torch import Tensor, nn

_ITSELF = "its inputs are finite: look for a division by 0, a logarithm of 0 or an overflow in it"
_WEIGHTS = "the last optimizer step did this: try a smaller learning rate, or clip gradients"
_FLAT = "the gradient that it received is finite: look for an infinite slope, such as that of a root or a norm at 0"


class Finder:
    """Checker of everything that the layers of one stage make. Raises RunError for NaN or infinite values."""

    def __init__(self, readers: Mapping[int, tuple[str, ...]]) -> None:
        """Store `readers`, the layers that read each value, by number. They produce the value's gradient."""
        self._readers = readers

    def takes(self, name: str, at: int, tensor: Tensor, *, is_input: bool) -> None:
        """Check an input of the model. Watch the gradient of any value that the stage takes."""
        if is_input and (found := _wrong(tensor)):
            raise RunError(f"{found} of `{name}` are nan or infinite", "leave such samples out of the data")
        self._watch(at, tensor)

    def makes(self, layer: str, module: nn.Module, values: Iterable[tuple[int, Any]]) -> None:
        """Check the values that a layer returns, by number."""
        for at, tensor in values:
            if found := _wrong(tensor):
                words = f"{found} that layer `{layer}` makes are nan or infinite"
                # Bad weights are an earlier step's fault, which the layer's own operations do not show.
                if any(_wrong(weight, infinite=True) for weight in module.parameters()):
                    raise RunError(f"{words}, and so are some of its weights", _WEIGHTS)
                raise RunError(words, _ITSELF)
            self._watch(at, tensor)

    def loss(self, tensor: Tensor, outputs: Iterable[Tensor]) -> None:
        """Check the loss of a micro-batch, and the gradients that it returns for `outputs`."""
        if _wrong(tensor, infinite=True):
            raise RunError(
                f"the loss is {float(tensor.detach())}, but its outputs are finite",
                "check the targets, and the loss function",
            )
        for one in outputs:
            _when_back(one, "the loss passes back")

    def gradients(self, by_layer: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Check the weight gradients after a backward pass."""
        # Gradients flow from the last layer to the first, so the first bad one in this order is the cause.
        for layer, weights in reversed(list(by_layer.items())):
            for name, weight in weights.items():
                if weight.grad is not None and (found := _wrong(weight.grad, infinite=True)):
                    raise RunError(f"{found} of the gradient of `{name}` of layer `{layer}` are nan or infinite", _FLAT)

    def _watch(self, at: int, tensor: Any) -> None:
        readers = self._readers.get(at, ())
        if readers:
            names = ", ".join(f"`{name}`" for name in readers)
            _when_back(tensor, f"layer{'s' * (len(readers) > 1)} {names} pass{'es' * (len(readers) == 1)} back")


def _when_back(tensor: Any, whose: str) -> None:
    """Check the gradient of a tensor as soon as autograd has computed it."""

    def look(gradient: torch.Tensor) -> None:
        if found := _wrong(gradient, infinite=True):
            raise RunError(f"{found} of the gradient that {whose} are nan or infinite", _FLAT)

    # A hook runs before the gradient reaches the next layer, so the reader of this tensor is to blame.
    if getattr(tensor, "requires_grad", False):
        tensor.register_hook(look)


def _wrong(tensor: Any, *, infinite: bool = False) -> str:
    """Describe how many values of a tensor are NaN or infinite; empty if none. Minus infinity counts if `infinite`."""
    if not (getattr(tensor, "is_floating_point", bool)() and not tensor.is_meta):
        return ""
    given = tensor.detach()
    # The common case is a single reduction. Count only after it fails.
    if bool(given.isfinite().all()):
        return ""
    wrong = int((~given.isfinite() if infinite else given.isnan() | given.isposinf()).sum())
    return f"{wrong:,} of {given.numel():,} numbers" if wrong else ""
