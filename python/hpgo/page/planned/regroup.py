"""Stages for another schedule: some run one on each group of devices, others several, in an order of their own."""

from __future__ import annotations

from bisect import bisect_left
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

from hpgo.base.messages import pluralize
from hpgo.errors import ArgumentError
from hpgo.planning.schedule_search import VIRTUAL_STAGES
from hpgo.programs.schedule import schedule

if TYPE_CHECKING:
    from collections.abc import Mapping

Stages = list[tuple[list[str], list[int]]]
"""Layers of each stage, by their ids, and its devices."""


def regrouped(stages: Stages, name: str, micro_batches: int, times_s: Mapping[str, float]) -> Stages:
    """`stages` on the same groups of devices, cut as schedule `name` runs them, or as they are where it can run them.

    Each group computes for as long as before, by the layers' `times_s`, as far as layers can be cut. Raises
    ArgumentError where there are fewer layers than stages.
    """
    groups = list(dict.fromkeys(tuple(devices) for _, devices in stages))
    now = [groups.index(tuple(devices)) for _, devices in stages]
    order = _order(name, len(groups), len(stages), micro_batches)
    if order == now:
        return stages
    layers = [layer for own, _ in stages for layer in own]
    if len(layers) < len(order):
        raise ArgumentError(
            f"`{name}` runs {len(order)} stages on {pluralize(len(groups), 'group')} of devices, but there are"
            f" {pluralize(len(layers), 'layer')}",
            "join stages first, or choose another schedule",
        )
    busy_s = [0.0] * len(groups)
    for (own, _), group in zip(stages, now, strict=True):
        busy_s[group] += sum(times_s[layer] for layer in own)
    ends_s = list(accumulate(times_s[layer] for layer in layers))
    cuts = [0]
    for at, wanted_s in enumerate(accumulate(busy_s[group] / order.count(group) for group in order)):
        near = bisect_left(ends_s, wanted_s)
        if near < len(ends_s) and (near == 0 or ends_s[near] - wanted_s <= wanted_s - ends_s[near - 1]):
            near += 1
        cuts.append(min(max(near, cuts[-1] + 1), len(layers) - (len(order) - 1 - at)))
    cuts[-1] = len(layers)
    cut = zip(pairwise(cuts), order, strict=True)
    return [(layers[first:end], list(groups[group])) for (first, end), group in cut]


def _order(name: str, groups: int, stages: int, micro_batches: int) -> list[int]:
    """On which group of devices a schedule runs each stage."""
    if name not in VIRTUAL_STAGES:
        return list(range(groups))
    chunks, rest = divmod(stages, groups)
    several = chunks if not rest and chunks in VIRTUAL_STAGES[name] else VIRTUAL_STAGES[name][0]
    return list(schedule(name, ranks=groups, micro_batches=micro_batches, chunks=several).rank_of_stage)
