"""Run every file of checks in its environment, and print what was run on which version.

    python tests/frameworks/run.py [--write research/framework-tables.md docs/export.md]

Started by `make frameworks`, with the interpreter whose torch all environments see. A check is not run again while its
files, its environment and what it exports are the same: `.frameworks/results` holds what it found.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import os
import re
import resource
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import environments
from releases import bridge_sources, megatron_releases
from rich.console import Console
from rich.table import Table

from hpgo.base.documents import write_text
from hpgo.errors import HpgoError

HERE = Path(__file__).parent
sys.path.append(str(HERE.parents[1] / "research"))

from pages import fill

CHECKS = {
    "torch_checks": (None,),  # in the environment of whoever runs this
    "torchtitan_checks": ("torchtitan-0.3", "torchtitan-0.2"),
    "megatron_checks": ("megatron",),
    "deepspeed_checks": ("deepspeed",),
    "accelerate_checks": ("accelerate",),
    "job_checks": (None, "torchtitan-0.3", "torchtitan-0.2", "deepspeed"),
}
STARTS = {"torchtitan_start_checks": "torchtitan-0.3", "deepspeed_start_checks": "deepspeed"}
"""Checks that start small public models, and the environment of each. Those of Megatron-LM need its sources."""
COLUMNS = {
    "target": "target",
    "ran": "run with",
    "read_back": "200 random plans, read back",
    "built": "built",
    "trained": "trained, or served, against one process",
    "ways": "200 random LLM plans, read back",
}
FRAMEWORKS = {"megatron": "Megatron-LM", "torchtitan": "torchtitan", "deepspeed": "DeepSpeed"}
_INPUTS = (
    "export",
    "jobs",
    "model",
    "llm/arithmetic.py",
    "llm/frameworks.py",
    "llm/hugging_face_shape.py",
    "llm/megatron_shape.py",
    "llm/plan.py",
    "llm/parallelism.py",
)
"""Files and packages of hpgo that determine what is exported for a given plan."""

Row = dict[str, Any]


def check(module: str, python: Path, sources: str = "") -> list[Row]:
    """Return the rows that a file of checks finds. A failure is a row that says so.

    `sources` is a folder whose packages come before those of the environment.
    """
    rows: list[Row]
    kept = environments.FOLDER / "results" / f"{module}-{digest(module, python, sources)}.json"
    if kept.exists():
        Console(stderr=True).print(f"{module} {python.parent.parent.name} {Path(sources).name}: as before")
        rows = json.loads(kept.read_text(encoding="utf-8"))
        return rows
    began_s, began_cpu_s = time.monotonic(), cpu_s()
    paths = (*([sources] if sources else []), str(environments.ROOT / "python"), str(HERE))
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder) / "found.json"
        ended = subprocess.run(
            [python, HERE / f"{module}.py", found],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(paths), "PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1"},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
        if ended.returncode == 0:
            text = found.read_text(encoding="utf-8")
            kept.parent.mkdir(parents=True, exist_ok=True)
            kept.write_text(text, encoding="utf-8")
            took = f"{time.monotonic() - began_s:.0f} s, {cpu_s() - began_cpu_s:.0f} s of CPU"
            Console(stderr=True).print(f"{module} {python.parent.parent.name} {Path(sources).name}: {took}")
            rows = json.loads(text)
            return rows
    sys.stderr.write(ended.stderr)
    return [{"target": module, "read_back": "FAILED"}]


def cpu_s() -> float:
    """Return the seconds of CPU time of all processes that were started here and have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def digest(module: str, python: Path, sources: str) -> str:
    """Return a digest of what a check depends on: its files, hpgo's exporters, the environment, and the sources."""
    stamp = python.parent.parent / "installed.txt"
    parts = [
        sources,
        stamp.read_text(encoding="utf-8") if stamp.exists() else str(python),
        environments.torch_version(),
    ]
    for file in [*imported(module), *exporters()]:
        parts += [file.name, file.read_text(encoding="utf-8")]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def imported(module: str) -> list[Path]:
    """Return the file of a module of this folder, and those that it imports, directly or not."""
    found: dict[str, Path] = {}
    left = [module]
    while left:
        name = left.pop()
        file = HERE / f"{name}.py"
        if name in found or not file.exists():
            continue
        found[name] = file
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom):
                left.append(node.module or "")
            elif isinstance(node, ast.Import):
                left += [one.name for one in node.names]
    return [found[name] for name in sorted(found)]


def exporters() -> list[Path]:
    """Return hpgo's files that determine what is exported."""
    package = environments.ROOT / "python" / "hpgo"
    inputs = [package / name for name in _INPUTS]
    return sorted(file for at in inputs for file in ([at] if at.suffix else at.rglob("*.py")))


