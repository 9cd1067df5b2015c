"""Merging of measurements into PipeEdge's `models.yml` and `device_types.yml`, whose other lines stay unchanged."""

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
"""Relative difference between the memory in the file and the measured memory from which on hpgo reports it."""


@dataclass(frozen=True, slots=True)
class Device:
    """The device type of the measurement. None means the value in its file."""

    name: str
    memory_mb: float | None = None
    bandwidth_mbps: float | None = None


@dataclass(frozen=True, slots=True)
class Merged:
    """New texts of the two files; None means that a file does not change."""

    models: str | None
    device_types: str | None
    notes: tuple[str, ...] = ()

    def write(self, models: str | os.PathLike[str], device_types: str | os.PathLike[str]) -> None:
        """Write the changed files, each atomically. Raise ProfileError or ClusterError if that fails."""
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
    """Return the texts of both files with `model`, and with `timings` of it on `device`. The files need not exist.

    Existing values of the model, or of its timings at a batch size and dtype, stay if they are equal. Other values are
    replaced with `overwrite`, and are an error without it. Raises ProfileError for conflicts in the first file, and
    ClusterError for conflicts in the second.
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
                f"{path}: model `{shorten(model.name)}` has {pluralize(len(before.memory_mb), 'layer')} with "
                f"{before.parameters_in:g} input and {sum(before.parameters_out):g} output values, not "
                f"{pluralize(len(model.memory_mb), 'layer')}, "
                f"{model.parameters_in:g} input and {sum(model.parameters_out):g} output values",
                "choose another `--model-name`, or pass `--overwrite` to replace the model",
            )
        # Memory is a noisy measurement, so a difference is reported but is not an error.
        held_mb, found_mb = math.fsum(before.memory_mb), math.fsum(model.memory_mb)
        if abs(held_mb - found_mb) <= _FAR * found_mb:
            return None, []
        note = (
            f"memory of `{shorten(model.name)}` in {path} stays {held_mb:.4g} MB, but "
            f"{found_mb:.4g} MB were measured: `--overwrite` replaces it"
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
                f"{path}: type `{shorten(device.name)}` is new, but its memory or bandwidth is missing",
                "add them, for example `--device-memory 512MiB --device-bandwidth 100Mbit/s`",
            )
        keys = {"bw_Mbps": _plain(device.bandwidth_mbps), "mem_MB": _plain(device.memory_mb)}
        rows = {"model_profiles": {model.name: [_row(one) for one in timings]}}
        return put(text, [device.name], keys | rows, str(path), ClusterError)
    types = read_device_types(path, model=model.name, layers=len(model.memory_mb))
    known = types[device.name]
    for key, given, known_value in (
        ("mem_MB", device.memory_mb, known.memory_mb),
        ("bw_Mbps", device.bandwidth_mbps, known.bandwidth_mbps),
    ):
        if given is not None and not math.isclose(given, known_value, rel_tol=1e-9):
            raise ClusterError(
                f"{path}: type `{shorten(device.name)}` has `{key}: {known_value:g}`, not {given:g}",
                "leave out the option to keep that value, or name another type (MB and Mbps count 2^20 there)",
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
                "pass `--overwrite` to replace its times",
            )
        at = (
            len(there) - 1 - there[::-1].index((one.batch_size, one.dtype))
        )  # PipeEdge uses the last of several entries
        text = put(text, [*rows_path, at, "time_s"], _row(one)["time_s"], str(path), ClusterError)
    return text


def _read(path: str | os.PathLike[str], error: type[HpgoError]) -> tuple[str, dict[str, Any]]:
    """Return text and content of a file of names; both are empty if the file does not exist."""
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
    """Return a whole number as an int, so that it is written without a decimal point."""
    return int(number) if float(number).is_integer() else number
