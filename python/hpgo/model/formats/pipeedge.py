"""Readers of PipeEdge's YAML files: models, device types, devices, profiler results, and hpgo's own `links.yml`.

Errors name file and key. Keys that PipeEdge does not know are ignored, as PipeEdge does.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Literal

from hpgo.base.documents import Section, hinted, kind_of_document, parse_yaml, read_text
from hpgo.base.messages import as_float, did_you_mean, join_words, nearest_names, printable, safe_repr, shorten
from hpgo.base.units import parse_bytes_per_s, parse_seconds
from hpgo.errors import ArgumentError, ClusterError, HpgoError, ProfileError

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterable, Mapping

    from hpgo.hardware.cluster import Cluster
    from hpgo.model.profile import Profile

ValueType = Literal[
    "torch.float64", "torch.float32", "torch.float16", "torch.bfloat16", "torch.float8_e4m3fn", "torch.float8_e5m2",
    "torch.complex64", "torch.int64", "torch.int32", "torch.int16", "torch.int8", "torch.uint8", "torch.bool",
]  # fmt: skip
Units = Literal["pipeedge", "si"]

BYTES_OF_DTYPE: dict[str, int] = {
    "torch.float64": 8, "torch.float32": 4, "torch.float16": 2, "torch.bfloat16": 2,
    "torch.float8_e4m3fn": 1, "torch.float8_e5m2": 1, "torch.complex64": 8,
    "torch.int64": 8, "torch.int32": 4, "torch.int16": 2, "torch.int8": 1, "torch.uint8": 1, "torch.bool": 1,
}  # fmt: skip
MEGA: dict[str, float] = {"pipeedge": 2.0**20, "si": 1e6}
"""Value of the prefix in `MB` and `Mbps`: PipeEdge means binary megas in both."""


@dataclass(frozen=True, slots=True)
class PipeEdgeModel:
    """A chain of layers in `models.yml`."""

    name: str
    memory_mb: tuple[float, ...]
    """Memory of each layer in MB."""
    parameters_in: float
    """Number of values that one sample brings into the model."""
    parameters_out: tuple[float, ...]
    """Number of values that leave each layer for one sample."""


@dataclass(frozen=True, slots=True)
class Timing:
    """Measured times of a model on a device type, at one batch size and dtype."""

    batch_size: int
    dtype: str
    time_s: tuple[float, ...]
    """Seconds of each layer for the whole batch."""


@dataclass(frozen=True, slots=True)
class DeviceType:
    """A device type in `device_types.yml`."""

    name: str
    bandwidth_mbps: float
    memory_mb: float
    timings: Mapping[str, tuple[Timing, ...]]
    """Timings by the name of the model."""


@dataclass(frozen=True, slots=True)
class LinkLine:
    """A line of `links.yml`: sender and receiver hosts or types, with their rate and latency.

    None means that of the slower of the two ports.
    """

    senders: str
    receivers: str
    bytes_per_s: float | None
    latency_s: float | None


@dataclass(frozen=True, slots=True)
class End:
    """The source of the input, or the destination of the result."""

    host: str | None
    """Name of a host of the row: the transfer is free for this host, and takes its link for others."""
    bytes_per_s: float | None
    """Rate in bytes per second. None means the rate of the host at the other end."""
    latency_s: float


@dataclass(frozen=True, slots=True)
class Links:
    """Content of `links.yml`. Later lines override earlier ones."""

    latency_s: float = 0.0
    lines: tuple[LinkLine, ...] = ()
    input: End | None = None
    output: End | None = None


_MODEL_KEYS = "layers mem_MB parameters_in parameters_out"
_TIMING_KEYS = "batch_size dtype time_s"
_LINK_KEYS = "links latency input output"
_RESULT_KEYS = "layer memory shape_in shape_out time"
_hint = hinted("`hpgo profile --format pipeedge` writes models.yml and device_types.yml")


@_hint
def read_model(path: str | os.PathLike[str], name: str) -> tuple[PipeEdgeModel, tuple[str, ...]]:
    """Return the model `name` in the file `path`, and remarks for the user.

    A list of `parameters_out` that is shorter than the model repeats, as in PipeEdge, if its length divides the number
    of layers.

    Raises ProfileError naming file and key.
    """
    models = _mapping(path, ProfileError)
    if name not in models:
        raise ProfileError(f"{path}: there is no model `{shorten(name)}`", did_you_mean(name, models))
    section = Section(models[name], f"{path}: model `{shorten(name)}`", ProfileError, keys=_MODEL_KEYS)
    layers = section.whole("layers")
    memory_mb = _numbers(section, "mem_MB", layers)
    parameters_in = _number(section, "parameters_in", section.get("parameters_in"))
    parameters_out = _numbers(section, "parameters_out", None)
    if len(parameters_out) == layers:
        return PipeEdgeModel(name, memory_mb, parameters_in, parameters_out), ()
    if not parameters_out or layers % len(parameters_out):
        section.fail(
            f"`parameters_out` has {len(parameters_out)} entries, but `layers` is {layers}",
            "give one entry for each layer, or a block whose length divides the number of layers",
        )
    remark = (
        f"{section.where}: `parameters_out` has {len(parameters_out)} entries for {layers} layers, so they are repeated"
    )
    repeated = parameters_out * (layers // len(parameters_out))
    return PipeEdgeModel(name, memory_mb, parameters_in, repeated), (remark,)


@_hint
def read_device_types(
    path: str | os.PathLike[str], *, model: str, layers: int, models: str | os.PathLike[str] | None = None
) -> dict[str, DeviceType]:
    """Return the device types in the file `path` by name, with their timings of `model` only.

    A type without timings of `model` is accepted. But if the file `models` is given, and the type has timings of a very
    similar name that `models` does not contain, that name counts as misspelled.

    Raises ClusterError naming file and key.
    """
    others = _mapping(models, ProfileError) if models is not None else {}
    types = {}
    for name, value in _mapping(path, ClusterError).items():
        section = Section(value, f"{path}: type `{shorten(name)}`", ClusterError, keys="bw_Mbps mem_MB model_profiles")
        bandwidth = _number(section, "bw_Mbps", section.get("bw_Mbps"), maximum=math.inf)
        memory = _number(section, "mem_MB", section.get("mem_MB"))
        profiles = section.get("model_profiles", None)
        section.check_spelling()
        timings: list[Timing] = []
        if profiles is not None:
            held = Section(profiles, f"{section.where}: `model_profiles`", ClusterError)
            rows = held.items(model) if model in held and held.get(model) is not None else []
            strange = [str(other) for other in held if other not in others]
            if models is not None and model not in held and (slip := nearest_names(model, strange, minimum=1.0)):
                held.fail(
                    f"there is no model `{shorten(slip[0])}` in {models}",
                    f"did you mean `{printable(model)}`?",
                    code="unknown_name",
                )
            for index, row in enumerate(rows, 1):
                entry = Section(
                    row, f"{section.where}: profile {index} of `{shorten(model)}`", ClusterError, keys=_TIMING_KEYS
                )
                batch_size = entry.whole("batch_size", minimum=1)
                timings.append(Timing(batch_size, entry.text("dtype"), _numbers(entry, "time_s", layers)))
        types[name] = DeviceType(name, bandwidth, memory, {model: tuple(timings)} if timings else {})
    return types


@hinted("write each type with a list of hosts, such as `my-type: [host-0, host-1]`")
def read_devices(path: str | os.PathLike[str]) -> dict[str, tuple[str, ...]]:
    """Return the hosts of each type in the file `path`.

    Raises ClusterError naming file and key, also for a host that is listed twice.
    """
    hosts: dict[str, tuple[str, ...]] = {}
    home: dict[str, str] = {}
    for name, value in _mapping(path, ClusterError).items():
        where = f"{path}: type `{shorten(name)}`"
        if not isinstance(value, list):
            raise ClusterError(
                f"{where}: must be a list of hosts, got {safe_repr(value)}", "write `[]` if there are none"
            )
        for host in value:
            if isinstance(host, bool) or not isinstance(host, (str, int)):
                raise ClusterError(f"{where}: a host must be a name, got {safe_repr(host)}", "quote it")
            if str(host) in home:
                raise ClusterError(
                    f"{where}: host `{shorten(str(host))}` is listed twice, before under `{shorten(home[str(host)])}`",
                    "a host takes one stage: list it once",
                    code="duplicate",
                )
            home[str(host)] = name
        hosts[name] = tuple(map(str, value))
    return hosts


@hinted(f"the keys of such a file are {join_words(_LINK_KEYS.split())}")
def read_links(path: str | os.PathLike[str]) -> Links:
    """Return the links in the file `path`.

    Raises ClusterError naming file and key.
    """
    held = parse_yaml(read_text(path, ClusterError), str(path), ClusterError)
    section = Section(held, str(path), ClusterError, keys=_LINK_KEYS)
    lines: list[LinkLine] = []
    for index, value in enumerate(section.items("links", []), 1):
        line = Section(value, f"{path}: link {index}", ClusterError, keys="between from to bandwidth latency")
        rate = _unit(line, "bandwidth", parse_bytes_per_s)
        latency_s = _unit(line, "latency", parse_seconds)
        if "between" in line:
            names = line.items("between")
            if len(names) != 2:
                line.fail(
                    f"`between` must have two names, but has {len(names)}", "write it like `between: [mb-0, rcc-0]`"
                )
            pairs = [(str(names[0]), str(names[1])), (str(names[1]), str(names[0]))]
        else:
            pairs = [(line.text("from"), line.text("to"))]
        line.done()
        lines += [LinkLine(senders, receivers, rate, latency_s) for senders, receivers in pairs]
    latency_s = _unit(section, "latency", parse_seconds) or 0.0
    links = Links(latency_s, tuple(lines), _end(section, "input"), _end(section, "output"))
    section.done()
    return links


@_hint
def read_results(path: str | os.PathLike[str]) -> tuple[PipeEdgeModel, Timing]:
    """Return a model and its timing from `profiler_results.yml` of PipeEdge's profiler.

    Sizes of inputs and outputs are summed over all tensors of a layer. Memory is the growth of a process in MB of 10^6
    bytes, and is not converted: PipeEdge's own tools also copy it into `models.yml` as it is.

    Raises ProfileError naming file and key, also if layers are missing.
    """
    held = parse_yaml(read_text(path, ProfileError), str(path), ProfileError)
    section = Section(held, str(path), ProfileError, keys="model_name layers profile_data batch_size dtype")
    name, count = section.text("model_name"), section.whole("layers", minimum=1)
    rows: dict[int, Section] = {}
    for index, value in enumerate(section.items("profile_data"), 1):
        row = Section(value, f"{path}: entry {index} of `profile_data`", ProfileError, keys=_RESULT_KEYS)
        row.check_spelling()
        number = row.whole("layer", minimum=1)
        if number in rows or number > count:
            row.fail(
                f"layer {number} of {count}" + (" is there twice" if number in rows else ""),
                "number each layer once, from 1 to {count}",
                code="duplicate",
            )
        rows[number] = row
    if len(rows) < count:
        absent = next(number for number in range(1, count + 1) if number not in rows)
        section.fail(f"{len(rows)} of {count} layers were measured, but layer {absent} was not", "measure all layers")
    ordered = [rows[number] for number in range(1, count + 1)]
    model = PipeEdgeModel(
        name,
        tuple(_number(row, "memory", row.get("memory")) for row in ordered),
        _values(ordered[0], "shape_in"),
        tuple(_values(row, "shape_out") for row in ordered),
    )
    times = tuple(_number(row, "time", row.get("time")) for row in ordered)
    return model, Timing(section.whole("batch_size", minimum=1), section.text("dtype"), times)


def read_profile(
    models: str | os.PathLike[str],
    device_types: str | os.PathLike[str],
    *,
    model: str,
    device_type: str,
    dtype: str = "torch.float32",
) -> Profile:
    """Return PipeEdge's `model` as a `Profile`, measured on `device_type`, with all measured batch sizes.

    PipeEdge measures inference, so backward times are 0. The memory of a layer counts as parameters.

    Raises ProfileError or ClusterError naming file and key.
    """
    from hpgo.model.profile import Layer, Profile

    found, _ = read_model(models, model)
    layers = len(found.memory_mb)
    types = read_device_types(device_types, model=model, layers=layers, models=models)
    timings = {row.batch_size: row for row in _timings(types, str(device_types), model, device_type, dtype)}
    sizes = tuple(sorted(timings))
    ids = [f"layer{number}" for number in range(1, layers + 1)]
    width = bytes_of(dtype)
    return Profile(
        model,
        sizes,
        tuple(
            Layer(
                id=layer_id,
                name=layer_id,
                forward_s=tuple(timings[size].time_s[index] for size in sizes),
                backward_s=(0.0,) * len(sizes),
                activation_bytes=tuple(width * size * found.parameters_out[index] for size in sizes),
                parameter_bytes=found.memory_mb[index] * MEGA["pipeedge"],
            )
            for index, layer_id in enumerate(ids)
        ),
        tuple(pairwise(ids)),
        source=f"PipeEdge: {models}, {device_types} ({device_type})",
    )


def read_cluster(
    models: str | os.PathLike[str],
    device_types: str | os.PathLike[str],
    devices: str | os.PathLike[str],
    *,
    model: str,
    device_type: str,
    dtype: str = "torch.float32",
) -> Cluster:
    """Return PipeEdge's hosts as a `Cluster` of one-device nodes, with speeds relative to `device_type`.

    PipeEdge times each layer separately, but a device here has one speed. It is that of the whole `model` at the
    largest batch size that both types were measured with. All links have the rate of the slowest port in use.

    Raises ProfileError or ClusterError naming file and key.
    """
    from hpgo.hardware.cluster import Cluster, Device, Link, Node

    found, _ = read_model(models, model)
    types = read_device_types(device_types, model=model, layers=len(found.memory_mb), models=models)

    def totals(name: str) -> dict[int, float]:
        rows = _timings(types, str(device_types), model, name, dtype)
        return {row.batch_size: sum(row.time_s) for row in rows}

    measured = totals(device_type)
    nodes, rates = [], []
    for name, hosts in read_devices(devices).items():
        if not hosts:
            continue
        if name not in types:
            raise ClusterError(f"{devices}: type `{shorten(name)}` is not in {device_types}", did_you_mean(name, types))
        own = totals(name)
        if not (common := own.keys() & measured.keys()):
            raise ClusterError(
                f"{device_types}: `{name}` and `{device_type}` share no batch size", "measure one on both"
            )
        kind = types[name]
        device = Device(name, kind.memory_mb * MEGA["pipeedge"], measured[max(common)] / own[max(common)])
        nodes += [Node(device, 1, host) for host in hosts]
        rates.append(kind.bandwidth_mbps * MEGA["pipeedge"] / 8)
    if not nodes:
        raise ClusterError(f"{devices}: there are no hosts", "list at least one")
    link = Link(min(rates), min(rates))
    return Cluster(str(devices), tuple(nodes), link, link, source=f"PipeEdge: {device_types}, {devices}")


def _timings(
    types: Mapping[str, DeviceType], file: str, model: str, device_type: str, dtype: str
) -> tuple[Timing, ...]:
    if device_type not in types:
        raise ClusterError(f"{file}: there is no type `{shorten(device_type)}`", did_you_mean(device_type, types))
    rows = tuple(row for row in types[device_type].timings.get(model, ()) if row.dtype == dtype)
    if not rows:
        raise ClusterError(
            f"{file}: type `{device_type}` has no profile of `{model}` in {dtype}",
            "measure it with `hpgo profile --format pipeedge`",
        )
    return rows


def bytes_of(dtype: str) -> int:
    """Return the bytes of one value; raise ArgumentError for an unknown type."""
    if not isinstance(dtype, str) or dtype not in BYTES_OF_DTYPE:
        wanted = f"torch.{dtype}" if isinstance(dtype, str) else ""
        raise ArgumentError(f"{safe_repr(dtype)} is not a known dtype", did_you_mean(wanted, BYTES_OF_DTYPE))
    return BYTES_OF_DTYPE[dtype]


def _mapping(path: str | os.PathLike[str], error: type[HpgoError]) -> dict[str, object]:
    document = parse_yaml(read_text(path, error), str(path), error)
    if kind := kind_of_document(document):
        raise error(f"{path} is {kind}, not a file of PipeEdge's", code="wrong_kind_of_file")
    if not isinstance(document, dict):
        raise error(f"{path}: must be a mapping of names, got {safe_repr(document)}", "")
    return document


def _number(section: Section, what: str, value: object, *, maximum: float = 1e18) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        section.fail(f"`{what}` must be a number, got {safe_repr(value)}")
    if not 0 <= (number := as_float(value)) <= maximum:  # NaN fails every comparison
        section.fail(f"`{what}` is {safe_repr(value)}", "give a finite number of at least 0")
    return number


def _numbers(section: Section, key: str, wanted: int | None) -> tuple[float, ...]:
    values = section.items(key)
    if wanted is not None and len(values) != wanted:
        section.fail(f"`{key}` has {len(values)} entries, but the model has {wanted} layers", "give one for each layer")
    return tuple(_number(section, f"{key}[{index}]", value) for index, value in enumerate(values))


def _values(section: Section, key: str) -> int:
    """Return the total number of values in tensors of the shapes under `key`."""
    count = 0
    for shape in section.items(key):
        if not isinstance(shape, list) or not all(type(size) is int and 0 <= size <= 2**40 for size in shape):
            section.fail(
                f"`{key}` must be a list of shapes, got {safe_repr(shape)} in it", "write it like `[[197, 768]]`"
            )
        count += math.prod(shape)
    return (
        count
        if count <= 10**18
        else section.fail(f"`{key}` has {count:g} values", "give one shape for each tensor, such as `[[197, 768]]`")
    )


def _unit(section: Section, key: str, parse_unit: Callable[[str | float], float]) -> float | None:
    value = section.get(key, None)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        section.wrong(key, "a number with its unit", value)
    try:
        return parse_unit(value)
    except HpgoError as error:
        section.reraise(error, f"`{key}`: {error.message}")


def _end(section: Section, key: str) -> End | None:
    if section.get(key, None) is None:
        return None
    end = Section(section.get(key), f"{section.where}: `{key}`", ClusterError, keys="host bandwidth latency")
    host = end.text("host") if "host" in end else None
    found = End(host, _unit(end, "bandwidth", parse_bytes_per_s), _unit(end, "latency", parse_seconds) or 0.0)
    if host is not None and (found.bytes_per_s is not None or found.latency_s):
        end.fail("an end with a `host` of the row uses the links of that host", "leave `bandwidth` and `latency` out")
    end.done()
    return found


def check_names(links: Links, known: Iterable[str], file: str) -> None:
    """Raise ClusterError if `links` name a host or type that is not in `known`."""
    names = set(known)
    used = [name for line in links.lines for name in (line.senders, line.receivers)]
    used += [end.host for end in (links.input, links.output) if end is not None and end.host is not None]
    for name in used:
        if name not in names:
            raise ClusterError(f"{file}: there is no host or type `{shorten(name)}`", did_you_mean(name, sorted(names)))
