"""The planner's cost model a second time, from the pages alone, to hold `hpgo.evaluate` and `hpgo.plan` against.

Profile and cluster come as what `dataclasses.asdict` makes of them. Nothing here is the package's: each rule of
docs/planner.md stands in its plainest form, and none is made fast at the price of that.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

Record = dict[str, Any]
Stages = Sequence[tuple[Sequence[str], Sequence[int]]]
"""For each stage the ids of its layers, in the order in which they run, and its devices."""


@dataclass(frozen=True)
class Assumed:
    """What a price stands on besides profile, cluster and stages."""

    micro_batches: int
    micro_batch: int
    schedule: str = "eager_1f1b"
    recompute: bool = False
    overlap: bool = True
    overlap_p2p_comm: bool = True
    include_data_loading: bool = False
    gradients_per_weight: float = 1.0
    optimizer_per_weight: float = 2.0
    shard_optimizer: bool = False
    reserved_bytes: float = 0.0
    shares_by_speed: bool = False
    min_samples: int = 1
    zero_stage: int | str = 0

    def min_in_flight(self, behind: int) -> int:
        """The fewest micro-batches in flight of a stage with so many to the last one, both counted."""
        return self.micro_batches if self.schedule == "gpipe" else min(self.micro_batches, behind)

    def shards(self, zero_stage: int) -> bool:
        """Whether replicas share what they share from this ZeRO stage on."""
        return max(int(self.zero_stage), int(self.shard_optimizer)) >= zero_stage


@dataclass(frozen=True)
class Stage:
    """Seconds of one micro-batch, and bytes of one device."""

    share: int
    forward_s: float
    backward_s: float
    input_gradient_s: float
    weight_gradient_s: float
    transfer_s: float
    transfer_busy_s: float
    exposed_transfer_s: float
    exposed_forward_comm_s: float
    exposed_backward_comm_s: float
    grad_reduce_s: float
    exposed_grad_reduce_s: float
    split_tail_s: float
    weights_bytes: float
    gradients_bytes: float
    optimizer_bytes: float
    buffers_bytes: float
    saved_activation_bytes: float
    recomputed_bytes: float
    capacity_bytes: float
    shares: tuple[int, ...] = ()
    by_device: tuple[Stage, ...] = ()
    """The stage with the memory of each device, if shares are by speed."""

    def fits(self, in_flight: int) -> bool:
        return all(one.holds_bytes(in_flight) <= one.capacity_bytes for one in self.by_device or [self])

    def tightest(self, in_flight: int) -> Stage:
        """The stage with the memory of the device with the least to spare."""
        each = self.by_device or (self,)
        return min(each, key=lambda one: one.capacity_bytes - one.holds_bytes(in_flight))

    def activations_bytes(self, in_flight: int) -> float:
        return self.saved_activation_bytes * in_flight + self.recomputed_bytes

    def holds_bytes(self, in_flight: int) -> float:
        fixed = self.weights_bytes + self.gradients_bytes + self.optimizer_bytes + self.buffers_bytes
        return fixed + self.activations_bytes(in_flight)


def at_share(sizes: Sequence[int], measured: Sequence[float], share: int) -> float:
    """What was measured at `sizes`, at `share`: on the line between two sizes, in proportion beyond them."""
    for near, far in zip(range(len(sizes)), range(1, len(sizes)), strict=False):
        if sizes[near] <= share <= sizes[far]:
            way = (share - sizes[near]) / (sizes[far] - sizes[near])
            return measured[near] + (measured[far] - measured[near]) * way
    end = 0 if share < sizes[0] else -1
    return measured[end] * share / sizes[end]


class Model:
    """The layers of a profile."""

    def __init__(self, profile: Record) -> None:
        self.sizes = profile["batch_sizes"]
        self.layers = {layer["id"]: layer for layer in profile["layers"]}
        self.edges = profile["edges"]
        self.reads = {target for _, target in self.edges}
        self.sent = {name: layer["parameter_bytes"] - layer["frozen_bytes"] for name, layer in self.layers.items()}
        self.copies: list[float] = []

    def sum(self, key: str, ids: Iterable[str], share: int, of_type: str = "") -> float:
        return sum(at_share(self.sizes, self.told(self.on(name, of_type), key), share) for name in ids)

    def on(self, name: str, of_type: str) -> Record:
        """A layer with its times on a device type, or with the profile's own if it has none there."""
        row = self.layers[name]
        times = next((times for times in row["times_by_type"] if times["type"] == of_type), {})
        return {**row, **times}

    def is_timed_on(self, of_type: str) -> bool:
        return any(times["type"] == of_type for row in self.layers.values() for times in row["times_by_type"])

    def told(self, row: Record, key: str) -> Sequence[float]:
        if row[key] is None:
            return row["activation_bytes"] if key == "saved_bytes" else [whole / 2 for whole in row["backward_s"]]
        if key in {"input_gradient_s", "weight_gradient_s"}:
            sums = [one + other for one, other in zip(row["input_gradient_s"], row["weight_gradient_s"], strict=True)]
            each = zip(row[key], sums, row["backward_s"], strict=True)
            return [one if whole <= both <= 2 * whole else one * whole / both for one, both, whole in each]
        return row[key]

    def loads(self, name: str) -> bool:
        """Whether a layer only loads data, which happens ahead of the step."""
        row = self.layers[name]
        idle = not any(row["backward_s"]) and not row["parameter_bytes"]
        return idle and name not in self.reads and row["name"].startswith("Input")

    def crossing(self, before: set[str]) -> set[str]:
        """Layers in front of a cut that one behind it reads, however far behind."""
        return {source for source, target in self.edges if source in before and target not in before}


