"""How commands show their help: options in sections, as wide as the terminal, in colour where there is one."""

from __future__ import annotations

import os
import re
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

from hpgo.base.errors import HpgoError
from hpgo.cli.terminal import WIDEST

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

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


_WORD = re.compile(
    r"\b([a-z]+(?:_[a-z0-9]+)+|(?<=`)(?:cap|chunks|iterations|ranks)(?=`)"
    r"|(?<=`)(?:cp|devices|ep|pp|tp|vpp)(?==)|(?:recompute|schedule)(?==))\b"
    r"(?:=('?)([\w.]+)\2)?"
)
"""An argument of a function of Python, perhaps with a value. Of single words, only those that mean nothing else."""
_ARGUMENTS = {
    "batch_size": "profile_batch_size",
    "batch_sizes": "batch_size",
    "layer_counts": "profile_layer_counts",
    "boundary_bytes": "profile_boundary",
    "headroom_bytes": "reserve",
    "reserved_bytes": "reserve",
    "deadline_s": "deadline",
    "seq_length": "seq",
}
"""Arguments of functions, and the parameters of commands that stand for them under another name."""
_KEY = re.compile(r": (the key )?`\w+`")
"""A key of a document, behind the place where it stands."""


@contextmanager
def as_options() -> Iterator[None]:
    """Names arguments of functions as the running command's options in errors that pass.

    Keys of documents keep their names, since options don't stand in files.
    """
    try:
        yield
    except HpgoError as error:
        context = click.get_current_context(silent=True)
        if context is None or context.params.get("config") is not None or _KEY.search(error.message):
            raise
        known = {
            str(param.name): next((name for name in param.opts if name.startswith("--")), param.opts[0])
            for param in context.command.params
            if isinstance(param, click.Option) and not param.hidden
        }
        known |= {name: known[other] for name, other in _ARGUMENTS.items() if other in known and name not in known}

        def option(found: re.Match[str]) -> str:
            name = known.get(found[1])
            return found[0] if name is None else f"{name} {found[3]}" if found[3] else name

        message, hint = _WORD.sub(option, error.message), _WORD.sub(option, error.hint)
        if (message, hint) == (error.message, error.hint):
            raise
        raise type(error)(message, hint) from None


class Command(click.Command):
    """A command whose options stand in sections: a title, and the names of parameters with blanks between them."""

    context_class = _Context

    def __init__(self, *args: Any, sections: Mapping[str, str] | None = None, **keywords: Any) -> None:
        super().__init__(*args, **keywords)
        self.sections = {title: names.split() for title, names in (sections or {}).items()}

    def invoke(self, ctx: click.Context) -> Any:
        """Runs the command, and names its options in errors."""
        with as_options():
            return super().invoke(ctx)

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
