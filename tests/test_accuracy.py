"""docs/accuracy.md and its tables are what `make accuracy` gives, and the constants are those that it fitted."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from hpgo.llm.constants import CONSTANTS
from hpgo.llm.platform import ERROR_WITH_EXPERTS, ERRORS, MEMORY_ERROR, USUAL_ERROR
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

    sys.modules["accuracy"] = module  # dataclasses look there for the names of types
    spec.loader.exec_module(module)
    module.MEASURED = reference / "llm/measured.jsonl"
    return module


def test_constants_are_those_that_were_fitted() -> None:
    kept = json.loads((ROOT / "research/accuracy.json").read_text(encoding="utf-8"))["half"]
    assert {name: getattr(CONSTANTS, name) for name in kept} == kept


def test_errors_are_those_of_the_page() -> None:
    page = (ROOT / "docs/accuracy.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\w+) \| (\d+) \| \d+ \| ([\d.]+) % \|$", page, re.MULTILINE)
    assert {name: round(float(error) / 100, 2) for name, platforms, error in rows if int(platforms) > 1} == ERRORS
    mean = next(line for line in page.splitlines() if line.startswith("| **mean of platforms"))
    left_out = re.findall(r"([\d.]+) %", mean)[2]
    assert round(float(left_out) / 100, 2) == USUAL_ERROR
    memory = next(line for line in page.splitlines() if line.startswith("| memory, mean error |"))
    assert round(float(re.findall(r"([\d.]+) %", memory)[0]) / 100, 2) == MEMORY_ERROR
    experts = next(line for line in page.splitlines() if line.startswith("| **all** |"))
    assert round(float(re.findall(r"([\d.]+) %", experts)[3]) / 100, 2) == ERROR_WITH_EXPERTS


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
    assert {device: set(held) for device, held in counts.items()} == {
        name: set(held) for name, held in VALIDATED.items()
    }


def test_a_fit_is_no_worse_than_where_it_begins(accuracy: ModuleType) -> None:
    points = [point for point in accuracy.read()[0] if point.platform == "torchtitan" and point.step_s]

    def error(constants) -> float:
        ratios = [point.stages(constants).bound_s / point.step_s for point in points]
        return sum(abs(ratio - 1) for ratio in ratios) / len(ratios)

    assert error(accuracy.fit(points)) <= error(accuracy.replace(CONSTANTS, **accuracy._START))
