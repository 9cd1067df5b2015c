"""Measure step, gap and search time of the planner on the hard questions of `questions.py`.

    python research/hard.py run --seeds 0-199 --json FILE      # one process per question; continues FILE
    python research/hard.py run --names                        # the named questions
    python research/hard.py anneal --seeds 0-199:4 --seconds 60 --json FILE
    python research/hard.py known FILE ...                     # adds better plans to research/hard/known.jsonl
    python research/hard.py table BEFORE AFTER                 # compares two such files
    python research/hard.py table BEFORE AFTER research/benchmark-tables.md

A row of a file is one question, written by `row` and `asked`. A search is interrupted, like by Ctrl-C, after 20 s of
processor time, which is at least 10 s on two cores. It then counts as slow. Wall time would depend on other processes.
"""

from __future__ import annotations

import argparse
import json
import math
import resource
import signal
import subprocess
import sys
import time
from itertools import groupby
from pathlib import Path
from typing import Any

from anneal import Annealing
from pages import fill
from questions import NAMED, SEEDS, Question, named

import hpgo
from hpgo.base.tables import markdown

Row = dict[str, Any]

RESULTS = Path(__file__).parent / "hard"
KNOWN = RESULTS / "known.jsonl"
LIMIT_S = 20.0
"""Processor time in seconds after which a search is interrupted."""
NEAR = 1.005
"""Largest ratio to the step of the best known plan at which that plan counts as found."""


def ranges(numbers: list[int]) -> str:
    """Return ascending numbers as text, with runs as `first-last`.

    >>> ranges([0, 1, 2, 5, 7, 8])
    '0-2,5,7-8'
    """
    runs = [[number for _, number in run] for _, run in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])]
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def numbers_of(text: str) -> list[int]:
    """Return the numbers in a text of `ranges`.

    >>> numbers_of("0-2,5,7-8")
    [0, 1, 2, 5, 7, 8]
    """
    ends = [part.split("-") for part in text.split(",")]
    return [number for end in ends for number in range(int(end[0]), int(end[-1]) + 1)]


def written(question: Question, plan: hpgo.Plan) -> Row:
    """Return what is needed to evaluate the plan again: layers by their place in the profile, and devices."""
    place = {layer.id: index for index, layer in enumerate(question.profile.layers)}
    stages = [
        [ranges(sorted(place[layer] for layer in stage.layers)), ranges(sorted(stage.devices))] for stage in plan.stages
    ]
    return {"pipeline_micro_batch_size": plan.pipeline_micro_batch_size, "recompute": plan.recompute, "stages": stages}


def evaluated(question: Question, plan: Row) -> hpgo.Plan:
    """Evaluate the plan in a row of `written`."""
    layers = question.profile.layers
    stages = [([layers[at].id for at in numbers_of(held)], numbers_of(devices)) for held, devices in plan["stages"]]
    options = dict(question.options) | {
        "pipeline_micro_batch_size": plan["pipeline_micro_batch_size"],
        "recompute": plan["recompute"],
    }
    return hpgo.evaluate(question.profile, question.cluster, stages, **options)


