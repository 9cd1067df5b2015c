"""Command `sched-pipeline`: the options and output of PipeEdge's scheduler, with optimal plans."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

import click

from hpgo.base.messages import above
from hpgo.cli.command import Options, option, takes
from hpgo.cli.main import run
from hpgo.cli.terminal import say

if TYPE_CHECKING:
    from hpgo.model.formats.pipeedge import ValueType


class _UsageError(click.UsageError):
    """A usage error that exits with 1, like PipeEdge's scheduler."""

    exit_code = 1


class _Command(click.Command):
    def main(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().main(*args, **kwargs)
        except click.UsageError as error:
            raise _UsageError(error.format_message(), error.ctx) from None


class SchedPipelineOptions(Options):
    """Options of `sched-pipeline`, with the names in PipeEdge's scheduler."""

    dtype: ValueType = option(
        "-d", "--dtype", default="torch.float32", show_default=True, help="Data type of the layer times."
    )
    batch_size: int = option("-b", "--batch-size", type=int, default=8, show_default=True, help="Samples per batch.")
    buffers_in: int = option(
        "-i", "--buffers-in", type=int, default=2, show_default=True, help="Batches buffered before a stage."
    )
    buffers_out: int = option(
        "-o", "--buffers-out", type=int, default=2, show_default=True, help="Batches buffered behind a stage."
    )
    model_name: str = option(
        "-m", "--model-name", default="google/vit-base-patch16-224", show_default=True, help="Name of the model."
    )
    models_file: str = option(
        "-M",
        "--models-file",
        default="models.yml",
        show_default=True,
        help="File of models: layers, memory, sizes of values.",
    )
    dev_types_file: str = option(
        "-T",
        "--dev-types-file",
        default="device_types.yml",
        show_default=True,
        help="File of device types: memory, layer times.",
    )
    dev_file: str = option(
        "-D", "--dev-file", default="devices.yml", show_default=True, help="File of hosts by device type."
    )
    ignore_unknown_types: bool = option(
        "--ignore-unknown-types",
        is_flag=True,
        help="Skip hosts whose device type has no layer times, instead of failing.",
    )


@takes(SchedPipelineOptions, cls=_Command, context_settings={"help_option_names": ["-h", "--help"]})
def command(options: SchedPipelineOptions) -> None:
    """Split a model's layers over hosts so that the slowest stage or transfer is as short as possible.

    The command has the options and files of PipeEdge's sched-pipeline and prints the same YAML: one entry per stage,
    with layers counted from 1. It exits with 1, with the reason on stderr, if no plan fits or a file is wrong.

    \b
    Examples:
      sched-pipeline
      sched-pipeline -m google/vit-large-patch16-224 -b 8
      sched-pipeline -M models.yml -T device_types.yml -D devices.yml > schedule.yml

    `hpgo partition` adds tables, reasons, links and other objectives.
    """
    from hpgo.planning.chain.search import partition_files

    plan = partition_files(
        options.models_file,
        options.dev_types_file,
        options.dev_file,
        model=options.model_name,
        batch_size=options.batch_size,
        dtype=options.dtype,
        buffers_in=options.buffers_in,
        buffers_out=options.buffers_out,
        ignore_unknown_types=options.ignore_unknown_types,
    )
    for remark in plan.remarks:
        say("warning", remark)
    if plan.optimality_gap:
        say("warning", f"not proven optimal: {above(plan.optimality_gap)}")
    click.echo(plan.pipeedge(), nl=False)


def main() -> NoReturn:
    """Run the command `sched-pipeline`."""
    run(command, prog_name="sched-pipeline")
