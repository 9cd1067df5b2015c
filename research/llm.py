"""Measure `hpgo.plan_llm` on a table of questions, with the number of configurations of each.

    python research/llm.py                            # prints the table
    python research/llm.py --write research/benchmark-tables.md # puts it between the page's marks

Seconds are of one processor, the least of several searches in one process, imports done; searches use no more than one.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

import hpgo

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


def main() -> None:
    """Print the table, or write it into a page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", type=Path, help="page to put the table into, between its marks")
    page = parser.parse_args().write
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
