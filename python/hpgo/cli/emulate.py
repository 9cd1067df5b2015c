"""Command `hpgo emulate`: run a plan in processes that send its messages and sleep instead of computing."""

from __future__ import annotations

import math
from contextlib import nullcontext
from typing import TYPE_CHECKING

from hpgo.base.units import format_seconds
from hpgo.cli import steps
from hpgo.cli.command import option, takes
from hpgo.cli.processes import ProcessOptions, heartbeat_timeout, read_training, run_ranks, warn
from hpgo.cli.terminal import passing_lines
from hpgo.cli.values import steps_option

if TYPE_CHECKING:
    from hpgo.runtime.runnable import Runnable

_WAKING_S = 0.02
"""Length of a pass below which it is measured too long, because the system wakes sleeping processes late."""

_SECTIONS = {
    "Emulation": "scale steps",
    "Processes": "timeout_s heartbeat_timeout_s grace_s",
    "Output": "timeline as_json",
}


class EmulateOptions(ProcessOptions):
    """Options of `hpgo emulate`: the plan, and its slowdown."""

    scale: float = option(
        "--scale", type=float, default=1.0, show_default=True, metavar="X", help="Slow down all times by this factor."
    )
    steps: int = steps_option(3)
    # Many more ranks than cores wait for their turn before they can send a heartbeat.
    heartbeat_timeout_s: float = heartbeat_timeout("30s")


@takes(EmulateOptions, sections=_SECTIONS)
def command(options: EmulateOptions) -> None:
    """Run a plan on this machine without its model or its devices.

    One process starts per device of PLAN.json. The processes exchange real messages in the order of the plan. Instead
    of computing, they sleep for the times of the plan.

    \b
    Examples:
      hpgo emulate plan.json
      hpgo emulate plan.json --scale 10 --steps 5
      hpgo emulate plan.json --timeline emulated.timeline.json
    """
    run_ranks(
        options,
        lambda runnable: _emulate(options, runnable),
        read=lambda: read_training(options.plan),
        prepare=lambda runnable: _prepare(runnable, options.scale),
        kept="an emulation saves nothing",
    )


def _prepare(runnable: Runnable, scale: float) -> None:
    """Warn if passes are too short to sleep for. Raises ArgumentError for programs that can't be emulated."""
    import numpy as np

    from hpgo.runtime.emulation import check
    from hpgo.timing.simulation import simulate

    check(runnable.program, scale)
    step = simulate(runnable.program)
    pass_s = float(np.median(step.end_s - step.start_s))
    if 0 < pass_s * scale < _WAKING_S:
        warn(
            f"passes of {format_seconds(pass_s * scale)} will be measured too long, because processes wake up late;"
            f" use `--scale {math.ceil(_WAKING_S / pass_s)}`"
        )


def _emulate(options: EmulateOptions, runnable: Runnable) -> None:
    """Run one rank. Rank 0 prints the result."""
    from hpgo.runtime import Emulation

    program, steps_s = runnable.program, list[float]()
    with Emulation(runnable, scale=options.scale, timeout_s=options.timeout_s) as emulation:
        talks = emulation.rank == 0
        predicted = steps.predicted_step(program) if talks else None
        with passing_lines() if talks and not options.as_json else nullcontext() as tell:
            for step in range(1, options.steps + 1):
                steps_s.append(emulation.step())
                if tell is not None:
                    tell(steps.line(step, None, steps_s[-1], program.global_batch_size, predicted))
        measured = emulation.timeline(emulation.usual_step())
    if talks:
        if options.timeline is not None:
            measured.save(options.timeline)
        found = steps.compare(program, predicted, measured)
        steps.conclude({"scale": options.scale}, steps_s, found, as_json=options.as_json)
