"""Gives a schedule, or a plan, a clock: `hpgo.simulate`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from hpgo import _core
from hpgo.base.errors import ArgumentError
from hpgo.base.wording import near, shown
from hpgo.programs.orders import Schedule
from hpgo.timing.timeline import Timeline, of_simulation

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import ArrayLike, NDArray

    from hpgo.planning.plans import Plan

COMMUNICATION = {
    "link": "asynchronous; each link takes one message after the other",
    "latency": "asynchronous; links are never full",
    "stream": "one in-order stream a rank, as NCCL; a receive posted early blocks later sends",
    "stream_deferred": "the same, receives posted right before they are needed",
    "rendezvous": "blocking sends and receives",
}
"""How messages can travel."""


@dataclass(frozen=True, slots=True)
class StageBytes:
    """What each stage keeps in memory: one number for all stages, or one for each.

    Activation, stash and output are those of one micro-batch.
    """

    weights_bytes: ArrayLike = 0.0
    """Of one version; a rank keeps as many as the schedule's `weight_versions`."""
    gradients_bytes: ArrayLike = 0.0
    optimizer_bytes: ArrayLike = 0.0
    buffers_bytes: ArrayLike = 0.0
    activation_bytes: ArrayLike = 0.0
    """Kept from the start of F to the end of B, or of I where the backward is split."""
    weight_gradient_stash_bytes: ArrayLike | None = None
    """Kept from the end of I to the end of W; None is all of the activation, as if W freed it."""
    output_bytes: ArrayLike = 0.0
    """Sent to the next stage, and back as a gradient."""


@dataclass(frozen=True, slots=True)
class _Costs:
    compute_s: NDArray[np.float64]
    activation_s: NDArray[np.float64]
    gradient_s: NDArray[np.float64]
    gradient_sync_s: list[float]
    optimizer_s: list[float]


