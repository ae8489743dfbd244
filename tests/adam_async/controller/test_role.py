"""The common part of all roles: requests, tasks, and the end of the block."""

import asyncio

import pytest
from msgspec.msgpack import encode

from adam_async.controller.role import Role, RoleSettings
from adam_async.errors import first_cause
from adam_async.messages import (
    GetProfile,
    GetStatistics,
    Reported,
    Statistics,
    pack,
    read_text_tensor,
    unpack,
)
from adam_async.run.config import Config
from adam_async.run.counts import Counts
from tests.adam_async.runs import NETWORKS, PATIENT, address_of, cluster_of, until
from transport import Identity, Message, RemoteError


class Bare(Role):
    """A role without work, or with the tasks of a test."""

    def __init__(self, network, *works):
        identity = Identity(role="worker", node="worker-0", incarnation=1)
        super().__init__(
            RoleSettings(network=network, address=address_of(network), identity=identity, waits=PATIENT)
        )
        self._works = works

    def _tasks(self):
        return {work.__name__: work() for work in self._works}


@pytest.fixture(params=NETWORKS)
def network(request):
    return NETWORKS[request.param]()


def link_to(role):
    return role._network.connect(
        role.address, Identity(role="driver", node="driver", incarnation=1), timeout_s=50.0
    )


async def test_every_role_sends_its_counts(network):
    async with Bare(network) as role, link_to(role) as link:
        reply = await link.call(pack(GetStatistics(run="")), timeout_s=50.0)
        sender = unpack(reply, Statistics)
        assert (sender.node, sender.role) == ("worker-0", "worker")
        assert read_text_tensor(reply, Counts, 1 << 20).node == "worker-0"
        await until(lambda: bool(role.statistics().traffic))
        (row,) = role.statistics().traffic
        assert (row.sender, row.receiver, row.type, row.messages) == ("worker-0", "driver", "Statistics", 1)


async def test_a_malformed_or_foreign_request_is_refused_and_the_link_stays_open(network):
    async with Bare(network) as role, link_to(role) as link:
        for message, code, text in (
            (Message(type="GetStatistics", meta=encode({"run": 7})), "malformed", "malformed GetStatistics"),
            (pack(GetProfile(start=0, stop=1)), "no-profile", "was started without a profile"),
        ):
            with pytest.raises(RemoteError, match=text) as failure:
                await link.call(message, timeout_s=50.0)
            assert failure.value.code == code
        unpack(await link.call(pack(GetStatistics(run="")), timeout_s=50.0), Statistics)


async def test_a_request_without_an_answer_is_refused_by_name():
    refused = []

    class Asked:
        message = pack(Reported())

        def fail(self, code, text):
            refused.append((code, text))

    async with Bare(NETWORKS["local"]()) as role:
        role._on_request(Asked())
    assert refused == [("unexpected", "worker-0 does not answer Reported")]


async def test_tasks_are_named_run_as_long_as_the_block_and_end_with_it(network):
    ended = []

    async def work():
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("work")

    async with Bare(network, work) as role:
        await asyncio.sleep(0)
        assert "worker-0/work" in {task.get_name() for task in asyncio.all_tasks()}
        assert ended == []
        address = role.address
    assert ended == ["work"]
    assert address


async def test_an_error_of_a_task_ends_the_block():
    async def work():
        raise LookupError("nothing to do")

    with pytest.raises(LookupError, match="nothing to do"):
        try:
            async with Bare(NETWORKS["local"](), work):
                await asyncio.Event().wait()
        except ExceptionGroup as errors:
            raise first_cause(errors) from None


@pytest.mark.parametrize("trained", [False, True], ids=["before a run", "after one"])
async def test_a_role_outside_a_run_leaves_the_map_at_once(trained):
    async with cluster_of(Config(epochs=1, threads=1, data_servers=2, waits=PATIENT)) as cluster:
        if trained:
            await cluster.train()
        for role in (cluster.servers[0], *cluster.data_servers):
            await role.joined()
            await role.__aexit__(None, None, None)
        nodes = cluster.controller.map.nodes
        assert {name for name, node in nodes.items() if node.left} == {"ps-0", "data-0", "data-1"}
        assert {name for name, node in nodes.items() if node.live} == {"worker-0", "driver"}


async def test_closed_links_keep_their_counts(network):
    async with Bare(network) as role:
        for _ in range(2):
            async with link_to(role) as link:
                await link.call(pack(GetStatistics(run="")), timeout_s=50.0)
            await until(lambda: not role._traffic.links)
        assert [row.messages for row in role.statistics().traffic] == [2]
