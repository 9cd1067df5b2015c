"""Guards of this process as a rank: failure detection over all ranks, and the handler of SIGTERM. At most one each."""

from __future__ import annotations

import os
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hpgo.errors import HpgoError, RunError
from hpgo.runtime.failure_detection import BEAT_S, LostRankError, Watch
from hpgo.runtime.preemption import CODE, Notice, Preempted
from hpgo.runtime.progress import HERE

if TYPE_CHECKING:
    from collections.abc import Callable

    from hpgo.runtime.failure_detection import Limits

    Tell = Callable[[RunError], None]


@dataclass(slots=True)
class _Guards:
    notice: Notice
    watch: Watch | None
    tell: Tell | None


# A list instead of a variable, so that functions change it without `global`. It has at most one element.
_here: list[_Guards] = []


def say(error: RunError) -> None:
    """Print an error like Python prints an uncaught one."""
    sys.excepthook(type(error), error, None)


def are_there() -> bool:
    """Return whether this process is guarded."""
    return bool(_here)


def begin(store: Any, rank: int, size: int, limits: Limits, tell: Tell | None = say) -> bool:
    """Begin to guard this process. Return False if it is guarded already.

    `store` is a separate connection to the store that all ranks share, or None. `tell` reports why the run is over
    where the main thread can't; None if another process reports it.
    """
    if _here:
        return False
    watch = Watch(store, rank, size, limits) if store is not None else None
    guards = _Guards(Notice(limits.grace_s, _end), watch, tell)
    if watch is not None:
        watch.begin(_last_words)
    _here.append(guards)
    guards.notice.listen()
    return True


def tell_now() -> None:
    """Write the progress of this rank now, so that the other ranks see it at once."""
    for guards in _here:
        if guards.watch is not None:
            guards.watch.tell_now()


def end() -> None:
    """End what `begin` has begun."""
    while _here:
        guards = _here.pop()
        guards.notice.close()
        if guards.watch is not None:
            guards.watch.end()


def notice() -> Notice | None:
    """Return the SIGTERM handler of this process; None if there is none."""
    return _here[-1].notice if _here else None


def charge(error: BaseException) -> None:
    """Report `error` to the others as the end of this rank, unless it ends because they do."""
    watch = _here[-1].watch if _here else None
    # These two are consequences of another rank's end. Reporting them would hide the cause.
    if watch is None or isinstance(error, LostRankError | Preempted):
        return
    if isinstance(error, HpgoError):
        watch.charge(error.message, named(error).hint)
    elif isinstance(error, SystemExit):
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        watch.charge(f"{HERE}: left before the run had ended, with exit code {code}", "look for a call of `sys.exit`")
    else:
        watch.charge(f"{HERE}: {type(error).__name__}: {error}")


def named(error: HpgoError) -> HpgoError:
    """Return the error with the rank and its action in the hint, if hpgo only passes on another library's error."""
    cause = error.__cause__
    if not _here or error.message.startswith("rank ") or cause is None or isinstance(cause, HpgoError):
        return error
    where = f"it happened {HERE.where()}"
    return error.reworded(error.message, f"{error.hint}; {where}" if error.hint else where)


def lost() -> LostRankError | None:
    """Return an error that names the lost rank, if another rank is known to be lost; else None.

    Blocks until that is known. Raises Preempted if the run was asked to end.
    """
    watch = _here[-1].watch if _here else None
    verdict = None if watch is None else watch.explain()
    if verdict is None:
        return None
    if verdict.code == CODE:
        raise Preempted(verdict.message)
    return LostRankError(verdict.message, verdict.hint)


def is_first_to_tell() -> bool:
    """Return whether this rank is the first to report why the run is over, and so the one to print it."""
    watch = _here[-1].watch if _here else None
    return watch is None or watch.is_first_to_tell()


def _last_words(error: RunError) -> None:
    tell = _here[-1].tell if _here else None
    if tell is not None and is_first_to_tell():
        tell(error)


def _end(reason: str) -> None:
    """End this process after SIGTERM, and so all others."""
    watch = _here[-1].watch if _here else None
    if watch is not None:
        if watch.verdict is not None:
            return  # the watch ends the process already
        watch.charge(f"{HERE}: {reason}", code=CODE)
        # The others must read the reason before this process ends, because it may keep the store.
        time.sleep(BEAT_S)
    _last_words(RunError(f"{HERE}: {reason}"))
    os._exit(CODE)
