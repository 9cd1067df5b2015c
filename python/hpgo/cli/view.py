"""Command `hpgo view`: open the page of a plan, or an interactive picture of timelines, in the browser."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click
from click.core import ParameterSource

from hpgo.cli.command import argument, option, takes
from hpgo.cli.pictures import SCHEDULE_OF_PLANS, PictureOptions, plan_in, timelines_in
from hpgo.cli.values import PLAN, File

if TYPE_CHECKING:
    from hpgo.programs.names import ScheduleName


class ViewOptions(PictureOptions):
    """Options of `hpgo view`."""

    inputs: tuple[str, ...] = argument(type=PLAN, nargs=-1, required=True, metavar="PLAN_OR_TIMELINE...")
    output: str | None = option(
        "-o", "--output", type=File(".html"), metavar="FILE", help="File of the page.  [default: a temporary file]"
    )
    opens: bool = option("--open/--no-open", default=True, help="Open the page in the browser.")
    schedule: ScheduleName | None = SCHEDULE_OF_PLANS


@takes(ViewOptions)
def command(options: ViewOptions) -> None:
    """Open the page of a plan, or an interactive picture of timelines, without a server.

    The page of a plan shows its layers, stages, devices, step, memory and report. With several inputs, a timeline, or
    an option of the picture, you get only the picture, which you can zoom and pan.

    The page is one file that works offline. The command prints its path on stdout. To also change the plan, use `hpgo
    serve PLAN`.

    \b
    Examples:
      hpgo view vgg19.plan.json
      hpgo view vgg19.plan.json other.plan.json --memory
      hpgo view run.timeline.json -o run.html --no-open
    """
    ctx = click.get_current_context()
    output = options.output
    import tempfile
    import webbrowser

    from hpgo.base.files import writing
    from hpgo.draw import save
    from hpgo.errors import HpgoError
    from hpgo.page.planned.facts import too_large

    if output is None:
        # The page must outlive this process, so the folder is not removed.
        output = str(Path(tempfile.mkdtemp(prefix="hpgo-")) / f"{Path(options.inputs[0]).stem or 'timeline'}.html")
    pictured = options.group(PictureOptions)
    # Options of the picture have no effect on the page of a plan. If one is given, the picture is meant.
    is_plain = all(
        ctx.get_parameter_source(name) is not ParameterSource.COMMANDLINE for name in ("schedule", *pictured)
    )
    plan = plan_in(options.inputs[0]) if is_plain and len(options.inputs) == 1 else None
    if plan is None or too_large(plan):
        path = save(timelines_in(options.inputs, options.schedule), output, **pictured)
    else:
        from hpgo.page.planned.document import alone

        path = Path(output)
        with writing(path, HpgoError) as file:
            file.write(alone(plan))
    click.echo(path)
    if options.opens and not webbrowser.open(path.resolve().as_uri()):
        click.echo("note: no browser found; open the file yourself", err=True)
