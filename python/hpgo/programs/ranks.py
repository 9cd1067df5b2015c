"""A plan as one process of a launcher sees it: its layers, its samples, and whom it talks to."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from hpgo.base.errors import ArgumentError
from hpgo.base.wording import as_whole

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hpgo.programs.stages import Stage


@dataclass(frozen=True, slots=True)
class RankPlan:
    """What one process of a launcher does."""

    rank: int
    stage: int
    replica: int
    layers: tuple[str, ...]
    rows: range
    """Its samples of each micro-batch."""
    micro_batches: int
    in_flight: int
    peers: tuple[int, ...]
    """Ranks that run the same stage, this one included: the data-parallel group."""
    receives: tuple[tuple[int, range], ...]
    """Ranks of the stage before, with the rows of a micro-batch that come from each."""
    sends: tuple[tuple[int, range], ...]
    """Ranks of the next stage, with the rows of a micro-batch that go to each."""


def rank_plan(stages: Sequence[Stage], rank: int, *, micro_batch_size: int, micro_batches: int) -> RankPlan:
    """The part of `rank`, which runs on the device of that number; `Plan.for_rank` describes it."""
    number = as_whole(rank)
    if number is None:
        raise ArgumentError(f"rank is {rank!r}", "give a whole number, as the launcher's RANK")
    rank = number
    index = next((index for index, stage in enumerate(stages) if rank in stage.devices), None)
    if index is None:
        raise ArgumentError(
            f"the plan leaves rank {rank} idle: it uses {sum(stage.replicas for stage in stages)} devices",
            "start only the ranks that `plan.stages` names, or let idle ones wait",
        )
    stage = stages[index]
    rows = _rows(stage, micro_batch_size)[rank]
    before, after = stages[max(0, index - 1) : index], stages[index + 1 : index + 2]
    return RankPlan(
        rank=rank,
        stage=index,
        replica=stage.devices.index(rank),
        layers=stage.layers,
        rows=rows,
        micro_batches=micro_batches,
        in_flight=stage.in_flight,
        peers=stage.devices,
        receives=_overlaps(rows, before, micro_batch_size),
        sends=_overlaps(rows, after, micro_batch_size),
    )


def _rows(stage: Stage, micro_batch_size: int) -> dict[int, range]:
    """The samples of a micro-batch that each device of `stage` gets."""
    base, longer = divmod(micro_batch_size, stage.replicas)
    ends = [replica * base + min(replica, longer) for replica in range(stage.replicas + 1)]
    return {device: range(*ends) for device, ends in zip(stage.devices, pairwise(ends), strict=True)}


def _overlaps(rows: range, others: Sequence[Stage], micro_batch_size: int) -> tuple[tuple[int, range], ...]:
    """The devices of `others`, one stage or none, with the part of `rows` that each has."""
    shared = (
        (device, range(max(rows.start, theirs.start), min(rows.stop, theirs.stop)))
        for stage in others
        for device, theirs in _rows(stage, micro_batch_size).items()
    )
    return tuple((device, common) for device, common in shared if common)
