"""`hpgo serve`: the local page."""

from __future__ import annotations

import click

from hpgo.cli.command import Options, argument, option, takes
from hpgo.cli.plan_options import BYTES, SECONDS
from hpgo.cli.values import PLAN

_LEAST_BYTES = 200e6
_MOST_BYTES = 1e15


class ServeOptions(Options):
    """Options of `hpgo serve`."""

    plans: tuple[str, ...] = argument(type=PLAN, nargs=-1, metavar="[PLAN]...")
    host: str = option(
        "--host",
        default="127.0.0.1",
        show_default=True,
        help="Address to listen on; the default is this machine alone.",
    )
    port: int = option(
        "--port", type=click.IntRange(0, 65535), default=8000, show_default=True, help="0 takes any free one."
    )
    workers: int = option(
        "--workers",
        type=click.IntRange(1, 64),
        default=2,
        show_default=True,
        help="Processes for large requests; small ones have their own.",
    )
    memory: float = option(
        "--memory", type=BYTES, metavar="SIZE", default="1GB", show_default=True, help="What a process may take."
    )
    time_limit: float = option(
        "--time-limit",
        type=SECONDS,
        metavar="TIME",
        default="20s",
        show_default=True,
        help="How long a request may be worked on.",
    )
    opens: bool = option("--open/--no-open", default=True, help="Open the page in the browser.")


@takes(ServeOptions)
def command(options: ServeOptions) -> None:
    """Serve the pages that plan, show and change plans, and compare schedules.

    The plan's page, /plan, shows a plan's layers, stages, devices, step and memory, prices it anew while you change it,
    and searches for the best one. The other draws schedules side by side, with the times that you give; it exports
    every format. Addresses carry the settings, so a view can be shared. Nothing leaves this machine. Ctrl-C stops it.

    No request holds up others or fills the machine.

    \b
    Examples:
      hpgo serve
      hpgo serve vgg19.plan.json --port 0 --no-open
    """
    import importlib.util
    import webbrowser
    from pathlib import Path

    from hpgo.base.files import read_bytes
    from hpgo.base.units import format_bytes
    from hpgo.errors import HpgoError

    if not all(importlib.util.find_spec(name) for name in ("starlette", "uvicorn")):
        raise HpgoError(
            "the page needs starlette and uvicorn, which are not installed",
            "install them: `pip install starlette uvicorn`",
            code="missing_package",
        )
    if not options.host.strip():
        raise HpgoError("`--host` is empty", "name an address; 0.0.0.0 listens on all")
    if not _LEAST_BYTES <= options.memory <= _MOST_BYTES:
        raise HpgoError(
            f"`--memory` is {format_bytes(options.memory)}, but a process needs {format_bytes(_LEAST_BYTES)}"
            " before it draws",
            "give it 1GB or more",
        )
    if not options.time_limit:
        raise HpgoError("`--time-limit` is zero, in which nothing is done", "give it some seconds")
    from hpgo.page.plan_store import PlanStore
    from hpgo.page.pool import Limits
    from hpgo.page.server import listen, serve

    shelf = PlanStore()
    for path in options.plans:
        shelf.give(read_bytes(path, HpgoError, hint="name a plan that `hpgo plan` saved"), Path(path).name)
    bound = listen(options.host, options.port)
    shown = f"[{options.host}]" if ":" in options.host else options.host
    address = f"http://{shown}:{bound.getsockname()[1]}/"
    pages = {f"{address}plan?plan={name}": plan.title for name, plan in shelf.given.items()}
    for page, title in pages.items():
        click.echo(f"{title} is at {page}", err=True)
    click.echo(f"hpgo is at {address} (Ctrl-C stops it)", err=True)
    if options.opens:
        webbrowser.open(next(iter(pages), address))
    # Whoever listens on every address has chosen to be reached by any name.
    names = ["*"] if options.host in {"0.0.0.0", "::"} else ["localhost", "127.0.0.1", "[::1]", shown]  # noqa: S104
    serve(bound, shelf, names, Limits(int(options.memory), options.time_limit), options.workers)
