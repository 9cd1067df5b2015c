"""Estimate the launch settings of public recipes, beside their published steps where there are some.

    python research/launch_settings.py                          # prints the tables; seconds
    python research/launch_settings.py docs/launch-settings.md  # fills them into the page
    python research/launch_settings.py --rows mine.jsonl        # the same for settings of your own

Each line of `launch_settings.jsonl` is a recipe in the form of `frozen.jsonl`: its source, model, GPUs, settings as
arguments of `hpgo.estimate_llm`, what the source leaves open or hpgo can't say, and the measured seconds, or null.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from statistics import fmean, median
from typing import TYPE_CHECKING

import pages
from frozen import Prediction, predict, read

from hpgo.base.tables import markdown
from hpgo.hardware.rates import REPORTED_BYTES, key_of
from hpgo.llm.validated_features import family, features_of

if TYPE_CHECKING:
    from collections.abc import Sequence

ROWS = Path(__file__).with_name("launch_settings.jsonl")
MARGIN = 1.05
"""Estimated memory of a recipe that ran, per memory of the card, above which the page counts it as refused."""


def card_bytes(each: Prediction) -> float:
    """Return the memory that a recipe's card reports, which is more than plans use on some cards."""
    device = each.row["cluster"]["preset"].partition(":")[0]
    return max(each.one.capacity_bytes, REPORTED_BYTES.get(key_of(device) or "", 0.0))


def filled(each: Prediction) -> float:
    """Return the estimated share of the card's memory."""
    return each.one.fullest.peak_bytes / card_bytes(each)


def measured(predictions: Sequence[Prediction]) -> list[Prediction]:
    """Return the recipes with a published step."""
    return [each for each in predictions if each.row["measured_s"] is not None]


def compared_features(predictions: Sequence[Prediction]) -> dict[str, set[str]]:
    """Return the features of recipes whose published step lies in the range of its estimate, by device."""
    found: dict[str, set[str]] = {}
    for each in measured(predictions):
        if each.in_range:
            device = family(each.row["cluster"]["preset"].partition(":")[0])
            found.setdefault(device, set()).update(features_of(each.one.parallelism))
    return found


def summary(predictions: Sequence[Prediction]) -> str:
    """Return the errors and the memory of all recipes, by source."""
    rows = []
    for name in [*dict.fromkeys(each.row["source"] for each in predictions), "**all**"]:
        those = [each for each in predictions if name in {each.row["source"], "**all**"}]
        ran = measured(those)
        off = [100 * abs(each.ratio - 1) for each in ran]
        rows.append((
            name, f"{len(those)}", f"{len(ran)}", *([f"{fmean(off):.1f} %", f"{median(off):.1f} %"] if ran else "––"),
            f"{sum(each.in_range for each in ran)} of {len(ran)}" if ran else "–",
            f"{sum(filled(each) > MARGIN for each in those)}",
        ))  # fmt: skip
    head = ("source", "recipes", "with a step", "mean error", "median error", "in range", "refused")
    return "\n".join(markdown(head, rows))


def table(predictions: Sequence[Prediction]) -> str:
    """Return all recipes with their estimates."""
    head = ("recipe", "model", "GPUs", "configuration", "predicted", "measured", "ratio", "in range", "memory")
    rows = (
        (
            f"[{each.row['id']}]({each.row['address']})", each.row["name"],
            f"{each.row['gpus']} {family(each.row['cluster']['preset'].partition(':')[0])}",
            f"{each.one.parallelism.named()}, {each.one.parallelism.precision}",
            f"{each.one.step_s:.4g} s",
            *(
                ("–", "–", "–")
                if each.row["measured_s"] is None
                else (f"{each.row['measured_s']:.4g} s", f"{each.ratio:.2f}", "yes" if each.in_range else "no")
            ),
            f"{100 * filled(each):.0f} %",
        )
        for each in predictions
    )  # fmt: skip
    return "\n".join(markdown(head, rows))


def left_open(predictions: Sequence[Prediction]) -> str:
    """Return what sources leave open and what settings can't say, with the recipes to which it applies."""
    found: dict[str, list[str]] = {}
    for each in predictions:
        if each.row["open"]:
            found.setdefault(each.row["open"], []).append(f"`{each.row['id']}`")
    return "\n".join(f"- {text[0].upper()}{text[1:]}: {', '.join(names)}." for text, names in found.items())


def tables(rows: Path = ROWS) -> dict[str, str]:
    """Return all tables of the page by name."""
    predictions = [predict(row) for row in read(rows)]
    return {"summary": summary(predictions), "recipes": table(predictions), "open": left_open(predictions)}


def main() -> None:
    """Print the tables, or fill them into a page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("page", nargs="?", type=Path, help="page with a place for each table")
    parser.add_argument("--rows", type=Path, default=ROWS, help="file of recipes")
    asked = parser.parse_args()
    made = tables(asked.rows)
    if asked.page is None:
        print("\n\n".join(made.values()))
    else:
        asked.page.write_text(pages.fill(asked.page.read_text(encoding="utf-8"), made), encoding="utf-8")


if __name__ == "__main__":
    main()
