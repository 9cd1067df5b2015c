"""PipeEdge's YAML files: models, device types, devices, what its profiler saw. And `links.yml`, which it does not have.

Whatever is wrong is named with file and key. Keys that PipeEdge does not know are left alone, as it does.
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

    from hpgo.machine.cluster import Cluster
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
"""What `MB` and `Mbps` count: PipeEdge means binary megas in both."""


@dataclass(frozen=True, slots=True)
class PipeEdgeModel:
    """A chain of layers, as `models.yml` has it."""

    name: str
    memory_mb: tuple[float, ...]
    """By layer."""
    parameters_in: float
    """Values that one sample brings."""
    parameters_out: tuple[float, ...]
    """Values that leave each layer for one sample."""


@dataclass(frozen=True, slots=True)
class Timing:
    """What a model was measured to take on a device type, at one batch size and dtype."""

    batch_size: int
    dtype: str
    time_s: tuple[float, ...]
    """By layer, for the whole batch."""


@dataclass(frozen=True, slots=True)
class DeviceType:
    """A device type, as `device_types.yml` has it."""

    name: str
    bandwidth_mbps: float
    memory_mb: float
    timings: Mapping[str, tuple[Timing, ...]]
    """By model."""


@dataclass(frozen=True, slots=True)
class LinkLine:
    """A line of `links.yml`: hosts or types, and what differs from the slower of the two ports."""

    senders: str
    receivers: str
    bytes_per_s: float | None
    latency_s: float | None


@dataclass(frozen=True, slots=True)
class End:
    """Where the input comes from, or the result goes to."""

    host: str | None
    """A host of the row: the hop is free for that host, and its link for others."""
    bytes_per_s: float | None
    """None: the rate of the host at the other end."""
    latency_s: float


@dataclass(frozen=True, slots=True)
class Links:
    """What `links.yml` says. Later lines win over earlier ones."""

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
    """The model `name` in the file `path`, and remarks worth showing.

    A list of `parameters_out` that is shorter than the model repeats, as in PipeEdge, if it fits a whole number of
    times.

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
            "one entry for each layer, or a block that repeats a whole number of times",
        )
    remark = f"{section.where}: `parameters_out` has {len(parameters_out)} entries for {layers} layers: they repeat"
    repeated = parameters_out * (layers // len(parameters_out))
    return PipeEdgeModel(name, memory_mb, parameters_in, repeated), (remark,)


@_hint
def read_device_types(
    path: str | os.PathLike[str], *, model: str, layers: int, models: str | os.PathLike[str] | None = None
) -> dict[str, DeviceType]:
    """The device types in the file `path` by name, with their timings of `model` only.

    A type that has none of `model` is read without timings. But if the file `models` is given, and the type has those
    of a name that is almost the model's and none of that file's, it is misspelt.

    Raises ClusterError naming file and key.
    """
    others = _mapping(models, ProfileError) if models is not None else {}
    types = {}
    for name, value in _mapping(path, ClusterError).items():
        section = Section(value, f"{path}: type `{shorten(name)}`", ClusterError, keys="bw_Mbps mem_MB model_profiles")
        bandwidth = _number(section, "bw_Mbps", section.get("bw_Mbps"), most=math.inf)
        memory = _number(section, "mem_MB", section.get("mem_MB"))
        profiles = section.get("model_profiles", None)
        section.check_spelling()
        timings: list[Timing] = []
        if profiles is not None:
            held = Section(profiles, f"{section.where}: `model_profiles`", ClusterError)
            rows = held.items(model) if model in held and held.get(model) is not None else []
            strange = [str(other) for other in held if other not in others]
            if models is not None and model not in held and (slip := nearest_names(model, strange, least=1.0)):
                held.fail(
                    f"there is no model `{shorten(slip[0])}` in {models}",
                    f"did you mean `{printable(model)}`?",
                    code="unknown_name",
                )
            for index, row in enumerate(rows, 1):
                entry = Section(
                    row, f"{section.where}: profile {index} of `{shorten(model)}`", ClusterError, keys=_TIMING_KEYS
                )
                batch_size = entry.whole("batch_size", least=1)
                timings.append(Timing(batch_size, entry.text("dtype"), _numbers(entry, "time_s", layers)))
        types[name] = DeviceType(name, bandwidth, memory, {model: tuple(timings)} if timings else {})
    return types


@hinted("write each type with a list of hosts, such as `my-type: [host-0, host-1]`")
def read_devices(path: str | os.PathLike[str]) -> dict[str, tuple[str, ...]]:
    """The hosts of each type in the file `path`.

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
    """The links in the file `path`.

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
                line.fail(f"`between` must name two, got {len(names)}", "like `between: [mb-0, rcc-0]`")
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
    """What PipeEdge's profiler saw of a model, in its `profiler_results.yml`.

    Values of a layer's inputs and outputs are counted over all of its tensors. Memory is as it stands there: the growth
    of a process, in MB of 10^6 bytes, which PipeEdge's own tools copy into `models.yml` as well.

    Raises ProfileError naming file and key, also where layers are missing.
    """
    held = parse_yaml(read_text(path, ProfileError), str(path), ProfileError)
    section = Section(held, str(path), ProfileError, keys="model_name layers profile_data batch_size dtype")
    name, count = section.text("model_name"), section.whole("layers", least=1)
    rows: dict[int, Section] = {}
    for index, value in enumerate(section.items("profile_data"), 1):
        row = Section(value, f"{path}: entry {index} of `profile_data`", ProfileError, keys=_RESULT_KEYS)
        row.check_spelling()
        number = row.whole("layer", least=1)
        if number in rows or number > count:
            row.fail(
                f"layer {number} of {count}" + (" is there twice" if number in rows else ""),
                "count from 1",
                code="duplicate",
            )
        rows[number] = row
    if len(rows) < count:
        absent = next(number for number in range(1, count + 1) if number not in rows)
        section.fail(f"{len(rows)} of {count} layers were measured, layer {absent} was not", "measure the others too")
    ordered = [rows[number] for number in range(1, count + 1)]
    model = PipeEdgeModel(
        name,
        tuple(_number(row, "memory", row.get("memory")) for row in ordered),
        _values(ordered[0], "shape_in"),
        tuple(_values(row, "shape_out") for row in ordered),
    )
    times = tuple(_number(row, "time", row.get("time")) for row in ordered)
    return model, Timing(section.whole("batch_size", least=1), section.text("dtype"), times)


def read_profile(
    models: str | os.PathLike[str],
    device_types: str | os.PathLike[str],
    *,
    model: str,
    device_type: str,
    dtype: str = "torch.float32",
) -> Profile:
    """PipeEdge's `model` as a `Profile`, measured on `device_type`, with every batch size that was.

    PipeEdge measures inference, so backward times are 0; layer memory counts as parameters.

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
    """PipeEdge's hosts as a `Cluster` of one-device machines, their speed relative to `device_type`.

    A device has one speed where PipeEdge times each layer apart: it is that of the whole `model` at the largest batch
    size that both were measured with. All links are as fast as the slowest port in use.

    Raises ProfileError or ClusterError naming file and key.
    """
    from hpgo.machine.cluster import Cluster, Device, Link, Node

    found, _ = read_model(models, model)
    types = read_device_types(device_types, model=model, layers=len(found.memory_mb), models=models)

    def totals(name: str) -> dict[int, float]:
        rows = _timings(types, str(device_types), model, name, dtype)
        return {row.batch_size: sum(row.time_s) for row in rows}

    measured = totals(device_type)
    machines, rates = [], []
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
        machines += [Node(device, 1, host) for host in hosts]
        rates.append(kind.bandwidth_mbps * MEGA["pipeedge"] / 8)
    if not machines:
        raise ClusterError(f"{devices}: there are no hosts", "list at least one")
    link = Link(min(rates), min(rates))
    return Cluster(str(devices), tuple(machines), link, link, source=f"PipeEdge: {device_types}, {devices}")


def _timings(
    types: Mapping[str, DeviceType], file: str, model: str, device_type: str, dtype: str
) -> tuple[Timing, ...]:
    if device_type not in types:
        raise ClusterError(f"{file}: there is no type `{shorten(device_type)}`", did_you_mean(device_type, types))
    rows = tuple(row for row in types[device_type].timings.get(model, ()) if row.dtype == dtype)
    if not rows:
        raise ClusterError(f"{file}: type `{device_type}` has no profile of `{model}` in {dtype}", "measure it")
    return rows


def bytes_of(dtype: str) -> int:
    """Bytes of one value; raises ArgumentError for a type that nobody knows."""
    if not isinstance(dtype, str) or dtype not in BYTES_OF_DTYPE:
        wanted = f"torch.{dtype}" if isinstance(dtype, str) else ""
        raise ArgumentError(f"{safe_repr(dtype)} is no dtype that hpgo knows", did_you_mean(wanted, BYTES_OF_DTYPE))
    return BYTES_OF_DTYPE[dtype]


def _mapping(path: str | os.PathLike[str], error: type[HpgoError]) -> dict[str, object]:
    document = parse_yaml(read_text(path, error), str(path), error)
    if kind := kind_of_document(document):
        raise error(f"{path} is {kind}, not a file of PipeEdge's", code="wrong_kind_of_file")
    if not isinstance(document, dict):
        raise error(f"{path}: must be a mapping of names, got {safe_repr(document)}", "")
    return document


def _number(section: Section, what: str, value: object, *, most: float = 1e18) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        section.fail(f"`{what}` must be a number, got {safe_repr(value)}")
    if not 0 <= (number := as_float(value)) <= most:  # NaN fails every comparison
        section.fail(f"`{what}` is {safe_repr(value)}", "it is a finite number from 0")
    return number


def _numbers(section: Section, key: str, wanted: int | None) -> tuple[float, ...]:
    values = section.items(key)
    if wanted is not None and len(values) != wanted:
        section.fail(f"`{key}` has {len(values)} entries where the model has {wanted} layers", "one for each layer")
    return tuple(_number(section, f"{key}[{index}]", value) for index, value in enumerate(values))


def _values(section: Section, key: str) -> int:
    """How many values tensors of the shapes under `key` have."""
    count = 0
    for shape in section.items(key):
        if not isinstance(shape, list) or not all(type(size) is int and 0 <= size <= 2**40 for size in shape):
            section.fail(f"`{key}` must be a list of shapes, got {safe_repr(shape)} in it", "like `[[197, 768]]`")
        count += math.prod(shape)
    return count if count <= 10**18 else section.fail(f"`{key}` has {count:g} values", "are these shapes?")


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
        end.fail("a `host` of the row has its links already", "leave `bandwidth` and `latency` out")
    end.done()
    return found


def check_names(links: Links, known: Iterable[str], file: str) -> None:
    """Raises ClusterError if `links` name a host or type that is not in `known`."""
    names = set(known)
    asked = [name for line in links.lines for name in (line.senders, line.receivers)]
    asked += [end.host for end in (links.input, links.output) if end is not None and end.host is not None]
    for name in asked:
        if name not in names:
            raise ClusterError(f"{file}: there is no host or type `{shorten(name)}`", did_you_mean(name, sorted(names)))
