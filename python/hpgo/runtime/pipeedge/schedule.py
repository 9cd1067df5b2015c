"""Assignment of layers to ranks in `pipeedge-run`: by its options, or by `hpgo partition`."""

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
    """Options of the schedule."""

    world: int
    model: str
    layers: int
    """Number of layers of the model."""
    micro_batch_size: int
    partition: tuple[int, ...] | None
    quantize: tuple[int, ...] | None
    rank_order: tuple[int, ...] | None
    hosts: tuple[str, ...] | None
    files: tuple[str, str, str] | None
    """Files of models, device types and devices."""
    data_rank: int | None
    """Rank of the data. None: rank 0, or the rank of the first stage if rank 0 has a later stage."""
    hold_samples_per_s: float | None


@dataclass(frozen=True, slots=True)
class Assignment:
    """Assignment of layers to ranks, which is the same on all ranks."""

    model: str
    micro_batch_size: int
    stages: tuple[tuple[int, int], ...]
    """First and last layer of each stage, counted from 1."""
    ranks: tuple[int, ...]
    """Rank of each stage."""
    bits: tuple[int, ...]
    """Bit width after each stage but the last; 0 sends numbers unchanged."""
    data_rank: int
    world: int
    hold_samples_per_s: float | None = None
    forward_s: tuple[float, ...] = ()
    transfer_s: tuple[float, ...] = ()
    """Times that `hpgo partition` estimated; empty if the options gave the stages."""
    remarks: tuple[str, ...] = ()

    def to_json(self) -> str:
        """Return JSON for `from_json`."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Assignment:
        """Return the assignment that `to_json` has written."""
        facts: dict[str, Any] = json.loads(text)
        # JSON has no tuples, so convert the lists back.
        facts = {name: tuple(value) if isinstance(value, list) else value for name, value in facts.items()}
        return cls(**facts | {"stages": tuple(tuple(stage) for stage in facts["stages"])})

    def program(self, layers: Sequence[str]) -> Program:
        """Return the assignment as a program of the model's layers."""
        return program(
            schedule("forward_only", ranks=len(self.stages), micro_batches=1),
            [(layers[first - 1 : last], [rank]) for (first, last), rank in zip(self.stages, self.ranks, strict=True)],
            pipeline_micro_batch_size=self.micro_batch_size,
            global_batch_size=self.micro_batch_size,
            nodes=(1,) * self.world,
            costs=Costs(forward_s=self.forward_s, transfer_s=self.transfer_s) if self.forward_s else None,
        )


def decide(options: ScheduleOptions) -> Assignment:
    """Return the assignment of layers to ranks.

    Raises ArgumentError for options that contradict each other or are out of range, and for a host that is no rank.
    Also raises the errors of `partition_files`.

    >>> two = ScheduleOptions(2, "m", 48, 8, (1, 24, 25, 48), (8, 0), None, None, None, None, None)
    >>> decide(two).stages, decide(two).ranks, decide(two).bits
    (((1, 24), (25, 48)), (0, 1), (8,))
    """
    if options.partition is not None:
        found = _from_options(options)
    elif options.quantize is not None or options.rank_order is not None:
        option = "-q" if options.quantize is not None else "-r"
        raise ArgumentError(f"`{option}` is given, but `-pt` is not", f"add `-pt`, or leave out `{option}`")
    elif options.world == 1:
        found = _assignment(options, ((1, options.layers),), (0,), (0,))
    elif options.files is None:
        raise ArgumentError(f"the assignment of {options.layers} layers to {options.world} ranks is not given", _FILES)
    else:
        found = _planned(options, options.files)
    _check_ranks(found)
    return found


def _assignment(
    options: ScheduleOptions, stages: tuple[tuple[int, int], ...], ranks: tuple[int, ...], bits: Sequence[int]
) -> Assignment:
    """Build an assignment. `bits` may have an entry for the last stage, which is ignored, as in PipeEdge."""
    given = tuple(bits)[: len(stages) - 1] if len(bits) == len(stages) else tuple(bits)
    return Assignment(
        model=options.model,
        micro_batch_size=options.micro_batch_size,
        stages=stages,
        ranks=ranks,
        bits=bits_behind(None, len(stages), given),
        data_rank=_data_rank(options, ranks),
        world=options.world,
        hold_samples_per_s=options.hold_samples_per_s,
    )


