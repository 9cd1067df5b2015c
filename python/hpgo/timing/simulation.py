"""Gives a schedule, or a plan, a clock: `hpgo.simulate`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol, TypedDict, Unpack

from hpgo import _core
from hpgo.base.checks import check_int, check_is, choice
from hpgo.base.memory_check import check_room
from hpgo.base.messages import did_you_mean, percent, safe_repr
from hpgo.errors import ArgumentError
from hpgo.model.profile import SPLIT_RATIOS
from hpgo.programs.costs import Costs, StageBytes
from hpgo.programs.program import Program
from hpgo.programs.schedule import MOST_ACTIONS, Schedule
from hpgo.timing.laws import check_makespan
from hpgo.timing.timeline import Timeline, of_simulation

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import ArrayLike, NDArray

    from hpgo.programs.names import Communication, ScheduleName

COMMUNICATION = {
    "link": "asynchronous; each link takes one message after the other",
    "latency": "asynchronous; links are never full",
    "stream": "one in-order stream a rank, as NCCL; a receive posted early blocks later sends",
    "stream_deferred": "the same, receives posted right before they are needed",
    "rendezvous": "blocking sends and receives",
}
"""How messages can travel."""


class CostOptions(TypedDict, total=False):
    """The fields of `hpgo.Costs`, as arguments of `simulate`, which explains them."""

    forward_s: ArrayLike
    backward_s: ArrayLike | None
    input_gradient_s: ArrayLike | None
    weight_gradient_s: ArrayLike | None
    overlapped_s: ArrayLike | None
    transfer_s: ArrayLike
    latency_s: ArrayLike
    gradient_transfer_s: ArrayLike | None
    gradient_latency_s: ArrayLike | None
    gradient_sync_s: ArrayLike
    optimizer_s: ArrayLike
    memory: StageBytes | None
    memory_cap_bytes: ArrayLike | None


class Runnable(Protocol):
    """What makes a program: a plan."""

    def program(self, schedule: ScheduleName | None = None) -> Program:
        """The program, run by its own schedule or another."""


@dataclass(frozen=True, slots=True)
class Columns:
    """What each stage of a schedule takes, all chains included, as the native simulator reads it."""

    compute_s: NDArray[np.float64]
    """F, B, I, W and a fused pair: shape (stages, 5), or (micro-batches × stages, 5). NaN is a pair that takes the sum
    of its halves."""
    activation_s: NDArray[np.float64]
    """How long a stage's output occupies its link, and its latency: shape (stages, 2)."""
    gradient_s: NDArray[np.float64]
    """The same of its gradient."""
    gradient_sync_s: list[float]
    optimizer_s: list[float]


def columns_of(schedule: Schedule, costs: Costs) -> Columns:
    """`costs` in the shape of `schedule`. Raises ArgumentError for numbers that don't fit."""
    return _Shape(schedule).columns(costs)


