"""`hpgo evaluate`: the price of a plan that you give."""

from __future__ import annotations

from typing import Any

import click

from hpgo.cli.plan import show
from hpgo.cli.questions import as_options, question, settings


class _Stages(click.ParamType):  # type: ignore[type-arg]
    """`26@0-7,27@8-15`: layers and devices of each stage."""

    name = "stages"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> list[tuple[int, list[int]]]:
        """Layers and devices of each stage."""
        if isinstance(value, list):
            return value
        stages = []
        for word in str(value).split(","):
            layers, at, places = word.strip().partition("@")
            devices: list[int] = []
            for place in places.split("+"):
                first, dash, last = place.strip().partition("-")
                if not (at and _is_count(layers) and _is_count(first) and (not dash or _is_count(last))):
                    self.fail(f"`{word[:40]}` is no stage; write layers@devices, like 26@0-7 or 4@0-3+8-11", param, ctx)
                if int(last or first) - int(first) >= 2**20:
                    self.fail(f"`{place[:40]}` are too many devices", param, ctx)
                devices += range(int(first), int(last or first) + 1)
            if not devices:
                self.fail(f"`{word[:40]}` has no devices; ranges ascend, like 0-7", param, ctx)
            stages.append((int(layers), devices))
        return stages


def _is_count(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= 9


@click.command()
@question(several=False)
@click.option(
    "--stages", type=_Stages(), required=True, metavar="LAYERS@DEVICES,…",
    help="For each stage a number of layers, in the profile's order, and its devices.",
)  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="For machines: docs/plan.md.")
@click.option("--markdown", "as_markdown", is_flag=True, help="To paste into a document.")
@click.option("-o", "--output", metavar="FILE", help="Also write the plan as JSON, for `hpgo export` and others.")
def command(
    *,
    profile: str,
    cluster: str,
    global_batch_size: int,
    profile_batch_size: int | None,
    stages: list[tuple[int, list[int]]],
    as_json: bool,
    as_markdown: bool,
    output: str | None,
    **options: Any,
) -> None:
    """Price a plan of your own, with the model and the report of `hpgo plan`.

    Devices are numbered machine by machine from 0: `0-7` are eight, `0-3+8-11` four on each of two machines of eight.

    \b
    Examples:
      hpgo evaluate bert-48 --cluster dapple-a -b 64 --stages "26@0-7,27@8-15"
      hpgo evaluate vgg-19 --cluster dapple-c -b 2048 --stages "22@0-14,4@15"
    """
    from hpgo.machine.cluster import Cluster
    from hpgo.model.formats import read_profile
    from hpgo.planning.planner import evaluate

    if as_json and as_markdown:
        raise click.UsageError("choose one of --json and --markdown")
    with as_options():
        read = read_profile(profile, batch_size=profile_batch_size)
        priced = evaluate(
            read, Cluster.parse(cluster), stages, global_batch_size=global_batch_size, **settings(options)
        )
    try:
        if output is not None:
            priced.save(output)
    finally:
        show(priced, as_json=as_json, as_markdown=as_markdown)
