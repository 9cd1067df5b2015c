"""Plans for schedules beyond 1F1B and GPipe, and which schedule is best for a question.

The planner's search knows the step of 1F1B, eager 1F1B and GPipe. Other schedules are run on plans that it finds:
1F1B's best cuts for each depth of the pipeline and each micro-batch size worth trying, or balanced cuts into several
stages a device. Each is simulated, and the shortest step within memory is taken. Nothing is proven of it: there may be
better cuts, so such plans have no lower bound.

Where 1F1B fits nowhere, schedules that can do with one activation a stage still may: they are run on the best cuts
for a step of a single micro-batch, the plans that hold least.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from itertools import pairwise, product
from typing import TYPE_CHECKING, TypeVar

from hpgo import _core
from hpgo.base.errors import ArgumentError, HpgoError, InfeasibleError
from hpgo.base.units import format_bytes
from hpgo.base.wording import near
from hpgo.model.states import cut_points
from hpgo.planning.plans import ScheduleChoice
from hpgo.planning.question import SCHEDULES
from hpgo.planning.reprice import reprice
from hpgo.planning.search import plan_of, price, search, with_alternatives
from hpgo.planning.ties import with_leaner
from hpgo.programs.costs import Costs, StageBytes
from hpgo.programs.orders import schedule, schedules
from hpgo.timing.simulation import simulate

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from hpgo.machine.cluster import Cluster
    from hpgo.planning.plans import Plan
    from hpgo.planning.question import Question
    from hpgo.programs.names import ScheduleName
    from hpgo.programs.orders import Durations, Family, Schedule
    from hpgo.programs.stages import Stage
    from hpgo.timing.timeline import Timeline

    _Name = TypeVar("_Name", bound=str)
    _Try = tuple[Plan | None, ScheduleChoice]  # the best plan of a schedule, if any, and what to say of it

RUN_ON_PLANS = ("zb_h1", "zb_h2", "zb", "1f1b_overlap", "sequential")
"""Schedules with one stage a device that are planned by running them on the planner's cuts."""

_FRUGAL = ("zb", "sequential")
"""Those of them that can do with one activation a stage, which is less than 1F1B's."""

COMPARED: dict[ScheduleName, tuple[int, ...]] = {
    "interleaved": (2, 4),
    "interleaved_overlap": (2, 4),
    "looped_bfs": (2, 4),
    "hanayo": (2,),
    "interleaved_zb": (2, 4),
    "zb_v": (2,),
    "v_half": (2,),
    "v_min": (2,),
    "dualpipe_v": (2,),
}
"""Schedules with several stages a device, and how many are tried: `auto` says what they would give."""

_SIZES = 6  # micro-batch sizes tried, those nearest to the best of eager 1F1B
_STOPPED = "not tried, as the search was stopped"
_MOST_ACTIONS = 50_000  # simulated for one candidate; a larger one would take more than a few hundredths of a second


def check(name: object) -> None:
    """Raises ArgumentError, with the reason, for a schedule that no plan can be made for."""
    known = {family.name: family for family in schedules()}
    plannable = (*SCHEDULES, *RUN_ON_PLANS)
    if name == "auto" or name in plannable:
        return
    if not isinstance(name, str) or name not in known:
        raise ArgumentError(f"there is no schedule {name!r}", near(str(name), ["auto", *plannable]))
    why, hint = _refusal(known[name])
    raise ArgumentError(f"can't plan for schedule {name!r}: {why}", hint)


def _refusal(family: Family) -> tuple[str, str]:
    plannable = f"choose auto or one of {', '.join((*SCHEDULES, *RUN_ON_PLANS))}"
    if family.pace == "asynchronous":
        return "it updates weights while micro-batches are under way, so no step of it ends", plannable
    if not family.trains:
        return (
            "it has no backward passes, and a plan is a training step",
            "`hpgo.partition` plans inference; `hpgo.simulate` runs this schedule",
        )
    if family.chains > 1:
        return "it keeps two copies of the model", plannable
    return (
        "it runs several stages on a device, and a plan has one",
        "`auto` says what it would give; `hpgo.simulate` runs it",
    )


