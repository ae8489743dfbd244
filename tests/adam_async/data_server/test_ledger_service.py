"""Several data servers lease one epoch: any may be asked, join, fall silent or be lost in the middle."""

import asyncio
import re
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from itertools import pairwise

import msgspec
import numpy as np
import pytest

from adam_async.controller.client import Membership
from adam_async.controller.role import RoleSettings
from adam_async.controller.service import Controller
from adam_async.data_server import client as client_module
from adam_async.data_server.client import DataClient, WorkerSlot
from adam_async.data_server.ledger_replication import Part
from adam_async.data_server.questions import first_question
from adam_async.data_server.service import DataServer
from adam_async.data_server.state import Opening
from adam_async.driver.preparation import store_of
from adam_async.driver.submission import submit
from adam_async.driver.training_rules import PROGRAM_KINDS
from adam_async.errors import DataError, first_cause
from adam_async.messages import (
    CopyLedger,
    Enter,
    Finished,
    Groups,
    LeaseGroups,
    LedgerCopied,
    ReportGroups,
    pack,
    packed_tensor,
    unpack,
)
from adam_async.model.named import digits
from adam_async.model.network import Network
from adam_async.run.cluster_map import NodeRecord, ready_word
from adam_async.run.config import Config
from adam_async.run.group_limits import GroupLimits
from adam_async.run.partition import arrays_of
from adam_async.run.store_record import served_word
from adam_async.run.training_program import TrainingProgram
from adam_async.runtime.channel import Endpoint
from adam_async.runtime.traffic import Traffic
from tests.adam_async.cluster.test_elastic import IMAGES, elastic
from tests.adam_async.cluster.test_local import QUICK as CLUSTER_WAITS
from tests.adam_async.runs import NETWORKS, PATIENT, Rough, address_of, entropy_of, tiny_dataset, turns, until
from tests.transport.testing import Faults
from transport import Identity, RemoteError

pytestmark = pytest.mark.thorough

RUN = "run"
GROUPS = 20
DATA = tiny_dataset(train=4 * GROUPS)
QUICK = msgspec.structs.replace(PATIENT, grace_s=0.1)
"""Waits after which a silent node is soon removed."""


@pytest.fixture(autouse=True)
def soon_another_is_looked_for(monkeypatch):
    """Limit the time that a client dials a lost data server."""
    monkeypatch.setattr(client_module, "DIAL_S", 0.05)


class Worker:
    """A replica of one worker, which trains nothing; each group's loss is another power of two."""

    def __init__(self, party, number):
        self.party, self.number = party, number
        self.asked: list[str] = []
        """Data servers that it asked, in order."""
        self.trained: list[tuple[int, int, int]] = []
        self.gate = asyncio.Event()
        self.gate.set()

    async def run(self, group):
        member = self.party.member("worker", self.number, group)
        self.member = member
        cluster = await member.wait_for(lambda m: m.replica_generation(self.number) > 0, "a place", 30.0)
        replica_generation = cluster.replica_generation(self.number)
        self.traffic = Traffic(member.node)
        self.client = DataClient(
            Endpoint(self.party.network, member._identity, self.traffic),
            WorkerSlot(RUN, self.number, replica_generation, 0),
            address=self._address,
            ahead=4,
            limits=GroupLimits(images=4, pixels=64, classes=10, epochs=9, train_images=4 * GROUPS),
            waits=self.party.waits,
        )
        await member.set_node(ready=ready_word(RUN, replica_generation))
        self.party.tasks += [
            group.create_task(self.client.run(), name="client"),
            group.create_task(self._look(), name="look"),
            group.create_task(self._train(), name="train"),
        ]

    def _address(self, attempt):
        address = self.member.map.ledger_leader_for(self.number, attempt)
        if address and self.asked[-1:] != [address]:
            self.asked.append(address)
        return address

    @property
    def settled(self):
        """Whether there is a link to the data server that is asked now."""
        address = self.member.map.ledger_leader_for(self.number, self.client._silent)
        wanted = [name for name, node in self.member.map.nodes.items() if node.address == address]
        links = [link.peer.node for link in self.traffic.links]
        return self.member.map.ledger_leaders == self.party.map.ledger_leaders and links == wanted

    async def _look(self):
        async for _ in self.member.changes():
            self.client.map_changed()

    async def _train(self):
        client = self.client
        while True:
            while not client.has_group:
                await client.wait_group()
            await self.gate.wait()
            await turns(3)
            group = client.take()
            lease = group.lease
            assert len(group.images) == len(group.labels) == lease.images
            self.trained.append((lease.epoch, lease.number, lease.attempt))
            loss = float(2**lease.number) / lease.images
            client.finished(Finished(lease.epoch, lease.number, lease.attempt, lease.images, loss))


