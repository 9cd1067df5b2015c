"""Backward passes whose halves a profile tells: schedules that split them pay both, and the others pay the whole."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from itertools import combinations, pairwise
from random import Random
from typing import TYPE_CHECKING

import chance
import pytest
import twin
import twin_steps
from refusals import refused
from toys import chain

import hpgo
from hpgo.model.formats import native

if TYPE_CHECKING:
    from pathlib import Path

SPLIT = ("zb_h1", "zb_h2", "zb")
SEVERAL = ("interleaved_zb", "zb_v", "v_half", "v_min", "dualpipe_v")


def with_halves(profile: hpgo.Profile, inputs: float, weights: float) -> hpgo.Profile:
    """The halves are these parts of each backward pass."""
    return replace(
        profile,
        layers=tuple(
            replace(
                layer,
                input_gradient_s=tuple(inputs * one for one in layer.backward_s),
                weight_gradient_s=tuple(weights * one for one in layer.backward_s),
            )
            for layer in profile.layers
        ),
    )


def nodes(devices: int, memory: str = "64 GB") -> hpgo.Cluster:
    return hpgo.Cluster.of(nodes=1, devices_per_node=devices, intra_gbit_s=80, inter_gbit_s=10, memory=memory)


def toy(seed: int, layers: int) -> hpgo.Profile:
    random = Random(seed)
    seconds = [random.uniform(0.1, 2.0) for _ in range(layers)]
    return chain(seconds, [random.uniform(0, 5e8) for _ in seconds], [random.uniform(0, 5e8) for _ in seconds])


def test_random_plans_with_split_passes_cost_what_a_model_written_from_the_pages_says() -> None:
    wrong: list[object] = []
    splits = 0
    for seed in range(500):
        random = Random(seed)
        case = chance.case(random, counts=(2, 7), batch_sizes=[(1,), (1, 2, 4), (2, 8)], halves=0.7)
        assumed = twin.Assumed(
            micro_batches=random.randint(1, 8),
            micro_batch=case.minimum(random.choice([4, 5, 8, 17])),
            recompute=random.random() < 0.3,
            overlap=random.random() < 0.6,
        )
        plan = case.evaluate(assumed, schedule=random.choice(SPLIT))
        ours = case.price(assumed, plan)
        words = [re.findall(r"\b\d+([FBIW])(\d+)", " ".join(row)) for row in plan.to_schedule().action_lists]
        action_lists = [[(kind, int(micro_batch)) for kind, micro_batch in row] for row in words]
        step_s = twin_steps.end_s(action_lists, ours, [stage.split_tail_s for stage in ours])
        terms = [(plan.step_s, step_s), (plan.timeline().makespan_s, step_s)]
        for stage, mine in zip(plan.stages, ours, strict=True):
            halves_s = stage.halves_s
            terms += zip(halves_s, (mine.input_gradient_s, mine.weight_gradient_s), strict=True)
            terms += [(stage.backward_s, mine.backward_s), (stage.exposed_grad_reduce_s, mine.split_tail_s)]
        wrong += [(seed, *both) for both in terms if not math.isclose(*both, rel_tol=1e-9, abs_tol=1e-12)]
        splits += any(action == "W" for row in action_lists for action, _ in row)
    assert wrong == []
    assert splits > 400


@pytest.mark.parametrize("schedule", [*SPLIT, *SEVERAL, "1f1b", "interleaved"])
@pytest.mark.parametrize("recompute", [False, True])
def test_halves_of_half_the_backward_are_what_a_profile_without_any_has(schedule: str, recompute: bool) -> None:
    for seed in range(3):
        profile = toy(seed, 6)
        plans = [
            hpgo.plan(
                one,
                nodes(2),
                global_batch_size=4,
                pipeline_micro_batch_size=1,
                schedule=schedule,  # type: ignore[arg-type]
                recompute=recompute,
            )
            for one in (profile, with_halves(profile, 0.5, 0.5))
        ]
        assert [stage.layers for stage in plans[0].stages] == [stage.layers for stage in plans[1].stages]
        assert plans[0].step_s == pytest.approx(plans[1].step_s, rel=1e-9)
        bounds_s = [plan.lower_bound_s or 0.0 for plan in plans]
        assert bounds_s[0] == pytest.approx(bounds_s[1], rel=1e-9)
        assert [stage.exposed_grad_reduce_s for stage in plans[0].stages] == pytest.approx(
            [stage.exposed_grad_reduce_s for stage in plans[1].stages]
        )


@pytest.mark.parametrize("schedule", ["1f1b", "eager_1f1b", "gpipe", "interleaved", "1f1b_overlap"])
def test_schedules_with_whole_passes_pay_those_whatever_the_halves_are(schedule: str) -> None:
    profile = toy(1, 6)
    question = {"global_batch_size": 4, "schedule": schedule}
    plain, told = (
        hpgo.plan(one, nodes(2), **question)  # type: ignore[arg-type]
        for one in (profile, with_halves(profile, 3.0, 4.0))
    )
    assert told.step_s == plain.step_s
    assert told.lower_bound_s == plain.lower_bound_s
    assert told.timeline().makespan_s == plain.timeline().makespan_s


@pytest.mark.parametrize("schedule", SPLIT)
def test_schedules_that_split_passes_pay_what_splitting_costs(schedule: str) -> None:
    profile = chain([1.0] * 4, [0.0] * 4, [1e6] * 4)  # forward 1 s, backward 2 s
    stages = [(4, [0])]
    question = {"global_batch_size": 3, "pipeline_micro_batch_size": 1, "schedule": schedule}
    for inputs, weights in [(0.5, 0.5), (0.75, 0.75), (0.5, 1.5)]:
        plan = hpgo.evaluate(with_halves(profile, inputs, weights), nodes(1), stages, **question)  # type: ignore[arg-type]
        forward_s = sum(layer.forward_s[0] for layer in profile.layers)
        backward_s = sum(layer.backward_s[0] for layer in profile.layers)
        assert plan.step_s == pytest.approx(3 * (forward_s + (inputs + weights) * backward_s))


@pytest.mark.parametrize("schedule", ["zb_v", "v_half", "dualpipe_v"])
@pytest.mark.parametrize("parts", [(0.3, 0.4), (0.9, 0.4), (0.1, 1.2)])
def test_no_cut_is_below_the_bound_and_none_is_better_than_the_plan(schedule: str, parts: tuple[float, float]) -> None:
    profile = with_halves(toy(5, 6), *parts)
    question = {"global_batch_size": 4, "pipeline_micro_batch_size": 1, "schedule": schedule}
    steps_s = []
    for inner in combinations(range(1, 6), 3):
        counts = [end - begin for begin, end in pairwise((0, *inner, 6))]
        stages = list(zip(counts, ([0], [1], [1], [0]), strict=True))
        steps_s.append(hpgo.evaluate(profile, nodes(2), stages, **question).step_s)  # type: ignore[arg-type]
    plan = hpgo.plan(profile, nodes(2), **question)  # type: ignore[arg-type]
    assert plan.lower_bound_s is not None
    assert plan.lower_bound_s <= min(steps_s) * (1 + 1e-9)
    assert plan.step_s <= min(steps_s) * (1 + 1e-9)


@pytest.mark.parametrize("schedule", ["zb_h1", "zb_v"])
def test_saved_plans_keep_their_halves_and_are_priced_anew_from_them(schedule: str, tmp_path: Path) -> None:
    profile = with_halves(toy(2, 6), 0.7, 0.6)
    plan = hpgo.plan(profile, nodes(2), global_batch_size=4, schedule=schedule)  # type: ignore[arg-type]
    plan.save(tmp_path / "plan.json")
    read = hpgo.Plan.read(tmp_path / "plan.json")
    assert read == plan
    assert read.reevaluate().step_s == plan.step_s
    assert read.timeline().makespan_s == pytest.approx(plan.step_s)


def test_profiles_keep_halves_in_files_and_need_both() -> None:
    profile = with_halves(toy(3, 3), 0.6, 0.5)
    for text in (native.write_yaml(profile), native.write_json(profile)):
        assert native.parse(text, name="") == profile
    layer = profile.layers[0]
    with refused(hpgo.errors.ProfileError, "invalid_profile", "weight_gradient_s"):
        replace(layer, weight_gradient_s=None)
    with refused(hpgo.errors.ProfileError, "invalid_profile", "1", "forward_s", "2", "input_gradient_s"):
        replace(layer, input_gradient_s=(1.0, 2.0))


def test_corrected_profiles_keep_halves_in_proportion() -> None:
    profile = with_halves(toy(4, 4), 0.7, 0.6)
    plan = hpgo.evaluate(profile, nodes(2), [(2, [0]), (2, [1])], global_batch_size=4, schedule="zb_h1")
    program = plan.program()
    slow = hpgo.simulate(
        program,
        input_gradient_s=[2 * stage.halves_s[0] for stage in plan.stages],
        weight_gradient_s=[2 * stage.halves_s[1] for stage in plan.stages],
    )
    found = hpgo.calibrate(plan, slow)
    assert found.corrected_step_s == pytest.approx(slow.makespan_s)
    for was, now in zip(profile.layers, found.profile.layers, strict=True):
        for key in ("backward_s", "input_gradient_s", "weight_gradient_s"):
            assert getattr(now, key) == pytest.approx([2 * one for one in getattr(was, key)])
