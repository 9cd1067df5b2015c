"""The block that GPT, BERT and ViT are made of: attention, then a feed-forward net."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from hpgo.base.errors import ArgumentError

DEVIATION = 0.02
"""Of first weights."""


def check_heads(hidden: int, heads: int) -> None:
    """Raises ArgumentError unless heads share `hidden` numbers equally."""
    if hidden % heads:
        raise ArgumentError(f"hidden={hidden} can't be shared by heads={heads}", "give a multiple")


def begin(linear: nn.Linear) -> nn.Linear:
    """`linear` with normal first weights, and no offset."""
    nn.init.normal_(linear.weight, std=DEVIATION)
    if linear.bias is not None:
        nn.init.zeros_(linear.bias)
    return linear


class Block(nn.Module):
    """Attention, then a feed-forward net; each adds to what it reads.

    With `norm_first`, each normalises what it reads, as GPT and ViT do, else the sum, as BERT does. Attention weights
    themselves are never dropped: it is a fused operation.
    """

    def __init__(
        self, hidden: int, heads: int, layers: int, dropout: float, *, norm_first: bool, is_causal: bool = False
    ) -> None:
        super().__init__()
        self.heads, self.norm_first, self.is_causal = heads, norm_first, is_causal
        self.norm_1, self.norm_2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.attend = begin(nn.Linear(hidden, 3 * hidden))
        self.join = begin(nn.Linear(hidden, hidden))
        self.widen = begin(nn.Linear(hidden, 4 * hidden))
        self.narrow = begin(nn.Linear(4 * hidden, hidden))
        self.dropout_1, self.dropout_2 = nn.Dropout(dropout), nn.Dropout(dropout)
        if norm_first:  # what is added grows over the layers, and nothing else holds it back
            with torch.no_grad():
                self.join.weight /= (2 * layers) ** 0.5
                self.narrow.weight /= (2 * layers) ** 0.5

    def forward(self, given: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        """The shape of `given`, `(rows, length, hidden)`; `mask` is true where tokens may be read."""
        if self.norm_first:
            given = given + self._attend(self.norm_1(given), mask)
            return given + self._feed(self.norm_2(given))
        given = self.norm_1(given + self._attend(given, mask))
        made: torch.Tensor = self.norm_2(given + self._feed(given))
        return made

    def _attend(self, given: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        rows, length, hidden = given.shape
        parts = self.attend(given).view(rows, length, 3, self.heads, hidden // self.heads)
        queries, keys, values = parts.permute(2, 0, 3, 1, 4)
        read = functional.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, is_causal=self.is_causal)
        made: torch.Tensor = self.dropout_1(self.join(read.transpose(1, 2).reshape(rows, length, hidden)))
        return made

    def _feed(self, given: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.dropout_2(self.narrow(functional.gelu(self.widen(given))))
        return made
