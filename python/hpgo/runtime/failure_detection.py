"""Failure detection between the ranks of a run: when one is lost, all end, and all report the same reason.

Each rank has two threads beside its work. One writes what the rank does into the launch's store, twice a second, and
reads what all others have written. The other thread evaluates what was read, so a store that does not answer can't
block it. A `FailureDetector` finds the rank to blame. A process that starts ranks on its node uses one, too.

With `backend="torch"`, waits within a step are unknown, so another rank of the same step may be named. Ranks never wait
in a cycle (see `messages`), so the search ends.

The first verdict in the store (`compare_set`) is final, so all ranks name the same one. A rank then has a second to end
by itself.

- Stopped processes blame no other. A detector that has not run for 1.5 s adds the gap to the time of all ranks, so
  Ctrl-Z and `fg` do no harm.
- A process in which a call holds Python's lock can't write. Other ranks of its node write for it that it runs, as long
  as the operating system counts processor time for it. A stopped process gets none.
- Such a process can't run its detector either. Python's `faulthandler` ends it `silence_s` and some seconds after
  `timeout_s`, and prints its stacks.
- The store is the launcher's. `hpgo run` and torchrun keep it outside of the ranks. Other launchers leave it to rank 0,
  so its silence means that rank 0 is lost.
- Restarted ranks may find the store of earlier ones. So a living rank 0 gives all ranks a name that prefixes the keys
  of the run.
"""

from __future__ import annotations

import atexit
import faulthandler
import json
import os
import signal
import threading
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from hpgo.base.checks import number
from hpgo.errors import RunError
from hpgo.runtime.progress import ALL, HERE, SAVE, ProgressEvent, born, busy_ticks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

BEAT_S = 0.5
"""Interval in seconds at which each rank writes its progress and reads that of the others."""
LEAVE_S = 1.0
"""Time in seconds that a rank has to end by itself once the run is over. Then it is ended."""
_HELD_UP_S = 3 * BEAT_S
"""Gap between two readings from which on this process was itself stopped. Not tuned."""
_MAX_TIMEOUT_S = 1e6
"""Longest timeout, in seconds: 11 days. Waits in C++ count milliseconds in 32 bits."""
_STDERR = 2
_SILENT = "it was stopped or killed, or its node is gone"


class LostRankError(RunError):
    """Another rank was lost while this one waited for it."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Timeouts of a run, in seconds."""

    timeout_s: float = 600.0
    """Longest time that a run may stand still while ranks wait, and that all ranks may take to join."""
    silence_s: float = 5.0
    """Longest time for which a rank may send no heartbeat; at most `timeout_s`."""
    grace_s: float = 30.0
    """Longest time that a run may take to end after it was asked to."""
    timeout_name: str = "timeout_s"
    """Name under which the user sets `timeout_s`, for messages: an argument of scripts, or an option of a command."""
    silence_name: str = "silence_s"
    """Name under which the user sets `silence_s`; empty if a command has no such option."""

    def __post_init__(self) -> None:
        for name in ("timeout_s", "silence_s", "grace_s"):
            object.__setattr__(self, name, number(name, getattr(self, name), above=0, maximum=_MAX_TIMEOUT_S))
        object.__setattr__(self, "silence_s", min(self.silence_s, self.timeout_s))

    def longer_silence(self, when: str) -> str:
        """Return the advice to allow more time without heartbeats, which begins with `; ` and `when`, or nothing."""
        return f"; {when}, allow more time with `{self.silence_name}`" if self.silence_name else ""

    @property
    def patience_s(self) -> float:
        """Timeout of anything that waits in torch. Failure detection, which knows more, ends the run before."""
        return self.timeout_s + self.silence_s + 2 * BEAT_S + LEAVE_S


@dataclass(frozen=True, slots=True)
class FailureReport:
    """Reason why a run is over."""

    message: str
    hint: str
    code: int = 1
    """Exit code of the run's processes."""
    culprit: int | None = None
    """The rank that can't end itself any more, so that others must; None if there is none."""


