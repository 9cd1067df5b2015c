"""Plans for launchers: what they accept, and what is refused."""

from __future__ import annotations

import ast
import itertools
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import hpgo
from hpgo import export

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def bert() -> hpgo.Plan:
    return hpgo.plan(hpgo.read_profile("bert-48"), hpgo.Cluster.preset("dapple-a"), global_batch_size=64)


@pytest.fixture(scope="module")
def uneven() -> hpgo.Plan:
    return hpgo.plan(hpgo.read_profile("vgg-19"), hpgo.Cluster.preset("dapple-c"), global_batch_size=2048)


@settings(deadline=None, max_examples=30)
@given(st.lists(st.integers(1, 5), min_size=1, max_size=4), st.integers(1, 3), st.integers(1, 4), st.booleans())
def test_every_launcher_gets_the_blocks_the_batch_and_the_grid_of_the_plan(
    counts: list[int], replicas: int, share: int, recompute: bool
) -> None:
    layers = sum(counts) + 2
    profile = hpgo.Profile.chain(
        "toy",
        batch_size=1,
        forward_s=[1.0] * layers,
        backward_s=[2.0] * layers,
        activation_bytes=[8.0] * layers,
        parameter_bytes=[8.0] * layers,
    )
    names = ["embed", *(f"block.{index}" for index in range(layers - 2)), "head"]
    renamed = hpgo.Profile(
        "toy",
        (1,),
        tuple(
            hpgo.Layer(name, name, layer.forward_s, layer.backward_s, layer.activation_bytes, layer.parameter_bytes)
            for name, layer in zip(names, profile.layers, strict=True)
        ),
        tuple(itertools.pairwise(names)),
    )
    stages = len(counts)
    cluster = hpgo.Cluster.of(nodes=stages, devices_per_node=replicas, intra_gbit_s=100, inter_gbit_s=10)
    sizes = [count + (at == 0) + (at == stages - 1) for at, count in enumerate(counts)]
    plan = hpgo.evaluate(
        renamed,
        cluster,
        [(size, range(at * replicas, (at + 1) * replicas)) for at, size in enumerate(sizes)],
        global_batch_size=2 * share * replicas,
        micro_batch_size=share * replicas,
        recompute=recompute,
    )
    arguments = dict(
        line.removeprefix("--").split(" ", 1) for line in export.megatron(plan).splitlines() if not line.startswith("#")
    )
    assert arguments["num-layers"] == str(sum(counts))
    assert arguments["micro-batch-size"] == str(share)
    if stages > 1:
        layout = arguments["pipeline-model-parallel-layout"]
        assert [int(number) for number in re.findall(r"t\*(\d+)", layout)] == counts
        assert (layout[0], layout[-1], layout.count("|")) == ("E", "L", stages - 1)
    assert ("recompute-granularity" in arguments) == recompute

    job = tomllib.loads(export.torchtitan(plan))
    assert job["training"] == {"global_batch_size": 2 * share * replicas, "local_batch_size": 2 * share}
    assert job["parallelism"]["pipeline_parallel_degree"] == stages
    assert job["parallelism"]["data_parallel_replicate_degree"] == replicas
    if stages > 1:
        parts = job["parallelism"]["module_fqns_per_model_part"]
        assert [sum(name.startswith("layers.") for name in part) for part in parts] == counts
        names = [name for part in parts for name in part]
        assert names == ["tok_embeddings", *(f"layers.{index}" for index in range(sum(counts))), "norm", "output"]

    values = {
        node.targets[0].id: ast.literal_eval(node.value)
        for node in ast.parse(export.deepspeed(plan)).body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
    }
    assert [end - begin for begin, end in zip(values["PARTS"], values["PARTS"][1:], strict=False)] == sizes
    config = values["CONFIG"]
    assert config["train_batch_size"] == (
        config["train_micro_batch_size_per_gpu"] * config["gradient_accumulation_steps"] * values["REPLICAS"]
    )


