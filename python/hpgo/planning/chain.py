"""Uneven hosts in a row: who takes which slice of a model, so that the slowest stage or transfer is short.

`partition` takes PipeEdge's three files, or a `Profile` and a `Cluster` of mixed devices. Both become the same
question: a chain of layers, groups of hosts that are alike, and the links between the groups.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal, TypedDict, Unpack, overload

from hpgo import _core
from hpgo.base.checks import whole
from hpgo.base.errors import ArgumentError, ClusterError, InfeasibleError
from hpgo.base.quoting import in_yaml
from hpgo.base.wording import near, shorten
from hpgo.machine.cluster import Cluster, Device
from hpgo.model.batches import at_batch
from hpgo.model.formats import pipeedge
from hpgo.model.profile import Profile
from hpgo.programs.costs import Costs
from hpgo.programs.orders import schedule
from hpgo.programs.program import program
from hpgo.programs.stages import Crossing

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterable, Sequence

    from hpgo.model.formats.pipeedge import End, Links
    from hpgo.programs.program import Program

    Path = str | os.PathLike[str]
    Progress = Callable[[float, float], object]

Objective = Literal["throughput", "latency", "hosts", "bits"]
Units = Literal["pipeedge", "si"]


@dataclass(frozen=True, slots=True)
class ChainStage:
    """Consecutive layers on one host, or on several of one type that take turns. Times are for one batch."""

    hosts: tuple[str, ...]
    device_type: str
    first: int
    """Number of the first layer, from 1."""
    last: int
    """Number of the last layer, inclusive."""
    compute_s: float
    """On one of the hosts."""
    interval_s: float
    """Time between batches that the stage keeps up: compute over hosts."""
    memory_bytes: float
    """Layers and buffers, on each host."""
    host_memory_bytes: float
    """What the host has; it must be more."""


@dataclass(frozen=True, slots=True)
class ChainHop:
    """What moves into the first stage, between two stages, or out of the last. Times are for one batch."""

    bits: int
    """Of each value."""
    bytes: float
    seconds: float
    interval_s: float
    """Time between batches that the hop keeps up: stages of several hosts have as many ports."""


@dataclass(frozen=True, slots=True)
class ChainPlan:
    """Who takes which layers, what that costs, and how good it is.

    A model of no layers has no stages.
    """

    model: str
    batch_size: int
    objective: str
    stages: tuple[ChainStage, ...]
    hops: tuple[ChainHop, ...]
    """One more than stages: into the first, between neighbours, out of the last."""
    interval_s: float
    """Time between batches: the longest of all stages and hops."""
    latency_s: float
    """Time of one batch through the empty pipeline."""
    value: float
    """What the objective counts: interval or latency in seconds, hosts, bits lost."""
    lower_bound: float
    """No plan has a smaller value."""
    units: str
    """What the files' `MB` and `Mbps` were taken for: `pipeedge` (2²⁰) or `si` (10⁶)."""
    unused: tuple[str, ...] = ()
    """Hosts without a stage."""
    remarks: tuple[str, ...] = ()
    """What a reader of the files should know: skipped types, repeated blocks."""

    @property
    def throughput(self) -> float:
        """Samples per second."""
        return self.batch_size / self.interval_s if self.interval_s else float("inf")

    @property
    def gap(self) -> float:
        """At most this share is the value above the best possible; 0 is proven optimal."""
        if self.value <= self.lower_bound * (1 + 1e-8):
            return 0.0
        return self.value / self.lower_bound - 1 if self.lower_bound else float("inf")

    @property
    def bottleneck(self) -> str:
        """The stage or hop that sets the interval, in words.

        >>> from hpgo.model.profile import Profile
        >>> from hpgo.machine.cluster import Cluster, Device
        >>> toy = Profile.chain("toy", batch_size=1, forward_s=[1, 2], backward_s=[0, 0],
        ...                     activation_bytes=[8, 8], parameter_bytes=[4, 4])
        >>> partition(toy, Cluster.of(nodes=2, devices_per_node=1, intra_gbit_s=1, inter_gbit_s=1)).bottleneck
        'stage 2 (machine1)'
        """
        for number, stage in enumerate(self.stages, 1):
            if stage.interval_s == self.interval_s:
                return f"stage {number} ({', '.join(stage.hosts)})"
        for number, hop in enumerate(self.hops):
            if hop.interval_s == self.interval_s:
                return f"the transfer {self._where(number)}"
        return "nothing: the model has no layers"

    def utilisation(self, stage: ChainStage) -> float:
        """Share of the time that the stage's hosts compute, from 0 to 1."""
        return stage.interval_s / self.interval_s if self.interval_s else 0.0

    def slack_s(self, part: ChainStage | ChainHop) -> float:
        """How much longer the stage or hop could take between batches before the plan slows down."""
        slack_s = self.interval_s - part.interval_s
        return slack_s if slack_s > 1e-9 * self.interval_s else 0.0  # below that it is rounding

    def pipeedge(self) -> str:
        """The schedule as PipeEdge's runtime reads it: `- host: [first, last]`, in stage order.

        Raises ArgumentError if hosts share a stage, which PipeEdge has no words for.
        """
        for number, stage in enumerate(self.stages, 1):
            if len(stage.hosts) > 1:
                raise ArgumentError(
                    f"stage {number} runs on {len(stage.hosts)} hosts, which PipeEdge's schedule can't say",
                    "leave `max_replicas` at 1, or take `--json`",
                )
        lines = [f"- {in_yaml(stage.hosts[0])}: [{stage.first}, {stage.last}]\n" for stage in self.stages]
        return "".join(lines) or "[]\n"

    def program(self, *, batches: int) -> Program:
        """Forward passes of so many batches through the stages, one after the other; device d is the d-th host used.

        Raises ArgumentError if hosts share a stage: they take turns batch by batch, and replicas of a program split
        each batch; and for a model of no layers.

        >>> from hpgo.model.profile import Profile
        >>> from hpgo.machine.cluster import Cluster
        >>> toy = Profile.chain("toy", batch_size=1, forward_s=[1, 2], backward_s=[0, 0],
        ...                     activation_bytes=[8, 8], parameter_bytes=[4, 4])
        >>> pair = Cluster.of(nodes=2, devices_per_node=1, intra_gbit_s=1, inter_gbit_s=1)
        >>> partition(toy, pair).program(batches=3).for_rank(1).stages[0].layers
        ('2',)
        """
        for number, stage in enumerate(self.stages, 1):
            if len(stage.hosts) > 1:
                raise ArgumentError(
                    f"stage {number} runs on {len(stage.hosts)} hosts that take turns, but replicas split each batch",
                    "leave `max_replicas` at 1",
                )
        if not self.stages:
            raise ArgumentError("the model has no layers, so nothing runs", "partition a model with layers")
        orders = schedule("forward_only", ranks=len(self.stages), micro_batches=batches)
        layers = [tuple(str(layer) for layer in range(stage.first, stage.last + 1)) for stage in self.stages]
        hops = self.hops[1:-1]
        return program(
            orders,
            [(ids, [device]) for device, ids in enumerate(layers)],
            micro_batch_size=self.batch_size,
            global_batch_size=self.batch_size * orders.total_micro_batches,
            machines=(1,) * len(self.stages),
            crossings=[[Crossing(ids[-1], hop.bytes)] for ids, hop in zip(layers, hops, strict=False)],
            costs=Costs(
                forward_s=tuple(stage.compute_s for stage in self.stages),
                transfer_s=tuple(hop.interval_s for hop in hops),
                latency_s=tuple(hop.seconds - hop.interval_s for hop in hops),
            ),
        )

    def to_json(self) -> str:
        """Everything, for machines."""
        facts = asdict(self) | {
            "throughput": self.throughput,
            "gap": self.gap,
            "bottleneck": self.bottleneck,
        }
        for stage, row in zip(self.stages, facts["stages"], strict=True):
            row |= {"utilisation": self.utilisation(stage), "slack_s": self.slack_s(stage)}
        # JSON has no infinity: an interval of 0 or a bound of 0 makes one.
        known = {key: None if value == float("inf") else value for key, value in facts.items()}
        return json.dumps(known, indent=2, ensure_ascii=False)

    def _where(self, number: int) -> str:
        if number == 0:
            return "of the input"
        if number == len(self.stages):
            return "of the result"
        return f"from stage {number} to stage {number + 1}"


