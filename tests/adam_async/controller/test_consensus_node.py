"""Controllers become a group, lose members and take them in again, and hand over: on simulated machines, and
on real loops and networks."""

import asyncio
import logging
import re
from contextlib import AsyncExitStack

import pytest

from adam_async.controller.consensus import Settings, identity
from adam_async.controller.consensus.records import Born
from adam_async.controller.consensus_node import LATE_S, SETTINGS, ConsensusNode, ConsensusSetup
from adam_async.controller.log_file import NAME, LogFile
from adam_async.controller.replicated_state import ReplicatedState
from adam_async.controller.role import RoleSettings
from adam_async.controller.service import Controller
from adam_async.errors import ConfigError, first_cause
from adam_async.run.config import Waits
from adam_async.run.counts import ControllerCounts
from adam_async.runtime.channel import Endpoint
from adam_async.runtime.disk import Disk
from adam_async.runtime.traffic import Traffic
from tests.adam_async.controller.simulated_group import CALL_S, FOLDER, WAITS, network_of, record, simulated
from tests.adam_async.runs import NETWORKS, address_of, entropy_of, local_network, until
from tests.simulation.loop import SimulationFailed
from tests.worlds import inside
from transport import Identity

seeds = pytest.mark.parametrize("seed", range(4))


def voters_of(trio, name):
    return trio.statistics()[name].voters


# --- the simulated ones --------------------------------------------------------------------------


@seeds
@pytest.mark.parametrize("count", [3, 5])
@inside(simulated)
async def test_controllers_that_have_nothing_become_one_group(trio, seed, count):
    await trio.settled()
    groups = {it.replicated_state.group for it in trio.running.values()}
    assert len(groups) == 1
    assert "" not in groups
    assert len({tuple(voters_of(trio, name)) for name in trio.peers}) == 1


@inside(simulated, count=1)
async def test_one_alone_leads_at_once_and_keeps_its_state_over_power_cuts(trio):
    for number in range(3):
        assert await trio.until(lambda: trio.leaders, "it does not lead") < 0.05
        client = await (await trio.client("controller-1")).open()
        assert (await client.set(f"nodes/w{number}", 0, record())).done
        cluster, _ = await client.map()
        assert sorted(cluster.nodes) == [f"w{each}" for each in range(number + 1)]
        trio.crash("controller-1")
        await trio.restart("controller-1")


def test_a_group_is_founded_when_the_last_one_comes_and_not_before(caplog):
    async def scenario(trio):
        await asyncio.sleep(0.0)
        trio.kill("controller-3")
        await asyncio.sleep(30.0)
        assert trio.leaders == []
        assert trio.statistics()["controller-1"] == ControllerCounts()
        await trio.restart("controller-3")
        await trio.settled()

    with caplog.at_level(logging.WARNING):
        simulated(scenario)
    assert caplog.text.count("controller-1 waits for controller-3 to begin a group") == 1
    assert caplog.text.count("controller-2 belongs to no group yet, and waits for controller-3") == 1


@seeds
@inside(simulated)
async def test_after_a_power_cut_of_all_they_go_on_where_they_were(trio, seed):
    client = await (await trio.client(await trio.settled())).open()
    version = (await client.set("nodes/w", 0, record(1))).version
    _, group = await client.map()
    voters = voters_of(trio, "controller-1")
    for _ in range(3):
        trio.crash()
        await trio.restart()
        client = await trio.client(await trio.settled())
        cluster, again = await client.map()
        assert (cluster.nodes["w"].info, again) == ({"number": 1}, group)
        assert cluster.version >= version
        assert voters_of(trio, "controller-1") == voters


@seeds
@inside(simulated)
async def test_a_controller_that_lost_its_disk_is_added_again_and_counts(trio, seed):
    """Each in turn, the founder and the leader too; then two of them, the new one among them, are enough."""

    client = await (await trio.client(await trio.settled())).open()
    assert (await client.set("nodes/w", 0, record(1))).done
    for name in trio.peers:
        before = set(voters_of(trio, trio.others(name)[0]))
        trio.crash(name)
        await trio.restart(name, empty_disk=True)
        await trio.until(
            lambda before=before: (
                len(trio.leaders) == 1
                and len(now := set(voters_of(trio, trio.leaders[0]))) == 3
                and len(now - before) == 1
            ),
            "it is not taken in",
            seconds=20.0,
        )
        await trio.settled()
    trio.crash("controller-1")
    client = await trio.client(await trio.led())
    assert (await client.map())[0].nodes["w"].info == {"number": 1}


