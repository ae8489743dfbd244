"""A channel over real links: one link at a time, patience, pauses, and a name for errors."""

import asyncio
import math
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

import adam_async
from adam_async.runtime.channel import PAUSES, Channel, Endpoint, StackedTaskGroup, wait_set
from adam_async.runtime.traffic import Traffic
from tests.adam_async.runs import NETWORKS, address_of, local_network, until
from transport import DialFailed, HandshakeRejected, Identity, RetrySchedule, TransportError

NEAR = Identity(role="driver", node="driver-0", incarnation=1)
FAR = Identity(role="ps", node="ps-0", incarnation=2)
ONCE = RetrySchedule(attempts=1)


class Peer:
    """A listener that keeps its links open until the other side ends them."""

    def __init__(self):
        self.open = 0
        self.seen = 0

    async def on_link(self, link):
        self.open, self.seen = self.open + 1, self.seen + 1
        try:
            await link.receive()
        except TransportError:
            self.open -= 1
        finally:
            link.abort()


class Clock:
    """A clock that a test moves."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def channel_to(network, address, *, traffic=None, **options):
    return Channel(Endpoint(network, NEAR, traffic), peer="ps-0", address=address, **options)


@pytest.mark.parametrize("network", NETWORKS)
async def test_a_link_of_one_block_counts_in_the_traffic_until_its_end_also_by_an_error(network):
    links, peer, traffic = NETWORKS[network](), Peer(), Traffic("driver-0")
    async with links.listen(address_of(links), FAR, peer.on_link) as listener:
        with pytest.raises(ZeroDivisionError):
            async with Endpoint(links, NEAR, traffic).connected(listener.address, timeout_s=5.0) as link:
                assert traffic.links == [link]
                raise ZeroDivisionError
        assert (traffic.links, link.closed) == ([], True)
        async with Endpoint(links, NEAR).connected(listener.address, timeout_s=5.0) as link:
            assert not link.closed


@pytest.mark.parametrize("network", NETWORKS)
async def test_a_link_counts_in_the_traffic_until_it_is_dropped_and_the_next_dial_replaces_it(network):
    links, peer, traffic = NETWORKS[network](), Peer(), Traffic("driver-0")
    async with links.listen(address_of(links), FAR, peer.on_link) as listener:
        channel = channel_to(links, listener.address, traffic=traffic, peer_role="ps")
        first = await channel.dial(5.0)
        assert (channel.link, traffic.links) == (first, [first])
        second = await channel.dial(5.0)
        assert first.closed
        assert (channel.link, traffic.links) == (second, [second])
        channel.drop()
        channel.drop()
        assert second.closed
        assert (channel.link, traffic.links) == (None, [])
        await channel.dial(5.0)
        await channel.aclose()
        assert (channel.link, traffic.links) == (None, [])
        await until(lambda: peer.seen == 3 and not peer.open)


@pytest.mark.parametrize("network", NETWORKS)
async def test_a_peer_of_another_role_is_refused_and_leaves_no_link(network):
    links, traffic = NETWORKS[network](), Traffic("driver-0")
    async with links.listen(address_of(links), FAR, Peer().on_link) as listener:
        channel = channel_to(links, listener.address, traffic=traffic, peer_role="data")
        with pytest.raises(HandshakeRejected):
            await channel.dial(5.0)
        assert (channel.link, traffic.links) == (None, [])


async def test_a_failed_or_cancelled_dial_keeps_the_last_link():
    links, peer = local_network(), Peer()
    async with links.listen(address_of(links), FAR, peer.on_link) as listener:
        channel = channel_to(links, listener.address)
        link = await channel.dial(5.0)
        channel.address = "local://away"
        with pytest.raises(DialFailed):
            await channel.dial(5.0, retry=ONCE)
        async with asyncio.TaskGroup() as group:
            dialling = group.create_task(channel.dial(5.0), name="dialling")
            await asyncio.sleep(0)
            dialling.cancel()
        assert channel.link is link
        assert not link.closed
        channel.drop()


async def test_the_patience_that_is_left_is_the_deadline_of_a_dial():
    channel = channel_to(local_network(), "local://away", patience_s=0.01)
    channel.renew()
    with pytest.raises(DialFailed):
        await channel.dial()
    assert channel.left_s < 1e-3


def test_patience_runs_from_the_last_progress():
    clock = Clock()
    channel = channel_to(local_network(), "local://ps-0", patience_s=10.0, clock=clock)
    assert channel.left_s == math.inf
    channel.renew()
    clock.now += 4.0
    assert channel.left_s == 6.0
    channel.progressed()
    assert channel.left_s == 10.0


async def test_pauses_grow_and_begin_again_after_progress_alone(monkeypatch):
    slept = []

    async def sleep(pause_s):
        slept.append(pause_s)

    monkeypatch.setattr(asyncio, "sleep", sleep)
    channel = channel_to(local_network(), "local://ps-0", patience_s=10.0)
    for _ in range(2):
        await channel.pause()
    channel.renew()
    await channel.pause()
    channel.progressed()
    await channel.pause()
    first_s = PAUSES.first_s
    assert slept == [first_s, 2 * first_s, 4 * first_s, first_s]


async def test_a_schedule_that_has_ended_goes_on_with_its_longest_pause():
    schedule = RetrySchedule(first_s=0.0001, longest_s=0.0002, attempts=2)
    channel = channel_to(local_network(), "local://ps-0", pauses=schedule)
    for _ in range(3):
        await channel.pause()


async def test_an_event_ends_a_pause_early_and_a_cancelled_wait_loses_nothing():
    channel = channel_to(
        local_network(), "local://ps-0", pauses=RetrySchedule(first_s=1000.0, longest_s=1000.0)
    )
    wake = asyncio.Event()
    async with asyncio.TaskGroup() as group:
        cancelled = group.create_task(channel.pause(wake), name="cancelled")
        pausing = group.create_task(channel.pause(wake), name="pausing")
        await asyncio.sleep(0)
        cancelled.cancel()
        wake.set()
    assert not pausing.cancelled()
    await wait_set(asyncio.Event(), 0.0)


def test_a_channel_names_its_peer():
    channel = channel_to(local_network(), "local://ps-0")
    assert str(channel) == "ps-0 at local://ps-0"
    assert repr(channel) == "<Channel to ps-0 at local://ps-0 away>"


def _contexts(error: BaseException | None) -> list[BaseException]:
    """The error and its contexts; an error that is its own context appears twice."""
    found: list[BaseException] = []
    while error is not None:
        again = any(error is other for other in found)
        found.append(error)
        if again:
            break
        error = error.__context__
    return found


async def _forever() -> None:
    await asyncio.get_running_loop().create_future()


async def _wait_cancelled() -> None:
    """Wait, as a role's report does, and meet a cancellation."""
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().call_soon(task.cancel)
    await _forever()


