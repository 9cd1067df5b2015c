"""The one record of what runs: stages on devices, their orders, what moves between them, and what that costs.

A schedule knows ranks that run actions of stages; a plan knows devices, replicas and rows. A `Program` says which is
which: a rank of the schedule stands for all devices that hold its stages, and each of them runs its actions on rows of
its own. The simulator, pictures, exporters and every process of a job read programs.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from hpgo import _core
from hpgo.base.checks import MOST_GPUS, check_int, check_is, check_list, check_text, device_number
from hpgo.base.documents import Section, hinted, parse, read_text, record, write_text
from hpgo.base.messages import as_whole, exactly, safe_repr, spans_of
from hpgo.base.validated import Record, check_fields
from hpgo.errors import ArgumentError
from hpgo.programs.costs import Costs, StageBytes
from hpgo.programs.ranks import GradientSum, ProgramStage, RankProgram, even_rows, rank_actions, rank_stages
from hpgo.programs.schedule import Schedule
from hpgo.programs.stages import BoundaryTensor

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable, Sequence

_VERSION = 1
_SHOWN = ("model", "cluster", "device_types")
"""Fields that files say only where they are known."""


@dataclass(frozen=True, slots=True)
class Program(Record):
    """What runs in each step: `hpgo.program` and `Plan.program` make it, and check that it can run."""

    schedule: Schedule
    """Orders of actions. One of its ranks stands for all devices that hold its stages."""
    stages: tuple[ProgramStage, ...]
    """One for each stage of the schedule, the second chain of bidirectional ones included."""
    micro_batch_size: int
    global_batch_size: int
    nodes: tuple[int, ...]
    """Devices of each machine; they are numbered machine by machine from 0, idle ones included."""
    recompute: bool = False
    """Whether backward passes compute the activations of their stage anew."""
    shard_optimizer: bool = False
    """Whether the replicas of a stage share its optimizer state (ZeRO stage 1)."""
    gpus_per_device: int = 1
    """How many GPUs each device stands for, those that share each layer."""
    costs: Costs | None = None
    """What the stages take and hold, where that is known."""
    model: str = ""
    """What its layers are of, and the next two what runs them: for people, where that is known."""
    cluster: str = ""
    device_types: tuple[str, ...] = ()
    """Of the devices of each machine."""

    def __post_init__(self) -> None:
        check_fields(self)
        _check(self)

    @property
    def world_size(self) -> int:
        """Devices, and so processes, idle ones included."""
        return sum(self.nodes)

    @property
    def micro_batches(self) -> int:
        """Micro-batches in a step, over all chains."""
        return self.schedule.total_micro_batches

    @property
    def loss_weight(self) -> float:
        """Weight of one sample's loss in the mean over the global batch."""
        return 1 / self.global_batch_size

    @property
    def row(self) -> str:
        """What a row of a picture of it stands for: a `stage`, or a `group` of devices that hold the same stages."""
        return "stage" if self.schedule.stages == self.schedule.ranks else "group"

    @property
    def devices_of_rank(self) -> tuple[int, ...]:
        """For each rank of the schedule, how many devices hold its stages."""
        stage_of = dict(zip(self.schedule.rank_of_stage, self.stages, strict=True))
        return tuple(len(stage_of[rank].devices) for rank in range(self.schedule.ranks))

    @property
    def title(self) -> str:
        """What runs on what, in a few words; nothing where neither is known."""
        return " on ".join(name for name in (self.model, self.cluster) if name)

    @property
    def row_names(self) -> tuple[str, ...]:
        """For each rank of the schedule, what it stands for: its number, its devices and its layers.

        >>> import hpgo
        >>> orders = hpgo.schedule("1f1b", ranks=2, micro_batches=2)
        >>> hpgo.program(orders, [(["a"], [0, 1]), (["b"], [2])], micro_batch_size=2, global_batch_size=4).row_names
        ('stage 0 (2 devices, a)', 'stage 1 (b)')
        """
        of_rank: dict[int, list[ProgramStage]] = {}
        for rank, stage in zip(self.schedule.rank_of_stage, self.stages, strict=True):
            of_rank.setdefault(rank, []).append(stage)
        rows = [stage.layers for stage in self.stages]
        said = dict(zip(rows, spans_of(rows), strict=True))
        kinds = [kind for kind, count in zip(self.device_types, self.nodes, strict=False) for _ in range(count)]
        names = []
        for rank in range(self.schedule.ranks):
            count = len(of_rank[rank][0].devices)
            here = sorted({kinds[device] for device in of_rank[rank][0].devices}) if kinds else []
            kind = " and ".join(here) or "devices"
            devices = [f"{count} × {kind}" if here else f"{count} {kind}"] if count > 1 else here
            layers = [", ".join(dict.fromkeys(said[stage.layers] for stage in of_rank[rank]))]
            names.append(f"{self.row} {rank} ({', '.join([*devices, *layers])})")
        return tuple(names)

    @property
    def sums(self) -> tuple[GradientSum, ...]:
        """Which layers' gradients are summed over which ranks, in the order of the stages.

        >>> import hpgo
        >>> orders = hpgo.schedule("gpipe", ranks=2, micro_batches=4)
        >>> two = hpgo.program(orders, [(["a", "b"], [0, 1]), (["c"], [2])], micro_batch_size=4, global_batch_size=16)
        >>> [(one.layers, one.ranks) for one in two.sums]
        [(('a', 'b'), (0, 1)), (('c',), (2,))]
        """
        devices: dict[str, set[int]] = {}
        for stage in self.stages:
            for layer in stage.layers:
                devices.setdefault(layer, set()).update(stage.devices)
        layers: dict[tuple[int, ...], list[str]] = {}
        for layer, ranks in devices.items():
            layers.setdefault(tuple(sorted(ranks)), []).append(layer)
        return tuple(GradientSum(tuple(summed), ranks) for ranks, summed in layers.items())

    def for_rank(self, rank: int) -> RankProgram:
        """What the process with this rank does; idle ranks get a part without stages and actions.

        Raises ArgumentError for a rank that there isn't.

        >>> import hpgo
        >>> orders = hpgo.schedule("1f1b", ranks=2, micro_batches=2)
        >>> two = hpgo.program(orders, [(["a"], [0, 1]), (["b"], [2])], micro_batch_size=3, global_batch_size=6)
        >>> mine = two.for_rank(1)
        >>> [(action.kind, action.micro_batch) for action in mine.actions]
        [('F', 0), ('F', 1), ('B', 0), ('B', 1)]
        >>> mine.actions[0].sends[0].peer, mine.actions[0].sends[0].rows
        (2, range(2, 3))
        """
        number = as_whole(rank)
        if number is None:
            raise ArgumentError(f"rank is {safe_repr(rank)}", "give a whole number, as the launcher's RANK")
        if not 0 <= number < self.world_size:
            raise ArgumentError(
                f"there is no rank {exactly(number)}: the program is for {self.world_size} devices",
                f"start ranks 0 to {self.world_size - 1}",
            )
        machine, local_rank = 0, number
        while local_rank >= self.nodes[machine]:
            local_rank -= self.nodes[machine]
            machine += 1
        chain = self.schedule.chain_length
        stages = rank_stages(number, self.stages, chain)
        sums = self.sums
        lasts = self.stages[chain - 1 :: chain]
        return RankProgram(
            rank=number,
            world_size=self.world_size,
            machine=machine,
            local_rank=local_rank,
            schedule=self.schedule.name,
            total_stages=len(self.stages),
            micro_batch_size=self.micro_batch_size,
            micro_batches=self.micro_batches,
            global_batch_size=self.global_batch_size,
            loss_weight=self.loss_weight,
            recompute=self.recompute,
            shard_optimizer=self.shard_optimizer,
            gpus_per_device=self.gpus_per_device,
            stages=stages,
            actions=rank_actions(stages, self.schedule),
            max_in_flight=self.schedule.peak_in_flight[self.schedule.rank_of_stage[stages[0].stage]] if stages else 0,
            sums=tuple(one for one in sums if number in one.ranks),
            groups=tuple(dict.fromkeys(one.ranks for one in sums if len(one.ranks) > 1)),
            loss_ranks=tuple(sorted({device for stage in lasts for device in stage.devices})),
        )

    def to_json(self) -> str:
        """The program as versioned JSON, described in `docs/program.schema.json`; `Program.from_json` reads it back."""
        stages = [
            {
                "layers": stage.layers,
                "devices": stage.devices,
                "rows": [[rows.start, rows.stop] for rows in stage.rows],
                "boundary_tensors": [asdict(crossing) for crossing in stage.boundary_tensors],
            }
            for stage in self.stages
        ]
        orders = self.schedule
        document = {
            "format": "hpgo.program",
            "version": _VERSION,
            "schedule": {
                "name": orders.name,
                "pace": orders.pace,
                "chain_length": orders.chain_length,
                "micro_batches": orders.micro_batches,
                "rank_of_stage": orders.rank_of_stage,
                "weight_versions": orders.weight_versions,
                "orders": orders.to_text().splitlines(),
            },
            "micro_batch_size": self.micro_batch_size,
            "global_batch_size": self.global_batch_size,
            "nodes": self.nodes,
            "recompute": self.recompute,
            "shard_optimizer": self.shard_optimizer,
            "gpus_per_device": self.gpus_per_device,
            "stages": stages,
            "costs": None if self.costs is None else _plain(asdict(self.costs)),
        }
        document |= {name: value for name in _SHOWN if (value := getattr(self, name))}
        return json.dumps(document, indent=2, ensure_ascii=False)

    @classmethod
    def from_json(cls, text: str, *, source: str = "the program") -> Program:
        """Reads what `to_json` wrote. Raises ArgumentError that names `source` and what is wrong with it."""
        with hinted("make it again with `Program.save`"):
            check_text("the source of a program", source)
            top = Section(parse(check_text(source, text), source, ArgumentError), source, ArgumentError)
            if top.get("format", None) != "hpgo.program" or top.get("version", None) != _VERSION:
                top.fail(f"is not a program of version {_VERSION}", code="wrong_kind_of_file")
            costs = None if top.get("costs") is None else _read_costs(top.within("costs"))
            return top.build(_of_document, record(_Document, top, optional=_SHOWN), costs)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the program as JSON. Raises ArgumentError if the file can't be written."""
        write_text(path, self.to_json() + "\n", ArgumentError)

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Program:
        """Reads a program that `save` wrote. Raises ArgumentError naming the file."""
        return cls.from_json(read_text(path, ArgumentError), source=str(path))


