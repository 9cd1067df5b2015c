"""Commands, their options as fields of a record, and their help.

A command declares each option once, as a field of a subclass of `Options`. Commands share options by inheriting from a
group of them, or by a constant such as `hpgo.cli.values.AS_JSON`:

    class GreetOptions(Options):
        name: str = argument(metavar="NAME")
        times: int = option("--times", type=int, default=1, help="How often to greet.")


    @takes(GreetOptions)
    def command(options: GreetOptions) -> None: ...
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import textwrap
from collections.abc import Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar, dataclass_transform

import click

from hpgo.base.messages import did_you_mean, shorten
from hpgo.base.signals import uninterrupted
from hpgo.cli.terminal import WIDEST
from hpgo.errors import HpgoError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from dataclasses import Field

    from click.shell_completion import CompletionItem

    _Run = Callable[["_Record"], None]

_Record = TypeVar("_Record", bound="Options")

_LEFT = 30
_MORE = "More options"
_FULL = "hpgo.cli.command.full"


def explain_all(ctx: click.Context) -> None:
    """Have the help of this context's commands explain each option."""
    ctx.meta[_FULL] = True


def is_full(ctx: click.Context) -> bool:
    """Return whether `explain_all` was called."""
    return bool(ctx.meta.get(_FULL))


_COUNTED = re.compile(r"  \[x>=1\]|; x>=1|(?<=\[)x>=1; ")
"""Ranges in the help of click that are obvious: counts start at 1."""


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
        # Set for each command, not only for the root: commands can also be called without the root.
        super().__init__(*args, **{"help_option_names": ["-h", "--help"]} | keywords)
        if self.color is None and os.environ.get("NO_COLOR"):
            self.color = False


_WORD = re.compile(
    r"\b([a-z]+(?:_[a-z0-9]+)+|(?<=`)(?:iterations|ranks)(?=`)"
    r"|(?<=`)(?:cp|devices|ep|pp|tp|vpp)(?==)|(?:optimizer|precision|recompute|schedule)(?==))\b"
    r"(?:=('?)([\w.]+)\2)?"
)
"""Name of an argument of a Python function, and its value if there is one.

Of names without underscore, only those that have no other meaning in a sentence.
"""
_ARGUMENTS = {
    "batch_size": "profile_batch_size",
    "batch_sizes": "batch_size",
    "layer_counts": "profile_layer_counts",
    "boundary_bytes": "profile_boundary",
    "reserved_bytes": "reserve_memory",
    "time_limit_s": "time_limit",
    "sequence_parallel": "no_sequence_parallel",
    "flash_attention": "no_flash_attention",
    "fused_elementwise": "no_fused_elementwise",
    "fused_cross_entropy": "no_fused_cross_entropy",
    "fused_adam": "no_fused_adam",
    "overlap_dp_comm": "no_overlap_dp_comm",
    "overlap_p2p_comm": "no_overlap_p2p_comm",
}
"""Parameter of a command for each argument of a function that has another name there."""
_KEY = re.compile(r": (the key )?`\w+`")
"""A key of a document in a message, after its location."""


