"""`hpgo price`: what one way of training a transformer costs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, get_args

import click

from hpgo.base.documents import json_text
from hpgo.cli.command import Command
from hpgo.cli.questions import as_options
from hpgo.cli.terminal import say, width
from hpgo.cli.values import CLUSTER, FILE, PROFILE_OUT, STILL, TRANSFORMER, written
from hpgo.llm.parallelism import PipelineSchedule, Precision, Recompute

if TYPE_CHECKING:
    from hpgo.machine.cluster import Cluster

_DEGREE = click.IntRange(min=1)


_SECTIONS = {
    "What is trained": "cluster devices global_batch_size micro_batch_size seq_length precision",
    "How it is shared": "tp pp vpp first_rank_layers last_rank_layers pp_schedule cp ep zero_stage",
    "How it is computed": "recompute recompute_num_layers no_sequence_parallel no_flash no_fused no_fused_loss"
    " no_fused_update flatten_gradients dtensor grad_reduce_in_bf16 cpu_offload_num_layers no_overlap adapter_gbit_s"
    " platform",
    "What is written": "outputs picture as_json",
}


@click.command(cls=Command, sections=_SECTIONS)
@click.argument("model", type=TRANSFORMER)
@click.option("-c", "--cluster", required=True, type=CLUSTER, metavar="NAME|FILE", help="See `hpgo clusters`.")
@click.option("-b", "--global-batch-size", type=_DEGREE, required=True, metavar="N", help="Sequences of a step.")
@click.option("--seq", "seq_length", type=_DEGREE, required=True, metavar="N", help="Tokens of a sequence.")
@click.option("--tp", type=_DEGREE, default=1, metavar="N", help="GPUs that share each matrix.  [1]")
@click.option("--pp", type=_DEGREE, default=1, metavar="N", help="Stages of the pipeline.  [1]")
@click.option("--vpp", type=_DEGREE, default=1, metavar="N", help="Stages on each GPU: interleaving.  [1]")
@click.option(
    "--first-layers",
    "first_rank_layers",
    type=_DEGREE,
    metavar="N",
    help="On the pipeline's first group.  [as between]",
)
@click.option("--last-layers", "last_rank_layers", type=_DEGREE, metavar="N", help="On its last one.  [as between]")
@click.option(
    "--schedule", "pp_schedule", type=click.Choice(get_args(PipelineSchedule)), default="1f1b", show_default=True,
    help="Order of passes; the others need --vpp.",
)  # fmt: skip
@click.option("--cp", type=_DEGREE, default=1, metavar="N", help="GPUs that share each sequence.  [1]")
@click.option("--ep", type=_DEGREE, default=1, metavar="N", help="GPUs that share a layer's experts.  [1]")
@click.option("--devices", type=_DEGREE, metavar="N", help="GPUs, the first of the cluster.  [all]")
@click.option(
    "--zero", "zero_stage", type=click.IntRange(0, 3), default=1, show_default=True,
    help="Replicas share optimizer state from 1, gradients from 2, weights at 3.",
)  # fmt: skip
@click.option("--micro-batch-size", type=_DEGREE, default=1, metavar="N", help="Sequences at once.  [1]")
@click.option(
    "--recompute", type=click.Choice(get_args(Recompute)), default="none", show_default=True,
    help="Backward passes compute anew: nothing, attention's scores, or layers.",
)  # fmt: skip
@click.option(
    "--recompute-layers",
    "recompute_num_layers",
    type=_DEGREE,
    metavar="N",
    help="How many of each stage, of `full`.  [all]",
)
@click.option(
    "--precision", type=click.Choice(get_args(Precision)), default="bf16", show_default=True,
    help="Of products.",
)  # fmt: skip
@click.option("--no-sequence-parallel", is_flag=True, help="What lies between matrices is not shared.")
@click.option("--no-flash", is_flag=True, help="Attention is several kernels, which keep scores.")
@click.option("--no-fused", is_flag=True, help="Operations on single values are not fused.")
@click.option("--no-overlap", is_flag=True, help="Gradients are summed after the backward passes only.")
@click.option("--no-fused-loss", is_flag=True, help="The loss is several kernels, in 32 bits.")
@click.option("--no-fused-update", is_flag=True, help="Adam is several kernels.")
@click.option(
    "--flat-update",
    "flatten_gradients",
    is_flag=True,
    help="Its 16-bit gradients are copied into one tensor, as by DeepSpeed.",
)
@click.option("--dtensor", is_flag=True, help="PyTorch's DTensor and FSDP2 share it, as in torchtitan.")
@click.option("--narrow-gradients", "grad_reduce_in_bf16", is_flag=True, help="Gradients add up in 16 bits.")
@click.option(
    "--offload-layers", "cpu_offload_num_layers", type=click.IntRange(min=0), default=0, metavar="N",
    help="Layers whose values wait in the host's memory.  [0]",
)  # fmt: skip
@click.option("--adapter", "adapter_gbit_s", type=float, metavar="GBIT/S", help="Rate of a preset's network adapters.")
@click.option("--platform", type=FILE, metavar="FILE", help="What steps measured there say: `hpgo calibrate --steps`.")
@click.option("--picture", type=STILL, metavar="FILE", help="The way on its cluster: .svg, .png, .pdf or .html.")
@written(PROFILE_OUT, "Its layers, on groups of GPUs, as a profile for `hpgo plan`. Repeatable.")
@click.option("--json", "as_json", is_flag=True, help="For machines.")
def command(
    *,
    model: str,
    cluster: str,
    no_sequence_parallel: bool,
    no_flash: bool,
    no_fused: bool,
    no_overlap: bool,
    no_fused_loss: bool,
    no_fused_update: bool,
    adapter_gbit_s: float | None,
    platform: str | None,
    picture: str | None,
    outputs: tuple[str, ...],
    as_json: bool,
    **options: Any,
) -> None:
    """Price one way of training a transformer on GPUs, without a profile.

    MODEL is a name that `hpgo models transformers` lists, a Hugging Face config.json, or a YAML file with its sizes.
    The degree of data parallelism follows from the others. Nothing is measured: the step stands with the error that
    such prices have against published steps.

    \b
    Examples:
      hpgo price llama-3-8b -c h100:1 -b 32 --seq 8192 --tp 2
      hpgo price llama-3-70b -c h100:8 -b 128 --seq 8192 --tp 8 --pp 4 --vpp 5
      hpgo price llama-3-8b -c h100:2 -b 32 --seq 8192 --tp 2 --picture way.svg
      hpgo price config.json -c a100:4 --devices 24 -b 48 --seq 4096 --tp 8
      hpgo price mixtral-8x7b -c h100:4 -b 128 --seq 4096 --pp 2 --ep 8
    """
    from hpgo.llm.estimate import constants_of, estimate_llm, profile_of
    from hpgo.llm.platform import Platform
    from hpgo.model.formats import write_profile
    from hpgo.show.llm_report import document, lines

    where = _cluster(cluster, adapter_gbit_s)
    measured = None if platform is None else Platform.read(platform)
    with as_options():
        found = estimate_llm(
            model,
            where,
            sequence_parallel=False if no_sequence_parallel else None,
            flash_attention=not no_flash,
            fused_elementwise=not no_fused,
            overlap_dp_comm=not no_overlap,
            fused_cross_entropy=not no_fused_loss,
            fused_adam=not no_fused_update,
            platform=measured,
            **options,
        )
        for output in outputs:
            write_profile(profile_of(found, model, where, constants=constants_of(where, measured)), output)
        if picture is not None:
            from hpgo.show.llm_figure import draw_llm_plan

            draw_llm_plan(found, where, picture)
    click.echo(json_text(document(found)) if as_json else "\n".join(lines(found, width())))
    if not found.fits:
        say("warning", "it does not fit: raise a degree, or --zero, or compute anew with --recompute")


def _cluster(name: str, adapter_gbit_s: float | None) -> Cluster:
    from hpgo.machine.cluster import Cluster

    return Cluster.read(name) if adapter_gbit_s is None else Cluster.preset(name, adapter_gbit_s=adapter_gbit_s)
