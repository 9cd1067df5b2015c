"""A plan as launchers number ranks: along a grid, stage by stage, with as many replicas of each stage.

A plan with other replica counts is better on many clusters, but only a launcher that reads it rank by rank
(`Plan.for_rank`) can run it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpgo.base.errors import ArgumentError
from hpgo.base.wording import shown
from hpgo.planning.plans import Plan
from hpgo.programs.blocks import Blocks
from hpgo.programs.launchers import check, runs_as

if TYPE_CHECKING:
    from hpgo.programs.launchers import Launcher


def grid(plan: Plan, launcher: Launcher) -> tuple[int, int, int]:
    """Stages, replicas of each, and samples of a micro-batch on a replica.

    Raises ArgumentError for a plan that `launcher` does not run.
    """
    if not isinstance(plan, Plan):
        raise ArgumentError(f"the plan is {shown(plan)}", "make one, with `hpgo.plan` or `hpgo.Plan.read` say")
    replicas = [stage.replicas for stage in plan.stages]
    check(
        launcher,
        schedule=plan.schedule,
        replicas=replicas,
        micro_batch_size=plan.micro_batch_size,
        shard_optimizer=False,
        recompute=plan.recompute,
    )
    return len(replicas), replicas[0], plan.micro_batch_size // replicas[0]


def block_counts(plan: Plan, launcher: Launcher) -> tuple[int, ...]:
    """How many of the model's blocks each stage has; raises ArgumentError for a model or cuts that have none."""
    stages = [stage.layers for stage in plan.stages]
    found = Blocks.among((layer for layers in stages for layer in layers), name=plan.profile)
    return found.counts(stages, launcher.title)


def notes(plan: Plan, launcher: Launcher) -> list[str]:
    """What whoever starts the job must know: where its schedule differs, and which rank belongs on which device."""
    lines = [
        f"{plan.profile} on {plan.cluster}: predicted step {plan.step_s:.4g} s, {plan.samples_per_s:.4g} samples/s"
    ]
    if runs_as(launcher, plan.schedule) != plan.schedule:
        lines.append(
            f"{launcher.title} runs 1F1B, which hides less of the transfers than the plan's eager 1F1B:"
            " see --schedule 1f1b"
        )
    devices = [device for stage in plan.stages for device in stage.devices]
    if devices != list(range(len(devices))):
        lines.append(f"start rank r on device D[r], D = {','.join(map(str, devices))}, numbered machine by machine")
    return lines
