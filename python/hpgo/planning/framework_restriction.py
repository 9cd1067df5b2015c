"""Plans for one framework: a problem without what it can't run, and what that costs against the best plan of all.

The search itself knows of the restrictions, so its bound is one for all plans that the framework runs.
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
from hpgo.planning.problem import SCHEDULES
from hpgo.planning.search import search
from hpgo.programs.blocks import Blocks
from hpgo.programs.frameworks import check_optimizer, sums_shared
from hpgo.programs.names import PlannedSchedule
from hpgo.programs.recomputation import activations_bytes, group_of
from hpgo.programs.schedule import schedules

if TYPE_CHECKING:
    from collections.abc import Callable

    from hpgo.planning.plans import Plan
    from hpgo.planning.problem import PlanningProblem
    from hpgo.programs.frameworks import Framework

FREE_S = 10.0
"""Seconds to look for the best plan that anybody could run."""
_TRIES = 8


def restricted(question: PlanningProblem, framework: Framework, *, schedule: str | None) -> PlanningProblem:
    """`question`, asked for what `framework` runs; under its own choice of schedule, unless `schedule` was asked for.

    Raises ArgumentError, with the way out, if it runs nothing of what is asked.
    """
    title = framework.title
    if not framework.trains:
        raise ArgumentError(
            f"{title} trains nothing",
            f"`hpgo partition --framework {framework.name}` plans inference",
            code="unsupported",
        )
    if schedule is None:
        schedule = next(iter(framework.schedules))
    elif schedule != "auto" and schedule not in framework.schedules:
        plannable = [name for name in framework.schedules if name in get_args(PlannedSchedule)]
        raise ArgumentError(
            f"{title} does not run schedule {schedule!r}",
            f"choose auto or one of {', '.join(plannable)}",
            code="unsupported",
        )
    memory = question.memory
    if memory.shard_optimizer not in framework.shards_optimizer:
        if memory.shard_optimizer:
            raise ArgumentError(
                f"{title} does not share the optimizer's state between replicas",
                "leave out `shard_optimizer`",
                code="unsupported",
            )
        memory = replace(memory, shard_optimizer=True)
    elif framework.shares_bf16 and (memory.optimizer or "").startswith("adam-bf16"):
        memory = replace(memory, shard_optimizer=True)
    splitting = {family.name for family in schedules() if family.splits_backward}
    check_optimizer(
        framework,
        memory.optimizer,
        shard_optimizer=memory.shard_optimizer,
        splits_backward=schedule in splitting,
    )
    if memory.optimizer == "adam-bf16-fp32-gradients" and not framework.widens_halves:
        whole = {name: own for name, own in framework.schedules.items() if name not in splitting}
        framework = replace(framework, schedules=MappingProxyType(whole))
    cluster = question.cluster
    if cluster.gpus_per_device > 1 and not framework.tensor_parallel:
        raise ArgumentError(
            f"a device of `{shorten(cluster.name)}` is {cluster.gpus_per_device} GPUs, which {title} can't join",
            "plan with a profile and a cluster of single GPUs",
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
        framework=framework,
        **_cuts(question, framework),
    )


class _Cuts(TypedDict, total=False):
    """Fields of `PlanningProblem`."""

    parts: tuple[tuple[int, ...], ...]
    together: tuple[tuple[int, ...], ...]


def _cuts(question: PlanningProblem, framework: Framework) -> _Cuts:
    """Return what `framework` does not cut."""
    profile = question.profile
    index_of = {layer.id: index for index, layer in enumerate(profile.layers)}
    whole = _kept_whole(question, framework)
    if framework.cuts == "anywhere":
        return {"together": tuple(tuple(sorted(index_of[layer] for layer in layers)) for layers in whole)}
    rows = Blocks.of(profile).parts(min_blocks=framework.min_blocks)
    row_of = {layer: at for at, row in enumerate(rows) for layer in row}
    ends = [{row_of[layer] for layer in layers} for layers in whole]
    parts: list[tuple[int, ...]] = []
    for at, row in enumerate(rows):
        layers = tuple(index_of[layer] for layer in row)
        is_joined = any(min(held) < at <= max(held) for held in ends)
        parts = [*parts[:-1], parts[-1] + layers] if is_joined else [*parts, layers]
    return {"parts": tuple(parts)}


def _kept_whole(question: PlanningProblem, framework: Framework) -> list[set[str]]:
    """Layers that no cut may part, since the framework doesn't sum the gradients of a weight that they share."""
    ties = (set(tie.layers) for tie in question.profile.ties if tie.parameter_bytes)  # nothing is summed without bytes
    return [layers for layers in ties if not sums_shared(framework, layers, question.blocks)]


