"""Models of the tests of weights, by name: `weight_models:net`, as users name theirs."""

from __future__ import annotations

import torch
from torch import nn

from hpgo.runtime import Workload

WIDTH, LENGTH, WORDS = 8, 4, 11


class Net(nn.Module):
    """A tied table, a buffer that the model reads, one that it does not, batch norm, and a layer without use."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(WORDS, WIDTH)
        self.register_buffer("mask", torch.tril(torch.rand(LENGTH, LENGTH)))
        self.register_buffer("unread", torch.rand(3))
        self.register_buffer("local", torch.ones(1), persistent=False)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(LENGTH), nn.Tanh()) for _ in range(3)
        )
        self.spare = nn.Linear(2, 2)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.table.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.mask @ (self.table(tokens) * self.local)
        for block in self.blocks:
            hidden = block(hidden)
        scores: torch.Tensor = self.head(hidden)
        return scores


def loss(scores: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(scores.flatten(0, 1), targets.flatten())


def examples() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randint(WORDS, (8, LENGTH), generator=generator) for _ in range(2))  # type: ignore[return-value]


def net() -> Workload:
    return Workload(Net(), *examples(), loss)


def chain() -> Workload:
    """The same kind of layers as a list."""
    table, head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
    head.weight = table.weight
    return Workload(nn.Sequential(table, nn.BatchNorm1d(LENGTH), head), *examples(), loss)


def compiled() -> Workload:
    return Workload(torch.compile(Net()), *examples(), loss)  # type: ignore[arg-type]  # it returns a module
