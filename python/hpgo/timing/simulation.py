"""Simulation of a schedule or a plan: `hpgo.simulate`."""

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
from hpgo.programs.schedule import MAX_ACTIONS, Schedule
from hpgo.timing.laws import check_makespan
from hpgo.timing.timeline import Timeline, of_simulation

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import ArrayLike, NDArray

    from hpgo.programs.names import Communication, ScheduleName

COMMUNICATION = {
    "link": "asynchronous; each link transfers one message at a time",
    "latency": "asynchronous; messages never wait for a link",
    "stream": "one in-order stream per rank, like NCCL; a receive posted early blocks later sends",
    "stream_deferred": "like stream, with receives posted right before they are needed",
    "rendezvous": "blocking sends and receives",
}
"""Models of communication, with a description of each."""


class CostOptions(TypedDict, total=False):
    """The fields of `hpgo.Costs` as arguments of `simulate`, which documents them."""

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
    """An object that can create a program: a plan."""

    def program(self, schedule: ScheduleName | None = None) -> Program:
        """Return the program for the object's own schedule, or for another one."""


@dataclass(frozen=True, slots=True)
class Columns:
    """Costs of each stage of a schedule over all chains, as the native simulator reads them."""

    compute_s: NDArray[np.float64]
    """Seconds of F, B, I, W and a fused pair: shape (stages, 5), or (micro-batches × stages, 5). NaN means that a pair
    takes the sum of its two passes."""
    activation_s: NDArray[np.float64]
    """Seconds for which a stage's output occupies its link, and its latency: shape (stages, 2)."""
    gradient_s: NDArray[np.float64]
    """Seconds for which the gradient of that output occupies its link, and its latency: shape (stages, 2)."""
    gradient_sync_s: list[float]
    optimizer_s: list[float]


