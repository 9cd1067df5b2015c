"""Piper (Tarnawski et al., NeurIPS 2021): its dynamic program on its profile of BERT-32 on A100.

Its objective is the time for one sample of the slowest stage: computation and messages, divided by the replicas, which
take whole micro-batches in turn, and gradient sums after each sample. It chooses a tensor-parallel degree for each
stage, and recomputation for each layer. hpgo answers one question for each degree, and the best plan counts.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
from dataclasses import replace
from math import ceil, inf
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hpgo
from hpgo.errors import InfeasibleError
from peers.comparison import Comparison, Stages, planned, run, stages_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

CLONE = "piper"
INPUT = "inputs/bert32a100.json"
GIB = 2**30
BYTES_PER_S = 25 * GIB
SAMPLES = 1920
QUESTIONS = tuple((devices, memory_gib) for memory_gib in (80, 8, 2) for devices in (8, 64, 512, 2048))
DEGREES = (1, 2, 4, 8)

DRIVER = r"""
#define main all_experiments
#include "algo.cpp"
#undef main
int main(int, char **given) {
    Instance question = readBERTA100(32);
    question.maxDevices = atoi(given[1]);
    question.maxMemoryPerDevice = atof(given[2]);
    question.mbsInBatch = atoi(given[3]);
    question.bandwidth = atof(given[4]);
    Graph graph(question);
    const Result found = graph.runDP();
    cout << "FOUND " << json({{"time", found.stages.empty() ? -1 : graph.getTPSForResult(found)}}) << endl;
    return 0;
}
"""
"""Asks Piper's planner one question, where its own program runs all experiments of the paper."""


class Model:
    """Piper's input, and its objective for a plan (Section 3 of the paper)."""

    def __init__(self, document: dict[str, Any]) -> None:
        """Keep the costs of each layer, and edges by their ends."""
        self.costs = {str(node["id"]): node["TMPCs"] for node in document["nodes"]}
        self.edges = [
            (str(edge["sourceId"]), str(edge["destId"]), edge["communicationCost"]) for edge in document["edges"]
        ]

    def seconds_per_sample(
        self, stages: Stages, degree: int, memory_bytes: float, *, recompute: Sequence[bool]
    ) -> float:
        """Return the time per sample of the slowest stage, or infinity if one exceeds the memory.

        `recompute` has whether each stage recomputes its activations.
        """
        behind = sum(replicas for _, replicas in stages)
        slowest_s = 0.0
        for (layers, replicas), again in zip(stages, recompute, strict=True):
            inside = set(layers)
            chosen = {name: self.costs[name][str(degree)][again] for name in layers}
            in_flight = ceil(behind / replicas)
            behind -= replicas
            used = sum(each["memoryUsageA"] * in_flight + each["memoryUsageB"] for each in chosen.values())
            if used > memory_bytes:
                return inf
            moved = sum(
                2 * (size + chosen[end]["syncTimeFw"][start])
                for start, end, size in self.edges
                if end in inside and start not in inside
            )
            moved += sum(
                2 * (size + chosen[start]["syncTimeBw"][end])
                for start, end, size in self.edges
                if start in inside and end not in inside
            )
            weights = sum(each["parameterSize"] for each in chosen.values())
            sums = 4 * weights * (replicas - 1) / replicas / SAMPLES
            compute_s = sum(each["timePerSample"] for each in chosen.values())
            slowest_s = max(slowest_s, (moved / BYTES_PER_S + compute_s) / replicas + sums / BYTES_PER_S)
        return slowest_s


def our_best(clone: Path, model: Model, devices: int, memory_bytes: float) -> tuple[float, float]:
    """Return Piper's objective of hpgo's best plan over all degrees, with the processor seconds of all questions."""
    best_s, cpu_s = inf, 0.0
    for degree in DEGREES:
        profile = replace(hpgo.read_profile(clone / INPUT, batch_size=1, gpus_per_device=degree), gpus_per_device=1)
        cluster = hpgo.Cluster.of(
            nodes=devices // degree, devices_per_node=1, intra_gbit_s=8e-9 * BYTES_PER_S,
            inter_gbit_s=8e-9 * BYTES_PER_S, memory=f"{memory_bytes:.0f} B",
        )  # fmt: skip
        question = {"global_batch_size": SAMPLES, "memory": hpgo.MemoryModel(1, 0), "recompute": "auto"}
        try:
            plan, took_s = planned(profile, cluster, **question)
        except InfeasibleError:
            continue
        cpu_s += took_s
        recompute = [stage.recompute for stage in plan.stages]
        found_s = model.seconds_per_sample(stages_of(plan), degree, memory_bytes, recompute=recompute)
        best_s = min(best_s, found_s)
    return best_s, cpu_s


def comparisons(clones: Path) -> Iterator[Comparison]:
    """Return what Piper and hpgo find for each number of devices and each memory."""
    clone = clones / CLONE
    model = Model(json.loads((clone / INPUT).read_text(encoding="utf-8")))
    with tempfile.TemporaryDirectory() as built:
        program, source = Path(built, "piper"), Path(built, "driver.cpp")
        source.write_text(DRIVER, encoding="utf-8")
        subprocess.run(["g++", "-O3", "-w", f"-I{clone}", "-o", program, source], check=True)
        for devices, memory_gib in QUESTIONS:
            memory_bytes = memory_gib * GIB
            printed, their_cpu_s = run([str(program), *map(str, (devices, memory_bytes, SAMPLES, BYTES_PER_S))], clone)
            theirs_s = json.loads(printed.partition("FOUND ")[2])["time"]
            ours_s, our_cpu_s = our_best(clone, model, devices, memory_bytes)
            yield Comparison(
                "Piper", f"BERT-32, {devices} devices of {memory_gib} GiB", "s per sample of the slowest stage",
                inf if theirs_s < 0 else theirs_s, ours_s, None, None, their_cpu_s, our_cpu_s,
            )  # fmt: skip
