"""Links in shared memory of a simulated host: the suite of all links, reorderings of memory, and its lack."""

import asyncio
import hashlib

import numpy as np
import pytest

from tests.simulation import shared
from tests.simulation.scenario import simulate
from tests.simulation.shared import UNIX_SOCKETS, SimulatedSide
from tests.simulation.wire import Conditions
from tests.transport.conformance import CHECKS
from tests.transport.testing import link_pair, open_rules
from transport import LinkBroken, LinkConfig, Message, Region, TcpNetwork
from transport.regions import region_of
from transport.shared import SharedLink
from transport.stream import StreamLink

SEEDS = (0, 2)


@pytest.fixture(autouse=True)
def plenty(monkeypatch):
    """Hosts with memory, descriptors and Unix sockets for every dial."""
    for name in ("NO_MEMORY", "NO_DESCRIPTOR", "REFUSED"):
        monkeypatch.setattr(shared, name, 0.0)


def network(link="shared"):
    return TcpNetwork(
        token=b"a token of tests",
        entropy=lambda count: hashlib.shake_128(b"test").digest(count),
        rules=open_rules(),
        config=LinkConfig(link=link, place_bytes=64, lend_bytes=64, shared_bytes=4 << 20),
        unix=UNIX_SOCKETS,
    )


def within_a_host(check, *, seed=0, link="shared", together="all"):
    """Run a check of the two ends of a link."""

    async def main(world):
        world.network.together = together
        async with link_pair(network(link), address="tcp://127.0.0.1:700") as (near, far):
            await check(near, far)

    rough = Conditions(jitter_s=0.02, ragged=True)
    return simulate(main, seed=seed, shuffled=seed > 0, conditions=rough if seed > 1 else None)


def sides_of(world):
    ours, theirs = SimulatedSide(world.network), SimulatedSide(world.network)
    ours.peer, theirs.peer = theirs, ours
    return ours, theirs


async def answers(near, far, values):
    """Call with some values; return those of the answer, which are the same."""
    far.serve(lambda request: request.reply(Message(type="answer", tensors=request.message.tensors)))
    answer = await near.call(Message(type="ask", tensors=(values,)), timeout_s=5.0)
    return answer.tensors[0]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_a_simulated_link_in_shared_memory_keeps_its_promise(check, seed):
    within_a_host(check, seed=seed)


def test_a_run_repeats_its_steps_and_the_bytes_in_memory():
    async def talk(near, far):
        assert type(near) is type(far) is SharedLink
        for number in range(20):
            values = np.full(1000, number, np.float32)
            assert (await answers(near, far, values) == values).all()

    first, again = within_a_host(talk, seed=2), within_a_host(talk, seed=2)
    assert first.replay_hash == again.replay_hash


def test_a_read_that_no_frame_orders_finds_old_bytes():
    async def main(world):
        ours, theirs = sides_of(world)
        descriptor, memory = ours.allocate(1 << 14)
        memory[:4] = b"1234"
        ours.send(b"packet", descriptor)
        found = theirs.map(theirs.receive(100)[1][0], 1 << 14, is_common=False)
        arrived = ours.departs()
        memory[:4] = b"5678"
        assert bytes(found[:4]) == bytes(4)
        arrived()
        assert bytes(found[:4]) in (b"1234", b"5678")

    simulate(main, seed=1)


def test_later_writes_become_visible_in_any_order():
    seen = set()

    async def main(world):
        ours, theirs = sides_of(world)
        descriptor, memory = ours.allocate(256)
        ours.send(b"packet", descriptor)
        found = theirs.map(theirs.receive(100)[1][0], 256, is_common=False)
        arrived = ours.departs()
        memory[:] = b"x" * 256
        arrived()
        seen.add(tuple(found[at] == ord("x") for at in range(0, 256, 64)))

    for seed in range(60):
        simulate(main, seed=seed)
    assert {(False,) * 4, (True,) * 4, (False, False, True, True)} <= seen


@pytest.mark.parametrize("lack", ["NO_MEMORY", "NO_DESCRIPTOR", "REFUSED"])
def test_a_lack_of_memory_or_sockets_takes_the_stream_and_one_of_descriptors_ends_the_link(lack, monkeypatch):
    monkeypatch.setattr(shared, lack, 1.0)

    async def talk(near, far):
        values = np.arange(1000.0)
        assert type(near) is (StreamLink if lack == "REFUSED" else SharedLink)
        if lack == "NO_DESCRIPTOR":
            with pytest.raises(LinkBroken, match=r"no descriptor is free|hung up"):
                await answers(near, far, values)
        else:
            assert (await answers(near, far, values) == values).all()

    within_a_host(talk, link="auto")


def test_machines_of_their_own_have_links_over_tcp():
    async def talk(near, far):
        assert type(near) is type(far) is StreamLink

    within_a_host(talk, link="auto", together="none")


@pytest.mark.parametrize("seed", range(4))
def test_held_requests_and_answers_keep_their_values(seed):
    async def talk(near, far):
        dice = asyncio.get_running_loop().dice("talk")

        async def answer(request):
            (values,) = request.message.tensors
            await asyncio.sleep(dice.between(0.0, 0.5))
            assert (values == int(request.message.meta)).all()
            request.reply(Message(type="answer", tensors=(values,)))

        async def ask(number):
            await asyncio.sleep(dice.between(0.0, 3.0))
            values = np.full(100 + dice.below(2000), number, np.float32)
            asked = Message(type="ask", meta=str(number).encode(), tensors=(values,))
            (found,) = (await near.call(asked, timeout_s=60.0)).tensors
            await asyncio.sleep(dice.between(0.0, 0.5))
            assert (found == number).all()

        async with asyncio.TaskGroup() as group:
            far.serve(lambda request: group.create_task(answer(request), name="answer"))
            for number in range(80):
                group.create_task(ask(number), name=f"ask-{number}")

    within_a_host(talk, seed=seed)


def test_a_region_of_the_program_is_read_where_it_was_written():
    async def talk(near, far):
        values = Region.allocate(4000).view(np.float32)
        for number in range(1, 6):
            values[:] = number
            assert (await answers(near, far, values) == number).all()

    within_a_host(talk)


@pytest.mark.parametrize("seed", range(6))
def test_a_published_range_is_not_written_while_a_reader_has_it(seed):
    async def talk(near, far):
        dice = asyncio.get_running_loop().dice("talk")
        memory = far.publish(8000).view(np.float32)
        region, _ = region_of(memory.data)
        pending = []

        def answer(request):
            if not region.is_lent(0, 8000):
                memory[:] = int(request.message.meta)
            request.reply(Message(type="answer", tensors=(memory[16:],)), lent=True)

        async def ask(number):
            await asyncio.sleep(dice.between(0.0, 3.0))
            (found,) = (await near.call(Message(type="ask", meta=b"%d" % number), timeout_s=60.0)).tensors
            first = found[0]
            assert (found == first).all()
            await asyncio.sleep(dice.between(0.0, 0.2))
            assert (found == first).all()
            pending.append(first)

        async with asyncio.TaskGroup() as group:
            far.serve(answer)
            for number in range(1, 40):
                group.create_task(ask(number), name=f"ask-{number}")
        assert len(set(pending)) > 2

    within_a_host(talk, seed=seed)
