"""A slow network delays links between the named nodes, and is a normal network otherwise."""

import asyncio
import gc
import hashlib
import random
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import numpy as np
import pytest
from msgspec.msgpack import decode, encode

from tests.transport.conformance import CHECKS, Check
from tests.transport.testing import FaultyNetwork, check_link, link_pair, open_rules
from transport import Link, LinkBroken, LinkClosed, LocalNetwork, Message, Network, TcpNetwork
from transport.slow import SlowNetwork

PATIENCE_S = 30.0


def tcp() -> Network:
    return TcpNetwork(token=None, entropy=lambda n: hashlib.shake_128(b"test").digest(n), rules=open_rules())


def local() -> Network:
    return LocalNetwork(rules=open_rules())


both = pytest.mark.parametrize("make", [tcp, local], ids=["tcp", "local"])
Make = Callable[[], Network]

PAIR = ("near-1", "far-1")
LONG_S = 3600.0
"""A delay that no test sees the end of."""


def note(number: int = 0, size: int = 0) -> Message:
    return Message(type="note", meta=encode(number), tensors=(np.full(size, number % 128, np.int8),))


@asynccontextmanager
async def slow_pair(make: Make, **options: Any) -> AsyncIterator[tuple[Link, Link]]:
    """Both ends of a link over a slow network."""
    inner = make()
    address = "local://" if isinstance(inner, LocalNetwork) else "tcp://127.0.0.1:0"
    options = {"delay_s": 0.002, "dice": random.Random(7), "between": PAIR, **options}
    async with SlowNetwork(inner, **options) as network, link_pair(network, address=address) as pair:
        yield pair


CONDITIONS = {"delay": {"delay_s": 0.0005}, "jitter": {"delay_s": 0.0002, "jitter_s": 0.0004}}


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("conditions", ["jitter", pytest.param("delay", marks=pytest.mark.thorough)])
@both
async def test_a_slow_link_keeps_every_promise(make: Make, conditions: str, check: Check) -> None:
    async with slow_pair(make, **CONDITIONS[conditions]) as (near, far):
        await check(near, far)


@pytest.mark.slow
@both
async def test_check_link_runs_all_checks_on_slow_links(make: Make) -> None:
    await check_link(lambda: slow_pair(make, delay_s=0.005, jitter_s=0.002))


@both
async def test_every_kind_of_message_is_late_in_both_directions(make: Make) -> None:
    async with slow_pair(make, delay_s=0.004) as (near, far):
        for one, other in ((near, far), (far, near)):
            begin = time.monotonic()
            one.send_nowait(note())
            await other.receive()
            assert time.monotonic() - begin >= 0.004

            other.serve(lambda request: request.reply(Message(type="answer")))
            begin = time.monotonic()
            await one.call(Message(type="ask"), timeout_s=PATIENCE_S)
            assert time.monotonic() - begin >= 0.008

            other.serve(lambda request: request.fail("odd", "cannot"))
            begin = time.monotonic()
            with pytest.raises(Exception, match="odd: cannot"):
                await one.call_nowait(Message(type="ask"), timeout_s=PATIENCE_S)
            assert time.monotonic() - begin >= 0.008


@both
async def test_many_messages_are_under_way_at_once(make: Make) -> None:
    delay_s = 0.05
    async with slow_pair(make, delay_s=delay_s) as (near, far):
        begin = time.monotonic()
        for number in range(40):
            near.send_nowait(note(number, 100_000))
            await asyncio.sleep(0)
        seen = [decode((await far.receive()).meta) for _ in range(40)]
        took = time.monotonic() - begin

    assert seen == list(range(40))
    assert delay_s <= took < 40 * delay_s / 2


@both
async def test_the_loop_does_not_wait_for_messages_under_way(make: Make) -> None:
    async with slow_pair(make, delay_s=LONG_S) as (near, far):
        begin = time.monotonic()
        near.send_nowait(note())
        await near.send(note())
        for _ in range(10):
            await asyncio.sleep(0)
        assert time.monotonic() - begin < LONG_S / 100
        near.abort()
        far.abort()


@both
async def test_messages_of_one_iteration_arrive_in_one(make: Make) -> None:
    async with slow_pair(make, jitter_s=0.005) as (near, far):
        for _ in range(5):
            for number in range(10):
                near.send_nowait(note(number))
            await far.receive()
            turn: list[int] = []
            asyncio.get_running_loop().call_soon(turn.append, 1)  # after this turn
            for _ in range(9):
                await far.receive()  # waits for no iteration: all of them have arrived
            assert turn == []


@both
async def test_a_path_stops_its_senders_before_much_is_queued(make: Make) -> None:
    async with slow_pair(make, delay_s=LONG_S) as (near, far):
        sent = 0
        with pytest.raises(Exception, match="bytes wait for"):
            while sent < 1000:
                near.send_nowait(note(sent, 1 << 20))
                sent += 1
        assert near.statistics().unsent_bytes >= 4 << 20
        assert sent <= 80
        near.abort()
        far.abort()


