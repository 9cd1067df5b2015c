"""Ctrl-C, kept back where it must not come in between."""

from __future__ import annotations

import signal
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


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
