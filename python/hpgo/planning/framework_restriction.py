"""Plans for one framework: the restricted planning problem, and the comparison with the best unrestricted plan.

The search itself applies the restrictions, so its bound holds for all plans that the framework can run.
"""

from __future__ import annotations

import contextlib
import time
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, TypedDict, get_args

from hpgo.base.messages import pluralize, shorten
from hpgo.base.units import format_bytes
from hpgo.errors import ArgumentError, HpgoError, InfeasibleError
from hpgo.planning.plans import Restriction
from hpgo.planning.problem import SCHEDULES, check_transfers
from hpgo.planning.search import search
from hpgo.programs.blocks import Blocks
from hpgo.programs.frameworks import check_computes_in_16_bits, check_optimizer, sums_shared
from hpgo.programs.names import PlannedSchedule
from hpgo.programs.recomputation import activations_bytes, group_of
from hpgo.programs.schedule import schedules

if TYPE_CHECKING:
    from collections.abc import Callable

    from hpgo.planning.plans import Plan
    from hpgo.planning.problem import PlanningProblem
    from hpgo.programs.frameworks import Framework

FREE_S = 10.0
"""Time limit in seconds to search for the best unrestricted plan. Not tuned."""
_MAX_TRIES = 8
"""Largest number of searches with more and more memory set aside. Not tuned."""


def restricted(question: PlanningProblem, framework: Framework, *, schedule: str | None) -> PlanningProblem:
    """Return the problem restricted to plans that `framework` can run.

    Without `schedule`, the framework's default schedule is taken. Raises ArgumentError, with a change that helps, if
    the framework supports no such plan.
    """
    title = framework.title
    if not framework.trains:
        raise ArgumentError(
            f"{title} trains nothing",
            f"`hpgo partition --framework {framework.name}` plans inference",
            code="unsupported",
        )
    if schedule is None:
        # The first schedule in the table is the default of the framework.
        schedule = next(iter(framework.schedules))
    elif schedule != "auto" and schedule not in framework.schedules:
        # A framework may run schedules that the planner does not support. The hint must not suggest these.
        plannable = [name for name in framework.schedules if name in get_args(PlannedSchedule)]
        raise ArgumentError(
            f"{title} does not run schedule {schedule!r}",
            f"choose auto or one of {', '.join(plannable)}",
            code="unsupported",
        )
    check_transfers(schedule, overlap_p2p_comm=question.overlap_p2p_comm)
    memory = question.memory
    if memory.max_zero_stage >= 2:
        raise ArgumentError(
            f"plans from a profile for {title} shard at most the optimizer state, but zero_stage is"
            f" {memory.zero_stage}",
            "use zero_stage=1, or plan transformers with `hpgo llm plan`",
            code="unsupported",
        )
    if memory.shard_optimizer not in framework.shards_optimizer:
        if memory.shard_optimizer:
            raise ArgumentError(
                f"{title} does not shard the optimizer state over replicas",
                "leave out `shard_optimizer`",
                code="unsupported",
            )
        # The framework always shards the state, so the plan must count on it.
        memory = replace(memory, shard_optimizer=True)
    elif framework.shares_bf16 and (memory.optimizer or "").startswith("adam-bf16"):
        memory = replace(memory, shard_optimizer=True)
    # Some optimizers and frameworks have limits for schedules that split the backward pass.
    splitting = {family.name for family in schedules() if family.splits_backward}
    check_optimizer(
        framework,
        memory.optimizer,
        shard_optimizer=memory.shard_optimizer,
        splits_backward=schedule in splitting,
    )
    if memory.optimizer == "adam-bf16-fp32-gradients" and not framework.widens_halves:
        # The framework has no gradients that are wider than weights if backward passes are split.
        whole = {name: own for name, own in framework.schedules.items() if name not in splitting}
        framework = replace(framework, schedules=MappingProxyType(whole))
    cluster = question.cluster
    if cluster.gpus_per_device > 1 and not framework.tensor_parallel:
        raise ArgumentError(
            f"a device of `{shorten(cluster.name)}` is {cluster.gpus_per_device} GPUs, which {title} can't run as one",
            "use a profile and a cluster with one GPU per device",
            code="unsupported",
        )
    if framework.recomputes == "no" and False not in question.recompute:
        raise ArgumentError(f"{title} does not recompute activations", "leave out `recompute`", code="unsupported")
    return replace(
        question,
        schedule=schedule,
        even_split=question.even_split or framework.equal_replicas,
        equal_replicas=framework.equal_replicas,
        overlap=question.overlap and framework.overlaps,
        memory=memory,
        recompute=(False,) if framework.recomputes == "no" else question.recompute,
        recompute_by_stage=framework.recomputes_by_stage,
        framework=framework,
        **_cuts(question, framework),
    )


