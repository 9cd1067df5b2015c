"""Command `hpgo weights`: write trained weights under the model's own names."""

from __future__ import annotations

from pathlib import Path

import click

from hpgo.base.documents import json_text
from hpgo.base.messages import pluralize
from hpgo.base.units import format_bytes
from hpgo.cli.command import Options, argument, option, takes
from hpgo.cli.plan_options import BYTES
from hpgo.cli.values import AS_JSON, FILE, is_folder_name
from hpgo.errors import ArgumentError

_FORMATS = ("safetensors", "dcp")


class WeightsOptions(Options):
    """Options of `hpgo weights`."""

    checkpoint: str = argument(type=FILE, metavar="CHECKPOINT")
    output: str = option(
        "-o",
        "--output",
        type=FILE,
        required=True,
        metavar="FILE|FOLDER",
        help="File to write, `model.safetensors`, or a folder, with `config.json` if the model has one.",
    )
    format: str = option(
        "--format",
        type=click.Choice(_FORMATS),
        default=_FORMATS[0],
        show_default=True,
        help="Format of the files: safetensors, or a folder of `torch.distributed.checkpoint`.",
    )
    with_optimizer: bool = option(
        "--with-optimizer",
        is_flag=True,
        help="Also write the state of the optimizer, with `--format dcp`.",
    )
    max_shard_bytes: int = option(
        "--max-shard-size",
        type=BYTES,
        default="5GB",
        show_default=True,
        metavar="SIZE",
        help="Split larger weights into several files of safetensors, with an index.",
    )
    as_json: bool = AS_JSON


@takes(WeightsOptions)
def command(options: WeightsOptions) -> None:
    """Write the weights of CHECKPOINT under the names that they have in your model.

    CHECKPOINT is a folder of `hpgo run --checkpoint`, whose newest step is read, or a folder `step-N` in it. It may
    also be a file of safetensors, a Hugging Face folder, or a folder of `torch.distributed.checkpoint`. Your model
    loads the result with `load_state_dict(…, strict=True)`, and `hpgo run --weights` starts from it.

    \b
    Examples:
      hpgo weights saved -o model.safetensors
      hpgo weights saved/step-1000 -o my-model/
      hpgo weights saved -o for-torchtitan/ --format dcp --with-optimizer
      hpgo weights from-torchtitan -o model.safetensors
    """
    from hpgo import runtime

    runtime.check_torch()
    from hpgo.runtime.optimizer_files import read_optimizer_state, write_dcp
    from hpgo.runtime.weight_files import WeightFiles, write_weights

    if options.with_optimizer and options.format != "dcp":
        raise click.UsageError("`--with-optimizer` needs `--format dcp`")
    is_file = options.output.endswith(".safetensors")
    if is_file and options.format == "dcp":
        raise ArgumentError(
            f"`{options.output}` is a file, but `torch.distributed.checkpoint` writes a folder",
            f"write `-o {options.output.removesuffix('.safetensors')}/`",
        )
    if not is_file and not is_folder_name(options.output) and Path(options.output).suffix:
        raise ArgumentError(
            f"`{options.output}` has an unknown ending",
            "write a name that ends in `.safetensors`, or in `/` for a folder",
        )
    with WeightFiles(options.checkpoint) as weights:
        if options.format == "dcp":
            state = read_optimizer_state(options.checkpoint) if options.with_optimizer else None
            written = write_dcp(options.output, weights, optimizer_state=state)
        else:
            written = write_weights(
                options.output, weights, config=weights.config, max_shard_bytes=options.max_shard_bytes
            )
        sizes_bytes = {name: weights.size_bytes(name) for name in weights}
    if options.as_json:
        document = {"format": "hpgo.weights", "version": 1, "tensors": len(sizes_bytes)}
        click.echo(json_text(document | {"bytes": sum(sizes_bytes.values()), "files": [str(one) for one in written]}))
        return
    click.echo(f"{pluralize(len(sizes_bytes), 'tensor')}, {format_bytes(sum(sizes_bytes.values()))}")
    for one in written:
        click.echo(f"  {one}")
