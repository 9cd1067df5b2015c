"""Plans with virtual stages on nodes that differ in speed or in their number of devices, beside all plans."""

from __future__ import annotations

from itertools import combinations, pairwise, product
from random import Random
from typing import TYPE_CHECKING, Any

import pytest

import hpgo
from hpgo.hardware.cluster import Device, Link, Node

if TYPE_CHECKING:
    from collections.abc import Iterator

SHAPES = ((2, 1), (1, 2), (1, 1, 1), (2, 2), (1, 3), (1, 1, 2))
"""Devices of each node."""
SEEDS = (31, 50, 51, 69, 76, 96, 121)
"""Questions whose best plan needs a division of the devices, an order of nodes, or a number of groups that only small
clusters try. Without these the steps are 3 % to 10 % longer."""


def question(seed: int) -> tuple[hpgo.Profile, hpgo.Cluster, dict[str, Any]]:
    """Four to seven layers, some of them short or empty, on up to four devices of several speeds."""
    dice = Random(f"mix-{seed}")
    layers = dice.randrange(4, 8)
    forward_s = [dice.choice([0, 0.2, 1, 1, 2]) * dice.uniform(0.5, 1.5) * 1e-3 for _ in range(layers)]
    forward_s[0] += 1e-4  # at least one layer takes time
    profile = hpgo.Profile.chain(
        "mixed",
        batch_size=1,
        forward_s=forward_s,
        backward_s=[time_s * dice.uniform(1, 2.5) for time_s in forward_s],
        activation_bytes=[10 ** dice.uniform(4, 6.5) for _ in forward_s],
        parameter_bytes=[10 ** dice.uniform(4, 6.5) for _ in forward_s],
    )
    counts = dice.choice(SHAPES)
    nodes = tuple(
        Node(Device(f"d{index}", 1e15, dice.choice([0.5, 0.7, 1, 1, 2, 3])), count)
        for index, count in enumerate(counts)
    )
    intra = Link(*[10 ** dice.uniform(8.5, 11)] * 2, dice.choice([0, 1e-4]))
    inter = Link(*[10 ** dice.uniform(8.5, 10)] * 2, dice.choice([0, 1e-5]))
    batch, schedule = dice.choice([6, 8, 12]), dice.choice(["interleaved", "interleaved_zb", "zb_v"])
    return profile, hpgo.Cluster("mixed", nodes, intra, inter), {"global_batch_size": batch, "schedule": schedule}


def groups_of(cluster: hpgo.Cluster, ranks: int) -> Iterator[list[list[int]]]:
    """Assign devices to ranks or to none, in every way that differs in more than the numbers of equal devices."""
    node_of = [index for index, node in enumerate(cluster.nodes) for _ in range(node.count)]
    seen = set()
    for owners in product(range(-1, ranks), repeat=cluster.devices):
        groups = [[device for device, owner in enumerate(owners) if owner == rank] for rank in range(ranks)]
        key = tuple(tuple(node_of[device] for device in group) for group in groups)
        if all(groups) and key not in seen:
            seen.add(key)
            yield groups


def steps_s(profile: hpgo.Profile, cluster: hpgo.Cluster, options: dict[str, Any]) -> Iterator[float]:
    """Evaluate all plans with two or three stages on each device."""
    layers, batch = len(profile.layers), options["global_batch_size"]
    is_v_shaped = options["schedule"] == "zb_v"
    for ranks, count in product(range(2, cluster.devices + 1), (2,) if is_v_shaped else (2, 3)):
        order = [*range(ranks), *reversed(range(ranks))] if is_v_shaped else [*range(ranks)] * count
        for groups, inner in product(groups_of(cluster, ranks), combinations(range(1, layers), ranks * count - 1)):
            ends = [end - begin for begin, end in pairwise((0, *inner, layers))]
            stages = [(length, groups[rank]) for length, rank in zip(ends, order, strict=True)]
            for size in range(max(map(len, groups)), batch + 1):
                if batch % size == 0:
                    evaluated = hpgo.evaluate(profile, cluster, stages, pipeline_micro_batch_size=size, **options)
                    yield evaluated.step_s


@pytest.mark.parametrize("seed", SEEDS)
def test_no_plan_on_few_different_devices_is_clearly_shorter(seed):
    profile, cluster, options = question(seed)
    assert hpgo.plan(profile, cluster, **options).step_s <= min(steps_s(profile, cluster, options)) * 1.02
