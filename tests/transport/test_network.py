"""Listeners open and close, dials are repeated, and both kinds of network behave alike."""

import asyncio
import hashlib
from collections.abc import Callable

import numpy as np
import pytest

from tests.transport.testing import FAR, NEAR, link_pair, open_rules
from transport import (
    DialFailed,
    HandshakeRejected,
    Link,
    LinkClosed,
    LinkConfig,
    LocalNetwork,
    Message,
    Network,
    Request,
    RetrySchedule,
    RoleTable,
    TcpNetwork,
)

ONCE = RetrySchedule(attempts=1)


def tcp(rules: RoleTable | None = None) -> Network:
    entropy = lambda count: hashlib.shake_128(b"test").digest(count)  # noqa: E731
    return TcpNetwork(token=None, entropy=entropy, rules=rules or open_rules())


def local(rules: RoleTable | None = None) -> Network:
    return LocalNetwork(rules=rules or open_rules())


both = pytest.mark.parametrize("make", [tcp, local], ids=["tcp", "local"])
Make = Callable[..., Network]


def anywhere(network: Network) -> str:
    return "tcp://127.0.0.1:0" if isinstance(network, TcpNetwork) else "local://"


@both
async def test_a_dial_without_a_listener_fails(make: Make) -> None:
    network = make()
    async with network.listen(anywhere(network), FAR, lambda link: link.wait_closed()) as listener:
        address = listener.address
    for retry in (ONCE, RetrySchedule(attempts=3, first_s=0.001)):
        with pytest.raises(DialFailed, match="cannot reach") as caught:
            await network.dial(address, NEAR, retry=retry)
        assert caught.value.attempts == retry.attempts
    with pytest.raises(DialFailed):
        await network.dial(address, NEAR, timeout_s=0.02)


@both
async def test_a_dial_waits_for_a_listener_that_is_late(make: Make) -> None:
    network = make()
    async with network.listen(anywhere(network), FAR, lambda link: link.wait_closed()) as listener:
        address = listener.address
    async with asyncio.TaskGroup() as tg:
        dialling = tg.create_task(
            network.dial(address, NEAR, retry=RetrySchedule(first_s=0.001)), name="dial"
        )
        await asyncio.sleep(0)
        async with network.listen(address, FAR, lambda link: link.wait_closed()):
            link = await dialling
            await link.aclose()


@pytest.mark.parametrize(
    ("advertised", "expected"),
    [
        ("tcp://localhost:0", "tcp://localhost:{port}"),
        ("tcp://gateway:7100", "tcp://gateway:7100"),
        ("tcp://[::1]:0", "tcp://[::1]:{port}"),
    ],
)
async def test_a_listener_on_every_interface_names_the_advertised_address(
    advertised: str, expected: str
) -> None:
    entropy = lambda count: hashlib.shake_128(b"test").digest(count)  # noqa: E731
    token = b"a token of many bytes"
    network = TcpNetwork(token=token, entropy=entropy, rules=open_rules(), advertise=advertised)
    plain = TcpNetwork(token=token, entropy=entropy, rules=open_rules())
    async with plain.listen("tcp://127.0.0.1:0", FAR, lambda link: link.wait_closed()) as free:
        port = free.address.rpartition(":")[2]
    async with network.listen(f"tcp://0.0.0.0:{port}", FAR, lambda link: link.wait_closed()) as listener:
        assert listener.address == expected.format(port=port)
        async with plain.connect(f"tcp://127.0.0.1:{port}", NEAR) as link:
            assert link.peer == FAR


@both
async def test_an_unexpected_role_is_refused(make: Make) -> None:
    network = make()
    async with network.listen(anywhere(network), FAR, lambda link: link.wait_closed()) as listener:
        with pytest.raises(HandshakeRejected, match="dialled a controller, but a far answered"):
            await network.dial(listener.address, NEAR, peer_role="controller")


@both
async def test_roles_that_exchange_no_messages_are_refused(make: Make) -> None:
    network = make(RoleTable({"push": {("worker", "far")}}))
    async with network.listen(anywhere(network), FAR, lambda link: link.wait_closed()) as listener:
        with pytest.raises(HandshakeRejected, match="exchange no messages"):
            await network.dial(listener.address, NEAR)


@both
async def test_leaving_the_block_closes_every_link(make: Make) -> None:
    network = make()
    async with network.listen(anywhere(network), FAR, lambda link: link.wait_closed()) as listener:
        links = [await network.dial(listener.address, NEAR) for _ in range(3)]
    for link in links:
        await link.wait_closed()
        with pytest.raises(LinkClosed):
            await link.receive()
        await link.aclose()


@both
async def test_a_link_closes_when_its_on_link_returns(make: Make) -> None:
    network = make()

    async def on_link(link: Link) -> None:
        await link.receive()

    async with (
        network.listen(anywhere(network), FAR, on_link) as listener,
        network.connect(listener.address, NEAR) as link,
    ):
        await link.send(Message(type="note"))
        await link.wait_closed()


