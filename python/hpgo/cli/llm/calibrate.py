"""`hpgo llm calibrate`: fits the constants of the cost model to measured steps, or to the kernels of this node."""

from __future__ import annotations

import sys
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import click

from hpgo.base.documents import json_text
from hpgo.cli.command import Options, argument, option, takes
from hpgo.cli.llm.options import COUNT, shell_words
from hpgo.cli.plan_options import MEASUREMENT_TIMEOUT, measurement_time_limit
from hpgo.cli.terminal import clear_line, progress, say, width
from hpgo.cli.values import AS_JSON, DEVICE, FILE, TRANSFORMER, YAML, cluster_option, is_folder_name
from hpgo.errors import ArgumentError, HpgoError
from hpgo.llm.parallelism import Precision, Recompute

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from hpgo.llm.measured_steps import MeasuredStep

_TABLES = (".yaml", ".yml", ".json", ".csv")
"""Endings of tables of steps. Files with other endings are logs."""
_MAX_S = 300.0
"""Seconds that a node may take to measure itself."""


class CalibrateOptions(Options):
    """The measured steps or the node, and where the file goes."""

    files: tuple[str, ...] = argument(type=FILE, metavar="[STEPS|LOG|JOB/]...", nargs=-1)
    model: str | None = option("--model", type=TRANSFORMER, metavar="NAME|FILE", help="Model of the runs.")
    cluster: str | None = cluster_option(required=False)
    global_batch_size: int | None = option(
        "-b", "--global-batch-size", type=COUNT, metavar="N", help="Sequences per training step."
    )
    seq_length: int | None = option("--seq-length", type=COUNT, metavar="N", help="Tokens per sequence.")
    micro_batch_size: int | None = option(
        "--micro-batch-size", type=COUNT, metavar="N", help="Sequences per micro-batch."
    )
    devices: int | None = option("--devices", type=COUNT, metavar="N", help="GPUs of the runs.  [all of the cluster]")
    tp: int | None = option("--tp", type=COUNT, metavar="N", help="Tensor-parallel degree.  [printed, or 1]")
    pp: int | None = option("--pp", type=COUNT, metavar="N", help="Pipeline-parallel degree.  [printed, or 1]")
    vpp: int | None = option("--vpp", type=COUNT, metavar="N", help="Virtual stages per pipeline rank.")
    cp: int | None = option("--cp", type=COUNT, metavar="N", help="Context-parallel degree.")
    ep: int | None = option("--ep", type=COUNT, metavar="N", help="Expert-parallel degree.")
    zero_stage: str | None = option(
        "--zero-stage", type=click.Choice(["0", "1", "2", "3"]), metavar="N", help="ZeRO stage.  [printed, or 1]"
    )
    recompute: Recompute | None = option(
        "--recompute", type=click.Choice(get_args(Recompute)), metavar="NAME", help="Recomputation.  [printed, or none]"
    )
    precision: Precision | None = option(
        "--precision", type=click.Choice(get_args(Precision)), metavar="NAME", help="GEMMs in bf16, fp16, fp8 or fp4."
    )
    stack: str | None = option(
        "--stack", metavar="NAME|FILE", help="Software stack of the runs.  [what the framework of the log implies]"
    )
    nic_gbit_s: float | None = option("--nic", type=float, metavar="GBIT/S", help="Rate of each NIC of a preset.")
    node: bool = option("--node", is_flag=True, help="Measure this node instead.")
    ranks: int | None = option(
        "--ranks",
        type=click.IntRange(1),
        metavar="N",
        help="Processes to start on this node, one for each device.  [default: its GPUs, or 1]",
    )
    device: str | None = DEVICE
    time_limit: float = measurement_time_limit("120s")
    timeout: float = MEASUREMENT_TIMEOUT
    output: str | None = option("-o", "--output", type=YAML, metavar="FILE", help="Platform or device record: .yaml.")
    as_json: bool = AS_JSON


_SECTIONS = {
    "Runs whose logs are given": "model cluster global_batch_size seq_length",
    "Node and output": "node output as_json",
}
_OF_RUNS = "micro_batch_size devices tp pp vpp cp ep zero_stage recompute precision"
"""Options that `hpgo.estimate_llm` takes under the same name, in the order of the help."""


