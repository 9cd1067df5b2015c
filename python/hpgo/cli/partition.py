"""`hpgo partition`: spread a chain of layers over uneven hosts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from hpgo.base.documents import write_text
from hpgo.base.errors import ArgumentError
from hpgo.base.units import format_seconds
from hpgo.cli.command import Command
from hpgo.cli.questions import SECONDS
from hpgo.cli.terminal import say, searching
from hpgo.cli.values import CLUSTER, FILE, PROFILE, File

if TYPE_CHECKING:
    from hpgo.model.formats.pipeedge import Units
    from hpgo.planning.chain.plans import ChainPlan
    from hpgo.programs.names import ServingLauncher


_SECTIONS = {
    "Files": "model_name models_file dev_types_file dev_file profile cluster links units ignore_unknown_types",
    "What is planned": "objective samples_per_s batch_size dtype buffers_in buffers_out bits interpolate count_loading",
    "Where layers run": "pins exclude max_replicas launcher",
    "What is written": "deadline_s why as_json as_yaml picture",
}


@click.command(cls=Command, sections=_SECTIONS, context_settings={"show_default": True})
@click.option("-m", "--model-name", metavar="NAME", default="google/vit-base-patch16-224", help="Model to spread.")
@click.option(
    "-M", "--models-file", type=FILE, metavar="FILE", default="models.yml", help="Models: layers, memory, values."
)
@click.option(
    "-T", "--dev-types-file", type=FILE, metavar="FILE", default="device_types.yml", help="Types: memory, times."
)
@click.option("-D", "--dev-file", type=FILE, metavar="FILE", default="devices.yml", help="Hosts of each type.")
@click.option(
    "--profile",
    type=PROFILE,
    metavar="NAME|FILE",
    help="A built-in model or a file, instead of the three; with --cluster.",
)
@click.option("--cluster", type=CLUSTER, metavar="NAME|FILE", help="A cluster, of mixed devices say, for --profile.")
@click.option(
    "--for",
    "launcher",
    metavar="NAME",
    help="Cut --profile as vllm, sglang, llama.cpp and accelerate can: between blocks, one a stage at least.",
)
@click.option("-b", "--batch-size", type=int, metavar="N", help="Samples in a batch: 8, or the largest of --profile.")
@click.option("-d", "--dtype", metavar="TYPE", default="torch.float32", help="Data type of values on the edges.")
@click.option("-i", "--buffers-in", type=int, metavar="N", default=2, help="Batches that wait to be worked on.")
@click.option("-o", "--buffers-out", type=int, metavar="N", default=2, help="Batches that wait to be sent.")
@click.option(
    "--objective",
    type=click.Choice(["throughput", "latency", "hosts", "bits"]),
    default="throughput",
    help="Shortest interval, shortest latency, fewest hosts, or fewest bits lost.",
)
@click.option(
    "--throughput", "samples_per_s", type=float, metavar="X", help="Samples per second that every plan must reach."
)
@click.option("--links", type=FILE, metavar="FILE", help="YAML of pairwise links, latencies, and ways in and out.")
@click.option("--pin", "pins", multiple=True, metavar="HOST=1-12", help="These layers run here. Repeatable.")
@click.option("--exclude", multiple=True, metavar="HOST[=1-12]", help="Not this host, or not these layers. Repeatable.")
@click.option("--max-replicas", type=int, metavar="N", default=1, help="Hosts of a type that may share a stage.")
@click.option("--bits", multiple=True, type=int, metavar="N", help="Width that edges may be cut to. Repeatable.")
@click.option("--interpolate", is_flag=True, help="Allow batch sizes between and beyond the measured ones.")
@click.option("--units", type=click.Choice(["pipeedge", "si"]), default="pipeedge",
              help="What MB and Mbps count: 2^20, as PipeEdge, or 10^6.")  # fmt: skip
@click.option("--ignore-unknown-types", is_flag=True, help="Leave out hosts whose type has no profile.")
@click.option("--count-loading", is_flag=True,
              help="Count the time of layers that only load data; by default a loader works ahead.")  # fmt: skip
@click.option("--deadline", "--time-limit", "deadline_s", type=SECONDS, metavar="TIME", default=10.0,
              help="Stop then, with the best plan so far: `30s`.")  # fmt: skip
@click.option("--explain", "why", is_flag=True, help="Say why: compute, transfer, memory and slack of each stage.")
@click.option("--json", "as_json", is_flag=True, help="The whole plan for machines.")
@click.option("--yaml", "as_yaml", is_flag=True, help="The schedule as PipeEdge's runtime reads it.")
@click.option("--svg", "picture", type=File(".svg"), metavar="FILE", help="Also draw the stages.")
def command(
    *,
    model_name: str,
    models_file: str,
    dev_types_file: str,
    dev_file: str,
    profile: str | None,
    cluster: str | None,
    launcher: ServingLauncher | None,
    count_loading: bool,
    interpolate: bool,
    units: Units,
    ignore_unknown_types: bool,
    why: bool,
    as_json: bool,
    as_yaml: bool,
    picture: str | None,
    **options: Any,
) -> None:
    """Spread a chain of layers over uneven hosts, with proof that nothing is better.

    Model, device types and hosts are PipeEdge's three YAML files, or a --profile and a --cluster.

    \b
    Examples:
      hpgo partition --explain
      hpgo partition --objective hosts --throughput 1
      hpgo partition --pin mb-0=1-4 --exclude rcc-3 --links links.yml
      hpgo partition --objective bits --throughput 6 --bits 16 --bits 8
      hpgo partition --profile vgg-19 --cluster mixed.yaml --json
      hpgo partition --profile bert-48 --cluster mixed.yaml --for vllm
      hpgo partition --profile llm.yaml --cluster two.yaml --for sglang --json
    """
    from hpgo.planning.chain.search import partition, partition_files
    from hpgo.show.chain_report import explain, table

    if (profile is None) != (cluster is None):
        raise click.UsageError("--profile and --cluster go together")
    if launcher is not None and profile is None:
        raise click.UsageError("--for goes with --profile and --cluster: PipeEdge's files don't name blocks")
    if [why, as_json, as_yaml].count(True) > 1:
        raise click.UsageError("choose one of --explain, --json and --yaml")
    given = {key: value for key, value in options.items() if value is not None}
    objective = options["objective"]
    in_seconds = objective in {"throughput", "latency"}
    label = "interval" if objective == "throughput" else objective
    with searching(label, format_seconds if in_seconds else "{:g}".format) as given["progress"]:
        plan: ChainPlan
        if profile is not None and cluster is not None:
            plan = partition(profile, cluster, launcher=launcher, count_loading=count_loading, **given)
        else:
            plan = partition_files(
                models_file,
                dev_types_file,
                dev_file,
                model=model_name,
                interpolate=interpolate,
                units=units,
                ignore_unknown_types=ignore_unknown_types,
                **given,
            )
    for remark in plan.remarks:
        say("warning", remark)
    if picture is not None:
        from hpgo.show.chain_picture import svg

        write_text(picture, svg(plan), ArgumentError)
    if as_json:
        click.echo(plan.to_json())
    elif as_yaml:
        click.echo(plan.pipeedge(), nl=False)
    else:
        click.echo(explain(plan) if why else table(plan))