class _Role:
    """A block over an exit stack, which holds a task group and waits at its end."""

    def __init__(self, group: asyncio.TaskGroup) -> None:
        self.group = group

    async def __aenter__(self) -> None:
        self.stack = AsyncExitStack()
        await self.stack.enter_async_context(self.group)
        self.stack.callback(self.group.create_task(_forever()).cancel)
        self.stack.push_async_callback(_wait_cancelled)

    async def __aexit__(self, *error: Any) -> bool | None:
        try:
            return await self.stack.__aexit__(*error)
        except asyncio.CancelledError as left:
            self.contexts = _contexts(left)
            raise


async def _contexts_of(group: asyncio.TaskGroup) -> list[BaseException]:
    """Cancel a block in a role with the group, and cancel it again as the role waits; return the contexts."""
    role = _Role(group)

    async def block() -> None:
        async with role:
            await _wait_cancelled()

    with pytest.raises(asyncio.CancelledError):
        await asyncio.get_running_loop().create_task(block())
    return role.contexts


async def test_a_second_cancellation_never_becomes_its_own_context() -> None:
    contexts = await _contexts_of(StackedTaskGroup())
    assert len(contexts) == len(set(map(id, contexts)))


async def test_the_group_of_asyncio_makes_a_second_cancellation_its_own_context() -> None:
    """The reason for this class. If the test fails, then Python is repaired, and the class can go."""
    first, second = await _contexts_of(asyncio.TaskGroup())
    assert first is second


async def test_an_error_of_a_task_still_ends_the_block() -> None:
    async def fail() -> None:
        raise ValueError("of the task")

    with pytest.raises(ExceptionGroup) as group:
        async with AsyncExitStack() as stack:
            tasks = await stack.enter_async_context(StackedTaskGroup())
            tasks.create_task(fail())
            await asyncio.get_running_loop().create_future()
    assert [str(error) for error in group.value.exceptions] == ["of the task"]


async def test_an_error_of_the_block_is_wrapped_as_asyncio_does() -> None:
    with pytest.raises(ExceptionGroup) as group:
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(StackedTaskGroup())
            raise ValueError("of the block")
    assert [str(error) for error in group.value.exceptions] == ["of the block"]


async def test_a_cancelled_block_ends_its_tasks_and_stays_cancelled() -> None:
    ended = asyncio.Event()

    async def work() -> None:
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            ended.set()

    async def block() -> None:
        async with AsyncExitStack() as stack:
            group = await stack.enter_async_context(StackedTaskGroup())
            group.create_task(work())
            await asyncio.sleep(0)
            await _wait_cancelled()

    task = asyncio.get_running_loop().create_task(block())
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended.is_set()
    assert task.cancelled()


def test_each_exit_stack_of_the_product_holds_this_group() -> None:
    sources = Path(adam_async.__file__).parent.rglob("*.py")
    assert [path.name for path in sources if "context(asyncio.TaskGroup())" in path.read_text()] == []
