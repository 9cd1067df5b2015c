"""Four ranks on three machines, as their clocks have it: `clock_ranks.py FOLDER` leaves how wrong each is, in ns.

Clocks are 50 ms ahead or behind, and 50 ppm too fast or too slow. Between the readings ten minutes pass.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from ranks import run_ranks

from hpgo.runtime.clocks import RankClock

MACHINES = ["a", "b", "c", "c"]
AHEAD_NS = [0, 50_000_000, -50_000_000, -50_000_000]
FAST = [0.0, 50e-6, -50e-6, -50e-6]


def run(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=len(MACHINES))
    passed_ns = 0
    begin_ns = time.perf_counter_ns()

    def shown_ns(at_ns: int) -> int:
        return at_ns + AHEAD_NS[rank] + round(FAST[rank] * (at_ns - begin_ns))

    def true_ns() -> int:
        return time.perf_counter_ns() + passed_ns

    clock = RankClock(torch.device("cpu"), lambda: shown_ns(true_ns()), MACHINES[rank])
    moments = []
    clock.compare()
    for _ in range(2):
        moments.append(true_ns())
        passed_ns += 300 * 10**9
        dist.barrier()
    clock.compare()
    moments.append(true_ns())
    wrong = (clock.by_rank_0(shown_ns(moment)) - moment for moment in moments)
    (folder / f"{rank}").write_text(" ".join(map(str, wrong)))
    dist.destroy_process_group()


if __name__ == "__main__":
    run_ranks(len(MACHINES), run, Path(sys.argv[1]))
