"""The parts of a step by stage, to compare a measured step with a predicted one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from hpgo.base.checks import check_is
from hpgo.base.laws import share_left
from hpgo.base.validated import Record
from hpgo.programs.schedule import KINDS
from hpgo.timing.timeline import Timeline

if TYPE_CHECKING:
    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Breakdown(Record):
    """The parts of one step. Tuples have one entry per stage, and None where the timeline has no such part."""

    step_s: float
    forward_s: tuple[float | None, ...]
    """Seconds of a forward pass of one micro-batch: the mean on the slowest replica."""
    backward_s: tuple[float | None, ...]
    """Seconds of a backward pass of one micro-batch: the mean on the slowest replica. A split backward counts as the
    sum of both parts."""
    transfer_s: tuple[float | None, ...]
    """Seconds of a message to the next stage or back: the median."""
    grad_reduce_s: tuple[float | None, ...]
    """Seconds of the exposed gradient reduction, after the last backward pass."""
    memory_bytes: tuple[float | None, ...]
    """Peak bytes on the fullest device that holds the stage, including all else on this device."""
    bubble: float
    """Idle share of the time of all devices that have work."""
    peak_memory_bytes: float | None
    """Peak bytes on the fullest device. None if memory is unknown."""


def breakdown(timeline: Timeline) -> Breakdown:
    """Return the parts of the step of a simulated or measured timeline.

    >>> import hpgo
    >>> schedule = hpgo.schedule("1f1b", ranks=2, micro_batches=4)
    >>> step = breakdown(hpgo.simulate(schedule, backward_s=2.5, transfer_s=0.25))
    >>> step.step_s, step.forward_s, step.backward_s, step.transfer_s, step.bubble
    (18.5, (1.0, 1.0), (2.5, 2.5), (0.25, None), 0.2432432432432432)
    """
    check_is("the timeline", timeline, Timeline, "make one with `hpgo.simulate`, or read one")
    measures = timeline.measures
    counts = np.array(timeline.devices or (1,) * timeline.ranks)
    busy_s = np.array(measures.busy_s)
    # A device without work, like a spare one, is no bubble of the schedule.
    working_s = float(counts[busy_s > 0].sum()) * timeline.makespan_s
    peaks = measures.peak_memory_bytes
    return Breakdown(
        step_s=timeline.makespan_s,
        forward_s=_passes(timeline, "F", "F"),
        backward_s=_passes(timeline, "BIW", "BI"),
        transfer_s=_transfers(timeline),
        grad_reduce_s=_syncs(timeline),
        memory_bytes=_memory(timeline),
        bubble=share_left(float(counts @ busy_s), working_s),
        peak_memory_bytes=None if peaks is None else max(peaks),
    )


def _passes(timeline: Timeline, kinds: str, counted: str) -> tuple[float | None, ...]:
    """Return the mean seconds of a pass by stage.

    The time of all actions of `kinds` is divided by the number of actions of the kinds `counted`.
    """
    shape = timeline.stages, timeline.ranks
    # One number per pair of stage and rank lets `bincount` sum both dimensions at once.
    place = timeline.stage.astype(np.int64) * timeline.ranks + timeline.rank

    def table(letters: str, weights: NDArray[np.float64]) -> NDArray[np.float64]:
        chosen = np.isin(timeline.kind, [KINDS.index(letter) for letter in letters])
        summed = np.bincount(place[chosen], weights[chosen], minlength=shape[0] * shape[1])
        return summed.reshape(shape).astype(np.float64)

    spent_s = table(kinds, timeline.end_s - timeline.start_s)
    count = table(counted, np.ones(len(timeline.kind)))
    # Stages without such an action get -1, which becomes None below. The maximum over ranks selects the slowest
    # replica.
    mean_s = np.divide(spent_s, count, out=np.full(shape, -1.0), where=count > 0).max(axis=1)
    return tuple(None if one_s < 0 else one_s for one_s in mean_s.tolist())


def _transfers(timeline: Timeline) -> tuple[float | None, ...]:
    # The next stage sends the gradient of a cut, so subtract 1 to count it with the cut's activations.
    cut = timeline.transfer_stage.astype(np.int64) - timeline.transfer_kind
    lasting_s = timeline.transfer_end_s - timeline.transfer_start_s
    return tuple(
        float(np.median(lasting_s[cut == stage])) if (cut == stage).any() else None for stage in range(timeline.stages)
    )


def _syncs(timeline: Timeline) -> tuple[float | None, ...]:
    lasting_s = timeline.sync_end_s - timeline.sync_start_s
    return tuple(
        float(lasting_s[chosen].max()) if chosen.any() else None
        for stage in range(timeline.stages)
        # Stages on a single device reduce nothing. Their entries take no time, and are omitted.
        for chosen in [(timeline.sync_stage == stage) & (lasting_s > 0)]
    )


def _memory(timeline: Timeline) -> tuple[float | None, ...]:
    # Ranks report peaks for all stages they hold together, so a stage gets the peak of its fullest rank.
    peaks = timeline.measures.peak_memory_bytes
    if peaks is None:
        return (None,) * timeline.stages
    return tuple(
        max(peaks[rank] for rank in np.unique(timeline.rank[timeline.stage == stage]).tolist())
        for stage in range(timeline.stages)
    )
