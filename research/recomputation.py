"""Compare plans that recompute in single stages with plans that recompute in all stages or in none.

    python research/recomputation.py            # about two minutes on one core
    python research/recomputation.py docs/benchmarks.md   # fills the table in between its markers

Both searches are of one version and run one after the other, for devices with a part of the memory that the best plan
without recomputation needs. Steps and gaps are the same on every machine; processor times are not.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import replace
from typing import NamedTuple

from pages import tell

import hpgo
from hpgo.base.tables import markdown
from hpgo.planning.problem import PlanningProblem
from hpgo.planning.search import search

MODELS = {"bert-48": 64, "gnmt-16": 1024, "xlnet-36": 128, "vgg-19": 1024, "amoebanet-36": 128, "resnet-50": 2048}
"""Global batch size of each model."""
PARTS = (0.85, 0.6, 0.4, 0.25)
"""Parts of the memory that the best plan without recomputation needs."""


class Found(NamedTuple):
    """What a search found: the step and its bound in seconds, or nothing, and its processor time."""

    step_s: float | None
    bound_s: float | None
    cpu_s: float


def searched(problem: PlanningProblem) -> Found:
    """Search a problem."""
    begin_s = time.process_time()
    try:
        plan = search(problem, None, None)
    except hpgo.errors.InfeasibleError:
        return Found(None, None, time.process_time() - begin_s)
    return Found(plan.step_s, plan.lower_bound_s, time.process_time() - begin_s)


def pairs(schedule: str) -> list[tuple[Found, Found]]:
    """Search each problem of a schedule with one choice for all stages, and with a choice for each stage."""
    found = []
    for model, batch in MODELS.items():
        profile = hpgo.read_profile(model)
        for name in ("dapple-a", "dapple-b", "dapple-c"):
            cluster = hpgo.Cluster.preset(name)
            kept = hpgo.plan(profile, cluster, global_batch_size=batch, schedule=schedule)
            needed_bytes = max(stage.memory.total_bytes for stage in kept.stages)
            for part in PARTS:
                nodes = tuple(
                    replace(node, device=replace(node.device, memory_bytes=part * needed_bytes))
                    for node in cluster.nodes
                )
                problem = PlanningProblem.of(
                    profile, replace(cluster, nodes=nodes), global_batch_size=batch, schedule=schedule, recompute="auto"
                )
                # A first search converts the model, which both would otherwise not share.
                problem.session.nothing_fits(problem, True, True, None)
                found.append((searched(replace(problem, recompute_by_stage=False)), searched(problem)))
    return found


def table() -> str:
    """Return a row per schedule."""
    rows = []
    for schedule in ("1f1b", "eager_1f1b", "gpipe"):
        found = pairs(schedule)
        both = [(old, new) for old, new in found if old.step_s and new.step_s]
        ratios = [new.step_s / old.step_s for old, new in both if old.step_s and new.step_s]
        shorter = [1 - ratio for ratio in ratios if ratio < 1 - 1e-9]
        gaps = [
            sorted(one.step_s / one.bound_s - 1 for one in side if one.step_s and one.bound_s)
            for side in zip(*found, strict=True)
        ]
        rows.append(
            [
                schedule, str(len(found)), f"{len(both)}, {sum(new.step_s is not None for _, new in found)}",
                str(len(shorter)), f"{100 * statistics.median(shorter):.1f} %, {100 * max(shorter):.0f} %",
                str(sum(ratio > 1 + 1e-9 for ratio in ratios)),
                ", ".join(f"{100 * side[int(0.95 * len(side))]:.1f} %" for side in gaps),
                f"{sum(new.cpu_s for _, new in found) / sum(old.cpu_s for old, _ in found):.2f}",
            ]
        )  # fmt: skip
    head = [
        "schedule", "questions", "that fit: all or none, by stage", "shorter steps", "median and largest gain",
        "longer steps", "95 % of gaps: all or none, by stage", "ratio of CPU",
    ]  # fmt: skip
    return "\n".join(markdown(head, rows))


if __name__ == "__main__":
    tell("recomputation", table, __doc__)
