"""Random numbers that depend on layer, step and sample, so that every plan draws the same.

The numbers of a sample come from a seeded generator. The seed combines the sample's number in the global batch, the
step, the place in the model, and the number of draws at that place in this pass. So the numbers do not depend on the
replica or micro-batch that holds the sample.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from hpgo.errors import ArgumentError
from hpgo.runtime.passes import current

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

Distribution = Literal["uniform", "normal", "bernoulli"]


def draw(
    place: str,
    shape: Sequence[int],
    *,
    row_dimension: int | None,
    seed: int,
    device: torch.device,
    fill: Callable[..., Tensor] = torch.rand,
) -> Tensor:
    """Return float32 numbers drawn by `fill`: `torch.rand`, uniform from 0 to below 1, or `torch.randn`.

    `row_dimension` counts the samples of the pass, or a fixed number of rows for each of them, such as its heads. None:
    all samples share the numbers. Raises ArgumentError if the row dimension does not match the number of samples.
    """
    # A place that draws twice in one pass, such as a shared module, must get other numbers each time. The counter is
    # part of the key.
    one = current()
    one.calls[place] += 1
    key = f"{seed} {place} {one.calls[place]} {one.step}"
    generator = torch.Generator(device)

    def numbers(size: Sequence[int], name: str) -> Tensor:
        generator.manual_seed(_hash(f"{key} {name}"))
        return fill(size, generator=generator, dtype=torch.float32, device=device)

    if row_dimension is None:
        return numbers(shape, "all")
    each, rest = divmod(shape[row_dimension], len(one.samples))
    if rest or not each:
        raise ArgumentError(
            f"`{place}` draws for {shape[row_dimension]} rows, but the pass has {len(one.samples)} samples",
            "let each layer keep a row for each sample, or set the probability of this dropout to 0",
        )
    before, behind = shape[:row_dimension], shape[row_dimension + 1 :]
    # One generator call for each sample, because a single draw for the batch would depend on which samples are in it.
    if each == 1:
        return torch.stack([numbers([*before, *behind], str(sample)) for sample in one.samples], dim=row_dimension)
    return torch.cat([numbers([*before, each, *behind], str(sample)) for sample in one.samples], dim=row_dimension)


def kept(place: str, p: float, shape: list[int], *, row_dimension: int | None, seed: int, like: Tensor) -> Tensor:
    """Return a mask in the dtype and on the device of `like`: 0 with probability `p`, else 1 / (1 - p).

    Raises ArgumentError if the row dimension does not match the number of samples in this pass.
    """
    if like.is_meta:
        return like.new_empty(shape)
    if p == 1:
        return like.new_zeros(shape)
    drawn = draw(place, shape, row_dimension=row_dimension, seed=seed, device=like.device)
    return (drawn >= p).to(like.dtype) / (1 - p)


class DrawnNumbers(nn.Module):
    """An operation of an exported graph that draws random numbers, such as `torch.randn_like`."""

    def __init__(
        self, place: str, distribution: Distribution, dtype: torch.dtype, *, row_dimension: int | None
    ) -> None:
        super().__init__()
        self.place, self.distribution, self.dtype, self.row_dimension = place, distribution, dtype, row_dimension
        self.seed = 0
        """Seed of the run. `dropout.install` sets it."""
        # A size alone does not tell on which device the layer is.
        self.register_buffer("where", torch.zeros(()), persistent=False)

    def forward(self, shape: Sequence[int], into: Tensor | None, given: Sequence[Any]) -> Tensor:
        """Return numbers of this shape, written to `into` unless that is None.

        `given` has the ends of a uniform distribution, mean and standard deviation of a normal one, or the probability
        of 1.
        """
        if self.where.is_meta:
            made = torch.empty(tuple(shape), dtype=self.dtype, device="meta")
        else:
            fill = torch.randn if self.distribution == "normal" else torch.rand
            made = draw(
                self.place,
                list(shape),
                row_dimension=self.row_dimension,
                seed=self.seed,
                device=self.where.device,
                fill=fill,
            )
            if self.distribution == "bernoulli":
                made = made < given[0]
            elif self.distribution == "normal":
                made = given[0] + given[1] * made
            else:
                made = given[0] + (given[1] - given[0]) * made
            made = made.to(self.dtype)
        return made if into is None else into.copy_(made)


def _hash(text: str) -> int:
    """Return 63 bits derived from `text`, the same on every node."""
    # `hash()` differs between processes, so it can't seed ranks that must agree.
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest()) >> 1
