"""What every picture says about a timeline beside its boxes: names, shares, chunks."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from hpgo.base.messages import printable
from hpgo.base.units import format_bytes, format_seconds
from hpgo.draw.density import parts

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from hpgo.timing.timeline import Timeline

_BUBBLE = "Bubble: share of {0}s × step in which a {0} computes nothing."
_HELD = "Activations held: most on one rank from F to B or W, in micro-batches of all its layers."


def names(timelines: Sequence[Timeline], labels: Sequence[str]) -> list[str]:
    """A name for each timeline, fit to be drawn: its label, or its schedule, numbered where two share it."""
    if labels:
        return [printable(label) for label in labels]
    schedules = [printable(timeline.schedule) for timeline in timelines]
    return [
        name if schedules.count(name) == 1 else f"{name} ({schedules[: i + 1].count(name)})"
        for i, name in enumerate(schedules)
    ]


def title(timelines: Sequence[Timeline], labels: Sequence[str]) -> str:
    """What is drawn: model and cluster, where they are known, what runs there, and how long a step of one alone is."""
    what = labels[0] if len(labels) == 1 else " against ".join(labels) if len(labels) <= 3 else f"{len(labels)} runs"
    titles = list(dict.fromkeys(printable(timeline.title) for timeline in timelines if timeline.title))
    named = f"{' and '.join(titles)}: {what}" if len(titles) in {1, 2} else what
    return f"{named}, a step of {format_seconds(timelines[0].makespan_s)}" if len(labels) == 1 and titles else named


def rank_name(timeline: Timeline, rank: int, per_row: int = 1) -> str:
    """What the row of `per_row` ranks is called that holds `rank`."""
    if per_row > 1:
        first = rank // per_row * per_row
        return f"{timeline.row}s {first}–{min(first + per_row, timeline.ranks) - 1}"
    return printable(timeline.row_names[rank]) if timeline.row_names else f"{timeline.row} {rank}"


def _rank_of_stage(timeline: Timeline) -> NDArray[np.int64]:
    """For each stage the rank that runs it; of several, replicas in a measured timeline, the last."""
    found, stages, ranks = np.zeros(timeline.stages, np.int64), timeline.stage, timeline.rank
    for part in parts(len(stages)):
        found[stages[part]] = ranks[part]
    return found


def sync_rows(timeline: Timeline) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Which synchronisations are drawn on which ranks: each on all that run its stage. Places of both, as columns."""
    one, stages, ranks = _rank_of_stage(timeline), timeline.stage, timeline.rank
    holders = [np.stack([np.arange(timeline.stages), one], 1)]
    for part in parts(len(stages)):
        others = one[stages[part]] != ranks[part]
        holders.append(np.unique(np.stack([stages[part][others], ranks[part][others]], 1), axis=0))
    of_stage, rank = np.unique(np.concatenate(holders), axis=0).T
    first = np.searchsorted(of_stage, timeline.sync_stage)
    counts = np.searchsorted(of_stage, timeline.sync_stage, side="right") - first
    syncs = np.repeat(np.arange(len(counts)), counts)
    before = np.repeat(np.cumsum(counts) - counts, counts)
    return syncs, rank[first[syncs] + np.arange(len(syncs)) - before]


def chunk_of_stage(timeline: Timeline) -> NDArray[np.int64]:
    """For each stage, the how-many-eth of its rank's stages it is, counted from 0."""
    rank_of_stage = _rank_of_stage(timeline)
    by_rank = np.argsort(rank_of_stage, kind="stable")
    firsts = np.searchsorted(rank_of_stage[by_rank], rank_of_stage[by_rank])
    chunks = np.empty(len(rank_of_stage), np.int64)
    chunks[by_rank] = np.arange(len(by_rank)) - firsts
    return chunks


def bar_of_stage(timeline: Timeline) -> NDArray[np.float64]:
    """For each stage, the part of its boxes that a bar covers: none of its rank's first stage, all of its last."""
    chunks = chunk_of_stage(timeline)
    return chunks / max(int(chunks.max(initial=0)), 1)


