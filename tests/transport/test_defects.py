"""An error in a callback of a link closes that link with a named reason and is reported."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from tests.transport.test_conformance import local, tcp
from tests.transport.testing import FAR, NEAR, link_pair
from transport import Link, LinkBroken, Message, Network, RetrySchedule, TransportError
from transport.greeter import Greeter
from transport.stream import StreamLink


def fail(*_args: object) -> Any:
    raise LookupError("no such thing")


@pytest.fixture
def reports() -> list[dict[str, Any]]:
    return []


@pytest.fixture(autouse=True)
async def listen_to_the_loop(reports: list[dict[str, Any]]) -> None:
    asyncio.get_running_loop().set_exception_handler(lambda _, context: reports.append(context))


async def ask(near: Link, far: Link) -> None:
    far.serve(lambda request: request.reply(Message(type="answer")))
    await near.call(Message(type="ask"), timeout_s=50)


def delivery(near: Link, monkeypatch: pytest.MonkeyPatch) -> None:
    near.observe(lambda was_sent, *_: None if was_sent else fail())


def timer(near: Link, monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(near, Link)
    monkeypatch.setattr(type(near), "_tick", fail)
    near._arm(near._loop.time())


def writing(near: Link, monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(near, StreamLink)
    monkeypatch.setattr(StreamLink, "_pump", fail)
    near._loop.call_soon(near.resume_writing)


@pytest.mark.parametrize(
    ("make_network", "breaking"),
    [(tcp, delivery), (local, delivery), (tcp, timer), (local, timer), (tcp, writing)],
    ids=lambda each: each.__name__,
)
async def test_a_callback_that_raises_closes_its_link_and_is_reported(
    make_network: Callable[[], Network],
    breaking: Callable[[Link, pytest.MonkeyPatch], None],
    monkeypatch: pytest.MonkeyPatch,
    reports: list[dict[str, Any]],
) -> None:
    async with asyncio.timeout(60), link_pair(make_network()) as (near, far):
        breaking(near, monkeypatch)
        with pytest.raises(TransportError):
            await ask(near, far)
            await near.receive()
        with pytest.raises(
            LinkBroken, match=r"closed by a defect of near near-1.*LookupError: no such thing"
        ):
            await near.receive()
        await far.wait_closed()
        monkeypatch.undo()
    (report,) = reports
    assert isinstance(report["exception"], LookupError)
    assert report["protocol"] is near


async def test_a_handshake_that_raises_disconnects_its_peer_and_is_reported(
    monkeypatch: pytest.MonkeyPatch, reports: list[dict[str, Any]]
) -> None:
    network = tcp()

    async def on_link(link: Link) -> None:
        await link.wait_closed()

    async with asyncio.timeout(60), network.listen("tcp://127.0.0.1:0", FAR, on_link) as listener:
        monkeypatch.setattr("transport.handshake.ServerHandshake.receive", fail)
        with pytest.raises(TransportError):
            await network.dial(listener.address, NEAR, timeout_s=50, retry=RetrySchedule(attempts=1))
    (report,) = reports
    assert isinstance(report["protocol"], Greeter)


async def test_an_answer_callback_that_raises_is_reported_and_the_link_stays_open(
    reports: list[dict[str, Any]],
) -> None:
    async with link_pair(tcp()) as (near, far):
        far.serve(lambda request: request.reply(Message(type="answer")))
        near.ask(Message(type="ask"), fail, timeout_s=50)
        await near.call(Message(type="ask"), timeout_s=50)
        assert not near.closed
    (report,) = reports
    assert isinstance(report["exception"], LookupError)
