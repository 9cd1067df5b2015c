"""Compare emulated with predicted steps in wall time.

    python research/emulation.py [--write research/benchmark-tables.md] [--passes 20]

Sixteen processes emulate plans of built-in models under several schedules, slowed down until the median pass takes 100
ms, and 20 ms. This takes 15 minutes on an idle machine. `--write` writes the table between the markers of a page.
`--passes` sets a single length of passes.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from pathlib import Path

import numpy as np

import hpgo
from hpgo.runtime import Emulation
from hpgo.runtime.failure_detection import Limits
from hpgo.runtime.launch import run_here

CLUSTER = hpgo.Cluster.preset("dapple-c")
MODELS = {"vgg-19": 2048, "bert-48": 32, "xlnet-36": 32, "amoebanet-36": 32, "gnmt-16": 1024}  # global batch
SCHEDULES = ("gpipe", "1f1b", "eager_1f1b", "zb_h1", "zb_v", "interleaved", "hanayo")
PASSES_S = (0.1, 0.02)


def programs() -> dict[tuple[str, str], hpgo.Program]:
    """Return the program of the best plan for each model and schedule."""
    return {
        (model, schedule): hpgo.plan(
            hpgo.read_profile(model), CLUSTER, global_batch_size=samples, schedule=schedule
        ).program()
        for model, samples in MODELS.items()
        for schedule in SCHEDULES
    }


def errors(chosen: dict[tuple[str, str], hpgo.Program], pass_s: float) -> dict[tuple[str, str], float]:
    """Run one rank and return the relative error of the second of two steps for each program."""
    found = {}
    for (model, schedule), program in chosen.items():
        predicted = hpgo.simulate(program)
        scale = pass_s / float(np.median(predicted.end_s - predicted.start_s))
        with Emulation(program, scale=scale) as emulation:
            # The first step warms up, so only the second one counts.
            measured_s = [emulation.step() for _ in range(2)]
            found[model, schedule] = measured_s[-1] / predicted.makespan_s - 1
            if emulation.rank == 0:
                here_s, error = predicted.makespan_s * scale, found[model, schedule]
                passes = f"passes of {1e3 * pass_s:3.0f} ms  step {here_s:7.3f} s  {100 * error:+6.2f} %"
                print(f"{model:13} {schedule:12} {passes}  load {os.getloadavg()[0]:.1f}", flush=True)
    return found


def table(found: dict[float, dict[tuple[str, str], float]]) -> list[str]:
    """Return a Markdown table of errors by model and schedule, with the median and the largest error below it."""
    lengths = " and ".join(f"{1e3 * pass_s:.0f} ms" for pass_s in found)
    rows = [
        f"| passes of {lengths} | {' | '.join(f'`{schedule}`' for schedule in SCHEDULES)} |",
        f"|---|{'---:|' * len(SCHEDULES)}",
    ]
    for model in MODELS:
        cells = (
            ", ".join(f"{100 * those[model, schedule]:.2f} %" for those in found.values()) for schedule in SCHEDULES
        )
        rows.append(f"| {model} | {' | '.join(cells)} |")
    rows.append("")
    for pass_s, those in found.items():
        worst = max(those, key=lambda which: abs(those[which]))
        rows.append(
            f"Passes of {1e3 * pass_s:.0f} ms: median {100 * statistics.median(map(abs, those.values())):.2f} %,"
            f" largest {100 * those[worst]:.2f} % ({worst[0]} under `{worst[1]}`), of {len(those)} plans.\\"
        )
    rows[-1] = rows[-1].removesuffix("\\")
    return rows


def work(chosen: dict[tuple[str, str], hpgo.Program], passes_s: list[float], page: Path | None) -> None:
    """Run one rank. Rank 0 prints the table and writes the page."""
    load = os.getloadavg()[0]
    rows = table({pass_s: errors(chosen, pass_s) for pass_s in passes_s})
    rows.append(f"\nThe load was {load:.1f} when it began, on {os.cpu_count()} cores.")
    if os.environ["RANK"] != "0":
        return
    print("\n".join(rows))
    if page is not None:
        before, mark, rest = page.read_text(encoding="utf-8").partition("<!-- emulation -->\n")
        _, end, after = rest.partition("<!-- emulation end -->")
        page.write_text(before + mark + "\n".join(rows) + "\n" + end + after, encoding="utf-8")


def main() -> None:
    """Plan, start the ranks and wait for them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", type=Path, metavar="PAGE")
    parser.add_argument("--passes", type=float, metavar="MS", help="single length of passes in milliseconds")
    asked = parser.parse_args()
    passes_s = list(PASSES_S) if asked.passes is None else [asked.passes / 1e3]
    chosen = programs()
    run_here(CLUSTER.devices, lambda: work(chosen, passes_s, asked.write), Limits(silence_s=30))


if __name__ == "__main__":
    sys.exit(main())
