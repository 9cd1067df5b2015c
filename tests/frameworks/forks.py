"""Forks of a process that has imported a framework: each is a rank of a training script, with torchrun's variables."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

LIMIT_S = 240
"""Seconds after which a run is stopped. Not tuned: a run takes 5 to 30 s."""


def together(
    count: int, run: Callable[..., Any], *arguments: object, logs: Mapping[int, Path] | None = None
) -> list[Any]:
    """Return what `run(*arguments)` returns in each of `count` forks of this process, by rank.

    Files in `logs` get the output of a rank, where -1 is the last. Raises AssertionError with the end of the output of
    the rank that failed first.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        outputs = [Path(folder) / f"{rank}.log" for rank in range(count)]
        for rank, log in (logs or {}).items():
            outputs[rank] = log
        pids = [_fork(rank, count, port, outputs[rank], Path(folder), run, arguments) for rank in range(count)]
        failed = _wait(pids)
        if failed:
            # The rank that fails first is the cause. The others lose their connections.
            texts = [outputs[pids.index(pid)].read_text(encoding="utf-8")[-3000:] for pid in failed[:1]]
            raise AssertionError(f"rank {pids.index(failed[0])} of {count} failed:\n{texts[0]}")
        return [json.loads((Path(folder) / f"{rank}.json").read_text(encoding="utf-8")) for rank in range(count)]


def _fork(rank: int, count: int, port: int, log: Path, folder: Path, run: Any, arguments: tuple[object, ...]) -> int:
    pid = os.fork()
    if pid:
        return pid
    status = 1
    with log.open("w", encoding="utf-8") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
        try:
            os.environ.update(
                RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(count), MASTER_ADDR="127.0.0.1",
                MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo", CUDA_DEVICE_MAX_CONNECTIONS="1",
            )  # fmt: skip
            os.chdir(folder)
            torch.set_num_threads(1)
            (folder / f"{rank}.json").write_text(json.dumps(run(*arguments)), encoding="utf-8")
            status = 0
        except SystemExit as end:  # a script may end so
            status = int(bool(end.code))
        except BaseException:  # noqa: BLE001 -- whatever ends a script is written to its log
            traceback.print_exc()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
    os._exit(status)


def _wait(pids: list[int]) -> list[int]:
    """Return the processes that failed, in the order of their ends. Kill those that run too long."""
    left, failed, until_s = set(pids), [], time.monotonic() + LIMIT_S
    while left:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid:
            left.discard(pid)
            failed += [pid] if status else []
        elif time.monotonic() > until_s:
            for one in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(one, 9)
        else:
            time.sleep(0.05)
    return failed
