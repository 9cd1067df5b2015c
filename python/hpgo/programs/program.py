"""A program: stages on devices, with their schedule, messages and costs.

A schedule has ranks that run actions of stages. A plan has devices, replicas and rows of a batch. A `Program` connects
them: a rank of the schedule stands for all devices that hold its stages. Each of these devices runs the rank's actions
on its own rows. The simulator, pictures, exporters and every process of a job read programs.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from hpgo import _core
from hpgo.base.checks import MAX_GPUS, check_flag, check_int, check_is, check_list, check_text, device_number
from hpgo.base.documents import Section, hinted, parse, read_text, record, write_text
from hpgo.base.messages import as_whole, exactly, pluralize, safe_repr, spans_of
from hpgo.base.validated import Record, check_fields
from hpgo.errors import ArgumentError
from hpgo.programs.costs import Costs, StageBytes
from hpgo.programs.ranks import GradientSum, ProgramStage, RankProgram, even_rows, rank_actions, rank_stages, rows_of
from hpgo.programs.schedule import Schedule
from hpgo.programs.stages import BoundaryTensor, recompute_by_stage

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable, Sequence

_VERSION = 1
_OPTIONAL = ("model", "cluster", "device_types")
"""Fields that the JSON file has only if they are known."""


@dataclass(frozen=True, slots=True)
class Program(Record):
    """The computation of one training or inference step.

    `hpgo.program` and `Plan.program` create it and check that it can run.
    """

    schedule: Schedule
    """Actions of each rank. One of its ranks stands for all devices that hold its stages."""
    stages: tuple[ProgramStage, ...]
    """One entry for each stage of the schedule, including the second chain of bidirectional schedules."""
    pipeline_micro_batch_size: int
    global_batch_size: int
    nodes: tuple[int, ...]
    """Number of devices on each node. Devices are numbered node by node from 0, including idle ones."""
    shard_optimizer: bool = False
    """Whether the replicas of a stage shard its optimizer state (ZeRO stage 1)."""
    gpus_per_device: int = 1
    """Number of GPUs that each device stands for. They shard each layer."""
    costs: Costs | None = None
    """Times and memory of the stages. None if unknown."""
    model: str = ""
    """Name of the model, for titles. Empty if unknown, as the next two."""
    cluster: str = ""
    # Type of the devices on each node, by node.
    device_types: tuple[str, ...] = ()
    zero_stage: int = 0
    """ZeRO stage: what the replicas of a stage shard. `hpgo.planning.problem.MemoryModel` lists the values."""

    def __post_init__(self) -> None:
        check_fields(self)
        # Each field implies the other, so that all readers find what they look for in either of them.
        if self.shard_optimizer and self.zero_stage == 0:
            object.__setattr__(self, "zero_stage", 1)
        elif self.zero_stage:
            object.__setattr__(self, "shard_optimizer", True)
        _check(self)

    @property
    def world_size(self) -> int:
        """Number of devices, and so of processes, including idle ones."""
        return sum(self.nodes)

    @property
    def recompute(self) -> bool:
        """Whether some stage recomputes its activations in its backward passes."""
        return any(stage.recompute for stage in self.stages)

    @property
    def micro_batches(self) -> int:
        """Number of micro-batches in a step, over all chains."""
        return self.schedule.total_micro_batches

    @property
    def loss_weight(self) -> float:
        """Weight of one sample's loss in the mean over the global batch."""
        return 1 / self.global_batch_size

    @property
    def row(self) -> str:
        """Meaning of a row in a picture: a `stage`, or a `group` of devices that hold the same stages."""
        return "stage" if self.schedule.stages == self.schedule.ranks else "group"

    @property
    def devices_of_rank(self) -> tuple[int, ...]:
        """Number of devices that hold the stages of each rank of the schedule, by rank."""
        stage_of = dict(zip(self.schedule.rank_of_stage, self.stages, strict=True))
        return tuple(len(stage_of[rank].devices) for rank in range(self.schedule.ranks))

    @property
    def title(self) -> str:
        """Model and cluster in a few words. Empty if neither is known."""
        return " on ".join(name for name in (self.model, self.cluster) if name)

    @property
    def row_names(self) -> tuple[str, ...]:
        """Description of each rank of the schedule, by rank: its number, its devices and its layers.

        >>> import hpgo
        >>> schedule = hpgo.schedule("1f1b", ranks=2, micro_batches=2)
        >>> stages = [(["a"], [0, 1]), (["b"], [2])]
        >>> hpgo.program(schedule, stages, pipeline_micro_batch_size=2, global_batch_size=4).row_names
        ('stage 0 (2 devices, a)', 'stage 1 (b)')
        """
        of_rank: dict[int, list[ProgramStage]] = {}
        for rank, stage in zip(self.schedule.rank_of_stage, self.stages, strict=True):
            of_rank.setdefault(rank, []).append(stage)
        rows = [stage.layers for stage in self.stages]
        spans = dict(zip(rows, spans_of(rows), strict=True))
        kinds = [kind for kind, count in zip(self.device_types, self.nodes, strict=False) for _ in range(count)]
        names = []
        for rank in range(self.schedule.ranks):
            count = len(of_rank[rank][0].devices)
            here = sorted({kinds[device] for device in of_rank[rank][0].devices}) if kinds else []
            kind = " and ".join(here) or "devices"
            devices = [f"{count} × {kind}" if here else f"{count} {kind}"] if count > 1 else here
            # With two chains, a rank may hold the same layers twice. Name them once.
            layers = [", ".join(dict.fromkeys(spans[stage.layers] for stage in of_rank[rank]))]
            names.append(f"{self.row} {rank} ({', '.join([*devices, *layers])})")
        return tuple(names)

    @property
    def sums(self) -> tuple[GradientSum, ...]:
        """Groups of layers, and the ranks over which their gradients are reduced, in the order of the stages.

        >>> import hpgo
        >>> schedule = hpgo.schedule("gpipe", ranks=2, micro_batches=4)
        >>> stages = [(["a", "b"], [0, 1]), (["c"], [2])]
        >>> two = hpgo.program(schedule, stages, pipeline_micro_batch_size=4, global_batch_size=16)
        >>> [(one.layers, one.ranks) for one in two.sums]
        [(('a', 'b'), (0, 1)), (('c',), (2,))]
        """
        devices: dict[str, set[int]] = {}
        for stage in self.stages:
            for layer in stage.layers:
                devices.setdefault(layer, set()).update(stage.devices)
        # Layers with the same ranks share one reduction, so that the runtime starts fewer and larger collectives.
        layers: dict[tuple[int, ...], list[str]] = {}
        for layer, ranks in devices.items():
            layers.setdefault(tuple(sorted(ranks)), []).append(layer)
        return tuple(GradientSum(tuple(summed), ranks) for ranks, summed in layers.items())

    def for_rank(self, rank: int) -> RankProgram:
        """Return the part of the program that the process with this rank runs. Idle ranks get no stages and no actions.

        Raises ArgumentError for a rank outside 0 to `world_size` - 1.

        >>> import hpgo
        >>> schedule = hpgo.schedule("1f1b", ranks=2, micro_batches=2)
        >>> stages = [(["a"], [0, 1]), (["b"], [2])]
        >>> two = hpgo.program(schedule, stages, pipeline_micro_batch_size=3, global_batch_size=6)
        >>> mine = two.for_rank(1)
        >>> [(action.kind, action.micro_batch) for action in mine.actions]
        [('F', 0), ('F', 1), ('B', 0), ('B', 1)]
        >>> mine.actions[0].sends[0].peer, mine.actions[0].sends[0].rows
        (2, range(2, 3))
        """
        number = as_whole(rank)
        if number is None:
            raise ArgumentError(f"rank is {safe_repr(rank)}, but must be a whole number", "pass the launcher's RANK")
        if not 0 <= number < self.world_size:
            raise ArgumentError(
                f"rank is {exactly(number)}, but the program is for {self.world_size} devices",
                f"start ranks 0 to {self.world_size - 1}",
            )
        node, local_rank = 0, number
        while local_rank >= self.nodes[node]:
            local_rank -= self.nodes[node]
            node += 1
        chain = self.schedule.stages_per_pipeline
        stages = rank_stages(number, self.stages, chain)
        sums = self.sums
        # Each chain has a last stage with a loss. All their ranks take part in the mean loss.
        lasts = self.stages[chain - 1 :: chain]
        return RankProgram(
            rank=number,
            world_size=self.world_size,
            node=node,
            local_rank=local_rank,
            schedule=self.schedule.name,
            total_stages=len(self.stages),
            pipeline_micro_batch_size=self.pipeline_micro_batch_size,
            micro_batches=self.micro_batches,
            global_batch_size=self.global_batch_size,
            loss_weight=self.loss_weight,
            shard_optimizer=self.shard_optimizer,
            gpus_per_device=self.gpus_per_device,
            stages=stages,
            actions=rank_actions(stages, self.schedule),
            # All stages of a device belong to one rank of the schedule, so the first one finds it.
            max_in_flight=self.schedule.peak_in_flight[self.schedule.rank_of_stage[stages[0].stage]] if stages else 0,
            sums=tuple(one for one in sums if number in one.ranks),
            # Take the groups of all reductions, not only the rank's own: every rank must create them in the same order.
            groups=tuple(dict.fromkeys(one.ranks for one in sums if len(one.ranks) > 1)),
            loss_ranks=tuple(sorted({device for stage in lasts for device in stage.devices})),
        )

    def to_json(self) -> str:
        """Return the program as versioned JSON, described in `docs/program.schema.json`.

        `Program.from_json` reads it.
        """
        stages = [
            {
                "layers": stage.layers,
                "devices": stage.devices,
                "rows": [[rows.start, rows.stop] for rows in stage.rows],
                "boundary_tensors": [asdict(crossing) for crossing in stage.boundary_tensors],
                "recompute": stage.recompute,
            }
            for stage in self.stages
        ]
        schedule = self.schedule
        document = {
            "format": "hpgo.program",
            "version": _VERSION,
            "schedule": {
                "name": schedule.name,
                "synchronization": schedule.synchronization,
                "stages_per_pipeline": schedule.stages_per_pipeline,
                "micro_batches": schedule.micro_batches,
                "rank_of_stage": schedule.rank_of_stage,
                "weight_versions": schedule.weight_versions,
                "action_lists": schedule.to_text().splitlines(),
            },
            "pipeline_micro_batch_size": self.pipeline_micro_batch_size,
            "global_batch_size": self.global_batch_size,
            "nodes": self.nodes,
            "shard_optimizer": self.shard_optimizer,
            "gpus_per_device": self.gpus_per_device,
            "stages": stages,
            "costs": None if self.costs is None else _plain(asdict(self.costs)),
        }
        document |= {name: value for name in _OPTIONAL if (value := getattr(self, name))}
        # `shard_optimizer` tells ZeRO stages 0 and 1 apart.
        document |= {"zero_stage": self.zero_stage} if self.zero_stage > 1 else {}
        return json.dumps(document, indent=2, ensure_ascii=False)

    @classmethod
    def from_json(cls, text: str, *, source: str = "the program") -> Program:
        """Read the text that `to_json` wrote. Raise ArgumentError with `source` and the fault if it is invalid."""
        with hinted("write the file with `Program.save`"):
            check_text("the source of a program", source)
            document = recompute_by_stage(parse(check_text(source, text), source, ArgumentError))
            top = Section(document, source, ArgumentError)
            # Check format and version first: a file of another kind should not be reported as a program with a missing
            # key.
            if top.get("format", None) != "hpgo.program" or top.get("version", None) != _VERSION:
                top.fail(f"is not a program of version {_VERSION}", code="wrong_kind_of_file")
            costs = None if top.get("costs") is None else _read_costs(top.within("costs"))
            return top.build(
                _of_document, record(_Document, top, optional=(*_OPTIONAL, "recompute", "zero_stage")), costs
            )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the program to a JSON file. Raise ArgumentError if the file can't be written."""
        write_text(path, self.to_json() + "\n", ArgumentError)

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Program:
        """Read a program that `save` wrote. Raise ArgumentError with the name of the file if it is invalid."""
        return cls.from_json(read_text(path, ArgumentError), source=str(path))


