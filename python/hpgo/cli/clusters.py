"""Command `hpgo clusters`: list the built-in clusters and print their files."""

from __future__ import annotations

import dataclasses
import json

import click

from hpgo.base.units import format_bytes_per_s
from hpgo.cli.command import Group, Options, argument, takes
from hpgo.cli.terminal import sources, table
from hpgo.cli.values import AS_JSON, CLUSTER
from hpgo.machine.cluster import Cluster, Link
from hpgo.machine.presets import PRESETS


class ListOptions(Options):
    """Options of `hpgo clusters` without a command."""

    as_json: bool = AS_JSON


@takes(ListOptions, cls=Group, invoke_without_command=True)
def command(options: ListOptions) -> None:
    """List the clusters that `--cluster` takes by name, or show one as a file to edit.

    A name may contain the number of nodes: `h100:16`. The size is nodes × devices per node. Rates are per port and
    direction, within a node and between nodes, for point-to-point messages and for a ring all-reduce. They come from
    datasheets.

    \b
    Examples:
      hpgo clusters
      hpgo clusters --json
      hpgo clusters show h100:4 > mine.yaml
    """
    if click.get_current_context().invoked_subcommand is not None:
        return
    if options.as_json:
        click.echo(json.dumps([_entry(Cluster.preset(name)) for name in PRESETS], indent=2))
        return
    table(
        ["cluster", "size", "device", "inside", "ring inside", "between", "ring between"],
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


class ShowOptions(Options):
    """Options of `hpgo clusters show`."""

    cluster: str = argument(type=CLUSTER)


@takes(ShowOptions, within=command)
def show(options: ShowOptions) -> None:
    """Print CLUSTER, a name or a file, as an editable file for `--cluster`.

    \b
    Examples:
      hpgo clusters show dapple-a
      hpgo clusters show h100:4 > mine.yaml
    """
    click.echo(Cluster.read(options.cluster).yaml(), nl=False)


def _rates(link: Link, *, used: bool) -> tuple[str, str]:
    if not used:
        return "-", "-"
    return format_bytes_per_s(link.bytes_per_s), format_bytes_per_s(link.collective_bytes_per_s)


def _entry(cluster: Cluster) -> dict[str, object]:
    machine = cluster.nodes[0]
    return {
        "name": cluster.name,
        "machines": len(cluster.nodes),
        "devices_per_machine": machine.count,
        "device": machine.device.name,
        "memory_bytes": machine.device.memory_bytes,
        "intra": dataclasses.asdict(cluster.intra),
        "inter": dataclasses.asdict(cluster.inter),
        "source": cluster.source,
    }
