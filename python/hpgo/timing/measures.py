"""Results of a run, and the causes of idle time."""

from __future__ import annotations

from dataclasses import dataclass

from hpgo.base.validated import Record

TRANSFER_KINDS = ("activation", "gradient")
CAUSES = ("fill", "drain", "dependency", "communication", "imbalance")
"""Causes of idle time on a rank. `fill`: before its first action. `drain`: after its last action. `dependency`: its
input is not computed yet. `communication`: its input is in transit. `imbalance`: its input is being computed by a rank
with more total work."""


@dataclass(frozen=True, slots=True)
class Measures(Record):
    """Results of a whole run. T is the makespan, b_r the busy time of rank r of p.

    >>> import hpgo
    >>> measures = hpgo.simulate(hpgo.schedule("1f1b", ranks=2, micro_batches=4)).measures
    >>> measures.busy_s, measures.idle_over_total, measures.peak_in_flight
    ((12.0, 12.0), 0.2, (2, 1))
    """

    makespan_s: float
    """Makespan T in seconds: the end of the last action or optimizer step."""
    max_rank_span_s: float
    """Longest time from a rank's first start to its last end, in seconds. The zero-bubble papers call it cost."""
    busy_s: tuple[float, ...]
    """Busy time b_r of each rank, in seconds."""
    idle_over_total: float
    """Idle share of all device time, 1 − Σ b_r / (p T). Here and below, a rank that stands for n devices counts n
    times. `Plan.bubble` is this number."""
    idle_over_busy: float
    """Idle time relative to busy time, p T / Σ b_r − 1. Some tools call this the bubble rate."""
    idle_over_busiest: float
    """Idle share of the busiest rank, 1 − max b_r / T."""
    idle_by_cause_s: tuple[float, ...]
    """Idle seconds over all ranks, or over all devices that they stand for, in the order of `CAUSES`."""
    peak_in_flight: tuple[int, ...]
    """Largest number of activations of virtual stages that each rank holds, if they are freed at B or W."""
    peak_in_flight_freed_at_input_gradient: tuple[int, ...]
    """Largest number of activations of virtual stages that each rank holds, if they are freed at B or I."""
    messages: int
    """Number of messages between ranks."""
    peak_memory_bytes: tuple[float, ...] | None = None
    """Peak bytes of each rank. None if memory is unknown."""
    bytes_sent: tuple[float, ...] | None = None
    """Bytes that each rank sends to others. None if sizes are unknown."""
