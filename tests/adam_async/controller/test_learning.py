"""A single controller without a folder is started again, and learns the stores from real servers."""

import asyncio
import logging
from contextlib import AsyncExitStack, asynccontextmanager, suppress

import msgspec
import numpy as np
import pytest

from adam_async import ParameterStore, Sgd, StoreError
from adam_async.cluster.networks import LOOPBACK, cluster_network
from adam_async.cluster.roles.controller import controller
from adam_async.cluster.roles.parameter_server import parameter_server
from adam_async.cluster.roles.place import Place
from adam_async.controller import leader_connection, learned_map
from adam_async.controller.consensus_node import ConsensusSetup
from adam_async.controller.learned_map import AHEAD, StoresReport
from adam_async.controller.log_file import LogFile
from adam_async.controller.role import RoleSettings
from adam_async.controller.service import Controller
from adam_async.messages import LEARNING, NOT_LEADER, ReportStores, WatchMap, pack, role_table, text_tensor
from adam_async.run.cluster_map import ClusterMap
from adam_async.run.config import Waits
from adam_async.runtime.clock import system_entropy
from adam_async.runtime.disk import Disk
from tests.adam_async.runs import until
from transport import BufferPool, Identity, LocalNetwork, RemoteError, RetrySchedule, TransportError

ZEROS = {"w": np.zeros((4, 8)), "b": np.zeros(3)}
ONES = {name: np.ones_like(array) for name, array in ZEROS.items()}
WAITS = Waits(grace_s=0.2)


@pytest.fixture(autouse=True)
def _wait_briefly(monkeypatch):
    monkeypatch.setattr(learned_map, "LISTEN_S", 0.4)
    monkeypatch.setattr(leader_connection, "PAUSES", RetrySchedule(first_s=0.01, longest_s=0.04))


def place(node, controller="", bind=LOOPBACK):
    buffers = BufferPool()
    return Place(
        node=node,
        bind=bind,
        controller=controller,
        network=cluster_network(None, entropy=system_entropy, buffers=buffers),
        buffers=buffers,
        waits=WAITS,
        entropy=system_entropy,
    )


class Cluster:
    """A controller without a folder, and servers in blocks of their own."""

    def __init__(self, stack):
        self._stack = stack
        self.address = ""
        self.controller = None
        self._ends = {}

    async def start_controller(self):
        block = controller(place("controller", bind=self.address or LOOPBACK), learns=True)
        self._ends["controller"] = ending = AsyncExitStack()
        self._stack.push_async_exit(ending)
        self.controller = await ending.enter_async_context(block)
        self.address = self.controller.address

    async def start_servers(self, *nodes):
        for node in nodes:
            self._ends[node] = ending = AsyncExitStack()
            self._stack.push_async_exit(ending)
            server = await ending.enter_async_context(parameter_server(place(node, self.address)))
            await server.joined()

    async def end(self, node):
        await self._ends[node].aclose()

    def open(self, **options):
        return ParameterStore.open(self.address, ZEROS, name="s", rule=Sgd(rate=1.0), waits=WAITS, **options)


@asynccontextmanager
async def cluster_of(*servers):
    async with AsyncExitStack() as stack:
        cluster = Cluster(stack)
        await cluster.start_controller()
        await cluster.start_servers(*servers)
        yield cluster


class Pusher:
    """Pushes ones to a store, step by step, and counts."""

    def __init__(self, store):
        self._store = store
        self.count = 0

    async def push(self, enough):
        while not enough():
            await self._store.push(ONES)
            await self._store.tick()
            self.count += 1

    async def push_times(self, times):
        goal = self.count + times
        await self.push(lambda: self.count >= goal)


@pytest.mark.parametrize(
    ("copies", "consistency"),
    [
        (1, "asp"),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in ((1, "ssp:1"), (1, "bsp"), (2, "asp"), (2, "bsp"), (3, "ssp:1"))
        ),
    ],
)
async def test_a_client_pushes_through_the_restart_and_each_push_counts_once(copies, consistency):
    async with cluster_of("ps-0", "ps-1", "ps-2") as cluster:
        async with cluster.open(copies=copies, consistency=consistency, replicas=1) as store:
            pusher = Pusher(store)
            await pusher.push_times(3)
            before, session = cluster.controller.map, store._link.session
            await cluster.end("controller")
            await pusher.push_times(20)
            restart = asyncio.create_task(cluster.start_controller())
            await restart
            await pusher.push(lambda: cluster.controller.map.version > before.version)
            await pusher.push(lambda: cluster.controller.map == store.link.membership.map)
            await pusher.push_times(20)

            values = await store.pull()
            for array in values.values():
                np.testing.assert_array_equal(array, np.full_like(array, -pusher.count))
            now = cluster.controller.map
            assert now.version >= before.version + AHEAD
            assert now.stores["s"].id == before.stores["s"].id
            assert now.nodes[store._link._identity.node] == before.nodes[store._link._identity.node]
            assert store._link.session == session


