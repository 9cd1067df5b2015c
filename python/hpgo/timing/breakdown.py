"""What a step is made of, stage by stage, so that a measured one can stand beside a predicted one."""

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
    """Of one step. Tuples have an entry for each stage, None where the timeline has nothing of the kind."""

    step_s: float
    forward_s: tuple[float | None, ...]
    """One micro-batch on average, on the slowest replica."""
    backward_s: tuple[float | None, ...]
    """Likewise; both halves together where it is split."""
    transfer_s: tuple[float | None, ...]
    """A message to the next stage, or one back; the median."""
    grad_reduce_s: tuple[float | None, ...]
    """Summing gradients over the replicas, as far as it outlasts the last backward pass."""
    memory_bytes: tuple[float | None, ...]
    """The peak of the fullest device that holds the stage, with all else that it holds."""
    bubble: float
    """The share of time in which devices that have work stand idle."""
    peak_memory_bytes: float | None
    """Of the fullest device."""


def breakdown(timeline: Timeline) -> Breakdown:
    """What the step of a simulated or measured timeline is made of.

    >>> import hpgo
    >>> orders = hpgo.schedule("1f1b", ranks=2, micro_batches=4)
    >>> step = breakdown(hpgo.simulate(orders, backward_s=2.5, transfer_s=0.25))
    >>> step.step_s, step.forward_s, step.backward_s, step.transfer_s, step.bubble
    (18.5, (1.0, 1.0), (2.5, 2.5), (0.25, None), 0.2432432432432432)
    """
    check_is("the timeline", timeline, Timeline, "make one with `hpgo.simulate`, or read one")
    measures = timeline.measures
    counts = np.array(timeline.devices or (1,) * timeline.ranks)
    busy_s = np.array(measures.busy_s)
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
    """Seconds of all actions of `kinds` for each one of the kinds `counted`."""
    shape = timeline.stages, timeline.ranks
    place = timeline.stage.astype(np.int64) * timeline.ranks + timeline.rank

    def table(letters: str, weights: NDArray[np.float64]) -> NDArray[np.float64]:
        chosen = np.isin(timeline.kind, [KINDS.index(letter) for letter in letters])
        summed = np.bincount(place[chosen], weights[chosen], minlength=shape[0] * shape[1])
        return summed.reshape(shape).astype(np.float64)

    spent_s = table(kinds, timeline.end_s - timeline.start_s)
    count = table(counted, np.ones(len(timeline.kind)))
    mean_s = np.divide(spent_s, count, out=np.full(shape, -1.0), where=count > 0).max(axis=1)
    return tuple(None if one_s < 0 else one_s for one_s in mean_s.tolist())


def _transfers(timeline: Timeline) -> tuple[float | None, ...]:
    cut = timeline.transfer_stage.astype(np.int64) - timeline.transfer_kind  # gradients are the next stage's
    lasting_s = timeline.transfer_end_s - timeline.transfer_start_s
    return tuple(
        float(np.median(lasting_s[cut == stage])) if (cut == stage).any() else None for stage in range(timeline.stages)
    )


def _syncs(timeline: Timeline) -> tuple[float | None, ...]:
    lasting_s = timeline.sync_end_s - timeline.sync_start_s
    return tuple(
        float(lasting_s[chosen].max()) if chosen.any() else None
        for stage in range(timeline.stages)
        for chosen in [(timeline.sync_stage == stage) & (lasting_s > 0)]
    )


def _memory(timeline: Timeline) -> tuple[float | None, ...]:
    peaks = timeline.measures.peak_memory_bytes
    if peaks is None:
        return (None,) * timeline.stages
    return tuple(
        max(peaks[rank] for rank in np.unique(timeline.rank[timeline.stage == stage]).tolist())
        for stage in range(timeline.stages)
    )
