"""The shell of the dashboard: HTTP for visitors, with limits, in the loop of its program.

    GET  /                      the page; it has nothing of the run
    POST /session               the token for a session
    GET  /session               what the page offers: past runs, operations
    GET  /view/PART?run=NAME    `now`, `curves` or `samples` of a past run; without a name, of what runs
    POST /operate               a request to the run's driver

Each connection has one request, and deadlines. A further connection above `MOST_CLIENTS` ends the oldest one
that has sent no request. Visitors without a session get the files of the page alone.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

import msgspec
from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from adam_async.dashboard.access import SESSION_S, Access, Session
from adam_async.dashboard.past_runs import PastRuns
from adam_async.dashboard.state import Part, State, shown
from adam_async.driver.requests import FAULTS
from adam_async.driver.requests import Request as DriverRequest
from adam_async.errors import AdamError, first_cause
from adam_async.report.stream import EventStream
from adam_async.run.events import AnyEvent
from transport import TransportError
from transport.sockets import stop_accepting

logger = logging.getLogger(__name__)

MOST_CLIENTS = 64
"""Maximum number of connections."""

HEAD_S = 5.0
"""Time in seconds that a connection has for its request."""

CLIENT_S = 60.0
"""Maximum duration of one connection, in seconds: starting a role may take long."""

MOST_HEAD_BYTES = 16 << 10
"""Maximum size of a request's head, in bytes."""

MOST_BODY_BYTES = 4096
"""Maximum size of a request's body, in bytes."""

SAME_S = 0.9
"""Time in seconds for which all visitors get the same bytes of a part: many cost as little as one."""

FILES = {
    "/": ("page.html", "text/html; charset=utf-8"),
    "/page.css": ("page.css", "text/css; charset=utf-8"),
    "/page.js": ("page.js", "text/javascript; charset=utf-8"),
    "/drawing.js": ("drawing.js", "text/javascript; charset=utf-8"),
    "/icon.svg": ("icon.svg", "image/svg+xml"),
}
"""Files of the page by path, with their types."""

HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; form-action 'none'; base-uri 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
    "Connection": "close",
}
"""Headers of each answer."""

PROOF = "x-session-proof"
"""Header of an operation with the proof of its session."""

Operate = Callable[[DriverRequest], Awaitable[Sequence[str]]]
"""Function that passes a request to the driver of the run, and returns the lines of its answer.

The function raises an `AdamError` if the driver refuses.
"""


