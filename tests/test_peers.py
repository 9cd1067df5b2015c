"""Objectives of other planners, as the comparison computes them for plans of either side."""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING

import pytest
from peers import alpa, metis, partitioning, pipedream, piper

import hpgo

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def chain() -> hpgo.Profile:
    return hpgo.Profile.chain(
        "toy", batch_size=2, forward_s=[1, 2, 1], backward_s=[2, 4, 2], activation_bytes=[1e9, 2e9, 0],
        parameter_bytes=[0, 1e9, 0],
    )  # fmt: skip


def test_pipedream_s_objective_is_its_slowest_stage_or_transfer(chain: hpgo.Profile) -> None:
    first, second, third = (layer.id for layer in chain.layers)
    # Two replicas: nine seconds and 4 · 1 · 1e9 / (2 · rate) for gradients, halved.
    sums_s = 4 * 1e9 / (2 * pipedream.BYTES_PER_S)
    assert pipedream.slowest_s(chain, [([first, second], 2), ([third], 1)]) == pytest.approx((9 + sums_s) / 2)


def test_partitions_load_is_work_and_each_tensor_once(chain: hpgo.Profile) -> None:
    first, second, third = (layer.id for layer in chain.layers)
    moved_s = 2 * (1e9 + 2e9) / partitioning.BYTES_PER_S
    assert partitioning.load_ms(chain, [([first], 1), ([second], 1), ([third], 1)], 2) == pytest.approx(
        1e3 * (6 + moved_s)
    )


def test_the_processor_sends_for_free_and_takes_ten_times_as_long(chain: hpgo.Profile) -> None:
    first, second, third = (layer.id for layer in chain.layers)
    stages = [([first, second], 1), ([third], 1)]
    assert partitioning.load_ms(chain, stages, 2) == pytest.approx(1e3 * (9 + 2 * 2e9 / partitioning.BYTES_PER_S))
    assert partitioning.load_ms(chain, stages, 2, processor=1) == pytest.approx(30e3)


@pytest.mark.parametrize(
    ("name", "passes", "load_ms"),
    [("bert24_inference", 1, 17.78990625), ("bert24_training", 2, 41.7458125), ("resnet50_inference", 1, 33.774666016)],
)  # fmt: skip
def test_plans_without_overlap_have_the_loads_that_dnn_partitioning_proves_shortest(
    reference: Path, name: str, passes: int, load_ms: float
) -> None:
    """Its program `throughput-dp/dp.cpp` printed the loads, of the fullest of six accelerators and a processor."""
    profile = hpgo.read_profile(reference / f"dnn-partitioning/{name}.json", batch_size=1)
    plan, _ = partitioning.best_plan(profile, 6, passes)
    processor = partitioning.processor_of(plan, 6)
    assert partitioning.load_ms(profile, partitioning.stages_of(plan), passes, processor) == pytest.approx(load_ms)
    assert 1e3 * max(sum(stage.occupied_s) for stage in plan.stages) == pytest.approx(load_ms)
    assert plan.optimality_gap == pytest.approx(0, abs=1e-6)


def test_partitions_run_in_an_order_that_respects_the_edges(chain: hpgo.Profile) -> None:
    first, second, third = (layer.id for layer in chain.layers)
    found = {"fpgas": [{"nodes": [third]}, {"nodes": []}], "cpus": [{"nodes": [first, second]}]}
    assert partitioning.stages_in_order(chain, found) == [([first, second], [2]), ([third], [0])]


def test_alpa_s_objective_is_the_sum_and_the_slowest_again(chain: hpgo.Profile) -> None:
    first, second, third = (layer.id for layer in chain.layers)
    # Micro-batches of two samples: nine seconds on two devices, and three on one.
    assert alpa.objective_s(chain, [([first, second], 2), ([third], 1)], 2, 8) == pytest.approx(4.5 + 3 + 3 * 4.5)


def test_metis_cuts_evenly() -> None:
    """Its documented example: ten layers on four stages."""
    names = [str(number) for number in range(10)]
    stages = metis.even_stages(names, 4, 2)
    assert [len(layers) for layers, _ in stages] == [3, 2, 2, 3]
    assert [name for layers, _ in stages for name in layers] == names


def test_piper_s_objective_counts_activations_in_flight() -> None:
    costs = {"timePerSample": 2.0, "parameterSize": 6e9, "memoryUsageA": 10.0, "memoryUsageB": 100.0}
    again = costs | {"timePerSample": 3.0, "memoryUsageA": 1.0}
    model = piper.Model(
        {
            "nodes": [
                {"id": 0, "TMPCs": {"1": [costs | {"syncTimeFw": {}, "syncTimeBw": {"1": 5e9}}, again]}},
                {"id": 1, "TMPCs": {"1": [costs | {"syncTimeFw": {"0": 1e9}, "syncTimeBw": {}}, again]}},
            ],
            "edges": [{"sourceId": 0, "destId": 1, "communicationCost": 3e9}],
        }
    )
    stages = [(["0"], 1), (["1"], 2)]
    moved_s, sums_s = 2 * 8e9 / piper.BYTES_PER_S, 4 * 6e9 / 2 / piper.SAMPLES / piper.BYTES_PER_S
    assert model.seconds_per_sample(stages, 1, 130, recompute=[False] * len(stages)) == pytest.approx(
        max(2 + moved_s, (2 + 2 * 4e9 / piper.BYTES_PER_S) / 2 + sums_s)
    )
    # The first stage has three micro-batches in flight.
    assert model.seconds_per_sample(stages, 1, 129, recompute=[False] * len(stages)) == inf