class FailureDetector:
    """Detector that finds the lost rank from what all ranks have written."""

    def __init__(self, size: int, limits: Limits, now_s: float) -> None:
        self._limits, self._read_s = limits, now_s
        self._raw = [b""] * size
        self._wrote_s = [now_s] * size
        self._heard_s = [now_s] * size
        """When each rank has last written, or another rank of its node has written that it runs."""
        self._moved_s = now_s
        self.reports: dict[int, ProgressEvent] = {}
        self.running: tuple[int, ...] = ()
        """Ranks of this node that have missed a heartbeat, but have used a processor since the last call of `read`."""
        self._ticks: dict[int, int] = {}

    def read(self, values: Mapping[int, bytes], now_s: float) -> None:
        """Evaluate the values read at `now_s`, by rank. Ranks that have written nothing are missing."""
        # If this process was stopped itself, it has missed the others' heartbeats and can't blame them. Move their last
        # ones forward by the time of the stop.
        if now_s - self._read_s > _HELD_UP_S:
            held_s = now_s - self._read_s - BEAT_S
            self._heard_s = [at_s + held_s for at_s in self._heard_s]
            self._wrote_s = [at_s + held_s for at_s in self._wrote_s]
            self._moved_s += held_s
        self._read_s = now_s
        for rank, raw in values.items():
            # Each write has another beat number, so equal bytes mean that the rank has not written since.
            if raw == self._raw[rank]:
                continue
            self._wrote_s[rank] = self._heard_s[rank] = now_s
            self._raw[rank], event = raw, ProgressEvent.read(raw)
            report = replace(event, running=())
            # A heartbeat alone is no progress. Only a change of what the rank does resets the stall timer.
            if report != self.reports.get(rank):
                self.reports[rank], self._moved_s = report, now_s
            for other in event.running:
                self._heard_s[other] = now_s
        self.running = self._run_silently()
        for rank in self.running:
            self._heard_s[rank] = now_s

    def _run_silently(self) -> tuple[int, ...]:
        node = HERE.report().node
        ticks = {
            rank: busy_ticks(report.pid, report.born)
            for rank, report in self.reports.items()
            if self._read_s - self._wrote_s[rank] > 2 * BEAT_S and report.node == node and not report.has_left
        }
        # One count doesn't show whether the process still runs, so the first one is only remembered.
        running = tuple(rank for rank, now in ticks.items() if now > self._ticks.get(rank, now))
        self._ticks = ticks
        return running

    def verdict(self) -> FailureReport | None:
        """Return the reason why the run is lost; None as long as it is not."""
        limits, now_s = self._limits, self._read_s
        silent_s = {rank: now_s - at_s for rank, at_s in enumerate(self._heard_s)}
        # Blame the rank that has been silent for longest. The others may be silent because of it.
        for rank in sorted(self.reports, key=lambda one: -silent_s[one]):
            report = self.reports[rank]
            if silent_s[rank] > limits.silence_s and not report.has_left:
                hint = _SILENT + limits.longer_silence("if it was slow, or a call held Python's lock (GIL)")
                return FailureReport(f"{report}: no sign of life for {limits.silence_s:g} s", hint, culprit=rank)
        for rank in silent_s.keys() - self.reports.keys():
            if silent_s[rank] > limits.timeout_s:
                hint = "check that all ranks start, and that their nodes reach each other"
                return FailureReport(f"rank {rank} has not joined within {limits.timeout_s:g} s", hint)
        # A rank may leave when no other needs it any more. Its leaving is a fault only if another rank has missed it.
        if any(report.is_lost for report in self.reports.values()):
            for report in self.reports.values():
                if report.has_left:
                    return FailureReport(
                        f"{report}: it left while others waited for it", "run the same number of steps on all ranks"
                    )
        if now_s - self._moved_s > limits.timeout_s and len(self.reports) == len(self._raw):
            return self._stalled()
        return None

    def _stalled(self) -> FailureReport | None:
        """Follow the chain of waiting ranks to one that waits for no other. Return None if no rank waits."""
        waiting = [rank for rank, one in self.reports.items() if one.waits is not None]
        if not waiting:
            return None
        at, saving = min(waiting), False
        passed: list[tuple[int, bool]] = []
        # Reports are from different moments, so waits may seem to form a cycle. Stop where one would close.
        while (at, saving) not in passed:
            passed.append((at, saving))
            report = self.reports[at]
            found = self._next(report, saving=saving)
            if found is None:
                break
            at, saving = found
        report = self.reports[at]
        hint = f"if an action may take that long, allow more time with `{self._limits.timeout_name}`"
        return FailureReport(f"{report}: the run has stood still for {self._limits.timeout_s:g} s", hint)

    def _next(self, report: ProgressEvent, *, saving: bool) -> tuple[int, bool] | None:
        """Return the rank that a rank waits for, and whether it waits for its save; None if it waits for no rank."""
        if saving:
            if report.save is None or not report.save[1]:
                return None
            # Ranks save in rounds. A rank in an earlier round, or one that still writes its file, is behind.
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
        # In a collective step, a rank is late if it has completed fewer of them, or does not wait in this one yet.
        late = [
            (one.place, rank)
            for rank in ranks
            if rank != report.rank
            and ((one := self.reports[rank]).place < report.place or (one.place == report.place and one.waits is None))
        ]
        return (min(late)[1], False) if late else None


