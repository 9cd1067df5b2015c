"""Choice of the bit width at one cut: the largest that its link sustains at a given rate.

The receiving rank measures the link's rate and requests a width. The width falls at once if the link is too slow for
the current one. It rises only after a run of packets that would all have been in time with more bits. If a higher width
fails too soon, the next attempt waits twice as long. So a link whose rate can't be measured, since it
carries short bursts faster than streams, makes the width change ever less often.

The receiving rank measures the link: the time between the arrival of a packet's header, a separate message, and of the
rest. So a slow host is never mistaken for a slow link, and no common clock is needed. Its request takes effect two
micro-batches later.

- Down: if two of the last three packets show that the current width takes more than 90 % of the time between two
  micro-batches, the widest that does not is used at once.
- Up: after eight consecutive packets that would have left a quarter of that time free with more bits, the widest such
  width is used. A link whose speed varies by less than 8 % changes the width in one direction only.
- If a higher width fails before it has lasted as long as the wait for it, the next wait is twice as long. So a link
  with fast bursts changes the width ever less often: in *n* packets about 2 log₂(*n* / 8) times.
"""

from __future__ import annotations

from collections import deque
from statistics import median_low
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

_REMEMBERED = 3
"""Number of packets whose median rate decides that the link is too slow. A single delayed packet decides nothing."""
_PATIENCE = 8
"""Number of consecutive packets that must be fast enough before the width rises."""
_BUSY, _SPARE = 0.9, 0.75
"""Fractions of the time between two packets that a link may be busy: at the current width, and at a wider one.

The gap between the two is a hysteresis, in which the width stays the same.
"""


class Widths:
    """The bit width at one cut; 0 sends numbers unchanged.

    >>> cut = Widths({0: 3200, 16: 1600, 8: 800, 4: 400}, within_s=1.0, width=0)
    >>> [cut.after(3200, 2.0) for _ in range(3)]
    [0, 0, 8]
    >>> [cut.after(800, 0.1) for _ in range(9)]
    [8, 8, 8, 8, 8, 8, 8, 0, 0]
    """

    def __init__(self, size_bytes: Mapping[int, int], within_s: float, width: int) -> None:
        """Create the state for one cut, beginning with `width`.

        `size_bytes` is a packet's size by width. A packet must pass within `within_s` seconds.
        """
        self.size_bytes: dict[int, int] = {}
        """Packet size in bytes by width, in descending order, without widths that save nothing over wider ones."""
        for bits, size in sorted(size_bytes.items(), key=lambda one: (-one[1], one[0])):
            if size not in self.size_bytes.values():
                self.size_bytes[bits] = size
        # A width without an entry, such as 16 bits for float16, stands for the entry of equal size.
        same = (bits for bits, size in self.size_bytes.items() if size == size_bytes[width])
        self.width = next(same)
        """Current width in bits, which is 0 for unchanged numbers."""
        self._within_s = within_s
        self._last: deque[float] = deque(maxlen=_REMEMBERED)  # rates in bytes per second
        self._patience = _PATIENCE
        self._tried: int | None = None  # packets since the width rose; None once it has lasted
        self._spare, self._slowest = 0, 0.0  # consecutive packets fast enough for more bits, and their lowest rate

    def after(self, size_bytes: int, seconds: float) -> int:
        """Record that a packet occupied the link for `seconds`, and return the width for the next packets."""
        rate = size_bytes / max(seconds, 1e-9)
        self._last.append(rate)
        # A width that has lasted longer than the wait for it is proven, so the wait is reset to its initial length.
        if self._tried is not None:
            self._tried += 1
            if self._tried > self._patience:
                self._patience, self._tried = _PATIENCE, None
        # `median_low` needs two slow packets of three, so one delayed packet does not lower the width.
        if len(self._last) == _REMEMBERED and not self._fits(self.width, median_low(self._last), _BUSY):
            self._fall(median_low(self._last))
        else:
            self._count(rate)
        return self.width

    def _fall(self, rate: float) -> None:
        """Reduce the width to the widest that fits the rate, or to the narrowest of all."""
        narrower = [bits for bits in self.size_bytes if self.size_bytes[bits] < self.size_bytes[self.width]]
        if narrower:
            # The last rise failed. Wait twice as long before the next one, which bounds the number of failures
            # logarithmically.
            if self._tried is not None:
                self._patience, self._tried = 2 * self._patience, None
            self.width = next((bits for bits in narrower if self._fits(bits, rate, _BUSY)), narrower[-1])
        self._spare = 0

    def _count(self, rate: float) -> None:
        """Count packets that are fast enough for more bits, and switch to a wider width after enough of them."""
        wider = [bits for bits in self.size_bytes if self.size_bytes[bits] > self.size_bytes[self.width]]
        if not wider or not self._fits(wider[-1], rate, _SPARE):
            self._spare = 0
            return
        self._slowest = min(rate, self._slowest) if self._spare else rate
        self._spare += 1
        # Choose by the slowest packet of the run, since the wider packets must all have been in time.
        if self._spare >= self._patience:
            self.width = next(bits for bits in wider if self._fits(bits, self._slowest, _SPARE))
            self._spare = self._tried = 0

    def _fits(self, bits: int, rate: float, share: float) -> bool:
        return self.size_bytes[bits] <= share * self._within_s * rate
