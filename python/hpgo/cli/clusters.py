"""`hpgo clusters`: the known clusters, and their files."""

from __future__ import annotations

import dataclasses
import json

import click

from hpgo.base.units import format_bytes_per_s
from hpgo.cli.command import Group
from hpgo.cli.terminal import sources, table
from hpgo.cli.values import CLUSTER
from hpgo.machine.cluster import Cluster, Link
from hpgo.machine.presets import PRESETS


@click.group(cls=Group, invoke_without_command=True)
@click.option("--json", "as_json", is_flag=True, help="For machines.")
@click.pass_context
def command(ctx: click.Context, as_json: bool) -> None:
    """List the clusters that `--cluster` takes by name, or show one as a file to edit.

    A name may say the number of machines: `h100:16`. Devices are machines × devices of each. Rates are one port's, in
    one direction: inside a machine and between machines, point to point, and in a ring all-reduce (ring). Figures are
    what datasheets promise.

    \b
    Examples:
      hpgo clusters
      hpgo clusters --json
      hpgo clusters show h100:4 > mine.yaml
    """
    if ctx.invoked_subcommand is not None:
        return
    if as_json:
        click.echo(json.dumps([_entry(Cluster.preset(name)) for name in PRESETS], indent=2))
        return
    table(
        ["cluster", "devices", "device", "inside", "ring inside", "between", "ring between"],
        [
            (
                name,
                f"{preset.machines} × {preset.devices}",
                preset.device,
                *_rates(Link(*preset.intra), used=preset.devices > 1),
                *_rates(Link(*preset.inter), used=preset.machines > 1),
            )
            for name, preset in PRESETS.items()
        ],
    )
    sources({name: preset.source for name, preset in PRESETS.items()})


@command.command()
@click.argument("cluster", type=CLUSTER)
def show(cluster: str) -> None:
    """Show CLUSTER, a name or a file, as a file that `--cluster` takes.

    \b
    Examples:
      hpgo clusters show dapple-a
      hpgo clusters show h100:4 > mine.yaml
    """
    click.echo(Cluster.read(cluster).yaml(), nl=False)


def _rates(link: Link, *, used: bool) -> tuple[str, str]:
    if not used:
        return "-", "-"
    return format_bytes_per_s(link.bytes_per_s), format_bytes_per_s(link.collective_bytes_per_s)


def _entry(cluster: Cluster) -> dict[str, object]:
    machine = cluster.machines[0]
    return {
        "name": cluster.name,
        "machines": len(cluster.machines),
        "devices_per_machine": machine.count,
        "device": machine.device.name,
        "memory_bytes": machine.device.memory_bytes,
        "intra": dataclasses.asdict(cluster.intra),
        "inter": dataclasses.asdict(cluster.inter),
        "source": cluster.source,
    }
