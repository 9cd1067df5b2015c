"""Small models of the tests of runs, by name: `runtime_models:tied`, as users name theirs."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import torch
from torch import nn

from hpgo.runtime import Network, Workload

WIDTH = 6


class Block(nn.Module):
    """A linear layer with what follows it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.norm(self.linear(given)))


class Sum(nn.Module):
    """What arrives over a connection that skips layers, and what comes from the layer before."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, given: torch.Tensor, skipped: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(given)) + skipped


def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return ((outputs - targets) ** 2).mean(1).mean()


def chain(layers: int = 8) -> Workload:
    return Workload([Block() for _ in range(layers)], torch.zeros(2, WIDTH), torch.zeros(2, WIDTH), loss)


class Adapted(nn.Module):
    """A frozen linear layer with a trained adapter of low rank."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(requires_grad=False)
        self.down, self.up = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False)

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.base(given) + self.up(self.down(given)))


def adapted() -> Workload:
    """Three frozen blocks, four with adapters, and a frozen one that ends the model."""
    frozen = [Block().requires_grad_(requires_grad=False) for _ in range(4)]
    layers = [*frozen[:3], *(Adapted() for _ in range(4)), frozen[3]]
    return Workload(layers, torch.zeros(2, WIDTH), torch.zeros(2, WIDTH), loss)


class Passing(nn.Module):
    """A block that passes a dict with None and the last three values. The last one adds them up."""

    def __init__(self, *, is_last: bool = False) -> None:
        super().__init__()
        self.block, self.is_last = Block(), is_last

    def forward(self, given: Any) -> Any:
        held = {"x": given, "mask": None, "skips": ()} if isinstance(given, torch.Tensor) else given
        made = self.block(held["x"])
        skips = (*held["skips"][-2:], made)
        return {"sum": sum(skips)} if self.is_last else {"x": made, "mask": None, "skips": skips}


def loss_of_sum(outputs: Any, targets: torch.Tensor) -> torch.Tensor:
    return loss(outputs["sum"], targets)


def passing() -> Workload:
    """Eight layers of a list with dicts between them."""
    layers = [Passing(is_last=at == 7) for at in range(8)]
    return Workload(layers, torch.zeros(2, WIDTH), torch.zeros(2, WIDTH), loss_of_sum)


def skips() -> Workload:
    """Eight layers; the first feeds the fifth too, over two boundaries where stages have two layers, and the last."""
    network = Network()
    for at in range(8):
        feeds = ["input:0" if at == 0 else str(at - 1), *(["0"] if at in {4, 7} else [])]
        network.add(str(at), Sum if at in {4, 7} else Block, *feeds)
    return Workload(network, torch.zeros(2, WIDTH), torch.zeros(2, WIDTH), loss)


def tied() -> Workload:
    """A table of words that the first and the last layer share."""
    network = Network().add("table", lambda: nn.Embedding(WIDTH, WIDTH), "input:0")
    for at in range(6):
        network.add(str(at), Block, "table" if at == 0 else str(at - 1))
    network.add("head", lambda: nn.Linear(WIDTH, WIDTH, bias=False), "5").tie(("table", "weight"), ("head", "weight"))
    return Workload(
        network, torch.zeros(2, dtype=torch.int64), torch.zeros(2, dtype=torch.int64), nn.functional.cross_entropy
    )


