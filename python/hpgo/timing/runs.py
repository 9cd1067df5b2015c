"""Simulations for a `SimulationConfig`: one schedule, a plan, or a sweep over numbers of micro-batches."""

from __future__ import annotations

from dataclasses import dataclass, replace
from operator import gt
from typing import TYPE_CHECKING, Any

from hpgo.base.memory_check import check_room
from hpgo.errors import ArgumentError
from hpgo.programs.costs import StageBytes
from hpgo.programs.schedule import BUILT_BYTES, Durations, actions_of, schedule, schedules
from hpgo.timing.config import SettingError
from hpgo.timing.simulation import RUN_BYTES, simulate

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hpgo.programs.names import ScheduleName
    from hpgo.programs.program import Program
    from hpgo.programs.schedule import Schedule
    from hpgo.timing.config import SimulationConfig
    from hpgo.timing.timeline import Timeline

OPTIONS = ("virtual_stages_per_rank", "group_size", "activation_limit")
"""Fields of `SimulationConfig` that only schedules with such an option use."""
BEYOND_A_PLAN = {
    "input_gradient_s": "input_gradient_times",
    "weight_gradient_s": "weight_gradient_times",
    "overlapped_s": "overlapped_times",
}
"""Times that a profile, and so a plan, may not contain: arguments of `simulate` and their fields in
`SimulationConfig`."""


def order_of(setup: SimulationConfig, name: ScheduleName, *, called: Callable[[str], str] = "`{}`".format) -> Schedule:
    """Return the schedule `name` with the sizes of `setup`. A family that takes durations is fitted to its times.

    A family gets only those options that it has, so that one configuration serves a comparison of several. Raises
    ScheduleError and ArgumentError like `hpgo.schedule`, and SettingError like `run`.
    """
    known = next((family.options for family in schedules() if family.name == name), ())
    options = {key: getattr(setup, key) for key in OPTIONS if key in known}
    # Check memory for building and running together: a schedule that can't be run should not be built for minutes
    # first.
    actions = setup.iterations * actions_of(
        name, setup.ranks, setup.micro_batches, options.get("virtual_stages_per_rank")
    )
    check_room(
        f"a run of {actions:,} actions",
        actions * (BUILT_BYTES + RUN_BYTES),
        "ask for fewer ranks, micro-batches or iterations",
    )
    built = schedule(name, ranks=setup.ranks, micro_batches=setup.micro_batches, **options)
    if "durations" not in known:
        return built
    forward = _per_stage(built, "forward_times", setup.forward_times, called)
    inputs, weights = (
        _per_stage(built, key, times, called) if (times := getattr(setup, key)) else None
        for key in ("input_gradient_times", "weight_gradient_times")
    )
    if inputs is None or weights is None:
        backward = _per_stage(built, "backward_times", setup.backward, called)
        if (given := inputs or weights) is None:
            inputs = weights = [time_s / 2 for time_s in backward]
        else:
            # Not below 0: the simulator reports a part that is longer than the whole backward pass.
            rest = [max(0.0, whole_s - half_s) for whole_s, half_s in zip(backward, given, strict=True)]
            inputs, weights = (inputs or rest), (weights or rest)
    # A fitted schedule takes one transfer time. The longest is safe: it never places an action before its input
    # arrives.
    delay_s = max(setup.p2p_time) + max(setup.transfer_time)
    durations = Durations(tuple(forward), tuple(inputs), tuple(weights), delay_s)
    return schedule(name, ranks=setup.ranks, micro_batches=setup.micro_batches, **options, durations=durations)


def run(setup: SimulationConfig, order: Schedule, *, called: Callable[[str], str] = "`{}`".format) -> Timeline:
    """Simulate `order` with the costs of `setup`.

    Raises SettingError if a field has the wrong number of entries. `called` maps a field's name to the user's name for
    it.
    """

    def each(key: str, numbers: Sequence[float], *, shared: bool = True) -> list[float]:
        return _per_stage(order, key, numbers, called, shared=shared)

    work = {
        "forward_s": ("forward_times", setup.forward_times),
        "backward_s": ("backward_times", setup.backward),
        **{argument: (key, getattr(setup, key)) for argument, key in BEYOND_A_PLAN.items()},
    }
    costs: dict[str, Any] = {argument: each(key, times) for argument, (key, times) in work.items() if times}
    # `simulate` would also report this, but under its own names for the arguments.
    halves = [argument for argument in ("input_gradient_s", "weight_gradient_s") if argument in costs]
    if len(halves) == 1 and any(map(gt, costs[halves[0]], costs["backward_s"])):
        key, other = BEYOND_A_PLAN[halves[0]], "weight" if halves[0].startswith("input") else "input"
        raise SettingError(
            f"{called(key)} is longer than the backward pass that contains it",
            f"give {called(f'{other}_gradient_times')} as well",
            key,
        )
    if setup.weight_bytes or setup.activation_bytes:
        costs["memory"] = StageBytes(
            weights_bytes=each("weight_bytes", setup.weight_bytes or (0.0,)),
            activation_bytes=each("activation_bytes", setup.activation_bytes or (0.0,)),
        )
    for key, count, what in (
        ("memory_cap", order.ranks, "ranks"),
        ("p2p_time", order.stages_per_pipeline - 1, "edges between stages"),
        ("transfer_time", order.stages_per_pipeline - 1, "edges between stages"),
    ):
        if (given := len(getattr(setup, key))) not in {0, 1, count}:
            raise SettingError(
                f"{called(key)} has {given} numbers, but `{order.name}` has {count} {what}",
                f"give 1 or {count}",
                key,
            )
    return simulate(
        order,
        **costs,
        latency_s=_one_or_each(setup.p2p_time),
        transfer_s=_one_or_each(setup.transfer_time),
        gradient_sync_s=each("gradient_sync_times", setup.gradient_sync_times, shared=False),
        optimizer_s=each("optimizer_times", setup.optimizer_times, shared=False),
        communication=setup.comm,
        iterations=setup.iterations,
        memory_cap_bytes=_one_or_each(setup.memory_cap) if setup.memory_cap else None,
    )


