"""What a plan says about the numbers behind its price: where they were measured, and what the optimizer keeps."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from click.testing import CliRunner
from refusals import refused

import hpgo
from hpgo.cli.main import group
from hpgo.model.builtin import MODELS, measured_on
from hpgo.programs.optimizers import OPTIMIZERS
from hpgo.show.report import markdown, table


def on(cluster: hpgo.Cluster | str, *, profile: str = "bert-48", batch: int = 64, **options) -> hpgo.Plan:
    where = hpgo.Cluster.preset(cluster) if isinstance(cluster, str) else cluster
    return hpgo.plan(hpgo.read_profile(profile), where, global_batch_size=batch, **options)


def sped_up(preset: str, speed: float) -> hpgo.Cluster:
    cluster = hpgo.Cluster.preset(preset)
    nodes = tuple(replace(node, device=replace(node.device, speed=speed)) for node in cluster.nodes)
    return replace(cluster, nodes=nodes)


def test_a_built_in_profile_on_other_devices_says_so_unless_their_speed_is_given() -> None:
    assert on("dapple-a").notes == ()
    (note,) = on("h100").notes
    assert "`bert-48` was measured on V100s" in note
    assert "`H100-80GB`" in note
    assert "measure yours with `hpgo profile`" in note
    assert on(sped_up("h100", 6.0)).notes == ()
    nameless = hpgo.Cluster.of(nodes=2, devices_per_node=1, intra_gbit_s=100, inter_gbit_s=10)
    assert not any("measured on" in note for note in on(nameless).notes)


def test_a_profile_of_ones_own_is_taken_at_its_word() -> None:
    own = replace(hpgo.read_profile("vgg-19"), source="measured here")
    assert measured_on(own) is None
    assert hpgo.plan(own, hpgo.Cluster.preset("h100"), global_batch_size=256).notes == ()
    assert all(measured_on(hpgo.read_profile(name)) for name in MODELS)


@pytest.mark.parametrize(("batch", "far"), [(128, False), (129, True), (1000, True)])
def test_shares_beyond_four_times_the_largest_batch_are_noted(batch: int, far: bool) -> None:
    toy = hpgo.Profile.chain(
        "toy", batch_size=32, forward_s=[1e-3], backward_s=[2e-3], activation_bytes=[1e3], parameter_bytes=[1e3]
    )
    one = hpgo.Cluster.of(nodes=1, devices_per_node=1, intra_gbit_s=100, inter_gbit_s=10)
    notes = hpgo.plan(toy, one, global_batch_size=batch, pipeline_micro_batch_size=batch).notes
    assert len(notes) == far
    if far:
        assert f"{batch} samples at once" in notes[0]
        assert "was measured with at most 32" in notes[0]


def test_notes_stand_in_reports_and_files_and_survive_them() -> None:
    plan = on("h100", memory=hpgo.MemoryModel.preset("adam-bf16"))
    assert [note[:12] for note in plan.notes] == ["the built-in", "`adam-bf16` "]
    assert table(plan).count("\nNote ") == 2
    assert f"- **Note**: {plan.notes[0]}" in markdown(plan)
    assert json.loads(plan.to_json())["notes"] == list(plan.notes)
    for embed in (True, False):
        assert hpgo.Plan.from_json(plan.to_json(embed=embed)).notes == plan.notes
    assert plan.reevaluate().notes == plan.notes


def test_several_plans_note_a_thing_once_on_stderr() -> None:
    ran = CliRunner().invoke(group, ["plan", "bert-48", "-c", "h100", "-b", "64,128"])
    assert ran.stderr.count("note: the built-in `bert-48`") == 1
    assert "note" not in ran.stdout


def test_the_default_is_the_first_preset_and_every_preset_is_found_again() -> None:
    assert hpgo.MemoryModel() == hpgo.MemoryModel.preset(next(iter(OPTIMIZERS)))
    for name in OPTIMIZERS:
        assert hpgo.MemoryModel.preset(name).optimizer == name
    assert hpgo.MemoryModel(optimizer_per_weight=5.5).optimizer is None
    with refused(hpgo.errors.ArgumentError, "unknown_name", "adam-bf61") as caught:
        hpgo.MemoryModel.preset("adam-bf61")
    assert caught.value.hint == "did you mean `adam-bf16`?"


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_device_holds_the_bytes_that_the_preset_names(name: str) -> None:
    kept, parameters = OPTIMIZERS[name], 1e6
    toy = hpgo.Profile.chain(
        "toy", batch_size=1, forward_s=[1e-3], backward_s=[2e-3], activation_bytes=[0],
        parameter_bytes=[kept.weights * parameters],
    )  # fmt: skip
    one = hpgo.Cluster.of(nodes=1, devices_per_node=1, intra_gbit_s=100, inter_gbit_s=10)
    plan = hpgo.plan(toy, one, global_batch_size=4, memory=hpgo.MemoryModel.preset(name))
    memory = plan.stages[0].memory
    each = (memory.weights_bytes, memory.gradients_bytes, memory.optimizer_bytes)
    assert each == (kept.weights * parameters, kept.gradients * parameters, kept.state * parameters)
    report = " ".join(table(plan).split())
    assert f"Optimizer {name}: " in report
    assert f"({kept.bytes_text} per parameter)" in report


def test_the_command_line_takes_presets_and_single_numbers_win() -> None:
    ask = ["plan", "vgg-19", "-c", "dapple-c", "-b", "256", "--json", "--optimizer", "adam-bf16"]
    for words, each in (
        ([], (1, 6)),
        (["--optimizer-per-weight", "3"], (1, 3)),
        (["--gradients-per-weight", "0"], (0, 6)),
    ):
        memory = json.loads(CliRunner().invoke(group, [*ask, *words]).stdout)["assumptions"]["memory"]
        assert (memory["gradients_per_weight"], memory["optimizer_per_weight"]) == each
    helped = CliRunner().invoke(group, ["plan", "--help"], terminal_width=500).output
    for name, kept in OPTIMIZERS.items():
        assert f"{name} {kept.bytes_text}" in helped


@pytest.mark.parametrize(("profile", "cluster", "batch"), [("vgg-19", "dapple-c", 2048), ("bert-48", "dapple-a", 64)])
def test_pictures_show_the_bubble_of_the_report(profile: str, cluster: str, batch: int) -> None:
    plan = on(cluster, profile=profile, batch=batch)
    timeline = plan.timeline()
    assert timeline.measures.idle_over_total == pytest.approx(plan.bubble, rel=1e-12)
    devices_s = plan.devices * plan.step_s
    assert sum(timeline.measures.idle_by_cause_s) / devices_s == pytest.approx(plan.bubble, rel=1e-9)
    shown = f"{100 * plan.bubble:.1f} %"
    assert f"do not compute for {shown} of the step" in " ".join(table(plan).split())
    for ending in (".svg", ".txt", ".tex"):
        picture = hpgo.draw.render(timeline, ending).decode().replace("\\", "")
        assert f"bubble {shown}" in picture
        assert "share of devices" in picture
