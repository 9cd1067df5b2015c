"""Monitoring tables of a rank in CSV, with the names and columns of PipeEdge's tables.

There is one file per key, with one line per micro-batch: time, work, energy, and a fourth number that depends on the
key. Each is also summed over the whole run and over a window of the last micro-batches, and divided by the time. Energy
is that of the host's processors, from the counters in Linux's `/sys/class/powercap`, if they are readable. It includes
all other programs that run on the host meanwhile.

Columns of the files:

- `shard.csv`: time of the pass through the rank's layers. Work: samples. Accuracy: layers.
- `output.csv`: time since the previous answers were yielded. Work: samples. Accuracy: correct answers; 0 without
  labels.
- `quant_encode.csv`, `quant_decode.csv`: time to fill a packet, to read one. Work: samples; 0 without quantization.
  Accuracy: bits; 0 without quantization.
- `send.csv`, `recv.csv`: time until a packet was received, as far as the rank has checked; of the wait for one. Work:
  Mbit. Accuracy: 0.
"""

from __future__ import annotations

import csv
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter_ns
from typing import TYPE_CHECKING

from hpgo.base.files import refused
from hpgo.errors import RunError

if TYPE_CHECKING:
    from hpgo.runtime.stream_events import Moment

KEYS = {
    "pass": "shard", "output": "output", "unpack": "quant_decode", "pack": "quant_encode", "receive": "recv",
    "send": "send",
}  # fmt: skip
"""PipeEdge's key of each kind of moment."""
_SPANS = ("Global", "Window", "Instant")
_MAX_READINGS = 1000
"""Maximum number of energy readings that are kept. Moments overlap, so older readings are needed. Not tuned."""
_MBIT = 1e6 / 8
_OTHER = "name another folder: `--monitor FOLDER`"


def columns() -> list[str]:
    """Return the column names, which all files share."""
    names = ["Heartbeat", "Tag"]
    for ends, name, rate in (
        (("Start ", "End "), "Time (ns)", "Heart Rate (/s)"),
        (("",), "Work", "Performance (/s)"),
        (("Start ", "End "), "Energy (uJ)", "Power (W)"),
        (("",), "Accuracy", "Accuracy Rate (/s)"),
    ):
        names += [f"{end}{name}" for end in ends]
        names += [f"{span} {what}" for what in (name, rate) for span in _SPANS]
    return names


class Energy:
    """Energy counters of a host.

    >>> Energy(Path("/absent")).microjoules() is None
    True
    """

    def __init__(self, root: Path = Path("/sys/class/powercap")) -> None:
        self._zones = [  # zones of packages, which include their subzones
            zone for zone in (sorted(root.iterdir()) if root.is_dir() else ()) if zone.name.count(":") == 1
        ]
        self._last = [self._read(zone, "energy_uj") for zone in self._zones]
        self._sum_uj = 0

    def microjoules(self) -> int | None:
        """Return the energy used since the creation of this object, or None without readable counters."""
        if not self._zones or None in self._last:
            return None
        for at, zone in enumerate(self._zones):
            now, before = self._read(zone, "energy_uj"), self._last[at]
            if now is None or before is None:
                return None
            # Counters wrap around at their maximum.
            self._sum_uj += (
                now - before if now >= before else now + (self._read(zone, "max_energy_range_uj") or 0) - before
            )
            self._last[at] = now
        return self._sum_uj

    @staticmethod
    def _read(zone: Path, name: str) -> int | None:
        try:
            return int((zone / name).read_text(encoding="ascii"))
        except (OSError, ValueError):
            return None


@dataclass(slots=True)
class _Sums:
    """Sums of time, work, energy and accuracy over micro-batches."""

    count: int = 0
    taken_ns: int = 0
    work: float = 0
    used_uj: int = 0
    accuracy: int = 0

    def add(self, other: _Sums, sign: int = 1) -> None:
        """Add `other`, or subtract it with `sign` -1."""
        self.count += sign * other.count
        self.taken_ns += sign * other.taken_ns
        self.work += sign * other.work
        self.used_uj += sign * other.used_uj
        self.accuracy += sign * other.accuracy


