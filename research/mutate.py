"""Report which share of small faults the tests find: change an operator of the code, run the tests of its file, repeat.

    python research/mutate.py                                # 25 places of Python and 15 of Rust, about two hours
    python research/mutate.py --python 5 --rust 0 --seed 7   # a look
    python research/mutate.py --json mutants.jsonl           # a row for each place; continues a file that is there
    python research/mutate.py -m slow                        # the tests that `make ci` leaves out

A place is drawn by a hash of the seed, its file and its line's text, so that other commits draw the same places as long
as these lines stand. The tests of a Python file are the test files that name its module, and of a Rust file all tests
of the crate. Everything runs in a copy of the repository.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parents[1]
MAX_FILES = 6
"""Test files that run for one place, at most: those named after the module first. Not tuned."""
MAX_S = 900.0
"""A change that makes the tests run longer than this is counted as found."""
_COMPARISONS = {
    ast.Lt: ("<", "<="), ast.LtE: ("<=", "<"), ast.Gt: (">", ">="), ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="), ast.NotEq: ("!=", "=="), ast.Is: ("is", "is not"), ast.IsNot: ("is not", "is"),
}  # fmt: skip
_ARITHMETIC = {ast.Add: ("+", "-"), ast.Sub: ("-", "+"), ast.Mult: ("*", "/"), ast.Div: ("/", "*"), ast.Mod: ("%", "*")}
_RUST = (
    (" < ", " <= "), (" <= ", " < "), (" > ", " >= "), (" >= ", " > "), (" == ", " != "), (" != ", " == "),
    (" + ", " - "), (" - ", " + "), (" * ", " / "), (" / ", " * "), (" && ", " || "), (" || ", " && "),
    (".min(", ".max("), (".max(", ".min("),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Place:
    """One operator of the code and what it becomes."""

    file: str
    line: int
    begin: int
    """Offset of the operator in the file's text, in characters."""
    old: str
    new: str

    def changed(self, text: str) -> str:
        """Return the file's text with the fault."""
        if not text.startswith(self.old, self.begin):
            raise ValueError(f"{self.file}:{self.line} does not hold `{self.old}`")
        return text[: self.begin] + self.new + text[self.begin + len(self.old) :]


def python_places(file: str, text: str) -> Iterator[Place]:
    """Yield the places of a Python file: comparisons, arithmetic, `and`, `or`, `not` and whole numbers.

    >>> [(place.old, place.new) for place in python_places("x.py", "if a < b and not c:\\n    d = a + 1")]
    [('and', 'or'), ('<', '<='), ('not ', ''), ('+', '-'), ('1', '2')]
    """
    starts = [0]
    for line in text.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    lines = text.splitlines()

    def offset(line: int, column: int) -> int:  # columns of ast count bytes
        return starts[line - 1] + len(lines[line - 1].encode()[:column].decode())

    def between(left: ast.expr, right: ast.expr, old: str, new: str) -> Iterator[Place]:
        first = offset(left.end_lineno or 0, left.end_col_offset or 0)
        at = text.find(old, first, offset(right.lineno, right.col_offset))
        if at >= 0:
            yield Place(file, text.count("\n", 0, at) + 1, at, old, new)

    for node in ast.walk(ast.parse(text)):
        match node:
            case ast.Compare(left, [operator], [right]) if type(operator) in _COMPARISONS:
                yield from between(left, right, *_COMPARISONS[type(operator)])
            case ast.BinOp(left, operator, right) if type(operator) in _ARITHMETIC:
                yield from between(left, right, *_ARITHMETIC[type(operator)])
            case ast.BoolOp(operator, [left, right, *_]):
                words = ("and", "or") if isinstance(operator, ast.And) else ("or", "and")
                yield from between(left, right, *words)
            case ast.UnaryOp(ast.Not(), _):
                yield Place(file, node.lineno, offset(node.lineno, node.col_offset), "not ", "")
            case ast.Constant(int() as number) if not isinstance(number, bool):
                at = offset(node.lineno, node.col_offset)
                if text.startswith(str(number), at):
                    yield Place(file, node.lineno, at, str(number), str(number + 1))


def rust_places(file: str, text: str) -> Iterator[Place]:
    """Yield the places of a Rust file: operators with spaces around them, `min` and `max`, not in comments or tests.

    >>> [(place.line, place.old) for place in rust_places("x.rs", "// a + b\\nlet c = a + b.max(1);")]
    [(2, ' + '), (2, '.max(')]
    """
    begin = 0
    for number, line in enumerate(text.splitlines(keepends=True), start=1):
        if "#[cfg(test)]" in line:
            return
        code = re.sub(r'"(?:[^"\\]|\\.)*"', lambda found: "_" * len(found[0]), line).partition("//")[0]
        # Bounds of types hold `+` and `<`, attributes are no code.
        if not re.match(r"\s*(#\[|#!\[|use |pub use |where|impl|(pub(\(\w+\))? )?(fn|struct|enum|trait)\b)", code):
            for old, new in _RUST:
                if (at := code.find(old)) >= 0:
                    yield Place(file, number, begin + at, old, new)
        begin += len(line)


def is_test(file: str) -> bool:
    """Return whether a Rust file is a module of tests, as the file that declares it says."""
    path = ROOT / file
    declared = rf"#\[cfg\(test\)\]\s+mod {path.stem};"
    return any(re.search(declared, one.read_text(encoding="utf-8")) for one in path.parent.glob("mod.rs"))


