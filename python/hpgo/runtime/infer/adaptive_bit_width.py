"""In how many bits numbers cross one cut, so that its link keeps up with a rate: as many as there is time for.

The rank behind the cut measures what the link carries, and asks for a width. It goes down at once where the link is too
slow for the one in use, and up only after a row of packets that would all have been in time with more bits. A width
that does not last as long as it was waited for is waited for twice as long the next time, so that links whose speed
can't be known, since they carry short bursts faster than streams say, make it change ever more seldom.
"""

from __future__ import annotations

from collections import deque
from statistics import median_low
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

_REMEMBERED = 3
"""Packets whose median tells that the link is too slow: one that was held up tells nothing."""
_PATIENCE = 8
"""Packets in a row before there are more bits."""
_BUSY, _SPARE = 0.9, 0.75
"""Shares of the time between two packets: a link may be busy for so long, and for so long if there shall be more bits;
what lies between is the room in which nothing changes."""


class Widths:
    """The width at one cut; 0 leaves numbers as they are.

    >>> cut = Widths({0: 3200, 16: 1600, 8: 800, 4: 400}, within_s=1.0, width=0)
    >>> [cut.after(3200, 2.0) for _ in range(3)]
    [0, 0, 8]
    >>> [cut.after(800, 0.1) for _ in range(9)]
    [8, 8, 8, 8, 8, 8, 8, 0, 0]
    """

    def __init__(self, size_bytes: Mapping[int, int], within_s: float, width: int) -> None:
        """`size_bytes` is what a packet has with each width; one shall be through within so many seconds."""
        self.size_bytes: dict[int, int] = {}
        """Of each width that makes packets smaller than all wider ones do, the widest first."""
        for bits, size in sorted(size_bytes.items(), key=lambda one: (-one[1], one[0])):
            if size not in self.size_bytes.values():
                self.size_bytes[bits] = size
        same = (bits for bits, size in self.size_bytes.items() if size == size_bytes[width])
        self.width = next(same)
        """What to use now."""
        self._within_s = within_s
        self._last: deque[float] = deque(maxlen=_REMEMBERED)  # bytes a second
        self._patience = _PATIENCE
        self._tried: int | None = None  # packets since there are more bits, until they have lasted
        self._spare, self._slowest = 0, 0.0  # packets in a row that leave room, and the slowest of them

    def after(self, size_bytes: int, seconds: float) -> int:
        """The width to use when a packet of so many bytes has taken the link so long."""
        rate = size_bytes / max(seconds, 1e-9)
        self._last.append(rate)
        if self._tried is not None:
            self._tried += 1
            if self._tried > self._patience:
                self._patience, self._tried = _PATIENCE, None
        if len(self._last) == _REMEMBERED and not self._fits(self.width, median_low(self._last), _BUSY):
            self._fall(median_low(self._last))
        else:
            self._count(rate)
        return self.width

    def _fall(self, rate: float) -> None:
        """To the widest that fits, or the narrowest."""
        narrower = [bits for bits in self.size_bytes if self.size_bytes[bits] < self.size_bytes[self.width]]
        if narrower:
            if self._tried is not None:
                self._patience, self._tried = 2 * self._patience, None
            self.width = next((bits for bits in narrower if self._fits(bits, rate, _BUSY)), narrower[-1])
        self._spare = 0

    def _count(self, rate: float) -> None:
        """Counts packets that leave room for more bits, and takes these when there were enough."""
        wider = [bits for bits in self.size_bytes if self.size_bytes[bits] > self.size_bytes[self.width]]
        if not wider or not self._fits(wider[-1], rate, _SPARE):
            self._spare = 0
            return
        self._slowest = min(rate, self._slowest) if self._spare else rate
        self._spare += 1
        if self._spare >= self._patience:
            self.width = next(bits for bits in wider if self._fits(bits, self._slowest, _SPARE))
            self._spare = self._tried = 0

    def _fits(self, bits: int, rate: float, share: float) -> bool:
        return self.size_bytes[bits] <= share * self._within_s * rate
