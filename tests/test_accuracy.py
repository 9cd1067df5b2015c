"""docs/accuracy.md and its tables are what `make accuracy` gives, and the constants are those that it fitted."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from hpgo.llm.constants import CONSTANTS
from hpgo.llm.platform import MEMORY_ERROR
from hpgo.llm.validated_features import VALIDATED

if TYPE_CHECKING:
    from types import ModuleType

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def accuracy(reference: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("accuracy", ROOT / "research/accuracy.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    import sys

    sys.path.insert(0, str(ROOT / "research"))  # it imports a module beside it
    sys.modules["accuracy"] = module  # dataclasses look there for the names of types
    spec.loader.exec_module(module)
    module.MEASURED = reference / "llm/measured.jsonl"
    return module


def test_constants_are_those_that_were_fitted() -> None:
    kept = json.loads((ROOT / "research/accuracy.json").read_text(encoding="utf-8"))["half"]
    assert {name: getattr(CONSTANTS, name) for name in kept} == kept


def test_the_memorys_error_is_that_of_the_page() -> None:
    page = (ROOT / "docs/accuracy.md").read_text(encoding="utf-8")
    memory = next(line for line in page.splitlines() if line.startswith("| memory, mean error |"))
    assert round(float(re.findall(r"([\d.]+) %", memory)[0]) / 100, 2) == MEMORY_ERROR


def test_the_page_leads_with_what_a_reader_may_rely_on() -> None:
    page = (ROOT / "docs/accuracy.md").read_text(encoding="utf-8")
    assert len(page.splitlines()) <= 300
    assert page.index("## What you may rely on") == page.index("## ")


def test_the_page_is_what_the_command_gives(accuracy: ModuleType) -> None:
    assert accuracy.main(["--check"]) == 0


def test_ways_that_ran_are_said_to_fit_and_those_too_large_are_not(accuracy: ModuleType) -> None:
    """19 of 20 of each platform; misprinted degrees are among the others."""
    points, _ = accuracy.read()
    ran: dict[str, list[bool]] = {}
    for point in points:
        fits = point.estimate(CONSTANTS).fits
        if point.step_s:
            ran.setdefault(point.platform, []).append(fits)
        assert not (point.is_too_large and fits)
    assert all(sum(held) >= 0.95 * len(held) for held in ran.values())


def test_releases_of_a_recipe_are_of_one_half(accuracy: ModuleType) -> None:
    points, _ = accuracy.read()
    halves: dict[str, set[bool]] = {}
    for point in points:
        halves.setdefault(point.recipe, set()).add(point.is_fitted)
    assert len(points) > 1300
    assert all(len(half) == 1 for half in halves.values())


def test_what_was_measured_is_what_published_steps_rely_on(accuracy: ModuleType) -> None:
    counts = accuracy.measured([point for point in accuracy.read()[0] if point.step_s])
    assert set(counts.pop("H200")) <= set(VALIDATED["H200"])
    assert {device: set(held) for device, held in counts.items()} == {
        name: set(held) for name, held in VALIDATED.items() if name != "H200"
    }


def test_a_fit_is_no_worse_than_where_it_begins(accuracy: ModuleType) -> None:
    points = [point for point in accuracy.read()[0] if point.platform == "torchtitan" and point.step_s]

    def error(constants) -> float:
        ratios = [point.stages(constants).bound_s / point.step_s for point in points]
        return sum(abs(ratio - 1) for ratio in ratios) / len(ratios)

    assert error(accuracy.fit(points)) <= error(accuracy.replace(CONSTANTS, **accuracy._START))
