"""What nobody has measured is marked, and chosen only where nothing else is within the error."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from test_spaces import ASKED, TINY, all_that_is_run

import hpgo
from hpgo.cli.main import group
from hpgo.llm.canonical import canonical
from hpgo.llm.simplicity import preference
from hpgo.llm.validated_features import EVERYWHERE, VALIDATED, features_of

if TYPE_CHECKING:
    from pathlib import Path

A100, H100 = hpgo.Cluster.preset("a100:1"), hpgo.Cluster.preset("h100:1")
KNOWN = ("tp", "sp", "cp", "pp", "vpp", "schedule zb_v", "zero 2", "zero 3", "zero 2 with pp", "recompute full")


@given(known=st.sets(st.sampled_from(KNOWN)), top=st.sampled_from([1, 3]), error=st.sampled_from([0.02, 0.15, 0.6]))
@settings(max_examples=10)
def test_of_ways_within_the_error_the_best_relies_on_the_least_that_nobody_measured(
    known: set[str], top: int, error: float
) -> None:
    cluster = H100.first(2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(VALIDATED, "H100", tuple(known))
        patch.setattr("hpgo.llm.search.RELATIVE_ERROR", error)
        every = all_that_is_run("torchtitan", TINY, cluster)
        found = hpgo.plan_llm(TINY, cluster, **ASKED, framework="torchtitan", top=top, devices=2)
        for one in found.estimates:
            assert set(one.unvalidated_features) == set(features_of(canonical(one.parallelism, TINY))) - known
        least_s = min(one.step_s for one in every)
        assert found.fastest.step_s == pytest.approx(least_s)
        alike = [one for one in every if one.step_s <= least_s * (1 + error)]
        wanted = min(preference(one) for one in alike)
        assert preference(found.best)[:3] == wanted[:3]
        assert found.best.step_s == pytest.approx(wanted[3])
        assert len(found.estimates) <= top + 2
        assert found.plan().estimate == found.plan(1).estimate == found.best


def test_what_everything_relies_on_decides_nothing() -> None:
    """No published step on H100 computes in float16, so that all ways do what nobody measured; and yet not all else."""
    # Graphs save more than the error of estimates on such a small model, so they are left out.
    found = hpgo.plan_llm(TINY, H100.first(4), **ASKED, precision="fp16", exclude=["cuda_graph_impl"])
    assert "fp16" not in VALIDATED["H100"]
    assert found.best.unvalidated_features == ("fp16",)


def test_what_is_fixed_is_taken_and_marked() -> None:
    ask = {"global_batch_size": 8, "seq_length": 8192}
    free = hpgo.plan_llm("llama-3-8b", A100, **ask)
    assert free.best.unvalidated_features == ()
    assert any("cp" in one.unvalidated_features for one in free.alike)
    assert hpgo.plan_llm("llama-3-8b", A100, **ask, fix={"cp": 2}).best.unvalidated_features == ("cp",)


def test_devices_that_no_step_is_published_of_are_taken_for_all() -> None:
    ask = {"global_batch_size": 8, "seq_length": 8192, "tp": 2, "cp": 2}
    assert "H20" not in VALIDATED
    assert hpgo.estimate_llm("llama-3-8b", "h20:1", **ask).unvalidated_features == ()
    folded = hpgo.estimate_llm("llama-3-8b", "h20:1", **ask, pp=2, vpp=2, pp_schedule="zb_v", zero_stage=2)
    assert folded.unvalidated_features == ("schedule zb_v",)
    assert "schedule zb_v" not in EVERYWHERE


def test_a_step_of_ones_own_counts(tmp_path: Path) -> None:
    ask = {"global_batch_size": 32, "seq_length": 8192, "tp": 2, "cp": 2}
    one = hpgo.estimate_llm("llama-3-8b", A100, **ask)
    assert one.unvalidated_features == ("cp",)
    fit = hpgo.fit_platform([hpgo.MeasuredStep.of("llama-3-8b", A100, one, 1.1 * one.step_s)])
    fit.platform.save(tmp_path / "platform.yaml")
    platform = hpgo.Platform.read(tmp_path / "platform.yaml")
    assert platform == fit.platform
    assert hpgo.estimate_llm("llama-3-8b", A100, **ask, platform=platform).unvalidated_features == ()


def said_of(*words: object) -> str:
    """What a command prints, its lines joined."""
    done = CliRunner().invoke(group, [str(word) for word in words])
    assert done.exit_code == 0, done.output
    return " ".join(done.stdout.split())


def test_reports_name_it() -> None:
    ask = ["llm", "estimate", "llama-3-8b", "-b", 8, "--seq-length", 8192]
    told = "No published step on this device type has validated cp: this part of the estimate was never"
    assert told in said_of(*ask, "-c", "a100:1", "--tp", 4, "--cp", 2)
    folded = ["--tp", 2, "--pp", 4, "--vpp", 2, "--zero-stage", 0, "--pp-schedule", "zb_v"]
    assert "No published step has validated schedule zb_v:" in said_of(*ask, "-c", "h100:1", *folded)
    assert "No published step" not in said_of(*ask, "-c", "h100:1", "--tp", 2)


def test_the_list_says_which_is_taken_and_explain_marks_what_is_next_to_it(tmp_path: Path) -> None:
    path = tmp_path / "llm-plan.json"
    words = ["llm", "plan", "llama-3-70b", "-c", "a100:8", "-b", 128, "--seq-length", 8192]
    words += ["--framework", "torchtitan", "--top", 2]
    said = said_of(*words, "-o", path)
    assert "?: No published step on this device type has validated cp" in said
    assert "Number 1 uses fewer of these features. To choose otherwise, use `--choose`" in said
    assert said.startswith("llama-3-70b on a100:8 (64 GPUs), 8192 tokens per sequence, global batch 128 Recommended")
    assert hpgo.LlmPlan.read(path).estimate.parallelism.named().rpartition(", ")[0] in said
    found = json.loads(said_of(*words, "--json"))
    assert (found["best"], found["fastest"]) == (1, len(found["estimates"]))
    best, fastest = (set(found["estimates"][found[one] - 1]["unvalidated_features"]) for one in ("best", "fastest"))
    assert len(best) < len(fastest)
    assert "cp" in fastest
    assert "has validated cp" in said_of("llm", "explain", path, "--compare-with", "cp=2,tp=4")
    said_of(*words, "--fix", "pp=4", "-o", path)
    against = ["llm", "explain", path, "--compare-with", "cp=2,tp=4"]
    assert json.loads(said_of(*against, "--json"))["unvalidated_features"] == ["cp", "zero 2 with pp"]
    said_of("llm", "plan", "llama-3-8b", "-c", "a100:1", "-b", 8, "--seq-length", 8192, "-o", path)
    assert "fits; cp not validated" in said_of("llm", "explain", path)
