"""docs/launch-settings.md has estimates of public recipes, and features of theirs count as validated."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import fmean, median

import frozen
import launch_settings
import pytest

from hpgo.llm.validated_features import RECIPES, VALIDATED

PAGE = Path(__file__).parent.parent / "docs/launch-settings.md"


@pytest.fixture(scope="module")
def predictions() -> list[frozen.Prediction]:
    return [frozen.predict(row) for row in frozen.read(launch_settings.ROWS)]


def test_the_page_has_todays_estimates() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert launch_settings.pages.fill(text, launch_settings.tables()) == text


def test_at_least_forty_recipes_have_a_published_step(predictions: list[frozen.Prediction]) -> None:
    ran = launch_settings.measured(predictions)
    assert len({each.row["id"] for each in predictions}) == len(predictions) >= 60
    assert len(ran) >= 40
    off = [abs(each.ratio - 1) for each in ran]
    assert fmean(off) < 0.15
    assert median(off) < 0.08
    assert sum(each.in_range for each in ran) >= 0.85 * len(ran)


def test_recipes_that_ran_are_not_refused_for_memory(predictions: list[frozen.Prediction]) -> None:
    assert not [each.row["id"] for each in predictions if launch_settings.filled(each) > launch_settings.MARGIN]


def test_memory_of_recipes_is_not_below_the_published_one(predictions: list[frozen.Prediction]) -> None:
    known = [each for each in predictions if "memory_bytes" in each.row]
    assert len(known) >= 4
    for each in known:
        # PyTorch's allocator counts neither CUDA's context nor NCCL's buffers.
        allocated = each.one.fullest.peak_bytes - dict(each.one.fullest.memory_bytes)["framework_overhead"]
        assert allocated > 0.97 * each.row["memory_bytes"]
        # torchtitan compiles the loss, which then needs less than the estimate of single kernels.
        assert each.row["source"] == "torchtitan" or allocated < 1.03 * each.row["memory_bytes"]


def test_features_of_recipes_were_compared_with_a_published_step(predictions: list[frozen.Prediction]) -> None:
    compared = launch_settings.compared_features(predictions)
    for device in ("H100", "GB200", "GB300"):
        # Recipes have graphs of single modules, but the feature is that of all CUDA graphs.
        assert set(RECIPES[device]) == compared[device] - set(VALIDATED[device]) - {"CUDA graphs"}


def test_other_settings_are_estimated_from_a_file(tmp_path: Path) -> None:
    row = frozen.read(launch_settings.ROWS)[0] | {"id": "mine", "measured_s": None}
    (tmp_path / "mine.jsonl").write_text(json.dumps(row) + "\n", encoding="utf-8")
    made = launch_settings.tables(tmp_path / "mine.jsonl")
    assert "| – | – | – |" in made["recipes"]
    assert "[mine](" in made["recipes"]
