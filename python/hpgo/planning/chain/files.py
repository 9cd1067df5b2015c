"""Chain problem for PipeEdge's three files."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpgo._core import at_batch
from hpgo.base.messages import did_you_mean, safe_repr, shorten
from hpgo.errors import ArgumentError, ClusterError, InfeasibleError
from hpgo.model.formats import pipeedge
from hpgo.planning.chain.records import ChainProblem, Hop, HostGroup

if TYPE_CHECKING:
    import os

    from hpgo.model.formats.pipeedge import Units, ValueType

    Path = str | os.PathLike[str]


def task_of_files(
    models: Path,
    device_types: Path,
    devices: Path,
    *,
    name: str,
    batch_size: int,
    dtype: ValueType,
    interpolate: bool,
    units: Units,
    ignore_unknown_types: bool,
) -> ChainProblem:
    """Return the chain problem of the model `name`. Raises an error of the file that is invalid."""
    if not isinstance(units, str) or units not in pipeedge.MEGA:
        raise ArgumentError(
            f"unknown units: {safe_repr(units)}", f"known: {', '.join(pipeedge.MEGA)}", code="unknown_name"
        )
    width, mega = pipeedge.bytes_of(dtype), pipeedge.MEGA[units]
    model, remarks = pipeedge.read_model(models, name)
    types = pipeedge.read_device_types(device_types, model=name, layers=len(model.memory_mb), models=models)
    hosts = pipeedge.read_devices(devices)
    notes = list(remarks)
    groups = []
    for type_name, names in hosts.items():
        # A type without hosts is not used, so it needs no profile.
        if not names:
            continue
        listed = f"{', '.join(names[:4])}{', …' if len(names) > 4 else ''}"
        if type_name not in types:
            if not ignore_unknown_types:
                raise ClusterError(
                    f"{devices}: type `{shorten(type_name)}` ({listed}) is not in {device_types}",
                    f"{did_you_mean(type_name, types)} (`--ignore-unknown-types` plans without these hosts)".lstrip(),
                )
            notes.append(f"type `{shorten(type_name)}` is not in {device_types}: {listed} not used")
            continue
        kind = types[type_name]
        if name not in kind.timings:
            if model.memory_mb:
                notes.append(f"type `{type_name}` has no profile of `{name}`: {listed} not used")
            continue
        # Of several profiles for a batch size, the last one counts, and a note reports it.
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
            HostGroup(
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
    # Value counts are per sample: the input of the first layer, then the output of each layer.
    values = (model.parameters_in, *model.parameters_out)
    return ChainProblem(
        model=name,
        layer_bytes=[memory * mega for memory in model.memory_mb],
        cut_bytes=[width * batch_size * count for count in values],
        numbers=list(range(len(model.memory_mb) + 1)),
        parts=[[number] for number in range(1, len(model.memory_mb) + 1)],
        groups=groups,
        names=frozenset(types) | frozenset(hosts) | frozenset(host for listed in hosts.values() for host in listed),
        # A link is as fast as the slower of its two ports. PipeEdge's files have no latency.
        link=lambda one, other: Hop(min(one.port_bytes_per_s, other.port_bytes_per_s), 0.0),
        bits=8 * width,
        remarks=notes,
    )
