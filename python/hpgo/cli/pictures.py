"""What the commands that draw share: reading their inputs, and the options of a picture."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hpgo.timeline import Timeline


def picture_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Adds the options of a picture to a command."""
    options = [
        click.option("--schedule", help="Schedule that plans run on; as they were planned if left out."),
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
            "--theme", type=click.Choice(["auto", "light", "dark"]), default="auto", show_default=True,
            help="auto follows the reader's setting where the format can.",
        ),
    ]  # fmt: skip
    for option in reversed(options):
        function = option(function)
    return function


def timelines_in(inputs: Sequence[str], schedule: str | None) -> list[Timeline]:
    """The timelines in the named files, plans simulated, on `schedule` if given."""
    from hpgo.plans import Plan
    from hpgo.simulation import simulate
    from hpgo.timeline import Timeline

    return [simulate(Plan.read(path), schedule=schedule) if _is_plan(path) else Timeline.load(path) for path in inputs]


def _is_plan(path: str) -> bool:
    """Whether the file says so; what can't be read is left to the reader of timelines, who says why."""
    try:
        with Path(path).open("rb") as file:
            return b'"hpgo.plan"' in file.read(200)
    except OSError:
        return False
