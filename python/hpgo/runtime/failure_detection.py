"""The watch over the ranks of a run: whichever of them is lost, all end, and all say which one it was.

Each rank has two threads beside its work. One writes into the store of the launch, twice a second, what the rank does,
and reads what all others have written; the other one looks at what was read, and so is never stuck in a store that does
not answer. The rank that is to blame is found by a `FailureDetector`, which a process that starts
ranks on its machine asks, too.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import threading
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from hpgo.base.checks import number
from hpgo.errors import RunError
from hpgo.runtime.progress import ALL, HERE, SAVE, ProgressEvent, born

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

BEAT_S = 0.5
LEAVE_S = 1.0
"""How long a rank has to end by itself, as others need not end it, once it is known that the run is over."""
_HELD_UP_S = 3 * BEAT_S
_MOST_S = 1e6
"""Eleven days; what waits in C++ counts milliseconds in 32 bits."""
_STDERR = 2
_SILENT = "it was stopped or killed, or its machine is gone; `--heartbeat-timeout` says how long a rank may be silent"
_STILL = "`--timeout` says for how long a run may stand still: for longer than any action"


class LostRankError(RunError):
    """Another rank has gone while this one waited for it."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Of patience, in seconds."""

    timeout_s: float = 600.0
    """For which a run may stand still while ranks wait, and in which all ranks come together."""
    silence_s: float = 5.0
    """For which a rank may give no sign of life; never longer than `timeout_s`."""
    grace_s: float = 30.0
    """In which a run that is asked to end does."""

    def __post_init__(self) -> None:
        for name in ("timeout_s", "silence_s", "grace_s"):
            object.__setattr__(self, name, number(name, getattr(self, name), above=0, most=_MOST_S))
        object.__setattr__(self, "silence_s", min(self.silence_s, self.timeout_s))

    @property
    def patience_s(self) -> float:
        """When the watch, which knows more, must have ended whatever still waits."""
        return self.timeout_s + self.silence_s + 2 * BEAT_S + LEAVE_S


@dataclass(frozen=True, slots=True)
class FailureReport:
    """Why a run is over."""

    message: str
    hint: str
    code: int = 1
    """With which its processes end."""
    culprit: int | None = None
    """The rank that can't end itself any more, so that others must."""


class FailureDetector:
    """Finds the rank that a run is lost with, by what all ranks have written."""

    def __init__(self, size: int, limits: Limits, now_s: float) -> None:
        self._limits, self._read_s = limits, now_s
        self._raw = [b""] * size
        self._heard_s = [now_s] * size
        self._moved_s = now_s
        self.reports: dict[int, ProgressEvent] = {}

    def read(self, values: Mapping[int, bytes], now_s: float) -> None:
        """Takes what was read at a moment, by rank; ranks that have written nothing are missing."""
        if now_s - self._read_s > _HELD_UP_S:  # who was stopped itself has not heard the others, and can't blame them
            held_s = now_s - self._read_s - BEAT_S
            self._heard_s = [at_s + held_s for at_s in self._heard_s]
            self._moved_s += held_s
        self._read_s = now_s
        for rank, raw in values.items():
            if raw == self._raw[rank]:
                continue
            self._heard_s[rank], self._raw[rank] = now_s, raw
            report = ProgressEvent.read(raw)
            if report != self.reports.get(rank):
                self.reports[rank], self._moved_s = report, now_s

    def verdict(self) -> FailureReport | None:
        """What the run is lost with; None as long as it is not."""
        limits, now_s = self._limits, self._read_s
        silent_s = {rank: now_s - at_s for rank, at_s in enumerate(self._heard_s)}
        for rank in sorted(self.reports, key=lambda one: -silent_s[one]):
            report = self.reports[rank]
            if silent_s[rank] > limits.silence_s and not report.has_left:
                return FailureReport(f"{report}: no sign of life for {limits.silence_s:g} s", _SILENT, culprit=rank)
        for rank in silent_s.keys() - self.reports.keys():
            if silent_s[rank] > limits.timeout_s:
                hint = "do all ranks start, and do their machines reach each other?"
                return FailureReport(f"rank {rank} has not come within {limits.timeout_s:g} s", hint)
        if any(report.is_lost for report in self.reports.values()):
            for report in self.reports.values():
                if report.has_left:
                    return FailureReport(
                        f"{report}: it left while others waited for it", "all ranks must do the same steps"
                    )
        if now_s - self._moved_s > limits.timeout_s and len(self.reports) == len(self._raw):
            return self._stalled()
        return None

    def _stalled(self) -> FailureReport | None:
        """Goes from a rank that waits to whom it waits for, until one waits for nobody; None if nobody waits."""
        waiting = [rank for rank, one in self.reports.items() if one.waits is not None]
        if not waiting:
            return None
        at, saving = min(waiting), False
        passed: list[tuple[int, bool]] = []
        while (at, saving) not in passed:
            passed.append((at, saving))
            report = self.reports[at]
            found = self._next(report, saving=saving)
            if found is None:
                break
            at, saving = found
        report = self.reports[at]
        return FailureReport(f"{report}: the run has stood still for {self._limits.timeout_s:g} s", _STILL)

    def _next(self, report: ProgressEvent, *, saving: bool) -> tuple[int, bool] | None:
        """Whom a rank waits for, or the save that it takes part in."""
        if saving:
            if report.save is None or not report.save[1]:
                return None
            rounds = {rank: one.save or (0, False) for rank, one in self.reports.items()}
            behind = [(done, rank) for rank, (done, waits) in rounds.items() if done < report.save[0] or not waits]
            return (min(behind)[1], self.reports[min(behind)[1]].save is not None) if behind else None
        if report.waits is None:
            return None
        if report.waits == SAVE:
            return report.rank, True
        if isinstance(report.waits, int):
            return report.waits, False
        ranks: Iterable[int] = self.reports if report.waits == ALL else report.waits  # type: ignore[assignment]
        late = [
            (one.place, rank)
            for rank in ranks
            if rank != report.rank
            and ((one := self.reports[rank]).place < report.place or (one.place == report.place and one.waits is None))
        ]
        return (min(late)[1], False) if late else None


