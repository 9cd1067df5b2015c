"""Checkpoints of runs: files of named tensors, and the index that says what is in which. They need torch."""

from __future__ import annotations

import json
import random
import tempfile
from pathlib import Path

import torch
from guided import fuzz, reader
from mutations import documents, injured, tree

import hpgo
from hpgo.runtime.checkpoint import whole_ones
from hpgo.runtime.tensor_files import TensorFile, write

_LENGTH_BYTES = 8
"""Of the length of a header, which comes first."""


def seeds() -> dict[str, bytes]:
    """A file of tensors of several types and shapes, and the index of a checkpoint that a run has saved."""
    schedule = hpgo.schedule("1f1b", ranks=1, micro_batches=1)
    layers = torch.nn.Sequential(torch.nn.Linear(2, 2))
    workload = hpgo.runtime.Workload(layers, torch.zeros(1, 2), torch.zeros(1, 2), torch.nn.functional.mse_loss)
    program = hpgo.program(schedule, [(workload.layers, [0])], pipeline_micro_batch_size=1, global_batch_size=1)
    tensors = {
        "layer.0.weight": torch.ones(2, 3),
        "layer.0.bias": torch.zeros(2, dtype=torch.bfloat16),
        "steps": torch.tensor(7),
        "none": torch.zeros(0, 4, dtype=torch.bool),
    }
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder, "x.safetensors"), tensors)
        with hpgo.runtime.Pipeline(program, workload) as pipeline:
            pipeline.step(torch.zeros(1, 2), torch.zeros(1, 2))
            pipeline.checkpoint(folder)
        facts = json.loads(Path(folder, "step-1", "checkpoint.json").read_text(encoding="utf-8"))
        facts["files"] = {}  # no other file is beside it when it is read
        return {"tensors": Path(folder, "x.safetensors").read_bytes(), "index": json.dumps(facts).encode()}


def mutate(data: bytes, maximum: int, seed: int) -> bytes:
    """A file whose header is changed as a tree, with the length that this gives it; an index as such."""
    chance = random.Random(seed)
    length = int.from_bytes(data[:_LENGTH_BYTES], "little")
    if data[:1] == b"{":
        return documents(data, maximum, seed)
    try:
        header = json.loads(data[_LENGTH_BYTES : _LENGTH_BYTES + length]) if chance.random() < 0.9 else None
    except (ValueError, RecursionError):
        header = None
    if header is None:
        return injured(data, maximum, chance)
    text = json.dumps(tree(header, chance)).encode()
    return (len(text).to_bytes(_LENGTH_BYTES, "little") + text + data[_LENGTH_BYTES + length :])[:maximum]


def read(path: Path) -> list[torch.Tensor]:
    """All tensors."""
    with TensorFile(path) as file:
        return [file.read(name).reshape(file.shape(name)).to(file.dtype(name)) for name in file]


def look(path: Path) -> int:
    """The steps that were done."""
    step = path.parent / "step-1"
    step.mkdir(exist_ok=True)
    path.replace(step / "checkpoint.json")
    found, _ = whole_ones(path.parent)
    if not found:
        raise hpgo.errors.RunError("the checkpoint is damaged")
    return found[0].steps + 1


if __name__ == "__main__":
    fuzz(seeds, mutate, reader("x.safetensors", read), reader("checkpoint.json", look))
