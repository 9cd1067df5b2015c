"""dnn-partitioning (Tarnawski et al., NeurIPS 2020): its dynamic program on its own graphs of layers.

Its objective is the load of the fullest device for one batch: computation and all transfers, one after another. hpgo
has it with transfers that do not overlap with computation (`overlap_p2p_comm=False`). The step has 65,536
micro-batches, so the fullest stage decides. Both may use the processor as one more device, ten times as slow.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hpgo
from peers.comparison import Comparison, Stages, planned, run, stages_of

if TYPE_CHECKING:
    from collections.abc import Iterator

CLONE = "dnn-partitioning"
INPUTS = "throughput-inputs/LayerGraphs"
FILES = (
    "bert24_inference", "bert24_training", "resnet50_inference", "resnet50_training", "gnmt_inference", "gnmt_training",
)  # fmt: skip
BYTES_PER_S = 2.0**31 * 1e3
PROCESSOR_SPEED = 0.1
QUESTION: dict[str, Any] = {
    # The largest number that hpgo allows: the time to fill and drain the pipeline counts least.
    "global_batch_size": 2**16,
    "pipeline_micro_batch_size": 1,
    "schedule": "1f1b",
    "overlap_p2p_comm": False,
}


def cluster_of(accelerators: int, passes: int) -> hpgo.Cluster:
    """Return accelerators and one processor, whose memory is no limit: weights are all that the other planner counts.

    hpgo's step has a forward and a backward pass, each with its transfers. For inference, with one pass, each transfer
    takes half of its time in either.
    """
    link = {"bandwidth": BYTES_PER_S * 2 / passes, "latency": 0.0}
    nodes = [
        {"devices": accelerators, "memory": "1 PB", "speed": 1.0, "type": "accelerator"},
        {"devices": 1, "memory": "1 PB", "speed": PROCESSOR_SPEED, "type": "processor"},
    ]
    document = {"hpgo_cluster": 1, "name": "host", "nodes": nodes, "intra": link, "inter": link}
    return hpgo.Cluster.from_document(document, file="host")


def load_ms(profile: hpgo.Profile, stages: Stages, passes: int, processor: int | None = None) -> float:
    """Return the load of the fullest device, in milliseconds: work, and each tensor that enters or leaves it.

    `processor` is the number of the stage on the processor, which takes ten times as long and sends for free.
    """
    layers = {layer.id: layer for layer in profile.layers}
    loads = []
    for number, (names, _) in enumerate(stages):
        inside = set(names)
        work_s = sum(layers[name].forward_s[0] + layers[name].backward_s[0] for name in inside)
        moved = {start for start, end in profile.edges if (start in inside) != (end in inside)}
        moved_s = sum(passes * layers[name].activation_bytes[0] for name in moved) / BYTES_PER_S
        loads.append(1e3 * (work_s / PROCESSOR_SPEED if number == processor else work_s + moved_s))
    return max(loads)


def best_plan(profile: hpgo.Profile, accelerators: int, passes: int) -> tuple[hpgo.Plan, float]:
    """Return our plan for this objective, with the seconds of processor time."""
    return planned(profile, cluster_of(accelerators, passes), **QUESTION)


def processor_of(plan: hpgo.Plan, accelerators: int) -> int | None:
    """Return the number of the stage on the processor, the last device; None if there is none."""
    return next((number for number, stage in enumerate(plan.stages) if accelerators in stage.devices), None)


def stages_in_order(profile: hpgo.Profile, found: dict[str, Any]) -> list[tuple[list[str], list[int]]]:
    """Return their stages in the order of the pipeline, with devices: accelerators first, then the processor."""
    ids = {layer.id for layer in profile.layers}
    on_devices = [{str(node) for node in each["nodes"]} & ids for each in (*found["fpgas"], *found["cpus"])]
    ordered: list[tuple[list[str], list[int]]] = []
    known: set[str] = set()
    while len(known) < len(ids):
        ready = next(
            number for number, own in enumerate(on_devices)
            if own - known and all(start in known | own for start, end in profile.edges if end in own)
        )  # fmt: skip
        ordered.append(([layer.id for layer in profile.layers if layer.id in on_devices[ready]], [ready]))
        known |= on_devices[ready]
    return ordered


def comparisons(clones: Path) -> Iterator[Comparison]:
    """Return the loads of both planners' partitions."""
    clone = clones / CLONE
    with tempfile.TemporaryDirectory() as built:
        program = Path(built, "dp")
        subprocess.run(["g++", "-O3", "-w", "-o", program, clone / "throughput-dp/dp.cpp"], check=True)
        for name in FILES:
            text = (clone / INPUTS / f"{name}.json").read_text(encoding="utf-8")
            printed, their_cpu_s = run([str(program)], clone, stdin=text)
            found = json.loads(printed)
            loads = [each["load"] for kind in ("cpus", "fpgas") for each in found[kind]]
            profile = hpgo.read_profile(clone / INPUTS / f"{name}.json", batch_size=1)
            accelerators = json.loads(text)["maxFPGAs"]
            passes = 1 if name.endswith("inference") else 2
            plan, our_cpu_s = best_plan(profile, accelerators, passes)
            theirs = hpgo.evaluate(
                profile, cluster_of(accelerators, passes), stages_in_order(profile, found), **QUESTION
            )
            yield Comparison(
                "dnn-partitioning", f"{name}, {accelerators} devices and a processor", "ms of the fullest device",
                max(loads), load_ms(profile, stages_of(plan), passes, processor_of(plan, accelerators)),
                theirs.step_s, plan.step_s, their_cpu_s, our_cpu_s,
            )  # fmt: skip
