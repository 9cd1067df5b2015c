"""Plans run by other schedules than those of the search: simulated on the cuts that it found, one stage a device."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, lru_cache
from typing import TYPE_CHECKING

from hpgo.programs.costs import Costs, StageBytes
from hpgo.programs.orders import fitted, schedule, schedules
from hpgo.timing.simulation import simulate

if TYPE_CHECKING:
    from hpgo.planning.plans import Plan
    from hpgo.programs.names import ScheduleName
    from hpgo.programs.orders import Durations, Schedule
    from hpgo.programs.stages import Stage
    from hpgo.timing.timeline import Timeline

RUN_ON_PLANS = ("zb_h1", "zb_h2", "zb", "1f1b_overlap", "sequential")
"""Schedules with one stage a device that are planned by running them on the planner's cuts."""

FRUGAL = ("zb", "sequential")
"""Those of them that can do with one activation a stage, which is less than 1F1B's."""


def run_on(plan: Plan, name: str) -> Plan:
    """`plan` with its stages run by the schedule `name` of `RUN_ON_PLANS`: simulated, with the memory that this takes.

    A backward pass is run as I and W where the schedule splits it, half of it each if the profile tells no more, and
    activations are held until W. Recomputation is part of I, and what it makes again is held until W, too. A forward
    and a backward that run as one take as long as one after the other: profiles don't tell what that saves. `zb` takes
    the cap on activations that gives the shortest step within memory.
    """
    if name != "zb":
        return _run_with(plan, name, None)
    depth = len(plan.stages)
    cap = max(1, depth // 2)
    runs = [_run_with(plan, name, most) for most in sorted({cap, depth, depth + depth // 2, 2 * depth})]
    fitting = [run for run in runs if run.fits]
    if fitting:
        return min(fitting, key=lambda run: run.step_s)
    run = runs[0]
    while cap > 1 and not run.fits:
        cap //= 2
        run = _run_with(plan, name, cap)
    return run


def _run_with(plan: Plan, name: str, cap: int | None) -> Plan:
    """As `run_on`, with at most `cap` activations on each device; the peak that comes out is a cap that gives it."""
    durations = plan.durations if name in fitted() else None
    while True:
        orders = _orders(name, len(plan.stages), plan.micro_batches, cap, durations)
        peaks = orders.peak_in_flight
        if cap is None or max(peaks) >= cap:
            break
        cap = max(peaks)
    return run_as(plan, orders)


def run_as(plan: Plan, orders: Schedule) -> Plan:
    """`plan` with its stages run in these orders, a stage on each rank."""
    run = _held(plan, orders.name, orders.peak_in_flight)
    costs = replace(Costs.of_stages(run.stages, recompute=run.recompute), memory=None, memory_cap_bytes=None)
    if not (run.recompute and _splits_backward(orders.name)):
        return replace(run, step_s=simulate(orders, costs=costs).makespan_s)
    # How many micro-batches wait for W at once, with what was made again for them, is for the order to say.
    held = StageBytes(
        activation_bytes=[stage.kept_bytes for stage in run.stages],
        recomputed_bytes=[stage.memory.recomputed_bytes for stage in run.stages],
    )
    timeline = simulate(orders, costs=replace(costs, memory=held))
    stages = tuple(
        replace(stage, memory=replace(stage.memory, activations_bytes=peak_bytes))
        for stage, peak_bytes in zip(run.stages, _peaks_bytes(timeline), strict=True)
    )
    return replace(run, step_s=timeline.makespan_s, stages=stages)


@lru_cache(maxsize=64)  # many plans have as many stages and micro-batches
def _orders(
    name: ScheduleName, ranks: int, micro_batches: int, cap: int | None, durations: Durations | None
) -> Schedule:
    return schedule(name, ranks=ranks, micro_batches=micro_batches, cap=cap, durations=durations)


def _peaks_bytes(timeline: Timeline) -> list[float]:
    """Most that each rank holds."""
    return [float(held.max()) for _, held in timeline.memory or ()]


def _held(plan: Plan, name: str, in_flight: list[int]) -> Plan:
    """The plan run by `name`, with so many activations on each stage, perhaps recomputed; the step is the old one."""
    split = _splits_backward(name)
    stages = tuple(
        replace(
            stage,
            in_flight=count,
            sync_tail_s=_tail_s(stage, plan.recompute) if split else stage.sync_tail_s,
            memory=replace(stage.memory, activations_bytes=count * stage.kept_bytes + stage.memory.recomputed_bytes),
        )
        for stage, count in zip(plan.stages, in_flight, strict=True)
    )
    return replace(
        plan,
        schedule=name,
        stages=stages,
        lower_bound_s=None,
        searched_cuts_bound_s=None,
        compact_bound_s=None,
        alternatives=(),
        schedules=(),
    )


@cache
def _splits_backward(name: str) -> bool:
    return any(family.splits_backward for family in schedules() if family.name == name)


def _tail_s(stage: Stage, recompute: bool) -> float:
    """Synchronisation after the last W, at most: W is the part of the backward that the sums can hide behind."""
    whole_s = stage.backward_s - (stage.forward_s if recompute else 0.0)
    unhidden_s = max(0.0, whole_s - stage.halves_s(recompute=recompute)[1])
    return min(stage.sync_s, stage.sync_tail_s + unhidden_s)
