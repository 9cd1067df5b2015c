"""The ranks of tests of checkpoints: runs that are saved, resumed and broken off, in processes that fork.

`checkpoint_ranks.py WORLD FOLDER` runs the cases of FOLDER/cases.json on so many ranks, one by one; each rank leaves
the losses of each case, and what it was told. With `killed` for WORLD, one rank is killed at each moment of a save.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
from pathlib import Path
from typing import Any

import runtime_models
import torch
import torch.distributed as dist
from ranks import FORK, run_ranks

import hpgo
from hpgo.runtime import Pipeline, Workload

FEW_BYTES = 100
MOMENTS = 4
"""At which a rank alone waits for the disk: the tensors, the index, the folder's names, its own name."""


def adamw(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01)


def run(rank: int, world: int, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=world)
    found = []
    for case in json.loads((folder / "cases.json").read_text()):
        program = hpgo.Program.from_json(json.dumps(case["program"]))
        workload = Workload.read(case["workload"])
        losses: list[float] = []
        told: list[str] = []
        with Pipeline(program, workload, dtype=torch.float64, optimizer=adamw, clip_norm=0.5) as pipeline:
            if case.get("resume"):
                assert pipeline.resume(folder / case["resume"])
            if case.get("save"):
                pipeline.checkpoint(folder / case["save"], tell=told.append)
            soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
            while pipeline.steps < case["steps"]:
                if pipeline.steps == case.get("full_from"):
                    pipeline.checkpoint(folder / case["save"])  # waits for the one that is being written
                    if rank == 1:
                        resource.setrlimit(resource.RLIMIT_FSIZE, (FEW_BYTES, hard))
                batch = runtime_models.batch(workload, program.global_batch_size, pipeline.steps)
                losses.append(pipeline.step(*batch))
                if case.get("save"):
                    pipeline.checkpoint(folder / case["save"], tell=told.append)
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        found.append((losses, told))
    (folder / f"{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def go_on(folder: Path, kill_at: int | None) -> None:
    """One rank, one step further than what is saved, killed when it waits for the disk for that time."""
    torch.set_num_threads(1)
    case = json.loads((folder / "cases.json").read_text())[0]
    program = hpgo.Program.from_json(json.dumps(case["program"]))
    workload = Workload.read(case["workload"])
    calls, to_disk = [0], os.fsync

    def fsync(descriptor: int) -> None:
        calls[0] += 1
        if calls[0] == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        to_disk(descriptor)

    with Pipeline(program, workload, dtype=torch.float64, optimizer=adamw) as pipeline:
        pipeline.resume(folder / "saved")
        with (folder / "resumed").open("a") as file:
            file.write(f"{pipeline.steps}\n")
        pipeline.step(*runtime_models.batch(workload, program.global_batch_size, pipeline.steps))
        os.fsync = fsync
        pipeline.checkpoint(folder / "saved")
    assert calls[0] == MOMENTS


def killed(folder: Path) -> int:
    """Saves once, is killed at each moment of the next save, and saves again; returns 0 if that is how they ended."""
    codes: list[Any] = []
    for kill_at in (None, *range(1, MOMENTS + 1), None):
        one = FORK.Process(target=go_on, args=(folder, kill_at))
        one.start()
        one.join()
        codes.append(one.exitcode)
    return 0 if codes == [0, *[-signal.SIGKILL] * MOMENTS, 0] else 1


if __name__ == "__main__":
    folder = Path(sys.argv[2])
    if sys.argv[1] == "killed":
        sys.exit(killed(folder))
    world = int(sys.argv[1])
    run_ranks(world, run, world, folder)
