"""Web application: routes, limits, and the choice of a worker process for each request.

This process only parses addresses and forwards responses. Two pools of workers do the work, so that small requests
never wait behind large ones.
"""

from __future__ import annotations

import asyncio
import json
import re
import secrets
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

import uvicorn
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from uvicorn.protocols.http.h11_impl import H11Protocol

from hpgo.base.messages import shorten
from hpgo.draw import ENDINGS
from hpgo.errors import HpgoError
from hpgo.page.cache import Store
from hpgo.page.form import page
from hpgo.page.origins import foreign
from hpgo.page.plan_store import Loaded, PlanStore
from hpgo.page.planned.address import drawn_size
from hpgo.page.planned.document import page as plan_page
from hpgo.page.planned.jobs import PARTS, File, PlanJob, mistake
from hpgo.page.pool import BrokenError, JobChannel, Pool, UnavailableError
from hpgo.page.settings import Size, settings_of, size_of
from hpgo.page.start import start_page
from hpgo.page.transformers.document import page as transformers_page
from hpgo.page.transformers.jobs import FILES, KINDS, SEARCHES, LlmJob
from hpgo.page.worker import PageRequest

try:
    import resource
except ImportError:  # on Windows
    resource = None  # type: ignore[assignment]

if TYPE_CHECKING:
    import socket
    from collections.abc import Iterator

    from starlette.types import ASGIApp, Receive, Scope, Send
    from uvicorn import Server

    from hpgo.page.worker import Done

_MAX_UPLOAD_BYTES = 16 * 2**20
_MAX_UPLOADS = 4
_UPLOAD_S = 30.0
_MAX_SENDING_BYTES = 256 * 2**20
_SENDING_S = 60.0
_PIECE_BYTES = 256 * 2**10
_ANSWERS_BYTES = 32 * 2**20
_MAX_CONNECTIONS = 500
_AT_ONCE = 128
"""Length of the queue of connections that wait to be accepted."""
_FIRST_REQUEST_S = 10.0
"""Time limit for the headers of the first request on a connection."""
_SMALL = Size(actions=5_000, ranks=200)
"""Size up to which a request counts as small: it takes a few 10 ms, also as a picture."""
_SMALL_PLAN_BYTES = 256 * 2**10
_TYPES = {
    ".svg": "image/svg+xml",
    ".png": "image/png",
    ".pdf": "application/pdf",
    ".html": "text/html",
    ".json": "application/json",
    ".txt": "text/plain",
    ".tex": "text/x-tex",
    ".zip": "application/zip",
}
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; img-src 'self' data:; style-src 'unsafe-inline'; "
    "script-src 'unsafe-inline'; connect-src 'self'; frame-src 'self'; form-action 'self'; base-uri 'none'; "
    "frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-store",
}
_IN_THE_PAGE = {
    "Content-Security-Policy": _HEADERS["Content-Security-Policy"].replace("ancestors 'none'", "ancestors 'self'")
}
"""Headers of pictures, which the page embeds in frames."""


