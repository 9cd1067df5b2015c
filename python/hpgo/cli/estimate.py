"""`hpgo estimate`: what the layers of a model would take on a device that is not at hand."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import click

from hpgo.base.documents import json_text
from hpgo.base.units import format_bytes, format_seconds
from hpgo.cli.command import Options, argument, option, takes
from hpgo.cli.plan_options import Counts
from hpgo.cli.terminal import say, table
from hpgo.cli.values import AS_JSON, PROFILE_OUT, TRANSFORMER, written
from hpgo.machine.rates import RATES, WIDTHS

if TYPE_CHECKING:
    from hpgo.machine.rates import ComputeType, DeviceName
    from hpgo.model.profile import Profile


class _Dim(click.ParamType):  # type: ignore[type-arg]  # not generic before click 8.5
    """`sequence=512`: a size by its name."""

    name = "dim"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, int]:
        """Name and size."""
        if isinstance(value, tuple):
            return value
        name, equals, size = str(value).rpartition("=")
        if not (equals and name and size.isascii() and size.isdigit() and len(size) <= 9 and int(size)):
            self.fail(f"`{str(value)[:40]}` is no size; write NAME=N, like sequence=512", param, ctx)
        return name, int(size)


class EstimateOptions(Options):
    """Options of `hpgo estimate`."""

    model: str = argument(type=TRANSFORMER)
    device: DeviceName = option("--device", type=click.Choice(tuple(RATES)), required=True, help="Where it would run.")
    outputs: tuple[str, ...] = written(PROFILE_OUT, "The profile: .yaml, .json, or PipeDream's .txt. Repeatable.")
    dtype: ComputeType | None = option(
        "--dtype",
        type=click.Choice(tuple(WIDTHS)),
        help="What to compute in; if left out, what an ONNX file holds, else bfloat16.",
    )
    batch_size: tuple[int, ...] | None = option(
        "--batch-size",
        type=Counts(),
        metavar="N[,N…]",
        help="Samples in a batch; the file's own if it fixes them, or else 1.",
    )
    by: Literal["block", "op"] = option(
        "--by",
        type=click.Choice(["block", "op"]),
        default="block",
        show_default=True,
        help="What a layer is: a block with one input and one output tensor, or an operation with a weight matrix.",
    )
    dims: tuple[tuple[str, int], ...] = option(
        "--dim",
        type=_Dim(),
        multiple=True,
        metavar="NAME=N",
        help="Another size that is open; of a transformer `tokens`. Repeatable.",
    )
    efficiency: float = option(
        "--efficiency",
        type=float,
        default=0.5,
        show_default=True,
        metavar="SHARE",
        help="How much of the device's peaks layers reach, from 0 to 1.",
    )
    as_json: bool = AS_JSON


@takes(EstimateOptions)
def command(options: EstimateOptions) -> None:
    """Estimate what the layers of a model take on a device, for `hpgo plan`.

    MODEL is an ONNX file, which needs the package `onnx`, or a transformer: one that `hpgo models transformers` lists,
    a Hugging Face config.json, or a YAML file with its sizes. Times are those of the device's datasheet: an operation's
    arithmetic or the bytes that it moves, whichever takes longer. Nothing is measured.

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
            say("note", "nothing was written: `-o FILE.yaml` keeps the profile for `hpgo plan`")


def _print(profile: Profile) -> None:
    """What the layers take at the largest batch size."""
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
    title = f"{profile.name}, a batch of {profile.batch_sizes[-1]}, estimated"
    table(("layer", "forward", "backward", "output", "saved", "weights"), rows, title)
    click.echo()
    for at, size in enumerate(profile.batch_sizes):
        forward, backward = (
            format_seconds(sum(getattr(layer, name)[at] for layer in profile.layers))
            for name in ("forward_s", "backward_s")
        )
        click.echo(f"batch of {size}: forward {forward}, backward {backward}")
