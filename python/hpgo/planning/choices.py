"""What is said of each schedule where several are compared."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from hpgo.base.units import format_bytes
from hpgo.planning.plans import ScheduleChoice
from hpgo.planning.reprice import reprice

if TYPE_CHECKING:
    from hpgo.planning.plans import Plan

    Try = tuple[Plan | None, ScheduleChoice]  # the best plan of a schedule, if any, and what to say of it


def shortest(runs: list[Plan], name: str) -> Try:
    """The run with the shortest step that fits, and what to say of it."""
    fitting = [run for run in runs if run.fits]
    if not fitting:
        return None, _lacking(name, runs)
    shortest = replace(reprice(min(fitting, key=lambda run: run.step_s)), simulated=len(runs))
    return shortest, choice(shortest, shortest.limit)


def choice(plan: Plan, why: str) -> ScheduleChoice:
    """What to say of the best plan of a schedule."""
    return ScheduleChoice(
        name=plan.schedule,
        step_s=plan.step_s if plan.fits else None,
        peak_bytes=max(group.memory.total_bytes for group in plan.groups),
        missing_bytes=plan.missing_bytes,
        stages=len(plan.stages),
        chunks=plan.chunks,
        micro_batch_size=plan.micro_batch_size,
        planned=True,
        why=why,
        plan=replace(plan, alternatives=(), schedules=()),
    )


def _lacking(name: str, runs: list[Plan]) -> ScheduleChoice:
    if not runs:
        return unknown(name, "no cut was tried: none was found, or it has too many micro-batches to simulate")
    closest = reprice(min(runs, key=lambda run: run.missing_bytes))
    return choice(closest, f"lacks {format_bytes(closest.missing_bytes)} on a device")


def unknown(name: str, why: str) -> ScheduleChoice:
    """What to say of a schedule without a plan."""
    return ScheduleChoice(name, None, None, 0.0, 0, 0, 0, True, why)
