"""`make site` shows every page, public name, command and schedule, and nothing on it leads nowhere."""

from __future__ import annotations

import importlib.util
import re
import subprocess
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

import hpgo
import hpgo.runtime
from hpgo.cli.main import COMMANDS

pytest.importorskip("material", reason="needs mkdocs-material: pip install -e '.[dev]'")

ROOT = Path(__file__).parent.parent
_spec = importlib.util.spec_from_file_location("build", ROOT / "docs/site/build.py")
assert _spec is not None
assert _spec.loader is not None
build = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(build)
_IDS = re.compile(r'\bid="([^"]+)"')
_TARGETS = re.compile(r'\b(?:href|src)="([^"]*)"')


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    build.stage(folder / "pages")
    build.build(folder / "pages", folder / "site")
    return folder / "site"


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, str]:
    return {page: page.read_text(encoding="utf-8") for page in sorted(site.rglob("*.html"))}


def reference(pages: dict[Path, str]) -> set[str]:
    return {name for page, text in pages.items() if page.parent.name == "reference" for name in _IDS.findall(text)}


def test_every_public_name_has_its_place_in_the_reference(pages: dict[Path, str]) -> None:
    names = {f"hpgo.{name}" for name in hpgo.__all__} | {f"hpgo.runtime.{name}" for name in hpgo.runtime.__all__}
    assert names - reference(pages) == set()


def test_what_public_classes_offer_is_told_with_them(pages: dict[Path, str]) -> None:
    members = {
        f"hpgo.{name}.{member}"
        for name in hpgo.__all__
        if isinstance(kind := getattr(hpgo, name), type)
        for member in [*getattr(kind, "__annotations__", ()), *vars(kind)]
        if not member.startswith("_")
    }
    assert len(members) > 300
    assert members - reference(pages) == set()


def test_examples_of_docstrings_are_shown_as_code(pages: dict[Path, str]) -> None:
    told = [text for page, text in pages.items() if page.parent.name == "reference"]
    assert sum(text.count('<span class="gp">&gt;&gt;&gt; </span>') for text in told) > 100
    assert not any("<blockquote>" in text for text in told)
    assert any("<li><code>pipeline_micro_batch_size=None</code>" in re.sub(r"\s*</?p>\s*", "", text) for text in told)


def test_every_command_is_there_with_its_help(site: Path) -> None:
    text = (site / "reference/commands.html").read_text(encoding="utf-8")
    assert {name for name in COMMANDS if f'id="hpgo-{name}"' not in text} == set()
    assert text.count("Usage: hpgo") >= len(COMMANDS)


def test_every_schedule_is_in_the_gallery(site: Path) -> None:
    text = (site / "gallery.html").read_text(encoding="utf-8")
    for family in hpgo.schedules():
        assert f'id="{family.name}"' in text
        assert f'src="gallery/{family.name}.svg"' in text
        assert "forward" in (site / f"gallery/{family.name}.svg").read_text(encoding="utf-8")


def test_every_page_of_the_documentation_is_in_the_index() -> None:
    index = (ROOT / "docs/README.md").read_text(encoding="utf-8")
    listed = set(re.findall(r"^\| \[.*?\]\((.*?\.md)\)", index, re.MULTILINE))
    assert {page.name for page in (ROOT / "docs").glob("*.md")} - {"README.md"} == {
        page for page in listed if "/" not in page
    }


def test_words_of_the_glossary_are_used_where_it_says() -> None:
    glossary = (ROOT / "docs/glossary.md").read_text(encoding="utf-8").replace(r"\|", "")
    rows = re.findall(r"^\| (\w.*?) \| .*? \| .*?\| (\[.*?) \|$", glossary, re.MULTILINE)
    assert len(rows) > 40
    for words, places in rows:
        for place in re.findall(r"\]\(([\w-]+\.md)", places):
            text = (ROOT / "docs" / place).read_text(encoding="utf-8").lower()
            assert any(re.sub("s?$", "", word.lower()) in text for word in re.split(r", | \(`|`\)", words) if word), (
                f"{place} has none of {words}"
            )


def test_all_that_pages_link_to_or_load_is_on_the_site(site: Path, pages: dict[Path, str]) -> None:
    ids = {page: {unquote(name) for name in _IDS.findall(text)} for page, text in pages.items()}
    for page, text in pages.items():
        if page.name == "404.html":
            continue  # a server shows it under any address, so its links start at the root
        for target in _TARGETS.findall(text):
            parts = urlsplit(target)
            if parts.scheme in {"https", "http", "mailto", "data"}:
                continue
            found = (page.parent / unquote(parts.path)).resolve() if parts.path else page
            assert found.exists(), f"{page.relative_to(site)} leads to {target}"
            if parts.fragment and found in ids and not parts.fragment.startswith("__"):
                assert unquote(parts.fragment) in ids[found], f"{page.relative_to(site)} leads to {target}"


def test_pages_load_nothing_from_elsewhere(pages: dict[Path, str], site: Path) -> None:
    loads = re.compile(
        r'<(?:script|img|iframe|link rel="(?:stylesheet|preconnect|icon)")[^>]*(?:src|href)="(?:https?:)?//'
    )
    assert [str(page.relative_to(site)) for page, text in pages.items() if loads.search(text)] == []


@pytest.mark.parametrize("fault", ["[gone](gone.md)", "[gone](planner.md#gone)", "![gone](gone.svg)"])
def test_a_link_to_nowhere_ends_the_build(fault: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs/index.md").write_text(f"# One\n\n{fault}\n", encoding="utf-8")
    (tmp_path / "docs/planner.md").write_text("# Other\n", encoding="utf-8")
    settings = (ROOT / "docs/site/mkdocs.yml").read_text(encoding="utf-8").replace("ROOT/", f"{ROOT}/")
    for line in (
        "extra_css: [site/site.css]\n",
        "  polyfills: [site/iframe-worker.js] # lets a page from disk search\n",
    ):
        settings = settings.replace(line, "")
    (tmp_path / "mkdocs.yml").write_text(settings, encoding="utf-8")
    with pytest.raises(subprocess.CalledProcessError):
        build.build(tmp_path, tmp_path / "site")
    assert "gone" in capfd.readouterr().err


def test_the_search_finds_pages_that_lie_on_disk(site: Path, tab) -> None:
    asked: list[str] = []
    tab.on("request", lambda request: asked.append(request.url))
    tab.goto((site / "reference/planning.html").as_uri())
    # Key by key, as a reader: the page looks for words again when a key goes up, which `fill` presses none of.
    tab.locator(".md-search__input").press_sequentially("gallery")
    tab.wait_for_selector(".md-search-result__link[href*='gallery.html']", state="attached")
    assert {urlsplit(address).scheme for address in asked} <= {"file", "data", "blob"}
