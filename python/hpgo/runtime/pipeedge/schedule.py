"""Which rank takes which layers in `pipeedge-run`: as its options say, or as `hpgo partition` finds best."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from hpgo.base.messages import pluralize, shorten
from hpgo.errors import ArgumentError
from hpgo.planning.chain.search import partition_files
from hpgo.programs.costs import Costs
from hpgo.programs.program import program
from hpgo.programs.schedule import schedule
from hpgo.runtime.quantization import BITS
from hpgo.runtime.runnable import bits_behind

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hpgo.programs.program import Program

_FILES = "give `-sm`, `-sdt` and `-sd`, PipeEdge's three files, or the layers of each stage: `-pt 1,24,25,48`"


@dataclass(frozen=True, slots=True)
class ScheduleOptions:
    """What the options say."""

    world: int
    model: str
    layers: int
    """Of the model."""
    micro_batch_size: int
    partition: tuple[int, ...] | None
    quantize: tuple[int, ...] | None
    rank_order: tuple[int, ...] | None
    hosts: tuple[str, ...] | None
    files: tuple[str, str, str] | None
    """Of models, of types of devices, of devices."""
    data_rank: int | None
    """None is rank 0, or the rank of the first stage if rank 0 has a later one."""
    hold_samples_per_s: float | None


@dataclass(frozen=True, slots=True)
class Assignment:
    """Who takes what, the same for all ranks."""

    model: str
    micro_batch_size: int
    stages: tuple[tuple[int, int], ...]
    """First and last layer of each, from 1."""
    ranks: tuple[int, ...]
    """Of each stage."""
    bits: tuple[int, ...]
    """Behind each stage but the last; 0 leaves numbers as they are."""
    data_rank: int
    world: int
    hold_samples_per_s: float | None = None
    forward_s: tuple[float, ...] = ()
    transfer_s: tuple[float, ...] = ()
    """As `hpgo partition` has planned it; nothing where it has not."""
    remarks: tuple[str, ...] = ()

    def to_json(self) -> str:
        """For `from_json`."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Assignment:
        """What `to_json` wrote."""
        facts: dict[str, Any] = json.loads(text)
        facts = {name: tuple(value) if isinstance(value, list) else value for name, value in facts.items()}
        return cls(**facts | {"stages": tuple(tuple(stage) for stage in facts["stages"])})

    def program(self, layers: Sequence[str]) -> Program:
        """It as a program of the model's layers."""
        return program(
            schedule("forward_only", ranks=len(self.stages), micro_batches=1),
            [(layers[first - 1 : last], [rank]) for (first, last), rank in zip(self.stages, self.ranks, strict=True)],
            micro_batch_size=self.micro_batch_size,
            global_batch_size=self.micro_batch_size,
            nodes=(1,) * self.world,
            costs=Costs(forward_s=self.forward_s, transfer_s=self.transfer_s) if self.forward_s else None,
        )


def decide(asked: ScheduleOptions) -> Assignment:
    """Who takes what.

    Raises ArgumentError for options that don't go together or make no sense, what `partition_files` raises, and
    ArgumentError for a host that no rank is.

    >>> two = ScheduleOptions(2, "m", 48, 8, (1, 24, 25, 48), (8, 0), None, None, None, None, None)
    >>> decide(two).stages, decide(two).ranks, decide(two).bits
    (((1, 24), (25, 48)), (0, 1), (8,))
    """
    if asked.partition is not None:
        found = _as_said(asked)
    elif asked.quantize is not None or asked.rank_order is not None:
        option = "-q" if asked.quantize is not None else "-r"
        raise ArgumentError(f"`{option}` is for stages that `-pt` gives", "give `-pt`, too, or leave it out")
    elif asked.world == 1:
        found = _of(asked, ((1, asked.layers),), (0,), (0,))
    elif asked.files is None:
        raise ArgumentError(f"nobody says how {asked.world} ranks share {asked.layers} layers", _FILES)
    else:
        found = _planned(asked, asked.files)
    _check_ranks(found)
    return found


def _of(
    asked: ScheduleOptions, stages: tuple[tuple[int, int], ...], ranks: tuple[int, ...], bits: Sequence[int]
) -> Assignment:
    """`bits` may have one for the last stage, behind which nothing is sent in few."""
    given = tuple(bits)[: len(stages) - 1] if len(bits) == len(stages) else tuple(bits)
    return Assignment(
        model=asked.model,
        micro_batch_size=asked.micro_batch_size,
        stages=stages,
        ranks=ranks,
        bits=bits_behind(None, len(stages), given),
        data_rank=_data_rank(asked, ranks),
        world=asked.world,
        hold_samples_per_s=asked.hold_samples_per_s,
    )


