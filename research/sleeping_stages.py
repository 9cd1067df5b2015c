"""Run one step in 1, 2, 4 and 8 stages by processes that sleep instead of computing.

    python research/sleeping_stages.py [research/variants.md]

The order is that of the variants `staggered` and `staggered-8`: 16 micro-batches in waves. All stages take equal times.
Processes that sleep don't compete for cores, so the measured ratios approach the schedule's on any number of cores.
This takes two minutes.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from engine_variants import staggered
from pages import tell

import hpgo
from hpgo.base.units import format_seconds
from hpgo.runtime import Emulation
from hpgo.runtime.failure_detection import Limits
from hpgo.runtime.launch import run_here
from hpgo.runtime.rendezvous import place

CASES = ((1, 1), (2, 2), (4, 4), (8, 4), (8, 8))
"""Numbers of stages and processes. `staggered-8` has eight stages on four processes."""
MICRO_BATCHES = 16
FORWARD_S, BACKWARD_S = 0.32, 0.64
"""Times of a micro-batch through the whole model. A pass of the shortest stage then takes 40 ms, much longer than a
sleeping process takes to wake up."""


def program_of(stages: int, processes: int) -> hpgo.Program:
    """Return the program of one case.

    >>> program_of(8, 4).for_rank(1).stages[1].layers
    ('5',)
    """
    costs = hpgo.Costs(forward_s=FORWARD_S / stages, backward_s=BACKWARD_S / stages)
    return hpgo.program(
        staggered(stages, processes, MICRO_BATCHES),
        [([str(stage)], [stage % processes]) for stage in range(stages)],
        pipeline_micro_batch_size=1,
        global_batch_size=MICRO_BATCHES,
        costs=costs,
    )


def emulated_s(program: hpgo.Program) -> float:
    """Return the time of the second step. The first one warms up."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "step"

        def work() -> None:
            with Emulation(program) as emulation:
                steps_s = [emulation.step() for _ in range(2)]
            if place()[0] == 0:
                file.write_text(str(steps_s[-1]), encoding="ascii")

        run_here(program.world_size, work, Limits(silence_s=30))
        return float(file.read_text(encoding="ascii"))


def table() -> str:
    """Return the rows of all cases as Markdown."""
    rows = ["| stages | processes | schedule | ratio | measured | ratio |", "|---:|---:|---:|---:|---:|---:|"]
    first: tuple[float, float] | None = None
    for stages, processes in CASES:
        program = program_of(stages, processes)
        found = hpgo.simulate(program).makespan_s, emulated_s(program)
        first = first or found
        cells = [
            cell
            for value, one in zip(found, first, strict=True)
            for cell in (format_seconds(value), f"{value / one:.3f}")
        ]
        rows.append(f"| {stages} | {processes} | {' | '.join(cells)} |")
        print(rows[-1], flush=True)
    return "\n".join(rows)


if __name__ == "__main__":
    tell("sleeping", table, __doc__)