class Party:
    """A controller, data servers and workers of a run of one epoch; others are in the map only."""

    def __init__(self, network, waits, stack, group):
        self.network, self.waits = network, waits
        self.tasks = []
        self.servers: dict[str, DataServer] = {}
        self._stack, self._group = stack, group
        self._entropy = entropy_of("party")

    def identity(self, role, node):
        return Identity(role=role, node=node, incarnation=int.from_bytes(self._entropy(7), "little"))

    async def start(self, servers, **options):
        self.controller = Controller(
            RoleSettings(
                network=self.network,
                address=address_of(self.network),
                identity=self.identity("controller", "controller"),
                waits=self.waits,
            ),
            kinds=PROGRAM_KINDS,
        )
        await self._stack.enter_async_context(self.controller)
        for number in range(servers):
            await self.join(f"data-{number}")
        driver, ps = (self.member(role, 0, self._group) for role in ("driver", "ps"))
        self.driver = driver
        for member in (driver, ps):
            await member.wait_for(lambda _, member=member: member.joined, "a seat", 30.0)
        config = Config(
            images_per_group=4, epochs=1, replicas=2, threads=1, waits=self.waits, read_ahead=4, **options
        )
        program = TrainingProgram(config=config, spec=digits().to_dict())
        run = program.record(RUN, driver.member)
        await submit(driver, run)
        arrays = arrays_of(Network(digits()), None)
        await driver.create_store(RUN, store_of(run, program, arrays), arrays)
        await ps.wait_for(lambda m: bool(m.buckets), "the placement", 30.0)
        await ps.set_node(serves=(served_word(ps.map.run_store),))
        await until(lambda: len(self.map.ledger_leaders) == servers)

    async def train(self, *, waiting=False):
        """Let two workers take part; waiting ones take no group before their gates open."""
        self.workers = [Worker(self, number) for number in range(2)]
        for worker in self.workers:
            if waiting:
                worker.gate.clear()
            await worker.run(self._group)

    def member(self, role, number, group):
        identity = self.identity(role, f"{role}-{number}")
        member = Membership(
            network=self.network,
            controller=self.controller.address,
            identity=identity,
            record=NodeRecord(
                role=role, address=f"local://{identity.node}", incarnation=identity.incarnation
            ),
            waits=self.waits,
            traffic=Traffic(identity.node),
        )
        self.tasks.append(group.create_task(member.run(), name=identity.node))
        return member

    def data_server(self, node, dataset=DATA):
        return DataServer(
            RoleSettings(
                network=self.network,
                address=address_of(self.network),
                identity=self.identity("data", node),
                waits=self.waits,
                controller=self.controller.address,
            ),
            dataset,
        )

    async def join(self, node):
        self.servers[node] = await self._stack.enter_async_context(self.data_server(node))

    async def end(self, node):
        await self.servers.pop(node).__aexit__(None, None, None)

    @property
    def map(self):
        return self.controller.map

    @property
    def ledger_leader(self):
        return self.map.ledger_leaders[0]

    @property
    def finished(self):
        """Groups that are finished, as far as the lender knows."""
        server = self.servers.get(self.ledger_leader) if self.map.ledger_leaders else None
        return server.state.statistics().finished if server is not None else 0

    async def result(self):
        """Return the result of the epoch; every image and every group's loss was counted once."""
        await until(lambda: self.map.epoch is not None and self.map.epoch.ended)
        result = self.map.epoch.result
        assert result["images"] == 4 * GROUPS
        assert result["loss"] * result["images"] == pytest.approx(2**GROUPS - 1, rel=1e-12)
        return result


@asynccontextmanager
async def party_of(network, servers=2, *, waits=QUICK, **options):
    async with AsyncExitStack() as stack:
        group = await stack.enter_async_context(asyncio.TaskGroup())
        party = Party(network, waits, stack, group)
        stack.callback(lambda: [task.cancel() for task in party.tasks])
        await party.start(servers, **options)
        yield party


@pytest.fixture(params=NETWORKS)
def network(request):
    return NETWORKS[request.param]()


async def ask(party, node, **more):
    """Ask a data server for the first groups of a replica."""
    body = LeaseGroups(
        run=RUN, replica=0, partition=0, position=0, count=3, wait_s=1.0, heard=-1, rows=None, **more
    )
    address = party.map.nodes[node].address
    (worker,) = party.map.members(0)
    identity = Identity(role="worker", node=worker, incarnation=party.map.nodes[worker].incarnation)
    async with party.network.connect(address, identity) as link:
        reply = await link.call(pack(body), timeout_s=20.0)
        return unpack(reply, Groups).leases, [np.array(tensor) for tensor in reply.tensors]


