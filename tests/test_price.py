"""`hpgo llm estimate`: published recipes, the report, JSON, and profiles of groups of GPUs."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

import hpgo
from hpgo.cli.main import group

LLAMA_70B = ["llm", "estimate", "llama-3-70b", "--cluster", "h100:8", "-b", "128", "--seq-length", "8192"]
RECIPE = [*LLAMA_70B, "--tp", "8", "--pp", "4", "--vpp", "5"]


def asked(*words: object, code: int = 0):
    done = CliRunner().invoke(group, [str(word) for word in words])
    assert done.exit_code == code, done.output
    return done


def test_the_report_says_gpus_degrees_and_where_time_and_memory_go() -> None:
    done = asked(*RECIPE)
    lines = done.stdout.splitlines()
    assert lines[:2] == ["llama-3-70b on h100:8 (64 GPUs), 8192 tokens per sequence, global batch 128", ""]
    assert lines[2:4] == ["Configuration:", "  tp 8 + sp, pp 4, vpp 5, dp 2, zero 1"]
    assert lines[4].startswith("  micro-batch 1 (64 micro-batches per replica)")
    assert max(map(len, lines)) <= 80
    words = done.stdout.split()
    assert {"linear", "attention", "TP", "bubble", "optimizer", "weights", "activations"} <= set(words)
    assert done.stderr == ""


def test_a_way_with_less_room_than_memory_is_off_says_how_to_leave_more() -> None:
    question = ("llm", "plan", "llama-3-8b", "--cluster", "h100:1", "--global-batch-size", 16, "--seq-length", 15360)
    # The recommended configuration leaves that much, if another is equally fast; the fastest need not.
    assert "less is free" not in asked(*question).stdout
    full = " ".join(asked(*question, "--choose", "fastest").stdout.split())
    assert "727.1 MB free less is free than the error of the estimate: `hpgo llm plan --reserve-memory 5GB`" in full
    roomy = asked(*question, "--reserve-memory", "4GB").stdout
    assert "GB free" in roomy
    assert "less is free" not in roomy


def test_json_has_what_the_library_gives() -> None:
    found = json.loads(asked(*RECIPE, "--json").stdout)
    one = hpgo.estimate_llm(
        "llama-3-70b", hpgo.Cluster.preset("h100:8"), global_batch_size=128, seq_length=8192, tp=8, pp=4, vpp=5
    )
    assert found["step_s"] == one.step_s
    assert found["parallelism"]["dp"] == 2
    assert found["gpus"] == 64
    assert found["stages"][0]["memory_bytes"] == dict(one.stages[0].memory_bytes)
    assert found["utilization"] == one.utilization


def test_a_way_that_does_not_fit_says_by_how_much_and_is_priced() -> None:
    done = asked(*LLAMA_70B, "--tp", "2")
    assert "does not fit, over by" in done.stdout
    assert "it does not fit" in done.stderr
    one = hpgo.estimate_llm("llama-3-70b", hpgo.Cluster.preset("h100:8"), global_batch_size=128, seq_length=8192, tp=2)
    assert not one.fits
    peak = max(stage.peak_bytes for stage in one.stages)
    assert one.shortfall_bytes == pytest.approx(peak - 80e9)


def test_devices_are_the_first_of_the_cluster() -> None:
    found = json.loads(asked(*LLAMA_70B, "--tp", 8, "--devices", 16, "--json").stdout)
    assert (found["gpus"], found["parallelism"]["dp"]) == (16, 2)


def test_errors_name_the_degree_and_go_to_stderr(run) -> None:
    done = run(*LLAMA_70B, "--tp", 3, code=1)
    assert done.stdout == ""
    assert done.stderr.startswith("error: tp is 3, but it must divide the 64 attention heads")
    assert "hint: use `--tp 2` or `--tp 4`" in done.stderr
    done = run(*LLAMA_70B, "--micro-batch-size", 3, "--tp", 8, "--pp", 8, code=1)
    assert "--global-batch-size is 128, but it must be a multiple" in done.stderr
    run(*LLAMA_70B, "--zero-stage", 4, code=2)
    assert "did you mean `llama-3-70b`?" in run("llm", "estimate", "llama-3-70", *LLAMA_70B[3:], code=1).stderr


def test_slower_nics_are_an_option() -> None:
    fast, slow = (
        json.loads(asked(*LLAMA_70B, "--tp", 8, "--pp", 2, "--nic", rate, "--json").stdout)["step_s"]
        for rate in (400, 25)
    )
    assert slow > fast


def test_layers_of_groups_are_a_profile_that_is_planned(tmp_path) -> None:
    path = tmp_path / "groups.yaml"
    asked(
        "llm", "estimate", "llama-3-8b", "-c", "h100:1", "-b", "16", "--seq-length", "4096", "--tp", "2", "--pp", "4",
        "-o", path,
    )  # fmt: skip
    profile = hpgo.read_profile(path)
    assert profile.gpus_per_device == 2
    assert [layer.id for layer in profile.layers][:2] == ["embedding", "layers.0"]
    groups = hpgo.Cluster.of(
        nodes=1, devices_per_node=4, intra_gbit_s=3600, memory="80 GB", gpus_per_device=2, name="groups"
    )
    plan = hpgo.plan(profile, groups, global_batch_size=16, memory=hpgo.MemoryModel.preset("adam-bf16"))
    assert plan.step_s > 0
    assert any("not measured" in note for note in plan.notes)
