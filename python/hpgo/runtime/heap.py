"""Memory that is freed stays with the process.

By default glibc gives large blocks back to the system as soon as they are free. The next pass gets them anew, page by
page, each filled with zeros: a fifth of what passes of convolutions take, or nothing at all, as the heap just lies.
"""

from __future__ import annotations

import ctypes
import os
import sys

_TRIM, _MAP = -1, -3
"""glibc's M_TRIM_THRESHOLD and M_MMAP_THRESHOLD."""
_MOST_KEPT = 2**31 - 1
_LARGEST = 2**25
"""glibc keeps no larger blocks."""
_OWN = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")
"""What users say themselves about it."""


def keep_freed() -> bool:
    """Has this process keep what it frees, up to 2 GiB; returns whether it does: with glibc, unless users say else."""
    if sys.platform != "linux" or any(name in os.environ for name in _OWN):
        return False
    option = getattr(ctypes.CDLL(None), "mallopt", None)
    return option is not None and bool(option(_TRIM, _MOST_KEPT) and option(_MAP, _LARGEST))
