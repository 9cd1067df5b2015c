"""`hpgo export`: a plan for a launcher."""

from __future__ import annotations

import click

_LAUNCHERS = ("megatron", "deepspeed", "torchtitan")  # hpgo.export.LAUNCHERS, which `--help` need not load


@click.command()
@click.argument("plan", metavar="PLAN.json")
@click.option("--to", "launcher", type=click.Choice(_LAUNCHERS), required=True, help="Who shall run it.")
@click.option("-o", "--output", metavar="FILE", help="Write it there instead of printing it.")
def command(plan: str, launcher: str, output: str | None) -> None:
    """Write PLAN.json, from `hpgo plan -o`, as configuration of a launcher.

    Launchers run grids: as many replicas of each stage. Plans with other counts are for launchers of your own, which
    ask a plan what each rank does: `Plan.for_rank`, examples/rank.py.

    \b
    Examples:
      hpgo export plan.json --to megatron -o arguments.txt
      hpgo export plan.json --to torchtitan -o job.toml
      hpgo export plan.json --to deepspeed -o planned.py
    """
    from hpgo import export
    from hpgo.planning.plans import Plan

    read = Plan.read(plan)
    if output is not None:
        export.save(read, launcher, output)
    else:
        click.echo(export.LAUNCHERS[launcher](read), nl=False)