class Table(nn.Module):
    """Returns what it is given, and a table that has nothing to do with samples."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Linear(WIDTH, WIDTH)

    def forward(self, given: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.tanh(self.table(given)), torch.tanh(self.table.weight)


class Look(Block):
    """Looks things up in a table."""

    def forward(self, given: torch.Tensor, table: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return super().forward(given @ table)


def shared() -> Workload:
    """A table without rows that layers of several stages read, and that has a gradient."""
    network = Network().add("0", Table, "input:0").add("1", Block, "0:0")
    for at in range(2, 8):
        network.add(str(at), *((Look, str(at - 1), "0:1") if at in {3, 5, 6} else (Block, str(at - 1))))
    return Workload(network, torch.zeros(2, WIDTH), torch.zeros(2, WIDTH), loss)


def weighted() -> Workload:
    """Samples that count by the size of their target."""
    of = chain()
    return Workload(
        nn.Sequential(*[Block() for _ in range(8)]), of.example_inputs, of.example_targets,
        lambda outputs, targets: (((outputs - targets) ** 2).mean(1) * size(targets)).sum() / size(targets).sum(),
        weight=size,
    )  # fmt: skip


def size(targets: torch.Tensor) -> torch.Tensor:
    return targets.abs().sum(1)


def dropping() -> Workload:
    """Layers that drop numbers."""
    modules = [module for _ in range(4) for module in (Block(), nn.Dropout(0.3))]
    return Workload(modules, torch.zeros(2, WIDTH), torch.zeros(2, WIDTH), loss)


class Image(nn.Module):
    """A convolution of small images, normalised over a micro-batch, beside what skips it."""

    def __init__(self, channels: int, how: str = "") -> None:
        super().__init__()
        self.convolution = nn.Conv2d(channels, 4, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(4, momentum=None if how == "mean" else 0.1, affine=how != "plain")

    def forward(self, given: torch.Tensor, skipped: torch.Tensor | None = None) -> torch.Tensor:
        made: torch.Tensor = self.norm(self.convolution(given))
        return torch.relu(made if skipped is None else made + skipped)


def normed() -> Workload:
    """Eight layers with batch normalisation, as residual networks have it, one without weights."""
    network = Network().add("0", partial(Image, 2), "input:0")
    for at, how in enumerate(("", "mean", "plain", "", "", ""), start=1):
        network.add(str(at), partial(Image, 4, how), str(at - 1), *([str(at - 2)] if at in {2, 4, 5} else []))
    network.add("7", lambda: nn.Sequential(nn.Flatten(), nn.Linear(36, WIDTH, bias=False), nn.BatchNorm1d(WIDTH)), "6")
    return Workload(network, torch.zeros(2, 2, 3, 3), torch.zeros(2, WIDTH), loss)


class Slow(Block):
    """Takes some milliseconds wherever it really runs."""

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        if not given.is_meta:
            time.sleep(0.01)
        return super().forward(given)


def slow_end() -> Workload:
    """Four layers, the last one much slower than the others."""
    return Workload([Block(), Block(), Block(), Slow()], torch.zeros(2, WIDTH), torch.zeros(2, WIDTH), loss)


class Late(nn.Module):
    """Layers that read the input again, behind any cut."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(4)])
        self.drop, self.norm = nn.Dropout(0.4), nn.BatchNorm1d(WIDTH)

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        made = self.norm(self.drop(self.blocks[0](given)))
        for block in self.blocks[1:]:
            made = block(made) * given
        return made


def late() -> Workload:
    return Workload(Late(), torch.randn(2, WIDTH), torch.zeros(2, WIDTH), loss)


class Branches(nn.Module):
    """Two branches of two layers and one of one layer, which meet in the last layer."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.left, self.left_end, self.right, self.right_end, self.gate, self.head = (
            nn.Linear(WIDTH, WIDTH) for _ in range(7)
        )

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        stem = torch.tanh(self.stem(given))
        left = torch.relu(self.left_end(torch.tanh(self.left(stem))))
        right = torch.relu(self.right_end(torch.tanh(self.right(stem))))
        made: torch.Tensor = self.head(left + right * torch.sigmoid(self.gate(stem)))
        return made


def branches() -> Workload:
    return Workload(Branches(), torch.randn(2, WIDTH), torch.zeros(2, WIDTH), loss)


def batch(workload: Workload, size: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets of a step, in float64 where they are numbers."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for (example,) in (workload.example_inputs, workload.example_targets):
        if example.is_floating_point():
            found.append(torch.randn(size, *example.shape[1:], generator=generator, dtype=torch.float64))
        else:
            found.append(torch.randint(WIDTH, (size, *example.shape[1:]), generator=generator))
    return found[0], found[1]