@pytest.mark.slow
async def test_a_second_restart_learns_what_the_first_has_learned():
    async with cluster_of("ps-0", "ps-1") as cluster:
        async with cluster.open(copies=2) as store:
            pusher = Pusher(store)
            await pusher.push_times(3)
            for _ in range(2):
                version = cluster.controller.map.version
                await cluster.end("controller")
                await cluster.start_controller()
                await pusher.push(lambda version=version: cluster.controller.map.version > version)
            await pusher.push_times(3)
            assert (await store.pull())["b"].tolist() == [-pusher.count] * 3


@pytest.mark.slow
async def test_a_primary_that_is_lost_with_the_controller_has_a_successor_with_all_pushes(monkeypatch):
    monkeypatch.setattr("adam_async.controller.service.FIND_S", 0.4)
    async with cluster_of("ps-0", "ps-1", "ps-2") as cluster:
        async with cluster.open(copies=2, servers=1, min_in_sync=1) as store:
            pusher = Pusher(store)
            await pusher.push_times(3)
            await until(lambda: len(cluster.controller.map.bundles["bundles/s/ps-0"].in_sync) == 2)
            await pusher.push_times(3)
            await cluster.end("controller")
            await cluster.end("ps-0")
            await cluster.start_controller()
            await pusher.push_times(3)
            assert (await store.pull())["b"].tolist() == [-pusher.count] * 3
            assert cluster.controller.map.bundles["bundles/s/ps-0"].in_sync[0][0] == "ps-1"


async def test_a_store_without_a_copy_on_any_server_fails_and_the_client_is_told(monkeypatch):
    monkeypatch.setattr("adam_async.controller.service.FIND_S", 0.4)
    async with cluster_of("ps-0", "ps-1") as cluster:
        store = await cluster.open()
        await Pusher(store).push_times(3)
        await cluster.end("controller")
        await cluster.end("ps-1")
        await cluster.start_controller()
        with pytest.raises(StoreError, match="ps-1 died"):
            await Pusher(store).push(lambda: False)
        with suppress(StoreError):
            await store.close()


async def test_a_store_that_nobody_had_loaded_opens_after_the_restart():
    async with cluster_of("ps-0") as cluster:
        opening = asyncio.ensure_future(cluster.open(servers=2))
        await until(lambda: "s" in cluster.controller.map.stores)
        await cluster.end("controller")
        await cluster.start_controller()
        await until(lambda: cluster.controller.group.leads)
        await cluster.start_servers("ps-1")
        store = await opening
        try:
            await Pusher(store).push_times(3)
            assert (await store.pull())["b"].tolist() == [-3] * 3
        finally:
            await store.close()


async def test_the_wait_is_one_line_of_each_member_and_is_not_repeated(monkeypatch, caplog):
    caplog.set_level(logging.WARNING)

    def lines():
        return [text for each in caplog.records if "waits for the controller" in (text := each.getMessage())]

    async with cluster_of("ps-0") as cluster:
        async with cluster.open() as store:
            pusher = Pusher(store)
            monkeypatch.setattr(leader_connection, "WARN_S", 0.1)
            await cluster.end("controller")
            await pusher.push(lambda: len(lines()) >= 2)
            await pusher.push_times(50)
            assert len(lines()) == 2
            assert all("for 3600 s more; its stores go on meanwhile; tried" in line for line in lines())


# --- which controllers learn, and from which peers -------------------------------------------------


def settings_of(network, address="local://controller-1", node="controller-1"):
    return RoleSettings(
        network=network,
        address=address,
        identity=Identity(role="controller", node=node, incarnation=1),
        waits=WAITS,
    )


async def asked(network, role, body, tensors=(), address="local://controller-1"):
    """The code with which a controller refuses a message of a peer."""
    async with network.connect(
        address, Identity(role=role, node=f"{role}-1", incarnation=7), timeout_s=5.0
    ) as link:
        with pytest.raises(TransportError) as caught:
            await link.call(pack(body, tensors), timeout_s=5.0)
    return caught.value.code if isinstance(caught.value, RemoteError) else type(caught.value).__name__


EARLIER = WatchMap(after=5, group="earlier", wait_s=0.0)


