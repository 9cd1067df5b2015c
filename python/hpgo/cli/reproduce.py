"""`hpgo reproduce`: published planning results beside ours, as tables and figures."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import NoReturn

import click

from hpgo.base.documents import make_folder, read_text, write_text
from hpgo.base.errors import ArgumentError
from hpgo.cli.command import Options, option, takes
from hpgo.cli.terminal import progress


class ReproduceOptions(Options):
    """Options of `hpgo reproduce`."""

    write: Path | None = option(
        "--write", type=click.Path(path_type=Path), help="Fill the tables of this document instead of printing."
    )
    check: Path | None = option(
        "--check", type=click.Path(path_type=Path), help="Fail unless the tables of this document are current."
    )
    figures: Path | None = option(
        "--figures", type=click.Path(path_type=Path), help="Draw the sweeps as SVG files in this folder."
    )
    emulate: bool = option(
        "--emulate", is_flag=True, help="Instead, run the plans of the first table, with processes that sleep."
    )


@takes(ReproduceOptions)
def command(options: ReproduceOptions) -> None:
    """Set published planning results beside ours.

    Asks the compatible and the modern planner every published question, and prints Markdown tables. Takes about a
    minute.

    With `--emulate`, sixteen processes on this machine run every plan of the first table in their place: they send each
    other the plan's messages, and sleep for what its passes take. It makes one table, of planned and emulated steps, in
    about ten minutes, and needs torch.

    \b
    Examples:
      hpgo reproduce
      hpgo reproduce --write PLANNER_REPRODUCTION.md --figures figures
      hpgo reproduce --check PLANNER_REPRODUCTION.md
      hpgo reproduce --emulate --write PLANNER_REPRODUCTION.md
    """
    if options.emulate:
        if options.check is not None or options.figures is not None:
            raise click.UsageError("`--emulate` measures: leave out `--check` and `--figures`")
        _emulate(options.write)
        return
    from hpgo.draw.curves import check as check_figure
    from hpgo.reproduce.document import NAMES, fill, make

    documents = {path: read_text(path, ArgumentError) for path in (options.write, options.check) if path is not None}
    for document in documents.values():
        fill(document, dict.fromkeys(NAMES, ""))  # complains now, not in a minute
    if options.figures is not None:
        check_figure(options.figures / "batches.svg")
        make_folder(options.figures)
    # On KeyboardInterrupt a search returns its best plan so far, which would be written down as the answer.
    before = signal.signal(signal.SIGINT, _abort)
    try:
        with progress("reproducing") as tell:
            tables = make(options.figures, tell)
    finally:
        signal.signal(signal.SIGINT, before)
    filled = {path: fill(document, tables) for path, document in documents.items()}
    if options.write is not None:
        write_text(options.write, filled[options.write], ArgumentError)
        click.echo(f"filled {len(tables)} tables of {options.write}", err=True)
    if options.check is not None:
        if filled[options.check] != documents[options.check]:
            raise ArgumentError(
                f"the tables of {options.check} are not current", f"run `hpgo reproduce --write {options.check}`"
            )
        click.echo(f"the tables of {options.check} are current", err=True)
    if not documents:
        for name, table in tables.items():
            click.echo(f"## {name}\n\n{table}\n")


def _emulate(write: Path | None) -> None:
    from hpgo import runtime
    from hpgo.reproduce import answers, tables
    from hpgo.reproduce.document import EMULATED, fill
    from hpgo.reproduce.emulated import emulated
    from hpgo.runtime.meeting import is_launched

    runtime.check_torch()
    if is_launched():
        raise ArgumentError(
            "`hpgo reproduce --emulate` starts its own processes, and a launcher has started this one",
            "start it alone, without RANK and WORLD_SIZE set",
            code="wrong_state",
        )
    document = "" if write is None else fill(read_text(write, ArgumentError), {EMULATED: ""})
    made = emulated(answers.strategies(), tell=lambda line: click.echo(line, err=True))
    table = tables.emulated(made)
    if write is None:
        click.echo(f"## {EMULATED}\n\n{table}")
        return
    write_text(write, fill(document, {EMULATED: table}), ArgumentError)
    click.echo(f"filled the table of {len(made)} plans in {write}", err=True)


def _abort(_signal: int, _frame: object) -> NoReturn:
    raise click.Abort
