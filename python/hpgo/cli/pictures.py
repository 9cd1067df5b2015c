"""Options and inputs that `hpgo draw` and `hpgo view` share."""

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

    labels: tuple[str, ...] = option(
        "--label", multiple=True, help="Label of a timeline. Give it once per timeline, in their order."
    )
    title: str = option("--title", default="", help="Title of the picture.")
    transfers: str = option(
        "--transfers",
        type=click.Choice(["none", "arrows", "lanes"]),
        default="none",
        show_default=True,
        help="Show transfers as arrows between ranks, or as lanes below each rank.",
    )
    memory: bool = option("--memory", is_flag=True, help="Draw a memory curve below each rank.")
    critical_path: bool = option("--critical-path", is_flag=True, help="Mark the critical path.")
    bubbles: bool = option("--bubbles/--no-bubbles", default=True, help="Shade idle time by its cause.")
    theme: str = option(
        "--theme", type=click.Choice(get_args(Theme)), default="auto", show_default=True,
        help="Colors; auto follows the viewer's setting in formats that support it.")  # fmt: skip


SCHEDULE_OF_PLANS: Any = option(
    "--schedule", type=SCHEDULE, metavar="NAME", help="Simulate plans under this schedule.  [default: the plan's own]"
)


def timelines_in(inputs: Sequence[str], schedule: ScheduleName | None) -> list[Timeline]:
    """Return the timelines of the files; plans are simulated, under `schedule` if it is given."""
    return [_timeline_in(path, schedule) for path in inputs]


def plan_in(path: str) -> Plan | None:
    """Return the plan in the file, or None if the file is not a plan."""
    from hpgo.base.documents import read_text
    from hpgo.base.files import MAX_BYTES_OF_RUNS
    from hpgo.errors import ArgumentError
    from hpgo.planning.plans import Plan

    # NumPy archives are timelines, and binary, so they cannot be read as text.
    if path.lower().endswith(".npz"):
        return None
    text = read_text(path, ArgumentError, maximum=MAX_BYTES_OF_RUNS)
    return Plan.from_json(text, source=path) if '"hpgo.plan"' in text[:200] else None


def _timeline_in(path: str, schedule: ScheduleName | None) -> Timeline:
    """Return the timeline of a file, or of the plan in it. The format name at the start of the file decides."""
    from hpgo.base.documents import read_text
    from hpgo.base.files import MAX_BYTES_OF_RUNS
    from hpgo.errors import ArgumentError
    from hpgo.planning.plans import Plan
    from hpgo.timing.simulation import simulate
    from hpgo.timing.timeline import Timeline

    if path.lower().endswith(".npz"):
        return Timeline.read(path)
    text = read_text(path, ArgumentError, maximum=MAX_BYTES_OF_RUNS)
    # All formats have their name at the start of the file.
    head = text[:200]
    if '"hpgo.plan"' in head:
        return simulate(Plan.from_json(text, source=path), schedule=schedule)
    if '"hpgo-timeline' in head:
        return Timeline.from_json(text, source=path)
    if '"hpgo.llm_plan"' in head:
        raise ArgumentError(
            f"`{path}` is an LLM plan, which has no timeline",
            f"draw its configuration: `hpgo llm explain {path} -o llm-plan.svg`",
            code="wrong_kind_of_file",
        )
    raise ArgumentError(
        f"`{path}` is neither a plan nor a timeline",
        "give a file of `hpgo plan -o plan.json`, or of `Timeline.save` (.npz or .timeline.json)",
        code="wrong_kind_of_file",
    )
