"""What is in research/ loads with the package as it is, and its README lists it."""

from __future__ import annotations

import doctest
import runpy
from pathlib import Path

import mutate
import pages
import pytest

RESEARCH = Path(__file__).parent.parent / "research"
FILES = sorted(RESEARCH.glob("*.py"))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_a_file_loads(file: Path) -> None:
    text = file.read_text(encoding="utf-8")
    for package in ("torch", "transformers"):
        if f"\nimport {package}" in text:
            pytest.importorskip(package, reason=f"needs {package}: pip install {package}")
    runpy.run_path(str(file), run_name="loaded")


def test_the_readme_lists_every_file() -> None:
    listed = (RESEARCH / "README.md").read_text(encoding="utf-8")
    assert [file.name for file in FILES if f"`{file.name}`" not in listed] == []


@pytest.mark.parametrize("module", [mutate, pages], ids=lambda module: module.__name__)
def test_examples_run(module: object) -> None:
    assert doctest.testmod(module).failed == 0  # type: ignore[arg-type]
