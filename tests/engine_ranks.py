"""The ranks of tests/test_program.py: `engine_ranks.py WORLD FOLDER PROGRAM…` runs programs on examples/engine.py.

Each rank is a process of its own; all of them run one program after the other, and leave their gradients beside it.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from ranks import run_ranks

import hpgo

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
import engine


def run(rank: int, world: int, folder: str, paths: list[str]) -> None:
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=world)
    for path in paths:
        program = hpgo.Program.read(path)
        mine = program.for_rank(rank)
        names = sorted({layer for stage in mine.stages for layer in stage.layers})
        rank_engine = engine.Engine(mine, {name: engine.make_layer(name) for name in names})
        loss = rank_engine.step(*batch(program.global_batch_size))
        gradients = {name: parameter.grad for name, parameter in rank_engine.layers.named_parameters()}
        torch.save((loss, gradients), f"{path}.{rank}.pt")
    dist.destroy_process_group()


def batch(size: int) -> torch.Tensor:
    return torch.randn(2, size, engine.WIDTH, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


if __name__ == "__main__":
    world, folder, *paths = sys.argv[1:]
    run_ranks(int(world), run, int(world), folder, paths)