class _Cuts(TypedDict, total=False):
    """Fields of `PlanningProblem` that restrict cuts."""

    parts: tuple[tuple[int, ...], ...]
    together: tuple[tuple[int, ...], ...]


def _cuts(question: PlanningProblem, framework: Framework) -> _Cuts:
    """Return the layers that `framework` does not separate, as fields of the problem."""
    profile = question.profile
    # The native planner knows layers only by their index in the profile.
    index_of = {layer.id: index for index, layer in enumerate(profile.layers)}
    whole = _kept_whole(question, framework)
    if framework.cuts == "anywhere":
        return {"together": tuple(tuple(sorted(index_of[layer] for layer in layers)) for layers in whole)}
    # With `min_blocks`, embedding and head join the first and the last block. Otherwise they are parts of their own.
    rows = Blocks.of(profile).parts(min_blocks=framework.min_blocks)
    row_of = {layer: at for at, row in enumerate(rows) for layer in row}
    ends = [{row_of[layer] for layer in layers} for layers in whole]
    parts: list[tuple[int, ...]] = []
    for at, row in enumerate(rows):
        layers = tuple(index_of[layer] for layer in row)
        # A cut here would separate layers of a tied weight, so the part is merged with the one before.
        is_joined = any(min(held) < at <= max(held) for held in ends)
        parts = [*parts[:-1], parts[-1] + layers] if is_joined else [*parts, layers]
    return {"parts": tuple(parts)}


def _kept_whole(question: PlanningProblem, framework: Framework) -> list[set[str]]:
    """Return groups of layers that must stay together, because the framework does not reduce their tied weights."""
    # Tied weights without bytes have no gradients to reduce.
    tied_weights = (set(tie.layers) for tie in question.profile.tied_weights if tie.parameter_bytes)
    return [layers for layers in tied_weights if not sums_shared(framework, layers, question.blocks)]


def solved(question: PlanningProblem, framework: Framework, solve: Callable[[PlanningProblem], Plan]) -> Plan:
    """Return the plan that `solve` finds, with memory for all activations that `framework` keeps when it recomputes.

    The planner counts only the inputs of stages. For a framework that keeps more, this function sets memory aside and
    searches again, until a plan fits. The bound is that of the first search, which allowed all these plans.

    Raises InfeasibleError if no plan fits.
    """
    plan = solve(question)
    # Only the plan has the number of replicas, so this can't be refused before the search.
    check_computes_in_16_bits(
        framework,
        question.memory.optimizer,
        replicas=len(plan.stages[0].devices),
        gpus=sum(len(stage.devices) for stage in plan.stages) * question.cluster.gpus_per_device,
    )
    # Searches with less memory have higher bounds, which do not hold for plans with all memory.
    bounds_s = {
        name: getattr(plan, name) for name in ("lower_bound_s", "searched_cuts_bound_s", "node_aligned_bound_s")
    }
    aside_bytes = 0.0
    for _ in range(_MAX_TRIES):
        lacking_bytes = _lacking_bytes(plan, question, framework)
        if lacking_bytes <= 0:
            plan = _with_all_memory(plan, question) if aside_bytes else plan
            known_s = {name: min(bound_s, plan.step_s) for name, bound_s in bounds_s.items() if bound_s is not None}
            return replace(plan, **known_s)
        # A plan with less memory may keep other activations, so the amount that is set aside can grow again.
        aside_bytes += lacking_bytes
        reserved_bytes = question.memory.reserved_bytes + aside_bytes
        try:
            plan = solve(replace(question, memory=replace(question.memory, reserved_bytes=reserved_bytes)))
        except InfeasibleError as error:
            raise error.reworded(
                f"with recomputation, {framework.title} keeps {format_bytes(aside_bytes)} besides the inputs of stages,"
                f" and without this memory {error.message}",
            ) from None
    raise InfeasibleError(
        f"no plan was found with enough memory for the activations that {framework.title} keeps with recomputation",
        "set memory aside with `reserve`, use more devices, or leave out `recompute`",
        code="unsupported",
    )


