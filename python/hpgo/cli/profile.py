"""Command `hpgo profile`: measure the layers of a model on this machine."""

from __future__ import annotations

from dataclasses import asdict
from itertools import groupby
from typing import TYPE_CHECKING, Any

import click

from hpgo.base.documents import json_text
from hpgo.base.messages import shorten, times
from hpgo.base.units import format_bytes, format_seconds
from hpgo.cli.command import Options, argument, option, takes
from hpgo.cli.pipeedge import Files, check_folder, check_words, device, read_all, timings
from hpgo.cli.plan_options import BYTES, DEVICE_BYTES, RATE, SECONDS, Counts
from hpgo.cli.terminal import progress, say, table
from hpgo.cli.values import AS_JSON, AUTOCAST, DEVICE, DTYPE, FILE, PROFILE_OUT, WORKLOAD, File, written
from hpgo.errors import ArgumentError
from hpgo.model.formats.pipeedge import Timing

if TYPE_CHECKING:
    from hpgo.model.formats.pipeedge import PipeEdgeModel
    from hpgo.model.profile import Layer, Profile
    from hpgo.runtime.profiling import Measurement

_PART = ".part"
"""Ending of the file with the results so far, after the name of the profile."""


_SECTIONS = {
    "Measurement": "by batch_size data ranks inference dtype autocast device time_limit memory",
    "Several device types": "merged profile_boundary",
    "Output": "outputs as_json",
    "For PipeEdge": "form device_type device_memory device_bandwidth model_name models_file dev_types_file"
    " overwrite results",
}