def simulate(
    what: Schedule | Program | Runnable,
    *,
    schedule: ScheduleName | None = None,
    communication: Communication = "link",
    iterations: int = 1,
    costs: Costs | None = None,
    **numbers: Unpack[CostOptions],
) -> Timeline:
    """Runs a schedule, a program or a plan: who does what from when to when, and with how much memory.

    A plan makes a program, of the schedule that it was made for, or of the family named `schedule`; it brings its own
    costs. One rank stands for all devices that run the same stages. A schedule needs the costs, as a `hpgo.Costs` or
    its fields as arguments; what is given beside a program's own costs replaces them:

    Times are seconds of one micro-batch: one number for all stages, one for each stage of a chain, one for each stage
    of all chains, or (for what is computed) an array `[micro-batch][stage]`. `backward_s` is I + W where both are
    given, else 2; I and W are half of it each where neither is given, and the rest of it where the other one is.
    `overlapped_s` is a forward of a stage and a backward run as one, else their sum.

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

    choice("communication mode", communication, COMMUNICATION)
    run, costs, program = _what_runs(what, schedule, costs)
    if numbers:
        unknown = next((name for name in numbers if name not in CostOptions.__annotations__), None)
        if unknown is not None:
            raise TypeError(f"there is no argument `{unknown}`: {did_you_mean(unknown, CostOptions.__annotations__)}")
        costs = replace(costs, **numbers)
    iterations = check_int("`iterations`", iterations)
    actions = len(run.actions) * iterations
    if actions > MOST_ACTIONS:
        raise ArgumentError(
            f"{actions:,} actions are more than {MOST_ACTIONS:,}",
            "lower the number of iterations or micro-batches",
            code="too_large",
        )
    check_room(f"a run of {actions:,} actions", actions * RUN_BYTES, "ask for fewer micro-batches or iterations")
    shape = _Shape(run)
    columns = shape.columns(costs)
    memory = costs.memory
    check_is("memory", memory, StageBytes, "make a `hpgo.StageBytes`", or_none=True)
    stage_bytes = None if memory is None else shape.bytes(memory)
    cap = None if costs.memory_cap_bytes is None else shape.caps(costs.memory_cap_bytes)
    micro_batches, rounds = run.total_micro_batches, iterations
    if run.pace == "asynchronous" and iterations > 1:
        run, rounds = run.without_flush(iterations), 1
        if len(columns.compute_s) > shape.stages:  # a row for each micro-batch of one iteration
            columns = replace(columns, compute_s=np.tile(columns.compute_s, (iterations, 1)))
    simulated = _core.simulate(run, columns, communication, rounds)
    check_makespan(simulated.makespan_s, run, columns.compute_s, rounds)
    timeline = of_simulation(
        simulated,
        run,
        communication=communication,
        iterations=rounds,
        stage_bytes=stage_bytes,
        memory_cap_bytes=cap,
        row="rank" if program is None else program.row,
        devices=() if program is None else program.devices_of_rank,
        title="" if program is None else program.title,
        row_names=() if program is None else program.row_names,
        notes=_notes(columns.compute_s),
    )
    return replace(timeline, micro_batches=micro_batches, iterations=iterations)


RUN_BYTES = 60
"""Of memory for each action, measured: what the simulator keeps, and takes while it runs."""


def _notes(compute_s: NDArray[np.float64]) -> tuple[str, ...]:
    """Return a note that schedules don't compare, if split backward passes are outside `SPLIT_RATIOS` of whole ones."""
    whole_s, halves_s = compute_s[:, 1], compute_s[:, 2] + compute_s[:, 3]
    wrong = (halves_s < SPLIT_RATIOS[0] * whole_s) | (halves_s > SPLIT_RATIOS[1] * whole_s)
    if not wrong.any():
        return ()
    at = int(wrong.argmax())
    share = percent(float(halves_s[at] / whole_s[at])) + " of B" if whole_s[at] else "time, and B none"
    note = (
        f"I and W together take {share}: schedules that split backward passes compute for other times than those that"
        " don't, so their steps don't compare"
    )
    return (note,)


def _what_runs(what: object, schedule: str | None, costs: Costs | None) -> tuple[Schedule, Costs, Program | None]:
    """The orders, what they cost, and the program, where there is one, that says what their ranks stand for."""
    check_is("costs", costs, Costs, "make a `hpgo.Costs`", or_none=True)
    if not isinstance(what, Schedule | Program):
        make = getattr(type(what), "program", None)
        made = make(what, schedule) if callable(make) else what
        if not isinstance(made, Program):
            raise ArgumentError(
                f"can't simulate {safe_repr(what)}",
                "give a schedule, of `hpgo.schedule` say, or a plan",
                code="unsupported",
            )
        what, schedule = made, None
    if schedule is not None:
        raise ArgumentError(
            f"`schedule` is {safe_repr(schedule)} beside a schedule", "it chooses how a plan is run", code="conflict"
        )
    if isinstance(what, Schedule):
        return what, costs or Costs(), None
    return what.schedule, costs or what.costs or Costs(), what


