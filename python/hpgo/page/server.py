"""Web server: its socket, its worker processes, and their end.

It uses Starlette and uvicorn, which are small and well maintained. They have what the standard library lacks: a check
of the Host header (against DNS rebinding), concurrent requests, notice of clients that disconnect, and a clean stop on
Ctrl-C.
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
"""Number of requests that may wait for a worker of each pool. Not tuned."""


def listen(host: str, port: int) -> socket.socket:
    """Return a socket bound to `host` and `port` (0: any free port). Raises HpgoError if that fails."""
    import socket

    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        hint = "use another port with `--port`, or `--port 0` for any free one"
        raise HpgoError(f"can't listen on {host} port {port}: {reason}", hint) from error


def serve(bound: socket.socket, store: PlanStore, hosts: list[str], limits: Limits, workers: int) -> None:
    """Serve requests on `bound` until interrupted, with `workers` processes for large requests."""
    asyncio.run(_serve(bound, store, hosts, limits, workers))


async def _serve(bound: socket.socket, store: PlanStore, hosts: list[str], limits: Limits, workers: int) -> None:
    pools = Pool(1, _QUEUE, limits), Pool(workers, _QUEUE, limits, nice=10)
    try:
        await pools[0].warm()  # The worker starts while this process imports the application.
        from hpgo.page.app import PageApp, server

        await server(PageApp(store, *pools), hosts).serve(sockets=[bound])
    finally:
        for pool in pools:
            await pool.close()