def _from_options(options: ScheduleOptions) -> Assignment:
    numbers = options.partition or ()
    text = ",".join(map(str, numbers))
    if not numbers or len(numbers) % 2:
        raise ArgumentError(f"`-pt {text}` has {pluralize(len(numbers), 'number')}", "give two for each stage")
    stages = tuple(zip(numbers[::2], numbers[1::2], strict=True))
    begins = [1, *(last + 1 for _, last in stages)]
    for at, (first, last) in enumerate(stages):
        if first != begins[at] or last < first:
            raise ArgumentError(
                f"`-pt {text}`: stage {at} has the layers {first} to {last}, but must begin with layer {begins[at]}",
                "list stages without gaps, starting at layer 1",
            )
    if stages[-1][1] != options.layers:
        raise ArgumentError(
            f"`-pt {text}` ends with layer {stages[-1][1]}, but `{options.model}` has {options.layers}",
            "end the last stage with the last layer",
        )
    if len(stages) > options.world:
        raise ArgumentError(
            f"`-pt {text}` has {len(stages)} stages for {pluralize(options.world, 'rank')}", "start more ranks"
        )
    ranks = options.rank_order or tuple(range(len(stages)))
    if len(ranks) != len(stages):
        raise ArgumentError(
            f"`-r` names {pluralize(len(ranks), 'rank')} for {pluralize(len(stages), 'stage')}",
            "name one for each stage",
        )
    return _assignment(options, stages, ranks, options.quantize or (0,) * len(stages))


def _planned(options: ScheduleOptions, files: tuple[str, str, str]) -> Assignment:
    if options.hosts is not None and len(options.hosts) != options.world:
        raise ArgumentError(
            f"`-H` names {pluralize(len(options.hosts), 'host')}, but there are {pluralize(options.world, 'rank')}",
            "name the host of each rank, in order",
        )
    models, device_types, devices = files
    rate = options.hold_samples_per_s
    plan = partition_files(
        models,
        device_types,
        devices,
        model=options.model,
        batch_size=options.micro_batch_size,
        objective="throughput" if rate is None else "bits",
        samples_per_s=rate,
        bits=() if rate is None else BITS,
    )
    # The file is of another model if the plan does not end with the model's last layer.
    if not plan.stages or plan.stages[-1].last != options.layers:
        has = plan.stages[-1].last if plan.stages else 0
        raise ArgumentError(
            f"{models} has {pluralize(has, 'layer')} for `{options.model}`, but the model has {options.layers}",
            "measure it: `hpgo profile … --by quarter --format pipeedge`",
        )
    ranks = tuple(_rank_of(stage.hosts[0], options) for stage in plan.stages)
    bits = bits_behind([hop.bits for hop in plan.hops[1:-1]], len(plan.stages), None)
    return Assignment(
        model=options.model,
        micro_batch_size=options.micro_batch_size,
        stages=tuple((stage.first, stage.last) for stage in plan.stages),
        ranks=ranks,
        bits=bits,
        data_rank=_data_rank(options, ranks),
        world=options.world,
        hold_samples_per_s=options.hold_samples_per_s,
        forward_s=tuple(stage.compute_s for stage in plan.stages),
        transfer_s=tuple(hop.seconds for hop in plan.hops[1:-1]),
        remarks=plan.remarks,
    )


def _data_rank(options: ScheduleOptions, ranks: tuple[int, ...]) -> int:
    if options.data_rank is not None:
        return options.data_rank
    # The data must be on the first stage or on a rank without a stage, so rank 0 can't hold it in a later stage.
    return ranks[0] if 0 in ranks[1:] else 0


def _rank_of(host: str, options: ScheduleOptions) -> int:
    """Return the rank on a host of the plan."""
    if options.hosts is not None:
        if host in options.hosts:
            return options.hosts.index(host)
        raise ArgumentError(
            f"the plan gives layers to `{shorten(host)}`, which `-H` doesn't name", "name it, or leave it out of `-sd`"
        )
    # Without `-H`, PipeEdge's files name hosts by their ranks.
    if host.isdecimal():
        return int(host)
    raise ArgumentError(
        f"the plan gives layers to `{shorten(host)}`, but its rank is unknown",
        "name the host of each rank, in order: `-H mb-0,rcc-0`",
    )


def _check_ranks(found: Assignment) -> None:
    for rank in (*found.ranks, found.data_rank):
        if not 0 <= rank < found.world:
            raise ArgumentError(f"there is no rank {rank} among {found.world}", f"choose from 0 to {found.world - 1}")
    if len(set(found.ranks)) != len(found.ranks):
        raise ArgumentError(
            f"a rank has two stages: {', '.join(map(str, found.ranks))}",
            "give each stage a separate rank",
            code="duplicate",
        )
    if found.data_rank in found.ranks[1:]:
        raise ArgumentError(
            f"the data rank is {found.data_rank}, but this rank has stage {found.ranks.index(found.data_rank)}",
            "set `-D` to the rank of the first stage, or to one without a stage",
        )
