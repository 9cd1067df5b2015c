"""Solve the published problems with the compatible and the modern planner."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

from hpgo.compat import Columns, Conductor, columns, devices_from_seps, model_of
from hpgo.errors import InfeasibleError
from hpgo.hardware.cluster import Cluster
from hpgo.model.formats import read_profile
from hpgo.model.states import cut_points
from hpgo.planning.planner import evaluate, plan
from hpgo.reproduce.questions import (
    CONFIGS,
    DEVICE_COUNTS,
    RIVALS,
    SEPS,
    STRATEGIES,
    SWEEPS,
    PublishedCase,
    PublishedPlans,
    Sweep,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hpgo.compat import Stage
    from hpgo.model.profile import Profile
    from hpgo.planning.plans import Plan


@dataclass(frozen=True, slots=True)
class Compatible:
    """A plan of the compatible planner, and its evaluation in the current cost model."""

    speedup: float
    stages: list[Stage]
    priced: Plan | None
    """The plan in the current cost model; None if it was not evaluated."""


@dataclass(frozen=True, slots=True)
class Strategy:
    """Plans of one model on one hardware configuration."""

    question: PublishedCase
    config: str
    published: str
    published_priced: Plan | None
    """The published replicas, with the best cuts for them in the current cost model; None if no cut is feasible."""
    compatible: Compatible | None
    """Plan of the compatible planner; None if it can't model the links of the configuration."""
    modern: Plan


@dataclass(frozen=True, slots=True)
class PlannerComparison:
    """Strategies of DAPPLE and PipeDream and the compatible plan for one model, evaluated in the current cost model."""

    rival: PublishedPlans
    compatible: Compatible
    dapple: Plan
    pipedream: Plan
    modern: Plan


@dataclass(frozen=True, slots=True)
class SweepPoint:
    """One model at one global batch size and device count, on nodes of configuration A."""

    model: str
    global_batch_size: int
    devices: int
    columns: Columns
    compatible: Compatible
    modern: Plan | None
    """Plan of the modern planner; None if no plan fits."""


@dataclass(frozen=True, slots=True)
class Answers:
    """Results for all published problems."""

    strategies: list[Strategy]
    batches: list[SweepPoint]
    devices: list[SweepPoint]
    duels: list[PlannerComparison]


def all_answers(progress: Callable[[float, str], object] = lambda _share, _doing: None) -> Answers:
    """Solve all published problems with both planners, in about half a minute.

    `progress` is called with the share that is complete and the name of the next part.
    """
    progress(0.0, "strategies")
    strategies_ = strategies()
    progress(0.25, "batch sizes")
    batches = batch_sweeps()
    progress(0.5, "device counts")
    devices = device_sweeps()
    progress(0.75, "PipeDream")
    return Answers(strategies_, batches, devices, duels())


def strategies() -> list[Strategy]:
    """Return all published strategies with both planners' plans."""
    return [_strategy(question, config) for question in STRATEGIES for config in CONFIGS]


def duels() -> list[PlannerComparison]:
    """Return the comparisons of DAPPLE and PipeDream on configuration A."""
    return [_duel(rival) for rival in RIVALS]


def batch_sweeps() -> list[SweepPoint]:
    """Return the results of each model for its global batch sizes on configuration A."""
    return [_point(sweep, size, 16) for sweep in SWEEPS for size in sweep.global_batch_sizes]


def device_sweeps() -> list[SweepPoint]:
    """Return the results of each model for all device counts, at the published global batch size."""
    sweeps = {sweep.model: sweep for sweep in SWEEPS}
    return [
        _point(sweeps[question.model], question.global_batch_size, count)
        for question in STRATEGIES
        for count in DEVICE_COUNTS
    ]


def _strategy(question: PublishedCase, config: str) -> Strategy:
    profile = read_profile(question.model)
    cluster = Cluster.preset(CONFIGS[config])
    size = question.global_batch_size
    best = plan(profile, cluster, global_batch_size=size)
    published = question.plans["ABC".index(config)]
    compatible = _compatible(profile, cluster, size, SEPS[config]) if config in SEPS else None
    return Strategy(question, config, published, _published(profile, cluster, size, published), compatible, best)


