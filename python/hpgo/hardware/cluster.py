"""Clusters: nodes with devices, and the links inside and between nodes.

A cluster is made from numbers (`Cluster.of`), from the ends of nodes (`Cluster.from_seps`), by name (`Cluster.preset`)
or from a YAML file (`Cluster.read`). The records check their fields, so every `Cluster` that exists is valid.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, replace
from itertools import accumulate, groupby
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpgo.base.checks import MAX_GPUS, check_int, check_is, check_text, number
from hpgo.base.documents import Section, hinted, kind_of_document, parse, read_text
from hpgo.base.messages import as_whole, brief, did_you_mean, pluralize, printable, safe_repr, shorten
from hpgo.base.presentation import Presented
from hpgo.base.units import (
    format_bytes,
    format_bytes_per_s,
    format_flop_per_s,
    format_seconds,
    parse_bytes,
    parse_bytes_per_s,
    parse_flop_per_s,
    parse_seconds,
)
from hpgo.base.validated import Record, check_fields
from hpgo.errors import ArgumentError, ClusterError
from hpgo.hardware.device_types import read_types, type_document

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Sequence

    from hpgo.hardware.rates import Rates

# Larger numbers are taken for typing errors.
_LARGEST = 1e18
MAX_DEVICES = 2**20
"""Maximum number of devices in a cluster."""
_VERSION = 1
_KEYS = "hpgo_cluster name source gpus_per_device types nodes intra inter"
_MACHINE_KEYS = "count devices type memory speed name"


@dataclass(frozen=True, slots=True)
class Device:
    """A device type. Raises ClusterError for memory or speed that is not above 0."""

    name: str
    memory_bytes: float
    speed: float = 1.0
    """Compute speed relative to the device of the profile: times of layers are divided by it."""
    rates: Rates | None = dataclasses.field(default=None, hash=False, repr=False)
    """Rates that the cluster's file states. None means the rates of the known card of this name."""
    measured_rates: Rates | None = dataclasses.field(default=None, compare=False, repr=False)
    """Rates of a device record, which the cost model uses in place of all others. Cluster files don't hold them."""

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
    """Rate of one port in a ring all-reduce. It differs from `bytes_per_s` if a port has several lanes or NICs."""
    latency_s: float = 0.0
    """Latency of one message in seconds."""

    def __post_init__(self) -> None:
        _check_positive("a link's bytes_per_s", self.bytes_per_s)
        _check_positive("a link's collective_bytes_per_s", self.collective_bytes_per_s)
        number("a link's latency_s", self.latency_s, maximum=_LARGEST, error=ClusterError)


@dataclass(frozen=True, slots=True)
class Node(Record):
    """A node with `count` devices of one type. Raises ClusterError for less than one device."""

    device: Device
    count: int
    name: str = ""

    def __post_init__(self) -> None:
        check_text("a node's name", self.name, ClusterError)
        check_fields(self, ClusterError)
        _count("the number of devices of a node", self.count)


