"""`hpgo llm calibrate`: fits the constants of the cost model to measured steps, or to the kernels of this node."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hpgo.base.documents import json_text
from hpgo.cli.command import Options, argument, option, takes
from hpgo.cli.llm.options import shell_words
from hpgo.cli.plan_options import SECONDS, SOME_SECONDS
from hpgo.cli.terminal import clear_line, progress, say, width
from hpgo.cli.values import AS_JSON, DEVICE, FILE, YAML
from hpgo.errors import ArgumentError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_MAX_S = 300.0
"""Seconds that a node may take to measure itself."""


class CalibrateOptions(Options):
    """The measured steps or the node, and where the file goes."""

    steps: str | None = argument(type=FILE, metavar="[STEPS]", required=False)
    node: bool = option("--node", is_flag=True, help="Measure this node.")
    ranks: int | None = option(
        "--ranks",
        type=click.IntRange(1),
        metavar="N",
        help="Processes to start on this node, one for each device.  [default: its GPUs, or 1]",
    )
    device: str | None = DEVICE
    time_limit: float = option(
        "--time-limit",
        type=SECONDS,
        default="120s",
        show_default=True,
        metavar="TIME",
        help="About how long --node takes.",
    )
    timeout: float = option(
        "--timeout",
        type=SOME_SECONDS,
        default="600s",
        show_default=True,
        metavar="TIME",
        help="How long processes of --node wait for each other.",
    )
    output: str | None = option(
        "-o", "--output", type=YAML, metavar="FILE", help="Write the platform, or the device record of --node: .yaml."
    )
    as_json: bool = AS_JSON


_SECTIONS = {"Measurement of a node": "node", "Output": "output as_json"}


@takes(CalibrateOptions, sections=_SECTIONS, brief="ranks device time_limit timeout")
def command(options: CalibrateOptions) -> None:
    """Fit the cost model to training steps that you measured on your cluster, or to the kernels of one node.

    STEPS is a YAML, JSON or CSV file. Each entry names a model, a cluster, a configuration and the measured seconds of
    a step. The report compares each step with its estimate.

    With --node, the node measures its GEMMs, attention, memory, launches and collectives instead.

    Pass the file that is written as --platform to the other commands of `hpgo llm`.

    \b
    A file of two steps:
      hpgo_steps: 1
      steps:
        - {model: llama-3-8b, cluster: h100:1, global_batch_size: 32,
           seq_length: 8192, tp: 2, seconds: 4.41 s}
        - {model: llama-3-8b, cluster: h100:2, global_batch_size: 32,
           seq_length: 8192, tp: 4, pp: 2, seconds: 2.32 s}

    \b
    Examples:
      hpgo llm calibrate steps.yaml
      hpgo llm calibrate steps.yaml -o platform.yaml
      hpgo llm calibrate --node -o node.yaml
    """
    if options.node:
        if options.steps is not None:
            raise click.UsageError("give one of STEPS and --node")
        _measure(options)
        return
    if options.steps is None:
        raise click.UsageError("Missing argument 'STEPS', or --node.")
    from hpgo.llm.platform_fit import fit_platform
    from hpgo.show.llm_report import next_commands
    from hpgo.show.platform_report import document, lines

    found = fit_platform(options.steps)
    # Save before printing, so that a closed pipe (`| head`) does not lose the platform.
    if options.output is not None:
        found.platform.save(options.output)
    if options.as_json:
        click.echo(json_text(document(found)))
    else:
        plan = "hpgo llm plan MODEL -c CLUSTER -b N --seq-length N --platform"
        commands = [f"{plan} {shell_words(options.output or 'platform.yaml')}"]
        title = "Next:" if options.output else "Save the platform with `-o platform.yaml`, then:"
        click.echo("\n".join([*lines(found, width()), *next_commands(commands, title)]))
    if options.output is None:
        say("note", "nothing was written: `-o platform.yaml` keeps the platform for --platform")


def _measure(options: CalibrateOptions) -> None:
    """Measure this node, or take part as one rank of a launch. Rank 0 prints and writes."""
    from hpgo import runtime

    runtime.check_torch()
    if options.time_limit > _MAX_S:
        raise ArgumentError(f"--time-limit is {options.time_limit:g} s, but it must be at most {_MAX_S:g} s")
    if options.output is not None and not Path(options.output).parent.is_dir():
        raise ArgumentError(f"folder not found: `{Path(options.output).parent}`", code="not_found")
    import torch

    from hpgo.cli.ranks import in_ranks
    from hpgo.runtime.node_measurement import measure_node
    from hpgo.runtime.rendezvous import is_launched, place

    gpus = 0 if options.device == "cpu" else torch.cuda.device_count()
    count = options.ranks or max(1, gpus)

    def work(*, forked: bool = True) -> None:
        first = place()[0] == 0 if is_launched() else True
        given: dict[str, Any] = {
            "device": options.device, "seconds": options.time_limit, "timeout_s": options.timeout,
        }  # fmt: skip
        if first:
            with _progress(forked=forked) as tell:
                record = measure_node(progress=tell, **given)
        else:
            record = measure_node(**given)
        if not first:
            return
        from hpgo.show.node_report import SKIPPED, document, lines

        if options.output is not None:
            record.save(options.output)
        click.echo(json_text(document(record)) if options.as_json else "\n".join(lines(record, width())))
        if options.as_json and not record.collectives:
            say("note", SKIPPED)
        if options.output is None:
            say("note", "nothing was written: `-o node.yaml` keeps the device record for --platform")

    if count == 1 and not is_launched():
        work(forked=False)
    else:
        in_ranks(count, options.timeout, work)


@contextmanager
def _progress(*, forked: bool) -> Iterator[Callable[[float, str], None]]:
    """Show the progress on stderr if it is a terminal.

    A process that another may kill writes plain lines: a bar would leave the cursor hidden.
    """
    if not forked:
        with progress("measuring") as tell:
            yield tell
        return

    def show(fraction: float, what: str) -> None:
        clear_line()
        if sys.stderr.isatty():
            click.echo(f"measuring: {100 * fraction:.0f} %, {what}", nl=False, err=True)

    try:
        yield show
    finally:
        clear_line()