def program(
    schedule: Schedule,
    stages: Sequence[tuple[Iterable[str], Iterable[int]]],
    *,
    micro_batch_size: int,
    global_batch_size: int,
    nodes: Sequence[int] | None = None,
    boundary_tensors: Sequence[Sequence[BoundaryTensor]] | None = None,
    recompute: bool = False,
    shard_optimizer: bool = False,
    gpus_per_device: int = 1,
    costs: Costs | None = None,
) -> Program:
    """Puts the stages of a schedule on devices.

    Args:
        schedule: the orders, of `hpgo.schedule` say.
        stages: for each stage of the schedule, the second chain of bidirectional ones included, the ids of its layers
            and its devices. A device may hold several stages, if one rank of the schedule runs them.
        micro_batch_size: samples of a micro-batch, over all replicas of a stage.
        global_batch_size: samples of a step: those of all micro-batches.
        nodes: devices of each node; None is one node that ends with the last device named.
        boundary_tensors: for each stage what it gives to the next; None is the output of its last layer.
        recompute: whether backward passes compute the activations of their stage anew.
        shard_optimizer: whether the replicas of a stage share its optimizer state (ZeRO stage 1).
        gpus_per_device: how many GPUs each device stands for, those that share each layer.
        costs: seconds and bytes, for `hpgo.simulate`.

    Raises ArgumentError for what can't run: another number of stages, layers named twice in a chain, a device on two
    ranks of the schedule, a micro-batch with fewer samples than a stage has replicas.

    >>> import hpgo
    >>> orders = hpgo.schedule("1f1b", ranks=2, micro_batches=4)
    >>> two = hpgo.program(orders, [(["a", "b"], [0, 1, 2]), (["c"], [3])], micro_batch_size=7, global_batch_size=28)
    >>> two.stages[0].rows
    (range(0, 3), range(3, 5), range(5, 7))
    """
    check_is("the schedule", schedule, Schedule, "make one, with `hpgo.schedule` say")
    micro_batch_size = check_int("micro_batch_size", micro_batch_size)
    parts = [_layers_and_devices(number, stage) for number, stage in enumerate(check_list("stages", stages))]
    chain = schedule.chain_length
    if boundary_tensors is None:
        given = [() if (at + 1) % chain == 0 else (BoundaryTensor(layers[-1]),) for at, (layers, _) in enumerate(parts)]
    else:
        given = [
            tuple(check_list("boundary_tensors", crossing))
            for crossing in check_list("boundary_tensors", boundary_tensors)
        ]
        given += [()] * (len(parts) - len(given))  # a chain's last stage may be left out
    used = 1 + max((device for _, devices in parts for device in devices), default=-1)
    return Program(
        schedule=schedule,
        stages=tuple(
            ProgramStage(layers, devices, even_rows(micro_batch_size, len(devices)), crossing)
            for (layers, devices), crossing in zip(parts, given, strict=False)
        ),
        micro_batch_size=micro_batch_size,
        global_batch_size=check_int("global_batch_size", global_batch_size),
        nodes=(used,) if nodes is None else tuple(check_int("nodes", one) for one in check_list("nodes", nodes)),
        recompute=recompute,
        shard_optimizer=shard_optimizer,
        gpus_per_device=gpus_per_device,
        costs=costs,
    )


