"""Scripts and commands in processes that fork from one that has loaded torch: loading it takes most of a small test."""

from __future__ import annotations

import atexit
import json
import os
import runpy
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from importlib import import_module
from pathlib import Path
from typing import NoReturn

from ports import free_port

HERE = Path(__file__).parent
_COMMANDS = ("hpgo", "pipeedge_run")
"""Names of functions in `hpgo.cli.entry`."""
Ended = subprocess.CompletedProcess[str]
_servers: list[subprocess.Popen[str]] = []
"""The process that others fork from, once the first one was asked for. It ends with this process."""


class Started:
    """A process, with as much of `subprocess.Popen` as tests need."""

    def __init__(self, place: Path, words: list[str], variables: dict[str, str]) -> None:
        """Begin `python WORDS`, or a command, in a folder, with one thread and these variables of the environment."""
        self.args, self.returncode = words, None
        self._folder = Path(tempfile.mkdtemp())
        server = _server()
        assert server.stdin is not None
        assert server.stdout is not None
        asked = {"words": words, "place": str(place), "variables": variables, "folder": str(self._folder)}
        server.stdin.write(json.dumps(asked) + "\n")
        server.stdin.flush()
        self.pid = int(server.stdout.readline())

    returncode: int | None

    def poll(self) -> int | None:
        code = self._folder / "code"
        if self.returncode is None and code.exists():
            self.returncode = int(code.read_text())
        return self.returncode

    def wait(self, timeout: float = 200) -> int:
        """Raises subprocess.TimeoutExpired, after everything the process has started is killed."""
        until_s = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > until_s:
                os.killpg(self.pid, signal.SIGKILL)
                raise subprocess.TimeoutExpired(self.args, timeout)
            time.sleep(0.01)
        assert self.returncode is not None
        return self.returncode

    def communicate(self, timeout: float = 200) -> tuple[str, str]:
        """Called once: what was written is gone then."""
        self.wait(timeout)
        out, err = ((self._folder / name).read_text() for name in ("out", "err"))
        shutil.rmtree(self._folder)
        return out, err

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _server() -> subprocess.Popen[str]:
    if not _servers:
        _servers.append(
            subprocess.Popen(
                [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=HERE,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
        )  # fmt: skip
        atexit.register(_servers[0].communicate)
    return _servers[0]


def start(command: str, folder: Path, *words: object, **variables: str) -> Started:
    """Begin one of `_COMMANDS` in a folder."""
    return Started(folder, [command, *map(str, words)], variables)


def ran(script: str, *words: object, timeout: float) -> Ended:
    """Run `python tests/SCRIPT WORDS` in the folder of tests."""
    return _ended(Started(HERE, [str(HERE / script), *map(str, words)], {}), timeout)


def hpgo(folder: Path, *words: object, timeout: float = 200) -> Ended:
    """Run `python -m hpgo WORDS` in a folder."""
    return _ended(start("hpgo", folder, *words), timeout)


def together(world: int, folder: Path, *words: object, timeout: float = 200, **variables: str) -> list[Ended]:
    """Run a command or script in a folder as each of `world` ranks, with the variables that torchrun sets."""
    place = {"WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1"}
    place |= {"MASTER_PORT": free_port(), **variables}
    ranks = [
        Started(folder, [str(word) for word in words], place | {"RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(world)
    ]
    return [_ended(rank, timeout) for rank in ranks]


def _ended(one: Started, timeout: float) -> Ended:
    out, err = one.communicate(timeout)
    assert one.returncode is not None
    return Ended(one.args, one.returncode, out, err)


def serve() -> None:
    """For each request a process, whose number is printed, and one that waits for it and writes down its exit code."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # of those that wait, nobody asks for the code
    for line in sys.stdin:
        asked = json.loads(line)
        if os.fork():
            continue
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        child = os.fork()
        if not child:
            _run(**asked)
        sys.stdout.write(f"{child}\n")
        sys.stdout.flush()
        _, status = os.waitpid(child, 0)
        folder = Path(asked["folder"])
        (folder / "ended").write_text(f"{os.waitstatus_to_exitcode(status)}")
        (folder / "ended").rename(folder / "code")
        os._exit(0)


def _run(words: list[str], place: str, variables: dict[str, str], folder: str) -> NoReturn:
    """Be `python WORDS`, or a command, in a folder."""
    os.setpgid(0, 0)
    os.chdir(place)
    os.environ.update(variables)
    sys.path[0] = place
    sys.path += filter(None, variables.get("PYTHONPATH", "").split(os.pathsep))
    for name, number in ((os.devnull, 0), (f"{folder}/out", 1), (f"{folder}/err", 2)):
        os.dup2(os.open(name, os.O_RDWR | os.O_CREAT), number)
    sys.argv = words
    code = 0
    try:
        if words[0] in _COMMANDS:
            getattr(import_module("hpgo.cli.entry"), words[0])()
        else:
            runpy.run_path(words[0], run_name="__main__")
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            sys.stderr.write(f"{end.code}\n")
    except BaseException:  # noqa: BLE001 -- as Python does
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    import hpgo.runtime.infer.pipeline
    import hpgo.runtime.launch
    import hpgo.runtime.train.pipeline  # noqa: F401
    from hpgo.runtime.train.optimizer import optimizer_of

    optimizer_of("adamw")  # loads more of torch
    import torch._dynamo  # noqa: F401

    serve()
