"""Worker processes of the server, with limits on their number, on waiting requests, and on the time of each.

Workers are child processes that start on demand, import hpgo once and then run job after job. Threads can't be killed.
A pool of `concurrent.futures` breaks as a whole if one of its processes is killed, but the server kills a process
whenever a request exceeds its limits or its client disconnects.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
import sys
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hpgo.base.units import format_bytes, format_seconds
from hpgo.errors import HpgoError
from hpgo.page.worker import OUT_OF_MEMORY, ProgressMessage, Stop, framed

if TYPE_CHECKING:
    from hpgo.page.planned.jobs import PlanJob
    from hpgo.page.worker import Done, PageRequest

_GRACE_S = 0.5
"""Time that work continues after its client disconnected. Most work ends earlier, and a new process costs more."""


class UnavailableError(HpgoError):
    """The server can't accept this request now, but may later."""


class BrokenError(HpgoError):
    """The process that worked on a request ended for an unknown reason."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits on memory and time of one job."""

    memory_bytes: int
    time_s: float


class JobChannel:
    """Communication with a running job: it reports progress, and can be stopped."""

    def __init__(self) -> None:
        self.progress: asyncio.Queue[dict[str, Any]] = asyncio.Queue(1)
        """The last progress message, if it was not taken yet."""
        self.stopped = asyncio.Event()

    def tell(self, message: dict[str, Any]) -> None:
        """Replace the last progress message."""
        if self.progress.full():
            self.progress.get_nowait()
        self.progress.put_nowait(message)


class Pool:
    """Up to `processes` workers with the niceness `nice`, and up to `queue` jobs that wait for one of them."""

    def __init__(self, processes: int, queue: int, limits: Limits, *, nice: int = 0) -> None:
        self.limits = limits
        self._nice = nice
        self._queue = queue
        self._waiting = 0
        self._free = asyncio.Semaphore(processes)
        self._idle: list[_Worker] = []
        self._at_work: set[asyncio.Task[Done]] = set()
        self._closed = False

    async def warm(self) -> None:
        """Start a worker before there is work."""
        self._idle.append(await _Worker.start(self.limits, self._nice))

    async def run(self, job: PageRequest | PlanJob, talk: JobChannel | None = None) -> Done:
        """Run `job`, and stop its work soon after this call is cancelled. A search uses the channel `talk`.

        The job waits for a worker no longer than it may then take, `Limits.time_s`. Raises the error of the job,
        HpgoError if it exceeds its limits, UnavailableError, or BrokenError.
        """
        # Requests beyond the queue fail at once, so that memory and waiting times stay bounded.
        if self._waiting >= self._queue:
            raise UnavailableError(
                f"{self._waiting} requests are waiting, which is the limit",
                "try again soon, or start `hpgo serve` with more `--workers`",
            )
        self._waiting += 1
        try:
            # Work ahead may take its whole time limit, one job after the other. A client must not wait for all of it.
            async with asyncio.timeout(self.limits.time_s):
                await self._free.acquire()
        except TimeoutError:
            raise UnavailableError(
                f"the request has waited for {format_seconds(self.limits.time_s)}, the time limit, behind others",
                "try again soon, or start `hpgo serve` with more `--workers`",
            ) from None
        finally:
            self._waiting -= 1
        if self._closed:
            self._free.release()
            raise _stopped()
        # The work is a task of its own, so that it can outlive a cancelled request for a moment.
        work = asyncio.create_task(self._work(job, talk or JobChannel()))
        self._at_work.add(work)
        work.add_done_callback(self._worked)
        try:
            return await asyncio.shield(work)
        except asyncio.CancelledError:
            if self._closed:
                raise _stopped() from None
            # Most work ends within the grace period, and its worker can then be used again.
            asyncio.get_running_loop().call_later(_GRACE_S, work.cancel)
            raise

    async def close(self) -> None:
        """Kill all workers. Waiting requests get an error."""
        self._closed = True
        for work in self._at_work:
            work.cancel()
        if self._at_work:
            await asyncio.wait(self._at_work)
        while self._idle:
            await self._idle.pop().end()

    def _worked(self, work: asyncio.Task[Done]) -> None:
        self._at_work.discard(work)
        self._free.release()
        if not work.cancelled():
            work.exception()  # Mark it as retrieved: the client may have left, and asyncio would log a warning.

    async def _work(self, job: PageRequest | PlanJob, talk: JobChannel) -> Done:
        worker = await self._taken()
        # A worker is kept only after a complete exchange. Otherwise, its next message would belong to this job.
        keep = False
        try:
            await worker.is_ready()
            async with asyncio.timeout(self.limits.time_s):
                outcome, ends = await worker.ask(job, talk)
            keep = not ends
        except TimeoutError:
            raise HpgoError(
                f"the request takes longer than the limit of {format_seconds(self.limits.time_s)}",
                "make a smaller request, or start `hpgo serve` with a longer `--time-limit`",
            ) from None
        except (EOFError, ConnectionError):
            raise self._broken(await worker.ended()) from None
        finally:
            if keep:
                self._idle.append(worker)
            else:
                await worker.end()
        if isinstance(outcome, HpgoError):
            raise outcome
        return outcome

    async def _taken(self) -> _Worker:
        while self._idle:
            # A worker may have died while idle, for instance by the out-of-memory killer.
            if (worker := self._idle.pop()).is_alive:
                return worker
        return await _Worker.start(self.limits, self._nice)

    def _broken(self, code: int) -> HpgoError:
        # Rust aborts the process if an allocation fails, where Python raises MemoryError.
        if code in {OUT_OF_MEMORY, -signal.SIGABRT}:
            return HpgoError(
                f"the request takes more memory than the limit of {format_bytes(self.limits.memory_bytes)}",
                "make a smaller request, or start `hpgo serve` with more `--memory`",
            )
        return BrokenError(
            f"the process of this request ended with code {code}", "see the output of `hpgo serve` for the reason"
        )