class TypeFile(File):
    """A profile of one device type, as `TYPE=FILE`, or `FILE` if the file states its device."""

    name = "type"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the name of the type, which is empty if the file states it, and the file."""
        if isinstance(value, tuple):
            return value
        name, is_named, file = str(value).rpartition("=")
        if not file or (is_named and not name):
            self.fail(f"`{shorten(str(value))}` is not TYPE=FILE; write `V100=v100.yaml`", param, ctx)
        return name, file


class MeasureOptions(Options):
    """Options of the measurement."""

    by: str = option(
        "--by",
        type=click.Choice(["block", "module", "op", "quarter"]),
        default="block",
        show_default=True,
        help="Size of a layer in models that torch.export accepts; quarter splits the blocks of built-in transformers.",
    )
    batch_size: tuple[int, ...] = option(
        "--batch-size", type=Counts(), default="1", show_default=True, metavar="N[,N…]", help="Samples per batch."
    )
    data: str | None = option(
        "--data",
        metavar="MODULE:FUNCTION",
        help="Data set whose first batches, 8 at most, are measured in turn.  [default: the workload's example]",
    )
    ranks: int = option(
        "--ranks",
        type=click.IntRange(1),
        default=1,
        show_default=True,
        metavar="N",
        help="Number of ranks that will share this machine. The same number of processes measures at once.",
    )
    inference: bool = option("--inference", is_flag=True, help="Measure forward passes only, in evaluation mode.")
    dtype: str | None = DTYPE
    autocast: str | None = AUTOCAST
    device: str | None = DEVICE
    time_limit: float = option(
        "--time-limit",
        type=SECONDS,
        default="30s",
        show_default=True,
        metavar="TIME",
        help="Time to measure each batch size.",
    )
    memory: float | None = option(
        "--memory",
        type=BYTES,
        metavar="SIZE",
        help="Memory that layers may use at once.  [default: half of the free memory]",
    )


class ProfileOptions(MeasureOptions):
    """Options of `hpgo profile`."""

    workload: str = argument(type=WORKLOAD, metavar="[NAME|MODULE:FUNCTION|CONFIG.json]", required=False)
    merged: tuple[tuple[str, str], ...] = option(
        "--merge",
        type=TypeFile(),
        multiple=True,
        metavar="TYPE=FILE",
        help="Measure nothing; merge this profile, which was measured on a device type, into one with the times of all"
        " types. The type may be left out if the file states its device. Repeatable.",
    )
    profile_boundary: float | None = option(
        "--profile-boundary",
        type=BYTES,
        metavar="SIZE",
        help="Bytes that one sample sends between two layers, for --merge of Metis files without them.",
    )
    outputs: tuple[str, ...] = written(PROFILE_OUT, "Profile to write: .yaml, .json, or PipeDream's .txt. Repeatable.")
    as_json: bool = AS_JSON
    form: str | None = option(
        "--format",
        type=click.Choice(["pipeedge"]),
        help="Instead of -o, add the results to PipeEdge's two files for `hpgo partition`. Implies --inference.",
    )
    device_type: str = option("--device-type", metavar="NAME", help="Name of this device type in the files.")
    device_memory: float | None = option(
        "--device-memory", type=DEVICE_BYTES, metavar="SIZE", help="Memory of a new device type, such as 512MiB."
    )
    device_bandwidth: float | None = option(
        "--device-bandwidth", type=RATE, metavar="RATE", help="Bandwidth of a new device type, such as 100Mbit/s."
    )
    model_name: str | None = option(
        "-m", "--model-name", metavar="NAME", help="Name of the model in the files.  [default: name of the workload]"
    )
    models_file: str = option(
        "-M",
        "--models-file",
        type=FILE,
        metavar="FILE",
        default="models.yml",
        show_default=True,
        help="PipeEdge file of models.",
    )
    dev_types_file: str = option(
        "-T",
        "--dev-types-file",
        type=FILE,
        metavar="FILE",
        default="device_types.yml",
        show_default=True,
        help="PipeEdge file of device types.",
    )
    overwrite: bool = option("--overwrite", is_flag=True, help="Replace results that the files already have.")
    results: tuple[str, ...] = option(
        "--from",
        type=FILE,
        metavar="FILE",
        multiple=True,
        help="Measure nothing; add this profiler_results.yml of PipeEdge's profiler. Repeatable.",
    )


@takes(ProfileOptions, sections=_SECTIONS)
def command(options: ProfileOptions) -> None:
    """Measure the forward and backward time of each layer on this machine, for `hpgo plan`.

    The model is a built-in workload, a function of yours, or a Hugging Face config.json, as for `hpgo run`. A model
    that is larger than the memory is measured layer by layer. With -o, the same command continues an interrupted
    measurement.

    \b
    Examples:
      hpgo profile gpt:layers=4 --batch-size 1,2,4,8 -o gpt.yaml
      hpgo profile my_model:build --ranks 4 -o mine.yaml
      hpgo profile llama/config.json:length=512 --dtype bfloat16 -o llama.yaml
      hpgo plan gpt.yaml --cluster dapple-c --devices 4 --global-batch-size 64
      hpgo profile --merge V100=v100.yaml --merge H100=h100.yaml -o both.yaml
      hpgo profile vit-base --by quarter --format pipeedge --device-type mb
    """
    check_words(click.get_current_context())
    if options.merged:
        _merge(options)
        return
    # Only the fields of this group are arguments of the measurement.
    given = options.group(MeasureOptions)
    given["batch_sizes"] = given.pop("batch_size")
    if options.form is None:
        _check_outputs(options.outputs, options.batch_size)
        found = _measured(options.workload, keep=f"{options.outputs[0]}{_PART}" if options.outputs else None, **given)
        for output in options.outputs:
            from hpgo.model.formats import write_profile

            write_profile(found.profile, output)
        _print(found, as_json=options.as_json)
        if not options.outputs and not options.as_json:
            say("note", "no file was written; use `-o FILE.yaml` to save the profile for `hpgo plan`")
        return
    files = Files(
        options.models_file,
        options.dev_types_file,
        device(options.device_type, options.device_memory, options.device_bandwidth),
        overwrite=options.overwrite,
    )
    if options.results:
        files.merge(*read_all(options.results, name=options.model_name, dtype=given["dtype"]))
        return
    model, dtype = _described(options.workload, options.model_name, given)
    # Check the files before the measurement, which may take minutes.
    files.check(model, [Timing(size, dtype, (0.0,) * len(model.memory_mb)) for size in options.batch_size])
    found = _measured(options.workload, keep=f"{options.dev_types_file}{_PART}", **given | {"inference": True})
    _print(found, as_json=options.as_json)
    files.merge(model, timings(found.profile, dtype))


def _merge(options: ProfileOptions) -> None:
    """Write the profile with the times of several device types."""
    from hpgo.model.formats import read_profile, write_profile
    from hpgo.model.formats.native import write_yaml
    from hpgo.model.merged import merge_profiles

    for output in options.outputs:
        if output.lower().endswith(".txt"):
            raise ArgumentError(f"`{output}` can't hold times of several device types", "write a .yaml or .json file")
        check_folder(output)
    profiles: dict[str, Profile] = {}
    for given, file in options.merged:
        profile = read_profile(file, boundary_bytes=options.profile_boundary)
        name = given or profile.device
        if not name:
            raise ArgumentError(f"`{file}` does not state its device", f"name its type: `--merge TYPE={file}`")
        if name in profiles:
            raise ArgumentError(
                f"two profiles are of the device type `{shorten(name)}`", "name each type once", code="duplicate"
            )
        profiles[name] = profile
    found = merge_profiles(profiles)
    for output in options.outputs:
        write_profile(found, output)
    if not options.outputs:
        click.echo(write_yaml(found), nl=False)


def _described(workload: str, name: str | None, options: dict[str, Any]) -> tuple[PipeEdgeModel, str]:
    """Return the model in PipeEdge's format, and its data type."""
    from hpgo.runtime import check_torch

    check_torch()
    from hpgo.runtime.chains import described
    from hpgo.runtime.workload import Workload

    read = Workload.read(workload, on_meta=True).by(options["by"])
    return described(read, name=name or workload, dtype=_torch_dtype(options["dtype"]))


