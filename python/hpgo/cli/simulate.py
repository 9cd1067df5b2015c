"""Command `hpgo simulate`: simulate schedules or plans, report their measures and draw them."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hpgo.cli.command import option, takes
from hpgo.cli.simulation_options import SECTIONS, Listing, SetupOptions, flag_of, read
from hpgo.cli.terminal import say
from hpgo.cli.values import AS_JSON, FILE, PLAN, RUN_OUT, SCHEDULES, written
from hpgo.errors import ArgumentError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from hpgo.programs.names import ScheduleName
    from hpgo.timing.config import SimulationConfig
    from hpgo.timing.timeline import Timeline

    Called = Callable[[str], str]
    """A function that returns the name of a field of `SimulationConfig` in errors."""

_DATA = (".npz", ".timeline.json")
_MAX_ROWS = 64
"""Number of table rows above which the table of ranks is not printed. Not tuned."""


class SimulateOptions(SetupOptions):
    """Options of `hpgo simulate`."""

    config: str | None = option(
        "-c",
        "--config",
        type=FILE,
        metavar="FILE",
        help="JSON or YAML file with these options as keys. Options on the command line override it.",
    )
    plan_file: str | None = option(
        "--plan", type=PLAN, metavar="FILE", help="Plan of `hpgo plan -o`, whose times and memory are used."
    )
    compare: str | None = option(
        "--compare", type=SCHEDULES, metavar="A,B,...", help="Compare several schedules in one table and one picture."
    )
    sweep: str | None = option(
        "--sweep",
        type=click.Choice(["micro-batches"]),
        help="Report step time and memory for each number of micro-batches up to -b.",
    )
    outputs: tuple[str, ...] = written(
        RUN_OUT,
        "Picture (.png .svg .pdf .html .json .txt .tex) or data (.npz .timeline.json). Repeatable.  [default: a picture"
        " named after the schedule]",
    )
    no_visualization: bool = option("--no-visualization", is_flag=True, help="Write no picture, only data files of -o.")
    as_json: bool = AS_JSON


@takes(SimulateOptions, cls=Listing, sections=SECTIONS)
def command(options: SimulateOptions) -> None:
    """Simulate a pipeline schedule: step time, bubbles, memory, and a picture.

    \b
    Examples:
      hpgo simulate -s 4 -b 8
      hpgo simulate -s 4 -b 8 -f 1 1.2 1 0.9 --schedule zb_h1 --p2p-time 0.05
      hpgo simulate -s 8 -b 32 --compare gpipe,1f1b,interleaved,zb_v -o all.png
      hpgo simulate -s 8 -b 64 --compare 1f1b,eager_1f1b --sweep micro-batches
      hpgo simulate --config config.yaml --no-visualization --json
      hpgo simulate --plan vgg19.plan.json -o vgg19.html
    """
    outputs = options.outputs
    given = {key: value for key, value in options.group(SetupOptions).items() if value is not None}

    def called(key: str) -> str:
        # A value of the file keeps its key in errors, since the user did not type the option.
        return f"`{flag_of(key) if key in given else key}`"

    setup, beside = read(options.config, given)
    # `--compare` replaces the schedule of the file.
    typed = beside.get("schedule", "1f1b") if options.compare is None else options.compare
    names: list[Any] = [typed] if options.compare is None else [name.strip() for name in typed.split(",")]
    if not all(names):
        of = "--schedule" if options.compare is None else "--compare"
        raise ArgumentError(f"`{of}` has an empty schedule name", "write `--compare gpipe,1f1b`")
    if not outputs and (configured := beside.get("output_file")) is not None:
        outputs = (RUN_OUT.convert(configured, None, None),)
    # Data files are no visualization, so they are still written.
    if options.no_visualization:
        outputs = tuple(output for output in outputs if output.endswith(_DATA))
    if options.plan_file is not None:
        if options.sweep:
            raise ArgumentError(
                "`--sweep` can't vary a plan, because a plan has a fixed number of micro-batches", "leave out `--sweep`"
            )
        timelines = _of_plan(
            options.plan_file, names if options.compare or "schedule" in given else [None], setup, given, called
        )
    else:
        _check_known(names, setup)
        if options.sweep:
            _sweep(names, setup, called, outputs, as_json=options.as_json)
            return
        timelines = [_timeline(setup, name, called) for name in names]
    _print_notes(note for timeline in timelines for note in timeline.notes)
    if options.as_json:
        documents = [timeline.to_json() for timeline in timelines]
        click.echo(documents[0] if options.compare is None else f"[{', '.join(documents)}]")
    else:
        _print(timelines, alone=options.compare is None)
    # The program that this command replaces always writes a picture, so this one does, too.
    if not outputs and not options.as_json and not options.no_visualization:
        name = "compare" if options.compare is not None else Path(timelines[0].schedule).name
        outputs = (f"pipeline_{name}.{'png' if find_spec('matplotlib') else 'svg'}",)
    for output in outputs:
        from hpgo import draw

        written = timelines[0].save(output) if len(timelines) == 1 else draw.save(timelines, output)
        click.echo(f"wrote {written}", err=True)


def _of_plan(
    path: str, names: Sequence[ScheduleName | None], setup: SimulationConfig, given: dict[str, Any], called: Called
) -> list[Timeline]:
    from hpgo.planning.plans import Plan
    from hpgo.timing.runs import BEYOND_A_PLAN, run_program

    # A plan has times and memory of its own. Only options beyond these can be combined with it.
    allowed = {"schedule", "comm", "iterations", *BEYOND_A_PLAN.values()}
    if extra := ", ".join(flag_of(key) for key in given if key not in allowed):
        raise ArgumentError(
            f"{extra} can't be used with `--plan`, because a plan has its own values",
            f"leave out `--plan` or {extra}",
            code="conflict",
        )
    program_of = Plan.read(path).program
    return [run_program(setup, program_of(name), called=called) for name in names]


def _print_notes(notes: Iterable[str]) -> None:
    for note in dict.fromkeys(notes):
        say("note", note)


def _timeline(setup: SimulationConfig, name: ScheduleName, called: Called) -> Timeline:
    from hpgo.timing.runs import order_of, run

    if not _is_file(name):
        return run(setup, order_of(setup, name, called=called), called=called)
    from hpgo.programs.schedule import Schedule

    order = Schedule.read(name)
    # A file of action lists has fixed sizes, so other values are mistakes.
    for key, size in (("num_stages", order.ranks), ("num_batches", order.total_micro_batches)):
        if (asked := getattr(setup, key)) not in {None, size}:
            raise ArgumentError(
                f"`{flag_of(key)}` is {asked}, but the action lists in {name} are for {size}",
                f"leave out `{flag_of(key)}`",
            )
    return run(setup, order, called=called)


def _is_file(name: str) -> bool:
    """Return whether `name` is a schedule file: it has the ending of one, or exists and is not a schedule's name."""
    from hpgo.programs.schedule import schedules

    if name.lower().endswith((".csv", ".txt")):
        return True
    is_known = any(name == family.name for family in schedules())
    return not is_known and os.path.isfile(name)  # noqa: PTH113 -- `Path.is_file` fails on names that are too long


