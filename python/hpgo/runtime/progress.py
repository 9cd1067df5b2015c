"""Progress of this process: what it does, and which ranks it waits for. Failure detection reads it.

A rank is a process, so there is one object per process.
"""

from __future__ import annotations

import json
import os
import socket
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from hpgo.programs.program import Program

ALL = "all"
"""Value of `waits` while a rank waits for every rank."""
SAVE = "save"
"""Value of `waits` while a rank waits for the save that it takes part in."""
_MOMENTS = {"the start", "the end"}
"""Descriptions of moments, which read "at the end". All others are actions, "in the forward pass"."""
_KINDS = {"F": "the forward pass", "B": "the backward pass", "I": "the backward pass", "W": "the backward pass"}
# The order matters: of ranks between the same collective steps, one that works is behind one that waits for a
# reduction, which is behind one that waits in the next collective step.
_WORK, _SUMS, _MEETING = range(3)


@dataclass(frozen=True, slots=True)
class ProgressEvent:
    """Progress of a rank at one moment."""

    rank: int
    stages: tuple[int, ...] | None
    """Stages that the rank holds; None before it knows them."""
    host: str
    node: str
    """Name of the scope in which `pid` identifies a process."""
    pid: int
    born: str
    """Start time of the process, by its system's clock, because process ids are reused."""
    does: str
    place: tuple[int, int]
    """Progress of the rank: the number of its completed collective steps, and whether it works, reduces or is in the
    next one."""
    waits: int | tuple[int, ...] | str | None
    """The rank that this one waits for, ranks of which it waits for the last, `ALL`, `SAVE`, or None."""
    save: tuple[int, bool] | None
    """Progress of a save beside the steps, and whether it waits for other ranks; None if there is none."""
    running: tuple[int, ...]
    """Ranks of this node that write nothing, but whose processes use a processor, as the operating system counts."""
    is_lost: bool
    """Whether the rank knows that another rank is gone, but not which one."""
    has_left: bool

    def __str__(self) -> str:
        return f"{who(self.rank, self.stages, self.host)}, last seen in {self.does}"

    def written(self, beat: int) -> bytes:
        """Return the event as bytes for `read`. Another `beat` makes other bytes."""
        return f"{beat} {json.dumps(asdict(self))}".encode()

    @classmethod
    def read(cls, raw: bytes) -> ProgressEvent:
        """Return the event that `written` has encoded."""
        given: dict[str, Any] = json.loads(raw.partition(b" ")[2])
        lists: dict[str, Any] = {name: tuple(value) for name, value in given.items() if isinstance(value, list)}
        return cls(**{**given, **lists})


def who(rank: int, stages: Sequence[int] | None, host: str) -> str:
    """Describe a rank in words.

    >>> who(3, (1,), "box")
    'rank 3 of stage 1 on box'
    """
    if stages is None:
        return f"rank {rank} on {host}"
    if not stages:
        return f"rank {rank}, idle, on {host}"
    return f"rank {rank} of {'stage' if len(stages) == 1 else 'stages'} {', '.join(map(str, stages))} on {host}"


def stages_of(program: Program, rank: int) -> tuple[int, ...]:
    """Return the stages that a rank holds."""
    held = [number for number, stage in enumerate(program.stages) if rank in stage.devices]
    # In inference, a host has the same stage in all pipeline replicas that it serves, so name it once.
    if not program.schedule.actions[:, 0].any():
        held = sorted({number % program.schedule.stages_per_pipeline for number in held})
    return tuple(held)


