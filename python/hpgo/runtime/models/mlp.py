"""A chain of equal linear layers, each but the last with a tanh."""

from __future__ import annotations

import torch
from torch import nn

from hpgo.runtime.models import BuiltModel, seeded
from hpgo.runtime.modules import Network


def mlp(*, layers: int = 8, width: int = 256, batch: int = 8) -> BuiltModel:
    """Return `layers` linear layers of `width` units. The example has `batch` random vectors as inputs and targets."""
    network, last = Network(), "input:0"
    for number in range(1, layers + 1):
        # Bind `end` as a default, since a closure would see the loop's last value.
        network.add(f"linear-{number}", lambda end=number == layers: _layer(width, end), last)  # type: ignore[misc]
        last = f"linear-{number}"
    inputs, targets = seeded(lambda: (torch.randn(batch, width), torch.randn(batch, width)))
    return BuiltModel(network, (inputs,), (targets,), nn.functional.mse_loss)


def _layer(width: int, is_last: bool) -> nn.Module:
    linear = nn.Linear(width, width)
    return linear if is_last else nn.Sequential(linear, nn.Tanh())