def main(arguments: list[str]) -> int:
    """Run all checks. Return the exit status: 0 if all hold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--write",
        nargs=2,
        type=Path,
        metavar=("TABLES", "PAGE"),
        help="file for all tables, and page with places",
    )
    asked = parser.parse_args(arguments)
    environments.build_all()
    releases, megatron = megatron_releases(), environments.python("megatron")
    starts = [row for sources in releases for row in check("megatron_start_checks", megatron, sources)]
    starts += [row for module, name in STARTS.items() for row in check(module, environments.python(name))]
    rows = []
    for module, names in CHECKS.items():
        for name in names:
            python = Path(sys.executable) if name is None else environments.python(name)
            rows += check(module, python)
    rows += [row for sources in releases for row in check("megatron_parser_checks", megatron, sources)]
    bridge = bridge_sources()
    rows += check("bridge_checks", environments.python("megatron-bridge"), bridge) if bridge else []
    failed = [row["target"] for row in [*rows, *starts] if row.get("read_back") == "FAILED"]
    if failed:
        sys.stderr.write(f"error: {', '.join(failed)} failed\n")
        return 1
    if not releases:
        said = {"target": "megatron", "ran": "Megatron-LM's parser", "read_back": "skipped: $MEGATRON_LM names nothing"}
        rows.append(dict.fromkeys(COLUMNS, "") | said)
    if not bridge:
        said = {
            "target": "megatron-bridge",
            "ran": "Megatron-Bridge",
            "ways": "skipped: $MEGATRON_BRIDGE names nothing",
        }
        rows.append(dict.fromkeys(COLUMNS, "") | said)
    table = Table(*COLUMNS.values())
    for row in rows:
        table.add_row(*(row[key] for key in COLUMNS))
    console = Console(width=140 if not sys.stdout.isatty() else None)
    console.print(table)
    tables = {"frameworks": markdown(rows), "starts": matrix(starts), "start-runs": runs(starts)}
    console.print(tables["starts"])
    if asked.write and releases and bridge:
        for document in asked.write:
            text = document.read_text(encoding="utf-8")
            of_page = {name: one for name, one in tables.items() if f"<!-- table: {name} -->" in text}
            write_text(document, fill(text, of_page), HpgoError)
    return 0


def markdown(rows: list[Row]) -> str:
    """Return the table of random plans for the document."""
    lines = [f"| {' | '.join(COLUMNS.values())} |", "|" + "---|" * len(COLUMNS)]
    for row in rows:
        target, *others = (row[key] for key in COLUMNS)
        lines.append(f"| {' | '.join([f'`{target}`', *others])} |")
    return "\n".join(lines)


def matrix(starts: list[Row]) -> str:
    """Return the table of small public models, with a column for each framework."""
    cells: dict[str, dict[str, list[Row]]] = defaultdict(lambda: defaultdict(list))
    for row in starts:
        cells[row["model"]][row["framework"]].append(row)
    lines = [f"| model | {' | '.join(FRAMEWORKS.values())} |", "|" + "---|" * (1 + len(FRAMEWORKS))]
    for model, by_framework in cells.items():
        lines.append(f"| {model} | {' | '.join(cell(by_framework[name]) for name in FRAMEWORKS)} |")
    return "\n".join(lines)


def cell(rows: list[Row]) -> str:
    """Return what the releases of a framework did with one model."""
    if not rows:
        return ""
    refusals = {row["refused"] for row in rows}
    if len(refusals) == 1 and "" not in refusals:
        return "refused: " + re.sub(r"^(has no settings? for|does not support) ", "", refusals.pop())
    started = [row for row in rows if not row["refused"]]
    first = started[0]
    words = [f"{first['compared']} values and {first['parameters']:,} parameters equal"]
    trained = [row["release"] for row in started if row["losses"]]
    words.append(f"trained by {', '.join(trained)}" if trained else "not trained")
    words += [f"{row['release']} {row['refused']}" for row in rows if row["refused"]]
    return "; ".join(words)


def runs(starts: list[Row]) -> str:
    """Return the table of the runs, with the loss of the first and of the last step."""
    lines = ["| model | framework | release | plan | processes | loss of step 1 | of step 5 |", "|" + "---|" * 7]
    for row in starts:
        if row["losses"]:
            first, last = row["losses"][0], row["losses"][-1]
            what = (row["model"], FRAMEWORKS[row["framework"]], row["release"], row["plan"], str(row["ranks"]))
            lines.append(f"| {' | '.join(what)} | {first:.3f} | {last:.3f} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
