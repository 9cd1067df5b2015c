"""Plans whose transfers occupy the devices of both stages."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest
from click.testing import CliRunner

import hpgo
from hpgo.cli.main import group

SCHEMA = Path(__file__).parent.parent / "docs/plan.schema.json"


@pytest.fixture
def profile() -> hpgo.Profile:
    return hpgo.Profile.chain(
        "toy", batch_size=1, forward_s=[1, 2, 1], backward_s=[2, 4, 2], activation_bytes=[1e9, 3e9, 1e9],
        parameter_bytes=[1e6] * 3,
    )  # fmt: skip


@pytest.fixture
def cluster() -> hpgo.Cluster:
    """Three devices whose links take a second for 10⁹ bytes."""
    return hpgo.Cluster.of(nodes=1, devices_per_node=3, intra_gbit_s=8, memory="64 GB")


STAGES = [(1, [0]), (1, [1]), (1, [2])]


def test_each_pass_takes_the_transfers_of_both_ends(profile: hpgo.Profile, cluster: hpgo.Cluster) -> None:
    plan = hpgo.evaluate(profile, cluster, STAGES, global_batch_size=1, overlap_p2p_comm=False)
    assert [stage.exposed_transfer_s for stage in plan.stages] == [1, 4, 3]
    assert [stage.occupied_s for stage in plan.stages] == [(2, 3), (6, 8), (4, 5)]
    # One micro-batch goes down and up, and both ends of each transfer take their time.
    assert plan.step_s == pytest.approx(2 + 6 + 4 + 5 + 8 + 3)
    many = hpgo.evaluate(profile, cluster, STAGES, global_batch_size=1_000, overlap_p2p_comm=False, schedule="1f1b")
    assert many.step_s == pytest.approx(1_000 * 14 + 2 + 3, rel=1e-3)


def test_latency_occupies_no_device(profile: hpgo.Profile) -> None:
    late = hpgo.Cluster.of(nodes=1, devices_per_node=3, intra_gbit_s=8, memory="64 GB", latency=1)
    plan = hpgo.evaluate(profile, late, STAGES, global_batch_size=1, overlap_p2p_comm=False)
    assert [stage.exposed_transfer_s for stage in plan.stages] == [1, 4, 3]
    assert plan.step_s == pytest.approx(2 + 6 + 4 + 5 + 8 + 3 + 4)


def test_files_and_timelines_have_the_same_step(profile: hpgo.Profile, cluster: hpgo.Cluster) -> None:
    plan = hpgo.plan(profile, cluster, global_batch_size=6, overlap_p2p_comm=False, recompute="auto")
    text = plan.to_json()
    jsonschema.validate(json.loads(text), json.loads(SCHEMA.read_text(encoding="utf-8")))
    read = hpgo.Plan.from_json(text)
    assert read == plan
    assert read.reevaluate().step_s == plan.step_s
    assert plan.timeline().makespan_s == pytest.approx(plan.step_s, rel=1e-12)
    assert not read.assumed.overlap_p2p_comm


def test_older_files_have_transfers_that_overlap(profile: hpgo.Profile, cluster: hpgo.Cluster) -> None:
    plan = hpgo.plan(profile, cluster, global_batch_size=6)
    document = json.loads(plan.to_json())

    def without(value: object) -> object:
        if isinstance(value, list):
            return [without(item) for item in value]
        if not isinstance(value, dict):
            return value
        new = {"exposed_transfer_s", "overlap_p2p_comm"}
        return {key: without(item) for key, item in value.items() if key not in new}

    assert hpgo.Plan.from_json(json.dumps(without(document))) == plan


def test_no_stages_are_faster_without_overlap() -> None:
    plan = hpgo.plan("vgg-19", "dapple-b", global_batch_size=512)
    exposed = hpgo.plan("vgg-19", "dapple-b", global_batch_size=512, overlap_p2p_comm=False)
    stages = [(stage.layers, stage.devices) for stage in exposed.stages]
    assert plan.lower_bound_s is not None
    assert exposed.lower_bound_s is not None
    assert plan.lower_bound_s <= exposed.step_s
    assert exposed.lower_bound_s <= exposed.step_s
    size = exposed.pipeline_micro_batch_size
    again = hpgo.evaluate("vgg-19", "dapple-b", stages, global_batch_size=512, pipeline_micro_batch_size=size)
    assert again.step_s <= exposed.step_s * (1 + 1e-12)


@pytest.mark.parametrize("schedule", ["zb_h1", "interleaved", "auto"])
def test_other_schedules_are_refused(profile: hpgo.Profile, cluster: hpgo.Cluster, schedule: str) -> None:
    words = f"the schedule is `{schedule}`, but only plans under 1f1b, eager_1f1b, gpipe have transfers without overlap"
    with pytest.raises(hpgo.errors.ArgumentError, match=words) as caught:
        hpgo.plan(profile, cluster, global_batch_size=6, schedule=schedule, overlap_p2p_comm=False)
    assert "eager_1f1b" in str(caught.value.hint)


def test_the_command_has_the_option(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    words = ["plan", "bert-48", "-c", "dapple-b", "-b", "64", "--no-overlap-p2p-comm", "-o", str(path)]
    assert CliRunner().invoke(group, words).exit_code == 0
    plan = hpgo.Plan.read(path)
    assert not plan.assumed.overlap_p2p_comm
    assert len(plan.stages) == 1 or all(stage.exposed_transfer_s for stage in plan.stages)