def row(name: str, limit_s: float) -> Row:
    """Return one question and its answer. Times are seconds, and `gap` is a share. Uses the timer of CPU time.

    `bound_over` is `compact` in older rows, whose bound holds for compact placements only.
    """
    question = named(name)
    found: Row = {
        "question": name,
        "model": question.profile.name,
        "layers": len(question.profile.layers),
        "branches": question.branches,
        "cluster": question.cluster.name,
        "kinds": len({node.device for node in question.cluster.nodes}),
        "batch": question.options["global_batch_size"],
    }
    # A timer of processor time ends the search like Ctrl-C, independent of other load on the machine.
    signal.signal(signal.SIGPROF, signal.default_int_handler)
    signal.setitimer(signal.ITIMER_PROF, limit_s)
    started_s = time.monotonic()
    try:
        plan = hpgo.plan(question.profile, question.cluster, **question.options)
    except hpgo.errors.HpgoError as error:  # nothing fits
        return found | {"error": str(error), "wall_s": round(time.monotonic() - started_s, 2)}
    except KeyboardInterrupt:
        return found | {"error": "no plan in time", "stop_reason": "interrupt"}
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    return found | {
        "wall_s": round(time.monotonic() - started_s, 2),
        "step_s": plan.step_s,
        "bound_s": plan.lower_bound_s,
        "gap": plan.optimality_gap,
        "node_aligned_bound_s": plan.node_aligned_bound_s,
        "placements": plan.placements,
        "bound_over": "all",
        "cuts": plan.cuts,
        "stop_reason": plan.stop_reason,
        "devices": plan.devices,
        "replicas": "-".join(str(stage.replicas) for stage in plan.stages),
        "limit": plan.limit,
        "plan": written(question, plan),
    }


def asked(name: str, limit_s: float) -> Row:
    """Return `row` of a separate process. Kills the process after ten times `limit_s` of wall time.

    `cpu_s` is the processor time of the process, including its start.
    """
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    started_s, max_s = time.monotonic(), 10 * limit_s
    command = [sys.executable, __file__, "row", name, "--limit-s", str(limit_s)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=max_s, check=False)  # noqa: S603
    except subprocess.TimeoutExpired:
        found: Row = {"question": name, "error": f"still ran after {max_s:g} s", "stop_reason": "killed"}
    else:
        try:
            found = json.loads(done.stdout)
        except ValueError:
            found = {"question": name, "error": done.stderr.strip().rpartition("\n")[2] or f"exit {done.returncode}"}
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"wall_s": round(time.monotonic() - started_s, 2)} | found | {"cpu_s": round(cpu_s, 2)}


def read(file: Path) -> dict[str, Row]:
    """Return the rows of a file by question; empty if there is no file."""
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    return {found["question"]: found for found in map(json.loads, lines)}


def seeds_of(text: str) -> list[str]:
    """Return the names of questions in `0-199`, `3,7` or `0-199:4` (every fourth)."""
    which, _, step = text.partition(":")
    return [str(seed) for seed in numbers_of(which)[:: int(step or 1)]]


def run(names: list[str], limit_s: float, file: Path | None) -> None:
    """Ask each question that `file` lacks, print a line for it, and append it to `file`."""
    have = read(file) if file else {}
    for name in names:
        if name in have:
            continue
        found = asked(name, limit_s)
        print(line(found), flush=True)
        # Append after each question, so that an interrupted run can be continued.
        if file:
            with file.open("a", encoding="utf-8") as rows:
                rows.write(json.dumps(found) + "\n")


def line(found: Row) -> str:
    """Return the line of progress for a row."""
    head = f"{found['question']:>16} {found.get('model', ''):>10} {found.get('layers', '')!s:>4} "
    head += f"{found.get('cluster', ''):>6} {found['wall_s']:6.1f} s {found['cpu_s']:6.1f} cpu s  "
    if "error" in found:
        return f"{head}{found['error']}".partition("\n")[0]
    gap = f"{100 * found['gap']:.2f} %"
    return head + f"{found['step_s']:.5g} s, {gap}, {found['placements']}, {found['stop_reason']}, {found['replicas']}"


def anneal(names: list[str], seconds: float, file: Path | None) -> None:
    """Anneal each question for some seconds of processor time, and append the best plans to `file`."""
    have = read(file) if file else {}
    for name in names:
        if name in have:
            continue
        annealing = Annealing(named(name))
        annealing.run(seconds)
        plan = annealing.best
        print(
            f"{name:>16} {plan.step_s if plan else math.inf:.5g} s, {annealing.evaluated} plans evaluated", flush=True
        )
        if file and plan:
            found = {"question": name, "step_s": plan.step_s, "seconds": seconds, "priced": annealing.evaluated}
            with file.open("a", encoding="utf-8") as rows:
                rows.write(json.dumps(found | {"plan": written(annealing.question, plan)}) + "\n")


