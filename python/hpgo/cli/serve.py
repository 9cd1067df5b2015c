"""`hpgo serve`: the local page."""

from __future__ import annotations

import click


@click.command()
@click.argument("plans", nargs=-1, metavar="[PLAN]...")
@click.option(
    "--host", default="127.0.0.1", show_default=True, help="Address to listen on; the default is this machine alone."
)
@click.option("--port", type=click.IntRange(0, 65535), default=8000, show_default=True, help="0 takes any free one.")
@click.option("--open/--no-open", "opens", default=True, help="Open the page in the browser.")
def command(plans: tuple[str, ...], host: str, port: int, opens: bool) -> None:
    """Serve a page that draws schedules side by side as you change them.

    Choose schedules, ranks, micro-batches, times, latency and communication mode, or load a plan; export every format.
    The address carries the settings, so a view can be shared. Nothing leaves this machine. Ctrl-C stops it.

    \b
    Examples:
      hpgo serve
      hpgo serve vgg19.plan.json --port 0 --no-open
    """
    import importlib.util
    import webbrowser
    from pathlib import Path

    from hpgo.base.errors import HpgoError
    from hpgo.base.files import refused

    if not all(importlib.util.find_spec(name) for name in ("starlette", "uvicorn")):
        raise HpgoError("the page needs starlette and uvicorn, which are not installed", "`pip install 'hpgo[serve]'`")
    if not host.strip():
        raise HpgoError("`--host` is empty", "name an address; 0.0.0.0 listens on all")
    from hpgo.page.server import listen, serve
    from hpgo.page.settings import Plans

    held = Plans()
    for path in plans:
        try:
            held.add(Path(path).read_bytes(), Path(path).name)
        except OSError as error:
            raise refused("read", path, error, HpgoError, "name a plan that `hpgo plan` saved") from None
    bound = listen(host, port)
    shown = f"[{host}]" if ":" in host else host
    address = f"http://{shown}:{bound.getsockname()[1]}/"
    click.echo(f"hpgo is at {address} (Ctrl-C stops it)", err=True)
    if opens:
        webbrowser.open(address)
    # Whoever listens on every address has chosen to be reached by any name.
    names = ["*"] if host in {"0.0.0.0", "::"} else ["localhost", "127.0.0.1", "[::1]", shown]  # noqa: S104
    serve(bound, held, names)