def columns_of(schedule: Schedule, costs: Costs) -> Columns:
    """Return `costs` in the shape of `schedule`. Raise ArgumentError for arrays of the wrong shape."""
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
    """Simulate a schedule, a program or a plan. Return start and end of every action, and the memory over time.

    A plan is run with its own schedule, or with the family named `schedule`, and has its own costs. One rank then
    stands for all devices that run the same stages. A schedule needs costs, as a `hpgo.Costs` or as its fields in
    arguments. Arguments replace the fields of a program's own costs.

    Times are seconds of one micro-batch: one number for all stages, one per stage of a chain, one per stage of all
    chains, or (for computation) an array `[micro-batch][stage]`. `backward_s` defaults to I + W if both are given, else
    to 2. If neither I nor W is given, each is half of `backward_s`. If one is given, the other is the rest.
    `overlapped_s` is a fused forward and backward, by default their sum.

    A message between ranks occupies its link for `transfer_s` and arrives `latency_s` later: one number, or one per
    edge from a stage to the next. Gradients take the same time back unless it is given. `gradient_sync_s` and
    `optimizer_s` of a stage follow its last backward. `communication` is one of `COMMUNICATION`. `iterations` steps
    follow each other, without a break if the schedule has no flush. In lock-step, the ranks communicate between steps
    and ignore `communication`. `memory_cap_bytes` (one number, or one per rank) is drawn beside the memory.

    Ctrl-C stops a long simulation. Raises ArgumentError for invalid numbers, and ScheduleError for a schedule that
    can't run.

    >>> import hpgo
    >>> timeline = simulate(hpgo.schedule("1f1b", ranks=4, micro_batches=8))
    >>> timeline.makespan_s, round(timeline.measures.idle_over_total, 3)
    (33.0, 0.273)
    """
    import numpy as np

    choice("communication mode", communication, COMMUNICATION)
    run, costs, program = _what_runs(what, schedule, costs)
    if numbers:
        # Only type checkers compare keyword arguments with a TypedDict, so check the names here too.
        unknown = next((name for name in numbers if name not in CostOptions.__annotations__), None)
        if unknown is not None:
            raise TypeError(f"there is no argument `{unknown}`: {did_you_mean(unknown, CostOptions.__annotations__)}")
        costs = replace(costs, **numbers)
    iterations = check_int("`iterations`", iterations)
    actions = len(run.actions) * iterations
    if actions > MAX_ACTIONS:
        raise ArgumentError(
            f"the run has {actions:,} actions, but at most {MAX_ACTIONS:,} are supported",
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
    # Without a flush, iterations overlap. So simulate them as one long iteration instead of several in a row.
    if run.synchronization == "asynchronous" and iterations > 1:
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
    # The timeline still has the micro-batches and iterations that the caller asked for.
    return replace(timeline, micro_batches=micro_batches, iterations=iterations)


RUN_BYTES = 60
"""Bytes of memory for each action that the simulator holds and uses while it runs, as measured."""


def _notes(compute_s: NDArray[np.float64]) -> tuple[str, ...]:
    """Return a note that steps aren't comparable, if split backward passes are outside `SPLIT_RATIOS` of whole ones."""
    whole_s, halves_s = compute_s[:, 1], compute_s[:, 2] + compute_s[:, 3]
    wrong = (halves_s < SPLIT_RATIOS[0] * whole_s) | (halves_s > SPLIT_RATIOS[1] * whole_s)
    if not wrong.any():
        return ()
    at = int(wrong.argmax())
    share = percent(float(halves_s[at] / whole_s[at])) + " of B" if whole_s[at] else "time, but B takes none"
    note = (
        f"I and W together take {share}: schedules with split backward passes compute for other times than schedules"
        " without them, so their steps can't be compared"
    )
    return (note,)


def _what_runs(what: object, schedule: str | None, costs: Costs | None) -> tuple[Schedule, Costs, Program | None]:
    """Return the schedule, its costs, and the program that describes its ranks.

    The program is None for a plain schedule.
    """
    check_is("costs", costs, Costs, "make a `hpgo.Costs`", or_none=True)
    if not isinstance(what, Schedule | Program):
        # Plans belong to a package that imports this one, so recognize a plan by its method.
        make = getattr(type(what), "program", None)
        made = make(what, schedule) if callable(make) else what
        if not isinstance(made, Program):
            raise ArgumentError(
                f"can't simulate {safe_repr(what)}",
                "pass a schedule, for instance of `hpgo.schedule`, or a plan",
                code="unsupported",
            )
        what, schedule = made, None
    if schedule is not None:
        raise ArgumentError(
            f"`schedule` is {safe_repr(schedule)}, but the first argument is a schedule or program already",
            "pass `schedule` only with a plan",
            code="conflict",
        )
    if isinstance(what, Schedule):
        return what, costs or Costs(), None
    return what.schedule, costs or what.costs or Costs(), what


class _Shape:
    """Converts a user's numbers to the shape of a schedule, or raises an error that states what is wrong."""

    def __init__(self, schedule: Schedule) -> None:
        self.stages = schedule.stages
        self.chain = schedule.stages_per_pipeline
        self.micro_batches = schedule.total_micro_batches
        self.ranks = schedule.ranks

    def columns(self, costs: Costs) -> Columns:
        """Return the costs as the native simulator reads them."""
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
        # NaN marks pairs without a separate time. Zero would be a time.
        columns = [
            self.times("forward_s", costs.forward_s),
            backward,
            *halves_s,
            np.array([[np.nan]]) if together is None else self.times("overlapped_s", together),
        ]
        # Use one row per micro-batch only if a column has them: most callers give one row, which saves memory.
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
        """Return the seconds of I and W.

        Raise ArgumentError if only one is given and takes longer than the backward pass.
        """
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
                f"{name} is {-rest.min():g} s longer than the backward pass that contains it",
                f"give `{other}` as well",
            )
        return (given, rest) if weights is None else (rest, given)

    def times(self, name: str, given: ArrayLike) -> NDArray[np.float64]:
        """Return an array of shape (1 or micro-batches, stages)."""
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
        """Return an array of shape (stages,)."""
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
        """Return an array of shape (stages,). The entry of a chain's last stage is unused."""
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
        """Return an array of shape (stages, 7)."""
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
        # Buffers exist for the whole run, like weights.
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
        what = "a ragged list" if is_list else repr(given)[:60] if isinstance(given, str) else safe_repr(given)
        raise ArgumentError(f"`{name}` is {what}, but must be numbers", "give one number, or a list of numbers")
    array = array.astype(np.float64)
    # The comparison is written so that NaN fails it.
    if array.size and not (array.min() >= 0 and array.max() < np.inf):
        wrong = array[~((array >= 0) & (array < np.inf))]
        raise ArgumentError(
            f"`{name}` holds {wrong.flat[0]}, but numbers must be finite and at least 0", "correct that entry"
        )
    return array


def _give(*counts: int) -> str:
    return f"give {' or '.join(str(count) for count in dict.fromkeys(counts) if count)}"


def _counted(array: NDArray[Any]) -> str:
    return f"{len(array)} numbers" if array.ndim == 1 else f"shape {array.shape}"