@both
async def test_closing_waits_for_messages_under_way(make: Make) -> None:
    async with slow_pair(make, delay_s=0.02) as (near, far):
        begin = time.monotonic()
        near.send_nowait(note(5, 1 << 20))
        await near.aclose()
        assert time.monotonic() - begin >= 0.02
        assert decode((await far.receive()).meta) == 5
        with pytest.raises(LinkClosed):
            await far.receive()


@both
async def test_a_close_arrives_after_all_earlier_messages(make: Make) -> None:
    async with slow_pair(make, delay_s=0.005) as (near, far), asyncio.TaskGroup() as group:
        near.send_nowait(note(1))
        closing = group.create_task(near.aclose(), name="close")
        assert decode((await far.receive()).meta) == 1
        with pytest.raises(LinkClosed):
            await far.receive()
        await closing


async def test_closing_a_local_link_does_not_wait_for_ever() -> None:
    async with slow_pair(local, delay_s=LONG_S) as (near, far), asyncio.TaskGroup() as group:
        near.send_nowait(note(1))
        closing = group.create_task(near.aclose(), name="close")
        await asyncio.sleep(0)
        closing.cancel()
        # A cancelled close takes effect at once: the other side sees it now.
        assert decode((await far.receive()).meta) == 1
        with pytest.raises(LinkClosed):
            await far.receive()


@both
async def test_an_abort_drops_and_releases_messages_under_way(make: Make) -> None:
    async with slow_pair(make, delay_s=LONG_S) as (near, far):
        released = asyncio.Event()
        array = np.ones(1 << 20, np.float32)
        near.send_nowait(Message(type="note", tensors=(array,)), released.set)
        await asyncio.sleep(0)
        near.abort()
        gc.collect()
        await released.wait()
        with pytest.raises(LinkBroken):
            await far.receive()


@both
async def test_a_release_fires_after_delivery(make: Make) -> None:
    async with slow_pair(make) as (near, far):
        released = asyncio.Event()
        near.send_nowait(Message(type="note", tensors=(np.ones(1 << 16),)), released.set)
        await asyncio.sleep(0)
        assert not released.is_set()
        received = await far.receive()
        assert (received.tensors[0] == 1).all()
        del received
        await released.wait()


@both
async def test_links_between_other_nodes_are_left_alone(make: Make) -> None:
    async with slow_pair(make, delay_s=LONG_S, between=("near-1", "another")) as (near, far):
        near.send_nowait(note(3))
        assert decode((await far.receive()).meta) == 3


@both
async def test_leaving_the_block_delivers_delayed_messages(make: Make) -> None:
    inner = make()
    address = "local://" if isinstance(inner, LocalNetwork) else "tcp://127.0.0.1:0"
    async with AsyncExitStack() as stack:
        network = SlowNetwork(inner, delay_s=LONG_S, dice=random.Random(7), between=PAIR)
        await network.__aenter__()
        near, far = await stack.enter_async_context(link_pair(network, address=address))
        near.send_nowait(note(1))
        await asyncio.sleep(0)
        near.send_nowait(note(2))
        await asyncio.sleep(0)
        await network.__aexit__(None, None, None)
        near.send_nowait(note(3))  # and from then on no message is delayed
        assert [decode((await far.receive()).meta) for _ in range(3)] == [1, 2, 3]


@both
async def test_links_are_made_inside_the_block(make: Make) -> None:
    network = SlowNetwork(make(), delay_s=0.1, dice=random.Random(7), between=PAIR)
    address = "local://" if isinstance(network.inner, LocalNetwork) else "tcp://127.0.0.1:0"
    with pytest.raises((RuntimeError, ExceptionGroup)) as raised:
        async with link_pair(network, address=address):
            pass
    errors = raised.value.exceptions if isinstance(raised.value, ExceptionGroup) else (raised.value,)
    assert all("inside its `async with` block" in str(error) for error in errors)


async def test_a_link_of_another_kind_is_refused() -> None:
    faulty = FaultyNetwork(local(), random.Random(1))
    async with SlowNetwork(faulty, delay_s=0.1, dice=random.Random(7), between=PAIR) as network:
        with pytest.raises(TypeError, match="neither a TCP nor a local link: wrap a network that makes"):
            async with link_pair(network, address="local://"):
                pass


@both
async def test_slow_networks_between_different_nodes_stand_on_one_another(make: Make) -> None:
    inner = make()
    address = "local://" if isinstance(inner, LocalNetwork) else "tcp://127.0.0.1:0"
    dice = random.Random(7)
    async with (
        SlowNetwork(inner, delay_s=0.003, dice=dice, between=PAIR) as first,
        SlowNetwork(first, delay_s=LONG_S, dice=dice, between=("a", "b")) as network,
        link_pair(network, address=address) as (near, far),
    ):
        begin = time.monotonic()
        near.send_nowait(note())
        await far.receive()
        assert time.monotonic() - begin >= 0.003
        assert "SlowNetwork" in repr(network)
