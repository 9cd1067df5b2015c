"""Sixteen ranks that emulate each program in a folder: `emulated_ranks.py FOLDER` leaves its timelines there.

Of `held.program` rank 5 is held up for a third of a second at the begin of the second step.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch.distributed as dist

import hpgo
from hpgo.runtime import Emulation
from hpgo.runtime.failure_detection import Limits
from hpgo.runtime.launch import run_here

RANKS, STEPS, SCALE = 16, 2, 2.0
HELD_S = 1 / 3


def run(folder: Path) -> None:
    """One rank."""
    dist.init_process_group("gloo")  # once for all programs
    for file in sorted(folder.glob("*.program")):
        with Emulation(hpgo.Program.read(file), scale=SCALE) as emulation:
            for step in range(STEPS):
                if (file.stem, emulation.rank, step) == ("held", 5, 1):
                    runs = emulation.engine.step
                    emulation.engine.step = lambda batch, runs=runs: (time.sleep(HELD_S), runs(batch))
                step_s = emulation.step()
                timeline = emulation.timeline()
                if emulation.rank == 0:
                    assert abs(timeline.makespan_s / step_s - 1) < 1e-6
                    timeline.save(folder / f"{file.stem}-{step}.timeline.json")


if __name__ == "__main__":
    run_here(RANKS, lambda: run(Path(sys.argv[1])), Limits(silence_s=30))
