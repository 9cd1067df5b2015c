"""How commands show their help: options in sections, as wide as the terminal, in colour where there is one."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, Any

import click

from hpgo.cli.terminal import WIDEST

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_LEFT = 30
_COUNTED = re.compile(r"  \[x>=1\]|; x>=1|(?<=\[)x>=1; ")
"""What click says of whole numbers: that they begin with 1 goes without saying."""


class _Formatter(click.HelpFormatter):
    def __init__(self, indent_increment: int = 2, width: int | None = None, max_width: int | None = None) -> None:
        super().__init__(indent_increment, width, max_width or WIDEST)

    def write_heading(self, heading: str) -> None:
        self.write(f"{'':{self.current_indent}}{click.style(f'{heading}:', bold=True)}\n")

    def write_usage(self, prog: str, args: str = "", prefix: str | None = None) -> None:
        super().write_usage(prog, args, prefix or click.style("Usage:", bold=True) + " ")


class _Context(click.Context):
    formatter_class = _Formatter

    def __init__(self, *args: Any, **keywords: Any) -> None:
        # Here, not at the root: click keeps the help option of whoever asked first, and a command may be called alone.
        super().__init__(*args, **{"help_option_names": ["-h", "--help"]} | keywords)
        if self.color is None and os.environ.get("NO_COLOR"):
            self.color = False


class Command(click.Command):
    """A command whose options stand in sections: a title, and the names of parameters with blanks between them."""

    context_class = _Context

    def __init__(self, *args: Any, sections: Mapping[str, str] | None = None, **keywords: Any) -> None:
        super().__init__(*args, **keywords)
        self.sections = {title: names.split() for title, names in (sections or {}).items()}

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Writes each section, and the options that are in none behind them."""
        write_columns(formatter, options_of(self, ctx))


class Group(click.Group):
    """A command with commands of its own, all with such help."""

    context_class = _Context
    command_class = Command

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Writes the options, then the commands."""
        write_columns(formatter, options_of(self, ctx))
        self.format_commands(ctx, formatter)


def options_of(command: click.Command, ctx: click.Context) -> dict[str, list[tuple[str, str]]]:
    """Options and what is said of them, by the title of their section, in the order of the help."""
    shown = {
        str(param.name): (record[0], _COUNTED.sub("", record[1]))
        for param in command.get_params(ctx)
        if isinstance(param, click.Option) and (record := param.get_help_record(ctx)) is not None
    }
    titles = command.sections if isinstance(command, Command) else {}
    found = {title: [shown.pop(name) for name in names] for title, names in titles.items()}
    return found | ({"Options": list(shown.values())} if shown else {})


def write_columns(formatter: click.HelpFormatter, sections: Mapping[str, Sequence[tuple[str, str]]]) -> None:
    """Writes names and what is said of them below their titles, all in the same two columns."""
    width = max((len(name) for rows in sections.values() for name, _ in rows if len(name) <= _LEFT), default=0)
    for title, rows in sections.items():
        with formatter.section(title):
            styled = [(click.style(f"{name:{width}}", fg="cyan"), text) for name, text in rows]
            formatter.write_dl(styled, col_max=_LEFT)
