"""A server that cannot take up its copy leaves the joining members with its reason, and another may join."""

import logging
from contextlib import asynccontextmanager

import numpy as np
import pytest

from adam_async.cluster.roles import parameter_server
from adam_async.messages.replication import PieceCopy
from adam_async.parameter_server import members_watch, served_store
from adam_async.parameter_server.bundle_copy import BundleCopy
from adam_async.parameter_server.served_store import ServedStore
from tests.adam_async.store.fleets import copied
from transport import RemoteProtocolError

NODES = ("ps-0", "ps-1", "ps-2")
NETWORKS = pytest.mark.parametrize("network", ["tcp", "local"])
ARRAYS = {"total": np.zeros(192)}
ONES = {"total": -np.ones(192)}


@pytest.fixture(autouse=True)
def _invites_at_once(monkeypatch):
    monkeypatch.setattr(members_watch, "INVITE_S", 0.3)


def members_of(servers):
    """Return the names of the members in sync and joining of the only bundle."""
    (record,) = servers.leader.map.bundles.values()
    return [[node for node, _ in members] for members in (record.in_sync, record.joining)]


def notice_of(servers, node):
    return servers.leader.map.nodes[node].info.get("notice", "")


@asynccontextmanager
async def in_three_copies(monkeypatch, network):
    """A fleet and a store whose only bundle is in sync on all three servers, after one push."""
    async with copied(monkeypatch, ARRAYS, network=network, servers=1) as (servers, store):
        await servers.until(lambda: len(servers.in_sync("ps-0")) == 3, "not in sync")
        yield servers, store


def lack_memory(monkeypatch, *calls):
    """Let ps-2 fail to allocate shards, at these calls or at all of them; returns the times of its calls."""
    whole, seen = served_store.shards_of, []

    def shards_of(store, home, table, arrays, rules, host):
        if host.node == "ps-2":
            seen.append(host.now())
            if not calls or len(seen) in calls:
                raise MemoryError("as full as can be")
        return whole(store, home, table, arrays, rules, host)

    monkeypatch.setattr(served_store, "shards_of", shards_of)
    return seen


@NETWORKS
async def test_a_server_without_memory_leaves_with_its_reason_and_another_joins(monkeypatch, network):
    tries = lack_memory(monkeypatch)
    async with copied(monkeypatch, ARRAYS, network=network, servers=1) as (servers, store):
        await servers.until(lambda: members_of(servers) == [["ps-0", "ps-1"], []], "ps-2 has not left")
        text = notice_of(servers, "ps-2")
        assert text.startswith("ps-2 does not join the shards of ps-0 in store ")
        assert text.endswith(
            ": it has no memory for them; it is invited again after 60 s: free memory there, add "
            "servers, or delete a store"
        )
        await servers.start("ps-3")
        await servers.until(lambda: servers.in_sync("ps-0") == ["ps-0", "ps-1", "ps-3"], "none joined")
        await store.push(ONES)
        assert (await store.pull())["total"].tolist() == [2.0] * 192
    assert len(tries) == 1


@NETWORKS
@pytest.mark.parametrize("call", [1, 2], ids=["at first", "for the values of the primary"])
async def test_a_server_that_lacked_memory_joins_after_the_pause(monkeypatch, network, call):
    monkeypatch.setattr(members_watch, "PAUSE_S", 1.0)
    tries = lack_memory(monkeypatch, call)
    async with copied(monkeypatch, ARRAYS, network=network, servers=1) as (servers, store):
        await servers.until(lambda: members_of(servers) == [["ps-0", "ps-1"], []], "ps-2 has not left")
        await servers.until(lambda: "ps-2" in servers.in_sync("ps-0"), "ps-2 has not joined again")
        assert tries[call] - tries[call - 1] >= 0.9
        await servers.end("ps-0")
        await servers.end("ps-1")
        await servers.start("ps-3")
        await store.push(ONES)
        assert (await store.pull())["total"].tolist() == [2.0] * 192


@NETWORKS
async def test_a_server_that_takes_no_piece_is_struck_out_and_named(monkeypatch, network):
    monkeypatch.setattr(members_watch, "JOIN_S", 0.5)
    received = BundleCopy.received

    def refuses_pieces(self, sender, message, tensors):
        if self.me[0] == "ps-2" and isinstance(message, PieceCopy):
            raise RemoteProtocolError("piece", "it has 1 shards, not those of this piece")
        received(self, sender, message, tensors)

    monkeypatch.setattr(BundleCopy, "received", refuses_pieces)
    async with copied(monkeypatch, ARRAYS, network=network, servers=1) as (servers, store):
        await servers.until(lambda: members_of(servers) == [["ps-0", "ps-1"], []], "ps-2 has not left")
        await servers.until(lambda: bool(notice_of(servers, "ps-0")), "no notice")
        assert "ps-2 does not join the shards of ps-0 in store " in notice_of(servers, "ps-0")
        assert "it has 0 of 2 pieces" in notice_of(servers, "ps-0")
        await servers.start("ps-3")
        await servers.until(lambda: servers.in_sync("ps-0") == ["ps-0", "ps-1", "ps-3"], "none joined")
        await store.push(ONES)
        assert (await store.pull())["total"].tolist() == [2.0] * 192


@NETWORKS
async def test_a_session_that_came_before_the_map_begins_again_with_the_next_copy(monkeypatch, network):
    async with in_three_copies(monkeypatch, network) as (servers, store):
        copies = servers.copies()
        primary, late = copies["ps-0", "ps-0"].copy, copies["ps-0", "ps-2"]
        maps = []
        monkeypatch.setattr(late, "map_changed", maps.append)
        primary._core.primary.strike_out(late.copy.me)
        primary.tick()
        await servers.until(lambda: primary.me in late.copy._core._waiting, "ps-2 was not invited")
        for each in maps:
            if servers.copies().get(("ps-0", "ps-2")) is late:
                ServedStore.map_changed(late, each)
        assert ("ps-0", "ps-2") not in servers.copies()
        await servers.servers["ps-2"]._membership.set_info(note="another version of the map")
        await servers.until(lambda: len(servers.in_sync("ps-0")) == 3, "ps-2 has not joined", within_s=10.0)
        await store.push(ONES)
        assert (await store.pull())["total"].tolist() == [2.0] * 192


@NETWORKS
async def test_a_server_that_takes_a_bundle_over_reports_that_it_serves_the_store(monkeypatch, network):
    async with in_three_copies(monkeypatch, network) as (servers, _):
        (record,) = servers.leader.map.stores.values()
        assert servers.leader.map.serving(record)
        await servers.end("ps-0")
        await servers.until(lambda: servers.primaries("ps-0"), "no server took over")
        await servers.until(lambda: servers.leader.map.serving(record), "none serves", within_s=10.0)


@NETWORKS
async def test_a_member_with_other_numerics_follows_and_is_named(monkeypatch, network, caplog):
    caplog.set_level(logging.INFO, logger="adam_async.controller.status_log")
    facts = iter([{"blas core": "Zen"}, {"blas core": "Zen"}, {"blas core": "Haswell"}])
    monkeypatch.setattr(parameter_server, "apply_numerics", lambda: next(facts))
    async with copied(monkeypatch, ARRAYS, network=network, servers=1) as (servers, _):
        await servers.until(lambda: len(servers.in_sync("ps-0")) == 3, "not in sync")
    lines = [record.getMessage() for record in caplog.records]
    named = (
        "shards of ps-0 in store 'model': ps-2 may round otherwise than ps-0: blas core is Haswell, not Zen"
    )
    assert lines.count(named) == 1
    assert not [line for line in lines if "ps-1 may round" in line]
