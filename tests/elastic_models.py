"""A model for runs that lose machines, and the plan of it: steps last as long as the file `pace` says."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

import hpgo
from hpgo.runtime import Workload

WIDTH, LAYERS, BATCH = 8, 6, 24


class Layer(nn.Module):
    """Draws masks, too, so that these must be the same under every plan."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.dropout = nn.Linear(WIDTH, WIDTH), nn.Dropout(0.1)

    def forward(self, given: Any) -> Any:
        return self.dropout(self.linear(given).tanh())


class Last(nn.Linear):
    """The one that takes its time."""

    def forward(self, given: Any) -> Any:
        if not given.is_meta and (pace := Path("pace")).exists():
            time.sleep(float(pace.read_text() or 0))
        return super().forward(given)


def build() -> Workload:
    layers: dict[str, nn.Module] = {f"layer{at}": Layer() for at in range(LAYERS - 1)}
    layers[f"layer{LAYERS - 1}"] = Last(WIDTH, 1)
    return Workload(layers, torch.randn(2, WIDTH), torch.randn(2, 1), nn.functional.mse_loss)


def data() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Five global batches and a bit."""
    draw = torch.Generator().manual_seed(1)
    return [(torch.randn(WIDTH, generator=draw), torch.randn(1, generator=draw)) for _ in range(5 * BATCH + 7)]


def plan(nodes: int, *, memory: str = "1 GB") -> hpgo.Plan:
    """For so many machines of one device: stages with replicas, which share the optimizer's state."""
    profile = hpgo.Profile.chain(
        "toy", batch_size=1, forward_s=[1e-3] * LAYERS, backward_s=[2e-3] * LAYERS,
        activation_bytes=[1e4] * LAYERS, parameter_bytes=[3e6] * LAYERS,
    )  # fmt: skip
    cluster = hpgo.Cluster.of(nodes=nodes, devices_per_node=1, intra_gbit_s=10, inter_gbit_s=2, memory=memory)
    kept = hpgo.MemoryModel(shard_optimizer=True)
    return hpgo.plan(profile, cluster, global_batch_size=BATCH, memory=kept)
