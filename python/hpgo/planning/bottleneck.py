"""Bottleneck of a plan: where the time of a step goes, and which change would shorten it.

The step is split from the view of its bottleneck, the stage or link that is busy for longest. The parts are its work,
the gradient reduction after the last backward pass, the time before its first and after its last micro-batch, and the
waits in between.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hpgo.base.messages import pluralize
from hpgo.programs.stages import grouped

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hpgo.programs.stages import Stage

_NOTABLE = 0.005
"""Share of a step from which on a part is reported. Not tuned: profiles are less accurate than 0.5 %."""


@dataclass(frozen=True, slots=True)
class StepPart:
    """A part of a step, in seconds, and a remedy that would shorten it."""

    seconds: float
    what: str
    """A clause that a percentage completes: `stage 0 computes for`."""
    remedy: str


def parts(stages: Sequence[Stage], micro_batches: int, step_s: float) -> list[StepPart]:
    """Return the parts of a step, as the busiest stage or link sees it; their seconds add up to the step."""
    groups = grouped(stages)
    # With virtual stages, devices run several stages, so the text names devices instead of one stage.
    alone = len(groups) == len(stages)
    # The negative index breaks ties in favor of the first stage, here and below.
    work_s, at = max((sum(sum(stages[own].occupied_s) for own in group) * micro_batches, -group[0]) for group in groups)
    link_s, link = _busiest_link(stages, groups, micro_batches)
    tail_s, tail = max((s.exposed_grad_reduce_s, -index) for index, s in enumerate(stages))
    # The busiest resource bounds the step from below: its work is the part that nothing else can hide.
    if link_s > work_s:
        at, work_s = link, link_s
        ends = f"stage {-at} sends to stage {1 - at}" if alone else f"the devices of stage {-at} send to the next ones"
        what, remedy = f"{ends} for", "a faster network between nodes"
    elif len(groups) == 1:
        what, remedy = "all devices compute for", "more devices, or faster ones"
    else:
        what = f"stage {-at} computes" if alone else f"the devices of stage {-at} compute"
        # Passes that communicate only occur with one stage per group of devices.
        computes_s = stages[-at].forward_s + stages[-at].backward_s
        what += " and communicates for" if sum(stages[-at].occupied_s) > computes_s else " for"
        remedy = "more devices, or faster ones"
    # The simulation adds the same numbers in another order and rounds differently. No part may become negative.
    work_s = min(work_s, step_s)
    # The tail may overlap with work of other stages. What remains of the step limits each part in turn.
    tail_s = min(tail_s, step_s - work_s)
    rest_s = step_s - work_s - tail_s
    # Only stages before the bottleneck delay its first micro-batch and its last gradient.
    fill_s = min(rest_s, sum(sum(s.occupied_s) + 2 * s.link_s for s in stages[:-at]))
    return [
        StepPart(work_s, what, remedy),
        StepPart(fill_s, "waits for its first micro-batch and after its last one for", "a larger global batch"),
        StepPart(
            rest_s - fill_s,
            "waits for other stages and transfers for",
            "a larger global batch, or a faster network between nodes",
        ),
        StepPart(
            tail_s,
            f"gradients of stage {-tail} are reduced after its last backward pass for",
            "a larger global batch, or a faster network",
        ),
    ]


def _busiest_link(stages: Sequence[Stage], groups: list[list[int]], micro_batches: int) -> tuple[float, int]:
    """Return the seconds for which the busiest link between two groups is in use, and minus its first sending stage."""
    rank_of = {stage: rank for rank, group in enumerate(groups) for stage in group}
    busy: dict[tuple[int, int], tuple[float, int]] = {}
    for index, stage in enumerate(stages[:-1]):
        # With virtual stages, several stage boundaries use the same pair of devices, so their times add up.
        link = rank_of[index], rank_of[index + 1]
        before_s, first = busy.get(link, (0.0, -index))
        busy[link] = before_s + stage.link_busy_s * micro_batches, first
    return max(busy.values(), default=(0.0, 0))


def describe(stages: Sequence[Stage], micro_batches: int, step_s: float) -> str:
    """Return where the time of a step goes, as one sentence.

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
    """Return the change that would shorten the step most; `idle` is the number of devices without a stage.

    It is the remedy for the longest part. Computation counts only if no other part takes 10 % of the step.
    """
    work, *others = parts(stages, micro_batches, step_s)
    # Idle devices mean that more of them do not help: the global batch has too few samples to use them.
    if idle and work.seconds >= 0.9 * step_s:
        return f"a larger global batch, for {pluralize(idle, 'idle device')}, or faster ones"
    longest = max(others, key=lambda part: part.seconds)
    return (longest if longest.seconds >= 0.1 * step_s else work).remedy
