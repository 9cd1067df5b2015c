"""`hpgo view`: the interactive picture in the browser."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hpgo.cli.pictures import picture_options, timelines_in

if TYPE_CHECKING:
    from hpgo.programs.names import ScheduleName


@click.command()
@click.argument("inputs", nargs=-1, required=True, metavar="PLAN_OR_TIMELINE...")
@click.option("-o", "--output", metavar="FILE", help="Keep the page here; a temporary file otherwise.")
@click.option("--open/--no-open", "opens", default=True, help="Open the page in the browser.")
@picture_options
def command(
    inputs: tuple[str, ...], output: str | None, opens: bool, schedule: ScheduleName | None, **options: Any
) -> None:
    """Open plans or timelines as one interactive page: zoom, pan, hover, no server.

    The page is one file that works offline; send it to whom you like. Its path goes to stdout.

    \b
    Examples:
      hpgo view vgg19.plan.json
      hpgo view run.timeline.json -o run.html --no-open
    """
    import tempfile
    import webbrowser

    from hpgo.base.errors import ArgumentError
    from hpgo.draw import save

    if output is None:
        output = str(Path(tempfile.mkdtemp(prefix="hpgo-")) / f"{Path(inputs[0]).stem or 'timeline'}.html")
    elif Path(output).suffix.lower() != ".html":
        raise ArgumentError(f"`{output}` does not end in .html", "`hpgo draw` writes the other formats")
    path = save(timelines_in(inputs, schedule), output, **options)
    click.echo(path)
    if opens and not webbrowser.open(path.resolve().as_uri()):
        click.echo("no browser to open it in; open the file yourself", err=True)
