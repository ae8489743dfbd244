"""Servers with a path of their own use it among themselves, and pieces on it do not delay entries."""

import socket
from contextlib import asynccontextmanager

import numpy as np
import pytest

from adam_async.cluster.networks import cluster_network, copies_path
from adam_async.errors import BindFailed, first_cause
from adam_async.model.rules import Sgd
from adam_async.parameter_server import members_watch
from adam_async.parameter_server.piece_link import PIECES_CONFIG
from adam_async.run.cluster_map import COPIES
from adam_async.runtime.clock import system_entropy
from tests.adam_async.runs import until
from tests.adam_async.store.fleets import fleet
from transport import BindRefused, BufferPool, HandshakeRejected, Identity, Message

NODES = ("ps-0", "ps-1", "ps-2")
APART, CLIENTS = "127.0.0.2", "127.0.0.1"
ARRAYS = {"total": np.zeros(192), "wide": np.zeros((1 << 20,), np.float32)}
"""Arrays of several pieces."""
ONES = {"total": -np.ones(192)}
TOKEN = "a token of more than sixteen bytes"


@pytest.fixture(autouse=True)
def _invites_at_once(monkeypatch):
    monkeypatch.setattr(members_watch, "INVITE_S", 0.3)


@pytest.fixture
def _links_have_addresses(monkeypatch):
    """Use TCP within this host: a Unix socket has no host."""
    monkeypatch.setattr("transport.network.HAS_SHARED", False)


def apart(monkeypatch, *nodes):
    return fleet(monkeypatch, *nodes, copies_bind=f"tcp://{APART}:0")


def links_of(server, role):
    return [link for link in server._traffic.links if link.peer.role == role]


def hosts_of(link):
    """Return the addresses of both ends of a link."""
    return {link._transport.get_extra_info(name)[0] for name in ("sockname", "peername")}


def carries(link, kind):
    return kind in link.statistics().by_type


@pytest.mark.usefixtures("_links_have_addresses")
async def test_servers_reach_each_other_at_their_own_address_and_clients_the_other(monkeypatch):
    async with apart(monkeypatch, *NODES) as servers:
        async with servers.open(ARRAYS, copies=3, rule=Sgd(rate=1.0)) as store:
            await store.push(ONES)
            assert (await store.pull(["total"]))["total"].tolist() == [1.0] * 192
        for node, server in servers.servers.items():
            record = servers.leader.map.nodes[node]
            assert record.info[COPIES].startswith(f"tcp://{APART}:")
            assert record.address.startswith(f"tcp://{CLIENTS}:")
            among = links_of(server, "ps")
            assert len(among) >= 4, "beats to and from two others"
            assert all(APART in hosts_of(link) for link in among)
            assert all(hosts_of(link) == {CLIENTS} for link in links_of(server, "client"))


@pytest.mark.usefixtures("_links_have_addresses")
async def test_without_the_option_servers_share_the_listener_of_the_clients(monkeypatch):
    async with fleet(monkeypatch, *NODES) as servers:
        async with servers.open(ARRAYS, copies=3, rule=Sgd(rate=1.0)) as store:
            await store.push(ONES)
        for node, server in servers.servers.items():
            assert COPIES not in servers.leader.map.nodes[node].info
            assert all(hosts_of(link) == {CLIENTS} for link in links_of(server, "ps"))


@pytest.mark.parametrize("role", ["client", "driver", "worker", "reader", "controller", "data"])
async def test_a_listener_for_servers_refuses_every_other_role(monkeypatch, role):
    async with apart(monkeypatch, "ps-0") as servers:
        network = servers._place("other").network
        copies = servers.leader.map.nodes["ps-0"].info[COPIES]
        with pytest.raises(HandshakeRejected):
            await network.dial(copies, Identity(role=role, node="other", incarnation=1))
        link = await network.dial(copies, Identity(role="ps", node="other", incarnation=1))
        await link.aclose()


@asynccontextmanager
async def listening(token, address=f"tcp://{APART}:0"):
    path = copies_path(token, address, entropy=system_entropy, buffers=BufferPool())

    async def accept(link):
        await link.wait_closed()

    server = Identity(role="ps", node="ps-0", incarnation=1)
    async with path.network.listen(path.address, server, accept) as listener:
        yield listener.address


