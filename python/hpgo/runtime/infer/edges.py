"""What crosses a cut between two ranks of a stream: packets, in the bits that their link carries at a rate.

Where a rate is to be held, the receiver measures what comes, and tells the sender in how many bits numbers shall
travel. That word is there when the packet behind the next one is filled, since its place is free only then; the
packet's head says how long the one behind it will be, so its receiver makes room for just that.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import replace
from time import perf_counter_ns
from typing import TYPE_CHECKING

import torch

from hpgo.runtime.channels import Incoming, Outgoing
from hpgo.runtime.infer.adaptive_bit_width import Widths
from hpgo.runtime.packets import HEAD_BYTES, Packet
from hpgo.runtime.quantization import BITS

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from hpgo.runtime.packets import PacketHeader, PacketLayout
    from hpgo.runtime.session import NeighbourGroups

    Note = Callable[[str, int, int, PacketLayout], None]

_ASKING = 1
"""Tag of the words that ask for a width; there are packets both ways between two ranks."""


class BoundaryChannel:
    """What crosses one cut, in the bits that it does now."""

    def __init__(self, layout: PacketLayout, *, holds: bool) -> None:
        self.holds, self.bits = holds, layout.bits
        self.layouts = {bits: layout.at(bits) for bits in ((0, *BITS) if holds else (layout.bits,))}

    @property
    def layout(self) -> PacketLayout:
        """Of the next packet."""
        return self.layouts[self.bits]

    @property
    def ends(self) -> tuple[int, ...]:
        """Of the pieces that it travels in: where a rate is held, the head goes before, and the rest is timed."""
        return (HEAD_BYTES, self.layout.size_bytes) if self.holds else (self.layout.size_bytes,)

    def empty(self, device: torch.device) -> Packet:
        """Room for a packet, however wide."""
        return max(self.layouts.values(), key=lambda one: one.size_bytes).empty(device)


class Sender:
    """The end of a cut where packets are filled."""

    def __init__(
        self,
        ways: NeighbourGroups,
        peer: int,
        layout: PacketLayout,
        device: torch.device,
        note: Note,
        *,
        holds: bool = False,
    ) -> None:
        """`note` is told of what is done with each packet."""
        self._cut, self._note = BoundaryChannel(layout, holds=holds), note
        self._out = Outgoing(ways, peer, [self._cut.empty(device)])
        self._asked = Incoming(ways, peer, _words(1), tag=_ASKING) if holds else None
        self._given = self._heard = 0
        self._under_way: tuple[int, int, PacketLayout] | None = None  # begin, rows and layout of the last packet
        self.sent_bits: Counter[int] = Counter()
        """How many micro-batches have been sent in how many bits."""

    def give(self, head: PacketHeader, tensors: Mapping[str, torch.Tensor]) -> None:
        """Hands a micro-batch on, or the end, as soon as there is a place."""
        place = self._out.place()
        self._is_taken()
        layout, ends = self._cut.layout, self._cut.ends
        if self._asked is not None and self._given - self._heard >= 2:
            self._hear(self._asked)
        begin_ns = perf_counter_ns()
        layout.write(place, replace(head, bits=self._cut.bits), tensors)
        if head.rows:
            self._note("pack", begin_ns, head.rows, layout)
            self.sent_bits[layout.bits] += 1
            self._given += 1
            self._under_way = perf_counter_ns(), head.rows, layout
        self._out.send(place, ends)

    def settle(self) -> None:
        """Waits until all that was sent is taken."""
        self._out.settle()
        self._is_taken()

    def finish(self) -> None:
        """Waits until the other end has said all that it will."""
        self.settle()
        while self._asked is not None and self._heard < self._given:
            self._hear(self._asked)

    def _hear(self, asked: Incoming) -> None:
        self._cut.bits = int(asked.take((1,)).raw[0])
        self._heard += 1

    def _is_taken(self) -> None:
        under_way, self._under_way = self._under_way, None
        if under_way is not None:
            self._note("send", *under_way)


class Receiver:
    """The end of a cut where packets are read."""

    def __init__(
        self,
        ways: NeighbourGroups,
        peer: int,
        cut: BoundaryChannel,
        places: deque[Packet],
        note: Note,
        *,
        within_s: float | None = None,
    ) -> None:
        """Ranks that send to this one in turn may share `places`, not `cut`.

        Where the cut's bits follow its link, a packet shall be through `within_s`.
        """
        self._cut, self._note = cut, note
        self._in = Incoming(ways, peer, places, is_timed=cut.holds)
        self._asks = self._widths = None
        if within_s is not None:
            sizes_bytes = {bits: one.size_bytes - HEAD_BYTES for bits, one in cut.layouts.items()}
            self._widths = Widths(sizes_bytes, within_s, cut.bits)
            self._asks = Outgoing(ways, peer, _words(2), tag=_ASKING)

    def post(self) -> None:
        """Makes ready for the next one, if that is not done yet; then the place of the one before the last is lost."""
        self._in.post(self._cut.ends)

    def take(self) -> tuple[PacketHeader, dict[str, torch.Tensor]]:
        """The next packet's head, and what it holds, where it lies, or unpacked; nothing behind the last one."""
        begin_ns, layout = perf_counter_ns(), self._cut.layout
        packet = self._in.take(self._cut.ends)
        head = layout.head(packet)
        if not head.rows:
            return head, {}
        self._note("receive", begin_ns, head.rows, layout)
        if self._asks is not None and self._widths is not None:
            first_ns, last_ns = self._in.arrived_ns
            word = self._asks.place()
            word.raw[0] = self._widths.after(layout.size_bytes - HEAD_BYTES, (last_ns - first_ns) * 1e-9)
            self._asks.send(word, (1,))
        self._cut.bits = head.bits
        begin_ns = perf_counter_ns()
        held = layout.read(packet, head.rows)
        self._note("unpack", begin_ns, head.rows, layout)
        return head, held

    def finish(self) -> None:
        """Waits until all that it has said is heard."""
        if self._asks is not None:
            self._asks.settle()

    def close(self) -> None:
        """Notes no more arrivals."""
        self._in.close()


def _words(count: int) -> deque[Packet]:
    """Room for numbers of bits."""
    return deque(Packet(torch.zeros(1, dtype=torch.uint8)) for _ in range(count))
