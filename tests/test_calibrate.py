"""A measured step explains itself part by part, and what it corrects predicts it."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from click.testing import CliRunner
from refusals import refused

import hpgo
from hpgo.cli.main import group
from hpgo.planning.calibration import PARTS

if TYPE_CHECKING:
    from pathlib import Path

CASES = [("bert-48", "dapple-a", 64), ("gnmt-16", "dapple-b", 1024), ("vgg-19", "dapple-c", 2048)]


@pytest.fixture(scope="module", params=CASES, ids=lambda case: case[0])
def plan(request: pytest.FixtureRequest) -> hpgo.Plan:
    model, cluster, size = request.param
    return hpgo.plan(hpgo.read_profile(model), hpgo.Cluster.preset(cluster), global_batch_size=size)


def ran(plan: hpgo.Plan, **costs: object) -> hpgo.Timeline:
    """The step of `plan` where some of its costs are others."""
    program = plan.program()
    assert program.costs is not None
    return hpgo.simulate(program, costs=replace(program.costs, **costs))  # type: ignore[arg-type]


def test_a_step_as_predicted_leaves_nothing_to_explain(plan: hpgo.Plan) -> None:
    found = hpgo.calibrate(plan, plan.timeline())
    assert found.explained_s == pytest.approx((0, 0, 0, 0), abs=1e-9 * plan.step_s)
    assert found.corrected_step_s == pytest.approx(plan.step_s, rel=1e-9)
    for layer, was in zip(found.profile.layers, hpgo.read_profile(plan.profile).layers, strict=True):
        assert layer.forward_s == pytest.approx(was.forward_s)


def test_slower_stages_are_found_and_the_corrected_profile_predicts_them(plan: hpgo.Plan) -> None:
    scales = [1.5 + 0.25 * at for at in range(len(plan.stages))]
    slow = ran(
        plan,
        forward_s=tuple(scale * stage.forward_s for scale, stage in zip(scales, plan.stages, strict=True)),
        backward_s=tuple(scale * stage.backward_s for scale, stage in zip(scales, plan.stages, strict=True)),
    )
    found = hpgo.calibrate(plan, slow)
    assert found.largest == "computation"
    assert sum(found.explained_s) == pytest.approx(slow.makespan_s - plan.step_s)
    assert found.explained_s[0] == pytest.approx(slow.makespan_s - plan.step_s)
    for scale, stage in zip(scales, plan.stages, strict=True):
        before, after = (
            {layer.id: layer for layer in one.layers} for one in (hpgo.read_profile(plan.profile), found.profile)
        )
        for layer in stage.layers:
            assert after[layer].forward_s == pytest.approx([scale * one for one in before[layer].forward_s])
            assert after[layer].backward_s == pytest.approx([scale * one for one in before[layer].backward_s])
    # Sums of gradients overlap with other passes then, as far as those last: the price may differ by them.
    max_s = max(stage.grad_reduce_s for stage in plan.stages)
    assert found.corrected_step_s == pytest.approx(slow.makespan_s, abs=max_s)


def test_slower_links_and_sums_and_what_nothing_explains_are_told_apart() -> None:
    plan = hpgo.plan(hpgo.read_profile("bert-48"), hpgo.Cluster.preset("dapple-a"), global_batch_size=64)
    edge = plan.stages[0]
    slow = ran(plan, transfer_s=10 * edge.transfer_busy_s, latency_s=10 * (edge.transfer_s - edge.transfer_busy_s))
    found = hpgo.calibrate(plan, slow)
    assert found.largest == "transfers"
    assert found.explained_s[1] == pytest.approx(slow.makespan_s - plan.step_s)
    was = hpgo.Cluster.preset("dapple-a")
    assert found.cluster.inter.bytes_per_s == pytest.approx(was.inter.bytes_per_s / 10)
    assert found.cluster.intra == was.intra
    links = replace(was.intra, collective_bytes_per_s=was.intra.collective_bytes_per_s / 30)
    slower = replace(plan, assumptions=replace(plan.assumed, cluster=replace(was, intra=links))).reevaluate()
    summed = hpgo.calibrate(plan, slower.timeline())
    assert summed.largest == "synchronisation"
    assert summed.cluster.intra.collective_bytes_per_s == pytest.approx(links.collective_bytes_per_s, rel=1e-3)
    assert summed.corrected_step_s == pytest.approx(slower.step_s, rel=1e-4)
    assert found.corrected_step_s == pytest.approx(slow.makespan_s, rel=1e-4)
    waits = hpgo.calibrate(plan, ran(plan, optimizer_s=3.0))
    assert waits.largest == "the rest"
    assert waits.explained_s[3] == pytest.approx(3.0)


def test_the_command_writes_what_the_next_plan_reads(tmp_path: Path) -> None:
    profile, cluster = hpgo.read_profile("bert-48"), hpgo.Cluster.preset("dapple-a")
    plan = hpgo.plan(profile, cluster, global_batch_size=64)
    slow = ran(plan, forward_s=tuple(2 * stage.forward_s for stage in plan.stages))
    plan.save(tmp_path / "plan.json")
    slow.save(tmp_path / "measured.npz")
    files = [str(tmp_path / name) for name in ("plan.json", "measured.npz")]
    written = ["-o", str(tmp_path / "profile.yaml"), "--cluster-output", str(tmp_path / "cluster.yaml")]
    done = CliRunner().invoke(group, ["calibrate", *files, *written])
    assert done.exit_code == 0, done.output
    assert "Largest cause: computation" in done.output
    assert "stage 0 forward" in done.output
    again = hpgo.read_profile(tmp_path / "profile.yaml")
    assert again.layers[0].forward_s[0] == pytest.approx(2 * profile.layers[0].forward_s[0])
    assert hpgo.Cluster.read(tmp_path / "cluster.yaml").devices == cluster.devices
    told = json.loads(CliRunner().invoke(group, ["calibrate", *files, "--json"]).output)
    assert list(told["explained_s"]) == list(PARTS)
    assert sum(told["explained_s"].values()) == pytest.approx(told["step_s"]["measured"] - told["step_s"]["predicted"])


def test_another_plans_timeline_and_a_plan_without_sources_are_refused() -> None:
    profile, cluster = hpgo.read_profile("bert-48"), hpgo.Cluster.preset("dapple-a")
    plan = hpgo.plan(profile, cluster, global_batch_size=64)
    other = hpgo.simulate(hpgo.schedule("1f1b", ranks=5, micro_batches=4))
    with refused(hpgo.errors.HpgoError, "invalid_argument", "5", "2"):
        hpgo.calibrate(plan, other)
    bare = hpgo.Plan.from_json(plan.to_json(embed=False))
    with refused(hpgo.errors.HpgoError, "mismatch"):
        hpgo.calibrate(bare, plan.timeline())
    assert hpgo.calibrate(bare, plan.timeline(), profile=profile, cluster=cluster).explained_s[0] == 0
