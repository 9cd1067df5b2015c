"""Replacement of modules that drop values: `random_numbers` draws for them, so that every plan drops the same."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from hpgo.errors import ArgumentError
from hpgo.runtime.drawn_attention import DrawnAttention, DrawnMultiheadAttention
from hpgo.runtime.random_numbers import DrawnNumbers, kept

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from torch import Tensor

_MASKED_DIMENSIONS = {nn.Dropout: None, nn.Dropout1d: 1, nn.Dropout2d: 2, nn.Dropout3d: 3}
"""Number of trailing dimensions that are kept or dropped as one; None where each value is dropped separately."""


class DrawnDropout(nn.Module):
    """A dropout after `install`. `place`, `row_dimension` and `seed` determine its masks."""

    p: float
    place: str
    seed: int
    whole_dimensions: int | None
    row_dimension: int | None
    """Dimension of the input that counts samples; None if all samples share the input."""

    def forward(self, given: Tensor) -> Tensor:
        """Return `given` with some values or channels set to 0, and the others scaled by 1 / (1 - p)."""
        if not self.training or self.p == 0:
            return given
        shape = list(given.shape)
        if self.whole_dimensions is not None:
            shape = shape[: -self.whole_dimensions] + [1] * self.whole_dimensions
        return given * kept(self.place, self.p, shape, row_dimension=self.row_dimension, seed=self.seed, like=given)

    def extra_repr(self) -> str:
        """Return the text that torch prints for its own dropouts."""
        return f"p={self.p}"


def install(
    layer: str, module: nn.Module, *, seed: int, row_dimensions: Mapping[str, int | None] | None = None
) -> None:
    """Make every dropout in `module`, the module of `layer`, draw by sample, and give `seed` to all that draw.

    `row_dimensions` has, for each dropout by its name in the module, the input dimension that counts samples.

    Raises ArgumentError for a dropout that can't draw by sample: inside a recurrent layer of torch or an attention with
    further keys, or of another class.
    """
    for name, found in module.named_modules():
        place = f"{layer}.{name}" if name else layer
        if type(found) in _MASKED_DIMENSIONS:
            whole = _MASKED_DIMENSIONS[type(found)]
            # Changing the class keeps hooks and references to the module.
            found.__class__ = DrawnDropout
            # Operations of a graph keep their place, because the graph may be cut into other layers.
            found.place = getattr(found, "place", place)
            found.seed, found.whole_dimensions = seed, whole
            found.row_dimension = (row_dimensions or {}).get(name, 0)
            found.inplace = False  # multiplying by the mask returns a new tensor
        elif isinstance(found, (DrawnNumbers, DrawnAttention)):
            found.seed = seed
        elif isinstance(found, nn.MultiheadAttention) and found.dropout > 0:
            # A subclass may have another `forward`, which the replacement would lose.
            if type(found) is not nn.MultiheadAttention or found.bias_k is not None or found.add_zero_attn:
                hidden(place, type(found).__name__)
            found.__class__, found.place, found.seed = DrawnMultiheadAttention, place, seed
        elif isinstance(found, nn.RNNBase) and found.dropout > 0:
            hidden(place, type(found).__name__)
        elif isinstance(found, nn.modules.dropout._DropoutNd) and found.p > 0:
            raise ArgumentError(
                f"layer `{layer}`: `{place}` is a {type(found).__name__}, whose random numbers would depend on the"
                " plan",
                "use nn.Dropout, Dropout1d, Dropout2d or Dropout3d, which draw by sample here, or set p=0",
                code="unsupported",
            )


def hidden(place: str, what: str) -> None:
    """Raise ArgumentError for dropout inside a fused operation, whose random numbers can't be seeded by sample."""
    raise ArgumentError(
        f"`{place}` drops inside a fused {what}, so its random numbers would depend on the plan",
        "set its dropout to 0, or write the attention out with an nn.Dropout module on its weights (for Hugging Face "
        "models `attn_implementation='eager'`)",
        code="unsupported",
    )


@contextmanager
def watching(layer: str) -> Iterator[None]:
    """Raise ArgumentError when the layer drops within this context by other means than a module."""
    with _Watch(layer):
        yield


# Functions draw from torch's global generator, whose state depends on which passes a rank has run before.
_FREE = {
    functional.dropout,
    functional.dropout1d,
    functional.dropout2d,
    functional.dropout3d,
    functional.alpha_dropout,
    functional.feature_alpha_dropout,
    torch.dropout,
}
_FUSED = {functional.scaled_dot_product_attention, functional.multi_head_attention_forward}


class _Watch(TorchFunctionMode):
    def __init__(self, layer: str) -> None:
        super().__init__()
        self._layer = layer

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _FUSED and _chance(func, args, kwargs) > 0:
            hidden(self._layer, "attention")
        if func in _FREE and _chance(func, args, kwargs) > 0:
            raise ArgumentError(
                f"layer `{self._layer}` calls `{func.__name__}`, whose random numbers would depend on the plan",
                "make an nn.Dropout in the module's `__init__` and call that: such modules draw by sample here",
                code="unsupported",
            )
        return func(*args, **kwargs)


def _chance(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> float:
    """Return the probability with which such a call drops values; 0 if it is not training."""
    if func is functional.scaled_dot_product_attention:
        return float(kwargs.get("dropout_p", args[4] if len(args) > 4 else 0.0))
    if func is functional.multi_head_attention_forward:
        return float(args[10]) if kwargs.get("training", True) else 0.0
    if func is torch.dropout:
        return float(args[1]) if args[2] else 0.0
    training = kwargs.get("training", args[2] if len(args) > 2 else func is functional.dropout)
    return float(kwargs.get("p", args[1] if len(args) > 1 else 0.5)) if training else 0.0
