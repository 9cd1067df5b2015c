"""Compare hpgo with other planners on their own inputs, under both objectives.

    python research/peers CLONES                                  # prints the table; five minutes
    python research/peers CLONES --write PLANNER_REPRODUCTION.md  # fills it into the page
    python research/peers CLONES --only Piper --only Alpa

CLONES is a folder with clones of the planners' public repositories, under their own names: `pipedream`, `piper` and
`dnn-partitioning` of msr-fiddle, `alpa` of alpa-projects, `Metis` of SamsungLabs. Piper and dnn-partitioning are
compiled by g++, and Alpa needs numba. A planner without a clone is left out, and said to be.
"""

from __future__ import annotations

import argparse
import sys
from importlib.util import find_spec
from math import isinf
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).parents[1]))

import pages

from hpgo.base.tables import markdown
from peers import alpa, metis, partitioning, pipedream, piper

if TYPE_CHECKING:
    from collections.abc import Sequence

    from peers.comparison import Comparison

PLANNERS = {
    "PipeDream": pipedream,
    "Piper": piper,
    "dnn-partitioning": partitioning,
    "Alpa": alpa,
    "Metis": metis,
}


def value(number: float | None) -> str:
    """Return a number with four digits; a plan that does not fit, or a plan that can't be expressed, by name."""
    if number is None:
        return "–"
    return "does not fit" if isinf(number) else f"{number:.4g}"


def table(rows: Sequence[Comparison]) -> str:
    """Return all comparisons: the other objective and ours, each of both plans."""
    head = (
        "planner", "question", "its objective", "its plan", "our plan", "its plan's step", "our step", "its CPU",
        "our CPU",
    )  # fmt: skip
    return "\n".join(
        markdown(
            head,
            [
                (
                    row.planner, row.question, row.unit, value(row.theirs_of_theirs), value(row.theirs_of_ours),
                    *(("–" if step is None else f"{value(step)} s") for step in (row.ours_of_theirs, row.ours_of_ours)),
                    f"{row.their_cpu_s:.2g} s", f"{row.our_cpu_s:.2g} s",
                )
                for row in rows
            ],
        )
    )  # fmt: skip


def main() -> None:
    """Print the table, or fill it into a page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("clones", type=Path, help="folder with the clones")
    parser.add_argument("--only", action="append", choices=list(PLANNERS), help="planner to compare with; repeatable")
    parser.add_argument("--write", type=Path, metavar="PAGE", help="page with a place for the table `peers`")
    asked = parser.parse_args()
    rows = []
    for name in asked.only or PLANNERS:
        planner = PLANNERS[name]
        if not (asked.clones / planner.CLONE).is_dir():
            sys.stderr.write(f"note: {name} is left out: there is no {asked.clones / planner.CLONE}\n")
        elif name == "Alpa" and find_spec("numba") is None:
            sys.stderr.write("note: Alpa is left out: numba is not installed\n")
        else:
            for row in planner.comparisons(asked.clones):
                sys.stderr.write(f"{row.planner}: {row.question}\n")
                rows.append(row)
    made = table(rows)
    if asked.write is None:
        print(made)
    else:
        asked.write.write_text(pages.fill(asked.write.read_text(encoding="utf-8"), {"peers": made}), encoding="utf-8")


if __name__ == "__main__":
    main()
