"""Alpa (Zheng et al., OSDI 2022): the dynamic program that builds its stages, on hpgo's profiles.

Its objective is the sum of the times that stages take for one micro-batch, plus that of the slowest for each further
one. It gets the times of each range of layers on each mesh, as Alpa measures them: here those of the profile, shared by
the devices of the mesh. Messages between stages and gradient sums are not part of it.
"""

from __future__ import annotations

import json
import sys
import tempfile
from math import inf
from typing import TYPE_CHECKING

import numpy as np

import hpgo
from peers.comparison import Comparison, Stages, planned, run, stages_of, step_s

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

CLONE = "alpa"
CLUSTER = "dapple-a"
MESHES = ((1, 1), (1, 2), (1, 4), (1, 8), (2, 8))
"""Nodes and devices per node, the powers of two of Alpa's default."""
DEVICES = 16
QUESTIONS = (("vgg-19", 1024), ("bert-48", 64), ("gnmt-16", 1024))

DRIVER = """
import ast, json, sys
from collections import defaultdict
from unittest.mock import MagicMock
import numpy as np
from numba import jit
tree = ast.parse(open(sys.argv[1]).read())
names = {"get_optimal_submeshes", "training_dp_impl_2", "training_dp_2"}
parts = [part for part in tree.body if isinstance(part, ast.FunctionDef) and part.name in names]
space = {"np": np, "maybe_numba_jit": jit(nopython=True), "timers": MagicMock()}
exec(compile(ast.Module(parts, []), sys.argv[1], "exec"), space)
costs = np.load(sys.argv[2])
meshes, devices, micro_batches = json.loads(sys.argv[3])
cost, found = space["training_dp_2"](devices, micro_batches, meshes, costs, np.full(costs.shape, 4096))
print(json.dumps([float(cost), [[int(start), int(end), int(mesh)] for (start, end), mesh, _ in found]]))
"""
"""Takes the functions of the dynamic program from Alpa's file, which imports much that it does not need."""


def times_s(profile: hpgo.Profile, samples: float) -> dict[str, float]:
    """Return the time of each layer for that many samples. Loading of data is ahead of the step."""
    loading = {layer.id for layer in profile.loading}
    return {
        layer.id: 0.0
        if layer.id in loading
        else (layer.forward_s[0] + layer.backward_s[0]) * samples / profile.batch_sizes[0]
        for layer in profile.layers
    }


def stage_times_s(profile: hpgo.Profile, micro_batch: int) -> np.ndarray:
    """Return the time of one micro-batch for layers `i` to `j` on each mesh: shape (layers, layers, meshes, 1)."""
    count = len(profile.layers)
    table = np.full((count, count, len(MESHES), 1), inf)
    for mesh, (nodes, devices) in enumerate(MESHES):
        samples = micro_batch / (nodes * devices)
        if samples >= 1:
            each = list(times_s(profile, samples).values())
            for start in range(count):
                table[start, start:, mesh, 0] = np.cumsum(each[start:])
    return table


def objective_s(profile: hpgo.Profile, stages: Stages, micro_batch: int, batch: int) -> float:
    """Return Alpa's objective of stages."""
    each = []
    for layers, devices in stages:
        known = times_s(profile, micro_batch / devices)
        each.append(sum(known[name] for name in layers))
    return sum(each) + (batch // micro_batch - 1) * max(each)


def comparisons(clones: Path) -> Iterator[Comparison]:
    """Return what Alpa's dynamic program and hpgo find."""
    source = clones / CLONE / "alpa/pipeline_parallel/stage_construction.py"
    cluster = hpgo.Cluster.preset(CLUSTER)
    for name, batch in QUESTIONS:
        profile = hpgo.read_profile(name)
        plan, our_cpu_s = planned(profile, cluster, global_batch_size=batch, min_samples_per_replica=1)
        micro_batch = plan.pipeline_micro_batch_size
        times = stage_times_s(profile, micro_batch)
        with tempfile.NamedTemporaryFile(suffix=".npy") as file:
            np.save(file, times)
            file.flush()
            settings = json.dumps([MESHES, DEVICES, batch // micro_batch])
            printed, their_cpu_s = run([sys.executable, "-c", DRIVER, str(source), file.name, settings], clones)
        theirs_s, found = json.loads(printed)
        names = [layer.id for layer in profile.layers]
        stages = [(names[start:end], MESHES[mesh][0] * MESHES[mesh][1]) for start, end, mesh in found]
        yield Comparison(
            "Alpa", f"{name}, batch {batch}, {CLUSTER}", "s per step without messages",
            theirs_s, objective_s(profile, stages_of(plan), micro_batch, batch),
            step_s(profile, cluster, stages, global_batch_size=batch, min_samples_per_replica=1), plan.step_s,
            their_cpu_s, our_cpu_s,
        )  # fmt: skip
