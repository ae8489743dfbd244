"""Data servers are lost in the middle of an epoch: every group is counted once, and on the shards once."""

import asyncio
import random
import re
from collections import Counter
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from random import Random

import msgspec
import numpy as np
import pytest

from adam_async.controller.client import Membership
from adam_async.controller.role import RoleSettings
from adam_async.controller.service import Controller
from adam_async.data_server import client as client_module
from adam_async.data_server import group_reader
from adam_async.data_server.client import DataClient, WorkerSlot
from adam_async.data_server.dealer import Dealer, merged
from adam_async.data_server.epoch import SetsRead
from adam_async.data_server.group_reader import GroupLimits
from adam_async.data_server.service import DataServer
from adam_async.data_server.state import LeaseAsked, ReplicasChanged
from adam_async.driver.preparation import store_of
from adam_async.driver.takeover import submit, update_program
from adam_async.errors import DataError, first_cause
from adam_async.messages import (
    BundleSets,
    Finished,
    Groups,
    LeaseGroups,
    ReadGroups,
    ReadGroupSets,
    ReportGroups,
    pack,
    unpack,
)
from adam_async.messages.group_sets import LossSum
from adam_async.model.named import digits
from adam_async.model.network import Network
from adam_async.run.cluster_map import NodeRecord, ready_word
from adam_async.run.config import Config
from adam_async.run.group_ranges import name_groups, with_losses
from adam_async.run.ids import Replica
from adam_async.run.partition import arrays_of
from adam_async.run.store_record import served_word
from adam_async.run.training_program import ResumeRecord, TrainingProgram, read_training
from adam_async.runtime.channel import Endpoint
from adam_async.runtime.traffic import Traffic
from tests.adam_async.cluster.test_elastic import IMAGES, elastic
from tests.adam_async.cluster.test_local import QUICK as CLUSTER_WAITS
from tests.adam_async.cluster_maps import training
from tests.adam_async.exactness.serial import assert_equal_bits
from tests.adam_async.runs import NETWORKS, PATIENT, address_of, entropy_of, tiny_dataset, turns, until
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
    monkeypatch.setattr(group_reader, "DIAL_S", 0.05)


class Worker:
    """A replica of one worker, which trains nothing; each group's loss is another power of two."""

    def __init__(self, party, number):
        self.party, self.number = party, number
        self.trained: list[tuple[int, int, int]] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.may_be_ready = asyncio.Event()
        self.may_be_ready.set()
        self.generation = 0
        self.asked: list[str] = []
        """Data servers that it read images from, in order."""

    def _servers(self):
        servers = self.member.map.data_servers_for(self.number)
        if servers and self.asked[-1:] != [servers[0]]:
            self.asked.append(servers[0])
        return servers

    async def run(self, group):
        self.member = self.party.member("worker", self.number, group)
        self.traffic = Traffic(self.member.node)
        self.party.tasks.append(group.create_task(self._follow(group), name="worker"))

    async def _follow(self, group):
        """Begin again in each generation of the replica."""
        tasks = []
        async for cluster in self.member.changes():
            generation = cluster.replica_generation(self.number)
            if generation != self.generation:
                for task in tasks:
                    task.cancel()
                self.generation, tasks = generation, []
                if generation:
                    tasks = self._begin(generation, group)
                    await self.may_be_ready.wait()
                    await self.member.set_node(ready=ready_word(RUN, generation))
            elif generation:
                self.client.map_changed()

    def _begin(self, generation, group):
        self.client = DataClient(
            Endpoint(self.party.network, self.member._identity, self.traffic),
            WorkerSlot(RUN, self.number, generation, 0),
            address=lambda: self.member.map.dealer_address,
            servers=self._servers,
            ahead=4,
            limits=GroupLimits(
                images=4, shape=DATA.image_shape, classes=10, epochs=9, train_images=4 * GROUPS
            ),
            waits=self.party.waits,
        )
        tasks = [
            group.create_task(self.client.run(), name="client"),
            group.create_task(self._train(self.client, generation), name="train"),
        ]
        self.party.tasks += tasks
        return tasks

    async def _train(self, client, generation):
        while True:
            while not client.has_group:
                await client.wait_group()
            await self.gate.wait()
            await turns(3)
            group = client.take()
            lease = group.lease
            assert len(group.images) == len(group.labels) == lease.images
            await self.party.push(self.number, generation, lease)
            self.trained.append((lease.epoch, lease.number, lease.attempt))
            client.finished(Finished(lease.epoch, lease.number, lease.attempt, lease.images, 0.0))


