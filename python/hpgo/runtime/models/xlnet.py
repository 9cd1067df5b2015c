"""XLNet (Yang et al., 2019): layers that all read relative positions, segments and the mask, with its profiles' ids.

Only the content stream is modeled, as in fine-tuning. The tensors that all layers read are computed from the inputs on
each stage, so none of them is sent.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import nn

from hpgo.runtime.models import BuiltModel, seeded
from hpgo.runtime.models.transformer import DEVIATION, begin, check_heads
from hpgo.runtime.modules import Network


def xlnet(
    *, layers: int = 24, hidden: int = 1024, heads: int = 16, vocabulary: int = 32000, length: int = 512,
    dropout: float = 0.1, batch: int = 8,
) -> BuiltModel:  # fmt: skip
    """Return XLNet with `layers` layers for texts of `length` tokens in two segments, padded with token 0.

    Targets are vectors of `hidden` numbers.
    """
    check_heads(hidden, heads)
    network = Network().add("Input", Both, "input:0", "input:1", everywhere=True)
    network.add("token-embedding", partial(Tokens, vocabulary, hidden), "Input:0")
    network.add("position-dropout", partial(Positions, hidden, dropout), "Input:0", everywhere=True)
    network.add("segment-one-hot", Segments, "Input:1", everywhere=True)
    network.add("attention-mask", Mask, "Input:0", everywhere=True)
    network.add("embedding-dropout", partial(nn.Dropout, dropout), "token-embedding")
    last = "embedding-dropout"
    for number in range(1, layers + 1):
        side = ("position-dropout", "segment-one-hot", "attention-mask")
        network.add(f"layer-{number}", partial(Layer, hidden, heads, dropout), last, *side)
        last = f"layer-{number}"
    network.add("loss", Mean, last)

    def example() -> tuple[torch.Tensor, ...]:
        lengths = torch.randint(length // 2, length + 1, (batch, 1))
        tokens = torch.randint(1, vocabulary, (batch, length)) * (torch.arange(length) < lengths)
        segments = (torch.arange(length) >= lengths // 2).long()
        return tokens, segments, torch.randn(batch, hidden)

    *inputs, vectors = seeded(example)
    return BuiltModel(network, tuple(inputs), (vectors,), nn.functional.mse_loss)


class Both(nn.Module):
    """Inputs of the model: tokens and segments."""

    def forward(self, tokens: torch.Tensor, segments: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return both tensors unchanged."""
        return tokens, segments


class Tokens(nn.Embedding):
    """Embedding of tokens with normal initial weights."""

    def reset_parameters(self) -> None:
        """Initialize the weights normally."""
        nn.init.normal_(self.weight, std=DEVIATION)


class Positions(nn.Module):
    """Encoding of relative positions as sines and cosines of many wavelengths."""

    def __init__(self, hidden: int, dropout: float) -> None:
        super().__init__()
        self.dropout = nn.Dropout(dropout)
        waves = 10_000 ** -(torch.arange(0, hidden - 1, 2) / hidden)
        # Waves are computed, not trained, so checkpoints do not contain them.
        self.register_buffer("waves", waves, persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return `(rows, 2 * length, hidden)`, for distances from `length` down to `1 - length`."""
        rows, length = tokens.shape
        angles = torch.arange(length, -length, -1, device=tokens.device)[:, None] * self.waves
        output: torch.Tensor = self.dropout(torch.cat([angles.sin(), angles.cos()], dim=1).repeat(rows, 1, 1))
        return output


class Segments(nn.Module):
    """Segment relation of each pair of tokens."""

    def forward(self, segments: torch.Tensor) -> torch.Tensor:
        """Return 0 for equal and 1 for different segments, `(rows, length, length)`."""
        return (segments[:, :, None] != segments[:, None, :]).long()


class Mask(nn.Module):
    """Mask of the padding."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return True after the end of a text, `(rows, 1, 1, length)`."""
        return (tokens == 0)[:, None, None, :]


class Layer(nn.Module):
    """Attention by content, position and segment, then a feed-forward network, each with a residual connection."""

    def __init__(self, hidden: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.attend = begin(nn.Linear(hidden, 3 * hidden, bias=False))
        self.places = begin(nn.Linear(hidden, hidden, bias=False))
        self.join = begin(nn.Linear(hidden, hidden, bias=False))
        self.segments = nn.Parameter(DEVIATION * torch.randn(2, heads, hidden // heads))
        self.offsets = nn.Parameter(
            torch.zeros(3, heads, hidden // heads)
        )  # biases of queries for content, position and segment
        self.widen, self.narrow = begin(nn.Linear(hidden, 4 * hidden)), begin(nn.Linear(4 * hidden, hidden))
        self.norm_1, self.norm_2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.dropouts = nn.ModuleList(nn.Dropout(dropout) for _ in range(4))

    def forward(
        self, given: torch.Tensor, positions: torch.Tensor, segments: torch.Tensor, mask: torch.Tensor
    ) -> torch.Tensor:
        """Return the shape of `given`, `(rows, length, hidden)`."""
        rows, length, hidden = given.shape
        share = hidden // self.heads
        queries, keys, values = self.attend(given).view(rows, length, 3, self.heads, share).unbind(2)
        places = self.places(positions).view(rows, 2 * length, self.heads, share)
        content, position, segment = (queries + offset for offset in self.offsets)
        # The indices are r rows, h heads, q queries, k keys, s features of a head, and t equal or different segment.
        scores = torch.einsum("rqhs,rkhs->rhqk", content, keys)
        scores = scores + shifted(torch.einsum("rqhs,rkhs->rhqk", position, places))
        # There are only two segment relations, so score both and select one per pair.
        by_segment = torch.einsum("rqhs,ths->rthq", segment, self.segments)
        same, other = by_segment[:, 0, :, :, None], by_segment[:, 1, :, :, None]
        scores = scores + torch.where(segments[:, None] == 0, same, other)
        weights = (scores * share**-0.5).masked_fill(mask, -torch.inf).softmax(dim=3)
        read = torch.einsum("rhqk,rkhs->rqhs", self.dropouts[0](weights), values).reshape(rows, length, hidden)
        given = self.norm_1(given + self.dropouts[1](self.join(read)))
        fed = self.narrow(self.dropouts[2](nn.functional.gelu(self.widen(given))))
        output: torch.Tensor = self.norm_2(given + self.dropouts[3](fed))
        return output


def shifted(scores: torch.Tensor) -> torch.Tensor:
    """Convert scores `(…, length, 2 * length)` by distance to scores `(…, length, length)` by token.

    The query at `q` reads the key at `k` at distance `q - k`, which is stored at `length - (q - k)`.

    >>> shifted(torch.arange(8).view(1, 1, 2, 4)).tolist()
    [[[[2, 3], [5, 6]]]]
    """
    # A reshape to transposed sizes shifts each row by one more position than the row before, without an index tensor.
    *before, length, both = scores.shape
    turned = scores.reshape(*before, both, length)[..., 1:, :].reshape(*before, length, both - 1)
    return turned[..., :length]


class Mean(nn.Module):
    """Mean of the vectors over all tokens."""

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        """Return vectors of the shape `(rows, hidden)`."""
        return given.mean(1)