@dataclass(frozen=True, slots=True)
class _Hop:
    bytes_per_s: float
    latency_s: float


@dataclass(frozen=True, slots=True)
class _HostType:
    """Hosts that are alike: what the native module calls a host type."""

    name: str
    hosts: int
    memory_bytes: float
    time_s: list[float]
    may_run: list[bool]


@dataclass(frozen=True, slots=True)
class _Chain:
    layer_bytes: list[float]
    cut_bytes: list[float]
    buffers_in: int
    buffers_out: int
    types: list[_HostType]
    links: list[list[_Hop]]
    input: list[_Hop]
    output: list[_Hop]
    max_replicas: int
    bits: list[int]


@dataclass(frozen=True, slots=True)
class _Group:
    """Hosts of one type that nothing tells apart."""

    device_type: str
    hosts: tuple[str, ...]
    memory_bytes: float
    time_s: list[float]
    port_bytes_per_s: float
    machine: str | None = None
    """Inside a machine of several devices, links differ from those between machines."""


@dataclass(frozen=True, slots=True)
class _Task:
    """The question before groups are told apart by links, pins and exclusions."""

    model: str
    layer_bytes: list[float]
    cut_bytes: list[float]
    numbers: list[int]
    """Layers of the model before each position."""
    groups: list[_Group]
    names: frozenset[str]
    """Types and hosts that links, pins and exclusions may name, used or not."""
    link: Callable[[_Group, _Group], _Hop]
    bits: int
    remarks: list[str] = field(default_factory=list)


