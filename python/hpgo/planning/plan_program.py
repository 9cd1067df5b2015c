"""Schedule and program of a plan, for `Plan.to_schedule` and `Plan.program`."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from hpgo.base.checks import choice
from hpgo.errors import ArgumentError, ScheduleError
from hpgo.hardware.cluster import Cluster
from hpgo.programs.costs import Costs
from hpgo.programs.program import Program, program
from hpgo.programs.schedule import Durations, Schedule, schedules
from hpgo.programs.schedule import schedule as build

if TYPE_CHECKING:
    from hpgo.planning.plans import Plan
    from hpgo.programs.names import ScheduleName


def schedule_of(plan: Plan, schedule: ScheduleName | None) -> Schedule:
    """Return the schedule of a plan, with one rank for each group of devices."""
    asked = plan.schedule if schedule is None else schedule
    name = choice("schedule", asked, (family.name for family in schedules()), ScheduleError)
    ranks, micro_batches = len(plan.groups), plan.micro_batches
    planned = name == plan.schedule
    in_flight = [stage.max_in_flight for stage in plan.stages]
    # Recorded action lists come first: they may be fitted to times, and building the family again could differ.
    if planned and plan.actions:
        return _recorded(plan)
    # For these two, the limits in flight determine the order.
    if planned and name in {"1f1b", "eager_1f1b"}:
        return build(name, ranks=ranks, micro_batches=micro_batches, max_in_flight=in_flight)
    if not planned:
        _check_shape(plan, name)
    # Only schedules that are fitted to times use the durations. The others ignore them.
    return build(
        name,
        ranks=ranks,
        micro_batches=micro_batches,
        virtual_stages_per_rank=plan.virtual_stages_per_rank if plan.virtual_stages_per_rank > 1 else None,
        # The greedy zero-bubble schedule was planned under a limit, which must hold again.
        activation_limit=max(in_flight) if planned and name == "zb" else None,
        durations=durations_of(plan),
    )


def _check_shape(plan: Plan, name: ScheduleName) -> None:
    """Raise ArgumentError if the family `name` does not place the plan's stages on its groups."""
    groups, virtual_stages_per_rank = plan.groups, plan.virtual_stages_per_rank
    family = next((family for family in schedules() if family.name == name), None)
    # Families with a fixed number of virtual stages must not get one.
    several = (
        virtual_stages_per_rank
        if family is not None
        and family.virtual_stages_per_rank in {"2 or more", "even"}
        and virtual_stages_per_rank > 1
        else None
    )
    own = build(name, ranks=len(groups), micro_batches=plan.micro_batches, virtual_stages_per_rank=several)
    if own.rank_of_stage != _rank_of_stage(plan):
        each = "one stage" if virtual_stages_per_rank == 1 else f"{virtual_stages_per_rank} stages"
        raise ArgumentError(
            f"`{name}` runs {own.stages} stages on {own.ranks} ranks, but the plan has {each} per rank"
            + (", on other ranks" if own.stages == len(plan.stages) else ""),
            f"choose a schedule with {each} per rank"
            + (", placed like the plan's" if own.stages == len(plan.stages) else ""),
        )


def _rank_of_stage(plan: Plan) -> tuple[int, ...]:
    """Return the number of the group of each stage."""
    rank_of = {stage: rank for rank, group in enumerate(plan.groups) for stage in group.stages}
    return tuple(rank_of[stage] for stage in range(len(plan.stages)))


def durations_of(plan: Plan) -> Durations:
    """Return the times of the plan's stages, for schedules that are fitted to them."""
    # Recomputation belongs to the input-gradient pass, which needs the activations first.
    halves = [stage.halves_s for stage in plan.stages]
    # Schedules that are fitted to times know only one transfer time. The longest one is safe.
    transfer_s = max((stage.link_s for stage in plan.stages[:-1]), default=0.0)
    return Durations(
        forward_s=tuple(stage.occupied_s[0] for stage in plan.stages),
        input_gradient_s=tuple(half_s for half_s, _ in halves),
        weight_gradient_s=tuple(half_s for _, half_s in halves),
        transfer_s=transfer_s,
    )


def _recorded(plan: Plan) -> Schedule:
    """Return the schedule of the action lists in the plan. Raises ArgumentError if they are of other stages."""
    # A user may have edited the file, so its action lists are checked against its stages.
    schedule = Schedule.from_text("\n".join(plan.actions), name=plan.schedule)
    if schedule.rank_of_stage != _rank_of_stage(plan) or schedule.total_micro_batches != plan.micro_batches:
        raise ArgumentError(
            f"the plan's actions are for {schedule.stages} stages on {schedule.ranks} ranks and"
            f" {schedule.total_micro_batches} micro-batches, but it has {len(plan.stages)} stages,"
            f" {'one per rank' if plan.virtual_stages_per_rank == 1 else f'on {len(plan.groups)} groups of devices'},"
            f" and {plan.micro_batches} micro-batches",
            "restore `actions` as `hpgo plan` wrote them",
        )
    return schedule


def program_of(plan: Plan, schedule: ScheduleName | None) -> Program:
    """Return the program of a plan: its stages, devices, schedule and times."""
    made = program(
        schedule_of(plan, schedule),
        [(stage.layers, stage.devices) for stage in plan.stages],
        pipeline_micro_batch_size=plan.pipeline_micro_batch_size,
        global_batch_size=plan.global_batch_size,
        # Old files have no list of nodes. One node with all devices is then assumed.
        nodes=plan.nodes or (plan.cluster_devices,),
        boundary_tensors=plan.boundary_tensors or None,
        recompute=[stage.recompute for stage in plan.stages],
        shard_optimizer=plan.assumptions is not None and plan.assumptions.memory.shard_optimizer,
        zero_stage=max(stage.zero_stage for stage in plan.stages),
        gpus_per_device=1 if plan.assumptions is None else plan.assumptions.gpus_per_device,
        costs=Costs.of_stages(plan.stages),
        samples_by_replica=[stage.samples_by_replica for stage in plan.stages],
    )
    cluster = None if plan.assumptions is None else plan.assumptions.cluster
    # A plan that was saved without its cluster does not know the device types.
    types = tuple(node.device.name for node in cluster.nodes) if isinstance(cluster, Cluster) else ()
    return replace(made, model=plan.profile, cluster=plan.cluster, device_types=types)
