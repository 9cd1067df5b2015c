"""Reports of simulated runs: measures, ranks, comparisons of schedules, and sweeps over micro-batches."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpgo.base.laws import difference, share_left
from hpgo.base.messages import printable
from hpgo.base.units import format_bytes, format_seconds
from hpgo.show.folding import alike, numbers, ranged, steps
from hpgo.timing.measures import CAUSES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hpgo.timing.runs import SweepPoint
    from hpgo.timing.timeline import Timeline

    Table = tuple[list[str], list[list[str]]]


def headline(timeline: Timeline) -> str:
    """Return one line with schedule, ranks and micro-batches."""
    parts = [f"{timeline.schedule}: {timeline.ranks} ranks"]
    parts += [f"{timeline.virtual_stages_per_rank} stages per rank"] if timeline.virtual_stages_per_rank > 1 else []
    parts += [f"{timeline.micro_batches} micro-batches"]
    parts += [f"{timeline.iterations} steps"] if timeline.iterations > 1 else []
    return printable(f"{', '.join(parts)}, communication `{timeline.communication}`")


def measures(timeline: Timeline) -> Table:
    """Return a table of measures with their meanings."""
    found = timeline.measures
    whose = "of all devices' time" if timeline.devices else "of all ranks' time"
    rows = [
        ["step", format_seconds(found.makespan_s), "to the end of the last optimizer step"],
        ["longest rank span", format_seconds(found.max_rank_span_s), "from a rank's first start to its last end"],
        ["idle / total", _percent(found.idle_over_total), whose],
        ["idle / busy", _percent(found.idle_over_busy), "also called bubble rate"],
        ["idle of the busiest", _percent(found.idle_over_busiest), "what balancing alone can't win back"],
    ]
    total_s = (sum(timeline.devices) or timeline.ranks) * timeline.makespan_s
    rows += [
        [f"  idle: {cause}", _percent(idle_s / total_s), whose]
        for cause, idle_s in zip(CAUSES, found.idle_by_cause_s, strict=True)
        if idle_s > 1e-9 * total_s
    ]
    if found.peak_memory_bytes is not None:
        rows.append(["peak memory", format_bytes(max(found.peak_memory_bytes)), _over_cap(timeline)])
    return ["measure", "value", "meaning"], rows


def ranks(timeline: Timeline) -> Table:
    """Return a table of ranks with time and memory. Equally busy ranks with evenly changing memory share a row."""
    found = timeline.measures
    in_flight, peaks = found.peak_in_flight, found.peak_memory_bytes
    columns = [
        "rank",
        "busy",
        "idle / total",
        "in flight" if timeline.virtual_stages_per_rank == 1 else "activations in flight",
    ]
    columns += [] if peaks is None else ["peak memory"]
    # In-flight counts of 1F1B decrease by one per rank. Equal steps, not equal counts, make ranks similar.
    on = steps(in_flight)
    rows = []
    for run in alike(range(timeline.ranks), lambda rank: (found.busy_s[rank], on[rank])):
        busy_s = max(found.busy_s[rank] for rank in run)
        row = [str(numbers(run)), format_seconds(busy_s), _percent(share_left(busy_s, timeline.makespan_s))]
        row += [str(ranged(in_flight[run.start], in_flight[run.stop - 1]))]
        row += [] if peaks is None else [_sizes(peaks[run.start : run.stop])]
        rows.append(row)
    return columns, rows


def _sizes(peaks: Sequence[float]) -> str:
    """Return the first and the last size, or the largest if it is neither."""
    first, last = format_bytes(peaks[0]), format_bytes(peaks[-1])
    number, _, unit = first.partition(" ")
    ends = (f"{number}–{last}" if last.endswith(f" {unit}") else f"{first} – {last}") if first != last else first
    return ends if max(peaks) in {peaks[0], peaks[-1]} else f"up to {format_bytes(max(peaks))}"


def comparison(timelines: Sequence[Timeline]) -> Table:
    """Return a table that compares runs with the first one. It has a memory column if all runs have sizes."""
    # A memory column with gaps would invite wrong comparisons.
    with_memory = all(timeline.measures.peak_memory_bytes is not None for timeline in timelines)
    columns = ["schedule", "step", "against first", "idle / total", "idle / busy", "activations held"]
    columns += ["peak memory"] if with_memory else []
    first_s = timelines[0].makespan_s
    rows = []
    for timeline in timelines:
        found = timeline.measures
        row = [
            timeline.schedule,
            format_seconds(found.makespan_s),
            "–" if timeline is timelines[0] else f"{100 * difference(found.makespan_s, first_s) / first_s:+.1f} %",
            _percent(found.idle_over_total),
            _percent(found.idle_over_busy),
            f"{timeline.activations_held:g}",
        ]
        row += [format_bytes(max(found.peak_memory_bytes))] if with_memory and found.peak_memory_bytes else []
        rows.append(row)
    return columns, rows


def sweep(points: Sequence[SweepPoint]) -> Table:
    """Return a table of schedules for each number of micro-batches."""
    columns = ["schedule", "micro-batches", "step", "each", "idle / total", "activations held"]
    with_memory = points[0].peak_memory_bytes is not None
    rows = []
    for point in points:
        row = [
            point.schedule,
            str(point.micro_batches),
            format_seconds(point.makespan_s),
            format_seconds(point.makespan_s / point.micro_batches),
            _percent(point.idle_over_total),
            f"{point.activations_held:g}",
        ]
        row += [] if point.peak_memory_bytes is None else [format_bytes(point.peak_memory_bytes)]
        rows.append(row)
    return columns + (["peak memory"] if with_memory else []), rows


def _over_cap(timeline: Timeline) -> str:
    peaks, caps = timeline.measures.peak_memory_bytes, timeline.memory_cap_bytes
    if peaks is None or caps is None:
        return "of the fullest rank"
    over = [rank for rank, (peak, cap) in enumerate(zip(peaks, caps, strict=True)) if peak > cap]
    return f"over the cap on {len(over)} of {timeline.ranks} ranks" if over else "of the fullest rank, within the cap"


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"
