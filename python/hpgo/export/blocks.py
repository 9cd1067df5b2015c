"""What launchers know of a model: what comes before its blocks, the blocks, what comes after; and a grid of ranks.

Launchers number ranks along a grid, stage by stage, with as many replicas of each stage. A plan with other replica
counts is better on many clusters, but only a launcher that reads it rank by rank (`Plan.for_rank`) can run it.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass

from hpgo.base.errors import ArgumentError
from hpgo.base.wording import shown
from hpgo.planning.plans import Plan

_NUMBERED = re.compile(r"(.*?)([0-9]+)")


@dataclass(frozen=True, slots=True)
class Blocks:
    """How many of the model's equal blocks each stage has."""

    stem: str
    """What the blocks' ids begin with: `encoder-`."""
    counts: tuple[int, ...]
    """For each stage."""


def grid(plan: Plan, launcher: str) -> tuple[int, int, int]:
    """Stages, replicas of each, and samples of a micro-batch on a replica.

    Raises ArgumentError if stages differ in replicas, or replicas in samples.
    """
    if not isinstance(plan, Plan):
        raise ArgumentError(f"the plan is {shown(plan)}", "make one, with `hpgo.plan` or `hpgo.Plan.read` say")
    replicas = [stage.replicas for stage in plan.stages]
    if len(set(replicas)) > 1:
        raise ArgumentError(
            f"{launcher} needs as many replicas of each stage, but the plan has {', '.join(map(str, replicas))}",
            "run it rank by rank with `Plan.for_rank` (examples/rank.py), or price an even one with `hpgo evaluate`",
        )
    if plan.micro_batch_size % replicas[0]:
        raise ArgumentError(
            f"{launcher} needs equal shares, but {replicas[0]} replicas split {plan.micro_batch_size} samples",
            "plan again with `--no-uneven`",
        )
    return len(replicas), replicas[0], plan.micro_batch_size // replicas[0]


def blocks(plan: Plan, launcher: str) -> Blocks:
    """The blocks of the plan's stages: the layers whose ids are the most frequent word with a number.

    Raises ArgumentError if there are none, or if other layers stand between them.
    """
    ids = [layer for stage in plan.stages for layer in stage.layers]
    stems = Counter(found[1] for layer in ids if (found := _NUMBERED.fullmatch(layer)))
    hint = f"{launcher} takes a row of equal blocks, with ids like `layers.0`, between what embeds and what predicts"
    if not stems:
        raise ArgumentError(f"profile `{plan.profile}` has no numbered layers", hint)
    stem = max(stems, key=lambda word: stems[word])
    is_block = [bool((found := _NUMBERED.fullmatch(layer)) and found[1] == stem) for layer in ids]
    first, last = is_block.index(True), len(ids) - 1 - is_block[::-1].index(True)
    if not all(is_block[first : last + 1]):
        stranger = ids[is_block.index(False, first)]
        raise ArgumentError(f"layer `{stranger}` stands between the blocks `{stem}…`", hint)
    if first > len(plan.stages[0].layers):
        raise ArgumentError(
            f"the plan cuts between `{ids[0]}` and the first block `{ids[first]}`, which {launcher} keeps on one stage",
            "make these layers one in the profile",
        )
    if len(ids) - 1 - last > len(plan.stages[-1].layers):
        raise ArgumentError(
            f"the plan cuts between the last block `{ids[last]}` and `{ids[-1]}`, which {launcher} keeps on one stage",
            "make these layers one in the profile",
        )
    members = set(ids[first : last + 1])
    return Blocks(stem, tuple(sum(layer in members for layer in stage.layers) for stage in plan.stages))


def notes(plan: Plan, launcher: str, schedules: dict[str, str]) -> list[str]:
    """What whoever starts the job must know: where its schedule differs, and which rank belongs on which device.

    Raises ArgumentError if the launcher has no schedule near the plan's.
    """
    if plan.schedule not in schedules:
        raise ArgumentError(
            f"{launcher} does not run `{plan.schedule}`", f"plan with `--schedule {next(iter(schedules))}`"
        )
    lines = [
        f"{plan.profile} on {plan.cluster}: predicted step {plan.step_s:.4g} s, {plan.samples_per_s:.4g} samples/s"
    ]
    if plan.schedule == "eager_1f1b":
        lines.append(
            f"{launcher} runs 1F1B, which hides less of the transfers than the plan's eager 1F1B: see --schedule 1f1b"
        )
    devices = [device for stage in plan.stages for device in stage.devices]
    if devices != list(range(len(devices))):
        lines.append(f"start rank r on device D[r], D = {','.join(map(str, devices))}, numbered machine by machine")
    return lines
