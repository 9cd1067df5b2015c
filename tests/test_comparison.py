"""`hpgo.compare` and `hpgo llm explain`: why this way and not another, term by term."""

from __future__ import annotations

import json
import re
from itertools import combinations
from typing import TYPE_CHECKING

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

import hpgo
from hpgo.cli.main import group
from hpgo.llm.comparison import NAMES, changed, differences, neighbours, read_changes
from hpgo.llm.estimate import estimate_config

if TYPE_CHECKING:
    from pathlib import Path

CLUSTER = hpgo.Cluster.preset("h100:2")
MODEL = hpgo.Transformer(
    name="small", layers=16, hidden=2048, heads=16, kv_heads=8, head_dim=128, ffn=8192, vocab=64000
)
ASKED = {"global_batch_size": 32, "seq_length": 4096}
ways = st.fixed_dictionaries(
    {
        "tp": st.sampled_from([1, 2, 4, 8]), "cp": st.sampled_from([1, 2]), "pp": st.sampled_from([1, 2, 4, 8]),
        "vpp": st.sampled_from([1, 2, 4]), "micro_batch_size": st.sampled_from([1, 2]),
        "zero_stage": st.integers(0, 3), "recompute": st.sampled_from(["none", "full"]),
        "overlap_dp_comm": st.booleans(),
        "ends": st.sampled_from([{}, {}, {"first_rank_layers": 2}, {"first_rank_layers": 1, "last_rank_layers": 1}]),
        "layers": st.sampled_from([None, None, 1]),
    }
)  # fmt: skip


def priced(*, ends=None, layers=None, **config) -> hpgo.LlmEstimate | None:
    if config.get("pp", 1) > 1:
        config |= ends or {}
    if config.get("recompute") == "full":
        config["recompute_num_layers"] = layers
    try:
        return hpgo.estimate_llm(MODEL, CLUSTER, **ASKED, **config)
    except hpgo.errors.ArgumentError:
        return None


@given(here=ways, there=ways)
@settings(max_examples=60)
def test_differences_of_terms_add_up_to_that_of_the_steps_and_of_the_fullest_gpus(here, there) -> None:
    one, two = priced(**here), priced(**there)
    if one is None or two is None:
        return
    found = hpgo.compare(one, two)
    assert sum(there - here for _, here, there in found.time_by_term_s) == pytest.approx(
        found.longer_s, abs=1e-9 * one.step_s
    )
    for place, price in ((1, one), (2, two)):
        assert sum(row[place] for row in found.time_by_term_s) == pytest.approx(price.step_s, rel=1e-9)
        assert sum(row[place] for row in found.memory_bytes) == pytest.approx(price.fullest.peak_bytes)
    assert hpgo.compare(two, one).longer_s == -found.longer_s
    assert found.apart == hpgo.compare(two, one).apart


@given(here=ways, there=ways)
@settings(max_examples=60)
def test_what_differs_makes_one_way_of_the_other(here, there) -> None:
    one, two = priced(**here), priced(**there)
    if one is None or two is None:
        return
    said = differences(one.parallelism, two.parallelism)
    changes = {
        name: getattr(two.parallelism, name)
        for name in NAMES
        if getattr(one.parallelism, name) != getattr(two.parallelism, name)
    }
    if {"pp", "vpp"} & set(changes):  # whose ranks have layers of their own
        changes |= {end: getattr(two.parallelism, end) for end in ("first_rank_layers", "last_rank_layers")}
    config = changed(one.parallelism, changes)
    assert estimate_config(MODEL, CLUSTER, config, **ASKED).parallelism == two.parallelism
    assert bool(said) == (one.parallelism != two.parallelism)
    for name in set(changes) & {"tp", "cp", "pp", "vpp", "zero_stage"}:
        assert f"{name} {changes[name]}" in said.split(", ")


def test_other_pipelines_are_even_unless_layers_are_asked_for() -> None:
    config = priced(pp=4, ends={"first_rank_layers": 2, "last_rank_layers": 2}).parallelism
    assert changed(config, {"tp": 2}).last_rank_layers == 2
    assert changed(config, {"pp": 8}) == priced(pp=8).parallelism.__class__(
        pp=8, dp=config.dp, zero_stage=config.zero_stage
    )
    assert differences(config, changed(config, {"last_rank_layers": None})) == "even last rank"
    assert changed(config, read_changes("pp=2,first-rank-layers=7")).named_pipeline() == "pp 2 (first rank: 7 layers)"


def test_each_neighbour_is_another_way_or_none() -> None:
    config = priced(tp=2, pp=4, vpp=2, micro_batch_size=2).parallelism
    found = list(neighbours(config))
    assert {"tp": 1} in found
    assert {"pp": 8} in found
    assert {"zero_stage": 0} in found
    assert {"recompute": "full"} in found
    for one, two in combinations(found, 2):
        assert one != two


