"""Plans for schedules beyond 1F1B, eager 1F1B and GPipe, and which schedule is best for a question.

One native search tries all schedules that are asked for. Schedules with one stage a device are run on cuts that suit
1F1B, and nothing is proven of them. Schedules with several stages a device have a search and a bound of their own:
docs/planner.md.
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
"""Schedules with one stage a device that are run on 1F1B's cuts."""
FRUGAL = tuple(_core.FRUGAL)
"""The schedules of `ONE_STAGE` that can do with one activation a stage, which is less than 1F1B holds."""
VIRTUAL_STAGES = dict(_core.VIRTUAL_STAGES)
"""Schedules with several stages a device, and how many are tried."""

_ALL = (*SCHEDULES, *ONE_STAGE, *VIRTUAL_STAGES)


def check_schedule(name: object) -> None:
    """Raise ArgumentError, with the reason, for a schedule that no plan can be made for."""
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
    if family.pace == "asynchronous":
        return "it updates weights while micro-batches are under way, so no step of it ends", plannable
    if not family.trains:
        return (
            "it has no backward passes, and a plan is a training step",
            "`hpgo.partition` plans inference; `hpgo.simulate` runs this schedule",
        )
    return "it keeps two copies of the model", plannable


def best_of_one(question: PlanningProblem, *, time_limit_s: float | None, progress: Progress) -> Plan:
    """Return the shortest step that is found for a schedule of `ONE_STAGE` or `VIRTUAL_STAGES`.

    Raises InfeasibleError if no plan that fits is found, TimeLimitError if the time was up before there was one.
    """
    name = question.schedule
    check_memory(
        question, time_limit_s, name=name, in_flight_as_1f1b=name in ONE_STAGE and name not in FRUGAL,
        chunks=name in VIRTUAL_STAGES,
    )  # fmt: skip
    flushed = replace(question, schedule="1f1b")
    try:
        (tried,), _ = question.session.search(question, [name], time_limit_s, progress)
    except InfeasibleError as error:
        raise _none_found(explained(error, flushed), f"`{name}`", certain=name not in FRUGAL) from None
    plan = _plan_of(question, tried)
    if plan is not None and plan.fits:
        return plan
    lacking = plan is not None and bool(plan.shortfall_bytes)
    if tried["message"] is not None and name in VIRTUAL_STAGES:
        raise InfeasibleError(tried["message"], tried["hint"] or "")
    closest = "the closest one found " if lacking else ""
    change = "a smaller micro-batch, or devices with more memory" if lacking else "or a larger micro-batch"
    raise InfeasibleError(
        f"no plan was found that fits `{name}`: {closest}{_choice(question, tried).reason}",
        f"choose schedule='auto', {change}",
    )


def best_of_all(question: PlanningProblem, *, time_limit_s: float | None, progress: Progress) -> Plan:
    """Return the shortest step over all schedules that can be planned; `Plan.schedules` says what each would give.

    Raises InfeasibleError if no schedule fits, with what eager 1F1B lacks.
    """
    # Several stages on a device weaken the conditions, so both kinds of schedules must fail them.
    check_memory(question, time_limit_s, name=None, chunks=True)
    names = [name for name in _ALL if question.framework is None or name in question.framework.schedules]
    first = "eager_1f1b" if "eager_1f1b" in names else "1f1b"
    try:
        tried, stopped = question.session.search(question, names, time_limit_s, progress)
    except InfeasibleError as error:
        raise _none_found(explained(error, replace(question, schedule=first)), "under any schedule") from None
    for each in tried:  # where 1F1B fits nowhere, the first of these says why
        if each["schedule"] in SCHEDULES and each["message"] is not None:
            nothing_fits = InfeasibleError(each["message"], each["hint"] or "")
            each["message"] = explained(nothing_fits, replace(question, schedule=first)).message
    choices = [_choice(question, each) for each in tried]
    listed = {choice.name for choice in choices}
    choices += [_unknown(name, "not tried, as the search was stopped") for name in names if name not in listed]
    choices.sort(key=lambda choice: (choice.step_s is None, choice.step_s or 0.0))
    winner = choices[0].plan
    if winner is None:
        raise InfeasibleError(
            f"no plan was found that fits under any schedule: {choices[0].reason}", "use more devices"
        )
    winner = replace(winner, stop_reason=stopped or winner.stop_reason)  # others may be better, if they were not tried
    if winner.schedule in SCHEDULES:
        alone = replace(question, schedule=winner.schedule)
        winner = with_leaner(alone, with_alternatives(alone, winner))
    return replace(winner, schedules=tuple(choices))


def _none_found(error: InfeasibleError, whose: str, *, certain: bool = False) -> InfeasibleError:
    """Return what to raise for other schedules if `error` says that 1F1B or eager 1F1B has no plan.

    It is `certain` for them where they hold at least as much as 1F1B and nothing fits that. A bound on 1F1B's steps is
    no bound on theirs, so it stays a clause about 1F1B.
    """
    if certain and error.message.startswith(NO_PLAN_FITS):
        return InfeasibleError(
            f"{NO_PLAN_FITS} {whose}, which holds no less than 1F1B: {error.message}",
            error.hint,
            code="insufficient_memory",
        )
    return InfeasibleError(f"no plan was found that fits {whose}; under 1F1B {error.message}", error.hint)


def _plan_of(question: PlanningProblem, tried: _core.TriedRecord) -> Plan | None:
    """Return the plan of one schedule, which may lack memory; None if there is none."""
    if tried["plan"] is None:
        return None
    return searched(replace(question, schedule=tried["schedule"]), tried["plan"], tried["search"])


def _choice(question: PlanningProblem, tried: _core.TriedRecord) -> ScheduleChoice:
    """Return what to say of the best plan of one schedule."""
    plan = _plan_of(question, tried)
    name = tried["schedule"]
    if plan is None:
        why = tried["message"] or ""
        if name == "gpipe" and not why.startswith(NO_PLAN_FITS):
            why = "no plan was found that fits"  # a bound on the steps of 1F1B is none on those of GPipe
        return _unknown(name, why)
    return ScheduleChoice(
        name=name,
        step_s=plan.step_s if plan.fits else None,
        peak_bytes=max(group.memory.total_bytes for group in plan.groups),
        shortfall_bytes=plan.shortfall_bytes,
        stages=len(plan.stages),
        chunks=plan.chunks,
        micro_batch_size=plan.micro_batch_size,
        planned=True,
        reason=plan.limit if plan.fits else f"lacks {format_bytes(plan.shortfall_bytes)} on a device",
        plan=plan,
    )


def _unknown(name: str, why: str) -> ScheduleChoice:
    """Return what to say of a schedule without a plan."""
    return ScheduleChoice(name, None, None, 0.0, 0, 0, 0, True, why)