class _Shape:
    """Brings numbers of a user into the shape of a schedule, or says what is wrong with them."""

    def __init__(self, schedule: Schedule) -> None:
        self.stages = schedule.stages
        self.chain = schedule.chain_length
        self.micro_batches = schedule.total_micro_batches
        self.ranks = schedule.ranks

    def columns(self, costs: Costs) -> Columns:
        """As the native simulator reads them."""
        import numpy as np

        given_i, given_w = costs.input_gradient_s, costs.weight_gradient_s
        if costs.backward_s is not None:
            backward = self.times("backward_s", costs.backward_s)
        elif given_i is not None and given_w is not None:
            backward = self.times("input_gradient_s", given_i) + self.times("weight_gradient_s", given_w)
        else:
            backward = self.times("backward_s", 2.0)
        halves_s = self.halves(backward, given_i, given_w)
        together = costs.overlapped_s
        columns = [
            self.times("forward_s", costs.forward_s),
            backward,
            *halves_s,
            np.array([[np.nan]]) if together is None else self.times("overlapped_s", together),
        ]
        compute = np.empty((max(len(column) for column in columns), self.stages, 5))
        for at, column in enumerate(columns):
            compute[:, :, at] = column
        there = back = np.stack(
            [self.edges(name, getattr(costs, name)) for name in ("transfer_s", "latency_s")], axis=-1
        )
        if costs.gradient_transfer_s is not None or costs.gradient_latency_s is not None:
            back = there.copy()
            for at, name in enumerate(("gradient_transfer_s", "gradient_latency_s")):
                if getattr(costs, name) is not None:
                    back[:, at] = self.edges(name, getattr(costs, name))
        return Columns(
            compute.reshape(-1, 5),
            there,
            back,
            self.each("gradient_sync_s", costs.gradient_sync_s).tolist(),
            self.each("optimizer_s", costs.optimizer_s).tolist(),
        )

    def halves(
        self, backward: NDArray[np.float64], inputs: ArrayLike | None, weights: ArrayLike | None
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Times of I and W. Raises ArgumentError if one is given alone and takes longer than the backward pass."""
        if inputs is None and weights is None:
            return backward / 2, backward / 2
        if inputs is not None and weights is not None:
            return self.times("input_gradient_s", inputs), self.times("weight_gradient_s", weights)
        name, other, alone = "input_gradient_s", "weight_gradient_s", inputs
        if alone is None:
            name, other, alone = other, name, weights
        given = self.times(name, alone)  # type: ignore[arg-type] # one of them is not None
        rest = backward - given
        if rest.min() < 0:
            raise ArgumentError(
                f"{name} is longer than the backward pass that it is a part of, by {-rest.min():g} s",
                f"give `{other}` as well",
            )
        return (given, rest) if weights is None else (rest, given)

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
        """Shape (stages, 7)."""
        import numpy as np

        stash = memory.weight_gradient_stash_bytes
        columns = {
            "weights_bytes": memory.weights_bytes,
            "gradients_bytes": memory.gradients_bytes,
            "optimizer_bytes": memory.optimizer_bytes,
            "activation_bytes": memory.activation_bytes,
            "weight_gradient_stash_bytes": 0.0 if stash is None else stash,
            "output_bytes": memory.output_bytes,
            "recomputed_bytes": memory.recomputed_bytes,
        }
        table = np.stack([self.each(name, column) for name, column in columns.items()], axis=-1)
        if stash is None:
            table[:, 4] = table[:, 3] + table[:, 6]
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
    except Exception:  # noqa: BLE001 -- ragged or nested too deep, or what other people's arrays raise
        array = np.asarray("ragged")
    if array.dtype.kind not in "iuf" or array.ndim > 2:
        is_list = isinstance(given, Sequence) and not isinstance(given, str)
        what = "ragged lists" if is_list else repr(given)[:60] if isinstance(given, str) else safe_repr(given)
        raise ArgumentError(f"`{name}` must be numbers, got {what}", "give one number, or a list of them")
    array = array.astype(np.float64)
    if array.size and not (array.min() >= 0 and array.max() < np.inf):
        wrong = array[~((array >= 0) & (array < np.inf))]
        raise ArgumentError(f"`{name}` holds {wrong.flat[0]}", "give finite numbers, zero or more")
    return array


def _give(*counts: int) -> str:
    return f"give {' or '.join(str(count) for count in dict.fromkeys(counts) if count)}"


def _counted(array: NDArray[Any]) -> str:
    return f"{len(array)} numbers" if array.ndim == 1 else f"shape {array.shape}"
