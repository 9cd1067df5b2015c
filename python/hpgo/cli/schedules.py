"""Command `hpgo schedules`: list the schedules and print their action lists."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING

import click

from hpgo.cli.command import Group, Options, argument, option, takes
from hpgo.cli.values import AS_JSON, SCHEDULE
from hpgo.programs.schedule import Schedule, schedule, schedules

if TYPE_CHECKING:
    from hpgo.programs.names import ScheduleName


class ListOptions(Options):
    """Options of `hpgo schedules` without a command."""

    as_json: bool = AS_JSON


@takes(ListOptions, cls=Group, invoke_without_command=True)
def command(options: ListOptions) -> None:
    """List the pipeline schedules, or show one.

    \b
    Examples:
      hpgo schedules
      hpgo schedules show zb_v
      hpgo schedules show interleaved --ranks 4 --micro-batches 8 -c 2
      hpgo schedules show dualpipe --ranks 4 --micro-batches 8 --csv > it.csv
    """
    if click.get_current_context().invoked_subcommand is not None:
        return
    table = schedules()
    if options.as_json:
        click.echo(json.dumps([dataclasses.asdict(family) for family in table], indent=2, ensure_ascii=False))
        return
    width = max(len(family.name) for family in table)
    for family in table:
        click.echo(f"{family.name:{width}}  {family.summary}")


class ShowOptions(Options):
    """Options of `hpgo schedules show`."""

    name: ScheduleName = argument(type=SCHEDULE)
    ranks: int = option(
        "-r",
        "--ranks",
        type=click.IntRange(min=1),
        default=4,
        show_default=True,
        help="Number of pipeline ranks.",
    )
    micro_batches: int = option(
        "-m",
        "--micro-batches",
        type=click.IntRange(min=1),
        default=8,
        show_default=True,
        help="Number of micro-batches.",
    )
    virtual_stages_per_rank: int | None = option(
        "-c", "--virtual-stages-per-rank", type=click.IntRange(min=1), help="Virtual stages per rank."
    )
    group_size: int | None = option(
        "-g",
        "--group-size",
        type=click.IntRange(min=1),
        help="Micro-batches that a rank runs before it changes to its next virtual stage.",
    )
    activation_limit: int | None = option(
        "--activation-limit", type=click.IntRange(min=1), help="Activation limit: micro-batches that a rank may hold."
    )
    csv: bool = option(
        "--csv", is_flag=True, help="Print only the action lists, one line per rank, in PyTorch's format."
    )
    transfers: bool = option(
        "--transfers",
        is_flag=True,
        help="With --csv, also print sends and receives where PyTorch places them. PyTorch can't load these lines.",
    )
    as_json: bool = AS_JSON


@takes(ShowOptions, within=command)
def show(options: ShowOptions) -> None:
    """Show schedule NAME and its action lists. Column t is time t if every action takes 1.

    \b
    Examples:
      hpgo schedules show 1f1b
      hpgo schedules show zb --ranks 4 --micro-batches 8 --activation-limit 6
    """
    built = schedule(
        options.name,
        ranks=options.ranks,
        micro_batches=options.micro_batches,
        virtual_stages_per_rank=options.virtual_stages_per_rank,
        group_size=options.group_size,
        activation_limit=options.activation_limit,
    )
    if options.transfers:
        if not options.csv:
            raise click.UsageError("--transfers needs --csv")
        click.echo("\n".join(",".join(order) for order in built.with_transfers()))
        return
    if options.csv:
        click.echo(built.to_text(), nl=False)
        return
    family = next(family for family in schedules() if family.name == options.name)
    if options.as_json:
        facts = dataclasses.asdict(family) | {
            "ranks": built.ranks,
            "stages": built.stages,
            "micro_batches": built.total_micro_batches,
            "rank_of_stage": built.rank_of_stage,
            "peak_in_flight": built.peak_in_flight,
            "action_lists": built.action_lists,
        }
        click.echo(json.dumps(facts, ensure_ascii=False))
        return
    facts = {
        "source": family.source,
        "needs": family.limits,
        "synchronization": family.synchronization,
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
            click.echo(f"  {what:15}  {fact}")
    click.echo()
    click.echo(_columns(built))


def _columns(built: Schedule) -> str:
    """Return the action lists as a table with one column per time step, at most 200 characters wide."""
    lines = [line.split(",") for line in built.to_text(in_steps=True).splitlines()]
    # PyTorch's notation for combined passes is too long for a column.
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
