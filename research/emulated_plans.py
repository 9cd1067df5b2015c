"""Run the plans of the first table with processes that sleep instead of computing."""

from __future__ import annotations

import json
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hpgo.timing.simulation import simulate

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from hpgo.planning.plans import Plan
    from hpgo.programs.program import Program
    from hpgo.reproduce.answers import Strategy

PASS_S = 0.1
"""Time of the median pass. Sixteen sleeping processes wake up late, which matters most for steps of only two passes."""
_STEPS = 3
_SILENCE_S = 30.0
"""Seconds without a heartbeat until a rank counts as lost. It is long because many processes share few cores."""


@dataclass(frozen=True, slots=True)
class Emulated:
    """A plan and the time of its emulated step."""

    model: str
    config: str
    whose: tuple[str, ...]
    """Planners with this plan: `DAPPLE`, `compatible`, `modern`."""
    plan: Plan
    emulated_s: float
    """Emulated step, scaled back to seconds on the cluster."""


def emulated(
    rows: Iterable[Strategy], *, pass_s: float = PASS_S, tell: Callable[[str], None] = lambda _line: None
) -> list[Emulated]:
    """Run every plan of `rows`, one after the other, with one process per device.

    All times are scaled so that the median pass takes `pass_s`. `tell` is called with a line for each plan, in the
    process of rank 0. Raises RunError if a process is lost.
    """
    from hpgo.runtime.failure_detection import Limits
    from hpgo.runtime.launch import run_here

    plans: list[tuple[str, str, list[str], Plan, Program]] = []
    for row in rows:
        theirs = row.compatible.priced if row.compatible else None
        begin = len(plans)
        for who, plan in (("DAPPLE", row.published_priced), ("compatible", theirs), ("modern", row.modern)):
            if plan is None:
                continue
            program = plan.program()
            known = next((one for one in plans[begin:] if one[-1] == program), None)
            if known is None:
                plans.append((row.question.model, row.config, [who], plan, program))
            else:
                known[2].append(who)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "emulated.json"

        def work() -> None:
            found = []
            for model, config, whose, plan, program in plans:
                found.append(_step_s(program, pass_s))
                if os.environ["RANK"] == "0":
                    error = 100 * (found[-1] / plan.step_s - 1)
                    tell(f"{model} on {config}, {', '.join(whose)}: {found[-1]:.4g} s, {error:+.2f} %")
            if os.environ["RANK"] == "0":
                file.write_text(json.dumps(found), encoding="ascii")

        run_here(max(one[-1].world_size for one in plans), work, Limits(silence_s=_SILENCE_S))
        steps_s = json.loads(file.read_text(encoding="ascii"))
    return [
        Emulated(model, config, tuple(whose), plan, step_s)
        for (model, config, whose, plan, _), step_s in zip(plans, steps_s, strict=True)
    ]


def _step_s(program: Program, pass_s: float) -> float:
    """Run one rank of a plan, and return the median of all steps but the first."""
    import numpy as np

    from hpgo.runtime import Emulation

    predicted = simulate(program)
    scale = pass_s / float(np.median(predicted.end_s - predicted.start_s))
    with Emulation(program, scale=scale) as emulation:
        steps_s = sorted([emulation.step() for _ in range(_STEPS)][1:])
    return steps_s[(len(steps_s) - 1) // 2]
