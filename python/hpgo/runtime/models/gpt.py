"""A GPT (Radford et al., 2019): blocks of causal attention and a feed-forward network, each after a norm.

The LM head shares the embedding's weight, which ties the first layer to the last.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import nn
from torch.nn import functional

from hpgo.runtime.models import BuiltModel, seeded
from hpgo.runtime.models.transformer import DEVIATION, Block, begin, check_heads
from hpgo.runtime.modules import Network


def gpt(
    *, layers: int = 12, hidden: int = 768, heads: int = 12, vocabulary: int = 50257, length: int = 128,
    dropout: float = 0.0, tied: bool = True, batch: int = 8,
) -> BuiltModel:  # fmt: skip
    """Return a GPT with `layers` blocks of width `hidden` for texts of `length` tokens. Targets are the next tokens.

    A target of -100 is ignored. A sample's weight is the number of its other targets.
    """
    check_heads(hidden, heads)
    network = Network().add("embedding", partial(Embedding, vocabulary, length, hidden, dropout), "input:0")
    last = "embedding"
    for number in range(1, layers + 1):
        network.add(
            f"block-{number}", partial(Block, hidden, heads, layers, dropout, norm_first=True, is_causal=True), last
        )
        last = f"block-{number}"
    network.add("head", partial(Head, hidden, vocabulary), last)
    if tied:
        network.tie(("embedding", "tokens.weight"), ("head", "linear.weight"))

    def example() -> tuple[torch.Tensor, ...]:
        text = torch.randint(vocabulary, (batch, length + 1))
        return text[:, :-1].contiguous(), text[:, 1:].contiguous()

    tokens, following = seeded(example)
    return BuiltModel(network, (tokens,), (following,), next_token_loss, tokens_that_count)


def next_token_loss(scores: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the mean loss over the tokens that count."""
    return functional.cross_entropy(scores.flatten(0, 1), targets.flatten())


def tokens_that_count(targets: torch.Tensor) -> torch.Tensor:
    """Return the number of each sample's targets that count."""
    # -100 is the default `ignore_index` of torch's cross-entropy.
    return (targets != -100).sum(1)


class Embedding(nn.Module):
    """Embedding of tokens `(rows, length)`, with the embeddings of positions added."""

    def __init__(self, vocabulary: int, length: int, hidden: int, dropout: float) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, hidden)
        self.positions = nn.Embedding(length, hidden)
        self.dropout = nn.Dropout(dropout)
        for table in (self.tokens, self.positions):
            nn.init.normal_(table.weight, std=DEVIATION)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return vectors of the shape `(rows, length, hidden)`."""
        places = torch.arange(tokens.shape[1], device=tokens.device)
        embedded: torch.Tensor = self.dropout(self.tokens(tokens) + self.positions(places))
        return embedded


class Head(nn.Module):
    """A norm, then logits over the vocabulary."""

    def __init__(self, hidden: int, vocabulary: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(hidden)
        self.linear = begin(nn.Linear(hidden, vocabulary, bias=False))

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        """Return logits of the shape `(rows, length, vocabulary)`."""
        scores: torch.Tensor = self.linear(self.norm(given))
        return scores
