"""Worker process of the server, which runs one job after the other within limits of memory and time.

Only a separate process can be limited and killed. So the server keeps responding regardless of the job.
"""

from __future__ import annotations

import os
import pickle
import select
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from hpgo.base.memory_check import RoomError
from hpgo.base.units import format_bytes
from hpgo.errors import HpgoError
from hpgo.page.planned.jobs import PlanJob
from hpgo.page.settings import Plans, Size, numbers_of, one_step, settings_of, timelines
from hpgo.page.transformers.jobs import LlmJob

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hpgo.timing.timeline import Timeline

OUT_OF_MEMORY = 75
"""Exit code of a worker that reached its memory limit."""
_MAX_GROWTH_BYTES = 32 * 2**20
"""Growth in memory after which a worker exits, because a fresh one is cheaper than memory that is never returned."""
_MAX_BYTES = 64 * 2**20
"""Limit on the size of a response."""
_LATE_S = 2.0
"""Time after its limit at which a job is killed by the system, if the server that keeps the limit is gone."""


@dataclass(frozen=True, slots=True)
class PageRequest:
    """One request of the page that compares schedules."""

    wanted: str
    """`page`, `plan` (check the file of a plan), or an ending of `hpgo.draw.ENDINGS`."""
    items: tuple[tuple[str, str], ...] = ()
    """Name and value of each field in the address."""
    titles: tuple[tuple[str, str], ...] = ()
    """Names and titles of the plans that a page offers."""
    plan: bytes = b""
    """File of the plan that the address names, or that is to be checked."""
    title: str = ""
    """Title of that plan for users."""
    numbers: tuple[tuple[str, str], ...] = ()
    """Values of that plan, which a page shows in its fields."""
    table: bool = True
    """Whether a picture includes its table."""


@dataclass(frozen=True, slots=True)
class Done:
    """The result of a job."""

    body: bytes
    size: Size | None = None
    """Size of one step of the plan that was checked."""
    numbers: tuple[tuple[str, str], ...] = ()
    """Values of that plan, which the page shows in its fields."""


@dataclass(frozen=True, slots=True)
class ProgressMessage:
    """The progress of a running job."""

    message: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Stop:
    """A request to stop a search, which then returns its best plan so far.

    It can arrive between jobs, if the search ended in the meantime.
    """


def done(job: PageRequest | PlanJob, tell: Callable[[dict[str, Any]], object] = lambda _: None) -> Done:
    """Run a job. Raises HpgoError if the request is invalid or can't be met.

    >>> done(PageRequest(".txt", (("num_stages", "2"), ("num_batches", "2")))).body.decode().startswith("1f1b")
    True
    """
    if isinstance(job, LlmJob):
        from hpgo.page.transformers import work

        return Done(_bounded(work.answer(job, tell), job.wanted))
    if isinstance(job, PlanJob):
        from hpgo.page.planned.work import answer

        return Done(_bounded(answer(job, tell), job.wanted))
    plans = Plans()
    name = plans.add(job.plan, job.title) if job.plan else ""
    if job.wanted == "plan":
        plan = plans.get(name)
        return Done(name.encode(), one_step(plan), tuple(numbers_of(plan).items()))
    settings = settings_of(job.items)
    drawn = timelines(settings, plans)
    if job.wanted == "page":
        from hpgo.page.form import page

        return Done(page(job.items, dict(job.titles), drawn, dict(job.numbers)).encode())
    return Done(_bounded(_rendered(drawn, job.wanted, settings.options | {"table": job.table}), job.wanted[1:]))


def _bounded(body: bytes, what: str) -> bytes:
    """Return `body`. Raises HpgoError if it exceeds the size limit."""
    if len(body) > _MAX_BYTES:
        raise HpgoError(
            f"this {what} has {format_bytes(len(body))}, but the limit is {format_bytes(_MAX_BYTES)}",
            "export another format, or write it with `hpgo simulate`",
        )
    return body


