"""`hpgo llm calibrate` finds what a platform takes by its steps, and `--platform` foretells others with it."""

from __future__ import annotations

import inspect
import json
from dataclasses import replace
from math import exp, log

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

import hpgo
from hpgo.cli.main import group
from hpgo.llm.constants import COMPUTING, CONSTANTS, EXCHANGE, Constants
from hpgo.llm.estimate import estimate_config
from hpgo.llm.measured_steps import PLATFORM_SPREAD, STEP_SPREAD, read_steps
from hpgo.llm.step_range import QUANTILE
from hpgo.model.transformer_presets import TRANSFORMERS

CLUSTER = hpgo.Cluster.preset("h100:4")
MODEL = TRANSFORMERS["llama-3-8b"]
WAYS = ({"tp": 1, "pp": 2}, {"tp": 8}, {"tp": 2}, {"tp": 4, "pp": 2, "micro_batch_size": 2}, {"tp": 8, "cp": 2})
ASKED = {"global_batch_size": 64, "seq_length": 8192}


def taken_s(one: hpgo.LlmEstimate, computing: float, exchange: float) -> float:
    """A step on a platform that is so many times slower."""
    constants = CONSTANTS.slower(computing, exchange)
    return estimate_config(MODEL, CLUSTER, one.parallelism, constants=constants, **ASKED).step_s


def measured(computing: float, exchange: float, ways=WAYS) -> list[hpgo.MeasuredStep]:
    prices = [hpgo.estimate_llm(MODEL, CLUSTER, **ASKED, **config) for config in ways]
    return [hpgo.MeasuredStep(MODEL, CLUSTER, one, taken_s(one, computing, exchange)) for one in prices]


@given(factor=st.floats(0.5, 2.0), count=st.integers(1, 5))
@settings(max_examples=15)
def test_a_platform_that_is_slower_in_all_is_found_from_any_number_of_steps(factor: float, count: int) -> None:
    found = hpgo.fit_platform(measured(factor, factor, WAYS[:count])).platform
    assert found.computing == found.exchange == pytest.approx(factor, rel=1e-9)
    assert found.steps == count


@given(computing=st.floats(0.7, 1.5), apart=st.sampled_from([0.5, 0.7, 1.5, 2.0]))
@settings(max_examples=10)
def test_a_platform_whose_exchange_differs_is_found_from_steps_that_exchange_more_and_less(
    computing: float, apart: float
) -> None:
    fit = hpgo.fit_platform(measured(computing, computing * apart))
    assert fit.note.startswith("two factors")
    assert fit.platform.computing == pytest.approx(computing, rel=1e-6)
    assert fit.platform.exchange == pytest.approx(computing * apart, rel=1e-6)


@pytest.mark.parametrize(
    ("ways", "why"),
    [(WAYS[:2], "at least 3 steps"), ([WAYS[2]] * 4, "too similar to separate")],
)
def test_no_more_is_fitted_than_steps_tell(ways, why: str) -> None:
    steps = measured(1.0, 2.0, ways)
    fit = hpgo.fit_platform([replace(one, measured_s=one.measured_s * (1 + at / 50)) for at, one in enumerate(steps)])
    assert fit.platform.computing == fit.platform.exchange
    assert why in fit.note


def test_steps_that_scatter_without_a_pattern_get_one_factor() -> None:
    steps = [
        replace(one, measured_s=one.measured_s * off)
        for one, off in zip(measured(1.2, 1.2), (1.1, 1.1, 0.9, 0.9, 1.0), strict=True)
    ]
    fit = hpgo.fit_platform(steps)
    assert fit.note.startswith("one factor")
    logs = [log(one.measured_s / taken_s(one.predicted, 1.2, 1.2)) for one in steps]
    assert fit.platform.computing == pytest.approx(1.2 * exp(sum(logs) / len(logs)), rel=1e-3)


def test_more_steps_are_trusted_more_and_leave_less_error() -> None:
    fits = [hpgo.fit_platform(measured(1.3, 1.3, WAYS[:count])).platform for count in (1, 3, 5)]
    assert [one.trust for one in fits] == sorted(one.trust for one in fits)
    assert [one.error for one in fits] == sorted((one.error for one in fits), reverse=True)
    assert fits[0].trust == pytest.approx(PLATFORM_SPREAD**2 / (PLATFORM_SPREAD**2 + STEP_SPREAD**2))
    assert all(1 < one.factors[0] < 1.3 for one in fits)


def test_steps_that_scatter_leave_more_error() -> None:
    steps = measured(1.0, 1.0)
    wild = [replace(one, measured_s=one.measured_s * (1.4 if at % 2 else 0.7)) for at, one in enumerate(steps)]
    calm, rough = (hpgo.fit_platform(given).platform for given in (steps, wild))
    assert rough.error > 1.5 * calm.error
    assert rough.trust < calm.trust


