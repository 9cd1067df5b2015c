"""Command `hpgo measure-links`: measure the links between ranks, for `hpgo plan`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from hpgo.base.documents import json_text, write_text
from hpgo.base.messages import percent
from hpgo.base.units import format_bytes_per_s
from hpgo.cli.command import Options, option, takes
from hpgo.cli.plan_options import MEASUREMENT_TIMEOUT, measurement_time_limit
from hpgo.cli.ranks import in_ranks
from hpgo.cli.terminal import table
from hpgo.cli.values import AS_JSON, DEVICE, YAML, File
from hpgo.errors import ArgumentError, ClusterError

if TYPE_CHECKING:
    from hpgo.runtime.links import Fit, Links

_KINDS = {"intra": "within a node", "inter": "between nodes"}


class MeasureLinksOptions(Options):
    """Options of `hpgo measure-links`."""

    output: str | None = option("-o", type=YAML, metavar="FILE", help="Cluster file to write: .yaml.")
    picture: str | None = option(
        "--picture", type=File(".svg"), metavar="FILE", help="Draw the rates between all ranks: .svg."
    )
    ranks: int = option(
        "--ranks",
        type=click.IntRange(2),
        default=2,
        show_default=True,
        metavar="N",
        help="Number of processes to start on this machine. Ignored under a launcher.",
    )
    name: str = option("--name", default="", metavar="NAME", help="Name of the cluster.")
    device: str | None = DEVICE
    time_limit: float = measurement_time_limit("20s")
    timeout: float = MEASUREMENT_TIMEOUT
    as_json: bool = AS_JSON


@takes(MeasureLinksOptions)
def command(options: MeasureLinksOptions) -> None:
    """Measure latency and bandwidth of the links between ranks, and write the cluster file for `hpgo plan`.

    Under torchrun, or another launcher that sets RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, the command is one
    rank; start one rank per device of the cluster. Otherwise it starts --ranks processes on this machine. Rank 0
    prints the result and writes the files.

    \b
    Examples:
      hpgo measure-links --ranks 4 -o here.yaml
      hpgo measure-links -o here.yaml --picture rates.svg
      hpgo measure-links --ranks 8 --device cuda --json
    """
    from hpgo import runtime

    runtime.check_torch()
    # Check the folders first: the result of a long measurement must not be lost.
    for file in (options.output, options.picture):
        if file is not None and not Path(file).parent.is_dir():
            raise ArgumentError(
                f"folder not found: `{Path(file).parent}`, for `{file}`",
                f"make the folder: `mkdir -p {Path(file).parent}`",
                code="not_found",
            )

    def work() -> None:
        from hpgo.runtime.links import measure_links
        from hpgo.runtime.rendezvous import place

        rank, _ = place()
        found = measure_links(
            name=options.name, device=options.device, seconds=options.time_limit, timeout_s=options.timeout
        )
        # All ranks measure, but only one may print and write.
        if rank == 0:
            _write(found, options.output, options.picture, as_json=options.as_json)

    in_ranks(options.ranks, options.timeout, work)


def _write(found: Links, output: str | None, picture: str | None, *, as_json: bool) -> None:
    from hpgo.show.links_figure import svg

    if output is not None:
        write_text(Path(output), found.cluster.yaml(), ClusterError)
    if picture is not None:
        write_text(Path(picture), svg(found.cluster.name, found.pairs, found.node_of), ClusterError)
    if as_json:
        click.echo(json_text(_as_json(found)))
        return
    table(
        ("", "latency", "one way", "residual", "both ways, each", "all pairs", "all-reduce"),
        [_row(found, kind, fit) for kind, fit in found.fits.items()],
    )
    if output is None:
        click.echo()
        click.echo(found.cluster.yaml(), nl=False)


def _row(found: Links, kind: str, fit: Fit) -> tuple[str, ...]:
    link = getattr(found.cluster, kind)
    return (
        _KINDS[kind],
        f"{1e6 * fit.latency_s:.3g} us",
        format_bytes_per_s(fit.bytes_per_s),
        percent(fit.residual),
        f"{100 * found.both_ways[kind]:.0f} %",
        format_bytes_per_s(found.at_once[kind]),
        format_bytes_per_s(link.collective_bytes_per_s),
    )


def _as_json(found: Links) -> dict[str, object]:
    kinds = {
        kind: {
            "latency_s": fit.latency_s,
            "bytes_per_s": fit.bytes_per_s,
            "residual": fit.residual,
            "messages": [list(one) for one in found.messages[kind]],
            "both_ways": found.both_ways[kind],
            "at_once_bytes_per_s": found.at_once[kind],
        }
        for kind, fit in found.fits.items()
    }
    pairs = [{"ranks": list(pair), "bytes_per_s": rate} for pair, rate in found.pairs.items()]
    return {"format": "hpgo.links", "version": 1, "cluster": found.cluster.document(), "links": kinds, "pairs": pairs}
