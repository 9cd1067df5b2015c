"""Processes of a run on this machine: one a rank, forked after torch was loaded once, and watched until they end."""

from __future__ import annotations

import io
import math
import multiprocessing
import multiprocessing.connection
import os
import signal
import socket
import sys
import threading
import time
import traceback
import warnings
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from hpgo.base.signals import uninterrupted
from hpgo.errors import HpgoError, RunError
from hpgo.runtime import guards
from hpgo.runtime.failure_detection import (
    BEAT_S,
    LEAVE_S,
    FailureDetector,
    FailureReport,
    Limits,
    LostRankError,
    agreed,
    readings,
)
from hpgo.runtime.preemption import CODE, Preempted
from hpgo.runtime.progress import HERE, who

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from multiprocessing.context import ForkProcess

    from _typeshed import ReadableBuffer

_WATCH = "hpgo/watch"
_LOOK = "what it wrote before may say why; where memory is short, systems end processes with SIGKILL"
_HERE = "127.0.0.1"


def run_here(
    world_size: int,
    work: Callable[[], None],
    limits: Limits | None = None,
    stages_of: Callable[[int], tuple[int, ...]] | None = None,
) -> None:
    """Runs `work` in `world_size` processes, each with the variables of a launcher, and waits for all of them.

    `stages_of` says which stages a rank will hold, for what is said of one that is lost before it does.

    Raises what the first rank raised that was not only told of another's end; RunError for one that was lost, and
    Preempted if SIGTERM has ended them. All processes have ended then, also after Ctrl-C.
    """
    import torch._dynamo  # noqa: F401 -- seconds, which every rank would take when it first looks at tensors on meta

    limits = limits or Limits()
    stages = [None if stages_of is None else stages_of(rank) for rank in range(world_size)]
    context = multiprocessing.get_context("fork")
    listener = socket.create_server((_HERE, 0))
    port = listener.getsockname()[1]
    errors = context.SimpleQueue()
    alive, held = os.pipe()  # the end that is held closes with this process
    ranks: list[ForkProcess] = []
    with _notice() as notice:
        try:
            with uninterrupted(), warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # of forking beside the threads that numpy may have
                for rank in range(world_size):
                    place = _variables(rank, world_size, port)
                    given = (place, work, errors, (alive, held), listener, stages[rank], limits)
                    ranks.append(context.Process(target=_rank, args=given))
                    ranks[-1].start()
            # The store lives here, not in rank 0, so that it outlives every rank.
            store = dist.TCPStore(
                _HERE, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
            )  # fmt: skip
            verdict = _Overseer(ranks, stages, dist.PrefixStore(_WATCH, store), limits).wait(notice)
        finally:
            _end(ranks)
            os.close(alive)
            os.close(held)
    _raise_first(errors, verdict, ranks)


@contextmanager
def _notice() -> Iterator[list[int]]:
    """What comes in meanwhile of SIGTERM, which the ranks answer."""
    came: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield came
        return
    before = signal.signal(signal.SIGTERM, lambda number, _: came.append(number))
    try:
        yield came
    finally:
        signal.signal(signal.SIGTERM, before)


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
        "TORCHELASTIC_MAX_RESTARTS": "0",
    }


