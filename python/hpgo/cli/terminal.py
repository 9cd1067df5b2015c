"""Tables and progress bars: rich on a terminal, plain text in a pipe or a file."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

import click

from hpgo.tables import numeric, plain, printable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence


def table(columns: Sequence[str], rows: Iterable[Sequence[object]], title: str | None = None) -> None:
    """Prints `rows` under `columns` on stdout; columns of numbers, with or without a unit, are set to the right.

    On a terminal long cells wrap; in a pipe each row is one line, columns two blanks apart.
    """
    if sys.stdout.isatty():
        _rich_table(columns, [[printable(str(cell)) for cell in row] for row in rows], title)
        return
    for line in [*([title, ""] if title else []), *plain(columns, rows)]:
        click.echo(line)


@contextmanager
def progress(label: str) -> Iterator[Callable[[float, str], None]]:
    """A bar on stderr while the block runs, and nothing where stderr is no terminal.

    Yields a function that takes the fraction done (0 to 1) and a remark to show behind the bar.
    """
    if not sys.stderr.isatty():
        yield lambda _fraction, _remark: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TextColumn("{task.fields[remark]}"))
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(label, total=1.0, remark="")
        yield lambda fraction, remark: bar.update(task, completed=fraction, remark=remark)


def _rich_table(columns: Sequence[str], cells: list[list[str]], title: str | None) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    drawn = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    for column, right in zip(columns, numeric(cells, len(columns)), strict=True):
        drawn.add_column(column, justify="right" if right else "left", overflow="fold", no_wrap=right)
    for row in cells:
        drawn.add_row(*map(Text, row))  # brackets in a cell are no markup
    Console().print(drawn)