@pytest.mark.parametrize("launcher", sorted(export.LAUNCHERS))
def test_uneven_replication_is_refused_with_the_way_out(launcher: str, uneven: hpgo.Plan) -> None:
    with pytest.raises(hpgo.ArgumentError, match="as many replicas of each stage, but the plan has 15, 1") as caught:
        export.LAUNCHERS[launcher](uneven)
    assert "for_rank" in caught.value.hint


def test_a_model_without_a_row_of_blocks_is_refused() -> None:
    plan = hpgo.plan(hpgo.read_profile("gnmt-16"), hpgo.Cluster.preset("dapple-a"), global_batch_size=1024)
    with pytest.raises(hpgo.ArgumentError, match=r"between the blocks|no numbered layers|cuts between"):
        export.megatron(plan)


def test_ranks_off_the_grid_order_are_told_where_to_start() -> None:
    profile, cluster = hpgo.read_profile("bert-48"), hpgo.Cluster.preset("dapple-a")
    plan = hpgo.evaluate(profile, cluster, [(26, (0, 8)), (27, (1, 9))], global_batch_size=64)
    assert "D = 0,8,1,9" in export.megatron(plan)


def test_a_schedule_that_a_launcher_lacks_is_refused() -> None:
    profile, cluster = hpgo.read_profile("bert-48"), hpgo.Cluster.preset("dapple-a")
    plan = hpgo.plan(profile, cluster, global_batch_size=64, schedule="gpipe", max_stages=2)
    with pytest.raises(hpgo.ArgumentError, match="does not run `gpipe`"):
        export.deepspeed(plan)


def test_the_command_writes_what_the_function_returns(bert: hpgo.Plan, tmp_path: Path) -> None:
    bert.save(tmp_path / "plan.json")
    for launcher, write in export.LAUNCHERS.items():
        words = [sys.executable, "-m", "hpgo", "export", str(tmp_path / "plan.json"), "--to", launcher]
        done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=True)
        assert done.stdout == write(bert)
        subprocess.run([*words, "-o", str(tmp_path / launcher)], timeout=60, check=True)
        assert (tmp_path / launcher).read_text(encoding="utf-8") == write(bert)


def test_one_process_a_rank_reads_its_part_and_all_parts_meet(uneven: hpgo.Plan, tmp_path: Path) -> None:
    uneven.save(tmp_path / "plan.json")
    processes = [
        subprocess.Popen(
            [sys.executable, str(ROOT / "examples/rank.py"), str(tmp_path / "plan.json")],
            env=os.environ | {"RANK": str(rank), "WORLD_SIZE": "16"},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(16)
    ]
    said = [process.communicate(timeout=120)[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * 16
    sent = {
        (rank, int(other), int(begin), int(end))
        for rank, text in enumerate(said)
        for begin, end, other in re.findall(r"sends samples (\d+) to (\d+), rank (\d+)", text)
    }
    received = {
        (int(other), rank, int(begin), int(end))
        for rank, text in enumerate(said)
        for begin, end, other in re.findall(r"receives samples (\d+) to (\d+), rank (\d+)", text)
    }
    assert sent == received
    rows = sorted(row for _, _, begin, end in sent for row in range(begin, end + 1))
    assert rows == list(range(uneven.micro_batch_size))


def test_the_example_tells_idle_ranks_and_what_it_lacks(tmp_path: Path) -> None:
    cluster = hpgo.Cluster.preset("dapple-c")
    plan = hpgo.evaluate(hpgo.read_profile("vgg-19"), cluster, [(13, [0]), (13, [2])], global_batch_size=64)
    plan.save(tmp_path / "plan.json")

    def said(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, str(ROOT / "examples/rank.py"), *words],
            env=os.environ | environment,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    assert said("plan.json", RANK="1", WORLD_SIZE="3").stdout == "rank 1: idle\n"
    assert said("plan.json", RANK="2", WORLD_SIZE="3").stdout.startswith("rank 2: stage 1,")
    assert said("plan.json", RANK="0", WORLD_SIZE="2").stderr == "the plan needs 3 ranks, not 2\n"
    assert said("none.json", RANK="0", WORLD_SIZE="3").stderr.startswith("error: there is no file `none.json`")
    assert "RANK" in said("plan.json").stderr