def _rank(  # noqa: PLR0917 -- as multiprocessing calls it
    place: dict[str, str],
    work: Callable[[], None],
    errors: Any,
    pipe: tuple[int, int],
    listener: socket.socket,
    stages: tuple[int, ...] | None,
    limits: Limits,
) -> None:
    """One process: takes its place, works, and says what went wrong."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    listener.close()
    alive, held = pipe
    os.close(held)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that started this one ends it
    threading.Thread(target=_end_with_parent, args=(alive,), daemon=True).start()
    os.environ.update(place)
    sys.stdout = io.TextIOWrapper(io.BufferedWriter(_Lasting(1, "w", closefd=False)), line_buffering=True)
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    rank, size = int(place["RANK"]), int(place["WORLD_SIZE"])
    store = dist.TCPStore(_HERE, int(place["MASTER_PORT"]), is_master=False, wait_for_workers=False)
    HERE.begin(rank, stages)
    guards.begin(dist.PrefixStore(_WATCH, store), rank, size, limits, tell=None)
    if "OMP_NUM_THREADS" not in os.environ:
        import torch

        torch.set_num_threads(max(1, (os.cpu_count() or 1) // size))
    code = 0
    try:
        work()
    except Preempted:
        code = CODE
    except BaseException as error:  # noqa: BLE001 -- whatever it is, the others must not wait for this rank
        if isinstance(error, HpgoError):
            errors.put(guards.named(error))
        guards.charge(error)
        code = 1
        if not isinstance(error, HpgoError | SystemExit):
            traceback.print_exception(error)
    guards.end()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # threads of communication libraries may still wait for ranks that are gone


class _Lasting(io.FileIO):
    """A stream whose reader may leave, as `| head` does: a run goes on without it."""

    def write(self, given: ReadableBuffer, /) -> int:
        try:
            return super().write(given)
        except BrokenPipeError:
            return memoryview(given).nbytes


def _end_with_parent(alive: int) -> None:
    os.read(alive, 1)  # nothing is ever written: it ends when the other end closes
    os._exit(1)


class _Overseer:
    """Waits for the ranks, and sees which of them is lost: by its end, or as they see it themselves."""

    def __init__(
        self, ranks: list[ForkProcess], stages: list[tuple[int, ...] | None], store: Any, limits: Limits
    ) -> None:
        self._ranks, self._stages, self._store, self._limits = ranks, stages, store, limits
        self._judge = FailureDetector(len(ranks), limits, time.monotonic())

    def wait(self, notice: list[int]) -> FailureReport | None:
        """Until all have ended, or those that are left have had their time; returns what the run was lost with."""
        verdict: FailureReport | None = None
        until_s = math.inf
        is_passed_on = False
        left = list(self._ranks)
        while left and (now_s := time.monotonic()) < until_s:
            multiprocessing.connection.wait([one.sentinel for one in left], min(BEAT_S, until_s - now_s))
            left = [one for one in left if one.exitcode is None]
            if notice and not is_passed_on:
                is_passed_on = True
                until_s = time.monotonic() + self._limits.grace_s
                for one in left:
                    one.terminate()
            if verdict is None and (left or any(one.exitcode for one in self._ranks)):
                verdict = self._verdict()
                if verdict is not None:
                    until_s = min(until_s, time.monotonic() + 2 * BEAT_S + LEAVE_S)
        return verdict

    def _verdict(self) -> FailureReport | None:
        codes = [one.exitcode for one in self._ranks]  # before the reading: ranks first say that they leave
        self._judge.read(readings(self._store, range(len(self._ranks))), time.monotonic())
        mine = self._ended(codes) or self._judge.verdict()
        return agreed(self._store, mine)

    def _ended(self, codes: list[int | None]) -> FailureReport | None:
        """Of ranks that have ended without a word, that which a signal has ended, or else the first."""
        for at, code in sorted(enumerate(codes), key=lambda place: place[1] or 0):
            report = self._judge.reports.get(at)
            if code is None or code == CODE or (code == 0 and report is not None and report.has_left):
                continue
            name = report or who(at, self._stages[at], socket.gethostname())
            if code == -signal.SIGTERM:  # before it could answer
                return FailureReport(f"{name}: ended by SIGTERM", "", CODE)
            how = f"ended by {signal.Signals(-code).name}" if code < 0 else f"left with exit code {code}"
            return FailureReport(f"{name}: {how}", _LOOK)
        return None


def _end(ranks: list[ForkProcess]) -> None:
    """Kills those that are left, stopped ones too."""
    for one in ranks:
        if one.exitcode is None:
            one.kill()
    for one in ranks:
        one.join()


def _raise_first(errors: Any, verdict: FailureReport | None, ranks: list[ForkProcess]) -> None:
    said: list[HpgoError] = []
    while not errors.empty():
        said.append(errors.get())
    for error in said:
        if not isinstance(error, LostRankError):
            raise error
    if verdict is not None and verdict.code == CODE:
        raise Preempted(verdict.message)
    if verdict is not None:
        raise RunError(verdict.message, verdict.hint)
    for error in said:
        raise error
    if any(one.exitcode for one in ranks):  # asked to end, at a boundary or, where that took too long, anywhere
        raise Preempted
