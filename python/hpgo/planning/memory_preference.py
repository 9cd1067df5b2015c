"""Plans that take hardly longer than the shortest step and hold much less.

`with_leaner` looks beside a plan, at the same stages in smaller micro-batches, with fewer of them in flight or with
activations recomputed, which costs next to nothing. `min_memory` searches anew on devices that are given ever less
memory. Neither changes what the search has proved: the bound stays that of the shortest step.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from hpgo.base.units import format_bytes
from hpgo.planning.plans import Alternative, MemoryPreference
from hpgo.planning.search import plan_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hpgo.planning.plans import Plan
    from hpgo.planning.problem import PlanningProblem

_LONGER = 0.01  # a share of the step that few would miss
_LESS = 0.75  # of the memory, which is worth a line of the report
_SIZES = 3  # of micro-batches that are tried beside a plan
_MOST_ACTIONS = 20_000  # of a step; simulations of more take longer than a hundredth of a second


def with_leaner(question: PlanningProblem, best: Plan) -> Plan:
    """`best` with the plan beside it that holds least as an alternative, if that is hardly longer and much smaller."""
    if best.memory_preference is not None or not best.finished:
        return best
    found = min(_beside(question, best, best.step_s * (1 + _LONGER)), key=peak_bytes, default=None)
    if found is None or peak_bytes(found) > _LESS * peak_bytes(best):
        return best
    less, more = (format_bytes(float(f"{peak_bytes(plan):.3g}")) for plan in (found, best))
    why = f"{less} instead of {more} on the fullest device"
    other = Alternative(
        "less memory", found.step_s, len(found.stages), found.micro_batch_size, 0.0, why, replace(found, notes=())
    )
    return replace(best, alternatives=(*best.alternatives, other))


def min_memory(question: PlanningProblem, best: Plan, within: float, time_limit_s: float | None) -> Plan:
    """The plan with the least memory on its fullest device whose step is at most `within` longer than that of `best`.

    The memory that is needed is narrowed down by searches on devices that have no more than some of it. After
    `time_limit_s` seconds, or Ctrl-C, it is the best plan so far.
    """
    limit_s = best.step_s * (1 + within)
    kept = min([best, *_beside(question, best, limit_s)], key=lambda plan: (peak_bytes(plan), plan.step_s))
    stopped = best.stop_reason
    if stopped != "interrupt":
        left_s = None if time_limit_s is None else max(1e-3, time_limit_s)
        found, ended = question.session.min_memory(question, limit_s, peak_bytes(kept), left_s)
        kept = kept if found is None else plan_of(question, found)
        stopped = ended or stopped
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
    """What its fullest device holds."""
    return max(stage.memory.total_bytes for stage in plan.stages)


def _beside(question: PlanningProblem, best: Plan, limit_s: float) -> Iterator[Plan]:
    """The stages of `best` in smaller micro-batches, with as few in flight as 1F1B has, or recomputed if allowed.

    Those that fit, and whose step is no longer than `limit_s`.
    """
    index_of = {layer.id: index for index, layer in enumerate(question.profile.layers)}
    rows = [([index_of[layer] for layer in stage.layers], list(stage.devices)) for stage in best.stages]
    most = _MOST_ACTIONS // (2 * len(rows))
    least = max(stage.replicas for stage in best.stages) * question.min_samples_per_replica
    sizes = [
        size
        for size in question.micro_batch_sizes
        if least <= size < best.micro_batch_size and question.global_batch_size // size <= most
    ]
    depth = len(rows)
    fewest = [min(best.micro_batches, depth - at) for at in range(depth)]  # of 1F1B
    tried: list[tuple[int, bool, list[int] | None]] = [(size, best.recompute, None) for size in sizes[-_SIZES:]]
    if True in question.recompute and not best.recompute:
        tried.append((best.micro_batch_size, True, None))
    if best.micro_batches <= most and question.schedule == "eager_1f1b":
        tried.append((best.micro_batch_size, best.recompute, fewest))
    for found in question.session.evaluate_each(question, rows, tried):
        if found is not None and found["step_s"] <= limit_s and (plan := plan_of(question, found)).fits:
            yield plan