def _stopped() -> UnavailableError:
    return UnavailableError("hpgo is stopping", "start `hpgo serve` again")


class _Worker:
    """A worker process that runs jobs."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._ready = False

    @classmethod
    async def start(cls, limits: Limits, nice: int) -> _Worker:
        known = {
            # The worker must find hpgo like this process. `-P` keeps modules in the current folder out.
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            # OpenBLAS reserves memory for each processor, and jobs don't multiply matrices.
            "OPENBLAS_NUM_THREADS": "1",
        }
        try:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-P", "-c", "from hpgo.page.worker import main; main()"),
                *(str(limits.memory_bytes), str(limits.time_s), str(nice)),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                env=os.environ | known,
                start_new_session=True,  # Ctrl-C must reach only the server, which kills its workers.
            )
        except OSError as error:
            raise BrokenError(
                f"can't start a process: {error.strerror or error}", "raise the limit on processes: `ulimit -u`"
            ) from None
        return cls(process)

    @property
    def is_alive(self) -> bool:
        """Whether the process is running."""
        return self._process.returncode is None

    async def ask(self, job: PageRequest | PlanJob, talk: JobChannel) -> tuple[Done | HpgoError, bool]:
        """Return the result of `job`, and whether the process exits now.

        Raises EOFError or ConnectionError if the process died.
        """
        await self._say(job)
        stopping = asyncio.create_task(self._stop(talk.stopped))
        try:
            while isinstance(heard := await self._heard(), ProgressMessage):
                talk.tell(heard.message)
        finally:
            stopping.cancel()
        answer: tuple[Done | HpgoError, bool] = heard
        return answer

    async def _stop(self, stopped: asyncio.Event) -> None:
        await stopped.wait()
        with suppress(ConnectionError):
            await self._say(Stop())

    async def _say(self, message: object) -> None:
        to = self._process.stdin
        assert to is not None  # noqa: S101 -- it is a pipe
        to.write(framed(message))
        await to.drain()

    async def is_ready(self) -> None:
        """Wait until the process is ready for its first job. Raises EOFError if it died."""
        if not self._ready:
            await self._heard()
            self._ready = True

    async def _heard(self) -> Any:
        back = self._process.stdout
        assert back is not None  # noqa: S101 -- it is a pipe
        size = int.from_bytes(await back.readexactly(8))
        return pickle.loads(await back.readexactly(size))  # noqa: S301 -- from our child

    async def ended(self) -> int:
        """Return the exit code of a process that is exiting."""
        try:
            async with asyncio.timeout(_GRACE_S):
                return await self._process.wait()
        except TimeoutError:
            return -signal.SIGKILL

    async def end(self) -> None:
        """Kill the process."""
        if self._process.returncode is None:
            with suppress(ProcessLookupError):
                self._process.kill()
        await self._process.wait()