def test_prices_of_other_questions_are_not_compared() -> None:
    one = priced(tp=2)
    with pytest.raises(hpgo.errors.ArgumentError, match="global_batch_size is 32 in one estimate and 16 in the other"):
        hpgo.compare(one, hpgo.estimate_llm(MODEL, CLUSTER, global_batch_size=16, seq_length=4096))
    with pytest.raises(hpgo.errors.ArgumentError, match="an estimate is `x`"):
        hpgo.compare(one, "x")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("tp", "is no NAME=VALUE"), ("tp=", "is no NAME=VALUE"), ("tpp=2", "did you mean `tp`"), ("tp=1,tp=2", "twice"),
        ("tp=two", "tp is `two` give a whole number"), ("tp=0", "give a whole number from 1"), ("tp=-1", "tp is `-1`"),
        ("zero_stage=7", "zero_stage is 7"), ("recompute=ful", "did you mean `full`"), ("recompute=4", "selective_op"),
        ("precision=int8", "there is no precision `int8`"), ("pp_schedule=gpipe", "there is no pp_schedule `gpipe`"),
        ("flash_attention=maybe", "there is no value of flash_attention `maybe`"), ("sp=2", "known: yes"),
        ("recompute_modules=mpl", "did you mean `mlp`"), ("recompute_modules=mlp+", "there is no module ``"),
        ("first_rank_layers=some", "first_rank_layers is `some`"),
    ],
)  # fmt: skip
def test_changes_that_are_none_are_refused(text: str, says: str) -> None:
    with pytest.raises(hpgo.errors.ArgumentError) as found:
        read_changes(text)
    assert says in f"{found.value.message} {found.value.hint}"


def test_modules_and_numbers_that_are_left_out_can_be_changes() -> None:
    config = priced(pp=2).parallelism
    modules = changed(config, read_changes("recompute_modules=mlp+layernorm"))
    assert (modules.recompute, modules.recompute_modules) == ("selective", ("mlp", "layernorm"))
    assert differences(config, modules) == "recompute selective, recompute_modules mlp+layernorm"
    assert differences(modules, config) == "recompute none"
    assert changed(modules, read_changes("recompute=full")).recompute_modules == ()
    assert changed(modules, read_changes("recompute_modules=none")).recompute == "selective"
    some = changed(config, read_changes("recompute=full,recompute_every=2"))
    assert differences(some, changed(some, read_changes("recompute_every=none"))) == "recompute every layer"
    assert changed(some, {"recompute": "none"}).recompute_every is None


# --- The command


@pytest.fixture
def plan(tmp_path):
    path = tmp_path / "plan.json"
    words = ["llm", "plan", "llama-3-8b", "-c", "h100:2", "-b", "32", "--seq-length", "8192", "-o", str(path)]
    done = CliRunner().invoke(group, words)
    assert done.exit_code == 0, done.output
    return path


def test_the_report_says_what_is_next_to_a_plan(plan) -> None:
    picture = plan.with_suffix(".svg")
    done = CliRunner().invoke(group, ["llm", "explain", str(plan), "-o", str(picture)])
    assert done.exit_code == 0, done.output
    assert picture.read_text(encoding="utf-8").startswith("<svg")
    assert "Change of one setting" in done.stdout
    assert "Step time" in done.stdout
    assert "tp " in done.stdout
    assert max(len(line) for line in done.stdout.splitlines() if str(plan) not in line) <= 80


def test_another_way_stands_beside_the_plan(plan) -> None:
    done = CliRunner().invoke(group, ["llm", "explain", str(plan), "--compare-with", "tp=8,recompute=full"])
    assert done.exit_code == 0, done.output
    assert "longer" in done.stdout
    assert "TP communication" in done.stdout
    told = json.loads(
        CliRunner()
        .invoke(group, ["llm", "explain", str(plan), "--compare-with", "tp=8,recompute=full", "--json"])
        .stdout
    )
    terms = sum(row["other"] - row["chosen"] for row in told["time_by_term_s"].values())
    assert terms == pytest.approx(told["longer_s"])
    assert told["other"]["tp"] == 8


def test_what_does_not_fit_says_by_how_much(plan) -> None:
    done = CliRunner().invoke(
        group, ["llm", "explain", str(plan), "--compare-with", "tp=1,cp=1,pp=1,micro_batch_size=2,zero_stage=0"]
    )
    assert done.exit_code == 0, done.output
    assert "The other configuration does not fit: the fullest GPU needs" in " ".join(done.stdout.split())


def test_what_the_launcher_does_not_run_says_its_rule(plan) -> None:
    done = CliRunner().invoke(group, ["llm", "explain", str(plan), "--compare-with", "zero_stage=2"])
    assert done.exit_code == 0, done.output
    assert "The other configuration does not run: Megatron-LM supports ZeRO stage 0, 1 or 3, not 2." in " ".join(
        done.stdout.split()
    )


