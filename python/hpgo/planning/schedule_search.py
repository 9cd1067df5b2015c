"""Plans for schedules other than 1F1B, eager 1F1B and GPipe, and the comparison of all schedules.

One native search tries all requested schedules. Schedules with one stage per device are simulated on good cuts for
1F1B, without a proof. Schedules with virtual stages have a separate search and bound: see docs/planner.md.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from hpgo import _core
from hpgo.base.messages import did_you_mean, safe_repr
from hpgo.base.units import format_bytes
from hpgo.errors import ArgumentError, InfeasibleError
from hpgo.planning.infeasibility import check_memory
from hpgo.planning.memory_preference import with_leaner
from hpgo.planning.plans import ScheduleChoice
from hpgo.planning.problem import SCHEDULES
from hpgo.planning.search import NO_PLAN_FITS, explained, searched, with_alternatives
from hpgo.programs.schedule import schedules

if TYPE_CHECKING:
    from collections.abc import Callable

    from hpgo.planning.plans import Plan
    from hpgo.planning.problem import PlanningProblem
    from hpgo.programs.schedule import ScheduleFamily

    Progress = Callable[[float, float], object] | None

ONE_STAGE = tuple(_core.ONE_STAGE)
"""Schedules with one stage per device, which are simulated on cuts for 1F1B."""
FRUGAL = tuple(_core.FRUGAL)
"""Schedules of `ONE_STAGE` that can run with one activation per stage, which is less than 1F1B needs."""
VIRTUAL_STAGES = dict(_core.VIRTUAL_STAGES)
"""Schedules with virtual stages, and the numbers of virtual stages per device to try."""

_ALL = (*SCHEDULES, *ONE_STAGE, *VIRTUAL_STAGES)


def check_schedule(name: object) -> None:
    """Raise ArgumentError, with the reason, for a schedule that the planner does not support."""
    # The valid case comes first: the table of families below is only built for the error.
    if isinstance(name, str) and name in {"auto", *_ALL}:
        return
    known = {family.name: family for family in schedules()}
    if not isinstance(name, str) or name not in known:
        wanted = name if isinstance(name, str) else ""
        raise ArgumentError(
            f"there is no schedule {safe_repr(name)}", did_you_mean(wanted, ["auto", *_ALL]), code="unknown_name"
        )
    why, hint = _refusal(known[name])
    raise ArgumentError(f"can't plan for schedule {name!r}: {why}", hint, code="unsupported")


def _refusal(family: ScheduleFamily) -> tuple[str, str]:
    plannable = f"choose auto or one of {', '.join(_ALL)}"
    # The order of these reasons matters: an asynchronous schedule may also have other obstacles.
    if family.synchronization == "asynchronous":
        return "it updates weights while micro-batches are in flight, so no step of it ends", plannable
    if not family.trains:
        return (
            "it has no backward passes, and a plan is a training step",
            "`hpgo.partition` plans inference; `hpgo.simulate` runs this schedule",
        )
    return "it keeps two copies of the model", plannable


def best_of_one(question: PlanningProblem, *, time_limit_s: float | None, progress: Progress) -> Plan:
    """Return the plan with the shortest step found, for a schedule of `ONE_STAGE` or `VIRTUAL_STAGES`.

    Raises InfeasibleError if no plan that fits is found, TimeLimitError if the time limit passed before there was one.
    """
    name = question.schedule
    # A cheap check of necessary conditions comes first, because a search can take minutes to find no plan.
    check_memory(
        question, time_limit_s, name=name, in_flight_as_1f1b=name in ONE_STAGE and name not in FRUGAL,
        virtual_stages_per_rank=name in VIRTUAL_STAGES,
    )  # fmt: skip
    # Explanations of missing memory need a schedule of the native search. 1F1B is the closest one.
    flushed = replace(question, schedule="1f1b")
    try:
        (tried,), _ = question.session.search(question, [name], time_limit_s, progress)
    except InfeasibleError as error:
        raise _none_found(explained(error, flushed), f"`{name}`", certain=name not in FRUGAL) from None
    plan = _plan_of(question, tried)
    if plan is not None and plan.fits:
        return plan
    lacking = plan is not None and bool(plan.shortfall_bytes)
    # The search for virtual stages has its own message and hint.
    if tried["message"] is not None and name in VIRTUAL_STAGES:
        raise InfeasibleError(tried["message"], tried["hint"] or "")
    closest = "the closest one found " if lacking else ""
    change = "a smaller micro-batch, or devices with more memory" if lacking else "or a larger micro-batch"
    raise InfeasibleError(
        f"no plan was found that fits `{name}`: {closest}{_choice(question, tried).reason}",
        f"choose schedule='auto', {change}",
    )


def best_of_all(question: PlanningProblem, *, time_limit_s: float | None, progress: Progress) -> Plan:
    """Return the plan with the shortest step over all schedules. `Plan.schedules` has the best plan of each.

    Raises InfeasibleError if no schedule fits, with the shortfall under eager 1F1B.
    """
    # The conditions with virtual stages are weaker. Only if these fail, no plan of either kind can fit.
    check_memory(question, time_limit_s, name=None, virtual_stages_per_rank=True)
    # A framework restricts the comparison to its own schedules.
    names = [name for name in _ALL if question.framework is None or name in question.framework.schedules]
    first = "eager_1f1b" if "eager_1f1b" in names else "1f1b"
    try:
        tried, stopped = question.session.search(question, names, time_limit_s, progress)
    except InfeasibleError as error:
        raise _none_found(explained(error, replace(question, schedule=first)), "under any schedule") from None
    # Without a plan under 1F1B, the message of its own search is the most specific reason.
    for each in tried:
        if each["schedule"] in SCHEDULES and each["message"] is not None:
            nothing_fits = InfeasibleError(each["message"], each["hint"] or "")
            each["message"] = explained(nothing_fits, replace(question, schedule=first)).message
    choices = [_choice(question, each) for each in tried]
    listed = {choice.name for choice in choices}
    choices += [_unknown(name, "not tried, because the search was stopped") for name in names if name not in listed]
    # Schedules without a step time go to the end, in the order of the table.
    choices.sort(key=lambda choice: (choice.step_s is None, choice.step_s or 0.0))
    winner = choices[0].plan
    if winner is None:
        raise InfeasibleError(
            f"no plan was found that fits under any schedule: {choices[0].reason}", "use more devices"
        )
    # A stopped search may not have tried all schedules, so an untried one may be better than the winner.
    winner = replace(winner, stop_reason=stopped or winner.stop_reason)
    if winner.schedule in SCHEDULES:
        # Alternatives belong to one schedule. Under `auto`, the comparison of schedules replaces them for others.
        alone = replace(question, schedule=winner.schedule)
        winner = with_leaner(alone, with_alternatives(alone, winner))
    return replace(winner, schedules=tuple(choices))


def _none_found(error: InfeasibleError, whose: str, *, certain: bool = False) -> InfeasibleError:
    """Return the error for other schedules if `error` is about 1F1B or eager 1F1B.

    It is `certain` that they have none if they need at least as much memory as 1F1B and provably nothing fits under
    1F1B. A bound on steps of 1F1B is none for other schedules, so the message mentions it only for 1F1B.
    """
    if certain and error.message.startswith(NO_PLAN_FITS):
        return InfeasibleError(
            f"{NO_PLAN_FITS} {whose}, which needs at least as much memory as 1F1B: {error.message}",
            error.hint,
            code="insufficient_memory",
        )
    return InfeasibleError(f"no plan was found that fits {whose}; under 1F1B {error.message}", error.hint)


def _plan_of(question: PlanningProblem, tried: _core.TriedRecord) -> Plan | None:
    """Return the plan of one schedule, which may not fit in memory; None if none was found."""
    if tried["plan"] is None:
        return None
    return searched(replace(question, schedule=tried["schedule"]), tried["plan"], tried["search"])


def _choice(question: PlanningProblem, tried: _core.TriedRecord) -> ScheduleChoice:
    """Return the row of one schedule in the comparison."""
    plan = _plan_of(question, tried)
    name = tried["schedule"]
    if plan is None:
        why = tried["message"] or ""
        if name == "gpipe" and not why.startswith(NO_PLAN_FITS):
            why = "no plan was found that fits"  # The message has a bound for 1F1B, which does not hold for GPipe.
        return _unknown(name, why)
    return ScheduleChoice(
        name=name,
        step_s=plan.step_s if plan.fits else None,
        peak_bytes=max(group.memory.total_bytes for group in plan.groups),
        shortfall_bytes=plan.shortfall_bytes,
        stages=len(plan.stages),
        virtual_stages_per_rank=plan.virtual_stages_per_rank,
        pipeline_micro_batch_size=plan.pipeline_micro_batch_size,
        planned=True,
        reason=plan.limit if plan.fits else f"lacks {format_bytes(plan.shortfall_bytes)} on a device",
        plan=plan,
    )


def _unknown(name: str, why: str) -> ScheduleChoice:
    """Return the row of a schedule without a plan in the comparison."""
    return ScheduleChoice(name, None, None, 0.0, 0, 0, 0, True, why)
