"""A web server in the test's own loop that does whatever a bad one does: cuts, lies, stalls, ignores."""

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class Answer:
    """Answer of the server to one request."""

    body: bytes = b""
    status: str = ""
    """Instead of 200 OK or 206 Partial Content."""
    ranges: bool = True
    """Whether a Range is heeded."""
    cut: int | None = None
    """Bytes of the answer after which the connection ends."""
    stall: int | None = None
    """Bytes of the answer after which nothing more comes."""
    length: int | None = None
    """Content-Length instead of the true one; -1: none is said."""
    content_range: str | None = None
    """Instead of the true one."""


@dataclass
class Web:
    """The server: its address, what it answers by path, and what it was asked."""

    address: str = ""
    answers: dict[str, list[Answer]] = field(default_factory=dict)
    """By path; each request takes one, and the last one stays."""
    asked: list[tuple[str, int]] = field(default_factory=list)
    """Path and first byte of each request."""
    stalled: asyncio.Event = field(default_factory=asyncio.Event)
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            request = (await reader.readuntil(b"\r\n\r\n")).decode()
            await self._answer(request, writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass  # the other side has left
        finally:
            writer.close()

    async def _answer(self, request: str, writer: asyncio.StreamWriter) -> None:
        path = request.split()[1]
        wanted = re.search(r"(?im)^range: bytes=(\d+)-", request)
        start = int(wanted[1]) if wanted else 0
        self.asked.append((path, start))
        answers = self.answers.get(path, [Answer(status="404 Not Found")])
        answer = answers.pop(0) if len(answers) > 1 else answers[0]
        partial = start > 0 and answer.ranges
        if partial and start >= len(answer.body) and not answer.content_range:
            answer, partial = Answer(status="416 Range Not Satisfiable"), False
        body = answer.body[start:] if partial else answer.body
        head = [f"HTTP/1.1 {answer.status or ('206 Partial Content' if partial else '200 OK')}"]
        if answer.length != -1:
            head.append(f"Content-Length: {len(body) if answer.length is None else answer.length}")
        if partial or answer.content_range:
            true = f"bytes {start}-{len(answer.body) - 1}/{len(answer.body)}"
            head.append(f"Content-Range: {answer.content_range or true}")
        writer.write("\r\n".join([*head, "Connection: close", "", ""]).encode())
        writer.write(body[: answer.cut if answer.stall is None else answer.stall])
        await writer.drain()
        if answer.stall is not None:
            self.stalled.set()
            await self.ended.wait()


@asynccontextmanager
async def open_web() -> AsyncIterator[Web]:
    """Serve on a free port of this machine; leaving ends what stalls."""
    web = Web()
    group = asyncio.TaskGroup()
    async with group:
        server = await asyncio.start_server(
            lambda reader, writer: group.create_task(web.serve(reader, writer), name="serve"), "127.0.0.1", 0
        )
        web.address = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        try:
            yield web
        finally:
            server.close()
            web.ended.set()
