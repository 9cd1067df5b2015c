"""What a measured step says about the profile and the cluster that its plan was made with.

Parts of the prediction are replaced by what was measured, one after the other: computation, transfers, synchronisation.
Each makes the simulated step longer or shorter, and what is left is what no part of the model explains: waiting for the
system, for processors that others use, for ranks that were late.
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
from hpgo.machine.cluster import Cluster, Link
from hpgo.model.profile import Layer, Profile
from hpgo.planning.files import known_source
from hpgo.planning.plans import Plan
from hpgo.timing.breakdown import Breakdown, breakdown
from hpgo.timing.simulation import simulate
from hpgo.timing.timeline import Timeline

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from hpgo.programs.costs import Costs
    from hpgo.programs.program import Program

_FAR, _SAME = 256.0, 1e-4
"""By how much sums may be slower or faster than thought, and how closely that is found."""
_BACKWARD = ("backward_s", "input_gradient_s", "weight_gradient_s")
PARTS = ("computation", "transfers", "synchronisation", "the rest")


@dataclass(frozen=True, slots=True)
class Calibration(Record):
    """A predicted and a measured step, what lies between them, and what would have predicted it.

    >>> import hpgo
    >>> plan = hpgo.plan("bert-48", "dapple-a", global_batch_size=64)
    >>> found = hpgo.calibrate(plan, plan.timeline())  # as if a run took just what was predicted
    >>> found.explained_s == (0.0,) * len(found.explained_s), found.corrected_step_s == plan.step_s
    (True, True)
    """

    predicted: Breakdown
    measured: Breakdown
    explained_s: tuple[float, ...]
    """By how much each of `PARTS` makes the step longer; together the whole difference."""
    profile: Profile
    """The plan's, with the times of each stage's layers scaled to what the stage took."""
    cluster: Cluster
    """The plan's, with links scaled to what transfers and sums took."""
    corrected_step_s: float
    """What the plan takes by these two."""

    def __post_init__(self) -> None:
        check_fields(self)
        if len(self.explained_s) != len(PARTS):
            raise ArgumentError(f"explained_s has {len(self.explained_s)} numbers", f"give one for each of {PARTS}")

    @property
    def largest(self) -> str:
        """Which of `PARTS` explains most."""
        return PARTS[int(np.argmax(np.abs(self.explained_s)))]


