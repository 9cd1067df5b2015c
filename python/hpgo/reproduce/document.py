"""The document that shows the tables: each stands between `<!-- table: NAME -->` and `<!-- end -->`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpgo.base.errors import ArgumentError
from hpgo.reproduce import answers, tables

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

NAMES = ("strategies", "reasons", "pipedream", "batches", "devices")
"""The tables, in the order of the document."""
EMULATED = "emulated"
"""One more, which is measured and not made anew with the others."""


def make(
    figures: Path | None = None, progress: Callable[[float, str], object] = lambda _share, _doing: None
) -> dict[str, str]:
    """All tables; and the sweeps' figures as SVG files in the folder `figures`, if one is given.

    Takes about half a minute; `progress` hears which share is done, and what comes next. Raises ArgumentError if
    figures are wanted and matplotlib is missing.
    """
    progress(0.0, "strategies")
    strategies = answers.strategies()
    progress(0.25, "batch sizes")
    batches = answers.batch_sweeps()
    progress(0.5, "device counts")
    devices = answers.device_sweeps()
    progress(0.75, "PipeDream")
    duels = answers.duels()
    if figures is not None:
        from hpgo.reproduce import figures as draw

        draw.batches(batches, figures / "batches.svg")
        draw.devices(devices, figures / "devices.svg")
    return {
        "strategies": tables.strategies(strategies),
        "reasons": tables.reasons(strategies),
        "pipedream": tables.pipedream(duels),
        "batches": tables.batches(batches),
        "devices": tables.devices(devices),
    }


def fill(document: str, tables: Mapping[str, str]) -> str:
    r"""`document` with each of `tables` between its markers.

    Raises ArgumentError naming a table whose markers are missing.

    >>> fill("before\n<!-- table: a -->\nold\n<!-- end -->\nafter", {"a": "| new |"})
    'before\n<!-- table: a -->\n| new |\n<!-- end -->\nafter'
    """
    for name, table in tables.items():
        before, start, rest = document.partition(f"<!-- table: {name} -->\n")
        _, end, after = rest.partition("<!-- end -->")
        if not start or not end:
            raise ArgumentError(
                f"the document has no place for the table `{name}`",
                f"mark it with `<!-- table: {name} -->` and `<!-- end -->` on lines of their own",
            )
        document = f"{before}{start}{table}\n{end}{after}"
    return document