class Party:
    """A controller, data servers and workers of a run of one epoch; others are in the map only."""

    def __init__(self, network, waits, stack, group):
        self.network, self.waits = network, waits
        self.tasks = []
        self.servers: dict[str, DataServer] = {}
        self.pushed: set[int] = set()
        """Groups that all shards have."""
        self.ragged: set[int] = set()
        """Groups that only some shards have."""
        self.losses = {}
        self.readings: list[ReadGroupSets] = []
        self._stack, self._group = stack, group
        self._entropy = entropy_of("party")

    def identity(self, role, node):
        return Identity(role=role, node=node, incarnation=int.from_bytes(self._entropy(7), "little"))

    async def start(self, servers, *, resumed=None, **options):
        self.controller = Controller(
            RoleSettings(
                network=self.network,
                address=address_of(self.network),
                identity=self.identity("controller", "controller"),
                waits=self.waits,
            )
        )
        await self._stack.enter_async_context(self.controller)
        for number in range(servers):
            await self.join(f"data-{number}")
        identity = self.identity("ps", "ps-0")
        listens = self.network.listen(address_of(self.network), identity, self._serve_sets)
        shards = await self._stack.enter_async_context(listens)
        ps = self.ps = self.member("ps", 0, self._group, identity=identity, address=shards.address)
        driver = self.driver = self.member("driver", 0, self._group)
        for member in (driver, ps):
            await member.wait_for(lambda _, member=member: member.joined, "a seat", 30.0)
        config = Config(
            images_per_group=4,
            replicas=2,
            threads=1,
            waits=self.waits,
            read_ahead=4,
            **{"epochs": 1, **options},
        )
        program = TrainingProgram(config=config, spec=digits().to_dict(), resumed=resumed)
        run = program.record(RUN, driver.member)
        await submit(driver, run)
        arrays = arrays_of(Network(digits()), None)
        await driver.create_store(RUN, store_of(run, program, arrays), arrays)
        await ps.wait_for(lambda m: bool(m.buckets), "the placement", 30.0)
        await ps.set_node(serves=(served_word(ps.map.run_store),))
        await until(lambda: len(self.ready) == servers)

    async def train(self, *, waiting=False):
        """Let two workers take part; waiting ones take no group before their gates open."""
        self.workers = [Worker(self, number) for number in range(2)]
        for worker in self.workers:
            if waiting:
                worker.gate.clear()
            await worker.run(self._group)

    async def push(self, replica, generation, lease):
        """Take a group of a generation in the map of the shards; one of another generation waits."""
        await self.ps.wait_for(
            lambda m: m.replica_generations().get(replica) == generation, "the generation", 30.0
        )
        number = lease.number
        assert number not in self.pushed, f"group {number} is on all shards"
        if number not in self.ragged:
            self.losses = with_losses(self.losses, 1, lease.images, 2.0**number)
        self.pushed.add(number)
        self.ragged.discard(number)

    async def _serve_sets(self, link):
        link.serve(self._send_sets, receives=False)
        await link.wait_closed()

    def _send_sets(self, request):
        body = unpack(request.message, ReadGroupSets)
        if self.ps.map.version < body.map_version:
            request.fail("busy", "the map is older")
            return
        self.readings.append(body)
        sets = [np.array(name_groups(1, each)[1:], np.int64) for each in (self.pushed, self.ragged)]
        counted = self.losses.get(1, LossSum())
        body = BundleSets(trainable=True, clock=0, images=counted.images, loss_sum=counted.total)
        request.reply(pack(body, sets))

    def member(self, role, number, group, *, identity=None, address=""):
        identity = identity or self.identity(role, f"{role}-{number}")
        member = Membership(
            network=self.network,
            controller=self.controller.address,
            identity=identity,
            record=NodeRecord(
                role=role, address=address or f"local://{identity.node}", incarnation=identity.incarnation
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
    def ready(self):
        return [name for name in self.map.live("data") if self.map.nodes[name].ready == RUN]

    @property
    def dealer(self):
        return self.map.dealing

    @property
    def finished(self):
        """Groups that are finished, as far as the dealer knows."""
        server = self.servers.get(self.dealer)
        return server.state.statistics().finished if server is not None else 0

    async def result(self):
        """Return the result of the epoch: every image was counted once, with its loss, and is on the shards
        once."""
        await until(lambda: self.map.epoch is not None and self.map.epoch.ended)
        result = self.map.epoch.result
        assert result.images == 4 * GROUPS
        assert (self.pushed, self.ragged) == (set(range(GROUPS)), set())
        assert (result.loss * result.images, result.loss_images) == (2**GROUPS - 1, 4 * GROUPS)
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


@asynccontextmanager
async def dealer_of(maps, program, waits=QUICK):
    """A dealer in the newest of some maps; yields it and its task."""
    identity = Identity(role="data", node="data-0", incarnation=1)
    endpoint = Endpoint(NETWORKS["local"](), identity, Traffic("data-0"))
    dealer = Dealer(endpoint, waits, cluster=lambda: maps[-1], on_effects=lambda _: None)
    async with asyncio.TaskGroup() as group:
        task = group.create_task(dealer.run(), name="dealer")
        await turns()
        dealer.take_up("run-1", program, images=100)
        dealer.map_changed(maps[-1])
        yield dealer, task
        task.cancel()


async def test_a_run_that_is_replaced_before_the_first_question_for_its_sets_ends_no_dealer():
    cluster = training(resumed=ResumeRecord(epoch=1, clock=0))
    maps = [cluster.map]
    async with dealer_of(maps, read_training(cluster.map.run)) as (_, task):
        maps.append(msgspec.structs.replace(cluster.map, stores={}))
        await turns(3)
        assert not task.done()


async def test_skipped_groups_that_no_epoch_has_are_left_out():
    """A false record may name them, and each would take memory."""
    cluster = training()
    groups = cluster.map.epoch.groups
    false = ((2, 4), (groups - 1, groups + 9), (groups + 20, groups + 30))
    program = read_training(cluster.map.run)
    program = msgspec.structs.replace(program, resumed=ResumeRecord(epoch=1, clock=0, skipped=(false,)))
    async with dealer_of([cluster.map], program) as (dealer, _):
        dealer._begin(cluster.map.epoch, SetsRead(epoch=1, version=1, every=frozenset(), some=frozenset()))
        assert dealer.state.statistics().skipped_groups == ((2, 4), (groups - 1, groups))
        dealer.state.check_invariants()


async def test_a_dealer_that_has_ended_reads_no_sets():
    """A link may bring a report before the end of the server closes it."""
    cluster = training()
    async with dealer_of([cluster.map], read_training(cluster.map.run)) as (dealer, task):
        dealer.enter(
            LeaseAsked(
                request=1,
                replica=Replica(0),
                replica_generation=cluster.map.replica_generation(0),
                partition=0,
                epoch=0,
                position=0,
                heard=-1,
                count=1,
                wait_s=0.0,
            )
        )
        task.cancel()
        await asyncio.wait([task])
        dealer.enter(ReplicasChanged({}, version=99))
        assert (dealer.state.lost_at, dealer.deals) == (99, False)


async def test_without_a_lost_role_the_sets_are_read_once_for_the_losses_of_the_epoch(network):
    async with party_of(network, 2) as party:
        await party.train()
        await party.result()
        assert (party.map.dealer.term, len(party.readings)) == (1, 1)
        terms = [server.statistics().term for server in party.servers.values()]
        assert sorted(terms) == [0, 1]
        # Each replica reads its images from another server.
        assert {worker.asked[0] for worker in party.workers} == {
            server.address for server in party.servers.values()
        }


async def test_every_data_server_sends_the_same_images_of_a_group(network):
    async with party_of(network, 3) as party:
        await party.train(waiting=True)
        await until(lambda: party.servers[party.dealer].state.leased == 8)
        (name,) = party.map.members(0)
        worker = Identity(role="worker", node=name, incarnation=party.map.nodes[name].incarnation)
        question = ReadGroups(run=RUN, epoch=1, numbers=(0, 3, 17), least=3)
        answers = []
        for server in party.servers.values():
            async with party.network.connect(server.address, worker) as link:
                reply = await link.call(pack(question), timeout_s=20.0)
                assert unpack(reply, Groups).count == 3
                answers.append([np.concatenate(reply.tensors[:-1]), np.array(reply.tensors[-1])])
        for images, labels in answers:
            np.testing.assert_array_equal(images, answers[0][0])
            np.testing.assert_array_equal(labels, answers[0][1])


async def test_a_lost_replica_is_settled_by_the_sets_of_the_shards(network):
    async with party_of(network, 1) as party:
        await party.train(waiting=True)
        state = party.servers["data-0"].state
        await until(lambda: state.statistics().leased == 8)
        lost = sorted(number for number, lease in state._epoch.leases.items() if lease.replica == 1)
        # The worker dies after pushes that it has not reported: of two groups to all shards, of one to some.
        party.pushed.update(lost[:2])
        party.ragged.add(lost[2])
        (name,) = party.map.members(1)
        await party.driver.report_death(name, 1.7e9)
        await until(lambda: state.statistics().finished == 2)
        assert party.readings[0].map_version <= party.map.version
        party.workers[0].gate.set()
        party.workers[1].gate.set()
        await until(lambda: party.map.epoch.ended)
        again = [lease[1] for worker in party.workers for lease in worker.trained if lease[2] > 1]
        assert sorted(again) == lost[2:]
        assert party.pushed == set(range(GROUPS))


@pytest.mark.parametrize("servers", [2, 3])
async def test_when_the_dealer_is_lost_another_goes_on_and_every_group_is_counted_once(network, servers):
    async with party_of(network, servers) as party:
        await party.train()
        await until(lambda: party.finished >= GROUPS // 4)
        lost = party.dealer
        await party.end(lost)
        await party.result()
        assert party.map.dealer.term == 2
        assert lost != party.dealer
        assert party.readings[0].map_version == party.map.dealer.changed


async def test_a_resumed_run_trains_what_each_shard_lacks(network):
    async with party_of(network, 2, resumed=ResumeRecord(epoch=1, clock=0), push_every=2) as party:
        party.pushed.update(range(10))
        party.ragged.update((12, 15))
        await party.train()
        await until(lambda: party.map.epoch is not None and party.map.epoch.ended)
        assert party.pushed == set(range(GROUPS))
        trained = sorted(lease[1:3] for worker in party.workers for lease in worker.trained)
        assert trained == [(n, 2 if n in (12, 15) else 1) for n in range(10, GROUPS)]
        assert {reading.epoch for reading in party.readings} == {1}


async def test_a_dealer_may_be_lost_between_two_epochs(network):
    async with party_of(network, 2, epochs=2) as party:
        await party.train()
        await until(lambda: party.map.run.phase == "between")
        await party.end(party.dealer)
        await until(lambda: party.dealer and party.map.dealer.term == 2)
        party.pushed.clear()
        party.losses = {}
        goes_on = {"phase": "training", "epoch": 2}
        await update_program(party.driver, lambda run: msgspec.structs.replace(run, **goes_on))
        await until(lambda: party.map.epoch.number == 2)
        await party.result()


async def test_one_dealer_after_the_other_may_be_lost(network):
    async with party_of(network, 3) as party:
        await party.train()
        for term in (1, 2):
            await until(lambda term=term: party.finished >= term * GROUPS // 4)
            await party.end(party.dealer)
        await party.result()
        assert party.map.dealer.term == 3


async def test_all_data_servers_may_be_lost_and_another_one_goes_on(network):
    async with party_of(network, 2) as party:
        await party.train()
        await until(lambda: party.finished >= GROUPS // 4)
        for name in list(party.servers):
            await party.end(name)
        await until(lambda: not party.map.live("data"))
        assert party.map.run.phase == "training"
        await party.join("data-7")
        await party.result()
        assert party.map.dealer.node == "data-7"


async def test_a_dealer_reads_no_sets_before_all_workers_have_told_what_they_hold(network, monkeypatch):
    lease_on, may_tell = DataClient._lease_on, asyncio.Event()

    async def tell_late(client, link):
        if client._slot.replica == 1 and client._position:
            await may_tell.wait()
        await lease_on(client, link)

    monkeypatch.setattr(DataClient, "_lease_on", tell_late)
    async with party_of(network, 2) as party:
        await party.train()
        await until(lambda: party.finished >= GROUPS // 4)
        await party.end(party.dealer)
        await until(lambda: party.dealer and party.map.dealer.term == 2)
        await turns(100)
        assert not party.readings
        may_tell.set()
        await party.result()


async def begin_reading(party):
    """Lose the dealer in the middle of an epoch, and hold the questions of the next one for sets.

    Returns what answers a question, and the questions.
    """
    await party.train()
    await until(lambda: party.finished >= GROUPS // 4)
    asked = []
    answer, party._send_sets = party._send_sets, asked.append
    await party.end(party.dealer)
    await until(lambda: asked)
    return answer, asked


async def test_a_replica_that_is_lost_while_a_dealer_begins_costs_no_group(network):
    async with party_of(network, 2) as party:
        answer, asked = await begin_reading(party)
        lost = party.workers[1].member.member[0]
        await party.driver.report_death(lost, 1.7e9)
        await until(lambda: party.map.live_replicas() == (0,))
        await until(lambda: len(asked) > 1)
        party._send_sets = answer
        answer(asked[-1])
        await party.result()
        assert party.readings[0].map_version > party.map.dealer.changed


async def test_a_reading_waits_for_a_bundle_without_an_answer(network):
    async with party_of(network, 2) as party:
        await party.train()
        await until(lambda: party.finished >= GROUPS // 4)
        asked = []

        def refuse(request):
            asked.append(request)
            request.fail("not-primary", "this server is no primary")

        answer, party._send_sets = party._send_sets, refuse
        await party.end(party.dealer)
        await until(lambda: len(asked) > 3)
        assert party.finished == 0
        party._send_sets = answer
        await party.result()


async def test_a_dealer_that_is_lost_while_it_reads_leaves_no_trace(network):
    async with party_of(network, 3) as party:
        party._send_sets, _ = await begin_reading(party)
        await party.end(party.dealer)
        await party.result()
        assert party.map.dealer.term == 3


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (tiny_dataset(train=60), "train_images is 60, not 80"),
        (tiny_dataset(train=4 * GROUPS, shape=(1, 9, 9)), "shape is"),
        (tiny_dataset(train=4 * GROUPS, classes=9), "classes is|labels is"),
    ],
)
@pytest.mark.parametrize("alone", [False, True])
async def test_a_server_with_other_data_is_refused_and_the_others_go_on(network, other, said, alone):
    async with party_of(network, 2) as party:
        await party.train()
        if alone:
            for name in list(party.servers):
                await party.end(name)
            await until(lambda: not party.map.live("data"))
        with pytest.raises(ExceptionGroup) as failure:
            async with party.data_server("data-9", other):
                await asyncio.Event().wait()
        cause = first_cause(failure.value)
        assert isinstance(cause, DataError)
        assert re.search(said, str(cause))
        assert f"data-9 has other data than {party.map.dealer.node}" in str(cause)
        if alone:
            await party.join("data-0")
        await party.result()


async def test_a_live_dealer_that_was_taken_for_lost_ends_nothing_and_comes_back(network):
    async with party_of(network, 2) as party:
        await party.train()
        await until(lambda: party.finished >= GROUPS // 4)
        name = party.dealer
        old, record = party.servers[name], party.map.nodes[name]
        await party.driver.report_death(name, 1.7e9)
        await until(lambda: party.map.dealer.term == 2)
        await party.result()
        await until(lambda: party.map.nodes[name].live)
        assert party.map.nodes[name].incarnation == record.incarnation
        await until(lambda: old.statistics().term == 0)


async def refused(party, server, body, tensors=(), role="data"):
    async with party.network.connect(server.address, party.identity(role, f"{role}-8")) as link:
        with pytest.raises(RemoteError) as failure:
            await link.call(pack(body, tensors), timeout_s=20.0)
    return failure.value.code


async def test_only_the_worker_that_has_a_part_asks_the_dealer_for_its_groups_and_reports_them(network):
    async with party_of(network, 2) as party:
        await party.train()
        await until(lambda: 0 in party.servers[party.dealer].state.replica_generations)
        part = {
            "run": RUN,
            "replica": 0,
            "replica_generation": party.map.replica_generation(0),
            "partition": 0,
        }
        questions = (
            LeaseGroups(**part, epoch=0, position=0, count=1, wait_s=0.0),
            ReportGroups(**part, finished=(Finished(1, 0, 1, 1, 0.5),)),
        )
        for name, server in party.servers.items():
            for question in questions:
                code = "not-yours" if name == party.dealer else "no-leases"
                assert await refused(party, server, question, role="worker") == code


# --- whole clusters -----------------------------------------------------------------------------

MODES = {
    "asp": {},
    "ssp": {"consistency": "ssp:2", "push_every": 2},
    "bsp": {"consistency": "bsp"},
    "bsp-cut": {"consistency": "bsp", "partitions": 2},
    "pool": {"epoch_rule": "images", "epoch_fraction": 1.0},
}


REPLACED = msgspec.structs.replace(CLUSTER_WAITS, replica_s=30.0)
"""Waits in which no replica may be live for a while: all of them begin again after the loss of a dealer."""


async def kill(server):
    """End a data server without letting it finish what it waits for."""
    with suppress(ExceptionGroup):
        await server.__aexit__(RuntimeError, RuntimeError("killed"), None)


async def end_dealer(cluster, *, after, epoch=1):
    """End the dealer when so many groups of an epoch are finished."""
    servers = {server._identity.node: server for server in cluster.data_servers}

    def progress():
        dealer = servers.get(cluster.controller.map.dealing)
        statistics = dealer.state.statistics() if dealer is not None else None
        return (statistics.epoch, statistics.finished) if statistics is not None else (0, 0)

    await until(lambda: progress() >= (epoch, after))
    await kill(servers[cluster.controller.map.dealing])


@pytest.mark.parametrize(("mode", "network"), [*((mode, "local") for mode in MODES), ("bsp", "tcp")])
async def test_in_every_mode_another_data_server_goes_on_where_the_dealer_was(mode, network):
    async with (
        elastic(network, data_servers=2, replicas=2, waits=REPLACED, **MODES[mode]) as cluster,
        asyncio.TaskGroup() as group,
    ):
        training = group.create_task(cluster.train(), name="train")
        await end_dealer(cluster, after=10)
        result = await training
        assert cluster.controller.map.dealer.term == 2
        for server in cluster.data_servers:
            server.state.check_invariants()
    assert [epoch.images for epoch in result.epochs] == [IMAGES] * 2
    assert all(np.isfinite(values).all() for values in result.weights.values())


EXACT = {
    "short-group": {"images_per_group": 7},
    "steps": {"images_per_group": 1, "replicas": 3, "push_every": 4},
    "short-steps": {"images_per_group": 3, "replicas": 2, "push_every": 4},
    "lag": {"replicas": 3, "lag": 1, "push_every": 3},
    "warm": {"replicas": 3, "warm_start": 5, "push_every": 2},
    "cut": {"partitions": 2, "push_every": 2},
}


async def bits_of(monkeypatch, *kills, **options):
    """Train in bsp, and kill each dealer when it has entered so many events.

    Returns the weights, and the number of events of each dealer.
    """
    events = Counter()
    due = asyncio.Event()
    enter = Dealer.enter

    def counted(dealer, event):
        enter(dealer, event)
        events[dealer.term] += 1
        if dealer.term <= len(kills) and events[dealer.term] == kills[dealer.term - 1]:
            due.set()

    monkeypatch.setattr(Dealer, "enter", counted)
    options = {"data_servers": 1 + len(kills), "replicas": 2, "waits": REPLACED, **options}
    async with elastic(consistency="bsp", **options) as cluster, asyncio.TaskGroup() as group:
        training = group.create_task(cluster.train(), name="train")
        servers = {server._identity.node: server for server in cluster.data_servers}
        for term in range(1, 1 + len(kills)):
            await due.wait()
            due.clear()
            await kill(servers[cluster.controller.map.dealing])
            await until(lambda term=term: cluster.controller.map.dealer.term > term)
        result = await training
        assert cluster.controller.map.dealer.term == 1 + len(kills)
        for server in cluster.data_servers:
            server.state.check_invariants()
    monkeypatch.setattr(Dealer, "enter", enter)
    assert [epoch.images for epoch in result.epochs] == [IMAGES] * 2
    return result.weights, events


@pytest.mark.parametrize("mode", EXACT)
async def test_in_bsp_the_loss_of_dealers_at_any_moment_changes_no_bit(mode, monkeypatch):
    whole, events = await bits_of(monkeypatch, **EXACT[mode])
    dice = Random(mode)
    moments = [
        (dice.randint(1, 9),),
        (events[1] // 2 - dice.randint(0, 9),),
        (dice.randint(1, events[1] - 9),),
    ]
    for kills in (*moments, (dice.randint(9, events[1] // 2), dice.randint(1, 9))):
        weights, _ = await bits_of(monkeypatch, *kills, **EXACT[mode])
        assert_equal_bits(weights, whole)


@pytest.mark.parametrize("mode", ["asp", "bsp"])
async def test_a_run_stops_with_its_checkpoint_when_the_dealer_is_lost_meanwhile(mode, tmp_path):
    waits = msgspec.structs.replace(REPLACED, dial_s=0.5, call_s=5.0)  # the lost one is asked, in vain
    options = {"data_servers": 2, "replicas": 2, "waits": waits, **MODES[mode]}
    async with elastic(checkpoint=tmp_path, **options) as cluster, asyncio.TaskGroup() as group:
        training = group.create_task(cluster.train(), name="train")
        await end_dealer(cluster, after=20)
        cluster.stop()
        result = await training
        assert cluster.controller.map.dealer.term == 2
    (last,) = result.checkpoints
    assert last.name == f"checkpoint-0001-{result.epochs[-1].images // cluster.config.images_per_group:06}"


async def test_an_epoch_of_which_no_loss_is_known_has_a_checkpoint(tmp_path, monkeypatch):
    shipped = DataServer._report_epoch

    async def without_losses(server, run, term, number, result):
        await shipped(server, run, term, number, msgspec.structs.replace(result, loss_images=0))

    monkeypatch.setattr(DataServer, "_report_epoch", without_losses)
    async with elastic(checkpoint=tmp_path) as cluster:
        result = await cluster.train()
    assert all(np.isnan(epoch.train_loss) for epoch in result.epochs)
    assert len(result.checkpoints) == len(result.epochs)


def answer(every=(), some=(), *, trainable=True, clock=0):
    return BundleSets(trainable=trainable, clock=clock), tuple(every), tuple(some)


def test_a_group_is_on_every_shard_or_on_some_or_on_none():
    found = merged([answer((0, 4, 6, 8), (4, 5)), answer((0, 2, 6, 7), (2, 3))], 10)
    assert found == ({0, 1, 6}, {2, 3, 4, 7}, 0)


def test_a_bundle_without_trainable_shards_restricts_nothing_and_has_a_clock():
    assert merged([answer((0, 2), clock=3), answer(trainable=False, clock=7)], 4) == ({0, 1}, set(), 7)


def test_without_any_trainable_shard_no_group_counts_as_trained():
    assert merged([answer(trainable=False), answer(trainable=False)], 4) == (set(), set(), 0)


def test_groups_that_the_epoch_does_not_have_are_left_out():
    assert merged([answer((2, 1 << 32), (0, 1))], 4) == ({2, 3}, {0}, 0)


@pytest.mark.parametrize("seed", range(5))
def test_ranges_are_merged_as_sets_of_numbers_are(seed):
    dice = random.Random(seed)
    for groups in (1, 7, 30):
        every, some = ([*dice.sample(range(40), dice.randrange(12))] for _ in range(2))
        some = [number for number in some if not {number - 1, number, number + 1} & {*every}]
        found = merged([answer(name_groups(1, every)[1:], name_groups(1, some)[1:])], groups)
        assert found[:2] == tuple({n for n in numbers if n < groups} for numbers in (every, some))
