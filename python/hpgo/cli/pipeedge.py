"""Output of `hpgo profile --format pipeedge`, and checks of its options."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import click
from click.core import ParameterSource

from hpgo.base.messages import pluralize, shorten
from hpgo.cli.terminal import say
from hpgo.errors import ArgumentError, ProfileError
from hpgo.model.formats.pipeedge import MEGA, Timing, read_results
from hpgo.model.formats.pipeedge_merge import Device, merged

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hpgo.model.formats.pipeedge import PipeEdgeModel
    from hpgo.model.profile import Profile

_MEASURING = ("by", "batch_size", "ranks", "inference", "autocast", "device", "time_limit", "memory", "as_json")
_MERGING = (
    "device_type", "device_memory", "device_bandwidth", "model_name", "models_file", "dev_types_file", "overwrite",
    "results",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Files:
    """The files `models.yml` and `device_types.yml`, and the device type whose results are added."""

    models: str
    device_types: str
    device: Device
    overwrite: bool

    def check(self, model: PipeEdgeModel, rows: Sequence[Timing]) -> None:
        """Raise the errors that `merge` would raise; they don't depend on the times in `rows`."""
        for file in (self.models, self.device_types):
            check_folder(file)
        merged(self.models, self.device_types, model=model, device=self.device, timings=rows, overwrite=self.overwrite)

    def merge(self, model: PipeEdgeModel, rows: Sequence[Timing]) -> None:
        """Add the results to both files, and report it."""
        new = merged(
            self.models, self.device_types, model=model, device=self.device, timings=rows, overwrite=self.overwrite
        )
        new.write(self.models, self.device_types)
        for note in new.notes:
            say("note", note)
        name, device = shorten(model.name), shorten(self.device.name)
        sizes = ", ".join(str(one.batch_size) for one in rows)
        say(
            "note",
            f"{self.device_types} has `{name}` on `{device}` at batch size {sizes} in {rows[0].dtype}, "
            f"{self.models} its {pluralize(len(model.memory_mb), 'layer')}",
        )


def device(name: str, memory_bytes: float | None, bytes_per_s: float | None) -> Device:
    """Return a device type in PipeEdge's units: MB and Mbit/s of 2^20."""
    mega = MEGA["pipeedge"]
    return Device(
        name,
        None if memory_bytes is None else memory_bytes / mega,
        None if bytes_per_s is None else 8 * bytes_per_s / mega,
    )


def timings(profile: Profile, dtype: str) -> list[Timing]:
    """Return the forward times of a profile for each batch size."""
    return [
        Timing(size, dtype, tuple(layer.forward_s[at] for layer in profile.layers))
        for at, size in enumerate(profile.batch_sizes)
    ]


def read_all(files: Sequence[str], *, name: str | None, dtype: str | None) -> tuple[PipeEdgeModel, list[Timing]]:
    """Return model and times of result files of PipeEdge's profiler, with `name` and `dtype` replaced if given.

    Raises ProfileError if the files are of different models.
    """
    found = [read_results(file) for file in files]
    model = found[0][0]
    for file, (other, _) in zip(files[1:], found[1:], strict=True):
        # Measured memory varies from run to run, so it may differ. All other properties must be equal.
        if replace(other, memory_mb=model.memory_mb) != model:
            raise ProfileError(
                f"{file} is of `{shorten(other.name)}`, {files[0]} of `{shorten(model.name)}`, or their layers differ",
                "merge one model at a time",
            )
    rows = [timing if dtype is None else replace(timing, dtype=f"torch.{dtype}") for _, timing in found]
    return (model if name is None else replace(model, name=name)), rows


def check_folder(file: str) -> None:
    """Raise ArgumentError if the folder of `file` does not exist."""
    parent = Path(file).parent
    if not parent.is_dir():
        raise ArgumentError(
            f"folder not found: `{parent}`, for `{file}`", f"make the folder: `mkdir -p {parent}`", code="not_found"
        )


def check_words(context: click.Context) -> None:
    """Raise UsageError for options that can't be combined."""
    given = {name for name in context.params if context.get_parameter_source(name) is not ParameterSource.DEFAULT}
    called = {option.name: option.opts[-1] for option in context.command.params}
    results, form = context.params["results"], context.params["form"]
    if context.params["merged"]:
        others = [called[name] for name in called if name in given - {"merged", "profile_boundary", "outputs"}]
        if others:
            raise click.UsageError(f"{', '.join(others)} can't be used with --merge, which measures nothing")
        return
    if "profile_boundary" in given:
        raise click.UsageError("--profile-boundary can only be used with --merge")
    if (context.params["workload"] is None) != bool(results):
        raise click.UsageError(
            "give a workload to measure, or results with --from, or profiles with --merge, but not both"
        )
    if form is None:
        others = [called[name] for name in _MERGING if name in given]
        if others:
            raise click.UsageError(f"{', '.join(others)} can only be used with --format pipeedge")
        return
    if context.params["device_type"] is None:
        raise click.UsageError("--format pipeedge needs --device-type, the name of this machine in device_types.yml")
    refused = ["outputs", "autocast", *(_MEASURING if results else ())]
    others = [called[name] for name in dict.fromkeys(refused) if name in given]
    if others:
        why = " and --from" if results else ""
        raise click.UsageError(f"{', '.join(others)} can't be used with --format pipeedge{why}")