def _as_said(asked: ScheduleOptions) -> Assignment:
    numbers = asked.partition or ()
    said = ",".join(map(str, numbers))
    if not numbers or len(numbers) % 2:
        raise ArgumentError(f"`-pt {said}` has {pluralize(len(numbers), 'number')}", "give two for each stage")
    stages = tuple(zip(numbers[::2], numbers[1::2], strict=True))
    begins = [1, *(last + 1 for _, last in stages)]
    for at, (first, last) in enumerate(stages):
        if first != begins[at] or last < first:
            raise ArgumentError(
                f"`-pt {said}`: stage {at} has the layers {first} to {last}, and begins with layer {begins[at]}",
                "stages follow each other without gaps, the first one from layer 1",
            )
    if stages[-1][1] != asked.layers:
        raise ArgumentError(
            f"`-pt {said}` ends with layer {stages[-1][1]}, and `{asked.model}` has {asked.layers}",
            "the last stage ends with the last layer",
        )
    if len(stages) > asked.world:
        raise ArgumentError(f"`-pt {said}` has {len(stages)} stages for {pluralize(asked.world, 'rank')}", "start more")
    ranks = asked.rank_order or tuple(range(len(stages)))
    if len(ranks) != len(stages):
        raise ArgumentError(
            f"`-r` names {pluralize(len(ranks), 'rank')} for {pluralize(len(stages), 'stage')}",
            "name one for each stage",
        )
    return _of(asked, stages, ranks, asked.quantize or (0,) * len(stages))


def _planned(asked: ScheduleOptions, files: tuple[str, str, str]) -> Assignment:
    if asked.hosts is not None and len(asked.hosts) != asked.world:
        raise ArgumentError(
            f"`-H` names {pluralize(len(asked.hosts), 'host')}, and there are {pluralize(asked.world, 'rank')}",
            "name that of each rank, in order",
        )
    models, device_types, devices = files
    rate = asked.hold_samples_per_s
    plan = partition_files(
        models,
        device_types,
        devices,
        model=asked.model,
        batch_size=asked.micro_batch_size,
        objective="throughput" if rate is None else "bits",
        samples_per_s=rate,
        bits=() if rate is None else BITS,
    )
    if not plan.stages or plan.stages[-1].last != asked.layers:
        has = plan.stages[-1].last if plan.stages else 0
        raise ArgumentError(
            f"{models} has {pluralize(has, 'layer')} for `{asked.model}`, which has {asked.layers}",
            "measure it: `hpgo profile … --by quarter --format pipeedge`",
        )
    ranks = tuple(_rank_of(stage.hosts[0], asked) for stage in plan.stages)
    bits = bits_behind([hop.bits for hop in plan.hops[1:-1]], len(plan.stages), None)
    return Assignment(
        model=asked.model,
        micro_batch_size=asked.micro_batch_size,
        stages=tuple((stage.first, stage.last) for stage in plan.stages),
        ranks=ranks,
        bits=bits,
        data_rank=_data_rank(asked, ranks),
        world=asked.world,
        hold_samples_per_s=asked.hold_samples_per_s,
        forward_s=tuple(stage.compute_s for stage in plan.stages),
        transfer_s=tuple(hop.seconds for hop in plan.hops[1:-1]),
        remarks=plan.remarks,
    )


def _data_rank(asked: ScheduleOptions, ranks: tuple[int, ...]) -> int:
    if asked.data_rank is not None:
        return asked.data_rank
    return ranks[0] if 0 in ranks[1:] else 0


def _rank_of(host: str, asked: ScheduleOptions) -> int:
    """The rank that a host of the plan is."""
    if asked.hosts is not None:
        if host in asked.hosts:
            return asked.hosts.index(host)
        raise ArgumentError(
            f"the plan gives layers to `{shorten(host)}`, which `-H` doesn't name", "name it, or leave it out of `-sd`"
        )
    if host.isdecimal():
        return int(host)
    raise ArgumentError(
        f"the plan gives layers to `{shorten(host)}`, and nobody says which rank that is",
        "name the host of each rank, in order: `-H mb-0,rcc-0`",
    )


def _check_ranks(found: Assignment) -> None:
    for rank in (*found.ranks, found.data_rank):
        if not 0 <= rank < found.world:
            raise ArgumentError(f"there is no rank {rank} among {found.world}", "ranks are counted from 0")
    if len(set(found.ranks)) != len(found.ranks):
        raise ArgumentError(
            f"a rank has two stages: {', '.join(map(str, found.ranks))}",
            "give each stage a rank of its own",
            code="duplicate",
        )
    if found.data_rank in found.ranks[1:]:
        raise ArgumentError(
            f"rank {found.data_rank} has stage {found.ranks.index(found.data_rank)}, and shall hold the data",
            "`-D` names the rank of the first stage, or one without a stage",
        )
