"""Processes of a run on this node: one per rank, forked after torch was loaded once, and supervised until they end."""

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
_LOOK = "read its output above; the system sends SIGKILL when memory runs out"
_HERE = "127.0.0.1"


def run_here(
    world_size: int,
    work: Callable[[], None],
    limits: Limits | None = None,
    stages_of: Callable[[int], tuple[int, ...]] | None = None,
) -> None:
    """Run `work` in `world_size` processes, each with a launcher's environment variables, and wait for all of them.

    `stages_of` returns the stages that a rank will hold, to name a rank that is lost before it knows them.

    Raises the first rank's error that is no consequence of another's, RunError for a lost rank, and Preempted if
    SIGTERM has ended the ranks. All processes have ended then, also after Ctrl-C.
    """
    # Loading it takes seconds, and each rank would need it at its first meta tensor. Load it once, before the forks.
    import torch._dynamo  # noqa: F401

    limits = limits or Limits()
    stages = [None if stages_of is None else stages_of(rank) for rank in range(world_size)]
    context = multiprocessing.get_context("fork")
    listener = socket.create_server((_HERE, 0))
    port = listener.getsockname()[1]
    errors = context.SimpleQueue()
    # The kernel closes `held` when this process ends, even by SIGKILL. Ranks see that at the other end of the pipe.
    alive, held = os.pipe()
    ranks: list[ForkProcess] = []
    with _notice() as notice:
        try:
            with uninterrupted(), warnings.catch_warnings():
                # Python warns of forks in a process with threads, which numpy may have started.
                warnings.simplefilter("ignore", DeprecationWarning)
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
    """Collect the SIGTERM signals that arrive within this context. The ranks handle them."""
    received: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield received
        return
    before = signal.signal(signal.SIGTERM, lambda number, _: received.append(number))
    try:
        yield received
    finally:
        signal.signal(signal.SIGTERM, before)