@seeds
@inside(simulated, with_files=False)
async def test_without_files_a_killed_controller_has_a_new_identity_and_is_added_again(trio, seed):
    leader = await trio.settled()
    client = await (await trio.client(leader)).open()
    assert (await client.set("nodes/w", 0, record(1))).done
    before = voters_of(trio, leader)
    trio.kill(leader)
    await trio.restart(leader)
    await trio.until(
        lambda: trio.leaders and len(set(voters_of(trio, trio.leaders[0])) - set(before)) == 1, "no place"
    )
    client = await trio.client(await trio.settled())
    assert (await client.map())[0].nodes["w"].info == {"number": 1}


@inside(simulated)
async def test_a_first_controller_that_lost_its_disk_begins_no_second_group(trio):
    await trio.settled()
    group = trio.running["controller-2"].replicated_state.group
    trio.crash("controller-1")
    await trio.restart("controller-1", empty_disk=True)
    await trio.until(lambda: trio.running["controller-1"].replicated_state.group, "it is not taken in")
    assert trio.running["controller-1"].replicated_state.group == group


@inside(simulated)
async def test_a_name_that_is_taken_is_given_to_nobody_else(trio, caplog):
    """Two processes with the same name and other disks: the one in the group stays."""

    await trio.settled()
    before = voters_of(trio, "controller-1")
    stranger = trio.world.node("stranger")
    trio.peers["stranger"] = "tcp://stranger:7"

    async def pretend(node):
        peers = {name: it for name, it in trio.peers.items() if name != "stranger"}
        controller = Controller(
            RoleSettings(
                network=network_of(node),
                address=trio.peers["stranger"],
                identity=Identity(role="controller", node="controller-3", incarnation=99),
                waits=WAITS,
            ),
            ConsensusSetup(entropy=node.entropy),
            peers=peers,
        )
        async with controller:
            await asyncio.Event().wait()

    stranger.start(pretend)
    await asyncio.sleep(10.0)
    assert voters_of(trio, "controller-1") == before
    assert trio.statistics()["controller-1"].learners == []


@seeds
@inside(simulated)
async def test_a_stall_of_the_own_loop_elects_nobody(trio, seed):
    """Neither one that the links outlast nor one that they do not: what came meanwhile is read first."""

    leader = await trio.settled()
    term = trio.running[leader].group.term
    for _ in range(12):
        sleeper = trio.world.dice.choose(trio.others(leader))
        trio.node(sleeper).freeze()
        await asyncio.sleep(trio.world.dice.between(0.2, 4.0))
        trio.node(sleeper).thaw()
        await asyncio.sleep(2.0)
        assert set(trio.terms.values()) == {term}
    assert trio.leaders == [leader]


@seeds
@inside(simulated)
async def test_when_all_of_them_stand_still_together_nobody_is_missed(trio, seed):
    """As when a laptop sleeps: the leader has said nothing, and nobody could have heard it."""

    leader = await trio.settled()
    before = trio.terms
    for name in trio.peers:
        trio.node(name).freeze()
    await asyncio.sleep(2 * SETTINGS.election_s + 2.5 * LATE_S)  # beyond all deadlines, and late
    for name in trio.peers:
        trio.node(name).thaw()
    await asyncio.sleep(5.0)
    assert trio.terms == before
    assert trio.leaders == [leader]


@inside(simulated)
async def test_time_passes_on_machines_that_are_always_late(trio):
    """Machines so slow that their timers ring late again and again still find a leader when they need one."""

    leader = await trio.settled()
    left = trio.others(leader)
    trio.crash(leader)
    for name in left:
        trio.node(name).slow(LATE_S * 0.6)
    await trio.until(lambda: trio.leaders, "nobody leads", seconds=60.0)


@seeds
@inside(simulated)
async def test_a_leader_that_leaves_in_order_hands_over(trio, seed):
    leader = await trio.settled()
    client = await (await trio.client(leader)).open()
    assert (await client.set("nodes/w", 0, record())).done
    others = trio.others(leader)
    trio.leave[leader].set()
    took_s = await trio.until(
        lambda: any(trio.running[name].group.leads for name in others), "nobody took over"
    )
    assert took_s < SETTINGS.election_s / 4
    await trio.node(leader).task


