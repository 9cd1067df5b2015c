"""The pages on profiles and clusters show files and code that work."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parent.parent / "docs"
# A fenced block: its language, then its text.
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", ["profiles.md", "clusters.md", "states.md"])
def test_a_page_runs_from_top_to_bottom(page, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    for language, text in BLOCK.findall((DOCS / page).read_text(encoding="utf-8")):
        if language == "python":
            exec(compile(text, page, "exec"), names)
            shown = re.findall(r"^print\(.*\)  # (.*)$", text, re.MULTILINE)
            assert capsys.readouterr().out.splitlines() == shown
        else:
            file, _, content = text.removeprefix("# ").partition("\n")
            Path(file).write_text(content, encoding="utf-8")
