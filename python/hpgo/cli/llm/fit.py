"""`hpgo llm fit`: what fine-tuning fits on given GPUs."""

from __future__ import annotations

from typing import Any

import click

from hpgo.base.documents import json_text
from hpgo.cli.command import Options, argument, option, takes
from hpgo.cli.llm.options import COUNT, note_model, note_unmeasured
from hpgo.cli.plan_options import as_options
from hpgo.cli.terminal import width
from hpgo.cli.values import AS_JSON, TRANSFORMER, cluster_option


class FitOptions(Options):
    """Options on the model, the GPUs and the methods."""

    model: str | None = argument(type=TRANSFORMER, required=False)
    cluster: str = cluster_option(required=True)
    devices: int = option("--devices", type=COUNT, default=1, metavar="N", help="Number of GPUs to use.  [1]")
    method: str = option(
        "--method", default="full,lora,qlora", metavar="NAME[:RANK][,…]",
        help="full, lora or qlora, the latter two with a rank: lora:64.  [full,lora,qlora; rank 16]",
    )  # fmt: skip
    seq_length: int = option("--seq-length", type=COUNT, default=2048, metavar="N", help="Tokens per sequence.  [2048]")
    micro_batch_size: int = option(
        "--micro-batch-size", type=COUNT, default=1, metavar="N", help="Sequences per GPU and pass.  [1]"
    )
    top: int = option("--top", type=COUNT, default=10, metavar="N", help="Rows of each table.  [10]")
    as_json: bool = AS_JSON


_SECTIONS = {
    "Model and cluster": "cluster devices",
    "Fine-tuning": "method seq_length micro_batch_size",
    "Output": "top as_json",
}


@takes(FitOptions, sections=_SECTIONS)
def command(options: FitOptions) -> None:
    """Find what fine-tuning fits on your GPUs: all weights, LoRA or QLoRA, and with which settings.

    Without MODEL, find the largest built-in transformer that fits. Several GPUs shard weights, gradients and optimizer
    state (ZeRO stage 3).

    \b
    Examples:
      hpgo llm fit llama-3-8b -c rtx4090
      hpgo llm fit llama-3-70b -c h100 --devices 8 --method lora:64
      hpgo llm fit -c rtx4090
    """
    from hpgo.hardware.cluster import Cluster
    from hpgo.llm.fit import fewest_gpus, fit_llm, largest_models
    from hpgo.show import fit_report

    cluster = Cluster.read(options.cluster)
    methods = [word.strip() for word in options.method.split(",")]
    batch = {"seq_length": options.seq_length, "micro_batch_size": options.micro_batch_size}
    asked: dict[str, Any] = {
        "devices": options.devices,
        "methods": methods,
        **batch,
    }
    if options.model is None:
        with as_options():
            ways = largest_models(cluster, **asked)
        lines = fit_report.largest_lines(ways, width())
        click.echo(json_text(fit_report.document(ways)) if options.as_json else "\n".join(lines))
    else:
        with as_options():
            found = fit_llm(options.model, cluster, **asked)
        if options.as_json:
            click.echo(json_text(fit_report.document(found.ways)))
        else:
            fitting = {one.method for one in found.ways if one.estimate.fits}
            left = [name for name in dict.fromkeys(one.method for one in found.ways) if name not in fitting]
            wider = {name: fewest_gpus(options.model, cluster, method=name, **batch) for name in left}
            missing = [name for name, one in wider.items() if one is None]
            more = [one for one in wider.values() if one is not None]
            click.echo("\n".join(fit_report.lines(found.rows(options.top), more, missing, width())))
            note_model(options.model, options.seq_length)
    note_unmeasured(cluster, None)