class Nodes:
    """Who is where: devices are numbered machine by machine."""

    def __init__(self, cluster: Record) -> None:
        numbered = [(number, row) for number, row in enumerate(cluster["nodes"]) for _ in range(row["count"])]
        self.home = [number for number, _ in numbered]
        self.speed = [row["device"]["speed"] for _, row in numbered]
        self.type = [row["device"]["name"] for _, row in numbered]
        self.memory_bytes = [row["device"]["memory_bytes"] for _, row in numbered]
        self.intra, self.inter = cluster["intra"], cluster["inter"]

    def on_each(self, devices: Iterable[int]) -> dict[int, int]:
        """How many of the devices each machine has."""
        homes = [self.home[device] for device in devices]
        return {node: homes.count(node) for node in homes}

    def transfer_s(self, size: float, senders: Sequence[int], receivers: Sequence[int]) -> tuple[float, float]:
        """How long the fullest port is busy, and when all is there."""
        piece = size / (len(senders) * len(receivers))
        sending, receiving = self.on_each(senders), self.on_each(receivers)
        busy, link = 0.0, self.intra
        for node in sending.keys() | receiving.keys():
            here, there = sending.get(node, 0), receiving.get(node, 0)
            if here and there:
                busy = max(busy, piece * max(here, there) / self.intra["bytes_per_s"])
            leaving, entering = here * (len(receivers) - there), there * (len(senders) - here)
            if leaving or entering:
                busy = max(busy, piece * max(leaving, entering) / self.inter["bytes_per_s"])
                link = self.inter
        return busy, busy + link["latency_s"]

    def all_reduce_s(self, size: float, devices: Sequence[int]) -> float:
        """Rings inside the machines and one between them: 2 (n - 1) hops, each with 1 / n of the bytes."""
        on_each = self.on_each(devices)
        rings = ((max(on_each.values()), self.intra), (len(on_each), self.inter))
        hops = ((2 * (n - 1), size / n / link["collective_bytes_per_s"] + link["latency_s"]) for n, link in rings)
        return sum(count * takes for count, takes in hops) if size else 0.0


