"""The block of GPT, BERT and ViT: attention, then a feed-forward network."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn import functional

from hpgo.errors import ArgumentError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hpgo.runtime.modules import Network

DEVIATION = 0.02
"""Standard deviation of initial weights."""
NORM_EPS = 1e-5
"""Default epsilon of norms. Published weights were trained with a smaller one."""


def check_heads(hidden: int, heads: int) -> None:
    """Raise ArgumentError unless `hidden` is a multiple of `heads`."""
    if hidden % heads:
        raise ArgumentError(
            f"hidden is {hidden}, but it must be a multiple of heads, {heads}",
            f"set hidden to {heads * max(1, hidden // heads)}",
        )


def begin(linear: nn.Linear) -> nn.Linear:
    """Initialize `linear` with normal weights and zero bias, and return it."""
    nn.init.normal_(linear.weight, std=DEVIATION)
    if linear.bias is not None:
        nn.init.zeros_(linear.bias)
    return linear


class Block(nn.Module):
    """Attention, then a feed-forward network, each with a residual connection.

    With `norm_first`, norms are applied to the inputs, as in GPT and ViT, otherwise to the sums, as in BERT. Attention
    weights have no dropout, because attention is one fused operation.
    """

    def __init__(
        self,
        hidden: int,
        heads: int,
        layers: int,
        dropout: float,
        *,
        norm_first: bool,
        is_causal: bool = False,
        norm_eps: float = NORM_EPS,
    ) -> None:
        super().__init__()
        self.heads, self.norm_first, self.is_causal = heads, norm_first, is_causal
        self.norm_1, self.norm_2 = (nn.LayerNorm(hidden, eps=norm_eps) for _ in range(2))
        self.attend = begin(nn.Linear(hidden, 3 * hidden))
        self.join = begin(nn.Linear(hidden, hidden))
        self.widen = begin(nn.Linear(hidden, 4 * hidden))
        self.narrow = begin(nn.Linear(4 * hidden, hidden))
        self.dropout_1, self.dropout_2 = nn.Dropout(dropout), nn.Dropout(dropout)
        if norm_first:  # without a norm on the residual stream, its variance grows with each sum
            with torch.no_grad():
                self.join.weight /= (2 * layers) ** 0.5
                self.narrow.weight /= (2 * layers) ** 0.5

    def forward(self, given: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        """Return the shape of `given`, `(rows, length, hidden)`. `mask` is True at tokens that may be attended to."""
        # The four parts below can also run as separate layers; see `Quarter`.
        joined = self.joined(self.attended(given, mask), given)
        return self.narrowed(self.widened(joined), joined)

    def attended(self, given: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        """Return what each token's attention reads from the others."""
        if self.norm_first:
            given = self.norm_1(given)
        rows, length, hidden = given.shape
        parts = self.attend(given).view(rows, length, 3, self.heads, hidden // self.heads)
        # The fused operation expects the dimension of heads before that of the sequence.
        queries, keys, values = parts.permute(2, 0, 3, 1, 4)
        read = functional.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, is_causal=self.is_causal)
        return read.transpose(1, 2).reshape(rows, length, hidden)

    def joined(self, read: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
        """Project the result of attention, and add it to the input."""
        output: torch.Tensor = given + self.dropout_1(self.join(read))
        return output if self.norm_first else self.norm_1(output)

    def widened(self, given: torch.Tensor) -> torch.Tensor:
        """Return the hidden layer of the feed-forward network, `(rows, length, 4 * hidden)`."""
        return functional.gelu(self.widen(self.norm_2(given) if self.norm_first else given))

    def narrowed(self, wide: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
        """Project the hidden layer, and add it to the feed-forward network's input."""
        output: torch.Tensor = given + self.dropout_2(self.narrow(wide))
        return output if self.norm_first else self.norm_2(output)


_QUARTERS = {"attend": {"attend"}, "join": {"join", "dropout_1"}, "widen": {"widen"}, "narrow": {"narrow", "dropout_2"}}
"""The quarters of a block with their modules. Norms belong to the first or to the last quarter of each half."""
_NORMS_FIRST, _NORMS_LAST = ({"attend": "norm_1", "widen": "norm_2"}, {"join": "norm_1", "narrow": "norm_2"})


class Quarter(nn.Module):
    """One quarter of a block with only its own weights, as PipeEdge (Hu et al., 2022) splits transformers."""

    def __init__(
        self,
        part: str,
        block: Callable[[], Block],
        before: Callable[[], nn.Module] | None = None,
        behind: Callable[[], nn.Module] | None = None,
    ) -> None:
        """Build a quarter. `before` builds the model's input module, `behind` its output module."""
        super().__init__()
        self.part, self.block = part, block()
        norm = (_NORMS_FIRST if self.block.norm_first else _NORMS_LAST).get(part)
        # Build the whole block and delete the rest, so that one definition serves both granularities.
        for name in [name for name, _ in self.block.named_children()]:
            if name != norm and name not in _QUARTERS[part]:
                delattr(self.block, name)
        self.before = None if before is None else before()
        self.behind = None if behind is None else behind()

    def forward(self, *given: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """Return the quarter's result; the first quarter of the model also returns the embedding, which `join` adds."""
        if self.part == "attend":
            if self.before is None:
                return self.block.attended(*given)
            first = self.before(given[0])
            return self.block.attended(first, *given[1:]), first
        if self.part == "join":
            return self.block.joined(*given)
        if self.part == "widen":
            return self.block.widened(*given)
        output = self.block.narrowed(*given)
        if self.behind is not None:
            output = self.behind(output)
        return output


def add_quarters(
    network: Network,
    names: Sequence[str],
    block: Callable[[], Block],
    *,
    before: Callable[[], nn.Module],
    behind: Callable[[], nn.Module],
    mask: Sequence[str] = (),
) -> None:
    """Add the blocks `names` as four layers each. The first one includes `before`, the last one `behind`."""
    given = "input:0"
    for number, name in enumerate(names):
        attend, join, widen, narrow = (f"{name}.{part}" for part in _QUARTERS)
        first = before if number == 0 else None
        last = behind if number == len(names) - 1 else None
        network.add(attend, partial(Quarter, "attend", block, first), given, *mask)
        # The first quarter returns a pair, whose elements have indices. Others return one tensor.
        read, given = (attend, given) if first is None else (f"{attend}:0", f"{attend}:1")
        # `join` and `narrow` also read the input of their half, for the residual connection.
        network.add(join, partial(Quarter, "join", block), read, given)
        network.add(widen, partial(Quarter, "widen", block), join)
        network.add(narrow, partial(Quarter, "narrow", block, None, last), widen, join)
        given = narrow
