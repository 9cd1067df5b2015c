"""`hpgo view`: a plan's page, or the interactive picture of timelines, in the browser."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from hpgo.cli.command import Command
from hpgo.cli.pictures import picture_options, plan_in, timelines_in
from hpgo.cli.values import PLAN, File

if TYPE_CHECKING:
    from hpgo.programs.names import ScheduleName


@click.command(cls=Command)
@click.argument("inputs", type=PLAN, nargs=-1, required=True, metavar="PLAN_OR_TIMELINE...")
@click.option(
    "-o", "--output", type=File(".html"), metavar="FILE", help="Keep the page here; a temporary file otherwise."
)
@click.option("--open/--no-open", "opens", default=True, help="Open the page in the browser.")
@picture_options
@click.pass_context
def command(
    ctx: click.Context,
    /,
    *,
    inputs: tuple[str, ...],
    output: str | None,
    opens: bool,
    schedule: ScheduleName | None,
    **options: Any,
) -> None:
    """Open a plan's page, or timelines as one interactive picture: no server.

    A plan's page has its layers and stages, where they run, the step, memory, and the report's words. Several inputs, a
    timeline, or an option of the picture give the picture alone, to zoom, pan and hover in.

    The page is one file that works offline; send it to whom you like. Its path goes to stdout. `hpgo serve PLAN` opens
    the page that also changes the plan.

    \b
    Examples:
      hpgo view vgg19.plan.json
      hpgo view vgg19.plan.json other.plan.json --memory
      hpgo view run.timeline.json -o run.html --no-open
    """
    import tempfile
    import webbrowser

    from hpgo.base.errors import HpgoError
    from hpgo.base.files import writing
    from hpgo.draw import save
    from hpgo.page.planned.facts import too_large

    if output is None:
        output = str(Path(tempfile.mkdtemp(prefix="hpgo-")) / f"{Path(inputs[0]).stem or 'timeline'}.html")
    pictured = {"schedule", *options}
    is_plain = all(ctx.get_parameter_source(name) is not ParameterSource.COMMANDLINE for name in pictured)
    plan = plan_in(inputs[0]) if is_plain and len(inputs) == 1 else None
    if plan is None or too_large(plan):
        path = save(timelines_in(inputs, schedule), output, **options)
    else:
        from hpgo.page.planned.document import alone

        path = Path(output)
        with writing(path, HpgoError) as file:
            file.write(alone(plan))
    click.echo(path)
    if opens and not webbrowser.open(path.resolve().as_uri()):
        click.echo("no browser to open it in; open the file yourself", err=True)
