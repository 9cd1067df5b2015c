"""What a process that works for the server does: it takes one job after the other, within limits of memory and time.

It is a process of its own since only that can be bounded and ended: whatever a job does, the server answers on.
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

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hpgo.timing.timeline import Timeline

OUT_OF_MEMORY = 75
"""Exit code of a worker that came up against its limit."""
_MOST_GROWTH_BYTES = 32 * 2**20
_MOST_BYTES = 64 * 2**20
"""How long an answer may be."""
_LATE_S = 2.0


@dataclass(frozen=True, slots=True)
class PageRequest:
    """What one request asks for."""

    wanted: str
    """`page`, `plan` (a look at the file of one), or an ending of `hpgo.draw.ENDINGS`."""
    items: tuple[tuple[str, str], ...] = ()
    """The pairs of its address."""
    titles: tuple[tuple[str, str], ...] = ()
    """For a page: names and titles of the plans that can be chosen."""
    plan: bytes = b""
    """The file of the plan that the address names, or that is to be looked at."""
    title: str = ""
    """What people call that plan."""
    numbers: tuple[tuple[str, str], ...] = ()
    """For a page: what that plan says in place of fields."""
    table: bool = True
    """Whether a picture has its table."""


@dataclass(frozen=True, slots=True)
class Done:
    """What came of a job."""

    body: bytes
    size: Size | None = None
    """Of one step of the plan that was looked at."""
    numbers: tuple[tuple[str, str], ...] = ()
    """What that plan says in place of the page's fields."""


@dataclass(frozen=True, slots=True)
class ProgressMessage:
    """How far a job is, before it is done."""

    said: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Stop:
    """Ends a search: what it has found so far is its answer. Comes between jobs too, when the search was quicker."""


def done(job: PageRequest | PlanJob, tell: Callable[[dict[str, Any]], object] = lambda _: None) -> Done:
    """Does a job; raises HpgoError where it asks for what can't be had.

    >>> done(PageRequest(".txt", (("num_stages", "2"), ("num_batches", "2")))).body.decode().startswith("1f1b")
    True
    """
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
    """An answer that is no longer than it may be."""
    if len(body) > _MOST_BYTES:
        raise HpgoError(
            f"this {what} has {format_bytes(len(body))}; the page gives {format_bytes(_MOST_BYTES)}",
            "export another format, or write it with `hpgo simulate`",
        )
    return body


def _rendered(drawn: Sequence[Timeline], ending: Any, options: dict[str, Any]) -> bytes:
    from hpgo.draw import render, save

    if ending not in {".png", ".pdf"}:
        return render(drawn, ending, **options)
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        return save(drawn, Path(folder) / f"schedule{ending}", **options).read_bytes()


def main() -> None:
    """Does jobs from stdin, one pickle behind its length each, and answers on stdout, until there are no more.

    First it sends None: it is ready. An answer is what came of the job, or its error, and whether this process ends now
    since it has grown. The command line has the limits: memory in bytes, seconds for each job, and niceness.
    """
    memory_bytes, time_limit_s, nice = int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])
    # Prints of whatever runs here go where they harm no answer.
    with os.fdopen(os.dup(1), "wb") as answers, os.fdopen(os.dup(0), "rb") as jobs:
        os.dup2(2, 1)
        from hpgo.draw import html, scene, svg  # noqa: F401 -- before the first request waits for them
        from hpgo.page.planned import work  # noqa: F401

        at_first_bytes = _held_bytes()
        _bound(memory_bytes, nice)
        _send(answers, None)

        def tell(said: dict[str, Any]) -> None:
            _send(answers, ProgressMessage(said))
            if _is_waiting(jobs) and isinstance(receive(jobs), Stop):
                raise KeyboardInterrupt

        while (job := receive(jobs)) is not None:
            if isinstance(job, Stop):
                continue
            # The server keeps the time; this is for what goes on when the server is gone.
            _end_after(time_limit_s + _LATE_S)
            try:
                outcome: Done | HpgoError = done(job, tell)
            except (MemoryError, RoomError):
                os._exit(OUT_OF_MEMORY)
            except HpgoError as error:
                outcome = error
            _end_after(0)
            ends = _held_bytes() > at_first_bytes + _MOST_GROWTH_BYTES
            _send(answers, (outcome, ends))
            if ends:
                return


def framed(message: object) -> bytes:
    """`message` as it goes through a pipe."""
    data = pickle.dumps(message)
    return len(data).to_bytes(8) + data


def _send(stream: BinaryIO, message: object) -> None:
    """Answers; ends this process where nobody hears it any more, as the server has ended."""
    try:
        stream.write(framed(message))
        stream.flush()
    except BrokenPipeError:
        os._exit(0)


def receive(stream: BinaryIO) -> Any:
    """The next message of `stream`; None at its end."""
    head = stream.read(8)
    if len(head) < 8:
        return None
    return pickle.loads(stream.read(int.from_bytes(head)))  # noqa: S301 -- from the process that started this one


def _is_waiting(stream: BinaryIO) -> bool:
    """Whether there is a message to receive, where the system tells: nobody waits for one on Windows."""
    if os.name == "nt":
        return False
    return bool(select.select([stream], [], [], 0)[0])


def _bound(memory_bytes: int, nice: int) -> None:
    try:
        import resource
    except ImportError:  # Windows has no such limits
        return
    _, max_bytes = resource.getrlimit(resource.RLIMIT_DATA)
    if max_bytes != resource.RLIM_INFINITY:
        memory_bytes = min(memory_bytes, max_bytes)
    resource.setrlimit(resource.RLIMIT_DATA, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.nice(nice)


def _end_after(time_s: float) -> None:
    """Lets the system end this process then; 0 takes that back."""
    if hasattr(signal, "setitimer"):
        signal.setitimer(signal.ITIMER_REAL, time_s)


def _held_bytes() -> int:
    """Memory of this process; 0 where the system doesn't tell."""
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    except OSError:
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")