def _measured(
    workload: str, *, keep: str | None, dtype: str | None, autocast: str | None, time_limit: float,
    memory: float | None, **options: Any,
) -> Measurement:  # fmt: skip
    from hpgo.runtime import check_torch

    check_torch()
    from hpgo.runtime.profiling import measure

    with progress("measuring") as tell:
        return measure(
            workload,
            dtype=_torch_dtype(dtype),
            autocast=_torch_dtype(autocast),
            seconds=time_limit,
            memory_bytes=memory,
            keep=keep,
            progress=tell,
            **options,
        )


def _torch_dtype(name: str | None) -> Any:
    import torch

    return name and getattr(torch, name)


def _check_outputs(outputs: tuple[str, ...], sizes: tuple[int, ...]) -> None:
    """Raise ArgumentError for files that can't be written, before the measurement starts."""
    for output in outputs:
        if output.lower().endswith(".txt") and len(sizes) > 1:
            raise ArgumentError(
                f"`{output}` can hold one batch size only, but {len(sizes)} are measured",
                "write a .yaml file, or measure one batch size",
            )
        check_folder(output)


def _print(found: Measurement, *, as_json: bool) -> None:
    if as_json:
        _print_json(found)
        return
    _print_table(found)
    for note in found.notes:
        say("note", note)


def _print_json(found: Measurement) -> None:
    from hpgo.model.formats.native import document

    wholes = {str(rows): asdict(one) for rows, one in found.wholes.items()}
    click.echo(
        json_text(
            {"profile": document(found.profile), "spread": found.spreads, "whole": wholes, "notes": list(found.notes)}
        )
    )


def _print_table(found: Measurement) -> None:
    """Print the layers' times at the largest batch size, with equal adjacent layers in one row."""
    profile, spreads = found.profile, found.spreads
    rows = []
    # Repeated blocks were measured once and have equal figures, so they share a row.
    for _, group in groupby(profile.layers, key=lambda layer: (_figures(layer), spreads[layer.id])):
        alike = list(group)
        first, last = alike[0], alike[-1]
        rows.append(
            (
                first.id if first is last else f"{first.id} … {last.id}",
                len(alike),
                *_cells(first),
                times(spreads[first.id]),
            )
        )
    title = f"{profile.name}, batch of {profile.batch_sizes[-1]}"
    table(("layer", "count", "forward", "backward", "output", "saved", "weights", "spread"), rows, title)
    click.echo()
    for at, size in enumerate(profile.batch_sizes):
        click.echo(_total(found, profile, at, size))


def _figures(layer: Layer) -> tuple[float | None, ...]:
    saved = None if layer.saved_bytes is None else layer.saved_bytes[-1]
    return layer.forward_s[-1], layer.backward_s[-1], layer.activation_bytes[-1], saved, layer.parameter_bytes


def _cells(layer: Layer) -> list[str]:
    forward, backward, *sizes = _figures(layer)
    return [*(format_seconds(one or 0) for one in (forward, backward)), *(format_bytes(one or 0) for one in sizes)]


def _total(found: Measurement, profile: Profile, at: int, size: int) -> str:
    forward, backward = (
        sum(getattr(layer, name)[at] for layer in profile.layers) for name in ("forward_s", "backward_s")
    )
    whole = found.wholes.get(size)
    beside = "" if whole is None else f"; whole model {format_seconds(whole.whole_s)}"
    if whole is not None and whole.peak_bytes is not None:
        beside += f" and {format_bytes(whole.peak_bytes)} of activations"
    return f"batch of {size}: forward {format_seconds(forward)}, backward {format_seconds(backward)}{beside}"
