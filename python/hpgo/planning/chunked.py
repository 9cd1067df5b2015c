"""Plans for schedules that run several stages on a device.

The native search starts from balanced cuts into several stages on each of equal groups of devices, and moves borders
and devices while that shortens the step under the memory of each group: docs/planner.md.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import TYPE_CHECKING

from hpgo import _core
from hpgo.base.errors import ArgumentError, DeadlineError, HpgoError, InfeasibleError
from hpgo.base.units import format_bytes
from hpgo.base.wording import counted
from hpgo.planning.choices import choice
from hpgo.planning.cuts import MOST_ACTIONS, sizes
from hpgo.planning.laws import bounded
from hpgo.planning.running import durations_of
from hpgo.planning.search import plan_of
from hpgo.programs.orders import built, fitted, schedule

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from hpgo.planning.choices import Try
    from hpgo.planning.clock import Clock
    from hpgo.planning.plans import Plan
    from hpgo.planning.question import Question
    from hpgo.programs.names import ScheduleName
    from hpgo.programs.orders import Schedule

CHUNKED: dict[ScheduleName, tuple[int, ...]] = {
    "interleaved": (2, 3, 4, 6),
    "interleaved_overlap": (2, 3, 4, 6),
    "looped_bfs": (2, 3, 4, 6),
    "hanayo": (2, 4),
    "interleaved_zb": (2, 3, 4, 6),
    "zb_v": (2,),
    "v_half": (2,),
    "v_min": (2,),
    "dualpipe_v": (2,),
}
"""Schedules with several stages a device, and how many are tried."""


def _chunks(question: Question, name: ScheduleName) -> tuple[int, ...]:
    """Those of `CHUNKED` that the launcher of the question runs."""
    is_single = name == "hanayo" and question.launcher is not None and question.launcher.single_v
    return (2,) if is_single else CHUNKED[name]


def best_of(
    question: Question,
    name: ScheduleName,
    clock: Clock,
    *,
    progress: Callable[[float, float], object] | None = None,
    near_size: int | None = None,
) -> Try:
    """The best plan of a schedule of `CHUNKED` that was found, and what to say of it; no plan if none fits.

    A few micro-batch sizes near `near_size` are tried, see `near`, which is asked if it is None; while nothing fits,
    the next few. Raises InfeasibleError if there is no cut into so many stages, DeadlineError if the time was up before
    there was any plan.
    """
    left = _few_actions(question, name)
    near_size = near(question, clock) if near_size is None else near_size
    plans: list[Plan] = []
    refused: InfeasibleError | None = None
    is_whole = True
    while left and not any(plan.fits for plan in plans) and not (plans and clock.over()):
        few = sizes(left, near_size)
        left = [size for size in left if size not in few]
        for some, chunks, most_stages in _parts(question, name, few):
            one = replace(question, most_stages=most_stages)
            try:
                plans.append(_searched(one, name, some, chunks, clock, progress=progress))
            except InfeasibleError as error:  # these sizes have no cut
                refused = refused or error
            except DeadlineError:
                if not plans:
                    raise
                is_whole = False
                break
    if not plans:
        raise refused or InfeasibleError(
            f"`{name}` needs two micro-batches or more, and all sizes make one of the whole batch",
            "choose smaller micro-batches, with `micro_batch_size`, or a larger batch",
        )
    plan = min(plans, key=lambda plan: (plan.missing_bytes, plan.step_s))
    bounds_s = [one.lower_bound_s for one in plans]
    plan = replace(
        plan,
        simulated=sum(plan.simulated for plan in plans),
        lower_bound_s=min(bounds_s) if is_whole and None not in bounds_s else None,  # type: ignore[type-var]
    )
    if not plan.fits:
        return None, choice(plan, f"lacks {format_bytes(plan.missing_bytes)} on a device")
    return plan, choice(plan, plan.limit)


def _parts(
    question: Question, name: ScheduleName, few: Sequence[int]
) -> Iterator[tuple[list[int], tuple[int, ...], int]]:
    """Micro-batch sizes, numbers of stages a device and most stages that are searched together.

    A launcher's own interleaved 1F1B needs as many micro-batches as there are ranks, or more.
    """
    chunks, most = _chunks(question, name), question.most_stages
    if question.launcher is None or question.launcher.by_file:
        yield list(few), chunks, most
        return
    devices = question.cluster.devices
    free = [size for size in few if question.global_batch_size // size >= devices]
    if free:
        yield free, chunks, most
    for size, count in product([size for size in few if size not in free], chunks):
        if (micro_batches := question.global_batch_size // size) > 1:
            yield [size], (count,), min(most, count * micro_batches)


def _few_actions(question: Question, name: ScheduleName) -> list[int]:
    """Micro-batch sizes that make so few actions that a step can be simulated in no time."""
    stages = 2 * min(_chunks(question, name))
    actions = {size: 3 * stages * (question.global_batch_size // size) for size in question.micro_batch_sizes}
    few = [size for size, count in actions.items() if count <= MOST_ACTIONS]
    if not few:
        size = max(actions)
        raise InfeasibleError(
            f"a step of `{name}` with micro-batches of {size} has {actions[size]:,} actions or more, and up to"
            f" {MOST_ACTIONS:,} are simulated",
            "choose larger micro-batches, a smaller batch, or a schedule with one stage on each device",
        )
    return few


def _searched(
    question: Question,
    name: ScheduleName,
    few: Sequence[int],
    chunks: tuple[int, ...],
    clock: Clock,
    *,
    progress: Callable[[float, float], object] | None,
) -> Plan:
    """The best plan for a few micro-batch sizes that was found, or the one that lacks least; the bound is for all."""
    asked = replace(question, schedule="1f1b")
    found, record, facts = _core.chunked_plan(asked, name, chunks, sorted(few), clock.left_s(), progress)
    clock.stopped = facts["stopped"] or clock.stopped
    # The search adds up the same numbers in another order. Priced again, the plan is what `Plan.reprice` gives.
    one = replace(question, micro_batch_sizes=(found["micro_batch_size"],), recompute=(found["recompute"],))
    rows = [(list(stage["layers"]), list(stage["devices"])) for stage in found["stages"]]
    plan = price(one, rows, built(record))
    return replace(
        plan,
        lower_bound_s=bounded(plan, "lower_bound_s", facts["lower_bound_s"]),
        cuts=facts["one_order"] or "all",
        placements="compact",
        simulated=facts["simulated"],
    )


def near(question: Question, clock: Clock) -> int:
    """The micro-batch size that eager 1F1B takes at a glance, the smallest one where that fits nowhere."""
    glance = clock.glance(replace(question, schedule="eager_1f1b"))
    return min(question.micro_batch_sizes) if glance is None else glance.micro_batch_size


def evaluate(question: Question, stages: Sequence[tuple[list[int], list[int]]]) -> Plan:
    """The price of given stages, several of them on the same devices, under the question's schedule.

    The best of the question's micro-batch sizes is taken. Raises ArgumentError if it runs other stages on other ranks.
    """
    groups = list(dict.fromkeys(tuple(devices) for _, devices in stages))
    if len(stages) % len(groups):
        raise ArgumentError(
            f"{counted(len(stages), 'stage')} on {counted(len(groups), 'group')} of devices are not as many on each",
            f"`{question.schedule}` runs as many stages on each device: name the same devices for each of them",
        )
    plans: list[Plan] = []
    refused: HpgoError | None = None
    for size, recompute in product(question.micro_batch_sizes, question.recompute):
        one = replace(question, micro_batch_sizes=(size,), recompute=(recompute,))
        try:
            plans.append(_fitted_plan(one, stages, groups))
        except HpgoError as error:
            refused = error
    if not plans and refused is not None:
        raise refused
    return min(plans, key=lambda plan: (plan.missing_bytes, plan.step_s))


def price(question: Question, stages: Sequence[tuple[list[int], list[int]]], orders: Schedule) -> Plan:
    """The plan with these stages and these orders, for the question's only micro-batch size."""
    found = _core.evaluate_orders(replace(question, schedule="1f1b"), stages, orders)
    return _plan(question, orders.name, found, orders)


def _fitted_plan(
    question: Question, stages: Sequence[tuple[list[int], list[int]]], groups: Sequence[tuple[int, ...]]
) -> Plan:
    """The price under orders that the question's schedule has for it, fitted to times where it looks at them."""

    def orders(plan: Plan | None) -> Schedule:
        return schedule(
            question.schedule,  # type: ignore[arg-type] # one of `CHUNKED`
            ranks=len(groups),
            micro_batches=question.global_batch_size // question.micro_batch_sizes[0],
            chunks=len(stages) // len(groups),
            durations=None if plan is None else durations_of(plan),
        )

    plan = price(question, stages, orders(None))
    return price(question, stages, orders(plan)) if question.schedule in fitted() else plan


def _plan(question: Question, name: str, found: _core.PlanRecord, orders: Schedule) -> Plan:
    return replace(
        plan_of(replace(question, schedule=name), found, chunks=orders.stages // orders.ranks),
        actions=tuple(orders.to_text().splitlines()),
    )
