"""Tabulate the certified gap of the planner for every built-in model on every preset cluster.

    python research/gaps.py                      # prints the table; about a minute
    python research/gaps.py research/benchmark-tables.md   # fills it in between its markers

The gaps are the same on every machine: the search is deterministic and runs to its end.
"""

from __future__ import annotations

from pages import tell

import hpgo
from hpgo.base.tables import markdown
from hpgo.hardware.presets import PRESETS
from hpgo.model.builtin import MODELS

BATCHES = (32, 64, 256)
"""Global batch sizes, in batches of the profile."""


def gaps(model: str, preset: str) -> list[float | None]:
    """Return the gap for each of `BATCHES`, or None if no plan fits."""
    profile, cluster = hpgo.read_profile(model), hpgo.Cluster.preset(preset)
    found: list[float | None] = []
    for batches in BATCHES:
        try:
            best = hpgo.plan(profile, cluster, global_batch_size=batches * profile.batch_sizes[0])
        except hpgo.errors.InfeasibleError:
            found.append(None)
        else:
            found.append(best.optimality_gap)
    return found


def percent(gap: float | None) -> str:
    """Return a gap as text for the table."""
    if gap is None:
        return "-"
    return "0 %" if gap < 5e-7 else f"{100 * gap:.2f} %"


def table() -> str:
    """Return a row per model and cluster, then mean and largest gap and the number of plans proven optimal."""
    rows, known = [], []
    for model in MODELS:
        for preset in PRESETS:
            row = gaps(model, preset)
            known += [gap for gap in row if gap is not None]
            rows.append([model, preset, *map(percent, row)])
    proven = sum(percent(gap) == "0 %" for gap in known)
    lines = markdown(["model", "cluster", *(f"{batches} batches" for batches in BATCHES)], rows)
    summary = (
        f"{len(known)} plans: mean {percent(sum(known) / len(known))}, largest {percent(max(known))}; "
        f"{proven} are proven optimal."
    )
    return "\n".join([*lines, "", summary])


if __name__ == "__main__":
    tell("gaps", table, __doc__)