def run_on(plan: Plan, name: str) -> Plan:
    """`plan` with its stages run by the schedule `name` of `RUN_ON_PLANS`: simulated, with the memory that this takes.

    A backward pass is halved into I and W where the schedule splits it, and activations are held until W. Recomputation
    is part of I, and what it makes again is held until W, too. A forward and a backward that run as one take as long as
    one after the other: profiles don't tell what that saves. `zb` takes the cap on activations that gives the shortest
    step within memory.
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
    durations = plan.durations if name in _fitted() else None
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


@cache
def _fitted() -> frozenset[str]:
    """Schedules that look at durations."""
    return frozenset(family.name for family in schedules() if "durations" in family.options)


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
        plan, schedule=name, stages=stages, lower_bound_s=None, compact_bound_s=None, alternatives=(), schedules=()
    )


@cache
def _splits_backward(name: str) -> bool:
    return any(family.splits_backward for family in schedules() if family.name == name)


def _tail_s(stage: Stage, recompute: bool) -> float:
    """Synchronisation after the last W, at most: W is the half of the backward that the sums can hide behind."""
    return min(stage.sync_s, stage.sync_tail_s + stage.halves_s(recompute=recompute)[1])


@dataclass(slots=True)
class _Clock:
    """When to stop trying."""

    end_s: float
    stopped: str | None = None
    """As `Plan.stopped`."""

    @classmethod
    def of(cls, deadline_s: float | None) -> _Clock:
        return cls(float("inf") if deadline_s is None else time.monotonic() + deadline_s)

    def search(self, question: Question, progress: Callable[[float, float], object] | None) -> Plan:
        """The planner's search, in half of the time left; if Ctrl-C ended it, nothing more is to be tried."""
        allowed_s = None if self.end_s == float("inf") else max(1e-3, (self.end_s - time.monotonic()) / 2)
        plan = search(question, allowed_s, progress)
        if plan.stopped == "interrupt":
            self.stopped = plan.stopped
        return plan

    def glance(self, question: Question) -> Plan | None:
        """What the planner finds at a glance, if anything; the same on every machine unless time runs out."""
        left_s = None if self.end_s == float("inf") else max(1e-3, self.end_s - time.monotonic())
        try:
            return plan_of(question, _core.quick_plan(question, left_s))
        except HpgoError:  # none fits, or none was found in time
            return None

    def over(self) -> bool:
        if self.stopped is None and time.monotonic() >= self.end_s:
            self.stopped = "deadline"
        return self.stopped is not None


def best(
    question: Question,
    *,
    deadline_s: float | None,
    progress: Callable[[float, float], object] | None,
) -> Plan:
    """The shortest step of a schedule of `RUN_ON_PLANS` among the plans tried, as `hpgo.plan` gives it.

    Raises InfeasibleError if none of them fits.
    """
    name = question.schedule
    clock = _Clock.of(deadline_s)
    flushed = replace(question, schedule="1f1b")
    cuts, placements = "all", "all"
    try:
        first = clock.search(flushed, progress)
        plans = _candidates(flushed, [first], clock)
        cuts, placements = first.cuts, first.placements
    except InfeasibleError:
        sparest = list(_sparest(flushed, clock)) if name in _FRUGAL else []
        if not sparest:
            raise
        plans = iter(sparest)
    runs: list[Plan] = []
    try:
        for run in _runs(plans, name, clock):
            runs.append(run)  # noqa: PERF402 -- those before Ctrl-C stay
    except KeyboardInterrupt:
        if not any(run.fits for run in runs):
            raise
        clock.stopped = "interrupt"
    winner, choice = _shortest(runs, name)
    if winner is None:
        raise InfeasibleError(
            f"no plan that was tried fits `{name}`: the one that comes closest {choice.why}",
            "choose schedule='auto', a smaller micro-batch, or devices with more memory",
        )
    return replace(winner, cuts=cuts, placements=placements, stopped=clock.stopped)


