"""Servers with copies of bundles: an invalid message or a slow server costs a link, and no push."""

import asyncio
from contextlib import suppress

import msgspec
import numpy as np
import pytest

from adam_async.messages import pack
from adam_async.messages.replication import Begin, Begun, Committed, Copy, Held, PieceCopy
from adam_async.model.rules import Sgd
from adam_async.parameter_server import members_watch, server_links
from tests.adam_async.runs import until
from tests.adam_async.store.fleets import copied, fleet
from transport import Identity, TransportError

NODES = ("ps-0", "ps-1", "ps-2")
NETWORKS = pytest.mark.parametrize("network", ["tcp", "local"])
ARRAYS = {"total": np.zeros(192), "small": np.zeros(3)}
ONES = {name: -np.ones_like(array) for name, array in ARRAYS.items()}
TENSOR = np.zeros(5, np.uint8)
NESTED = np.frombuffer(b"\x94\xa5epoch\x01\x00" + b"\x91" * 5000 + b"\xc0", np.uint8)


def messages(store, generation, home="ps-0"):
    """Invalid messages about a bundle, each with its tensors."""
    common = {"store": store, "home": home, "generation": generation, "session": 1}
    copy = Copy(**common, position=1, origin=generation, nbytes=5, committed=0, applied_by_all=0)
    piece = PieceCopy(**common, piece=0, position=0, nbytes=5)
    change = msgspec.structs.replace
    return [
        (copy, [TENSOR]),
        (copy, []),
        (change(copy, nbytes=6), [TENSOR]),
        (change(copy, nbytes=1 << 50), [TENSOR]),
        (change(copy, part=1, parts=2), [TENSOR]),
        (change(copy, part=3, parts=2), [TENSOR]),
        (change(copy, parts=0), [TENSOR]),
        (change(copy, parts=8000), [TENSOR]),
        (change(copy, nbytes=NESTED.nbytes), [NESTED]),
        (change(copy, session=1 << 40), [TENSOR]),
        (change(copy, generation=1 << 40), [TENSOR]),
        (piece, [TENSOR]),
        (change(piece, digest=b"d" * 32), [TENSOR]),
        (change(piece, piece=8000), [TENSOR]),
        (change(piece, parts=8000, nbytes=1 << 50), [TENSOR]),
        (Begun(**common, position=0, applied=0), []),
        (Held(**common, position=1 << 50, applied=0, pieces=0), []),
        (Committed(**common, committed=1 << 50, applied_by_all=0), []),
        (Begin(**common, version=0, start=0), []),
        (change(copy, home="nowhere"), [TENSOR]),
        (change(copy, store="nothing"), [TENSOR]),
    ]


async def raw_link(servers, node, identity):
    network = servers._place("bad").network
    return network.connect(servers.servers[node].address, identity, timeout_s=20.0)


def of_role(node, incarnation=7):
    return Identity(role="ps", node=node, incarnation=incarnation)


@NETWORKS
async def test_an_invalid_message_of_a_server_costs_its_link_and_nothing_else(monkeypatch, network):
    async with copied(monkeypatch, ARRAYS, network=network) as (servers, store):
        await servers.until(lambda: len(servers.copies()) == 9, "not all have taken up their copies")
        (key,) = {served.store.id for served in servers.copies().values()}
        incarnation = servers.servers["ps-0"]._identity.incarnation
        for identity in (of_role("ps-9"), of_role("ps-0", incarnation)):
            for body, tensors in messages(key, 1):
                async with await raw_link(servers, "ps-1", identity) as link:
                    with suppress(TransportError):
                        await link.send(pack(body, tensors))
                        await link.send(pack(body, tensors))
                await store.push(ONES)
        values = await store.pull()
        expected = 2 * len(messages(key, 1)) + 1
        assert values["total"].tolist() == [float(expected)] * 192
        assert sorted(servers.servers) == list(NODES), "no role has ended"


@NETWORKS
async def test_ten_thousand_begins_end_a_link_that_does_not_read(monkeypatch, network):
    monkeypatch.setattr(server_links, "MOST_ANSWERS", 64)
    async with copied(monkeypatch, ARRAYS, network=network) as (servers, store):
        (key,) = {served.store.id for served in servers.copies().values()}
        async with await raw_link(servers, "ps-1", of_role("ps-9")) as link:
            begin = Begin(store=key, home="ps-0", generation=0, session=1, version=0, start=0)
            for session in range(1, 10_000):
                try:
                    await link.send(pack(msgspec.structs.replace(begin, session=session)))
                except TransportError:
                    break
        await store.push(ONES)
        assert (await store.pull())["total"].tolist() == [2.0] * 192


@NETWORKS
async def test_parts_of_an_entry_that_never_ends_are_bounded_by_its_size(monkeypatch, network):
    async with copied(monkeypatch, ARRAYS, network=network) as (servers, _):
        (served,) = [each for key, each in servers.copies().items() if key == ("ps-0", "ps-1")]
        copy = messages(served.store.id, 1)[0][0]
        endless = msgspec.structs.replace(copy, parts=60, nbytes=20)
        async with await raw_link(servers, "ps-1", of_role("ps-9")) as link:
            with suppress(TransportError):
                for part in range(60):
                    await link.send(pack(msgspec.structs.replace(endless, part=part), [TENSOR]))
            await link.wait_closed()
        assert not served.copy._parts


