"""Command `hpgo serve`: serve the local web pages."""

from __future__ import annotations

import click

from hpgo.cli.command import Options, argument, option, takes
from hpgo.cli.plan_options import BYTES, SECONDS
from hpgo.cli.values import PLAN

_MIN_BYTES = 200e6
"""Memory that a process needs before it handles a request."""
_MAX_BYTES = 1e15


class ServeOptions(Options):
    """Options of `hpgo serve`."""

    plans: tuple[str, ...] = argument(type=PLAN, nargs=-1, metavar="[PLAN]...")
    host: str = option(
        "--host",
        default="127.0.0.1",
        show_default=True,
        help="Address to listen on. The default can be reached from this machine only.",
    )
    port: int = option(
        "--port",
        type=click.IntRange(0, 65535),
        default=8000,
        show_default=True,
        help="Port to listen on; 0 takes any free port.",
    )
    workers: int = option(
        "--workers",
        type=click.IntRange(1, 64),
        default=2,
        show_default=True,
        help="Number of processes for large requests. Small requests have a separate process.",
    )
    memory: float = option(
        "--memory",
        type=BYTES,
        metavar="SIZE",
        default="1GB",
        show_default=True,
        help="Memory limit of each process.",
    )
    time_limit: float = option(
        "--time-limit",
        type=SECONDS,
        metavar="TIME",
        default="20s",
        show_default=True,
        help="Time limit of a request.",
    )
    opens: bool = option("--open/--no-open", default=True, help="Open the page in the browser.")


@takes(ServeOptions)
def command(options: ServeOptions) -> None:
    """Serve local web pages to plan models and transformers, and to compare schedules.

    The page /plan shows the layers, stages, devices, step and memory of a plan. It estimates the step again while you
    change the plan, and searches for the best plan. The page /transformers does so for transformers, and exports jobs.
    The page / draws schedules side by side with the times that you set. The address contains the settings, so you can
    share a view. Nothing leaves this machine. Ctrl-C stops the server.

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
            "`hpgo serve` needs the packages starlette and uvicorn, which are not installed",
            "install them: `pip install starlette uvicorn`",
            code="missing_package",
        )
    if not options.host.strip():
        raise HpgoError("`--host` is empty", "use `--host 127.0.0.1`, or `--host 0.0.0.0` for all addresses")
    if not _MIN_BYTES <= options.memory <= _MAX_BYTES:
        raise HpgoError(
            f"`--memory` is {format_bytes(options.memory)}, but it must be from {format_bytes(_MIN_BYTES)}"
            f" to {format_bytes(_MAX_BYTES)}",
            "use `--memory 1GB`",
        )
    if not options.time_limit:
        raise HpgoError("`--time-limit` is 0, but it must be positive", "use `--time-limit 20s`")
    from hpgo.page.plan_store import PlanStore
    from hpgo.page.pool import Limits
    from hpgo.page.server import listen, serve

    store = PlanStore()
    # Read plans before the port is opened, so that errors in files stop the command.
    for path in options.plans:
        store.give(read_bytes(path, HpgoError, hint="name a file of `hpgo plan -o plan.json`"), Path(path).name)
    bound = listen(options.host, options.port)
    # IPv6 addresses need brackets in a URL.
    shown = f"[{options.host}]" if ":" in options.host else options.host
    address = f"http://{shown}:{bound.getsockname()[1]}/"
    pages = {f"{address}plan?plan={name}": plan.title for name, plan in store.given.items()}
    for page, title in pages.items():
        click.echo(f"{title} is at {page}", err=True)
    click.echo(f"hpgo is at {address} (Ctrl-C stops it)", err=True)
    if options.opens:
        webbrowser.open(next(iter(pages), f"{address}start"))
    # The check of host names protects against DNS rebinding. On all addresses, any name may be legitimate.
    names = ["*"] if options.host in {"0.0.0.0", "::"} else ["localhost", "127.0.0.1", "[::1]", shown]  # noqa: S104
    serve(bound, store, names, Limits(int(options.memory), options.time_limit), options.workers)
