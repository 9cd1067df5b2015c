"""Runs every file of checks in its environment, and prints what was run on which version.

    python tests/frameworks/run.py [--write research/framework-tables.md]

Started by `make frameworks`, with the interpreter whose torch all environments see.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import environments
from releases import megatron_releases
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
COLUMNS = {
    "target": "target",
    "ran": "run with",
    "read_back": "200 random plans, read back",
    "built": "built",
    "trained": "trained, or served, against one process",
    "ways": "200 random LLM plans, read back",
}


def check(module: str, python: Path, sources: str = "") -> list[dict[str, str]]:
    """Rows of the table; what fails is a row that says so. `sources` come before what the environment has."""
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
            rows: list[dict[str, str]] = json.loads(found.read_text(encoding="utf-8"))
            return rows
    sys.stderr.write(ended.stderr)
    return [dict.fromkeys(COLUMNS, "") | {"target": module, "read_back": "FAILED"}]


def main(arguments: list[str]) -> int:
    """Exit status: 0 if all checks hold."""
    environments.build_all()
    rows = []
    for module, names in CHECKS.items():
        for name in names:
            python = Path(sys.executable) if name is None else environments.python(name)
            began_s = time.monotonic()
            rows += check(module, python)
            Console(stderr=True).print(f"{module} {python.parent.parent.name}: {time.monotonic() - began_s:.0f} s")
    releases = megatron_releases()
    for sources in releases:
        rows += check("megatron_parser_checks", environments.python("megatron"), sources)
    if not releases:
        said = {"target": "megatron", "ran": "Megatron-LM's parser", "read_back": "skipped: $MEGATRON_LM names nothing"}
        rows.append(dict.fromkeys(COLUMNS, "") | said)
    table = Table(*COLUMNS.values())
    for row in rows:
        table.add_row(*(row[key] for key in COLUMNS))
    Console(width=140 if not sys.stdout.isatty() else None).print(table)
    failed = any(row["read_back"] == "FAILED" for row in rows)
    skipped = any("skipped" in row["read_back"] for row in rows)
    if arguments[:1] == ["--write"] and not failed and not skipped:
        document = Path(arguments[1])
        write_text(document, fill(document.read_text(encoding="utf-8"), {"frameworks": markdown(rows)}), HpgoError)
    return int(failed)


def markdown(rows: list[dict[str, str]]) -> str:
    """The same table for the document."""
    lines = [f"| {' | '.join(COLUMNS.values())} |", "|" + "---|" * len(COLUMNS)]
    for row in rows:
        target, *others = (row[key] for key in COLUMNS)
        lines.append(f"| {' | '.join([f'`{target}`', *others])} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