def program(
    schedule: Schedule,
    stages: Sequence[tuple[Iterable[str], Iterable[int]]],
    *,
    pipeline_micro_batch_size: int,
    global_batch_size: int,
    nodes: Sequence[int] | None = None,
    boundary_tensors: Sequence[Sequence[BoundaryTensor]] | None = None,
    recompute: bool | Sequence[bool] = False,
    shard_optimizer: bool = False,
    gpus_per_device: int = 1,
    costs: Costs | None = None,
    samples_by_replica: Sequence[Sequence[int]] = (),
    zero_stage: int = 0,
) -> Program:
    """Create a program: assign the stages of a schedule to devices.

    Args:
        schedule: the actions of each rank, for instance from `hpgo.schedule`.
        stages: the ids of the layers and the devices of each stage of the schedule, including the second chain of
            bidirectional schedules. A device may hold several stages if one rank of the schedule runs them.
        pipeline_micro_batch_size: samples of a micro-batch, over all replicas of a stage.
        global_batch_size: samples of a step, over all micro-batches.
        nodes: number of devices on each node. None means one node that ends with the last device in `stages`.
        boundary_tensors: tensors that each stage sends to the next. None means the output of its last layer.
        recompute: whether backward passes recompute the activations of their stage: one value for all stages, or one
            for each.
        shard_optimizer: whether the replicas of a stage shard its optimizer state (ZeRO stage 1).
        gpus_per_device: number of GPUs that each device stands for. They shard each layer.
        costs: seconds and bytes, for `hpgo.simulate`.
        samples_by_replica: samples of a micro-batch on each device of each stage. A stage without them, or any stage if
            it is empty, divides its micro-batch evenly.
        zero_stage: what the replicas of a stage shard: nothing (0), the optimizer state (1, as with
            `shard_optimizer`), also the gradients (2), or also the weights (3). `hpgo run` runs 0 and 1.

    Raises ArgumentError for a program that can't run: a wrong number of stages, a layer twice in a chain, a device on
    two ranks of the schedule, or a micro-batch with fewer samples than a stage has replicas.

    >>> import hpgo
    >>> schedule = hpgo.schedule("1f1b", ranks=2, micro_batches=4)
    >>> stages = [(["a", "b"], [0, 1, 2]), (["c"], [3])]
    >>> two = hpgo.program(schedule, stages, pipeline_micro_batch_size=7, global_batch_size=28)
    >>> two.stages[0].rows
    (range(0, 3), range(3, 5), range(5, 7))
    """
    check_is("the schedule", schedule, Schedule, "make one with `hpgo.schedule`")
    pipeline_micro_batch_size = check_int("pipeline_micro_batch_size", pipeline_micro_batch_size)
    parts = [_layers_and_devices(number, stage) for number, stage in enumerate(check_list("stages", stages))]
    chain = schedule.stages_per_pipeline
    if boundary_tensors is None:
        given = [() if (at + 1) % chain == 0 else (BoundaryTensor(layers[-1]),) for at, (layers, _) in enumerate(parts)]
    else:
        given = [
            tuple(check_list("boundary_tensors", crossing))
            for crossing in check_list("boundary_tensors", boundary_tensors)
        ]
        # Callers list the boundaries between stages, of which there is one less than stages.
        given += [()] * (len(parts) - len(given))  # a chain's last stage may be left out
    recomputing = _each("recompute", recompute, len(parts))
    used = 1 + max((device for _, devices in parts for device in devices), default=-1)
    return Program(
        schedule=schedule,
        stages=tuple(
            ProgramStage(
                layers,
                devices,
                rows_of(samples) if samples else even_rows(pipeline_micro_batch_size, len(devices)),
                crossing,
                again,
            )
            for (layers, devices), crossing, again, samples in zip(
                parts, given, recomputing, _samples(samples_by_replica, len(parts)), strict=False
            )
        ),
        pipeline_micro_batch_size=pipeline_micro_batch_size,
        global_batch_size=check_int("global_batch_size", global_batch_size),
        nodes=(used,) if nodes is None else tuple(check_int("nodes", one) for one in check_list("nodes", nodes)),
        shard_optimizer=shard_optimizer,
        gpus_per_device=gpus_per_device,
        costs=costs,
        zero_stage=check_int("zero_stage", zero_stage, minimum=0, maximum=3),
    )


