"""Allocator setting that keeps freed memory in the process.

By default glibc returns large blocks to the system as soon as they are free. The next pass then gets new pages, each
filled with zeros. This takes up to 20 % of the passes of convolutions, or nothing at all, depending on the layout of
the heap.
"""

from __future__ import annotations

import ctypes
import os
import sys

_TRIM, _MAP = -1, -3
"""glibc's M_TRIM_THRESHOLD and M_MMAP_THRESHOLD."""
_MAX_KEPT = 2**31 - 1
_LARGEST = 2**25
"""Largest M_MMAP_THRESHOLD that glibc accepts, in bytes. Larger blocks are always returned."""
_OWN = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")
"""Variables by which users configure the allocator themselves."""


def keep_freed() -> bool:
    """Make this process keep up to 2 GiB that it frees. Return whether it does.

    It needs glibc, and leaves the settings of users alone.
    """
    # A user who sets one of these variables has a reason, which this default must not override.
    if sys.platform != "linux" or any(name in os.environ for name in _OWN):
        return False
    option = getattr(ctypes.CDLL(None), "mallopt", None)
    return option is not None and bool(option(_TRIM, _MAX_KEPT) and option(_MAP, _LARGEST))