@both
async def test_the_end_of_a_link_is_no_failure_of_the_listener(make: Make) -> None:
    network = make()
    received = asyncio.Queue[Message]()

    async def on_link(link: Link) -> None:
        while True:
            received.put_nowait(await link.receive())

    async with network.listen(anywhere(network), FAR, on_link) as listener:
        for _ in range(2):
            async with network.connect(listener.address, NEAR) as link:
                await link.send(Message(type="note"))
                await received.get()
        link = await network.dial(listener.address, NEAR)
        link.abort()


@both
async def test_an_error_in_on_link_ends_the_block_and_is_raised(make: Make) -> None:
    network = make()

    async def on_link(link: Link) -> None:
        raise KeyError("bug")

    async def run() -> None:
        async with network.listen(anywhere(network), FAR, on_link) as listener:
            async with network.connect(listener.address, NEAR) as link:
                await link.wait_closed()
            await asyncio.Event().wait()

    with pytest.raises(ExceptionGroup) as caught:
        await run()
    assert caught.value.subgroup(KeyError) is not None


@both
async def test_an_error_of_the_block_is_raised_alone(make: Make) -> None:
    network = make()
    with pytest.raises(KeyError, match="mine"):
        async with network.listen(anywhere(network), FAR, lambda link: link.wait_closed()):
            raise KeyError("mine")


@both
async def test_an_error_of_the_block_keeps_its_cause(make: Make) -> None:
    network = make()
    with pytest.raises(KeyError, match="mine") as caught:
        async with network.listen(anywhere(network), FAR, lambda link: link.wait_closed()):
            raise KeyError("mine") from ValueError("of the caller")
    assert str(caught.value.__cause__) == "of the caller"


@both
async def test_an_address_can_be_listened_on_once(make: Make) -> None:
    network = make()
    async with network.listen(anywhere(network), FAR, lambda link: link.wait_closed()) as listener:
        with pytest.raises(OSError, match="address"):
            async with network.listen(listener.address, FAR, lambda link: link.wait_closed()):
                pass


@both
async def test_a_coroutine_function_is_no_handler(make: Make) -> None:
    async def handler(request: Request) -> None:
        raise AssertionError("no link calls this")

    async with link_pair(make()) as (near, _):
        with pytest.raises(TypeError, match="is a coroutine function: let it start a task instead"):
            near.serve(handler)  # type: ignore[arg-type]


async def test_local_addresses_are_checked() -> None:
    with pytest.raises(DialFailed, match="local://name"):
        await local().dial("tcp://127.0.0.1:1", NEAR, retry=RetrySchedule(attempts=1))


async def test_local_delivery_passes_the_very_objects() -> None:
    async with link_pair(local()) as (near, far):
        message = Message(type="note", meta=b"a", tensors=(np.ones(3),))
        await near.send(message)
        assert await far.receive() is message
        assert near.statistics().by_type["note"].frame_bytes_out == 0
        assert near.statistics().by_type["note"].payload_bytes_out == 24


async def test_a_local_peer_that_never_reads_ends_the_link() -> None:
    network = LocalNetwork(rules=open_rules(), config=LinkConfig(stalled_after_s=0.02))
    async with link_pair(network) as (near, far):
        array = np.zeros(1 << 20, np.uint8)

        async def pour() -> None:
            while True:
                await near.send(Message(type="note", tensors=(array,)))

        with pytest.raises(ExceptionGroup) as caught:
            async with asyncio.TaskGroup() as tg:
                tg.create_task(pour(), name="pour")
        assert "took none of" in str(caught.value.exceptions[0])
        await far.wait_closed()


def test_a_short_token_is_refused() -> None:
    with pytest.raises(ValueError, match="16 random bytes"):
        TcpNetwork(token=b"short", entropy=bytes, rules=open_rules())


def test_retry_waits_grow_to_a_limit_and_end() -> None:
    schedule = RetrySchedule(first_s=1, factor=3, longest_s=5, attempts=5)
    assert list(schedule.waits()) == [1, 3, 5, 5]
    assert list(RetrySchedule(attempts=1).waits()) == []
    for wrong in ({"first_s": 0}, {"factor": 0.5}, {"attempts": 0}, {"longest_s": 0.001}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            RetrySchedule(**wrong)  # type: ignore[arg-type]


def test_roles_may_send_messages_with_a_row() -> None:
    rules = RoleTable({"push": {("worker", "ps")}, "stop": {("*", "ps")}})
    assert rules.sendable("worker", "ps") == {"push", "stop"}
    assert rules.sendable("ps", "worker") == set()
    assert rules.allows("stop", "data", "ps")
    assert rules.may_talk("ps", "worker")
    assert not rules.may_talk("data", "worker")
    with pytest.raises(ValueError, match="not \\(from role, to role\\)"):
        RoleTable({"push": {("worker", "")}})
