"""PipeDream (Narayanan et al., SOSP 2019): its hierarchical optimizer on its own profiles.

Its objective is the time for one minibatch of the slowest stage: computation and gradient sums of the stage, divided by
its replicas, which take whole minibatches in turn and sum gradients after each; or the transfer of its input.
hpgo plans a step of many minibatches, which replicas share, and sums gradients once a step.
"""

from __future__ import annotations

import re
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import hpgo
from peers.comparison import Comparison, Stages, planned, run, stages_of, step_s

if TYPE_CHECKING:
    from collections.abc import Iterator

CLONE = "pipedream"
BYTES_PER_S = 25e9 / 8
PROFILES = {
    "vgg16": ("image_classification/profiles/vgg16/graph.txt", 64),
    "resnet50": ("image_classification/profiles/resnet50/graph.txt", 128),
    "gnmt": ("translation/profiles/gnmt/graph.txt", 64),
}
"""Profiles and the minibatches for which they were measured."""
DEVICES = (8, 16)
STEP_MINIBATCHES = 64
WITHOUT_GRAPHVIZ = """
import runpy, sys, types
sys.modules["graphviz"] = types.ModuleType("graphviz")
sys.path.insert(0, "..")
import graph
graph.Graph.to_dot = lambda *_: None
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
"""Runs the optimizer, which draws its graph only as an illustration, without Graphviz."""


def slowest_s(profile: hpgo.Profile, stages: Stages) -> float:
    """Return PipeDream's objective: the time for one minibatch of the slowest stage or transfer."""
    loading = {layer.id for layer in profile.loading}  # is not part of the graph that its optimizer cuts
    layers = {layer.id: layer for layer in profile.layers if layer.id not in loading}
    times = []
    for names, replicas in stages:
        inside = set(names) & set(layers)
        compute_s = sum(layers[name].forward_s[0] + layers[name].backward_s[0] for name in inside)
        weights = sum(layers[name].parameter_bytes for name in inside)
        sums_s = 4 * (replicas - 1) * weights / (BYTES_PER_S * replicas)
        received = {start for start, end in profile.edges if end in inside and start not in inside and start in layers}
        moved = sum(layers[name].activation_bytes[0] for name in received)
        times += [(compute_s + sums_s) / replicas, 2 * moved / (BYTES_PER_S * replicas)]
    return max(times)


def their_stages(clone: Path, graph: Path, profile: hpgo.Profile, devices: int) -> tuple[Stages, float]:
    """Return the stages of PipeDream's optimizer, with its processor seconds.

    It removes unused outputs from the graph, which are no work. They go where their inputs are.
    """
    with tempfile.TemporaryDirectory() as out:
        command = [
            sys.executable,
            "-c",
            WITHOUT_GRAPHVIZ,
            "optimizer_graph_hierarchical.py",
            "-f",
            str(graph),
            "-n",
            str(devices),
        ]
        command += ["-b", str(BYTES_PER_S), "--activation_compression_ratio", "1", "-o", out]
        printed, cpu_s = run(command, clone / "optimizer")
        written = Path(out, f"gpus={devices}.txt").read_text(encoding="utf-8")
    replicas = [int(each) for each in re.findall(r"^\(\d+, \d+\) \S+ (\d+)$", printed, re.MULTILINE)]
    names: list[list[str]] = [[] for _ in replicas]
    for node, stage in re.findall(r"^(node\d+) -- .*stage_id=(\d+)$", written, re.MULTILINE):
        names[int(stage)].append(node)
    placed = {node: inside for inside in names for node in inside}
    for start, end in profile.edges:
        if end not in placed:
            placed[start].append(end)
            placed[end] = placed[start]
    return list(zip(names, replicas, strict=True)), cpu_s


def comparisons(clones: Path) -> Iterator[Comparison]:
    """Return what PipeDream and hpgo find for each of PipeDream's profiles."""
    for name, (file, batch) in PROFILES.items():
        graph = clones / CLONE / "profiler" / file
        profile = hpgo.read_profile(graph, batch_size=batch)
        for devices in DEVICES:
            cluster = hpgo.Cluster.of(
                nodes=devices, devices_per_node=1, intra_gbit_s=1, inter_gbit_s=8e-9 * BYTES_PER_S, memory="1 TB"
            )
            question = {"global_batch_size": STEP_MINIBATCHES * batch, "min_samples_per_replica": 1}
            stages, their_cpu_s = their_stages(clones / CLONE, graph, profile, devices)
            plan, our_cpu_s = planned(profile, cluster, **question)
            yield Comparison(
                "PipeDream", f"{name}, {devices} devices at 25 Gbit/s", "s per minibatch of the slowest stage",
                slowest_s(profile, stages), slowest_s(profile, stages_of(plan)),
                step_s(profile, cluster, stages, **question), plan.step_s, their_cpu_s, our_cpu_s,
            )  # fmt: skip
