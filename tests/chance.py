"""Profiles, clusters and plans at random, from a seed: small, and with everything in them that a price heeds."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import hpgo

if TYPE_CHECKING:
    from random import Random


def between(chance: Random, low: float, high: float) -> float:
    """As often in one decade as in another."""
    return math.exp(chance.uniform(math.log(low), math.log(high)))


def profile(chance: Random, *, batch_sizes: tuple[int, ...], count: int, branching: bool) -> hpgo.Profile:
    """Layers in any order of lines; some are free, without weights or output, or load data."""

    def column(low: float, high: float, never: float) -> tuple[float, ...]:
        if chance.random() < never:
            return (0.0,) * len(batch_sizes)
        return tuple(between(chance, low, high) * size for size in batch_sizes)

    ids = [f"layer{number}" for number in range(count)]
    layers = [
        hpgo.Layer(
            name,
            chance.choice(["Input0", "Linear"]),
            forward_s=column(0.01, 1, 0.1),
            backward_s=column(0.01, 2, 0.2),
            activation_bytes=column(1e5, 1e8, 0.1),
            parameter_bytes=0.0 if chance.random() < 0.25 else between(chance, 1e5, 1e9),
            saved_bytes=column(1e5, 1e9, 0.1) if chance.random() < 0.6 else None,
        )
        for name in ids
    ]
    edges = list(pairwise(ids))
    if branching:
        edges = [(a, b) for number, a in enumerate(ids) for b in ids[number + 1 :] if chance.random() < 0.4]
    chance.shuffle(layers)
    return hpgo.Profile("random", batch_sizes, tuple(layers), tuple(edges))


def cluster(chance: Random) -> hpgo.Cluster:
    """One to four machines of one to four devices; some are slow, links may have latencies."""

    def link() -> dict[str, float]:
        return {
            "bandwidth": between(chance, 1e7, 1e9),
            "collective": between(chance, 1e7, 1e9),
            "latency": chance.choice([0.0, between(chance, 1e-4, 1e-1)]),
        }

    machines = [
        {
            "devices": chance.randint(1, 4),
            "memory": between(chance, 1e9, 1e11),
            "speed": chance.choice([0.5, 1.0, 2.0]),
            "type": f"device{number}",
        }
        for number in range(chance.randint(1, 4))
    ]
    document = {"hpgo_cluster": 1, "name": "random", "machines": machines, "intra": link(), "inter": link()}
    return hpgo.Cluster.from_document(document, file="random")


def stages(chance: Random, profile: hpgo.Profile, cluster: hpgo.Cluster) -> list[tuple[list[str], list[int]]]:
    """Layers in a random order that respects the edges, cut at random, on devices in a row or from anywhere."""
    waiting, ids = sorted(layer.id for layer in profile.layers), []
    while waiting:
        fed = [name for name in waiting if not any(b == name and a in waiting for a, b in profile.edges)]
        ids.append(chance.choice(fed))
        waiting.remove(ids[-1])
    devices = list(range(cluster.devices))
    if chance.random() < 0.6:
        chance.shuffle(devices)
    depth = chance.randint(1, min(len(ids), len(devices), 4))
    used = devices[: chance.randint(depth, len(devices))]
    return list(zip(parts(chance, ids, depth), parts(chance, used, depth), strict=True))


def parts(chance: Random, row: list[Any], count: int) -> list[list[Any]]:
    """The row in `count` parts, each with something in it."""
    cuts = [0, *sorted(chance.sample(range(1, len(row)), count - 1)), len(row)]
    return [row[start:end] for start, end in pairwise(cuts)]
