"""The check of prose finds each kind of finding, and passes on the repository."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FILLER = "def f():\n    pass\n" * 250


def check(root: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, ROOT / "docs/prose.py", root], capture_output=True, text=True, encoding="utf-8", check=False
    )


@pytest.mark.parametrize(
    ("file", "text", "found"),
    [
        ("python/hpgo/a.py", '"""Of the products in a step."""\n', "python/hpgo/a.py:1: opener"),
        ("python/hpgo/a.py", 'def f():\n    """The plan of a small model."""\n', "a.py:2: function fragment"),
        ("python/hpgo/a.py", 'def f():\n    """Plans of one small model."""\n', "a.py:2: fragment"),
        ("python/hpgo/a.py", 'def f():\n    """Run it."""\n', "a.py:2: short"),
        ("research/a.py", "# All of it is done anew.\n", "research/a.py:1: “anew”"),
        ("src/a.rs", "/// Those of one rank alone.\nfn f() {}\n", "src/a.rs:1: “Those of”"),
        ("docs/a.md", "Words " * 36 + "end.\n", "docs/a.md:1: 37 words"),
        ("python/hpgo/llm/a.py", FILLER, "python/hpgo/llm:1: 0.00 comments per 100 lines"),
    ],
)
def test_a_finding_is_listed_by_file_and_line(file: str, text: str, found: str, tmp_path: Path) -> None:
    path = tmp_path / file
    path.parent.mkdir(parents=True)
    path.write_text(text, encoding="utf-8")
    done = check(tmp_path)
    assert done.returncode == 1
    assert found in done.stdout


def test_plain_prose_passes(tmp_path: Path) -> None:
    path = tmp_path / "python/hpgo/a.py"
    path.parent.mkdir(parents=True)
    path.write_text('def f():\n    """Return the plan of a small model."""\n', encoding="utf-8")
    assert check(tmp_path).returncode == 0


def test_the_repository_passes() -> None:
    done = check(ROOT)
    assert done.returncode == 0, done.stdout