def key(rank: int) -> str:
    """Under which a rank writes what it does."""
    return f"rank/{rank}"


_VERDICT = "verdict"


def agreed(store: Any, mine: FailureReport | None = None) -> FailureReport | None:
    """The verdict of all: that which was given first, maybe `mine`."""
    if mine is not None:
        text = store.compare_set(_VERDICT, "", json.dumps(asdict(mine)))
    elif store.check([_VERDICT]):
        text = store.get(_VERDICT)
    else:
        return None
    return FailureReport(**json.loads(text))


def readings(store: Any, ranks: Iterable[int]) -> dict[int, bytes]:
    """What those of `ranks` have written that have written anything."""
    there = [rank for rank in ranks if store.check([key(rank)])]
    return dict(zip(there, store.multi_get([key(rank) for rank in there]), strict=True)) if there else {}


class Watch:
    """That of one rank, from `begin` to `end`."""

    def __init__(self, store: Any, rank: int, size: int, limits: Limits) -> None:
        self.limits = limits
        self.verdict: FailureReport | None = None
        self._store, self._rank, self._ranks = store, rank, range(size)
        self._judge = FailureDetector(size, limits, time.monotonic())
        self._charge: FailureReport | None = None  # of this rank, to be posted
        self._found: tuple[dict[int, bytes], FailureReport | None] = {}, None
        self._rounds = 0
        self._is_heard = False  # the verdict: then whoever gave it can tell
        self._ends_itself = False  # the main thread has said or asked why, and is on its way out
        self._wake, self._over, self._known = threading.Event(), threading.Event(), threading.Event()
        self._threads: list[threading.Thread] = []

    def begin(self, last_words: Callable[[RunError], None]) -> None:
        """`last_words` are said where this process must be ended, because the run is over and its main thread waits."""
        self._threads = [
            threading.Thread(target=self._carry, daemon=True),
            threading.Thread(target=self._look, args=(last_words,), daemon=True),
        ]
        for one in self._threads:
            one.start()

    def charge(self, message: str, hint: str = "", *, code: int = 1) -> FailureReport | None:
        """Says why the run is over; returns what all say, or None if that can't be known any more."""
        return self._decide(FailureReport(message, hint, code), 4 * BEAT_S)

    def explain(self) -> FailureReport | None:
        """Says that another rank is gone, and returns which one, when that is known."""
        HERE.is_lost = True
        return self._decide(None, self.limits.silence_s + 4 * BEAT_S)

    def _decide(self, charge: FailureReport | None, patience_s: float) -> FailureReport | None:
        self._charge = self._charge or charge
        self._ends_itself = True
        self._wake.set()
        self._known.wait(patience_s)
        return self.verdict

    def tell_now(self) -> None:
        """Others hear at once what this rank is, not only at the next beat."""
        self._wake.set()

    def is_first_to_tell(self) -> bool:
        """Whether no other rank has said yet why the run is over."""
        try:
            first: bytes = self._store.compare_set("told", "", str(self._rank))
        except RuntimeError:  # it went with rank 0, which spoke first, or was lost without a word
            return self._rank == 1 and not self._is_heard
        return first.decode() == str(self._rank)

    def end(self) -> None:
        """The rank leaves, well or not, and its process may go on."""
        self._over.set()
        self._wake.set()
        for one in self._threads:
            one.join(self.limits.silence_s)  # and no longer, if the store does not answer
        faulthandler.cancel_dump_traceback_later()

    def _carry(self) -> None:
        """Writes and reads, twice a second; the thread that may be stuck in the store."""
        with suppress(RuntimeError):  # torch's: whoever kept the store is gone, and no round follows
            while not self._over.is_set():
                self._store.set(key(self._rank), HERE.report().written(self._rounds))
                verdict = agreed(self._store, self._charge)
                self._found = readings(self._store, self._ranks), verdict
                self._rounds += 1
                self._wake.wait(BEAT_S)
                self._wake.clear()
            self._store.set(key(self._rank), HERE.report(has_left=True).written(self._rounds))

    def _look(self, last_words: Callable[[RunError], None]) -> None:
        """Judges, twice a second. If it can't, as somebody holds Python's lock, faulthandler ends the process."""
        rounds, answered_s, looked_s = -1, time.monotonic(), time.monotonic()
        while not self._over.wait(BEAT_S):
            faulthandler.dump_traceback_later(self.limits.patience_s, exit=True, file=_STDERR)
            now_s = time.monotonic()
            if now_s - looked_s > _HELD_UP_S:  # the process was stopped
                answered_s += now_s - looked_s
            looked_s = now_s
            verdict = None
            if self._rounds != rounds:
                rounds, answered_s = self._rounds, now_s
                values, verdict = self._found
                self._judge.read(values, now_s)
                self._charge = self._charge or self._judge.verdict()
                if self._charge is not None:
                    self._wake.set()
                self._is_heard = verdict is not None
            elif now_s - answered_s > self.limits.silence_s and HERE.waits is not None:
                verdict = self._without_store()
            if verdict is not None:
                self._leave(verdict, last_words)
                return

    def _without_store(self) -> FailureReport:
        """Who keeps the store is gone, or stopped: rank 0, unless a launcher does."""
        report = self._judge.reports.get(0)
        hint = "it keeps what the ranks tell each other; `--heartbeat-timeout` says how long it may be silent"
        if report is None or "TORCHELASTIC_USE_AGENT_STORE" in os.environ:
            return FailureReport(f"the launcher has given no sign of life for {self.limits.silence_s:g} s", hint)
        return FailureReport(f"{report}: no sign of life for {self.limits.silence_s:g} s", hint, culprit=0)

    def _leave(self, verdict: FailureReport, last_words: Callable[[RunError], None]) -> None:
        """Ends this process, unless it ends by itself, and a stopped one beside it."""
        self.verdict = verdict
        self._known.set()
        culprit = None if verdict.culprit is None else self._judge.reports.get(verdict.culprit)
        if culprit is not None:
            _kill(culprit)
        if self._over.wait(LEAVE_S if verdict.code == 1 else 0):  # a grace is over when it is over
            return
        if self._ends_itself and self._over.wait(self.limits.silence_s):
            return
        last_words(LostRankError(verdict.message, verdict.hint))
        os._exit(verdict.code)


def _kill(report: ProgressEvent) -> None:
    """Ends the process of another rank, if it is on this machine and still the same."""
    mine = HERE.report()
    if report.born and report.machine == mine.machine and report.pid != mine.pid and born(report.pid) == report.born:
        with suppress(OSError):  # it has just ended, or is another user's
            os.kill(report.pid, signal.SIGKILL)