def _samples(given: object, count: int) -> list[tuple[int, ...]]:
    """Return the samples of each replica of `count` stages, none where a stage divides its micro-batch evenly."""
    name = "samples_by_replica"
    listed = [tuple(check_int(name, one) for one in check_list(name, samples)) for samples in check_list(name, given)]
    if listed and len(listed) != count:
        raise ArgumentError(
            f"{name} has {pluralize(len(listed), 'list')}, but there are {pluralize(count, 'stage')}",
            "give one list for each stage, or none",
        )
    return listed or [()] * count


def _each(name: str, given: object, count: int) -> list[bool]:
    """Return a flag for each of `count` stages, from one flag for all of them or a list."""
    if isinstance(given, bool):
        return [given] * count
    flags = check_list(f"values of {name}", given)
    for flag in flags:
        check_flag(name, flag)
    if len(flags) != count:
        raise ArgumentError(
            f"{name} has {pluralize(len(flags), 'value')}, but there are {pluralize(count, 'stage')}",
            "give one value for all stages, or one for each",
        )
    return list(flags)


def _check(given: Program) -> None:
    """Raise ArgumentError if the program can't run."""
    schedule, stages = given.schedule, given.stages
    check_int("gpus_per_device", given.gpus_per_device, maximum=MAX_GPUS)
    if len(stages) != schedule.stages:
        raise ArgumentError(
            f"`{schedule.name}` runs {schedule.stages} stages, but layers and devices are given for {len(stages)}",
            "give layers and devices for each stage, including a second chain",
        )
    if given.pipeline_micro_batch_size * given.micro_batches != given.global_batch_size:
        raise ArgumentError(
            f"{given.micro_batches} micro-batches of {given.pipeline_micro_batch_size} are"
            f" {given.micro_batches * given.pipeline_micro_batch_size} samples, but global_batch_size is"
            f" {given.global_batch_size}",
            "build the schedule for global_batch_size / pipeline_micro_batch_size micro-batches",
        )
    rank_of_device: dict[int, int] = {}
    for number, stage in enumerate(stages):
        _check_stage(number, stage, given)
        for device in stage.devices:
            rank = rank_of_device.setdefault(device, schedule.rank_of_stage[number])
            if rank != schedule.rank_of_stage[number]:
                raise ArgumentError(
                    f"device {device} holds stage {number}, which rank {schedule.rank_of_stage[number]} of"
                    f" `{schedule.name}` runs, beside a stage of rank {rank}",
                    "put stages of different ranks on different devices",
                )
    chains = [
        stages[begin : begin + schedule.stages_per_pipeline]
        for begin in range(0, len(stages), schedule.stages_per_pipeline)
    ]
    for chain in chains:
        layers = [layer for stage in chain for layer in stage.layers]
        if len(set(layers)) < len(layers):
            twice = next(layer for at, layer in enumerate(layers) if layer in layers[:at])
            raise ArgumentError(
                f"layer {safe_repr(twice)} is in two stages",
                "give each layer to one stage of a chain",
                code="duplicate",
            )
        # Chains may cut the model at different places, but each must hold the same layers.
        if set(layers) != {layer for stage in chains[0] for layer in stage.layers}:
            raise ArgumentError(
                "the chains hold different layers, but each must be a copy of the whole model",
                "give all chains the same layers",
            )
        for number, stage in enumerate(chain):
            # A tensor of an earlier stage may cross several cuts. Each stage on its path sends it on.
            before = (
                {layer for earlier in chain[: number + 1] for layer in earlier.layers} if stage.boundary_tensors else ()
            )
            for crossing in stage.boundary_tensors:
                if crossing.layer not in before or number == len(chain) - 1:
                    raise ArgumentError(
                        f"stage {number} can't send the output of {safe_repr(crossing.layer)}",
                        "send outputs of this stage or of earlier ones, and none from the last stage",
                    )


