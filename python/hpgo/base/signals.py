"""Ctrl-C, kept back where it must not come in between."""

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
    """Lets Ctrl-C interrupt this process as before, but not in the middle of an import, anywhere: then when it is over.

    For commands, whose functions import what they need. An interrupted import is not always told from a failed one:
    Python wraps what interrupts the making of a class, and compiled modules take it for a broken installation.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _unless_importing)


def _unless_importing(number: int, frame: FrameType | None) -> None:
    at = frame
    while at is not None:
        if at.f_code.co_filename == "<frozen importlib._bootstrap>":
            _thread.start_new_thread(_interrupt_again, (threading.get_ident(),))
            return
        at = at.f_back
    signal.default_int_handler(number, frame)


def _interrupt_again(main_thread: int) -> None:
    time.sleep(_PAUSE_S)
    if sys.platform == "win32":
        _thread.interrupt_main()
    else:
        signal.pthread_kill(main_thread, signal.SIGINT)  # which also ends a wait that the main thread may be in


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Answers a Ctrl-C that comes meanwhile only when the block has ended.

    For imports of compiled modules, which take an exception in the middle for a broken installation, or crash.

    >>> with uninterrupted():
    ...     import json
    """
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield  # only the main thread is interrupted; and where Ctrl-C is ignored, it stays so
        return
    came: list[int] = []
    signal.signal(signal.SIGINT, lambda number, _: came.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if came:
        signal.raise_signal(signal.SIGINT)