def _check_known(names: Sequence[ScheduleName], setup: SimulationConfig) -> None:
    """Raise ArgumentError for an option that none of the schedules has."""
    from hpgo.programs.schedule import schedules
    from hpgo.timing.runs import OPTIONS

    families = [family for family in schedules() if family.name in names]
    if not families and not any(_is_file(name) for name in names):
        return  # All names are misspelled. The simulation reports that with the nearest names.
    for key in OPTIONS:
        asked = getattr(setup, key)
        fixed = any(
            key == "virtual_stages_per_rank" and family.virtual_stages_per_rank == str(asked) for family in families
        )
        if asked is not None and not fixed and not any(key in family.options for family in families):
            whose = f"`{names[0]}` has no" if len(names) == 1 else f"none of {', '.join(names)} has an"
            raise ArgumentError(f"{whose} option `{flag_of(key)}`", f"leave out `{flag_of(key)}`")


def _print(timelines: Sequence[Timeline], *, alone: bool) -> None:
    from hpgo.cli.terminal import table
    from hpgo.show import run_report

    if not alone:
        table(*run_report.comparison(timelines))
        return
    click.echo(f"{run_report.headline(timelines[0])}\n")
    table(*run_report.measures(timelines[0]))
    # Equal ranks share a row, so only very uneven runs exceed the limit.
    rows = run_report.ranks(timelines[0])
    if len(rows[1]) <= _MAX_ROWS:
        click.echo()
        table(*rows)


def _sweep(
    names: Sequence[ScheduleName], setup: SimulationConfig, called: Called, outputs: Sequence[str], *, as_json: bool
) -> None:
    from hpgo.cli.terminal import progress, table
    from hpgo.show import run_report
    from hpgo.timing.runs import sweep

    if outputs:
        from hpgo.draw.curves import check

        for output in outputs:
            check(output)
    notes: list[str] = []

    def timeline_of(setup: SimulationConfig, name: ScheduleName) -> Timeline:
        timeline = _timeline(setup, name, called)
        notes.extend(timeline.notes)
        return timeline

    with progress("simulating") as report:
        points = sweep(setup, names, timeline_of, report)
    _print_notes(notes)
    if as_json:
        click.echo(json.dumps([asdict(point) for point in points]))
    else:
        table(*run_report.sweep(points))
    for output in outputs:
        from hpgo.show.figures import draw_runs

        click.echo(f"wrote {draw_runs(points, output)}", err=True)
