"""What crosses a cut in inference: all tensors of a micro-batch in one piece of memory, behind a head.

The piece is as long as a whole micro-batch needs, so that its receiver can make room before it knows how many rows
come, or whether any do.
"""

from __future__ import annotations

import ctypes
import math
import struct
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch

from hpgo.runtime.quantization import pack, packed_bytes, unpack

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from hpgo.runtime.stage_module import StageModule, Value

_ALIGNED = 64
"""Bytes, as memory of torch's own: libraries may add up in another order where tensors lie otherwise."""
HEAD_BYTES = _ALIGNED
"""Of a packet, before its tensors."""
_WORDS = struct.Struct("=qqq")
"""The numbers in it."""


@dataclass(frozen=True, slots=True)
class PacketHeader:
    """What a packet begins with."""

    rows: int
    """Of the micro-batch; 0 behind the last one, with nothing that follows."""
    ends: bool
    """Whether a rank was asked to end, so that no more micro-batches shall enter."""
    bits: int = 0
    """In which numbers travel in the packet behind this one, so that its receiver knows how long that is."""


@dataclass(slots=True, eq=False)
class Packet:
    """Memory that one packet after the other goes through.

    Views of it are made once: beside a pass that has used the caches, one takes ten to twenty microseconds to make.
    """

    raw: torch.Tensor
    """Its bytes."""
    head: PacketHeader | None = None
    """What was written last."""
    pieces: dict[tuple[int, ...], list[torch.Tensor]] = field(default_factory=dict)
    """What it travels in, by where each ends."""
    values: dict[tuple[int, int], list[tuple[Value, int, torch.Tensor]]] = field(default_factory=dict)
    """For bits and rows: each value, the bits of its numbers or 0, and its part, as it lies there if that is 0."""

    def ending(self, ends: tuple[int, ...]) -> list[torch.Tensor]:
        """The pieces that end after so many bytes."""
        found = self.pieces.get(ends)
        if found is None:
            found = [self.raw[begin:end] for begin, end in zip((0, *ends), ends, strict=False)]
            self.pieces[ends] = found
        return found


class PacketLayout:
    """Where the tensors of a cut lie in its packets.

    >>> from hpgo.runtime.stage_module import Value
    >>> cut = PacketLayout([Value("a", by_row=True, has_gradient=False, shape=(3,), dtype=torch.float32)], rows=2)
    >>> packet = cut.empty(torch.device("cpu"))
    >>> cut.write(packet, PacketHeader(1, ends=False), {"a": torch.tensor([[1.0, 2.0, 3.0]])})
    >>> cut.read(packet, cut.head(packet).rows)["a"].tolist(), cut.size_bytes
    ([[1.0, 2.0, 3.0]], 128)
    """

    def __init__(self, values: Sequence[Value], rows: int, bits: int = 0) -> None:
        """`rows` are those of a whole micro-batch. Floating numbers travel in `bits`, unless that is 0."""
        self.values, self.bits, self._rows = tuple(values), bits, rows
        self._begins: list[int] = []
        self.size_bytes = HEAD_BYTES
        for value in self.values:
            self._begins.append(self.size_bytes)
            self.size_bytes += -(-self._size_bytes(value, rows) // _ALIGNED) * _ALIGNED

    def at(self, bits: int) -> PacketLayout:
        """The same tensors with numbers in `bits`."""
        return self if bits == self.bits else PacketLayout(self.values, self._rows, bits)

    def empty(self, device: torch.device) -> Packet:
        """Room for a packet."""
        return Packet(torch.empty(self.size_bytes, dtype=torch.uint8, device=device))

    def write(self, packet: Packet, head: PacketHeader, tensors: Mapping[str, torch.Tensor]) -> None:
        """Fills a packet; tensors become of the type that the cut has them in."""
        if head != packet.head:  # mostly it is that of the one before
            words = torch.frombuffer(bytearray(_WORDS.pack(head.rows, head.ends, head.bits)), dtype=torch.uint8)
            packet.raw[: _WORDS.size].copy_(words)
            packet.head = head
        if head.rows:
            for value, bits, piece in self._pieces(packet, head.rows):
                if bits:
                    pack(tensors[value.name], bits, piece)
                else:
                    piece.copy_(tensors[value.name])

    def head(self, packet: Packet) -> PacketHeader:
        """What a packet begins with."""
        raw = packet.raw if packet.raw.is_cpu else packet.raw[: _WORDS.size].cpu()
        rows, ends, bits = _WORDS.unpack(ctypes.string_at(raw.data_ptr(), _WORDS.size))
        return PacketHeader(rows, bool(ends), bits)

    def read(self, packet: Packet, rows: int) -> dict[str, torch.Tensor]:
        """The tensors of a packet by name, where they lie, or unpacked."""
        return {
            # A view of its own, since a layer may change its shape.
            value.name: unpack(piece, bits, value.shape_of(rows), value.dtype) if bits else piece.view(piece.shape)
            for value, bits, piece in self._pieces(packet, rows)
        }

    def _pieces(self, packet: Packet, rows: int) -> list[tuple[Value, int, torch.Tensor]]:
        found = packet.values.get((self.bits, rows))
        if found is None:
            found = packet.values[self.bits, rows] = []
            for begin, value in zip(self._begins, self.values, strict=True):
                bits, piece = self._bits_of(value), packet.raw[begin : begin + self._size_bytes(value, rows)]
                found.append((value, bits, piece if bits else piece.view(value.dtype).view(value.shape_of(rows))))
        return found

    def _bits_of(self, value: Value) -> int:
        """In which a number travels; 0 if as it is."""
        is_less = self.bits < 8 * value.dtype.itemsize and math.prod(value.shape) > 0
        return self.bits if value.dtype.is_floating_point and is_less else 0

    def _size_bytes(self, value: Value, rows: int) -> int:
        count, bits = math.prod(value.shape_of(rows)), self._bits_of(value)
        return packed_bytes(count, bits) if bits else count * value.dtype.itemsize


def layouts(
    parts: Sequence[StageModule], rows: int, dtype: torch.dtype | None, bits: Sequence[int]
) -> list[PacketLayout]:
    """What comes into the first of `parts`, for each cut between two what crosses it, and what leaves the last.

    Inputs come in at the first part alone, and are passed on to later ones that read them; weights are of `dtype`, as
    far as that is given. `bits` are those of each cut.
    """
    found = []
    for number, width in enumerate((0, *bits)):
        later = {value.name: value for one in parts[number:] for value in one.takes if value.is_input}
        inputs = [later[name] for name in sorted(later)]
        if dtype is not None:  # data is cast as weights are
            inputs = [replace(one, dtype=dtype) if one.dtype.is_floating_point else one for one in inputs]
        found.append(PacketLayout([*(parts[number - 1].gives if number else ()), *inputs], rows, width))
    return [*found, PacketLayout(parts[-1].gives, rows)]