@contextmanager
def as_options() -> Iterator[None]:
    """Replace names of arguments in errors by the options of the running command.

    Keys of documents keep their names, because files don't contain options.
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
        # Some arguments have other names on the command line, but only where the command has that option.
        known |= {name: known[other] for name, other in _ARGUMENTS.items() if other in known and name not in known}

        def option(found: re.Match[str]) -> str:
            name = known.get(found[1])
            return found[0] if name is None else f"{name} {found[3]}" if found[3] else name

        message, hint = _WORD.sub(option, error.message), _WORD.sub(option, error.hint)
        if (message, hint) == (error.message, error.hint):
            raise
        raise error.reworded(message, hint) from None


class Command(click.Command):
    """A command whose options are grouped in sections: titles, each with a list of parameter names."""

    context_class = _Context

    def __init__(self, *args: Any, sections: Mapping[str, str] | None = None, brief: str = "", **keywords: Any) -> None:
        """Create a command; `--help` lists the parameters in `brief` without help, and `hpgo help` explains them."""
        super().__init__(*args, **keywords)
        self.sections = {title: names.split() for title, names in (sections or {}).items()}
        self.brief = brief.split()

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command, and replace arguments of functions by options in errors."""
        with as_options():
            return super().invoke(ctx)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write all sections, then the options that are in none."""
        sections = options_of(self, ctx)
        brief = [] if is_full(ctx) else [name for name, _ in sections.pop(_MORE, [])]
        write_columns(formatter, sections)
        if brief:
            # Values and negative forms are left out, so that many options fit on one screen.
            text = " ".join(next(word for word in name.split() if word.startswith("--")) for name in brief)
            words = ctx.command_path.split(" ", 1)
            with formatter.section(f"{_MORE} (`{' help '.join(words)}` explains them)"):
                for line in textwrap.wrap(text, formatter.width - formatter.current_indent, break_on_hyphens=False):
                    formatter.write(f"{'':{formatter.current_indent}}{line}\n")


class Group(click.Group):
    """A command with subcommands, which all have this help."""

    context_class = _Context
    command_class = Command

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options, then the commands."""
        write_columns(formatter, options_of(self, ctx))
        self.format_commands(ctx, formatter)


Table = Mapping[str, Mapping[str, tuple[str, str]]]
"""Title of a help section -> command -> module with the attribute `command`, and a line of help."""
_FORMER_COMMANDS = {"price": "evaluate"}
"""Current name of each former command."""


class UnknownCommandError(click.UsageError):
    """A command that its group does not have, with a hint that names the command that was probably meant."""

    def __init__(self, message: str, hint: str, ctx: click.Context) -> None:
        super().__init__(message, ctx)
        self.hint = hint


def _help_alone() -> None:
    """Print the help of a group that is called without a command."""
    ctx = click.get_current_context()
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