def calibrate(
    plan: Plan, timeline: Timeline, *, profile: Profile | None = None, cluster: Cluster | None = None
) -> Calibration:
    """Sets a measured step of `plan` beside its prediction, part by part, and corrects what it was predicted from.

    Args:
        plan: with one stage or several on each device.
        timeline: measured, as `hpgo run --timeline` and `Pipeline.timeline` give it.
        profile: what the plan was made with, where it was saved without it.
        cluster: likewise.

    Raises ArgumentError for a timeline of other stages, and for a plan without what it was made with.

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
            f"the timeline has {timeline.stages} stages, and the plan {len(program.stages)}",
            "give the timeline of a run of this plan",
        )
    assumed = plan.assumed
    known_profile = known_source("profile", plan.profile, assumed.profile, profile)
    known_cluster = known_source("cluster", plan.cluster, assumed.cluster, cluster)
    predicted, measured = breakdown(simulate(program)), breakdown(timeline)
    steps_s = [predicted.step_s, *_replaced(program, predicted, measured), measured.step_s]
    corrected_profile = _profile(known_profile.with_consistent_split(), program, predicted, measured)
    corrected_cluster = _cluster(known_cluster, program, predicted, measured)

    def priced(cluster: Cluster) -> Plan:
        known = replace(assumed, profile=corrected_profile, cluster=cluster)
        return replace(plan, assumptions=known).reprice()

    slower = _slower_sums(lambda ratio: priced(_summing(corrected_cluster, ratio)), measured)
    corrected_cluster = _summing(corrected_cluster, slower)
    anew = priced(corrected_cluster)
    return Calibration(
        predicted,
        measured,
        tuple(after - before for before, after in pairwise(steps_s)),
        corrected_profile,
        corrected_cluster,
        anew.step_s,
    )


def _replaced(program: Program, predicted: Breakdown, measured: Breakdown) -> Iterator[float]:
    """The step with measured computation, then with transfers too, then with synchronisation too."""
    costs = program.costs
    if costs is None:
        raise ArgumentError("the plan has no times", "give one of `hpgo plan`")
    forward = _ratios(predicted.forward_s, measured.forward_s)
    backward = _ratios(predicted.backward_s, measured.backward_s)
    by_stage = {"forward_s": forward, **dict.fromkeys(_BACKWARD, backward)}
    costs = replace(costs, **{name: _scaled(costs, name, ratios) for name, ratios in by_stage.items()})
    if costs.overlapped_s is not None:
        costs = replace(costs, overlapped_s=None)  # the sum of what was measured
    yield simulate(program, costs=costs).makespan_s
    edges = len(program.stages) - 1
    told = [measured.transfer_s[at] if at < edges else None for at in range(edges)]
    busy, late = (np.broadcast_to(np.asarray(one, float), (edges,)) for one in (costs.transfer_s, costs.latency_s))
    scales = [1.0 if one is None or not (was := busy[at] + late[at]) else one / was for at, one in enumerate(told)]
    new = [one if one is not None and not busy[at] + late[at] else busy[at] * scales[at] for at, one in enumerate(told)]
    costs = replace(
        costs,
        transfer_s=tuple(float(one) for one in new),
        latency_s=tuple(float(one) for one in late * scales),
        gradient_transfer_s=None,
        gradient_latency_s=None,
    )
    yield simulate(program, costs=costs).makespan_s
    costs = replace(costs, gradient_sync_s=tuple(one or 0.0 for one in measured.grad_reduce_s))
    yield simulate(program, costs=costs).makespan_s


def _ratios(predicted: Sequence[float | None], measured: Sequence[float | None]) -> list[float]:
    """How many times as long as predicted each stage took; 1 where one of them is not known."""
    return [new / old if old and new else 1.0 for old, new in zip(predicted, measured, strict=True)]


def _scaled(costs: Costs, name: str, ratios: Sequence[float]) -> Any:
    """Seconds of all stages, each scaled."""
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
        told = {name: held for name in slower if (held := getattr(layer, name)) is not None}
        scaled: dict[str, Any] = {name: tuple(one * slower[name] for one in held) for name, held in told.items()}
        return replace(layer, **scaled)

    return replace(
        profile,
        layers=tuple(map(corrected, profile.layers)),
        source=f"{profile.source}; times of {len(program.stages)} stages scaled to a measured step",
    )


def _cluster(cluster: Cluster, program: Program, predicted: Breakdown, measured: Breakdown) -> Cluster:
    machine_of = [number for number, machine in enumerate(cluster.nodes) for _ in range(machine.count)]
    spans = [{machine_of[device] for device in stage.devices} for stage in program.stages]
    ratios: dict[str, list[float]] = {}
    for stage, (old, new) in enumerate(zip(predicted.transfer_s, measured.transfer_s, strict=True)):
        if old and new:
            kind = "inter" if len(spans[stage] | spans[stage + 1]) > 1 else "intra"
            ratios.setdefault(kind, []).append(new / old)

    def corrected(kind: str, link: Link) -> Link:
        slower = median(ratios.get(kind, [1.0]))
        return replace(link, bytes_per_s=_short(link.bytes_per_s / slower), latency_s=_short(link.latency_s * slower))

    if not ratios:
        return cluster
    return replace(
        cluster,
        intra=corrected("intra", cluster.intra),
        inter=corrected("inter", cluster.inter),
        source=f"{cluster.source}; links scaled to a measured step".removeprefix("; "),
    )


def _slower_sums(priced: Callable[[float], Plan], measured: Breakdown) -> float:
    """How many times slower sums must be for those that outlast the last backward pass to take what they took.

    By bisection, since what overlaps with passes doesn't show; 1 if no ratio between the limits does it.
    """
    wanted_s = sum(one or 0.0 for one in measured.grad_reduce_s)

    def lasting_s(ratio: float) -> float:
        return sum(stage.exposed_grad_reduce_s for stage in priced(ratio).stages)

    low, high = 1 / _FAR, _FAR
    if abs(lasting_s(1.0) - wanted_s) <= _SAME * wanted_s or not lasting_s(low) < wanted_s < lasting_s(high):
        return 1.0
    while high > (1 + _SAME) * low:
        middle = sqrt(low * high)
        low, high = (middle, high) if lasting_s(middle) < wanted_s else (low, middle)
    return high


def _summing(cluster: Cluster, slower: float) -> Cluster:
    """`cluster` with sums that are so many times slower."""

    def slow(link: Link) -> Link:
        return replace(link, collective_bytes_per_s=_short(link.collective_bytes_per_s / slower))

    return replace(cluster, intra=slow(cluster.intra), inter=slow(cluster.inter))


def _short(number: float) -> float:
    """To six digits, as a reader can take it in."""
    return float(f"{number:.6g}")
