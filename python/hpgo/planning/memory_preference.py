"""Plans with much less memory whose step is only slightly longer than the shortest.

`with_leaner` tries variants of a plan: the same stages with smaller micro-batches, fewer micro-batches in flight, or
recomputed activations. This takes little time. `min_memory` searches again on devices with less and less memory.
Neither changes the proof: the bound remains that of the shortest step.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from hpgo.base.units import format_bytes
from hpgo.planning.plans import Alternative, MemoryPreference
from hpgo.planning.search import plan_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from hpgo.planning.plans import Plan
    from hpgo.planning.problem import PlanningProblem

_MAX_LONGER = 0.01
"""Largest share by which the step of the alternative `less memory` may be longer. Not tuned."""
_MAX_MEMORY = 0.75
"""Largest share of the plan's memory that the alternative may need. Not tuned."""
_SIZES = 3
"""Number of smaller micro-batch sizes to try. Not tuned."""
_MAX_ACTIONS = 20_000
"""Largest number of passes in a step to try. More take over 10 ms to simulate."""


def with_leaner(question: PlanningProblem, best: Plan) -> Plan:
    """Return `best` with the alternative `less memory`, if a variant needs much less memory for a similar step."""
    # Such a plan has the smallest memory already, and a stopped search has no time for variants.
    if best.memory_preference is not None or not best.finished:
        return best
    found = min(_variants(question, best, best.step_s * (1 + _MAX_LONGER)), key=peak_bytes, default=None)
    if found is None or peak_bytes(found) > _MAX_MEMORY * peak_bytes(best):
        return best
    # Round before formatting, so that both sizes have three digits and the same unit where possible.
    less, more = (format_bytes(float(f"{peak_bytes(plan):.3g}")) for plan in (found, best))
    why = f"{less} instead of {more} on the fullest device"
    other = Alternative(
        "less memory",
        found.step_s,
        len(found.stages),
        found.pipeline_micro_batch_size,
        0.0,
        why,
        replace(found, notes=()),
    )
    return replace(best, alternatives=(*best.alternatives, other))


def min_memory(question: PlanningProblem, best: Plan, within: float, time_limit_s: float | None) -> Plan:
    """Return the plan with the smallest peak memory whose step is longer than that of `best` by at most `within`.

    The native search narrows the memory down with searches on devices whose memory is limited. After `time_limit_s`
    seconds, or on Ctrl-C, it returns the best plan so far.
    """
    limit_s = best.step_s * (1 + within)
    # A small plan as a start lets the search begin with a tight limit on memory.
    kept = min([best, *_variants(question, best, limit_s)], key=lambda plan: (peak_bytes(plan), plan.step_s))
    stopped = best.stop_reason
    if stopped != "interrupt":
        # The first search may have used up its time. The limit of the second one must stay positive.
        left_s = None if time_limit_s is None else max(1e-3, time_limit_s)
        found, ended = question.session.min_memory(question, limit_s, peak_bytes(kept), left_s)
        if found is not None:
            # With `zero_stage="auto"`, stages shard less on the real devices than on the smaller ones of the search.
            kept = min(kept, plan_of(question, found), key=peak_bytes)
        stopped = ended or stopped
    # All facts about the search, and so the bound, are about the shortest step.
    searched = (
        "lower_bound_s",
        "searched_cuts_bound_s",
        "node_aligned_bound_s",
        "cuts",
        "placements",
        "explored_labels",
        "simulated",
    )
    return replace(
        kept,
        **{name: getattr(best, name) for name in searched},
        stop_reason=stopped,
        memory_preference=MemoryPreference(within, best.step_s, peak_bytes(best)),
    )


def peak_bytes(plan: Plan) -> float:
    """Return the memory of the fullest stage, in bytes."""
    return max(stage.memory.total_bytes for stage in plan.stages)


def _variants(question: PlanningProblem, best: Plan, limit_s: float) -> Iterator[Plan]:
    """Yield variants of `best` that fit and whose step is at most `limit_s`.

    They have the same stages with smaller micro-batches, as few micro-batches in flight as 1F1B, or recomputed
    activations if these are allowed.
    """
    index_of = {layer.id: index for index, layer in enumerate(question.profile.layers)}
    rows = [([index_of[layer] for layer in stage.layers], list(stage.devices)) for stage in best.stages]
    # A step has a forward and a backward pass per stage and micro-batch.
    maximum = _MAX_ACTIONS // (2 * len(rows))
    # Every replica must get at least the smallest allowed number of samples.
    minimum = max(stage.replicas for stage in best.stages) * question.min_samples_per_replica
    sizes = [
        size
        for size in question.pipeline_micro_batch_sizes
        if minimum <= size < best.pipeline_micro_batch_size and question.global_batch_size // size <= maximum
    ]
    depth = len(rows)
    min_in_flight = [min(best.micro_batches, depth - at) for at in range(depth)]  # The limits of 1F1B.
    # The largest of the smaller sizes come last in the list. They are nearest to the plan, so their steps are likely
    # similar.
    tried: list[tuple[int, Sequence[bool], tuple[list[int], list[bool]] | None]] = [
        (size, question.recompute, None) for size in sizes[-_SIZES:]
    ]
    recompute = [stage.recompute for stage in best.stages]
    if True in question.recompute and not all(recompute):
        tried.append((best.pipeline_micro_batch_size, [True], None))
    # Under 1F1B and GPipe, the limits in flight are fixed by the schedule, so only eager 1F1B has a choice.
    if best.micro_batches <= maximum and question.schedule == "eager_1f1b":
        tried.append((best.pipeline_micro_batch_size, question.recompute, (min_in_flight, recompute)))
    for found in question.session.evaluate_each(question, rows, tried):
        if found is not None and found["step_s"] <= limit_s and (plan := plan_of(question, found)).fits:
            yield plan
