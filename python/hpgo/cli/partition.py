"""Command `hpgo partition`: split a chain of layers over hosts of different speed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from hpgo.base.documents import write_text
from hpgo.base.units import format_seconds
from hpgo.cli.command import Options, option, takes
from hpgo.cli.plan_options import COUNT_LOADING, time_limit_option
from hpgo.cli.terminal import say, searching
from hpgo.cli.values import AS_JSON, CLUSTER, FILE, PROFILE, TRANSFORMER, File
from hpgo.errors import ArgumentError

if TYPE_CHECKING:
    from hpgo.model.formats.pipeedge import Units
    from hpgo.model.kv_cache import KvCache, KvType
    from hpgo.planning.chain.plans import ChainPlan
    from hpgo.programs.frameworks import ServingFramework


_SECTIONS = {
    "Model and hosts": "model_name models_file dev_types_file dev_file profile cluster links units"
    " ignore_unknown_types",
    "Problem": "objective samples_per_s batch_size dtype buffers_in buffers_out bits interpolate include_data_loading",
    "KV cache": "kv_model kv_context_length kv_sequences kv_dtype",
    "Placement": "pins exclude max_replicas framework",
    "Search": "time_limit_s",
    "Output": "why as_json as_yaml picture",
}


class ChainOptions(Options):
    """Options of the search, which are keyword arguments of `hpgo.partition` and `hpgo.partition_files`."""

    batch_size: int | None = option(
        "-b",
        "--batch-size",
        type=int,
        metavar="N",
        help="Samples per batch.  [default: 8, or the largest batch of --profile]",
    )
    dtype: str = option(
        "-d", "--dtype", metavar="TYPE", default="torch.float32", help="Data type of the values between stages."
    )
    buffers_in: int = option(
        "-i", "--buffers-in", type=int, metavar="N", default=2, help="Batches buffered before a stage."
    )
    buffers_out: int = option(
        "-o", "--buffers-out", type=int, metavar="N", default=2, help="Batches buffered behind a stage."
    )
    objective: str = option(
        "--objective",
        type=click.Choice(["throughput", "latency", "hosts", "bits"]),
        default="throughput",
        help="Goal: shortest interval between batches, shortest latency, fewest hosts, or fewest bits removed.",
    )
    samples_per_s: float | None = option(
        "--throughput", type=float, metavar="X", help="Minimum samples per second of any plan."
    )
    links: str | None = option(
        "--links",
        type=FILE,
        metavar="FILE",
        help="YAML file with links between pairs of hosts, latencies, and links of input and output.",
    )
    pins: tuple[str, ...] = option(
        "--pin", multiple=True, metavar="HOST=1-12", help="Place these layers on this host. Repeatable."
    )
    exclude: tuple[str, ...] = option(
        "--exclude",
        multiple=True,
        metavar="HOST[=1-12]",
        help="Do not use this host, or not for these layers. Repeatable.",
    )
    max_replicas: int = option(
        "--max-replicas",
        type=int,
        metavar="N",
        default=1,
        help="Maximum number of hosts of one type that share a stage.",
    )
    bits: tuple[int, ...] = option(
        "--bits",
        multiple=True,
        type=int,
        metavar="N",
        help="Bits per value to which transfers may be quantized. Repeatable.",
    )
    time_limit_s: float = time_limit_option(default=10.0)


class PartitionOptions(ChainOptions):
    """Options of `hpgo partition`."""

    model_name: str = option(
        "-m",
        "--model-name",
        metavar="NAME",
        default="google/vit-base-patch16-224",
        help="Name of the model in --models-file.",
    )
    models_file: str = option(
        "-M",
        "--models-file",
        type=FILE,
        metavar="FILE",
        default="models.yml",
        help="PipeEdge file of models: layers, memory, sizes of values.",
    )
    dev_types_file: str = option(
        "-T",
        "--dev-types-file",
        type=FILE,
        metavar="FILE",
        default="device_types.yml",
        help="PipeEdge file of device types: memory, layer times.",
    )
    dev_file: str = option(
        "-D",
        "--dev-file",
        type=FILE,
        metavar="FILE",
        default="devices.yml",
        help="PipeEdge file of hosts by device type.",
    )
    profile: str | None = option(
        "--profile",
        type=PROFILE,
        metavar="NAME|FILE",
        help="Built-in model or profile file, instead of the three PipeEdge files. Needs --cluster.",
    )
    cluster: str | None = option(
        "--cluster", type=CLUSTER, metavar="NAME|FILE", help="Cluster for --profile, whose devices may differ."
    )
    framework: ServingFramework | None = option(
        "--framework",
        metavar="NAME",
        help="Cut --profile only between blocks, as this framework runs it: vllm, sglang, llama.cpp, tensorrt-llm,"
        " accelerate. Every stage gets at least one block.",
    )
    kv_model: str | None = option(
        "--kv-model",
        type=TRANSFORMER,
        metavar="NAME|FILE",
        help="Transformer of --profile, whose blocks keep keys and values: a name, or its config.json.",
    )
    kv_context_length: int | None = option(
        "--kv-context",
        type=click.IntRange(1),
        metavar="N",
        help="Tokens of each sequence in the KV cache, of prompt and answer. Needs --kv-model.",
    )
    kv_sequences: int = option(
        "--kv-sequences", type=click.IntRange(1), metavar="N", default=1, help="Sequences in the KV cache at a time."
    )
    kv_dtype: KvType = option(
        "--kv-dtype",
        type=click.Choice(["bfloat16", "float16", "float32", "float8"]),
        default="bfloat16",
        help="Number format of the KV cache.",
    )
    interpolate: bool = option(
        "--interpolate", is_flag=True, help="Interpolate and extrapolate times for batch sizes that were not measured."
    )
    units: Units = option(
        "--units",
        type=click.Choice(["pipeedge", "si"]),
        default="pipeedge",
        help="Size of MB and Mbps in the files: 2^20 (pipeedge) or 10^6 (si).",
    )
    ignore_unknown_types: bool = option(
        "--ignore-unknown-types", is_flag=True, help="Skip hosts whose device type has no layer times."
    )
    include_data_loading: bool = COUNT_LOADING
    why: bool = option("--explain", is_flag=True, help="Explain each stage: compute, transfer, memory, slack.")
    as_json: bool = AS_JSON
    as_yaml: bool = option("--yaml", is_flag=True, help="Print the plan in the YAML format of PipeEdge's runtime.")
    picture: str | None = option(
        "--svg", type=File(".svg"), metavar="FILE", help="Also draw the stages into this file."
    )


@takes(PartitionOptions, sections=_SECTIONS, context_settings={"show_default": True})
def command(options: PartitionOptions) -> None:
    """Split a chain of layers over hosts of different speed, with proof that no split is better.

    The input is PipeEdge's three YAML files (models, device types, hosts), or a --profile and a --cluster.

    \b
    Examples:
      hpgo partition --explain
      hpgo partition --objective hosts --throughput 1
      hpgo partition --pin mb-0=1-4 --exclude rcc-3 --links links.yml
      hpgo partition --objective bits --throughput 6 --bits 16 --bits 8
      hpgo partition --profile vgg-19 --cluster mixed.yaml --json
      hpgo partition --profile bert-48 --cluster mixed.yaml --framework vllm
      hpgo partition --profile llm.yaml --cluster two.yaml --framework sglang
    """
    from hpgo.planning.chain.search import partition, partition_files
    from hpgo.show.chain_report import explain, table

    if (options.profile is None) != (options.cluster is None):
        raise click.UsageError("--profile and --cluster must be given together")
    if options.framework is not None and options.profile is None:
        raise click.UsageError("--framework needs --profile and --cluster: PipeEdge's files have no blocks")
    if (options.kv_model is None) != (options.kv_context_length is None):
        raise click.UsageError("--kv-model and --kv-context must be given together")
    if options.kv_model is not None and options.profile is None:
        raise click.UsageError("--kv-model needs --profile and --cluster: PipeEdge's files have no blocks")
    if [options.why, options.as_json, options.as_yaml].count(True) > 1:
        raise click.UsageError("choose one of --explain, --json and --yaml")
    # Options that are not given keep the defaults of the function.
    given = {key: value for key, value in options.group(ChainOptions).items() if value is not None}
    objective = options.objective
    # The progress line shows times with a unit, and counts as plain numbers.
    in_seconds = objective in {"throughput", "latency"}
    label = "interval" if objective == "throughput" else objective
    with searching(label, format_seconds if in_seconds else "{:g}".format) as given["progress"]:
        plan: ChainPlan
        if options.profile is not None and options.cluster is not None:
            plan = partition(
                options.profile,
                options.cluster,
                framework=options.framework,
                include_data_loading=options.include_data_loading,
                kv_cache=_kv_cache(options),
                **given,
            )
        else:
            plan = partition_files(
                options.models_file,
                options.dev_types_file,
                options.dev_file,
                model=options.model_name,
                interpolate=options.interpolate,
                units=options.units,
                ignore_unknown_types=options.ignore_unknown_types,
                **given,
            )
    # Warnings go to stderr, so that JSON and YAML on stdout stay valid.
    for remark in plan.remarks:
        say("warning", remark)
    if options.picture is not None:
        from hpgo.show.chain_figure import svg

        write_text(options.picture, svg(plan), ArgumentError)
    if options.as_json:
        click.echo(plan.to_json())
    elif options.as_yaml:
        click.echo(plan.pipeedge(), nl=False)
    else:
        click.echo(explain(plan) if options.why else table(plan))


def _kv_cache(options: PartitionOptions) -> KvCache | None:
    """Return the KV cache of the options; None without one."""
    if options.kv_model is None or options.kv_context_length is None:
        return None
    from hpgo.model.formats.transformers import transformer_of
    from hpgo.model.kv_cache import KvCache

    return KvCache(
        transformer=transformer_of(options.kv_model),
        context_length=options.kv_context_length,
        sequences=options.kv_sequences,
        dtype=options.kv_dtype,
    )