def best_of_all(
    question: Question,
    *,
    deadline_s: float | None,
    progress: Callable[[float, float], object] | None,
) -> Plan:
    """The shortest step over all schedules that can be planned; `Plan.schedules` says what each would give.

    Raises InfeasibleError if no schedule fits, with what eager 1F1B lacks.
    """
    clock = _Clock.of(deadline_s)
    tries: list[_Try] = []
    try:
        for tried in _tries(question, clock=clock, progress=progress):
            tries.append(tried)  # noqa: PERF402 -- those before Ctrl-C stay
    except KeyboardInterrupt:
        if not any(plan for plan, _ in tries):
            raise
        clock.stopped = "interrupt"
    winner = min((plan for plan, _ in tries if plan is not None), key=lambda plan: plan.step_s)
    winner = replace(winner, stopped=clock.stopped or winner.stopped)
    if winner.lower_bound_s is not None:
        alone = replace(question, schedule=winner.schedule)
        winner = with_leaner(alone, with_alternatives(alone, winner))
    choices = [choice for _, choice in tries]
    listed = {choice.name for choice in choices}
    untried = _known(question, (*SCHEDULES, *RUN_ON_PLANS, *COMPARED))
    choices += [_unknown(name, _STOPPED) for name in untried if name not in listed]
    choices.sort(key=lambda choice: (choice.step_s is None, choice.step_s or 0.0))
    return replace(winner, schedules=tuple(choices))


def _known(question: Question, names: Iterable[_Name]) -> list[_Name]:
    """Those of `names` that the launcher of the question runs."""
    return [name for name in names if question.launcher is None or name in question.launcher.schedules]


def _tries(
    question: Question,
    *,
    clock: _Clock,
    progress: Callable[[float, float], object] | None,
) -> Iterator[_Try]:
    """The best plan of each schedule, and what to say of it; raises InfeasibleError if no schedule fits."""
    name, *others = _known(question, ("eager_1f1b", "1f1b", "gpipe"))
    try:
        first = clock.search(replace(question, schedule=name), progress)
    except InfeasibleError as error:
        yield from _frugal_tries(question, clock, error)
        return
    yield first, _choice(first, first.limit)
    found = [first]
    for name in others:  # they hold as much as the first, or more
        if clock.over():
            return
        try:
            plan = clock.search(replace(question, schedule=name), progress)
        except HpgoError as error:
            yield None, _unknown(name, error.message)
            continue
        found.append(plan)
        yield plan, _choice(plan, plan.limit)
    flushed = replace(question, schedule="1f1b")
    run_on_plans = _known(question, RUN_ON_PLANS)
    cuts = list(_candidates(flushed, found, clock)) if run_on_plans else []
    for name in run_on_plans:
        yield _shortest(list(_runs(cuts, name, clock)), name)
    for choice in _compared(flushed, first.micro_batch_size, clock):
        yield None, choice


def _frugal_tries(question: Question, clock: _Clock, error: InfeasibleError) -> Iterator[_Try]:
    """As `_tries` where 1F1B fits nowhere, nor GPipe, which holds more: `error` says why."""
    flushed = replace(question, schedule="1f1b")
    cuts = list(_sparest(flushed, clock))
    tries = [_shortest(list(_runs(cuts, name, clock)), name) for name in _known(question, _FRUGAL)]
    if not any(plan for plan, _ in tries):
        raise error
    yield from tries
    for name in _known(question, SCHEDULES):
        yield None, _unknown(name, error.message)
    for name in _known(question, RUN_ON_PLANS):
        if name not in _FRUGAL:
            yield _shortest(list(_runs(cuts, name, clock)), name)
    for choice in _compared(flushed, cuts[0].micro_batch_size, clock):
        yield None, choice


def _runs(plans: Iterable[Plan], name: str, clock: _Clock) -> Iterator[Plan]:
    """`plans` run by `name`, at least one of them, however late it is."""
    ran = False
    for plan in plans:
        if _small(plan) and not (ran and clock.over()):
            yield run_on(plan, name)
            ran = True


