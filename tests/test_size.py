"""Sizes of clusters: the search against all sizes, and goodput against simulated failures."""

from __future__ import annotations

import json
import random
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import published_runs
import pytest
from click.testing import CliRunner
from refusals import refused

from hpgo.cli.main import group
from hpgo.errors import ArgumentError, InfeasibleError
from hpgo.llm.goodput import Failures
from hpgo.llm.prices import Prices
from hpgo.llm.search import plan_llm
from hpgo.llm.size import (
    BATCH_TOLERANCE,
    PUBLISHED_RUNS,
    LlmSizes,
    SizePoint,
    batch_sizes,
    node_counts,
    pareto_front,
    size_llm,
)
from hpgo.model.formats.transformers import transformer_of
from hpgo.show import size_report

EXAMPLES = Path(__file__).parent.parent / "examples"
RUN: dict[str, Any] = {"tokens": 2e11, "on": ["h100"], "gpus": (8, 160), "global_batch_size": 512}


@cache
def within(days: float) -> LlmSizes:
    return size_llm("llama-3-8b", days=days, **RUN)


@cache
def every_size() -> tuple[SizePoint, ...]:
    """Clusters of all sizes that the search may choose from, each evaluated."""
    found = [
        size_llm("llama-3-8b", days=1e-6, **RUN | {"gpus": (8 * count, 8 * count)}) for count in node_counts(1, 20)
    ]
    return tuple(point for one in found for point in one.points)


def simulated_goodput(failures: Failures, gpus: int, interval_s: float, *, segments: int, seed: int) -> float:
    """Run segments of training and saving with random failures, each with a restart that may fail, too."""
    chance = random.Random(seed)
    spent_s, mtbf_s = 0.0, failures.mtbf_s(gpus)
    for _ in range(segments):
        needed_s = interval_s + failures.save_s
        while (fails_s := chance.expovariate(1 / mtbf_s)) < needed_s:
            spent_s += fails_s
            while (fails_s := chance.expovariate(1 / mtbf_s)) < failures.restart_s:
                spent_s += fails_s
            spent_s += failures.restart_s
        spent_s += needed_s
    return segments * interval_s / spent_s


@pytest.mark.parametrize(
    ("gpus", "save_s", "interval_s"), [(16384, 30.0, 800.0), (65536, 60.0, 900.0), (64, 60.0, 1e4)]
)
def test_goodput_is_that_of_a_simulated_run(gpus: int, save_s: float, interval_s: float) -> None:
    failures = Failures(save_s=save_s)
    simulated = simulated_goodput(failures, gpus, interval_s, segments=60_000, seed=gpus)
    assert failures.goodput(gpus, interval_s) == pytest.approx(simulated, rel=0.01)


@pytest.mark.parametrize("gpus", [8, 1024, 16384, 100_000])
@pytest.mark.parametrize("save_s", [1.0, 30.0, 300.0])
def test_no_other_interval_is_much_better_than_the_chosen_one(gpus: int, save_s: float) -> None:
    failures = Failures(save_s=save_s)
    chosen_s = failures.save_interval_s(gpus)
    others = [failures.goodput(gpus, chosen_s * 1.02**power) for power in range(-200, 201)]
    assert failures.goodput(gpus) >= max(others) * 0.999


def test_a_run_that_fails_before_each_checkpoint_makes_no_progress() -> None:
    assert Failures(mtbf_gpu_hours=0.01, restart_s=3600).goodput(16384) == 0
    with refused(ArgumentError, "invalid_argument"):
        Failures(mtbf_gpu_hours=0)


