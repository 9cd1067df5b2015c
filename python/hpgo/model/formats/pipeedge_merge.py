"""Measurements merged into PipeEdge's `models.yml` and `device_types.yml`, whose other lines stay as they are."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hpgo.base.documents import hinted, parse_yaml, read_text, write_text
from hpgo.base.files import as_path
from hpgo.base.messages import pluralize, safe_repr, shorten
from hpgo.base.yaml_edits import put
from hpgo.errors import ClusterError, HpgoError, ProfileError
from hpgo.model.formats.pipeedge import read_device_types, read_model

if TYPE_CHECKING:
    import os
    from collections.abc import Sequence

    from hpgo.model.formats.pipeedge import PipeEdgeModel, Timing

_FAR = 0.1
"""From so large a difference on, the memory that a file has and the one that was found are told apart."""


@dataclass(frozen=True, slots=True)
class Device:
    """The device type that was measured on; what is None is as its file says."""

    name: str
    memory_mb: float | None = None
    bandwidth_mbps: float | None = None


@dataclass(frozen=True, slots=True)
class Merged:
    """What the two files are to hold; None where nothing changes."""

    models: str | None
    device_types: str | None
    notes: tuple[str, ...] = ()

    def write(self, models: str | os.PathLike[str], device_types: str | os.PathLike[str]) -> None:
        """Writes what changes, each file whole or not at all. Raises ProfileError or ClusterError if that fails."""
        if self.models is not None:
            write_text(models, self.models, ProfileError)
        if self.device_types is not None:
            write_text(device_types, self.device_types, ClusterError)


@hinted("`hpgo profile --format pipeedge` writes such files where there are none")
def merged(
    models: str | os.PathLike[str],
    device_types: str | os.PathLike[str],
    *,
    model: PipeEdgeModel,
    device: Device,
    timings: Sequence[Timing],
    overwrite: bool = False,
) -> Merged:
    """The texts of both files with `model`, and with `timings` of it on `device`; they need not exist before.

    What a file says already of the model, or of it on this device at a batch size and dtype, is left alone if it is the
    same, takes its new value with `overwrite`, and is an error otherwise. Raises ProfileError for what the first can't
    take, ClusterError for the second.
    """
    described, notes = _with_model(models, model, overwrite=overwrite)
    timed = _with_timings(device_types, model, device, timings, overwrite=overwrite)
    return Merged(described, timed, tuple(notes))


def _with_model(path: str | os.PathLike[str], model: PipeEdgeModel, *, overwrite: bool) -> tuple[str | None, list[str]]:
    text, held = _read(path, ProfileError)
    keys: dict[str, Any] = {
        "layers": len(model.memory_mb),
        "mem_MB": [_plain(one) for one in model.memory_mb],
        "parameters_in": _plain(model.parameters_in),
        "parameters_out": [_plain(one) for one in model.parameters_out],
    }
    if model.name not in held:
        return put(text, [model.name], keys, str(path), ProfileError), []
    before, _ = read_model(path, model.name)
    if not overwrite:
        if (before.parameters_in, before.parameters_out) != (model.parameters_in, model.parameters_out):
            raise ProfileError(
                f"{path}: model `{shorten(model.name)}` has {pluralize(len(before.memory_mb), 'layer')} that take in "
                f"{before.parameters_in:g} values and send {sum(before.parameters_out):g}, not "
                f"{pluralize(len(model.memory_mb), 'layer')}, "
                f"{model.parameters_in:g} and {sum(model.parameters_out):g}",
                "give this one another `--model-name`, or `--overwrite` that one",
            )
        held_mb, found_mb = math.fsum(before.memory_mb), math.fsum(model.memory_mb)
        if abs(held_mb - found_mb) <= _FAR * found_mb:
            return None, []
        note = (
            f"{path} says that `{shorten(model.name)}` takes {held_mb:.4g} MB, and stays as it is, but it was found to "
            f"take {found_mb:.4g} MB: `--overwrite` puts that there"
        )
        return None, [note]
    document = held[model.name]
    for key, value in keys.items():
        if document.get(key) != value:
            text = put(text, [model.name, key], value, str(path), ProfileError)
    return text, []


def _with_timings(
    path: str | os.PathLike[str], model: PipeEdgeModel, device: Device, timings: Sequence[Timing], *, overwrite: bool
) -> str:
    text, held = _read(path, ClusterError)
    if device.name not in held:
        if device.memory_mb is None or device.bandwidth_mbps is None:
            raise ClusterError(
                f"{path}: there is no type `{shorten(device.name)}` yet, so that its memory and bandwidth are needed",
                "like `--device-memory 512MiB --device-bandwidth 100Mbit/s`",
            )
        keys = {"bw_Mbps": _plain(device.bandwidth_mbps), "mem_MB": _plain(device.memory_mb)}
        rows = {"model_profiles": {model.name: [_row(one) for one in timings]}}
        return put(text, [device.name], keys | rows, str(path), ClusterError)
    types = read_device_types(path, model=model.name, layers=len(model.memory_mb))
    known = types[device.name]
    for key, said, has in (
        ("mem_MB", device.memory_mb, known.memory_mb),
        ("bw_Mbps", device.bandwidth_mbps, known.bandwidth_mbps),
    ):
        if said is not None and not math.isclose(said, has, rel_tol=1e-9):
            raise ClusterError(
                f"{path}: type `{shorten(device.name)}` has `{key}: {has:g}`, not {said:g}",
                "leave the option out to keep that, or name another type (MB and Mbps count 2^20 there)",
            )
    there = [(row.batch_size, row.dtype) for row in known.timings.get(model.name, ())]
    for one in timings:
        rows_path = [device.name, "model_profiles", model.name]
        if (one.batch_size, one.dtype) not in there:
            text = put(text, [*rows_path, len(there)], _row(one), str(path), ClusterError)
            there.append((one.batch_size, one.dtype))
            continue
        if not overwrite:
            raise ClusterError(
                f"{path}: type `{shorten(device.name)}` has a profile of `{shorten(model.name)}` at batch size "
                f"{one.batch_size} in {one.dtype} already",
                "`--overwrite` puts the new times in its place",
            )
        at = len(there) - 1 - there[::-1].index((one.batch_size, one.dtype))  # of several, the last counts
        text = put(text, [*rows_path, at, "time_s"], _row(one)["time_s"], str(path), ClusterError)
    return text


def _read(path: str | os.PathLike[str], error: type[HpgoError]) -> tuple[str, dict[str, Any]]:
    """Text and content of a file of names; nothing if there is none."""
    file = as_path(path, error)
    if not file.exists():
        return "", {}
    text = read_text(file, error)
    held = parse_yaml(text, str(path), error)
    if held is None:  # comments alone
        return text, {}
    if not isinstance(held, dict):
        raise error(f"{path}: must be a mapping of names, got {safe_repr(held)}", "")
    return text, held


def _row(timing: Timing) -> dict[str, Any]:
    return {
        "batch_size": timing.batch_size,
        "dtype": timing.dtype,
        "time_s": [_plain(one) for one in timing.time_s],
    }


def _plain(number: float) -> float:
    """As people write it."""
    return int(number) if float(number).is_integer() else number
