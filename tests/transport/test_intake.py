"""The budgets of a link and its process bound the memory held for a peer, and its time."""

import asyncio
import gc
import os
from collections.abc import Callable
from contextlib import AsyncExitStack, suppress
from weakref import ref

import numpy as np
import pytest
from msgspec.msgpack import decode, encode

from tests.transport.test_stream import authenticate, raw_peer
from tests.transport.testing import FAR, link_pair, open_rules
from transport import (
    Budget,
    BufferPool,
    Identity,
    Link,
    LinkBroken,
    LinkClosed,
    LinkConfig,
    LocalNetwork,
    Message,
    Network,
    RemoteError,
    RemoteProtocolError,
    Request,
    TcpNetwork,
    WouldBlock,
)
from transport.frames import CHUNK, PING, head
from transport.intake import META_COST, frame_cost
from transport.stream import StreamLink

MB = 1 << 20
ASK, NOTE, ANSWER = Message(type="ask"), Message(type="note"), Message(type="answer")
PATIENCE_S = 20.0

MakeNetwork = Callable[..., Network]


def tcp(budget: Budget | None = None, **config: float) -> TcpNetwork:
    return TcpNetwork(
        token=None,
        entropy=os.urandom,
        rules=open_rules(),
        config=LinkConfig(**config),  # type: ignore[arg-type]
        budget=budget,
    )


def local(budget: Budget | None = None, **config: float) -> LocalNetwork:
    return LocalNetwork(rules=open_rules(), config=LinkConfig(**config), budget=budget)  # type: ignore[arg-type]


either = pytest.mark.parametrize("make_network", [tcp, local], ids=["tcp", "local"])


async def turns(condition: Callable[[], object]) -> None:
    """Run the loop until a condition is true."""
    async with asyncio.timeout(PATIENCE_S):
        while not condition():  # noqa: ASYNC110 - bytes have no event
            await asyncio.sleep(0)


def fill(link: Link) -> None:
    """Send 5,000 messages, or fewer if the link takes no more."""
    with suppress(WouldBlock):
        for _ in range(5_000):
            link.send_nowait(Message(type="note", tensors=(np.zeros(1000, np.uint8),)))


@either
async def test_a_link_that_only_serves_ends_at_the_first_message(make_network: MakeNetwork) -> None:
    for early in (False, True):
        async with link_pair(make_network()) as (near, far):
            if early:
                near.send_nowait(NOTE)
                await turns(lambda: far._inbox)  # type: ignore[attr-defined]
            far.serve(lambda request: request.reply(ANSWER), receives=False)
            if not early:
                await near.call(ASK, timeout_s=PATIENCE_S)
                near.send_nowait(NOTE)
            await far.wait_closed()
            if not early:
                with pytest.raises(RemoteProtocolError, match="takes only requests"):
                    await far.receive()
            assert far.closed


async def test_a_link_that_ended_within_a_large_message_keeps_none_of_it() -> None:
    pool = BufferPool(retain_bytes=0)
    network = TcpNetwork(token=None, entropy=os.urandom, rules=open_rules(), pool=pool)
    gc.collect()
    gc.disable()
    try:
        async with link_pair(network) as (near, far):
            near.send_nowait(Message(type="note", tensors=(np.zeros(60 * MB, np.uint8),)))
            await turns(lambda: pool.statistics().outstanding)
            near._transport.write(head(CHUNK, 0, b"", 0))  # type: ignore[attr-defined]
            await far.wait_closed()
            await turns(lambda: not pool.statistics().outstanding)
            with pytest.raises(RemoteProtocolError, match="a chunk of 0 bytes"):
                await far.receive()
    finally:
        gc.enable()


@either
async def test_an_ended_link_keeps_no_receiver_alive(make_network: MakeNetwork) -> None:
    gc.collect()
    gc.disable()
    try:
        async with link_pair(make_network()) as (near, far):
            came = asyncio.Event()

            async def receive() -> ref[object]:
                message = await far.receive()
                arrived = ref(message.tensors[0])
                came.set()
                with suppress(LinkBroken, LinkClosed):
                    while True:
                        await far.receive()
                return arrived

            near.send_nowait(Message(type="note", tensors=(np.zeros(MB, np.uint8),)))
            receiving = asyncio.create_task(receive(), name="receiving")
            await came.wait()
            await near.aclose()
            arrived = await receiving
            del receiving
            await turns(lambda: arrived() is None)
            assert far.closed
    finally:
        gc.enable()