def drawn(files: list[str], count: int, seed: int) -> list[Place]:
    """Return places in these files in the order of their hashes: `count`, and twice that number as substitutes."""
    keyed = []
    for file in files:
        text = (ROOT / file).read_text(encoding="utf-8")
        places = python_places(file, text) if file.endswith(".py") else rust_places(file, text)
        seen: dict[str, int] = {}
        for place in places:
            line = text.splitlines()[place.line - 1].strip()
            word = f"{seed} {file} {line} {place.old} {seen.setdefault(f'{line} {place.old}', 0)}"
            seen[f"{line} {place.old}"] += 1
            keyed.append((sha256(word.encode()).hexdigest(), place))
    keyed.sort(key=lambda pair: pair[0])
    return [place for _, place in keyed[: 3 * count]]


def tests_of(file: str) -> list[str]:
    """Return the test files that name a Python file's module, or its package if none does; at most `MAX_FILES`."""
    module = file.removeprefix("python/").removesuffix(".py").replace("/", ".").removesuffix(".__init__")
    while module != "hpgo":
        package, _, stem = module.rpartition(".")
        says = re.compile(rf"\b{re.escape(module)}\b|from {re.escape(package)} import [^\n]*\b{re.escape(stem)}\b")
        ranked = []
        for path in sorted((ROOT / "tests").glob("test_*.py")):
            text = path.read_text(encoding="utf-8")
            is_named = path.stem in {f"test_{stem}", f"test_cli_{stem}"}
            if is_named or says.search(text):
                ranked.append((not is_named, len(text), f"tests/{path.name}"))
        if ranked:
            return [name for *_, name in sorted(ranked)[:MAX_FILES]]
        module = package  # a part that tests reach by its package
    return []


def ended(command: list[str], folder: Path) -> tuple[int, str]:
    """Return the exit code and the last lines of a command; -1 if it takes longer than `MAX_S`."""
    environment = os.environ | {"PYTHONPATH": str(folder / "python"), "OMP_NUM_THREADS": "1"}
    environment.setdefault("HPGO_REFERENCE", str(ROOT.parent / "shared/reference"))
    with subprocess.Popen(  # noqa: S603 -- commands of this script
        command, cwd=folder, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        start_new_session=True,
    ) as process:  # fmt: skip
        try:
            out = process.communicate(timeout=MAX_S)[0]
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            return -1, "took too long"
    return process.returncode, "\n".join(out.splitlines()[-12:])


def tried(place: Place, folder: Path, marker: str) -> str | None:
    """Return the test that finds a fault, or an empty text; None if it can't be built, or the test fails without it."""
    path = folder / place.file
    text = path.read_text(encoding="utf-8")
    path.write_text(place.changed(text), encoding="utf-8")
    try:
        if place.file.endswith(".rs"):
            if ended(["cargo", "check", "--quiet"], folder)[0]:
                return None
            code, said = ended(["cargo", "test", "--quiet"], folder)
            found = re.findall(r"^test (\S+) .*FAILED|^    (\S+)$", said, re.MULTILINE)
            return next(("".join(one) for one in found), "a test of the crate") if code else ""
        tests = tests_of(place.file)
        if not tests:
            return ""
        pytest = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-p", "no:randomly"]
        code, said = ended([*pytest, "-m", marker, *tests], folder)
    finally:
        path.write_text(text, encoding="utf-8")
    if code in {0, 5}:  # 5: the marker leaves no test
        return ""
    failed = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", said, re.MULTILINE)
    if failed and "::" in failed[1] and ended([*pytest, failed[1]], folder)[0] == 1:
        return None  # it fails without the fault, too, and says nothing of it
    return failed[1] if failed else said.splitlines()[-1]


def main() -> None:
    """Draw places, try each, and print the share that was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", type=int, default=25, metavar="N", help="places of Python")
    parser.add_argument("--rust", type=int, default=15, metavar="N", help="places of Rust")
    parser.add_argument("--seed", type=int, default=0, metavar="N")
    parser.add_argument("-m", dest="marker", default="not slow", metavar="MARKER", help="tests of Python that run")
    parser.add_argument("--json", type=Path, metavar="FILE", help="add a row for each place")
    asked = parser.parse_args()
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, text=True, capture_output=True, check=True).stdout  # noqa: S607
    known = (
        [json.loads(line) for line in asked.json.read_text().splitlines()] if asked.json and asked.json.exists() else []
    )
    rows = list(known)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "hpgo"
        for name in [*listed.splitlines(), *(one.relative_to(ROOT) for one in (ROOT / "python/hpgo").glob("_core.*"))]:
            if (ROOT / name).is_file():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, folder / name)
        for ending, under, count in ((".py", "python/hpgo/", asked.python), (".rs", "src/", asked.rust)):
            files = [name for name in listed.splitlines() if name.startswith(under) and name.endswith(ending)]
            files = [name for name in files if not name.startswith("src/python/") and (ROOT / name).is_file()]
            files = [name for name in files if not is_test(name)]
            done = 0
            for place in drawn(files, count, asked.seed):
                if done == count:
                    break
                row = next(
                    (
                        one
                        for one in known
                        if (one["file"], one["line"], one["new"]) == (place.file, place.line, place.new)
                    ),
                    None,
                )
                if row is None:
                    begin_s = time.monotonic()
                    found = tried(place, folder, asked.marker)
                    if found is None:
                        continue
                    row = asdict(place) | {"found": found, "seconds": round(time.monotonic() - begin_s, 1)}
                    rows.append(row)
                    if asked.json:
                        with asked.json.open("a", encoding="utf-8") as out:
                            out.write(json.dumps(row) + "\n")
                done += 1
                print(
                    f"{row['file']}:{row['line']}: `{row['old']}` to `{row['new']}`: {row['found'] or 'not found'}",
                    flush=True,
                )
            mine = [one for one in rows if one["file"].endswith(ending)]
            if mine:
                print(f"{sum(bool(one['found']) for one in mine)} of {len(mine)} faults of {under} are found")


if __name__ == "__main__":
    main()
