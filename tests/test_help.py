"""Every command explains itself."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click
import pytest
from click.testing import CliRunner

from hpgo.cli.main import COMMANDS, group

if TYPE_CHECKING:
    from collections.abc import Iterator


def commands() -> Iterator[tuple[str, ...]]:
    """Words of every command and sub-command."""
    for name in COMMANDS:
        yield (name,)
        command = group.get_command(click.Context(group), name)
        if isinstance(command, click.Group):
            yield from ((name, inner) for inner in command.list_commands(click.Context(command)))


@pytest.mark.parametrize("words", list(commands()), ids=" ".join)
def test_help_shows_examples_one_to_a_line(words):
    lines = CliRunner().invoke(group, [*words, "--help"]).output.splitlines()
    examples = lines.index("  Examples:")
    shown = [line.split() for line in lines[examples + 1 : lines.index("", examples)]]
    assert shown
    assert {example[0] for example in shown} <= {"hpgo", "sched-pipeline"}
    assert all(example.count("hpgo") <= 1 for example in shown), "examples run into each other"
    assert not any("\\b" in line for line in lines)
    assert max(map(len, lines)) <= 80
