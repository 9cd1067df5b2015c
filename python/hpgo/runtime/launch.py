"""Processes of a run on this machine: one a rank, forked after torch was loaded once, and watched until they end."""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
import signal
import socket
import sys
import threading
import time
import warnings
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from hpgo.base.errors import HpgoError, RunError
from hpgo.base.signals import uninterrupted
from hpgo.base.wording import counted
from hpgo.runtime.meeting import LostRankError

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.context import ForkProcess

_PATIENCE_S = 5.0
"""How long the other ranks may take to notice that one is gone."""
_LOOK = "what it wrote before may say why; where memory is short, systems end processes with SIGKILL"
_HERE = "127.0.0.1"


def run_here(world_size: int, work: Callable[[], None]) -> None:
    """Runs `work` in `world_size` processes, each with the variables of a launcher, and waits for all of them.

    Raises what the first rank raised that was not only told of another's end; RunError for one that was killed. All
    processes have ended then, also after Ctrl-C.
    """
    context = multiprocessing.get_context("fork")
    listener = socket.create_server((_HERE, 0))
    port = listener.getsockname()[1]
    errors = context.SimpleQueue()
    alive, held = os.pipe()  # the end that is held closes with this process
    ranks: list[ForkProcess] = []
    try:
        with uninterrupted(), warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of forking beside the threads that numpy may have
            for rank in range(world_size):
                place = _variables(rank, world_size, port)
                ranks.append(context.Process(target=_rank, args=(place, work, errors, (alive, held), listener)))
                ranks[-1].start()
        # The store lives here, not in rank 0, so that it outlives every rank.
        store = dist.TCPStore(
            _HERE, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
        )  # fmt: skip
        _wait(ranks)
        del store
    finally:
        _end(ranks)
        os.close(alive)
        os.close(held)
    _raise_first(ranks, errors)


def _variables(rank: int, world_size: int, port: int) -> dict[str, str]:
    """What torchrun would set, for a store that is there already."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(world_size),
        "GROUP_RANK": "0",
        "MASTER_ADDR": _HERE,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }


def _rank(
    place: dict[str, str], work: Callable[[], None], errors: Any, pipe: tuple[int, int], listener: socket.socket
) -> None:
    """One process: takes its place, works, and says what went wrong."""
    listener.close()
    alive, held = pipe
    os.close(held)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that started this one ends it
    threading.Thread(target=_end_with_parent, args=(alive,), daemon=True).start()
    os.environ.update(place)
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if "OMP_NUM_THREADS" not in os.environ:
        import torch

        torch.set_num_threads(max(1, (os.cpu_count() or 1) // int(place["WORLD_SIZE"])))
    try:
        work()
    except HpgoError as error:
        errors.put((int(place["RANK"]), error))
        code = 1
    else:
        code = 0
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # threads of communication libraries may still wait for ranks that are gone


def _end_with_parent(alive: int) -> None:
    os.read(alive, 1)  # nothing is ever written: it ends when the other end closes
    os._exit(1)


def _wait(ranks: list[ForkProcess]) -> None:
    """Until all have ended, or the patience with those left after one has failed is over."""
    until_s = None
    left = list(ranks)
    while left and (until_s is None or time.monotonic() < until_s):
        rest_s = None if until_s is None else max(0.0, until_s - time.monotonic())
        multiprocessing.connection.wait([one.sentinel for one in left], rest_s)
        left = [one for one in left if one.exitcode is None]
        if until_s is None and any(one.exitcode not in {None, 0} for one in ranks):
            until_s = time.monotonic() + _PATIENCE_S


def _end(ranks: list[ForkProcess]) -> None:
    """Kills those that are left, stopped ones too."""
    for one in ranks:
        if one.exitcode is None:
            one.kill()
    for one in ranks:
        one.join()


def _raise_first(ranks: list[ForkProcess], errors: Any) -> None:
    failed = [at for at, one in enumerate(ranks) if one.exitcode]
    if not failed:
        return
    said: list[tuple[int, HpgoError]] = []
    while not errors.empty():
        said.append(errors.get())
    for _, error in said:
        if not isinstance(error, LostRankError):
            raise error
    silent = [at for at in failed if at not in {rank for rank, _ in said}]
    for at in silent:
        code = ranks[at].exitcode or 0
        how = f"ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        raise RunError(f"rank {at} of {counted(len(ranks), 'rank')} {how}", _LOOK)
    for at, one in enumerate(ranks):
        if not one.exitcode:  # while others waited for it
            raise RunError(f"rank {at} of {counted(len(ranks), 'rank')} left before the run had ended", _LOOK)
    raise said[0][1]
