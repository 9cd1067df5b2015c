"""research/frozen-predictions.md has predictions of published steps that no fit used, and keeps them."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

import frozen
import pytest

if TYPE_CHECKING:
    from pathlib import Path

# Names that the reference data give to models which have another name here.
OTHER_NAMES = {"llama-3-8b": "llama3.1-8b", "llama-3-70b": "llama3.1-70b", "gpt-3-175b": "gpt-175b"}


@pytest.mark.parametrize("row", frozen.read(), ids=lambda row: row["id"])
def test_every_published_step_has_an_estimate_with_a_range(row: dict[str, object]) -> None:
    prediction = frozen.predict(row)
    assert prediction.one.low_s < prediction.one.step_s < prediction.one.high_s
    assert prediction.one.gpus == row["gpus"]


def test_the_page_has_predictions_of_every_step_with_their_date_and_version() -> None:
    page = frozen.ROWS.with_name("frozen-predictions.md").read_text(encoding="utf-8")
    first = re.split(r"^## \d{4}-\d\d-\d\d, version [\d.]+$", page, flags=re.MULTILINE)[1]
    predicted = re.findall(r"^\| \[([\w-]+)\]\(https://", first, re.MULTILINE)
    assert len(predicted) >= 20
    assert set(predicted) <= {row["id"] for row in frozen.read()}


def test_a_later_version_adds_a_section_and_keeps_the_older_one() -> None:
    page = frozen.with_section("# Page\n\nIntroduction.\n", "2026-11-26, version 0.1.0", "old")
    later = frozen.with_section(page, "2027-01-01, version 0.2.0", "new")
    assert later.startswith(page)
    assert later.endswith("## 2027-01-01, version 0.2.0\n\nnew\n")
    assert frozen.with_section(later, "2027-01-01, version 0.2.0", "again").startswith(page)


def test_no_predicted_step_is_part_of_the_reference_data(reference: Path) -> None:
    known = set()
    for line in (reference / "llm/measured.jsonl").read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        known.add((row["model"]["name"].lower(), row["gpus"], _rounded(row["step_s"] or row["derived_step_s"])))
    for line in (reference / "llm/launch_settings.jsonl").read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        gpus = row["setting"].get("devices") or frozen.hpgo.Cluster.preset(row["cluster"]).devices
        known.add((row["model"], gpus, _rounded(row["measured_step_s"])))
    for row in frozen.read():
        names = {row["name"], OTHER_NAMES.get(row["name"], row["name"])}
        assert not {(name, row["gpus"], _rounded(row["measured_s"])) for name in names} & known


def _rounded(seconds: float | None) -> str:
    return f"{seconds:.3g}" if seconds else ""
