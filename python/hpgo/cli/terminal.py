"""Tables and progress: as wide as the terminal and in colour there, plain text in a pipe or a file."""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

import click

from hpgo.tables import within

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

WIDTH = 80
"""Of what is printed into a pipe, where names of columns can do something about it."""
_BAR = 10
_PATIENCE_S = 0.5
_CLEAR = "\r\x1b[K"  # back to the begin of the line, and nothing on it


def table(columns: Sequence[str], rows: Iterable[Sequence[object]], title: str | None = None) -> None:
    """Prints `rows` under `columns` on stdout; columns of numbers, with or without a unit, are set to the right.

    Columns stand two blanks apart. On a terminal long cells wrap; in a pipe each row is one line.
    """
    on_terminal = sys.stdout.isatty()
    head, body = within(shutil.get_terminal_size().columns if on_terminal else WIDTH, columns, rows, fold=on_terminal)
    if title:
        click.secho(f"{title}\n", bold=True)
    for line in head:
        click.secho(line, fg="cyan")
    for line in body:
        click.echo(line)


def sources(source_of: Mapping[str, str]) -> None:
    """Prints where each named thing comes from, those from one place together."""
    names: dict[str, list[str]] = {}
    for name, source in source_of.items():
        names.setdefault(source, []).append(name)
    click.echo()
    for source, those in names.items():
        click.echo(
            textwrap.fill(f"{', '.join(those)}: {source}", WIDTH, subsequent_indent="  ", break_on_hyphens=False)
        )


@contextmanager
def progress(label: str) -> Iterator[Callable[[float, str], None]]:
    """A line on stderr while the block runs, gone afterwards; nothing where stderr is no terminal.

    Yields a function that takes the fraction done (0 to 1) and a remark to show behind the bar.
    """
    if not sys.stderr.isatty():
        yield lambda _fraction, _remark: None
        return
    started_s = time.monotonic()

    def draw(fraction: float, remark: str) -> None:
        done = round(_BAR * max(0.0, min(1.0, fraction)))
        line = f"{'━' * done}{'─' * (_BAR - done)} {time.monotonic() - started_s:.0f} s  {label}: {remark}"
        room = (os.get_terminal_size(sys.stderr.fileno()).columns or WIDTH) - 1
        click.echo(f"{_CLEAR}{line[:room]}", err=True, nl=False)

    try:
        yield draw
    finally:
        click.echo(_CLEAR, err=True, nl=False)


@contextmanager
def searching(label: str, shown: Callable[[float], str]) -> Iterator[Callable[[float, float], None] | None]:
    """A function for a search to call with its best value and bound; it draws once patience has run out.

    None where stderr is no terminal.
    """
    if not sys.stderr.isatty():
        yield None
        return
    started_s = time.monotonic()
    with progress(label) as draw:

        def tell(best: float, bound: float) -> None:
            if time.monotonic() - started_s < _PATIENCE_S:
                return
            if best == float("inf"):
                draw(0.0, "no plan yet; Ctrl-C gives up")
            else:
                draw(bound / best if best else 1.0, f"best {shown(best)}, Ctrl-C takes it; bound {shown(bound)}")

        yield tell
