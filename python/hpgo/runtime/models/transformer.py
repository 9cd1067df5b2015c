"""The block that GPT, BERT and ViT are made of: attention, then a feed-forward net."""

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
"""Of first weights."""
NORM_EPS = 1e-5
"""What normalisations add to variances, unless told otherwise; published weights were trained with less."""


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
        if norm_first:  # what is added grows over the layers, and nothing else holds it back
            with torch.no_grad():
                self.join.weight /= (2 * layers) ** 0.5
                self.narrow.weight /= (2 * layers) ** 0.5

    def forward(self, given: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        """The shape of `given`, `(rows, length, hidden)`; `mask` is true where tokens may be read."""
        joined = self.joined(self.attended(given, mask), given)
        return self.narrowed(self.widened(joined), joined)

    def attended(self, given: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        """What each token reads of the others."""
        if self.norm_first:
            given = self.norm_1(given)
        rows, length, hidden = given.shape
        parts = self.attend(given).view(rows, length, 3, self.heads, hidden // self.heads)
        queries, keys, values = parts.permute(2, 0, 3, 1, 4)
        read = functional.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, is_causal=self.is_causal)
        return read.transpose(1, 2).reshape(rows, length, hidden)

    def joined(self, read: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
        """That, added to what it was read from."""
        made: torch.Tensor = given + self.dropout_1(self.join(read))
        return made if self.norm_first else self.norm_1(made)

    def widened(self, given: torch.Tensor) -> torch.Tensor:
        """The first half of the feed-forward net, `(rows, length, 4 * hidden)`."""
        return functional.gelu(self.widen(self.norm_2(given) if self.norm_first else given))

    def narrowed(self, wide: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
        """The second half, added to what the first has read."""
        made: torch.Tensor = given + self.dropout_2(self.narrow(wide))
        return made if self.norm_first else self.norm_2(made)


_QUARTERS = {"attend": {"attend"}, "join": {"join", "dropout_1"}, "widen": {"widen"}, "narrow": {"narrow", "dropout_2"}}
"""The parts of a block, and what each holds, but for normalisations: these belong where they are first, or last."""
_NORMS_FIRST, _NORMS_LAST = ({"attend": "norm_1", "widen": "norm_2"}, {"join": "norm_1", "narrow": "norm_2"})


class Quarter(nn.Module):
    """One part of a block, with its weights alone: PipeEdge (Hu et al., 2022) cuts transformers so."""

    def __init__(
        self,
        part: str,
        block: Callable[[], Block],
        before: Callable[[], nn.Module] | None = None,
        behind: Callable[[], nn.Module] | None = None,
    ) -> None:
        """`before` makes what the model's first part begins with, `behind` what its last one ends with."""
        super().__init__()
        self.part, self.block = part, block()
        norm = (_NORMS_FIRST if self.block.norm_first else _NORMS_LAST).get(part)
        for name in [name for name, _ in self.block.named_children()]:
            if name != norm and name not in _QUARTERS[part]:
                delattr(self.block, name)
        self.before = None if before is None else before()
        self.behind = None if behind is None else behind()

    def forward(self, *given: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """What the part makes; where the model begins, with what it was made of."""
        if self.part == "attend":
            if self.before is None:
                return self.block.attended(*given)
            first = self.before(given[0])
            return self.block.attended(first, *given[1:]), first
        if self.part == "join":
            return self.block.joined(*given)
        if self.part == "widen":
            return self.block.widened(*given)
        made = self.block.narrowed(*given)
        if self.behind is not None:
            made = self.behind(made)
        return made


def add_quarters(
    network: Network,
    names: Sequence[str],
    block: Callable[[], Block],
    *,
    before: Callable[[], nn.Module],
    behind: Callable[[], nn.Module],
    mask: Sequence[str] = (),
) -> None:
    """Adds the blocks `names`, each as four layers; those before and behind are part of the first and the last."""
    given = "input:0"
    for number, name in enumerate(names):
        attend, join, widen, narrow = (f"{name}.{part}" for part in _QUARTERS)
        first = before if number == 0 else None
        last = behind if number == len(names) - 1 else None
        network.add(attend, partial(Quarter, "attend", block, first), given, *mask)
        read, given = (attend, given) if first is None else (f"{attend}:0", f"{attend}:1")
        network.add(join, partial(Quarter, "join", block), read, given)
        network.add(widen, partial(Quarter, "widen", block), join)
        network.add(narrow, partial(Quarter, "narrow", block, None, last), widen, join)
        given = narrow