def simulate(
    plan_or_schedule: Schedule | Plan,
    *,
    schedule: str | None = None,
    forward_s: ArrayLike = 1.0,
    backward_s: ArrayLike | None = None,
    input_gradient_s: ArrayLike | None = None,
    weight_gradient_s: ArrayLike | None = None,
    overlapped_s: ArrayLike | None = None,
    transfer_s: ArrayLike = 0.0,
    latency_s: ArrayLike = 0.0,
    gradient_transfer_s: ArrayLike | None = None,
    gradient_latency_s: ArrayLike | None = None,
    gradient_sync_s: ArrayLike = 0.0,
    optimizer_s: ArrayLike = 0.0,
    communication: str = "link",
    iterations: int = 1,
    memory: StageBytes | None = None,
    memory_cap_bytes: ArrayLike | None = None,
) -> Timeline:
    """Runs a schedule or a plan: who does what from when to when, and with how much memory.

    A plan brings its own times and memory: one rank stands for the replicas of a stage. Its schedule is the one it was
    made for, or the family named `schedule`; of the other arguments only `communication`, `iterations`,
    `input_gradient_s`, `weight_gradient_s` and `overlapped_s` apply. A schedule needs the costs:

    Times are seconds of one micro-batch: one number for all stages, one for each stage of a chain, one for each stage
    of all chains, or (for what is computed) an array `[micro-batch][stage]`. `backward_s` is I + W where both are
    given, else 2; I and W are half of it each where they are not given. `overlapped_s` is a forward of a stage and a
    backward run as one, else their sum.

    A message between ranks occupies its link for `transfer_s` and arrives `latency_s` later: one number, or one for
    each edge from a stage to the next. Gradients take the same way back unless given. `gradient_sync_s` and
    `optimizer_s` of a stage follow its last backward. `communication` is one of `COMMUNICATION`; `iterations` steps
    run back to back, without a break if the schedule has no flush; in lock step the ranks communicate between
    steps, whatever `communication` says. `memory_cap_bytes` (one number, or one a rank) is drawn beside the memory.

    Ctrl-C ends a long simulation. Raises ArgumentError for numbers that don't fit, ScheduleError for an order that
    can't be run.

    >>> import hpgo
    >>> timeline = simulate(hpgo.schedule("1f1b", ranks=4, micro_batches=8))
    >>> timeline.makespan_s, round(timeline.measures.idle_over_total, 3)
    (33.0, 0.273)
    """
    import numpy as np

    if not isinstance(communication, str) or communication not in COMMUNICATION:
        raise ArgumentError(
            f"there is no communication mode `{communication}`", near(str(communication), COMMUNICATION)
        )
    if not isinstance(plan_or_schedule, Schedule):
        from hpgo.planning.plans import Plan  # it runs simulations

        if not isinstance(plan_or_schedule, Plan):
            raise ArgumentError(
                f"can't simulate {shown(plan_or_schedule)}", "give a schedule, of `hpgo.schedule` say, or a plan"
            )
        return simulate(
            schedule_of(plan_or_schedule, schedule),
            input_gradient_s=input_gradient_s,
            weight_gradient_s=weight_gradient_s,
            overlapped_s=overlapped_s,
            communication=communication,
            iterations=iterations,
            **costs_of(plan_or_schedule),
        )
    if schedule is not None:
        raise ArgumentError(f"`schedule` is {schedule!r} beside a schedule", "it chooses how a plan is run")
    if isinstance(iterations, bool) or not isinstance(iterations, int) or not 1 <= iterations < 2**32:
        raise ArgumentError(f"`iterations` is {iterations!r}", "give a whole number from 1 on")
    actions = len(plan_or_schedule.actions) * iterations
    if actions > _MOST_ACTIONS:
        raise ArgumentError(
            f"{actions:,} actions are more than {_MOST_ACTIONS:,}", "lower the number of iterations or micro-batches"
        )
    shape = _Shape(plan_or_schedule)
    if backward_s is not None:
        backward = shape.times("backward_s", backward_s)
    elif input_gradient_s is not None and weight_gradient_s is not None:
        backward = shape.times("input_gradient_s", input_gradient_s) + shape.times(
            "weight_gradient_s", weight_gradient_s
        )
    else:
        backward = shape.times("backward_s", 2.0)
    halves = {"input_gradient_s": input_gradient_s, "weight_gradient_s": weight_gradient_s}
    columns = [
        shape.times("forward_s", forward_s),
        backward,
        *(backward / 2 if given is None else shape.times(name, given) for name, given in halves.items()),
        np.array([[np.nan]]) if overlapped_s is None else shape.times("overlapped_s", overlapped_s),
    ]
    rows = max(len(column) for column in columns)
    compute = np.stack([np.broadcast_to(column, (rows, shape.stages)) for column in columns], axis=-1)
    edges = [
        shape.edges("transfer_s", transfer_s),
        shape.edges("latency_s", latency_s),
        shape.edges("gradient_transfer_s", transfer_s if gradient_transfer_s is None else gradient_transfer_s),
        shape.edges("gradient_latency_s", latency_s if gradient_latency_s is None else gradient_latency_s),
    ]
    costs = _Costs(
        np.ascontiguousarray(compute.reshape(-1, 5)),
        np.stack(edges[:2], axis=-1),
        np.stack(edges[2:], axis=-1),
        shape.each("gradient_sync_s", gradient_sync_s).tolist(),
        shape.each("optimizer_s", optimizer_s).tolist(),
    )
    if not isinstance(memory, StageBytes | None):
        raise ArgumentError(f"memory is {shown(memory)}", "make a `hpgo.StageBytes`")
    stage_bytes = None if memory is None else shape.bytes(memory)
    cap = None if memory_cap_bytes is None else shape.caps(memory_cap_bytes)
    run, rounds = plan_or_schedule, iterations
    if run.pace == "asynchronous" and iterations > 1:
        run, rounds = run.without_flush(iterations), 1
        if rows > 1:
            costs = replace(costs, compute_s=np.tile(costs.compute_s, (iterations, 1)))
    timeline = of_simulation(
        _core.simulate(run, costs, communication, rounds),
        run,
        communication=communication,
        iterations=rounds,
        stage_bytes=stage_bytes,
        memory_cap_bytes=cap,
    )
    return replace(timeline, micro_batches=plan_or_schedule.total_micro_batches, iterations=iterations)


_MOST_ACTIONS = 200_000_000


def schedule_of(plan: Plan, name: str | None) -> Schedule:
    """The orders of a plan's stages: as it was planned, or of another family with one stage a rank."""
    from hpgo.programs.orders import Durations, schedule

    name = name or plan.schedule
    ranks, micro_batches = len(plan.stages), plan.micro_batches
    planned = name == plan.schedule
    in_flight = [stage.in_flight for stage in plan.stages]
    if planned and name in {"1f1b", "eager_1f1b"}:
        return schedule(name, ranks=ranks, micro_batches=micro_batches, windows=in_flight)
    if not planned and (built := schedule(name, ranks=ranks, micro_batches=micro_batches)).stages != ranks:
        raise ArgumentError(
            f"`{name}` runs {built.stages} stages on {built.ranks} ranks, but the plan has one stage a rank",
            "choose a schedule with one stage a rank",
        )
    # Schedules that look at durations may now be fitted to the plan's; the others come out as before.
    halves = tuple(stage.backward_s / 2 for stage in plan.stages)
    transfer_s = max((stage.transfer_s for stage in plan.stages[:-1]), default=0.0)
    durations = Durations(tuple(stage.forward_s for stage in plan.stages), halves, halves, transfer_s)
    cap = max(in_flight) if planned and name == "zb" else None
    return schedule(name, ranks=ranks, micro_batches=micro_batches, cap=cap, durations=durations)


