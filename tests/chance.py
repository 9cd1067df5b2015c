"""Profiles, clusters, plans and questions at random, small, with everything in them that a price heeds."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal

import twin

import hpgo

if TYPE_CHECKING:
    from collections.abc import Sequence
    from random import Random


@dataclass(frozen=True)
class Question:
    """What a planner may be asked."""

    profile: hpgo.Profile
    cluster: hpgo.Cluster
    global_batch: int
    schedule: str
    recompute: bool | str
    overlap: bool
    shard_optimizer: bool
    even_split: bool
    overlap_p2p_comm: bool = True
    shares_by_speed: bool = False
    zero_stage: Literal[0, 1, 2, 3, "auto"] = 0

    @property
    def options(self) -> dict[str, Any]:
        return {
            "schedule": self.schedule,
            "recompute": self.recompute,
            "overlap": self.overlap,
            "overlap_p2p_comm": self.overlap_p2p_comm,
            "even_split": self.even_split,
            "shares_by_speed": self.shares_by_speed,
            "memory": hpgo.MemoryModel(shard_optimizer=self.shard_optimizer, zero_stage=self.zero_stage),
        }

    def plan(self) -> hpgo.Plan | None:
        """The planner's answer; None if it says that no plan fits."""
        try:
            return hpgo.plan(self.profile, self.cluster, global_batch_size=self.global_batch, **self.options)
        except hpgo.errors.InfeasibleError:
            return None

    def evaluate(self, stages: Any, micro_batch: int, **options: Any) -> hpgo.Plan:
        sizes = {"global_batch_size": self.global_batch, "pipeline_micro_batch_size": micro_batch}
        return hpgo.evaluate(self.profile, self.cluster, stages, **sizes, **self.options | options)

    def order(self) -> tuple[str, ...]:
        """The model's layers in the order in which they run, as plans list them."""
        whole = [([layer.id for layer in self.profile.layers], [0])]
        return self.evaluate(whole, self.global_batch, recompute=False).stages[0].layers

    def assumed(self, micro_batch: int) -> list[twin.Assumed]:
        """What prices of this micro-batch's plans may stand on."""
        return [
            twin.Assumed(
                micro_batches=self.global_batch // micro_batch,
                micro_batch=micro_batch,
                schedule=self.schedule,
                recompute=recompute,
                overlap=self.overlap,
                overlap_p2p_comm=self.overlap_p2p_comm,
                shard_optimizer=self.shard_optimizer,
                shares_by_speed=self.shares_by_speed,
                min_samples=self.profile.batch_sizes[0],
                zero_stage=self.zero_stage,
            )
            for recompute in ([False, True] if self.recompute == "auto" else [bool(self.recompute)])
        ]


def question(chance: Random, counts: Sequence[int], *, layers: int) -> Question:
    """These numbers of devices, of one to four kinds; memory is short."""
    sizes = chance.choice([(1,), (1,), (1, 2), (2,)])
    asked = profile(chance, batch_sizes=sizes, count=layers, branching=chance.random() < 0.7, free=0.15)
    needed = sum(4 * layer.parameter_bytes + (layer.saved_bytes or layer.activation_bytes)[0] for layer in asked.layers)
    kinds = [
        {"memory": 1e6 + chance.uniform(0.2, 2.0) * needed, "speed": chance.choice([0.5, 1.0, 2.0]), "type": name}
        for name in ("type0", "type1", "type2", "type3")[: chance.randint(1, 4)]
    ]
    return Question(
        asked,
        linked(chance, [{"devices": devices, **chance.choice(kinds)} for devices in counts]),
        global_batch=chance.choice([2, 3, 4, 6]),
        schedule=chance.choice(["1f1b", "eager_1f1b", "gpipe"]),
        recompute=chance.choice([False, False, True, "auto"]),
        overlap=chance.random() < 0.5,
        shard_optimizer=chance.random() < 0.3,
        even_split=chance.random() < 0.2,
    )


def typed(chance: Random, asked: Question, *, share: float = 0.7) -> Question:
    """The same question with times of the layers on this share of the device types, each with its own gains."""
    names = sorted({node.device.name for node in asked.cluster.nodes})
    names = [name for name in names if chance.random() < share] or names[:1]

    def times(layer: hpgo.Layer, name: str) -> hpgo.TypeTimes:
        forward, backward = (chance.choice([1.0, 2.0, between(chance, 0.2, 5.0)]) for _ in range(2))
        scaled = {
            key: tuple(by * one for one in values)
            for key, by in (
                ("forward_s", forward),
                ("backward_s", backward),
                ("input_gradient_s", backward),
                ("weight_gradient_s", backward),
            )
            if (values := getattr(layer, key)) is not None
        }
        return hpgo.TypeTimes(name, **scaled)

    layers = tuple(
        replace(layer, times_by_type=tuple(times(layer, name) for name in names)) for layer in asked.profile.layers
    )
    return replace(asked, profile=replace(asked.profile, layers=layers))


def between(chance: Random, low: float, high: float) -> float:
    """As often in one decade as in another."""
    return math.exp(chance.uniform(math.log(low), math.log(high)))


