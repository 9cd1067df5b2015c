"""Commands: the record of options that a command's function takes, and the help that lists these options.

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
_GLUE = "\u00a0"
_FULL = "hpgo.cli.command.full"


def explain_all(ctx: click.Context) -> None:
    """Have the help of this context's commands explain each option."""
    ctx.meta[_FULL] = True


def is_full(ctx: click.Context) -> bool:
    """Whether `explain_all` was called."""
    return bool(ctx.meta.get(_FULL))


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
    "headroom_bytes": "reserve_memory",
    "reserved_bytes": "reserve_memory",
    "time_limit_s": "time_limit",
    "sequence_parallel": "no_sequence_parallel",
    "flash_attention": "no_flash_attention",
    "fused_elementwise": "no_fused_elementwise",
    "fused_cross_entropy": "no_fused_cross_entropy",
    "fused_adam": "no_fused_adam",
    "overlap_dp_comm": "no_overlap_dp_comm",
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
        raise error.reworded(message, hint) from None


class Command(click.Command):
    """A command whose options stand in sections: a title, and the names of parameters with blanks between them."""

    context_class = _Context

    def __init__(self, *args: Any, sections: Mapping[str, str] | None = None, brief: str = "", **keywords: Any) -> None:
        """`brief` names parameters of which `--help` lists the options alone; `hpgo help` explains them."""
        super().__init__(*args, **keywords)
        self.sections = {title: names.split() for title, names in (sections or {}).items()}
        self.brief = brief.split()

    def invoke(self, ctx: click.Context) -> Any:
        """Runs the command, and names its options in errors."""
        with as_options():
            return super().invoke(ctx)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Writes each section, and the options that are in none behind them."""
        sections = options_of(self, ctx)
        brief = [] if is_full(ctx) else [name for name, _ in sections.pop(_MORE, [])]
        write_columns(formatter, sections)
        if brief:
            # Options and their values stay on one line.
            text = ", ".join(name.replace(" ", _GLUE) for name in brief)
            words = ctx.command_path.split(" ", 1)
            with formatter.section(f"{_MORE} (`{' help '.join(words)}` explains them)"):
                for line in textwrap.wrap(text, formatter.width - formatter.current_indent, break_on_hyphens=False):
                    formatter.write(f"{'':{formatter.current_indent}}{line.replace(_GLUE, ' ')}\n")


class Group(click.Group):
    """A command with commands of its own, all with such help."""

    context_class = _Context
    command_class = Command

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Writes the options, then the commands."""
        write_columns(formatter, options_of(self, ctx))
        self.format_commands(ctx, formatter)


Table = Mapping[str, Mapping[str, tuple[str, str]]]
"""Title of a section of help -> command -> the module whose attribute `command` it is, and its line of help."""


def _help_alone() -> None:
    """Print the help of a group that is called without a command."""
    ctx = click.get_current_context()
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


class LazyGroup(Group):
    """A group whose commands stand in a table, and are imported when they are called."""

    def __init__(self, *args: Any, table: Table, **keywords: Any) -> None:
        super().__init__(*args, **keywords | {"invoke_without_command": True, "callback": _help_alone})
        self.table = table
        self._rows = {name: row for section in table.values() for name, row in section.items()}

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of the table, in its order."""
        del ctx
        return list(self._rows)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import a command; None if the table has no such name."""
        del ctx
        if cmd_name not in self._rows:
            return None
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
        """Find the command that `args` begin with. Raises UsageError with what may be meant."""
        if args[0] not in self._rows and not args[0].startswith("-") and not ctx.resilient_parsing:
            ctx.fail(f"there is no command `{shorten(args[0])}`; {self._meant(ctx, args[0])}")
        return super().resolve_command(ctx, args)

    def _meant(self, ctx: click.Context, name: str) -> str:
        """Return the command of another group that has this name, or else the nearest name of this one."""
        for group, (module, _) in self._rows.items():
            # Commands with a table of others are packages. All other modules need not be imported for this.
            found = importlib.util.find_spec(module)
            if found is None or found.submodule_search_locations is None:
                continue
            below = self.get_command(ctx, group)
            if isinstance(below, click.Group) and name in below.list_commands(ctx):
                return f"did you mean `{ctx.command_path} {group} {name}`?"
        return did_you_mean(name, self._rows)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the commands in their sections."""
        del ctx
        rows = {title: [(name, line) for name, (_, line) in rows.items()] for title, rows in self.table.items()}
        write_columns(formatter, rows)


def option(*flags: str, **attributes: Any) -> Any:
    """Declare a field of `Options` as an option; `attributes` are those of `click.Option`."""
    return _Declared(partial(click.Option, **attributes), flags)


def argument(**attributes: Any) -> Any:
    """Declare a field of `Options` as an argument; `attributes` are those of `click.Argument`."""
    return _Declared(partial(click.Argument, **attributes), ())


@dataclass(frozen=True, slots=True)
class _Declared:
    """A parameter without its name, which is the name of the field. Several records may have it as a field."""

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
                # Without a default the field is required, so that none is forgotten where a record is made by hand.
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
    """Make a function a command whose parameters are the fields of `record`, of which it gets one.

    The command is added to `within`, if given. `attributes` are those of the command's class, `cls`. The function's
    docstring is the help.
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
    """Options and what is said of them, by the title of their section, in the order of the help."""
    shown = {
        str(param.name): (record[0], _COUNTED.sub("", record[1]))
        for param in command.get_params(ctx)
        if isinstance(param, click.Option) and (record := param.get_help_record(ctx)) is not None
    }
    titles = command.sections if isinstance(command, Command) else {}
    if isinstance(command, Command) and command.brief:
        titles = titles | {_MORE: command.brief}
    found = {title: [shown.pop(name) for name in names] for title, names in titles.items()}
    return found | ({"Options": list(shown.values())} if shown else {})


def write_columns(formatter: click.HelpFormatter, sections: Mapping[str, Sequence[tuple[str, str]]]) -> None:
    """Writes names and what is said of them below their titles, all in the same two columns."""
    width = max((len(name) for rows in sections.values() for name, _ in rows if len(name) <= _LEFT), default=0)
    for title, rows in sections.items():
        with formatter.section(title):
            styled = [(click.style(f"{name:{width}}", fg="cyan"), text) for name, text in rows]
            formatter.write_dl(styled, col_max=_LEFT)