@takes(CalibrateOptions, sections=_SECTIONS, brief=f"{_OF_RUNS} stack nic_gbit_s ranks device time_limit timeout")
def command(options: CalibrateOptions) -> None:
    """Fit the cost model to measured training steps, or to the kernels of a node.

    Give a table of steps (.yaml, .json, .csv), logs of Megatron-LM, torchtitan or DeepSpeed, or job folders after the
    smoke run. Three steps that differ in micro-batch size, degrees or sequence length are worth it; one is not. The
    file that is written is --platform of other commands.

    \b
    A table of one step, with `seconds` or a `log`:
      hpgo_steps: 1
      steps:
        - {model: llama-3-8b, cluster: h100:2, global_batch_size: 32,
           seq_length: 8192, tp: 4, pp: 2, seconds: 2.32 s}

    \b
    Examples:
      hpgo llm calibrate run.log --model llama-3-8b -c h100:2
      hpgo llm calibrate job/ -o platform.yaml
      hpgo llm calibrate --node -o node.yaml
    """
    if options.node:
        if options.files:
            raise click.UsageError("give one of STEPS, LOG or JOB/, and --node")
        _measure(options)
        return
    if not options.files:
        raise click.UsageError("Missing argument 'STEPS', LOG or JOB/, or --node.")
    if options.output is not None and any(
        Path(file).resolve() == Path(options.output).resolve() for file in options.files
    ):
        raise click.UsageError(f"-o {options.output} would replace the measured steps: name another file")
    from hpgo.llm.platform_fit import fit_platform
    from hpgo.show.llm_report import next_commands
    from hpgo.show.platform_report import document, lines

    found = fit_platform(_steps(options))
    # Save before printing, so that a closed pipe (`| head`) does not lose the platform.
    if options.output is not None:
        found.platform.save(options.output)
    if options.as_json:
        click.echo(json_text(document(found)))
    else:
        commands = [f"{_search(options)} --platform {shell_words(options.output or 'platform.yaml')}"]
        title = "Next:" if options.output else "Save the platform with `-o platform.yaml`, then:"
        click.echo("\n".join([*lines(found, width()), *next_commands(commands, title)]))
    if options.output is None:
        say("note", "nothing was written: `-o platform.yaml` keeps the platform for --platform")


def _search(options: CalibrateOptions) -> str:
    """Return the command of a search: that of the first job folder's plan, or one with words to replace."""
    folders = [file for file in options.files if is_folder_name(file)]
    if not folders:
        return "hpgo llm plan MODEL -c CLUSTER -b N --seq-length N"
    from hpgo.hardware.cluster import Cluster
    from hpgo.llm.measured_steps import JOB_PLAN
    from hpgo.llm.plan import LlmPlan
    from hpgo.model.transformer_presets import named_transformer

    plan = LlmPlan.read(Path(folders[0]) / JOB_PLAN)
    model, cluster, precision = plan.transformer, plan.cluster, plan.estimate.parallelism.precision
    # A plan does not know the files that its model and its cluster were read from.
    known = False
    with suppress(HpgoError):
        known = Cluster.preset(cluster.name) == cluster
    words = [
        model.name if named_transformer(model.name) == model else "MODEL",
        "-c",
        cluster.name if known else "CLUSTER",
    ]
    words += ["-b", str(plan.estimate.global_batch_size), "--seq-length", str(plan.estimate.seq_length)]
    words += [] if precision == "bf16" else ["--precision", precision]
    words += [] if plan.row.name == "megatron" else ["--framework", plan.framework]
    return f"hpgo llm plan {shell_words(*words)}"


def _steps(options: CalibrateOptions) -> list[MeasuredStep]:
    """Return the steps of all tables and logs."""
    from hpgo.hardware.cluster import Cluster
    from hpgo.llm.measured_steps import MeasuredStep, read_steps

    folders = [file for file in options.files if is_folder_name(file)]
    logs = [file for file in options.files if file not in folders and Path(file).suffix.lower() not in _TABLES]
    names = ["global_batch_size", "seq_length", *_OF_RUNS.split()]
    given: dict[str, Any] = {name: getattr(options, name) for name in names}
    given["zero_stage"] = None if options.zero_stage is None else int(options.zero_stage)
    if not logs:
        of_runs = given | {"model": options.model, "cluster": options.cluster, "stack": options.stack}
        stray = [name for name, value in of_runs.items() if value is not None]
        if stray:
            raise click.UsageError(
                f"--{stray[0].replace('_', '-')} describes the run of a log, but only tables are given: write it into"
                " their rows"
            )
        return [
            step
            for file in options.files
            for step in ([MeasuredStep.from_job(file)] if file in folders else read_steps(file))
        ]
    for name in ("model", "cluster"):
        if getattr(options, name) is None:
            raise click.UsageError(f"Missing option '--{name}': a log does not state it.")
    assert options.model is not None and options.cluster is not None  # noqa: S101, PT018 -- checked above
    rate = options.nic_gbit_s
    cluster = Cluster.read(options.cluster) if rate is None else Cluster.preset(options.cluster, adapter_gbit_s=rate)
    found: list[MeasuredStep] = []
    for file in options.files:
        if file in logs:
            found.append(MeasuredStep.from_log(file, options.model, cluster, stack=options.stack, **given))
        elif file in folders:
            found.append(MeasuredStep.from_job(file))
        else:
            found += read_steps(file)
    return found


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
