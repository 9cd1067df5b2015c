"""Channels between two ranks of an inference stream. They carry packets in order, through buffers that are reused."""

from __future__ import annotations

import threading
from collections import deque
from queue import SimpleQueue
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any

from hpgo.runtime.progress import HERE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hpgo.runtime.packets import Packet
    from hpgo.runtime.session import NeighbourGroups

_JOIN_S = 2.0
"""Longest time in seconds to wait for the end of a thread, which takes less than 1 ms in a good run. Not tuned."""


class Outgoing:
    """Sender of one rank to another. A buffer is reused once the receiver has taken its packet."""

    def __init__(self, groups: NeighbourGroups, peer: int, places: Sequence[Packet], *, tag: int = 0) -> None:
        self._peer, self._group, self._tag = peer, groups.to(peer), tag
        self._free = deque(places)
        self._sent: deque[tuple[list[Any], Packet]] = deque()

    def place(self) -> Packet:
        """Return a buffer to fill, as soon as one is free."""
        # The oldest packet is taken first, because messages between two ranks keep their order.
        if not self._free:
            self._take_back()
        return self._free.popleft()

    def send(self, place: Packet, ends: tuple[int, ...]) -> None:
        """Send a filled buffer without waiting, in pieces that end at the byte offsets `ends`."""
        # Several pieces instead of one message, so that the receiver can record when each tensor has arrived.
        waits = [self._group.send([piece], self._peer, self._tag) for piece in place.ending(ends)]
        self._sent.append((waits, place))

    def settle(self) -> None:
        """Wait until the receiver has taken all packets."""
        while self._sent:
            self._take_back()

    def _take_back(self) -> None:
        waits, place = self._sent.popleft()
        with HERE.waiting(self._peer):
            for one in waits:
                one.wait()
        self._free.append(place)


class Incoming:
    """Receiver of one rank from another. Packets go into its buffers in rotation."""

    def __init__(
        self, groups: NeighbourGroups, peer: int, places: deque[Packet], *, tag: int = 0, is_timed: bool = False
    ) -> None:
        """Prepare to receive into `places`, which may be shared by ranks that send to this one in turn.

        If `is_timed`, a thread records when each piece arrives, even while this rank computes.
        """
        self._peer, self._group, self._tag = peer, groups.of(peer), tag
        self._places = places
        self._waits: list[Any] = []
        self._arrivals = _Arrivals() if is_timed else None
        self.arrived_ns: list[int] = []
        """Arrival times of the pieces of the last packet, by `perf_counter_ns`. Empty unless `is_timed`."""

    def post(self, ends: tuple[int, ...]) -> None:
        """Post the receive of the next packet, unless that is done.

        It reuses the buffer of the packet before the last one.
        """
        if self._waits:
            return
        # The packet of the last `take` stays valid while the next one arrives: the receive goes to the buffer after it.
        self._places.rotate(1)
        self._waits = [self._group.recv([piece], self._peer, self._tag) for piece in self._places[0].ending(ends)]
        if self._arrivals is not None:
            self._arrivals.expect(self._waits)

    def take(self, ends: tuple[int, ...]) -> Packet:
        """Return the next packet, as soon as it has arrived."""
        self.post(ends)
        with HERE.waiting(self._peer):
            if self._arrivals is not None:
                self.arrived_ns = self._arrivals.next()
            else:
                for one in self._waits:
                    one.wait()
        self._waits = []
        return self._places[0]

    def close(self) -> None:
        """Stop the recording of arrivals."""
        if self._arrivals is not None:
            self._arrivals.close()


class _Arrivals:
    """A thread that waits for each piece and records the time of its arrival."""

    def __init__(self) -> None:
        self._expected: SimpleQueue[list[Any] | None] = SimpleQueue()
        self._recorded: SimpleQueue[list[int] | Exception] = SimpleQueue()
        # A separate thread, because the main thread computes while packets arrive and would record the arrival too
        # late.
        self._thread = threading.Thread(target=self._note, daemon=True)
        self._thread.start()

    def expect(self, waits: list[Any]) -> None:
        """Add the pieces of one more packet."""
        self._expected.put(waits)

    def next(self) -> list[int]:
        """Return the arrival times of the next packet's pieces, once all have arrived.

        Raises torch's error if a rank is lost.
        """
        recorded = self._recorded.get()
        if isinstance(recorded, Exception):
            raise recorded
        return recorded

    def close(self) -> None:
        """End the thread after the packets that it still waits for."""
        self._expected.put(None)
        # A thread that returns from a call of torch while Python ends aborts the process. After a failure, a packet may
        # never arrive, so don't wait for longer.
        self._thread.join(_JOIN_S)

    def _note(self) -> None:
        while (waits := self._expected.get()) is not None:
            arrived_ns = []
            try:
                for one in waits:
                    one.wait()
                    arrived_ns.append(perf_counter_ns())
            except Exception as failure:  # noqa: BLE001 -- the main thread raises it
                self._recorded.put(failure)
                return
            self._recorded.put(arrived_ns)
