"""A file may list the layers of a graph in any order: plans, bounds and prices are the same."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from itertools import permutations
from typing import Any

import pytest

import hpgo

CASES = 40


def branching(rng: random.Random) -> hpgo.Profile:
    """Four to nine layers, some alike, some without time, output or weights."""
    count = rng.randint(4, 9)
    layers = tuple(
        hpgo.Layer(
            f"n{index}",
            "layer",
            (rng.choice([0.0, 1.0, 1.0, rng.uniform(0.2, 2)]),),
            (rng.choice([0.0, 1.0, 1.0, rng.uniform(0.2, 3)]),),
            (rng.choice([0.0, 1e6, 1e8, rng.uniform(1e6, 1e9)]),),
            rng.choice([0.0, 1e8, rng.uniform(1e8, 2e9)]),
        )
        for index in range(count)
    )
    pairs = [(start, end) for start in range(count) for end in range(start + 1, count)]
    edges = tuple((f"n{start}", f"n{end}") for start, end in pairs if rng.random() < 0.35)
    return hpgo.Profile("branching", (1,), layers, edges)


def shuffled(rng: random.Random, profile: hpgo.Profile) -> hpgo.Profile:
    layers, edges = list(profile.layers), list(profile.edges)
    rng.shuffle(layers)
    rng.shuffle(edges)
    return replace(profile, layers=tuple(layers), edges=tuple(edges))


def question(rng: random.Random) -> tuple[hpgo.Cluster, dict[str, Any]]:
    cluster = hpgo.Cluster.of(
        nodes=2,
        devices_per_node=2,
        intra_gbit_s=rng.choice([10, 100]),
        inter_gbit_s=rng.choice([5, 25]),
        memory=rng.choice([8e9, 16e9, 64e9]),
    )
    return cluster, {"global_batch_size": 8, "schedule": rng.choice(["1f1b", "eager_1f1b", "gpipe"])}


def answer(profile: hpgo.Profile, cluster: hpgo.Cluster, asked: dict[str, Any]) -> object:
    try:
        plan = hpgo.plan(profile, cluster, **asked)
    except hpgo.errors.InfeasibleError as error:
        return str(error)
    stages = [(stage.layers, stage.devices, stage.max_in_flight) for stage in plan.stages]
    return plan.step_s, plan.lower_bound_s, plan.pipeline_micro_batch_size, stages


@pytest.mark.parametrize("block", range(4))
def test_layers_listed_in_another_order_make_the_same_plan(block: int) -> None:
    for seed in range(block * CASES, (block + 1) * CASES):
        rng = random.Random(f"lines {seed}")
        profile = branching(rng)
        cluster, asked = question(rng)
        assert answer(profile, cluster, asked) == answer(shuffled(rng, profile), cluster, asked), seed


@pytest.mark.parametrize("block", range(4))
def test_layers_of_other_names_make_a_plan_that_takes_as_long(block: int) -> None:
    for seed in range(block * CASES, (block + 1) * CASES):
        rng = random.Random(f"names {seed}")
        profile = branching(rng)
        cluster, asked = question(rng)
        ids = [f"other{index}" for index in range(len(profile.layers))]
        rng.shuffle(ids)
        name = dict(zip((layer.id for layer in profile.layers), ids, strict=True))
        renamed = replace(
            profile,
            layers=tuple(replace(layer, id=name[layer.id]) for layer in profile.layers),
            edges=tuple((name[start], name[end]) for start, end in profile.edges),
        )
        steps = []
        for given in (profile, renamed):
            try:
                steps.append(hpgo.plan(given, cluster, **asked).step_s)
            except hpgo.errors.InfeasibleError:
                steps.append(math.inf)
        assert steps[0] == pytest.approx(steps[1], rel=1e-12), seed


def synchronised_s(profile: hpgo.Profile, backward: tuple[int, ...], s_per_byte: float) -> float:
    """What is left to synchronise when layers have run backward in this order."""
    left_s = 0.0
    for index in backward:
        layer = profile.layers[index]
        left_s = max(0.0, left_s - layer.backward_s[0]) + layer.parameter_bytes * s_per_byte
    return left_s


def test_branches_run_backward_in_an_order_that_leaves_little_to_synchronise() -> None:
    alone = hpgo.Cluster.of(nodes=1, devices_per_node=1, intra_gbit_s=1, memory="1 TB")
    lost = maximum = 0.0
    for seed in range(100):
        profile = branching(random.Random(f"sync {seed}"))
        ids = [layer.id for layer in profile.layers[:6]]
        edges = tuple(edge for edge in profile.edges if set(edge) <= set(ids))
        profile = replace(profile, layers=profile.layers[:6], edges=edges)
        weights = sum(layer.parameter_bytes for layer in profile.layers)
        backward_s = sum(layer.backward_s[0] for layer in profile.layers)
        if not weights or not backward_s:
            continue
        pairs = [(ids.index(start), ids.index(end)) for start, end in edges]
        orders = [
            order
            for order in permutations(range(len(ids)))
            if all(order.index(start) > order.index(end) for start, end in pairs)
        ]
        plan = hpgo.evaluate(profile, alone, [(len(ids), [0])], global_batch_size=1)
        ours = tuple(ids.index(name) for name in reversed(plan.stages[0].layers))
        assert ours in orders
        rate = backward_s / weights
        tails = [synchronised_s(profile, order, rate) for order in orders]
        lost += synchronised_s(profile, ours, rate) - min(tails)
        maximum += max(tails) - min(tails)
    assert lost < 0.05 * maximum
