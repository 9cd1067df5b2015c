"""GNMT (Wu et al., 2016): LSTMs that encode, and others that all read the attention, with its profiles' ids."""

from __future__ import annotations

from functools import partial

import torch
from torch import nn

from hpgo.errors import ArgumentError
from hpgo.runtime.models import BuiltModel, seeded
from hpgo.runtime.models.gpt import next_token_loss, tokens_that_count
from hpgo.runtime.modules import Network


def gnmt(
    *, layers: int = 16, hidden: int = 1024, vocabulary: int = 36560, source: int = 35, target: int = 36,
    dropout: float = 0.2, batch: int = 8,
) -> BuiltModel:  # fmt: skip
    """`layers` LSTM layers, half of them on each side, for texts of `source` tokens into texts of `target`.

    The inputs are source tokens, their number in each sample, and target tokens; targets are the tokens that follow,
    -100 where none does.
    """
    if layers % 2 or layers < 4:
        raise ArgumentError(f"layers={layers}", "give an even number from 4: half are on each side")
    half = layers // 2
    network = Network()
    network.add("Input-source", nn.Identity, "input:0", everywhere=True)
    network.add("Input-lengths", nn.Identity, "input:1", everywhere=True)
    network.add("source-embedding", partial(nn.Embedding, vocabulary, hidden), "Input-source")
    network.add("encoder-1", partial(BothWays, hidden), "source-embedding", "Input-lengths")
    last = "encoder-1"
    for number in range(2, half + 1):
        layer = f"encoder-{number}"
        network.add(f"{layer}-dropout", partial(nn.Dropout, dropout), last)
        network.add(layer, partial(Lstm, 2 * hidden if number == 2 else hidden, hidden), f"{layer}-dropout")
        last = _passed_on(network, layer, last, adds=number > 2)
    encoded = last
    network.add("Input-target", nn.Identity, "input:2", everywhere=True)
    network.add("target-embedding", partial(nn.Embedding, vocabulary, hidden), "Input-target")
    network.add("state", partial(States, half, hidden), "input:2", everywhere=True)
    network.add("decoder-1-state", partial(Select, 0), "state", everywhere=True)
    feeds = ("target-embedding", "decoder-1-state", encoded, "Input-lengths")
    network.add("decoder-1", partial(Attention, hidden), *feeds)
    network.add("decoder-1-sequence", nn.Identity, "decoder-1:0").add("attention", nn.Identity, "decoder-1:1")
    last = "decoder-1-sequence"
    for number in range(2, half + 1):
        layer = f"decoder-{number}"
        network.add(f"{layer}-dropout", partial(nn.Dropout, dropout), last)
        network.add(f"{layer}-concat", Concat, f"{layer}-dropout", "attention")
        network.add(f"{layer}-state", partial(Select, number - 1), "state", everywhere=True)
        network.add(layer, partial(Lstm, 2 * hidden, hidden), f"{layer}-concat", f"{layer}-state")
        last = _passed_on(network, layer, last, adds=number > 2)
    network.add("classifier", partial(nn.Linear, hidden, vocabulary), last)

    def example() -> tuple[torch.Tensor, ...]:
        texts = torch.randint(vocabulary, (batch, source)), torch.randint(vocabulary, (batch, target + 1))
        lengths = torch.randint(max(1, source // 2), source + 1, (batch,))
        ends = torch.randint(max(1, target // 2), target + 1, (batch, 1))
        following = texts[1][:, 1:].masked_fill(torch.arange(target) >= ends, -100)
        return texts[0], lengths, texts[1][:, :-1].contiguous(), following

    *inputs, following = seeded(example)
    return BuiltModel(network, tuple(inputs), (following,), next_token_loss, tokens_that_count)


def _passed_on(network: Network, layer: str, skipped: str, *, adds: bool) -> str:
    """The layer's sequence, with what it read added from the third layer of each side on."""
    network.add(f"{layer}-sequence", nn.Identity, layer)
    if not adds:
        return f"{layer}-sequence"
    network.add(f"{layer}-sum", Sum, f"{layer}-sequence", skipped)
    return f"{layer}-sum"


class Lstm(nn.Module):
    """One LSTM over sequences `(rows, length, inputs)`."""

    def __init__(self, inputs: int, hidden: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(inputs, hidden, batch_first=True)

    def forward(self, given: torch.Tensor, state: torch.Tensor | None = None) -> torch.Tensor:
        """Hidden states `(rows, length, hidden)`, from `state` of the shape `(rows, hidden)` on, or from 0."""
        first = None if state is None else (state[None].contiguous(), state[None].contiguous())
        made: torch.Tensor = self.lstm(given, first)[0]
        return made


class BothWays(nn.Module):
    """Two LSTMs, of which one reads each text from its end."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.ahead, self.back = Lstm(hidden, hidden), Lstm(hidden, hidden)

    def forward(self, given: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """Hidden states of both, side by side; behind a text's end they say nothing."""
        back = turned(self.back(turned(given, lengths)), lengths)
        return torch.cat([self.ahead(given), back], dim=2)


def turned(given: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Each sequence of `(rows, length, hidden)` from its end to its begin; what is behind its end stays there.

    >>> turned(torch.tensor([[[1], [2], [3], [0]]]), torch.tensor([3])).flatten().tolist()
    [3, 2, 1, 0]
    """
    places = torch.arange(given.shape[1], device=given.device)
    ends = lengths[:, None]
    order = torch.where(places < ends, ends - 1 - places, places)
    return given.gather(1, order[:, :, None].expand(given.shape))


class Attention(nn.Module):
    """The decoder's first LSTM, and what each of its states reads of the source (Bahdanau et al., 2015)."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.lstm = Lstm(hidden, hidden)
        self.query = nn.Linear(hidden, hidden, bias=False)
        self.key = nn.Linear(hidden, hidden, bias=False)
        self.score = nn.Linear(hidden, 1, bias=False)

    def forward(
        self, given: torch.Tensor, state: torch.Tensor, encoded: torch.Tensor, lengths: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The LSTM's states, and sums of `encoded`, weighted for each of them: both `(rows, target, hidden)`."""
        states = self.lstm(given, state)
        both = torch.tanh(self.query(states)[:, :, None] + self.key(encoded)[:, None])
        behind = torch.arange(encoded.shape[1], device=encoded.device) >= lengths[:, None]
        weights = self.score(both)[..., 0].masked_fill(behind[:, None], -torch.inf).softmax(dim=2)
        return states, weights @ encoded


class States(nn.Module):
    """A first state of 0 for each decoder layer."""

    def __init__(self, layers: int, hidden: int) -> None:
        super().__init__()
        self.layers, self.hidden = layers, hidden
        self.register_buffer("zero", torch.zeros(()), persistent=False)  # has the type that weights have

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """`(rows, layers, hidden)`."""
        return self.zero.expand(len(tokens), self.layers, self.hidden)


class Select(nn.Module):
    """One layer's state."""

    def __init__(self, layer: int) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """`(rows, hidden)` of `(rows, layers, hidden)`."""
        return states[:, self.layer]


class Concat(nn.Module):
    """A sequence beside the attention."""

    def forward(self, sequence: torch.Tensor, attention: torch.Tensor) -> torch.Tensor:
        """`(rows, length, 2 * hidden)`."""
        return torch.cat([sequence, attention], dim=2)


class Sum(nn.Module):
    """A residual sum."""

    def forward(self, sequence: torch.Tensor, skipped: torch.Tensor) -> torch.Tensor:
        """The shape of both."""
        return sequence + skipped