class _Options(TypedDict, total=False):
    """The arguments of `partition` that go with files and with profiles."""

    dtype: str
    buffers_in: int
    buffers_out: int
    objective: Objective
    throughput: float | None
    links: Path | None
    pins: Sequence[str]
    exclude: Sequence[str]
    max_replicas: int
    bits: Sequence[int]
    time_limit_s: float | None
    progress: Progress | None


@overload
def partition(
    models: Path,
    device_types: Path,
    devices: Path,
    *,
    model: str,
    batch_size: int = ...,
    interpolate: bool = ...,
    units: Units = ...,
    ignore_unknown_types: bool = ...,
    **options: Unpack[_Options],
) -> ChainPlan: ...


@overload
def partition(
    models: Profile, device_types: Cluster, *, batch_size: int | None = ..., **options: Unpack[_Options]
) -> ChainPlan: ...


def partition(
    models: Path | Profile,
    device_types: Path | Cluster,
    devices: Path | None = None,
    *,
    model: str | None = None,
    batch_size: int | None = None,
    dtype: str = "torch.float32",
    buffers_in: int = 2,
    buffers_out: int = 2,
    objective: Objective = "throughput",
    throughput: float | None = None,
    links: Path | None = None,
    pins: Sequence[str] = (),
    exclude: Sequence[str] = (),
    max_replicas: int = 1,
    bits: Sequence[int] = (),
    interpolate: bool = False,
    units: Units = "pipeedge",
    ignore_unknown_types: bool = False,
    time_limit_s: float | None = 10.0,
    progress: Progress | None = None,
) -> ChainPlan:
    """The best way to spread a chain of layers over uneven hosts (docs/partition.md explains everything).

    Takes PipeEdge's files and the name of a `model` in them, or a `Profile` and a `Cluster`; of a profile, the forward
    times count. `batch_size` defaults to 8, or to the profile's largest.

    `objective`: the shortest interval between batches (`throughput`), the shortest time of one batch (`latency`), the
    fewest `hosts`, or the fewest `bits` taken from the values on the edges. With `throughput`, in samples per second,
    every plan must reach that. `bits` lists the widths that edges may use beside that of `dtype`.

    `pins` are like `mb-0=1-12` (these layers run on this host, or on hosts of this type), `exclude` like `mb-3` or
    `mb-3=1-4,9`. `links` names a file of pairwise links. Up to `max_replicas` hosts of a type may share a stage.
    `interpolate` allows batch sizes that were not measured. `ignore_unknown_types` skips hosts of types without a
    profile. `progress` is called about ten times a second with the best value so far, infinite before there is
    one, and the bound.

    Raises ProfileError, ClusterError and ArgumentError for input that makes no sense; InfeasibleError, which says what
    is short.
    """
    if isinstance(models, Profile):
        if not isinstance(device_types, Cluster) or devices is not None or model is not None:
            raise ArgumentError("a `Profile` goes with a `Cluster` and nothing else", "partition(profile, cluster)")
        size = whole("batch_size", models.batch_sizes[-1] if batch_size is None else batch_size)
        units = "si"  # what profiles and clusters are written in
        task = _from_profile(models, device_types, size, dtype)
    else:
        if isinstance(device_types, Cluster) or devices is None or model is None:
            raise ArgumentError(
                "PipeEdge's files are models, device types and devices, with the name of a model",
                'partition("models.yml", "device_types.yml", "devices.yml", model="…")',
            )
        size = whole("batch_size", 8 if batch_size is None else batch_size)
        task = _from_files(
            models,
            device_types,
            devices,
            name=model,
            batch_size=size,
            dtype=dtype,
            interpolate=interpolate,
            units=units,
            ignore_unknown_types=ignore_unknown_types,
        )
    buffers_in = whole("buffers_in", buffers_in, least=0)
    buffers_out = whole("buffers_out", buffers_out, least=0)
    max_replicas = whole("max_replicas", max_replicas)
    if throughput is not None and not 0 < throughput < float("inf"):
        raise ArgumentError(f"the throughput to reach is {throughput}", "it is a number of samples per second above 0")
    if not task.layer_bytes:
        return ChainPlan(task.model, size, objective, (), (), 0.0, 0.0, 0.0, 0.0, units, _names(task.groups))
    rules = _Rules(task, pins, exclude, None if links is None else (str(links), pipeedge.read_links(links)))
    chain = _Chain(
        layer_bytes=task.layer_bytes,
        cut_bytes=task.cut_bytes,
        buffers_in=buffers_in,
        buffers_out=buffers_out,
        types=[
            _HostType(group.device_type, len(group.hosts), group.memory_bytes, group.time_s, may_run)
            for group, may_run in zip(rules.groups, rules.may_run, strict=True)
        ],
        links=[[rules.link(one, other) for other in rules.groups] for one in rules.groups],
        input=rules.end(rules.links.input, inward=True),
        output=rules.end(rules.links.output, inward=False),
        max_replicas=max_replicas,
        bits=_widths(task.bits, bits),
    )
    longest_s = None if throughput is None else size / throughput
    try:
        found = _core.partition_chain(chain, objective, longest_s, time_limit_s, progress)
    except InfeasibleError as error:
        if longest_s is None:
            raise
        asked = f"{throughput:g} samples/s are a batch of {size} every {longest_s:.6g} s"
        raise InfeasibleError(error.message, f"{error.hint}; {asked}") from None
    return _plan(found, task, rules.groups, batch_size=size, objective=objective, units=units)


