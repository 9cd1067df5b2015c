"""How long orders and simulations take from Python: `pytest tests/bench_simulate.py -o addopts= --benchmark-only`."""

from __future__ import annotations

import pytest

import hpgo

SIZES = [(8, 64), (64, 1_024), (1_024, 4_096)]


@pytest.mark.parametrize(("ranks", "micro_batches"), SIZES)
def test_order(benchmark, ranks: int, micro_batches: int) -> None:
    benchmark.pedantic(
        hpgo.schedule, ("1f1b",), {"ranks": ranks, "micro_batches": micro_batches}, rounds=11, warmup_rounds=1
    )


@pytest.mark.parametrize(
    ("name", "activation_limit"), [("zb", None), ("zb", 16), ("hanayo", None), ("v_half", None), ("v_min", None)]
)
def test_searched_order(benchmark, name: str, activation_limit: int | None) -> None:
    benchmark.pedantic(
        hpgo.schedule, (name,), {"ranks": 16, "micro_batches": 128, "activation_limit": activation_limit}, rounds=40
    )


@pytest.mark.parametrize(("ranks", "micro_batches"), SIZES)
def test_simulation(benchmark, ranks: int, micro_batches: int) -> None:
    order = hpgo.schedule("1f1b", ranks=ranks, micro_batches=micro_batches)
    forward_s = [1 + 0.001 * (rank % 7) for rank in range(ranks)]
    benchmark.pedantic(hpgo.simulate, (order,), {"forward_s": forward_s}, rounds=11, warmup_rounds=1)


@pytest.mark.parametrize("part", ["columns", "measures", "transfers", "slack"])
def test_what_is_computed_when_it_is_asked_for(benchmark, part: str) -> None:
    order = hpgo.schedule("1f1b", ranks=1_024, micro_batches=4_096)
    ask = {
        "columns": lambda timeline: (timeline.rank, timeline.start_s),
        "measures": lambda timeline: timeline.measures,
        "transfers": lambda timeline: timeline.transfer_start_s,
        "slack": lambda timeline: timeline.slack_s,
    }[part]
    benchmark.pedantic(ask, setup=lambda: ((hpgo.simulate(order),), {}), rounds=5, warmup_rounds=1)
