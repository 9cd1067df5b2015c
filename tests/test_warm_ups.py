"""How far stages run ahead: `evaluate` finds the best of what the planner may choose, and agrees with it."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import product
from typing import Any

import pytest

import hpgo


def pipeline(seed: int) -> tuple[hpgo.Plan, int]:
    """A straight pipeline, as priced, and its number of micro-batches; links with latency make windows matter."""
    rng = random.Random(f"windows {seed}")
    count = rng.randint(2, 5)
    profile = hpgo.Profile.chain(
        "chain",
        batch_size=1,
        forward_s=[rng.choice([0.2, 0.5, 1, 2]) * rng.uniform(0.9, 1.1) for _ in range(count)],
        backward_s=[rng.choice([0.2, 1, 2]) * rng.uniform(0.9, 1.1) for _ in range(count)],
        activation_bytes=[rng.choice([1e6, 1e8, 1e9, 2e9]) * rng.uniform(0.5, 1) for _ in range(count)],
        parameter_bytes=[rng.choice([0, 1e8, 1e9]) for _ in range(count)],
    )
    cluster = hpgo.Cluster.of(
        nodes=count,
        devices_per_node=1,
        intra_gbit_s=100,
        inter_gbit_s=rng.choice([5, 20, 100]),
        latency=rng.choice([0, 0.3, 1.0]),
        memory=rng.choice([20e9, 40e9, 100e9]),
    )
    micro_batches = rng.choice([4, 6, 8, 12])
    stages = [(1, [device]) for device in range(count)]
    plan = hpgo.evaluate(profile, cluster, stages, global_batch_size=micro_batches, pipeline_micro_batch_size=1)
    return plan, micro_batches


def with_windows(plan: hpgo.Plan, windows: list[int]) -> hpgo.Plan:
    stages = (replace(stage, max_in_flight=window) for stage, window in zip(plan.stages, windows, strict=True))
    return replace(plan, stages=tuple(stages)).reevaluate()


def choices(plan: hpgo.Plan, micro_batches: int) -> list[list[int]]:
    """All windows that keep every stage busy, fit, and never grow along the stages."""
    ranges = []
    for index, stage in enumerate(plan.stages):
        from_end = len(plan.stages) - index
        spare = stage.capacity_bytes - stage.memory.total_bytes + stage.memory.activations_bytes
        minimum, maximum = min(from_end, micro_batches), min(2 * from_end - 1, micro_batches)
        ranges.append(
            [window for window in range(minimum, maximum + 1) if window * stage.saved_activation_bytes <= spare]
        )
    return [list(windows) for windows in product(*ranges) if list(windows) == sorted(windows, reverse=True)]


@pytest.mark.parametrize("block", range(4))
def test_the_best_windows_are_found_for_given_stages(block: int) -> None:
    compared = 0
    for seed in range(30 * block, 30 * block + 30):
        plan, micro_batches = pipeline(seed)
        if not plan.fits:
            continue
        given = [with_windows(plan, windows) for windows in choices(plan, micro_batches)]
        best_s = min(other.step_s for other in given if other.fits)
        assert plan.step_s == pytest.approx(best_s, rel=1e-12), seed
        compared += 1
    assert compared > 10


@pytest.mark.parametrize("schedule", ["1f1b", "eager_1f1b", "gpipe"])
def test_a_plan_priced_once_more_takes_as_long(schedule: Any) -> None:
    for seed in range(40):
        rng = random.Random(f"again {seed}")
        count = rng.randint(3, 8)
        column: dict[str, Any] = {
            name: [rng.uniform(low, high) for _ in range(count)]
            for name, low, high in (
                ("forward_s", 0.2, 2),
                ("backward_s", 0.2, 3),
                ("activation_bytes", 1e6, 2e9),
                ("parameter_bytes", 0, 2e9),
            )
        }
        profile = hpgo.Profile.chain("chain", batch_size=1, **column)
        rate, memory = rng.choice([5, 25, 100]), rng.choice([16e9, 32e9, 64e9])
        cluster = hpgo.Cluster.of(nodes=2, devices_per_node=3, intra_gbit_s=100, inter_gbit_s=rate, memory=memory)
        try:
            plan = hpgo.plan(profile, cluster, global_batch_size=12, schedule=schedule)
        except hpgo.errors.InfeasibleError:
            continue
        stages = [(stage.layers, stage.devices) for stage in plan.stages]
        again = hpgo.evaluate(profile, cluster, stages, global_batch_size=12, schedule=schedule)
        assert again.step_s == pytest.approx(plan.step_s, rel=1e-12), seed
        assert plan.reevaluate().step_s == plan.step_s
