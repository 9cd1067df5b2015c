"""VGG-16 and VGG-19 (Simonyan and Zisserman, 2015).

Five groups of convolutions, each with a pooling layer at its end, then three linear layers. Layers match the built-in
profiles: VGG-19's profile merges each activation with the operation before it, VGG-16's does not. `flat` has one layer
per operation, and neither input, size nor loss: 44 for VGG-19.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import nn

from hpgo.runtime.models import BuiltModel, seeded
from hpgo.runtime.modules import Network

if TYPE_CHECKING:
    from collections.abc import Callable

_CONVOLUTIONS = {16: (2, 2, 3, 3, 3), 19: (2, 2, 4, 4, 4)}
_DROPPED = 0.5


def vgg(
    *, depth: int, flat: bool = False, width: int = 64, linear: int = 4096, classes: int = 1000, image: int = 224,
    dropout: float = _DROPPED, batch: int = 8, squared: bool = False,
) -> BuiltModel:  # fmt: skip
    """Return VGG of this depth, with `width` channels in the first group and `linear` units in linear layers 1 and 2.

    The example has `batch` images of `image` x `image`, which is at least 32. `squared` replaces classes and
    cross-entropy by random targets, one per class, and the mean squared error.
    """
    network = Network()
    has_separate_activations = flat or depth == 16
    last = "input:0"

    def add(layer: str, make: Callable[[], nn.Module], *, everywhere: bool = False) -> None:
        nonlocal last
        network.add(layer, make, last, everywhere=everywhere)
        last = layer

    def add_activated(layer: str, make: Callable[[], nn.Module], *, dropped: float = 0) -> None:
        """Add a layer, its activation and its dropout, if any, either as separate layers or as one."""
        if has_separate_activations:
            add(layer, make)
            add(f"{layer}-relu", nn.ReLU)
            if dropped:
                add(f"{layer}-dropout", partial(nn.Dropout, dropped))
        else:
            add(layer, lambda: nn.Sequential(make(), nn.ReLU(), *([nn.Dropout(dropped)] if dropped else [])))

    if not flat:
        add("Input", nn.Identity, everywhere=True)
    inputs = 3
    for group, count in enumerate(_CONVOLUTIONS[depth], start=1):
        # Channels double from group to group, but groups 4 and 5 have the same number.
        channels = width * 2 ** min(group - 1, 3)
        for number in range(1, count + 1):
            add_activated(f"conv-{group}-{number}", partial(_convolution, inputs, channels))
            inputs = channels
        add(f"pool-{group}", partial(nn.MaxPool2d, 2))
    # Five poolings have halved the images, which leaves 1/32 of the width.
    inputs *= (image // 32) ** 2
    # VGG-16's profile has separate layers for the batch size and for flattening.
    if depth == 16 and not flat:
        network.add("batch-size", nn.Identity, "input:0", everywhere=True)
        add("flatten", nn.Flatten)
    is_flattened = depth == 16 and not flat
    for number, features in enumerate((linear, linear), start=1):
        make = partial(_linear, inputs, features, flattens=number == 1 and not is_flattened)
        add_activated(f"linear-{number}", make, dropped=dropout)
        inputs = features
    add("linear-3", partial(nn.Linear, inputs, classes))
    # VGG-19's profile ends with a layer for the loss, which the workload computes.
    if depth == 19 and not flat:
        add("loss", nn.Identity)
    if squared:
        images, numbers = seeded(lambda: (torch.randn(batch, 3, image, image), torch.randn(batch, classes)))
        return BuiltModel(network, (images,), (numbers,), nn.functional.mse_loss)
    images, labels = seeded(lambda: (torch.randn(batch, 3, image, image), torch.randint(classes, (batch,))))
    return BuiltModel(network, (images,), (labels,), nn.functional.cross_entropy)


def _convolution(inputs: int, channels: int) -> nn.Module:
    """Return a convolution whose initial weights preserve the variance of signals (He et al., 2015)."""
    convolution = nn.Conv2d(inputs, channels, 3, padding=1)
    nn.init.kaiming_normal_(convolution.weight, mode="fan_out", nonlinearity="relu")
    nn.init.zeros_(convolution.bias)
    return convolution


def _linear(inputs: int, features: int, *, flattens: bool) -> nn.Module:
    layer = nn.Linear(inputs, features)
    return nn.Sequential(nn.Flatten(), layer) if flattens else layer