class PageApp:
    """The web application: one method per route."""

    def __init__(self, store: PlanStore, small: Pool, large: Pool) -> None:
        self._store = store
        self._answers: Store[object, bytes] = Store(_ANSWERS_BYTES)
        self._small = small
        self._large = large
        self._uploads = 0
        self.searches: dict[str, JobChannel] = {}
        """Running searches, by a random name that only their client knows."""
        self.sending_bytes = 0
        """Bytes of responses that are still being sent."""

    async def close(self) -> None:
        """Stop all work and kill the workers."""
        await self._small.close()
        await self._large.close()

    async def show(self, request: Request) -> Response:
        """Respond with the page that compares schedules."""
        items = tuple(request.query_params.multi_items())
        try:
            body = await self._drawn(request, "page", items)
        except HpgoError as error:
            return self._mistake(error, items)
        return _Pieces(self, body, "text/html", {})

    async def picture(self, request: Request) -> Response:
        """Respond with a picture or an export."""
        ending = f".{request.path_params['ending']}"
        is_export = request.url.path.startswith("/export")
        if ending not in ENDINGS:
            return PlainTextResponse(f"unknown format: {ending}; known: {', '.join(ENDINGS)}\n", 404, _HEADERS)
        try:
            # The page has a table of its own, so its picture has none.
            body = await self._drawn(request, ending, tuple(request.query_params.multi_items()), table=is_export)
        except HpgoError as error:
            hint = f"\nhint: {error.hint}" if error.hint else ""
            status, headers = _status(error)
            return PlainTextResponse(f"error: {error.message}{hint}\n", status, headers | _IN_THE_PAGE)
        attached = {"Content-Disposition": f'attachment; filename="{_file_name(request)}{ending}"'}
        return _Pieces(self, body, _TYPES[ending], attached if is_export else _IN_THE_PAGE)

    async def load(self, request: Request) -> Response:
        """Store an uploaded plan, and respond with its name."""
        title = request.query_params.get("name", "plan")
        try:
            with self._upload():
                body = await _uploaded(request)
                pool = self._small if len(body) <= _SMALL_PLAN_BYTES else self._large
                found = await _unless_gone(request, pool, PageRequest("plan", plan=body, title=title))
        except HpgoError as error:
            return self._mistake(error, ())
        name = found.body.decode()
        if found.size is not None:
            self._store.load(name, Loaded(shorten(title), body, found.size, found.numbers))
        return PlainTextResponse(name, 201, _HEADERS)

    async def plan_page(self, _: Request) -> Response:
        """Respond with the page of a plan, which requests the plan itself."""
        return HTMLResponse(plan_page(None), headers=_HEADERS)

    async def plan_part(self, request: Request) -> Response:
        """Respond with a part of the plan of an address: facts, timeline, or file."""
        wanted = request.path_params["wanted"]
        if wanted not in PARTS:
            return PlainTextResponse(f"unknown part: {shorten(wanted)}; known: {', '.join(PARTS)}\n", 404, _HEADERS)
        items = tuple(request.query_params.multi_items())
        try:
            body = await self._part(request, wanted, items)
        except HpgoError as error:
            return self._said(error)
        attached = {"Content-Disposition": 'attachment; filename="plan.json"'} if wanted == "plan.json" else {}
        return _Pieces(self, body, _TYPES[f".{wanted.rpartition('.')[2]}"], attached)

    async def _part(self, request: Request, wanted: str, items: tuple[tuple[str, str], ...]) -> bytes:
        key = ("plan", wanted, items)
        files = self._store.named(items)
        # Reloading a page and several tabs with one address are frequent, so responses are cached.
        if (kept := self._answers.get(key)) is not None:
            return kept
        if self.sending_bytes > _MAX_SENDING_BYTES:
            raise UnavailableError("too many responses are being sent", "try again soon")
        job = PlanJob(wanted, items, files)
        # Parsing a large file takes longer than most requests, regardless of the result.
        is_small = sum(len(file.body) for _, file in files) <= _SMALL_PLAN_BYTES
        if wanted.startswith("timeline"):
            plan = self._store.get(items_of["plan"]).size if (items_of := dict(items)).get("plan") else None
            is_small &= drawn_size(items, plan).within(_SMALL)
        pool = self._small if is_small else self._large
        body = (await _unless_gone(request, pool, job)).body
        self._answers.put(key, body, len(body) + 2 * len(str(key)))
        return body

    async def start(self, _: Request) -> Response:
        """Respond with the page that leads to all others."""
        return HTMLResponse(start_page(), headers=_HEADERS)

    async def transformers_page(self, _: Request) -> Response:
        """Respond with the page that plans transformers."""
        return HTMLResponse(transformers_page(), headers=_HEADERS)

    async def transformer_part(self, request: Request) -> Response:
        """Respond with a part of the configuration of an address: its estimate, its step, its plan, or its job."""
        wanted = request.path_params["wanted"]
        if wanted not in FILES:
            return PlainTextResponse(f"unknown part: {shorten(wanted)}; known: {', '.join(FILES)}\n", 404, _HEADERS)
        items = tuple(request.query_params.multi_items())
        try:
            if self.sending_bytes > _MAX_SENDING_BYTES:
                raise UnavailableError("too many responses are being sent", "try again soon")
            job = LlmJob(wanted, items, self._store.named(items, KINDS))
            # Changes of a configuration must not wait behind searches, and an estimate takes a few 10 ms.
            pool = self._small if wanted == "estimate.json" else self._large
            body = (await _unless_gone(request, pool, job)).body
        except HpgoError as error:
            return self._said(error)
        attached = {"Content-Disposition": f'attachment; filename="{FILES[wanted]}"'} if FILES[wanted] else {}
        return _Pieces(self, body, _TYPES[f".{wanted.rpartition('.')[2]}"], attached)

    async def transformer_search(self, request: Request) -> Response:
        """Search for configurations or for clusters, and stream progress as lines of JSON."""
        wanted = request.path_params["wanted"]
        if wanted not in SEARCHES:
            return PlainTextResponse(
                f"unknown search: {shorten(wanted)}; known: {', '.join(SEARCHES)}\n", 404, _HEADERS
            )
        items = tuple(request.query_params.multi_items())
        job = LlmJob(wanted, items, self._store.named(items, KINDS))
        return _Lines(self, secrets.token_hex(8), job)

    async def search(self, request: Request) -> Response:
        """Search for the best plan of an address, and stream progress as lines of JSON."""
        items = tuple(request.query_params.multi_items())
        try:
            files = self._store.named(items)
        except HpgoError as error:
            return self._said(error)
        # The name must be random: a client that knows it can stop the search.
        name = secrets.token_hex(8)
        # The time limit includes the work after the search, so the search gets only 80 % of it.
        job = PlanJob("search", items, files, time_limit_s=0.8 * self._large.limits.time_s)
        return _Lines(self, name, job)

    async def stop(self, request: Request) -> Response:
        """Stop a search, which then returns its best plan so far."""
        talk = self.searches.get(request.query_params.get("search", ""))
        if talk is not None:
            talk.stopped.set()
        return PlainTextResponse("", 204 if talk else 404, _HEADERS)

    async def load_file(self, request: Request) -> Response:
        """Store an uploaded profile, cluster or transformer, and respond with its name in addresses."""
        kind, title = request.query_params.get("kind", ""), request.query_params.get("name", "file")
        if kind not in {"profile", "cluster", "config"}:
            return PlainTextResponse("give `kind=profile`, `kind=cluster` or `kind=config`\n", 400, _HEADERS)
        try:
            with self._upload():
                file = File(kind, shorten(title, 100), await _uploaded(request))
                job = (LlmJob if kind == "config" else PlanJob)("look", (), (("", file),))
                await _unless_gone(request, self._large, job)
        except HpgoError as error:
            return self._said(error)
        return PlainTextResponse(self._store.add(file), 201, _HEADERS)

    @contextmanager
    def _upload(self) -> Iterator[None]:
        """Count a file until it was checked. Files that wait for the check take memory, too."""
        # The limit bounds the memory of this process: 4 files of 16 MiB.
        if self._uploads >= _MAX_UPLOADS:
            raise UnavailableError(f"{_MAX_UPLOADS} files are being loaded, which is the limit", "try again soon")
        self._uploads += 1
        try:
            yield
        finally:
            self._uploads -= 1

    def run_search(self, job: PlanJob, talk: JobChannel) -> asyncio.Task[Done]:
        """Start a search in a worker for large requests."""
        return asyncio.create_task(self._large.run(job, talk))

    @staticmethod
    def _said(error: HpgoError) -> Response:
        status, headers = _status(error)
        return JSONResponse({"error": mistake(error)}, status, headers)

    async def _drawn(
        self, request: Request, wanted: str, items: tuple[tuple[str, str], ...], *, table: bool = True
    ) -> bytes:
        """Return the response body for an address. Raises HpgoError for invalid addresses."""
        # Check the address in this process. Invalid addresses are frequent while a user types.
        settings = settings_of(items)
        plan = self._store.get(settings.plan) if settings.plan else None
        size = size_of(settings, plan.size if plan else None)
        titles = tuple(self._store.titles().items()) if wanted == "page" else ()
        key = (wanted, items, titles, table)
        if (kept := self._answers.get(key)) is not None:
            return kept
        if self.sending_bytes > _MAX_SENDING_BYTES:
            raise UnavailableError("too many responses are being sent", "try again soon")
        file, title = (plan.body, plan.title) if plan else (b"", "")
        # PNG and PDF need matplotlib, whose import is slow, so they go to the other pool.
        small = size.within(_SMALL) and len(file) <= _SMALL_PLAN_BYTES and wanted not in {".png", ".pdf"}
        job = PageRequest(wanted, items, titles, file, title, plan.numbers if plan else (), table)
        body = (await _unless_gone(request, self._small if small else self._large, job)).body
        self._answers.put(key, body, len(body) + 2 * len(str(key)))
        return body

    def _mistake(self, error: HpgoError, items: tuple[tuple[str, str], ...]) -> Response:
        status, headers = _status(error)
        return HTMLResponse(page(items, self._store.titles(), error, self._numbers(items)), status, headers)

    def _numbers(self, items: tuple[tuple[str, str], ...]) -> dict[str, str]:
        """Return the values of the plan in an address; empty without one."""
        name = dict(items).get("plan", "")
        try:
            return dict(self._store.get(name).numbers) if name else {}
        except HpgoError:
            return {}


