"""What the commands that draw share: reading their inputs, and the options of a picture."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, get_args

import click

from hpgo.cli.command import Options, option
from hpgo.cli.values import SCHEDULE
from hpgo.draw.options import Theme

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hpgo.planning.plans import Plan
    from hpgo.programs.names import ScheduleName
    from hpgo.timing.timeline import Timeline


class PictureOptions(Options):
    """Options of a picture of timelines: keyword arguments of `hpgo.draw.save`."""

    labels: tuple[str, ...] = option("--label", multiple=True, help="Name of a timeline; once for each, in order.")
    title: str = option("--title", default="", help="Title of the picture.")
    transfers: str = option(
        "--transfers",
        type=click.Choice(["none", "arrows", "lanes"]),
        default="none",
        show_default=True,
        help="Transfers as arrows between ranks, or as lanes below each.",
    )
    memory: bool = option("--memory", is_flag=True, help="A memory curve below each rank.")
    critical_path: bool = option("--critical-path", is_flag=True, help="Mark the critical path.")
    bubbles: bool = option("--bubbles/--no-bubbles", default=True, help="Shade idle time by its cause.")
    theme: str = option(
        "--theme", type=click.Choice(get_args(Theme)), default="auto", show_default=True,
        help="auto follows the reader's setting where the format can.")  # fmt: skip


SCHEDULE_OF_PLANS: Any = option(
    "--schedule", type=SCHEDULE, metavar="NAME", help="Schedule that plans run on; as they were planned if left out."
)


def timelines_in(inputs: Sequence[str], schedule: ScheduleName | None) -> list[Timeline]:
    """The timelines in the named files, plans simulated, on `schedule` if given."""
    return [_timeline_in(path, schedule) for path in inputs]


def plan_in(path: str) -> Plan | None:
    """The plan in the file, if it holds one."""
    from hpgo.base.documents import read_text
    from hpgo.base.files import MOST_BYTES_OF_RUNS
    from hpgo.errors import ArgumentError
    from hpgo.planning.plans import Plan

    if path.lower().endswith(".npz"):
        return None
    text = read_text(path, ArgumentError, most=MOST_BYTES_OF_RUNS)
    return Plan.from_json(text, source=path) if '"hpgo.plan"' in text[:200] else None


def _timeline_in(path: str, schedule: ScheduleName | None) -> Timeline:
    """What the file's own words at its beginning say it is."""
    from hpgo.base.documents import read_text
    from hpgo.base.files import MOST_BYTES_OF_RUNS
    from hpgo.errors import ArgumentError
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
            "`hpgo llm explain FILE -o llm-plan.svg` draws it on its cluster",
            code="wrong_kind_of_file",
        )
    raise ArgumentError(
        f"`{path}` is neither a plan nor a timeline",
        "`hpgo plan -o plan.json` makes plans, `Timeline.save` makes timelines (.npz or .timeline.json)",
        code="wrong_kind_of_file",
    )
