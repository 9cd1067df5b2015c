"""`hpgo llm calibrate` finds what a platform takes by its steps, and `--platform` foretells others with it."""

from __future__ import annotations

import inspect
import json
from dataclasses import asdict, replace
from math import exp, log

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

import hpgo
from hpgo.cli.main import group
from hpgo.llm.constants import CONSTANTS, Constants
from hpgo.llm.measured_steps import read_steps
from hpgo.llm.platform_fit import STEP_SD, MeasuredConfig, posterior
from hpgo.llm.stack import FACTORS
from hpgo.llm.step_range import QUANTILE
from hpgo.llm.term_factors import TERMS, scaled
from hpgo.model.transformer_presets import TRANSFORMERS

CLUSTER = hpgo.Cluster.preset("h100:4")
MODEL = TRANSFORMERS["llama-3-8b"]
WAYS = ({"tp": 1, "pp": 2}, {"tp": 8}, {"tp": 2}, {"tp": 4, "pp": 2, "micro_batch_size": 2}, {"tp": 8, "cp": 2})
VARIED = tuple(
    {"seq_length": seq_length, **way}
    for seq_length in (2048, 16384)
    for way in (*WAYS, {"zero_stage": 3, "overlap_dp_comm": False}, {"tp": 1, "micro_batch_size": 2}, {"tp": 4})
)
ASKED = {"global_batch_size": 64, "seq_length": 8192}
NEUTRAL = dict.fromkeys(TERMS, 1.0)


def estimated(ways=WAYS) -> list[hpgo.MeasuredStep]:
    """Steps that took as long as estimated."""
    prices = [hpgo.estimate_llm(MODEL, CLUSTER, **{**ASKED, **config}) for config in ways]
    return [hpgo.MeasuredStep(MODEL, CLUSTER, one, one.step_s) for one in prices]


def taken_s(one: hpgo.MeasuredStep, factors: dict[str, float]) -> float:
    """The step on a platform whose terms take so many times as long."""
    return MeasuredConfig.of(one).step_s({(term, ""): factor for term, factor in factors.items()})


def measured(factors: dict[str, float], ways=WAYS) -> list[hpgo.MeasuredStep]:
    return [replace(one, measured_s=taken_s(one, factors)) for one in estimated(ways)]


@pytest.mark.parametrize("term", [term for term in TERMS if term not in ("experts", "overall", "launch_overhead")])
def test_a_planted_factor_is_found_by_steps_that_differ_and_hardly_scatter(term: str) -> None:
    steps = measured({term: 1.2}, VARIED)
    found = posterior([MeasuredConfig.of(one) for one in steps], [log(one.measured_s) for one in steps], own_sd=1e-5)
    assert exp(found.logs[term, ""]) == pytest.approx(1.2, rel=0.01)
    assert all(abs(value) < 0.01 for (other, _), value in found.logs.items() if other != term)


def test_steps_as_estimated_leave_all_factors_at_1() -> None:
    platform = hpgo.fit_platform(estimated()).platform
    assert platform.factors() == pytest.approx({term: 1.0 for term in TERMS if term != "experts"})


def test_a_term_that_no_step_contains_keeps_its_prior() -> None:
    found = {one.term: one for one in hpgo.fit_platform(measured({"overall": 1.3})).platform.terms}
    assert found["param_all_gather"].factor == 1
    assert found["param_all_gather"].sd == pytest.approx(TERMS["param_all_gather"].prior_sd)


def test_more_steps_never_widen_the_posterior() -> None:
    steps = measured({"attention": 1.1, "tp_comm": 0.9}, VARIED)
    configs = [MeasuredConfig.of(one) for one in steps]
    before = {(term, ""): row.prior_sd for term, row in TERMS.items()}
    for count in (1, 2, 3, 5, len(steps)):
        found = posterior(configs[:count], [log(one.measured_s) for one in steps[:count]]).sds
        # Slopes are taken at the fitted factors, which differ a little with each step.
        assert all(sd <= before[key] * 1.005 for key, sd in found.items())
        before = found