def profile(
    chance: Random,
    *,
    batch_sizes: tuple[int, ...],
    count: int,
    branching: bool,
    free: float,
    halves: float = 0.0,
    ties: int = 0,
) -> hpgo.Profile:
    """Layers in any order of lines; some have no weights or output, and this share is free or loads data.

    The share `halves` of layers tells what the halves of backward passes take, possible or not; so many `ties` are
    tried.
    """

    def column(low: float, high: float, never: float) -> tuple[float, ...]:
        if chance.random() < never:
            return (0.0,) * len(batch_sizes)
        return tuple(between(chance, low, high) * size for size in batch_sizes)

    def layer(name: str) -> hpgo.Layer:
        costless = chance.random() < free
        split = bool(halves) and chance.random() < halves
        layer = hpgo.Layer(
            name,
            "Input0" if chance.random() < free else "Linear",
            forward_s=column(0.01, 1, 1.0 if costless else 0.1),
            backward_s=column(0.01, 2, 1.0 if costless else 0.2),
            activation_bytes=column(1e5, 1e8, 0.1),
            parameter_bytes=0.0 if costless or chance.random() < 0.2 else between(chance, 1e5, 1e9),
            saved_bytes=column(1e5, 1e9, 0.1) if chance.random() < 0.6 else None,
        )
        if not split:
            return layer
        inputs_s, weights_s = (column(0.01, 1, 1.0 if costless else never) for never in (0.1, 0.3))
        if not any(inputs_s + weights_s) or not any(layer.backward_s):
            inputs_s, weights_s = layer.backward_s, tuple(0.0 for _ in batch_sizes)  # both take time, or neither does
        return replace(layer, input_gradient_s=inputs_s, weight_gradient_s=weights_s)

    ids = [f"layer{number}" for number in range(count)]
    layers = [layer(name) for name in ids]
    edges = list(pairwise(ids))
    if branching:
        edges = [(a, b) for number, a in enumerate(ids) for b in ids[number + 1 :] if chance.random() < 0.4]
    shared = []
    for _ in range(ties):
        some = chance.sample(ids, min(len(ids), chance.choice([2, 2, 3])))
        left = next(layer.parameter_bytes for layer in layers if layer.id == some[0]) - sum(
            tie.parameter_bytes for tie in shared if tie.layers[0] == some[0]
        )
        if len(some) > 1:
            shared.append(hpgo.TiedWeight(tuple(some), left * chance.choice([0.0, 0.25, 1.0])))
    chance.shuffle(layers)
    return hpgo.Profile("random", batch_sizes, tuple(layers), tuple(edges), tied_weights=tuple(shared))


@dataclass(frozen=True)
class Case:
    """Layers on devices, to be priced by the package and by the twin."""

    profile: hpgo.Profile
    cluster: hpgo.Cluster
    stages: list[tuple[list[str], list[int]]]

    def minimum(self, *sizes: int) -> int:
        """The largest of some sizes of a micro-batch and of what gives each replica a sample."""
        return max(*sizes, *(len(devices) for _, devices in self.stages))

    def evaluate(self, assumed: twin.Assumed, **options: Any) -> hpgo.Plan:
        """The package's price; `options` go before what is assumed."""
        given = {
            "global_batch_size": assumed.micro_batches * assumed.micro_batch,
            "pipeline_micro_batch_size": assumed.micro_batch,
            "min_samples_per_replica": 1,
            "schedule": assumed.schedule,
            "recompute": assumed.recompute,
            "overlap": assumed.overlap,
            "overlap_p2p_comm": assumed.overlap_p2p_comm,
            "include_data_loading": assumed.include_data_loading,
            "shares_by_speed": assumed.shares_by_speed,
            "memory": hpgo.MemoryModel(
                gradients_per_weight=assumed.gradients_per_weight,
                optimizer_per_weight=assumed.optimizer_per_weight,
                shard_optimizer=assumed.shard_optimizer,
                reserved_bytes=assumed.reserved_bytes,
                zero_stage=assumed.zero_stage,
            ),
        }
        return hpgo.evaluate(self.profile, self.cluster, self.stages, **given | options)

    def price(self, assumed: twin.Assumed, plan: hpgo.Plan) -> list[twin.Stage]:
        """The twin's, of the stages as the plan lists them."""
        listed = [(stage.layers, stage.devices) for stage in plan.stages]
        return twin.price(asdict(self.profile), asdict(self.cluster), assumed, listed)


def case(chance: Random, *, counts: tuple[int, int], batch_sizes: Sequence[tuple[int, ...]], **how: Any) -> Case:
    """So many layers, from the least to the most, measured at one of these rows of batch sizes; half of them branch."""
    sizes, count = chance.choice(batch_sizes), chance.randint(*counts)
    how = {"branching": chance.random() < 0.5, **how}
    layers = profile(chance, batch_sizes=sizes, count=count, free=0.2, **how)
    nodes = cluster(chance)
    return Case(layers, nodes, stages(chance, layers, nodes))


def cluster(chance: Random) -> hpgo.Cluster:
    """One to four machines of one to four devices; some are slow."""
    nodes = [
        {
            "devices": chance.randint(1, 4),
            "memory": between(chance, 1e9, 1e11),
            "speed": chance.choice([0.5, 1.0, 2.0]),
            "type": f"type{number}",
        }
        for number in range(chance.randint(1, 4))
    ]
    return linked(chance, nodes)


def linked(chance: Random, nodes: list[dict[str, Any]]) -> hpgo.Cluster:
    """Machines as files have them, with links that may have latencies."""

    def link() -> dict[str, float]:
        return {
            "bandwidth": between(chance, 1e7, 1e9),
            "collective": between(chance, 1e7, 1e9),
            "latency": chance.choice([0.0, between(chance, 1e-4, 1.0)]),
        }

    document = {"hpgo_cluster": 1, "name": "random", "nodes": nodes, "intra": link(), "inter": link()}
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
