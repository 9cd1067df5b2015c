"""Check whether any plan can fit in memory, under schedules that the native search does not plan for.

The memory conditions of the native planner are necessary for every schedule, if a stage is assumed to hold only one
micro-batch. If they fail, no plan has to be simulated.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from hpgo._core import at_batch
from hpgo.base.messages import shorten
from hpgo.base.units import format_bytes
from hpgo.errors import HpgoError, InfeasibleError
from hpgo.planning.search import NO_PLAN_FITS, explained

if TYPE_CHECKING:
    from hpgo.planning.problem import PlanningProblem

_MORE_MEMORY = "use more devices, or devices with more memory"


def check_memory(
    question: PlanningProblem,
    left_s: float | None,
    *,
    name: str | None,
    in_flight_as_1f1b: bool = False,
    virtual_stages_per_rank: bool = False,
) -> None:
    """Raise InfeasibleError if provably no plan fits in memory under the schedule `name`, or under any if it is None.

    Args:
        question: the planning problem, whose own schedule is ignored.
        left_s: time limit in seconds, after which the check passes; None for no limit.
        name: the schedule; None if all are compared.
        in_flight_as_1f1b: whether each stage holds at least the micro-batches of 1F1B.
        virtual_stages_per_rank: whether a device may run several virtual stages.
    """
    # The native check knows only its own schedules. Under 1F1B, its conditions are necessary for all others, too.
    asked = replace(question, schedule="1f1b")
    try:
        if not asked.session.nothing_fits(asked, in_flight_as_1f1b, not virtual_stages_per_rank, left_s):
            return
    except HpgoError:  # The search that follows reports errors of the problem itself.
        return
    whose = "under any schedule" if name is None else f"`{name}`"
    error = InfeasibleError(NO_PLAN_FITS, _MORE_MEMORY, code="insufficient_memory")
    # A reason that holds for any stages is shorter and clearer than one about the closest plan.
    if alone := _without_stages(question):
        raise InfeasibleError(f"{NO_PLAN_FITS} {whose}: {alone}", _MORE_MEMORY, code="insufficient_memory")
    # A schedule that may hold one micro-batch per stage is as small in memory as a step of one micro-batch.
    if not in_flight_as_1f1b:
        size = question.pipeline_micro_batch_sizes[0]
        asked = replace(asked, global_batch_size=size, pipeline_micro_batch_sizes=(size,))
    error = explained(error, asked)
    raise error.reworded(f"{NO_PLAN_FITS} {whose}{error.message.removeprefix(NO_PLAN_FITS)}")


def _without_stages(question: PlanningProblem) -> str:
    """Return a reason for which no stages can fit: total memory or one layer. Empty if there is none."""
    profile, memory = question.profile, question.memory
    capacities = [(node.device.memory_bytes - memory.reserved_bytes, node.count) for node in question.cluster.nodes]
    all_bytes, largest_bytes = sum(size * count for size, count in capacities), max(size for size, _ in capacities)
    of_weight = memory.gradients_per_weight + memory.optimizer_per_weight
    states_bytes = sum(layer.parameter_bytes + of_weight * layer.trained_bytes for layer in profile.layers)
    if states_bytes > all_bytes:
        return (
            f"weights, gradients and optimizer states need {format_bytes(states_bytes)}, but all devices together have"
            f" {format_bytes(all_bytes)}: {format_bytes(states_bytes - all_bytes)} short"
        )
    # Sharded over all devices, the optimizer state of one layer is as small as it can be.
    sharing = question.cluster.devices if memory.shard_optimizer else 1
    of_weight += memory.optimizer_per_weight * (1 / sharing - 1)
    for layer in profile.layers:
        saved = layer.activation_bytes if layer.saved_bytes is None else layer.saved_bytes
        # A stage keeps at least one micro-batch of the smallest share in flight.
        saved_bytes = at_batch(profile.batch_sizes, saved, question.min_samples_per_replica)
        needed_bytes = layer.parameter_bytes + of_weight * layer.trained_bytes + saved_bytes
        if needed_bytes > largest_bytes:
            return (
                f"layer `{shorten(layer.id)}` alone needs {format_bytes(needed_bytes)} on a device, but the largest has"
                f" {format_bytes(largest_bytes)}: {format_bytes(needed_bytes - largest_bytes)} short"
            )
    return ""
