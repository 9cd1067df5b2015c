"""Clusters: machines of devices and the links between them.

A cluster comes from numbers (`Cluster.of`), from machine ends (`Cluster.from_seps`), by name (`Cluster.preset`) or from
a YAML file (`Cluster.read`). The records check themselves: a `Cluster` that exists is usable.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate, groupby
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpgo.base.checks import MOST_GPUS, check_int, check_is, check_text, number
from hpgo.base.documents import Section, hinted, kind_of_document, parse, read_text
from hpgo.base.messages import as_whole, brief, did_you_mean, pluralize, printable, safe_repr, shorten
from hpgo.base.presentation import present
from hpgo.base.units import (
    format_bytes,
    format_bytes_per_s,
    format_seconds,
    parse_bytes,
    parse_bytes_per_s,
    parse_seconds,
)
from hpgo.base.validated import Record, check_fields
from hpgo.errors import ArgumentError, ClusterError

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Sequence

_LARGEST = 1e18
MOST_DEVICES = 2**20
_VERSION = 1
_KEYS = "hpgo_cluster name source gpus_per_device nodes machines intra inter"
_MACHINE_KEYS = "count devices type memory speed name"


@dataclass(frozen=True, slots=True)
class Device:
    """A device type. Raises ClusterError for memory or speed that is not above 0."""

    name: str
    memory_bytes: float
    speed: float = 1.0
    """Compute speed relative to the device that the profile was measured on: times divide by it."""

    def __post_init__(self) -> None:
        check_text("a device's name", self.name, ClusterError)
        _check_positive(f"device `{self.name}`: memory_bytes", self.memory_bytes)
        _check_positive(f"device `{self.name}`: speed", self.speed)


@dataclass(frozen=True, slots=True)
class Link:
    """A kind of link; rates are bytes per second in one direction.

    Raises ClusterError for a rate that is not above 0, and for a negative latency.
    """

    bytes_per_s: float
    """Point-to-point rate of one port."""
    collective_bytes_per_s: float
    """Rate that a ring all-reduce reaches on one port."""
    latency_s: float = 0.0

    def __post_init__(self) -> None:
        _check_positive("a link's bytes_per_s", self.bytes_per_s)
        _check_positive("a link's collective_bytes_per_s", self.collective_bytes_per_s)
        number("a link's latency_s", self.latency_s, most=_LARGEST, error=ClusterError)


@dataclass(frozen=True, slots=True)
class Node(Record):
    """One machine: `count` devices of one type. Raises ClusterError for less than one device."""

    device: Device
    count: int
    name: str = ""

    def __post_init__(self) -> None:
        check_text("a machine's name", self.name, ClusterError)
        check_fields(self, ClusterError)
        _count("the number of devices of a machine", self.count)


@dataclass(frozen=True, slots=True)
class Cluster(Record):
    """Machines and their links. Devices are numbered machine by machine from 0.

    Raises ClusterError for no machine, or for more than 2²⁰ devices.
    """

    name: str
    nodes: tuple[Node, ...]
    intra: Link
    """Between the devices of one machine: each device has one port."""
    inter: Link
    """Between machines: each machine has one port."""
    source: str = ""
    """Where the numbers come from."""
    gpus_per_device: int = 1
    """How many GPUs each device stands for: those that share each layer, by tensor parallelism say."""

    def __post_init__(self) -> None:
        gpus = check_int(
            f"cluster {safe_repr(self.name)}: gpus_per_device", self.gpus_per_device, most=MOST_GPUS, error=ClusterError
        )
        object.__setattr__(self, "gpus_per_device", gpus)
        for field in ("name", "source"):
            check_text(f"a cluster's {field}", getattr(self, field), ClusterError)
        check_fields(self, ClusterError)
        if not self.nodes:
            raise ClusterError(f"cluster `{self.name}` has no machines", "give it at least one")
        _count("the number of devices of a cluster", self.devices)

    @property
    def devices(self) -> int:
        """Devices of all machines."""
        return sum(machine.count for machine in self.nodes)

    def to_frame(self) -> Any:
        """A row a machine, as a frame of polars or pandas.

        Of the library that is imported already, or else of the one that is installed; HpgoError if neither is.
        """
        return present("frame", self)

    def _repr_html_(self) -> str:
        html: str = present("html", self)
        return html

    def __repr__(self) -> str:
        types = ", ".join(dict.fromkeys(machine.device.name for machine in self.nodes))
        of = f"{pluralize(self.devices, 'device')} on {pluralize(len(self.nodes), 'machine')}"
        return brief("Cluster", f"{shorten(self.name)}: {of}, {types}")

    @classmethod
    def of(
        cls,
        *,
        nodes: int,
        devices_per_node: int,
        intra_gbit_s: float,
        inter_gbit_s: float | None = None,
        memory: str | float = "16 GB",
        latency: str | float = 0,
        name: str = "",
        gpus_per_device: int = 1,
    ) -> Cluster:
        """`nodes` equal machines; `inter_gbit_s` may be left out if there is only one.

        `memory` of each device and `latency` of every link take units, or plain bytes and seconds. Collectives run at
        the links' full rates.

        Raises ClusterError naming the argument.

        >>> cluster = Cluster.of(nodes=2, devices_per_node=8, intra_gbit_s=1_200, inter_gbit_s=25, memory="32 GB")
        >>> cluster.name, cluster.devices, cluster.inter.bytes_per_s
        ('2x8', 16, 3125000000.0)
        """
        nodes, devices_per_node = _count("nodes", nodes), _count("devices_per_node", devices_per_node)
        _count("nodes × devices_per_node", nodes * devices_per_node)
        if inter_gbit_s is None:
            if nodes > 1:
                raise ClusterError(f"{nodes} nodes need `inter_gbit_s`", "the rate of each machine's network port")
            inter_gbit_s = intra_gbit_s
        latency_s = _unit("latency", latency, parse_seconds)
        device = Device("device", _unit("memory", memory, parse_bytes))
        rates = []
        for argument, gbit_s in (("intra_gbit_s", intra_gbit_s), ("inter_gbit_s", inter_gbit_s)):
            rates.append(_check_positive(argument, gbit_s) * 1e9 / 8)
        intra, inter = (Link(rate, rate, latency_s) for rate in rates)
        machines = (Node(device, devices_per_node),) * nodes
        name = check_text("a cluster's name", name, ClusterError) or f"{nodes}x{devices_per_node}"
        return cls(name, machines, intra, inter, gpus_per_device=gpus_per_device)

    @classmethod
    def from_seps(cls, seps: Sequence[int], *, memory: str | float = "16 GB") -> Cluster:
        """Machines that end before these device numbers: `[8, 16]` is two machines of eight.

        Links are those of the original HPGO planner: 25 GB/s inside a machine; between machines 1 GB/s point to point
        and 3 GB/s for collectives.

        Raises ClusterError unless `seps` are whole numbers that ascend from at least 1.

        >>> [machine.count for machine in Cluster.from_seps([8, 11]).nodes]
        [8, 3]
        """
        hint = "`seps` are cumulative machine ends: [8, 16] is two machines of eight"
        if not isinstance(seps, (list, tuple)) or not seps:
            raise ClusterError(f"seps must be a list of at least one machine end, got {_shown_list(seps)}", hint)
        start, counts = 0, []
        for given in seps:
            end = as_whole(given)
            if end is None or end <= start:
                raise ClusterError(f"seps must be whole numbers that ascend from 1, got {_shown_list(seps)}", hint)
            counts.append(end - start)
            start = end
        _count("the number of devices in seps", start)
        device = Device("device", _unit("memory", memory, parse_bytes))
        return cls(
            f"seps {_shown_list(list(accumulate(counts)))}",
            tuple(Node(device, count) for count in counts),
            intra=Link(25e9, 25e9),
            inter=Link(1e9, 3e9),
            source="links: the rates built into HPGO 0.9",
        )

    @classmethod
    def preset(cls, name: str, *, adapter_gbit_s: float | None = None) -> Cluster:
        """A known cluster; `h100:16` is sixteen machines of it instead of its usual number.

        `adapter_gbit_s` replaces the rate of each network adapter; a machine keeps as many of them as it has.

        Raises ClusterError with the nearest name if there is none, and for a rate that is not above 0.

        >>> Cluster.preset("dapple-a").devices, Cluster.preset("h100:16").devices
        (16, 128)
        >>> Cluster.preset("h100", adapter_gbit_s=100).inter.collective_bytes_per_s
        100000000000.0
        """
        from hpgo.machine.presets import PRESETS

        if not isinstance(name, str):
            raise ClusterError(f"a cluster's name is text, not {safe_repr(name)}", did_you_mean("", PRESETS))
        base, colon, count = name.partition(":")
        if base not in PRESETS:
            raise ClusterError(f"there is no cluster `{shorten(base)}`", _near(name), code="unknown_name")
        preset = PRESETS[base]
        machines = preset.machines
        if colon:
            if not (count.isascii() and count.isdigit() and 1 <= len(count) <= 9):
                raise ClusterError(
                    f"`{shorten(name)}`: `{shorten(count)}` is no number of machines", f"like `{base}:4`"
                )
            machines = int(count)
            _count("machines", machines)
            _count("devices", machines * preset.devices)
        return cls(
            name,
            (Node(Device(preset.device, preset.memory_bytes), preset.devices),) * machines,
            intra=Link(*preset.intra),
            inter=Link(*preset.inter) if adapter_gbit_s is None else _with_adapters(preset.inter, adapter_gbit_s),
            source=preset.source,
        )

    @classmethod
    def read(cls, source: str | os.PathLike[str]) -> Cluster:
        """The cluster of that name, or in that YAML or JSON file (docs/clusters.md describes it).

        A preset's name wins; write `./h100` or `Path("h100")` for a file of that name. Raises ClusterError naming file,
        line or key; or if it is neither.

        >>> Cluster.read("dapple-c").name
        'dapple-c'
        """
        from hpgo.machine.presets import PRESETS

        if isinstance(source, str):
            if source.partition(":")[0] in PRESETS:
                return cls.preset(source)
            if Path(source).suffix not in {".yaml", ".yml", ".json"} and "/" not in source and not _is_file(source):
                raise ClusterError(
                    f"`{shorten(source)}` is no known cluster and no file", _near(source), code="unknown_name"
                )
        with hinted("`hpgo clusters show dapple-a` prints such a file"):
            text, name = read_text(source, ClusterError), printable(str(source))
            return _from_document(parse(text, name, ClusterError), name, printable(Path(source).stem))

    def first(self, devices: int) -> Cluster:
        """The part of the cluster that holds its first `devices` devices.

        Raises ClusterError if it has fewer.

        >>> [machine.count for machine in Cluster.preset("dapple-a").first(12).nodes]
        [8, 4]
        """
        devices = _count("devices", devices)
        if devices > self.devices:
            from hpgo.machine.presets import PRESETS

            base = self.name.partition(":")[0]
            larger = f"{base}:{-(-devices // PRESETS[base].devices)}" if base in PRESETS else ""
            raise ClusterError(
                f"cluster `{self.name}` has {self.devices} devices, not {devices}",
                f"name a larger one, such as `{larger}`" if larger else f"use at most {self.devices}",
            )
        if devices == self.devices:
            return self
        machines, left = [], devices
        for machine in self.nodes:
            if left:
                machines.append(replace(machine, count=min(left, machine.count)))
                left -= machines[-1].count
        return replace(self, name=f"{devices} of {self.name}", nodes=tuple(machines))

    def document(self) -> dict[str, object]:
        """The cluster as what a file of it holds, in bytes and seconds; `Cluster.from_document` reads it back.

        >>> cluster = Cluster.of(nodes=2, devices_per_node=8, intra_gbit_s=1_200, inter_gbit_s=25)
        >>> cluster.document()["nodes"]
        [{'count': 2, 'devices': 8, 'type': 'device', 'memory': 16000000000.0, 'speed': 1.0}]
        """
        machines = []
        for machine, group in groupby(self.nodes):
            device = machine.device
            row: dict[str, object] = {
                "count": len(list(group)),
                "devices": machine.count,
                "type": device.name,
                "memory": float(device.memory_bytes),
                "speed": float(device.speed),
            }
            machines.append(row | ({"name": machine.name} if machine.name else {}))
        links = {
            key: {
                "bandwidth": float(link.bytes_per_s),
                "collective": float(link.collective_bytes_per_s),
                "latency": float(link.latency_s),
            }
            for key, link in (("intra", self.intra), ("inter", self.inter))
        }
        head: dict[str, object] = {"hpgo_cluster": _VERSION, "name": self.name, "source": self.source}
        if self.gpus_per_device != 1:
            head["gpus_per_device"] = self.gpus_per_device
        return head | {"nodes": machines} | links

    @classmethod
    def from_document(cls, document: object, *, file: str) -> Cluster:
        """The cluster that a parsed file holds. Raises ClusterError naming `file` and key.

        Unlike what people write, it may have devices of one name that differ.

        >>> cluster = Cluster.preset("dapple-a")
        >>> Cluster.from_document(cluster.document(), file="x.json") == cluster
        True
        """
        return _from_document(document, check_text("a file's name", file, ClusterError), "", may_differ=True)

    def yaml(self) -> str:
        """The cluster as a file that `Cluster.read` takes, to edit.

        >>> print(Cluster.of(nodes=2, devices_per_node=8, intra_gbit_s=1_200, inter_gbit_s=25).yaml(), end="")
        hpgo_cluster: 1
        name: "2x8"
        nodes:
          - {count: 2, devices: 8, type: device, memory: 16 GB, speed: 1.0}
        intra: {bandwidth: 150 GB/s, collective: 150 GB/s, latency: 0 s}
        inter: {bandwidth: 3.125 GB/s, collective: 3.125 GB/s, latency: 0 s}
        """
        from hpgo.base.quoting import in_yaml

        lines = [f"hpgo_cluster: {_VERSION}", f"name: {in_yaml(self.name)}"]
        if self.source:
            lines.append(f"source: {in_yaml(self.source)}")
        if self.gpus_per_device != 1:
            lines.append(f"gpus_per_device: {self.gpus_per_device}")
        lines.append("nodes:")
        for machine, group in groupby(self.nodes):
            device = machine.device
            named = f", name: {in_yaml(machine.name)}" if machine.name else ""
            lines.append(
                f"  - {{count: {len(list(group))}, devices: {machine.count}, type: {in_yaml(device.name)}, "
                f"memory: {_written(device.memory_bytes, format_bytes, parse_bytes)}, "
                f"speed: {float(device.speed)!r}{named}}}"
            )
        for key, link in (("intra", self.intra), ("inter", self.inter)):
            bandwidth, collective = (
                _written(rate, format_bytes_per_s, parse_bytes_per_s)
                for rate in (link.bytes_per_s, link.collective_bytes_per_s)
            )
            latency = _written(link.latency_s, format_seconds, parse_seconds)
            lines.append(f"{key}: {{bandwidth: {bandwidth}, collective: {collective}, latency: {latency}}}")
        return "\n".join(lines) + "\n"


def cluster_of(given: Cluster | str | os.PathLike[str]) -> Cluster:
    """`given`, or the cluster that `Cluster.read` finds under this name.

    Raises ClusterError for a name that says nothing; ArgumentError for what is neither.

    >>> cluster_of("dapple-a:1").devices
    8
    """
    if isinstance(given, str | PathLike):
        return Cluster.read(given)
    check_is("cluster", given, Cluster, "name one, like `dapple-a`, or a file, or make one with `hpgo.Cluster.of`")
    return given


def _near(name: str) -> str:
    """Return a hint at presets with names like `name`, with its number of machines if that is one."""
    from hpgo.machine.presets import PRESETS

    base, _, count = name.partition(":")
    kept = f":{count}" if count.isascii() and count.isdigit() and len(count) <= 6 and 0 < int(count) <= 10**5 else ""
    return (
        did_you_mean(f"{base}{kept}", [f"{preset}{kept}" for preset in PRESETS])
        if kept
        else did_you_mean(base, PRESETS)
    )


def _with_adapters(inter: tuple[float, float, float], gbit_s: float) -> Link:
    """The link between machines of a preset, with adapters of another rate."""
    one, all_of_them, latency_s = inter
    rate = _check_positive("adapter_gbit_s", gbit_s) * 1e9 / 8
    return Link(rate, rate * (all_of_them / one), latency_s)


def _from_document(document: object, file: str, stem: str, *, may_differ: bool = False) -> Cluster:
    whence = f"is it a cluster? Then begin with `hpgo_cluster: {_VERSION}`, as `hpgo clusters show dapple-a` does"
    if "hpgo_cluster" not in (document if isinstance(document, dict) else {}) and (kind := kind_of_document(document)):
        raise ClusterError(
            f"{file} is {kind}, not a cluster",
            "name a cluster: `hpgo clusters` lists those that are known",
            code="wrong_kind_of_file",
        )
    top = Section(document, file, ClusterError, keys=_KEYS, whence=whence)
    version = top.get("hpgo_cluster")
    top.whence = ""
    if version != _VERSION:
        top.fail(f"`hpgo_cluster` is {safe_repr(version)}", f"this hpgo reads version {_VERSION}")
    if "nodes" in top and "machines" in top:
        top.fail("`nodes` and `machines` are both given", "keep `nodes`; `machines` is the older name", code="conflict")
    key = "machines" if "machines" in top else "nodes"
    machines: list[Node] = []
    types: dict[str, Device] = {}
    for place, entry in enumerate(top.items(key), start=1):
        section = Section(entry, f"{file}, {key} entry {place}", ClusterError, keys=_MACHINE_KEYS)
        device = section.build(
            Device,
            section.text("type", "device"),
            _measure(section, "memory", parse_bytes),
            section.number("speed", 1.0),
        )
        if types.setdefault(device.name, device) != device and not may_differ:
            section.fail(
                f"type `{device.name}` has another memory or speed above", "give it another name", code="mismatch"
            )
        machine = section.build(Node, device, section.whole("devices"), section.text("name", ""))
        count = section.whole("count", 1, least=1)
        section.done()
        if count * machine.count > MOST_DEVICES:
            section.fail(f"{count} × {machine.count} devices are too many", f"at most {MOST_DEVICES}", code="too_large")
        machines += [machine] * count
    intra = _link(top, "intra")
    inter = _link(top, "inter") if len(machines) > 1 or "inter" in top else intra
    name, source = top.text("name", stem), top.text("source", "")
    gpus = top.whole("gpus_per_device", 1, least=1)
    top.done()
    return top.build(Cluster, name, tuple(machines), intra, inter, source, gpus)


def _link(top: Section, key: str) -> Link:
    value = top.get(key)
    held = value if isinstance(value, dict) else {"bandwidth": value}
    section = Section(held, f"{top.where}, {key}", ClusterError, keys="bandwidth collective latency")
    rate = _measure(section, "bandwidth", parse_bytes_per_s)
    link = section.build(
        Link,
        rate,
        _measure(section, "collective", parse_bytes_per_s, rate),
        _measure(section, "latency", parse_seconds, 0.0),
    )
    section.done()
    return link


def _measure(section: Section, key: str, parser: Callable[[str | float], float], default: object = ...) -> float:
    value: Any = section.get(key, default)
    try:
        return parser(value)
    except ArgumentError as error:
        section.reraise(error, f"`{key}`: {error.message}")


def _written(value: float, form: Callable[[float], str], parser: Callable[[str | float], float]) -> str:
    """`value` with a unit where that loses nothing."""
    text = form(value)
    return text if parser(text) == value else repr(float(value))


def _unit(argument: str, value: str | float, parser: Callable[[str | float], float]) -> float:
    try:
        return parser(value)
    except ArgumentError as error:
        raise error.as_kind(ClusterError, f"{argument}: {error.message}") from None


def _check_positive(what: str, value: object) -> float:
    hint = "it must be a number above 0 and at most 1e18"
    return number(what, value, above=0, most=_LARGEST, error=ClusterError, hint=hint)


def _count(what: str, value: object) -> int:
    return check_int(what, value, most=MOST_DEVICES, error=ClusterError)


def _shown_list(values: object) -> str:
    if not isinstance(values, (list, tuple)):
        return safe_repr(values)
    return f"[{', '.join(map(safe_repr, values[:8]))}{', …' if len(values) > 8 else ''}]"


def _is_file(name: str) -> bool:
    try:
        return Path(name).is_file()
    except (OSError, ValueError):  # ValueError: a NUL in the name
        return False
