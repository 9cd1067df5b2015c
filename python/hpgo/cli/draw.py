"""Command `hpgo draw`: pictures of timelines and plans."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from hpgo.cli.command import argument, option, takes
from hpgo.cli.pictures import SCHEDULE_OF_PLANS, PictureOptions, timelines_in
from hpgo.cli.values import PICTURE, PLAN, written

if TYPE_CHECKING:
    from hpgo.programs.names import ScheduleName


class DrawOptions(PictureOptions):
    """Options of `hpgo draw`."""

    inputs: tuple[str, ...] = argument(type=PLAN, nargs=-1, required=True, metavar="TIMELINE_OR_PLAN...")
    outputs: tuple[str, ...] = written(
        PICTURE, "Picture to write. Its ending sets the format. Repeatable.", required=True
    )
    schedule: ScheduleName | None = SCHEDULE_OF_PLANS
    hatch: bool = option("--hatch", is_flag=True, help="Draw strong patterns, for prints without color.")
    width_px: int = option(
        "--width", type=click.IntRange(min=320), default=1200, show_default=True, help="Width of the picture in pixels."
    )


@takes(DrawOptions)
def command(options: DrawOptions) -> None:
    """Draw timelines, or the simulated steps of plans, one above the other on one time axis.

    A TIMELINE is a file of `hpgo run --timeline` or `Timeline.save` (.timeline.json or .npz), a PLAN a file of `hpgo
    plan -o`. The ending of the picture sets its format: .svg .png .pdf .html (interactive) .json (Perfetto trace) .txt
    .tex (TikZ).

    \b
    Examples:
      hpgo draw vgg19.plan.json -o vgg19.svg
      hpgo draw planned.npz real.npz --label planned --label real -o both.pdf
      hpgo draw run.npz -o run.txt -o run.png --memory --transfers arrows
    """
    from hpgo.draw import save

    pictured = options.group(PictureOptions) | {"hatch": options.hatch, "width_px": options.width_px}
    timelines = timelines_in(options.inputs, options.schedule)
    for output in options.outputs:
        click.echo(f"wrote {save(timelines, Path(output), **pictured)}", err=True)