def key(rank: int) -> str:
    """Return the store's key under which a rank writes its progress."""
    return f"rank/{rank}"


_VERDICT = "verdict"


def agreed(store: Any, mine: FailureReport | None = None) -> FailureReport | None:
    """Return the report that all ranks agree on: the first that was posted, possibly `mine`. None if there is none."""
    if mine is not None:
        # Compare-and-set makes the first reason win, so that all ranks report the same one.
        text = store.compare_set(_VERDICT, "", json.dumps(asdict(mine)))
    elif store.check([_VERDICT]):
        text = store.get(_VERDICT)
    else:
        return None
    return FailureReport(**json.loads(text))


def readings(store: Any, ranks: Iterable[int]) -> dict[int, bytes]:
    """Return what each of `ranks` has written, without ranks that have written nothing."""
    there = [rank for rank in ranks if store.check([key(rank)])]
    # `multi_get` blocks until all keys exist, so ask for existing ones only.
    return dict(zip(there, store.multi_get([key(rank) for rank in there]), strict=True)) if there else {}


class Watch:
    """Failure detection of one rank, from `begin` to `end`."""

    def __init__(self, store: Any, rank: int, size: int, limits: Limits) -> None:
        self.limits = limits
        self.verdict: FailureReport | None = None
        self._store, self._rank, self._ranks = store, rank, range(size)
        self._judge = FailureDetector(size, limits, time.monotonic())
        self._charge: FailureReport | None = None  # reason that this rank posts
        self._found: tuple[dict[int, bytes], FailureReport | None] = {}, None
        self._rounds = 0
        self._is_first: bool | None = None  # whether this rank reports, once that is decided
        self._is_heard = False  # whether a verdict was read, so that the rank that posted it can report it
        self._ends_itself = False  # whether the main thread knows the reason and is about to exit
        self._wake, self._over, self._known = threading.Event(), threading.Event(), threading.Event()
        self._is_abandoned = False
        self._threads: list[threading.Thread] = []

    def begin(self, last_words: Callable[[RunError], None]) -> None:
        """Start the threads. `last_words` gets the error if this process must be ended while its main thread waits."""
        self._threads = [
            threading.Thread(target=self._carry, daemon=True),
            threading.Thread(target=self._look, args=(last_words,), daemon=True),
        ]
        _begun.append(self)
        for one in self._threads:
            one.start()

    def charge(self, message: str, hint: str = "", *, code: int = 1) -> FailureReport | None:
        """Post a reason why the run is over. Return the one that all ranks agree on, or None if it can't be known."""
        return self._decide(FailureReport(message, hint, code), 4 * BEAT_S)

    def explain(self) -> FailureReport | None:
        """Declare that another rank is gone. Return the reason once it is known, or None."""
        HERE.is_lost = True
        return self._decide(None, self.limits.silence_s + 4 * BEAT_S)

    def _decide(self, charge: FailureReport | None, patience_s: float) -> FailureReport | None:
        self._charge = self._charge or charge
        self._ends_itself = True
        self._wake.set()
        self._known.wait(patience_s)
        return self.verdict

    def tell_now(self) -> None:
        """Write the progress of this rank now instead of at the next beat."""
        self._wake.set()

    def is_first_to_tell(self) -> bool:
        """Return whether no other rank has reported yet why the run is over."""
        if self._is_first is not None:
            return self._is_first
        try:
            first: bytes = self._store.compare_set("told", "", str(self._rank))
        except RuntimeError:
            # The store is gone with rank 0. Rank 0 has reported first, or it was lost silently, and rank 1 reports.
            return self._rank == 1 and not self._is_heard
        return first.decode() == str(self._rank)

    def end(self) -> None:
        """Stop the threads. The rank leaves the run, but its process may go on."""
        self._over.set()
        self._wake.set()
        for one in self._threads:
            one.join(self.limits.silence_s)  # no longer, because the store may not answer
        faulthandler.cancel_dump_traceback_later()
        if self in _begun and not any(one.is_alive() for one in self._threads):
            _begun.remove(self)

    def abandon(self) -> None:
        """Stop the threads because Python ends. The rank does not leave, so the others find it lost if they need it."""
        self._is_abandoned = not self._over.is_set()
        self._over.set()
        self._wake.set()
        for one in self._threads:
            one.join(self.limits.grace_s)

    def _carry(self) -> None:
        """Write and read the store twice a second. Only this thread can be blocked by the store."""
        # Torch raises RuntimeError once the process that keeps the store is gone. Then no round can follow.
        with suppress(RuntimeError):
            while not self._over.is_set():
                self._store.set(key(self._rank), HERE.report(running=self._judge.running).written(self._rounds))
                verdict = agreed(self._store, self._charge)
                # Decide who reports before the culprit is killed: it may keep the store.
                if verdict is not None and verdict.culprit is not None and self._is_first is None:
                    self._is_first = self.is_first_to_tell()
                self._found = readings(self._store, self._ranks), verdict
                self._rounds += 1
                self._wake.wait(BEAT_S)
                self._wake.clear()
            if not self._is_abandoned:
                self._store.set(key(self._rank), HERE.report(has_left=True).written(self._rounds))

    def _look(self, last_words: Callable[[RunError], None]) -> None:
        """Evaluate the readings twice a second.

        If another thread holds Python's lock and this one can't run, faulthandler ends the process.
        """
        rounds, answered_s, looked_s = -1, time.monotonic(), time.monotonic()
        while not self._over.wait(BEAT_S):
            # Rearmed in each round. It runs in a C thread, so it fires even if a call into a library never releases
            # Python's lock.
            faulthandler.dump_traceback_later(self.limits.patience_s, exit=True, file=_STDERR)
            now_s = time.monotonic()
            # The time that this process was stopped must not count as silence of the store.
            if now_s - looked_s > _HELD_UP_S:
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
        """Return the reason when the store does not answer: the rank or launcher that keeps it is gone."""
        report = self._judge.reports.get(0)
        hint = "it keeps the ranks' store" + self.limits.longer_silence("if it was only slow")
        if report is None or "TORCHELASTIC_USE_AGENT_STORE" in os.environ:
            return FailureReport(f"the launcher has given no sign of life for {self.limits.silence_s:g} s", hint)
        return FailureReport(f"{report}: no sign of life for {self.limits.silence_s:g} s", hint, culprit=0)

    def _leave(self, verdict: FailureReport, last_words: Callable[[RunError], None]) -> None:
        """End this process, unless it ends by itself, and a stopped one on the same node."""
        self.verdict = verdict
        self._known.set()
        culprit = None if verdict.culprit is None else self._judge.reports.get(verdict.culprit)
        if culprit is not None:
            _kill(culprit)
        # After a failure, the main thread gets LEAVE_S to report it. After SIGTERM, its grace period is over already.
        if self._over.wait(LEAVE_S if verdict.code == 1 else 0):
            return
        if self._ends_itself and self._over.wait(self.limits.silence_s):
            return
        last_words(LostRankError(verdict.message, verdict.hint))
        # A normal exit would run destructors of communication libraries, which may wait for ranks that are gone.
        os._exit(verdict.code)


_begun: list[Watch] = []
"""Failure detections whose threads may still run."""


@atexit.register
def _abandon_all() -> None:
    # A daemon thread that returns from a call of torch while Python ends aborts the process: "terminate called without
    # an active exception". The store may answer only now, on a machine with more processes than cores.
    while _begun:
        _begun.pop().abandon()


def _kill(report: ProgressEvent) -> None:
    """End the process of another rank, if it is on this node and still the same process."""
    mine = HERE.report()
    # Process ids are reused. The start time shows that this is still the process of the rank.
    if report.born and report.node == mine.node and report.pid != mine.pid and born(report.pid) == report.born:
        # The process may have ended meanwhile, or belong to another user.
        with suppress(OSError):
            os.kill(report.pid, signal.SIGKILL)
