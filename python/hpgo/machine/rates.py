"""What known devices do at most: floating-point operations and bytes of memory in a second, from their datasheets.

Operations are those of dense matrices; what a datasheet gives for sparse ones is halved.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

WIDTHS = {"float32": 4, "tf32": 4, "float16": 2, "bfloat16": 2}
"""Bytes of a value, by what a device computes in; tf32 is float32 on tensor cores, rounded on the way in."""


@dataclass(frozen=True, slots=True)
class Rates:
    """Peaks of one device."""

    flop_per_s: Mapping[str, float]
    """By what it computes in, a key of `WIDTHS`."""
    bytes_per_s: float
    source: str


RATES: dict[str, Rates] = {
    # Without tensor cores for anything but float16.
    "v100": Rates({"float32": 15.7e12, "float16": 125e12}, 900e9, "NVIDIA V100 datasheet, SXM2"),
    "a100": Rates(
        {"float32": 19.5e12, "tf32": 156e12, "float16": 312e12, "bfloat16": 312e12},
        2039e9,
        "NVIDIA A100 datasheet, SXM 80 GB",
    ),
    "h100": Rates(
        {"float32": 67e12, "tf32": 494.5e12, "float16": 989.5e12, "bfloat16": 989.5e12},
        3350e9,
        "NVIDIA H100 datasheet, SXM",
    ),
    "h200": Rates(
        {"float32": 67e12, "tf32": 494.5e12, "float16": 989.5e12, "bfloat16": 989.5e12},
        4800e9,
        "NVIDIA H200 datasheet, SXM",
    ),
    "b200": Rates(
        {"float32": 80e12, "tf32": 1100e12, "float16": 2250e12, "bfloat16": 2250e12},
        8000e9,
        "NVIDIA Blackwell architecture brief, HGX B200",
    ),
}
