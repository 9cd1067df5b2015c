"""Change of stages for another schedule, which may need another number of stages per group of devices."""

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
"""Ids of the layers of each stage, and its devices."""


def regrouped(stages: Stages, name: str, micro_batches: int, times_s: Mapping[str, float]) -> Stages:
    """Return stages on the same groups of devices that schedule `name` can run; unchanged if it can run `stages`.

    Each group computes for about as long as before, by `times_s` of the layers. Raises ArgumentError if the model has
    fewer layers than stages are needed.
    """
    groups = list(dict.fromkeys(tuple(devices) for _, devices in stages))
    now = [groups.index(tuple(devices)) for _, devices in stages]
    order = _order(name, len(groups), len(stages), micro_batches)
    # The schedule can run these stages, so the cuts of the user are kept.
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
    # Cut at the layer boundary that is nearest to the wanted time, but leave at least one layer for each later stage.
    for at, wanted_s in enumerate(accumulate(busy_s[group] / order.count(group) for group in order)):
        near = bisect_left(ends_s, wanted_s)
        if near < len(ends_s) and (near == 0 or ends_s[near] - wanted_s <= wanted_s - ends_s[near - 1]):
            near += 1
        cuts.append(min(max(near, cuts[-1] + 1), len(layers) - (len(order) - 1 - at)))
    cuts[-1] = len(layers)
    cut = zip(pairwise(cuts), order, strict=True)
    return [(layers[first:end], list(groups[group])) for (first, end), group in cut]


def _order(name: str, groups: int, stages: int, micro_batches: int) -> list[int]:
    """Return the group of devices of each stage under a schedule."""
    if name not in VIRTUAL_STAGES:
        return list(range(groups))
    virtual_stages_per_rank, rest = divmod(stages, groups)
    several = (
        virtual_stages_per_rank
        if not rest and virtual_stages_per_rank in VIRTUAL_STAGES[name]
        else VIRTUAL_STAGES[name][0]
    )
    return list(
        schedule(name, ranks=groups, micro_batches=micro_batches, virtual_stages_per_rank=several).rank_of_stage
    )
