"""Plans for schedules beyond 1F1B, eager 1F1B and GPipe, and which schedule is best for a question.

The planner's search knows the step of those three. Others with one stage a device are run on plans that it finds:
1F1B's best cuts for each depth of the pipeline and each micro-batch size worth trying. Each is simulated, and the
shortest step within memory is taken. Nothing is proven of it: there may be better cuts, so they have no lower bound.
Schedules with several stages a device have a search of their own, `chunked`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from hpgo.base.errors import ArgumentError, DeadlineError, HpgoError, InfeasibleError, InternalError
from hpgo.base.wording import near, shown
from hpgo.planning import chunked
from hpgo.planning.choices import choice, shortest, unknown
from hpgo.planning.chunked import CHUNKED
from hpgo.planning.clock import Clock
from hpgo.planning.cuts import candidates, small, sparest
from hpgo.planning.infeasible import check_memory
from hpgo.planning.question import SCHEDULES
from hpgo.planning.rerun import FRUGAL, RUN_ON_PLANS, run_on
from hpgo.planning.search import NO_PLAN_FITS, with_alternatives
from hpgo.planning.ties import with_leaner
from hpgo.programs.orders import schedules

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from hpgo.planning.choices import Try
    from hpgo.planning.plans import Plan, ScheduleChoice
    from hpgo.planning.question import Question
    from hpgo.programs.orders import Family

    _Name = TypeVar("_Name", bound=str)

_STOPPED = "not tried, as the search was stopped"
_ROUNDING = 1 + 1e-9


def check(name: object) -> None:
    """Raises ArgumentError, with the reason, for a schedule that no plan can be made for."""
    known = {family.name: family for family in schedules()}
    plannable = (*SCHEDULES, *RUN_ON_PLANS, *CHUNKED)
    if isinstance(name, str) and name in {"auto", *plannable}:
        return
    if not isinstance(name, str) or name not in known:
        wanted = name if isinstance(name, str) else ""
        raise ArgumentError(f"there is no schedule {shown(name)}", near(wanted, ["auto", *plannable]))
    why, hint = _refusal(known[name])
    raise ArgumentError(f"can't plan for schedule {name!r}: {why}", hint)


def _refusal(family: Family) -> tuple[str, str]:
    plannable = f"choose auto or one of {', '.join((*SCHEDULES, *RUN_ON_PLANS, *CHUNKED))}"
    if family.pace == "asynchronous":
        return "it updates weights while micro-batches are under way, so no step of it ends", plannable
    if not family.trains:
        return (
            "it has no backward passes, and a plan is a training step",
            "`hpgo.partition` plans inference; `hpgo.simulate` runs this schedule",
        )
    return "it keeps two copies of the model", plannable


def best(
    question: Question,
    *,
    deadline_s: float | None,
    progress: Callable[[float, float], object] | None,
) -> Plan:
    """The shortest step of a schedule of `RUN_ON_PLANS` or `CHUNKED` among the plans tried, as `hpgo.plan` gives it.

    Raises InfeasibleError if none of them fits, DeadlineError if the time was up before one did.
    """
    name = question.schedule
    clock = Clock.of(deadline_s)
    check_memory(
        question, clock.left_s(), name=name, in_flight_as_1f1b=name in RUN_ON_PLANS and name not in FRUGAL,
        chunks=name in CHUNKED,
    )  # fmt: skip
    tell = progress or _silence
    if name in CHUNKED:
        plan, said = chunked.best_of(question, name, clock, progress=progress)
        return _found(plan, said, clock)
    flushed = replace(question, schedule="1f1b")
    cuts, placements = "all", "all"
    try:
        first = clock.search(flushed, lambda *_: tell(float("inf"), 0.0))  # its steps are of another schedule
        plans = candidates(flushed, [first], clock)
        cuts, placements = first.cuts, first.placements
    except InfeasibleError as error:
        spare = list(sparest(flushed, clock)) if name in FRUGAL else []
        if not spare:
            raise _none_found(error, f"`{name}`", certain=name not in FRUGAL) from None
        plans = iter(spare)
    runs: list[Plan] = []
    try:
        for run in _runs(plans, name, clock, tell):
            runs.append(run)  # noqa: PERF402 -- those before Ctrl-C stay
    except KeyboardInterrupt:
        if not any(run.fits for run in runs):
            raise
        clock.stopped = "interrupt"
    winner = _found(*shortest(runs, name), clock)
    return replace(winner, cuts=cuts, placements=placements)


def _none_found(error: InfeasibleError, whose: str, *, certain: bool = False) -> InfeasibleError:
    """Return what to raise for other schedules if `error` says that 1F1B or eager 1F1B has no plan.

    It is `certain` for them where they hold at least as much as 1F1B and nothing fits that. A bound on 1F1B's steps is
    no bound on theirs, so it stays a clause about 1F1B.
    """
    if certain and error.message.startswith(NO_PLAN_FITS):
        return InfeasibleError(f"{NO_PLAN_FITS} {whose}, which holds no less than 1F1B: {error.message}", error.hint)
    return InfeasibleError(f"no plan was found that fits {whose}; under 1F1B {error.message}", error.hint)


def _silence(best_s: float, bound_s: float) -> None:
    """What is told of a search to nobody."""


def _found(plan: Plan | None, said: ScheduleChoice, clock: Clock) -> Plan:
    """`plan`, if there is one; raises what says why there is none, with what is `said` of it, otherwise."""
    if plan is not None:
        return replace(plan, stopped=clock.stopped)
    if clock.stopped == "interrupt":
        raise KeyboardInterrupt
    if clock.stopped == "deadline":
        raise DeadlineError(f"the time was up before there was any plan that fits `{said.name}`", "give it more time")
    if said.missing_bytes:
        closest, change = "the closest one found ", "a smaller micro-batch, or devices with more memory"
    else:
        closest, change = "", "or a larger micro-batch"
    raise InfeasibleError(
        f"no plan was found that fits `{said.name}`: {closest}{said.why}", f"choose schedule='auto', {change}"
    )


def best_of_all(
    question: Question,
    *,
    deadline_s: float | None,
    progress: Callable[[float, float], object] | None,
) -> Plan:
    """The shortest step over all schedules that can be planned; `Plan.schedules` says what each would give.

    Raises InfeasibleError if no schedule fits, with what eager 1F1B lacks.
    """
    clock = Clock.of(deadline_s)
    # Several stages on a device weaken the conditions, so both kinds of schedules must fail them.
    check_memory(question, clock.left_s(), name=None, chunks=True)
    tries: list[Try] = []

    def shortest_s() -> float:
        return min((plan.step_s for plan, _ in tries if plan is not None), default=float("inf"))

    def tell(best_s: float, _bound_s: float) -> None:
        if progress is not None:  # the bound of a schedule bounds no other
            progress(min(best_s, shortest_s()), 0.0)

    try:
        for tried in _tries(question, clock=clock, progress=tell):
            tries.append(tried)
            tell(float("inf"), 0.0)
    except KeyboardInterrupt:
        if not any(plan for plan, _ in tries):
            raise
        clock.stopped = "interrupt"
    winner = min((plan for plan, _ in tries if plan is not None), key=lambda plan: plan.step_s)
    winner = replace(winner, stopped=clock.stopped or winner.stopped)
    if winner.schedule in SCHEDULES:
        alone = replace(question, schedule=winner.schedule)
        winner = with_leaner(alone, with_alternatives(alone, winner))
    choices = [said for _, said in tries]
    listed = {said.name for said in choices}
    untried = _known(question, (*SCHEDULES, *RUN_ON_PLANS, *CHUNKED))
    choices += [unknown(name, _STOPPED) for name in untried if name not in listed]
    choices.sort(key=lambda said: (said.step_s is None, said.step_s or 0.0))
    return replace(winner, schedules=tuple(choices))


def _known(question: Question, names: Iterable[_Name]) -> list[_Name]:
    """Those of `names` that the launcher of the question runs."""
    return [name for name in names if question.launcher is None or name in question.launcher.schedules]


def _tries(
    question: Question,
    *,
    clock: Clock,
    progress: Callable[[float, float], object],
) -> Iterator[Try]:
    """The best plan of each schedule, and what to say of it; raises InfeasibleError if no schedule fits."""
    name, *others = _known(question, ("eager_1f1b", "1f1b", "gpipe"))
    try:
        first = clock.search(replace(question, schedule=name), progress)
    except InfeasibleError as error:
        yield from _frugal_tries(question, clock, progress, error)
        return
    yield first, choice(first, first.limit)
    found = [first]
    for name in others:  # they hold as much as the first, or more
        if clock.over():
            return
        try:
            plan = clock.search(replace(question, schedule=name), progress)
        except InternalError:
            raise
        except HpgoError as error:
            yield None, unknown(name, error.message)
            continue
        found.append(plan)
        yield plan, choice(plan, plan.limit)
    flushed = replace(question, schedule="1f1b")
    run_on_plans = _known(question, RUN_ON_PLANS)
    cuts = list(candidates(flushed, found, clock)) if run_on_plans else []
    for name in run_on_plans:
        yield shortest(list(_runs(cuts, name, clock, progress)), name)
    yield from _chunked(question, clock, progress)


def _frugal_tries(
    question: Question, clock: Clock, progress: Callable[[float, float], object], error: InfeasibleError
) -> Iterator[Try]:
    """As `_tries` where 1F1B fits nowhere, nor GPipe, which holds more: `error` says why."""
    flushed = replace(question, schedule="1f1b")
    cuts = list(sparest(flushed, clock))
    tries = [shortest(list(_runs(cuts, name, clock, progress)), name) for name in _known(question, FRUGAL)]
    tries += _chunked(question, clock, progress)
    if not any(plan for plan, _ in tries):
        raise _none_found(error, "under any schedule")
    yield from tries
    for name in _known(question, SCHEDULES):
        # GPipe holds what 1F1B does or more, but a bound on the steps of 1F1B is none on its.
        of_gpipe = name == "gpipe" and not error.message.startswith(NO_PLAN_FITS)
        yield None, unknown(name, "no plan was found that fits" if of_gpipe else error.message)
    for name in _known(question, RUN_ON_PLANS):
        if name not in FRUGAL:
            yield shortest(list(_runs(cuts, name, clock, progress)), name)


def _chunked(question: Question, clock: Clock, progress: Callable[[float, float], object]) -> Iterator[Try]:
    """The best plan of each schedule with several stages a device."""
    near_size = None
    for name in _known(question, CHUNKED):
        if clock.over():
            return
        near_size = near_size or chunked.near(question, clock)
        try:
            yield chunked.best_of(question, name, clock, progress=progress, near_size=near_size)
        except InternalError:
            raise
        except HpgoError as error:
            yield None, unknown(name, error.message)


def _runs(plans: Iterable[Plan], name: str, clock: Clock, progress: Callable[[float, float], object]) -> Iterator[Plan]:
    """`plans` run by `name`, at least one of them, however late it is; none that can only be longer."""
    ran, shortest_s = False, float("inf")
    for plan in plans:
        if small(plan) and _computing_s(plan) < shortest_s * _ROUNDING and not (ran and clock.over()):
            run = run_on(plan, name)
            yield run
            ran = True
            if run.fits:
                shortest_s = min(shortest_s, run.step_s)
                progress(shortest_s, 0.0)


def _computing_s(plan: Plan) -> float:
    """What the busiest stage computes in a step: no order of its passes makes one shorter."""
    return plan.micro_batches * max(stage.forward_s + stage.backward_s for stage in plan.stages)