def _check_stage(number: int, stage: ProgramStage, given: Program) -> None:
    if not stage.layers or not stage.devices:
        raise ArgumentError(f"stage {number} has no {'devices' if stage.layers else 'layers'}", "give it at least one")
    if len(set(stage.devices)) < len(stage.devices):
        raise ArgumentError(f"stage {number} names a device twice", "name each device once", code="duplicate")
    wrong = next((device for device in stage.devices if not 0 <= device < given.world_size), None)
    if wrong is not None:
        raise ArgumentError(
            f"stage {number} is on device {wrong}, but the nodes have {given.world_size} devices",
            f"choose devices from 0 to {given.world_size - 1}",
        )
    # Consecutive rows make the rows that two replicas share a single range, which one message can carry.
    ends = [0, *(rows.stop for rows in stage.rows)]
    if (
        [rows.start for rows in stage.rows] != ends[:-1]
        or ends[-1] != given.pipeline_micro_batch_size
        or not all(stage.rows)
    ):
        raise ArgumentError(
            f"stage {number}: the rows of its replicas don't add up to a micro-batch of"
            f" {given.pipeline_micro_batch_size}",
            "give each replica the next rows, and at least one",
        )
    if len(stage.rows) != len(stage.devices):
        raise ArgumentError(f"stage {number} has {len(stage.devices)} devices, but rows for {len(stage.rows)}")


