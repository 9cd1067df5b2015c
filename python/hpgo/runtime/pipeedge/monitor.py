"""What a rank does in each window of micro-batches, as a table in CSV: how fast, how long, how much, in how many bits.

Energy is what the processors of the machine have used, by the counters that Linux keeps under `/sys/class/powercap`,
where it does and lets them be read: that of all that ran on the machine meanwhile.
"""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any

from hpgo.base.errors import RunError
from hpgo.base.files import refused

if TYPE_CHECKING:
    from hpgo.runtime.moments import Moment

COLUMNS = (
    "key", "window", "micro_batches", "begin_s", "end_s", "micro_batches_per_s", "latency_s", "work", "unit",
    "work_per_s", "bits", "right", "energy_j", "power_w",
)  # fmt: skip
"""Seconds are counted from the begin of the run; `latency_s` is the mean time that one thing took."""
_KEYS = {
    "pass": "shard", "pack": "quant_encode", "send": "send", "receive": "recv", "unpack": "quant_decode",
    "output": "output",
}  # fmt: skip
"""As PipeEdge calls them."""
_MBIT = 1e6 / 8
_ALL = "all"
"""The window of a key's last line."""


class Energy:
    """Counters of a machine.

    >>> Energy(Path("/absent")).joules() is None
    True
    """

    def __init__(self, root: Path = Path("/sys/class/powercap")) -> None:
        self._zones = [  # the packages; what is within them counts in them, too
            zone for zone in (sorted(root.iterdir()) if root.is_dir() else ()) if zone.name.count(":") == 1
        ]
        self._last = [self._read(zone, "energy_uj") for zone in self._zones]
        self._sum_uj = 0

    def joules(self) -> float | None:
        """What was used since this was made; None where nobody counts it."""
        if not self._zones or None in self._last:
            return None
        for at, zone in enumerate(self._zones):
            now, before = self._read(zone, "energy_uj"), self._last[at]
            if now is None or before is None:
                return None
            # Counters begin anew when they are full.
            self._sum_uj += (
                now - before if now >= before else now + (self._read(zone, "max_energy_range_uj") or 0) - before
            )
            self._last[at] = now
        return self._sum_uj / 1e6

    @staticmethod
    def _read(zone: Path, name: str) -> int | None:
        try:
            return int((zone / name).read_text(encoding="ascii"))
        except (OSError, ValueError):
            return None


@dataclass(slots=True)
class _Window:
    """What came of one key since a moment."""

    since_ns: int
    since_j: float | None
    until_ns: int = 0
    until_j: float | None = None
    count: int = 0
    taken_ns: int = 0
    work: float = 0.0
    bits: int = 0
    right: int | None = None

    def add(self, moment: Moment, joules: float | None) -> None:
        """One thing more."""
        self.until_ns, self.until_j = moment.end_ns, joules
        self.count += 1
        self.taken_ns += moment.end_ns - moment.begin_ns
        self.work += moment.size_bytes / _MBIT if moment.kind in {"send", "receive"} else moment.samples
        self.bits += moment.bits or 32


@dataclass(slots=True)
class _Key:
    """The windows of one key."""

    size: int
    whole: _Window
    now: _Window
    full: int = 0


class Monitor:
    """Writes the windows of one rank; call it with each moment, and `close` it."""

    def __init__(self, path: Path, window: int, energy: Energy | None = None) -> None:
        """`window` is how many micro-batches make one. Raises FileError if the file can't be written."""
        self._path, self._size = path, window
        self._energy = energy or Energy()
        self._begin_ns, self._begin_j = perf_counter_ns(), self._energy.joules()
        self._keys: dict[str, _Key] = {}
        try:
            self._file = path.open("w", encoding="utf-8", newline="")
        except OSError as failure:
            raise refused("write", path, failure, RunError, "name a folder that exists") from None
        self._rows = csv.writer(self._file)
        self._rows.writerow(COLUMNS)

    def __call__(self, moment: Moment) -> None:
        """Counts it in the window of its key."""
        joules = self._energy.joules()
        name = _KEYS[moment.kind]
        key = self._keys.get(name)
        if key is None:
            before = _Window(moment.begin_ns, joules)
            key = self._keys[name] = _Key(self._size, before, _Window(moment.begin_ns, joules))
        elif key.now.count == self._size:
            self._write(name, key)
        key.whole.add(moment, joules)
        key.now.add(moment, joules)

    def right(self, count: int) -> None:
        """So many answers of the last output are right."""
        for window in (self._keys["output"].whole, self._keys["output"].now):
            window.right = (window.right or 0) + count

    def close(self) -> None:
        """Writes what is left, and a line for the whole run of each key."""
        for name, key in self._keys.items():
            if key.now.count:
                self._write(name, key)
            self._row(name, _ALL, key.whole)
        self._file.close()

    def _write(self, name: str, key: _Key) -> None:
        self._row(name, key.full, key.now)
        key.full += 1
        key.now = _Window(key.now.until_ns, key.now.until_j)

    def _row(self, name: str, number: int | str, window: _Window) -> None:
        taken_s = (window.until_ns - window.since_ns) / 1e9
        used_j: float | None = None
        if window.until_j is not None and window.since_j is not None:
            used_j = window.until_j - window.since_j
        is_packet = name not in {"shard", "output"}
        cells: list[Any] = [
            name, number, window.count, _seconds(window.since_ns - self._begin_ns),
            _seconds(window.until_ns - self._begin_ns), _per(window.count, taken_s),
            _seconds(window.taken_ns / window.count), f"{window.work:.6g}", "Mbit" if name in {"send", "recv"} else
            "samples", _per(window.work, taken_s), f"{window.bits / window.count:.4g}" if is_packet else "",
            "" if window.right is None else window.right, "" if used_j is None else f"{used_j:.6g}",
            "" if used_j is None else _per(used_j, taken_s),
        ]  # fmt: skip
        self._rows.writerow(cells)
        self._file.flush()


def _seconds(ns: float) -> str:
    return f"{ns / 1e9:.6f}"


def _per(amount: float, taken_s: float) -> str:
    return f"{amount / taken_s:.6g}" if taken_s > 0 else ""
