"""How long `hpgo.plan` takes, how close it comes to its bound, and how much memory that needs.

Run with `pytest tests/bench_plans.py -o addopts= --benchmark-only`; `-k 2048x8` chooses. Gap, stages and the peak
memory of the process stand in the JSON that `--benchmark-json` writes; run one question alone to read its peak.
"""

from __future__ import annotations

import resource
from typing import TYPE_CHECKING, Any

import pytest

import hpgo
from hpgo.model.formats import write_profile

if TYPE_CHECKING:
    from pathlib import Path

SMALL = [
    ("xlnet-36", "dapple-a", 32),
    ("bert-48", "dapple-a", 64),
    ("xlnet-36", "dapple-b", 64),
    ("bert-48", "dapple-b", 64),
    ("bert-48", "dapple-c", 64),
]
SCHEDULES = [
    ("bert-48", "dapple-a", 64),
    ("vgg-19", "dapple-c", 2_048),
    ("gnmt-16", "dapple-a", 1_024),
    ("xlnet-36", "h100:2", 128),
]
LARGE = [
    ("bert-48", 8, 512),
    ("xlnet-36", 8, 128),
    ("xlnet-36", 8, 512),
    ("bert-48", 128, 4_096),
    ("xlnet-36", 128, 1_024),
    ("xlnet-36", 128, 4_096),
    ("bert-48", 2_048, 65_536),
    ("xlnet-36", 2_048, 65_536),
]


def told(benchmark: Any, plan: hpgo.Plan) -> None:
    benchmark.extra_info |= {
        "gap": plan.optimality_gap,
        "stages": "-".join(str(stage.replicas) for stage in plan.stages),
        "peak_bytes": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
    }


@pytest.mark.parametrize(
    ("model", "preset", "size"), SMALL, ids=[f"{model} {size} on {preset}" for model, preset, size in SMALL]
)
def test_plan(benchmark: Any, model: str, preset: str, size: int) -> None:
    profile, cluster = hpgo.read_profile(model), hpgo.Cluster.preset(preset)
    told(benchmark, benchmark(hpgo.plan, profile, cluster, global_batch_size=size))


@pytest.mark.parametrize(
    ("model", "preset", "size"), SCHEDULES, ids=[f"{model} {size} on {preset}" for model, preset, size in SCHEDULES]
)
def test_schedules(benchmark: Any, model: str, preset: str, size: int) -> None:
    question = (hpgo.read_profile(model), hpgo.Cluster.preset(preset))
    found = benchmark.pedantic(
        hpgo.plan, question, {"global_batch_size": size, "schedule": "auto"}, rounds=5, warmup_rounds=1
    )
    benchmark.extra_info["schedule"] = found.schedule


@pytest.mark.parametrize(
    ("model", "nodes", "size"), LARGE, ids=[f"{model} {size} on {nodes}x8" for model, nodes, size in LARGE]
)
def test_plan_for_many_machines(benchmark: Any, model: str, nodes: int, size: int) -> None:
    profile = hpgo.read_profile(model)
    cluster = hpgo.Cluster.of(nodes=nodes, devices_per_node=8, intra_gbit_s=1_200, inter_gbit_s=25, memory="40 GB")
    told(
        benchmark,
        benchmark.pedantic(hpgo.plan, (profile, cluster), {"global_batch_size": size}, rounds=3),
    )


def test_gnmt_16_from_parsing_on(benchmark: Any, tmp_path: Path) -> None:
    path, cluster = tmp_path / "gnmt-16.txt", hpgo.Cluster.preset("dapple-a")
    write_profile(hpgo.read_profile("gnmt-16"), path)

    def answer() -> hpgo.Plan:
        return hpgo.plan(hpgo.read_profile(path, batch_size=64), cluster, global_batch_size=1_024)

    told(benchmark, benchmark(answer))
