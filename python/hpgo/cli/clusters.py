"""Command `hpgo clusters`: list the built-in clusters and print their files."""

from __future__ import annotations

import dataclasses
import json
import textwrap

import click

from hpgo.base.units import format_bytes_per_s
from hpgo.cli.command import Group, Options, argument, takes
from hpgo.cli.terminal import sources, table, width
from hpgo.cli.values import AS_JSON, CLUSTER
from hpgo.hardware.cluster import Cluster, Link
from hpgo.hardware.device_types import type_document
from hpgo.hardware.presets import PRESETS
from hpgo.hardware.rates import NAMES, RATES, rates_of


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
      hpgo clusters devices
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
                f"{preset.nodes} × {preset.devices}",
                preset.device,
                *_rates(Link(*preset.intra), used=preset.devices > 1),
                *_rates(Link(*preset.inter), used=preset.nodes > 1),
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


class DevicesOptions(Options):
    """Options of `hpgo clusters devices`."""

    as_json: bool = AS_JSON


@takes(DevicesOptions, within=command)
def devices(options: DevicesOptions) -> None:
    """List the devices whose rates are known, with their names.

    FLOP/s are peaks of dense matrices from datasheets. Shares are those that large bf16 operations reach: measured on
    the card, scaled from a measured card of its architecture, or unknown beyond the datasheet.

    \b
    Examples:
      hpgo clusters devices
      hpgo clusters devices --json
    """
    if options.as_json:
        click.echo(json.dumps([_device(key) for key in RATES], indent=2))
        return
    table(
        ["device", "processors", "bf16", "fp8", "memory", "GEMM share", "shares"],
        [
            (
                key,
                rates.processors,
                _tera(rates.flop_per_s.get("bfloat16", rates.flop_per_s["float16"])),
                _tera(rates.narrow_flop_per_s.get("fp8")),
                format_bytes_per_s(rates.bytes_per_s),
                f"{100 * rates.reached['bf16']:.1f} %" if "bf16" in rates.reached else "-",
                rates.shares,
            )
            for key, rates in RATES.items()
        ],
    )
    click.echo()
    click.echo("bf16 and fp8 in TFLOP/s; the V100 has fp16 in place of bf16.")
    for key, names in NAMES.items():
        text = f"{key}: {RATES[key].source}. Names: {', '.join(names)}"
        click.echo("\n".join(textwrap.wrap(text, width(), subsequent_indent="  ")))


def _tera(rate: float | None) -> str:
    return "-" if rate is None else f"{rate / 1e12:,.5g}"


def _device(key: str) -> dict[str, object]:
    return {"name": key, "names": NAMES[key], **type_document(RATES[key]), "shares": RATES[key].shares}


def _rates(link: Link, *, used: bool) -> tuple[str, str]:
    if not used:
        return "-", "-"
    return format_bytes_per_s(link.bytes_per_s), format_bytes_per_s(link.collective_bytes_per_s)


def _entry(cluster: Cluster) -> dict[str, object]:
    node = cluster.nodes[0]
    return {
        "name": cluster.name,
        "nodes": len(cluster.nodes),
        "devices_per_node": node.count,
        "device": node.device.name,
        "memory_bytes": node.device.memory_bytes,
        "shares": rates_of(node.device.name).shares,
        "intra": dataclasses.asdict(cluster.intra),
        "inter": dataclasses.asdict(cluster.inter),
        "source": cluster.source,
    }
