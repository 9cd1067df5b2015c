"""Plans exported for accelerate: split points of a pipeline, and the device of every parameter."""

from __future__ import annotations

import os
import random
import warnings
from itertools import accumulate, pairwise
from types import SimpleNamespace
from typing import Any

import accelerate
import torch
import torch.distributed.tensor  # before processes are forked
from accelerate.utils.modeling import check_device_map
from cases import outcome
from processes import together
from results import Result, done

import hpgo

WIDTH = 6


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x)) + x / 2


class Inner(torch.nn.Module):
    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.embed = torch.nn.Linear(WIDTH, WIDTH)
        self.layers = torch.nn.ModuleList(Block() for _ in range(blocks))
        self.norm = torch.nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


class Model(torch.nn.Module):
    """Named as Hugging Face names them."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        torch.manual_seed(blocks)
        self.model = Inner(blocks)
        self.head = torch.nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.model(x))


def plan(chance: random.Random, odd: float = 0.2) -> tuple[hpgo.Plan, list[int], list[str]]:
    """A plan of random stages, the blocks of each, and why it must be refused."""
    counts = [chance.randint(1, 4) for _ in range(chance.randint(1, 4))]
    ids = ["embed", *(f"layers.{block}" for block in range(sum(counts))), "head"]
    bounds = [0, *(1 + end for end in accumulate(counts))]
    bounds[-1] += 1
    replicas, reasons = 1, []
    if chance.random() < odd:
        replicas = 2
        reasons.append("replicas")
    memory = 1e15
    if chance.random() < odd / 2:
        memory = 1e3
        reasons.append("memory")
    devices = list(range(len(counts) * replicas))
    chance.shuffle(devices)
    profile = hpgo.Profile(
        "toy",
        (1,),
        tuple(hpgo.Layer(layer, layer, (1e-3,), (2e-3,), (1e6,), 4e6, (2e6,)) for layer in ids),
        tuple(pairwise(ids)),
    )
    stages = [
        (ids[begin:end], devices[at * replicas : (at + 1) * replicas])
        for at, (begin, end) in enumerate(pairwise(bounds))
    ]
    cluster = hpgo.Cluster.of(nodes=1, devices_per_node=len(devices), intra_gbit_s=100, memory=memory)
    return hpgo.evaluate(profile, cluster, stages, global_batch_size=8, pipeline_micro_batch_size=2), counts, reasons


def load(files: dict[str, str]) -> SimpleNamespace:
    """The exported module."""
    space: dict[str, Any] = {"__name__": "planned"}
    exec(next(iter(files.values())), space)
    return SimpleNamespace(**space)


def read_back() -> str:
    """Every parameter lies on the device of its stage, as accelerate reads the map."""
    chance = random.Random(6)
    same = refused = 0
    while same + refused < 200:
        given, counts, reasons = plan(chance)
        files = outcome(given, "accelerate", reasons)
        if files is None:
            refused += 1
            continue
        module = load(files)
        model = Model(sum(counts))
        places = module.device_map(model)
        with warnings.catch_warnings(action="error"):
            check_device_map(model, places)
        devices = [stage.devices[0] for stage in given.stages]
        stage_of = [stage for stage, count in enumerate(counts) for _ in range(count)]
        for name, _ in model.named_parameters():
            (device,) = {place for key, place in places.items() if name == key or name.startswith(f"{key}.")}
            if name.startswith("model.layers."):
                assert device == devices[stage_of[int(name.split(".")[2])]]
            else:
                assert device == devices[0 if "embed" in name else -1]
        assert module.split_points() == [f"model.layers.{end}" for end in accumulate(counts[:-1])]
        same += 1
    return f"{same} of {same + refused} the same, {refused} refused"


def served() -> str:
    """Five pipelines, each stage a process, give what one process gives."""
    chance = random.Random(7)
    worst, count = 0.0, 0
    while count < 5:
        given, counts, _ = plan(chance, odd=0)
        if len(counts) == 1:
            continue
        outputs = together(
            len(counts), _serve, load(hpgo.export.files(given, "accelerate")).split_points(), sum(counts)
        )
        alone = Model(sum(counts)).eval()(batch())
        worst = max(worst, float((outputs[-1] - alone).abs().max()))
        count += 1
    assert worst <= 1e-5, worst
    return f"{count} served, off by {worst:.0e}"


def batch() -> torch.Tensor:
    torch.manual_seed(3)
    return torch.randn(8, WIDTH)


def _serve(split_points: list[str], blocks: int) -> torch.Tensor | None:
    # What its framework would have said; the group is there already.
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    accelerate.PartialState(cpu=True, backend="gloo")
    # A sample a micro-batch: what divides otherwise, it pads.
    model = accelerate.prepare_pippy(
        Model(blocks).eval(), split_points=split_points, example_args=(batch()[:1],), num_chunks=len(batch())
    )
    with torch.no_grad():
        return model(batch())


if __name__ == "__main__":
    done(Result("accelerate", f"accelerate {accelerate.__version__}", read_back(), trained=served()))
