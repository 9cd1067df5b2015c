"""Preemption: SIGTERM asks a run to end at the next step boundary, within a grace period."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

CODE = 128 + signal.SIGTERM
"""Exit code of processes that were asked to end."""
_NO_MORE = b"\0"
_LAST_S = 2.0
"""Last part of the grace period in seconds, in which ranks learn from each other that it is over."""


class Preempted(SystemExit):
    """The run was asked to end by SIGTERM. If nothing catches this, the process ends with exit code 143.

    >>> Preempted().code
    143
    """

    def __init__(self, why: str = "") -> None:
        super().__init__(CODE)
        self.why = why
        """Which rank could not reach the end of a step; empty if all did."""


class Notice:
    """Handler of SIGTERM in this process, from `listen` to `close`, unless the process has another handler."""

    def __init__(self, grace_s: float, end: Callable[[str], None]) -> None:
        """Store `end`, which ends the process and reports why.

        It is called at once if the process runs no steps yet, or else when the grace period is over.
        """
        self.is_given = False
        self.has_steps = False
        """Whether the process reaches step boundaries, at which it ends by itself."""
        self._grace_s, self._end = grace_s, end
        self._once = threading.Lock()
        self._timer: threading.Timer | None = None
        self._pipe: tuple[int, int] | None = None

    def listen(self) -> None:
        """Install the handler of SIGTERM."""
        is_main = threading.current_thread() is threading.main_thread()
        if sys.platform == "win32" or not is_main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
            return
        # Python runs handlers in the main thread, which may be blocked in a receive. The wake-up pipe lets a second
        # thread see the signal at once.
        read, write = os.pipe()
        # A handler must never block, not even on a full pipe.
        os.set_blocking(write, False)
        before = signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        if before == -1:
            self._pipe = read, write
            threading.Thread(target=self._read, args=(read,), daemon=True).start()
        else:  # another event loop uses the wake-up descriptor, so leave it alone
            signal.set_wakeup_fd(before)
            os.close(read)
            os.close(write)
        signal.signal(signal.SIGTERM, lambda *_: self._give())
        _listening.append(self)

    def close(self) -> None:
        """Remove the handler, so that SIGTERM ends the process as usual."""
        if self._timer is not None:
            self._timer.cancel()
        if self in _listening:
            _listening.remove(self)
            self.forget()
            if self._pipe is not None:
                os.write(self._pipe[1], _NO_MORE)
                os.close(self._pipe[1])

    def forget(self) -> None:
        """Undo the process-wide settings of `listen`."""
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if self._pipe is not None:
            signal.set_wakeup_fd(-1)

    def _read(self, pipe: int) -> None:
        while (number := os.read(pipe, 1)) not in {_NO_MORE, b""}:
            if number[0] == signal.SIGTERM:
                self._give()
        os.close(pipe)

    def _give(self) -> None:
        # Both the handler and the reading thread call this. The lock is never released, so only the first call acts.
        if not self._once.acquire(blocking=False):
            if not self.has_steps and threading.current_thread() is threading.main_thread():
                # The reading thread ends the process. Until then the main thread must not start steps, nor save them.
                time.sleep(_LAST_S)
            return
        if not self.has_steps:
            # Without steps, no boundary follows at which the main thread could end the process.
            self._end("asked to end by SIGTERM")
            return
        self.is_given = True
        words = f"asked to end by SIGTERM, but no step ended within {self._grace_s:g} s"
        self._timer = threading.Timer(max(self._grace_s - _LAST_S, self._grace_s / 2), self._end, (words,))
        self._timer.daemon = True
        self._timer.start()


def _forget_in_child() -> None:
    while _listening:
        _listening.pop().forget()


_listening: list[Notice] = []
if sys.platform != "win32":
    # A forked child, such as a data loader's worker, must end on SIGTERM without ending the run.
    os.register_at_fork(after_in_child=_forget_in_child)
