"""Command `hpgo help`: show the help of a command."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click
from click.shell_completion import CompletionItem

from hpgo.base.messages import did_you_mean, shorten
from hpgo.cli.command import Options, argument, explain_all, takes

if TYPE_CHECKING:
    from collections.abc import Sequence


class _Word(click.ParamType):  # type: ignore[type-arg]  # not generic before click 8.5
    """The name of a command, or of a subcommand of the command before it."""

    name = "command"

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """Complete the names of commands."""
        del param
        above = _below(ctx.find_root(), ctx.params.get("names") or ())
        names = above.command.list_commands(above) if isinstance(above.command, click.Group) else []
        return [CompletionItem(name) for name in names if name.startswith(incomplete)]


class HelpOptions(Options):
    """Options of `hpgo help`."""

    names: tuple[str, ...] = argument(type=_Word(), nargs=-1, metavar="[COMMAND]...")


@takes(HelpOptions)
def command(options: HelpOptions) -> None:
    """Show the help of COMMAND, or the list of commands. Unlike `--help`, it explains each option.

    If the manual is installed, `man hpgo-plan` shows the page of `hpgo plan`.

    \b
    Examples:
      hpgo help plan
      hpgo help llm estimate
    """
    ctx = click.get_current_context()
    # Unlike `--help`, this command lists rarely used options with their explanation.
    explain_all(ctx)
    click.echo(_below(ctx.find_root(), options.names).get_help())


def _below(ctx: click.Context, names: Sequence[str]) -> click.Context:
    """Return the context of the command with the path `names`. Raises click.UsageError if it does not exist."""
    for name in names:
        group = ctx.command
        known = group.list_commands(ctx) if isinstance(group, click.Group) else []
        if not isinstance(group, click.Group) or name not in known:
            hint = did_you_mean(name, known) or "it has no subcommands"
            raise click.UsageError(f"`{ctx.command_path}` has no command `{shorten(name)}`; {hint}", ctx)
        found = group.get_command(ctx, name)
        assert found is not None  # noqa: S101 -- `list_commands` has it
        ctx = found.context_class(found, parent=ctx, info_name=name)
    return ctx