@dataclass(frozen=True, slots=True)
class Cluster(Presented, Record):
    """Nodes and their links. Devices are numbered node by node from 0.

    Raises ClusterError for no node, or for more than 2²⁰ devices.
    """

    name: str
    nodes: tuple[Node, ...]
    """The nodes, in the order of their devices."""
    intra: Link
    """Intra-node link. Each device has one port."""
    inter: Link
    """Inter-node link. Each node has one port."""
    source: str = ""
    """Origin of the numbers."""
    gpus_per_device: int = 1
    """Number of GPUs that a device stands for, for instance the GPUs of one tensor-parallel group."""

    def __post_init__(self) -> None:
        gpus = check_int(
            f"cluster {safe_repr(self.name)}: gpus_per_device",
            self.gpus_per_device,
            maximum=MAX_GPUS,
            error=ClusterError,
        )
        object.__setattr__(self, "gpus_per_device", gpus)
        for field in ("name", "source"):
            check_text(f"a cluster's {field}", getattr(self, field), ClusterError)
        check_fields(self, ClusterError)
        if not self.nodes:
            raise ClusterError(
                f"cluster `{self.name}` has no nodes, but it must have at least one",
                "list them: `nodes: [{devices: 8, memory: 80 GB}]`",
            )
        _count("the number of devices of a cluster", self.devices)
        self._check_rates()

    def _check_rates(self) -> None:
        """Raise ClusterError if two devices of one name have different rates, since a file states them by name."""
        types: dict[str, Device] = {}
        # Nodes usually share a few device records, so most of them are compared by identity only.
        for device in {id(node.device): node.device for node in self.nodes}.values():
            if types.setdefault(device.name, device).rates != device.rates:
                raise ClusterError(
                    f"devices of cluster `{shorten(self.name)}` named `{shorten(device.name)}` have different rates",
                    "give each type of device its own name",
                    code="mismatch",
                )

    def _types(self) -> dict[str, dict[str, Any]]:
        """Return the stated rates by device type, in base units."""
        stated = {node.device.name: node.device.rates for node in self.nodes if node.device.rates is not None}
        return {name: type_document(rates) for name, rates in stated.items()}

    @property
    def devices(self) -> int:
        """Number of devices on all nodes."""
        return sum(node.count for node in self.nodes)

    def __repr__(self) -> str:
        types = ", ".join(dict.fromkeys(node.device.name for node in self.nodes))
        of = f"{pluralize(self.devices, 'device')} on {pluralize(len(self.nodes), 'node')}"
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
        """Return a cluster of `nodes` equal nodes. `inter_gbit_s` may be left out if there is only one node.

        `memory` of each device and `latency` of every link take units, or plain bytes and seconds. Collectives run at
        the full rates of the links.

        Raises ClusterError that names the argument.

        >>> cluster = Cluster.of(nodes=2, devices_per_node=8, intra_gbit_s=1_200, inter_gbit_s=25, memory="32 GB")
        >>> cluster.name, cluster.devices, cluster.inter.bytes_per_s
        ('2x8', 16, 3125000000.0)
        """
        nodes, devices_per_node = _count("nodes", nodes), _count("devices_per_node", devices_per_node)
        _count("nodes × devices_per_node", nodes * devices_per_node)
        if inter_gbit_s is None:
            if nodes > 1:
                raise ClusterError(
                    f"inter_gbit_s is missing, but {nodes} nodes need it", "give the rate of each node's network port"
                )
            # A single node never uses the link, but the record needs one.
            inter_gbit_s = intra_gbit_s
        latency_s = _unit("latency", latency, parse_seconds)
        device = Device("device", _unit("memory", memory, parse_bytes))
        rates = []
        for argument, gbit_s in (("intra_gbit_s", intra_gbit_s), ("inter_gbit_s", inter_gbit_s)):
            rates.append(_check_positive(argument, gbit_s) * 1e9 / 8)
        intra, inter = (Link(rate, rate, latency_s) for rate in rates)
        name = check_text("a cluster's name", name, ClusterError) or f"{nodes}x{devices_per_node}"
        return cls(name, (Node(device, devices_per_node),) * nodes, intra, inter, gpus_per_device=gpus_per_device)

    @classmethod
    def from_seps(cls, seps: Sequence[int], *, memory: str | float = "16 GB") -> Cluster:
        """Return a cluster whose nodes end before these device numbers: `[8, 16]` is two nodes of eight devices.

        The links have the rates of the original HPGO planner: 25 GB/s inside a node; between nodes 1 GB/s point to
        point and 3 GB/s for collectives.

        Raises ClusterError unless `seps` are whole numbers that ascend from at least 1.

        >>> [node.count for node in Cluster.from_seps([8, 11]).nodes]
        [8, 3]
        """
        hint = "give the cumulative ends of nodes: [8, 16] is two nodes of eight devices"
        if not isinstance(seps, (list, tuple)) or not seps:
            raise ClusterError(f"seps must be a list of at least one node end, got {_shown_list(seps)}", hint)
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
        """Return a built-in cluster. `h100:16` has 16 nodes instead of the default number.

        `adapter_gbit_s` replaces the rate of each NIC. The number of NICs per node stays.

        Raises ClusterError with the nearest name if there is no such cluster, and for a rate that is not above 0.

        >>> Cluster.preset("dapple-a").devices, Cluster.preset("h100:16").devices
        (16, 128)
        >>> Cluster.preset("h100", adapter_gbit_s=100).inter.collective_bytes_per_s
        100000000000.0
        """
        from hpgo.hardware.presets import PRESETS

        if not isinstance(name, str):
            raise ClusterError(f"a cluster's name is {safe_repr(name)}, but it must be text", did_you_mean("", PRESETS))
        base, colon, count = name.partition(":")
        if base not in PRESETS:
            raise ClusterError(f"there is no cluster `{shorten(base)}`", _near(name), code="unknown_name")
        preset = PRESETS[base]
        nodes = preset.nodes
        if colon:
            # int() would also accept signs, spaces, underscores and digits of other scripts.
            if not (count.isascii() and count.isdigit() and 1 <= len(count) <= 9):
                several = "only `hpgo llm plan` takes several kinds of nodes, " if "+" in count else ""
                raise ClusterError(
                    f"`{shorten(name)}`: `{shorten(count)}` is not a number of nodes",
                    f"{several}write it like `{base}:4`",
                )
            nodes = int(count)
            _count("nodes", nodes)
            _count("devices", nodes * preset.devices)
        return cls(
            name,
            (Node(Device(preset.device, preset.memory_bytes), preset.devices),) * nodes,
            intra=Link(*preset.intra),
            inter=Link(*preset.inter) if adapter_gbit_s is None else _with_adapters(preset.inter, adapter_gbit_s),
            source=preset.source,
        )

    @classmethod
    def read(cls, source: str | os.PathLike[str]) -> Cluster:
        """Return the built-in cluster of that name, or the cluster in that YAML or JSON file (docs/clusters.md).

        A built-in name takes precedence. Write `./h100` or `Path("h100")` for a file of that name. Raises ClusterError
        that names file, line or key, or if there is neither a cluster nor a file.

        >>> Cluster.read("dapple-c").name
        'dapple-c'
        """
        from hpgo.hardware.presets import PRESETS

        if isinstance(source, str):
            if source.partition(":")[0] in PRESETS:
                return cls.preset(source)
            # A text without a suffix and a slash is more likely a mistyped name than a missing file.
            if Path(source).suffix not in {".yaml", ".yml", ".json"} and "/" not in source and not _is_file(source):
                raise ClusterError(
                    f"unknown cluster: `{shorten(source)}` (no built-in cluster, no such file)",
                    _near(source),
                    code="unknown_name",
                )
        with hinted("`hpgo clusters show dapple-a` prints such a file"):
            text, name = read_text(source, ClusterError), printable(str(source))
            return _from_document(parse(text, name, ClusterError), name, printable(Path(source).stem))

    def first(self, devices: int) -> Cluster:
        """Return the part of the cluster with its first `devices` devices; its last node may be only partly used.

        Raises ClusterError if the cluster has fewer devices.

        >>> [node.count for node in Cluster.preset("dapple-a").first(12).nodes]
        [8, 4]
        """
        devices = _count("devices", devices)
        if devices > self.devices:
            from hpgo.hardware.presets import PRESETS

            # Only built-in clusters can be enlarged by their name.
            base = self.name.partition(":")[0]
            larger = f"{base}:{-(-devices // PRESETS[base].devices)}" if base in PRESETS else ""
            raise ClusterError(
                f"cluster `{self.name}` has {self.devices} devices, not {devices}",
                f"use a larger cluster, such as `{larger}`" if larger else f"use at most {self.devices}",
            )
        if devices == self.devices:
            return self
        nodes, left = [], devices
        for node in self.nodes:
            if left:
                nodes.append(replace(node, count=min(left, node.count)))
                left -= nodes[-1].count
        return replace(self, name=f"{devices} of {self.name}", nodes=tuple(nodes))

    def document(self) -> dict[str, object]:
        """Return the content of the cluster's file, in bytes and seconds. `Cluster.from_document` reads it.

        >>> cluster = Cluster.of(nodes=2, devices_per_node=8, intra_gbit_s=1_200, inter_gbit_s=25)
        >>> cluster.document()["nodes"]
        [{'count': 2, 'devices': 8, 'type': 'device', 'memory': 16000000000.0, 'speed': 1.0}]
        """
        nodes = []
        # Equal neighbors share a row with a count. Clusters of thousands of nodes stay small files.
        for node, group in groupby(self.nodes):
            device = node.device
            row: dict[str, object] = {
                "count": len(list(group)),
                "devices": node.count,
                "type": device.name,
                "memory": float(device.memory_bytes),
                "speed": float(device.speed),
            }
            nodes.append(row | ({"name": node.name} if node.name else {}))
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
        if types := self._types():
            head["types"] = types
        return head | {"nodes": nodes} | links

    @classmethod
    def from_document(cls, document: object, *, file: str) -> Cluster:
        """Return the cluster of a parsed file. Raise ClusterError that names `file` and key.

        Unlike a file that a user wrote, it may have different devices of the same name.

        >>> cluster = Cluster.preset("dapple-a")
        >>> Cluster.from_document(cluster.document(), file="x.json") == cluster
        True
        """
        return _from_document(document, check_text("a file's name", file, ClusterError), "", may_differ=True)

    def yaml(self) -> str:
        """Return the cluster as the text of a file that `Cluster.read` accepts, for users to edit.

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
        if types := self._types():
            lines.append("types:")
        for name, stated in types.items():
            lines += [f"  {in_yaml(name)}:", *(f"    {key}: {_typed(key, value)}" for key, value in stated.items())]
        lines.append("nodes:")
        for node, group in groupby(self.nodes):
            device = node.device
            named = f", name: {in_yaml(node.name)}" if node.name else ""
            lines.append(
                f"  - {{count: {len(list(group))}, devices: {node.count}, type: {in_yaml(device.name)}, "
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
    """Return `given` if it is a cluster, else the cluster that `Cluster.read` returns for it.

    Raises ClusterError for an unknown name, and ArgumentError for other types.

    >>> cluster_of("dapple-a:1").devices
    8
    """
    if isinstance(given, str | PathLike):
        return Cluster.read(given)
    check_is("cluster", given, Cluster, "give a name like `dapple-a` or a file, or make one with `hpgo.Cluster.of`")
    return given


_SLOWER_LINKS = {"h800": "h100", "a800": "a100"}
"""Cards that differ from another only in their NVLink, of 400 GB/s in both directions, as NVIDIA's documents state."""