@given(factor=st.floats(0.4, 2.5), at=st.integers(0, len(WAYS) - 1))
@settings(max_examples=15)
def test_one_step_changes_its_prediction_by_the_share_that_the_priors_leave_it(factor: float, at: int) -> None:
    """That is v / (v + σ²), with the variances of its prediction by the priors and of a step's own deviation."""
    step = estimated((WAYS[at],))[0]
    fit = hpgo.fit_platform([replace(step, measured_s=factor * step.measured_s)])

    def share_at(factors: dict[str, float]) -> float:
        there_s = taken_s(step, factors)
        slopes = {name: log(taken_s(step, factors | {name: factors[name] * exp(1e-3)}) / there_s) for name in factors}
        variance = sum((slope / 1e-3 * TERMS[name].prior_sd) ** 2 for name, slope in slopes.items())
        return variance / (variance + STEP_SD**2)

    # Slopes change on the way from the estimate to the fit. A step far off counts less, as an outlier.
    ends = share_at(NEUTRAL), share_at(NEUTRAL | fit.platform.factors())
    share = log(fit.fitted_s[0] / step.measured_s) / log(factor) if abs(log(factor)) > 1e-3 else 0.0
    assert 0 <= share < 1.02 * max(ends)
    if 1e-3 < abs(log(factor)) < STEP_SD:
        assert share > 0.98 * min(ends)
    assert ends[0] < (0.7 if WAYS[at]["tp"] == 8 else 0.52), "one step does not decide"
    assert "one step is not enough" in fit.note


def test_a_single_wild_step_moves_the_factors_less_than_a_platform_does() -> None:
    calm = estimated()
    wild = [replace(one, measured_s=one.measured_s * (2.5 if at == 0 else 1)) for at, one in enumerate(calm)]
    factor = hpgo.fit_platform(wild).platform.factors()["overall"]
    assert 1 <= factor < 1.05


def test_the_same_configuration_measured_again_counts_once() -> None:
    first, *rest = measured({"overall": 1.2}, WAYS[:1])
    again = [replace(first, measured_s=first.measured_s * off) for off in (0.9, 1 / 0.9)]
    assert not rest
    assert hpgo.fit_platform(again).platform.log_sd == pytest.approx(hpgo.fit_platform([first]).platform.log_sd)
    fit = hpgo.fit_platform(again)
    assert fit.platform.steps == 1
    assert "repeated configurations count once" in fit.note


@pytest.mark.parametrize(("count", "says"), [(1, "not enough"), (2, "are weak"), (3, "are worth it"), (5, "worth it")])
def test_the_note_says_what_the_number_of_steps_is_good_for(count: int, says: str) -> None:
    fit = hpgo.fit_platform(measured({"overall": 1.2}, WAYS[:count]))
    assert says in fit.note
    if count >= 3:
        assert f"falls from {100 * fit.error_before:.1f} % to {100 * fit.error_left_out:.1f} %" in fit.note
    assert fit.error_fitted < fit.error_before


def test_steps_that_improve_nothing_are_not_called_worth_it() -> None:
    pairs = zip(estimated(), (0.9, 1.1, 1, 0.9, 1.1), strict=True)
    steps = [replace(one, measured_s=one.measured_s * off) for one, off in pairs]
    fit = hpgo.fit_platform(steps)
    assert fit.error_left_out > 0.9 * fit.error_before
    assert "5 steps do not improve the estimates: their mean error goes from 8.1 % to 8.7 %" in fit.note


STACK = "hpgo_stack: 1\nname: flash-3\ntitle: FlashAttention-3\nattention: 0.6\nseen: {H100: 3}\n"


