"""What this process does, and whom it waits for: for those who watch it. A rank is a process, so there is one of it."""

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
"""Waits for every rank."""
SAVE = "save"
"""Waits for the save that this rank takes part in."""
_KINDS = {"F": "the forward pass", "B": "the backward pass", "I": "the backward pass", "W": "the backward pass"}
_WORK, _SUMS, _MEETING = range(3)


@dataclass(frozen=True, slots=True)
class ProgressEvent:
    """What a rank does at a moment."""

    rank: int
    stages: tuple[int, ...] | None
    """That it holds; None before it knows."""
    host: str
    machine: str
    """Where `pid` means the same process."""
    pid: int
    born: str
    """When the process began, as its system counts: numbers of processes are used again."""
    does: str
    place: tuple[int, int]
    """How far it is: meetings of all ranks that are behind it, and work, sums or the next meeting."""
    waits: int | tuple[int, ...] | str | None
    """For a rank, for the last of some, for `ALL` or `SAVE`."""
    save: tuple[int, bool] | None
    """How far a save is that runs beside the steps, and whether it waits for the other ranks."""
    is_lost: bool
    """Whether it has heard that another rank is gone, and not which one."""
    has_left: bool

    def __str__(self) -> str:
        return f"{who(self.rank, self.stages, self.host)}, last seen in {self.does}"

    def written(self, beat: int) -> bytes:
        """For `read`; another `beat` makes it another text."""
        return f"{beat} {json.dumps(asdict(self))}".encode()

    @classmethod
    def read(cls, raw: bytes) -> ProgressEvent:
        """What was written."""
        given: dict[str, Any] = json.loads(raw.partition(b" ")[2])
        lists: dict[str, Any] = {name: tuple(value) for name, value in given.items() if isinstance(value, list)}
        return cls(**{**given, **lists})


def who(rank: int, stages: Sequence[int] | None, host: str) -> str:
    """A rank in words.

    >>> who(3, (1,), "box")
    'rank 3 of stage 1 on box'
    """
    if stages is None:
        return f"rank {rank} on {host}"
    if not stages:
        return f"rank {rank}, idle, on {host}"
    return f"rank {rank} of {'stage' if len(stages) == 1 else 'stages'} {', '.join(map(str, stages))} on {host}"


def stages_of(program: Program, rank: int) -> tuple[int, ...]:
    """The stages that a rank holds."""
    held = [number for number, stage in enumerate(program.stages) if rank in stage.devices]
    if not program.schedule.actions[:, 0].any():  # forward alone: a host's stage is the same on all its routes
        held = sorted({number % program.schedule.chain_length for number in held})
    return tuple(held)


class Progress:
    """Whoever does something that may take long, or waits for other ranks, says so here, before."""

    def __init__(self) -> None:
        self.begin(0)

    def begin(self, rank: int, stages: tuple[int, ...] | None = None) -> None:
        """Makes this process a rank of a run; nothing of an earlier one counts."""
        self.rank, self.stages = rank, stages
        self.waits: int | tuple[int, ...] | str | None = None
        self.step: int | None = None
        """The one that runs."""
        self.save: tuple[int, bool] | None = None
        self.saves = ""
        """What is saved beside the steps; empty if nothing is."""
        self.is_lost = False
        self._words = "the start"
        self._engine: Any = None
        self._meetings, self._phase = 0, _WORK

    def does(self, words: str) -> None:
        """It works at something by itself."""
        self._words, self._engine, self._phase = words, None, _WORK

    def acts(self, engine: Any) -> None:
        """It runs the actions of a step; `engine.last_action` says which."""
        self._engine, self._phase = engine, _WORK

    def sums(self, words: str) -> None:
        """It has done its part, and waits for sums over some ranks."""
        self._words, self._engine, self._phase = words, None, _SUMS

    @contextmanager
    def meets(self, words: str) -> Iterator[None]:
        """All ranks come together, in the same order of such meetings. If that fails, it stays what this rank does."""
        before = self._words, self._engine
        self._words, self._engine, self._phase, self.waits = words, None, _MEETING, ALL
        yield
        self.waits = None
        self._meetings += 1
        (self._words, self._engine), self._phase = before, _WORK

    @contextmanager
    def waiting(self, whom: int | tuple[int, ...] | str) -> Iterator[None]:
        """It waits for others in the middle of something."""
        self.waits = whom
        yield
        self.waits = None

    def __str__(self) -> str:
        return f"{who(self.rank, self.stages, socket.gethostname())}, {self._what()}"

    def _what(self) -> str:
        action = None if self._engine is None else self._engine.last_action
        words = self._words
        if action is not None:
            words = f"{_KINDS[action.kind]} of micro-batch {action.micro_batch} through stage {action.stage}"
        return words if self.step is None else f"step {self.step}, {words}"

    def report(self, *, has_left: bool = False) -> ProgressEvent:
        """As it is now."""
        pid = os.getpid()
        machine, born = _identity(pid)
        return ProgressEvent(
            rank=self.rank,
            stages=self.stages,
            host=socket.gethostname(),
            machine=machine,
            pid=pid,
            born=born,
            does=self._what() + (f", while {self.saves}" if self.saves else ""),
            place=(self._meetings, self._phase),
            waits=self.waits,
            save=self.save,
            is_lost=self.is_lost,
            has_left=has_left,
        )


HERE = Progress()
"""Of this process."""


def born(pid: int) -> str:
    """When a process of this machine began, in ticks of its clock; empty where there is none, or nobody knows."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""


@cache  # by process, since processes fork
def _identity(pid: int) -> tuple[str, str]:
    """Where the number of this process counts, and when it began."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        space = Path("/proc/self/ns/pid").readlink()
    except OSError:
        return "", ""
    return f"{boot} {space}", born(pid)
