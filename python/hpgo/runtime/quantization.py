"""Quantization of floats to few bits: uniform steps between two bounds, after a clamp, packed without gaps.

For each tensor of a micro-batch, the sender sends each number as the nearest of 2^b evenly spaced values between a
lower and an upper limit. The limits are the minimum and the maximum. Below 16 bits, they move to a multiple of the mean
absolute deviation from the mean, if that is closer: 2.83, 3.89, 5.03, 6.20, 7.41 or 9.90 for 2, 3, 4, 5, 6 and 8 bits.
These factors minimize the error for a Laplace distribution. The error is at most half a step, (upper − lower) / (2^b −
1) / 2. Beyond the limits, the distance to the limit comes on top.
"""

from __future__ import annotations

import math

import torch

BITS = (2, 3, 4, 5, 6, 8, 16)
"""Bit widths of quantized values."""
_REACH = {2: 2.83, 3: 3.89, 4: 5.03, 5: 6.20, 6: 7.41, 8: 9.90}
"""Bounds of the clamp, in mean absolute deviations from the mean. They minimize the squared error for a Laplace
distribution."""
_TOGETHER = 8
"""Number of values that are packed together. Each group takes one byte per bit of width."""
ENDS_BYTES = 16
"""Size of the header of packed values: the lower bound and the step, in double precision."""


def packed_bytes(count: int, bits: int) -> int:
    """Return the size in bytes of `count` packed values with their header.

    >>> packed_bytes(1024, 4) - ENDS_BYTES
    512
    """
    return ENDS_BYTES + -(-count // _TOGETHER) * bits


def pack(tensor: torch.Tensor, bits: int, room: torch.Tensor) -> None:
    """Write the values of `tensor` into `room`, whose size in bytes is that of `packed_bytes`.

    Each value becomes the nearest of 2^bits steps from `low` to `high`. These are the smallest and the largest value,
    or the bounds of the clamp if they are nearer to the mean. The error of `unpack` is at most half a step, (high -
    low) / (2^bits - 1) / 2. A clamped value also has the error of its distance to the clamp.
    """
    # In double precision, half a step bounds the error even for 16 bits, where 32-bit arithmetic would add its own
    # rounding.
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
    # Eight codes of at most 6 bits fit into one 64-bit word, so a single sum packs them.
    words = (rows << shifts).sum(1)
    packed.copy_(words.view(torch.uint8).view(-1, 8)[:, :bits])


def unpack(room: torch.Tensor, bits: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return the values that `pack` has written, as a tensor of this shape and dtype."""
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
    """Return the lower bound, and the step, which is not 0."""
    low, high = torch.aminmax(numbers)

    if bits in _REACH:
        mean = numbers.mean()
        reach = _REACH[bits] * (numbers - mean).abs().mean()
        low, high = torch.maximum(low, mean - reach), torch.minimum(high, mean + reach)
    step = (high - low) / (2**bits - 1)
    # Equal values give a step of 0, and 0 / 0 in `pack`. With any other step, all codes are 0 and unpack exactly.
    return low, torch.where(step > 0, step, torch.ones_like(step))
