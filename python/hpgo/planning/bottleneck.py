"""What keeps a step from being shorter, and what would help.

A step is split along its bottleneck, the stage or link that is busy for longest: its work, the synchronisation that is
left after the last backward pass, the time before its first and after its last micro-batch, and its waits in between.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hpgo.base.messages import pluralize
from hpgo.programs.stages import grouped

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hpgo.programs.stages import Stage

_NOTABLE = 0.005  # of a step: half a percent is below what any profile knows


@dataclass(frozen=True, slots=True)
class StepPart:
    """Some seconds of a step, and what would make them fewer."""

    seconds: float
    what: str
    """A clause that a percentage can follow: `stage 0 computes for`."""
    remedy: str


def parts(stages: Sequence[Stage], micro_batches: int, step_s: float) -> list[StepPart]:
    """Where the time of a step goes, seen from the busiest stage or link; the seconds add up to the step."""
    groups = grouped(stages)
    alone = len(groups) == len(stages)
    work_s, at = max(
        (sum(stages[own].forward_s + stages[own].backward_s for own in group) * micro_batches, -group[0])
        for group in groups
    )
    link_s, link = _busiest_link(stages, groups, micro_batches)
    tail_s, tail = max((s.exposed_grad_reduce_s, -index) for index, s in enumerate(stages))
    if link_s > work_s:
        at, work_s = link, link_s
        ends = f"stage {-at} sends to stage {1 - at}" if alone else f"the devices of stage {-at} send to the next ones"
        what, remedy = f"{ends} for", "a faster network between machines"
    elif len(groups) == 1:
        what, remedy = "all devices compute for", "more devices, or faster ones"
    else:
        what = f"stage {-at} computes for" if alone else f"the devices of stage {-at} compute for"
        remedy = "more devices, or faster ones"
    work_s = min(work_s, step_s)  # sums in another order round differently
    tail_s = min(tail_s, step_s - work_s)
    rest_s = step_s - work_s - tail_s
    fill_s = min(rest_s, sum(s.forward_s + s.backward_s + 2 * s.transfer_s for s in stages[:-at]))
    return [
        StepPart(work_s, what, remedy),
        StepPart(fill_s, "waits for its first micro-batch and after its last one for", "a larger global batch"),
        StepPart(
            rest_s - fill_s,
            "waits for other stages and transfers for",
            "a larger global batch, or a faster network between machines",
        ),
        StepPart(
            tail_s,
            f"gradients of stage {-tail} synchronise after its last backward pass for",
            "a larger global batch, or a faster network",
        ),
    ]


def _busiest_link(stages: Sequence[Stage], groups: list[list[int]], micro_batches: int) -> tuple[float, int]:
    """Seconds for which the busiest link between two groups carries messages; minus the first stage before it."""
    rank_of = {stage: rank for rank, group in enumerate(groups) for stage in group}
    busy: dict[tuple[int, int], tuple[float, int]] = {}
    for index, stage in enumerate(stages[:-1]):
        link = rank_of[index], rank_of[index + 1]
        before_s, first = busy.get(link, (0.0, -index))
        busy[link] = before_s + stage.transfer_busy_s * micro_batches, first
    return max(busy.values(), default=(0.0, 0))


def describe(stages: Sequence[Stage], micro_batches: int, step_s: float) -> str:
    """Where the time of a step goes, in one sentence.

    >>> import hpgo
    >>> plan = hpgo.plan(hpgo.read_profile("bert-48"), hpgo.Cluster.preset("dapple-a"), global_batch_size=64)
    >>> print(describe(plan.stages, plan.micro_batches, plan.step_s))
    stage 0 computes for 95.8 % of the step, waits for other stages and transfers for 3.9 %
    """
    if not step_s:
        return "nothing takes time"
    shown = [part for part in parts(stages, micro_batches, step_s) if part.seconds >= _NOTABLE * step_s]
    first, *others = (f"{part.what} {100 * part.seconds / step_s:.1f} %" for part in shown)
    return ", ".join([f"{first} of the step", *others])


def advice(stages: Sequence[Stage], micro_batches: int, step_s: float, *, idle: int) -> str:
    """What would shorten the step most, where so many devices are `idle`.

    It is against the longest part, computing aside if anything else takes a tenth.
    """
    work, *others = parts(stages, micro_batches, step_s)
    if idle and work.seconds >= 0.9 * step_s:
        return f"a larger global batch, for {pluralize(idle, 'idle device')}, or faster ones"
    longest = max(others, key=lambda part: part.seconds)
    return (longest if longest.seconds >= 0.1 * step_s else work).remedy
