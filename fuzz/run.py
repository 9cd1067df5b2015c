"""Runs the targets one after the other, and prints what each reached as a row of a table.

    python fuzz/run.py SECONDS RUNS [TARGET …] [-- OPTION …]

Each ends after so many seconds or runs, whichever comes first, and what it found stays in `fuzz/corpus/`. Options are
those of a target (see `guided.py`). Exits with 1, and the fault, at the first target that finds one.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

TARGETS = (
    "timelines", "npz", "schedules", "plans", "pipeedge", "pipeedge_merge", "profiles", "galvatron_metis",
    "onnx_files", "tensors", "configurations",
)  # fmt: skip
_HEAD = ("target", "executions", "seconds", "per second", "edges", "features")


def main(seconds: str, runs: str, *more: str) -> None:
    """Runs the targets that are named, or all."""
    at = more.index("--") if "--" in more else len(more)
    print("| " + " | ".join(_HEAD) + " |\n" + "|---" * len(_HEAD) + "|")
    for target in more[:at] or TARGETS:
        path = Path(__file__).with_name(f"{target}.py")
        limits = (f"-max_total_time={seconds}", f"-runs={runs}")
        done = subprocess.run(
            [sys.executable, path, *more[at + 1 :], *limits], capture_output=True, text=True, check=False
        )
        if done.returncode:
            sys.exit(f"{done.stdout}\n{done.stderr[-3000:]}\n`{target}` found a fault")
        found = re.search(r"DONE +cov: (\d+) ft: (\d+)[^$]*Done (\d+) runs in (\d+) second", done.stderr)
        if found is None:
            sys.exit(f"{done.stderr[-5000:]}\n`{target}` did not end as libFuzzer does")
        edges, features, executions, took_s = map(int, found.groups())
        row = (target, executions, took_s, executions // max(took_s, 1), edges, features)
        print("| " + " | ".join(f"{cell:,}" if isinstance(cell, int) else cell for cell in row) + " |", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
