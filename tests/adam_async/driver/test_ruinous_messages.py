"""Messages that once ended or spoilt a run: each is refused, and the servers continue."""

import asyncio
import math

import msgspec
import numpy as np
import pytest

from adam_async.controller.role import RoleSettings
from adam_async.data_server.service import DataServer
from adam_async.messages import LeaseGroups, Leases, Pull, Pushed, Tick, Values, pack, role_table, unpack
from adam_async.parameter_server import piece_states
from tests.adam_async.parameter_server.test_service import push_of, shard_named
from tests.adam_async.runs import address_of, servers_of, tiny_dataset, until
from transport import LinkConfig, LocalNetwork, RemoteError

FAR = 1 << 40
LEASE = LeaseGroups(
    run="run", replica=0, replica_generation=1, partition=0, epoch=0, position=0, count=1, wait_s=0.0
)
LINKS = LinkConfig(max_message_bytes=60 << 10)
"""Links with a message limit below the size of the model."""


def ruinous(servers, shard):
    """Return invalid messages by a fragment of their refusal."""
    run = {"store": "run", "generation": servers.map.generation}
    session = {"session": 1, "incarnation": 1, "replica": 0}
    everything = tuple(servers.shards())
    delta = np.ones(shard.size, np.float32)
    return {
        "epoch": pack(Tick(**run, **session, shards=(shard.id,), clock=1, numbers=0, epoch=FAR)),
        "wait_s": pack(Pull(**run, shards=(shard.id,), clock=FAR, wait_s=math.nan)),
        "rate": pack(push_of(servers, [shard.id], rate=math.nan), [delta]),
        "is named twice": pack(Pull(**run, shards=(shard.id,) * 3000, clock=0, wait_s=0.0)),
        "too-large": pack(Pull(**run, shards=everything, clock=0, wait_s=0.0)),
    }


async def test_messages_that_once_ended_a_run_are_refused_and_the_servers_continue(monkeypatch):
    monkeypatch.setattr(piece_states, "PART_BYTES", 16 << 10)
    network = LocalNetwork(rules=role_table(), config=LINKS)
    async with asyncio.timeout(30), servers_of(network, shard_bytes=16 << 10) as servers:
        data = DataServer(
            RoleSettings(
                network=network,
                address=address_of(network),
                identity=servers.identity("data"),
                waits=servers.waits,
                controller=servers.controller.address,
            ),
            tiny_dataset(),
        )
        bias = shard_named(servers, "fc2.bias")
        address, known = servers.map.nodes["ps-0"].address, servers.identity("worker", 5)
        async with (
            data,
            network.connect(address, known) as to_server,
            network.connect(data.address, known) as to_data,
        ):
            await until(lambda: bool(servers.controller.map.dealing))
            push = push_of(servers, [bias.id])
            pushed = to_server.call_nowait(pack(push, [np.ones(bias.size, np.float32)]), timeout_s=20.0)
            for refusal, message in ruinous(servers, bias).items():
                with pytest.raises(RemoteError, match=refusal):
                    await to_server.call(message, timeout_s=20.0)
            with pytest.raises(RemoteError, match="wait_s"):
                await to_data.call(pack(msgspec.structs.replace(LEASE, wait_s=math.nan)), timeout_s=20.0)
            assert unpack(await pushed, Pushed).versions == 1
            pull = Pull(
                store="run", generation=servers.map.generation, shards=(bias.id,), clock=0, wait_s=0.0
            )
            answer = await to_server.call(pack(pull), timeout_s=20.0)
            assert unpack(answer, Values).versions == 1
            assert np.isfinite(answer.tensors[0]).all()
            unpack(await to_data.call(pack(LEASE), timeout_s=20.0), Leases)
