"""Tables and progress bars, on a terminal and in a pipe."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys

from hpgo.cli.terminal import progress, table

ROWS = [("vgg-19", 26, "548 MB", "2 × 8"), ("a[b]c", 1_000, "1.5 GB", "16 × 1")]
SHOW = f"""
from hpgo.cli.terminal import progress, table
with progress("planning") as update:
    update(0.5, "gap 2 %")
table(["model", "layers", "size", "devices"], {ROWS!r}, title="Models")
"""


def on_a_terminal(code: str) -> str:
    """What `code` prints where stdout and stderr are a terminal."""
    reading, writing = pty.openpty()
    environment = os.environ | {"TERM": "xterm-256color", "COLUMNS": "60"}
    with subprocess.Popen([sys.executable, "-c", code], stdout=writing, stderr=writing, env=environment) as process:
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


def test_on_a_terminal_the_table_is_drawn_and_the_bar_is_gone_afterwards():
    shown = on_a_terminal(SHOW)
    assert "planning" in shown
    assert "gap 2 %" in shown
    plain = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", shown)
    assert "───" in plain
    assert re.search(r"a\[b\]c +1000 +1\.5 GB +16 × 1", plain)


def test_a_bar_is_silent_in_a_pipe(capsys):
    with progress("planning") as update:
        update(0.5, "half")
    captured = capsys.readouterr()
    assert captured.out + captured.err == ""


def test_a_long_digit_string_is_aligned_at_once(capsys):
    table(["name"], [["1" * 10_000 + "!"]])
    assert len(capsys.readouterr().out) > 10_000
