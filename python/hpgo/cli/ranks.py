"""Commands that are one rank of a launcher's, or start ranks of their own."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING

from hpgo.base.errors import HpgoError

if TYPE_CHECKING:
    from collections.abc import Callable

_SILENCE_S = 1.0
"""Of ranks that another one speaks for: launchers end all ranks when the first of them ends."""


def in_ranks(count: int, timeout_s: float, work: Callable[[], None]) -> None:
    """Runs `work` as the rank that a launcher has made this process, or in `count` processes here.

    Raises what the first rank raised; the other ranks of a launcher end without a word.
    """
    from hpgo.runtime.launch import run_here
    from hpgo.runtime.meeting import is_first_to_tell, is_launched, meet

    if not is_launched():
        run_here(count, work)
        return
    try:
        meet(timeout_s)
        work()
    except HpgoError:
        if is_first_to_tell():
            raise
        time.sleep(_SILENCE_S)
        sys.exit(1)
