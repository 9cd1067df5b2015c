"""Plans that take hardly longer and hold much less: as an alternative of every report, and on demand."""

from __future__ import annotations

import json
import random
from dataclasses import replace

import pytest
from click.testing import CliRunner
from refusals import refused

import hpgo
from hpgo.cli.main import group
from hpgo.show.report import table


def peak_bytes(plan: hpgo.Plan) -> float:
    return max(stage.memory.total_bytes for stage in plan.stages)


@pytest.fixture(scope="module")
def roomy() -> hpgo.Plan:
    """Data parallelism in a micro-batch much larger than it needs."""
    return hpgo.plan(hpgo.read_profile("resnet-50"), hpgo.Cluster.preset("dapple-a"), global_batch_size=8192)


def test_the_report_names_a_plan_that_is_as_fast_and_much_smaller(roomy: hpgo.Plan) -> None:
    *_, less = roomy.alternatives
    assert less.name == "less memory"
    smaller = roomy.alternative("less memory")
    assert smaller.step_s <= 1.01 * roomy.step_s
    assert peak_bytes(smaller) <= 0.75 * peak_bytes(roomy)
    assert smaller.reevaluate().step_s == smaller.step_s
    text = " ".join(table(roomy).split())
    assert "less memory 1.77 s, as long" in text
    assert "3.83 GB instead of 14.1 GB on the fullest device" in text


def test_a_plan_that_needs_its_memory_has_no_such_alternative() -> None:
    plan = hpgo.plan(hpgo.read_profile("bert-48"), hpgo.Cluster.preset("dapple-a"), global_batch_size=64)
    assert [other.name for other in plan.alternatives] == ["data parallelism", "pipeline parallelism only"]
    assert plan.memory_preference is None


def toy(seed: int) -> tuple[hpgo.Profile, hpgo.Cluster]:
    given = random.Random(seed)
    draw = lambda maximum: [given.uniform(0.2, 1.0) * maximum for _ in range(4)]  # noqa: E731
    profile = hpgo.Profile.chain(
        f"toy-{seed}", batch_size=1, forward_s=draw(1e-3), backward_s=draw(2e-3), activation_bytes=draw(50e6),
        parameter_bytes=draw(100e6),
    )  # fmt: skip
    rate = given.choice([10, 100, 1000])
    return profile, hpgo.Cluster.of(nodes=1, devices_per_node=3, intra_gbit_s=rate, inter_gbit_s=rate, memory="8 GB")


HALVES = (([0], [1]), ([0, 1], [2]), ([0], [1, 2]))
SHAPES = [
    *([(4, list(range(count)))] for count in (1, 2, 3)),
    *([(cut, first), (4 - cut, second)] for cut in (1, 2, 3) for first, second in HALVES),
    *([(a, [0]), (b, [1]), (c, [2])] for a, b, c in ((1, 1, 2), (1, 2, 1), (2, 1, 1))),
]


@pytest.mark.parametrize("within", [0.0, 0.05, 0.3])
@pytest.mark.parametrize("seed", range(6))
def test_no_plan_of_all_within_the_tie_holds_less(seed: int, within: float) -> None:
    profile, cluster = toy(seed)
    shortest = hpgo.plan(profile, cluster, global_batch_size=8)
    tied = hpgo.plan(profile, cluster, global_batch_size=8, tolerance=within)
    assert tied.memory_preference is not None
    assert (tied.memory_preference.step_s, tied.memory_preference.peak_bytes) == (shortest.step_s, peak_bytes(shortest))
    assert shortest.step_s <= tied.step_s * (1 + 1e-9) <= (1 + within) * shortest.step_s * (1 + 2e-9)
    assert tied.lower_bound_s == shortest.lower_bound_s
    assert tied.reevaluate().step_s == tied.step_s
    held = []
    for stages in SHAPES:
        for size in (1, 2, 4, 8):
            if size >= max(len(devices) for _, devices in stages):
                given = hpgo.evaluate(profile, cluster, stages, global_batch_size=8, pipeline_micro_batch_size=size)
                if given.step_s <= (1 + within) * shortest.step_s:
                    held.append(peak_bytes(given))
    assert held
    assert peak_bytes(tied) <= 1.03 * min(held)  # the search ends when it has come so close


def test_a_tie_is_reported_with_its_distance_and_survives_files(roomy: hpgo.Plan) -> None:
    profile, cluster = hpgo.read_profile("bert-48"), hpgo.Cluster.preset("dapple-a")
    tied = hpgo.plan(profile, cluster, global_batch_size=64, tolerance=0.15)
    assert tied.optimality_gap is not None
    assert 0 < tied.optimality_gap <= 0.15
    text = " ".join(table(tied).split())
    assert "within 15 % of the shortest step found, 837 ms" in text
    assert "instead of 6.57 GB on the fullest device" in text
    assert "is this plan" not in text
    again = hpgo.Plan.from_json(tied.to_json())
    assert again.memory_preference == tied.memory_preference
    assert str(again) == str(tied)


def test_the_shortest_plan_may_be_the_one_with_the_least_memory() -> None:
    profile, cluster = hpgo.read_profile("bert-48"), hpgo.Cluster.preset("dapple-a")
    tied = hpgo.plan(profile, cluster, global_batch_size=64, tolerance=0)
    assert replace(tied, memory_preference=None, alternatives=()) == replace(
        hpgo.plan(profile, cluster, global_batch_size=64), alternatives=()
    )
    assert "that plan itself" in " ".join(table(tied).split())


def test_the_command_line_takes_percents_and_shares() -> None:
    ask = ["plan", "bert-48", "-c", "dapple-a", "-b", "64", "--json", "--tolerance"]
    for words in ("15%", "15 %", "0.15"):
        assert json.loads(CliRunner().invoke(group, [*ask, words]).stdout)["memory_preference"][
            "tolerance"
        ] == pytest.approx(0.15)
    for words in ("150%", "-1%", "much", "nan"):
        refused = CliRunner().invoke(group, [*ask, words])
        assert refused.exit_code == 2
        assert "is not a percentage from 0 to 100" in refused.stderr


@pytest.mark.parametrize("tolerance", [-0.1, 1.5, float("nan"), "1%", True])
def test_shares_that_are_none_are_refused(tolerance: object) -> None:
    profile, cluster = toy(0)
    with refused(hpgo.errors.ArgumentError, "invalid_argument", name="tolerance"):
        hpgo.plan(profile, cluster, global_batch_size=8, tolerance=tolerance)  # type: ignore[arg-type]


def test_schedules_without_a_search_of_their_own_have_no_tie() -> None:
    profile, cluster = toy(0)
    for schedule in ("auto", "zb_h1"):
        with refused(hpgo.errors.ArgumentError, "conflict", "tolerance") as caught:
            hpgo.plan(profile, cluster, global_batch_size=8, schedule=schedule, tolerance=0.1)
        assert "1f1b" in caught.value.hint


def test_a_deadline_ends_the_search_for_less_memory_with_a_plan_within_the_tie() -> None:
    profile, cluster = hpgo.read_profile("bert-48"), hpgo.Cluster.preset("h100")
    tied = hpgo.plan(profile, cluster, global_batch_size=1024, tolerance=0.05, time_limit_s=0.2)
    assert tied.memory_preference is not None
    assert tied.step_s <= 1.05 * tied.memory_preference.step_s
    assert peak_bytes(tied) <= tied.memory_preference.peak_bytes
