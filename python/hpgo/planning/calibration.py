"""Calibration: explain the difference between a measured and a predicted step, and correct profile and cluster.

Parts of the prediction are replaced by measured values, one after the other: computation, transfers, gradient
reduction. Each replacement makes the simulated step longer or shorter. The rest is what no part of the model explains,
such as waits for the system, for busy processors, or for late ranks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from math import sqrt
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np

from hpgo.base.checks import check_is
from hpgo.base.validated import Record, check_fields
from hpgo.errors import ArgumentError
from hpgo.hardware.cluster import Cluster, Link
from hpgo.model.profile import Layer, Profile, TypeTimes
from hpgo.planning.files import known_source
from hpgo.planning.plans import Plan
from hpgo.timing.breakdown import Breakdown, breakdown
from hpgo.timing.simulation import simulate
from hpgo.timing.timeline import Timeline

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from hpgo.programs.costs import Costs
    from hpgo.programs.program import Program

_MAX_RATIO, _PRECISION = 256.0, 1e-4
"""Largest ratio of measured to predicted time of gradient reductions, and the relative precision of its bisection."""
_BACKWARD = ("backward_s", "input_gradient_s", "weight_gradient_s")
PARTS = ("computation", "transfers", "synchronisation", "the rest")


@dataclass(frozen=True, slots=True)
class Calibration(Record):
    """A predicted and a measured step, the parts of their difference, and the corrected profile and cluster.

    >>> import hpgo
    >>> plan = hpgo.plan("bert-48", "dapple-a", global_batch_size=64)
    >>> found = hpgo.calibrate(plan, plan.timeline())  # a run that takes exactly the predicted times
    >>> found.explained_s == (0.0,) * len(found.explained_s), found.corrected_step_s == plan.step_s
    (True, True)
    """

    predicted: Breakdown
    measured: Breakdown
    explained_s: tuple[float, ...]
    """Seconds by which each of `PARTS` makes the step longer. Their sum is the whole difference."""
    profile: Profile
    """Profile of the plan, with the layer times of each stage scaled to its measured times."""
    cluster: Cluster
    """Cluster of the plan, with links scaled to the measured transfers and gradient reductions."""
    corrected_step_s: float
    """Predicted step time with the corrected profile and cluster, in seconds."""

    def __post_init__(self) -> None:
        check_fields(self)
        if len(self.explained_s) != len(PARTS):
            raise ArgumentError(f"explained_s has {len(self.explained_s)} numbers", f"give one for each of {PARTS}")

    @property
    def largest(self) -> str:
        """Name of the one of `PARTS` with the largest absolute value."""
        return PARTS[int(np.argmax(np.abs(self.explained_s)))]


def calibrate(
    plan: Plan, timeline: Timeline, *, profile: Profile | None = None, cluster: Cluster | None = None
) -> Calibration:
    """Compare a measured step of `plan` with its prediction, part by part, and correct profile and cluster.

    Args:
        plan: the plan that ran, with or without virtual stages.
        timeline: the measured step, from `hpgo run --timeline` or `Pipeline.timeline`.
        profile: profile of the plan, if the plan was saved without it.
        cluster: cluster of the plan, if the plan was saved without it.

    Raises ArgumentError for a timeline of other stages, and if profile or cluster are missing.

    >>> import hpgo
    >>> bert = hpgo.plan(hpgo.read_profile("bert-48"), hpgo.Cluster.preset("dapple-a"), global_batch_size=64)
    >>> program = bert.program()
    >>> slow = hpgo.simulate(program, forward_s=[2 * stage.forward_s for stage in bert.stages])
    >>> found = hpgo.calibrate(bert, slow)
    >>> found.largest, [one.layers[9].forward_s[0] for one in (hpgo.read_profile("bert-48"), found.profile)]
    ('computation', [0.00269, 0.00538])
    """
    check_is("plan", plan, Plan, "give one of `hpgo.plan`, or read it with `hpgo.Plan.read`")
    check_is("the timeline", timeline, Timeline, "read what `hpgo run --timeline` wrote, with `hpgo.Timeline.read`")
    program = plan.program()
    if timeline.stages != len(program.stages):
        raise ArgumentError(
            f"the timeline has {timeline.stages} stages, but the plan has {len(program.stages)}",
            "give the timeline of a run of this plan",
        )
    assumed = plan.assumed
    known_profile = known_source("profile", plan.profile, assumed.profile, profile)
    known_cluster = known_source("cluster", plan.cluster, assumed.cluster, cluster)
    predicted, measured = breakdown(simulate(program)), breakdown(timeline)
    # Each entry replaces one more part by measurements. Differences of neighbors are the explained parts.
    steps_s = [predicted.step_s, *_replaced(program, predicted, measured), measured.step_s]
    # The split of backward passes must be consistent, because both halves are scaled by the same ratio.
    corrected_profile = _profile(known_profile.with_consistent_split(), program, predicted, measured)
    corrected_cluster = _cluster(known_cluster, program, predicted, measured)

    def evaluated(cluster: Cluster) -> Plan:
        known = replace(assumed, profile=corrected_profile, cluster=cluster)
        return replace(plan, assumptions=known).reevaluate()

    # Reductions overlap with computation, so their slowdown can only be found after both are corrected.
    slower = _reduction_slowdown(lambda ratio: evaluated(_with_slower_reductions(corrected_cluster, ratio)), measured)
    corrected_cluster = _with_slower_reductions(corrected_cluster, slower)
    corrected = evaluated(corrected_cluster)
    return Calibration(
        predicted,
        measured,
        tuple(after - before for before, after in pairwise(steps_s)),
        corrected_profile,
        corrected_cluster,
        corrected.step_s,
    )


def _replaced(program: Program, predicted: Breakdown, measured: Breakdown) -> Iterator[float]:
    """Yield the step time with measured computation, then also transfers, then also gradient reductions."""
    costs = program.costs
    if costs is None:
        raise ArgumentError("the plan has no times", "use a plan of `hpgo plan -o plan.json`")
    # One ratio per stage: a timeline has times of passes, not of single layers.
    forward = _ratios(predicted.forward_s, measured.forward_s)
    backward = _ratios(predicted.backward_s, measured.backward_s)
    by_stage = {"forward_s": forward, **dict.fromkeys(_BACKWARD, backward)}
    costs = replace(costs, **{name: _scaled(costs, name, ratios) for name, ratios in by_stage.items()})
    if costs.overlapped_s is not None:
        costs = replace(costs, overlapped_s=None)  # The default is the sum of both passes, which are measured.
    yield simulate(program, costs=costs).makespan_s
    edges = len(program.stages) - 1
    times_s = [measured.transfer_s[at] if at < edges else None for at in range(edges)]
    # A transfer occupies its link and has latency. Both are scaled by the same ratio, since only their sum is measured.
    busy, late = (np.broadcast_to(np.asarray(one, float), (edges,)) for one in (costs.transfer_s, costs.latency_s))
    scales = [1.0 if one is None or not (was := busy[at] + late[at]) else one / was for at, one in enumerate(times_s)]
    new = [
        one if one is not None and not busy[at] + late[at] else busy[at] * scales[at] for at, one in enumerate(times_s)
    ]
    costs = replace(
        costs,
        transfer_s=tuple(float(one) for one in new),
        latency_s=tuple(float(one) for one in late * scales),
        # Without separate values, gradients take as long as activations.
        gradient_transfer_s=None,
        gradient_latency_s=None,
    )
    yield simulate(program, costs=costs).makespan_s
    costs = replace(costs, gradient_sync_s=tuple(one or 0.0 for one in measured.grad_reduce_s))
    yield simulate(program, costs=costs).makespan_s


def _ratios(predicted: Sequence[float | None], measured: Sequence[float | None]) -> list[float]:
    """Return the ratio of measured to predicted time for each stage; 1 if either is unknown."""
    return [new / old if old and new else 1.0 for old, new in zip(predicted, measured, strict=True)]


def _scaled(costs: Costs, name: str, ratios: Sequence[float]) -> Any:
    """Return a cost of all stages, multiplied by one ratio per stage; None if the program has no such cost."""
    held = getattr(costs, name)
    if held is None:
        return None
    return tuple(float(one) for one in np.broadcast_to(np.asarray(held, float), (len(ratios),)) * np.array(ratios))


def _profile(profile: Profile, program: Program, predicted: Breakdown, measured: Breakdown) -> Profile:
    forward = _ratios(predicted.forward_s, measured.forward_s)
    backward = _ratios(predicted.backward_s, measured.backward_s)
    stage_of = {layer: number for number, stage in enumerate(program.stages) for layer in stage.layers}

    def corrected(layer: Layer) -> Layer:
        stage = stage_of[layer.id]
        slower = {"forward_s": forward[stage], **dict.fromkeys(_BACKWARD, backward[stage])}

        def scaled(times: Layer | TypeTimes) -> dict[str, Any]:
            known = {name: held for name in slower if (held := getattr(times, name)) is not None}
            return {name: tuple(one * slower[name] for one in held) for name, held in known.items()}

        # A stage on several device types is as slow as the slowest, so all types get its ratio.
        types = tuple(replace(of_type, **scaled(of_type)) for of_type in layer.times_by_type)
        return replace(layer, **scaled(layer), times_by_type=types)

    return replace(
        profile,
        layers=tuple(map(corrected, profile.layers)),
        source=f"{profile.source}; times of {len(program.stages)} stages scaled to a measured step",
    )


def _cluster(cluster: Cluster, program: Program, predicted: Breakdown, measured: Breakdown) -> Cluster:
    node_of = [number for number, node in enumerate(cluster.nodes) for _ in range(node.count)]
    spans = [{node_of[device] for device in stage.devices} for stage in program.stages]
    ratios: dict[str, list[float]] = {}
    for stage, (old, new) in enumerate(zip(predicted.transfer_s, measured.transfer_s, strict=True)):
        if old and new:
            # A transfer between nodes is limited by their link, even if some replicas share a node.
            kind = "inter" if len(spans[stage] | spans[stage + 1]) > 1 else "intra"
            ratios.setdefault(kind, []).append(new / old)

    def corrected(kind: str, link: Link) -> Link:
        # The median ignores single transfers that waited for a late rank.
        slower = median(ratios.get(kind, [1.0]))
        return replace(link, bytes_per_s=_short(link.bytes_per_s / slower), latency_s=_short(link.latency_s * slower))

    # Without measured transfers, there is nothing to correct.
    if not ratios:
        return cluster
    return replace(
        cluster,
        intra=corrected("intra", cluster.intra),
        inter=corrected("inter", cluster.inter),
        source=f"{cluster.source}; links scaled to a measured step".removeprefix("; "),
    )


def _reduction_slowdown(evaluate: Callable[[float], Plan], measured: Breakdown) -> float:
    """Return the slowdown of gradient reductions with which their exposed parts take the measured time.

    Only the part after the last backward pass is measured, so bisection finds the slowdown. It is 1 if no ratio between
    the limits gives the measured time.
    """
    wanted_s = sum(one or 0.0 for one in measured.grad_reduce_s)

    def lasting_s(ratio: float) -> float:
        return sum(stage.exposed_grad_reduce_s for stage in evaluate(ratio).stages)

    low, high = 1 / _MAX_RATIO, _MAX_RATIO
    if abs(lasting_s(1.0) - wanted_s) <= _PRECISION * wanted_s or not lasting_s(low) < wanted_s < lasting_s(high):
        return 1.0
    while high > (1 + _PRECISION) * low:
        # The ratio spans several orders of magnitude, so bisect its logarithm.
        middle = sqrt(low * high)
        low, high = (middle, high) if lasting_s(middle) < wanted_s else (low, middle)
    return high


def _with_slower_reductions(cluster: Cluster, slower: float) -> Cluster:
    """Return `cluster` with collective bandwidths divided by `slower`."""

    def slow(link: Link) -> Link:
        return replace(link, collective_bytes_per_s=_short(link.collective_bytes_per_s / slower))

    return replace(cluster, intra=slow(cluster.intra), inter=slow(cluster.inter))


def _short(number: float) -> float:
    """Return `number` rounded to six digits, which keeps corrected files readable."""
    return float(f"{number:.6g}")