def _plan(
    found: dict[str, Any], task: _Task, groups: list[_Group], *, batch_size: int, objective: str, units: str
) -> ChainPlan:
    free = [list(group.hosts) for group in groups]
    stages = []
    for row in found["stages"]:
        group, count = groups[row["host_type"]], row["replicas"]
        hosts, free[row["host_type"]] = free[row["host_type"]][:count], free[row["host_type"]][count:]
        stages.append(
            ChainStage(
                hosts=tuple(hosts),
                device_type=group.device_type,
                first=task.numbers[row["first"]] + 1,
                last=task.numbers[row["end"]],
                compute_s=row["compute_s"],
                interval_s=row["interval_s"],
                memory_bytes=row["memory_bytes"],
                host_memory_bytes=group.memory_bytes,
            )
        )
    return ChainPlan(
        model=task.model,
        batch_size=batch_size,
        objective=objective,
        stages=tuple(stages),
        hops=tuple(ChainHop(**row) for row in found["hops"]),
        interval_s=found["interval_s"],
        latency_s=found["latency_s"],
        value=found["value"],
        lower_bound=found["lower_bound"],
        units=units,
        unused=tuple(host for hosts in free for host in hosts),
        remarks=tuple(task.remarks),
    )


def _from_files(
    models: Path,
    device_types: Path,
    devices: Path,
    *,
    name: str,
    batch_size: int,
    dtype: str,
    interpolate: bool,
    units: Units,
    ignore_unknown_types: bool,
) -> _Task:
    width, mega = _width(dtype), _mega(units)
    model, remarks = pipeedge.read_model(models, name)
    types = pipeedge.read_device_types(device_types, model=name, layers=len(model.memory_mb))
    hosts = pipeedge.read_devices(devices)
    notes = list(remarks)
    groups = []
    for type_name, names in hosts.items():
        if not names:
            continue
        listed = f"{', '.join(names[:4])}{', …' if len(names) > 4 else ''}"
        if type_name not in types:
            if not ignore_unknown_types:
                raise ClusterError(
                    f"{devices}: type `{shorten(type_name)}` ({listed}) is not in {device_types}",
                    f"{near(type_name, types)} (`--ignore-unknown-types` plans without these hosts)".lstrip(),
                )
            notes.append(f"type `{shorten(type_name)}` is not in {device_types}: {listed} not used")
            continue
        kind = types[type_name]
        if name not in kind.timings:
            if model.memory_mb:
                notes.append(f"type `{type_name}` has no profile of `{name}`: {listed} not used")
            continue
        measured: dict[int, tuple[float, ...]] = {}
        for row in kind.timings[name]:
            if row.dtype == dtype:
                if row.batch_size in measured:
                    notes.append(f"type `{type_name}` has two profiles at batch size {row.batch_size}: the last counts")
                measured[row.batch_size] = row.time_s
        if not measured or (batch_size not in measured and not interpolate):
            known = ", ".join(f"{row.batch_size} {row.dtype}" for row in kind.timings[name])
            message = (
                f"{device_types}: type `{type_name}` has no profile of `{name}` at batch size {batch_size} in {dtype}"
            )
            if not ignore_unknown_types:
                raise ClusterError(message, f"measured: {known}; `--interpolate` goes from there to other batch sizes")
            notes.append(f"{message}: {listed} not used")
            continue
        sizes = sorted(measured)
        groups.append(
            _Group(
                device_type=type_name,
                hosts=names,
                memory_bytes=kind.memory_mb * mega,
                time_s=[
                    at_batch(sizes, times, batch_size)
                    for times in zip(*(measured[size] for size in sizes), strict=True)
                ],
                port_bytes_per_s=kind.bandwidth_mbps * mega / 8,
            )
        )
    if not groups and model.memory_mb:
        message = f"{devices} lists no host whose type has a profile of `{name}`"
        raise InfeasibleError(message, "; ".join(notes) or "list at least one host")
    values = (model.parameters_in, *model.parameters_out)
    return _Task(
        model=name,
        layer_bytes=[memory * mega for memory in model.memory_mb],
        cut_bytes=[width * batch_size * count for count in values],
        numbers=list(range(len(model.memory_mb) + 1)),
        groups=groups,
        names=frozenset(types) | frozenset(hosts) | frozenset(host for listed in hosts.values() for host in listed),
        link=lambda one, other: _Hop(min(one.port_bytes_per_s, other.port_bytes_per_s), 0.0),
        bits=8 * width,
        remarks=notes,
    )