def barred(timelines: Sequence[Timeline]) -> str:
    """What the bars on boxes stand for; empty if there are none."""
    chunked = any(timeline.chunks > 1 for timeline in timelines)
    two_way = any(chunk_of_stage(timeline).max(initial=0) + 1 > timeline.chunks for timeline in timelines)
    meanings = [f"later chunk of the {timelines[0].row}"] * chunked + ["the other direction"] * two_way
    return f"bar on top: {', or '.join(meanings)}" if meanings else ""


def peak_bytes(timeline: Timeline) -> float | None:
    """Most bytes that any rank holds at any time; None where memory is not known."""
    peaks = timeline.measures.peak_memory_bytes
    return None if peaks is None else max(peaks)


def drawn_caps(timeline: Timeline) -> tuple[float, ...] | None:
    """The ranks' memory caps, or None where there are none, or where curves would be flat beside them."""
    caps = timeline.memory_cap_bytes
    return caps if caps and max(caps) <= 3 * (peak_bytes(timeline) or 0.0) else None


def memory_top_bytes(timelines: Sequence[Timeline]) -> float:
    """What the height of all memory curves stands for, so that they can be compared."""
    return max(max([peak_bytes(timeline) or 0.0, *(drawn_caps(timeline) or ())]) for timeline in timelines)


def far_cap(timeline: Timeline, label: str) -> str:
    """The note on caps that are not drawn."""
    caps = range_text(timeline.memory_cap_bytes or (0.0,))
    return f"{label}: the memory cap, {caps}, is far above what is in use and not drawn."


def range_text(values: Sequence[float]) -> str:
    """Least and greatest of some sizes."""
    least, most = format_bytes(min(values)), format_bytes(max(values))
    return least if least == most else f"{least} to {most}"


def counted(number: int, noun: str) -> str:
    """A count with its noun.

    >>> counted(1, "rank"), counted(1024, "rank")
    ('1 rank', '1,024 ranks')
    """
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def summary(timeline: Timeline) -> str:
    """One line: size, step, bubble, peak memory."""
    parts = [
        counted(timeline.ranks, timeline.row),
        counted(timeline.micro_batches, "micro-batch").replace("batchs", "batches"),
    ]
    if timeline.chunks > 1:
        parts.append(f"{timeline.chunks} chunks a {timeline.row}")
    parts += [f"step {format_seconds(timeline.makespan_s)}", f"bubble {100 * timeline.measures.idle_over_total:.1f} %"]
    peak = peak_bytes(timeline)
    if peak is not None:
        parts.append(f"peak {format_bytes(peak)}")
    return " · ".join(parts)


def comparison(timelines: Sequence[Timeline], labels: Sequence[str]) -> list[list[str]]:
    """Rows of the table that sets timelines beside the first: a heading, then one row a timeline.

    Of one timeline alone there are no differences, and memory only where all timelines know it.
    """
    first = timelines[0]
    rows = [["", "step", "against first", "bubble", "difference", "activations held", "peak memory", "against first"]]
    for label, timeline in zip(names(timelines, labels), timelines, strict=True):
        idle, first_idle = timeline.measures.idle_over_total, first.measures.idle_over_total
        peak, first_peak = peak_bytes(timeline) or 0.0, peak_bytes(first) or 0.0
        rows.append(
            [
                label,
                format_seconds(timeline.makespan_s),
                _relative(timeline.makespan_s, first.makespan_s, timeline is first),
                f"{100 * idle:.1f} %",
                "–" if timeline is first else f"{100 * (idle - first_idle):+.1f} points",
                f"{timeline.activations_held:g}",
                format_bytes(peak),
                _relative(peak, first_peak, timeline is first),
            ]
        )
    unwanted = set() if len(timelines) > 1 else {2, 4, 7}
    if any(peak_bytes(timeline) is None for timeline in timelines):
        unwanted |= {6, 7}
    return [[cell for i, cell in enumerate(row) if i not in unwanted] for row in rows]


def definitions(timelines: Sequence[Timeline], *, with_table: bool) -> str:
    """What the words of a summary, and of the table where it is shown, mean."""
    noun = "device" if any(timeline.devices for timeline in timelines) else "rank"
    bubble = _BUBBLE.format(noun)
    return f"{bubble} {_HELD}" if with_table else bubble


def _relative(value: float, base: float, is_first: bool) -> str:
    if is_first or base <= 0 or math.isinf(change := 100 * (value / base - 1)):
        return "–"
    return f"{change:+.1f} %"
