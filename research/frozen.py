"""Predict published steps that no fit used, and freeze the predictions with their date and version.

    python research/frozen.py                                        # predicts all steps with today's code; seconds
    python research/frozen.py --write research/frozen-predictions.md # adds the section of this date and version

`frozen.jsonl` has a step per line: its source, model, cluster, settings as arguments of `hpgo.estimate_llm`, settings
that the source leaves open, and the measured seconds. Settings were chosen before the first prediction. Sections of
other dates or versions stay as they are.
"""

from __future__ import annotations

import argparse
import json
import re
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import hpgo
from hpgo.base.tables import markdown
from hpgo.model.transformer import Transformer
from hpgo.model.transformer_presets import TRANSFORMERS

if TYPE_CHECKING:
    from collections.abc import Sequence

ROWS = Path(__file__).with_name("frozen.jsonl")
INTRODUCTION = """# Frozen predictions

These published steps are part of no fit and no range of [accuracy.md](../docs/accuracy.md). `research/frozen.py`
predicts them from `frozen.jsonl`, which names the source, the settings of each and those that the source leaves open.
Settings were fixed before the first prediction. Later versions add a section and leave the older ones as they are.

*Ratio* is predicted over measured. *In range* tells whether the measured step lies in the 90 % range. *Fits* tells
whether the estimated memory fits: all of these steps ran. Bias is the mean of the ratios, minus one. Steps of one
source are alike, so compare sources rather than steps.

After 2026-11-26, the eight steps of NeMo 25.04 gave the rise of attention's rate on Blackwell with the sequence. They
test nothing from then on.
"""


@dataclass(frozen=True, slots=True)
class Prediction:
    """A published step and its estimate."""

    row: dict[str, Any]
    one: hpgo.LlmEstimate

    @property
    def ratio(self) -> float:
        """Predicted over measured seconds."""
        return self.one.step_s / float(self.row["measured_s"])

    @property
    def in_range(self) -> bool:
        """Whether the measured step lies in the 90 % range."""
        return self.one.low_s <= float(self.row["measured_s"]) <= self.one.high_s


def read(path: Path = ROWS) -> list[dict[str, Any]]:
    """Return the published steps of a file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def predict(row: dict[str, Any]) -> Prediction:
    """Estimate a published step with today's code."""
    cluster = hpgo.Cluster.preset(row["cluster"]["preset"], adapter_gbit_s=row["cluster"].get("adapter_gbit_s"))
    return Prediction(row, hpgo.estimate_llm(model_of(row), cluster, devices=row["gpus"], **row["settings"]))


def model_of(row: dict[str, Any]) -> Transformer:
    """Return the model of a row: a preset by its name, a preset with other values, or a shape."""
    model = row["model"]
    if isinstance(model, str):
        return TRANSFORMERS[model]
    # JSON has lists where the shape of a transformer has tuples.
    sizes = {key: tuple(value) if isinstance(value, list) else value for key, value in model.items()}
    preset = sizes.pop("preset", None)
    return Transformer(name=row["name"], **sizes) if preset is None else replace(TRANSFORMERS[preset], **sizes)


def _steps(predictions: Sequence[Prediction]) -> list[str]:
    head = ("step", "model", "GPUs", "predicted_s", "low_s", "high_s", "measured_s", "ratio", "in range", "fits")
    return markdown(head, (
        (
            f"[{each.row['id']}]({each.row['address'].split(' ')[0]})", each.row["name"], f"{each.row['gpus']}",
            *(f"{each_s:.4g}" for each_s in (each.one.step_s, each.one.low_s, each.one.high_s, each.row["measured_s"])),
            f"{each.ratio:.2f}", *("yes" if flag else "no" for flag in (each.in_range, each.one.fits)),
        )
        for each in predictions
    ))  # fmt: skip


def _sources(predictions: Sequence[Prediction]) -> list[str]:
    rows = []
    for name in [*dict.fromkeys(each.row["source"] for each in predictions), "**all**"]:
        those = [each for each in predictions if name in (each.row["source"], "**all**")]
        off = [100 * (each.ratio - 1) for each in those]
        held = f"{sum(each.in_range for each in those)} of {len(those)}"
        rows.append((name, f"{fmean(map(abs, off)):.1f} %", f"{fmean(off):+.1f} %", held))
    return markdown(("source", "mean error", "bias", "in range"), rows)


def with_section(page: str, title: str, body: str) -> str:
    """Return a page with this section, at the end unless it replaces the one of the same title."""
    head, *sections = re.split(r"^(?=## )", page, flags=re.MULTILINE)
    kept = [each.rstrip() for each in sections if each.partition("\n")[0] != f"## {title}"]
    return "\n\n".join([head.rstrip(), *kept, f"## {title}\n\n{body}"]) + "\n"


def main() -> None:
    """Print the predictions, or write them to a page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", type=Path, help="page that gets the section of this date and version")
    page = parser.parse_args().write
    predictions = [predict(row) for row in read()]
    body = "\n".join([*_sources(predictions), "", *_steps(predictions)])
    if page:
        old = page.read_text(encoding="utf-8") if page.exists() else INTRODUCTION
        page.write_text(with_section(old, f"{date.today()}, version {hpgo.__version__}", body), encoding="utf-8")
    else:
        print(body)


if __name__ == "__main__":
    main()