class LazyGroup(Group):
    """A group whose commands are listed in a table, and imported when they are called."""

    def __init__(self, *args: Any, table: Table, **keywords: Any) -> None:
        super().__init__(*args, **keywords | {"invoke_without_command": True, "callback": _help_alone})
        self.table = table
        self._rows = {name: row for section in table.values() for name, row in section.items()}

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of the table, in its order."""
        del ctx
        return list(self._rows)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import a command. Return None if the table does not contain it."""
        del ctx
        if cmd_name not in self._rows:
            return None
        # Python can lose a Ctrl-C during an import, so it is delayed until the import is complete.
        with uninterrupted():
            command: click.Command = importlib.import_module(self._rows[cmd_name][0]).command
        return command

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Complete names from the table, so that no command is imported."""
        from click.shell_completion import CompletionItem

        found = [
            CompletionItem(name, help=line) for name, (_, line) in self._rows.items() if name.startswith(incomplete)
        ]
        return found or click.Command.shell_complete(self, ctx, incomplete)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the command that `args` start with. Raises UsageError with a similar name."""
        if args[0] not in self._rows and not args[0].startswith("-") and not ctx.resilient_parsing:
            raise UnknownCommandError(f"unknown command: `{shorten(args[0])}`", self._meant(ctx, args[0]), ctx)
        return super().resolve_command(ctx, args)

    def _meant(self, ctx: click.Context, name: str) -> str:
        """Return the command of another group that has this name, or else the nearest name of this one."""
        for group, (module, _) in self._rows.items():
            # Only groups are packages. Importing other modules to look for subcommands would take long.
            found = importlib.util.find_spec(module)
            if found is None or found.submodule_search_locations is None:
                continue
            below = self.get_command(ctx, group)
            if isinstance(below, click.Group) and name in below.list_commands(ctx):
                return f"did you mean `{ctx.command_path} {group} {name}`?"
        if (former := _FORMER_COMMANDS.get(name)) in self._rows:
            return f"did you mean `{ctx.command_path} {former}`?"
        return did_you_mean(name, self._rows)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the commands in their sections."""
        del ctx
        rows = {title: [(name, line) for name, (_, line) in rows.items()] for title, rows in self.table.items()}
        write_columns(formatter, rows)


def option(*flags: str, **attributes: Any) -> Any:
    """Declare a field of `Options` as an option; `attributes` are arguments of `click.Option`."""
    return _Declared(partial(click.Option, **attributes), flags)


def argument(**attributes: Any) -> Any:
    """Declare a field of `Options` as an argument; `attributes` are arguments of `click.Argument`."""
    return _Declared(partial(click.Argument, **attributes), ())


@dataclass(frozen=True, slots=True)
class _Declared:
    """A parameter whose name is that of the field. Several records may share one."""

    kind: Callable[..., click.Parameter]
    flags: tuple[str, ...]

    def named(self, name: str) -> click.Parameter:
        return self.kind([name, *self.flags])


@dataclass_transform(kw_only_default=True, frozen_default=True, field_specifiers=(option, argument))
class Options:
    """The parameters of a command. Each subclass is a frozen dataclass with a field for each parameter.

    A subclass that declares a field of its base again replaces that parameter.
    """

    def __init_subclass__(cls) -> None:
        for name, declared in list(vars(cls).items()):
            if isinstance(declared, _Declared):
                # Without a default, a record that tests or code create must set every field.
                setattr(cls, name, field(metadata={"declared": declared}))
        dataclass(frozen=True, kw_only=True)(cls)

    def group(self, kind: type[Options]) -> dict[str, Any]:
        """Return the fields that come from `kind`, a base of this record, by name."""
        return {one.name: getattr(self, one.name) for one in _fields(kind)}


def _fields(record: type[Options]) -> tuple[Field[Any], ...]:
    return fields(record)  # type: ignore[arg-type]  # a dataclass, as all subclasses are


def takes(
    record: type[_Record], *, within: click.Group | None = None, cls: type[Any] = Command, **attributes: Any
) -> Callable[[_Run[_Record]], Any]:
    """Turn a function of one `record` into a command with the fields of `record` as parameters.

    The command is added to the group `within`, if given. `attributes` are arguments of `cls`, the class of the command.
    The docstring of the function is the help.
    """

    def decorate(function: _Run[_Record]) -> Any:
        made = cls(
            function.__name__,
            params=[one.metadata["declared"].named(one.name) for one in _fields(record)],
            callback=lambda **values: function(record(**values)),
            help=function.__doc__,
            **attributes,
        )
        if within is not None:
            within.add_command(made)
        return made

    return decorate


def options_of(command: click.Command, ctx: click.Context) -> dict[str, list[tuple[str, str]]]:
    """Return options and their help texts by section title, in the order of the help."""
    shown = {
        str(param.name): (record[0], _COUNTED.sub("", record[1]))
        for param in command.get_params(ctx)
        if isinstance(param, click.Option) and (record := param.get_help_record(ctx)) is not None
    }
    titles = command.sections if isinstance(command, Command) else {}
    if isinstance(command, Command) and command.brief:
        titles = titles | {_MORE: command.brief}
    found = {title: [shown.pop(name) for name in names] for title, names in titles.items()}
    if _MORE in found:
        # A section for `--help` alone would take three lines of the screen.
        found[_MORE] += [shown.pop(name) for name in list(shown)]
    return found | ({"Options": list(shown.values())} if shown else {})


def write_columns(formatter: click.HelpFormatter, sections: Mapping[str, Sequence[tuple[str, str]]]) -> None:
    """Write names and texts in two columns below their titles, with the same width in all sections."""
    width = max((len(name) for rows in sections.values() for name, _ in rows if len(name) <= _LEFT), default=0)
    for title, rows in sections.items():
        with formatter.section(title):
            styled = [(click.style(f"{name:{width}}", fg="cyan"), text) for name, text in rows]
            formatter.write_dl(styled, col_max=_LEFT)