class _Table:
    """The file of one key."""

    def __init__(self, path: Path, mode: str, window: int) -> None:
        self._whole, self._window = _Sums(), _Sums()
        self._beats: deque[_Sums] = deque()
        self._most = window
        try:
            self._file = path.open(mode, encoding="utf-8", newline="")
        except OSError as failure:
            raise refused("write", path, failure, RunError, _OTHER) from None
        self._rows = csv.writer(self._file)
        self._rows.writerow(columns())
        self._file.flush()

    def add(self, ends_ns: tuple[int, int], work: float, ends_uj: tuple[int, int], accuracy: int) -> None:
        """Append the line of one micro-batch."""
        # A duration of 0 would make the rates infinite.
        beat = _Sums(1, max(1, ends_ns[1] - ends_ns[0]), work, ends_uj[1] - ends_uj[0], accuracy)
        self._beats.append(beat)
        self._whole.add(beat)
        self._window.add(beat)
        # Update the window's sums incrementally, so that a line takes constant time for any window.
        if len(self._beats) > self._most:
            self._window.add(self._beats.popleft(), -1)
        spans = (self._whole, self._window, beat)
        number = self._whole.count - 1
        row: list[float] = [number, number, *ends_ns]
        row += [one.taken_ns for one in spans] + [one.count / one.taken_ns * 1e9 for one in spans]
        row += [work, *(one.work for one in spans)] + [one.work / one.taken_ns * 1e9 for one in spans]
        row += [*ends_uj, *(one.used_uj for one in spans)] + [one.used_uj / one.taken_ns * 1e3 for one in spans]
        row += [accuracy, *(one.accuracy for one in spans)] + [one.accuracy / one.taken_ns * 1e9 for one in spans]
        self._rows.writerow([f"{one:.15f}" if isinstance(one, float) else one for one in row])
        # Flush each line, so that a rank that is killed leaves its table up to then.
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class Monitor:
    """Writer of the tables of one rank. Call it with each moment, and `close` it."""

    def __init__(
        self, folder: Path, window: int, layers: int, *, mode: str = "w", energy: Energy | None = None
    ) -> None:
        """Open the tables of a rank that has `layers` layers.

        `window` is a number of micro-batches, and `mode` that of `open`. Raises FileError if a file can't be written.
        """
        self._layers = layers
        self._energy = energy or Energy()
        self._readings = deque([(perf_counter_ns(), self._energy.microjoules() or 0)], maxlen=_MAX_READINGS)
        self._output: Moment | None = None
        try:
            folder.mkdir(parents=True, exist_ok=True)  # another rank of this host may create it at this moment
        except OSError as failure:
            raise refused("write", folder, failure, RunError, _OTHER) from None
        self._tables = {kind: _Table(folder / f"{key}.csv", mode, window) for kind, key in KEYS.items()}

    def __call__(self, moment: Moment) -> None:
        """Append a line to the table of the moment's key."""
        # Take a reading with every moment, since later moments may begin at this time and look it up.
        self._readings.append((moment.end_ns, self._energy.microjoules() or 0))
        if moment.kind == "output":
            self._write_output()
            self._output = moment  # written later, when the number of correct answers is known
        elif moment.kind == "pass":
            self._write(moment, moment.samples, self._layers)
        elif moment.kind in {"send", "receive"}:
            self._write(moment, moment.size_bytes / _MBIT, 0)
        else:
            self._write(moment, moment.samples if moment.bits else 0, moment.bits)

    def right(self, count: int) -> None:
        """Record that `count` answers of the last output are correct."""
        self._write_output(count)

    def close(self) -> None:
        """Write the last output and close all files."""
        self._write_output()
        for table in self._tables.values():
            table.close()

    def _write_output(self, right: int = 0) -> None:
        moment, self._output = self._output, None
        if moment is not None:
            self._write(moment, moment.samples, right)

    def _write(self, moment: Moment, work: float, accuracy: int) -> None:
        ends_uj = self._used_uj(moment.begin_ns), self._used_uj(moment.end_ns)
        self._tables[moment.kind].add((moment.begin_ns, moment.end_ns), work, ends_uj, accuracy)

    def _used_uj(self, at_ns: int) -> int:
        """Return the energy at a time from the last reading before it, or else from the first reading."""
        return next(
            (used_uj for read_ns, used_uj in reversed(self._readings) if read_ns <= at_ns), self._readings[0][1]
        )
