"""`sched-pipeline`: PipeEdge's scheduler, its options and its output, with plans that are optimal."""

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
    """Wrong usage exits with 1, as PipeEdge's scheduler does."""

    exit_code = 1


class _Command(click.Command):
    def main(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().main(*args, **kwargs)
        except click.UsageError as error:
            raise _UsageError(error.format_message(), error.ctx) from None


class SchedPipelineOptions(Options):
    """Options of `sched-pipeline`."""

    dtype: ValueType = option(
        "-d", "--dtype", default="torch.float32", show_default=True, help="Data type of the profiles."
    )
    batch_size: int = option("-b", "--batch-size", type=int, default=8, show_default=True, help="Samples in a batch.")
    buffers_in: int = option(
        "-i", "--buffers-in", type=int, default=2, show_default=True, help="Batches that wait to be worked on."
    )
    buffers_out: int = option(
        "-o", "--buffers-out", type=int, default=2, show_default=True, help="Batches that wait to be sent."
    )
    model_name: str = option(
        "-m", "--model-name", default="google/vit-base-patch16-224", show_default=True, help="Model to spread."
    )
    models_file: str = option(
        "-M", "--models-file", default="models.yml", show_default=True, help="Models: layers, memory, values."
    )
    dev_types_file: str = option(
        "-T", "--dev-types-file", default="device_types.yml", show_default=True, help="Types: memory, times."
    )
    dev_file: str = option("-D", "--dev-file", default="devices.yml", show_default=True, help="Hosts of each type.")
    ignore_unknown_types: bool = option(
        "--ignore-unknown-types", is_flag=True, help="Leave out hosts whose type has no profile, instead of stopping."
    )


@takes(SchedPipelineOptions, cls=_Command, context_settings={"help_option_names": ["-h", "--help"]})
def command(options: SchedPipelineOptions) -> None:
    """Spread a model's layers over hosts so that the slowest stage or transfer is as short as possible.

    Takes the options and files of PipeEdge's sched-pipeline and prints the same YAML, stage by stage, with layers
    counted from 1. Exit code 1, with the reason on stderr, if no plan fits or a file is wrong.

    \b
    Examples:
      sched-pipeline
      sched-pipeline -m google/vit-large-patch16-224 -b 8
      sched-pipeline -M models.yml -T device_types.yml -D devices.yml > schedule.yml

    `hpgo partition` does the same and more: tables, reasons, links, other objectives.
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
    if plan.gap:
        say("warning", f"not proven optimal: {above(plan.gap)} possible")
    click.echo(plan.pipeedge(), nl=False)


def main() -> NoReturn:
    """Entry point of the command `sched-pipeline`."""
    run(command, prog_name="sched-pipeline")