def price(profile: Record, cluster: Record, assumed: Assumed, stages: Stages) -> list[Stage]:
    """What each stage takes and holds."""
    nodes = Nodes(cluster)
    receivers = [devices for _, devices in stages[1:]] + [()]
    senders = [(), *(devices for _, devices in stages[:-1])]
    priced = []
    for number, (ids, devices) in enumerate(stages):
        model, sums = Model(profile), 0.0
        for tie in profile["tied_weights"]:
            size, sharers = tie["parameter_bytes"], [row for row in stages if {*row[0]} & {*tie["layers"]}]
            if (ids, devices) in sharers and len(sharers) > 1:
                model.sent[tie["layers"][0]] -= size
                model.copies += [size] * (tie["layers"][0] not in ids)
                sums += nodes.all_reduce_s(size, [device for _, group in sharers for device in group])
        before = {name for row, _ in stages[:number] for name in row}
        behind = len(stages) - number
        stage = price_stage(model, nodes, assumed, behind, before, ids, devices, receivers[number], senders[number])
        tails = {key: getattr(stage, key) + sums for key in ("grad_reduce_s", "exposed_grad_reduce_s", "split_tail_s")}
        priced.append(replace(stage, **tails))
    return priced


def shares_by_speed(
    model: Model, nodes: Nodes, assumed: Assumed, computing: Sequence[str], ids: Sequence[str], devices: Sequence[int]
) -> tuple[int, ...]:
    """The samples of each device, one sample after another; none if all devices are alike."""
    kind_of = {device: alike(model, nodes, device) for device in devices}
    if len({*kind_of.values()}) < 2:
        return ()
    given = dict.fromkeys(sorted(devices), assumed.min_samples)
    while sum(given.values()) < assumed.micro_batch:
        taker, shortest = -1, 0.0
        for device, samples in given.items():
            of_type, speed = kind(model, nodes, device)
            if samples > min(given[other] for other in devices if kind_of[other] == kind_of[device]):
                continue
            takes = model.sum("forward_s", computing, samples + 1, of_type)
            takes = (takes + model.sum("backward_s", ids, samples + 1, of_type)) / speed
            if taker < 0 or takes < shortest * (1 - 1e-9):
                taker, shortest = device, takes
        given[taker] += 1
    return tuple(given[device] for device in devices)


def alike(model: Model, nodes: Nodes, device: int) -> object:
    """What devices that count as one type agree in: whether they have times of their own, and their times."""
    of_type, speed = kind(model, nodes, device)
    if not any(model.is_timed_on(name) for name in nodes.type):
        return speed
    rows = [model.on(name, of_type) for name in model.layers]
    passes = [[*row["forward_s"], *model.told(row, "input_gradient_s"), *row["backward_s"]] for row in rows]
    return bool(of_type), *(takes / speed for row in passes for takes in row)


def kind(model: Model, nodes: Nodes, device: int) -> tuple[str, float]:
    """The type and speed that give a device its times. Types with times of their own have no speed."""
    timed = model.is_timed_on(nodes.type[device])
    return (nodes.type[device], 1.0) if timed else ("", nodes.speed[device])


def price_stage(model: Model, nodes: Nodes, assumed: Assumed, behind: int, *of: Any) -> Stage:
    """What a stage takes and holds that is so many in front of the end; `of` goes on to `price_sharded`."""
    if assumed.zero_stage != "auto":
        return price_sharded(model, nodes, assumed, *of)
    each = [price_sharded(model, nodes, replace(assumed, zero_stage=zero_stage), *of) for zero_stage in (1, 2, 3)]
    fits = (one for one in each if one.holds_bytes(assumed.min_in_flight(behind)) <= one.capacity_bytes)
    return next(fits, each[-1])


