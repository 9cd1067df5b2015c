"""Laws of simulated and measured runs: invariants that every run must satisfy. docs/proofs.md lists them."""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING, NamedTuple

from hpgo.base.laws import broken, check, is_at_most, is_equal
from hpgo.base.messages import shorten
from hpgo.errors import ArgumentError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

    from hpgo.programs.schedule import Schedule
    from hpgo.timing.measures import Measures


def check_makespan(makespan_s: float, schedule: Schedule, compute_s: NDArray[np.float64], iterations: int) -> None:
    """Check the makespan of a simulated run against the work of each rank. Raise InternalError if it is too short.

    `compute_s` has the seconds of each kind of action, shape (stages or micro-batches × stages, 5).
    """
    if place := makespan_covers_work(makespan_s, schedule, compute_s, iterations):
        broken(f"the run of `{shorten(schedule.name)}`", makespan_covers_work, place)


class Run(NamedTuple):
    """The measures of a run, and the number of devices that each rank stands for."""

    measures: Measures
    devices: Sequence[int]

    @property
    def total_s(self) -> float:
        """Seconds of all devices together."""
        return sum(self.devices) * self.measures.makespan_s

    @property
    def busy_s(self) -> float:
        """Busy seconds of all devices together."""
        return sum(count * one_s for count, one_s in zip(self.devices, self.measures.busy_s, strict=True))


def checked(schedule: str, measures: Measures, devices: Sequence[int] = (), *, measured: bool = False) -> Measures:
    """Return the measures of a run of `schedule` if they satisfy all laws. Raise InternalError otherwise."""
    # Clocks of processes differ, so measured idle intervals do not exactly fill the gaps between actions.
    laws = RUN_LAWS if measured else (*RUN_LAWS, causes_make_the_idle_time)
    check(f"the run of `{shorten(schedule)}`", laws, Run(measures, devices or (1,) * len(measures.busy_s)))
    return measures


def check_file(source: str, measures: Measures, devices: Sequence[int]) -> None:
    """Raise ArgumentError with the name `source` if the run in a file violates a law."""
    run = Run(measures, devices or (1,) * len(measures.busy_s))
    check(f"{source}: the run", RUN_LAWS, run, error=ArgumentError, hint="write the file again with `hpgo simulate`")


def makespan_covers_work(makespan_s: float, schedule: Schedule, compute_s: NDArray[np.float64], iterations: int) -> str:
    """A run takes at least as long as the actions of any rank, one after the other."""
    import numpy as np

    if not 0 <= makespan_s < inf:
        return "`makespan_s`"
    stages = schedule.stages
    stride = 0 if len(compute_s) == stages else stages
    kind, stage, micro_batch, back_stage, back_micro_batch = schedule.actions.T
    # Count how often each entry of `compute_s` is used. This takes a fraction of the time of looking up each action.
    count = np.bincount((micro_batch * stride + stage) * 5 + kind, minlength=compute_s.size).reshape(compute_s.shape)
    if count[:, 4].any():  # pairs without a separate time take the sum of their passes
        apart = np.isnan(compute_s[:, 4])
        pairs = (kind == 4) & apart[micro_batch * stride + stage]
        backs = np.bincount((back_micro_batch * stride + back_stage)[pairs], minlength=len(compute_s))
        count[:, 0] += np.where(apart, count[:, 4], 0)
        count[:, 1] += backs
    # A cell that no action uses may be NaN, and NaN times 0 is NaN.
    spent_s = np.where(count > 0, count * compute_s, 0.0)
    spent_s[:, 4][np.isnan(spent_s[:, 4])] = 0.0
    of_stage_s = spent_s.sum(axis=1).reshape(-1, stages).sum(axis=0)
    work_s = np.bincount(schedule.rank_of_stage, of_stage_s, minlength=schedule.ranks) * iterations
    busiest = int(work_s.argmax())
    return "" if is_at_most(float(work_s[busiest]), makespan_s) else f"rank {busiest}"


def measures_are_lengths(run: Run) -> str:
    """Times and memory of a run are not negative, and times are finite."""
    found = run.measures
    times_s: dict[str, tuple[float, ...]] = {
        "makespan_s": (found.makespan_s,),
        "max_rank_span_s": (found.max_rank_span_s,),
    }
    times_s |= {"busy_s": found.busy_s, "idle_by_cause_s": found.idle_by_cause_s}
    sizes: dict[str, tuple[float, ...]] = {
        "peak_memory_bytes": found.peak_memory_bytes or (),
        "bytes_sent": found.bytes_sent or (),
    }
    wrong = [name for name, values in times_s.items() if not all(0 <= one < inf for one in values)]
    wrong += [name for name, values in sizes.items() if not all(one >= 0 for one in values)]
    return f"`{wrong[0]}`" if wrong else ""


def ranks_are_busy_within_the_run(run: Run) -> str:
    """No rank is busy for longer than the run takes."""
    found = run.measures
    return next((f"rank {at}" for at, one_s in enumerate(found.busy_s) if not is_at_most(one_s, found.makespan_s)), "")


def idle_time_is_a_share(run: Run) -> str:
    """The idle shares of a run are between 0 and 1, and follow from the busy times of its ranks."""
    found = run.measures
    busiest_s = max(found.busy_s, default=0.0)
    for name, share, total_s, busy_s in (
        ("idle_over_total", found.idle_over_total, run.total_s, run.busy_s),
        ("idle_over_busiest", found.idle_over_busiest, found.makespan_s, busiest_s),
    ):
        follows = is_equal(share * total_s, total_s - busy_s, total_s)
        if not (is_at_most(0, share, 1) and is_at_most(share, 1) and follows):
            return f"`{name}`"
    return ""


def causes_make_the_idle_time(run: Run) -> str:
    """The sum of the busy time and the idle time of all causes is the time of all devices."""
    spent_s = run.busy_s + sum(run.measures.idle_by_cause_s)
    return "" if is_equal(spent_s, run.total_s) else "`idle_by_cause_s`"


RUN_LAWS = (measures_are_lengths, ranks_are_busy_within_the_run, idle_time_is_a_share)
"""Laws of every run. Measured runs have no exact causes of idle time, so the law about causes is for simulations
only."""