def _layers_and_devices(number: int, stage: object) -> tuple[tuple[str, ...], tuple[int, ...]]:
    if not isinstance(stage, tuple | list) or len(stage) != 2:
        raise ArgumentError(f"stage {number} is {safe_repr(stage)}", "give each stage its layers and its devices")
    layers = check_list(f"the layers of stage {number}", stage[0])
    for layer in layers:
        if not isinstance(layer, str) or not layer:
            raise ArgumentError(
                f"stage {number} names layer {safe_repr(layer)}", "layers are named by their ids", code="unknown_name"
            )
    devices = [device_number(number, device) for device in check_list(f"the devices of stage {number}", stage[1])]
    if not layers or not devices:
        raise ArgumentError(f"stage {number} has no {'devices' if layers else 'layers'}", "give it at least one")
    return tuple(layers), tuple(devices)


# --- Reading ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _StageRow:
    """A stage in the JSON file."""

    layers: tuple[str, ...]
    devices: tuple[int, ...]
    rows: tuple[tuple[int, ...], ...]
    boundary_tensors: tuple[BoundaryTensor, ...]
    recompute: bool = False


@dataclass(frozen=True, slots=True)
class _ScheduleRow:
    """A schedule in the JSON file."""

    name: str
    synchronization: str
    stages_per_pipeline: int
    micro_batches: tuple[tuple[int, ...], ...]
    rank_of_stage: tuple[int, ...]
    weight_versions: tuple[int, ...]
    action_lists: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Document:
    """A program in the JSON file, without its costs."""

    pipeline_micro_batch_size: int
    global_batch_size: int
    nodes: tuple[int, ...]
    shard_optimizer: bool
    gpus_per_device: int
    schedule: _ScheduleRow
    stages: tuple[_StageRow, ...]
    model: str = ""
    cluster: str = ""
    device_types: tuple[str, ...] = ()
    zero_stage: int = 0