def price_sharded(
    model: Model,
    nodes: Nodes,
    assumed: Assumed,
    before: set[str],
    ids: Sequence[str],
    devices: Sequence[int],
    receivers: Sequence[int],
    senders: Sequence[int],
) -> Stage:
    """What the stage with these layers behind those of `before` takes and holds, between its neighbours' devices."""
    share = -(-assumed.micro_batch // len(devices))
    computing = [name for name in ids if assumed.include_data_loading or not model.loads(name)]
    shares: tuple[int, ...] = ()
    if assumed.shares_by_speed:
        shares = shares_by_speed(model, nodes, assumed, computing, ids, devices)
        share = max(shares, default=share)
    each = shares or (share,) * len(devices)
    kinds = {(*kind(model, nodes, device), samples) for device, samples in zip(devices, each, strict=True)}
    forward = max(model.sum("forward_s", computing, samples, of_type) / speed for of_type, speed, samples in kinds)
    read, made = model.crossing(before), model.crossing(before | set(ids))
    busy = arrives = 0.0
    if receivers:
        size = model.sum("activation_bytes", made, assumed.micro_batch)
        busy, arrives = nodes.transfer_s(size, devices, receivers)
    exposed = 0.0
    if not assumed.overlap_p2p_comm:
        size = model.sum("activation_bytes", read, assumed.micro_batch)
        exposed = busy + (nodes.transfer_s(size, senders, devices)[0] if senders else 0.0)
    summed = sync = 0.0
    computed_on = dict.fromkeys(kinds, 0.0)
    for name in reversed(ids):
        for of_type, speed, samples in kinds:
            computed_on[of_type, speed, samples] += model.sum("backward_s", [name], samples, of_type) / speed
        takes = nodes.all_reduce_s(model.sent[name], devices)
        # The gradients of all replicas must be there.
        summed = max(summed, *computed_on.values()) + takes
        sync += takes
    computed = max(computed_on.values())
    inputs, weights = (
        max(model.sum(f"{half}_gradient_s", ids, samples, of_type) / speed for of_type, speed, samples in kinds)
        for half in ("input", "weight")
    )
    tail = summed - computed if assumed.overlap else sync

    def held_by(samples: int) -> dict[str, float]:
        saved = model.sum("saved_bytes", ids, samples)
        entering, leaving = (model.sum("activation_bytes", names, samples) for names in (read, made))
        return {
            "buffers_bytes": 2 * (entering + leaving),
            "saved_activation_bytes": entering if assumed.recompute else saved,
            "recomputed_bytes": saved * assumed.recompute,
        }

    # A copy of a tied weight counts like a layer of its own. Frozen weights are gathered, but have no gradients.
    held = [model.layers[name]["parameter_bytes"] for name in ids] + model.copies
    frozen = [model.layers[name]["frozen_bytes"] for name in ids] + [0.0 for _ in model.copies]
    trained = [whole - part for whole, part in zip(held, frozen, strict=True)]
    scatters = sum(nodes.all_reduce_s(size, devices) / 2 for size in trained) * assumed.shards(2)
    gathers = sum(nodes.all_reduce_s(size, devices) / 2 for size in held) * assumed.shards(3)
    backward = computed + forward * assumed.recompute
    messages = (gathers, gathers * (1 + assumed.recompute) + scatters)
    waits = [
        max(0.0, sent - takes) if assumed.overlap else sent
        for sent, takes in zip(messages, (forward, backward), strict=True)
    ]
    stage = Stage(
        share=share,
        forward_s=forward,
        backward_s=backward,
        input_gradient_s=inputs + forward * assumed.recompute,
        weight_gradient_s=weights,
        transfer_s=arrives,
        transfer_busy_s=busy,
        exposed_transfer_s=exposed,
        exposed_forward_comm_s=waits[0],
        exposed_backward_comm_s=waits[1],
        grad_reduce_s=sync,
        exposed_grad_reduce_s=tail,
        split_tail_s=min(sync, tail + max(0.0, computed - weights)),
        weights_bytes=sharded_bytes(held, devices, whole=2, shares=assumed.shards(3)),
        gradients_bytes=sharded_bytes(trained, devices, whole=2, shares=assumed.shards(2))
        * assumed.gradients_per_weight,
        optimizer_bytes=sharded_bytes(trained, devices, whole=0, shares=assumed.shards(1))
        * assumed.optimizer_per_weight,
        **held_by(share),
        capacity_bytes=min(nodes.memory_bytes[device] for device in devices) - assumed.reserved_bytes,
        shares=shares,
    )
    memories = [
        replace(stage, **held_by(samples), capacity_bytes=nodes.memory_bytes[device] - assumed.reserved_bytes)
        for device, samples in zip(devices, shares, strict=False)
    ]
    return replace(stage, by_device=tuple(memories))


def sharded_bytes(sizes: Sequence[float], devices: Sequence[int], *, whole: int, shares: bool) -> float:
    """What a device holds of layers of these sizes: all, or the largest so many times and a shard of the rest."""
    held = min(sum(sizes), whole * max(sizes))
    return held + (sum(sizes) - held) / len(devices) if shares else sum(sizes)
