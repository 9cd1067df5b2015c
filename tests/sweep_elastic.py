"""How long a run stands still when a machine is lost, and when it returns: `make elastic`.

Four agents of torchrun, each with one process, stand for machines. One of them, at random, is killed with its process
in the middle of a run and then started again, several times. Prints a table; `--write FILE` puts it between the marks
in that file. Exits with 1 where a loss is not that of a run that nothing happened to.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import re
import statistics
import sys
import tempfile
import time
from pathlib import Path

import elastic_models
from elastic_runs import RUN, SOON, Nodes, undisturbed

WAITS: dict[str, tuple[dict[str, int], list[str]]] = {
    "shortened": (SOON, ["--heartbeat-timeout", "4"]),
    "as they are": ({}, []),
}
PACE_S = 0.02


def trials(folder: Path, waits: str, count: int, chance: random.Random) -> tuple[list[float], list[float], list[float]]:
    """Seconds from a kill to the next step, those in which no step ended while a machine joined, and of planning."""
    elastic_models.plan(4).save(folder / "plan.json")
    (folder / "pace").write_text(str(PACE_S))
    conf, words = WAITS[waits]
    words = [*RUN, "--elastic", "--checkpoint", "saved", "--every", "3", "--losses", "losses.jsonl", *words]
    lost_s, joined_s = [], []
    with Nodes(folder, "3:4", *words, "--steps", "1000000", waits=conf) as nodes:
        nodes.start(*range(4))
        for _ in range(count):
            nodes.wait_for(lambda steps: steps != [] and steps[-1]["ranks"] == 4)
            seen = len(nodes.steps())
            nodes.wait_for(lambda steps: len(steps) > seen + 5)  # noqa: B023 -- waits here
            time.sleep(chance.uniform(0, 1))
            gone, at_s = chance.randrange(4), time.time()
            nodes.lose(gone)
            nodes.wait_for(lambda steps: steps[-1]["ranks"] == 3)
            steps = nodes.steps()
            resumed_s = next(one["ended_s"] for one in steps if one["ranks"] == 3 and one["ended_s"] > at_s)
            lost_s.append(resumed_s - at_s)
            nodes.start(gone)
            nodes.wait_for(lambda steps: steps[-1]["ranks"] == 4)
            ends_s = [one["ended_s"] for one in nodes.steps() if one["ended_s"] >= resumed_s]
            joined_s.append(max(after - before for before, after in itertools.pairwise(ends_s)))
        steps, said = nodes.steps(), nodes.said()
    (folder / "pace").unlink()
    whole = undisturbed(folder, max(one["step"] for one in steps))
    for one in steps:
        expected = whole[one["step"] - 1]
        if abs(one["loss"] - expected) > 1e-10 * abs(expected):
            sys.exit(f"the loss of step {one['step']} is {one['loss']}, and was {expected} where nothing happened")
    found = re.findall(r"planned again in ([\d.]+) (m?s),", said)
    return lost_s, joined_s, [float(text) * {"s": 1, "ms": 1e-3}[unit] for text, unit in found]


def cell(values_s: list[float]) -> str:
    return f"{statistics.median(values_s):.1f} s ({min(values_s):.1f} to {max(values_s):.1f})"


def main() -> None:
    """Loses machines, and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--write", type=Path, help="a page with `<!-- elastic -->` around its table")
    asked = parser.parse_args()
    chance = random.Random(asked.seed)
    load = os.getloadavg()[0]
    rows = [
        "| waits of torchrun | kill to the next step | stands still as it returns | planning |",
        "|---|---:|---:|---:|",
    ]
    for waits in WAITS:
        with tempfile.TemporaryDirectory() as folder:
            lost_s, joined_s, planned_s = trials(Path(folder), waits, asked.trials, chance)
        planning = f"{1e3 * statistics.median(planned_s):.1f} ms"
        rows.append(f"| {waits} | {cell(lost_s)} | {cell(joined_s)} | {planning} |")
        sys.stderr.write(rows[-1] + "\n")
    rows.append(f"\nTrials of each: {asked.trials}, on {os.cpu_count()} cores; the load was {load:.1f} at first.")
    sys.stdout.write("\n".join(rows) + "\n")
    if asked.write is not None:
        before, mark, rest = asked.write.read_text(encoding="utf-8").partition("<!-- elastic -->\n")
        _, end, after = rest.partition("<!-- elastic end -->")
        asked.write.write_text(before + mark + "\n".join(rows) + "\n" + end + after, encoding="utf-8")


if __name__ == "__main__":
    main()
