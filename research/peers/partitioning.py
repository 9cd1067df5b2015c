"""dnn-partitioning (Tarnawski et al., NeurIPS 2020): its dynamic program on its own graphs of layers.

Its objective is the load of the fullest device for one batch: computation and all transfers, one after another. hpgo
plans a step of many micro-batches without replicas, whose slowest stage or link decides, since both work at once.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import hpgo
from peers.comparison import Comparison, Stages, planned, run, stages_of

if TYPE_CHECKING:
    from collections.abc import Iterator

CLONE = "dnn-partitioning"
INPUTS = "throughput-inputs/LayerGraphs"
FILES = ("bert24_inference", "bert24_training", "resnet50_inference", "gnmt_inference")
BYTES_PER_S = 2.0**31 * 1e3
MICRO_BATCHES = 4096


def load_ms(profile: hpgo.Profile, stages: Stages, passes: int) -> float:
    """Return the load of the fullest device, in milliseconds: work, and each tensor that enters or leaves it."""
    layers = {layer.id: layer for layer in profile.layers}
    loads = []
    for names, _ in stages:
        inside = set(names)
        work_s = sum(layers[name].forward_s[0] + layers[name].backward_s[0] for name in inside)
        moved = {start for start, end in profile.edges if (start in inside) != (end in inside)}
        moved_bytes = sum(passes * layers[name].activation_bytes[0] for name in moved)
        loads.append(1e3 * (work_s + moved_bytes / BYTES_PER_S))
    return max(loads)


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
            devices = json.loads(text)["maxFPGAs"]
            cluster = hpgo.Cluster.of(nodes=1, devices_per_node=devices, intra_gbit_s=8e-9 * BYTES_PER_S, memory="1 TB")
            plan, our_cpu_s = planned(profile, cluster, global_batch_size=MICRO_BATCHES, pipeline_micro_batch_size=1)
            passes = 1 if name.endswith("inference") else 2
            yield Comparison(
                "dnn-partitioning", f"{name}, {devices} devices", "ms of the fullest device",
                max(loads), load_ms(profile, stages_of(plan), passes), None, None, their_cpu_s, our_cpu_s,
            )  # fmt: skip
