"""When a step of the twin's plan ends: its orders on a clock of their own, in plain Python (see `twin.py`)."""

from __future__ import annotations

from itertools import pairwise, product
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from twin import Assumed, Stage


def windows(assumed: Assumed, stages: Sequence[Stage]) -> list[tuple[int, ...]]:
    """Every row of micro-batches in flight that the schedule knows and memory allows; growing ones would never end."""
    rows = []
    for number, stage in enumerate(stages):
        behind = len(stages) - number
        minimum = assumed.micro_batches if assumed.schedule == "gpipe" else min(assumed.micro_batches, behind)
        maximum = min(assumed.micro_batches, 2 * behind - 1) if assumed.schedule == "eager_1f1b" else minimum
        rows.append([held for held in range(minimum, maximum + 1) if stage.fits(held)])
    return [row for row in product(*rows) if all(held >= later for held, later in pairwise(row))]


def order(count: int, window: int) -> list[tuple[str, int]]:
    """What a stage does with `count` micro-batches: `window` forwards, then a backward before each further one."""
    actions = [("F", micro_batch) for micro_batch in range(window)]
    for micro_batch in range(count):
        actions.append(("B", micro_batch))
        if window + micro_batch < count:
            actions.append(("F", window + micro_batch))
    return actions


def step_s(micro_batches: int, stages: Sequence[Stage], windows: Sequence[int]) -> float:
    """How long a step with these micro-batches in flight takes."""
    action_lists = [order(micro_batches, window) for window in windows]
    return end_s(action_lists, stages, [stage.exposed_grad_reduce_s for stage in stages])


TAKES = {"F": "forward_s", "B": "backward_s", "I": "input_gradient_s", "W": "weight_gradient_s"}


def end_s(action_lists: Sequence[Sequence[tuple[str, int]]], stages: Sequence[Stage], tails: Sequence[float]) -> float:
    """The end of the last synchronisation, if stages keep their orders and links take one message after another."""
    todo = [list(reversed(row)) for row in action_lists]
    micro_batches = sum(kind == "F" for kind, _ in action_lists[0])
    last = len(stages) - 1
    here = {(kind, index, number): 0.0 for kind, index in (("F", 0), ("B", last)) for number in range(micro_batches)}
    clock = [0.0] * len(stages)
    link_free: dict[tuple[str, int], float] = {}
    runnable = list(range(len(stages)))
    while runnable:
        index = runnable.pop()
        while todo[index]:
            action, number = todo[index][-1]
            kind = "F" if action == "F" else "B"
            if action != "W" and (kind, index, number) not in here:
                break
            todo[index].pop()
            begin = clock[index] if action == "W" else max(clock[index], here[kind, index, number])
            waits = {"F": stages[index].exposed_forward_comm_s, "B": stages[index].exposed_backward_comm_s}
            takes = getattr(stages[index], TAKES[action]) + waits.get(action, 0.0)
            clock[index] = begin + takes + stages[index].exposed_transfer_s
            to = {"F": index + 1, "W": -1}.get(action, index - 1)
            if 0 <= to <= last:
                link = stages[min(index, to)]
                on_link = 0.0 if link.exposed_transfer_s else link.transfer_busy_s
                sent = max(clock[index], link_free.get((kind, index), 0.0)) + on_link
                link_free[kind, index] = sent
                here[kind, to, number] = sent + link.transfer_s - link.transfer_busy_s
                runnable.append(to)
    if any(todo):
        raise ValueError("the stages wait for each other")
    return max(end + tail for end, tail in zip(clock, tails, strict=True))
