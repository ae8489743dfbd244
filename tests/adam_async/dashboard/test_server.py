"""Visitors without the token read and do nothing; limits hold; visitors with it get the parts of the page."""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

httpx = pytest.importorskip("httpx")
pytest.importorskip("uvicorn")

from adam_async.dashboard import server  # noqa: E402
from adam_async.dashboard.access import Access  # noqa: E402
from adam_async.dashboard.past_runs import PastRuns  # noqa: E402
from adam_async.dashboard.server import FILES, MOST_CLIENTS, Site, feed, serving  # noqa: E402
from adam_async.dashboard.state import Part, State  # noqa: E402
from adam_async.driver.requests import Request  # noqa: E402
from adam_async.errors import ConfigError  # noqa: E402
from adam_async.report.stream import EventStream  # noqa: E402
from adam_async.run.events import Noted  # noqa: E402
from adam_async.runtime.clock import system_entropy  # noqa: E402
from adam_async.runtime.disk import Disk  # noqa: E402
from tests.adam_async.dashboard.test_past_runs import lines  # noqa: E402
from tests.adam_async.dashboard_events import beginning, epochs, poll, predicted, state_of  # noqa: E402

TOKEN = "a token of visitors"
WORDS = ("digits on", "run-1", "worker-0", "old.jsonl")


class Operated:
    """A driver that notes requests, and refuses those about ps-0."""

    def __init__(self) -> None:
        self.requests: list[Request] = []

    async def __call__(self, request: Request) -> Sequence[str]:
        self.requests.append(request)
        if request.node == "ps-0":
            raise ConfigError("the run would end with ps-0; see /home/ann/notes.txt")
        return ("done",)


@asynccontextmanager
async def visited(tmp_path: Path, operate: Operated | None = None) -> AsyncIterator[Any]:
    """A client of a dashboard without a session; `client.port` has the port."""
    (tmp_path / "old.jsonl").write_bytes(lines(3))
    (tmp_path / "broken.jsonl").write_bytes(b"{}\n{}\n")
    async with AsyncExitStack() as stack:
        disk = await stack.enter_async_context(Disk())
        live = state_of(beginning(), *epochs(5), *poll(1), *poll(2), predicted())
        site = Site(live=live, past=PastRuns(tmp_path, disk), operate=operate)
        access = Access(TOKEN, host="127.0.0.1", entropy=system_entropy)
        port = await stack.enter_async_context(serving("127.0.0.1", 0, site, access))
        client = await stack.enter_async_context(
            httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", trust_env=False)
        )
        client.port = port
        yield client


async def login(client: Any) -> dict[str, Any]:
    answer = await client.post("/session", json={"token": TOKEN})
    assert answer.status_code == 200, answer.text
    offer: dict[str, Any] = answer.json()
    return offer


async def test_a_visitor_with_the_token_gets_each_part(tmp_path: Path) -> None:
    async with visited(tmp_path) as client:
        offer = await login(client)
        assert (offer["live"], offer["operations"], sorted(offer["runs"])) == (
            True,
            False,
            ["broken.jsonl", "old.jsonl"],
        )
        assert len((await client.get("/view/curves")).json()["accuracy"]) == 5
        assert (await client.get("/view/now")).json()["status"]["run"]["id"] == "run-1"
        assert (await client.get("/view/samples")).json()["epoch"] == 1
        assert len((await client.get("/view/curves?run=old.jsonl")).json()["accuracy"]) == 3
        assert (await client.get("/session")).json()["proof"] == offer["proof"]
        broken = await client.get("/view/curves?run=broken.jsonl")
        assert (broken.status_code, str(tmp_path) in broken.text) == (422, False)


async def test_without_a_session_only_the_files_of_the_page_are_readable(tmp_path: Path) -> None:
    operate = Operated()
    async with visited(tmp_path, operate) as client:
        for path in FILES:
            answer = await client.get(path)
            assert answer.status_code == 200
            assert not any(word in answer.text for word in WORDS)
        for path in ("/session", "/view/now", "/view/curves", "/view/samples", "/view/curves?run=old.jsonl"):
            for cookies in ({}, {f"adam-{client.port}": "0" * 48}, {f"adam-{client.port}": TOKEN}):
                headers = {"Cookie": "; ".join(f"{name}={value}" for name, value in cookies.items())}
                answer = await client.get(path, headers=headers)
                assert (answer.status_code, answer.json()) == (401, {"error": "no session"})
        for body in ({"token": ""}, {"token": TOKEN + "x"}, {"token": "x"}):
            assert (await client.post("/session", json=body)).status_code == 401
        for content in (b"", b"[]", b'{"token": 1}', b'{"token": "a", "more": 1}', b"\xff"):
            assert (await client.post("/session", content=content)).status_code == 400
        answer = await client.post("/operate", json={"action": "kill", "node": "worker-0"})
        assert answer.status_code == 401
    assert operate.requests == []