def _rendered(drawn: Sequence[Timeline], ending: Any, options: dict[str, Any]) -> bytes:
    from hpgo.draw import render, save

    # Matplotlib writes these formats only into files.
    if ending not in {".png", ".pdf"}:
        return render(drawn, ending, **options)
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        return save(drawn, Path(folder) / f"schedule{ending}", **options).read_bytes()


def main() -> None:
    """Run jobs from stdin and write their results to stdout, until stdin ends. Messages are pickles after their length.

    The first message is None, when the process is ready. A result is that of the job, or its error, and whether this
    process exits now because it has grown. The command line has the limits: memory in bytes, seconds per job, niceness.
    """
    memory_bytes, time_limit_s, nice = int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])
    # Code that prints on stdout must not damage the messages, so stdout becomes a copy of stderr.
    with os.fdopen(os.dup(1), "wb") as answers, os.fdopen(os.dup(0), "rb") as jobs:
        os.dup2(2, 1)
        from hpgo.draw import html, scene, svg  # noqa: F401 -- load them before the first request
        from hpgo.page.planned import work  # noqa: F401
        from hpgo.page.transformers import work as llm_work  # noqa: F401

        at_first_bytes = _held_bytes()
        _bound(memory_bytes, nice)
        _send(answers, None)

        def tell(message: dict[str, Any]) -> None:
            _send(answers, ProgressMessage(message))
            # A search reads its stop message while it reports progress, since it has no other thread.
            if _is_waiting(jobs) and isinstance(receive(jobs), Stop):
                raise KeyboardInterrupt

        while (job := receive(jobs)) is not None:
            if isinstance(job, Stop):
                continue
            # The server enforces the time limit. This timer ends jobs whose server is gone.
            _end_after(time_limit_s + _LATE_S)
            try:
                outcome: Done | HpgoError = done(job, tell)
            except (MemoryError, RoomError):
                # After a failed allocation, regular clean-up could fail again. The exit code is the message.
                os._exit(OUT_OF_MEMORY)
            except HpgoError as error:
                outcome = error
            _end_after(0)
            ends = _held_bytes() > at_first_bytes + _MAX_GROWTH_BYTES
            _send(answers, (outcome, ends))
            if ends:
                return


def framed(message: object) -> bytes:
    """Return `message` as bytes for a pipe: the length of its pickle, then the pickle."""
    data = pickle.dumps(message)
    return len(data).to_bytes(8) + data


def _send(stream: BinaryIO, message: object) -> None:
    """Send `message`, or exit if the server is gone."""
    try:
        stream.write(framed(message))
        stream.flush()
    except BrokenPipeError:
        os._exit(0)


def receive(stream: BinaryIO) -> Any:
    """Return the next message of `stream`, or None at its end."""
    head = stream.read(8)
    if len(head) < 8:
        return None
    return pickle.loads(stream.read(int.from_bytes(head)))  # noqa: S301 -- from the process that started this one


def _is_waiting(stream: BinaryIO) -> bool:
    """Return whether a message can be received without waiting; always false on Windows, which can't poll pipes."""
    if os.name == "nt":
        return False
    return bool(select.select([stream], [], [], 0)[0])


def _bound(memory_bytes: int, nice: int) -> None:
    try:
        import resource
    except ImportError:  # Windows has no resource limits.
        return
    _, max_bytes = resource.getrlimit(resource.RLIMIT_DATA)
    if max_bytes != resource.RLIM_INFINITY:
        memory_bytes = min(memory_bytes, max_bytes)
    resource.setrlimit(resource.RLIMIT_DATA, (memory_bytes, memory_bytes))
    # A process that is killed by its limits must not write core files.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.nice(nice)


def _end_after(time_s: float) -> None:
    """Let the system kill this process after `time_s` seconds; 0 cancels that."""
    if hasattr(signal, "setitimer"):
        signal.setitimer(signal.ITIMER_REAL, time_s)


def _held_bytes() -> int:
    """Return the resident memory of this process in bytes; 0 on systems without /proc."""
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    except OSError:
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")
