"""Ctrl-C ends every command at once, with one word and exit code 130, whatever it is doing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

# As the installed command does, but saying when its door is there: before that, Ctrl-C is Python's to answer. One that
# comes between that word and the door, where this process may stand for a while, waits for it.
ENTER = """
from hpgo.cli.entry import hpgo
import os, _signal
_signal.pthread_sigmask(_signal.SIG_BLOCK, [_signal.SIGINT])
os.write(1, b'.')
hpgo()
"""
COMMANDS = {
    "plan": ["plan", "bert-48", "--cluster", "dapple-a", "--global-batch-size", "64", "-o", "out.json"],
    "csv": ["schedules", "show", "zb", "--ranks", "64", "--micro-batches", "1024", "--csv"],
    "simulate": ["simulate", "--schedule", "zb_v", "-s", "32", "-b", "512", "-o", "out.npz"],
    "draw": ["simulate", "--schedule", "1f1b", "-s", "8", "-b", "64", "-o", "out.png"],
    "models": ["models"],
}
MOMENTS_S = [0.004 * 1.28**step for step in range(25)]  # 4 ms to 1.5 s


def interrupted(words: list[str], moment_s: float, folder: Path) -> tuple[int, str]:
    """Exit code and stderr of a command that gets Ctrl-C so long after it has begun."""
    with subprocess.Popen(
        [sys.executable, "-c", ENTER, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=folder
    ) as process:
        assert process.stdout is not None
        os.read(process.stdout.fileno(), 1)
        time.sleep(moment_s)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=60)
    return process.returncode, said.decode()


@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
def test_every_moment_is_a_good_one_for_ctrl_c(name: str, tmp_path: Path) -> None:
    (tmp_path / "out.npz").write_text("old")
    codes, strange = [], []
    for moment_s in MOMENTS_S:
        code, said = interrupted(COMMANDS[name], moment_s, tmp_path)
        codes.append(code)
        assert "panicked" not in said, moment_s
        assert [one.name for one in tmp_path.iterdir() if one.suffix == ".tmp"] == []
        # A search that was stopped answers with its best plan so far; a command may have ended before.
        if "Traceback" in said or not (code == 0 or (code == 130 and said.splitlines()[-1] == "interrupted")):
            strange.append((moment_s, code, said))
    assert 130 in codes
    assert strange == []


IMPORTING = """
import sys, time
from hpgo.base.signals import answer_between_imports
answer_between_imports()
try:
    import interrupting
    print("imported")
    time.sleep(60)
except KeyboardInterrupt:
    print("interrupted")
"""
INTERRUPTING = """
import os, signal
class Field:
    def __set_name__(self, owner, name):
        os.kill(os.getpid(), signal.SIGINT)
        self.sum = sum(range(100))  # time for Python to see it; what is raised here is wrapped in a RuntimeError
class Record:
    field = Field()
"""


def test_an_import_is_not_interrupted_in_the_middle_but_behind_it(tmp_path: Path) -> None:
    (tmp_path / "interrupting.py").write_text(INTERRUPTING)
    done = subprocess.run(
        [sys.executable, "-c", IMPORTING], capture_output=True, text=True, timeout=120, check=True, cwd=tmp_path
    )
    assert done.stdout == "imported\ninterrupted\n"


LOADING = """
import importlib, os, signal
from hpgo.cli.entry import hpgo
load = importlib.import_module
def interrupting(name):
    os.kill(os.getpid(), signal.SIGINT)
    return load(name)
importlib.import_module = interrupting
hpgo()
"""


def test_ctrl_c_during_imports_is_interrupted(tmp_path: Path) -> None:
    argv = [sys.executable, "-c", LOADING, *COMMANDS["plan"]]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=120, check=False, cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "interrupted\n")


ORDER = """
import _thread, threading, time, hpgo
def build(until_s):
    began = time.monotonic()
    timer = threading.Timer(until_s, _thread.interrupt_main)
    timer.daemon = True
    timer.start()
    try:
        hpgo.schedule("v_half", ranks=64, micro_batches=4096)
    except KeyboardInterrupt:
        pass
    timer.cancel()
    print(time.monotonic() - began)
build(1e6)
build(0.2)
"""


@pytest.mark.slow
def test_ctrl_c_ends_the_search_for_an_order_and_does_not_wait_for_it() -> None:
    done = subprocess.run([sys.executable, "-c", ORDER], capture_output=True, text=True, timeout=300, check=True)
    whole_s, interrupted_s = map(float, done.stdout.split())
    assert interrupted_s < whole_s / 2
