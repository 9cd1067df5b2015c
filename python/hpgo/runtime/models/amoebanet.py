"""AmoebaNet-D (Real et al., 2019): cells that each read the outputs of the two before, with the profiles' ids.

A cell adds pairs of operations on its states, five times, and returns some of the sums concatenated.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import nn

from hpgo.errors import ArgumentError
from hpgo.runtime.models import BuiltModel, seeded
from hpgo.runtime.modules import Network

if TYPE_CHECKING:
    from collections.abc import Callable

# Each sum has two operations: the state that it reads, and its kind. States 0 and 1 are the cell's inputs.
_NORMAL = (
    ((1, "convolve 1"), (1, "max 3")),
    ((1, "keep"), (0, "convolve 7")),
    ((0, "convolve 1"), (0, "convolve 7")),
    ((2, "max 3"), (2, "keep")),
    ((1, "average 3"), (5, "convolve 1")),
)
_NORMAL_RETURNS = (0, 3, 4, 6)
_REDUCTION = (
    ((0, "max 2"), (0, "max 3")),
    ((2, "keep"), (1, "convolve 3")),
    ((2, "convolve 7"), (2, "max 3")),
    ((3, "keep"), (1, "max 2")),
    ((2, "average 3"), (3, "convolve 1")),
)
_REDUCTION_RETURNS = (4, 5, 6)


def amoebanet(
    *, cells: int = 18, width: int = 512, classes: int = 1001, image: int = 224, batch: int = 8
) -> BuiltModel:
    """Return AmoebaNet-D with `cells` cells, a third at each of three resolutions.

    The first cells have `width` channels, a multiple of 16.
    """
    if cells % 3:
        raise ArgumentError(
            f"cells is {cells}, but it must be a multiple of 3", f"set cells to {max(3, cells - cells % 3)}"
        )
    if width % 16:
        raise ArgumentError(
            f"width is {width}, but it must be a multiple of 16", f"set width to {max(16, width - width % 16)}"
        )
    network = Network().add("Input", nn.Identity, "input:0", everywhere=True)
    network.add("stem", partial(_stem, width // 16), "Input")
    path = [("stem", width // 16, 1)]  # (layer, channels, number of times that images were halved)

    def cell(layer: str, channels: int, *, reduces: bool) -> None:
        # The first cell has only the stem before it, and reads it twice.
        (before, before_channels, before_halved), (last, last_channels, halved) = (path[-2:] * 2)[-2:]
        make = partial(
            Cell, before_channels, last_channels, channels, reduces=reduces, halves_before=before_halved < halved
        )
        # A cell with a single input feeds it to both states, so the network lists it once.
        network.add(layer, make, *dict.fromkeys((before, last)))
        returns = len(_REDUCTION_RETURNS if reduces else _NORMAL_RETURNS)
        path.append((layer, returns * channels, halved + reduces))

    cell("stem-cell-1", width // 4, reduces=True)
    cell("stem-cell-2", width // 2, reduces=True)
    number, channels = 0, width
    for resolution in range(3):
        if resolution:
            channels *= 2
            cell(f"reduction-cell-{resolution}", channels, reduces=True)
        for _ in range(cells // 3):
            number += 1
            cell(f"cell-{number}", channels, reduces=False)
    last, inputs, _ = path[-1]
    # The published profile has a layer for the loss, which the workload computes outside of the network.
    network.add("classifier", partial(_classifier, inputs, classes), last).add("loss", nn.Identity, "classifier")
    images, labels = seeded(lambda: (torch.randn(batch, 3, image, image), torch.randint(classes, (batch,))))
    return BuiltModel(network, (images,), (labels,), nn.functional.cross_entropy)


def _stem(channels: int) -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, channels, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(channels))


def _classifier(inputs: int, classes: int) -> nn.Module:
    return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, classes))


class Cell(nn.Module):
    """One cell. `halves_before` means that the earlier input has images of twice the width."""

    def __init__(self, before: int, last: int, channels: int, *, reduces: bool, halves_before: bool) -> None:
        super().__init__()
        self.read_before = Halve(before, channels) if halves_before else _convolution(before, channels, 1)
        self.read_last = _convolution(last, channels, 1)
        self.sums = _REDUCTION if reduces else _NORMAL
        self.returns: tuple[int, ...] = _REDUCTION_RETURNS if reduces else _NORMAL_RETURNS
        self.operations = nn.ModuleList(
            # In a reduction cell, only operations on the two inputs halve the images. Later states are halved already.
            _OPERATIONS[name](channels, 2 if reduces and state < 2 else 1)
            for pair in self.sums
            for state, name in pair
        )

    def forward(self, before: torch.Tensor, last: torch.Tensor | None = None) -> torch.Tensor:
        """Return the cell's output for its two inputs, or for one input used twice."""
        states = [self.read_last(before if last is None else last), self.read_before(before)]
        operations = iter(self.operations)
        for pair in self.sums:
            one, other = (next(operations)(states[state]) for state, _ in pair)
            states.append(one + other)
        return torch.cat([states[at] for at in self.returns], dim=1)


