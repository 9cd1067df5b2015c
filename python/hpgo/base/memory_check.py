"""Memory that is free, asked for before work that would need more of it than there is.

An allocation that fails ends a process without a word; work whose size is known is refused before that, with both
numbers.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from hpgo.base.units import format_bytes
from hpgo.errors import HpgoError

_SMALL_BYTES = 2**26  # not worth asking for
_BESIDE_BYTES = 2**28  # stacks and arenas of threads, and what Python takes meanwhile
_CGROUPS = Path("/sys/fs/cgroup")


class RoomError(HpgoError):
    """Some work needs more memory than is free."""


def check_room(what: str, needed_bytes: float, hint: str) -> None:
    """Raises RoomError, with the numbers, if `what` needs more bytes than are free.

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
    """What this process may still take: of the machine's memory, its limits, and its container's; infinite if unknown.

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
    """Of `ulimit -v` and `ulimit -d`."""
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
    """Of the control groups, version 2, that the process is in; files that can be dropped count as free."""
    free = float("inf")
    with contextlib.suppress(OSError, ValueError):
        lines = Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines()
        own = next((line[3:] for line in lines if line.startswith("0::")), None)
        folder = None if own is None else _CGROUPS / own.lstrip("/")
        while folder is not None and folder.is_relative_to(_CGROUPS):
            with contextlib.suppress(OSError, ValueError):
                most = float((folder / "memory.max").read_text(encoding="ascii"))  # a ValueError for `max`: no limit
                used = float((folder / "memory.current").read_text(encoding="ascii"))
                stat = (folder / "memory.stat").read_text(encoding="ascii").splitlines()
                dropped = sum(float(line.split()[1]) for line in stat if line.startswith("inactive_file "))
                free = min(free, most - used + dropped)
            folder = folder.parent
    return free
