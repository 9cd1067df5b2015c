"""Measure `hpgo.plan_llm` on a table of questions, with the number of configurations of each.

    python research/llm.py                            # prints the table
    python research/llm.py --write research/benchmark-tables.md # puts it between the page's marks
    python research/llm.py --fit                      # prints the time of `hpgo.fit_platform` for 3, 8 and 32 steps

Seconds are of one processor, the least of several searches in one process, imports done; searches use no more than one.
"""

from __future__ import annotations

import argparse
import os
import time
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hpgo

if TYPE_CHECKING:
    from collections.abc import Iterator

QUESTIONS = (
    ("llama-3-8b", "h100:8", 256, 8192),
    ("llama-3-70b", "h100:8", 256, 8192),
    ("llama-3-70b", "h100:32", 1024, 8192),
    ("gpt-3-175b", "a100:128", 1536, 2048),
    ("llama-3.1-405b", "h100:128", 1024, 8192),
    ("deepseek-v3", "h100:128", 8192, 4096),
    ("llama-3.1-405b", "h100:2048", 2048, 8192),
)
"""Model, cluster, sequences of a step, tokens of a sequence."""
TRIES = 3
MARKS = ("<!-- ways -->\n", "<!-- /ways -->\n")


def row(model: str, cluster: str, batch: int, seq: int) -> str:
    """Return the table row of one question."""
    where = hpgo.Cluster.preset(cluster)
    min_s = float("inf")
    for _ in range(TRIES):
        start_s = time.process_time()
        found = hpgo.plan_llm(model, where, global_batch_size=batch, seq_length=seq)
        min_s = min(min_s, time.process_time() - start_s)
    counts = f"{found.configurations:,} | {found.bounded:,} | {found.simulated:,}"
    return f"| {model}, {batch:,} × {seq:,} | {cluster} | {where.devices:,} | {counts} | {min_s:.2f} s |"


def fit_rows() -> Iterator[str]:
    """Yield a table row for each number of measured steps that a platform is fitted to."""
    where = hpgo.Cluster.preset("h100:2")
    steps = []
    for at, (tp, seq, size) in enumerate(product((1, 2, 4, 8), (2048, 4096, 8192, 16384), (1, 2))):
        asked: dict[str, Any] = {"global_batch_size": 64, "seq_length": seq, "tp": tp, "micro_batch_size": size}
        one = hpgo.estimate_llm("llama-3-8b", where, pp=2 if tp < 8 else 1, **asked)
        # Steps that deviate by 3 % in turn, on a platform that is 10 % slower.
        steps.append(hpgo.MeasuredStep.of("llama-3-8b", where, one, one.step_s * 1.1 * (0.97, 1.0, 1.03)[at % 3]))
    # In this order a few steps differ in all settings.
    mixed = sorted(steps, key=lambda step: step.predicted.seq_length * 7 % 13)
    for count in (3, 8, 32):
        min_s = float("inf")
        for _ in range(TRIES):
            start_s = time.process_time()
            hpgo.fit_platform(mixed[:count])
            min_s = min(min_s, time.process_time() - start_s)
        yield f"| `hpgo.fit_platform`, {count} steps | {min_s:.2f} s |"


def main() -> None:
    """Print the table, or write it into a page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", type=Path, help="page to put the table into, between its marks")
    parser.add_argument("--fit", action="store_true", help="time fits of a platform instead")
    given = parser.parse_args()
    if given.fit:
        print("| fit | time |\n|---|---|", *fit_rows(), sep="\n")
        return
    page = given.write
    lines = [
        "| transformer, batch | cluster | GPUs | ways | bounded one by one | simulated | time |",
        "|---|---|---|---|---|---|---|",
    ]
    for question in QUESTIONS:
        lines.append(row(*question))
        print(lines[-1], flush=True)
    print(f"{os.getloadavg()[1]:.1f} processes wanted a processor, on average of the last five minutes")
    if page is not None:
        before, rest = page.read_text(encoding="utf-8").split(MARKS[0])
        after = rest.split(MARKS[1])[1]
        table = "\n".join(lines) + "\n"
        page.write_text(before + MARKS[0] + table + MARKS[1] + after, encoding="utf-8")


if __name__ == "__main__":
    main()
