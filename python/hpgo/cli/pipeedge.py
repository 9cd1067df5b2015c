"""What `hpgo profile --format pipeedge` writes, and which of its words go together."""

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
    """`models.yml` and `device_types.yml`, and whose figures they are to take."""

    models: str
    device_types: str
    device: Device
    overwrite: bool

    def check(self, model: PipeEdgeModel, rows: Sequence[Timing]) -> None:
        """Raises what `merge` would, whatever the times of `rows` are."""
        for file in (self.models, self.device_types):
            check_folder(file)
        merged(self.models, self.device_types, model=model, device=self.device, timings=rows, overwrite=self.overwrite)

    def merge(self, model: PipeEdgeModel, rows: Sequence[Timing]) -> None:
        """Writes both files, and says so."""
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
    """A type in PipeEdge's units."""
    mega = MEGA["pipeedge"]
    return Device(
        name,
        None if memory_bytes is None else memory_bytes / mega,
        None if bytes_per_s is None else 8 * bytes_per_s / mega,
    )


def timings(profile: Profile, dtype: str) -> list[Timing]:
    """The forward times of a profile, by batch size."""
    return [
        Timing(size, dtype, tuple(layer.forward_s[at] for layer in profile.layers))
        for at, size in enumerate(profile.batch_sizes)
    ]


def read_all(files: Sequence[str], *, name: str | None, dtype: str | None) -> tuple[PipeEdgeModel, list[Timing]]:
    """What PipeEdge's profiler has seen of one model, under another name or dtype if there is one."""
    found = [read_results(file) for file in files]
    model = found[0][0]
    for file, (other, _) in zip(files[1:], found[1:], strict=True):
        if replace(other, memory_mb=model.memory_mb) != model:
            raise ProfileError(
                f"{file} is of `{shorten(other.name)}`, {files[0]} of `{shorten(model.name)}`, or their layers differ",
                "merge one model at a time",
            )
    rows = [timing if dtype is None else replace(timing, dtype=f"torch.{dtype}") for _, timing in found]
    return (model if name is None else replace(model, name=name)), rows


def check_folder(file: str) -> None:
    """Raises ArgumentError where `file` can't be written for want of a folder."""
    parent = Path(file).parent
    if not parent.is_dir():
        raise ArgumentError(
            f"there is no folder `{parent}` to write `{file}` in", "name one that exists", code="not_found"
        )


def check_words(context: click.Context) -> None:
    """Raises UsageError for options that don't go together."""
    given = {name for name in context.params if context.get_parameter_source(name) is not ParameterSource.DEFAULT}
    called = {option.name: option.opts[-1] for option in context.command.params}
    results, form = context.params["results"], context.params["form"]
    if (context.params["workload"] is None) != bool(results):
        raise click.UsageError("name a workload to measure, or what was measured with --from, not both")
    if form is None:
        others = [called[name] for name in _MERGING if name in given]
        if others:
            raise click.UsageError(f"{', '.join(others)} goes with --format pipeedge")
        return
    if context.params["device_type"] is None:
        raise click.UsageError("--format pipeedge needs --device-type, what this machine is called in device_types.yml")
    refused = ["outputs", "autocast", *(_MEASURING if results else ())]
    others = [called[name] for name in dict.fromkeys(refused) if name in given]
    if others:
        why = " and --from" if results else ""
        raise click.UsageError(f"{', '.join(others)} doesn't go with --format pipeedge{why}")
