"""What a run amounts to, and the words for why ranks stand idle."""

from __future__ import annotations

from dataclasses import dataclass

from hpgo.base.validated import Record

TRANSFER_KINDS = ("activation", "gradient")
CAUSES = ("fill", "drain", "dependency", "communication", "imbalance")
"""Why a rank stands idle: before its first action; behind its last; its input isn't computed yet; it is on the way; it
is being computed, by a rank that has more work in all."""


@dataclass(frozen=True, slots=True)
class Measures(Record):
    """Numbers of a whole run. T is the makespan, b_r the busy time of rank r of p.

    >>> import hpgo
    >>> measures = hpgo.simulate(hpgo.schedule("1f1b", ranks=2, micro_batches=4)).measures
    >>> measures.busy_s, measures.idle_over_total, measures.peak_in_flight
    ((12.0, 12.0), 0.2, (2, 1))
    """

    makespan_s: float
    """T: the end of everything."""
    max_rank_span_s: float
    """The longest time from a rank's first start to its last end; the zero-bubble papers' cost."""
    busy_s: tuple[float, ...]
    """b_r of each rank."""
    idle_over_total: float
    """1 − Σ b_r / (p T), where a rank that stands for n devices counts n times, here and below; `Plan.bubble`."""
    idle_over_busy: float
    """p T / Σ b_r − 1; some tools call this the bubble rate."""
    idle_over_busiest: float
    """1 − max b_r / T."""
    idle_by_cause_s: tuple[float, ...]
    """Seconds of all ranks, or of all devices that they stand for, in the order of `CAUSES`."""
    peak_in_flight: tuple[int, ...]
    """Most chunk activations that each rank holds, freed at B or W."""
    peak_in_flight_freed_at_input_gradient: tuple[int, ...]
    """The same, freed at B or I."""
    messages: int
    """Messages between ranks."""
    peak_memory_bytes: tuple[float, ...] | None = None
    """Of each rank; None where memory is not known."""
    bytes_sent: tuple[float, ...] | None = None
    """By each rank to others; None where sizes are not known."""
