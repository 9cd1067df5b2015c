"""Transfer of packets over a cut between two ranks of a stream, in the bit width that the link sustains.

If a rate must be held, the receiver measures the arrival of packets and requests a bit width from the sender. A request
takes effect two packets later: the sender reads it when it fills a packet, and a place for that is free only after the
packet before was received. The header of a packet announces the bit width of the packet after it, so the receiver posts
a buffer of exactly that size.
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
"""Message tag of width requests, which travel against the direction of packets between the same two ranks."""


class BoundaryChannel:
    """The packet layouts of one cut by bit width, and the current width."""

    def __init__(self, layout: PacketLayout, *, holds: bool) -> None:
        self.holds, self.bits = holds, layout.bits
        # Only a cut that must hold a rate changes its width, so others need a single layout.
        self.layouts = {bits: layout.at(bits) for bits in ((0, *BITS) if holds else (layout.bits,))}

    @property
    def layout(self) -> PacketLayout:
        """Layout of the next packet at the current width."""
        return self.layouts[self.bits]

    @property
    def ends(self) -> tuple[int, ...]:
        """End offsets of the messages that carry a packet.

        If a rate must be held, the header is a separate message. The time between its arrival and that of the rest is
        then the link's time alone, without the time that the sender was late.
        """
        return (HEAD_BYTES, self.layout.size_bytes) if self.holds else (self.layout.size_bytes,)

    def empty(self, device: torch.device) -> Packet:
        """Return memory for a packet of any width."""
        return max(self.layouts.values(), key=lambda one: one.size_bytes).empty(device)


class Sender:
    """The sending end of a cut, where packets are filled."""

    def __init__(
        self,
        groups: NeighbourGroups,
        peer: int,
        layout: PacketLayout,
        device: torch.device,
        note: Note,
        *,
        holds: bool = False,
    ) -> None:
        """Call `note` with the kind, begin, rows and layout of each operation on a packet."""
        self._cut, self._note = BoundaryChannel(layout, holds=holds), note
        self._out = Outgoing(groups, peer, [self._cut.empty(device)])
        self._requests = Incoming(groups, peer, _words(1), tag=_ASKING) if holds else None
        self._packets_sent = self._requests_read = 0
        self._in_transfer: tuple[int, int, PacketLayout] | None = (
            None  # begin, rows and layout of the packet in transfer
        )
        self.sent_bits: Counter[int] = Counter()
        """Number of micro-batches sent by bit width."""

    def give(self, head: PacketHeader, tensors: Mapping[str, torch.Tensor]) -> None:
        """Send a micro-batch, or the end of the stream, as soon as a place is free."""
        place = self._out.place()
        # There is a single place, so the packet before has been received by now.
        self._note_transfer()
        layout, ends = self._cut.layout, self._cut.ends
        # The receiver answers each packet, and the answer to packet n has arrived when packet n + 2 is filled. Reading
        # it earlier would wait for the receiver.
        if self._requests is not None and self._packets_sent - self._requests_read >= 2:
            self._read_request(self._requests)
        begin_ns = perf_counter_ns()
        layout.write(place, replace(head, bits=self._cut.bits), tensors)
        if head.rows:
            self._note("pack", begin_ns, head.rows, layout)
            self.sent_bits[layout.bits] += 1
            self._packets_sent += 1
            self._in_transfer = perf_counter_ns(), head.rows, layout
        self._out.send(place, ends)

    def settle(self) -> None:
        """Wait until all sent packets are received."""
        self._out.settle()
        self._note_transfer()

    def finish(self) -> None:
        """Wait until the other end has sent all its requests."""
        self.settle()
        while self._requests is not None and self._requests_read < self._packets_sent:
            self._read_request(self._requests)

    def _read_request(self, requests: Incoming) -> None:
        self._cut.bits = int(requests.take((1,)).raw[0])
        self._requests_read += 1

    def _note_transfer(self) -> None:
        in_transfer, self._in_transfer = self._in_transfer, None
        if in_transfer is not None:
            self._note("send", *in_transfer)


class Receiver:
    """The receiving end of a cut, where packets are read."""

    def __init__(
        self,
        groups: NeighbourGroups,
        peer: int,
        cut: BoundaryChannel,
        places: deque[Packet],
        note: Note,
        *,
        within_s: float | None = None,
    ) -> None:
        """Receive from `peer` into `places`, which all ranks that send to this one in turn may share.

        With `within_s`, the width follows the link: a packet must pass within this time in seconds.
        """
        self._cut, self._note = cut, note
        self._in = Incoming(groups, peer, places, is_timed=cut.holds)
        self._requests = self._widths = None
        if within_s is not None:
            # Only the part after the header is timed, so sizes exclude the header.
            sizes_bytes = {bits: one.size_bytes - HEAD_BYTES for bits, one in cut.layouts.items()}
            self._widths = Widths(sizes_bytes, within_s, cut.bits)
            self._requests = Outgoing(groups, peer, _words(2), tag=_ASKING)

    def post(self) -> None:
        """Post the receive of the next packet, unless it is posted. This invalidates the packet before the last one."""
        self._in.post(self._cut.ends)

    def take(self) -> tuple[PacketHeader, dict[str, torch.Tensor]]:
        """Return the header and the tensors of the next packet, without tensors at the end of the stream.

        Unquantized tensors are views into the packet's memory.
        """
        begin_ns, layout = perf_counter_ns(), self._cut.layout
        packet = self._in.take(self._cut.ends)
        head = layout.head(packet)
        if not head.rows:
            return head, {}
        self._note("receive", begin_ns, head.rows, layout)
        if self._requests is not None and self._widths is not None:
            first_ns, last_ns = self._in.arrived_ns
            word = self._requests.place()
            word.raw[0] = self._widths.after(layout.size_bytes - HEAD_BYTES, (last_ns - first_ns) * 1e-9)
            self._requests.send(word, (1,))
        # The header announces the width of the next packet. Set it before the next receive is posted.
        self._cut.bits = head.bits
        begin_ns = perf_counter_ns()
        held = layout.read(packet, head.rows)
        self._note("unpack", begin_ns, head.rows, layout)
        return head, held

    def finish(self) -> None:
        """Wait until the sender has received all requests."""
        if self._requests is not None:
            self._requests.settle()

    def close(self) -> None:
        """Stop the timing of arrivals."""
        self._in.close()


def _words(count: int) -> deque[Packet]:
    """Return places for messages of one bit width each."""
    return deque(Packet(torch.zeros(1, dtype=torch.uint8)) for _ in range(count))
