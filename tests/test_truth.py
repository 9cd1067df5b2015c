"""docs/truth.md says what `make truth` measured last, and counts it as it says."""

from __future__ import annotations

import importlib.util
import random
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent


def bench(name: str) -> Any:
    """A benchmark as a module."""
    spec = importlib.util.spec_from_file_location(name, ROOT / f"research/{name}.py")
    assert spec is not None
    assert spec.loader is not None
    made = sys.modules[name] = importlib.util.module_from_spec(spec)  # where its dataclasses look for it
    spec.loader.exec_module(made)
    return made


truth = bench("truth")


def test_the_page_and_its_picture_are_those_of_the_rows_that_are_kept(tmp_path: Path) -> None:
    rows, page, tables = truth.read(truth.ROWS), tmp_path / "truth.md", tmp_path / "truth-tables.md"
    for copy, original in ((page, truth.PAGE), (tables, truth.TABLES)):
        copy.write_text(original.read_text(encoding="utf-8"), encoding="utf-8")
    truth.write(page, rows, tmp_path / "truth.svg", tables)
    for copy, original in ((page, truth.PAGE), (tables, truth.TABLES)):
        assert copy.read_text(encoding="utf-8") == original.read_text(encoding="utf-8")
    assert (tmp_path / "truth.svg").read_bytes() == truth.PICTURE.read_bytes()


def test_the_rows_are_of_five_models_and_every_schedule_that_the_page_names() -> None:
    rows = truth.read(truth.ROWS)
    assert len(rows) >= 30
    assert {row["model"] for row in rows} == set(truth.MODELS)
    for model in truth.MODELS:
        plans = {row["plan"] for row in rows if row["model"] == model}
        assert plans >= {"one device", "two replicas", "1f1b", "eager_1f1b", "gpipe", "interleaved", "zb_h1"}
    for row in rows:
        explained_s = sum(row["explained_s"].values())
        # What is explained is of one step of each round, what is told of all of them; and medians need not add up.
        apart_s = sum(max(those) - min(those) for those in zip(*row["rounds_s"], strict=True))
        assert abs(row["measured_s"] - row["predicted_s"] - explained_s) < 0.1 * row["measured_s"] + apart_s


def test_the_page_says_what_was_measured_in_turns_of_the_same_plans(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="needs torch: pip install torch")
    turns, page, tables = bench("turns"), tmp_path / "truth.md", tmp_path / "truth-tables.md"
    rows = truth.read(turns.ROWS)
    for copy, original in ((page, truth.PAGE), (tables, truth.TABLES)):
        copy.write_text(original.read_text(encoding="utf-8"), encoding="utf-8")
    turns.write(page, rows, tables)
    for copy, original in ((page, truth.PAGE), (tables, truth.TABLES)):
        assert copy.read_text(encoding="utf-8") == original.read_text(encoding="utf-8")
    commands = [(row["model"], row["plan"]) for row in truth.read(truth.ROWS)]
    assert [(row["model"], row["plan"]) for row in rows] == commands
    assert all(len(row["steps_s"]) >= 10 for row in rows)


def step(model: str, predicted_s: float, measured_s: float) -> dict[str, Any]:
    """What a row says of a run's length."""
    return {"model": model, "predicted_s": predicted_s, "measured_s": measured_s}


def test_pairs_count_within_a_model_where_predictions_differ_by_five_percent() -> None:
    rows = [step("a", 1.0, 2.0), step("a", 1.04, 1.0), step("a", 1.1, 3.0), step("b", 5.0, 0.1)]
    assert truth.ranked(rows) == (2, 2)
    assert truth.ranked([*rows, step("a", 2.0, 0.5)]) == (2, 5)
    chance = random.Random(3)
    true = [step("a", seconds, seconds) for seconds in (chance.uniform(1, 2) for _ in range(40))]
    right, pairs = truth.ranked(true)
    assert right == pairs > 0
    assert truth.ranked([step("a", 1.0, one["measured_s"]) for one in true]) == (0, 0)