def test_what_nobody_runs_says_the_rule(plan) -> None:
    done = CliRunner().invoke(group, ["llm", "explain", str(plan), "--compare-with", "tp=3"])
    assert done.exit_code == 0, done.output
    assert "No framework runs this configuration: tp is 3, but it must divide the 32 attention" in done.stdout


@pytest.mark.parametrize(
    "against",
    ["tp=3", "pp=5", "cp=3,pp=7", "vpp=5", "ep=2", "micro_batch_size=7", "pp_schedule=zb_v", "tp=8,pp=4,cp=8"],
)
def test_what_nobody_runs_leads_to_changes_that_are_accepted(plan, against) -> None:
    done = CliRunner().invoke(group, ["llm", "explain", str(plan), "--compare-with", against, "--json"])
    said = json.loads(done.stdout)["refused"]
    alternatives = [re.findall(r"`(\w+=\d+)`", one) for one in re.split(r",? or ", said)]
    assert any(alternatives), said
    for changes in filter(None, alternatives):
        both = dict(one.split("=") for one in [*against.split(","), *changes])
        typed = ",".join(f"{name}={value}" for name, value in both.items())
        other = CliRunner().invoke(group, ["llm", "explain", str(plan), "--compare-with", typed, "--json"])
        assert "refused" not in json.loads(other.stdout), (typed, other.stdout)


@pytest.mark.parametrize("against", ["recompute=ful", "tp=two", "zero_stage=9", "recompute_modules=mpl", "sp=maybe"])
def test_values_that_a_setting_never_takes_are_usage_errors(plan, against: str) -> None:
    done = CliRunner().invoke(group, ["llm", "explain", str(plan), "--compare-with", against])
    assert done.exit_code == 2
    assert "--compare-with" in done.output


def test_recomputed_modules_stand_beside_the_plan(plan) -> None:
    words = ["llm", "explain", str(plan), "--compare-with", "recompute_modules=mlp"]
    done = CliRunner().invoke(group, words)
    assert done.exit_code == 0, done.output
    assert "mlp" in done.stdout
    told = json.loads(CliRunner().invoke(group, [*words, "--json"]).stdout)
    activations = told["memory_bytes"]["activations"]
    assert activations["other"] < activations["chosen"]


def test_words_that_are_no_degrees_are_usage_errors(plan) -> None:
    done = CliRunner().invoke(group, ["llm", "explain", str(plan), "--compare-with", "tpp=3"])
    assert done.exit_code == 2
    assert "did you mean `tp`" in done.output
    assert CliRunner().invoke(group, ["llm", "explain"]).exit_code == 2
    assert CliRunner().invoke(group, ["llm", "explain", str(plan.parent / "absent.json")]).exit_code == 1


def test_why_not_compares_with_the_fastest_configuration_that_has_the_values(plan: Path) -> None:
    held = hpgo.LlmPlan.read(plan)
    known = held.estimate
    ask = {"global_batch_size": known.global_batch_size, "seq_length": known.seq_length, "devices": known.gpus}
    fixed = hpgo.plan_llm(held.transformer, held.cluster, **ask, stack=known.stack, fix={"tp": 4}, top=1)
    done = CliRunner().invoke(group, ["llm", "explain", str(plan), "--why-not", "tp=4", "--json"])
    found = json.loads(done.stdout)
    assert found["fixed"] == {"tp": 4}
    assert found["other"]["tp"] == 4
    assert found["longer_s"] == pytest.approx(fixed.fastest.step_s - known.step_s)
    assert found["configurations"] == fixed.configurations
    said = CliRunner().invoke(group, ["llm", "explain", str(plan), "--why-not", "tp=4"]).stdout
    assert "configurations with tp 4, beside the plan's" in " ".join(said.split())
    assert "TP communication" in said


@pytest.mark.parametrize(
    ("fixed", "says"),
    [
        ("zero_stage=2", "No configuration has zero-stage 2: Megatron-LM does not support zero-stage 2"),
        ("tp=16", "No configuration has tp 16: tp 16 does not divide the 8 GPUs of a node"),
        ("sp=no", "there is no degree `sequence_parallel` to fix or exclude"),
    ],
)
def test_why_not_names_the_rule_that_leaves_no_configuration(plan: Path, fixed: str, says: str) -> None:
    done = CliRunner().invoke(group, ["llm", "explain", str(plan), "--why-not", fixed])
    assert done.exit_code == 0
    assert says in " ".join(done.stdout.split())


def test_one_comparison_at_a_time(plan: Path) -> None:
    words = ["llm", "explain", str(plan), "--why-not", "tp=4", "--compare-with", "tp=4"]
    done = CliRunner().invoke(group, words)
    assert done.exit_code == 2
    assert "give one of --compare-with and --why-not" in done.output
