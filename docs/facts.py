"""Report numbers and formulas of docs/planner.md, docs/proofs.md and docs/cost-terms.md that got lost since a commit.

    python docs/facts.py COMMIT

Run it after you shorten one of these pages. A fact may move to any page of docs/ or to research/*.md. Formulas are code
spans with an operator, and indented lines. Spaces, emphasis and line ends do not matter. The exit code is 1 if there
is no trace of a fact that `CHANGED` does not list.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGES = ("docs/planner.md", "docs/proofs.md", "docs/cost-terms.md")
CHANGED = {
    "src/planner/chunked/": "The folder is src/planner/action_lists/ today.",
    "src/planner/orders/": "The folder is src/planner/action_lists/ today.",
    "stage0F0F1B0F2B1F3B2F4B3B4F=B=T=1,M=5,windows2and1:": "The same drawing calls windows in-flight limits.",
}
"""Facts that changed on purpose, each with the reason. Delete them once COMMIT is newer."""

_NUMBER = re.compile(r"(?<![\w.,/])\d[\d,]*(?:\.\d+)?(?:e-?\d+)?(?: %)?(?![\w])")
_CODE = re.compile(r"`([^`\n]+(?:\n[^`\n]+)?)`")
_DISPLAY = re.compile(r"^ {4}(\S.*)$", re.MULTILINE)
_FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
_OPERATOR = re.compile(r"[-+·=<>≤≥Σ⌈⌊−/^] ?\w|\w\(\w")


def plain(text: str) -> str:
    """Return a text without spaces, emphasis and signs of multiplication, so that line ends do not matter."""
    return re.sub(r"[\s*`·]|\\(?=\|)", "", text)


def numbers(text: str) -> set[str]:
    """Return all numbers of a page, without the commas between thousands and with their percent sign."""
    return {found.strip(",").replace(",", "") for found in _NUMBER.findall(text)}


def formulas(text: str) -> set[str]:
    """Return all formulas of a page in plain form. Code spans without an operator are names, which may change."""
    prose = _FENCE.sub("", text)
    spans = [span for span in _CODE.findall(prose) if _OPERATOR.search(span) and not re.search(r"\.\w+$|^--", span)]
    return {plain(formula) for formula in [*spans, *_DISPLAY.findall(prose)]}


def main() -> int:
    """Print each missing fact with its page. Return 1 if there is one."""
    parser = argparse.ArgumentParser(description="Report numbers and formulas that the pages had at COMMIT and lost.")
    parser.add_argument("commit", metavar="COMMIT", help="a commit with the old pages")
    commit = parser.parse_args().commit
    today = "\n".join(path.read_text("utf-8") for place in ("docs", "research") for path in (ROOT / place).glob("*.md"))
    known, whole, missing = numbers(today), plain(today), 0
    for page in PAGES:
        command = ["git", "-C", str(ROOT), "show", f"{commit}:{page}"]
        old = subprocess.run(command, capture_output=True, check=True).stdout.decode()
        lost = (numbers(old) - known) | {formula for formula in formulas(old) if formula not in whole}
        for fact in sorted(lost - CHANGED.keys()):
            missing += 1
            print(f"{page}: {fact}")
    return int(missing > 0)


if __name__ == "__main__":
    sys.exit(main())
