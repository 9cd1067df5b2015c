"""Whether any plan can fit the devices' memory under schedules that the native search does not know.

The native planner's memory conditions hold for every schedule once a stage need not hold more than one micro-batch.
Where they fail, nothing has to be simulated.
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
    chunks: bool = False,
) -> None:
    """Raise InfeasibleError if it is certain that no plan fits under the schedule `name`, or under any if it is None.

    Args:
        question: what is planned, under any schedule.
        left_s: seconds until nothing is to be known any more; None if that is never.
        name: the schedule; None if all are compared.
        in_flight_as_1f1b: whether each stage holds at least as many micro-batches as under 1F1B.
        chunks: whether a device may run several stages.
    """
    asked = replace(question, schedule="1f1b")
    try:
        if not asked.session.nothing_fits(asked, in_flight_as_1f1b, not chunks, left_s):
            return
    except HpgoError:  # what is wrong with the question is for the search to say
        return
    whose = "under any schedule" if name is None else f"`{name}`"
    error = InfeasibleError(NO_PLAN_FITS, _MORE_MEMORY, code="insufficient_memory")
    if alone := _without_stages(question):
        raise InfeasibleError(f"{NO_PLAN_FITS} {whose}: {alone}", _MORE_MEMORY, code="insufficient_memory")
    if not in_flight_as_1f1b:  # a stage may hold one micro-batch, as in a step of one
        size = question.micro_batch_sizes[0]
        asked = replace(asked, global_batch_size=size, micro_batch_sizes=(size,))
    error = explained(error, asked)
    raise error.reworded(f"{NO_PLAN_FITS} {whose}{error.message.removeprefix(NO_PLAN_FITS)}")


def _without_stages(question: PlanningProblem) -> str:
    """Return what is short whatever the stages are; empty if that is not it."""
    profile, memory = question.profile, question.memory
    rooms = [(machine.device.memory_bytes - memory.reserved_bytes, machine.count) for machine in question.cluster.nodes]
    all_bytes, largest_bytes = sum(room * count for room, count in rooms), max(room for room, _ in rooms)
    of_weight = 1 + memory.gradients_per_weight + memory.optimizer_per_weight
    states_bytes = of_weight * sum(layer.parameter_bytes for layer in profile.layers)
    if states_bytes > all_bytes:
        return (
            f"weights, gradients and optimizer states are {format_bytes(states_bytes)}, and all devices together have"
            f" {format_bytes(all_bytes)}: {format_bytes(states_bytes - all_bytes)} short"
        )
    sharing = question.cluster.devices if memory.shard_optimizer else 1
    of_weight += memory.optimizer_per_weight * (1 / sharing - 1)
    for layer in profile.layers:
        saved = layer.activation_bytes if layer.saved_bytes is None else layer.saved_bytes
        saved_bytes = at_batch(profile.batch_sizes, saved, question.min_samples_per_replica)
        needed_bytes = of_weight * layer.parameter_bytes + saved_bytes
        if needed_bytes > largest_bytes:
            return (
                f"layer `{shorten(layer.id)}` alone needs {format_bytes(needed_bytes)} on a device, and the largest has"
                f" {format_bytes(largest_bytes)}: {format_bytes(needed_bytes - largest_bytes)} short"
            )
    return ""
