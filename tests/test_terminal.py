"""Tables and progress bars, on a terminal and in a pipe."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys

from hpgo.cli.terminal import passing_lines, progress, say, table

ROWS = [("vgg-19", 26, "548 MB", "2 × 8"), ("a[b]c", 1_000, "1.5 GB", "16 × 1")]
LONG = [(*ROWS[0], "Remarks could hardly mean something if they lost their end"), (*ROWS[1], "none")]
SHOW = f"""
from hpgo.cli.terminal import passing_lines, progress, table
with progress("planning") as update:
    update(0.5, "gap 2 %")
table(["model", "number of layers", "size", "devices", "remark"], {LONG!r}, title="Models")
"""


PASS = """
from hpgo.cli.terminal import passing_lines
with passing_lines() as tell:
    for step in range(3):
        tell(f"step {step} " + 70 * "x")
"""


def on_a_terminal(code: str, *, stdout: int | None = None) -> str:
    """What `code` prints on a terminal, which stderr is, and stdout where it is not said to be something else."""
    reading, writing = pty.openpty()
    environment = os.environ | {"TERM": "xterm-256color", "COLUMNS": "60"}
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=stdout or writing, stderr=writing, env=environment
    ) as process:
        os.close(writing)
        shown = b""
        try:
            while piece := os.read(reading, 65_536):
                shown += piece
        except OSError:  # how Linux says that the other end is closed
            pass
        os.close(reading)
    assert process.returncode == 0, shown.decode()
    return shown.decode()


def test_in_a_pipe_rows_are_lines_with_numbers_to_the_right(capsys):
    table(["model", "layers", "size", "devices"], ROWS, title="Models")
    assert capsys.readouterr().out.splitlines() == [
        "Models",
        "",
        "model   layers    size  devices",
        "vgg-19      26  548 MB    2 × 8",
        "a[b]c     1000  1.5 GB   16 × 1",
    ]


def test_a_cell_can_neither_break_its_line_nor_steer_the_terminal(capsys):
    table(["name"], [["a\nb\x1b[31mc"]])
    assert capsys.readouterr().out.splitlines() == ["name", "a b [31mc"]


def test_a_table_without_rows_is_its_head(capsys):
    table(["name", "size"], [])
    assert capsys.readouterr().out == "name  size\n"


def test_on_a_terminal_the_table_keeps_its_width_and_every_word_and_the_bar_is_gone_afterwards():
    shown = on_a_terminal(SHOW)
    assert "planning" in shown
    assert "gap 2 %" in shown
    lines = [line.rstrip() for line in re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", shown).splitlines()]
    table = lines[next(at for at, line in enumerate(lines) if line.endswith("Models")) + 1 :]
    assert max(map(len, table)) <= 60
    assert any(re.fullmatch(r"a\[b\]c +1000 +1\.5 GB +16 × 1 +none", line) for line in table)
    words = " ".join(table).split()
    assert [word for word in words if word in LONG[0][-1].split()] == LONG[0][-1].split()
    assert {"number", "of", "layers"} <= {*words}


def test_in_a_pipe_long_names_of_columns_fold_and_rows_do_not(capsys):
    table(["model", "a name of eighty letters " * 3, "remark"], [("vgg-19", 26, "x" * 40), ("bert", 48, "y" * 90)])
    *head, first, second = capsys.readouterr().out.splitlines()
    assert max(map(len, head)) < 40
    assert "name" in head[1].split() or len(head) > 3
    assert (first.split(), second.split()) == (["vgg-19", "26", "x" * 40], ["bert", "48", "y" * 90])


def test_on_a_terminal_each_line_that_passes_takes_the_place_of_the_one_before_and_the_last_stays(tmp_path):
    passed = r"(\r\x1b\[Kstep [0-2] x{52})+\r\x1b\[K"
    assert re.fullmatch(passed + r"step 2 x{70}\r\n", on_a_terminal(PASS))
    with (tmp_path / "steps.txt").open("w") as steps:
        assert re.fullmatch(passed, on_a_terminal(PASS, stdout=steps.fileno()))
    assert (tmp_path / "steps.txt").read_text() == "".join(f"step {step} {70 * 'x'}\n" for step in range(3))


def test_lines_that_pass_are_lines_in_a_pipe(capsys):
    with passing_lines() as tell:
        for step in range(3):
            tell(f"step {step}")
    assert capsys.readouterr() == ("step 0\nstep 1\nstep 2\n", "")


def test_a_bar_is_silent_in_a_pipe(capsys):
    with progress("planning") as update:
        update(0.5, "half")
    captured = capsys.readouterr()
    assert captured.out + captured.err == ""


def test_a_long_digit_string_is_aligned_at_once(capsys):
    table(["name"], [["1" * 10_000 + "!"]])
    assert len(capsys.readouterr().out) > 10_000


def test_a_long_path_is_cut_in_an_error_and_whole_in_a_command(capsys):
    path = f"/{'folder/' * 600}plan.json"
    say("error", f"file not found: `{path}`")
    say("hint", f"make the folder: `mkdir -p {path}`")
    error, hint = capsys.readouterr().err.splitlines()
    assert re.fullmatch("error: file not found: `/folder/.*….*/folder/plan.json`", error)
    assert len(error) == len("error: file not found: ") + 160
    assert hint == f"hint: make the folder: `mkdir -p {path}`"
