"""Plans for one framework: the best of what it runs, held against every such plan; and what that costs."""

from __future__ import annotations

import shlex
import subprocess
import sys
from itertools import combinations, pairwise, permutations
from typing import TYPE_CHECKING, Any

import pytest
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refused

import hpgo
from hpgo import export
from hpgo.hardware.cluster import Device, Node
from hpgo.programs.blocks import Blocks
from hpgo.programs.frameworks import TABLE, framework

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from hpgo.programs.frameworks import Framework

ROUNDING = 1 + 1e-9
TRAINERS = [f"{row.name}@{row.version}" for row in TABLE if row.trains]


def model(forward_s: list[float], weights: list[float], activations: list[float]) -> hpgo.Profile:
    """A row of blocks between an embedding and a head, measured at 1 and 4 samples."""
    names = ["embed", *(f"layers.{at}" for at in range(len(forward_s) - 2)), "head"]
    times_s = [forward_s[0] / 8, *forward_s[1:-1], forward_s[-1] / 4]  # the blocks are the model
    layers = tuple(
        hpgo.Layer(name, name, (f, 3 * f), (2 * f, 5 * f), (a, 4 * a), w)
        for name, f, a, w in zip(names, times_s, activations, weights, strict=True)
    )
    return hpgo.Profile("toy", (1, 4), layers, tuple(pairwise(names)))


@st.composite
def questions(draw: st.DrawFn) -> tuple[hpgo.Profile, hpgo.Cluster, dict[str, Any]]:
    """A few blocks on up to four devices, small enough to price all plans that a framework runs."""
    count = draw(st.integers(3, 5))
    some = st.lists(st.sampled_from([1.0, 2.0, 3.0]), min_size=count, max_size=count)
    profile = model(draw(some), draw(some), draw(some))
    speeds = draw(st.sampled_from([(1.0, 1.0), (1.0, 2.0)]))
    memory = draw(st.sampled_from([1e9, 60.0, 40.0]))
    size = draw(st.sampled_from([1, 2]))
    rates = draw(st.sampled_from([(1e-7, 1e-8), (1e-8, 1e-9)]))
    nodes = tuple(Node(Device(f"d{speed}", memory, speed), size) for speed in speeds)
    cluster = hpgo.Cluster.of(
        nodes=2, devices_per_node=size, intra_gbit_s=rates[0], inter_gbit_s=rates[1], memory=memory
    )
    cluster = hpgo.Cluster("toy", nodes, cluster.intra, cluster.inter)
    options = {
        "global_batch_size": draw(st.sampled_from([4, 6, 8])),
        "recompute": draw(st.booleans()),
        "overlap": draw(st.booleans()),
    }
    return profile, cluster, options