async def test_the_session_is_a_cookie_that_scripts_and_other_sites_do_not_get(tmp_path: Path) -> None:
    async with visited(tmp_path) as client:
        answer = await client.post("/session", json={"token": TOKEN})
        assert "HttpOnly; SameSite=Strict" in answer.headers["set-cookie"]
        for path in ("/", "/view/now", "/none"):
            headers = (await client.get(path)).headers
            policy = headers["content-security-policy"]
            assert "default-src 'none'" in policy
            assert "unsafe" not in policy
            assert "frame-ancestors 'none'" in policy
            assert headers["cache-control"] == "no-store"
            assert headers["x-content-type-options"] == "nosniff"
            assert "server" not in headers


async def test_an_operation_needs_its_proof_and_comes_from_the_page(tmp_path: Path) -> None:
    operate = Operated()
    kill = {"run": "run-1", "action": "kill", "node": "worker-0"}
    async with visited(tmp_path, operate) as client:
        offer = await login(client)
        for headers in ({}, {"X-Session-Proof": ""}, {"X-Session-Proof": "0" * 48}):
            assert (await client.post("/operate", json=kill, headers=headers)).status_code == 403
        proof = {"X-Session-Proof": offer["proof"]}
        for origin in ("http://evil.example", f"http://127.0.0.1:{client.port + 1}", "null", "http://[x"):
            assert (
                await client.post("/operate", json=kill, headers={**proof, "Origin": origin})
            ).status_code == 403
        for body in (
            {"run": "run-1", "action": "stop"},
            {"run": "run-1", "action": "logs", "node": "ps-0"},
            {"run": "run-1", "action": "freeze", "node": "a", "seconds": 1e9},
            {"run": "run-1", "action": "add", "role": "driver"},
            {"action": "kill", "node": "worker-0"},
            [],
        ):
            assert (await client.post("/operate", json=body, headers=proof)).status_code == 400
        assert operate.requests == []
        answer = await client.post(
            "/operate", json=kill, headers={**proof, "Origin": f"http://127.0.0.1:{client.port}"}
        )
        assert (answer.status_code, answer.json()) == (200, {"text": "done"})
        refused = await client.post("/operate", json={**kill, "node": "ps-0"}, headers=proof)
        assert (refused.status_code, refused.json()) == (
            409,
            {"error": "the run would end with ps-0; see …/notes.txt"},
        )
    assert [(each.run, each.action, each.node) for each in operate.requests] == [
        ("run-1", "kill", "worker-0"),
        ("run-1", "kill", "ps-0"),
    ]


async def test_a_file_of_nested_lists_has_an_error_in_words(tmp_path: Path) -> None:
    (tmp_path / "deep.jsonl").write_bytes(
        lines(1).replace(b'"config":{', b'"config":{"a":' + b"[" * 100_000, 1)
    )
    async with visited(tmp_path) as client:
        await login(client)
        answer = await client.get("/view/now", params={"run": "deep.jsonl"})
        assert (answer.status_code, "deep.jsonl cannot be read" in answer.text) == (422, True)


async def test_without_permission_there_are_no_operations(tmp_path: Path) -> None:
    async with visited(tmp_path) as client:
        proof = {"X-Session-Proof": (await login(client))["proof"]}
        answer = await client.post("/operate", json={"action": "kill", "node": "worker-0"}, headers=proof)
        assert (answer.status_code, "--allow-operations" in answer.text) == (403, True)


async def test_requests_that_name_another_host_are_refused(tmp_path: Path) -> None:
    async with visited(tmp_path) as client:
        await login(client)
        for host in ("evil.example", f"evil.example:{client.port}", "127.0.0.1.evil.example", ""):
            for path in ("/", "/view/now"):
                assert (await client.get(path, headers={"Host": host})).status_code == 421


PATHS = (
    "/../server.py",
    "/%2e%2e/server.py",
    "/files/page.js",
    "/page.js/..",
    "//etc/passwd",
    "/page.css%00",
    "/view/../session",
    "/view/take",
    "/view/_begin",
    "/view/__class__",
)
RUNS = ("../old.jsonl", "..%2fold.jsonl", "/etc/passwd", "%2e%2e", "old.jsonl%00", "OLD.jsonl", "old.json")


