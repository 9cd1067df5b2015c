"""The ranks of tests of varying batches: `varying_ranks.py WORLD FOLDER` writes losses and weights of each case."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import nn
from torch.nn import functional
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import hpgo
from hpgo.runtime import Pipeline, Workload

BATCH, WORDS, WIDTH = 8, 11, 6


class Words(nn.Module):
    """The first layer of a list: texts with a bias by name, or the lengths of texts."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)

    def forward(self, ids: torch.Tensor, lengths: torch.Tensor | None = None, *, bias: Any = None) -> Any:
        made = self.words(ids) if bias is None else self.words(ids) + bias[:, None]
        return made if lengths is None else (made, lengths)


class Mixed(nn.Module):
    """A layer in which each token sees those before it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        return given + torch.tanh(self.linear(given.cumsum(1)))


class Packed(nn.Module):
    """A recurrent layer that packs its texts, so that it needs the values of their lengths."""

    def __init__(self, *, is_last: bool) -> None:
        super().__init__()
        self.recurrent, self.is_last = nn.GRU(WIDTH, WIDTH, batch_first=True), is_last

    def forward(self, given: tuple[torch.Tensor, torch.Tensor]) -> Any:
        texts, lengths = given
        packed = pack_padded_sequence(texts, lengths.cpu(), batch_first=True, enforce_sorted=False)
        made, _ = pad_packed_sequence(self.recurrent(packed)[0], batch_first=True, total_length=texts.shape[1])
        return made if self.is_last else (made, lengths)


def tokens_loss(scores: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(scores.flatten(0, 1), targets.flatten())


def counted(targets: torch.Tensor) -> torch.Tensor:
    return (targets != -100).sum(1)


def whole(maximum: int, *shape: int, seed: int) -> torch.Tensor:
    return torch.randint(maximum, shape, generator=torch.Generator().manual_seed(seed))


def layers(case: str) -> list[nn.Module]:
    torch.manual_seed(0)
    if case == "packed":
        middle: list[nn.Module] = [Packed(is_last=False), Packed(is_last=True)]
    else:
        middle = [Mixed(), Mixed(), nn.Tanh()]
    return [one.double() for one in (Words(), *middle, nn.Linear(WIDTH, WORDS))]


def batch(case: str, length: int, seed: int) -> tuple[Any, torch.Tensor]:
    """Inputs and targets of a global batch of texts of this length."""
    ids, targets = whole(WORDS, BATCH, length, seed=seed), whole(WORDS, BATCH, length, seed=seed + 1)
    if case == "packed":
        lengths = whole(length, BATCH, seed=seed + 2) + 1
        return (ids, lengths), targets
    if case == "named":
        bias = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        return {"ids": ids, "bias": bias, "lengths": None}, targets
    if case == "weighted":
        for at in range(BATCH):
            targets[at, 1 + at % length :] = -100
    return ids, targets


CASES = ("plain", "weighted", "named", "packed")
LENGTHS = (7, 4, 9, 7, 4)
SAMPLES = 21
"""Samples of the data set: two whole batches and five samples."""


def workload(case: str, *, dynamic_shapes: bool = True) -> Workload:
    weight = counted if case == "weighted" else None
    example = batch(case, LENGTHS[0], 5)
    return Workload(layers(case), *example, tokens_loss, weight=weight, dynamic_shapes=dynamic_shapes)


def data(case: str) -> list[Any]:
    """Samples whose lengths differ from the example's, one global batch after the other."""
    found: list[Any] = []
    for seed in range(3):
        inputs, targets = batch(case, 5 + seed, 30 + seed)
        for at in range(BATCH):
            if isinstance(inputs, dict):
                own: Any = {name: None if one is None else one[at] for name, one in inputs.items()}
            else:
                own = tuple(one[at] for one in inputs) if isinstance(inputs, tuple) else inputs[at]
            found.append((own, targets[at]))
    return found[:SAMPLES]


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.3)


def run(rank: int, world: int, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=world)
    found: dict[str, Any] = {}
    for case in CASES:
        work = workload(case)
        ids = work.layers
        # The first stage has a micro-batch on each of two ranks, of three and one rows.
        stages = [(ids[:2], [0, 1]), (ids[2:], [2])]
        schedule = hpgo.schedule("1f1b", ranks=2, micro_batches=2)
        program = hpgo.program(schedule, stages, pipeline_micro_batch_size=4, global_batch_size=BATCH)
        with Pipeline(program, work, optimizer=sgd, tell=lambda _: None) as pipeline:
            losses = [pipeline.step(*batch(case, length, at)) for at, length in enumerate(LENGTHS)]
            loader = pipeline.loader(data(case), shuffle=False, drop_last=False)
            losses += [pipeline.step(*share) for share in loader]
            losses.append(pipeline.evaluate(data(case))["loss"])
            found[case] = losses
    (folder / f"{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    run_ranks(int(sys.argv[1]), run, int(sys.argv[1]), Path(sys.argv[2]))
