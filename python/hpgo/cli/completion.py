"""Command `hpgo completion`: complete commands, options, files and names in bash, zsh and fish.

Click computes the completions. This module changes its scripts for two cases that they don't handle: words of bash
with `=`, `:` or `@`, and `--option=value` in all three shells.
"""

from __future__ import annotations

import os
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click
from click.shell_completion import (
    BashComplete,
    CompletionItem,
    FishComplete,
    ShellComplete,
    ZshComplete,
    add_completion_class,
    split_arg_string,
)

from hpgo.base.documents import make_folder, read_text, write_text
from hpgo.cli.command import Options, argument, option, takes
from hpgo.errors import ArgumentError

if TYPE_CHECKING:
    from collections.abc import Mapping

_BREAKS = "\"'@><=;|&(:"
"""Characters that end a word in bash, by default (COMP_WORDBREAKS)."""

_BASH = r"""%(complete_func)s() {
    local IFS=$'\n' completion type value
    for completion in $(COMP_WORDS="${COMP_LINE:0:COMP_POINT}" %(complete_var)s=bash_complete "$1"); do
        IFS=',' read -r type value <<< "$completion"
        case $type in
            dir) COMPREPLY=(); compopt -o dirnames ;;
            file) COMPREPLY=(); compopt -o default ;;
            plain) COMPREPLY+=("$value"); [[ $value == *@ ]] && compopt -o nospace ;;
        esac
    done
    return 0
}
complete -o nosort -F %(complete_func)s %(prog_name)s
"""


def _changed(script: str, *pairs: tuple[str, str]) -> str:
    """Return a script of click with some texts replaced."""
    for old, new in pairs:
        script = script.replace(old, new)
    return script


class _Whole(ShellComplete):
    """Completes `--option=value` as one word."""

    def get_completions(self, args: list[str], incomplete: str) -> list[CompletionItem[str]]:
        found = super().get_completions(args, incomplete)
        option, equals, _ = incomplete.partition("=")
        if not (equals and option.startswith("-")):
            return found
        return [
            item if item.type != "plain" else CompletionItem(f"{option}={item.value}", help=item.help) for item in found
        ]


@add_completion_class
class _Bash(_Whole, BashComplete):
    source_template = _BASH

    def get_completion_args(self) -> tuple[list[str], str]:
        line = os.environ["COMP_WORDS"]
        words = split_arg_string(line)[1:]
        return (words[:-1], words[-1]) if words and not line[-1:].isspace() else (words, "")

    def get_completions(self, args: list[str], incomplete: str) -> list[CompletionItem[str]]:
        # Bash replaces only the part after its last word break, so completions must not repeat what is before it. `@`
        # starts a word for bash, so it is part of the completion.
        kept = max(incomplete.rfind(letter) for letter in _BREAKS)
        kept += incomplete[kept : kept + 1] != "@"
        found = super().get_completions(args, incomplete)
        return [CompletionItem(item.value[kept:], item.type) if item.type == "plain" else item for item in found]


@add_completion_class
class _Zsh(_Whole, ZshComplete):
    source_template = _changed(
        ZshComplete.source_template,
        ("    compdef ", "    (( $+functions[compdef] )) || { autoload -Uz compinit && compinit -u; }\n    compdef "),
        ("compadd -U ", """compadd -S "${${${${completions[1]}[-1]}/@/}/?/ }" -U """),
    )


@add_completion_class
class _Fish(_Whole, FishComplete):
    source_template = _changed(FishComplete.source_template, ("string split ", "string split --max 1 "))


@dataclass(frozen=True, slots=True)
class _Shell:
    """Completion of one shell: the class that generates its script, and the files to install it."""

    complete: type[ShellComplete]
    folder: tuple[str, str, str]
    """Environment variable of the base folder, its default below the home, and the script's path below it."""
    start: tuple[str, str] | None
    """Environment variable of the folder of the start-up file, and its name; None if no line is needed there."""

    def script(self, root: click.Command) -> str:
        return self.complete(root, {}, "hpgo", "_HPGO_COMPLETE").source()

    def file(self) -> Path:
        variable, below_home, inside = self.folder
        return Path(os.environ.get(variable) or Path.home() / below_home) / inside

    def start_file(self) -> Path | None:
        return None if self.start is None else Path(os.environ.get(self.start[0]) or Path.home()) / self.start[1]