@inside(simulated)
async def test_one_that_leaves_while_nobody_can_take_over_ends_all_the_same(trio):
    leader = await trio.settled()
    for name in trio.others(leader):
        trio.node(name).freeze()
    begun = trio.world.now
    trio.leave[leader].set()
    await trio.node(leader).task
    assert trio.world.now - begun < 5.0


@pytest.mark.parametrize("fault", ["an error", "a full disk"])
@inside(simulated, may_fail=True)
async def test_a_controller_whose_disk_fails_ends_and_the_others_go_on(trio, fault):
    leader = await trio.settled()
    node = trio.node(leader)
    client = await (await trio.client(leader)).open()
    assert (await client.set("nodes/w", 0, record(1))).done
    if fault == "an error":
        node.disk_conditions.fail = 1.0
    else:
        node.disk_model.capacity_bytes = node.disk_model.used_bytes
    asking = asyncio.ensure_future(client.set("nodes/w", 0, record(2)))
    with pytest.raises(ExceptionGroup) as caught:
        async with asyncio.timeout(CALL_S):
            await node.task
    assert isinstance(first_cause(caught.value), ConfigError)
    said = str(first_cause(caught.value))
    assert re.search(
        r"controller\.log cannot be written: (Input/output error|No space left on device); make", said
    )
    await asyncio.gather(asking, return_exceptions=True)
    client = await trio.client(await trio.led(by=trio.others(leader)), node="other")
    assert (await client.map())[0].nodes["w"].info == {"number": 1}


def test_a_damaged_file_ends_the_controller_by_name():
    async def scenario(trio):
        name = await trio.settled()
        node = trio.node(name)
        trio.crash(name)
        file = node.disk_model.file(FOLDER / NAME)
        file.data[30] ^= 1
        node.restart()
        await asyncio.sleep(1.0)

    with pytest.raises(
        SimulationFailed, match=r"DamagedLog.*controller.log is damaged at byte 0.*empty disk"
    ):
        simulated(scenario)


@inside(simulated, snapshot_entries=20)
async def test_entries_give_way_to_a_snapshot_and_who_was_away_gets_that(trio):
    leader = await trio.settled()
    away = trio.others(leader)[0]
    trio.crash(away)
    client = await (await trio.client(leader)).open()
    version = 0
    for number in range(60):
        answer = await client.set("nodes/w", version, record(number))
        assert answer.done
        version = answer.at
    assert trio.statistics()[leader].log < 25
    await trio.restart(away)
    await trio.until(lambda: trio.running[away].map == trio.running[leader].map, "it lags behind")


@inside(simulated, snapshot_entries=20)
async def test_a_session_goes_on_in_those_who_begin_with_a_snapshot(trio):
    client = await (await trio.client(await trio.settled())).open()
    version = 0
    for number in range(30):
        version = (await client.set("nodes/w", version, record(number))).at
    trio.crash()
    await trio.restart()
    again = await trio.client(await trio.settled())
    again.session = client.session
    answer = await again.set("nodes/w", 0, record(), number=client.number)
    assert (answer.done, answer.at) == (True, version)
    assert (await again.set("nodes/w", version, record(), number=client.number + 1)).done


# --- on real loops -------------------------------------------------------------------------------


SOON = Settings(heartbeat_s=0.03, election_s=0.3)


class Three:
    """Three controllers in this loop."""

    def __init__(self, network, tmp_path=None, disk=None):
        self.network, self._folder, self._disk = network, tmp_path, disk
        self.controllers = []
        self.stacks = []

    async def start(self):
        for number in range(1, 4):
            name = f"controller-{number}"
            file = LogFile(self._disk, self._folder / name) if self._disk else None
            controller = Controller(
                RoleSettings(
                    network=self.network,
                    address=address_of(self.network),
                    identity=Identity(role="controller", node=name, incarnation=number),
                    waits=Waits(),
                ),
                ConsensusSetup(entropy=entropy_of(f"{name}/{id(self)}"), file=file, settings=SOON),
                alone=False,
            )
            stack = AsyncExitStack()
            self.controllers.append(await stack.enter_async_context(controller))
            self.stacks.append(stack)
        peers = {f"controller-{number}": it.address for number, it in enumerate(self.controllers, start=1)}
        for controller in self.controllers:
            controller.group.set_addresses(peers)

    async def leader(self):
        while True:
            for number, controller in enumerate(self.controllers):
                voters = controller.group.statistics().voters or ()
                if controller.group.leads and len(voters) == 3:
                    return number
            await asyncio.sleep(0.01)

    async def end(self, number):
        self.controllers.pop(number)
        await self.stacks.pop(number).aclose()

    async def __aenter__(self):
        await self.start()
        return self

    async def __aexit__(self, *exc):
        while self.stacks:
            await self.end(0)


