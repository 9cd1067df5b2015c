"""Questions that no plan answers: how fast the planner says so, and whether it is certain.

    python benches/infeasible.py run --seeds 0-299 --json FILE    # one row a question, in one process
    python benches/infeasible.py table FILE ...                   # one column a file

Each question is one of `questions.py` whose devices have less memory: a random share, from 2 % to 100 %, of what would
hold the weights, gradients and optimizer states of the whole model once. Questions with a plan are left out.
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
from questions import Question, question

import hpgo
from hpgo.base.tables import markdown

FAST_S = 0.1
"""Time within which a question without a plan should be answered."""
LIMIT_S = 30.0


def short_of_memory(seed: int) -> Question:
    """Return the question of `seed` with less memory on every device."""
    asked = question(seed)
    dice = Random(f"memory {seed}")  # noqa: S311 -- questions, not secrets
    states_bytes = 4 * sum(layer.parameter_bytes for layer in asked.profile.layers)
    share = 0.02 * 50 ** dice.random()
    largest = max(machine.device.memory_bytes for machine in asked.cluster.machines)
    factor = share * states_bytes / asked.cluster.devices / largest * dice.choice((1, 4, asked.cluster.devices))
    machines = tuple(
        replace(machine, device=replace(machine.device, memory_bytes=factor * machine.device.memory_bytes))
        for machine in asked.cluster.machines
    )
    return replace(asked, cluster=replace(asked.cluster, machines=machines))


def row(seed: int) -> dict[str, Any] | None:
    """Ask one question. Return its answer and the time that it took, or None if there is a plan."""
    asked = short_of_memory(seed)
    started_s = time.monotonic()
    try:
        hpgo.plan(asked.profile, asked.cluster, deadline_s=LIMIT_S, **asked.options)
    except hpgo.InfeasibleError as error:
        took_s = time.monotonic() - started_s
        return {"seed": seed, "wall_s": round(took_s, 4), "certain": error.message.startswith("no plan fits"),
                "message": error.message, "hint": error.hint}  # fmt: skip
    except hpgo.HpgoError:
        return {"seed": seed, "wall_s": LIMIT_S, "certain": False, "message": "no answer", "hint": ""}
    return None


def summary(rows: list[dict[str, Any]]) -> list[str]:
    """Return the figures of one file, for a column of the table."""
    times = sorted(each["wall_s"] for each in rows)
    return [
        str(len(rows)),
        f"{100 * sum(each['certain'] for each in rows) / len(rows):.0f} %",
        f"{100 * sum(each['wall_s'] <= FAST_S for each in rows) / len(rows):.0f} %",
        *(f"{times[int(share * (len(times) - 1))]:.3f} s" for share in (0.5, 0.95, 1.0)),
    ]


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
    names = ["questions without a plan", "certain", f"answered within {FAST_S:g} s", "median", "95 %", "longest"]
    columns = [summary([json.loads(line) for line in path.read_text().splitlines()]) for path in options.files]
    print(markdown(["", *(path.stem for path in options.files)], list(zip(names, *columns, strict=True))))


if __name__ == "__main__":
    main()