def _from_profile(profile: Profile, cluster: Cluster, batch_size: int, dtype: str) -> _Task:
    from hpgo.model.states import cut_points

    remarks = []
    found = cut_points(profile)
    if not all(set(one.layers) < set(other.layers) for one, other in pairwise(found.states)):
        found = cut_points(profile, bound=2)
        remarks.append("the model branches: optimal for one good order of its layers")
    states = found.states

    def total(state: int, measure: str) -> float:
        return at_batch(profile.batch_sizes, getattr(states[state], measure), batch_size)

    forward_s = [total(index, "forward_s") for index in range(len(states))]
    time_s = [max(0.0, later - earlier) for earlier, later in pairwise(forward_s)]
    # Devices are alike if nothing but their number differs: same type, and no faster links to some than to others.
    alike: dict[tuple[Device, int | None], list[str]] = {}
    inner = cluster.intra != cluster.inter
    for index, machine in enumerate(cluster.machines):
        name = machine.name or f"machine{index}"
        hosts = [f"{name}:{device}" for device in range(machine.count)] if machine.count > 1 else [name]
        alike.setdefault((machine.device, index if inner and machine.count > 1 else None), []).extend(hosts)
    groups = [
        _Group(
            device_type=device.name,
            hosts=tuple(hosts),
            memory_bytes=device.memory_bytes,
            time_s=[seconds / device.speed for seconds in time_s],
            port_bytes_per_s=cluster.inter.bytes_per_s,
            machine=None if index is None else str(index),
        )
        for (device, index), hosts in alike.items()
    ]

    def link(one: _Group, other: _Group) -> _Hop:
        inside = one.machine is not None and one.machine == other.machine
        kind = cluster.intra if inside else cluster.inter
        return _Hop(kind.bytes_per_s, kind.latency_s)

    return _Task(
        model=profile.name,
        layer_bytes=[later.parameter_bytes - earlier.parameter_bytes for earlier, later in pairwise(states)],
        cut_bytes=[total(index, "boundary_bytes") for index in range(len(states))],
        numbers=[len(state.layers) for state in states],
        groups=groups,
        names=frozenset(name for group in groups for name in (group.device_type, *group.hosts)),
        link=link,
        bits=8 * _width(dtype),
        remarks=remarks,
    )


