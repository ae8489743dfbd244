"""Finding the leader among machines that are silent, refuse, or say that they do not lead."""

import asyncio
import itertools
import logging

import msgspec
import pytest

from adam_async.controller.leader_connection import NEXT_S, LeaderConnection
from adam_async.errors import Leaderless
from adam_async.run.config import Waits
from adam_async.runtime.traffic import Traffic
from tests.adam_async.controller.simulated_group import network_of, simulated
from tests.adam_async.controller.test_map_client import Front, Mind, table_of
from tests.adam_async.runs import NETWORKS, address_of, until
from tests.worlds import inside
from transport import HandshakeRejected, Identity, LinkBroken, LinkClosed

WAITS = Waits(dial_s=20.0, call_s=20.0, patience_s=20.0)
AT_ONCE_S = 0.1
"""Some messages between simulated machines take less, and one more attempt beside another more."""


def link_of(network, controllers, *, waits=WAITS):
    """A link to whoever leads of these, and where its links are counted."""
    traffic = Traffic("asker")
    identity = Identity(role="worker", node="asker", incarnation=1)
    leader = LeaderConnection(
        network=network, controllers=",".join(controllers), identity=identity, waits=waits, traffic=traffic
    )
    return leader, traffic


async def asks(trio, program):
    """Run something on a machine of its own, given its network; returns what it comes to."""
    done = asyncio.get_running_loop().create_future()

    async def run(machine):
        try:
            done.set_result(await program(network_of(machine)))
        except Exception as error:
            done.set_exception(error)

    trio.node("asker").start(run)
    return await done


def dead(trio, *names):
    """Machines that have lost their power: who dials them hears nothing, not even a refusal."""

    async def idle(machine):
        await asyncio.Event().wait()

    for name in names:
        trio.node(name).start(idle)
        trio.node(name).crash()
    return [f"tcp://{name}:7" for name in names]


async def found(leader):
    """Look for the leader; returns how long that took."""
    loop = asyncio.get_running_loop()
    begin = loop.time()
    await leader.find(-1, "")
    return loop.time() - begin


async def test_a_controller_that_starts_late_is_waited_for_at_the_beginning():
    network = NETWORKS["tcp"]()
    async with table_of(network) as table:
        address = table.addresses
    waits = msgspec.structs.replace(WAITS, dial_s=0.01, meet_s=20.0)
    leader, _ = link_of(network, [address], waits=waits)
    loop = asyncio.get_running_loop()
    async with asyncio.TaskGroup() as group:
        finding = group.create_task(leader.find(-1, ""), name="finds")
        begin = loop.time()
        await until(lambda: loop.time() > begin + 5 * waits.dial_s)
        mind = Mind()
        front = mind.leader = Front(mind)
        front.address = address
        identity = Identity(role="controller", node="controller-0", incarnation=1)
        async with network.listen(address, identity, front.on_link):
            assert (await finding).peer.node == "controller-0"
            leader.close()


def attempts():
    """Names of the attempts that are under way."""
    return [task.get_name() for task in asyncio.all_tasks() if task.get_name().startswith("asker/")]


# --- machines that are gone ----------------------------------------------------------------------


@inside(simulated)
async def test_a_leader_is_found_within_a_second_wherever_three_of_five_addresses_are_silent(trio):
    leads = trio.peers[await trio.settled()]
    lost = next(name for name in trio.peers if trio.peers[name] != leads)
    trio.crash(lost)
    addresses = [*trio.peers.values(), *dead(trio, "gone-1", "gone-2")]

    async def look_in_every_order(network):
        took = []
        for order in itertools.permutations(addresses):
            leader, traffic = link_of(network, order)
            took.append(await found(leader))
            assert (leader.address, traffic.links) == (leads, [leader.link])
            leader.close()
        return took

    took = await asks(trio, look_in_every_order)
    assert len(took) == 120
    assert min(took) < AT_ONCE_S
    assert 3 * NEXT_S < max(took) < 1.0


@inside(simulated)
async def test_addresses_at_which_nobody_listens_cost_nothing(trio):
    leads = trio.peers[await trio.settled()]
    nobody = [f"tcp://controller-1:{port}" for port in range(90, 96)]
    assert await asks(trio, lambda network: found(link_of(network, [*nobody, leads])[0])) < AT_ONCE_S


