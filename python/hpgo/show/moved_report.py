"""Comparison of two searches of one problem: what measured steps change in the list of configurations.

A platform, fitted to measured steps, changes the estimates and so the order of the list. The report shows the rank and
the step time of each configuration before and after.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hpgo.base.messages import pluralize
from hpgo.base.tables import plain
from hpgo.base.units import format_seconds
from hpgo.base.validated import Record
from hpgo.llm.estimate import LlmEstimate, estimate_on, stack_on

if TYPE_CHECKING:
    from os import PathLike

    from hpgo.llm.device_record import DeviceRecord
    from hpgo.llm.parallelism import ParallelismConfig
    from hpgo.llm.platform import Platform
    from hpgo.llm.search import LlmPlanSearch
    from hpgo.llm.stack import Stack

_NOTABLE = 0.01
"""Change of a step time, as a share, that a sentence mentions. Not tuned."""


@dataclass(frozen=True, slots=True)
class Move(Record):
    """A configuration in two lists."""

    before: LlmEstimate
    after: LlmEstimate
    rank_before: int | None
    """Place in the list without the platform, from 1; None if it is below the end of the list."""
    rank_after: int | None


def moves(
    before: LlmPlanSearch,
    after: LlmPlanSearch,
    platform: Platform | DeviceRecord,
    stack: Stack | str | PathLike[str] | None = None,
) -> tuple[Move, ...]:
    """Return the configurations of both lists, in the order of `after`; those that left the list follow.

    Args:
        before: the search without the platform.
        after: the search of the same problem with it.
        platform: the platform, which also estimates configurations that are in one list only.
        stack: the stack that the searches were asked for; None means the one that the framework implies.

    >>> import hpgo
    >>> cluster, ask = hpgo.Cluster.preset("h100:1"), {"global_batch_size": 32, "seq_length": 8192}
    >>> one = hpgo.estimate_llm("llama-3-8b", cluster, tp=2, **ask)
    >>> step = hpgo.MeasuredStep.of("llama-3-8b", cluster, one, 1.2 * one.step_s)
    >>> platform = hpgo.fit_platform([step]).platform
    >>> lists = [hpgo.plan_llm("llama-3-8b", cluster, platform=one, **ask) for one in (None, platform)]
    >>> first = moves(*lists, platform)[0]
    >>> first.rank_after, first.after.step_s > first.before.step_s
    (1, True)
    """
    places_before, places_after = (
        {one.parallelism: place for place, one in enumerate(found.estimates, start=1)} for found in (before, after)
    )

    def estimated(found: LlmPlanSearch, config: ParallelismConfig, place: int | None) -> LlmEstimate:
        one = found.estimates[0 if place is None else place - 1]
        if place is not None:
            return one
        # It is not in this list, so estimate it as the search did.
        used = platform if found is after else None
        batch = {"global_batch_size": one.global_batch_size, "seq_length": one.seq_length}
        known = stack_on(stack, found.cluster, found.framework, used)
        return estimate_on(found.transformer, found.cluster, config, known, used, **batch)

    return tuple(
        Move(
            estimated(before, config, places_before.get(config)),
            estimated(after, config, places_after.get(config)),
            places_before.get(config),
            places_after.get(config),
        )
        for config in dict.fromkeys((*places_after, *places_before))
    )


def lines(moved: tuple[Move, ...], width: int) -> list[str]:
    """Return the report: a sentence about the best configuration, and a table with ranks and step times."""
    rows = [
        (
            f"{_rank(move.rank_before)} → {_rank(move.rank_after)}",
            format_seconds(move.before.step_s),
            format_seconds(move.after.step_s),
            f"{100 * (move.after.step_s / move.before.step_s - 1):+.1f} %",
            move.after.parallelism.named(),
        )
        for move in moved
        if move.rank_before != move.rank_after or move is moved[0]
    ]
    same = sum(move.rank_before == move.rank_after for move in moved)
    first = moved[0]
    place = "not in the list" if first.rank_before is None else f"number {first.rank_before}"
    title = "The fastest configuration " + ("stays the fastest" if first.rank_before == 1 else f"was {place}")
    change = first.after.step_s / first.before.step_s - 1
    if abs(change) >= _NOTABLE:
        title += f", and its estimate {'rises' if change > 0 else 'falls'} by {100 * abs(change):.0f} %"
    return [
        f"What the measured steps change: {pluralize(len(moved) - same, 'configuration')} of {len(moved)} moved.",
        f"{title}.",
        *plain(["rank", "step before", "after", "", "configuration"], rows, width),
    ]


def document(moved: tuple[Move, ...]) -> list[dict[str, object]]:
    """Return the moves for JSON."""
    return [
        {
            "configuration": move.after.parallelism.named(),
            "rank_before": move.rank_before,
            "rank_after": move.rank_after,
            "step_before_s": move.before.step_s,
            "step_after_s": move.after.step_s,
        }
        for move in moved
    ]


def _rank(rank: int | None) -> str:
    return "-" if rank is None else str(rank)
