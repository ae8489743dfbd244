"""The endpoint of `--health`: the state of a process and its role over HTTP, for an engine's probes.

    GET /healthz      200 while the event loop of the process runs
    GET /readyz       200 while its role serves; else 503
    GET /metrics      with --metrics: the counts of the role, for Prometheus

Each answer to a probe is one line with the reason. The endpoint needs no key, so without `--metrics` an
answer has no other content. Each client is limited to a short request head, one answer and a deadline. Above
`MOST_CLIENTS` connections the endpoint ends the oldest connection of the host with the most connections. So
slow clients can block only the probes of their own host.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from transport.sockets import stop_accepting

logger = logging.getLogger(__name__)

MOST_CLIENTS = 16
"""Maximum number of connections."""

MOST_HEAD_BYTES = 4096
"""Maximum size of a request's head, in bytes."""

CLIENT_S = 5.0
"""Maximum duration of one connection, in seconds."""

METRICS_S = 1.0
"""Time in seconds for which further requests get the same metrics, so that visitors cost a role little."""

METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_REASONS = {200: "OK", 400: "Bad Request", 404: "Not Found", 405: "Method Not Allowed", 503: "Unavailable"}


class Health:
    """Readiness of a process's role: ready from `follow` until `drain`.

    Args:
        with_metrics: Whether the endpoint has the metrics, too.
    """

    def __init__(self, *, with_metrics: bool = False) -> None:
        self.unready: Callable[[], str] = lambda: "starts"
        """Function that returns why the role does not serve; empty if it serves."""
        self.metrics: Callable[[], str] = str
        """Function that returns the metrics; empty before the role has any."""
        self.paths = ("/healthz", "/readyz", *(("/metrics",) if with_metrics else ()))
        self._metrics, self._text_until = (200, ""), 0.0

    def follow(self, unready: Callable[[], str]) -> None:
        """Report the readiness of a role from now on."""
        self.unready = unready

    def drain(self) -> None:
        """Report from now on that the role ends."""
        self.unready = lambda: "ends"

    def answer(self, head: bytes, now: float) -> tuple[int, str]:
        """Return status and body for the head of a request; `now` is in seconds of the loop's clock."""
        words = head.split(b"\r\n", 1)[0].decode("latin-1").split(" ")
        if len(words) != 3 or not words[2].startswith("HTTP/1."):
            return 400, "not an HTTP/1 request"
        method, path = words[0], words[1].partition("?")[0]
        if path not in self.paths:
            return 404, f"no such path; paths are {' and '.join(self.paths)}"
        if method != "GET":
            return 405, "the only method is GET"
        if path == "/healthz":
            return 200, "runs"
        if path == "/metrics":
            if now >= self._text_until:
                self._metrics, self._text_until = self._read(), now + METRICS_S
            return self._metrics
        reason = self.unready()
        return (503, reason) if reason else (200, "serves")

    def _read(self) -> tuple[int, str]:
        try:
            return 200, self.metrics()
        except Exception:  # a visitor must not end the role by a defect of a number
            logger.exception("the metrics of this role cannot be read")
            return 503, "the metrics cannot be read; the log of the role has the error"


def _response(status: int, text: str) -> bytes:
    is_line = not text.startswith("#")
    body = (f"{' '.join(text.split())}\n" if is_line else text).encode()
    lines = (
        f"HTTP/1.1 {status} {_REASONS[status]}",
        f"Content-Type: {'text/plain; charset=utf-8' if is_line else METRICS_TYPE}",
        f"Content-Length: {len(body)}",
        "Cache-Control: no-store",
        *(("Allow: GET",) if status == 405 else ()),
        "Connection: close",
    )
    return "\r\n".join((*lines, "", "")).encode() + body


@asynccontextmanager
async def health_endpoint(
    host: str, port: int, health: Health, *, client_s: float = CLIENT_S
) -> AsyncIterator[int]:
    """Answer probes until the block ends. Yields the port.

    Args:
        host: Host to listen on; `*` or an empty host means every interface.
        port: Port; 0 is any free port.
        client_s: Maximum duration of one connection, in seconds.

    Raises:
        OSError: The address is not available.
    """
    clients: dict[asyncio.Task[None], str] = {}  # the host of each, oldest first
    ending = False
    async with asyncio.TaskGroup() as group:

        def on_client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            """Serve a client in a task; with too many clients, end the oldest of the host with the most."""
            if ending:
                writer.transport.abort()
                return
            client = (writer.get_extra_info("peername") or ("",))[0]  # none if the client has left already
            if len(clients) >= MOST_CLIENTS:
                counts = Counter((*clients.values(), client))
                oldest = max(clients, key=lambda task: counts[clients[task]])
                del clients[oldest]
                oldest.cancel()
            task = group.create_task(_serve(reader, writer, health, client_s), name="health/client")
            clients[task] = client

            def on_done(task: asyncio.Task[None]) -> None:
                """Forget the client, and cut its connection."""
                clients.pop(task, None)
                writer.transport.abort()  # here: a task cancelled before its start runs no line

            task.add_done_callback(on_done)

        server = await asyncio.start_server(
            on_client, None if host in ("", "*") else host, port, limit=MOST_HEAD_BYTES
        )
        try:
            yield server.sockets[0].getsockname()[1]
        finally:
            ending = True
            stop_accepting(server)
            for task in tuple(clients):
                task.cancel()
            try:
                await asyncio.sleep(0)  # connections that asyncio has accepted get their transports
            finally:
                server.close()
    await server.wait_closed()


async def _serve(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, health: Health, client_s: float
) -> None:
    """Answer one request, and close the connection."""
    try:
        async with asyncio.timeout(client_s):
            try:
                head = await reader.readuntil(b"\r\n\r\n")
                answer = health.answer(head, asyncio.get_running_loop().time())
            except asyncio.LimitOverrunError:
                answer = 400, f"the head is longer than {MOST_HEAD_BYTES} bytes"
            writer.write(_response(*answer))
            await writer.drain()
            writer.close()
            await writer.wait_closed()
    except (TimeoutError, asyncio.IncompleteReadError, OSError):
        pass  # a client that is slow or gone gets no answer