@either
async def test_a_link_whose_messages_are_not_received_ends(make_network: MakeNetwork) -> None:
    budget = Budget()
    async with link_pair(make_network(budget, inbox_messages=8, stalled_after_s=0.05)) as (near, far):
        fill(near)
        async with asyncio.timeout(PATIENCE_S):
            await turns(lambda: far.statistics().waits)
            assert "messages of near-1" in far.statistics().waits
            assert "waits: messages of near-1" in repr(far)
            await far.wait_closed()
        for _ in range(8):
            await far.receive()
        with pytest.raises(LinkBroken, match=r"nothing moved for .* messages of near-1"):
            while True:
                await far.receive()
    assert (budget.held_bytes, budget.links) == (0, 0)


async def test_the_end_of_a_peer_that_fills_the_inbox_ends_the_link() -> None:
    async with link_pair(tcp(inbox_messages=8, stalled_after_s=0.05)) as (near, far):
        fill(near)
        await turns(lambda: far.statistics().waits)
        near.abort()
        async with asyncio.timeout(PATIENCE_S):
            await far.wait_closed()


async def test_an_application_that_receives_slowly_keeps_its_link() -> None:
    async with link_pair(local(inbox_messages=8)) as (near, far):
        fill(near)
        await turns(lambda: far.statistics().waits)
        now = asyncio.get_running_loop().time()
        intake = far._intake  # type: ignore[attr-defined]
        for step in range(1, 20):
            await far.receive()
            fill(near)
            intake.tick(now + 9.0 * step)
        assert not far.closed
        intake.tick(now + 9.0 * 19 + 10.0)
        assert far.closed


@either
async def test_answers_are_begun_only_while_there_is_room_for_them(make_network: MakeNetwork) -> None:
    begun: list[Request] = []
    budget = Budget()
    async with link_pair(make_network(budget, link_budget_bytes=3 * MB)) as (near, far):
        far.serve(lambda request: request.charge(MB, lambda: begun.append(request)))
        calls = [near.call_nowait(ASK, timeout_s=PATIENCE_S) for _ in range(200)]
        await turns(lambda: far.statistics().waits)
        for _ in range(50):
            await asyncio.sleep(0)
        assert len(begun) == 3
        assert far.statistics().waits.startswith("answers of 3.1 MB are owed to near-1")
        assert 3 * MB <= budget.held_bytes < 4 * MB
        for _ in range(len(calls)):
            await turns(lambda: begun)
            assert len(begun) <= 3
            begun.pop(0).reply(ANSWER)
        await asyncio.gather(*calls)
        assert far.statistics().waits == ""
        assert far.statistics().held_bytes == 0
    assert (budget.held_bytes, budget.links) == (0, 0)


async def test_requests_that_were_read_behind_a_pause_wait_and_keep_their_order() -> None:
    seen: list[int] = []
    array = np.zeros(4 * MB, np.uint8)

    def answer(request: Request) -> None:
        seen.append(decode(request.message.meta))
        request.charge(
            array.nbytes,
            lambda: request.reply(Message(type="answer", meta=request.message.meta, tensors=(array,))),
        )

    async with link_pair(tcp(link_budget_bytes=MB)) as (near, far):
        assert isinstance(near, StreamLink)
        assert isinstance(far, StreamLink)
        far.serve(answer)
        near._transport.pause_reading()
        calls = [near.call_nowait(Message(type="ask", meta=encode(n)), timeout_s=50) for n in range(12)]
        await turns(lambda: far._backlog)
        assert len(seen) <= 6, "what the kernel takes is not held"
        before = len(seen)
        for _ in range(50):
            await asyncio.sleep(0)
        assert len(seen) == before
        near._transport.resume_reading()
        answers = [await call for call in calls]
        assert [decode(one.meta) for one in answers] == seen == list(range(12))


async def test_messages_behind_a_pause_are_received_after_the_peer_has_closed() -> None:
    async with link_pair(tcp(inbox_messages=2)) as (near, far):
        for number in range(9):
            near.send_nowait(Message(type="note", meta=encode(number)))

        async def receive() -> list[int]:
            return [decode((await far.receive()).meta) for _ in range(9)]

        received, _ = await asyncio.gather(receive(), near.aclose())
        assert received == list(range(9))


