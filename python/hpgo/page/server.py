"""The web server: a page, pictures and exports, all read from the address.

Built on Starlette and uvicorn: small, kept by the people behind much of Python's web, and they bring what a server of
one page still needs and the standard library lacks: a check of the Host header (a page elsewhere can't reach in
through DNS rebinding), requests side by side, a clean stop on Ctrl-C.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hpgo.base.errors import HpgoError
from hpgo.draw import ENDINGS, render, save
from hpgo.page.form import page
from hpgo.page.settings import Plans, settings_of, timelines

if TYPE_CHECKING:
    import socket

    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response

_MOST_UPLOAD_BYTES = 16 * 2**20
_TYPES = {
    ".svg": "image/svg+xml",
    ".png": "image/png",
    ".pdf": "application/pdf",
    ".html": "text/html",
    ".json": "application/json",
    ".txt": "text/plain",
    ".tex": "text/x-tex",
}
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; img-src 'self' data:; style-src 'unsafe-inline'; script-src "
    "'unsafe-inline'; connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-store",
}


def application(plans: Plans, hosts: list[str]) -> Starlette:
    """The ASGI application; it answers only requests whose Host header is one of `hosts`."""
    from starlette.applications import Starlette
    from starlette.middleware import Middleware
    from starlette.middleware.trustedhost import TrustedHostMiddleware
    from starlette.responses import HTMLResponse, PlainTextResponse
    from starlette.responses import Response as Answer
    from starlette.routing import Route

    def show(request: Request) -> Response:
        items = request.query_params.multi_items()
        try:
            return HTMLResponse(page(items, plans, timelines(settings_of(items), plans)), 200, _HEADERS)
        except HpgoError as error:
            return HTMLResponse(page(items, plans, error), 400, _HEADERS)

    def picture(request: Request) -> Response:
        ending = f".{request.path_params['ending']}"
        is_export = request.url.path.startswith("/export")
        if ending not in ENDINGS:
            return PlainTextResponse(f"no format ends in {ending}; there are {', '.join(ENDINGS)}\n", 404, _HEADERS)
        try:
            settings = settings_of(request.query_params.multi_items())
            # The page has its own table beside the picture.
            table = is_export or ending != ".svg"
            body = _rendered(timelines(settings, plans), ending, settings.options | {"table": table})
        except HpgoError as error:
            hint = f"\nhint: {error.hint}" if error.hint else ""
            return PlainTextResponse(f"error: {error.message}{hint}\n", 400, _HEADERS)
        attached = {"Content-Disposition": f'attachment; filename="schedule{ending}"'}
        headers = _HEADERS | (attached if is_export else {})
        return Answer(body, 200, headers, media_type=_TYPES[ending])

    async def load(request: Request) -> Response:
        from starlette.concurrency import run_in_threadpool

        body = b""
        async for piece in request.stream():
            body += piece
            if len(body) > _MOST_UPLOAD_BYTES:
                error = HpgoError("the file is larger than 16 MiB, which no plan is", "choose a plan written by hpgo")
                return HTMLResponse(page([], plans, error), 413, _HEADERS)
        try:
            name = await run_in_threadpool(plans.add, body, request.query_params.get("name", "plan"))
        except HpgoError as error:
            return HTMLResponse(page([], plans, error), 400, _HEADERS)
        return PlainTextResponse(name, 201, _HEADERS)

    return Starlette(
        routes=[
            Route("/", show),
            Route("/picture.{ending}", picture),
            Route("/export.{ending}", picture),
            Route("/plans", load, methods=["POST"]),
        ],
        middleware=[Middleware(TrustedHostMiddleware, allowed_hosts=hosts, www_redirect=False)],
    )


def _rendered(drawn: Any, ending: str, options: dict[str, Any]) -> bytes:
    if ending not in {".png", ".pdf"}:
        return render(drawn, ending, **options)
    import tempfile
    from pathlib import Path

    with tempfile.TemporaryDirectory() as folder:
        return save(drawn, Path(folder) / f"schedule{ending}", **options).read_bytes()


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


def serve(bound: socket.socket, plans: Plans, hosts: list[str]) -> None:
    """Answers requests on `bound` until interrupted."""
    import uvicorn

    config = uvicorn.Config(application(plans, hosts), log_level="warning", access_log=False, lifespan="off")
    uvicorn.Server(config).run(sockets=[bound])
