"""SIGTERM is a notice: the run is to end at the next boundary of a step, and before some time is over."""

from __future__ import annotations

import os
import signal
import sys
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

CODE = 128 + signal.SIGTERM
"""With which processes end that were asked to."""
_NO_MORE = b"\0"
_LAST_S = 2.0
"""Of the grace, in which ranks hear from each other that it is over."""


class Preempted(SystemExit):
    """The run was asked to end by SIGTERM, and here it can: a process that lets this pass ends with exit code 143.

    >>> Preempted().code
    143
    """

    def __init__(self, why: str = "") -> None:
        super().__init__(CODE)
        self.why = why
        """Which rank could not go on to the end of a step; empty if all have."""


class Notice:
    """Waits for SIGTERM in this process, from `listen` to `close`, unless somebody else here answers it."""

    def __init__(self, grace_s: float, end: Callable[[str], None]) -> None:
        """`end` ends the process and says why: at once where it does no steps yet, or else when the grace is over."""
        self.is_given = False
        self.has_steps = False
        """Whether a boundary comes at which the process ends by itself."""
        self._grace_s, self._end = grace_s, end
        self._once = threading.Lock()
        self._timer: threading.Timer | None = None
        self._pipe: tuple[int, int] | None = None

    def listen(self) -> None:
        """Begins to wait."""
        is_main = threading.current_thread() is threading.main_thread()
        if sys.platform == "win32" or not is_main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
            return
        # Handlers run in the main thread, which may wait for a message meanwhile: a thread that reads hears at once.
        read, write = os.pipe()
        os.set_blocking(write, False)
        before = signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        if before == -1:
            self._pipe = read, write
            threading.Thread(target=self._read, args=(read,), daemon=True).start()
        else:  # somebody's loop waits for signals by that
            signal.set_wakeup_fd(before)
            os.close(read)
            os.close(write)
        signal.signal(signal.SIGTERM, lambda *_: self._give())
        _listening.append(self)

    def close(self) -> None:
        """Answers no more: SIGTERM ends the process as it ends others."""
        if self._timer is not None:
            self._timer.cancel()
        if self in _listening:
            _listening.remove(self)
            self.forget()
            if self._pipe is not None:
                os.write(self._pipe[1], _NO_MORE)
                os.close(self._pipe[1])

    def forget(self) -> None:
        """Undoes what `listen` has set for the process."""
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if self._pipe is not None:
            signal.set_wakeup_fd(-1)

    def _read(self, pipe: int) -> None:
        while (number := os.read(pipe, 1)) not in {_NO_MORE, b""}:
            if number[0] == signal.SIGTERM:
                self._give()
        os.close(pipe)

    def _give(self) -> None:
        if not self._once.acquire(blocking=False):
            return
        if not self.has_steps:
            self._end("asked to end by SIGTERM")  # not at a boundary that the main thread may still come to
            return
        self.is_given = True
        words = f"asked to end by SIGTERM, and no step was over within {self._grace_s:g} s"
        self._timer = threading.Timer(max(self._grace_s - _LAST_S, self._grace_s / 2), self._end, (words,))
        self._timer.daemon = True
        self._timer.start()


def _forget_in_child() -> None:
    while _listening:
        _listening.pop().forget()


_listening: list[Notice] = []
if sys.platform != "win32":
    os.register_at_fork(after_in_child=_forget_in_child)  # readers of data, say, whose ends are not the run's