def _variables(rank: int, world_size: int, port: int) -> dict[str, str]:
    """Return the variables that torchrun would set, for a store that exists already."""
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
    """Run one process: set it up as a rank, do the work, and report errors."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    listener.close()
    alive, held = pipe
    os.close(held)
    # A terminal sends Ctrl-C to all processes. The parent handles it and ends the ranks, with one message.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, args=(alive,), daemon=True).start()
    os.environ.update(place)
    sys.stdout = io.TextIOWrapper(io.BufferedWriter(_Lasting(1, "w", closefd=False)), line_buffering=True)
    if sys.platform == "linux":
        # All ranks are on this node. The loopback interface works without a network and behind firewalls.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    rank, size = int(place["RANK"]), int(place["WORLD_SIZE"])
    store = dist.TCPStore(_HERE, int(place["MASTER_PORT"]), is_master=False, wait_for_workers=False)
    HERE.begin(rank, stages)
    guards.begin(dist.PrefixStore(_WATCH, store), rank, size, limits, tell=None)
    if "OMP_NUM_THREADS" not in os.environ:
        import torch

        # By default every process starts a thread per core, and the ranks would compete for cores.
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // size))
    code = 0
    try:
        work()
    except Preempted:
        code = CODE
    except BaseException as error:  # noqa: BLE001 -- after any error, the others must not wait for this rank
        if isinstance(error, HpgoError):
            errors.put(guards.named(error))
        guards.charge(error)
        code = 1
        # Errors of hpgo are reported once, by the parent. Others are faults of the user's code or of hpgo, so show
        # where.
        if not isinstance(error, HpgoError | SystemExit):
            traceback.print_exception(error)
    guards.end()
    sys.stdout.flush()
    sys.stderr.flush()
    # A normal exit would join threads of communication libraries, which may wait for ranks that are gone.
    os._exit(code)


class _Lasting(io.FileIO):
    """An output stream whose reader may leave, as `| head` does. The run goes on without it."""

    def write(self, given: ReadableBuffer, /) -> int:
        """Write bytes, or discard them if there is no reader any more."""
        try:
            return super().write(given)
        except BrokenPipeError:
            return memoryview(given).nbytes


def _end_with_parent(alive: int) -> None:
    # Nothing is ever written. The read returns when the other end closes.
    os.read(alive, 1)
    os._exit(1)


class _Overseer:
    """Supervisor that waits for the ranks, and finds the one that is lost, by its exit or from what the ranks write."""

    def __init__(
        self, ranks: list[ForkProcess], stages: list[tuple[int, ...] | None], store: Any, limits: Limits
    ) -> None:
        self._ranks, self._stages, self._store, self._limits = ranks, stages, store, limits
        self._judge = FailureDetector(len(ranks), limits, time.monotonic())
        self._ended_ranks: list[int] = []
        """Ranks that have ended, in that order."""

    def wait(self, notice: list[int]) -> FailureReport | None:
        """Wait until all have ended, or the rest has had its time. Return the reason why the run was lost, or None."""
        verdict: FailureReport | None = None
        until_s = math.inf
        is_passed_on = False
        left = list(self._ranks)
        while left and (now_s := time.monotonic()) < until_s:
            multiprocessing.connection.wait([one.sentinel for one in left], min(BEAT_S, until_s - now_s))
            left = [one for one in left if one.exitcode is None]
            self._note_ended()
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

    def _note_ended(self) -> None:
        codes = {at: code for at, one in enumerate(self._ranks) if (code := one.exitcode) is not None}
        # Of ranks that end at once, one that a signal has ended is the cause, since it did not wait for others.
        self._ended_ranks += sorted(codes.keys() - set(self._ended_ranks), key=lambda at: codes[at])

    def _verdict(self) -> FailureReport | None:
        # Take the exit codes before the readings. A rank writes that it leaves before it exits, so that no normal exit
        # looks like a loss.
        codes = [(at, self._ranks[at].exitcode) for at in self._ended_ranks]
        self._judge.read(readings(self._store, range(len(self._ranks))), time.monotonic())
        mine = self._ended(codes) or self._judge.verdict()
        return agreed(self._store, mine)

    def _ended(self, codes: list[tuple[int, int | None]]) -> FailureReport | None:
        """Return the reason if a rank has ended without reporting one: the first of `codes`, rank by rank."""
        for at, code in codes:
            report = self._judge.reports.get(at)
            if code is None or code == CODE or (code == 0 and report is not None and report.has_left):
                continue
            name = report or who(at, self._stages[at], socket.gethostname())
            if code == -signal.SIGTERM:  # it came before the rank had installed its handler
                return FailureReport(f"{name}: ended by SIGTERM", "", CODE)
            how = f"ended by {signal.Signals(-code).name}" if code < 0 else f"left with exit code {code}"
            return FailureReport(f"{name}: {how}", _LOOK)
        return None


def _end(ranks: list[ForkProcess]) -> None:
    """Kill the ranks that are left, stopped ones included."""
    for one in ranks:
        if one.exitcode is None:
            one.kill()
    for one in ranks:
        one.join()


def _raise_first(errors: Any, verdict: FailureReport | None, ranks: list[ForkProcess]) -> None:
    reported: list[HpgoError] = []
    while not errors.empty():
        reported.append(errors.get())
    if verdict is not None and verdict.code != CODE:
        # The first reason is the cause. Other ranks may have reported what followed from it.
        own = [one for one in reported if one.message == verdict.message and not isinstance(one, LostRankError)]
        raise own[0] if own else RunError(verdict.message, verdict.hint)
    for error in reported:
        if not isinstance(error, LostRankError):
            raise error
    if verdict is not None:
        raise Preempted(verdict.message)
    for error in reported:
        raise error
    # No error and no verdict, but exit codes: the ranks were asked to end.
    if any(one.exitcode for one in ranks):
        raise Preempted
