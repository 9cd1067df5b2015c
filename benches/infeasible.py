"""Questions that no plan answers: how fast the planner says so, and whether it is certain.

    python benches/infeasible.py run --seeds 0-299 --json FILE    # one row a question, in one process
    python benches/infeasible.py table FILE ...                   # one column a file

Each question is one of `questions.py` whose devices have less memory: from a tenth of what the fullest device of a
straight pipeline with up to 32 stages holds, to all of it. Questions with a plan are left out. Times are wall time and
processor time. The latter says more on a machine with other work.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

from hard import numbers_of
from questions import Question, needed_bytes, question

import hpgo
from hpgo.base.tables import markdown

FAST_S = 0.1
"""Time within which a question without a plan should be answered."""
LIMIT_S = 30.0


def short_of_memory(seed: int) -> Question:
    """Return the question of `seed` with less memory on every device."""
    asked = question(seed)
    dice = Random(f"memory {seed}")  # noqa: S311 -- questions, not secrets
    enough_bytes = needed_bytes(asked.profile, min(32, asked.cluster.devices))
    largest_bytes = max(machine.device.memory_bytes for machine in asked.cluster.machines)
    factor = enough_bytes / largest_bytes * 0.1 ** dice.random()
    machines = tuple(
        replace(machine, device=replace(machine.device, memory_bytes=factor * machine.device.memory_bytes))
        for machine in asked.cluster.machines
    )
    return replace(asked, cluster=replace(asked.cluster, machines=machines))


def row(seed: int) -> dict[str, Any] | None:
    """Ask one question. Return its answer and the time that it took, or None if there is a plan."""
    asked = short_of_memory(seed)
    started_s, busy_s = time.monotonic(), time.process_time()
    try:
        hpgo.plan(asked.profile, asked.cluster, deadline_s=LIMIT_S, **asked.options)
    except hpgo.InfeasibleError as error:
        wall_s, busy_s = time.monotonic() - started_s, time.process_time() - busy_s
        certain = error.message.startswith("no plan fits")
        answer = {"certain": certain, "message": error.message, "hint": error.hint}
        return {"seed": seed, "wall_s": round(wall_s, 4), "busy_s": round(busy_s, 4), **answer}
    except hpgo.HpgoError as error:  # the time was up
        return {"seed": seed, "wall_s": LIMIT_S, "busy_s": LIMIT_S, "certain": False, "message": error.message}
    return None


def summary(rows: list[dict[str, Any]]) -> list[str]:
    """Return the figures of one file, for a column of the table."""
    figures = [str(len(rows)), f"{100 * sum(each['certain'] for each in rows) / len(rows):.0f} %"]
    for clock in ("wall_s", "busy_s"):
        times = sorted(each[clock] for each in rows)
        figures.append(f"{100 * sum(time_s <= FAST_S for time_s in times) / len(times):.0f} %")
        figures += [f"{times[int(share * (len(times) - 1))]:.3f} s" for share in (0.5, 0.95, 1.0)]
    return figures


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run")
    run.add_argument("--seeds", default="0-299")
    run.add_argument("--json", type=Path, required=True)
    table = commands.add_parser("table")
    table.add_argument("files", type=Path, nargs="+")
    options = parser.parse_args()
    if options.command == "run":
        with options.json.open("a") as file:
            for seed in numbers_of(options.seeds):
                if (found := row(seed)) is not None:
                    print(json.dumps(found), file=file, flush=True)
        return
    names = ["questions without a plan", "said to fit nowhere"]
    for clock in ("wall", "processor"):
        names += [
            f"{clock} time up to {FAST_S:g} s",
            *(f"{clock} time, {rank}" for rank in ("median", "95 %", "longest")),
        ]
    columns = [summary([json.loads(line) for line in path.read_text().splitlines()]) for path in options.files]
    print("\n".join(markdown(["", *(path.stem for path in options.files)], list(zip(names, *columns, strict=True)))))


if __name__ == "__main__":
    main()