def _compatible(
    profile: Profile, cluster: Cluster | None, size: int, seps: Sequence[int], minimum: int = 1
) -> Compatible:
    conductor = Conductor(model_of(profile, size), devices_from_seps(list(seps)))
    conductor.m.min_micro_batch_size = min(minimum, size)
    speedup, stages = conductor.py_orchestrate()
    priced = None
    if cluster is not None:
        layers = conductor.layers(stages)
        priced = _priced(
            profile, cluster, size, [(ids, devices) for ids, (*_, devices) in zip(layers, stages, strict=True)]
        )
    return Compatible(speedup, stages, priced)


def _priced(
    profile: Profile, cluster: Cluster, size: int, stages: Sequence[tuple[Sequence[str], Sequence[int]]]
) -> Plan | None:
    try:
        return evaluate(profile, cluster, stages, global_batch_size=size)
    except InfeasibleError:
        return None


def _published(profile: Profile, cluster: Cluster, size: int, published: str) -> Plan | None:
    """Return the best plan with the published replicas. Cuts are chosen, because papers count layers differently."""
    # Data parallelism runs all layers on each device.
    order = [layer.id for layer in profile.layers]
    if published == "DP":
        return _priced(profile, cluster, size, [(order, range(cluster.devices))])
    if published == "straight":
        # One device a stage: among the compatible planner's families it is the one with most stages.
        conductor = Conductor(model_of(profile, size), devices_from_seps(list(SEPS["B"])))
        conductor.py_orchestrate()
        straight = max(conductor.res, key=lambda result: len(result.stages))
        layers = conductor.layers(straight.stages)
        return _priced(profile, cluster, size, [(ids, [device]) for device, ids in enumerate(layers)])
    # Only the replicas of the first stage are needed. The second stage has all other devices.
    first = int(published.partition(":")[0])
    found = []
    # The first and the last cut point would leave a stage without layers.
    for state in cut_points(profile).states[1:-1]:
        before = [profile.layers[index].id for index in state.layers]
        behind = [layer.id for layer in profile.layers if layer.id not in set(before)]
        devices = [range(first), range(first, cluster.devices)]
        found.append(_priced(profile, cluster, size, list(zip((before, behind), devices, strict=True))))
    return min((priced for priced in found if priced and priced.fits), key=lambda priced: priced.step_s, default=None)


def _duel(rival: PublishedPlans) -> PlannerComparison:
    profile, cluster = read_profile(rival.model), Cluster.preset("dapple-a")
    size = rival.global_batch_size

    def priced(strategy: tuple[tuple[int, ...], tuple[int, ...]]) -> Plan:
        replicas, cuts = strategy
        conductor = Conductor(model_of(profile, size), devices_from_seps([8, 16]))
        # The original counts states, not layers, so its planner translates cuts into layers.
        bounds = [0, *cuts, len(conductor.m.layers) - 1]
        layers = conductor.layers([(start, end, 1, [0]) for start, end in pairwise(bounds)])
        ends = list(accumulate(replicas))
        devices = [range(end - count, end) for count, end in zip(replicas, ends, strict=True)]
        return evaluate(profile, cluster, list(zip(layers, devices, strict=True)), global_batch_size=size)

    return PlannerComparison(
        rival,
        _compatible(profile, cluster, size, [8, 16]),
        priced(rival.dapple),
        priced(rival.pipedream),
        plan(profile, cluster, global_batch_size=size),
    )


def _point(sweep: Sweep, size: int, devices: int) -> SweepPoint:
    profile = read_profile(sweep.model)
    # The original describes a cluster by the device numbers at which nodes end.
    seps = [devices] if devices <= 8 else list(range(8, devices + 1, 8))
    model = model_of(profile, size)
    model.optimizer_memory_scaling = sweep.optimizer_memory_scaling
    if sweep.peak_activation_bytes is not None:
        model.peak_activation_per_batch = sweep.peak_activation_bytes
    cluster = Cluster.preset(f"dapple-a:{max(1, devices // 8)}")
    # The smallest clusters are part of one 8-device node.
    if devices < 8:
        cluster = replace(cluster, nodes=tuple(replace(node, count=devices) for node in cluster.nodes))
    try:
        best = plan(profile, cluster, global_batch_size=size, min_samples_per_replica=sweep.micro_batch_size)
    except InfeasibleError:
        best = None
    answer = _compatible(profile, None, size, seps, minimum=sweep.micro_batch_size)
    return SweepPoint(sweep.model, size, devices, columns(model, devices_from_seps(seps)), answer, best)
