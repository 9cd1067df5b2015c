"""Texts and numbers about a timeline that all picture formats share: names, shares, virtual stages."""

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
_HELD = "Activations held: maximum on one rank from F to B or W, in micro-batches of all its layers."


def names(timelines: Sequence[Timeline], labels: Sequence[str]) -> list[str]:
    """Return a name for each timeline: its label or its schedule, numbered if two timelines have the same."""
    if labels:
        return [printable(label) for label in labels]
    schedules = [printable(timeline.schedule) for timeline in timelines]
    return [
        name if schedules.count(name) == 1 else f"{name} ({schedules[: i + 1].count(name)})"
        for i, name in enumerate(schedules)
    ]


def title(timelines: Sequence[Timeline], labels: Sequence[str]) -> str:
    """Return the title of a picture: model and cluster if known, the schedules, and the step time of one timeline."""
    what = labels[0] if len(labels) == 1 else " against ".join(labels) if len(labels) <= 3 else f"{len(labels)} runs"
    titles = list(dict.fromkeys(printable(timeline.title) for timeline in timelines if timeline.title))
    named = f"{' and '.join(titles)}: {what}" if len(titles) in {1, 2} else what
    return f"{named}, a step of {format_seconds(timelines[0].makespan_s)}" if len(labels) == 1 and titles else named


def rank_name(timeline: Timeline, rank: int, per_row: int = 1) -> str:
    """Return the name of the row that holds `rank`, if a row has `per_row` ranks."""
    if per_row > 1:
        first = rank // per_row * per_row
        return f"{timeline.row}s {first}–{min(first + per_row, timeline.ranks) - 1}"
    return printable(timeline.row_names[rank]) if timeline.row_names else f"{timeline.row} {rank}"


def _rank_of_stage(timeline: Timeline) -> NDArray[np.int64]:
    """Return the rank of each stage.

    If several ranks run it, as replicas of a measured timeline do, return the last.
    """
    found, stages, ranks = np.zeros(timeline.stages, np.int64), timeline.stage, timeline.rank
    for part in parts(len(stages)):
        found[stages[part]] = ranks[part]
    return found


def sync_rows(timeline: Timeline) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return two columns of equal length: indices of gradient reductions, and the ranks on which each is drawn."""
    one, stages, ranks = _rank_of_stage(timeline), timeline.stage, timeline.rank
    # Measured timelines have several ranks per stage. Collect the pairs in slices, to limit the memory.
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


def virtual_stage_of_stage(timeline: Timeline) -> NDArray[np.int64]:
    """Return the index of each stage among the stages of its rank, from 0."""
    rank_of_stage = _rank_of_stage(timeline)
    by_rank = np.argsort(rank_of_stage, kind="stable")
    firsts = np.searchsorted(rank_of_stage[by_rank], rank_of_stage[by_rank])
    positions = np.empty(len(rank_of_stage), np.int64)
    positions[by_rank] = np.arange(len(by_rank)) - firsts
    return positions


def bar_of_stage(timeline: Timeline) -> NDArray[np.float64]:
    """Return the fraction of each stage's boxes that a bar covers: 0 for the first stage of a rank, 1 for its last."""
    positions = virtual_stage_of_stage(timeline)
    return positions / max(int(positions.max(initial=0)), 1)


def barred(timelines: Sequence[Timeline]) -> str:
    """Return the meaning of the bars on boxes. Empty if there are none."""
    is_virtual = any(timeline.virtual_stages_per_rank > 1 for timeline in timelines)
    two_way = any(
        virtual_stage_of_stage(timeline).max(initial=0) + 1 > timeline.virtual_stages_per_rank for timeline in timelines
    )
    meanings = [f"later virtual stage of the {timelines[0].row}"] * is_virtual + ["the other direction"] * two_way
    return f"bar on top: {', or '.join(meanings)}" if meanings else ""


def peak_bytes(timeline: Timeline) -> float | None:
    """Return the peak bytes of the fullest rank. None if memory is unknown."""
    peaks = timeline.measures.peak_memory_bytes
    return None if peaks is None else max(peaks)


def drawn_caps(timeline: Timeline) -> tuple[float, ...] | None:
    """Return the ranks' memory limits. None if there are none, or if memory curves would be flat beside them."""
    caps = timeline.memory_cap_bytes
    # Above three times the peak, a curve uses less than a third of its height.
    return caps if caps and max(caps) <= 3 * (peak_bytes(timeline) or 0.0) else None


def memory_top_bytes(timelines: Sequence[Timeline]) -> float:
    """Return the bytes at the top of all memory curves.

    It is the same for all timelines, so that they can be compared.
    """
    return max(max([peak_bytes(timeline) or 0.0, *(drawn_caps(timeline) or ())]) for timeline in timelines)


def far_cap(timeline: Timeline, label: str) -> str:
    """Return the note on a memory limit that is not drawn."""
    caps = range_text(timeline.memory_cap_bytes or (0.0,))
    return f"{label}: the memory cap, {caps}, is far above the memory in use and not drawn."


def range_text(values: Sequence[float]) -> str:
    """Return the range of some sizes as text."""
    minimum, maximum = format_bytes(min(values)), format_bytes(max(values))
    return minimum if minimum == maximum else f"{minimum} to {maximum}"


def counted(number: int, noun: str) -> str:
    """Return a number with its noun in singular or plural.

    >>> counted(1, "rank"), counted(1024, "rank")
    ('1 rank', '1,024 ranks')
    """
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def summary(timeline: Timeline) -> str:
    """Return one line with size, step time, bubble and peak memory."""
    parts = [
        counted(timeline.ranks, timeline.row),
        counted(timeline.micro_batches, "micro-batch").replace("batchs", "batches"),
    ]
    if timeline.virtual_stages_per_rank > 1:
        parts.append(f"{timeline.virtual_stages_per_rank} virtual stages per {timeline.row}")
    parts += [f"step {format_seconds(timeline.makespan_s)}", f"bubble {100 * timeline.measures.idle_over_total:.1f} %"]
    peak = peak_bytes(timeline)
    if peak is not None:
        parts.append(f"peak {format_bytes(peak)}")
    return " · ".join(parts)


def comparison(timelines: Sequence[Timeline], labels: Sequence[str]) -> list[list[str]]:
    """Return the rows of the table that compares timelines with the first one: a heading, then one row per timeline.

    A single timeline has no columns of differences. Memory is left out unless all timelines have it.
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
    """Return the definitions of the words in a summary, and in the table if it is shown."""
    noun = "device" if any(timeline.devices for timeline in timelines) else "rank"
    bubble = _BUBBLE.format(noun)
    return f"{bubble} {_HELD}" if with_table else bubble


def _relative(value: float, base: float, is_first: bool) -> str:
    if is_first or base <= 0 or math.isinf(change := 100 * (value / base - 1)):
        return "–"
    return f"{change:+.1f} %"
