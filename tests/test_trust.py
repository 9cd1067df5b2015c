"""docs/trust.md repeats figures of other pages, and is out of date if one of them changes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parent.parent / "docs/trust.md"
ROWS = re.findall(
    r"^\| (.+?) \| (.+?) \| \[.+?\]\((\S+?\.md)[^)]*\) \| `(.+?)` \|$", PAGE.read_text("utf-8"), re.MULTILINE
)
NUMBER = re.compile(r"[-+−]?\d[\d.,]*\d(?: %| GB)?|[-+−]?\d(?: %)?|\bTwo folders\b")


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row[0][:40]}")
def test_each_figure_is_on_the_page_that_its_row_names(row: tuple[str, str, str, str]) -> None:
    _, result, target, _ = row
    text = (PAGE.parent / target).read_text(encoding="utf-8")
    for figure in NUMBER.findall(result):
        plain = figure.replace(",", "")
        assert re.search(rf"(?<![\d.]){re.escape(plain)}(?![\d]|\.\d)", text.replace(",", "")), (
            f"{target} has no {figure}"
        )


def test_every_row_of_a_table_is_checked() -> None:
    lines = [line for line in PAGE.read_text("utf-8").splitlines() if line.startswith("| ") and "| page |" not in line]
    assert len(ROWS) == len(lines) > 20


def test_the_frozen_steps_that_do_not_fit_are_counted() -> None:
    frozen = (PAGE.parent / "../research/frozen-predictions.md").read_text(encoding="utf-8")
    fits = re.findall(r"\| (?:yes|no) \| (yes|no) \|$", frozen, re.MULTILINE)
    assert f"Of the {len(fits)} steps that no fit has seen, {fits.count('no')} are" in PAGE.read_text(encoding="utf-8")
