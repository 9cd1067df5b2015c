"""The floors of docs/architecture.md hold, and importing stays light."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "python/hpgo"
# Inside functions, because these things show themselves.
UPWARDS = {("plans", "report"), ("plans", "simulation"), ("timeline", "draw")}


def table() -> tuple[dict[str, int], dict[str, int]]:
    rust, python = {}, {}
    for floor, left, right in re.findall(
        r"^\| (\d) \|(.*?)\|(.*?)\|$", (ROOT / "docs/architecture.md").read_text(encoding="utf-8"), re.MULTILINE
    ):
        rust |= dict.fromkeys(re.findall(r"`(\w+)`", left), int(floor))
        python |= dict.fromkeys(re.findall(r"`(\w+)`", right), int(floor))
    return rust, python


def python_imports() -> set[tuple[str, str]]:
    """(who, whom), parts of the package; imports for type checkers alone don't count."""
    found = set()
    for file in PACKAGE.rglob("*.py"):
        who = file.relative_to(PACKAGE).with_suffix("").parts[0]
        if who == "__init__":
            continue
        tree = ast.parse(file.read_text(encoding="utf-8"))
        for_types = {
            id(inner)
            for node in ast.walk(tree)
            if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
            for inner in ast.walk(node)
        }
        for node in ast.walk(tree):
            if id(node) in for_types:
                continue
            if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "hpgo":
                parts = node.module.split(".")[1:2] or [alias.name for alias in node.names]
                found |= {(who, part) for part in parts}
            elif isinstance(node, ast.Import):
                found |= {(who, alias.name.split(".")[1]) for alias in node.names if alias.name.startswith("hpgo.")}
    return {(who, whom) for who, whom in found if whom not in {who, "_core"}}


def rust_imports() -> set[tuple[str, str]]:
    found = set()
    for file in (ROOT / "src").rglob("*.rs"):
        who = file.relative_to(ROOT / "src").with_suffix("").parts[0]
        if who == "lib":
            continue
        for line in file.read_text(encoding="utf-8").splitlines():
            if line.lstrip().startswith("//"):
                continue
            found |= {(who, whom) for whom in re.findall(r"\bcrate::([a-z_]+)", line)}
    return {(who, whom) for who, whom in found if who != whom}


def test_python_modules_import_only_downwards() -> None:
    _, floors = table()
    imports = python_imports() - UPWARDS
    assert {name for pair in imports for name in pair} <= set(floors), "name it in docs/architecture.md"
    assert {pair for pair in imports if floors[pair[0]] < floors[pair[1]]} == set()


def test_rust_modules_import_only_downwards() -> None:
    floors, _ = table()
    imports = rust_imports()
    assert {name for pair in imports for name in pair} <= set(floors), "name it in docs/architecture.md"
    assert {pair for pair in imports if floors[pair[0]] < floors[pair[1]]} == set()


def test_only_the_border_knows_python() -> None:
    strangers = {
        file.relative_to(ROOT).as_posix()
        for file in (ROOT / "src").rglob("*.rs")
        if "python" not in file.relative_to(ROOT / "src").parts[0]
        for line in file.read_text(encoding="utf-8").splitlines()
        if "pyo3" in line and "cfg_attr" not in line and "cfg(feature" not in line
    }
    assert strangers == set()


@pytest.mark.parametrize(
    ("statement", "heavy"),
    [
        ("import hpgo", {"numpy", "networkx", "matplotlib", "rich", "yaml", "click", "torch", "hpgo.planner"}),
        ("import hpgo.planner, hpgo.report", {"numpy", "networkx", "matplotlib", "rich", "yaml", "click", "torch"}),
        (
            (
                "from hpgo.cli.main import group\n"
                "group(['plan', 'bert-48', '-c', 'dapple-a', '-b', '64'], standalone_mode=False)"
            ),
            {"numpy", "networkx", "matplotlib", "rich", "yaml", "torch"},
        ),
    ],
)
def test_what_starts_often_loads_nothing_heavy(statement: str, heavy: set[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", f"{statement}\nimport sys; print(*sys.modules, file=sys.stderr)"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert heavy & set(done.stderr.split()) == set()