def _near(name: str) -> str:
    """Return a hint with built-in clusters of similar names. A valid number of nodes in `name` is kept."""
    from hpgo.hardware.presets import PRESETS

    base, _, count = name.partition(":")
    kept = f":{count}" if count.isascii() and count.isdigit() and len(count) <= 6 and 0 < int(count) <= 10**5 else ""
    if similar := _SLOWER_LINKS.get(base.lower()):
        return (
            f"it is an {similar.upper()} with a slower NVLink: save `hpgo clusters show {similar}{kept}` as a file,"
            " and set `intra` to 200 GB/s"
        )
    return (
        did_you_mean(f"{base}{kept}", [f"{preset}{kept}" for preset in PRESETS])
        if kept
        else did_you_mean(base, PRESETS)
    )


def _with_adapters(inter: tuple[float, float, float], gbit_s: float) -> Link:
    """Return the inter-node link of a preset with NICs of another rate."""
    one, all_of_them, latency_s = inter
    rate = _check_positive("adapter_gbit_s", gbit_s) * 1e9 / 8
    return Link(rate, rate * (all_of_them / one), latency_s)


def _from_document(document: object, file: str, stem: str, *, may_differ: bool = False) -> Cluster:
    hint = f"is it a cluster? Then begin with `hpgo_cluster: {_VERSION}`, as `hpgo clusters show dapple-a` does"
    if "hpgo_cluster" not in (document if isinstance(document, dict) else {}) and (kind := kind_of_document(document)):
        raise ClusterError(
            f"{file} is {kind}, not a cluster",
            "name a cluster: `hpgo clusters` lists those that are known",
            code="wrong_kind_of_file",
        )
    top = Section(document, file, ClusterError, keys=_KEYS, source=hint)
    version = top.get("hpgo_cluster")
    top.source = ""
    if version != _VERSION:
        top.fail(f"`hpgo_cluster` is {safe_repr(version)}", f"this hpgo reads version {_VERSION}")
    if "nodes" in top and "machines" in top:
        top.fail("`nodes` and `machines` are both given", "keep `nodes`; `machines` is the older name", code="conflict")
    key = "machines" if "machines" in top else "nodes"
    stated = read_types(top)
    nodes: list[Node] = []
    types: dict[str, Device] = {}
    for place, entry in enumerate(top.items(key), start=1):
        section = Section(entry, f"{file}, {key} entry {place}", ClusterError, keys=_MACHINE_KEYS)
        kind = section.text("type", "device")
        known = stated.get(kind)
        device = section.build(
            Device,
            kind,
            _measure(section, "memory", parse_bytes, ... if known is None else known.memory_bytes or ...),
            section.number("speed", 1.0),
            None if known is None else known.rates,
        )
        # In a file that a user wrote, two different devices of one name are probably a typing error.
        if types.setdefault(device.name, device) != device and not may_differ:
            section.fail(
                f"type `{device.name}` has another memory or speed above", "give it another name", code="mismatch"
            )
        node = section.build(Node, device, section.whole("devices"), section.text("name", ""))
        count = section.whole("count", 1, minimum=1)
        section.done()
        if count * node.count > MAX_DEVICES:
            section.fail(f"{count} × {node.count} devices are too many", f"at most {MAX_DEVICES}", code="too_large")
        nodes += [node] * count
    for unused in stated.keys() - types.keys():
        top.fail(
            f"`types` has `{shorten(unused)}`, but no node has this type",
            did_you_mean(unused, types) or "remove it",
            code="unknown_name",
        )
    intra = _link(top, "intra")
    # With a single node the link between nodes is never used, so files may leave it out.
    inter = _link(top, "inter") if len(nodes) > 1 or "inter" in top else intra
    name, source = top.text("name", stem), top.text("source", "")
    gpus = top.whole("gpus_per_device", 1, minimum=1)
    top.done()
    return top.build(Cluster, name, tuple(nodes), intra, inter, source, gpus)


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
    """Return `value` with a unit if that is exact, else as a plain number."""
    text = form(value)
    return text if parser(text) == value else repr(float(value))


