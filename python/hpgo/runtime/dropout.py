"""Dropout that draws by layer, step and sample, so that every plan drops the same.

A sample's mask comes from a generator seeded by its number in the global batch, the step, the place in the model and
how often that place has drawn in this pass: which replica holds the sample, in which micro-batch, does not show.
"""

from __future__ import annotations

import hashlib
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from hpgo.errors import ArgumentError
from hpgo.runtime.passes import current

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from torch import Tensor

_MASKED_DIMENSIONS = {nn.Dropout: None, nn.Dropout1d: 1, nn.Dropout2d: 2, nn.Dropout3d: 3}
"""Of an input, those behind which all is kept or dropped as one; None for each number by itself."""


class DrawnDropout(nn.Module):
    """What `install` makes of a dropout; `place`, `row_dimension` and `seed` say what it draws by."""

    p: float
    place: str
    seed: int
    whole_dimensions: int | None
    row_dimension: int | None
    """Which dimension of its input counts samples; None if it holds what all samples share."""

    def forward(self, given: Tensor) -> Tensor:
        """`given` with some numbers, or channels, set to zero and the others enlarged."""
        if not self.training or self.p == 0:
            return given
        shape = list(given.shape)
        if self.whole_dimensions is not None:
            shape = shape[: -self.whole_dimensions] + [1] * self.whole_dimensions
        return given * kept(self.place, self.p, shape, row_dimension=self.row_dimension, seed=self.seed, like=given)

    def extra_repr(self) -> str:
        """As torch's own say it."""
        return f"p={self.p}"


def kept(place: str, p: float, shape: list[int], *, row_dimension: int | None, seed: int, like: Tensor) -> Tensor:
    """0 where dropped with probability `p`, else 1 / (1 - p), as `like` in dtype and device."""
    if like.is_meta:
        return like.new_empty(shape)
    if p == 1:
        return like.new_zeros(shape)
    one = current()
    one.calls[place] += 1
    key = f"{seed} {place} {one.calls[place]} {one.step}"
    generator = torch.Generator(like.device)

    def draw(size: list[int], name: str) -> Tensor:
        generator.manual_seed(_number(f"{key} {name}"))
        return torch.rand(size, generator=generator, dtype=torch.float32, device=like.device)

    if row_dimension is None:
        drawn = draw(shape, "all")
    else:
        rows = shape[row_dimension]
        if rows != len(one.samples):
            raise ArgumentError(
                f"the dropout `{place}` got {rows} rows, but {len(one.samples)} samples are running",
                "an engine says which samples run; layers must keep a row for each",
            )
        rest = [*shape[:row_dimension], *shape[row_dimension + 1 :]]
        drawn = torch.stack([draw(rest, str(sample)) for sample in one.samples], dim=row_dimension)
    return (drawn >= p).to(like.dtype) / (1 - p)


def _number(text: str) -> int:
    """63 bits that follow from `text`, on every machine."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest()) >> 1


def install(
    layer: str, module: nn.Module, *, seed: int, row_dimensions: Mapping[str, int | None] | None = None
) -> None:
    """Makes every dropout in `module`, which is the layer `layer`, draw by sample.

    `row_dimensions` says for each, by its name in the module, which dimension of what it gets counts samples.

    Raises ArgumentError for one that can't: inside an attention or a recurrent layer of torch, or of another kind.
    """
    for name, found in module.named_modules():
        place = f"{layer}.{name}" if name else layer
        if type(found) in _MASKED_DIMENSIONS:
            whole = _MASKED_DIMENSIONS[type(found)]
            found.__class__ = DrawnDropout
            # Operations of a graph keep their place, whatever layers it is cut into.
            found.place = getattr(found, "place", place)
            found.seed, found.whole_dimensions = seed, whole
            found.row_dimension = (row_dimensions or {}).get(name, 0)
            found.inplace = False  # the mask is multiplied
        elif isinstance(found, (nn.MultiheadAttention, nn.RNNBase)) and found.dropout > 0:
            hidden(place, type(found).__name__)
        elif isinstance(found, nn.modules.dropout._DropoutNd) and found.p > 0:
            raise ArgumentError(
                f"layer `{layer}`: `{place}` is a {type(found).__name__}, whose draws would follow from the plan",
                "use nn.Dropout, Dropout1d, Dropout2d or Dropout3d, which draw by sample here, or set p=0",
                code="unsupported",
            )


def hidden(place: str, what: str) -> None:
    """Raises ArgumentError: dropout happens where nobody can say what it draws."""
    raise ArgumentError(
        f"`{place}` drops inside a fused {what}, so its draws would follow from the plan",
        "set its dropout to 0, or write the attention out with an nn.Dropout module on its weights (for Hugging Face "
        "models `attn_implementation='eager'`)",
        code="unsupported",
    )


@contextmanager
def watching(layer: str) -> Iterator[None]:
    """Within it, raises ArgumentError when the layer drops otherwise than by a module."""
    with _Watch(layer):
        yield


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
                f"layer `{self._layer}` calls `{func.__name__}`, whose draws would follow from the plan",
                "make an nn.Dropout in the module's `__init__` and call that: such modules draw by sample here",
                code="unsupported",
            )
        return func(*args, **kwargs)


def _chance(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> float:
    """The probability with which such a call drops, 0 where it is not training."""
    if func is functional.scaled_dot_product_attention:
        return float(kwargs.get("dropout_p", args[4] if len(args) > 4 else 0.0))
    if func is functional.multi_head_attention_forward:
        return float(args[10]) if kwargs.get("training", True) else 0.0
    if func is torch.dropout:
        return float(args[1]) if args[2] else 0.0
    training = kwargs.get("training", args[2] if len(args) > 2 else func is functional.dropout)
    return float(kwargs.get("p", args[1] if len(args) > 1 else 0.5)) if training else 0.0
