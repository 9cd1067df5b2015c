"""What two ranks of a stream send each other: packets in order, into places that are used again and again."""

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


class Outgoing:
    """What one rank sends to another, from places that are filled again once it is taken."""

    def __init__(self, ways: NeighbourGroups, peer: int, places: Sequence[Packet], *, tag: int = 0) -> None:
        self._peer, self._way, self._tag = peer, ways.to(peer), tag
        self._free = deque(places)
        self._sent: deque[tuple[list[Any], Packet]] = deque()

    def place(self) -> Packet:
        """One to fill, as soon as there is one."""
        if not self._free:
            self._take_back()
        return self._free.popleft()

    def send(self, place: Packet, ends: tuple[int, ...]) -> None:
        """Sends what was filled, in pieces that end after so many bytes, and does not wait."""
        waits = [self._way.send([piece], self._peer, self._tag) for piece in place.ending(ends)]
        self._sent.append((waits, place))

    def settle(self) -> None:
        """Waits until all that was sent is taken."""
        while self._sent:
            self._take_back()

    def _take_back(self) -> None:
        waits, place = self._sent.popleft()
        with HERE.waiting(self._peer):
            for one in waits:
                one.wait()
        self._free.append(place)


class Incoming:
    """What one rank receives from another, in turn into each of its places."""

    def __init__(
        self, ways: NeighbourGroups, peer: int, places: deque[Packet], *, tag: int = 0, is_timed: bool = False
    ) -> None:
        """Ranks that send to this one in turn may share `places`.

        If `is_timed`, the arrival of each piece is noted, whatever this rank does meanwhile.
        """
        self._peer, self._way, self._tag = peer, ways.of(peer), tag
        self._places = places
        self._waits: list[Any] = []
        self._arrivals = _Arrivals() if is_timed else None
        self.arrived_ns: list[int] = []
        """When the pieces of the last packet had come, if that is noted."""

    def post(self, ends: tuple[int, ...]) -> None:
        """Makes ready for the next one, if that is not done yet; then the place of the one before the last is lost."""
        if self._waits:
            return
        self._places.rotate(1)
        self._waits = [self._way.recv([piece], self._peer, self._tag) for piece in self._places[0].ending(ends)]
        if self._arrivals is not None:
            self._arrivals.expect(self._waits)

    def take(self, ends: tuple[int, ...]) -> Packet:
        """The next one, as soon as it is there."""
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
        """Notes no more arrivals."""
        if self._arrivals is not None:
            self._arrivals.close()


class _Arrivals:
    """A thread that waits for what comes, and looks at the clock when it is there."""

    def __init__(self) -> None:
        self._expected: SimpleQueue[list[Any] | None] = SimpleQueue()
        self._come: SimpleQueue[list[int] | Exception] = SimpleQueue()
        threading.Thread(target=self._note, daemon=True).start()

    def expect(self, waits: list[Any]) -> None:
        """The pieces of one packet more."""
        self._expected.put(waits)

    def next(self) -> list[int]:
        """When those of the next packet had come, as soon as they have. Raises what torch does if a rank is lost."""
        come = self._come.get()
        if isinstance(come, Exception):
            raise come
        return come

    def close(self) -> None:
        """Ends the thread, when it has no more to wait for."""
        self._expected.put(None)

    def _note(self) -> None:
        while (waits := self._expected.get()) is not None:
            come_ns = []
            try:
                for one in waits:
                    one.wait()
                    come_ns.append(perf_counter_ns())
            except Exception as failure:  # noqa: BLE001 -- the main thread raises it
                self._come.put(failure)
                return
            self._come.put(come_ns)