async def test_a_second_store_is_replicated_over_links_that_are_there(monkeypatch):
    async with fleet(monkeypatch, *NODES) as servers:
        async with (
            servers.open(ARRAYS, copies=3, rule=Sgd(rate=1.0), name="first") as first,
            servers.open(ARRAYS, copies=3, rule=Sgd(rate=1.0), name="second") as second,
        ):
            await first.push(ONES)
            await second.push(ONES)
            assert (await second.pull())["total"].tolist() == [1.0] * 192


async def test_a_bundle_that_a_server_cannot_hold_leaves_its_links_to_the_others(monkeypatch):
    async with fleet(monkeypatch, *NODES) as servers:
        async with servers.open(ARRAYS, copies=3, rule=Sgd(rate=1.0), name="first") as first:
            await servers.until(lambda: len(servers.in_sync("ps-0")) == 3, "not in sync")
            full = servers.servers["ps-2"]
            monkeypatch.setattr(full, "_take_up", lambda *args: None)
            before = dict(servers.servers["ps-0"]._links._out)
            async with servers.open(
                {"w": np.zeros(1)}, copies=3, rule=Sgd(rate=1.0), name="second"
            ) as second:
                for _ in range(10):
                    await first.push(ONES)
                    await second.push({"w": -np.ones(1)})
                assert (await second.pull())["w"].tolist() == [10.0]
            assert servers.servers["ps-0"]._links._out == before
            assert len(before) == 2


async def test_a_member_that_beats_and_takes_no_entry_is_struck_out(monkeypatch):
    monkeypatch.setattr(members_watch, "STUCK_TICKS", 3)
    monkeypatch.setattr(members_watch, "STALLED_TICKS", 6)
    monkeypatch.setattr(members_watch, "INVITE_S", 1000.0)
    async with copied(monkeypatch, ARRAYS) as (servers, store):
        homes = {home for home, _ in servers.copies()}
        await servers.until(lambda: all(len(servers.in_sync(home)) == 3 for home in homes), "not in sync")
        deaf = servers.servers["ps-2"]
        monkeypatch.setattr(deaf._links, "_on_message", lambda sender, message, tensors: None)
        await store.push(ONES)
        for home in {"ps-0", "ps-1"}:
            await servers.until(lambda home=home: "ps-2" not in servers.in_sync(home), "still in sync")


async def test_a_primary_that_stalls_for_long_counts_no_other_server_as_silent(monkeypatch):
    async with copied(monkeypatch, ARRAYS) as (servers, _):
        links = servers.servers["ps-0"]._links
        peers = list(links._peers)
        assert len(peers) == 2
        for member in peers:
            links._peers[member].heard -= 2.5
        links._last_tick -= 2.5
        assert min(map(links.silent_s, peers)) > 2.0
        before = links._last_tick
        await until(lambda: links._last_tick > before)
        assert max(map(links.silent_s, peers)) < members_watch.SILENT_S
        assert len(servers.in_sync("ps-0")) == 3


async def test_entries_beyond_the_budget_of_the_log_end_the_membership_of_a_slow_server(monkeypatch):
    monkeypatch.setattr(members_watch, "LOG_BYTES", 4000)
    monkeypatch.setattr(members_watch, "INVITE_S", 1000.0)
    async with copied(monkeypatch, ARRAYS) as (servers, store):
        await servers.until(lambda: len(servers.in_sync("ps-0")) == 3, "not in sync")
        # It holds entries, and applies none.
        (slow,) = [each for key, each in servers.copies().items() if key == ("ps-0", "ps-2")]
        monkeypatch.setattr(slow.copy, "_apply", lambda logged, bundle: None)
        for _ in range(40):
            await store.push(ONES)
        await servers.until(lambda: "ps-2" not in servers.in_sync("ps-0"), "still in sync")
        (primary,) = [each for key, each in servers.copies().items() if key == ("ps-0", "ps-0")]
        await store.push(ONES)
        await servers.until(lambda: primary.copy._core.held_bytes <= 4000, "the log is long")


async def test_pushes_go_on_at_once_after_a_handover_that_was_cancelled(monkeypatch):
    async with copied(monkeypatch, ARRAYS, servers=1) as (servers, store):
        await servers.until(lambda: len(servers.in_sync("ps-0")) == 3, "not in sync")
        copies = servers.copies()
        primary, slow = copies["ps-0", "ps-0"].copy, copies["ps-0", "ps-2"].copy
        # It holds entries, and applies none, so the handover to it cannot end.
        monkeypatch.setattr(slow, "_apply", lambda logged, bundle: None)
        await store.push(ONES)
        primary._core.primary.hand_over(slow.me)
        pushing = asyncio.create_task(store.push(ONES))
        await until(lambda: bool(primary._unproposed))
        primary._core.primary.cancel_hand_over()
        primary.work_done()
        assert not primary._unproposed
        await pushing


async def test_a_push_that_waits_while_its_primary_gets_another_generation_is_applied_once(monkeypatch):
    async with copied(monkeypatch, ARRAYS, servers=1) as (servers, store):
        await servers.until(lambda: len(servers.in_sync("ps-0")) == 3, "not in sync")
        copies = [served.copy for served in servers.copies().values()]
        (primary,) = [copy for copy in copies if copy.is_primary]
        primary._core.primary.hand_over(next(copy.me for copy in copies if not copy.is_primary))
        primary._core.report()
        pushing = asyncio.create_task(store.push(ONES))
        await until(lambda: bool(primary._unproposed))
        later = primary.record.changed + 1000
        record = msgspec.structs.replace(primary.record, generation=later, changed=later)
        for copy in copies:
            copy.record_changed(record)
        await pushing
        values = await store.pull()
        assert {name: values[name].max() for name in ONES} == dict.fromkeys(ONES, 2.0)
