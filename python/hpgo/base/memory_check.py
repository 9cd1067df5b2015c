"""Check of free memory before work that may need more than there is.

Linux ends a process that runs out of memory without a message. So work of known size is refused before it starts, with
the needed and the free amount.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from hpgo.base.units import format_bytes
from hpgo.errors import HpgoError

_SMALL_BYTES = 2**26  # smaller work is not worth a check
_BESIDE_BYTES = 2**28  # thread stacks, allocator arenas, and what Python allocates in between
_CGROUPS = Path("/sys/fs/cgroup")


class RoomError(HpgoError):
    """Some work needs more memory than is free."""


def check_room(what: str, needed_bytes: float, hint: str) -> None:
    """Raise RoomError if the work `what` needs more bytes than are free. Work below 64 MiB is not checked.

    >>> check_room("a schedule of 8 actions", 800, "ask for fewer micro-batches")
    >>> check_room("a schedule of 10^15 actions", 1e17, "ask for fewer micro-batches")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    hpgo.base.memory_check.RoomError: a schedule of 10^15 actions needs about 100 PB of memory, but ... are free
    """
    if needed_bytes < _SMALL_BYTES:
        return
    needed_bytes += _BESIDE_BYTES
    if needed_bytes > (free := free_bytes()):
        needed, there = format_bytes(needed_bytes), format_bytes(free)
        raise RoomError(f"{what} needs about {needed} of memory, but {there} are free", hint)


def free_bytes() -> float:
    """Return the bytes that this process may still allocate, or infinity if unknown.

    This is the minimum of what the machine, the limits of the process and its container leave.

    >>> free_bytes() > 0
    True
    """
    return max(0.0, min(_machine(), _limits(), _container()))


def _machine() -> float:
    kib = dict.fromkeys(("MemAvailable", "SwapFree"), 0.0)
    with contextlib.suppress(OSError, ValueError):
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            name, _, rest = line.partition(":")
            if name in kib:
                kib[name] = float(rest.split()[0])
        return sum(kib.values()) * 1024
    return float("inf")


def _limits() -> float:
    """Return the bytes that `ulimit -v` and `ulimit -d` leave."""
    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource

        pages = [int(number) for number in Path("/proc/self/statm").read_text(encoding="ascii").split()]
        page_bytes = os.sysconf("SC_PAGE_SIZE")
        return min(
            float("inf") if limit == resource.RLIM_INFINITY else limit - used * page_bytes
            for limit, used in (
                (resource.getrlimit(resource.RLIMIT_AS)[0], pages[0]),
                (resource.getrlimit(resource.RLIMIT_DATA)[0], pages[5]),
            )
        )
    return float("inf")


def _container() -> float:
    """Return the bytes that all enclosing control groups (version 2) leave.

    Inactive page cache counts as free, since the kernel drops it when memory is short.
    """
    free = float("inf")
    with contextlib.suppress(OSError, ValueError):
        lines = Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines()
        own = next((line[3:] for line in lines if line.startswith("0::")), None)
        folder = None if own is None else _CGROUPS / own.lstrip("/")
        # Each level of the hierarchy may set a limit, and the smallest applies.
        while folder is not None and folder.is_relative_to(_CGROUPS):
            with contextlib.suppress(OSError, ValueError):
                maximum = float((folder / "memory.max").read_text(encoding="ascii"))  # a ValueError for `max`: no limit
                used = float((folder / "memory.current").read_text(encoding="ascii"))
                stat = (folder / "memory.stat").read_text(encoding="ascii").splitlines()
                dropped = sum(float(line.split()[1]) for line in stat if line.startswith("inactive_file "))
                free = min(free, maximum - used + dropped)
            folder = folder.parent
    return free
