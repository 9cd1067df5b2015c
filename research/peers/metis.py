"""Metis (Um et al., USENIX ATC 2024): its planner for equal devices on its profile of a GPT with ten layers on A100.

Its objective is a step of 1F1B from the sums of stages, the slowest message of each stage, gradient sums, and constants
of the profile. It cuts layers evenly and gives all stages the same replicas. Plans without tensor parallelism are
compared, with batches of 1 to 4 samples, which its files have.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import hpgo
from peers.comparison import Comparison, Stages, planned, run, step_s

if TYPE_CHECKING:
    from collections.abc import Iterator

CLONE = "Metis"
PROFILE = "profile_data_samples"
NODES, DEVICES_PER_NODE = 2, 4
MEMORY_GIB = 80
LAYERS, HIDDEN, LENGTH, VOCABULARY = 10, 4096, 1024, 51200
QUESTIONS = ((64, 10), (64, 1), (256, 1))
"""Global batches, and gigabytes per second of all links: its code takes the rate of nodes for links between them."""
MAX_SAMPLES = 4
DRIVER = """
import cost_homo_cluster as metis
args = metis.parse_args()
cluster = metis.GPUCluster(hostfile_path=args.hostfile_path, clusterfile_path=args.clusterfile_path)
data, metis.device_types = metis.ProfileDataLoader(args.profile_data_path).load_profile_data_all()
config = metis.ModelConfig(model_name=args.model_name, num_layers=args.num_layers, sequence_length=args.sequence_length,
    vocab_size=args.vocab_size, hidden_size=args.hidden_size, attention_head_size=args.attention_head_size)
volume = metis.GPTActivationAndParam(config, data["model"]["parameters"])
estimator = metis.HomoCostEstimator(data, config, volume, cluster)
for plan, cost_ms in metis.cost_homo_cluster(args, cluster, estimator):
    if not estimator.get_cost(plan, metis.device_types[0])[2]:
        print("FOUND", cost_ms, plan.dp, plan.pp, plan.tp, plan.mbs)
"""
"""Does what its main program does, which gives the reader of profiles an argument that it no longer takes."""
LINE = re.compile(r"^FOUND ([\d.]+) (\d+) (\d+) (\d+) (\d+)$", re.MULTILINE)


def even_stages(names: list[str], count: int, replicas: int) -> Stages:
    """Return Metis's stages: blocks evenly, with the first layer in front and the last one behind."""
    blocks, more = divmod(len(names) - 2, count)
    counts = [blocks + (0 < stage <= more) for stage in range(count)]
    counts[0] += 1
    counts[-1] += 1
    stages: Stages = []
    first = 0
    for each in counts:
        stages.append((names[first : first + each], replicas))
        first += each
    return stages


def their_plans(clone: Path, batch: int, gbytes: int) -> tuple[list[tuple[float, int, int, int]], float]:
    """Return plans without tensor parallelism as seconds, dp, pp and micro-batch, with Metis's processor seconds."""
    with tempfile.TemporaryDirectory() as folder:
        hosts, nodes = Path(folder, "hosts"), Path(folder, "nodes.json")
        addresses = [f"10.0.0.{node}" for node in range(NODES)]
        hosts.write_text("".join(f"{each} slots={DEVICES_PER_NODE}\n" for each in addresses), encoding="utf-8")
        node = {"instance_type": "A100", "inter_bandwidth": gbytes, "intra_bandwidth": gbytes, "memory": MEMORY_GIB}
        nodes.write_text(json.dumps(dict.fromkeys(addresses, node)), encoding="utf-8")
        options = {
            "model_name": "GPT", "model_size": "1.5B", "num_layers": LAYERS, "gbs": batch, "hidden_size": HIDDEN,
            "sequence_length": LENGTH, "vocab_size": VOCABULARY, "attention_head_size": 32, "hostfile_path": hosts,
            "clusterfile_path": nodes, "profile_data_path": clone / PROFILE, "max_profiled_tp_degree": 4,
            "max_profiled_batch_size": MAX_SAMPLES,
        }  # fmt: skip
        command = [sys.executable, "-c", DRIVER, *(f"--{name}={value}" for name, value in options.items())]
        printed, cpu_s = run(command, clone)
    found = [
        (float(ms) / 1e3, int(dp), int(pp), int(mbs)) for ms, dp, pp, tp, mbs in LINE.findall(printed) if tp == "1"
    ]
    return found, cpu_s


def comparisons(clones: Path) -> Iterator[Comparison]:
    """Return what Metis and hpgo find for several global batches."""
    clone = clones / CLONE
    profile = hpgo.read_profile(
        clone / PROFILE / "DeviceType.A100_tp1_bs1.json", boundary_bytes=LENGTH * HIDDEN, batch_size=None
    )
    names = [layer.id for layer in profile.layers]
    for batch, gbytes in QUESTIONS:
        cluster = hpgo.Cluster.of(
            nodes=NODES, devices_per_node=DEVICES_PER_NODE, intra_gbit_s=8 * gbytes, inter_gbit_s=8 * gbytes,
            memory=f"{MEMORY_GIB} GiB",
        )  # fmt: skip
        plan, our_cpu_s = planned(profile, cluster, global_batch_size=batch)
        plans, their_cpu_s = their_plans(clone, batch, gbytes)
        theirs_s, replicas, stages, samples = min(plans)
        theirs = step_s(
            profile, cluster, even_stages(names, stages, replicas), global_batch_size=batch,
            pipeline_micro_batch_size=samples * replicas,
        )  # fmt: skip
        yield Comparison(
            "Metis", f"GPT of 10 layers, batch {batch}, 2 × 4 A100, {gbytes} GB/s links", "s per step", theirs_s, None,
            theirs, plan.step_s, their_cpu_s, our_cpu_s,
        )  # fmt: skip
