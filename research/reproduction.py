"""Fill the tables of PLANNER_REPRODUCTION.md and draw its figures: published planning results beside ours.

    python research/reproduction.py --write PLANNER_REPRODUCTION.md --figures docs/reproduction   # half a minute
    python research/reproduction.py --check PLANNER_REPRODUCTION.md     # exit with 1 unless its tables are current
    python research/reproduction.py --emulate --write PLANNER_REPRODUCTION.md   # ten minutes; needs torch

`hpgo reproduce` prints the same tables. With `--emulate`, sixteen processes on this machine run every plan of the first
table: they send each other the plan's messages, and sleep instead of computing. This makes one table, of planned and
emulated steps.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click
import sweep_figures
from pages import fill

from hpgo.base.documents import make_folder, read_text, write_text
from hpgo.base.units import format_seconds
from hpgo.cli.command import Command
from hpgo.cli.main import run
from hpgo.cli.reproduce import answered
from hpgo.draw.curves import check as check_figure
from hpgo.errors import ArgumentError
from hpgo.reproduce import answers
from hpgo.reproduce.tables import TABLES, shape, table

if TYPE_CHECKING:
    from collections.abc import Iterable

    from emulated_plans import Emulated

EMULATED = "emulated"
"""The table of emulated steps. It is measured, so the other tables are made without it."""


@click.command(cls=Command)
@click.option("--write", type=click.Path(path_type=Path), help="Fill the tables of this document instead of printing.")
@click.option("--check", type=click.Path(path_type=Path), help="Fail unless the tables of this document are current.")
@click.option("--figures", type=click.Path(path_type=Path), help="Draw the sweeps as SVG files in this folder.")
@click.option("--emulate", is_flag=True, help="Run the plans of the first table with processes that sleep instead.")
def command(write: Path | None, check: Path | None, figures: Path | None, emulate: bool) -> None:
    """Set published planning results beside ours."""
    if emulate:
        if check is not None or figures is not None:
            raise click.UsageError("`--emulate` measures: leave out `--check` and `--figures`")
        _emulate(write)
        return
    documents = {path: read_text(path, ArgumentError) for path in (write, check) if path is not None}
    for document in documents.values():
        fill(document, dict.fromkeys(TABLES, ""))  # complains now, not in a minute
    if figures is not None:
        check_figure(figures / "batches.svg")
        make_folder(figures)
    made = answered()
    tables = {name: tell(made) for name, tell in TABLES.items()}
    if figures is not None:
        sweep_figures.batches(made.batches, figures / "batches.svg")
        sweep_figures.devices(made.devices, figures / "devices.svg")
    filled = {path: fill(document, tables) for path, document in documents.items()}
    if write is not None:
        write_text(write, filled[write], ArgumentError)
        click.echo(f"filled {len(tables)} tables of {write}", err=True)
    if check is not None:
        if filled[check] != documents[check]:
            raise ArgumentError(f"the tables of {check} are not current", "run `make reproduce`")
        click.echo(f"the tables of {check} are current", err=True)
    if not documents:
        for name, text in tables.items():
            click.echo(f"## {name}\n\n{text}\n")


def emulated_table(rows: Iterable[Emulated]) -> str:
    """Return each plan's predicted step beside the step of the sleeping processes, as Markdown."""
    return table(
        ("model", "config", "plan of", "stages", "planned", "emulated", "difference"),
        [
            (
                row.model,
                row.config,
                ", ".join(row.whose),
                shape(row.plan),
                format_seconds(row.plan.step_s),
                format_seconds(row.emulated_s),
                f"{100 * (row.emulated_s / row.plan.step_s - 1):+.2f} %",
            )
            for row in rows
        ],
    )


def _emulate(write: Path | None) -> None:
    from hpgo import runtime
    from hpgo.runtime.rendezvous import is_launched

    runtime.check_torch()
    if is_launched():
        raise ArgumentError(
            "`--emulate` starts its own processes, and a framework has started this one",
            "start it alone, without RANK and WORLD_SIZE set",
        )
    from emulated_plans import emulated

    document = "" if write is None else fill(read_text(write, ArgumentError), {EMULATED: ""})
    made = emulated(answers.strategies(), tell=lambda line: click.echo(line, err=True))
    text = emulated_table(made)
    if write is None:
        click.echo(f"## {EMULATED}\n\n{text}")
        return
    write_text(write, fill(document, {EMULATED: text}), ArgumentError)
    click.echo(f"filled the table of {len(made)} plans in {write}", err=True)


if __name__ == "__main__":
    try:
        run(command)
    except KeyboardInterrupt:
        sys.exit("interrupted: nothing is written")
