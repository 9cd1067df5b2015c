"""Command `hpgo reproduce`: compare published planning results with ours, as tables."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING, NoReturn

import click

from hpgo.cli.command import Command
from hpgo.cli.terminal import progress

if TYPE_CHECKING:
    from hpgo.reproduce.answers import Answers


@click.command(cls=Command)
def command() -> None:
    """Compare published planning results with hpgo.

    The command solves each published planning problem with the original algorithm and with the current planner, and
    prints Markdown tables. It takes about a minute.

    \b
    Examples:
      hpgo reproduce
    """
    from hpgo.reproduce.tables import TABLES

    made = answered()
    for name, table in TABLES.items():
        click.echo(f"## {name}\n\n{table(made)}\n")


def answered() -> Answers:
    """Return the answers to all published questions, and show the progress on a terminal.

    Raises click.Abort on Ctrl-C. A search that KeyboardInterrupt ends returns its best plan so far, which would be
    reported as the answer.
    """
    from hpgo.reproduce.answers import all_answers

    before = signal.signal(signal.SIGINT, _abort)
    try:
        with progress("reproducing") as tell:
            return all_answers(tell)
    finally:
        signal.signal(signal.SIGINT, before)


def _abort(_signal: int, _frame: object) -> NoReturn:
    raise click.Abort
