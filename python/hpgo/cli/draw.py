"""`hpgo draw`: timelines and plans as pictures."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hpgo.cli.command import Command
from hpgo.cli.pictures import picture_options, timelines_in
from hpgo.cli.values import PICTURE, PLAN, written

if TYPE_CHECKING:
    from hpgo.programs.names import ScheduleName


@click.command(cls=Command)
@click.argument("inputs", type=PLAN, nargs=-1, required=True, metavar="TIMELINE_OR_PLAN...")
@written(PICTURE, "Picture to write; its ending chooses the format. May be given several times.", required=True)
@picture_options
@click.option("--hatch", is_flag=True, help="Draw strong patterns, as in print.")
@click.option(
    "--width", "width_px", type=click.IntRange(min=320), default=1200, show_default=True, help="Width in pixels."
)
def command(inputs: tuple[str, ...], outputs: tuple[str, ...], schedule: ScheduleName | None, **options: Any) -> None:
    """Draw timelines, or plans as they would run, one above the other on one time axis.

    A TIMELINE is a file that `Timeline.save` keeps (.timeline.json or .npz), a PLAN what `hpgo plan` saved. The
    picture's ending chooses its format: .svg .png .pdf .html (interactive) .json (Perfetto trace) .txt .tex (TikZ).

    \b
    Examples:
      hpgo draw vgg19.plan.json -o vgg19.svg
      hpgo draw planned.npz real.npz --label planned --label real -o both.pdf
      hpgo draw run.npz -o run.txt -o run.png --memory --transfers arrows
    """
    from hpgo.draw import save

    timelines = timelines_in(inputs, schedule)
    for output in outputs:
        click.echo(f"wrote {save(timelines, Path(output), **options)}", err=True)