def _check(given: Program) -> None:
    """Raises ArgumentError for what can't run."""
    orders, stages = given.schedule, given.stages
    check_int("gpus_per_device", given.gpus_per_device, most=MOST_GPUS)
    if len(stages) != orders.stages:
        raise ArgumentError(
            f"`{orders.name}` runs {orders.stages} stages, but layers and devices are given for {len(stages)}",
            "give each stage its layers and its devices, those of a second chain too",
        )
    if given.micro_batch_size * given.micro_batches != given.global_batch_size:
        raise ArgumentError(
            f"{given.micro_batches} micro-batches of {given.micro_batch_size} are"
            f" {given.micro_batches * given.micro_batch_size} samples, not {given.global_batch_size}",
            "build the schedule for global_batch_size / micro_batch_size micro-batches",
        )
    rank_of_device: dict[int, int] = {}
    for number, stage in enumerate(stages):
        _check_stage(number, stage, given)
        for device in stage.devices:
            rank = rank_of_device.setdefault(device, orders.rank_of_stage[number])
            if rank != orders.rank_of_stage[number]:
                raise ArgumentError(
                    f"device {device} holds stage {number}, which rank {orders.rank_of_stage[number]} of"
                    f" `{orders.name}` runs, beside a stage of rank {rank}",
                    "a device may hold several stages only if one rank of the schedule runs them",
                )
    chains = [stages[begin : begin + orders.chain_length] for begin in range(0, len(stages), orders.chain_length)]
    for chain in chains:
        layers = [layer for stage in chain for layer in stage.layers]
        if len(set(layers)) < len(layers):
            twice = next(layer for at, layer in enumerate(layers) if layer in layers[:at])
            raise ArgumentError(
                f"layer {safe_repr(twice)} is in two stages",
                "give each layer to one stage of a chain",
                code="duplicate",
            )
        if set(layers) != {layer for stage in chains[0] for layer in stage.layers}:
            raise ArgumentError("the chains hold different layers", "each is a copy of the whole model")
        for number, stage in enumerate(chain):
            before = (
                {layer for earlier in chain[: number + 1] for layer in earlier.layers} if stage.boundary_tensors else ()
            )
            for crossing in stage.boundary_tensors:
                if crossing.layer not in before or number == len(chain) - 1:
                    raise ArgumentError(
                        f"stage {number} can't send on the output of {safe_repr(crossing.layer)}",
                        "only layers of its own and earlier stages cross the cut behind it, and none the last stage's",
                    )