def test_one_of_several_controllers_takes_no_map_from_servers():
    three = {f"controller-{number}": f"local://controller-{number}" for number in (1, 2, 3)}
    for peers, alone, learns in ((three, True, False), ({}, False, False), ({}, True, True)):
        node = Controller(
            settings_of(LocalNetwork(rules=role_table())),
            peers=peers,
            alone=alone,
            learns=True,
            wall=lambda: 1e9,
        )
        assert (node.group._first_map is not None) is learns


async def test_a_controller_with_a_folder_begins_at_once_and_asks_no_server(tmp_path):
    network = LocalNetwork(rules=role_table())
    async with Disk(name="log") as disk:
        setup = ConsensusSetup(file=LogFile(disk, tmp_path))
        async with Controller(settings_of(network), setup, learns=True, wall=lambda: 1e9) as node:
            assert await asked(network, "ps", ReportStores(), [text_tensor({})]) == NOT_LEADER
            await until(lambda: node.group.leads)
            assert node.map == ClusterMap()


async def test_a_learning_controller_asks_servers_of_an_earlier_one_alone(monkeypatch):
    monkeypatch.setattr(learned_map, "LISTEN_S", 60.0)
    monkeypatch.setattr("adam_async.controller.service.FIND_S", 60.0)
    network = LocalNetwork(rules=role_table())
    async with Controller(settings_of(network), learns=True, wall=lambda: 1e9) as node:
        await until(lambda: node._learned is not None)
        assert await asked(network, "ps", WatchMap(after=-1, group="", wait_s=0.0)) == NOT_LEADER
        assert not node._learned.is_restart
        assert await asked(network, "ps", EARLIER) == LEARNING
        assert await asked(network, "client", EARLIER) == NOT_LEADER
        assert await asked(network, "reader", EARLIER) == NOT_LEADER
        report = text_tensor(StoresReport(map=ClusterMap(version=9)))
        assert await asked(network, "ps", ReportStores(), [report]) == NOT_LEADER
        assert await asked(network, "ps", EARLIER) == NOT_LEADER  # it has reported
        assert node._learned.newest.version == 9


DEEP = np.frombuffer(b'{"map":{"nodes":{"a":{"info":' + b"[" * 5000 + b"]" * 5000 + b"}}}}", np.uint8)
FALSE = {
    "nothing": [],
    "two": [text_tensor({}), text_tensor({})],
    "no map": [text_tensor({"standings": {}})],
    "a version of 2**63": [text_tensor({"map": {"version": 1 << 63}})],
    "a version of 2**70": [np.frombuffer(b'{"map":{"version":%d}}' % (1 << 70), np.uint8)],
    "a version that is no number": [text_tensor({"map": {"version": "9"}})],
    "deep": [DEEP],
    "not text": [np.frombuffer(b"\xff\xfe\x00", np.uint8)],
    "numbers": [np.zeros(3)],
    "long": [np.frombuffer(b" " * (17 << 20), np.uint8)],
}


@pytest.mark.parametrize("name", FALSE)
async def test_a_false_report_is_refused_and_the_controller_goes_on(name, monkeypatch):
    monkeypatch.setattr("adam_async.controller.service.FIND_S", 0.0)
    network = LocalNetwork(rules=role_table())
    async with Controller(settings_of(network), learns=True, wall=lambda: 1e9) as node:
        await until(lambda: node._learned is not None)
        code = await asked(network, "ps", ReportStores(), FALSE[name])
        assert code in ("invalid", "malformed")
        await until(lambda: node.group.leads)
        assert node.map == ClusterMap()


async def test_reports_whose_checks_stall_the_controller_end_its_wait_late_and_not_never(monkeypatch):
    monkeypatch.setattr("adam_async.controller.service.STOOD_STILL_S", -1.0)  # each turn counts as a stall
    monkeypatch.setattr("adam_async.controller.service.FIND_S", 0.0)
    home = place("controller")
    async with controller(home, learns=True) as node:
        turns = 0
        while not node.group.leads:
            turns += 1
            assert turns < 1000
            if node._learned is not None:
                report = text_tensor(StoresReport(map=ClusterMap(version=turns)))
                await asked(home.network, "ps", ReportStores(), [report], address=node.address)
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("role", ["client", "reader", "worker", "data", "driver"])
async def test_a_peer_of_another_role_cannot_report_stores(role, monkeypatch):
    monkeypatch.setattr("adam_async.controller.service.FIND_S", 0.2)
    home = place("controller")
    report = text_tensor(StoresReport(map=ClusterMap(version=9)))
    async with controller(home, learns=True) as node:
        await until(lambda: node._learned is not None)
        code = await asked(home.network, role, ReportStores(), [report], address=node.address)
        assert code not in (NOT_LEADER, LEARNING)
        assert node._learned is None or not node._learned.standings
    assert msgspec.to_builtins(node.map)["version"] == 0