async def test_one_pong_is_owed_while_the_peer_does_not_read() -> None:
    links: list[Link] = []

    async def on_link(link: Link) -> None:
        links.append(link)
        await link.wait_closed()

    net = tcp()
    async with net.listen("tcp://127.0.0.1:0", FAR, on_link) as listener:
        async with raw_peer(listener.address) as (reader, writer):
            await authenticate(reader, writer, token=None)
            await turns(lambda: links)
            link = links[0]
            assert isinstance(link, StreamLink)
            writer.transport.pause_reading()  # type: ignore[attr-defined]
            with suppress(WouldBlock):
                while True:
                    link.send_nowait(Message(type="note", tensors=(np.zeros(MB, np.uint8),)))
                    await asyncio.sleep(0)
            unsent = link.statistics().unsent_bytes
            writer.write(head(PING, 0, b"", 0) * 2000)
            await turns(lambda: link._pong_owed)
            for _ in range(200):
                await asyncio.sleep(0)
            assert link.statistics().unsent_bytes <= unsent
            link.abort()


async def peers(net: Network, count: int, far_links: list[Link], stack: AsyncExitStack) -> list[Link]:
    """Dial a number of links to one listener."""

    async def on_link(link: Link) -> None:
        far_links.append(link)
        await link.wait_closed()

    address = "local://" if isinstance(net, LocalNetwork) else "tcp://127.0.0.1:0"
    listener = await stack.enter_async_context(net.listen(address, FAR, on_link))
    near = []
    for number in range(count):
        identity = Identity(role="near", node=f"near-{number}", incarnation=1)
        near.append(await stack.enter_async_context(net.connect(listener.address, identity)))
    await turns(lambda: len(far_links) == count)
    return near