class _Rules:
    """Groups as finely told apart as links, pins and exclusions need, and what these say about each."""

    def __init__(
        self, task: _Task, pins: Iterable[str], exclude: Iterable[str], links: tuple[str, Links] | None
    ) -> None:
        file, self.links = links or ("", pipeedge.Links())
        self._link = task.link
        groups = task.groups
        known = task.names
        layers = task.numbers[-1]
        pinned = [_rule(text, "pin", known, layers) for text in pins]
        excluded = [_rule(text, "exclude", known, layers) for text in exclude]
        pipeedge.check_names(self.links, known, file)
        single = {name for name, _ in (*pinned, *excluded)}
        single |= {name for line in self.links.lines for name in (line.senders, line.receivers)}
        single |= {end.host for end in (self.links.input, self.links.output) if end is not None and end.host}
        gone = {name for name, numbers in excluded if numbers is None}
        self.groups: list[_Group] = []
        for group in groups:
            if group.device_type in gone:
                continue
            together = tuple(host for host in group.hosts if host not in single)
            apart = [(host,) for host in group.hosts if host in single and host not in gone]
            self.groups += [replace(group, hosts=hosts) for hosts in (together, *apart) if hosts]
        if not self.groups:
            raise InfeasibleError("every host is excluded", "lift an exclusion")
        self.may_run = [self._permissions(group, task.numbers, pinned, excluded) for group in self.groups]

    @staticmethod
    def _permissions(
        group: _Group,
        numbers: list[int],
        pinned: list[tuple[str, frozenset[int] | None]],
        excluded: list[tuple[str, frozenset[int] | None]],
    ) -> list[bool]:
        names = {group.device_type, *group.hosts}
        barred: set[int] = set()
        for name, layers in pinned:
            if name not in names:
                barred |= layers or frozenset()
        for name, layers in excluded:
            if name in names:
                barred |= layers or frozenset()
        if not barred:
            return []
        # A position may stand for several layers of the model: none of them may be barred.
        return [barred.isdisjoint(range(first + 1, end + 1)) for first, end in pairwise(numbers)]

    def link(self, one: _Group, other: _Group) -> _Hop:
        """From a host of one group to a host of another, or of the same."""
        hop = self._link(one, other)
        rate, latency_s = hop.bytes_per_s, max(hop.latency_s, self.links.latency_s)
        senders, receivers = {one.device_type, *one.hosts}, {other.device_type, *other.hosts}
        for line in self.links.lines:
            if line.senders in senders and line.receivers in receivers:
                rate = rate if line.bytes_per_s is None else line.bytes_per_s
                latency_s = latency_s if line.latency_s is None else line.latency_s
        return _Hop(rate, latency_s)

    def end(self, end: End | None, *, inward: bool) -> list[_Hop]:
        """The hop between the world outside and each group; empty if it costs nothing."""
        if end is None:
            return []
        hops = []
        for group in self.groups:
            if end.host is None:
                rate = group.port_bytes_per_s if end.bytes_per_s is None else end.bytes_per_s
                hops.append(_Hop(rate, end.latency_s))
            elif end.host in group.hosts:
                hops.append(_Hop(float("inf"), 0.0))
            else:
                home = next((other for other in self.groups if end.host in other.hosts), None)
                if home is None:
                    raise ArgumentError(f"host `{end.host}` has the input or takes the result, but is excluded", "")
                hops.append(self.link(home, group) if inward else self.link(group, home))
        return hops