class Progress:
    """Progress of this process. Code reports here before it does something long or waits for other ranks."""

    def __init__(self) -> None:
        self.begin(0)

    def begin(self, rank: int, stages: tuple[int, ...] | None = None) -> None:
        """Make this process a rank of a run, and forget earlier progress."""
        self.rank, self.stages = rank, stages
        self.waits: int | tuple[int, ...] | str | None = None
        self.step: int | None = None
        """Number of the step that runs; None between steps."""
        self.save: tuple[int, bool] | None = None
        self.saves = ""
        """Description of the save that runs beside the steps; empty if there is none."""
        self.is_lost = False
        self._words = "the start"
        self._engine: Any = None
        self._meetings, self._phase = 0, _WORK

    def does(self, words: str) -> None:
        """Record what the rank works on by itself."""
        self._words, self._engine, self._phase = words, None, _WORK

    def acts(self, engine: Any) -> None:
        """Record that the rank runs the actions of a step. `engine.last_action` is the current one."""
        self._engine, self._phase = engine, _WORK

    def sums(self, words: str) -> None:
        """Record that the rank has done its part, and waits for a reduction over some ranks."""
        self._words, self._engine, self._phase = words, None, _SUMS

    @contextmanager
    def meets(self, words: str) -> Iterator[None]:
        """Record a collective step within this context. All ranks make these steps in the same order."""
        # No `finally`: if the step fails, other ranks must see where this one failed.
        before = self._words, self._engine
        self._words, self._engine, self._phase, self.waits = words, None, _MEETING, ALL
        yield
        self.waits = None
        self._meetings += 1
        (self._words, self._engine), self._phase = before, _WORK

    @contextmanager
    def waiting(self, whom: int | tuple[int, ...] | str) -> Iterator[None]:
        """Record within this context that the rank waits for others in the middle of something."""
        self.waits = whom
        yield
        self.waits = None

    def __str__(self) -> str:
        return f"{who(self.rank, self.stages, socket.gethostname())}, {self._what()}"

    def where(self) -> str:
        """Return what the rank does and which one it is, as the end of a sentence: "at the end, on rank 1 on box"."""
        what, name = self._what(), who(self.rank, self.stages, socket.gethostname())
        return f"{'at' if what in _MOMENTS else 'in'} {what}, on {name}"

    def _what(self) -> str:
        # Build the text only when it is asked for: the engine changes its action thousands of times between two
        # heartbeats.
        action = None if self._engine is None else self._engine.last_action
        words = self._words
        if action is not None:
            words = f"{_KINDS[action.kind]} of micro-batch {action.micro_batch} through stage {action.stage}"
        return words if self.step is None else f"step {self.step}, {words}"

    def report(self, *, running: tuple[int, ...] = (), has_left: bool = False) -> ProgressEvent:
        """Return the progress as it is now."""
        pid = os.getpid()
        node, born = _identity(pid)
        return ProgressEvent(
            rank=self.rank,
            stages=self.stages,
            host=socket.gethostname(),
            node=node,
            pid=pid,
            born=born,
            does=self._what() + (f", while {self.saves}" if self.saves else ""),
            place=(self._meetings, self._phase),
            waits=self.waits,
            save=self.save,
            running=running,
            is_lost=self.is_lost,
            has_left=has_left,
        )


HERE = Progress()
"""Progress of this process."""


def born(pid: int) -> str:
    """Return the start time of a process on this node, in clock ticks; empty if it can't be read."""
    values = _stat(pid)
    return values[19] if values else ""


def busy_ticks(pid: int, start: str) -> int:
    """Return the processor time of the process with this id and this `born`, in clock ticks; 0 if there is none.

    >>> import os
    >>> busy_ticks(os.getpid(), "another start")
    0
    """
    values = _stat(pid)
    return int(values[11]) + int(values[12]) if start and values and values[19] == start else 0


def _stat(pid: int) -> list[str]:
    """Return the third and later values of a process, as Linux's `proc_pid_stat(5)` has them; none without Linux."""
    try:
        # The second value is the name of the program in brackets, which may contain spaces and brackets.
        text = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return []
    values = text.rpartition(")")[2].split()
    return values if len(values) > 19 else []


# A forked child has another id, so the cache has an entry for each process.
@cache
def _identity(pid: int) -> tuple[str, str]:
    """Return the scope in which this process's id is valid, and its start time."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        # Containers number their processes separately, so an id is valid in its namespace only.
        space = Path("/proc/self/ns/pid").readlink()
    except OSError:
        return "", ""
    return f"{boot} {space}", born(pid)