@pytest.mark.parametrize("share", [0.3, 0.9, 1.0, 1.7])
def test_the_answer_is_the_smallest_of_all_sizes(share: float) -> None:
    days = share * sorted(point.days for point in every_size())[len(every_size()) // 2]
    expected = min((point for point in every_size() if point.days <= days), key=lambda one: one.nodes, default=None)
    assert within(days).answer("h100") == expected


@pytest.mark.parametrize("share", [0.99, 1.001, 1.02, 2.0])
def test_the_answer_in_a_budget_is_the_fastest_of_all_sizes(share: float) -> None:
    budget = share * 3.0 * min(point.gpu_hours for point in every_size())
    found = size_llm("llama-3-8b", budget=budget, hour_prices={"h100": 3.0}, **RUN)
    affordable = [point for point in every_size() if 3.0 * point.gpu_hours <= budget]
    answer = found.answer("h100")
    # Costs of neighbors are alike to 2 % here, so a larger cluster may be slightly cheaper than a smaller one.
    if answer is None:
        assert not affordable or budget < 1.02 * 3.0 * min(point.gpu_hours for point in affordable)
    else:
        assert found.cost(answer) <= budget
        larger = [point for point in affordable if point.nodes > answer.nodes]
        assert all(3.0 * point.gpu_hours > budget / 1.02 for point in larger)


def test_prices_depend_on_commitment_and_zone(tmp_path: Path) -> None:
    prices = Prices.read(EXAMPLES / "prices.yaml")
    assert prices.of("h100", commitment="spot", zone="anywhere") == (2.7, "")
    assert prices.of("b200") == (6.0, "us-east")
    assert prices.of("b200", zone="eu-west") == (6.4, "eu-west")
    assert prices.of("b200", commitment="spot") == (3.1, "")
    for kind, ask, said in (
        ("a100", {}, "a100"),
        ("b200", {"zone": "mars"}, "mars"),
        ("b200", {"commitment": "x"}, "x"),
    ):
        with pytest.raises(ArgumentError, match=said):
            prices.of(kind, **ask)
    text = (EXAMPLES / "prices.yaml").read_text(encoding="utf-8")
    for old, new in (("2026-03-21", "soon"), ("2.70", "-1"), ("2.70", "cheap"), ("hpgo_prices: 1", "hpgo_prices: 9")):
        (tmp_path / "bad.yaml").write_text(text.replace(old, new), encoding="utf-8")
        with pytest.raises(ArgumentError):
            Prices.read(tmp_path / "bad.yaml")


def test_costs_decide_the_order_and_spot_prices_change_it() -> None:
    words = ["llm", "size", "llama-3-8b", "--tokens", "200B", "--days", "4", "--gpus", "8..256", "--json"]
    words += ["--on", "h100,b200", "--prices", str(EXAMPLES / "prices.yaml")]
    orders = []
    for more in ([], ["--commitment", "spot"]):
        found = json.loads(CliRunner().invoke(group, [*words, *more]).stdout)
        orders.append([one["kind"] for one in found["answers"]])
        for point in found["points"]:
            assert point["cost"] == pytest.approx(point["gpu_hours"] * found["gpu_hour_prices"][point["kind"]])
    assert orders == [["h100", "b200"], ["b200", "h100"]]


def test_a_larger_cluster_is_never_slower_among_all_sizes() -> None:
    # Batches near the asked one, and idle GPUs, are what makes this hold. The search relies on it.
    days = [point.days for point in every_size()]
    assert days == sorted(days, reverse=True)


def test_a_point_adds_up() -> None:
    point = every_size()[-1]
    assert point.steps == -(-RUN["tokens"] // (point.estimate.global_batch_size * 8192))
    assert point.days * 86400 * point.goodput == pytest.approx(point.steps * point.estimate.step_s)
    assert point.gpu_hours == pytest.approx(point.days * 24 * point.gpus)
    low, high = point.range_days
    assert low <= point.days <= high
    assert low < high


def test_nothing_beats_a_point_of_the_front() -> None:
    front = pareto_front(every_size(), lambda point: point.gpu_hours)
    assert front
    for point in every_size():
        better = [one for one in front if one.days <= point.days and one.gpu_hours <= point.gpu_hours]
        assert better
        assert (point in front) == (better == [point])


def test_batches_stay_near_the_asked_one() -> None:
    for asked in (1, 7, 512, 2048, 15360):
        for gpus in (8, 24, 72, 136, 3072, 16384):
            batches = batch_sizes(asked, gpus)
            assert batches[0] == asked
            assert all(abs(batch - asked) <= BATCH_TOLERANCE * asked for batch in batches)
            assert batch_sizes(asked, gpus, is_exact=True) == [asked]


def test_the_range_of_published_runs_is_that_of_the_page() -> None:
    page = (EXAMPLES.parent / "docs/cost.md").read_text(encoding="utf-8")
    table = page.partition("<!-- table: published-runs -->\n")[2].partition("\n\n")[0]
    rows = {line.split(" | ")[0].lstrip("| "): tuple(line[2:-2].split(" | ")) for line in table.splitlines()[2:]}
    assert [*rows] == [run.name for run in published_runs.RUNS]
    # All predictions take a minute. A cost model that changed shows in a quarter of the dense models, too.
    sample = [run for run in published_runs.RUNS if not transformer_of(run.model).experts][::4]
    for run, ratio in zip(sample, published_runs.ratios(sample), strict=True):
        assert rows[run.name] == published_runs.row(run, ratio)
    count, *found = published_runs.summary([float(row[6]) for row in rows.values() if row[7] == "run"])
    # The page rounds ratios to 2 digits.
    assert (count, *found) == pytest.approx(PUBLISHED_RUNS, abs=0.011)


def test_a_published_run_is_predicted_like_a_cluster_of_the_same_size() -> None:
    run = next(run for run in published_runs.RUNS if run.name == "Llama 2 70B")
    (point,) = size_llm(
        run.model, tokens=run.tokens, on=[run.kind], gpus=(run.gpus, run.gpus), seq_length=run.seq_length,
        global_batch_size=run.global_batch_size, is_exact_batch=True,
    ).points  # fmt: skip
    assert run.predicted_gpu_hours() == pytest.approx(point.gpu_hours)


def test_an_allowance_stretches_the_run() -> None:
    plain, longer = (
        size_llm("llama-3-8b", days=1e-6, allowance=factor, **RUN | {"gpus": (64, 64)}).points[0] for factor in (1, 1.5)
    )
    assert longer.days == pytest.approx(1.5 * plain.days)
    assert longer.gpu_hours == pytest.approx(1.5 * plain.gpu_hours)
    assert longer.estimate == plain.estimate


@pytest.mark.parametrize("ending", ["svg", "html"])
def test_the_picture_has_each_kind_and_each_point(tmp_path: Path, ending: str) -> None:
    file = tmp_path / f"cost.{ending}"
    words = ["llm", "size", "llama-3-8b", "--tokens", "200B", "--gpus", "8..128", "--on", "h100,b200"]
    done = CliRunner().invoke(group, [*words, "-o", str(file)])
    assert done.exit_code == 0, done.output
    text = file.read_text(encoding="utf-8")
    assert "GPU-hours" in text
    for name in ("h100: 128 at", "b200: 8 at"):
        assert name in text


def test_numbers_of_nodes_are_dense_and_in_range() -> None:
    counts = node_counts(3, 2048)
    assert (counts[0], counts[-1]) == (3, 2048)
    assert counts == sorted(set(counts))
    assert all(later <= earlier * 17 / 16 or later == earlier + 1 for earlier, later in pairwise(counts))


def test_a_rack_may_leave_gpus_idle() -> None:
    found = size_llm("llama-3-8b", tokens=1e9, days=1e-6, on=["gb200"], gpus=(72, 72), global_batch_size=64,
                     is_exact_batch=True)  # fmt: skip
    (point,) = found.points
    assert point.gpus == 72
    assert point.estimate.gpus == 64
    assert point.gpu_hours == pytest.approx(point.days * 24 * 72)
    slow = size_llm("llama-3-8b", tokens=1e9, days=1e6, on=["gb200"], gpus=(72, 72), global_batch_size=64,
                    is_exact_batch=True)  # fmt: skip
    assert any("8 GPUs idle" in line for line in size_report.lines(slow))


def test_ctrl_c_gives_what_was_found(monkeypatch: pytest.MonkeyPatch) -> None:
    real: Any = plan_llm
    asked: list[object] = []

    def interrupted(*args: object, **keywords: object) -> object:
        asked.append(args)
        if len(asked) == 3:
            raise KeyboardInterrupt
        return real(*args, **keywords)

    monkeypatch.setattr("hpgo.llm.size.plan_llm", interrupted)
    found = size_llm("llama-3-8b", **RUN)
    assert not found.is_complete
    assert found.points
    assert "interrupted" in size_report.lines(found)[-1]


def test_the_next_command_plans_the_same_configuration() -> None:
    answer = within(4).answer("h100")
    assert answer is not None
    text = " ".join(size_report.lines(within(4), model="llama-3-8b")).replace("\\", " ")
    words = text[text.index("hpgo llm plan") :].split()[1 : -len(["-o", "llm-plan.json"])]
    done = CliRunner().invoke(group, [*words, "--json"])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["estimates"][found["fastest"] - 1]["step_s"] == answer.estimate.step_s


def test_the_command_prints_what_python_finds() -> None:
    words = ["llm", "size", "llama-3-8b", "--tokens", "200B", "--on", "h100", "--gpus", "8..160"]
    done = CliRunner().invoke(group, [*words, "--tokens-per-batch", str(512 * 8192), "--days", "4", "--json"])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    answer = within(4).answer("h100")
    assert answer is not None
    assert found["answers"] == [{"kind": "h100", "nodes": answer.nodes}]
    assert answer.days in [point["days"] for point in found["points"]]
    assert found == json.loads(json.dumps(size_report.document(within(4))))
    assert all(len(line) <= 80 for line in size_report.lines(within(4)))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--on", "h1000"], "unknown kind of node"),
        (["--on", "h100", "--quota", "b200=64"], "not compared"),
        (["--quota", "h100"], "no quota"),
        (["--gpus", "9..8"], "is empty"),
        (["--on", "gb200", "--gpus", "8..64"], "72 GPUs per node"),
        (["--days", "0"], "must be positive"),
        (["--days", "2weeks"], "write the number of days alone"),
        (["--tokens", "15"], "one step has 4,194,304 tokens"),
        (["--tokens-per-batch", "3"], "one sequence has 8192 tokens"),
        (["--budget", "5k"], "no prices"),
        (["--on", "h100", "--gpus", "8..64", "--framework", "torchtitan", "--precision", "fp8"], "fp8"),
        (["--on", "h100", "--gpus", "8..64", "--framework", "nonsense"], "nonsense"),
    ],
)
def test_wrong_options_are_refused(words: list[str], said: str) -> None:
    done = CliRunner().invoke(group, ["llm", "size", "llama-3-8b", "--tokens", "1B", *words])
    assert done.exit_code != 0
    assert said in done.output + str(done.exception)


def test_limits_that_no_cluster_meets_end_with_the_report_and_an_error() -> None:
    words = ["llm", "size", "llama-3-8b", "--tokens", "15T", "--days", "1", "--gpus", "8..16", "--on", "h100"]
    done = CliRunner().invoke(group, words)
    assert "h100: none of up to 16 GPUs" in done.stdout
    assert isinstance(done.exception, InfeasibleError)
    assert "--gpus" in done.exception.hint