def test_prices_and_plans_on_a_platform_are_those_of_slower_terms(tmp_path) -> None:
    platform = hpgo.fit_platform(measured(1.3, 0.8)).platform
    platform.save(tmp_path / "p.yaml")
    assert hpgo.Platform.read(tmp_path / "p.yaml") == platform
    one = hpgo.estimate_llm(MODEL, CLUSTER, tp=4, platform=platform, **ASKED)
    assert one.step_s == taken_s(one, *platform.factors)
    assert one.measured_steps == 5
    assert one.high_s / one.step_s == pytest.approx(exp(QUANTILE * platform.log_sd))
    chosen = hpgo.plan_llm(MODEL, CLUSTER, platform=platform, stack="default", top=3, **ASKED)
    assert [found.step_s for found in chosen.estimates] == [
        taken_s(found, *platform.factors) for found in chosen.estimates
    ]
    assert {found.measured_steps for found in chosen.estimates} == {5}


def test_every_constant_with_a_rate_or_a_time_follows_its_factor() -> None:
    """A platform twice as slow in all takes twice as long, but for what is a datasheet's."""
    scaled = {name for shares_and_seconds in (COMPUTING, EXCHANGE) for names in shares_and_seconds for name in names}
    ratios = {
        "gemm_tile", "tail_wave_loss", "attention_backward_factor", "misaligned_head_factor",
        "unfused_elementwise_factor", "backward_launch_factor", "launch_overlap_fraction",
        "comm_overlap_fraction", "grouped_gemm_efficiency", "routed_row_factor", "attention_time_factor",
        "tp_exposed_fraction", "expert_time_factor", "all_to_all_time_factor",
        "gather_bucket_parameters",
    }  # fmt: skip
    sizes = {name for name in Constants.__dataclass_fields__ if name.endswith("_bytes")}
    assert scaled | ratios | sizes >= set(Constants.__dataclass_fields__)
    assert not scaled & (ratios | sizes)


# --- files and the command

STEPS = """\
hpgo_steps: 1
steps:
  - {model: llama-3-8b, cluster: "h100:1", global_batch_size: 32, seq_length: 8192, tp: 2, seconds: 4.4 s}
  - {model: llama-3-8b, cluster: "h100:2", global_batch_size: 32, seq_length: 8192, tp: 4, recompute: full,
     seconds: 3.1}
"""
ROWS = """\
model,cluster,global_batch_size,seq_length,tp,recompute,seconds
llama-3-8b,h100:1,32,8192,2,,4.4 s
llama-3-8b,h100:2,32,8192,4,full,3.1
"""


def test_steps_name_the_modules_that_they_recompute(tmp_path) -> None:
    one = {"model": "deepseek-v2-lite", "cluster": "a100:1", "global_batch_size": 32, "seq_length": 4096, "ep": 8,
           "recompute": "selective", "recompute_modules": ["mla_up_proj", "moe_act"], "adam_moments_in_bf16": True,
           "seconds": 1.2}  # fmt: skip
    path = tmp_path / "steps.json"
    path.write_text(json.dumps({"hpgo_steps": 1, "steps": [one]}), encoding="utf-8")
    (step,) = read_steps(path)
    config = step.predicted.parallelism
    assert config.recompute_modules == ("mla_up_proj", "moe_act")
    assert config.adam_moments_in_bf16
    assert {"recompute of modules", "bf16 moments"} <= set(step.predicted.unvalidated_features)


def test_yaml_json_and_csv_hold_the_same_steps(tmp_path) -> None:
    held = {
        "hpgo_steps": 1,
        "steps": [
            {"model": "llama-3-8b", "cluster": "h100:1", "global_batch_size": 32, "seq_length": 8192, "tp": 2,
            "seconds": 4.4},
            {"model": "llama-3-8b", "cluster": "h100:2", "global_batch_size": 32, "seq_length": 8192, "tp": 4,
             "recompute": "full", "seconds": "3100 ms"},
        ],
    }  # fmt: skip
    found = []
    for name, text in (("a.yaml", STEPS), ("b.csv", ROWS), ("c.json", json.dumps(held))):
        (tmp_path / name).write_text(text, encoding="utf-8")
        found.append(read_steps(tmp_path / name))
    assert found[0] == found[1] == found[2]
    assert [one.measured_s for one in found[0]] == [4.4, 3.1]
    assert found[0][1].predicted.parallelism.recompute == "full"


def test_a_step_may_say_every_argument_of_a_price(tmp_path) -> None:
    usual = {
        name: one.default for name, one in inspect.signature(hpgo.estimate_llm).parameters.items()
        if one.default not in (None, inspect.Parameter.empty)
    }  # fmt: skip
    said = {"model": "llama-3-8b", "cluster": "h100:1", "global_batch_size": 32, "seq_length": 8192, "seconds": 4.4}
    path = tmp_path / "steps.json"
    path.write_text(json.dumps({"hpgo_steps": 1, "steps": [said | usual, said]}), encoding="utf-8")
    one, other = read_steps(path)
    assert len(usual) > 15
    assert one == other


