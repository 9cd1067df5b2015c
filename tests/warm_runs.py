"""`hpgo run` or `hpgo infer` again and again, in processes that fork after torch was loaded once.

Loading it is most of a small run.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Ended:
    """How a run has ended."""

    code: int
    out: str
    err: str
    after_s: float
    """From the fault or signal to the end of all."""
    left: list[int]
    """Processes of it that were there still."""

    @property
    def errors(self) -> list[str]:
        return [line for line in self.err.splitlines() if line.startswith("error: ")]


class Runs:
    """Of one folder, one after the other. They fork from a process of their own."""

    def __init__(self, folder: Path, command: str = "run") -> None:
        self.folder, self._command = folder, command
        self._server = subprocess.Popen(
            [sys.executable, HERE / "warm_runs.py", folder], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip

    def start(self, *words: str, command: str = "", **variables: str) -> int:
        """Begins a run; returns its process, which leads a group of its own."""
        words = (command or self._command, *words)
        for name in ("moment", "out", "err"):
            (self.folder / name).unlink(missing_ok=True)
        assert self._server.stdin is not None
        self._server.stdin.write(json.dumps({"words": words, "variables": variables}) + "\n")
        self._server.stdin.flush()
        self.process = self._answer()
        return self.process

    def signal(self, number: int, *ranks: int) -> None:
        """Sends a signal to the run, or to some of its ranks."""
        (self.folder / "moment").write_text(str(time.monotonic()))
        children = Path(f"/proc/{self.process}/task/{self.process}/children").read_text().split()
        for process in [int(children[rank]) for rank in ranks] or [self.process]:
            os.kill(process, number)

    def wait_for(self, word: str, file: str = "out") -> None:
        """Until the run has printed it, at most a minute."""
        until_s = time.monotonic() + 60
        while word not in self._text(file):
            time.sleep(0.01)
            assert time.monotonic() < until_s, self._text("err")

    def finish(self) -> Ended:
        """Waits for the end of the run."""
        code = self._answer()
        moment = self._text("moment")
        after_s = time.monotonic() - float(moment) if moment else 0.0
        left = [int(one.name) for one in Path("/proc").glob("[0-9]*") if _group(one) == self.process]
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process, signal.SIGKILL)
        return Ended(code, self._text("out"), self._text("err"), after_s, left)

    def close(self) -> None:
        """Ends the process that they fork from."""
        self._server.communicate()

    def _answer(self) -> int:
        assert self._server.stdout is not None
        return int(self._server.stdout.readline())

    def _text(self, file: str) -> str:
        path = self.folder / file
        return path.read_text() if path.exists() else ""


def _group(process: Path) -> int:
    try:
        return int((process / "stat").read_text().rpartition(")")[2].split()[2])
    except OSError:
        return -1


def serve() -> None:
    """For each request a process: its number, and, when it has ended, its exit code."""
    for line in sys.stdin:
        asked = json.loads(line)
        child = os.fork()
        if not child:
            _run(asked["words"], asked["variables"])
        answer(child)
        _, status = os.waitpid(child, 0)
        answer(os.waitstatus_to_exitcode(status))


def answer(number: int) -> None:
    sys.stdout.write(f"{number}\n")
    sys.stdout.flush()


def _run(words: list[str], variables: dict[str, str]) -> NoReturn:
    """As the installed command does."""
    os.setpgid(0, 0)
    os.environ.update(variables)
    for name, number in ((os.devnull, 0), ("out", 1), ("err", 2)):
        os.dup2(os.open(name, os.O_RDWR | os.O_CREAT), number)
    sys.argv = ["hpgo", *words]
    code = 0
    try:
        hpgo()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    import hpgo.cli.infer
    import hpgo.cli.run
    import hpgo.runtime.infer.pipeline
    import hpgo.runtime.launch
    import hpgo.runtime.train.pipeline
    from hpgo.cli.entry import hpgo
    from hpgo.runtime.train.optimizer import optimizer_of

    optimizer_of("adamw")  # loads more of torch

    os.chdir(sys.argv[1])
    serve()