@inside(simulated)
async def test_machines_that_were_silent_are_the_last_the_next_time(trio):
    await trio.settled()
    gone = dead(trio, "gone-1", "gone-2", "gone-3")

    async def look_twice(network):
        leader, _ = link_of(network, [*gone, *trio.peers.values()])
        first = await found(leader)
        lost = leader.node
        trio.crash(lost)
        leader.lose(leader.link, LinkBroken("no power"))
        await trio.led_without(lost)
        return first, await found(leader)

    first, then = await asks(trio, look_twice)
    assert 3 * NEXT_S < first < 3 * NEXT_S + AT_ONCE_S
    assert NEXT_S < then < NEXT_S + AT_ONCE_S


@inside(simulated)
async def test_a_dead_host_does_not_slow_the_search_during_an_election(trio):
    trio.crash("controller-3")
    others = [trio.peers[name] for name in ("controller-1", "controller-2")]

    async def look(network):
        leader, _ = link_of(network, [*dead(trio, "gone"), *others, trio.peers["controller-3"]])
        loop = asyncio.get_running_loop()
        looking = asyncio.create_task(leader.find(-1, ""))
        for _ in range(30):
            await asyncio.sleep(0.1)
            assert len(set(attempts())) == len(attempts()) >= 1
        assert not looking.done()  # for a group begins with all of it
        trio.node("controller-3").restart()
        await trio.led()
        begin = loop.time()
        await looking
        leader.close()
        return loop.time() - begin

    assert await asks(trio, look) < 0.5 + NEXT_S + AT_ONCE_S


@inside(simulated)
async def test_a_search_after_a_long_time_with_a_leader_has_the_whole_patience(trio):
    await trio.settled()

    async def look_twice(network):
        waits = msgspec.structs.replace(WAITS, patience_s=5.0)
        leader, _ = link_of(network, trio.peers.values(), waits=waits)
        await found(leader)
        await asyncio.sleep(10.0)
        trio.crash(leader.node)
        leader.lose(leader.link, LinkBroken("no power"))
        return await found(leader)

    assert NEXT_S < await asks(trio, look_twice) < 5.0


@inside(simulated)
async def test_a_client_with_one_address_finds_the_next_leader_among_the_named_ones(trio):
    leads = await trio.settled()

    async def look_twice(network):
        leader, _ = link_of(network, [trio.peers[leads]])
        assert not leader.several
        await found(leader)
        assert leader.addresses == tuple(sorted(trio.peers.values()))
        trio.crash(leads)
        leader.lose(leader.link, LinkBroken("no power"))
        await trio.led_without(leads)
        await found(leader)
        return leader.node != leads

    assert await asks(trio, look_twice)


@inside(simulated)
async def test_the_warning_has_the_result_of_each_address_also_of_silent_ones(trio, caplog):
    leads = await trio.settled()
    one, other = trio.others(leads)
    trio.crash(leads, one)
    (gone,) = dead(trio, "gone")
    addresses = [*trio.peers.values(), gone, "tcp://controller-1:99"]
    waits = msgspec.structs.replace(WAITS, patience_s=5.0)
    with caplog.at_level(logging.WARNING), pytest.raises(Leaderless, match=r"led for 5 s"):
        await asks(trio, lambda network: found(link_of(network, addresses, waits=waits)[0]))
    *silent, runs = gone, trio.peers[one], trio.peers[leads], trio.peers[other]
    (said,) = [text for text in caplog.messages if text.startswith("asker waits for one of 5 controllers")]
    assert all(f"{address}: no answer within 1 s" in said for address in silent)
    assert f"{runs}: does not lead, nor does any other" in said


@pytest.mark.parametrize("network", NETWORKS)
async def test_the_address_of_another_role_is_named_with_that_role(network):
    wire = NETWORKS[network]()
    server = Identity(role="ps", node="ps-0", incarnation=1)
    async with wire.listen(address_of(wire), server, lambda link: link.wait_closed()) as listener:
        leader, _ = link_of(wire, [listener.address])
        said = f"address {listener.address} is that of another role: dialled a controller, but a ps answered"
        with pytest.raises(HandshakeRejected, match=said):
            await leader.find(-1, "")
        leader.close()


# --- several attempts at once --------------------------------------------------------------------


@pytest.mark.parametrize("network", NETWORKS)
async def test_the_link_to_one_that_was_slower_is_closed(network):
    async with table_of(NETWORKS[network](), 2) as table:
        slow, leads = table.fronts
        slow.silent, table.mind.leader = True, leads
        leader, traffic = link_of(table.network, table.addresses.split(","))
        assert NEXT_S <= await found(leader) < 1.0
        assert (leader.address, traffic.links) == (leads.address, [leader.link])
        await until(lambda: slow.links[0].closed)
        leader.close()


