"""The ranks of tests of runs: `runtime_ranks.py WORLD FOLDER` runs the cases of FOLDER/cases.json, one by one.

Each rank is a process of its own. It leaves, for each case, the losses of its steps, the gradients of the last step and
the weights after it in a file, and if it is asked the model's outputs.
"""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import runtime_models
import torch
import torch.distributed as dist
from ranks import run_ranks

import hpgo
from hpgo.runtime import Pipeline, Workload


def optimizer(case: dict[str, Any]) -> Any:
    """AdamW, if weights are to change."""
    return (lambda p: torch.optim.AdamW(p, lr=0.01)) if case.get("adamw") else None


def keep(made: list[torch.Tensor], _part: Any, _given: Any, outputs: tuple[torch.Tensor, ...]) -> None:
    """What a part gives."""
    made.append(outputs[0].detach())


def run(rank: int, world: int, folder: Path, workloads: dict[str, Workload]) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=world)
    for number, case in enumerate(json.loads((folder / "cases.json").read_text())):
        program = hpgo.Program.from_json(json.dumps(case["program"]))
        workload = workloads[case["workload"]]
        given = {"clip_norm": case.get("clip_norm"), "optimizer": optimizer(case)}
        given |= {name: case[name] for name in ("backend",) if name in case}
        with Pipeline(program, workload, dtype=torch.float64, **given) as pipeline:
            made: list[torch.Tensor] = []
            for stage in pipeline.mine.stages:
                if case.get("outputs") and stage.is_last:
                    pipeline.parts[stage.stage].register_forward_hook(partial(keep, made))
            losses = [
                pipeline.step(
                    *(
                        pipeline.example()
                        if case.get("example")
                        else runtime_models.batch(workload, program.global_batch_size, step)
                    )
                )
                for step in range(case.get("steps", 1))
            ]
            found = [
                (layer, name, tensor.grad, tensor.detach())
                for part in pipeline.parts.values()
                for layer, tensors in part.by_layer().items()
                for name, tensor in tensors.items()
            ]
            outputs = (torch.cat(made) if made else None,) if case.get("outputs") else ()
            torch.save((losses, found, *outputs), folder / f"{number}.{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    world, folder = int(sys.argv[1]), Path(sys.argv[2])
    if "backend" in (folder / "cases.json").read_text():
        import hpgo.runtime.train.torch_backend  # takes seconds, too
    torch.set_num_threads(1)
    # All that ranks would find out by themselves, each for each case, is found out once.
    names = {case["workload"] for case in json.loads((folder / "cases.json").read_text())}
    workloads = {name: Workload.read(name) for name in sorted(names)}
    for workload in workloads.values():
        workload.look(torch.float64)
    run_ranks(world, run, world, folder, workloads)
