"""Plans whose cuts other schedules are run on: the best ones of 1F1B for several depths and micro-batch sizes.

Where 1F1B fits nowhere, schedules that can do with one activation a stage still may: they are run on the best cuts
for a step of a single micro-batch, the plans that hold least.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from hpgo.machine.cluster import Cluster
    from hpgo.planning.clock import Clock
    from hpgo.planning.plans import Plan
    from hpgo.planning.question import Question

MOST_ACTIONS = 50_000
"""Of one simulated plan; a larger one would take more than a few hundredths of a second."""
_SIZES = 6  # micro-batch sizes tried, those nearest to the best of eager 1F1B


def candidates(question: Question, first: list[Plan], clock: Clock) -> Iterator[Plan]:
    """Plans to run other schedules on: `first`, and 1F1B's best for every depth and micro-batch size worth trying."""
    seen = set()
    for plan in first:
        seen.add(_cut(plan))
        yield plan
    for size in sizes(question.micro_batch_sizes, first[0].micro_batch_size):
        for found in _each_depth(replace(question, micro_batch_sizes=(size,)), clock):
            if _cut(found) not in seen:
                seen.add(_cut(found))
                yield found


def sparest(question: Question, clock: Clock) -> Iterator[Plan]:
    """Plans that hold least: the best for one micro-batch at a time, of the smallest sizes. Their step is still its."""
    batch = question.global_batch_size
    few = [size for size in sorted(question.micro_batch_sizes) if 3 * batch // size <= MOST_ACTIONS]
    for size in few[:_SIZES]:
        single = replace(question, global_batch_size=size, micro_batch_sizes=(size,))
        for found in _each_depth(single, clock):
            one_device_step_s = batch // size * found.one_device_step_s
            yield replace(found, global_batch_size=batch, one_device_step_s=one_device_step_s)


def _each_depth(question: Question, clock: Clock) -> Iterator[Plan]:
    """1F1B's best plan for every depth worth trying, with activations kept and recomputed as the question has it."""
    depths = _depths(question.cluster, min(question.most_stages, len(question.profile.layers)))
    for depth, recompute in product(depths, question.recompute):
        if clock.over():
            return
        most_replicas = -(-question.cluster.devices // depth)
        found = clock.glance(replace(question, most_stages=depth, most_replicas=most_replicas, recompute=(recompute,)))
        if found is not None:
            yield found


def _cut(plan: Plan) -> tuple[object, ...]:
    return plan.micro_batch_size, plan.recompute, tuple((stage.layers, stage.devices) for stage in plan.stages)


def sizes(those: Sequence[int], near_size: int) -> list[int]:
    """Which of the micro-batch sizes are worth trying first: the nearest by ratio."""
    return sorted(those, key=lambda size: max(size / near_size, near_size / size))[:_SIZES]


def _depths(cluster: Cluster, most: int) -> list[int]:
    """Stages of a pipeline worth trying: powers of two, and as many as there are devices."""
    powers = {2**power for power in range(cluster.devices.bit_length())}
    return sorted(depth for depth in powers | {cluster.devices} if depth <= min(most, cluster.devices))


def small(plan: Plan) -> bool:
    """Whether the plan can be simulated in no time."""
    return 3 * plan.micro_batches * len(plan.stages) <= MOST_ACTIONS