@either
async def test_links_at_their_limits_leave_room_for_the_others(make_network: MakeNetwork) -> None:
    budget = Budget(64 * MB)
    far_links: list[Link] = []
    async with AsyncExitStack() as stack:
        near = await peers(make_network(budget, stalled_after_s=600), 5, far_links, stack)
        for far in far_links:
            greedy = far.peer.node != "near-0"
            held: list[Request] = []

            def answer(request: Request, greedy: bool = greedy, held: list[Request] = held) -> None:
                then = (lambda: held.append(request)) if greedy else (lambda: request.reply(ANSWER))
                request.charge(MB if greedy else MB // 4, then)

            far.serve(answer)
        for link in near[1:]:
            for _ in range(100):
                link.call_nowait(ASK, timeout_s=PATIENCE_S)
        await turns(lambda: sum(far.statistics().waits != "" for far in far_links) == 4)
        for _ in range(20):
            await near[0].call(ASK, timeout_s=PATIENCE_S)
        assert budget.held_bytes <= budget.limit_bytes
        assert any("links of this process hold" in far.statistics().waits for far in far_links)
        for link in near:
            link.abort()


async def test_large_messages_beyond_the_budget_come_one_after_the_other() -> None:
    budget = Budget(2 * MB)
    far_links: list[Link] = []
    most = 0
    async with AsyncExitStack() as stack:
        near = await peers(tcp(budget), 6, far_links, stack)

        def answer(request: Request) -> None:
            nonlocal most
            most = max(most, budget.held_bytes)
            request.reply(ANSWER)

        for far in far_links:
            far.serve(answer)
        array = np.zeros(4 * MB, np.uint8)
        calls = [link.call(Message(type="ask", tensors=(array,)), timeout_s=50) for link in near]
        await asyncio.gather(*calls)
        assert 4 * MB < most < 8 * MB, "two messages at a time at most, and one of them not whole"
        assert budget.held_bytes == 0


@either
async def test_an_answer_that_was_not_charged_is_refused_beyond_a_megabyte(make_network: MakeNetwork) -> None:
    async with link_pair(make_network()) as (near, far):
        for size, travels in ((MB, True), (MB + 1, False)):
            message = Message(type="answer", tensors=(np.zeros(size, np.uint8),))
            far.serve(lambda request, message=message: request.reply(message))  # type: ignore[misc]
            if travels:
                await near.call(ASK, timeout_s=PATIENCE_S)
            else:
                with pytest.raises(RemoteError, match="internal"):
                    await near.call(ASK, timeout_s=PATIENCE_S)


async def test_an_error_of_an_answer_fails_its_request() -> None:
    def fail(error: Exception) -> None:
        raise error

    async with link_pair(local()) as (near, far):
        for error, code in ((ValueError("no"), "internal"), (RemoteProtocolError("x", "no"), "malformed")):
            far.serve(lambda request, error=error: request.charge(1, lambda: fail(error)))  # type: ignore[misc]
            with pytest.raises(RemoteError, match=code):
                await near.call(ASK, timeout_s=PATIENCE_S)


async def test_a_link_that_ends_releases_half_a_message_at_once() -> None:
    net = tcp()

    async def end_half_way() -> "ref[Link]":
        async with link_pair(net) as (near, far):
            near.send_nowait(Message(type="note", tensors=(np.zeros(32 * MB, np.uint8),)))
            await turns(lambda: far.statistics().held_bytes > MB)
            near.abort()
            await far.wait_closed()
            await turns(lambda: net.pool.statistics().outstanding == 0)
            assert net.budget.held_bytes == 0
            return ref(far)

    gc.disable()
    try:
        gone = await end_half_way()
        await turns(lambda: gone() is None)
    finally:
        gc.enable()


async def test_a_link_that_ends_releases_the_bytes_of_its_requests() -> None:
    budget = Budget()
    async with link_pair(local(budget)) as (near, far):
        held: list[Request] = []
        far.serve(lambda request: request.charge(MB, lambda: held.append(request)))
        near.call_nowait(Message(type="ask", tensors=(np.zeros(MB, np.uint8),)), timeout_s=PATIENCE_S)
        await turns(lambda: held)
        assert budget.held_bytes == MB + frame_cost(MB, 0)
        far.abort()
        assert budget.held_bytes == 0
        held[0].reply(ANSWER)
        assert budget.held_bytes == 0


def refuse(request: Request) -> None:
    request.fail("malformed", "x" * 200)


def leave_open(request: Request) -> None:
    """Give no answer, so that the link refuses each request beyond ``max_requests``."""


@either
@pytest.mark.parametrize("handler", [refuse, leave_open], ids=["refused", "busy"])
async def test_refused_requests_of_a_peer_that_does_not_read_pause_reading(
    make_network: MakeNetwork, handler: Callable[[Request], None]
) -> None:
    limits = {"link_budget_bytes": MB // 4, "max_requests": 1, "inbox_messages": 8}
    async with link_pair(make_network(**limits, socket_buffer_bytes=64 << 10)) as (near, far):
        far.serve(handler)
        for _ in range(8):
            far.send_nowait(NOTE)
        await turns(lambda: near.statistics().waits)
        while not far.statistics().waits:
            with suppress(WouldBlock):
                for _ in range(100):
                    near.call_nowait(ASK, timeout_s=PATIENCE_S)
            await asyncio.sleep(0)
            assert far.statistics().unsent_bytes < MB
        near.abort()


@either
async def test_an_answer_charged_with_zero_bytes_counts_as_charged(make_network: MakeNetwork) -> None:
    answer = Message(type="answer", tensors=(np.zeros(2 * MB, np.uint8),))
    async with link_pair(make_network()) as (near, far):
        far.serve(lambda request: request.charge(0, lambda: request.reply(answer)))
        assert (await near.call(ASK, timeout_s=PATIENCE_S)).type == "answer"


@either
async def test_requests_that_fill_the_link_by_themselves_get_their_charged_answers(
    make_network: MakeNetwork,
) -> None:
    asked: list[Request] = []
    ask = Message(type="ask", tensors=(np.zeros(MB, np.uint8),))
    async with link_pair(make_network(link_budget_bytes=MB * 3 // 2)) as (near, far):
        far.serve(asked.append)
        for count in (1, 2):
            calls = [near.call_nowait(ask, timeout_s=PATIENCE_S) for _ in range(count)]
            await turns(lambda count=count: len(asked) == count)  # type: ignore[misc]
            for request in asked:
                request.charge(MB, lambda request=request: request.reply(ANSWER))  # type: ignore[misc]
            asked.clear()
            await asyncio.gather(*calls)


def test_a_byte_of_meta_counts_for_its_largest_expansion() -> None:
    assert META_COST == 72
    assert frame_cost(1000, 100) == 1000 + 7200 + 256
