"""Call the native planner and convert its results: the best plan with its bound, or the reason why none fits."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from hpgo import _core
from hpgo._core import at_batch
from hpgo.base.divisors import divisors
from hpgo.base.units import format_bytes
from hpgo.errors import HpgoError, InfeasibleError
from hpgo.hardware.cluster import MAX_DEVICES
from hpgo.planning.laws import bounded
from hpgo.planning.notes import notes
from hpgo.planning.plans import Alternative, Assumptions, Plan
from hpgo.programs.stages import BoundaryTensor, Memory, Stage

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hpgo.hardware.cluster import Cluster
    from hpgo.model.profile import Profile, TiedWeight
    from hpgo.planning.problem import PlanningProblem
    from hpgo.programs.schedule import Schedule

NO_PLAN_FITS = "no plan fits"
"""Message of the native planner if provably no plan fits. If it only found none, its message differs."""
_BOTH = "recompute and shard"
_CLOSEST_S = 4.0
"""Time limit in seconds to search for the closest plan, if it is unknown whether any plan fits. Not tuned."""
_HINT_S = 1.5
"""Time limit in seconds to search for a plan that fits after one change of the problem. Not tuned."""


def search(
    question: PlanningProblem, time_limit_s: float | None, progress: Callable[[float, float], object] | None
) -> Plan:
    """Return the best plan for one of `SCHEDULES`, without alternatives.

    Raises InfeasibleError, with the closest plan and changes that would help, if no plan fits.
    """
    try:
        # The session holds the converted model, so that several searches of one problem convert it once.
        found, facts = question.session.plan(question, time_limit_s, progress)
    except InfeasibleError as error:
        raise explained(error, replace(question, shares_by_speed=False)) from None
    return searched(question, found, facts)


def searched(question: PlanningProblem, found: _core.PlanRecord, facts: _core.SearchRecord) -> Plan:
    """Return the plan of a search with its bounds. Raises InternalError if a bound exceeds the step."""
    # Bounds of a search can exceed the simulated step by rounding. `bounded` cuts them, or reports a false bound.
    best = plan_of(replace(question, shares_by_speed=facts["shares_by_speed"]), found)
    return replace(
        best,
        lower_bound_s=bounded(best, "lower_bound_s", facts["lower_bound_s"]),
        searched_cuts_bound_s=bounded(best, "searched_cuts_bound_s", facts["searched_cuts_bound_s"]),
        node_aligned_bound_s=bounded(best, "node_aligned_bound_s", facts["node_aligned_bound_s"]),
        cuts=facts["one_order"] or "all",
        placements="compact" if facts["is_node_aligned"] else "all",
        stop_reason=facts["stop_reason"],
        explored_labels=facts["explored_labels"],
        simulated=facts["simulated"],
    )


def evaluated(
    question: PlanningProblem,
    stages: Sequence[tuple[list[int], list[int]]],
    *,
    max_in_flight: Sequence[int] | None = None,
    schedule: Schedule | None = None,
    recompute: Sequence[bool] | None = None,
) -> Plan:
    """Return the plan with these stages, under the question's schedule.

    Args:
        question: the planning problem.
        stages: layers, by their index in the profile, and devices of each stage.
        max_in_flight: limits in flight of all stages, under 1F1B, eager 1F1B or GPipe; None lets the planner choose.
        schedule: action lists of all ranks, under other schedules; None lets the planner choose.
        recompute: whether each stage recomputes its activations, beside one of the two before; None lets the planner
            choose.
    """
    found = question.session.evaluate(question, stages, max_in_flight, schedule, recompute)
    # The native planner returns devices in its own order. Rank programs depend on the order that was given.
    for record, (_, devices) in zip(found["stages"], stages, strict=True):
        record["devices"] = devices
    return plan_of(question, found)


def plan_of(question: PlanningProblem, found: _core.PlanRecord) -> Plan:
    """Return the plan of a record of the native planner."""
    profile = question.profile
    stages = []
    for record in found["stages"]:
        cost = record["cost"]
        stages.append(
            Stage(
                layers=tuple(profile.layers[index].id for index in record["layers"]),
                devices=tuple(record["devices"]),
                max_in_flight=record["max_in_flight"],
                samples_per_replica=cost["samples_per_replica"],
                samples_by_replica=_in_order(record["devices"], cost["samples_by_replica"]),
                forward_s=cost["forward_s"],
                backward_s=cost["backward_s"],
                transfer_s=cost["transfer_s"],
                transfer_busy_s=cost["transfer_busy_s"],
                exposed_transfer_s=cost["exposed_transfer_s"],
                exposed_forward_comm_s=cost["exposed_forward_comm_s"],
                exposed_backward_comm_s=cost["exposed_backward_comm_s"],
                grad_reduce_s=cost["grad_reduce_s"],
                exposed_grad_reduce_s=cost["exposed_grad_reduce_s"],
                memory=Memory(**cost["memory"]),
                capacity_bytes=cost["capacity_bytes"],
                input_gradient_s=cost["input_gradient_s"],
                weight_gradient_s=cost["weight_gradient_s"],
                recompute=cost["recompute"],
                zero_stage=cost["zero_stage"],
            )
        )
    # The record has only the values that the search decided. All others come from the problem.
    pipeline_micro_batch_size = found["pipeline_micro_batch_size"]
    return Plan(
        profile=profile.name,
        cluster=question.cluster.name,
        schedule=question.schedule,
        global_batch_size=question.global_batch_size,
        pipeline_micro_batch_size=pipeline_micro_batch_size,
        stages=tuple(stages),
        virtual_stages_per_rank=found["virtual_stages_per_rank"],
        actions=tuple(found["actions"] or ()),
        step_s=found["step_s"],
        one_device_step_s=question.global_batch_size
        // pipeline_micro_batch_size
        * _profile_step_s(profile, pipeline_micro_batch_size),
        loading_s=question.loading_s,
        cluster_devices=question.cluster.devices,
        nodes=tuple(node.count for node in question.cluster.nodes),
        split_tied_weights=_parted(profile, stages),
        boundary_tensors=_crossings(
            profile, [record["layers"] for record in found["stages"]], pipeline_micro_batch_size
        ),
        assumptions=Assumptions(
            profile=question.measured,
            cluster=question.cluster,
            memory=question.memory,
            even_split=question.even_split,
            overlap=question.overlap,
            overlap_p2p_comm=question.overlap_p2p_comm,
            shares_by_speed=question.shares_by_speed,
            min_samples_per_replica=question.min_samples_per_replica,
            include_data_loading=question.include_data_loading,
            blocks=question.blocks,
            gpus_per_device=question.cluster.gpus_per_device,
        ),
        made_with=_core.__version__,
        notes=notes(question, stages),
    )


def _in_order(devices: Sequence[int], samples: Sequence[int]) -> tuple[int, ...]:
    """Return samples of devices, which are listed by ascending device number, in the order of `devices`."""
    samples_of = dict(zip(sorted(devices), samples, strict=False))
    return tuple(samples_of[device] for device in devices) if samples_of else ()


def _parted(profile: Profile, stages: Sequence[Stage]) -> tuple[TiedWeight, ...]:
    """Return the tied weights whose layers are on several groups of devices."""
    # Stages are compared by devices, because virtual stages on the same devices share one copy of a weight.
    group_of = {layer: stage.devices for stage in stages for layer in stage.layers}
    return tuple(tie for tie in profile.tied_weights if len({group_of[layer] for layer in tie.layers}) > 1)


def _crossings(
    profile: Profile, stages: Sequence[Sequence[int]], pipeline_micro_batch_size: int
) -> tuple[tuple[BoundaryTensor, ...], ...]:
    """Return the tensors that cross each cut, in the order of the profile.

    They are the outputs of layers before the cut that layers behind it read.
    """
    stage_of = {profile.layers[index].id: number for number, layers in enumerate(stages) for index in layers}
    # A tensor must be passed on until the last stage that reads it, across all cuts in between.
    last_reader = dict(stage_of)
    for start, end in profile.edges:
        last_reader[start] = max(last_reader[start], stage_of[end])
    boundary_tensors: list[list[BoundaryTensor]] = [[] for _ in stages[1:]]
    for layer in profile.layers:
        first = stage_of[layer.id]
        if last_reader[layer.id] > first:
            size = at_batch(profile.batch_sizes, layer.activation_bytes, pipeline_micro_batch_size)
            for cut in range(first, last_reader[layer.id]):
                boundary_tensors[cut].append(BoundaryTensor(layer.id, size))
    return tuple(map(tuple, boundary_tensors))


def _profile_step_s(profile: Profile, batch_size: int) -> float:
    """Return the forward and backward time of all layers in seconds, interpolated like in the native planner."""
    sizes = profile.batch_sizes
    totals = [sum(layer.forward_s[at] + layer.backward_s[at] for layer in profile.layers) for at in range(len(sizes))]
    return at_batch(sizes, totals, batch_size)


def with_alternatives(question: PlanningProblem, best: Plan) -> Plan:
    """Return `best` with pure data parallelism and a pipeline without replicas as alternatives.

    If the search was stopped, no more time is spent on alternatives.
    """
    not_searched = "not searched, as the search was stopped"
    try:
        classics = question.session.classics(question, None if best.finished else 0.0)
    except KeyboardInterrupt:  # Return `best` without alternatives instead of losing it.
        classics = {"data_parallel": None, "pipeline_only": None, "pipeline_only_stopped": "interrupt"}
        shared = not_searched
    else:
        shared = "no micro-batch can be split over two devices"
    ended = {None: "no plan of this kind fits", "work_limit": "no plan of this kind was found"}
    pipeline_only = ended.get(classics["pipeline_only_stopped"], not_searched)
    alternatives = []
    for name, found, reason in (
        ("data parallelism", classics["data_parallel"], shared),
        ("pipeline parallelism only", classics["pipeline_only"], pipeline_only),
    ):
        if found is None:
            alternatives.append(Alternative(name, None, 0, 0, 0.0, reason))
            continue
        other = plan_of(question, found)
        if best.assumed.shares_by_speed:
            other = _with_shares_by_speed(question, other)
        lacking = other.shortfall_bytes
        # An alternative that does not fit has no step time in the report, only its shortfall.
        if lacking:
            why = f"lacks {format_bytes(lacking)} on each device"
        # An alternative can be faster than a plan that was preferred for its memory. Then it is a different plan.
        elif abs(other.step_s - best.step_s) <= 1e-9 * best.step_s or (
            best.memory_preference is None and other.step_s < best.step_s
        ):
            why = "is this plan"
        else:
            why = other.limit
        step_s = None if lacking else other.step_s
        alternatives.append(
            Alternative(name, step_s, len(other.stages), other.pipeline_micro_batch_size, lacking, why, other)
        )
    return replace(best, alternatives=tuple(alternatives))


def _with_shares_by_speed(question: PlanningProblem, plan: Plan) -> Plan:
    """Return a plan with even shares with shares by speed instead. A plan and its alternatives share assumptions."""
    index_of = {layer.id: index for index, layer in enumerate(question.profile.layers)}
    size = (plan.pipeline_micro_batch_size,)
    return evaluated(
        replace(question, shares_by_speed=True, pipeline_micro_batch_sizes=size),
        [([index_of[layer] for layer in stage.layers], list(stage.devices)) for stage in plan.stages],
        max_in_flight=[stage.max_in_flight for stage in plan.stages],
        recompute=[stage.recompute for stage in plan.stages],
    )


def explained(error: InfeasibleError, question: PlanningProblem) -> InfeasibleError:
    """Return `error` with the stage that lacks memory in the closest plan found, and changes that make a plan fit.

    If provably no plan fits, packing replaces the search, so that the answer takes about 0.1 s.
    """
    found = _packed(question) if error.message == NO_PLAN_FITS else _searched(question)
    if found is None:
        return error
    closest, helps = found
    index, stage = min(enumerate(closest.stages), key=lambda row: row[1].free_bytes)
    # The stage is limited by its smallest device, so that is the one to name.
    device = _smallest(question.cluster, stage.devices)
    reserved_bytes = question.memory.reserved_bytes
    reserved = f", {format_bytes(reserved_bytes)} of it reserved" if reserved_bytes else ""
    sizes = divisors(question.global_batch_size)
    # Suggest a smaller micro-batch only if a divisor of the batch is smaller and still allowed.
    can_shrink = any(
        question.min_samples_per_replica <= size < question.pipeline_micro_batch_sizes[0] for size in sizes
    )
    smaller = " or a smaller micro-batch" if can_shrink else ""
    hint = f"some plan fits if you {', or '.join(helps)}" if helps else f"use devices with more memory{smaller}"
    return error.as_kind(
        InfeasibleError,
        f"{error.message}: in the closest plan found, stage {index} of {len(closest.stages)}"
        f" ({len(stage.layers)} layers, micro-batch {closest.pipeline_micro_batch_size}) needs"
        f" {format_bytes(stage.memory.total_bytes)} on each device, but `{device}` has"
        f" {format_bytes(stage.capacity_bytes + reserved_bytes)}{reserved}:"
        f" {format_bytes(-stage.free_bytes)} short",
        hint,
    )


def _packed(question: PlanningProblem) -> tuple[Plan, list[str]] | None:
    """Return the closest plan that packing finds, and the changes after which packing finds a plan that fits."""
    try:
        closest, fits = question.session.shortage(question)
    except HpgoError:  # The error to explain is more important than one of the explanation.
        return None
    if closest is None:
        return None
    # The native call returns one flag per change in exactly this order.
    words = ["recompute activations", "shard the optimizer state", _BOTH, "choose schedule `zb`"]
    # Larger clusters are rejected on input, so doubling must not be suggested.
    if 2 * question.cluster.devices <= MAX_DEVICES:
        words.append(f"use {2 * question.cluster.devices} devices")
    helps = [name for name, fit in zip(words, fits, strict=False) if fit]
    # Suggest both changes together only if no single change is enough.
    return plan_of(question, closest), helps if helps in ([], [_BOTH]) else [name for name in helps if name != _BOTH]


def _searched(question: PlanningProblem) -> tuple[Plan, list[str]] | None:
    """Return the closest plan found, and the changes after which a short search finds a plan that fits."""
    try:
        closest = plan_of(question, question.session.closest(question, _CLOSEST_S))
    except HpgoError:  # No plan was found within the time limit.
        return None
    # Try cheap changes of the problem first, and more hardware last.
    recomputed = replace(question, recompute=(True,))
    sharded = replace(question.memory, shard_optimizer=True)
    smallest = question.pipeline_micro_batch_sizes[0]
    single = replace(question, global_batch_size=smallest, pipeline_micro_batch_sizes=(smallest,), recompute=(False,))
    helps: list[str] = []
    changes = [
        ("recompute activations", recomputed),
        ("shard the optimizer state", replace(question, memory=sharded)),
        (_BOTH, replace(recomputed, memory=sharded)),
        ("choose schedule `zb`", single),  # It needs only one micro-batch in flight, like a step of one.
    ]
    if 2 * question.cluster.devices <= MAX_DEVICES:
        doubled = replace(question.cluster, nodes=question.cluster.nodes * 2)
        changes.append((f"use {doubled.devices} devices", replace(question, cluster=doubled)))
    for words, changed in changes:
        if helps and words == _BOTH:
            continue
        try:
            if changed.session.fits(changed, _HINT_S):
                helps.append(words)
        except HpgoError:  # A failed suggestion must not hide the error to explain.
            continue
    return closest, helps


def _smallest(cluster: Cluster, devices: Sequence[int]) -> str:
    """Return the type of the device with the smallest memory."""
    types = [node.device for node in cluster.nodes for _ in range(node.count)]
    return min((types[device] for device in devices), key=lambda device: device.memory_bytes).name
