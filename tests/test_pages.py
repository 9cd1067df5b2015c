"""Every command line that a page shows is one that hpgo takes, also those that take a cluster or a day to run."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import click
import pytest
from test_readme import refresh

from hpgo.cli.main import group
from hpgo.cli.pipeedge_run import command as pipeedge_run
from hpgo.cli.sched_pipeline import command as sched_pipeline

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
PROGRAMS: dict[str, click.Command] = {"hpgo": group, "sched-pipeline": sched_pipeline, "pipeedge-run": pipeedge_run}
_BLOCK = re.compile(r"^```(sh|console)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_OPERATORS = {"|", "||", "&&", "&", ";", ">", ">>", "<"}


def lines(page: Path) -> Iterator[str]:
    """Each line of a page that is for a shell, but for those that are shown to be refused."""
    for language, text in _BLOCK.findall(page.read_text(encoding="utf-8")):
        shown = text.replace("\\\n", " ").splitlines()
        for line, below in zip(shown, [*shown[1:], ""], strict=True):
            refused = below.startswith(("error:", "Usage:"))
            if not refused and (language == "sh" or line.startswith("$ ")):
                yield line.removeprefix("$ ").replace("2>&1", "")


def asked(line: str) -> Iterator[tuple[str, ...]]:
    """The program of hpgo that a line starts, by itself or through another one, and the words that it is given."""
    words = shlex.shlex(line, posix=True, punctuation_chars=True)
    words.whitespace_split = True
    command: list[str] = []
    for word in [*words, ";"]:
        if word not in _OPERATORS:
            command.append(word)
            continue
        for at, one in enumerate(command):
            program = one.rpartition("/")[2]
            if program in PROGRAMS and command[at + 1 :] and (at == 0 or command[at - 1] == "-m"):
                yield program, *command[at + 1 :]
        command = []


SHOWN = [(page.name, *words) for page in PAGES for line in lines(page) for words in asked(line)]


@pytest.mark.parametrize("shown", SHOWN, ids=" ".join)
def test_a_command_on_a_page_is_one_that_is_taken(shown: tuple[str, ...]) -> None:
    _, program, *words = shown
    command = PROGRAMS[program]
    context = command.context_class(command, info_name=program)
    while isinstance(command, click.Group):
        name, found, words = command.resolve_command(context, words)
        assert found is not None
        command, context = found, found.context_class(found, info_name=name, parent=context)
    command.make_context(context.info_name, words)


@pytest.mark.parametrize("page", ["pictures.md", "simulation.md"])
def test_the_commands_of_a_page_run_one_after_the_other(page: str, tmp_path: Path) -> None:
    script = "\n".join(["set -e", *(line for line in lines(ROOT / "docs" / page) if any(asked(line)))])
    done = subprocess.run(
        ["sh", "-c", script], cwd=tmp_path, env=refresh.environment(tmp_path) | {"BROWSER": "true"},
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    drawn = {word for line in lines(ROOT / "docs" / page) for word in line.split() if word.endswith((".svg", ".png"))}
    assert drawn <= {path.name for path in tmp_path.iterdir()}
