"""Plans whose replicas shard gradients and weights (ZeRO stages 2 and 3)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import jsonschema
import pytest
from click.testing import CliRunner

import hpgo
from hpgo import export
from hpgo.cli.main import group

if TYPE_CHECKING:
    from hpgo.planning.problem import ZeroStage

ROOT = Path(__file__).parent.parent
GB = 1e9


@pytest.fixture
def profile() -> hpgo.Profile:
    """Four layers with 1, 2, 1 and 4 GB of weights."""
    return hpgo.Profile.chain(
        "toy", batch_size=1, forward_s=[1] * 4, backward_s=[2] * 4, activation_bytes=[1e6] * 4,
        parameter_bytes=[1 * GB, 2 * GB, 1 * GB, 4 * GB],
    )  # fmt: skip


@pytest.fixture
def even() -> hpgo.Profile:
    """Eight layers with 1 GB of weights each."""
    return hpgo.Profile.chain(
        "even", batch_size=1, forward_s=[1] * 8, backward_s=[2] * 8, activation_bytes=[1e6] * 8,
        parameter_bytes=[1 * GB] * 8,
    )  # fmt: skip


@pytest.fixture
def cluster() -> hpgo.Cluster:
    """Two devices, whose all-reduce of 10⁹ bytes takes a second."""
    return hpgo.Cluster.of(nodes=1, devices_per_node=2, intra_gbit_s=8, memory="64 GB")


def on_both(profile: hpgo.Profile, cluster: hpgo.Cluster, zero_stage: ZeroStage, **options: bool) -> hpgo.Plan:
    memory = hpgo.MemoryModel(zero_stage=zero_stage)
    stages = [(len(profile.layers), [0, 1])]
    sizes = {"global_batch_size": 8, "pipeline_micro_batch_size": 2}
    return hpgo.evaluate(profile, cluster, stages, **sizes, memory=memory, **options)


def test_each_stage_shards_more_and_sends_more(profile: hpgo.Profile, cluster: hpgo.Cluster) -> None:
    plans = [on_both(profile, cluster, zero_stage, overlap=False).stages[0] for zero_stage in range(4)]
    held = [(each.memory.weights_bytes, each.memory.gradients_bytes, each.memory.optimizer_bytes) for each in plans]
    assert held == [
        (8 * GB, 8 * GB, 16 * GB),
        (8 * GB, 8 * GB, 8 * GB),
        (8 * GB, 8 * GB, 8 * GB),
        (8 * GB, 8 * GB, 8 * GB),
    ]
    # The all-reduce of 8 GB takes 8 s, so a reduce-scatter or an all-gather takes 4 s.
    waits = [(each.exposed_forward_comm_s, each.exposed_backward_comm_s) for each in plans]
    assert waits == [(0, 0), (0, 0), (0, 4), (4, 8)]


def test_two_layers_are_whole(even: hpgo.Profile, cluster: hpgo.Cluster) -> None:
    (stage,) = on_both(even, cluster, 3).stages
    assert (stage.memory.weights_bytes, stage.memory.gradients_bytes) == (5 * GB, 5 * GB)
    assert stage.memory.optimizer_bytes == 8 * GB


def test_messages_pass_beside_computation_with_overlap(profile: hpgo.Profile, cluster: hpgo.Cluster) -> None:
    slow = hpgo.Cluster.of(nodes=1, devices_per_node=2, intra_gbit_s=4, memory="64 GB")
    stage = on_both(profile, cluster, 3).stages[0]
    # 4 s beside 4 s of forward, and 8 s beside 8 s of backward.
    assert (stage.exposed_forward_comm_s, stage.exposed_backward_comm_s) == (0, 0)
    plan = on_both(profile, slow, 3)
    (stage,) = plan.stages
    assert (stage.exposed_forward_comm_s, stage.exposed_backward_comm_s) == (4, 8)
    assert stage.occupied_s == (8, 16)
    assert plan.step_s == pytest.approx(4 * 24 + stage.exposed_grad_reduce_s)
    # The repeated forward gathers the weights once more: 3 messages of 8 s beside 12 s.
    again = on_both(profile, slow, 3, recompute=True).stages[0]
    assert again.exposed_backward_comm_s == 12


def test_sharding_the_optimizer_is_stage_1(profile: hpgo.Profile, cluster: hpgo.Cluster) -> None:
    assert hpgo.MemoryModel(shard_optimizer=True) == hpgo.MemoryModel(zero_stage=1)
    assert hpgo.MemoryModel(zero_stage=3).shard_optimizer
    assert on_both(profile, cluster, 1).program().zero_stage == 1


def test_files_and_timelines_have_the_same_step(profile: hpgo.Profile, cluster: hpgo.Cluster) -> None:
    plan = on_both(profile, cluster, 3, overlap=False)
    text = plan.to_json()
    jsonschema.validate(json.loads(text), json.loads((ROOT / "docs/plan.schema.json").read_text(encoding="utf-8")))
    assert hpgo.Plan.from_json(text) == plan
    assert plan.reevaluate().step_s == plan.step_s
    assert plan.timeline().makespan_s == pytest.approx(plan.step_s, rel=1e-12)
    program = plan.program()
    text = program.to_json()
    jsonschema.validate(json.loads(text), json.loads((ROOT / "docs/program.schema.json").read_text(encoding="utf-8")))
    assert hpgo.Program.from_json(text) == program
    assert program.zero_stage == 3


def test_a_plan_fits_at_the_stage_that_shards_enough(even: hpgo.Profile) -> None:
    small = hpgo.Cluster.of(nodes=1, devices_per_node=2, intra_gbit_s=80, memory="19 GB")
    # 8 GB of weights need 32, 24, 21 and 18 GB on each device.
    assert [on_both(even, small, zero_stage).fits for zero_stage in range(4)] == [False, False, False, True]


def test_auto_takes_the_lowest_stage_that_fits(even: hpgo.Profile) -> None:
    # As above, 8 GB of weights need 24, 21 and 18 GB at stages 1, 2 and 3.
    for memory, zero_stage in (("25 GB", 1), ("22 GB", 2), ("19 GB", 3), ("9 GB", 3)):
        small = hpgo.Cluster.of(nodes=1, devices_per_node=2, intra_gbit_s=80, memory=memory)
        plan = on_both(even, small, "auto")
        fixed = on_both(even, small, zero_stage)
        assert plan.stages == fixed.stages
        assert plan.step_s == fixed.step_s
        assert [stage.zero_stage for stage in plan.stages] == [zero_stage]
        assert hpgo.Plan.from_json(plan.to_json()).reevaluate().stages == plan.stages


def test_auto_is_never_worse_than_one_stage_for_all() -> None:
    """BERT-48 on devices that hold two thirds of what data parallelism without sharding needs."""
    cluster = hpgo.Cluster.of(nodes=2, devices_per_node=4, intra_gbit_s=600, inter_gbit_s=100, memory="5 GB")
    steps = {}
    for zero_stage in (1, 2, 3, "auto"):
        memory = hpgo.MemoryModel(zero_stage=zero_stage)
        try:
            plan = hpgo.plan("bert-48", cluster, global_batch_size=64, schedule="1f1b", memory=memory)
        except hpgo.errors.InfeasibleError:
            continue
        assert plan.lower_bound_s is not None
        steps[zero_stage] = (plan.lower_bound_s, plan.step_s)
    assert steps["auto"][0] <= min(step_s for _, step_s in steps.values())


@pytest.mark.parametrize("zero_stage", ["most", 4, -1, True, None, 1.5])
def test_files_with_other_stages_are_refused(profile: hpgo.Profile, cluster: hpgo.Cluster, zero_stage: object) -> None:
    document = json.loads(on_both(profile, cluster, 3).to_json())
    document["assumptions"]["memory"]["zero_stage"] = zero_stage
    with pytest.raises(hpgo.errors.ArgumentError, match="zero_stage"):
        hpgo.Plan.from_json(json.dumps(document))


@pytest.mark.parametrize("schedule", ["zb_h1", "interleaved", "auto"])
def test_other_schedules_are_refused(profile: hpgo.Profile, cluster: hpgo.Cluster, schedule: str) -> None:
    memory = hpgo.MemoryModel(zero_stage=2)
    words = f"the schedule is `{schedule}`, but only plans under 1f1b, eager_1f1b, gpipe have ZeRO stage 2"
    with pytest.raises(hpgo.errors.ArgumentError, match=words):
        hpgo.plan(profile, cluster, global_batch_size=6, schedule=schedule, memory=memory)


@pytest.mark.parametrize("zero_stage", [-1, 4, 1.5, "2"])
def test_other_stages_are_refused(profile: hpgo.Profile, cluster: hpgo.Cluster, zero_stage: int) -> None:
    memory = hpgo.MemoryModel(zero_stage=zero_stage)
    with pytest.raises(hpgo.errors.ArgumentError, match="zero_stage"):
        hpgo.plan(profile, cluster, global_batch_size=6, memory=memory)


def test_frameworks_and_exports_refuse_stages_2_and_3(profile: hpgo.Profile, cluster: hpgo.Cluster) -> None:
    with pytest.raises(hpgo.errors.ArgumentError, match="zero_stage is 2"):
        hpgo.plan(
            "bert-48", "dapple-a", global_batch_size=64, framework="megatron", memory=hpgo.MemoryModel(zero_stage=2)
        )
    with pytest.raises(hpgo.errors.ArgumentError, match="ZeRO stage 3"):
        export.files(on_both(profile, cluster, 3), "torch")


def test_runs_refuse_stages_2_and_3(profile: hpgo.Profile, cluster: hpgo.Cluster) -> None:
    pytest.importorskip("torch")
    from hpgo.runtime.runnable import check_program

    check_program(on_both(profile, cluster, 1).program())
    with pytest.raises(hpgo.errors.ArgumentError, match="the plan has ZeRO stage 2"):
        check_program(on_both(profile, cluster, 2).program())


def test_the_command_has_the_option(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    words = ["plan", "bert-48", "-c", "dapple-b", "-b", "64", "--zero-stage", "2", "-o", str(path)]
    assert CliRunner().invoke(group, words).exit_code == 0
    assert hpgo.Plan.read(path).assumed.memory.zero_stage == 2
