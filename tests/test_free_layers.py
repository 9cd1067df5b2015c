"""Layers that take no time: where they are decides what fits, so plans may cut before and behind them."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import combinations
from typing import Any

import pytest

import hpgo
from hpgo.planning.plans import Alternative


def layer(name: str, seconds: float, output: float, weights: float, saved: float) -> hpgo.Layer:
    return hpgo.Layer(name, name, (seconds,), (2 * seconds,), (output,), weights, (saved,))


def test_a_layer_that_takes_no_time_is_put_where_its_memory_is() -> None:
    layers = (layer("a", 1, 1e6, 2e9, 1e6), layer("x", 0, 3e9, 0, 3e9), layer("b", 1, 0, 0, 0))
    profile = hpgo.Profile("late", (1,), layers, (("a", "x"), ("a", "b")))
    cluster = hpgo.Cluster.of(nodes=1, devices_per_node=2, intra_gbit_s=100, memory="9 GB")
    found = hpgo.plan(profile, cluster, global_batch_size=8)
    assert [set(stage.layers) for stage in found.stages] == [{"a"}, {"x", "b"}]
    given = hpgo.evaluate(profile, cluster, [(["a"], [0]), (["x", "b"], [1])], global_batch_size=8)
    assert found.step_s == pytest.approx(given.step_s, rel=1e-12)
    assert found.step_s == pytest.approx(27.0, abs=0.1)
    assert found.cuts == "all"


def branching(rng: random.Random) -> hpgo.Profile:
    """Up to five layers, about half of them without time, most of which save something all the same."""
    count = rng.randint(3, 5)
    layers = []
    for index in range(count):
        is_free = rng.random() < 0.5
        saved = rng.choice([0.0, 1e9, 3e9])
        layers.append(
            layer(
                f"n{index}",
                0.0 if is_free else rng.uniform(0.5, 2),
                rng.choice([0.0, 1e6, 3e8]),
                0.0 if is_free else rng.choice([0.0, 1e9]),
                saved,
            )
        )
    pairs = list(combinations(range(count), 2))
    edges = tuple((f"n{start}", f"n{end}") for start, end in pairs if rng.random() < 0.5)
    return hpgo.Profile("any", (1,), tuple(layers), edges)


def down_sets(profile: hpgo.Profile) -> list[frozenset[str]]:
    ids = [layer.id for layer in profile.layers]
    sets = (frozenset(chosen) for size in range(len(ids) + 1) for chosen in combinations(ids, size))
    return [inside for inside in sets if all(start in inside for start, end in profile.edges if end in inside)]


def all_plans(profile: hpgo.Profile, devices: int) -> list[list[tuple[list[str], list[int]]]]:
    """Every nested choice of cuts, with every number of devices for each stage, in a row."""
    sets = down_sets(profile)
    whole = frozenset(layer.id for layer in profile.layers)

    def behind(begin: frozenset[str], first: int) -> list[list[tuple[list[str], list[int]]]]:
        if begin == whole:
            return [[]]
        plans = []
        for end in (end for end in sets if begin < end):
            for after in range(first + 1, devices + 1):
                stage = (sorted(end - begin), list(range(first, after)))
                plans += [[stage, *rest] for rest in behind(end, after)]
        return plans

    return behind(frozenset(), 0)


@pytest.mark.parametrize("block", range(6))
def test_no_cut_around_layers_without_time_gives_a_better_plan(block: int) -> None:
    compared = 0
    for seed in range(10 * block, 10 * block + 10):
        rng = random.Random(f"free {seed}")
        profile = branching(rng)
        rate = rng.choice([10, 100])
        memory = rng.choice([5e9, 8e9, 12e9, 20e9])
        cluster = hpgo.Cluster.of(nodes=1, devices_per_node=3, intra_gbit_s=rate, memory=memory)
        asked: dict[str, Any] = {"global_batch_size": 4, "recompute": rng.choice([False, True])}
        given = (hpgo.evaluate(profile, cluster, stages, **asked) for stages in all_plans(profile, 3))
        best_s = min((plan.step_s for plan in given if plan.fits), default=None)
        if best_s is None:
            with pytest.raises(hpgo.errors.InfeasibleError):
                hpgo.plan(profile, cluster, **asked)
            continue
        found = hpgo.plan(profile, cluster, **asked)
        assert found.lower_bound_s is not None
        assert found.lower_bound_s <= best_s * (1 + 1e-9), seed
        assert found.step_s <= best_s * (1 + 1e-9), seed
        compared += 1
    assert compared > 3


def test_a_model_without_any_times_is_planned_in_no_time() -> None:
    """Paths of no length can't get shorter, and annealing must not wait until they do."""
    layers = [
        hpgo.Layer(name, "Linear", (0.0, 0.0), (0.0, 0.0), output, weights)
        for name, output, weights in (
            ("a", (1.07e6, 5.65e6), 263.6e6), ("b", (9.3e4, 37.3e4), 56.6e6), ("c", (8.1e5, 4.3e6), 55.4e6),
        )
    ]  # fmt: skip
    ties = (hpgo.TiedWeight(("c", "a"), 55.4e6),)
    profile = hpgo.Profile("untimed", (2, 8), tuple(layers), (("b", "c"),), tied_weights=ties)
    cluster = hpgo.Cluster.of(nodes=1, devices_per_node=4, intra_gbit_s=0.2, memory="658 MB")
    options: dict[str, Any] = {"recompute": True, "memory": hpgo.MemoryModel(1, 0)}
    plan = hpgo.plan(profile, cluster, global_batch_size=6, **options)
    assert len(plan.stages) == 2
    assert plan.lower_bound_s == 0
    assert plan.step_s > 0
    assert "inf × the best" not in str(plan)
    assert "not known to be near the best" in str(plan)


def test_alternatives_to_a_step_of_no_length_are_as_long_or_longer() -> None:
    layers = tuple(hpgo.Layer(name, "Linear", (0.0,), (0.0,), (1e6,), 1e6) for name in "ab")
    cluster = hpgo.Cluster.of(nodes=1, devices_per_node=2, intra_gbit_s=1)
    plan = hpgo.plan(hpgo.Profile("untimed", (1,), layers, (("a", "b"),)), cluster, global_batch_size=2)
    assert plan.step_s == 0
    for step_s, said in ((0.0, "0 s, as long (micro-batch 1): because"), (1.0, "1 s, longer (micro-batch 1): because")):
        other = Alternative("another", step_s, 1, 1, 0.0, "because")
        shown = " ".join(str(replace(plan, alternatives=(other,))).split())
        assert f"another {said}" in shown
