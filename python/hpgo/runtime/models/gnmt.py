"""GNMT (Wu et al., 2016): an LSTM encoder, and decoder layers that all read the attention, with its profiles' ids."""

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
    """Return GNMT with `layers` LSTM layers, half in encoder and decoder each, for `source` and `target` tokens.

    Inputs are source tokens, the length of each source text, and target tokens. Targets are the next tokens, or -100
    after the end of a text.
    """
    if layers % 2 or layers < 4:
        raise ArgumentError(f"layers is {layers}, but it must be an even number of at least 4", "set layers to 16")
    half = layers // 2
    network = Network()
    # Layers with `everywhere` are computed by every stage that needs them, and are not sent over cuts.
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
        # Texts of random length make sure that the example contains padding.
        lengths = torch.randint(max(1, source // 2), source + 1, (batch,))
        ends = torch.randint(max(1, target // 2), target + 1, (batch, 1))
        following = texts[1][:, 1:].masked_fill(torch.arange(target) >= ends, -100)
        return texts[0], lengths, texts[1][:, :-1].contiguous(), following

    *inputs, following = seeded(example)
    return BuiltModel(network, tuple(inputs), (following,), next_token_loss, tokens_that_count)


def _passed_on(network: Network, layer: str, skipped: str, *, adds: bool) -> str:
    """Add the selector of a layer's sequence, and a residual sum if `adds`; return the id of the last of them."""
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
        """Return hidden states `(rows, length, hidden)`, starting at `state` of the shape `(rows, hidden)` or at 0."""
        # The cell state starts with the same values, since a stage receives one state per layer.
        first = None if state is None else (state[None].contiguous(), state[None].contiguous())
        output: torch.Tensor = self.lstm(given, first)[0]
        return output


class BothWays(nn.Module):
    """Bidirectional LSTM: one direction reads each text from its end."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.ahead, self.back = Lstm(hidden, hidden), Lstm(hidden, hidden)

    def forward(self, given: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """Return the hidden states of both directions, concatenated. States after the end of a text are meaningless."""
        # Reverse each text by its own length. Reversing the padded sequence would feed the padding first.
        back = turned(self.back(turned(given, lengths)), lengths)
        return torch.cat([self.ahead(given), back], dim=2)


def turned(given: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Reverse each sequence of `(rows, length, hidden)` up to its length; the padding stays at its place.

    >>> turned(torch.tensor([[[1], [2], [3], [0]]]), torch.tensor([3])).flatten().tolist()
    [3, 2, 1, 0]
    """
    places = torch.arange(given.shape[1], device=given.device)
    ends = lengths[:, None]
    order = torch.where(places < ends, ends - 1 - places, places)
    return given.gather(1, order[:, :, None].expand(given.shape))


class Attention(nn.Module):
    """The decoder's first LSTM, and attention of each of its states to the source (Bahdanau et al., 2015)."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.lstm = Lstm(hidden, hidden)
        self.query = nn.Linear(hidden, hidden, bias=False)
        self.key = nn.Linear(hidden, hidden, bias=False)
        self.score = nn.Linear(hidden, 1, bias=False)

    def forward(
        self, given: torch.Tensor, state: torch.Tensor, encoded: torch.Tensor, lengths: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the LSTM's states and the attention, both of the shape `(rows, target, hidden)`."""
        states = self.lstm(given, state)
        both = torch.tanh(self.query(states)[:, :, None] + self.key(encoded)[:, None])
        padding = torch.arange(encoded.shape[1], device=encoded.device) >= lengths[:, None]
        weights = self.score(both)[..., 0].masked_fill(padding[:, None], -torch.inf).softmax(dim=2)
        return states, weights @ encoded


class States(nn.Module):
    """Initial state of 0 for each decoder layer."""

    def __init__(self, layers: int, hidden: int) -> None:
        super().__init__()
        self.layers, self.hidden = layers, hidden
        self.register_buffer(
            "zero", torch.zeros(()), persistent=False
        )  # a buffer follows the number format and device of the weights

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return zeros of the shape `(rows, layers, hidden)`."""
        return self.zero.expand(len(tokens), self.layers, self.hidden)


class Select(nn.Module):
    """Selection of one layer's state."""

    def __init__(self, layer: int) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """Return `(rows, hidden)` of `(rows, layers, hidden)`."""
        return states[:, self.layer]


class Concat(nn.Module):
    """Concatenation of a sequence with the attention."""

    def forward(self, sequence: torch.Tensor, attention: torch.Tensor) -> torch.Tensor:
        """Return vectors of the shape `(rows, length, 2 * hidden)`."""
        return torch.cat([sequence, attention], dim=2)


class Sum(nn.Module):
    """Residual sum of two sequences."""

    def forward(self, sequence: torch.Tensor, skipped: torch.Tensor) -> torch.Tensor:
        """Return the sum, which has the shape of both inputs."""
        return sequence + skipped
