"""Scripts and commands in processes that fork from one that has loaded torch: loading it takes most of a small test."""

from __future__ import annotations

import atexit
import json
import os
import runpy
import select
import signal
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path
from typing import NoReturn

HERE = Path(__file__).parent
_servers: list[subprocess.Popen[str]] = []
"""The process that scripts fork from, once the first one was asked for. It ends with this process."""


def ran(script: str, *words: object, timeout: float) -> subprocess.CompletedProcess[str]:
    """Run `python tests/SCRIPT WORDS` in the folder of tests, with one thread a process.

    Raises subprocess.TimeoutExpired, after everything the script has started is killed.
    """
    return _ran(HERE, [str(HERE / script), *map(str, words)], timeout)


def hpgo(folder: Path, *words: object, timeout: float = 200) -> subprocess.CompletedProcess[str]:
    """Run `python -m hpgo WORDS` in a folder, like `ran`."""
    return _ran(folder, ["hpgo", *map(str, words)], timeout)


def _ran(place: Path, words: list[str], timeout: float) -> subprocess.CompletedProcess[str]:
    if not _servers:
        _servers.append(
            subprocess.Popen(
                [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=HERE,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
        )  # fmt: skip
        atexit.register(_servers[0].communicate)
    (server,) = _servers
    assert server.stdin is not None
    assert server.stdout is not None
    with tempfile.TemporaryDirectory() as folder:
        out, err = Path(folder, "out"), Path(folder, "err")
        asked = {"words": words, "place": str(place), "out": str(out), "err": str(err)}
        server.stdin.write(json.dumps(asked) + "\n")
        server.stdin.flush()
        process = int(server.stdout.readline())
        if not select.select([server.stdout], [], [], timeout)[0]:
            os.killpg(process, signal.SIGKILL)
            server.stdout.readline()
            raise subprocess.TimeoutExpired(words, timeout)
        code = int(server.stdout.readline())
        return subprocess.CompletedProcess(words, code, out.read_text(), err.read_text())


def serve() -> None:
    """For each request print a process, and its exit code when it has ended."""
    for line in sys.stdin:
        asked = json.loads(line)
        child = os.fork()
        if not child:
            _run(**asked)
        sys.stdout.write(f"{child}\n")
        sys.stdout.flush()
        _, status = os.waitpid(child, 0)
        sys.stdout.write(f"{os.waitstatus_to_exitcode(status)}\n")
        sys.stdout.flush()


def _run(words: list[str], place: str, out: str, err: str) -> NoReturn:
    """Be `python WORDS`, or `python -m hpgo WORDS`, in a folder."""
    os.setpgid(0, 0)
    os.chdir(place)
    sys.path[0] = place
    for name, number in ((os.devnull, 0), (out, 1), (err, 2)):
        os.dup2(os.open(name, os.O_RDWR | os.O_CREAT), number)
    sys.argv = words
    code = 0
    try:
        if words[0] == "hpgo":
            command()
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
    from hpgo.cli.entry import hpgo as command
    from hpgo.runtime.train.optimizer import optimizer_of

    optimizer_of("adamw")  # loads more of torch
    import torch._dynamo  # noqa: F401

    serve()
