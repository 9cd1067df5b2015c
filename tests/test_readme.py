"""README.md and the pages of docs/ say what is true: their commands and examples run."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlsplit

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")] + sorted(
    (ROOT / "docs").rglob("*.md")
)
_spec = importlib.util.spec_from_file_location("refresh", ROOT / "docs/refresh.py")
assert _spec is not None
assert _spec.loader is not None
refresh = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(refresh)


NEEDS_TORCH = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs torch: pip install torch")


@pytest.mark.parametrize(
    "page", [*refresh.PAGES, pytest.param(refresh.WITH_TORCH, marks=NEEDS_TORCH)], ids=lambda page: page.name
)
def test_commands_print_what_the_page_shows(page: Path) -> None:
    """`make docs` renews a page; read the diff."""
    assert refresh.same(page.read_text(encoding="utf-8"), refresh.refreshed(page))


@pytest.mark.parametrize("page", ["README.md", "docs/plan.md", "docs/planner.md", "docs/program.md", "docs/llm.md"])
def test_python_examples_run_one_after_the_other(page: str, tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL)
    assert blocks
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", "\n".join(blocks)],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=os.environ | {"PYTHONIOENCODING": "utf-8"},
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_the_picture_of_the_readme_is_what_the_command_draws(tmp_path: Path) -> None:
    for words in (
        ["plan", "bert-48", "--cluster", "dapple-a", "--global-batch-size", "64", "-o", "plan.json"],
        ["draw", "plan.json", "-o", "bert-48.svg"],
    ):
        subprocess.run(
            [sys.executable, "-m", "hpgo", *words], cwd=tmp_path, timeout=120, check=True, stdout=subprocess.DEVNULL
        )
    assert (tmp_path / "bert-48.svg").read_bytes() == (ROOT / "docs/pictures/bert-48.svg").read_bytes()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    """As code hosts find headings; tests/test_site.py has the same for the site."""
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    for target, anchor in re.findall(r"\]\(([^)#\s]*)(?:#([^)]*))?\)", text):
        if "://" in target:
            parts = urlsplit(target)
            assert (parts.scheme, "." in parts.netloc) == ("https", True), f"{page.name} links to {target}"
            continue
        found = page.parent / target if target else page
        assert found.exists(), f"{page.name} links to {target}"
        assert not anchor or anchor in anchors(found), f"{page.name} links to {target}#{anchor}"


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page: its headings, and explicit ones that keep old links valid."""
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    named = set(re.findall(r'<a id="([^"]+)"></a>', text))
    return named | {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_command_is_in_the_changelog_or_the_pages() -> None:
    from hpgo.cli.main import COMMANDS

    text = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
    assert {name for name in COMMANDS if f"hpgo {name}" not in text} == set()


def test_only_a_command_that_is_shown_with_an_error_may_fail(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("```console\n$ hpgo clusters show h800\nerror: old\n```\n", encoding="utf-8")
    lines = refresh.refreshed(page).splitlines()
    assert lines[2].startswith("error: ")
    assert "`hpgo clusters show h100`" in lines[3]
    page.write_text("```console\n$ hpgo clusters show h800\nname: h800\n```\n", encoding="utf-8")
    with pytest.raises(SystemExit, match="exit code 1"):
        refresh.refreshed(page)
