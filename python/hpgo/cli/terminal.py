"""Tables, messages and progress: drawn by rich on a terminal, plain text in a pipe or a file."""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
import time
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

import click

from hpgo.base.messages import cut_words, percent, printable
from hpgo.base.tables import cells_of, folded, numeric, plain

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

WIDTH = 80
"""Columns of text that is printed into a pipe."""
WIDEST = 120
"""Columns of prose on wider terminals, because longer lines are hard to read."""
_NARROWEST = 40
_BAR = 8
_SILENT_S = 0.5
"""Time that a search runs before a progress bar appears, so that short searches don't flicker."""
_MIN_LINE_S = 0.1
"""Shortest time between two progress lines, so that each can be seen."""


def width() -> int:
    """Return the columns for prose on stdout: the terminal's, limited to 40 to `WIDEST`, or `WIDTH` in a pipe."""
    if not sys.stdout.isatty():
        return WIDTH
    return min(max(shutil.get_terminal_size().columns, _NARROWEST), WIDEST)


def table(columns: Sequence[str], rows: Iterable[Sequence[object]], title: str | None = None) -> None:
    """Print `rows` under `columns` on stdout, with columns of numbers aligned to the right.

    On a terminal, long cells wrap. In a pipe, each row is one line.
    """
    if sys.stdout.isatty():
        _rich_table(columns, cells_of(rows), title)
        return
    for line in [*([title, ""] if title else []), *plain(columns, rows, WIDTH)]:
        click.echo(line)


def _rich_table(columns: Sequence[str], cells: list[list[str]], title: str | None) -> None:
    from rich.console import Console
    from rich.measure import Measurement
    from rich.table import Table
    from rich.text import Text

    console = Console()
    drawn = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="cyan")
    names = folded(columns, cells, console.width)
    # Column names may take several lines. Shorter ones are padded, so that all end above their column.
    tall = max(map(len, names))
    for at, (name, right) in enumerate(zip(names, numeric(cells, len(columns)), strict=True)):
        words = [*name, *(word for row in cells for word in ([row[at]] if right else row[at].split()))]
        drawn.add_column(
            Text("\n".join([""] * (tall - len(name)) + name)),
            justify="right" if right else "left",
            # Without it, rich drops columns that don't fit. With it, the terminal wraps the row.
            min_width=max(map(len, words)),
        )
    for row in cells:
        drawn.add_row(*map(Text, row))  # As plain strings, brackets in a cell would be markup.
    if title:
        console.print(Text(f"{title}\n", style="bold"))
    # A table that is wider than the terminal is printed in full, since cropped numbers are useless.
    minimum = Measurement.get(console, console.options, drawn).minimum
    console.print(drawn, width=max(console.width, minimum), crop=False)


def say(kind: str, text: str) -> None:
    """Print an `error`, `hint`, `note` or `warning` on stderr, as one line without control characters.

    Long words of an error are cut, such as paths. Hints may be commands to copy, so they stay whole.
    If stderr is closed or its disk is full, the text is dropped without an error.
    """
    line = printable(text)
    try:
        click.echo(f"{kind}: {cut_words(line) if kind == 'error' else line}", err=True)
    except OSError:
        # Later messages and the flush at exit must not fail for the same reason.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())


def sources(source_of: Mapping[str, str]) -> None:
    """Print the sources of named things, with equal sources in one line."""
    names: dict[str, list[str]] = {}
    for name, source in source_of.items():
        names.setdefault(source, []).append(name)
    click.echo()
    for source, same in names.items():
        click.echo(
            textwrap.fill(
                printable(f"{', '.join(same)}: {source}"), width(), subsequent_indent="  ", break_on_hyphens=False
            )
        )


@contextmanager
def progress(label: str) -> Iterator[Callable[[float, str], None]]:
    """Show a progress bar on stderr while the block runs, if stderr is a terminal.

    Yields a function that takes the fraction done (0 to 1) and a remark to show after the bar.
    """
    if not sys.stderr.isatty():
        yield lambda _fraction, _remark: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn
    from rich.table import Column

    words = TextColumn("{task.description}: {task.fields[remark]}", markup=False, table_column=Column(no_wrap=True))
    columns = (BarColumn(bar_width=_BAR), TextColumn("{task.elapsed:.0f} s"), words)
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(label, total=1.0, remark="")
        yield lambda fraction, remark: bar.update(task, completed=fraction, remark=remark)


@contextmanager
def searching(label: str, shown: Callable[[float], str]) -> Iterator[Callable[[float, float], None] | None]:
    """Yield a function that shows the best value and the bound of a search, or None if stderr is not a terminal.

    The progress bar appears after 0.5 s.
    """
    if not sys.stderr.isatty():
        yield None
        return
    started_s = time.monotonic()
    with ExitStack() as stack:
        draw: Callable[[float, str], None] | None = None

        def tell(best: float, bound: float) -> None:
            nonlocal draw
            if draw is None:
                if time.monotonic() - started_s < _SILENT_S:
                    return
                draw = stack.enter_context(progress(label))
            if best == float("inf"):
                draw(0.0, "no plan yet; Ctrl-C ends the search")
            else:
                # Three digits are enough for progress, and keep the line short.
                step, minimum = (shown(float(f"{value:.3g}")) for value in (best, bound))
                gap = f", gap {percent(best / bound - 1)}" if bound > best / 2 else ""
                proven = f", bound {minimum}{gap}" if bound > 0 else ""
                draw(bound / best if best else 1.0, f"best {step}{proven}; Ctrl-C takes it")

        yield tell


@contextmanager
def passing_lines() -> Iterator[Callable[[str], None]]:
    """Yield a function that prints lines on stdout.

    If stderr is a terminal, it shows the current line only. If stdout is one too, only the last line remains. The
    cursor stays visible, because the process may be killed at any time. The parent process then calls `clear_line`.
    """
    if not sys.stderr.isatty():
        yield click.echo
        return
    last, until_s = "", 0.0
    stays = not sys.stdout.isatty()

    def show(text: str) -> None:
        nonlocal last, until_s
        last = text
        if stays:
            click.echo(text)
        if time.monotonic() >= until_s:
            clear_line()
            click.echo(text[: shutil.get_terminal_size().columns - 1], nl=False, err=True)
            until_s = time.monotonic() + _MIN_LINE_S

    try:
        yield show
    finally:
        clear_line()
        if last and not stays:
            click.echo(last)


def clear_line() -> None:
    """Clear the line of the cursor, if stderr is a terminal."""
    if sys.stderr.isatty():
        click.echo("\r\x1b[K", nl=False, err=True)
