"""A server adds up the counts of its shards, in pieces."""

import asyncio
from types import SimpleNamespace

import msgspec

from adam_async.messages import Statistics
from adam_async.parameter_server import statistics
from adam_async.parameter_server.state import ServerState
from adam_async.parameter_server.statistics import KEPT_S, StoreReports, count_server, count_store
from adam_async.run.counts import ClientCounts, StoreCounts
from tests.adam_async.parameter_server.timelines import shard_of


def counted(states):
    """Count to the end."""
    pieces = count_store(states, StoreCounts())
    while True:
        try:
            next(pieces)
        except StopIteration as end:
            return end.value


def test_clients_of_a_store_see_versions_and_each_client_with_its_clock_and_staleness():
    shards = [shard_of(0), shard_of(1)]
    for clock, shard in enumerate(shards, start=4):
        shard.clocks = {0: clock, 1: 9}
        shard.separate().count_staleness(0, 2)
        shard.version = clock
    state = ServerState(store="s", generation=1, shards=shards)
    counts = msgspec.json.decode(msgspec.json.encode(counted([state])))
    assert (counts["shards"], counts["bytes"], counts["state_bytes"]) == (2, 32, 0)
    assert counts["versions"] == {"0": 4, "1": 5}
    assert counts["clients"] == {"0": {"clock": 4, "staleness": {"2": 2}}, "1": {"clock": 9, "staleness": {}}}
    total = count_server([state])
    assert (total.shards, total.clients, total.versions) == (2, counted([state]).clients, counts["versions"])
    assert total.staleness == {"2": 2}
    assert total.staleness_by_tensor == {"t0": {"2": 1}, "t1": {"2": 1}}
    assert (total.clocks, total.clock) == ({"0": {"0": 4, "1": 9}, "1": {"0": 5, "1": 9}}, 4)


def test_a_large_store_is_counted_in_pieces_with_the_same_counts(monkeypatch):
    shards = [shard_of(number) for number in range(7)]
    for shard in shards:
        shard.clocks = {0: 3 + int(shard.spec.id), 1: 9}
        shard.separate().count_staleness(0, 2)
    state = ServerState(store="s", generation=1, shards=shards)
    at_once = counted([state])
    monkeypatch.setattr(statistics, "PIECE_SHARDS", 2)
    assert len(list(count_store([state], StoreCounts()))) == 3
    assert counted([state]) == at_once
    assert at_once.clients["0"] == ClientCounts(clock=3, staleness={"2": 7})


class Asked:
    """A request that notes its answer."""

    link = SimpleNamespace(peer=SimpleNamespace(node="reader-1"))

    def charge(self, nbytes, then):
        then()

    def reply(self, message, *, lent=False):
        self.text = bytes(message.tensors[0])


async def test_requests_for_a_large_store_share_one_report_of_a_second(monkeypatch):
    monkeypatch.setattr(statistics, "PIECE_SHARDS", 2)
    state = ServerState(store="s", generation=1, shards=[shard_of(number) for number in range(7)])
    now, counts = [0.0], []

    def counting():
        counts.append(now[0])
        return count_store([state], StoreCounts())

    async with asyncio.TaskGroup() as group:
        reports = StoreReports(
            Statistics(node="ps-0", role="ps"), lambda: now[0], lambda _, work: group.create_task(work)
        )
        asked = [Asked() for _ in range(4)]
        for request in asked[:3]:
            reports.answer(request, counting)
    reports.answer(asked[3], counting)
    assert counts == [0.0]
    assert {request.text for request in asked} == {msgspec.json.encode(counted([state]))}
    now[0] = KEPT_S
    async with asyncio.TaskGroup() as group:
        reports.answer(asked[0], counting)
    assert counts == [0.0, KEPT_S]