class Login(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of a request for a session."""

    token: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """Contents and operations of a dashboard."""

    live: State | None = None
    """State of a run in progress; None: past runs alone."""
    past: PastRuns | None = None
    operate: Operate | None = None
    """Carries out operations; None: operations are not permitted."""


class Dashboard:
    """Answers the requests of visitors.

    Args:
        files: Contents of the page's files by path.

    Attributes:
        cookie: Name of a session's cookie; dashboards on one host have different names.
    """

    def __init__(self, site: Site, access: Access, files: dict[str, bytes]) -> None:
        self._site = site
        self._access = access
        self._files = files
        self.cookie = "adam"
        self._encoded: dict[tuple[str, str], tuple[float, bytes]] = {}
        routes = [
            *(Route(path, self._file) for path in files),
            Route("/session", self._login, methods=["POST"]),
            Route("/session", self._offer),
            Route("/view/{part}", self._view),
            Route("/operate", self._operate, methods=["POST"]),
        ]
        handlers = {_TooLarge: _refuse_large, ClientDisconnect: _refuse_large}
        self.app = _Guard(Starlette(routes=routes, exception_handlers=handlers), access)

    async def _file(self, request: Request) -> Response:
        _, kind = FILES[request.url.path]
        return Response(self._files[request.url.path], media_type=kind)

    async def _login(self, request: Request) -> Response:
        try:
            login = msgspec.json.decode(await _body(request), type=Login)
        except msgspec.DecodeError:
            return _error(400, "the body is no token")
        cookie = self._access.begin(login.token, _now())
        if cookie is None:
            return _error(401, "wrong token")
        session = self._access.session(cookie, _now())
        answer = await self._offers(session)
        facts = f"Path=/; HttpOnly; SameSite=Strict; Max-Age={SESSION_S:.0f}"
        answer.headers["Set-Cookie"] = f"{self.cookie}={cookie}; {facts}"
        return answer

    async def _offer(self, request: Request) -> Response:
        return await self._offers(self._session(request))

    async def _offers(self, session: Session | None) -> Response:
        if session is None:
            return _error(401, "no session")
        try:
            runs = await self._site.past.names() if self._site.past is not None else []
        except OSError as error:
            logger.warning("the folder of past runs cannot be read: %s", error.strerror)
            runs = []
        offer = {
            "proof": session.proof,
            "live": self._site.live is not None,
            "runs": runs,
            "operations": self._site.operate is not None,
        }
        return _json(offer)

    async def _view(self, request: Request) -> Response:
        if self._session(request) is None:
            return _error(401, "no session")
        name, part = request.query_params.get("run", ""), request.path_params["part"]
        if part not in get_args(Part):
            return _error(404, "no such part")
        until, body = self._encoded.get((name, part), (0.0, b""))
        if _now() >= until:
            try:
                state = await self._state(name)
            except (OSError, ValueError, RecursionError) as error:
                return _error(422, f"{name} cannot be read: {shown(str(error))}")
            if state is None:
                return _error(404, "no such run")
            body = state.part(part)
            self._encoded = {key: each for key, each in self._encoded.items() if each[0] > _now()}
            self._encoded[name, part] = _now() + SAME_S, body
        return Response(body, media_type="application/json")

    async def _state(self, name: str) -> State | None:
        if not name:
            return self._site.live
        return await self._site.past.state(name) if self._site.past is not None else None

    async def _operate(self, request: Request) -> Response:
        session = self._session(request)
        if session is None:
            return _error(401, "no session")
        if not self._access.proves(session, request.headers.get(PROOF, "")):
            return _error(403, "the request does not come from the page")
        operate = self._site.operate
        if operate is None:
            return _error(403, "operations are off: start with --allow-operations")
        try:
            asked = msgspec.json.decode(await _body(request), type=DriverRequest)
        except msgspec.DecodeError as error:
            return _error(400, str(error))
        if asked.action not in FAULTS:
            return _error(400, f"the page does not ask for {asked.action}")
        try:
            lines = await operate(asked)
        except (AdamError, TransportError, ExceptionGroup) as error:
            cause = first_cause(error)
            if not isinstance(cause, AdamError | TransportError):
                raise
            return _error(409, shown(str(cause)))
        return _json({"text": shown("; ".join(lines))})

    def _session(self, request: Request) -> Session | None:
        return self._access.session(request.cookies.get(self.cookie, ""), _now())


class _Guard:
    """Refuses requests for other hosts and from other sites, and adds `HEADERS` to each answer."""

    def __init__(self, app: ASGIApp, access: Access) -> None:
        self._app = app
        self._access = access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return

        async def send_guarded(message: Message) -> None:
            """Send a part of the answer."""
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        headers = Headers(scope=scope)
        host, origin = headers.get("host", ""), headers.get("origin")
        app = self._app
        if not self._access.names_host(host):
            app = _error(421, "this host is not served here")
        elif origin is not None and origin.partition("://")[2] != host:
            app = _error(403, "the request comes from another site")
        await app(scope, receive, send_guarded)


class _TooLarge(Exception):
    """The body of a request is too large."""


async def _body(request: Request) -> bytes:
    """Return the body of a request. Raises _TooLarge."""
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > MOST_BODY_BYTES:
            raise _TooLarge
    return bytes(body)


async def _refuse_large(request: Request, error: Exception) -> Response:
    """Answer a request whose body is too large, or was cut off by its visitor."""
    return _error(413, f"the body has more than {MOST_BODY_BYTES} bytes")


def _json(value: object) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")


def _error(status: int, text: str) -> Response:
    return Response(msgspec.json.encode({"error": text}), status, media_type="application/json")


def _now() -> float:
    return asyncio.get_running_loop().time()


class _Connection(H11Protocol):
    """One connection, which ends after its answer, or at its deadlines."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin; end another connection if there are too many."""
        connections = self.connections
        if len(connections) >= MOST_CLIENTS:
            others = [each for each in connections if isinstance(each, _Connection)]
            oldest = min(others, key=lambda each: (each.cycle is not None, each.began_at))
            oldest.transport.abort()
            connections.discard(oldest)
        super().connection_made(transport)
        self.began_at = self.loop.time()
        self._timers = [
            self.loop.call_later(HEAD_S, self._end_without_request),
            self.loop.call_later(CLIENT_S, transport.abort),
        ]

    def connection_lost(self, exc: Exception | None) -> None:
        """End."""
        for timer in self._timers:
            timer.cancel()
        super().connection_lost(exc)

    def _end_without_request(self) -> None:
        if self.cycle is None or self.cycle.more_body:
            self.transport.abort()


@asynccontextmanager
async def serving(host: str, port: int, site: Site, access: Access) -> AsyncIterator[int]:
    """Serve a dashboard until the block ends. Yields the port.

    Args:
        port: Port; 0 is any free port.

    Raises:
        OSError: The address is not available.
    """
    folder = Path(__file__).with_name("files")
    files = {path: (folder / name).read_bytes() for path, (name, _) in FILES.items()}
    loop, state = asyncio.get_running_loop(), ServerState()
    dashboard = Dashboard(site, access, files)
    config = Config(
        dashboard.app,
        http=_Connection,
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="critical",
        access_log=False,
        proxy_headers=False,
        server_header=False,
        h11_max_incomplete_event_size=MOST_HEAD_BYTES,
    )
    config.load()

    def connection() -> _Connection:
        """Return the protocol of a new connection."""
        return _Connection(config=config, server_state=state, app_state={}, _loop=loop)

    server = await loop.create_server(connection, host, port, start_serving=False)
    port = server.sockets[0].getsockname()[1]
    dashboard.cookie = f"adam-{port}"
    await server.start_serving()
    try:
        yield port
    finally:
        stop_accepting(server)
        server.close()
        for each in tuple(state.connections):
            each.transport.abort()
        for task in tuple(state.tasks):
            task.cancel()
        await server.wait_closed()


def feed(stream: EventStream, state: State) -> None:
    """Fold the events of a stream from now on. An error ends the news of the page, and not the run."""
    has_failed = False

    def on_event(event: AnyEvent) -> None:
        """Take one event."""
        nonlocal has_failed
        if not has_failed:
            try:
                state.take(event)
            except Exception:
                has_failed = True
                logger.exception("the dashboard shows no further events")

    stream.shows_images = True
    stream.listen(on_event)