def _typed(key: str, value: Any) -> str:
    """Return a value of a device type as YAML."""
    from hpgo.base.quoting import in_yaml

    if key in {"memory_bandwidth", "host_bandwidth"}:
        return _written(value, format_bytes_per_s, parse_bytes_per_s)
    if key == "flops":
        rates = (f"{one}: {_written(rate, format_flop_per_s, parse_flop_per_s)}" for one, rate in value.items())
        return f"{{{', '.join(rates)}}}"
    return "true" if value is True else in_yaml(value)


def _unit(argument: str, value: str | float, parser: Callable[[str | float], float]) -> float:
    try:
        return parser(value)
    except ArgumentError as error:
        raise error.as_kind(ClusterError, f"{argument}: {error.message}") from None


def _check_positive(what: str, value: object) -> float:
    hint = "it must be a number above 0 and at most 1e18"
    return number(what, value, above=0, maximum=_LARGEST, error=ClusterError, hint=hint)


def _count(what: str, value: object) -> int:
    return check_int(what, value, maximum=MAX_DEVICES, error=ClusterError)


def _shown_list(values: object) -> str:
    if not isinstance(values, (list, tuple)):
        return safe_repr(values)
    return f"[{', '.join(map(safe_repr, values[:8]))}{', …' if len(values) > 8 else ''}]"


def _is_file(name: str) -> bool:
    try:
        return Path(name).is_file()
    except (OSError, ValueError):
        # A name may be too long for the file system (OSError) or contain a NUL character (ValueError).
        return False
