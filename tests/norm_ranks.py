"""One replica of a stage with batch normalisation: `norm_ranks.py RANK FOLDER`; writes what it found to the folder."""

from __future__ import annotations

import sys

import cut_models
import torch
import torch.distributed as dist
from torch import nn

from hpgo.runtime import Workload
from hpgo.runtime.passes import running

SHARES = (3, 2)
STEPS = 2


def workload() -> Workload:
    """Convolutions with batch normalisations, of which one has no weights."""
    torch.manual_seed(0)
    layers = [
        nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU()),
        nn.Sequential(nn.Conv2d(4, 3, 3), nn.BatchNorm2d(3, affine=False, momentum=None), nn.Flatten()),
        nn.Sequential(nn.Linear(12, 5), nn.BatchNorm1d(5)),
    ]
    return Workload(layers, torch.randn(5, 2, 6, 6), torch.randn(5, 5), nn.functional.mse_loss)


if __name__ == "__main__":
    rank, folder = int(sys.argv[1]), sys.argv[2]
    dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=len(SHARES))
    made = workload()
    (part,) = made.parts([made.layers], dtype=torch.float64)
    assert part.joins
    part.join(dist.group.WORLD)
    rows = slice(sum(SHARES[:rank]), sum(SHARES[: rank + 1]))
    samples = range(rows.start, rows.stop)
    for step in range(STEPS):
        with torch.no_grad(), running(step=step, samples=samples):
            part(made.example_inputs[0][rows], rows=len(samples))
        with running(step=step, samples=samples, again=True):
            outputs = part(made.example_inputs[0][rows], rows=len(samples))
        made.loss_of(outputs, made.example_targets[0][rows]).backward()
    torch.save((outputs[0].detach(), cut_models.summed(made, [part]), part.state_dict()), f"{folder}/{rank}.pt")
    dist.destroy_process_group()
