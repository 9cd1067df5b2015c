"""Prices of random plans, held against a second cost model that was written from the pages alone."""

from __future__ import annotations

import math
from dataclasses import replace
from random import Random

import chance
import pytest
import twin
import twin_steps

import hpgo

TIMES = (
    "forward_s",
    "backward_s",
    "transfer_s",
    "transfer_busy_s",
    "exposed_transfer_s",
    "exposed_forward_comm_s",
    "exposed_backward_comm_s",
    "grad_reduce_s",
    "exposed_grad_reduce_s",
    "capacity_bytes",
)
MEMORY = (
    "weights_bytes",
    "gradients_bytes",
    "optimizer_bytes",
    "buffers_bytes",
    "saved_activation_bytes",
    "recomputed_bytes",
)


def priced(seed: int) -> tuple[list[tuple[object, float, float]], hpgo.Plan | None]:
    """What the package and the twin say of the plan with this seed: names of terms, with both numbers."""
    random = Random(seed)
    case = chance.case(random, counts=(1, 7), batch_sizes=[(1,), (2,), (1, 2, 4), (1, 3), (2, 8)])
    assumed = twin.Assumed(
        micro_batches=random.randint(1, 8),
        micro_batch=case.minimum(random.choice([4, 5, 6, 8, 12, 17])),
        schedule=random.choice(["1f1b", "eager_1f1b", "gpipe"]),
        recompute=random.random() < 0.3,
        overlap=random.random() < 0.6,
        overlap_p2p_comm=seed % 3 > 0,
        include_data_loading=random.random() < 0.3,
        gradients_per_weight=random.choice([0.5, 1.0, 2.0]),
        optimizer_per_weight=random.choice([0.0, 2.0, 6.0]),
        shard_optimizer=random.random() < 0.4,
        # Without a draw, so that each seed keeps its plan.
        zero_stage=[0, 1, 2, 3, "auto"][seed // 3 % 5],
        reserved_bytes=random.choice([0.0, 1e8]),
    )
    plan = case.evaluate(assumed)
    ours = case.price(assumed, plan)
    if assumed.schedule != "gpipe" and random.random() < 0.6:
        windows = [min(random.randint(1, 9), assumed.micro_batches) for _ in case.stages]
        windows = windows if random.random() < 0.1 else sorted(windows, reverse=True)
        given = tuple(replace(stage, max_in_flight=window) for stage, window in zip(plan.stages, windows, strict=True))
        try:
            plan = replace(plan, stages=given).reevaluate()
        except hpgo.errors.ScheduleError:
            with pytest.raises(ValueError, match="wait for each other"):
                twin_steps.step_s(assumed.micro_batches, ours, windows)
            return [], None
    in_flight = [stage.max_in_flight for stage in plan.stages]
    terms: list[tuple[object, float, float]] = [
        ("step_s", plan.step_s, twin_steps.step_s(assumed.micro_batches, ours, in_flight)),
    ]
    for number, (stage, mine) in enumerate(zip(plan.stages, ours, strict=True)):
        terms.append(((number, "share"), stage.samples_per_replica, mine.share))
        terms += (((number, name), getattr(stage, name), getattr(mine, name)) for name in TIMES)
        terms += (((number, name), getattr(stage.memory, name), getattr(mine, name)) for name in MEMORY)
        activations = mine.activations_bytes(stage.max_in_flight)
        terms.append(((number, "activations_bytes"), stage.memory.activations_bytes, activations))
    return terms, plan


def differences(seeds: range) -> tuple[list[object], int]:
    """Terms that differ by more than 10⁻⁹, and how many plans have any."""
    wrong: list[object] = []
    plans = 0
    for seed in seeds:
        terms, plan = priced(seed)
        plans += plan is not None
        wrong += [(seed, *term) for term in terms if not math.isclose(*term[1:], rel_tol=1e-9)]
    return wrong, plans


def test_random_plans_cost_what_a_model_written_from_the_pages_says() -> None:
    wrong, plans = differences(range(1_000))
    assert wrong == []
    assert plans > 900


@pytest.mark.slow
def test_ten_thousand_random_plans_cost_what_a_model_written_from_the_pages_says() -> None:
    wrong, plans = differences(range(1_000, 12_000))
    assert wrong == []
    assert plans > 10_000


def test_evaluate_lets_stages_run_ahead_just_as_far_as_shortens_the_step() -> None:
    worse: list[object] = []
    compared = 0
    for seed in range(600):
        random = Random(seed)
        case = chance.case(random, counts=(3, 7), batch_sizes=[(1,)], branching=random.random() < 0.3)
        assumed = twin.Assumed(random.randint(3, 9), micro_batch=case.minimum(1))
        plan = case.evaluate(assumed)
        ours = case.price(assumed, plan)
        rows = {row: twin_steps.step_s(assumed.micro_batches, ours, row) for row in twin_steps.windows(assumed, ours)}
        best = min(rows, key=rows.__getitem__, default=None)
        compared += len(rows) > 1
        if best is not None and plan.step_s > rows[best] * (1 + 1e-9):
            worse.append((seed, best, rows[best], [stage.max_in_flight for stage in plan.stages], plan.step_s))
    assert worse == []
    assert compared > 200
