"""The injected faults are those requested, over both kinds of network."""

import asyncio
import hashlib
import random
from collections.abc import Callable

import numpy as np
import pytest

from tests.transport.testing import Faults, FaultyNetwork, link_pair, open_rules
from transport import CallTimeout, LinkBroken, LinkClosed, LocalNetwork, Message, Network, Request, TcpNetwork


def tcp() -> Network:
    return TcpNetwork(token=None, entropy=lambda n: hashlib.shake_128(b"test").digest(n), rules=open_rules())


def local() -> Network:
    return LocalNetwork(rules=open_rules())


both = pytest.mark.parametrize("make", [tcp, local], ids=["tcp", "local"])
ASK = Message(type="ask", tensors=(np.ones(3),))


class Counter:
    def __init__(self) -> None:
        self.seen = 0

    def __call__(self, request: Request) -> None:
        self.seen += 1
        request.reply(Message(type="answer"))


@both
async def test_a_dropped_call_never_arrives_and_is_released(make: Callable[[], Network]) -> None:
    network = FaultyNetwork(make(), random.Random(1), Faults(drop=1.0))
    async with link_pair(network) as (near, far):
        counter, released = Counter(), []
        far.serve(counter)
        with pytest.raises(CallTimeout):
            await near.call(ASK, timeout_s=0.01, release=lambda: released.append(1))
        with pytest.raises(CallTimeout):
            await near.call_nowait(ASK, timeout_s=0.01)
        await near.send(Message(type="note"))
        near.send_nowait(Message(type="note"))
        assert (counter.seen, released) == (0, [1])


@both
async def test_a_lost_reply_belongs_to_a_call_that_was_carried_out(make: Callable[[], Network]) -> None:
    network = FaultyNetwork(make(), random.Random(1), Faults(drop_reply=1.0))
    async with link_pair(network) as (near, far):
        counter = Counter()
        far.serve(counter)
        with pytest.raises(CallTimeout):
            await near.call(ASK, timeout_s=0.05)
        with pytest.raises(CallTimeout):
            await near.call_nowait(ASK, timeout_s=0.05)
        # A slow machine may carry it out after the deadline.
        while counter.seen < 2:  # noqa: ASYNC110 - sockets have no event
            await asyncio.sleep(0)


@both
async def test_a_cut_breaks_the_link(make: Callable[[], Network]) -> None:
    network = FaultyNetwork(make(), random.Random(1), Faults(cut=1.0))
    async with link_pair(network) as (near, far):
        with pytest.raises(LinkClosed):
            await near.call(ASK, timeout_s=5)
        with pytest.raises(LinkBroken):
            await far.receive()


@both
async def test_a_delayed_message_arrives(make: Callable[[], Network]) -> None:
    network = FaultyNetwork(make(), random.Random(1), Faults(delay=1.0, delay_s=0.001))
    async with link_pair(network) as (near, far):
        far.serve(Counter())
        await near.call(ASK, timeout_s=5)
        await near.call_nowait(ASK, timeout_s=5)
        near.send_nowait(Message(type="note"))
        await near.send(Message(type="note"))
        await far.receive()
        await far.receive()


@both
async def test_cutting_all_ends_every_dialled_link(make: Callable[[], Network]) -> None:
    network = FaultyNetwork(make(), random.Random(1))
    async with link_pair(network) as (near, far):
        network.cut_all()
        assert near.closed
        await far.wait_closed()


async def test_faults_are_the_same_for_the_same_dice() -> None:
    async def outcomes(seed: int) -> list[bool]:
        network = FaultyNetwork(local(), random.Random(seed), Faults(drop=0.5))
        async with link_pair(network) as (near, far):
            far.serve(Counter())
            calls = [near.call_nowait(ASK, timeout_s=60) for _ in range(20)]
            network.faults = Faults()
            await near.call(ASK, timeout_s=60)  # answered after all the others that arrived
            answered = [call.done() for call in calls]
            for call in calls:
                call.cancel()
        return answered

    assert await outcomes(3) == await outcomes(3)
    assert len(set(await outcomes(3))) == 2


def test_invalid_probabilities_are_refused() -> None:
    for wrong in ({"drop": 0.6, "cut": 0.6}, {"drop": -0.1}):
        with pytest.raises(ValueError, match="chances"):
            Faults(**wrong)  # type: ignore[arg-type]