def test_the_command_writes_a_platform_that_plans_read(tmp_path, run) -> None:
    steps, platform = tmp_path / "steps.yaml", tmp_path / "platform.yaml"
    steps.write_text(STEPS, encoding="utf-8")
    done = run("llm", "calibrate", steps, "-o", platform)
    assert "× on all terms" in done.stdout
    assert max(len(line) for line in done.stdout.splitlines() if str(platform) not in line) <= 80
    found = hpgo.Platform.read(platform)
    told = json.loads(run("llm", "calibrate", steps, "--json").stdout)
    assert told["platform"]["computing"] == found.computing
    said = run(
        "llm",
        "estimate",
        "llama-3-8b",
        "-c",
        "h100:1",
        "-b",
        32,
        "--seq-length",
        8192,
        "--tp",
        2,
        "--platform",
        platform,
    ).stdout
    assert "estimated, fitted to 2 measured steps)" in " ".join(said.split())
    listed = run(
        "llm", "plan", "llama-3-8b", "-c", "h100:1", "-b", 32, "--seq-length", 8192, "--top", 3, "--platform", platform
    ).stdout
    assert "so the order of these 3 is not reliable" in " ".join(listed.split())


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "is empty"),
        ("hpgo_steps: 1\nsteps: []\n", "has no steps"),
        ("steps: []\n", "`hpgo_steps` is missing"),
        (STEPS.replace("llama-3-8b", "llama-9-8b"), "step 1: "),
        (STEPS.replace("4.4 s", "-4.4"), "step 1: "),
        (STEPS.replace("4.4 s", "0"), "step 1: a measured step is 0"),
        (STEPS.replace("4.4 s", "4400"), "times the"),
        (STEPS.replace("tp: 2", "tp: 3"), "tp is 3, but it must divide the 32"),
        (STEPS.replace("tp: 2", "tensor: 2"), "`tensor` is unknown"),
        (STEPS.replace("seconds: 3.1", ""), "step 2: `seconds` is missing"),
        (STEPS.replace("h100:2", "a100:2"), "steps were measured on `H100-80GB` and `A100-80GB`"),
        ("hpgo_steps: 1\nsteps: [3]\n", "step 1: must be a mapping"),
    ],
)
def test_files_that_are_no_steps_are_refused_by_file_and_key(tmp_path, text: str, says: str) -> None:
    path = tmp_path / "steps.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(hpgo.errors.ArgumentError) as found:
        hpgo.fit_platform(path)
    assert says in found.value.message
    assert found.value.hint


def test_a_file_that_is_refused_ends_the_command_with_1_and_prints_nothing(tmp_path, run) -> None:
    (tmp_path / "steps.yaml").write_text(STEPS.replace("4.4 s", "-4.4"), encoding="utf-8")
    done = run("llm", "calibrate", "steps.yaml", "-o", "p.yaml", code=1)
    assert done.stderr.startswith("error: steps.yaml, step 1: the time is -4.4, but it must be finite")
    assert "hint: " in done.stderr
    assert done.stdout == ""
    assert not (tmp_path / "p.yaml").exists()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("model,cluster\n", "has no steps"),
        (ROWS.replace(",2,,", ",2,"), "line 2 has 6 cells, but the first line has 7"),
        (ROWS.replace("tp,", "model,"), "a column appears twice"),
        (ROWS + '"x', "not valid CSV"),
    ],
)
def test_tables_that_are_no_steps_are_refused(tmp_path, text: str, says: str) -> None:
    path = tmp_path / "steps.csv"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(hpgo.errors.ArgumentError) as found:
        hpgo.fit_platform(path)
    assert says in found.value.message


def test_questions_that_make_no_sense_are_usage_errors(tmp_path) -> None:
    for words in (["calibrate"], ["calibrate", "plan.json"], ["llm", "calibrate"]):
        done = CliRunner().invoke(group, words)
        assert done.exit_code == 2, done.output


def test_a_platform_of_another_device_or_a_file_that_is_none_is_refused(tmp_path) -> None:
    path = tmp_path / "p.yaml"
    platform = hpgo.fit_platform(measured(1.1, 1.1)).platform
    with pytest.raises(hpgo.errors.ArgumentError, match="was measured on `H100-80GB`"):
        hpgo.estimate_llm(MODEL, hpgo.Cluster.preset("a100:4"), platform=platform, **ASKED)
    for text, says in (
        ("hpgo_platform: 2\n", "`hpgo_platform` is 2"),
        ("hpgo_steps: 1\n", "`hpgo_platform` is missing"),
        (platform.yaml().replace("trust: ", "trust: -"), "trust of a platform is -"),
        (platform.yaml() + "more: 1\n", "`more` is unknown"),
    ):
        path.write_text(text, encoding="utf-8")
        with pytest.raises(hpgo.errors.ArgumentError, match=says):
            hpgo.Platform.read(path)
    with pytest.raises(hpgo.errors.ArgumentError, match="platform is `p`"):
        hpgo.estimate_llm(MODEL, CLUSTER, platform="p", **ASKED)