class _Pieces(Response):
    """A response that is sent in pieces, within a time limit for slow readers."""

    def __init__(self, site: PageApp, body: bytes, media_type: str, headers: dict[str, str]) -> None:
        super().__init__(body, 200, _HEADERS | headers, media_type=media_type)
        self._site = site

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        size = len(self.body)
        self._site.sending_bytes += size
        try:
            with suppress(TimeoutError):  # Without the final message, uvicorn closes the connection.
                async with asyncio.timeout(_SENDING_S):
                    await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                    for start in range(0, size, _PIECE_BYTES):
                        piece = bytes(self.body[start : start + _PIECE_BYTES])
                        await send({"type": "http.response.body", "body": piece, "more_body": True})
                    await send({"type": "http.response.body", "body": b""})
        finally:
            self._site.sending_bytes -= size


class _Lines(Response):
    """Response of a search in lines of JSON: the first has its name, to stop it, the last has the plan or an error."""

    def __init__(self, site: PageApp, name: str, job: PlanJob) -> None:
        super().__init__(b"", 200, _HEADERS, media_type="application/x-ndjson")
        del self.headers["content-length"]  # The length is not known yet.
        self._site, self._name, self._job = site, name, job

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        site, talk = self._site, JobChannel()
        work = site.run_search(self._job, talk)
        gone = asyncio.create_task(_left(Request(scope, receive)))
        site.searches[self._name] = talk

        async def line(record: bytes) -> None:
            async with asyncio.timeout(_SENDING_S):
                await send({"type": "http.response.body", "body": record + b"\n", "more_body": True})

        try:
            with suppress(TimeoutError):  # Without the final message, uvicorn closes the connection.
                await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                await line(b'{"search":"%s"}' % self._name.encode())
                while not gone.done():
                    progress = asyncio.create_task(talk.progress.get())
                    await asyncio.wait({work, gone, progress}, return_when=asyncio.FIRST_COMPLETED)
                    if progress.done():
                        await line(json.dumps({"progress": progress.result()}).encode())
                    else:
                        progress.cancel()
                    if work.done():
                        await line(_outcome(work))
                        await send({"type": "http.response.body", "body": b""})
                        break
        finally:
            del site.searches[self._name]
            work.cancel()
            gone.cancel()


