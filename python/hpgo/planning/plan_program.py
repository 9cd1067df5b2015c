"""A plan's orders, and the program that follows from it: what `Plan.orders` and `Plan.program` answer."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from hpgo.base.checks import choice
from hpgo.errors import ArgumentError, ScheduleError
from hpgo.machine.cluster import Cluster
from hpgo.programs.costs import Costs
from hpgo.programs.program import Program, program
from hpgo.programs.schedule import Durations, Schedule, schedules
from hpgo.programs.schedule import schedule as build

if TYPE_CHECKING:
    from hpgo.planning.plans import Plan
    from hpgo.programs.names import ScheduleName


def orders_of(plan: Plan, schedule: ScheduleName | None) -> Schedule:
    """The order of each group of devices, one rank a group."""
    asked = plan.schedule if schedule is None else schedule
    name = choice("schedule", asked, (family.name for family in schedules()), ScheduleError)
    ranks, micro_batches = len(plan.groups), plan.micro_batches
    planned = name == plan.schedule
    in_flight = [stage.max_in_flight for stage in plan.stages]
    if planned and plan.actions:
        return _recorded(plan)
    if planned and name in {"1f1b", "eager_1f1b"}:
        return build(name, ranks=ranks, micro_batches=micro_batches, max_in_flight=in_flight)
    if not planned:
        _check_shape(plan, name)
    # Schedules that look at durations may now be fitted to the plan's; the others come out as before.
    return build(
        name,
        ranks=ranks,
        micro_batches=micro_batches,
        chunks=plan.chunks if plan.chunks > 1 else None,
        cap=max(in_flight) if planned and name == "zb" else None,
        durations=durations_of(plan),
    )


def _check_shape(plan: Plan, name: ScheduleName) -> None:
    """Raises ArgumentError unless the family `name` can run the plan's stages on its groups."""
    groups, chunks = plan.groups, plan.chunks
    family = next((family for family in schedules() if family.name == name), None)
    several = chunks if family is not None and family.chunks in {"2 or more", "even"} and chunks > 1 else None
    own = build(name, ranks=len(groups), micro_batches=plan.micro_batches, chunks=several)
    if own.rank_of_stage != _rank_of_stage(plan):
        each = "one stage" if chunks == 1 else f"{chunks} stages"
        raise ArgumentError(
            f"`{name}` runs {own.stages} stages on {own.ranks} ranks, but the plan has {each} a rank"
            + (", on others" if own.stages == len(plan.stages) else ""),
            f"choose a schedule with {each} a rank"
            + (", placed as those of the plan's" if own.stages == len(plan.stages) else ""),
        )


def _rank_of_stage(plan: Plan) -> tuple[int, ...]:
    """For each stage the number of its group."""
    rank_of = {stage: rank for rank, group in enumerate(plan.groups) for stage in group.stages}
    return tuple(rank_of[stage] for stage in range(len(plan.stages)))


def durations_of(plan: Plan) -> Durations:
    """Seconds of the plan's stages."""
    halves = [stage.halves_s(recompute=plan.recompute) for stage in plan.stages]
    transfer_s = max((stage.transfer_s for stage in plan.stages[:-1]), default=0.0)
    return Durations(
        forward_s=tuple(stage.forward_s for stage in plan.stages),
        input_gradient_s=tuple(half_s for half_s, _ in halves),
        weight_gradient_s=tuple(half_s for _, half_s in halves),
        transfer_s=transfer_s,
    )


def _recorded(plan: Plan) -> Schedule:
    """The orders that are written down."""
    orders = Schedule.from_text("\n".join(plan.actions), name=plan.schedule)
    if orders.rank_of_stage != _rank_of_stage(plan) or orders.total_micro_batches != plan.micro_batches:
        raise ArgumentError(
            f"the plan's actions are those of {orders.stages} stages on {orders.ranks} ranks and"
            f" {orders.total_micro_batches} micro-batches, but it has {len(plan.stages)} stages,"
            f" {'a rank each' if plan.chunks == 1 else f'on {len(plan.groups)} groups of devices'}, and"
            f" {plan.micro_batches} micro-batches",
            "leave `actions` as `hpgo plan` wrote them",
        )
    return orders


def program_of(plan: Plan, schedule: ScheduleName | None) -> Program:
    """The plan's stages on their devices, in these orders, with what they cost."""
    made = program(
        orders_of(plan, schedule),
        [(stage.layers, stage.devices) for stage in plan.stages],
        micro_batch_size=plan.micro_batch_size,
        global_batch_size=plan.global_batch_size,
        nodes=plan.nodes or (plan.cluster_devices,),
        boundary_tensors=plan.boundary_tensors or None,
        recompute=plan.recompute,
        shard_optimizer=plan.assumptions is not None and plan.assumptions.memory.shard_optimizer,
        gpus_per_device=1 if plan.assumptions is None else plan.assumptions.gpus_per_device,
        costs=Costs.of_stages(plan.stages, recompute=plan.recompute),
    )
    cluster = None if plan.assumptions is None else plan.assumptions.cluster
    types = tuple(machine.device.name for machine in cluster.nodes) if isinstance(cluster, Cluster) else ()
    return replace(made, model=plan.profile, cluster=plan.cluster, device_types=types)