class Halve(nn.Module):
    """Halving of images: one convolution reads every second pixel, another the pixels next to them."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.one = nn.Conv2d(inputs, outputs // 2, 1, stride=2, bias=False)
        self.other = nn.Conv2d(inputs, outputs - outputs // 2, 1, stride=2, bias=False)
        self.norm = nn.BatchNorm2d(outputs)

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        """Return images of half the width."""
        given = torch.relu(given)
        # The second convolution reads the pixels in odd rows and columns, which the first one skips.
        beside = nn.functional.pad(given[:, :, 1:, 1:], (0, 1, 0, 1))
        output: torch.Tensor = self.norm(torch.cat([self.one(given), self.other(beside)], dim=1))
        return output


def _convolution(inputs: int, outputs: int, *sizes: int | tuple[int, int], stride: int = 1) -> nn.Module:
    """Return convolutions of these sizes, each after an activation and before a norm.

    Several convolutions form a bottleneck with a quarter of the channels: they begin and
    end with size 1.
    """
    inner = outputs if len(sizes) == 1 else outputs // 4
    modules: list[nn.Module] = []
    for at, size in enumerate(sizes):
        height, width = size if isinstance(size, tuple) else (size, size)
        makes = outputs if at == len(sizes) - 1 else inner
        # The stride in a direction belongs to the one convolution that is wide in it, so images are halved once.
        step = (stride if height > 1 else 1, stride if width > 1 else 1) if len(sizes) > 1 else stride
        padding = (height // 2, width // 2)
        modules += [
            nn.ReLU(),
            nn.Conv2d(inputs, makes, (height, width), stride=step, padding=padding, bias=False),
            nn.BatchNorm2d(makes),
        ]
        inputs = makes
    return nn.Sequential(*modules)


def _keep(channels: int, stride: int) -> nn.Module:
    return nn.Identity() if stride == 1 else Halve(channels, channels)


_OPERATIONS: dict[str, Callable[[int, int], nn.Module]] = {
    "keep": _keep,
    "average 3": lambda _, stride: nn.AvgPool2d(3, stride=stride, padding=1, count_include_pad=False),
    "max 2": lambda _, stride: nn.MaxPool2d(2, stride=stride),
    "max 3": lambda _, stride: nn.MaxPool2d(3, stride=stride, padding=1),
    "convolve 1": lambda channels, stride: _convolution(channels, channels, 1, stride=stride),
    "convolve 3": lambda channels, stride: _convolution(channels, channels, 1, 3, 1, stride=stride),
    "convolve 7": lambda channels, stride: _convolution(channels, channels, 1, (1, 7), (7, 1), 1, stride=stride),
}