def test_a_stack_file_calibrates_and_its_platform_estimates_without_the_file(tmp_path, run) -> None:
    file = tmp_path / "flash.yaml"
    file.write_text(STACK, encoding="utf-8")
    (tmp_path / "steps.yaml").write_text(STEPS.replace("model:", "stack: flash.yaml, model:"), encoding="utf-8")
    done = run("llm", "calibrate", "steps.yaml", "-o", "p.yaml")
    assert "Stack     flash-3: FlashAttention-3" in done.stdout
    step = read_steps(tmp_path / "steps.yaml")[0]
    known = hpgo.estimate_llm("llama-3-8b", "h100:1", global_batch_size=32, seq_length=8192, tp=2, stack=file)
    assert step.predicted == known
    assert known.step_s < hpgo.estimate_llm("llama-3-8b", "h100:1", global_batch_size=32, seq_length=8192, tp=2).step_s
    again = hpgo.MeasuredStep.of("llama-3-8b", hpgo.Cluster.preset("h100:1"), known, 4.4, stack=file)
    assert again == step
    platform = hpgo.Platform.read(tmp_path / "p.yaml")
    assert platform == hpgo.fit_platform(tmp_path / "steps.yaml").platform
    assert platform.software_stack.attention == 0.6
    file.unlink()
    alone = hpgo.estimate_llm(MODEL, CLUSTER, tp=4, platform=platform, **ASKED)
    assert (alone.stack, alone.measured_steps) == ("flash-3", 2)
    file.write_text(STACK.replace("0.6", "0.5"), encoding="utf-8")
    with pytest.raises(hpgo.errors.ArgumentError, match="`flash-3` with other values"):
        hpgo.estimate_llm(MODEL, CLUSTER, tp=4, platform=platform, stack=file, **ASKED)
    with pytest.raises(hpgo.errors.ArgumentError, match="stack `flash-3` is not known"):
        hpgo.MeasuredStep.of("llama-3-8b", hpgo.Cluster.preset("h100:1"), known, 4.4)


def test_paths_in_a_table_are_relative_to_its_folder(tmp_path, monkeypatch) -> None:
    folder, elsewhere = tmp_path / "runs", tmp_path / "cwd"
    folder.mkdir()
    elsewhere.mkdir()
    (folder / "mine.yaml").write_text(STACK, encoding="utf-8")
    (folder / "gpus.json").write_text(json.dumps(hpgo.Cluster.preset("h100:1").document()), encoding="utf-8")
    shape = {"hpgo_transformer": 1, **asdict(MODEL), "name": "ours"}
    (folder / "model.json").write_text(json.dumps(shape), encoding="utf-8")
    row = {"model": "model.json", "cluster": "gpus.json", "stack": "mine.yaml", "global_batch_size": 32,
           "seq_length": 8192, "tp": 2, "seconds": 4.4}  # fmt: skip
    (folder / "steps.json").write_text(json.dumps({"hpgo_steps": 1, "steps": [row]}), encoding="utf-8")
    monkeypatch.chdir(elsewhere)
    (step,) = read_steps("../runs/steps.json")
    assert (step.model.name, step.stack, step.cluster.devices) == ("ours", "flash-3", 8)
    (elsewhere / "steps.json").write_text((folder / "steps.json").read_text(encoding="utf-8"), encoding="utf-8")
    with pytest.raises(hpgo.errors.ArgumentError, match=r"step 1: file not found: `gpus.json`"):
        read_steps("steps.json")


def cluster_of_cloud(power: float, name: str = "cloud") -> hpgo.Cluster:
    """H100s whose cluster file states other shares of the peak, as at a lower power limit."""
    document = hpgo.Cluster.preset("h100:4").document()
    types = {"H100-80GB": {"reached": {"bf16": 0.803 * power, "attention": 0.35 * power}, "scaled": True}}
    return hpgo.Cluster.from_document(document | {"types": types, "name": name}, file=name)


def test_a_platform_holds_only_for_the_rates_of_its_steps() -> None:
    def fitted(*clusters: hpgo.Cluster) -> hpgo.Platform:
        steps = []
        for cluster in clusters:
            one = hpgo.estimate_llm(MODEL, cluster, tp=2, **ASKED)
            steps.append(hpgo.MeasuredStep.of(MODEL, cluster, one, 1.1 * one.step_s))
        return hpgo.fit_platform(steps).platform

    cloud, slower = cluster_of_cloud(0.85), cluster_of_cloud(0.7, "slower")
    stock, changed = fitted(CLUSTER), fitted(cloud)
    assert stock.rates is None
    assert changed.rates is not None
    for platform, cluster in ((stock, CLUSTER), (changed, cloud), (changed, cluster_of_cloud(0.85, "other"))):
        assert hpgo.estimate_llm(MODEL, cluster, tp=4, platform=platform, **ASKED).measured_steps == 1
    for platform, cluster in ((stock, cloud), (changed, CLUSTER), (changed, slower)):
        with pytest.raises(hpgo.errors.ArgumentError, match="the platform's steps ran on `H100-80GB` with") as found:
            hpgo.estimate_llm(MODEL, cluster, tp=4, platform=platform, **ASKED)
        assert "calibrate with steps of this cluster" in found.value.hint
    with pytest.raises(hpgo.errors.ArgumentError, match="the rates of the known card and rates of a cluster"):
        fitted(CLUSTER, cloud)


