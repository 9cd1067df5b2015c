"""Command `hpgo estimate`: estimate layer times for a device without measuring."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import click

from hpgo.base.documents import json_text
from hpgo.base.units import format_bytes, format_seconds
from hpgo.cli.command import Options, argument, option, takes
from hpgo.cli.plan_options import Counts
from hpgo.cli.terminal import say, table
from hpgo.cli.values import AS_JSON, PROFILE_OUT, TRANSFORMER, written
from hpgo.hardware.rates import RATES, WIDTHS

if TYPE_CHECKING:
    from hpgo.hardware.rates import ComputeType, DeviceName
    from hpgo.model.profile import Profile


class _Dim(click.ParamType):  # type: ignore[type-arg]  # not generic before click 8.5
    """A named size, such as `sequence=512`."""

    name = "dim"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, int]:
        """Return the name and the size."""
        if isinstance(value, tuple):
            return value
        name, equals, size = str(value).rpartition("=")
        if not (equals and name and size.isascii() and size.isdigit() and len(size) <= 9 and int(size)):
            self.fail(f"`{str(value)[:40]}` is not NAME=N; write sequence=512", param, ctx)
        return name, int(size)


class EstimateOptions(Options):
    """Options of `hpgo estimate`."""

    model: str = argument(type=TRANSFORMER)
    device: DeviceName = option(
        "--device",
        type=click.Choice(tuple(RATES)),
        required=True,
        metavar="NAME",
        help="Device to estimate for: h100, mi300x, … (`hpgo clusters devices` lists them).",
    )
    outputs: tuple[str, ...] = written(PROFILE_OUT, "Profile to write: .yaml, .json, or PipeDream's .txt. Repeatable.")
    dtype: ComputeType | None = option(
        "--dtype",
        type=click.Choice(tuple(WIDTHS)),
        help="Data type of the computation.  [default: that of the ONNX file, or bfloat16]",
    )
    batch_size: tuple[int, ...] | None = option(
        "--batch-size",
        type=Counts(),
        metavar="N[,N…]",
        help="Samples per batch.  [default: the batch size of the file, or 1]",
    )
    by: Literal["block", "op"] = option(
        "--by",
        type=click.Choice(["block", "op"]),
        default="block",
        show_default=True,
        help="Size of a layer: a block with one input and one output tensor, or an operation with a weight matrix.",
    )
    dims: tuple[tuple[str, int], ...] = option(
        "--dim",
        type=_Dim(),
        multiple=True,
        metavar="NAME=N",
        help="Value of a size that the model leaves open, such as `tokens` of a transformer. Repeatable.",
    )
    efficiency: float = option(
        "--efficiency",
        type=float,
        default=0.5,
        show_default=True,
        metavar="SHARE",
        help="Share of the peak compute rate and memory bandwidth that layers reach, from 0 to 1.",
    )
    as_json: bool = AS_JSON


@takes(EstimateOptions)
def command(options: EstimateOptions) -> None:
    """Estimate the layer times of a model on a device from its datasheet, for `hpgo plan`.

    MODEL is an ONNX file, which needs the package `onnx`, or a transformer: a name of `hpgo models transformers`, such
    as Qwen/Qwen2.5-72B, a Hugging Face config.json, or a YAML file with its sizes. The time of an operation is the
    longer of its arithmetic and its memory traffic (roofline model). Nothing is measured.

    \b
    Examples:
      hpgo estimate llama-3-8b --device h100 --dim tokens=8192 -o llama.yaml
      hpgo estimate config.json --device a100 --dim tokens=4096 --batch-size 1,2
      hpgo estimate bert.onnx --device a100 --dim sequence=512 -o bert.yaml
      hpgo estimate gpt.onnx --device h100 --dtype bfloat16 --batch-size 1,2,4,8
      hpgo estimate resnet50.onnx --device v100 --by op --json
    """
    from hpgo.model.estimate import estimate
    from hpgo.model.formats import write_profile
    from hpgo.model.formats.native import document

    found = estimate(
        options.model,
        device=options.device,
        dtype=options.dtype,
        batch_sizes=options.batch_size,
        by=options.by,
        dims=dict(options.dims),
        efficiency=options.efficiency,
    )
    for output in options.outputs:
        write_profile(found, output)
    if options.as_json:
        click.echo(json_text(document(found)))
    else:
        _print(found)
        say("note", f"{found.source}")
        if not options.outputs:
            say("note", "no file was written; use `-o FILE.yaml` to save the profile for `hpgo plan`")


def _print(profile: Profile) -> None:
    """Print the layers' times at the largest batch size."""
    rows = [
        (
            layer.id,
            format_seconds(layer.forward_s[-1]),
            format_seconds(layer.backward_s[-1]),
            format_bytes(layer.activation_bytes[-1]),
            format_bytes(0 if layer.saved_bytes is None else layer.saved_bytes[-1]),
            format_bytes(layer.parameter_bytes),
        )
        for layer in profile.layers
    ]
    title = f"{profile.name}, batch of {profile.batch_sizes[-1]}, estimated"
    table(("layer", "forward", "backward", "output", "saved", "weights"), rows, title)
    click.echo()
    for at, size in enumerate(profile.batch_sizes):
        forward, backward = (
            format_seconds(sum(getattr(layer, name)[at] for layer in profile.layers))
            for name in ("forward_s", "backward_s")
        )
        click.echo(f"batch of {size}: forward {forward}, backward {backward}")
