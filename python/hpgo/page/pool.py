"""Processes that work for the server: so many at once, so many requests that wait for one, each for so long.

They are children that are started when there is work, import hpgo once and then do job after job. Threads would do for
waiting, but no thread can be ended; and a pool of the standard library (`concurrent.futures`) breaks as a whole when
one of its processes is ended, which here is what happens to everyone who asks too much or leaves.
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
"""How long work goes on for a client that has left: most ends by then, and a process is dearer than it."""


class UnavailableError(HpgoError):
    """The server can't take this request now, but may later."""


class BrokenError(HpgoError):
    """The process that worked on a request ended, and nobody knows why."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What one job may take."""

    memory_bytes: int
    time_s: float


class JobChannel:
    """What is said with a job while it is done: it tells how far it is, and can be stopped."""

    def __init__(self) -> None:
        self.told: asyncio.Queue[dict[str, Any]] = asyncio.Queue(1)
        """The last that it told, if nobody has taken it yet."""
        self.stopped = asyncio.Event()

    def tell(self, said: dict[str, Any]) -> None:
        """Keeps `said` in the place of what was told before."""
        if self.told.full():
            self.told.get_nowait()
        self.told.put_nowait(said)


class Pool:
    """Up to `processes` workers, each at the priority `nice`, and `queue` jobs that wait for one of them."""

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
        """Starts a worker before there is work."""
        self._idle.append(await _Worker.start(self.limits, self._nice))

    async def run(self, job: PageRequest | PlanJob, talk: JobChannel | None = None) -> Done:
        """Does `job`; if this is cancelled, its work ends soon, too. A search can be talked to.

        Raises HpgoError: the job's own, for want of memory or time, UnavailableError, or BrokenError.
        """
        if self._waiting >= self._queue:
            raise UnavailableError(
                f"{self._waiting} requests wait already", "try again soon, or start `hpgo serve` with more `--workers`"
            )
        self._waiting += 1
        try:
            await self._free.acquire()
        finally:
            self._waiting -= 1
        if self._closed:
            self._free.release()
            raise _stopped()
        work = asyncio.create_task(self._work(job, talk or JobChannel()))
        self._at_work.add(work)
        work.add_done_callback(self._worked)
        try:
            return await asyncio.shield(work)
        except asyncio.CancelledError:
            if self._closed:
                raise _stopped() from None
            asyncio.get_running_loop().call_later(_GRACE_S, work.cancel)
            raise

    async def close(self) -> None:
        """Ends all workers; those who wait for them are told so."""
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
            work.exception()  # nobody may be left to hear it

    async def _work(self, job: PageRequest | PlanJob, talk: JobChannel) -> Done:
        worker = await self._taken()
        keep = False
        try:
            await worker.is_ready()
            async with asyncio.timeout(self.limits.time_s):
                outcome, ends = await worker.ask(job, talk)
            keep = not ends
        except TimeoutError:
            raise HpgoError(
                f"that takes longer than {format_seconds(self.limits.time_s)}, which is all that a request gets",
                "ask for less, or start `hpgo serve` with another `--time-limit`",
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
            if (worker := self._idle.pop()).is_alive:
                return worker
        return await _Worker.start(self.limits, self._nice)

    def _broken(self, code: int) -> HpgoError:
        # Rust aborts where Python would raise a MemoryError.
        if code in {OUT_OF_MEMORY, -signal.SIGABRT}:
            return HpgoError(
                f"that takes more memory than the {format_bytes(self.limits.memory_bytes)} that a request gets",
                "ask for less, or start `hpgo serve` with more `--memory`",
            )
        return BrokenError(f"the process that worked on this ended with {code}", "its reason is where hpgo runs")


def _stopped() -> UnavailableError:
    return UnavailableError("hpgo is stopping", "start `hpgo serve` again")


class _Worker:
    """A process that does jobs."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._ready = False

    @classmethod
    async def start(cls, limits: Limits, nice: int) -> _Worker:
        known = {
            # Where this process finds hpgo, whoever told it; `-P` keeps files of the current folder out.
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            # OpenBLAS sets memory aside for each processor, and nothing here multiplies matrices.
            "OPENBLAS_NUM_THREADS": "1",
        }
        try:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-P", "-c", "from hpgo.page.worker import main; main()"),
                *(str(limits.memory_bytes), str(limits.time_s), str(nice)),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                env=os.environ | known,
                start_new_session=True,  # Ctrl-C is for the server, which ends its workers
            )
        except OSError as error:
            raise BrokenError(
                f"can't start a process: {error.strerror or error}", "end others, or let this machine run more"
            ) from None
        return cls(process)

    @property
    def is_alive(self) -> bool:
        """Whether it has not ended, by itself or by others."""
        return self._process.returncode is None

    async def ask(self, job: PageRequest | PlanJob, talk: JobChannel) -> tuple[Done | HpgoError, bool]:
        """What came of `job`, and whether the process ends; raises EOFError or ConnectionError if it ended before."""
        await self._say(job)
        stopping = asyncio.create_task(self._stop(talk.stopped))
        try:
            while isinstance(heard := await self._heard(), ProgressMessage):
                talk.tell(heard.said)
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
        """Waits until the process can take its first job; raises EOFError if it ended before."""
        if not self._ready:
            await self._heard()
            self._ready = True

    async def _heard(self) -> Any:
        back = self._process.stdout
        assert back is not None  # noqa: S101 -- it is a pipe
        size = int.from_bytes(await back.readexactly(8))
        return pickle.loads(await back.readexactly(size))  # noqa: S301 -- from our child

    async def ended(self) -> int:
        """The exit code of a process that is ending."""
        try:
            async with asyncio.timeout(_GRACE_S):
                return await self._process.wait()
        except TimeoutError:
            return -signal.SIGKILL

    async def end(self) -> None:
        """Ends the process, whatever it does."""
        if self._process.returncode is None:
            with suppress(ProcessLookupError):
                self._process.kill()
        await self._process.wait()