def run_program(setup: SimulationConfig, program: Program, *, called: Callable[[str], str] = "`{}`".format) -> Timeline:
    """Simulate `program`, which is a plan's, with the times in `setup` that a plan lacks.

    Raises SettingError if a field has the wrong number of entries. `called` maps a field's name to the user's name for
    it.
    """
    times: dict[str, Any] = {}
    for argument, key in BEYOND_A_PLAN.items():
        if not (numbers := getattr(setup, key)):
            continue
        if len(numbers) not in {1, len(program.stages)}:
            raise SettingError(
                f"{called(key)} has {len(numbers)} numbers, but the plan has {len(program.stages)} stages",
                f"give 1 or {len(program.stages)}",
                key,
            )
        times[argument] = _one_or_each(numbers)
    return simulate(program, communication=setup.comm, iterations=setup.iterations, **times)


def _one_or_each(numbers: tuple[float, ...]) -> float | tuple[float, ...]:
    return numbers[0] if len(numbers) == 1 else numbers


def _per_stage(
    order: Schedule, key: str, numbers: Sequence[float], called: Callable[[str], str], *, shared: bool = True
) -> list[float]:
    """Return one number per stage, from one for all ranks, one per rank, or one per stage."""
    ranks, chain = order.ranks, order.stages_per_pipeline
    virtual_stages_per_rank = max(1, chain // ranks)
    # With equal ranks and stages, a list means stages, which are the same.
    if len(numbers) == 1:
        each = [numbers[0] / (virtual_stages_per_rank if shared else 1)] * chain
    elif len(numbers) == chain:
        each = list(numbers)
    elif len(numbers) == ranks:
        each = [numbers[rank] / (virtual_stages_per_rank if shared else 1) for rank in order.rank_of_stage[:chain]]
    else:
        counts = " or ".join(str(count) for count in dict.fromkeys((1, ranks, chain)))
        raise SettingError(
            f"{called(key)} has {len(numbers)} numbers, but `{order.name}` has {ranks} ranks"
            + (f" and {chain} stages" if ranks != chain else ""),
            f"give {counts}",
            key,
        )
    return each * (order.stages // chain)


@dataclass(frozen=True, slots=True)
class SweepPoint:
    """Results of one schedule at one number of micro-batches."""

    schedule: str
    micro_batches: int
    makespan_s: float
    idle_over_total: float
    peak_in_flight: int
    virtual_stages_per_rank: int
    activations_held: float
    peak_memory_bytes: float | None
    """Peak bytes on the fullest rank. None if memory is unknown."""


def sweep(
    setup: SimulationConfig,
    names: Sequence[ScheduleName],
    timeline_of: Callable[[SimulationConfig, ScheduleName], Timeline],
    report: Callable[[float, str], object],
) -> list[SweepPoint]:
    """Simulate each schedule at growing numbers of micro-batches, up to the number in `setup` or 64.

    `report` receives the fraction that is done and a description of the next run. Numbers that a schedule does not
    support are left out. Raises ArgumentError if a schedule supports none of them.
    """
    maximum = 64 if setup.num_batches is None else setup.num_batches
    # Powers of 2 and their multiples of 1.5 are about evenly spaced on the logarithmic axis of the figure.
    counts = sorted({maximum, *(step << shift for shift in range(32) for step in (2, 3) if step << shift < maximum), 1})
    points: list[SweepPoint] = []
    for at, name in enumerate(names):
        # Some schedules need many micro-batches, so a number that is too small is no error by itself.
        refused = ""
        ran = len(points)
        for place, count in enumerate(counts):
            report((at + place / len(counts)) / len(names), f"{name}, {count} micro-batches")
            try:
                timeline = timeline_of(replace(setup, num_batches=count), name)
            except ArgumentError as error:
                refused = error.message
                continue
            measures = timeline.measures
            peaks = measures.peak_memory_bytes
            points.append(
                SweepPoint(
                    schedule=name,
                    micro_batches=count,
                    makespan_s=measures.makespan_s,
                    idle_over_total=measures.idle_over_total,
                    peak_in_flight=max(measures.peak_in_flight),
                    virtual_stages_per_rank=timeline.virtual_stages_per_rank,
                    activations_held=timeline.activations_held,
                    peak_memory_bytes=None if peaks is None else max(peaks),
                )
            )
        if len(points) == ran:
            raise ArgumentError(
                f"`{name}` can't run with any of these numbers of micro-batches: {refused}",
                "give a larger number with `-b`",
            )
    return points