def _outcome(work: asyncio.Task[Done]) -> bytes:
    """Return the last line of a search: the plan or the error."""
    try:
        return b'{"found":' + work.result().body + b"}"
    except HpgoError as error:
        return json.dumps({"error": mistake(error)}).encode()


class _OwnPagesOnly:
    """Middleware that rejects requests from pages of other sites."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if foreign(scope["method"], Headers(scope=scope)):
            text = "error: the request is from a page of another site\nhint: open the address in its own tab\n"
            await PlainTextResponse(text, 403, _HEADERS)(scope, receive, send)
        else:
            await self._app(scope, receive, send)


class _GoneError(HpgoError):
    """The client disconnected before the response."""


class _TooLargeError(HpgoError):
    """An uploaded file exceeds the size limit."""


def _file_name(request: Request) -> str:
    """Return the file name of an export, made of its schedules."""
    # The file name goes into a header, so only safe characters remain.
    names = [re.sub(r"[^\w.-]", "", name, flags=re.ASCII)[:40] for name in request.query_params.getlist("schedule")]
    return "-against-".join(filter(None, names)) or "schedule"


def _status(error: HpgoError) -> tuple[int, dict[str, str]]:
    """Return status code and headers of the response for `error`."""
    if isinstance(error, UnavailableError):
        return 503, _HEADERS | {"Retry-After": "2"}
    known = {BrokenError: 500, _TooLargeError: 413, _GoneError: 499}
    return known.get(type(error), 400), _HEADERS


async def _uploaded(request: Request) -> bytes:
    """Return the file in a request. Raises HpgoError if it is too large or arrives too slowly."""
    body = bytearray()
    try:
        async with asyncio.timeout(_UPLOAD_S):
            async for piece in request.stream():
                body += piece
                if len(body) > _MAX_UPLOAD_BYTES:
                    raise _TooLargeError(
                        "the file is larger than 16 MiB, the limit for plans", "choose a plan written by hpgo"
                    )
    except ClientDisconnect:
        raise _GoneError("the client disconnected") from None
    except TimeoutError:
        raise HpgoError(f"the file did not arrive within {_UPLOAD_S:.0f} s", "load it again") from None
    return bytes(body)


async def _unless_gone(request: Request, pool: Pool, job: PageRequest | PlanJob) -> Done:
    """Return the result of `job`, or stop its work if the client disconnects."""
    # Wait for the result and for the disconnect at once, because either can come first.
    work = asyncio.create_task(pool.run(job))
    gone = asyncio.create_task(_left(request))
    try:
        await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            raise _GoneError("the client disconnected")
        return work.result()
    finally:
        work.cancel()
        gone.cancel()


async def _left(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def application(site: PageApp, hosts: list[str]) -> Starlette:
    """Return the ASGI application, which accepts only requests with a Host header in `hosts`."""
    return Starlette(
        routes=[
            Route("/", site.show),
            Route("/picture.{ending}", site.picture),
            Route("/export.{ending}", site.picture),
            Route("/plans", site.load, methods=["POST"]),
            Route("/plan", site.plan_page),
            Route("/plan/search", site.search),
            Route("/plan/stop", site.stop, methods=["POST"]),
            Route("/plan/files", site.load_file, methods=["POST"]),
            Route("/plan/{wanted}", site.plan_part),
            Route("/start", site.start),
            Route("/transformers", site.transformers_page),
            Route("/transformers/search/{wanted}", site.transformer_search),
            Route("/transformers/{wanted}", site.transformer_part),
        ],
        middleware=[
            Middleware(TrustedHostMiddleware, allowed_hosts=hosts, www_redirect=False),
            Middleware(_OwnPagesOnly),
        ],
    )


def _connections() -> int:
    """Return the limit on open connections: at most half of the process's open files, because work needs files, too."""
    if resource is None:
        return _MAX_CONNECTIONS
    # Without a free file descriptor, the server could not accept a connection to refuse it.
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return _MAX_CONNECTIONS if files == resource.RLIM_INFINITY else min(_MAX_CONNECTIONS, files // 2)


def server(site: PageApp, hosts: list[str]) -> Server:
    """Return the HTTP server for `site`, which runs until a signal stops it."""

    class Stopped(uvicorn.Server):
        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            await site.close()  # Otherwise, the shutdown would wait until all work is complete.
            await super().shutdown(sockets)

    class Guarded(H11Protocol):
        """Protocol that closes idle connections, so that they don't use up the limit."""

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            if len(self.connections) > maximum:
                transport.abort()
            else:
                self.loop.call_later(_FIRST_REQUEST_S, self._end_if_unasked)

        def _end_if_unasked(self) -> None:
            if self.cycle is None and not self.transport.is_closing():
                self.transport.close()

    maximum = _connections()
    config = uvicorn.Config(
        application(site, hosts),
        http=Guarded,
        log_level="error",
        access_log=False,
        lifespan="off",
        limit_concurrency=maximum,
        backlog=_AT_ONCE,
        timeout_graceful_shutdown=1,
    )
    return Stopped(config)