def test_a_platform_with_a_stack_file_and_own_rates_keeps_both_in_its_file(tmp_path) -> None:
    (tmp_path / "mine.yaml").write_text(STACK, encoding="utf-8")
    cluster = cluster_of_cloud(0.85)
    one = hpgo.estimate_llm(MODEL, cluster, tp=2, stack=tmp_path / "mine.yaml", **ASKED)
    step = hpgo.MeasuredStep.of(MODEL, cluster, one, 1.1 * one.step_s, stack=tmp_path / "mine.yaml")
    platform = hpgo.fit_platform([step]).platform
    platform.save(tmp_path / "p.yaml")
    assert hpgo.Platform.read(tmp_path / "p.yaml") == platform
    text = (tmp_path / "p.yaml").read_text(encoding="utf-8")
    (tmp_path / "p.yaml").write_text(text.replace("attention: 0.6", "atention: 0.6"), encoding="utf-8")
    with pytest.raises(hpgo.errors.ArgumentError, match="custom_stack: `atention` is unknown"):
        hpgo.Platform.read(tmp_path / "p.yaml")


def test_factors_of_experts_hold_for_their_model_only() -> None:
    cluster, asked = hpgo.Cluster.preset("h100:4"), {"global_batch_size": 128, "seq_length": 4096, "ep": 8}
    plain = {name: hpgo.estimate_llm(name, cluster, **asked) for name in ("mixtral-8x7b", "qwen3-30b-a3b")}
    one = plain["mixtral-8x7b"]
    slow = hpgo.MeasuredStep.of("mixtral-8x7b", cluster, one, 1.3 * one.step_s)
    fit = hpgo.fit_platform([slow])
    platform = fit.platform
    assert "one step helps for this model with experts only" in fit.note
    assert platform.factors("mixtral-8x7b")["experts"] > 1.02
    assert "experts" not in platform.factors("qwen3-30b-a3b")
    ratio = {
        name: hpgo.estimate_llm(name, cluster, platform=platform, **asked).step_s / before.step_s
        for name, before in plain.items()
    }
    assert 1 < ratio["qwen3-30b-a3b"] < ratio["mixtral-8x7b"] - 0.02


def test_steps_that_scatter_leave_more_error() -> None:
    steps = estimated()
    wild = [replace(one, measured_s=one.measured_s * (1.4 if at % 2 else 0.7)) for at, one in enumerate(steps)]
    calm, rough = (hpgo.fit_platform(given).platform for given in (steps, wild))
    assert rough.error > 1.5 * calm.error


def test_steps_predicted_from_the_others_are_better_on_a_platform_that_differs() -> None:
    fit = hpgo.fit_platform(measured({"overall": 1.1, "tp_comm": 1.4, "linear": 1.1}))
    assert fit.error_left_out < 0.75 * fit.error_before


def test_prices_and_plans_on_a_platform_are_those_of_slower_terms(tmp_path) -> None:
    platform = hpgo.fit_platform(measured({"overall": 1.3, "tp_comm": 0.8})).platform
    platform.save(tmp_path / "p.yaml")
    assert hpgo.Platform.read(tmp_path / "p.yaml") == platform
    one = hpgo.estimate_llm(MODEL, CLUSTER, tp=4, platform=platform, **ASKED)
    assert one.step_s == taken_s(hpgo.MeasuredStep(MODEL, CLUSTER, one, one.step_s), platform.factors())
    assert one.measured_steps == 5
    assert one.high_s / one.step_s == pytest.approx(exp(QUANTILE * platform.log_sd))
    chosen = hpgo.plan_llm(MODEL, CLUSTER, platform=platform, top=3, **ASKED)
    assert [found.step_s for found in chosen.estimates] == [
        taken_s(hpgo.MeasuredStep(MODEL, CLUSTER, found, found.step_s), platform.factors())
        for found in chosen.estimates
    ]
    assert {found.measured_steps for found in chosen.estimates} == {5}


