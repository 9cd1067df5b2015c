"""The ranks of tests/test_export.py: `planned_ranks.py WORLD FOLDER…` runs the `planned.py` of each folder.

Each rank is a process of its own; all of them run one folder's after the other, one step of Adam each, and leave their
loss and parameters beside it.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from ranks import run_ranks

WIDTH = 3


class Stage(torch.nn.Module):
    """Layers in a row; the last may get the output of the first too. Takes and gives what `planned.py` says."""

    def __init__(self, layers: list[str], takes: list[str], gives: list[str], *, skip: bool) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleDict({name.replace(".", "_"): layer(name) for name in layers})
        self.names, self.takes, self.gives, self.skip = layers, takes, gives, skip

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, ...]:
        values = dict(zip(self.takes, inputs, strict=True))
        value = inputs[-1]
        for name in self.names:
            if name == "head" and self.skip:
                value = value + values["embed"]
            values[name] = value = torch.tanh(self.layers[name.replace(".", "_")](value))
        return tuple(values[name] for name in self.gives) if len(self.gives) > 1 else value


def named(module: Stage) -> list[tuple[str, torch.nn.Parameter]]:
    """Parameters of a stage by layer."""
    return [
        (f"{name}.{kind}", parameter)
        for name in module.names
        for kind, parameter in module.layers[name.replace(".", "_")].named_parameters()
    ]


def layer(name: str) -> torch.nn.Linear:
    """The same in every process that makes it."""
    torch.manual_seed(sum(name.encode()))
    return torch.nn.Linear(WIDTH, WIDTH, dtype=torch.float64)


def batch(size: int) -> torch.Tensor:
    """Inputs and targets."""
    return torch.randn(2, size, WIDTH, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def summed(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return ((output - target) ** 2).sum()


def run(rank: int, world: int, folders: list[str]) -> None:
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    dist.init_process_group("gloo", init_method=f"file://{folders[0]}/meet", rank=rank, world_size=world)
    for folder in folders:
        step(rank, Path(folder))
    dist.destroy_process_group()


def step(rank: int, folder: Path) -> None:
    found = importlib.util.spec_from_file_location("planned", folder / "planned.py")
    assert found
    assert found.loader
    planned: Any = importlib.util.module_from_spec(found)
    found.loader.exec_module(planned)
    mesh = planned.planned_mesh("cpu")
    mine = planned.my_stages(mesh)
    takes, skip = [["input"], *planned.PASSED_ON], any(len(names) > 1 for names in planned.PASSED_ON)
    modules = {stage: Stage(planned.LAYERS[stage], takes[stage], planned.PASSED_ON[stage], skip=skip) for stage in mine}
    optimizer = planned.planned_optimizer(modules, torch.optim.Adam, mesh, lr=0.1)
    schedule = planned.planned_schedule(modules, summed, mesh, torch.device("cpu"))
    inputs, targets = batch(planned.GLOBAL_BATCH_SIZE)
    rows = planned.my_rows(mesh)
    losses: list[torch.Tensor] = []
    last = planned.last(mesh)
    schedule.step(*[inputs[rows]] * planned.first(mesh), target=targets[rows] if last else None, losses=losses)
    planned.sum_gradients(modules, mesh)
    mine_named = [pair for module in modules.values() for pair in named(module)]
    gradients = {name: parameter.grad.clone() for name, parameter in mine_named}
    optimizer.step()
    parameters = {name: parameter.detach() for name, parameter in mine_named}
    torch.save((float(sum(losses)), gradients, parameters), folder / f"{rank}.pt")


if __name__ == "__main__":
    world, *folders = sys.argv[1:]
    os.environ["OMP_NUM_THREADS"] = "1"
    run_ranks(int(world), run, int(world), folders)