async def test_of_two_that_lead_at_the_same_moment_one_is_taken_and_the_other_let_go():
    async with table_of(NETWORKS["local"](), 2) as table:
        held = []
        for front in table.fronts:
            front.answer = lambda request, body, front=front: held.append((front, request, body))
        leader, traffic = link_of(table.network, table.addresses.split(","))
        looking = asyncio.create_task(leader.find(-1, ""))
        await until(lambda: len(held) == 2)
        for front, request, body in reversed(held):
            front.watch(request, body)
        link = await looking
        assert leader.address == table.fronts[1].address
        assert traffic.links == [link]
        await until(lambda: table.fronts[0].links[0].closed)
        assert not table.fronts[1].links[0].closed
        leader.close()


async def test_a_refusal_after_a_leader_was_found_changes_nothing():
    async with table_of(NETWORKS["local"](), 2) as table:
        held = []
        leads, other = table.fronts
        other.answer = lambda request, body: held.append(request)
        leads.answer = lambda request, body: held.append((request, body))
        leader, _ = link_of(table.network, table.addresses.split(","))
        looking = asyncio.create_task(leader.find(-1, ""))
        await until(lambda: len(held) == 2)
        leads.watch(*held[0])
        held[1].fail("unexpected", "not here")
        await looking
        assert leader.address == leads.address
        leader.close()


@pytest.mark.thorough
@pytest.mark.parametrize("network", NETWORKS)
async def test_a_search_cancelled_in_the_middle_leaves_no_task_and_no_link(network):
    async with table_of(NETWORKS[network](), 3) as table:
        for front in table.fronts:
            front.silent = True
        leader, traffic = link_of(table.network, table.addresses.split(","))
        looking = asyncio.create_task(leader.find(-1, ""))
        await until(lambda: all(front.asked for front in table.fronts))
        assert len(traffic.links) == 3
        looking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await looking
        assert (leader.link, traffic.links) == (None, [])
        assert attempts() == []
        await until(lambda: all(front.links[0].closed for front in table.fronts))


async def test_a_search_cancelled_as_the_leader_is_found_keeps_its_link_for_the_next_request():
    async with table_of(NETWORKS["local"](), 2) as table:
        leader, traffic = link_of(table.network, table.addresses.split(","))
        looking = asyncio.create_task(leader.find(-1, ""))
        await until(lambda: leader.link is not None)
        looking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await looking
        assert await leader.find(-1, "") is leader.link
        assert traffic.links == [leader.link]
        leader.close()
        assert traffic.links == []


async def test_a_leader_found_just_before_the_warning_prevents_it(monkeypatch, caplog):
    monkeypatch.setattr("adam_async.controller.leader_connection.WARN_S", 0.3)
    async with table_of(NETWORKS["local"](), 2) as table:
        slow, leads = table.fronts
        slow.silent, table.mind.leader = True, leads
        leader, _ = link_of(table.network, table.addresses.split(","))
        loop = asyncio.get_running_loop()
        say_at = loop.time() + 0.31
        looking = asyncio.create_task(leader.find(-1, ""))
        await until(lambda: leader.link is not None)
        while loop.time() < say_at:
            pass  # so that it is time to say it before anybody hears of the link
        await looking
        assert caplog.messages == []
        leader.close()


async def test_a_search_closed_as_the_leader_is_found_keeps_no_link():
    async with table_of(NETWORKS["local"](), 2) as table:
        leader, traffic = link_of(table.network, table.addresses.split(","))
        looking = asyncio.create_task(leader.find(-1, ""))
        await until(lambda: leader.link is not None)
        leader.close()
        with pytest.raises(LinkClosed, match="asker asks the controllers no more"):
            await looking
        assert (leader.link, traffic.links) == (None, [])


async def test_a_search_closed_during_several_attempts_keeps_no_link():
    async with table_of(NETWORKS["local"](), 2) as table:
        slow, leads = table.fronts
        slow.silent = True
        leader, traffic = link_of(table.network, table.addresses.split(","))
        leads.answer = lambda request, body: (leader.close(), leads.watch(request, body))
        with pytest.raises(LinkClosed, match="asker asks the controllers no more"):
            await leader.find(-1, "")
        assert (leader.link, traffic.links) == (None, [])
