"""The ranks of tests of inference: `python inference_ranks.py WORLD FOLDER`, one process a rank.

FOLDER/cases.json is a list of cases: program, workload, the rows of each micro-batch, and what else it asks for. The
rank that is given the outputs leaves them for each case in a file, with all times of the flow; each rank leaves what it
has seen of a stream whose links are slow.
"""

from __future__ import annotations

import json
import queue
import sys
import threading
import time
from pathlib import Path
from typing import Any

import runtime_models
import torch
import torch.distributed as dist
from ranks import run_ranks

import hpgo
from hpgo.runtime import InferencePipeline, Workload
from hpgo.runtime.session import NeighbourGroups


def batches(workload: Workload, rows: list[int]) -> list[torch.Tensor]:
    """Inputs of each micro-batch, the same everywhere."""
    found = [runtime_models.batch(workload, many, number)[0] for number, many in enumerate(rows)]
    return [one.float() if one.is_floating_point() else one for one in found]


class Link:
    """A group whose long messages take their time, one after the other; how long, changes with each so many of them."""

    def __init__(self, way: Any, phases: list[tuple[int, float]]) -> None:
        """`phases` are numbers of messages, and bytes a second."""
        self._way, self._phases = way, phases
        self._waiting: queue.SimpleQueue[Any] = queue.SimpleQueue()
        threading.Thread(target=self._carry, daemon=True).start()

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> Any:
        if tensors[0].numel() <= 64:  # a head or a word, for which others may wait
            return self._way.send(tensors, peer, tag)
        sent = Sent()
        self._waiting.put((tensors, peer, tag, sent))
        return sent

    def recv(self, *given: Any) -> Any:
        return self._way.recv(*given)

    def _carry(self) -> None:
        number = 0
        while True:
            tensors, peer, tag, sent = self._waiting.get()
            passed = 0
            for many, rate in self._phases:
                passed += many
                if number < passed:
                    time.sleep(tensors[0].numel() / rate)
                    break
            number += 1
            self._way.send(tensors, peer, tag).wait()
            sent.done.set()


def slowed(plain: Any, phases: list[tuple[int, float]]) -> Any:
    """`NeighbourGroups.to` with a link to each rank."""
    return lambda ways, peer: Link(plain(ways, peer), phases)


class Sent:
    def __init__(self) -> None:
        self.done = threading.Event()

    def wait(self) -> None:
        self.done.wait()


def run(rank: int, world: int, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=world)
    for number, case in enumerate(json.loads((folder / "cases.json").read_text())):
        program = hpgo.Program.from_json(json.dumps(case["program"]))
        workload = Workload.read(case["workload"])
        options: dict[str, Any] = {name: getattr(torch, case[name]) for name in ("autocast",) if name in case}
        options |= {name: case[name] for name in ("quantize",) if name in case}
        if "link" in case:
            NeighbourGroups.to = slowed(NeighbourGroups.to, case["link"])  # type: ignore[method-assign]
        with InferencePipeline(program, workload, **options) as pipeline:
            how = {name: case[name] for name in ("in_flight", "hold_samples_per_s", "data_rank") if name in case}
            reads, gets = pipeline.takes_batches, pipeline.gives_outputs
            if "data_rank" in case:
                reads = gets = rank == case["data_rank"]
            for _ in range(1 if "link" in case else 2):  # a stream leaves nothing that the next one could stumble over
                moments: list[Any] = []
                given = batches(workload, case["rows"]) if reads else ()
                outputs = list(pipeline.infer(iter(given), watch=moments.append, **how))
            torch.save(([vars_of(one) for one in moments], pipeline.sent_bits), folder / f"{number}-{rank}.moments")
            flow = pipeline.flow() if case["rows"] else None
            timeline = pipeline.timeline() if case["rows"] else None
            if gets:
                kept = [one.requires_grad for one in outputs], [part.training for part in pipeline.parts.values()]
                facts: Any = None
                if flow is not None and timeline is not None:
                    facts = flow.samples, flow.enter_s, flow.leave_s, timeline.action_texts(), kept
                torch.save((outputs, facts), folder / f"{number}.pt")
            else:
                assert outputs == []
    dist.destroy_process_group()


def vars_of(moment: Any) -> dict[str, Any]:
    return {name: getattr(moment, name) for name in moment.__slots__}


if __name__ == "__main__":
    world, folder = int(sys.argv[1]), Path(sys.argv[2])
    run_ranks(world, run, world, folder)