def _of_document(document: _Document, costs: Costs | None) -> Program:
    given = document.schedule
    # The text of the actions determines chains and placement. Files repeat them for other readers, so check that both
    # agree.
    schedule = Schedule.from_text("\n".join(given.action_lists), name=given.name)
    read = (schedule.stages_per_pipeline, schedule.micro_batches, schedule.rank_of_stage)
    if read != (given.stages_per_pipeline, given.micro_batches, given.rank_of_stage):
        raise ArgumentError("`action_lists` of the schedule have other stages or micro-batches than its other fields")
    paced = replace(schedule, synchronization=given.synchronization, weight_versions=given.weight_versions)
    # Text does not state the synchronization, and the copy above is unchecked. So validate it once more.
    _core.validate_schedule(paced)
    stages = []
    for number, stage in enumerate(document.stages):
        if not all(len(rows) == 2 for rows in stage.rows):
            raise ArgumentError(f"stage {number}: `rows` must be pairs of a first row and the row after the last")
        stages.append(
            ProgramStage(
                stage.layers,
                stage.devices,
                tuple(range(*rows) for rows in stage.rows),
                stage.boundary_tensors,
                stage.recompute,
            )
        )
    return Program(
        schedule=paced,
        stages=tuple(stages),
        pipeline_micro_batch_size=document.pipeline_micro_batch_size,
        global_batch_size=document.global_batch_size,
        nodes=document.nodes,
        shard_optimizer=document.shard_optimizer,
        gpus_per_device=document.gpus_per_device,
        costs=costs,
        zero_stage=check_int("zero_stage", document.zero_stage, minimum=0, maximum=3),
        **{name: getattr(document, name) for name in _OPTIONAL},
    )


def _read_costs(section: Section) -> Costs:
    values = {field.name: _numbers(section, field.name) for field in fields(Costs) if field.name != "memory"}
    held = None
    if section.get("memory") is not None:
        memory = section.within("memory")
        held = StageBytes(**{field.name: _numbers(memory, field.name) for field in fields(StageBytes)})
        memory.done()
    section.done()
    return Costs(**values, memory=held)


def _numbers(section: Section, key: str) -> Any:
    """Return a number, nested tuples of numbers, or None."""

    def check(value: object) -> Any:
        if isinstance(value, list):
            return tuple(map(check, value))
        # In Python, True is an integer. In a file it is a mistake.
        if isinstance(value, bool) or not isinstance(value, int | float):
            section.wrong(key, "a number or a list of numbers", value)
        return value

    value = section.get(key)
    return None if value is None else check(value)


def _plain(value: Any) -> Any:
    """Convert tuples and arrays to lists, for JSON."""
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(inner) for inner in value]
    # Costs may hold numpy arrays and numbers, which `json` can't write. Avoid importing numpy to test for them.
    return value.tolist() if hasattr(value, "tolist") else value