def _rule(text: str, what: str, known: frozenset[str], layers: int) -> tuple[str, frozenset[int] | None]:
    """`mb-0=1-12,48` as name and layers; `mb-0` alone names all of them where that makes sense."""
    example = "write `host=1-12,48`" if what == "pin" else "write `host` or `host=1-12,48`"
    name, equals, numbers = text.partition("=") if text not in known else (text, "", "")
    if name not in known:
        raise ArgumentError(
            f"{what} `{shorten(text)}`: there is no host or type `{shorten(name)}`", near(name, sorted(known))
        )
    if not equals:
        if what == "pin":
            raise ArgumentError(f"pin `{shorten(text)}` names no layers", example)
        return name, None
    chosen: set[int] = set()
    for part in numbers.split(","):
        first, _, last = part.partition("-")
        last = last or first
        if not (first.isascii() and first.isdigit() and last.isascii() and last.isdigit()):
            raise ArgumentError(f"{what} `{shorten(text)}`: `{shorten(part)}` is no range of layers", example)
        if not 1 <= int(first) <= int(last) <= layers:
            raise ArgumentError(
                f"{what} `{shorten(text)}`: there are layers 1 to {layers}, not {shorten(part)}", example
            )
        chosen |= set(range(int(first), int(last) + 1))
    return name, frozenset(chosen)


def _widths(full: int, allowed: Sequence[int]) -> list[int]:
    for width in allowed:
        whole("bits", width)
        if width > full:
            raise ArgumentError(f"{width} bits are more than the {full} that values have", "fewer bits save transfers")
    return sorted({full, *allowed}, reverse=True)


def _width(dtype: str) -> int:
    if dtype not in pipeedge.BYTES_OF_DTYPE:
        hint = near(f"torch.{dtype}", pipeedge.BYTES_OF_DTYPE)
        raise ArgumentError(f"`{shorten(dtype)}` is no dtype that hpgo knows", hint)
    return pipeedge.BYTES_OF_DTYPE[dtype]


def _mega(units: str) -> float:
    if units not in pipeedge.MEGA:
        raise ArgumentError(f"there are no units `{shorten(units)}`", near(units, pipeedge.MEGA))
    return pipeedge.MEGA[units]


def _names(groups: Iterable[_Group]) -> tuple[str, ...]:
    return tuple(host for group in groups for host in group.hosts)
