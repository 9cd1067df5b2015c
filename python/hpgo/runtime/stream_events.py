"""Events of a micro-batch in an inference stream on one rank, for observers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    Watch = Callable[["Moment"], object]

KINDS = ("pass", "pack", "send", "receive", "unpack", "output")
"""Kinds of events.

They are the pass through a stage's layers, the filling of a packet, the time until its buffer is free again (as far as
the rank has observed it), the wait for a packet, its reading, and the delivery of an output to the caller."""


@dataclass(frozen=True, slots=True)
class Moment:
    """One event, with its start and end by `time.perf_counter_ns`."""

    kind: str
    """Kind of the event, one of `KINDS`."""
    micro_batch: int
    begin_ns: int
    end_ns: int
    samples: int
    size_bytes: int = 0
    """Size of the packet; 0 if the event has none."""
    bits: int = 0
    """Bit width of the packet's values; 0 if they are not quantized."""