@pytest.mark.parametrize("path", [*PATHS, *(f"/view/curves?run={run}" for run in RUNS)])
async def test_tricks_with_paths_find_nothing(tmp_path: Path, path: str) -> None:
    async with visited(tmp_path) as client:
        await login(client)
        cookies = "; ".join(f"{name}={value}" for name, value in client.cookies.items())
        status, body = await raw(
            client.port, f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nCookie: {cookies}\r\n\r\n".encode()
        )
        assert status == 404, body
        assert b"root:" not in body


async def raw(port: int, data: bytes, most: int = 1 << 20) -> tuple[int, bytes]:
    """Send bytes; return status and rest of the answer; status 0 if the connection ended without one."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(data)
        answer = await reader.read(most)
    except ConnectionError:
        return 0, b""
    finally:
        writer.transport.abort()
    return (int(answer[9:12]), answer[12:]) if answer.startswith(b"HTTP/1.1 ") else (0, answer)


async def test_ten_megabytes_are_refused_after_the_first_kilobytes(tmp_path: Path) -> None:
    async with visited(tmp_path) as client:
        for head in ("Content-Length: 10000000", "Transfer-Encoding: chunked"):
            start = f"POST /session HTTP/1.1\r\nHost: 127.0.0.1\r\n{head}\r\n\r\n".encode()
            part = b"1000\r\n" + b"x" * 4096 + b"\r\n" if "chunked" in head else b"x" * 5000
            status, _ = await raw(client.port, start + part * 2)
            assert status == 413
        status, _ = await raw(client.port, b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nX: " + b"x" * 100_000)
        assert status in (0, 400, 431)
        status, _ = await raw(client.port, b"\x16\x03\x01\x02\x00" * 100 + b"\r\n\r\n")
        assert status in (0, 400)
        assert (await client.get("/")).status_code == 200


async def test_a_thousand_idle_connections_do_not_keep_a_visitor_out(tmp_path: Path) -> None:
    async with visited(tmp_path) as client:
        writers = []
        for _ in range(1000):
            _, writer = await asyncio.open_connection("127.0.0.1", client.port)
            writers.append(writer)
        await login(client)
        assert (await client.get("/view/now")).status_code == 200
        for writer in writers:
            writer.transport.abort()


async def test_connections_that_send_no_whole_request_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "HEAD_S", 0.1)
    async with visited(tmp_path) as client, asyncio.timeout(20):
        for begun in (
            b"",
            b"GET / HT",
            b"POST /session HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 9\r\n\r\n{",
        ):
            status, rest = await raw(client.port, begun)
            assert (status, rest) == (0, b"")


async def test_slow_readers_keep_neither_the_server_nor_its_end(tmp_path: Path) -> None:
    assert MOST_CLIENTS < 100
    async with visited(tmp_path) as client:
        cookie = f"adam-{client.port}"
        await login(client)
        mine = f"{cookie}={client.cookies[cookie]}"
        ask = f"GET /view/curves HTTP/1.1\r\nHost: 127.0.0.1\r\nCookie: {mine}\r\n\r\n".encode()
        writers = []
        for _ in range(2 * MOST_CLIENTS):
            _, writer = await asyncio.open_connection("127.0.0.1", client.port)
            writer.write(ask)
            writers.append(writer)
        assert (await client.get("/view/now")).status_code == 200
    for writer in writers:
        writer.transport.abort()


async def test_many_visitors_get_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folds = 0
    real = State.part

    def counted(self: State, part: Part) -> bytes:
        nonlocal folds
        folds += 1
        return real(self, part)

    monkeypatch.setattr(State, "part", counted)
    monkeypatch.setattr(server, "SAME_S", 60.0)
    async with visited(tmp_path) as client:
        await login(client)
        found = {(await client.get("/view/curves")).content for _ in range(20)}
        assert (len(found), folds) == (1, 1)
        assert json.loads(found.pop())["title"] == "digits on digits"


async def test_an_error_of_the_fold_ends_the_news_of_the_page_and_not_the_run(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream, state = EventStream(), State()
    feed(stream, state)
    assert stream.shows_images
    stream.publish(beginning())
    monkeypatch.setattr(state, "take", lambda event: 1 / 0)
    for _ in range(2):
        stream.publish(Noted(text="more"))
    assert caplog.text.count("the dashboard shows no further events") == 1
    assert state.run == "run-1"
