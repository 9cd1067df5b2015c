"""Objectives of other planners, as the comparison computes them for plans of either side."""

from __future__ import annotations

from math import inf

import pytest
from peers import alpa, metis, partitioning, pipedream, piper

import hpgo


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
