"""Deferred handling of Ctrl-C in places that must not be interrupted."""

from __future__ import annotations

import _thread
import signal
import sys
import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

_PAUSE_S = 0.01


def answer_between_imports() -> None:
    """Keep Ctrl-C working in this process, but defer it while any import is running.

    This is for commands, whose functions import what they need. An interrupted import can't always be distinguished
    from a failed one: Python wraps an exception that interrupts the creation of a class, and compiled modules report a
    broken installation.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _unless_importing)


def _unless_importing(number: int, frame: FrameType | None) -> None:
    at = frame
    while at is not None:
        if at.f_code.co_filename == "<frozen importlib._bootstrap>":
            # Signal handlers run in the main thread, so another thread has to wait and send the signal again.
            _thread.start_new_thread(_interrupt_again, (threading.get_ident(),))
            return
        at = at.f_back
    signal.default_int_handler(number, frame)


def _interrupt_again(main_thread: int) -> None:
    time.sleep(_PAUSE_S)
    if sys.platform == "win32":
        _thread.interrupt_main()
    else:
        signal.pthread_kill(main_thread, signal.SIGINT)  # also ends a blocking call of the main thread


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Defer Ctrl-C until the block has ended.

    This is for imports of compiled modules, which take an exception in between for a broken installation, or crash.

    >>> with uninterrupted():
    ...     import json
    """
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield  # only the main thread gets signals, and an ignored Ctrl-C stays ignored
        return
    received: list[int] = []
    signal.signal(signal.SIGINT, lambda number, _: received.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if received:
        signal.raise_signal(signal.SIGINT)
