"""What the commands that draw share: reading their inputs, and the options of a picture."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, get_args

import click

from hpgo.cli.values import SCHEDULE
from hpgo.draw.options import Theme

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hpgo.planning.plans import Plan
    from hpgo.programs.names import ScheduleName
    from hpgo.timing.timeline import Timeline


def picture_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Adds the options of a picture to a command."""
    options = [
        click.option(
            "--schedule", type=SCHEDULE, metavar="NAME",
            help="Schedule that plans run on; as they were planned if left out."
        ),
        click.option("--label", "labels", multiple=True, help="Name of a timeline; once for each, in order."),
        click.option("--title", default="", help="Title of the picture."),
        click.option(
            "--transfers", type=click.Choice(["none", "arrows", "lanes"]), default="none", show_default=True,
            help="Transfers as arrows between ranks, or as lanes below each.",
        ),
        click.option("--memory", is_flag=True, help="A memory curve below each rank."),
        click.option("--critical-path", is_flag=True, help="Mark the critical path."),
        click.option("--bubbles/--no-bubbles", default=True, help="Shade idle time by its cause."),
        click.option(
            "--theme", type=click.Choice(get_args(Theme)), default="auto", show_default=True,
            help="auto follows the reader's setting where the format can.",
        ),
    ]  # fmt: skip
    for option in reversed(options):
        function = option(function)
    return function


def timelines_in(inputs: Sequence[str], schedule: ScheduleName | None) -> list[Timeline]:
    """The timelines in the named files, plans simulated, on `schedule` if given."""
    return [_timeline_in(path, schedule) for path in inputs]


def plan_in(path: str) -> Plan | None:
    """The plan in the file, if it holds one."""
    from hpgo.base.documents import read_text
    from hpgo.base.errors import ArgumentError
    from hpgo.base.files import MOST_BYTES_OF_RUNS
    from hpgo.planning.plans import Plan

    if path.lower().endswith(".npz"):
        return None
    text = read_text(path, ArgumentError, most=MOST_BYTES_OF_RUNS)
    return Plan.from_json(text, source=path) if '"hpgo.plan"' in text[:200] else None


def _timeline_in(path: str, schedule: ScheduleName | None) -> Timeline:
    """What the file's own words at its beginning say it is."""
    from hpgo.base.documents import read_text
    from hpgo.base.errors import ArgumentError
    from hpgo.base.files import MOST_BYTES_OF_RUNS
    from hpgo.planning.plans import Plan
    from hpgo.timing.simulation import simulate
    from hpgo.timing.timeline import Timeline

    if path.lower().endswith(".npz"):
        return Timeline.read(path)
    text = read_text(path, ArgumentError, most=MOST_BYTES_OF_RUNS)
    head = text[:200]
    if '"hpgo.plan"' in head:
        return simulate(Plan.from_json(text, source=path), schedule=schedule)
    if '"hpgo-timeline' in head:
        return Timeline.from_json(text, source=path)
    if '"hpgo.llm_plan"' in head:
        raise ArgumentError(
            f"`{path}` is a way of training a transformer, which has no timeline",
            "`hpgo explain FILE --picture way.svg` draws it on its cluster",
        )
    raise ArgumentError(
        f"`{path}` is neither a plan nor a timeline",
        "`hpgo plan -o plan.json` makes plans, `Timeline.save` makes timelines (.npz or .timeline.json)",
    )