def costs_of(plan: Plan) -> dict[str, Any]:
    """Times and memory of a plan, as arguments of `simulate`."""
    stages = plan.stages
    edges = stages[:-1]
    held = [stage.memory for stage in stages]
    return {
        "forward_s": [stage.forward_s for stage in stages],
        "backward_s": [stage.backward_s for stage in stages],
        "transfer_s": [stage.transfer_busy_s for stage in edges],
        "latency_s": [max(0.0, stage.transfer_s - stage.transfer_busy_s) for stage in edges],
        "gradient_sync_s": [stage.sync_tail_s for stage in stages],
        "memory": StageBytes(
            weights_bytes=[memory.weights_bytes for memory in held],
            gradients_bytes=[memory.gradients_bytes for memory in held],
            optimizer_bytes=[memory.optimizer_bytes for memory in held],
            buffers_bytes=[memory.buffers_bytes for memory in held],
            activation_bytes=[stage.memory.activations_bytes / max(1, stage.in_flight) for stage in stages],
        ),
        "memory_cap_bytes": [stage.capacity_bytes for stage in stages],
    }


class _Shape:
    """Brings numbers of a user into the shape of a schedule, or says what is wrong with them."""

    def __init__(self, schedule: Schedule) -> None:
        self.stages = schedule.stages
        self.chain = schedule.chain_length
        self.micro_batches = schedule.total_micro_batches
        self.ranks = schedule.ranks

    def times(self, name: str, given: ArrayLike) -> NDArray[np.float64]:
        """Shape (1 or micro-batches, stages)."""
        array = _numbers(name, given)
        if array.ndim == 2:
            if array.shape != (self.micro_batches, self.stages):
                raise ArgumentError(
                    f"`{name}` has shape {array.shape}, but there are {self.micro_batches} micro-batches and "
                    f"{self.stages} stages",
                    "give one row for each micro-batch, with one number for each stage",
                )
            return array
        return self.each(name, array)[None, :]

    def each(self, name: str, given: ArrayLike) -> NDArray[np.float64]:
        """Shape (stages,)."""
        import numpy as np

        array = _numbers(name, given)
        if array.ndim == 0:
            return np.full(self.stages, float(array))
        if array.shape == (self.stages,):
            return array
        if array.shape == (self.chain,):
            return np.tile(array, self.stages // self.chain)
        raise ArgumentError(
            f"`{name}` has {_counted(array)}, but there are {self.stages} stages",
            _give(1, self.chain, self.stages),
        )

    def edges(self, name: str, given: ArrayLike) -> NDArray[np.float64]:
        """Shape (stages,); the entry of a chain's last stage is not used."""
        import numpy as np

        array = _numbers(name, given)
        if array.ndim == 0:
            return np.full(self.stages, float(array))
        if array.shape == (self.chain - 1,):
            return np.tile(np.append(array, 0.0), self.stages // self.chain)
        raise ArgumentError(
            f"`{name}` has {_counted(array)}, but there are {self.chain - 1} edges between stages",
            _give(1, self.chain - 1),
        )

    def bytes(self, memory: StageBytes) -> NDArray[np.float64]:
        """Shape (stages, 6)."""
        import numpy as np

        stash = memory.weight_gradient_stash_bytes
        columns = {
            "weights_bytes": memory.weights_bytes,
            "gradients_bytes": memory.gradients_bytes,
            "optimizer_bytes": memory.optimizer_bytes,
            "activation_bytes": memory.activation_bytes,
            "weight_gradient_stash_bytes": memory.activation_bytes if stash is None else stash,
            "output_bytes": memory.output_bytes,
        }
        table = np.stack([self.each(name, column) for name, column in columns.items()], axis=-1)
        table[:, 0] += self.each("buffers_bytes", memory.buffers_bytes)
        return table

    def caps(self, given: ArrayLike) -> tuple[float, ...]:
        array = _numbers("memory_cap_bytes", given)
        if array.ndim == 0:
            return (float(array),) * self.ranks
        if array.shape != (self.ranks,):
            raise ArgumentError(
                f"`memory_cap_bytes` has {_counted(array)}, but there are {self.ranks} ranks", _give(1, self.ranks)
            )
        return tuple(array.tolist())


def _numbers(name: str, given: ArrayLike) -> NDArray[np.float64]:
    import numpy as np

    try:
        array: NDArray[Any] = np.asarray(given)
    except ValueError:
        array = np.asarray("ragged")
    if array.dtype.kind not in "iuf" or array.ndim > 2:
        what = "ragged lists" if isinstance(given, Sequence) and not isinstance(given, str) else repr(given)[:60]
        raise ArgumentError(f"`{name}` must be numbers, got {what}", "give one number, or a list of them")
    array = array.astype(np.float64)
    wrong = array[~((array >= 0) & (array < np.inf))]
    if wrong.size:
        raise ArgumentError(f"`{name}` holds {wrong.flat[0]}", "give finite numbers, zero or more")
    return array


def _give(*counts: int) -> str:
    return f"give {' or '.join(str(count) for count in dict.fromkeys(counts) if count)}"


def _counted(array: NDArray[Any]) -> str:
    return f"{len(array)} numbers" if array.ndim == 1 else f"shape {array.shape}"