def _check_stage(number: int, stage: ProgramStage, given: Program) -> None:
    if not stage.layers or not stage.devices:
        raise ArgumentError(f"stage {number} has no {'devices' if stage.layers else 'layers'}", "give it some")
    if len(set(stage.devices)) < len(stage.devices):
        raise ArgumentError(f"stage {number} names a device twice", "name each once", code="duplicate")
    wrong = next((device for device in stage.devices if not 0 <= device < given.world_size), None)
    if wrong is not None:
        raise ArgumentError(
            f"stage {number} is on device {wrong}, but machines of {given.world_size} devices are given",
            "devices are numbered machine by machine from 0",
        )
    ends = [0, *(rows.stop for rows in stage.rows)]
    if [rows.start for rows in stage.rows] != ends[:-1] or ends[-1] != given.micro_batch_size or not all(stage.rows):
        raise ArgumentError(
            f"stage {number}: the rows of its replicas don't make a micro-batch of {given.micro_batch_size}",
            "give each replica the next rows, at least one",
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
        raise ArgumentError(f"stage {number} has no {'devices' if layers else 'layers'}", "give it some")
    return tuple(layers), tuple(devices)


# --- Reading ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _StageRow:
    """A stage as JSON has it."""

    layers: tuple[str, ...]
    devices: tuple[int, ...]
    rows: tuple[tuple[int, ...], ...]
    boundary_tensors: tuple[BoundaryTensor, ...]


@dataclass(frozen=True, slots=True)
class _Orders:
    """A schedule as JSON has it."""

    name: str
    pace: str
    chain_length: int
    micro_batches: tuple[tuple[int, ...], ...]
    rank_of_stage: tuple[int, ...]
    weight_versions: tuple[int, ...]
    orders: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Document:
    """A program as JSON has it, but for its costs."""

    micro_batch_size: int
    global_batch_size: int
    nodes: tuple[int, ...]
    recompute: bool
    shard_optimizer: bool
    gpus_per_device: int
    schedule: _Orders
    stages: tuple[_StageRow, ...]
    model: str = ""
    cluster: str = ""
    device_types: tuple[str, ...] = ()


def _of_document(document: _Document, costs: Costs | None) -> Program:
    given = document.schedule
    orders = Schedule.from_text("\n".join(given.orders), name=given.name)
    read = (orders.chain_length, orders.micro_batches, orders.rank_of_stage)
    if read != (given.chain_length, given.micro_batches, given.rank_of_stage):
        raise ArgumentError("`orders` of the schedule are for other stages or micro-batches than it names")
    paced = replace(orders, pace=given.pace, weight_versions=given.weight_versions)
    _core.validate_schedule(paced)
    stages = []
    for number, stage in enumerate(document.stages):
        if not all(len(rows) == 2 for rows in stage.rows):
            raise ArgumentError(f"stage {number}: `rows` are pairs of a first row and the one behind the last")
        stages.append(
            ProgramStage(
                stage.layers, stage.devices, tuple(range(*rows) for rows in stage.rows), stage.boundary_tensors
            )
        )
    return Program(
        schedule=paced,
        stages=tuple(stages),
        micro_batch_size=document.micro_batch_size,
        global_batch_size=document.global_batch_size,
        nodes=document.nodes,
        recompute=document.recompute,
        shard_optimizer=document.shard_optimizer,
        gpus_per_device=document.gpus_per_device,
        costs=costs,
        **{name: getattr(document, name) for name in _SHOWN},
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
    """A number, tuples of them, or None."""

    def check(value: object) -> Any:
        if isinstance(value, list):
            return tuple(map(check, value))
        if isinstance(value, bool) or not isinstance(value, int | float):
            section.wrong(key, "a number or a list of numbers", value)
        return value

    value = section.get(key)
    return None if value is None else check(value)


def _plain(value: Any) -> Any:
    """Numbers, lists and mappings for JSON, of tuples and arrays."""
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(inner) for inner in value]
    return value.tolist() if hasattr(value, "tolist") else value