def test_a_platform_scales_the_constants_of_its_stack() -> None:
    one = estimated(WAYS[2:3])[0]
    step = replace(one, predicted=replace(one.predicted, stack="te-hopper"))
    platform = hpgo.fit_platform([step]).platform
    assert platform.stack == "te-hopper"
    attention = platform.factors()["attention"]
    assert platform.constants_on(CLUSTER).attention_time_factor == pytest.approx(0.52 * attention)
    with pytest.raises(hpgo.errors.ArgumentError, match="stacks `default` and `te-hopper`"):
        hpgo.fit_platform([*estimated(WAYS[:1]), step])


def test_every_constant_with_a_rate_or_a_time_follows_its_factor() -> None:
    """A platform twice as slow in all takes twice as long, but for what is a datasheet's."""
    overall = {*TERMS["overall"].shares, *TERMS["overall"].times}
    ratios = {
        "gemm_tile", "tail_wave_loss", "attention_backward_factor", "misaligned_head_factor",
        "unfused_elementwise_factor", "backward_launch_factor", "launch_overlap_fraction",
        "comm_overlap_fraction", "grouped_gemm_efficiency", "routed_row_factor", "attention_time_factor",
        "tp_exposed_fraction", "expert_time_factor", "all_to_all_time_factor",
        "gather_bucket_parameters",
    }  # fmt: skip
    of_stacks = set(FACTORS.values())
    sizes = {name for name in Constants.__dataclass_fields__ if name.endswith("_bytes")}
    factors = {name for name in Constants.__dataclass_fields__ if name.endswith("_time_factor")}
    assert overall | ratios | sizes | of_stacks | factors >= set(Constants.__dataclass_fields__)
    assert not overall & (ratios | sizes | of_stacks | factors)


@pytest.mark.parametrize("term", [term for term in TERMS if term != "experts"])
def test_a_factor_of_a_term_makes_some_step_slower_and_none_faster(term: str) -> None:
    assert scaled(CONSTANTS, NEUTRAL) == CONSTANTS
    ratios = [taken_s(one, {term: 1.5}) / one.measured_s for one in estimated(VARIED)]
    assert min(ratios) >= 1
    assert term == "launch_overhead" or max(ratios) > 1.001
    assert max(ratios) <= 1.5 + 1e-9


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
    assert "2 steps are weak" in " ".join(done.stdout.split())
    assert max(len(line) for line in done.stdout.splitlines() if str(platform) not in line) <= 80
    found = hpgo.Platform.read(platform)
    told = json.loads(run("llm", "calibrate", steps, "--json").stdout)
    assert set(told["steps"][0]) == {"model", "parallelism", "measured_s", "predicted_s", "fitted_s", "source"}
    assert told["platform"]["terms"][0]["factor"] == found.terms[0].factor
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
    assert "equally fast: their step times differ by less than the error" in " ".join(listed.split())


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
    platform = hpgo.fit_platform(measured({"overall": 1.1})).platform
    with pytest.raises(hpgo.errors.ArgumentError, match="was measured on `H100-80GB`"):
        hpgo.estimate_llm(MODEL, hpgo.Cluster.preset("a100:4"), platform=platform, **ASKED)
    for text, says in (
        ("hpgo_platform: 1\n", "`hpgo_platform` is 1"),
        ("hpgo_steps: 1\n", "`hpgo_platform` is missing"),
        (platform.yaml().replace("log_sd: ", "log_sd: -"), "log_sd of a platform is -"),
        (platform.yaml().replace("term: linear", "term: lines"), "no term of a platform `lines`"),
        (platform.yaml().replace("term: linear", "term: memory"), "a term of a platform appears twice"),
        (platform.yaml().replace("stack: default", "stack: mine"), "stack `mine` is not known"),
        (platform.yaml() + "more: 1\n", "`more` is unknown"),
    ):
        path.write_text(text, encoding="utf-8")
        with pytest.raises(hpgo.errors.ArgumentError, match=says):
            hpgo.Platform.read(path)
    with pytest.raises(hpgo.errors.ArgumentError, match="platform is `p`"):
        hpgo.estimate_llm(MODEL, CLUSTER, platform="p", **ASKED)