async def test_every_data_server_answers_the_same_question_with_the_same_groups_and_images(network):
    async with party_of(network, 3) as party:
        await party.train()
        for worker in party.workers:
            worker.gate.clear()
        await until(lambda: all(worker.client.has_group for worker in party.workers))
        replica_generation = party.map.replica_generation(0)
        (leases, first), *others = [
            await ask(party, node, replica_generation=replica_generation) for node in party.map.ledger_leaders
        ]
        assert len(leases) > 0
        assert len(others) == 2
        for told, tensors in others:
            assert told == leases
            for one, other in zip(first, tensors, strict=True):
                np.testing.assert_array_equal(one, other)


async def test_workers_are_spread_over_the_data_servers(network):
    async with party_of(network, 2) as party:
        await party.train()
        result = await party.result()
        assert {worker.asked[0] for worker in party.workers} == {
            server.address for server in party.servers.values()
        }
        assert all(len(worker.asked) == 1 for worker in party.workers)
        assert result["trained_again"] == 0
        assert party.map.ledger_record.term == 1


@pytest.mark.parametrize("servers", [2, 3])
async def test_when_the_ledger_leader_is_lost_another_goes_on_and_every_group_is_counted_once(
    network, servers
):
    async with party_of(network, servers) as party:
        await party.train()
        await until(lambda: party.finished >= GROUPS // 4)
        lost = party.ledger_leader
        address = party.servers[lost].address
        await party.end(lost)
        result = await party.result()
        assert party.map.ledger_record.term == 2
        assert lost not in party.map.ledger_leaders
        told = [each for worker in party.workers for each in worker.trained]
        assert len(told) == len(set(told)) == GROUPS, "no group was leased again by the loss"
        assert result["trained_again"] == 0
        assert all(worker.asked[-1] != address for worker in party.workers)


async def test_one_ledger_leader_after_the_other_may_be_lost(network):
    async with party_of(network, 3) as party:
        await party.train()
        for term in (1, 2):
            await until(lambda term=term: party.finished >= term * GROUPS // 4)
            await party.end(party.ledger_leader)
        await party.result()
        assert party.map.ledger_record.term == 3


async def test_the_loss_of_a_ledger_replica_changes_no_term(network):
    async with party_of(network, 2) as party:
        await party.train()
        await until(lambda: party.finished >= GROUPS // 4)
        await party.end(party.map.ledger_leaders[1])
        await party.result()
        assert party.map.ledger_record.term == 1
        assert len(party.map.ledger_leaders) == 1


async def test_a_data_server_that_joins_in_the_middle_soon_has_the_ledger_and_can_lead(network):
    async with party_of(network, 1) as party:
        await party.train()
        await until(lambda: party.finished >= GROUPS // 4)
        for worker in party.workers:
            worker.gate.clear()
        await party.join("data-7")
        await until(lambda: party.map.ledger_leaders == ("data-0", "data-7"))
        await party.end("data-0")
        await until(lambda: party.map.ledger_leaders == ("data-7",))
        for worker in party.workers:
            worker.gate.set()
        result = await party.result()
        assert result["trained_again"] == 0


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (tiny_dataset(train=60), "train_images is 60, not 80"),
        (tiny_dataset(train=4 * GROUPS, shape=(1, 9, 9)), "shape is"),
        (tiny_dataset(train=4 * GROUPS, classes=9), "classes is|labels is"),
    ],
)
async def test_a_server_with_other_data_is_refused_and_the_others_go_on(network, other, said):
    async with party_of(network, 2) as party:
        await party.train()
        with pytest.raises(ExceptionGroup) as failure:
            async with party.data_server("data-9", other):
                await asyncio.Event().wait()
        cause = first_cause(failure.value)
        assert isinstance(cause, DataError)
        assert re.search(said, str(cause))
        assert f"data-9 has other data than {party.ledger_leader}" in str(cause)
        await party.result()


@pytest.mark.parametrize("inner", NETWORKS)
async def test_a_silent_ledger_replica_is_removed_and_leasing_goes_on(inner):
    rough = Rough(NETWORKS[inner](), Faults(), dialler="data", towards="data")
    async with party_of(rough, 2) as party:
        await party.train()
        await until(lambda: party.finished >= GROUPS // 4)
        ledger_leader = party.ledger_leader
        begin = asyncio.get_running_loop().time()
        rough.faults = Faults(drop=1.0)
        await party.result()
        assert asyncio.get_running_loop().time() - begin < 20 * QUICK.grace_s
        assert party.map.ledger_leaders == (ledger_leader,)
        assert party.map.ledger_record.term == 1
        rough.faults = Faults()
        await until(lambda: len(party.map.ledger_leaders) == 2)


@pytest.mark.parametrize("inner", NETWORKS)
async def test_a_request_on_its_way_to_a_lost_ledger_leader_is_answered_by_the_next(inner):
    rough = Rough(NETWORKS[inner](), Faults(), dialler="data", towards="data")
    waits = msgspec.structs.replace(QUICK, grace_s=5.0)
    async with party_of(rough, 2, waits=waits) as party, asyncio.TaskGroup() as group:
        await party.train()
        for worker in party.workers:
            worker.gate.clear()
        await until(lambda: all(worker.client.has_group for worker in party.workers))
        ledger_leader, other = party.map.ledger_leaders
        rough.faults = Faults(drop=1.0)
        asking = group.create_task(
            ask(party, other, replica_generation=party.map.replica_generation(0)), name="ask"
        )
        await until(lambda: len(party.servers[other]._questions.events()) > 0)
        await turns(20)
        await party.driver.report_death(ledger_leader)
        await asking
        assert party.map.ledger_leaders == (other,)


async def test_a_live_ledger_leader_that_was_taken_for_lost_settles_nothing_more_and_comes_back(network):
    async with party_of(network, 2) as party:
        await party.train()
        await until(lambda: party.finished >= GROUPS // 4)
        name, other = party.map.ledger_leaders
        old, record = party.servers[name], party.map.nodes[name]
        await party.driver.report_death(name)
        await until(lambda: party.map.ledger_record.term == 2)
        result = await party.result()
        await until(lambda: party.map.ledger_leaders == (other, name))
        assert party.map.nodes[name].incarnation == record.incarnation
        await until(lambda: old.statistics().ledger.term == 2)
        assert not old.statistics().ledger.leads
        assert result["trained_again"] == 0
        # Whoever they go to from here on: a link that is being made must not outlive the test.
        await until(lambda: all(worker.settled for worker in party.workers))


async def refused(party, server, body, tensors=(), role="data"):
    async with party.network.connect(server.address, party.identity(role, f"{role}-8")) as link:
        with pytest.raises(RemoteError) as failure:
            await link.call(pack(body, tensors), timeout_s=20.0)
    return failure.value.code


async def test_only_the_ledger_leader_enters_and_only_for_replicas_of_its_term(network):
    async with party_of(network, 2) as party:
        ledger_leader, other = (party.servers[name] for name in party.map.ledger_leaders)
        nothing = [packed_tensor([])]
        assert await refused(party, other, Enter(run=RUN, term=1), nothing) == "not-ledger-leader"
        assert await refused(party, ledger_leader, Enter(run=RUN, term=2), nothing) == "not-ledger-leader"
        assert await refused(party, ledger_leader, Enter(run=RUN, term=1), nothing) == "not-ledger-replica"
        assert await refused(party, ledger_leader, Enter(run="old", term=1), nothing) == "wrong-run"
        assert await refused(party, other, CopyLedger(run="old", term=1), nothing) == "wrong-run"
        assert await refused(party, other, CopyLedger(run=RUN, term=1), nothing) == "not-member"
        async with party.network.connect(other.address, ledger_leader._identity) as link:
            with pytest.raises(RemoteError, match="malformed"):
                await link.call(pack(CopyLedger(run=RUN, term=1), nothing), timeout_s=20.0)


async def test_a_ledger_of_a_non_member_in_a_later_term_is_not_taken(network):
    async with party_of(network, 2) as party:
        ledger_leader, other = (party.servers[name] for name in party.map.ledger_leaders)
        foreign = [packed_tensor(Part(first=0, settled=0, opening=Opening()))]
        for server in (ledger_leader, other):
            assert await refused(party, server, CopyLedger(run=RUN, term=9), foreign) == "not-member"
            assert server.statistics().ledger.term == 1
        assert ledger_leader.statistics().ledger.leads


async def test_a_later_term_is_taken_when_the_map_names_its_leader_and_not_before(network):
    async with party_of(network, 2) as party:
        ledger_leader, other = (party.servers[name] for name in party.map.ledger_leaders)
        opening = [packed_tensor(Part(first=0, settled=0, opening=Opening()))]
        async with party.network.connect(ledger_leader.address, other._identity) as link:
            with pytest.raises(RemoteError, match="not-ledger-leader"):
                await link.call(pack(CopyLedger(run=RUN, term=1), opening), timeout_s=20.0)
            copy = pack(CopyLedger(run=RUN, term=2), opening)
            first, second = (link.call_nowait(copy, timeout_s=20.0) for _ in range(2))
            with pytest.raises(RemoteError, match="not-ledger-leader"):
                await first
            assert ledger_leader.statistics().ledger.leads
            await party.driver.report_death(ledger_leader._identity.node)
            unpack(await second, LedgerCopied)
        assert not ledger_leader.statistics().ledger.leads


async def test_only_the_worker_that_has_a_part_asks_for_its_groups_and_reports_them(network):
    async with party_of(network, 2) as party:
        await party.train()
        await until(lambda: all(0 in server.state.replica_generations for server in party.servers.values()))
        part = {
            "run": RUN,
            "replica": 0,
            "replica_generation": party.map.replica_generation(0),
            "partition": 0,
        }
        questions = (
            LeaseGroups(**part, position=0, count=1, wait_s=0.0),
            ReportGroups(**part, finished=(Finished(1, 0, 1, 1, 0.5),)),
        )
        for server in party.servers.values():
            for question in questions:
                assert await refused(party, server, question, role="worker") == "not-yours"


# --- whole clusters -----------------------------------------------------------------------------

MODES = {
    "asp": {},
    "ssp": {"consistency": "ssp:2", "push_every": 2},
    "bsp": {"consistency": "bsp"},
    "bsp-cut": {"consistency": "bsp", "partitions": 2},
    "pool": {"epoch_rule": "images", "epoch_fraction": 1.0},
}


async def kill(server):
    """End a data server without letting it finish what it waits for."""
    with suppress(ExceptionGroup):
        await server.__aexit__(RuntimeError, RuntimeError("killed"), None)


async def end_ledger_leader(cluster, *, after, epoch=1):
    """End the lender when so many groups of an epoch are finished."""
    servers = {server._identity.node: server for server in cluster.data_servers}

    def progress():
        ledger_leaders = cluster.controller.map.ledger_leaders
        if not ledger_leaders:
            return 0, 0
        statistics = servers[ledger_leaders[0]].state.statistics()
        return statistics.epoch, statistics.finished

    await until(lambda: progress() >= (epoch, after))
    await kill(servers[cluster.controller.map.ledger_leaders[0]])


@pytest.mark.parametrize(("mode", "network"), [*((mode, "local") for mode in MODES), ("bsp", "tcp")])
async def test_in_every_mode_another_data_server_goes_on_where_the_ledger_leader_was(mode, network):
    async with (
        elastic(network, data_servers=2, replicas=2, **MODES[mode]) as cluster,
        asyncio.TaskGroup() as group,
    ):
        training = group.create_task(cluster.train(), name="train")
        await end_ledger_leader(cluster, after=10)
        result = await training
        assert cluster.controller.map.ledger_record.term == 2
        for server in cluster.data_servers:
            server.state.check_invariants()
    assert [epoch.images for epoch in result.epochs] == [IMAGES] * 2
    assert all(np.isfinite(values).all() for values in result.weights.values())


@pytest.mark.parametrize("mode", ["asp", "bsp"])
async def test_a_run_stops_with_its_checkpoint_when_the_ledger_leader_is_lost_meanwhile(mode, tmp_path):
    waits = msgspec.structs.replace(CLUSTER_WAITS, dial_s=0.5, call_s=5.0)  # the lost one is asked, in vain
    options = {"data_servers": 2, "replicas": 2, "waits": waits, **MODES[mode]}
    async with elastic(checkpoint=tmp_path, **options) as cluster, asyncio.TaskGroup() as group:
        training = group.create_task(cluster.train(), name="train")
        await end_ledger_leader(cluster, after=20)
        cluster.stop()
        result = await training
        assert cluster.controller.map.ledger_record.term == 2
    (last,) = result.checkpoints
    assert last.name == f"checkpoint-0001-{result.epochs[-1].images // cluster.config.images_per_group:06}"


def test_an_answer_to_an_earlier_incarnation_is_never_taken_for_an_answer_to_this_one() -> None:
    firsts = [first_question(incarnation) for incarnation in (0, 1, 2, 2000, 2001, (1 << 28) - 1)]

    assert all(later - first >= 1 << 24 for first, later in pairwise(firsts))
    assert firsts[-1] + (1 << 24) <= 1 << 53
