"""The check of facts finds numbers and formulas that a page has lost, however they are wrapped and on any page."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent.parent / "docs/facts.py"
OLD = "It takes 1,500 s, at most 2.5 % more, or\n`w·F +\nB` s.\n\n    a = b + c\n"


@pytest.mark.parametrize(
    ("planner", "other", "lost"),
    [
        (OLD, "", []),
        ("At most 2.5 % more.\n\n    a = b + c\n", "In 1500 s, `w * F+B`.", []),
        ("It takes 1,500 s or `w·F + B`.\n\n    a = b + c\n", "2.5 of them", ["docs/planner.md: 2.5 %"]),
        ("At most 2.5 %, 1,500 s.", "", ["docs/planner.md: a=b+c", "docs/planner.md: wF+B"]),
    ],
)
def test_a_number_or_formula_is_reported_only_if_no_page_has_it(planner, other, lost, tmp_path):
    docs = tmp_path / "docs"
    docs.mkdir()
    shutil.copy(SCRIPT, docs)
    for page in ("planner.md", "proofs.md", "cost-terms.md"):
        (docs / page).write_text(OLD if page == "planner.md" else "", encoding="utf-8")
    git = ["git", "-C", tmp_path, "-c", "user.name=a", "-c", "user.email=a@b.example"]
    for words in (["init", "--quiet"], ["add", "."], ["commit", "--quiet", "--message", "old"]):
        subprocess.run([*git, *words], check=True)
    (docs / "planner.md").write_text(planner, encoding="utf-8")
    (docs / "other.md").write_text(other, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, docs / "facts.py", "HEAD"], capture_output=True, text=True, encoding="utf-8", check=False
    )
    assert (done.stdout.splitlines(), done.returncode) == (lost, int(bool(lost)))
