"""Numbers in few bits: uniform steps between two ends, after a clamp, packed without gaps."""

from __future__ import annotations

import math

import torch

BITS = (2, 3, 4, 5, 6, 8, 16)
"""Widths that values may travel in."""
_REACH = {2: 2.83, 3: 3.89, 4: 5.03, 5: 6.20, 6: 7.41, 8: 9.90}
"""Of the clamp, in mean distances from the mean: there, numbers of a Laplace distribution lose least squared error."""
_TOGETHER = 8
"""Numbers that are packed into as many bytes as each has bits."""
ENDS_BYTES = 16
"""In front of packed numbers: the lower end and the step, in double precision."""


def packed_bytes(count: int, bits: int) -> int:
    """Of so many numbers with their ends.

    >>> packed_bytes(1024, 4) - ENDS_BYTES
    512
    """
    return ENDS_BYTES + -(-count // _TOGETHER) * bits


def pack(tensor: torch.Tensor, bits: int, room: torch.Tensor) -> None:
    """Writes the numbers into `room`, as many bytes as `packed_bytes` says.

    Each becomes the nearest of 2^bits steps from `low` to `high`, which are the least and the largest number, or nearer
    to the mean where the clamp is: what `unpack` gives is off by half a step, (high - low) / (2^bits - 1) / 2, at most,
    and beyond the clamp by what lies beyond it, too.
    """
    numbers = tensor.reshape(-1).to(torch.float64)
    low, step = _ends(numbers, bits)
    room[:ENDS_BYTES].view(torch.float64).copy_(torch.stack([low, step]))
    codes = ((numbers - low) / step).round_().clamp_(0, 2**bits - 1).to(torch.int64)
    if missing := -len(codes) % _TOGETHER:
        codes = torch.cat([codes, codes.new_zeros(missing)])
    rows = codes.view(-1, _TOGETHER)
    packed = room[ENDS_BYTES:].view(-1, bits)
    if bits == 16:
        packed.copy_(rows.to(torch.int32).view(torch.uint8).view(-1, _TOGETHER, 4)[:, :, :2].reshape(-1, bits))
        return
    if bits == 8:
        packed.copy_(rows)
        return
    shifts = torch.arange(_TOGETHER, device=rows.device) * bits
    words = (rows << shifts).sum(1)
    packed.copy_(words.view(torch.uint8).view(-1, 8)[:, :bits])


def unpack(room: torch.Tensor, bits: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """The numbers that `pack` wrote."""
    low, step = room[:ENDS_BYTES].view(torch.float64)
    packed = room[ENDS_BYTES:].view(-1, bits)
    if bits == 16:
        pairs = packed.reshape(-1, 2).to(torch.int32)
        codes = pairs[:, 0] | (pairs[:, 1] << 8)
    elif bits == 8:
        codes = packed.reshape(-1)
    else:
        words = torch.zeros(len(packed), 8, dtype=torch.uint8, device=room.device)
        words[:, :bits] = packed
        shifts = torch.arange(_TOGETHER, device=room.device) * bits
        codes = ((words.view(torch.int64) >> shifts) & (2**bits - 1)).reshape(-1)
    numbers = codes[: math.prod(shape)].to(torch.float64).mul_(step).add_(low)
    return numbers.to(dtype).view(shape)


def _ends(numbers: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The lower end, and a step, which is no zero."""
    low, high = torch.aminmax(numbers)
    if bits in _REACH:
        mean = numbers.mean()
        reach = _REACH[bits] * (numbers - mean).abs().mean()
        low, high = torch.maximum(low, mean - reach), torch.minimum(high, mean + reach)
    step = (high - low) / (2**bits - 1)
    return low, torch.where(step > 0, step, torch.ones_like(step))
