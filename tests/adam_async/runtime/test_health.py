"""Probes are answered with the state of the role, and no client of them can keep another one out."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import pytest

from adam_async.runtime.health import MOST_CLIENTS, MOST_HEAD_BYTES, Health, health_endpoint

PROBE = b"GET %s HTTP/1.1\r\nHost: pod\r\nUser-Agent: kube-probe/1.37\r\nConnection: close\r\n\r\n"


@asynccontextmanager
async def client(port: int) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        yield reader, writer
    finally:
        writer.transport.abort()


async def answer(port: int, request: bytes) -> tuple[int, str]:
    """Return status and line of the answer to a request."""
    async with client(port) as (reader, writer):
        writer.write(request)
        head, _, body = (await reader.read()).decode().partition("\r\n\r\n")
    assert f"Content-Length: {len(body)}" in head
    assert body.count("\n") == 1
    return int(head.split()[1]), body.rstrip("\n")


async def test_a_process_lives_before_its_role_serves_and_while_it_ends() -> None:
    health = Health()
    async with health_endpoint("127.0.0.1", 0, health) as port:

        async def probes() -> tuple[tuple[int, str], tuple[int, str]]:
            return await answer(port, PROBE % b"/healthz"), await answer(port, PROBE % b"/readyz")

        assert await probes() == ((200, "runs"), (503, "starts"))
        health.follow(lambda: "ps-0 is no member\r\nof the cluster")
        assert await probes() == ((200, "runs"), (503, "ps-0 is no member of the cluster"))
        health.follow(lambda: "")
        assert await probes() == ((200, "runs"), (200, "serves"))
        health.drain()
        assert await probes() == ((200, "runs"), (503, "ends"))


@pytest.mark.parametrize(
    ("request_", "status", "line"),
    [
        (b"POST /healthz HTTP/1.1\r\n\r\n", 405, "the only method is GET"),
        (b"GET / HTTP/1.1\r\n\r\n", 404, "no such path; paths are /healthz and /readyz"),
        (b"GET /healthz?verbose HTTP/1.0\r\n\r\n", 200, "runs"),
        (b"GET  /healthz HTTP/1.1\r\n\r\n", 400, "not an HTTP/1 request"),
        (b"\xff\x00\r\n\r\n", 400, "not an HTTP/1 request"),
        (b"GET /healthz SMTP\r\n\r\n", 400, "not an HTTP/1 request"),
        (b"x" * (MOST_HEAD_BYTES * 2), 400, f"the head is longer than {MOST_HEAD_BYTES} bytes"),
    ],
)
async def test_another_request_is_refused_by_name(request_: bytes, status: int, line: str) -> None:
    async with health_endpoint("127.0.0.1", 0, Health()) as port:
        assert await answer(port, request_) == (status, line)


async def test_slow_clients_do_not_keep_a_probe_out() -> None:
    async with health_endpoint("127.0.0.1", 0, Health()) as port:
        slow = [await asyncio.open_connection("127.0.0.1", port) for _ in range(MOST_CLIENTS + 4)]
        for _, writer in slow:
            writer.write(b"GET /healthz")
        assert await answer(port, PROBE % b"/healthz") == (200, "runs")
        for reader, _ in slow[:5]:  # the oldest, one for the probe
            with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
                await reader.readexactly(1)
        for _, writer in slow:
            writer.transport.abort()


async def test_many_clients_of_one_host_do_not_end_the_connection_of_another_host() -> None:
    async with health_endpoint("127.0.0.1", 0, Health()) as port:
        reader, probe = await asyncio.open_connection("127.0.0.1", port, local_addr=("127.0.0.2", 0))
        probe.write(b"GET /healthz HTTP/1.1\r\n")
        many = [await asyncio.open_connection("127.0.0.1", port) for _ in range(2 * MOST_CLIENTS)]
        ended, _ = many[0]
        with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
            await ended.readexactly(1)
        probe.write(b"\r\n")
        assert (await reader.read()).startswith(b"HTTP/1.1 200 OK")
        for _, writer in (*many, (reader, probe)):
            writer.transport.abort()


async def test_a_client_that_sends_no_whole_request_is_cut_off_after_its_deadline() -> None:
    async with health_endpoint("127.0.0.1", 0, Health(), client_s=0.05) as port:
        async with client(port) as (reader, writer):
            writer.write(b"GET /healthz HTTP/1.1\r\n")
            with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
                await reader.readexactly(1)


async def test_the_end_of_the_block_ends_all_connections() -> None:
    async with health_endpoint("127.0.0.1", 0, Health()) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /healthz")
        await answer(port, PROBE % b"/healthz")
    with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
        await reader.readexactly(1)
    writer.transport.abort()


@pytest.mark.parametrize("turns", range(5))
async def test_a_connection_accepted_as_the_block_ends_is_closed(turns: int) -> None:
    """Whether the loop has accepted it, or its transport is there by then."""
    async with health_endpoint("127.0.0.1", 0, Health()) as port:
        with socket.create_connection(("127.0.0.1", port), timeout=10):
            pass  # the first connection finds the loop idle, in its selector
        client = socket.create_connection(("127.0.0.1", port), timeout=10)
        for _ in range(turns):
            await asyncio.sleep(0)
    for _ in range(3):
        await asyncio.sleep(0)
    with client, suppress(ConnectionResetError):
        assert client.recv(1) == b""


async def test_metrics_are_there_if_asked_for_and_one_second_old_at_most() -> None:
    calls = list[int]()

    def metrics() -> str:
        calls.append(1)
        return "# TYPE adam_x gauge\nadam_x 1\n"

    health = Health(with_metrics=True)
    health.metrics = metrics
    async with health_endpoint("127.0.0.1", 0, health) as port:
        for _ in range(3):
            async with client(port) as (reader, writer):
                writer.write(PROBE % b"/metrics")
                head, _, body = (await reader.read()).decode().partition("\r\n\r\n")
            assert "Content-Type: text/plain; version=0.0.4" in head
            assert body == "# TYPE adam_x gauge\nadam_x 1\n"
    assert len(calls) == 1, "further visitors get the same text"
    assert health.answer(PROBE % b"/metrics", 1e9)[0] == 200
    assert len(calls) == 2
    assert Health().answer(PROBE % b"/metrics", 0.0)[0] == 404, "nobody asked for metrics"


async def test_metrics_that_raise_cost_the_visitor_an_answer_and_not_the_role() -> None:
    def metrics() -> str:
        raise ValueError("a number that is none")

    health = Health(with_metrics=True)
    health.metrics = metrics
    async with health_endpoint("127.0.0.1", 0, health) as port:
        for path, status in ((b"/metrics", b"503"), (b"/metrics", b"503"), (b"/healthz", b"200")):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(PROBE % path)
            assert (await reader.read()).split(b" ")[1] == status
            writer.close()
