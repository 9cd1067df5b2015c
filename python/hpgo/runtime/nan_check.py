"""Finds the layer that makes the first number which is none, forward or backward.

Every tensor is looked at as soon as it is there, so what is found first came first on this rank, and what other ranks
get from it has not been sent. Minus infinity is let pass on the way forward: masks of attention are made of it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hpgo.errors import RunError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    import torch
    from torch import Tensor, nn

_ITSELF = "what it was given are numbers: look for a division by 0, a logarithm of 0 or an overflow in it"
_WEIGHTS = "the step before has made them so: try a smaller learning rate, or clip gradients"
_FLAT = "what came to it are numbers: look for a slope that has no end, as that of a root or a norm at 0"


class Finder:
    """Looks at what the layers of one part make. Raises RunError for what is no number."""

    def __init__(self, readers: Mapping[int, tuple[str, ...]]) -> None:
        """`readers` are the layers that read each value, by number: its gradient comes from them."""
        self._readers = readers

    def takes(self, name: str, at: int, tensor: Tensor, *, is_input: bool) -> None:
        """What comes from outside of the part: an input, or what was received and has been looked at."""
        if is_input and (found := _wrong(tensor)):
            raise RunError(f"{found} of `{name}` are nan or infinite", "the data is so: leave such samples out")
        self._watch(at, tensor)

    def makes(self, layer: str, module: nn.Module, made: Iterable[tuple[int, Any]]) -> None:
        """What a layer has made, numbered."""
        for at, tensor in made:
            if found := _wrong(tensor):
                words = f"{found} that layer `{layer}` makes are nan or infinite"
                if any(_wrong(weight, infinite=True) for weight in module.parameters()):
                    raise RunError(f"{words}, and so are weights of it", _WEIGHTS)
                raise RunError(words, _ITSELF)
            self._watch(at, tensor)

    def loss(self, tensor: Tensor, outputs: Iterable[Tensor]) -> None:
        """The loss of a micro-batch, and what it was computed of."""
        if _wrong(tensor, infinite=True):
            raise RunError(
                f"the loss is {float(tensor.detach())}, of outputs that are numbers",
                "look at the targets, and at the loss",
            )
        for one in outputs:
            _when_back(one, "the loss passes back")

    def gradients(self, by_layer: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Those of the weights, after a backward pass."""
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
    """Looks at the gradient of a tensor, once it is known."""

    def look(gradient: torch.Tensor) -> None:
        if found := _wrong(gradient, infinite=True):
            raise RunError(f"{found} of the gradient that {whose} are nan or infinite", _FLAT)

    if getattr(tensor, "requires_grad", False):
        tensor.register_hook(look)


def _wrong(tensor: Any, *, infinite: bool = False) -> str:
    """How many of its numbers are none, if any; minus infinity counts if `infinite`."""
    if not (getattr(tensor, "is_floating_point", bool)() and not tensor.is_meta):
        return ""
    given = tensor.detach()
    if bool(given.isfinite().all()):
        return ""
    wrong = int((~given.isfinite() if infinite else given.isnan() | given.isposinf()).sum())
    return f"{wrong:,} of {given.numel():,} numbers" if wrong else ""