def every_plan(
    profile: hpgo.Profile, cluster: hpgo.Cluster, row: Framework, schedule: str, options: dict[str, Any]
) -> Iterator[hpgo.Plan]:
    """All plans with equal replicas, each priced by itself: every cut, every group of devices, every micro-batch."""
    names = [layer.id for layer in profile.layers]
    ends = [len(cut) for cut in Blocks.of(profile).cuts()] if row.cuts == "blocks" else range(1, len(names))
    batch = options["global_batch_size"]
    memory = hpgo.MemoryModel(shard_optimizer=False not in row.shards_optimizer)
    kept = {"recompute": options["recompute"], "overlap": options["overlap"] and row.overlaps}
    for stages in range(1, cluster.devices + 1):
        for replicas in range(1, cluster.devices // stages + 1):
            groups = {
                tuple(tuple(sorted(order[at * replicas : (at + 1) * replicas])) for at in range(stages))
                for order in permutations(range(cluster.devices), stages * replicas)
            }
            for inner in combinations(ends, stages - 1):
                bounds = [0, *inner, len(names)]
                for devices in groups:
                    given_stages = [
                        (names[begin:end], those) for (begin, end), those in zip(pairwise(bounds), devices, strict=True)
                    ]
                    for size in range(replicas, batch + 1, replicas):
                        if batch % size == 0:
                            yield hpgo.evaluate(
                                profile, cluster, given_stages, global_batch_size=batch, pipeline_micro_batch_size=size,
                                schedule=schedule, memory=memory, even_split=True, **kept,
                            )  # fmt: skip


@settings(max_examples=examples(60))
@given(questions(), st.sampled_from(["megatron", "deepspeed", "torchtitan@0.2"]))
def test_no_plan_that_a_launcher_runs_beats_its_bound_and_a_proof_is_one(
    question: tuple[hpgo.Profile, hpgo.Cluster, dict[str, Any]], name: str
) -> None:
    profile, cluster, options = question
    if framework(name).recomputes != "stage":  # what it keeps then is set aside, so that not every plan is looked at
        options = options | {"recompute": False}
    steps = [plan.step_s for plan in every_plan(profile, cluster, framework(name), "1f1b", options) if plan.fits]
    if not steps:
        with pytest.raises(hpgo.errors.InfeasibleError):
            hpgo.plan(profile, cluster, framework=name, schedule="1f1b", **options)
        return
    found = hpgo.plan(profile, cluster, framework=name, schedule="1f1b", **options)
    assert found.fits
    assert found.lower_bound_s is not None
    assert found.lower_bound_s <= min(steps) * ROUNDING
    assert min(steps) <= found.step_s * ROUNDING, "the plan is one of these"
    assert found.optimality_gap or found.step_s <= min(steps) * ROUNDING


@settings(max_examples=examples(60))
@given(questions(), st.sampled_from(TRAINERS))
def test_a_plan_for_a_launcher_is_what_it_runs_no_shorter_than_any_and_its_exporter_takes_it(
    question: tuple[hpgo.Profile, hpgo.Cluster, dict[str, Any]], name: str
) -> None:
    profile, cluster, options = question
    row = framework(name)
    try:
        plan = hpgo.plan(profile, cluster, framework=name, **options)
    except hpgo.errors.InfeasibleError:
        return
    assert plan.schedule == next(iter(row.schedules))
    assert len({stage.replicas for stage in plan.stages}) == 1
    assert plan.pipeline_micro_batch_size % plan.stages[0].replicas == 0
    restriction = plan.restriction
    assert restriction is not None
    assert (restriction.framework, restriction.version, restriction.label) == (row.name, row.version, row.label)
    assert restriction.unrestricted_step_s is not None
    assert restriction.unrestricted_lower_bound_s is not None
    assert (
        restriction.unrestricted_lower_bound_s
        <= restriction.unrestricted_step_s * ROUNDING
        <= plan.step_s * ROUNDING**2
    )
    minimum, maximum = restriction.costs(plan.step_s) or (1, 0)
    assert 0 <= minimum <= maximum
    assert hpgo.Plan.from_json(plan.to_json()) == plan
    assert all(export.files(plan, name).values())


def test_the_report_says_who_runs_the_plan_and_what_that_costs() -> None:
    profile, cluster = hpgo.read_profile("bert-48"), hpgo.Cluster.preset("dapple-a")
    free = hpgo.plan(profile, cluster, global_batch_size=64)
    plan = hpgo.plan(profile, cluster, global_batch_size=64, framework="megatron")
    text = " ".join(str(plan).split())
    assert (
        "proven optimal for 1F1B among plans that Megatron-LM 0.16 runs: no plan of the search space has a shorter"
        in text
    )
    assert "cuts between 48 blocks `encoder-…`, the same number of replicas for each stage, with equal samples" in text
    cost = f"{100 * (plan.step_s / free.step_s - 1):.0f} %"
    assert (
        f"Megatron-LM 0.16; its limits make the step {cost} longer than the best plan without them; the best one found"
        in text
    )
    assert plan.schedule == "1f1b"


def test_a_plan_that_nobody_but_a_launcher_of_ones_own_runs_is_told_from_one_that_somebody_does() -> None:
    profile, cluster = hpgo.read_profile("bert-48"), hpgo.Cluster.preset("dapple-b")
    free = hpgo.plan(profile, cluster, global_batch_size=64)
    plan = hpgo.plan(profile, cluster, global_batch_size=64, framework="megatron")
    assert len({stage.replicas for stage in free.stages}) > 1
    assert len({stage.replicas for stage in plan.stages}) == 1
    assert plan.restriction is not None
    minimum, maximum = plan.restriction.costs(plan.step_s) or (0.0, 0.0)
    assert free.lower_bound_s is not None
    assert minimum == pytest.approx(plan.step_s / free.step_s - 1)
    assert maximum == pytest.approx(plan.step_s / free.lower_bound_s - 1)
    assert f"make the step at most {100 * maximum:.0f} % longer" in " ".join(str(plan).split())


def test_what_a_launcher_lacks_is_refused_before_the_search() -> None:
    profile, cluster = hpgo.read_profile("bert-48"), hpgo.Cluster.preset("dapple-a")
    cases: list[tuple[dict[str, Any], str]] = [
        ({"framework": "megatron", "schedule": "gpipe"}, "Megatron-LM does not run schedule 'gpipe'"),
        ({"framework": "torch", "schedule": "pipedream"}, "PyTorch does not run schedule 'pipedream'"),
        ({"framework": "megatron@0.1"}, "Megatron-LM `0.1` is not a supported version"),
        ({"framework": "vllm"}, "vLLM trains nothing"),
        ({"framework": 3}, "framework is 3"),
    ]
    for options, why in cases:
        with pytest.raises(hpgo.errors.ArgumentError, match=why) as caught:
            hpgo.plan(profile, cluster, global_batch_size=64, **options)
        assert caught.value.hint
    with refused(hpgo.errors.ArgumentError, "invalid_argument", "block-2-1", "resnet-50", "block-3-…"):
        hpgo.plan(hpgo.read_profile("resnet-50"), cluster, global_batch_size=256, framework="torchtitan")


def test_auto_compares_only_the_schedules_of_the_framework() -> None:
    profile, cluster = hpgo.read_profile("bert-48"), hpgo.Cluster.preset("dapple-c").first(4)
    plan = hpgo.plan(profile, cluster, global_batch_size=64, framework="megatron", schedule="auto")
    assert {choice.name for choice in plan.schedules} == {"1f1b", "interleaved"}
    assert plan.step_s == min(choice.step_s for choice in plan.schedules if choice.step_s is not None)
    assert len({stage.replicas for stage in plan.stages}) == 1


def test_a_schedule_whose_plans_were_not_all_tried_is_not_compared() -> None:
    profile, cluster = hpgo.read_profile("bert-48"), hpgo.Cluster.preset("dapple-c").first(4)
    plan = hpgo.plan(profile, cluster, global_batch_size=64, framework="torch", schedule="zb_h1")
    assert plan.schedule == "zb_h1"
    assert plan.lower_bound_s is not None
    assert plan.lower_bound_s <= plan.step_s
    why = "not compared with plans for any framework: not all plans of its schedule were tried"
    assert why in " ".join(str(plan).split())
    assert len({stage.replicas for stage in plan.stages}) == 1


def test_a_deadline_leaves_out_the_comparison_rather_than_the_plan() -> None:
    profile, cluster = hpgo.read_profile("bert-48"), hpgo.Cluster.preset("dapple-a")
    plan = hpgo.plan(profile, cluster, global_batch_size=64, framework="megatron", time_limit_s=0.05)
    assert plan.restriction is not None
    if plan.restriction.costs(plan.step_s) is None:
        assert "not compared with plans for any framework" in " ".join(str(plan).split())


@pytest.mark.parametrize("name", ["vllm", "sglang"])
def test_inference_is_cut_between_blocks_with_one_a_stage_at_least(name: str) -> None:
    nodes = tuple(Node(Device(f"d{at}", 16e9, 1.0 + at), 1, f"host{at}") for at in range(3))
    dapple = hpgo.Cluster.preset("dapple-a")
    cluster = hpgo.Cluster("mixed", nodes, dapple.intra, dapple.inter)
    profile = hpgo.read_profile("bert-48")
    plan = hpgo.partition(profile, cluster, framework=name)
    free = hpgo.partition(profile, cluster)
    assert (plan.framework, sum(plan.blocks), len(plan.blocks)) == (name, 48, len(plan.stages))
    assert min(plan.blocks) >= 1
    assert plan.interval_s >= free.lower_bound / ROUNDING
    assert plan.optimality_gap == 0
    assert any(",".join(map(str, plan.blocks)) in text for text in export.files(plan, name).values())
    with refused(hpgo.errors.ArgumentError, "unknown_name"):
        hpgo.partition(profile, cluster, framework="megatron")


def test_what_is_exported_of_a_model_of_seventy_billion_weights_is_what_its_plan_says(tmp_path: Path) -> None:
    block = ((0.018,), (0.036,), (67e6,), 1.71e9, (1.14e9,))
    names = ["embed", *(f"layers.{at}" for at in range(80)), "head"]
    costs = {
        "embed": ((1e-4,), (2e-4,), (67e6,), 2.1e9, (0.1e9,)),
        "head": ((0.022,), (0.043,), (4.0,), 2.1e9, (2.1e9,)),
    }
    layers = tuple(hpgo.Layer(name, name, *costs.get(name, block)) for name in names)
    profile = hpgo.Profile("own", (1,), layers, tuple(pairwise(names)))
    hpgo.write_profile(profile, tmp_path / "own.yaml")
    question = ["own.yaml", "-c", "h100:16", "-b", "512", "--recompute", "yes", "--shard-optimizer"]
    memory = ["--gradients-per-weight", "2", "--optimizer-per-weight", "6"]
    for words in (["plan", *question, *memory, "--framework", "megatron", "-o", "plan.json"],
                  ["export", "plan.json", "--to", "megatron", "-o", "arguments.txt"]):  # fmt: skip
        subprocess.run(
            [sys.executable, "-m", "hpgo", *words], cwd=tmp_path, check=True, timeout=120, capture_output=True
        )
    plan = hpgo.Plan.read(tmp_path / "plan.json")
    lines = (tmp_path / "arguments.txt").read_text(encoding="utf-8").splitlines()
    arguments = shlex.split(" ".join(line for line in lines if not line.startswith("#")))
    value_of = dict(pairwise(arguments))
    assert plan.devices == 128
    assert plan.optimality_gap is not None
    assert plan.optimality_gap < 0.01
    layout = hpgo.PipelineLayout.from_text(value_of["--pipeline-model-parallel-layout"])
    assert [stage.count("t") for stage in layout.stages] == [
        sum(layer.startswith("layers.") for layer in stage.layers) for stage in plan.stages
    ]
    assert value_of["--num-layers"] == "80"
    assert int(value_of["--pipeline-model-parallel-size"]) == len(plan.stages)
    assert int(value_of["--global-batch-size"]) == plan.global_batch_size == 512
    assert int(value_of["--micro-batch-size"]) * plan.stages[0].replicas == plan.pipeline_micro_batch_size
    assert "--recompute-granularity" in arguments
    assert any(f"predicted step {plan.step_s:.4g} s" in line for line in lines if line.startswith("#"))
