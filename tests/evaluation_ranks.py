"""The ranks of tests of evaluation: `evaluation_ranks.py WORLD FOLDER` runs the cases of FOLDER/cases.json."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import runtime_models
import torch
import torch.distributed as dist
from checkpoint_ranks import adamw
from ranks import run_ranks

import hpgo
from hpgo.runtime import Pipeline, Workload


def data(workload: Workload, count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """So many samples, the same on all ranks."""
    return list(zip(*runtime_models.batch(workload, count, 77), strict=True))


def error(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (outputs - targets).abs().flatten(1).sum(1)


def relative(outputs: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return error(outputs, targets), targets.abs().flatten(1).sum(1)


METRICS: dict[str, Any] = {"error": error, "relative": relative}


def run(rank: int, world: int, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=world)
    found = []
    for case in json.loads((folder / "cases.json").read_text()):
        program = hpgo.Program.from_json(json.dumps(case["program"]))
        workload = Workload.read(case["workload"])
        rows = []
        options = {"backend": case["backend"]} if "backend" in case else {}
        with Pipeline(program, workload, dtype=torch.float64, optimizer=adamw, **options) as pipeline:
            for step in range(2):
                loss = pipeline.step(*runtime_models.batch(workload, program.global_batch_size, step))
                rows.append([loss, pipeline.evaluate(data(workload, case["samples"]), metrics=METRICS)])
                pipeline.checkpoint(folder / f"saved-{len(found)}", keep=1)
        found.append(rows)
    (folder / f"{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    folder = Path(sys.argv[2])
    run_ranks(int(sys.argv[1]), run, int(sys.argv[1]), folder)
