"""BERT (Devlin et al., 2019): encoder layers that all read the attention mask, and a pooler, with its profiles' ids."""

from __future__ import annotations

from functools import partial
from itertools import pairwise

import torch
from torch import nn

from hpgo.runtime.models import BuiltModel, seeded
from hpgo.runtime.models.transformer import DEVIATION, NORM_EPS, Block, add_quarters, begin, check_heads
from hpgo.runtime.modules import Network, NetworkLayer

_SEGMENTS = 2


def bert(
    *, layers: int = 12, hidden: int = 768, heads: int = 12, vocabulary: int = 30522, positions: int = 512,
    length: int = 384, classes: int = 0, dropout: float = 0.1, norm_eps: float = NORM_EPS, quarters: bool = False,
    batch: int = 8,
) -> BuiltModel:  # fmt: skip
    """Return BERT with `layers` encoder layers for texts of `length` tokens, padded with token 0.

    Targets are vectors of `hidden` numbers between -1 and 1, or with `classes` the class of each text. With `quarters`,
    each encoder layer becomes four layers, and the first and last one include embedding and pooler.
    """
    check_heads(hidden, heads)
    embedding = partial(Embedding, vocabulary, max(positions, length), hidden, dropout, norm_eps)
    block = partial(Block, hidden, heads, layers, dropout, norm_first=False, norm_eps=norm_eps)
    pooler, names = partial(Pooler, hidden, classes), [f"encoder-{number}" for number in range(1, layers + 1)]
    network = Network()
    if quarters:
        # Every stage computes the mask itself from the tokens, so that it is not sent over cuts.
        network.put(NetworkLayer("attention-mask", Mask, ("input:0",), everywhere=True, is_hidden=True))
        add_quarters(network, names, block, before=embedding, behind=pooler, mask=["attention-mask"])
    else:
        network.add("tokens", nn.Identity, "input:0", everywhere=True)
        network.add("attention-mask", Mask, "tokens", everywhere=True)
        network.add("embedding", embedding, "tokens").add("reshape", nn.Identity, "embedding")
        for last, name in pairwise(["reshape", *names]):
            network.add(name, block, last, "attention-mask")
        network.add("pooler", pooler, names[-1])

    def example() -> tuple[torch.Tensor, ...]:
        tokens = torch.randint(1, vocabulary, (batch, length))
        lengths = torch.randint(length // 2, length + 1, (batch, 1))
        wanted = torch.randint(classes, (batch,)) if classes else 2 * torch.rand(batch, hidden) - 1
        return tokens * (torch.arange(length) < lengths), wanted

    tokens, wanted = seeded(example)
    loss = nn.functional.cross_entropy if classes else nn.functional.mse_loss
    return BuiltModel(network, (tokens,), (wanted,), loss)


class Mask(nn.Module):
    """Attention mask of the shape `(rows, 1, 1, length)`."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return True at tokens, and False at padding."""
        return (tokens != 0)[:, None, None, :]


class Embedding(nn.Module):
    """Embedding of tokens `(rows, length)`, with the embeddings of positions and of the first segment added."""

    def __init__(self, vocabulary: int, positions: int, hidden: int, dropout: float, norm_eps: float) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, hidden)
        self.positions = nn.Embedding(positions, hidden)
        self.segments = nn.Embedding(_SEGMENTS, hidden)
        self.norm = nn.LayerNorm(hidden, eps=norm_eps)
        self.dropout = nn.Dropout(dropout)
        for table in (self.tokens, self.positions, self.segments):
            nn.init.normal_(table.weight, std=DEVIATION)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return vectors of the shape `(rows, length, hidden)`."""
        places = torch.arange(tokens.shape[1], device=tokens.device)
        # All tokens belong to segment 0, since the examples are single texts.
        embedded = self.tokens(tokens) + self.positions(places) + self.segments(torch.zeros_like(places))
        output: torch.Tensor = self.dropout(self.norm(embedded))
        return output


class Pooler(nn.Module):
    """Transformation of the first token's vector, and a classifier if there are classes."""

    def __init__(self, hidden: int, classes: int) -> None:
        super().__init__()
        self.linear = begin(nn.Linear(hidden, hidden))
        self.classify = begin(nn.Linear(hidden, classes)) if classes else nn.Identity()

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        """Return vectors `(rows, hidden)` of numbers between -1 and 1, or logits `(rows, classes)`."""
        output: torch.Tensor = self.classify(torch.tanh(self.linear(given[:, 0])))
        return output
