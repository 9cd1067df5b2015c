"""Packets of inference: all tensors of a micro-batch that cross a cut, in one buffer behind a header.

The buffer has the size of a full micro-batch. So its receiver can allocate it before it knows how many rows arrive, or
whether any do.
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
"""Alignment in bytes, like that of torch's own memory. Libraries may add up in another order at other alignments."""
HEAD_BYTES = _ALIGNED
"""Size of a packet's header in bytes."""
_WORDS = struct.Struct("=qqq")
"""Layout of the header: three 64-bit integers."""


@dataclass(frozen=True, slots=True)
class PacketHeader:
    """Header at the start of a packet."""

    rows: int
    """Rows of the micro-batch; 0 after the last one, with no tensors behind the header."""
    ends: bool
    """Whether a rank was asked to end, so that no more micro-batches may enter."""
    bits: int = 0
    """Bit width of values in the next packet, so that its receiver knows its size."""


@dataclass(slots=True, eq=False)
class Packet:
    """Buffer that is reused for one packet after the other.

    Views of it are cached. When a pass has filled the caches, creating a view takes 10 to 20 µs.
    """

    raw: torch.Tensor
    """The buffer as bytes."""
    head: PacketHeader | None = None
    """The header that was written last."""
    pieces: dict[tuple[int, ...], list[torch.Tensor]] = field(default_factory=dict)
    """Pieces in which the packet is sent, by their ends."""
    values: dict[tuple[int, int], list[tuple[Value, int, torch.Tensor]]] = field(default_factory=dict)
    """Values by bit width and rows: each value, the bits of its numbers or 0, and its part of the buffer, typed unless
    packed."""

    def ending(self, ends: tuple[int, ...]) -> list[torch.Tensor]:
        """Return the pieces of the buffer that end at the byte offsets `ends`."""
        found = self.pieces.get(ends)
        if found is None:
            found = [self.raw[begin:end] for begin, end in zip((0, *ends), ends, strict=False)]
            self.pieces[ends] = found
        return found


class PacketLayout:
    """Positions of a cut's tensors in its packets.

    >>> from hpgo.runtime.stage_module import Value
    >>> cut = PacketLayout([Value("a", by_row=True, has_gradient=False, shape=(3,), dtype=torch.float32)], rows=2)
    >>> packet = cut.empty(torch.device("cpu"))
    >>> cut.write(packet, PacketHeader(1, ends=False), {"a": torch.tensor([[1.0, 2.0, 3.0]])})
    >>> cut.read(packet, cut.head(packet).rows)["a"].tolist(), cut.size_bytes
    ([[1.0, 2.0, 3.0]], 128)
    """

    def __init__(self, values: Sequence[Value], rows: int, bits: int = 0) -> None:
        """Compute the layout.

        `rows` is that of a full micro-batch. Floats are quantized to `bits`, unless that is 0.
        """
        self.values, self.bits, self._rows = tuple(values), bits, rows
        self._begins: list[int] = []
        self.size_bytes = HEAD_BYTES
        for value in self.values:
            self._begins.append(self.size_bytes)
            self.size_bytes += -(-self._size_bytes(value, rows) // _ALIGNED) * _ALIGNED

    def at(self, bits: int) -> PacketLayout:
        """Return the layout of the same tensors with floats quantized to `bits`."""
        return self if bits == self.bits else PacketLayout(self.values, self._rows, bits)

    def empty(self, device: torch.device) -> Packet:
        """Allocate a packet's buffer on a device."""
        return Packet(torch.empty(self.size_bytes, dtype=torch.uint8, device=device))

    def write(self, packet: Packet, head: PacketHeader, tensors: Mapping[str, torch.Tensor]) -> None:
        """Fill a packet. Tensors are converted to the types of the cut."""
        # Most headers equal the one before, and writing to a GPU's memory from the CPU is slow.
        if head != packet.head:
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
        """Return the header of a packet."""
        # Read the bytes without creating a tensor, which would take longer than the rest.
        raw = packet.raw if packet.raw.is_cpu else packet.raw[: _WORDS.size].cpu()
        rows, ends, bits = _WORDS.unpack(ctypes.string_at(raw.data_ptr(), _WORDS.size))
        return PacketHeader(rows, bool(ends), bits)

    def read(self, packet: Packet, rows: int) -> dict[str, torch.Tensor]:
        """Return the tensors of a packet by name: views of the buffer, or unpacked copies."""
        return {
            # A new view each time, because a layer may change the shape of its input in place.
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
        """Return the bits of one number of a value; 0 if it is sent as it is."""
        is_less = self.bits < 8 * value.dtype.itemsize and math.prod(value.shape) > 0
        return self.bits if value.dtype.is_floating_point and is_less else 0

    def _size_bytes(self, value: Value, rows: int) -> int:
        count, bits = math.prod(value.shape_of(rows)), self._bits_of(value)
        return packed_bytes(count, bits) if bits else count * value.dtype.itemsize


def layouts(
    parts: Sequence[StageModule], rows: int, dtype: torch.dtype | None, bits: Sequence[int]
) -> list[PacketLayout]:
    """Return the layouts before the first of `parts`, at each cut between two, and behind the last.

    Inputs enter at the first stage, and are passed on to later stages that read them. `dtype` is that of the weights,
    or None. `bits` has the width at each cut.
    """
    found = []
    # Inputs enter the first stage unquantized, so its layout has 0 bits.
    for number, width in enumerate((0, *bits)):
        later = {value.name: value for one in parts[number:] for value in one.takes if value.is_input}
        inputs = [later[name] for name in sorted(later)]
        if dtype is not None:  # floating inputs are cast like weights
            inputs = [replace(one, dtype=dtype) if one.dtype.is_floating_point else one for one in inputs]
        found.append(PacketLayout([*(parts[number - 1].gives if number else ()), *inputs], rows, width))
    return [*found, PacketLayout(parts[-1].gives, rows)]