@pytest.mark.parametrize("network", NETWORKS)
async def test_three_in_one_loop_meet_elect_and_hand_over(network):
    async with Three(NETWORKS[network]()) as three:
        number = await three.leader()
        groups = {it.replicated_state.group for it in three.controllers if it.replicated_state.group}
        assert len(groups) == 1
        loop = asyncio.get_running_loop()
        await three.end(number)
        begun = loop.time()
        await three.leader()
        assert loop.time() - begun < SOON.election_s


async def test_three_with_folders_go_on_after_all_have_ended(tmp_path):
    async with Disk() as disk:
        groups = set()
        for _ in range(2):
            async with Three(NETWORKS["tcp"](), tmp_path, disk) as three:
                number = await three.leader()
                groups.add(
                    (
                        three.controllers[number].replicated_state.group,
                        *three.controllers[number].group.statistics().voters,
                    )
                )
        assert len(groups) == 1


def test_a_controller_missing_from_the_addresses_is_an_error():
    group = ConsensusNode(
        ConsensusSetup(entropy=entropy_of("x")),
        Endpoint(
            local_network(), Identity(role="controller", node="controller-9", incarnation=1), Traffic("x")
        ),
        state=ReplicatedState(),
        on_answer=lambda tag, answer: None,
        on_led=lambda: None,
        on_applied=lambda: None,
    )
    with pytest.raises(ValueError, match="controller-9 is not one of the controllers controller-1"):
        group.set_addresses({"controller-1": "tcp://a:1"})


def first_controller(disk, folder):
    settings = RoleSettings(
        network=local_network(),
        address="local://",
        identity=Identity(role="controller", node="controller-1", incarnation=1),
        waits=Waits(),
    )
    return Controller(settings, ConsensusSetup(file=LogFile(disk, folder)))


async def test_a_folder_of_another_controller_is_refused_with_its_name_and_ours(tmp_path):
    async with Disk() as disk:
        file = LogFile(disk, tmp_path)
        async with file.opened():
            await file.append([(Born(identity("controller-2", 7)),)])
        controller = first_controller(disk, tmp_path)
        with pytest.raises(ExceptionGroup) as caught:
            async with controller:
                await asyncio.Event().wait()
    said = f"{tmp_path} is that of controller-2, and this is controller-1: "
    said += "give the --id, and --peers, that controller-2 was started with, or another --dir"
    assert str(first_cause(caught.value)) == said


async def test_one_of_three_without_the_others_addresses_names_them(tmp_path, caplog):
    async with Disk() as disk:
        async with Three(NETWORKS["tcp"](), tmp_path, disk) as three:
            await three.leader()
        controller = Controller(
            RoleSettings(
                network=local_network(),
                address="local://",
                identity=Identity(role="controller", node="controller-1", incarnation=9),
                waits=Waits(),
            ),
            ConsensusSetup(file=LogFile(disk, tmp_path / "controller-1")),
        )
        with caplog.at_level(logging.WARNING):
            async with controller:
                await controller.joined()
                assert controller.group.is_cut_off
                await until(lambda: "name them all in --peers" in caplog.text)
    assert "controller-1 was one of a group with controller-2, controller-3, whose addresses" in caplog.text


async def test_a_folder_that_is_in_use_ends_the_second_with_what_to_do(tmp_path):
    async with Disk() as disk:
        async with LogFile(disk, tmp_path).opened():
            controller = first_controller(disk, tmp_path)
            with pytest.raises(ExceptionGroup) as caught:
                async with controller:
                    await asyncio.Event().wait()
        assert isinstance(first_cause(caught.value), ConfigError)
        assert "give this one another" in str(first_cause(caught.value))