def solved(question: PlanningProblem, framework: Framework, solve: Callable[[PlanningProblem], Plan]) -> Plan:
    """What `solve` answers to `question`, with room for what `framework` keeps where it recomputes parts of stages.

    The planner counts the inputs of stages. For a framework that keeps more, it searches again with so much memory
    set aside, until one has room. The bound is that of the first search, which allowed all of them.

    Raises InfeasibleError if none is found.
    """
    plan = solve(question)
    bounds_s = {
        name: getattr(plan, name) for name in ("lower_bound_s", "searched_cuts_bound_s", "node_aligned_bound_s")
    }
    aside_bytes = 0.0
    for _ in range(_TRIES):
        lacking_bytes = _lacking_bytes(plan, question, framework)
        if lacking_bytes <= 0:
            plan = _with_all_memory(plan, question) if aside_bytes else plan
            known_s = {name: min(bound_s, plan.step_s) for name, bound_s in bounds_s.items() if bound_s is not None}
            return replace(plan, **known_s)
        aside_bytes += lacking_bytes
        reserved_bytes = question.memory.reserved_bytes + aside_bytes
        try:
            plan = solve(replace(question, memory=replace(question.memory, reserved_bytes=reserved_bytes)))
        except InfeasibleError as error:
            raise error.reworded(
                f"{framework.title} keeps {format_bytes(aside_bytes)} more than the inputs of stages where it"
                f" recomputes, and with so much set aside {error.message}",
            ) from None
    raise InfeasibleError(
        f"no plan was found that has room for what {framework.title} keeps where it recomputes",
        "set memory aside with `reserve`, use more devices, or leave out `recompute`",
        code="unsupported",
    )


def _lacking_bytes(plan: Plan, question: PlanningProblem, framework: Framework) -> float:
    """Return the memory that a device lacks for what `framework` keeps, beyond what is set aside; at most 0 if none."""
    if not plan.recompute or framework.recomputes in {"stage", "no"}:
        return 0.0
    blocks = Blocks.of(question.profile)
    group = group_of(framework, blocks.counts([stage.layers for stage in plan.stages], framework.title))
    if group is None:
        return 0.0
    aside_bytes = plan.assumed.memory.reserved_bytes - question.memory.reserved_bytes
    saved_activation_bytes = [
        activations_bytes(question.profile, blocks, stage, group, stage.max_in_flight) for stage in plan.stages
    ]
    return (
        max(
            sum(saved_activation_bytes[at] for at in own.stages) - own.memory.activations_bytes - own.headroom_bytes
            for own in plan.groups
        )
        - aside_bytes
    )


def _with_all_memory(plan: Plan, question: PlanningProblem) -> Plan:
    """`plan` with what was set aside counted as free again, in its alternatives too."""
    memory = question.memory
    bytes_of = [machine.device.memory_bytes for machine in question.cluster.nodes for _ in range(machine.count)]
    stages = tuple(
        replace(stage, capacity_bytes=min(bytes_of[device] for device in stage.devices) - memory.reserved_bytes)
        for stage in plan.stages
    )
    free = replace(plan, stages=stages, assumptions=replace(plan.assumed, memory=memory))
    return _with_each(free, lambda other: _with_all_memory(other, question))


def _with_each(plan: Plan, change: Callable[[Plan], Plan]) -> Plan:
    """`plan` with its alternatives' plans changed."""
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
    """`plan`, found for `question` of this framework, with what it is compared to: the best answer to the `free` one.

    That is searched for during `FREE_S`, or until the clock says `until_s`; not at all if the search for `plan` was
    stopped, or if nothing is known of the steps that its schedule can have.
    """
    left_s = FREE_S if until_s is None else min(FREE_S, until_s - time.monotonic())
    best: Plan | None = None
    if plan.finished and plan.schedule in SCHEDULES and plan.lower_bound_s is not None and left_s > 0:
        # Eager 1F1B has the plans of 1F1B and more. Sharing the optimizer's state takes nothing from anybody.
        schedule = plan.schedule if plan.schedule == "gpipe" else "eager_1f1b"
        with contextlib.suppress(HpgoError, KeyboardInterrupt):  # the plan is worth having without the comparison
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
    # Its alternatives were looked for among the same plans.
    return _with_each(replace(plan, restriction=restriction), lambda other: replace(other, restriction=restriction))


def _space(question: PlanningProblem, framework: Framework) -> str:
    """What the framework runs, in words."""
    words = []
    if framework.cuts == "blocks":
        blocks = Blocks.of(question.profile)
        words.append(f"cuts between {pluralize(len(blocks.blocks), 'block')} `{shorten(blocks.stem)}…`")
    else:
        words.append("every cut between layers")
    if _kept_whole(question, framework):
        words.append("no cut between layers that share a weight")
    if framework.equal_replicas:
        words.append("as many replicas of each stage, with equal shares")
    if not framework.overlaps:
        words.append("gradients summed behind the last backward pass")
    if framework.shards_optimizer == (True,):
        words.append("the optimizer's state shared between replicas")
    if True in question.recompute and framework.recomputes in {"groups", "block"}:
        words.append("room for what its recomputation keeps")
    return ", ".join(words)