def _shortest(runs: list[Plan], name: str) -> _Try:
    """The run with the shortest step that fits, and what to say of it."""
    fitting = [run for run in runs if run.fits]
    if not fitting:
        return None, _lacking(name, runs)
    shortest = replace(reprice(min(fitting, key=lambda run: run.step_s)), simulated=len(runs))
    return shortest, _choice(shortest, shortest.limit)


def _candidates(question: Question, first: list[Plan], clock: _Clock) -> Iterator[Plan]:
    """Plans to run other schedules on: `first`, and 1F1B's best for every depth and micro-batch size worth trying."""
    seen = set()
    for plan in first:
        seen.add(_cut(plan))
        yield plan
    for size in _sizes(question, first[0].micro_batch_size):
        for found in _each_depth(replace(question, micro_batch_sizes=(size,)), clock):
            if _cut(found) not in seen:
                seen.add(_cut(found))
                yield found


def _sparest(question: Question, clock: _Clock) -> Iterator[Plan]:
    """Plans that hold least: the best for one micro-batch at a time, of the smallest sizes. Their step is still its."""
    batch = question.global_batch_size
    sizes = [size for size in sorted(question.micro_batch_sizes) if 3 * batch // size <= _MOST_ACTIONS]
    for size in sizes[:_SIZES]:
        single = replace(question, global_batch_size=size, micro_batch_sizes=(size,))
        for found in _each_depth(single, clock):
            one_device_step_s = batch // size * found.one_device_step_s
            yield replace(found, global_batch_size=batch, one_device_step_s=one_device_step_s)


def _each_depth(question: Question, clock: _Clock) -> Iterator[Plan]:
    """1F1B's best plan for every depth worth trying, with activations kept and recomputed as the question has it."""
    depths = _depths(question.cluster, min(question.most_stages, len(question.profile.layers)))
    for depth, recompute in product(depths, question.recompute):
        if clock.over():
            return
        most_replicas = -(-question.cluster.devices // depth)
        found = clock.glance(replace(question, most_stages=depth, most_replicas=most_replicas, recompute=(recompute,)))
        if found is not None:
            yield found


def _cut(plan: Plan) -> tuple[object, ...]:
    return plan.micro_batch_size, plan.recompute, tuple((stage.layers, stage.devices) for stage in plan.stages)


def _sizes(question: Question, near_size: int) -> list[int]:
    """Micro-batch sizes worth trying: the nearest by ratio."""
    return sorted(question.micro_batch_sizes, key=lambda size: max(size / near_size, near_size / size))[:_SIZES]


def _depths(cluster: Cluster, most: int) -> list[int]:
    """Stages of a pipeline worth trying: powers of two, and as many as there are devices."""
    powers = {2**power for power in range(cluster.devices.bit_length())}
    return sorted(depth for depth in powers | {cluster.devices} if depth <= min(most, cluster.devices))


def _small(plan: Plan) -> bool:
    return 3 * plan.micro_batches * len(plan.stages) <= _MOST_ACTIONS


def _compared(question: Question, near_size: int, clock: _Clock) -> list[ScheduleChoice]:
    """What the schedules with several stages a device would give on balanced cuts."""
    priced: dict[tuple[object, ...], Plan] = {}
    placed: dict[tuple[ScheduleName, int, int], tuple[int, ...]] = {}
    tried: dict[ScheduleName, list[ScheduleChoice]] = {name: [] for name in _known(question, COMPARED)}
    refused: dict[str, str] = {}
    row = _row_of_cuts(question)

    @cache  # placements and micro-batches share them
    def cuts(at: int, stages: int) -> list[int]:
        seconds = [layer.forward_s[at] + layer.backward_s[at] for layer in question.profile.layers]
        return _balanced([sum(seconds[layer] for layer in layers) for layers in row], stages)

    def built(
        name: ScheduleName, depth: int, micro_batches: int, chunks: int, plan: Plan | None = None
    ) -> Schedule | None:
        durations = None if plan is None else plan.durations
        try:
            return schedule(name, ranks=depth, micro_batches=micro_batches, chunks=chunks, durations=durations)
        except ArgumentError as error:
            refused[name] = error.message
            return None

    for size, depth, name, chunks in _shapes(question, near_size):
        micro_batches = question.global_batch_size // size
        stages = depth * chunks
        if clock.over() or 3 * micro_batches * stages > _MOST_ACTIONS or stages > len(row) - 1:
            continue
        orders = None
        if name not in _fitted() or (name, depth, chunks) not in placed:
            orders = built(name, depth, micro_batches, chunks)
            if orders is None:
                continue
            placed[name, depth, chunks] = orders.rank_of_stage
        rank_of_stage = placed[name, depth, chunks]
        for recompute in question.recompute:
            key = (size, recompute, rank_of_stage)
            if key not in priced:
                single = replace(question, micro_batch_sizes=(size,), recompute=(recompute,))
                priced[key] = _priced(single, row, cuts, rank_of_stage)
            if name in _fitted():
                orders = built(name, depth, micro_batches, chunks, priced[key])
            if orders is not None:
                tried[name].append(_simulated(name, priced[key], orders, chunks))
    choices = []
    for name, runs in tried.items():
        if not runs:
            why = _STOPPED if clock.stopped else "no cut into so many stages"
            choices.append(_unknown(name, refused.get(name, why)))
            continue
        choices.append(min(runs, key=lambda run: (run.missing_bytes, run.step_s or 0.0)))
    return choices


def _shapes(question: Question, near_size: int) -> Iterator[tuple[int, int, ScheduleName, int]]:
    """Micro-batch sizes, ranks, schedules of `COMPARED` and stages on a rank that go together."""
    devices = question.cluster.devices
    for size in _sizes(question, near_size):
        for depth in _depths(question.cluster, min(question.most_stages, devices)):
            if depth > 1 and devices % depth == 0 and size >= devices // depth * question.smallest_share:
                for name in _known(question, COMPARED):
                    yield from ((size, depth, name, chunks) for chunks in COMPARED[name])


def _simulated(name: str, plan: Plan, orders: Schedule, chunks: int) -> ScheduleChoice:
    """What `orders` gives on a plan with all chunks' stages priced, each on devices of its own."""
    costs = replace(Costs.of_stages(plan.stages, recompute=plan.recompute), memory_cap_bytes=None)
    if _splits_backward(name):
        costs = replace(costs, gradient_sync_s=tuple(_tail_s(stage, plan.recompute) for stage in plan.stages))
    timeline = simulate(orders, costs=costs)
    peaks = _peaks_bytes(timeline)
    room = [float("inf")] * orders.ranks
    for stage, rank in zip(plan.stages, orders.rank_of_stage, strict=True):
        room[rank] = min(room[rank], stage.capacity_bytes)
    missing = max(0.0, *(peak - capacity for peak, capacity in zip(peaks, room, strict=True)))
    lacking = f"lacks {format_bytes(missing)} on a device; " if missing else ""
    return ScheduleChoice(
        name=name,
        step_s=None if missing else timeline.makespan_s,
        peak_bytes=max(peaks),
        missing_bytes=missing,
        stages=orders.stages,
        chunks=chunks,
        micro_batch_size=plan.micro_batch_size,
        planned=False,
        why=(
            f"{lacking}runs {chunks} stages on a device, and a plan has one: this is what balanced cuts would give"
            f"{' with activations recomputed' if plan.recompute else ''}"
        ),
    )


def _priced(
    question: Question,
    row: list[tuple[int, ...]],
    cuts: Callable[[int, int], list[int]],
    rank_of_stage: tuple[int, ...],
) -> Plan:
    """Balanced stages on the ranks of `rank_of_stage`, priced on a cluster that has each device once for each chunk.

    Stages lie between `cuts` of a row of cut points, given the place of a batch size in the profile and their number.
    Links join machines and the devices inside them as before, so that transfers and sums take what they do on it.
    """
    profile, cluster = question.profile, question.cluster
    ranks, stages = max(rank_of_stage) + 1, len(rank_of_stage)
    chunks = stages // ranks
    machines = tuple(replace(machine, count=machine.count * chunks) for machine in cluster.machines)
    copies = []  # of each device: the number of its copy for each chunk
    begin = 0
    for machine in cluster.machines:
        copies += [[begin + chunk * machine.count + at for chunk in range(chunks)] for at in range(machine.count)]
        begin += machine.count * chunks
    replicas = cluster.devices // ranks
    share = question.micro_batch_sizes[0] / replicas
    at = min(range(len(profile.batch_sizes)), key=lambda index: abs(profile.batch_sizes[index] - share))
    ends = cuts(at, stages)
    used = [0] * ranks
    rows = []
    for stage, rank in enumerate(rank_of_stage):
        devices = [copies[rank * replicas + replica][used[rank]] for replica in range(replicas)]
        used[rank] += 1
        rows.append((sorted(set(row[ends[stage + 1]]) - set(row[ends[stage]])), devices))
    whole = replace(question, schedule="gpipe", cluster=replace(cluster, machines=machines))
    return price(whole, rows)


def _row_of_cuts(question: Question) -> list[tuple[int, ...]]:
    """Cut points one behind the other: all of a chain, and of a branching model those that each hold the last."""
    if question.stage_ends is not None:
        return [(), *question.stage_ends, tuple(range(len(question.profile.layers)))]
    row: list[tuple[int, ...]] = [()]
    for state in cut_points(question.profile).states:
        if len(state.layers) > len(row[-1]) and set(row[-1]) <= set(state.layers):
            row.append(state.layers)
    return row


def _balanced(seconds_before: Sequence[float], stages: int) -> list[int]:
    """Indices of the cuts around each of `stages` stages whose longest is as short as it can be.

    >>> _balanced([0.0, 1.0, 3.0, 4.0, 6.0], 2)
    [0, 2, 4]
    """
    last = len(seconds_before) - 1

    def ends(limit_s: float) -> list[int]:
        cuts = [0]
        for stage in range(stages):
            full = bisect_right(seconds_before, seconds_before[cuts[-1]] + limit_s) - 1
            cuts.append(max(cuts[-1] + 1, min(full, last - (stages - 1 - stage))))
        return cuts

    low_s, high_s = 0.0, seconds_before[-1]
    for _ in range(50):
        middle_s = (low_s + high_s) / 2
        if ends(middle_s)[-1] >= last and _longest(seconds_before, ends(middle_s)) <= middle_s:
            high_s = middle_s
        else:
            low_s = middle_s
    return [*ends(high_s)[:-1], last]


def _longest(seconds_before: Sequence[float], cuts: list[int]) -> float:
    return max(seconds_before[end] - seconds_before[begin] for begin, end in pairwise(cuts))


def _choice(plan: Plan, why: str) -> ScheduleChoice:
    return ScheduleChoice(
        name=plan.schedule,
        step_s=plan.step_s if plan.fits else None,
        peak_bytes=max(stage.memory.total_bytes for stage in plan.stages),
        missing_bytes=plan.missing_bytes,
        stages=len(plan.stages),
        chunks=1,
        micro_batch_size=plan.micro_batch_size,
        planned=True,
        why=why,
        plan=replace(plan, alternatives=(), schedules=()),
    )


def _lacking(name: str, runs: list[Plan]) -> ScheduleChoice:
    if not runs:
        return _unknown(name, "no cut was tried: none was found, or it has too many micro-batches to simulate")
    closest = reprice(min(runs, key=lambda run: run.missing_bytes))
    choice = _choice(closest, "")
    return replace(choice, why=f"lacks {format_bytes(choice.missing_bytes)} on a device")


def _unknown(name: str, why: str) -> ScheduleChoice:
    return ScheduleChoice(name, None, None, 0.0, 0, 0, 0, name not in COMPARED, why)
