"""What guards this process as a rank: a watch over all ranks, and the notice to end. There is one of each at most."""

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


_here: list[_Guards] = []


def say(error: RunError) -> None:
    """As Python says what nobody has caught."""
    sys.excepthook(type(error), error, None)


def are_there() -> bool:
    """Whether this process is guarded."""
    return bool(_here)


def begin(store: Any, rank: int, size: int, limits: Limits, tell: Tell | None = say) -> bool:
    """Begins to guard this process; returns False if it is guarded already.

    `store` is a connection to what all ranks share, of nobody else, or None. `tell` says why the run is over where the
    main thread does not come to it; None if another process says it.
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
    """Lets the other ranks know at once what this one is, if they are there."""
    for guards in _here:
        if guards.watch is not None:
            guards.watch.tell_now()


def end() -> None:
    """Ends what `begin` has begun."""
    while _here:
        guards = _here.pop()
        guards.notice.close()
        if guards.watch is not None:
            guards.watch.end()


def notice() -> Notice | None:
    """That of this process."""
    return _here[-1].notice if _here else None


def charge(error: BaseException) -> None:
    """Tells the others that this rank ends by `error`, unless it ends because they do."""
    watch = _here[-1].watch if _here else None
    if watch is None or isinstance(error, LostRankError | Preempted):
        return
    if isinstance(error, HpgoError):
        watch.charge(error.message, named(error).hint)
    elif isinstance(error, SystemExit):
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        watch.charge(f"{HERE}: left before the run had ended, with exit code {code}", "something called `sys.exit`")
    else:
        watch.charge(f"{HERE}: {type(error).__name__}: {error}")


def named(error: HpgoError) -> HpgoError:
    """The error, with the rank and what it did in its hint where hpgo only passes on what something else has raised."""
    cause = error.__cause__
    if not _here or error.message.startswith("rank ") or cause is None or isinstance(cause, HpgoError):
        return error
    return error.reworded(error.message, f"{error.hint}; that was in {HERE}" if error.hint else f"that was in {HERE}")


def lost() -> LostRankError | None:
    """Who is gone, if the main thread has noticed that somebody is; takes as long as that is not known."""
    watch = _here[-1].watch if _here else None
    verdict = None if watch is None else watch.explain()
    if verdict is None:
        return None
    if verdict.code == CODE:
        raise Preempted(verdict.message)
    return LostRankError(verdict.message, verdict.hint)


def is_first_to_tell() -> bool:
    """Whether this rank is the first to say why the run is over, and so the one to do it."""
    watch = _here[-1].watch if _here else None
    return watch is None or watch.is_first_to_tell()


def _last_words(error: RunError) -> None:
    tell = _here[-1].tell if _here else None
    if tell is not None and is_first_to_tell():
        tell(error)


def _end(why: str) -> None:
    """Ends this process, asked to by SIGTERM, and so all others."""
    watch = _here[-1].watch if _here else None
    if watch is not None:
        if watch.verdict is not None:
            return  # and that ends it
        watch.charge(f"{HERE}: {why}", code=CODE)
        time.sleep(BEAT_S)  # until the others have read it, which need this process if it keeps the store
    _last_words(RunError(f"{HERE}: {why}"))
    os._exit(CODE)