async def test_a_listener_for_servers_checks_the_token():
    async with listening(TOKEN) as address:
        for token in (None, "another token, as long as that one"):
            network = cluster_network(token, entropy=system_entropy, buffers=BufferPool())
            with pytest.raises(HandshakeRejected):
                await network.dial(address, Identity(role="ps", node="ps-1", incarnation=1))


async def test_a_listener_for_servers_that_others_reach_needs_a_token():
    with pytest.raises(BindRefused):
        async with listening(None, "tcp://0.0.0.0:0"):
            pass


async def test_a_taken_address_for_servers_is_named_with_its_option(monkeypatch):
    with socket.create_server((APART, 0)) as taken:
        address = f"tcp://{APART}:{taken.getsockname()[1]}"
        with pytest.raises(BaseExceptionGroup) as raised:
            async with fleet(monkeypatch, "ps-0", copies_bind=address):
                pass
    cause = first_cause(raised.value)
    assert isinstance(cause, BindFailed)
    assert cause.address == address
    assert "--copies-bind" in str(cause)


async def start_again(servers, node):
    """End a member, and start it as another incarnation, which joins anew."""
    await servers.end(node)
    await servers.until(lambda: node not in servers.in_sync("ps-0"), f"{node} is a member still")
    await servers.start(node)


async def joined(servers, store):
    """Wait for three members in sync, and push to them."""
    await store.push(ONES)
    await servers.until(lambda: len(servers.in_sync("ps-0")) == 3, "no third member")
    await store.push(ONES)
    assert (await store.pull(["total"]))["total"].tolist() == [2.0] * 192


async def test_pieces_for_a_joining_server_leave_on_a_link_with_a_small_buffer(monkeypatch):
    async with apart(monkeypatch, *NODES) as servers:
        async with servers.open(ARRAYS, copies=3, servers=1, rule=Sgd(rate=1.0)) as store:
            await start_again(servers, "ps-2")
            await joined(servers, store)
            links = [link for link in links_of(servers.servers["ps-0"], "ps") if link.peer.node == "ps-2"]
            (pieces,) = [link for link in links if carries(link, "PieceCopy")]
            (entries,) = [link for link in links if carries(link, "Copy")]
            assert pieces is not entries
            assert APART in hosts_of(pieces)

            def send_buffer(link):
                return link._transport.get_extra_info("socket").getsockopt(
                    socket.SOL_SOCKET, socket.SO_SNDBUF
                )

            assert send_buffer(pieces) <= 2 * PIECES_CONFIG.socket_buffer_bytes < send_buffer(entries)
            (first, second, third) = [
                servers.copies()["ps-0", node].copy.shards.shards for node in ("ps-0", "ps-1", "ps-2")
            ]
            for number, shard in first.items():
                assert shard.values.tobytes() == second[number].values.tobytes()
                assert shard.values.tobytes() == third[number].values.tobytes()


async def test_a_server_joins_although_the_link_for_pieces_has_ended(monkeypatch):
    async with apart(monkeypatch, *NODES) as servers:
        async with servers.open(ARRAYS, copies=3, servers=1, rule=Sgd(rate=1.0)) as store:
            links = servers.servers["ps-0"]._links

            def of_pieces():
                found = [
                    peer.pieces.channel.link
                    for member, peer in links._peers.items()
                    if member == servers.servers["ps-2"]._me
                ]
                return next((link for link in found if link is not None), None)

            await start_again(servers, "ps-2")
            await until(of_pieces)
            first = of_pieces()
            first.abort()
            await joined(servers, store)
            assert of_pieces() is not first


async def test_a_message_that_no_link_can_take_is_named_and_ends_its_link(monkeypatch, caplog):
    async with (
        fleet(monkeypatch, *NODES) as servers,
        servers.open(ARRAYS, copies=3, rule=Sgd(rate=1.0)) as store,
    ):
        links = next(server._links for server in servers.servers.values() if server._links.up)
        member, outgoing = next(iter(links._out.items()))
        outgoing.send(Message(type="Unknown"))
        await until(lambda: links._out.get(member) not in (outgoing, None))
        await store.push(ONES)
        assert (await store.pull(["total"]))["total"].tolist() == [1.0] * 192
    assert f"no link to {member[0]} can take Unknown" in caplog.text
