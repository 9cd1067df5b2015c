"""`hpgo schedules`: the table of schedules, and their orders."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING

import click

from hpgo.cli.command import Group
from hpgo.cli.values import SCHEDULE
from hpgo.programs.orders import Schedule, schedule, schedules

if TYPE_CHECKING:
    from hpgo.programs.names import ScheduleName


@click.group(cls=Group, invoke_without_command=True)
@click.option("--json", "as_json", is_flag=True, help="The whole table: sources, limits, closed forms.")
@click.pass_context
def command(ctx: click.Context, as_json: bool) -> None:
    """List the known schedules, one line each, or show one.

    \b
    Examples:
      hpgo schedules
      hpgo schedules show zb_v
      hpgo schedules show interleaved --ranks 4 --micro-batches 8 --chunks 2
      hpgo schedules show dualpipe --ranks 4 --micro-batches 8 --csv > it.csv
    """
    if ctx.invoked_subcommand is not None:
        return
    table = schedules()
    if as_json:
        click.echo(json.dumps([dataclasses.asdict(family) for family in table], indent=2, ensure_ascii=False))
        return
    width = max(len(family.name) for family in table)
    for family in table:
        click.echo(f"{family.name:{width}}  {family.summary}")


@command.command()
@click.argument("name", type=SCHEDULE)
@click.option("-r", "--ranks", type=click.IntRange(min=1), default=4, show_default=True)
@click.option("-m", "--micro-batches", type=click.IntRange(min=1), default=8, show_default=True)
@click.option("-c", "--chunks", type=click.IntRange(min=1), help="Stages a rank.")
@click.option("-g", "--group-size", type=click.IntRange(min=1), help="Micro-batches before the next chunk's turn.")
@click.option("--cap", type=click.IntRange(min=1), help="Most activations a rank may hold.")
@click.option("--csv", is_flag=True, help="Only the orders, one line a rank, as PyTorch reads them.")
@click.option(
    "--transfers",
    is_flag=True,
    help="With --csv: sends and receives too, where PyTorch places them; to read and compare, not to load.",
)
@click.option("--json", "as_json", is_flag=True, help="Orders and facts for machines.")
def show(
    *,
    name: ScheduleName,
    ranks: int,
    micro_batches: int,
    chunks: int | None,
    group_size: int | None,
    cap: int | None,
    csv: bool,
    transfers: bool,
    as_json: bool,
) -> None:
    """Show what schedule NAME is, and its orders: column t is step t if every action takes one.

    \b
    Examples:
      hpgo schedules show 1f1b
      hpgo schedules show zb --ranks 4 --micro-batches 8 --cap 6
    """
    built = schedule(name, ranks=ranks, micro_batches=micro_batches, chunks=chunks, group_size=group_size, cap=cap)
    if transfers:
        if not csv:
            raise click.UsageError("--transfers needs --csv")
        click.echo("\n".join(",".join(order) for order in built.with_transfers()))
        return
    if csv:
        click.echo(built.to_text(), nl=False)
        return
    family = next(family for family in schedules() if family.name == name)
    if as_json:
        facts = dataclasses.asdict(family) | {
            "ranks": built.ranks,
            "stages": built.stages,
            "micro_batches": built.total_micro_batches,
            "rank_of_stage": built.rank_of_stage,
            "peak_in_flight": built.peak_in_flight,
            "orders": built.orders,
        }
        click.echo(json.dumps(facts, ensure_ascii=False))
        return
    facts = {
        "source": family.source,
        "needs": family.limits,
        "pace": family.pace,
        "weights": " ".join(
            [
                "two copies of the model" if family.chains == 2 else "one copy",
                "" if family.weight_versions == "1" else f"in {family.weight_versions} versions",
            ]
        ).strip(),
        "in flight": f"{family.peak} = {', '.join(map(str, built.peak_in_flight))}",
        "bubble": family.bubble,
    }
    click.echo(f"{family.name}: {family.summary}")
    for what, fact in facts.items():
        if fact:
            click.echo(f"  {what:9}  {fact}")
    click.echo()
    click.echo(_columns(built))


def _columns(built: Schedule) -> str:
    """The orders as a table with one column a step, cut where a terminal would wrap."""
    lines = [line.split(",") for line in built.to_text(in_steps=True).splitlines()]
    cells = [[cell.replace("OVERLAP_F_B", "").strip("()").replace(";", "+") for cell in line] for line in lines]
    steps = max(len(line) for line in cells)
    table = [line + [""] * (steps - len(line)) for line in cells]
    width = max(len(cell) for line in table for cell in line) + 1
    head = len(f"rank {len(table) - 1}") + 1
    shown = max(1, (200 - head) // width)
    rows = [
        f"{f'rank {rank}':{head}}" + "".join(f"{cell:{width}}" for cell in line[:shown]).rstrip()
        for rank, line in enumerate(table)
    ]
    if shown < steps:
        rows.append(f"… {steps - shown} more steps; `--csv` and `--json` have them all")
    return "\n".join(rows)