_SHELLS: Mapping[str, _Shell] = {
    "bash": _Shell(_Bash, ("XDG_DATA_HOME", ".local/share", "hpgo/completion.bash"), ("", ".bashrc")),
    "zsh": _Shell(_Zsh, ("XDG_DATA_HOME", ".local/share", "hpgo/completion.zsh"), ("ZDOTDIR", ".zshrc")),
    "fish": _Shell(_Fish, ("XDG_CONFIG_HOME", ".config", "fish/completions/hpgo.fish"), None),
}
_MARK = "# completion of hpgo"


class CompletionOptions(Options):
    """Options of `hpgo completion`."""

    shell: str | None = argument(type=click.Choice(list(_SHELLS)), required=False)
    install: bool = option(
        "--install", is_flag=True, help="Install it for this user: a script, and a line that loads it."
    )
    remove: bool = option("--remove", is_flag=True, help="Remove the script and the line again.")


@takes(CompletionOptions)
def command(options: CompletionOptions) -> None:
    """Complete commands, options, files, models, clusters, schedules and layers in SHELL.

    SHELL is bash (4.4 or later), zsh or fish; the default is $SHELL. Without options, the script is printed.

    With --install, bash and zsh load the script by a line in ~/.bashrc or ~/.zshrc, and fish from its folder of
    completions. The command prints the files that it changes. Open a new shell to use it.

    \b
    Examples:
      hpgo completion --install
      hpgo completion fish --install
      hpgo completion bash > /etc/bash_completion.d/hpgo
    """
    ctx = click.get_current_context()
    found = _SHELLS[options.shell or _own()]
    if options.install:
        _install(found, ctx.find_root().command)
    elif options.remove:
        _remove(found)
    else:
        click.echo(found.script(ctx.find_root().command), nl=False)


def _own() -> str:
    name = Path(os.environ.get("SHELL", "")).name
    if name not in _SHELLS:
        what = f"unknown shell: `{name}`" if name else "$SHELL is not set"
        raise ArgumentError(what, f"name a shell: `hpgo completion {next(iter(_SHELLS))}`; known: {', '.join(_SHELLS)}")
    return name


def _install(shell: _Shell, root: click.Command) -> None:
    file = shell.file()
    make_folder(file.parent)
    write_text(file, shell.script(root), ArgumentError)
    click.echo(f"wrote {file}", err=True)
    if (start := shell.start_file()) is not None:
        name = shlex.quote(str(file))
        # Installing twice must not add a second line.
        others = _without_mark(start)
        write_text(start, f"{others}[ -r {name} ] && . {name}  {_MARK}\n", ArgumentError)
        click.echo(f"added a line to {start}", err=True)
    click.echo("open a new shell, type `hpgo pl` and press Tab", err=True)


def _remove(shell: _Shell) -> None:
    file, start = shell.file(), shell.start_file()
    if file.exists():
        file.unlink()
        click.echo(f"removed {file}", err=True)
    if start is not None and start.exists() and (others := _without_mark(start)) != _text(start):
        write_text(start, others, ArgumentError)
        click.echo(f"removed a line of {start}", err=True)


def _without_mark(start: Path) -> str:
    lines = _text(start).splitlines(keepends=True)
    kept = "".join(line for line in lines if not line.rstrip().endswith(_MARK))
    return kept if not kept or kept.endswith("\n") else f"{kept}\n"


def _text(start: Path) -> str:
    """Return the text of a file; empty if the file is missing or empty."""
    if not start.exists() or not start.stat().st_size:
        return ""
    return read_text(start, ArgumentError)
