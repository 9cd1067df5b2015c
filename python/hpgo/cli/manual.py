"""Manual pages for `man`, generated from the help of the commands. The wheel installs them."""

from __future__ import annotations

import inspect
import re
import textwrap
from typing import TYPE_CHECKING

import click

from hpgo.cli.command import options_of

if TYPE_CHECKING:
    from collections.abc import Iterator

_EXIT = {
    "0": "Success.",
    "1": "Failure: a file is wrong or missing, or no plan fits. The reason is on standard error.",
    "2": "Wrong usage.",
    "130": "Interrupted.",
}
_AS_WRITTEN = (".nh", ".ad l")
"""Requests of roff that turn off hyphenation and justification, so that commands can be copied."""
_CODE = re.compile(r"`([^`]+)`")


def pages(root: click.Command, name: str = "hpgo") -> dict[str, str]:
    """Return the manual page of a command and of all its subcommands, by file name.

    >>> import click
    >>> root = click.Group("tool", help="Do it.", commands=[click.Command("now", help="At once.")])
    >>> made = pages(root, "tool")
    >>> list(made), made["tool-now.1"].splitlines()[4]
    (['tool.1', 'tool-now.1'], 'tool\\\\-now \\\\- At once')
    """
    return {f"{_title(ctx)}.1": _page(ctx) for ctx in _contexts(root, name, None)}


def _contexts(command: click.Command, name: str, parent: click.Context | None) -> Iterator[click.Context]:
    ctx = command.context_class(command, parent=parent, info_name=name, **command.context_settings)
    yield ctx
    for below, one in _below(ctx):
        yield from _contexts(one, below, ctx)


def _title(ctx: click.Context) -> str:
    return ctx.command_path.replace(" ", "-")


def _below(ctx: click.Context) -> list[tuple[str, click.Command]]:
    group = ctx.command
    if not isinstance(group, click.Group):
        return []
    return [(name, command) for name in group.list_commands(ctx) if (command := group.get_command(ctx, name))]


def _page(ctx: click.Context) -> str:
    command, title = ctx.command, _title(ctx)
    first, *others = inspect.cleandoc(command.help or "").split("\n\n")
    # Examples get a section of their own, after the options.
    examples = [text for text in others if "Examples:" in text.split("\n")[:2]]
    usage = " ".join(command.collect_usage_pieces(ctx))
    lines = [f'.TH {title.upper()} 1 "" hpgo "Manual of hpgo"', *_AS_WRITTEN, ".SH NAME"]
    lines += [f"{_escaped(title)} \\- {_escaped(' '.join(first.split()).removesuffix('.'))}"]
    lines += [".SH SYNOPSIS", f"\\fB{_escaped(ctx.command_path)}\\fR {_escaped(usage)}"]
    lines += [".SH DESCRIPTION", *_paragraphs([first, *(text for text in others if text not in examples)])]
    lines += [".SH OPTIONS"]
    sections = options_of(command, ctx)
    for section, rows in sections.items():
        lines += [f".SS {_escaped(section)}"] * (len(sections) > 1)
        for option, text in rows:
            lines += [".TP", f"\\fB{_escaped(option)}\\fR", _prose(text)]
    if below := _below(ctx):
        lines.append(".SH COMMANDS")
        for name, one in below:
            page = f"{title}-{name}"
            lines += [".TP", f"\\fB{_escaped(page)}\\fR(1)", _prose(one.get_short_help_str(200))]
    for text in examples:
        lines += [".SH EXAMPLES", ".nf", *(_escaped(line.strip()) for line in text.splitlines()[2:]), ".fi"]
    lines.append(".SH EXIT STATUS")
    for code, meaning in _EXIT.items():
        lines += [".TP", f"\\fB{code}\\fR", _prose(meaning)]
    if ctx.parent is not None:
        lines += [".SH SEE ALSO", f"\\fB{_escaped(_title(ctx.parent))}\\fR(1)"]
    return "\n".join(lines) + "\n"


def _paragraphs(texts: list[str]) -> list[str]:
    lines: list[str] = []
    for text in texts:
        lines += [".PP"] * bool(lines)
        if text.startswith("\b"):
            lines += [".nf", *map(_escaped, text.splitlines()[1:]), ".fi"]
        else:
            lines.append(_prose(text))
    return lines


def _prose(text: str) -> str:
    """Return one paragraph in roff, with text between backticks in bold."""
    lines = textwrap.wrap(text, 76, break_long_words=False, break_on_hyphens=False)
    return _CODE.sub(r"\\fB\1\\fR", "\n".join(map(_escaped, lines)))


def _escaped(text: str) -> str:
    """Return `text` with the characters escaped that roff would interpret."""
    letters = text.replace("\\", "\\e").replace("-", "\\-")
    return f"\\&{letters}" if letters.startswith((".", "'")) else letters
