"""What a rank has done with one micro-batch of a stream, and when: for those who watch it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    Watch = Callable[["Moment"], object]

KINDS = ("pass", "pack", "send", "receive", "unpack", "output")
"""What there is: the pass through a stage's layers; the filling of a packet, the time until its place is free again, as
far as the rank has looked; the wait for one, and its reading; and an output that is handed to whoever infers."""


@dataclass(frozen=True, slots=True)
class Moment:
    """One thing, from its begin to its end by `time.perf_counter_ns`."""

    kind: str
    """One of `KINDS`."""
    micro_batch: int
    begin_ns: int
    end_ns: int
    samples: int
    size_bytes: int = 0
    """Of the packet, if it is one's."""
    bits: int = 0
    """In which the packet's numbers travel; 0 as they are."""