def known(files: list[Path]) -> None:
    """Keep the best plans of `KNOWN` and `files` in `KNOWN`, if they fit and `hpgo.evaluate` confirms their step."""
    best: dict[str, Row] = {}
    for source, file in [("", KNOWN), *((file.stem, file) for file in files)]:
        for name, found in read(file).items():
            min_s = best[name]["step_s"] if name in best else math.inf
            if "plan" not in found or found["step_s"] >= min_s:
                continue
            # The file may be older than the cost model, so evaluate its plan again.
            plan = evaluated(named(name), found["plan"])
            if plan.fits and plan.step_s < min_s:
                row = {"question": name, "step_s": plan.step_s, "from": source or found["from"], "plan": found["plan"]}
                best[name] = row
                print(f"{name}: {plan.step_s:.6g} s from {row['from']}")
    names = sorted(best, key=lambda name: (not name.isdigit(), int(name) if name.isdigit() else 0, name))
    KNOWN.write_text("".join(json.dumps(best[name]) + "\n" for name in names), encoding="utf-8")


def slow(found: Row) -> bool:
    """Return whether the search would take more than 10 s on two idle cores."""
    return found.get("stop_reason") in {"interrupt", "killed"} or found["cpu_s"] > LIMIT_S


def percentile(values: list[float], share: float) -> float:
    """Return the smallest value that at least this share of all values does not exceed."""
    return sorted(values)[max(0, -int(-share * len(values) // 1) - 1)]


def percent(share: float) -> str:
    """Return a share as the tables show it."""
    return f"{100 * share:.3g} %"


def gap(found: Row) -> str:
    """Return the gap of a row as text, with the placements for which it holds."""
    return percent(found["gap"]) + ("" if found["bound_over"] == "all" else " among compact placements")


def hard(found: Row, best: Row) -> bool:
    """Return whether a question is slow, has no plan, or a step over 5 % above its bound or the best known plan."""
    return "gap" not in found or slow(found) or found["gap"] > 0.05 or found["step_s"] > 1.05 * best["step_s"]


def summary(rows: dict[str, Row], best: dict[str, Row]) -> list[str]:
    """Return one column of the table, which summarizes all rows of a file."""
    gaps = [found["gap"] for found in rows.values() if "gap" in found]
    near = [found["step_s"] <= NEAR * best[name]["step_s"] for name, found in rows.items() if "step_s" in found]
    return [
        str(len(rows)),
        str(sum(found.get("branches", False) for found in rows.values())),
        str(len(rows) - len(gaps)),
        str(sum(map(slow, rows.values()))),
        str(sum(hard(found, best.get(name, found)) for name, found in rows.items())),
        *(percent(percentile(gaps, share)) for share in (0.5, 0.8, 0.95)),
        percent(max(gaps)),
        str(sum(found.get("bound_over") == "all" for found in rows.values())),
        f"{sum(near)} of {len(near)}",
    ]


LABELS = (
    "questions",
    "with branches",
    "without a plan",
    "slow",
    "slow, or without a plan, or 5 % over the bound or the best known plan",
    "gap: median",
    "gap: 80 % are at most",
    "gap: 95 % are at most",
    "gap: largest",
    "bound holds over all placements",
    f"within {100 * (NEAR - 1):g} % of the best known plan",
)


def compared(before: dict[str, Row], after: dict[str, Row], best: dict[str, Row]) -> list[str]:
    """Return a table that summarizes the seeds of both files, and the first one on common seeds if it has others."""
    first, second = ({name: found for name, found in rows.items() if name.isdigit()} for rows in (before, after))
    both = {name: found for name, found in first.items() if name in second}
    columns = {"before": first, "before, on the questions asked after": both, "after": second}
    if len(both) in {0, len(first)}:
        del columns["before, on the questions asked after"]
    cells = [summary(rows, best) if rows else ["-"] * len(LABELS) for rows in columns.values()]
    return markdown(["", *columns], [list(row) for row in zip(LABELS, *cells, strict=True)])


def cases(before: dict[str, Row], after: dict[str, Row], best: dict[str, Row]) -> list[str]:
    """Return a table of the named questions: step, gap and processor time before and after."""

    def cell(found: Row | None) -> str:
        if found is None or "step_s" not in found:
            return "-" if found is None else f"no plan, {found['cpu_s']:.1f} s"
        return f"{found['step_s']:.4g} s, {gap(found)}, {found['cpu_s']:.1f} s"

    rows = [
        [name, cell(before.get(name)), cell(after.get(name)), f"{best[name]['step_s']:.4g} s" if name in best else "-"]
        for name in NAMED
    ]
    return markdown(["", "before: step, gap, processor time", "after", "best known"], rows)


def misses(rows: dict[str, Row], best: dict[str, Row]) -> list[str]:
    """Return a table of questions that are slow, lack a plan, have a gap over 10 %, or miss the best known plan."""
    lines = []
    for name, found in rows.items():
        lacks = ["slow"] if slow(found) else []
        if "step_s" not in found:
            lacks.append("no plan")
        else:
            if found["gap"] > 0.1:
                lacks.append(f"gap {gap(found)}")
            if found["step_s"] > NEAR * best[name]["step_s"]:
                lacks.append(f"{percent(found['step_s'] / best[name]['step_s'] - 1)} over the best known")
        if lacks:
            what = f"{found.get('model', '')} {found.get('layers', '')}, {found.get('cluster', '')}"
            limit = found.get("limit") or found.get("error", "")
            lines.append([name, what, "; ".join(lacks), limit.partition("\n")[0]])
    return markdown(["question", "what", "lacks", "what limits its plan"], lines) if lines else ["None."]


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for command in ("run", "anneal"):
        sub = commands.add_parser(command)
        sub.add_argument("--seeds", default=f"{SEEDS[0]}-{SEEDS[-1]}", help="like 0-199, 3,7 or 0-199:4")
        sub.add_argument("--names", nargs="*", help="instead of seeds: questions of NAMED, all if none is given")
        sub.add_argument("--json", type=Path, help="rows are added to this file")
        if command == "run":
            sub.add_argument("--limit-s", type=float, default=LIMIT_S, help="processor time of each search")
        else:
            sub.add_argument("--seconds", type=float, default=60.0, help="processor time for each question")
    one = commands.add_parser("row")
    one.add_argument("name")
    one.add_argument("--limit-s", type=float, default=LIMIT_S)
    commands.add_parser("known").add_argument("files", type=Path, nargs="+")
    table = commands.add_parser("table")
    table.add_argument("before", type=Path)
    table.add_argument("after", type=Path)
    table.add_argument("document", type=Path, nargs="?", help="filled in between its markers")
    given = parser.parse_args()
    if given.command == "row":
        print(json.dumps(row(given.name, given.limit_s)))
    elif given.command == "known":
        known(given.files)
    elif given.command == "table":
        both = read(given.before), read(given.after), read(KNOWN)
        made = {
            "hard": "\n".join(compared(*both)),
            "hard-named": "\n".join(cases(*both)),
            "hard-misses": "\n".join(misses(both[1] or both[0], both[2])),
        }
        if given.document:
            text = given.document.read_text(encoding="utf-8")
            given.document.write_text(fill(text, made), encoding="utf-8")
        else:
            print("\n\n".join(made.values()))
    else:
        names = seeds_of(given.seeds) if given.names is None else given.names or list(NAMED)
        if given.command == "run":
            run(names, given.limit_s, given.json)
        else:
            anneal(names, given.seconds, given.json)


if __name__ == "__main__":
    main()
