"""Attention with dropout on its weights, whose random numbers do not depend on the plan.

Torch's fused kernels draw from a generator of the device, so their masks depend on which samples are in a pass. Here
the weights are computed as a matrix, which takes memory quadratic in the length of a text. Without dropout, or in
evaluation, torch's own attention runs.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional

from hpgo.runtime.random_numbers import kept

if TYPE_CHECKING:
    from torch import Tensor


class DrawnAttention(nn.Module):
    """`scaled_dot_product_attention` of an exported graph, with dropout of probability `p`."""

    def __init__(self, place: str, p: float, *, row_dimension: int | None) -> None:
        super().__init__()
        self.place, self.p, self.row_dimension = place, p, row_dimension
        self.seed = 0
        """Seed of the run. `dropout.install` sets it."""

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None = None,
        *,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """Return the attended values. Arguments and shapes are torch's; `mask` is its `attn_mask`."""
        if not self.training:
            return functional.scaled_dot_product_attention(
                query, key, value, mask, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa
            )
        if enable_gqa:
            key, value = (one.repeat_interleave(query.shape[-3] // one.shape[-3], -3) for one in (key, value))
        weights = _weights(query, key, mask, is_causal=is_causal, scale=scale)
        place, row = self.place, self.row_dimension
        return (
            weights * kept(place, self.p, list(weights.shape), row_dimension=row, seed=self.seed, like=weights) @ value
        )


class DrawnMultiheadAttention(nn.MultiheadAttention):
    """An `nn.MultiheadAttention` with dropout after `dropout.install`. `place` and `seed` determine its masks."""

    place: str
    seed: int

    def forward(  # noqa: PLR0917 -- as torch calls it
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the attended values and the weights after dropout, like torch's layer."""
        if not self.training:
            return super().forward(
                query, key, value, key_padding_mask, need_weights, attn_mask, average_attn_weights, is_causal
            )
        is_batched, rows_first = query.dim() == 3, self.batch_first
        # Torch also takes a single sample without a batch dimension. All samples of the pass then share its mask.
        given = [one if is_batched else one[None] for one in (query, key, value)]
        if is_batched and not rows_first:
            given = [one.transpose(0, 1) for one in given]
        query, key, value = (
            one.unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2) for one in self._projected(given)
        )
        weights = _weights(query, key, self._mask(query, key, attn_mask, key_padding_mask))
        weights = weights * kept(
            self.place,
            self.dropout,
            list(weights.shape),
            row_dimension=0 if is_batched else None,
            seed=self.seed,
            like=weights,
        )
        made = functional.linear((weights @ value).transpose(1, 2).flatten(2), self.out_proj.weight, self.out_proj.bias)
        if not is_batched:
            made = made[0]
        elif not rows_first:
            made = made.transpose(0, 1)
        if not need_weights:
            return made, None
        weights = weights.mean(1) if average_attn_weights else weights
        return made, weights if is_batched else weights[0]

    def _projected(self, given: list[Tensor]) -> list[Tensor]:
        """Return query, key and value as vectors of all heads."""
        # Torch keeps three matrices if keys or values have another width than queries, else one of them all.
        if self.in_proj_weight is not None:
            matrices: tuple[Tensor, ...] = self.in_proj_weight.chunk(3)
        else:
            matrices = self.q_proj_weight, self.k_proj_weight, self.v_proj_weight
        biases: tuple[Any, ...] = (None,) * 3 if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
        return [functional.linear(*one) for one in zip(given, matrices, biases, strict=True)]

    def _mask(self, query: Tensor, key: Tensor, attention: Tensor | None, padding: Tensor | None) -> Tensor | None:
        """Return both masks as numbers to add to the scores, of four dimensions; None without any."""
        found = None
        if attention is not None:
            found = _added(attention, query)
            # Torch takes a mask for all samples and heads, or one for each.
            found = found.view(-1, self.num_heads, *found.shape[1:]) if found.dim() == 3 else found
        if padding is not None:
            own = _added(padding, query).view(-1, 1, 1, key.shape[-2])
            found = own if found is None else found + own
        return found


def _weights(
    query: Tensor, key: Tensor, mask: Tensor | None, *, is_causal: bool = False, scale: float | None = None
) -> Tensor:
    """Return the attention weights before dropout. Queries that see no key get zeros, as in torch."""
    scores = query @ key.transpose(-2, -1) * (1 / math.sqrt(query.shape[-1]) if scale is None else scale)
    if is_causal:
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        scores = scores.masked_fill(~seen, -math.inf)
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
    return torch._safe_softmax(scores, -1)


def _added(mask: Tensor, like: Tensor) -> Tensor:
    """Return a mask of `nn.MultiheadAttention`, in which True forbids, as numbers to add."""
    if mask.dtype != torch.bool:
        return mask.to(like.dtype)
    return torch.zeros_like(mask, dtype=like.dtype).masked_fill_(mask, -math.inf)
