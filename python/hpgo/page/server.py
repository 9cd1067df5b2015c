"""The web server of the page: a socket, the processes behind it, and their end.

Built on Starlette and uvicorn: small, kept by the people behind much of Python's web, and they bring what a server of
one page still needs and the standard library lacks: a check of the Host header (a page elsewhere can't reach in
through DNS rebinding), requests side by side, word of clients that leave, a clean stop on Ctrl-C.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from hpgo.errors import HpgoError
from hpgo.page.pool import Limits, Pool

if TYPE_CHECKING:
    import socket

    from hpgo.page.plan_store import PlanStore

_QUEUE = 32


def listen(host: str, port: int) -> socket.socket:
    """A socket bound to `host` and `port` (0: any free one); raises HpgoError if that can't be."""
    import socket

    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        hint = "choose another with `--port`, or `--port 0` for any free one"
        raise HpgoError(f"can't listen on {host} port {port}: {reason}", hint) from error


def serve(bound: socket.socket, shelf: PlanStore, hosts: list[str], limits: Limits, workers: int) -> None:
    """Answers requests on `bound` until interrupted; `workers` processes do what is no small request."""
    asyncio.run(_serve(bound, shelf, hosts, limits, workers))


async def _serve(bound: socket.socket, shelf: PlanStore, hosts: list[str], limits: Limits, workers: int) -> None:
    pools = Pool(1, _QUEUE, limits), Pool(workers, _QUEUE, limits, nice=10)
    try:
        await pools[0].warm()  # it starts while this process loads the rest
        from hpgo.page.app import PageApp, server

        await server(PageApp(shelf, *pools), hosts).serve(sockets=[bound])
    finally:
        for pool in pools:
            await pool.close()