def _lacking_bytes(plan: Plan, question: PlanningProblem, framework: Framework) -> float:
    """Return the memory that a device lacks for activations that `framework` keeps, in bytes; at most 0 if it fits."""
    if not plan.recompute or framework.recomputes in {"stage", "no"}:
        return 0.0
    blocks = Blocks.of(question.profile)
    # If the framework recomputes whole stages, it keeps only their inputs, which are counted already.
    group = group_of(framework, blocks.counts([stage.layers for stage in plan.stages], framework.title))
    if group is None:
        return 0.0
    aside_bytes = plan.assumed.memory.reserved_bytes - question.memory.reserved_bytes
    saved_activation_bytes = [
        activations_bytes(question.profile, blocks, stage, group, stage.max_in_flight) for stage in plan.stages
    ]
    return (
        max(
            sum(saved_activation_bytes[at] for at in own.stages) - own.memory.activations_bytes - own.free_bytes
            for own in plan.groups
        )
        - aside_bytes
    )


def _with_all_memory(plan: Plan, question: PlanningProblem) -> Plan:
    """Return `plan` and its alternatives with the memory that was set aside as free memory again."""
    memory = question.memory
    # The capacity of a stage is that of its smallest device.
    bytes_of = [node.device.memory_bytes for node in question.cluster.nodes for _ in range(node.count)]
    stages = tuple(
        replace(stage, capacity_bytes=min(bytes_of[device] for device in stage.devices) - memory.reserved_bytes)
        for stage in plan.stages
    )
    free = replace(plan, stages=stages, assumptions=replace(plan.assumed, memory=memory))
    return _with_each(free, lambda other: _with_all_memory(other, question))


def _with_each(plan: Plan, change: Callable[[Plan], Plan]) -> Plan:
    """Return `plan` with `change` applied to the plans of its alternatives."""
    return replace(
        plan,
        alternatives=tuple(
            row if row.plan is None else replace(row, plan=change(row.plan)) for row in plan.alternatives
        ),
        schedules=tuple(row if row.plan is None else replace(row, plan=change(row.plan)) for row in plan.schedules),
    )


def with_restriction(
    plan: Plan, question: PlanningProblem, framework: Framework, free: PlanningProblem, *, until_s: float | None
) -> Plan:
    """Return `plan` with the comparison to the best plan of `free`, the problem without the framework.

    The search for that plan takes at most `FREE_S` seconds, and ends at the monotonic time `until_s`. There is no
    search if the one for `plan` was stopped, or if no bound is known for its schedule.
    """
    # The comparison must not exceed the time limit of the caller.
    left_s = FREE_S if until_s is None else min(FREE_S, until_s - time.monotonic())
    best: Plan | None = None
    if plan.finished and plan.schedule in SCHEDULES and plan.lower_bound_s is not None and left_s > 0:
        # Eager 1F1B includes all plans of 1F1B. The memory model is that of the framework, because sharding the
        # optimizer state only ever helps: without it, the comparison would favor the framework.
        schedule = plan.schedule if plan.schedule == "gpipe" else "eager_1f1b"
        # Return the plan without a comparison rather than lose it.
        with contextlib.suppress(HpgoError, KeyboardInterrupt):
            best = search(replace(free, schedule=schedule, memory=question.memory), left_s, None)
    restriction = Restriction(
        framework=framework.name,
        version=framework.version,
        label=framework.label,
        space=_space(question, framework),
        unrestricted_step_s=None if best is None else min(best.step_s, plan.step_s),
        unrestricted_lower_bound_s=None if best is None else best.lower_bound_s,
        unrestricted_stages=None if best is None else len(best.stages),
    )
    # Alternatives were searched in the restricted problem, too.
    return _with_each(replace(plan, restriction=restriction), lambda other: replace(other, restriction=restriction))


def _space(question: PlanningProblem, framework: Framework) -> str:
    """Return the restrictions of the framework as a phrase for reports."""
    words = []
    if framework.cuts == "blocks":
        blocks = Blocks.of(question.profile)
        words.append(f"cuts between {pluralize(len(blocks.blocks), 'block')} `{shorten(blocks.stem)}…`")
    else:
        words.append("every cut between layers")
    if _kept_whole(question, framework):
        words.append("no cut between layers that share a weight")
    if framework.equal_replicas:
        words.append("the same number of replicas for each stage, with equal samples")
    if not framework.overlaps:
        words.append("gradients reduced after the last backward pass")
    if framework.shards_optimizer == (True,):
        words.append("optimizer state sharded over replicas")
    if True in question.recompute and framework.recomputes in {"groups", "block"}:
        words.append("memory for activations that its recomputation keeps")
    return ", ".join(words)
