"""One question that another planner and hpgo answered, with both plans under both objectives."""

from __future__ import annotations

import resource
import subprocess
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import hpgo

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

Stages = list[tuple[list[str], int]]
"""Layers and number of devices of each stage, in the order of the pipeline. Devices are taken in order."""


@dataclass(frozen=True)
class Comparison:
    """What both planners found for one question."""

    planner: str
    question: str
    unit: str
    """Unit and meaning of the other planner's objective."""
    theirs_of_theirs: float
    """Their objective of their plan."""
    theirs_of_ours: float | None
    """Their objective of our plan: infinite if the plan does not fit in memory, None if it is not defined for it."""
    ours_of_theirs: float | None
    """Step of their plan in hpgo's simulation, seconds: infinite if it does not fit, None if hpgo can't say it."""
    ours_of_ours: float | None
    """Step of our plan, seconds."""
    their_cpu_s: float
    our_cpu_s: float


def run(command: Sequence[str], folder: Path, *, stdin: str | None = None) -> tuple[str, float]:
    """Run a program of another planner and return what it printed, with the seconds of processor time."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(command, cwd=folder, input=stdin, capture_output=True, check=False, text=True)
    if done.returncode:
        raise SystemExit(f"{command[0]} in {folder} ended with {done.returncode}:\n{done.stderr[-2000:]}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return done.stdout, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def planned(profile: hpgo.Profile, cluster: hpgo.Cluster, **question: Any) -> tuple[hpgo.Plan, float]:
    """Return our plan, with the seconds of processor time of all threads."""
    start = time.process_time()
    plan = hpgo.plan(profile, cluster, **question)
    return plan, time.process_time() - start


def step_s(profile: hpgo.Profile, cluster: hpgo.Cluster, stages: Stages, **question: Any) -> float:
    """Return the step of another planner's stages in hpgo's simulation, or infinity if they do not fit."""
    first, placed = 0, []
    for layers, devices in stages:
        placed.append((layers, range(first, first + devices)))
        first += devices
    plan = hpgo.evaluate(profile, cluster, placed, **question)
    return plan.step_s if plan.fits else float("inf")


def stages_of(plan: hpgo.Plan) -> Stages:
    """Return the layers and the number of devices of each stage of our plan."""
    return [(list(stage.layers), len(stage.devices)) for stage in plan.stages]
