"""The ranks of tests of inference: `python inference_ranks.py WORLD FOLDER`, one process a rank.

FOLDER/cases.json is a list of cases: program, workload, the rows of each micro-batch, and what else it asks for. The
rank that outputs leave from keeps, for each case, what it was given, and all times of the flow, in a file.
"""

from __future__ import annotations

import json
import multiprocessing
import sys
from pathlib import Path
from typing import Any

import runtime_models
import torch
import torch.distributed as dist

import hpgo
from hpgo.runtime import Pipeline, Workload


def batches(workload: Workload, rows: list[int]) -> list[torch.Tensor]:
    """Inputs of each micro-batch, the same everywhere."""
    found = [runtime_models.batch(workload, many, number)[0] for number, many in enumerate(rows)]
    return [one.float() if one.is_floating_point() else one for one in found]


def run(rank: int, world: int, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=world)
    for number, case in enumerate(json.loads((folder / "cases.json").read_text())):
        program = hpgo.Program.from_json(json.dumps(case["program"]))
        workload = Workload.read(case["workload"])
        options: dict[str, Any] = {"inference": True}
        options |= {name: getattr(torch, case[name]) for name in ("autocast",) if name in case}
        options |= {name: case[name] for name in ("quantize",) if name in case}
        with Pipeline(program, workload, **options) as pipeline:
            for _ in range(2):  # a stream leaves nothing that the next one could stumble over
                given = batches(workload, case["rows"]) if pipeline.takes_batches else ()
                outputs = list(pipeline.infer(iter(given), in_flight=case.get("in_flight")))
            flow = pipeline.flow() if case["rows"] else None
            timeline = pipeline.timeline() if case["rows"] else None
            if pipeline.gives_outputs:
                kept = [one.requires_grad for one in outputs], [part.training for part in pipeline.parts.values()]
                facts: Any = None
                if flow is not None and timeline is not None:
                    facts = flow.samples, flow.enter_s, flow.leave_s, timeline.action_texts(), kept
                torch.save((outputs, facts), folder / f"{number}.pt")
            else:
                assert outputs == []
    dist.destroy_process_group()


if __name__ == "__main__":
    world, folder = int(sys.argv[1]), Path(sys.argv[2])
    fork = multiprocessing.get_context("fork")  # torch is imported once; nothing has run yet
    ranks = [fork.Process(target=run, args=(rank, world, folder)) for rank in range(world)]
    for one in ranks:
        one.start()
    for one in ranks:
        one.join()
    sys.exit(max(abs(one.exitcode or 0) for one in ranks))
