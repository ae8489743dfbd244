"""Stores on the disks of servers, as a faulty server may list them."""

import asyncio
import logging
import re
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from functools import partial

import msgspec
import numpy as np
import pytest

from adam_async.checkpoint import saved_shards
from adam_async.checkpoint.checkpoint import CheckpointError
from adam_async.checkpoint.saved_shards import MOST_FAULTS, MOST_RECORDS, SavedShards, _merge
from adam_async.messages import (
    SavedList,
    SavedStore,
    ShardState,
    ShardStates,
    pack,
    packed_tensor,
    state_tables,
)
from adam_async.messages.saved_shards import MOST_LISTS, SavedPiece
from adam_async.run.cluster_map import DISK, ClusterMap
from adam_async.run.counts import EpochCounts
from adam_async.run.run_record import RunRecord, packed_record, read_run_record
from adam_async.run.store_record import ArrayRecord, StoreRecord
from adam_async.runtime.channel import Endpoint
from adam_async.runtime.traffic import Traffic
from tests.adam_async.cluster_maps import node as node_record
from tests.adam_async.cluster_maps import run_record, store_record
from tests.adam_async.runs import NETWORKS, PATIENT, address_of
from transport import Identity

ARRAYS = (ArrayRecord("w", (8,)),)


def listed(*, arrays=ARRAYS, **fields):
    record = store_record("store-1", ARRAYS, **{"shard_bytes": 64, "buckets": ("ps-0",) * 64, **fields})
    texts = msgspec.json.encode(record), msgspec.json.encode(arrays)
    return SavedStore("a-name", "store-1", *texts, (SavedPiece("ps-0", 1, 1, 7),), 1)


def test_a_listed_store_counts_with_its_pieces():
    found = {}
    _merge(found, "ps-0", listed(), "a-name")
    (store,) = found["store-1"]
    assert store.best == {("ps-0", 1): ((1, 7), "ps-0")}


@pytest.mark.parametrize(
    "options",
    [
        {"buckets": ()},
        {"buckets": ("ps-0",)},
        {"shard_bytes": 0},
        {"shard_bytes": 8, "arrays": (ArrayRecord("w", (1 << 40,)),)},
        {"arrays": (ArrayRecord("w", (-8,)),)},
    ],
    ids=str,
)
def test_a_listed_store_out_of_bounds_counts_as_absent(options):
    found = {}
    _merge(found, "ps-0", listed(**options), "a-name")
    assert found == {}


def test_a_listed_store_with_more_shards_than_the_reader_has_room_for_counts_as_absent():
    found = {}
    shards, fault = _merge(found, "ps-0", listed(shard_bytes=8), "a-name", room=3)
    assert (shards, found) == (0, {})
    assert fault.startswith("it has 4 shards, and there is room for 3 of ")
    assert _merge(found, "ps-0", listed(shard_bytes=8), "a-name", room=4) == (4, "")
    assert len(found) == 1


@pytest.mark.parametrize("changed", [{"name": "another"}, {"id": "store-2"}], ids=str)
def test_a_listed_store_of_another_name_or_id_counts_as_absent_for_this_reason(changed):
    found = {}
    saved = msgspec.structs.replace(listed(), **changed)
    assert _merge(found, "ps-0", saved, "a-name") == (
        0,
        "it has another name, or its record is that of another store",
    )
    assert found == {}


@pytest.mark.parametrize("newest", [(1, 7), (2, 3)])
@pytest.mark.parametrize("is_first", [False, True])
def test_of_two_copies_the_one_with_the_newer_last_entry_counts(newest, is_first):
    """A primary that was cut off may have more entries on its disk, which were never committed."""
    found = {}
    for number, order in enumerate((newest, (1, 5)) if is_first else ((1, 5), newest)):
        saved = msgspec.structs.replace(listed(), pieces=(SavedPiece("ps-0", 1, *order),))
        _merge(found, f"ps-{number}", saved, "a-name")
    (store,) = found["store-1"]
    assert store.best == {("ps-0", 1): (newest, "ps-0" if is_first else "ps-1")}


def test_of_the_cuts_of_a_run_the_newest_clock_counts_that_all_pieces_have():
    buckets = ("ps-0", "ps-1") * 32
    cuts = listed(shard_bytes=8, program="store-1", summed_weight=4, slack=0, buckets=buckets)
    assert msgspec.json.decode(cuts.record, type=StoreRecord).takes_cuts
    clocks = {"ps-0": {"ps-0": (5, 7)}, "ps-1": {"ps-1": (5,)}, "ps-2": {"ps-1": (4, 5), "ps-0": (9,)}}
    found = {}
    for node, of_node in clocks.items():
        pieces = [SavedPiece(home, 1, 0, clock) for home, each in of_node.items() for clock in each]
        _merge(found, node, msgspec.structs.replace(cuts, pieces=tuple(pieces)), "")
    (store,) = found["store-1"]
    assert store.best == {("ps-0", 1): ((0, 5), "ps-0"), ("ps-1", 1): ((0, 5), "ps-1")}
    assert not store.missing()
    del store.copies["ps-1", 1][0, 5]
    assert store.best == {("ps-0", 1): ((0, 9), "ps-2")}
    assert store.missing() == ("ps-1",)


@pytest.mark.parametrize("is_first", [False, True])
def test_a_server_that_lists_another_record_hides_no_store_of_others(is_first):
    found, another = {}, listed(creator="another")
    for node, saved in (("ps-0", another), ("ps-1", listed())) if is_first else (("ps-0", listed()),):
        _merge(found, node, saved, "a-name")
    _merge(found, "ps-2", another, "a-name")
    newer = msgspec.structs.replace(listed(), pieces=(SavedPiece("ps-0", 1, 1, 8),))
    _merge(found, "ps-3", newer, "a-name")
    servers = {store.record.creator: store.best["ps-0", 1][1] for store in found["store-1"]}
    assert servers == {"": "ps-3", "another": "ps-0" if is_first else "ps-2"}


def of_run(ended, *, order=(1, 1), id="store-1"):
    """A listed store of a run, with a record of so many epochs."""
    results = tuple(EpochCounts(images=epoch) for epoch in range(1, ended + 1))
    run = RunRecord(program=run_record(id), ended=ended, results=results)
    return msgspec.structs.replace(listed(program="store-1"), run=packed_record(run), run_order=order)


def test_the_newest_record_of_all_servers_counts_and_an_unreadable_one_costs_only_itself():
    found = {}
    torn = msgspec.structs.replace(of_run(9, order=(1, 9)), run=b"torn")
    shards, fault = _merge(found, "ps-0", torn, "")
    assert (shards, fault[:24]) == (1, "it is no record of a run")
    assert _merge(found, "ps-1", of_run(2, order=(1, 7)), "") == (1, "")
    assert _merge(found, "ps-2", of_run(1, order=(1, 6)), "") == (1, "")
    assert _merge(found, "ps-3", of_run(5, id="another"), "")[1] == "it has the record of run 'another'"
    (store,) = found["store-1"]
    assert store.run.ended == 2
    _merge(found, "ps-4", of_run(3, order=(1, 7)), "")
    assert store.run.ended == 3, "of equal orders the record with more epochs counts"
    assert store.best == {("ps-0", 1): ((1, 7), "ps-0")}
    found = {}
    assert _merge(found, "ps-0", listed(), "")[1].startswith("it has another name")
    assert found == {}


class Lists:
    """A server that lists these stores."""

    def __init__(self, number, *stores, before=(), **fields):
        self.identity = Identity(role="ps", node=f"ps-{number}", incarnation=1)
        self._answer = pack(SavedList(keeps=True, **fields), [packed_tensor(stores)])
        self._before = list(before)
        """Functions that answer its first requests."""

    async def on_link(self, link):
        link.serve(self._on_request)
        await link.wait_closed()

    def _on_request(self, request):
        (self._before.pop(0) if self._before else Lists.answer)(self, request)

    def answer(self, request):
        request.reply(self._answer)

    def hang_up(self, request):
        request.link.abort()


@asynccontextmanager
async def lists(network, *servers):
    """Start servers; yields an asker, and their map."""
    asking = Identity(role="driver", node="driver", incarnation=1)
    async with AsyncExitStack() as stack:
        nodes = {}
        for server in servers:
            listening = network.listen(address_of(network), server.identity, server.on_link)
            address = (await stack.enter_async_context(listening)).address
            nodes[server.identity.node] = node_record("ps", address=address, info={DISK: True})
        saved = SavedShards(Endpoint(network, asking, Traffic("driver")), waits=PATIENT)
        yield saved, ClusterMap(nodes=nodes)


@pytest.mark.parametrize("network", NETWORKS)
async def test_an_invalid_entry_costs_only_itself_and_is_logged_once_with_its_server(network, caplog):
    network = NETWORKS[network]()
    forged = SavedPiece("ps-0", 2, 1, 1 << 60)
    partly = msgspec.structs.replace(listed(), pieces=(*listed().pieces, forged))
    servers = (
        Lists(0, partly),
        Lists(1, {"name": "a-name"}, listed(shard_bytes=0)),
        Lists(2, msgspec.structs.replace(listed(), pieces=(SavedPiece("ps-0", 2, 1, 7),))),
    )
    async with lists(network, *servers) as (saved, cluster):
        with caplog.at_level(logging.WARNING, "adam_async.checkpoint.saved_shards"):
            for _ in range(2):
                survey = await saved.survey("a-name", cluster)
    assert survey.servers == ("ps-0", "ps-1", "ps-2")
    (store,) = survey.stores
    assert {key[1]: server for key, (_, server) in store.best.items()} == {1: "ps-0", 2: "ps-2"}
    faults = (
        r"ps-0 lists store 'store-1': piece 1 of its list: Expected `int` <= \d+ - at `\$\[3\]`",
        "ps-1 lists store 0 of its list: Object missing required field `id`",
        "ps-1 lists store 'store-1': its record or arrays are invalid",
    )
    logged = [record.getMessage() for record in caplog.records]
    assert logged == list(survey.faults)
    for fault, text in zip(faults, logged, strict=True):
        assert re.fullmatch(fault, text)
    assert survey.faults_text == "".join([f"; {fault}" for fault in logged])


async def test_a_fault_is_logged_once_for_each_name_that_is_surveyed_in_turn(caplog):
    network = NETWORKS["local"]()
    async with lists(network, Lists(0, {"name": "a-name"}, listed())) as (saved, cluster):
        with caplog.at_level(logging.WARNING, "adam_async.checkpoint.saved_shards"):
            for _ in range(3):
                await saved.survey("a-name", cluster)
                await saved.survey("another", cluster)
    of_list = "ps-0 lists store 0 of its list: Object missing required field `id`"
    of_name = "ps-0 lists store 'store-1': it has another name, or its record is that of another store"
    assert [record.getMessage() for record in caplog.records] == [of_list, of_list, of_name]


async def test_a_survey_logs_a_bounded_number_of_faults_of_each_server(caplog):
    network = NETWORKS["local"]()
    faulty = [{"name": "a-name"}] * (2 * MOST_FAULTS)
    async with lists(network, Lists(0, *faulty), Lists(1, *faulty)) as (saved, cluster):
        with caplog.at_level(logging.WARNING, "adam_async.checkpoint.saved_shards"):
            for _ in range(2):
                survey = await saved.survey("a-name", cluster)
    assert len(survey.faults) == 4 * MOST_FAULTS
    logged = [record.getMessage()[:4] for record in caplog.records]
    assert logged == ["ps-0"] * MOST_FAULTS + ["ps-1"] * MOST_FAULTS


async def test_a_survey_reads_all_lists_of_a_server_and_no_endless_ones():
    record = store_record("store-2", ARRAYS, shard_bytes=64, buckets=("ps-0",) * 64)
    older = msgspec.structs.replace(listed(), id="store-2", record=msgspec.json.encode(record))
    first = [lambda _, request: Lists(0, listed(), more=True).answer(request)]
    servers = Lists(0, older, before=first), Lists(1, listed(), more=True)
    async with lists(NETWORKS["local"](), *servers) as (saved, cluster):
        survey = await saved.survey("a-name", cluster)
    assert {store.record.id for store in survey.stores} == {"store-1", "store-2"}
    assert survey.faults == (f"ps-1 lists more stores than fit into {MOST_LISTS} lists",)


async def test_a_survey_decodes_a_bounded_size_of_the_records_of_a_server(monkeypatch):
    saved = [
        msgspec.structs.replace(of_run(ended), id=f"store-{ended}", began_ms=9 - ended) for ended in (1, 2, 3)
    ]
    room = sum([len(each.run) for each in saved[:2]])
    monkeypatch.setattr(saved_shards, "MOST_LISTED_RECORD_BYTES", room)
    merged = []
    monkeypatch.setattr(saved_shards, "_merge", lambda *args, room: merged.append(args[2].id) or (0, ""))
    async with lists(NETWORKS["local"](), Lists(0, *saved), Lists(1, saved[2])) as (reader, cluster):
        survey = await reader.survey("", cluster)
    assert merged == ["store-1", "store-2", "store-3"]
    assert survey.faults == (f"ps-0 lists store 'store-3': the records of runs have over {room} bytes",)


def test_equal_records_of_a_run_are_decoded_once_and_the_newest_ones_are_kept(monkeypatch):
    decoded = []
    monkeypatch.setattr(
        saved_shards, "read_run_record", lambda packed: decoded.append(packed) or read_run_record(packed)
    )
    found = {}
    for ended in (3, *range(2 * MOST_RECORDS), 3):
        for number in range(3):
            _merge(found, f"ps-{number}", of_run(ended, order=(1, ended)), "")
    (store,) = found["store-1"]
    assert store.run.ended == 2 * MOST_RECORDS - 1
    assert len(store.records) == MOST_RECORDS
    assert len(decoded) == 2 * MOST_RECORDS


WHOLE = listed(buckets=("ps-0",) * 64)


@pytest.mark.parametrize(
    "server",
    [
        partial(Lists, 1, WHOLE, before=[Lists.hang_up]),
        partial(Lists, 1, WHOLE, before=[lambda _, request: Lists(1, followed=("store-1",)).answer(request)]),
    ],
    ids=["a broken link", "a map that is late"],
)
async def test_a_search_waits_for_the_list_of_each_server_with_a_disk(monkeypatch, server):
    """Otherwise a new store would take the place of one that is on that disk only, and remove it."""
    monkeypatch.setattr(saved_shards, "PAUSE_S", 0.0)
    async with lists(NETWORKS["local"](), Lists(0), server()) as (saved, cluster):
        found = await saved.find("a-name", lambda: cluster)
    assert found.best == {("ps-0", 1): ((1, 7), "ps-1")}


@pytest.mark.parametrize(
    ("server", "why"),
    [
        (partial(Lists, 1, before=[Lists.hang_up] * 99), ".+"),
        (partial(Lists, 1, followed=("store-1", "store-2")), "it still serves or reads store-1"),
    ],
    ids=["silent", "serving"],
)
async def test_a_search_names_the_server_that_does_not_list_its_stores(monkeypatch, server, why):
    monkeypatch.setattr(saved_shards, "SEARCH_S", 0.0)
    monkeypatch.setattr(saved_shards, "PAUSE_S", 0.0)
    async with lists(NETWORKS["local"](), Lists(0, WHOLE), server()) as (saved, cluster):
        said = (
            f"ps-1 did not list the stores on the disk, ps-1: {why}; start it again with its folder, or end"
        )
        with pytest.raises(CheckpointError, match=said):
            await saved.find("a-name", lambda: cluster, without="store-2")
        gone = msgspec.structs.replace(cluster.nodes["ps-1"], live=False)
        cluster = msgspec.structs.replace(cluster, nodes={**cluster.nodes, "ps-1": gone})
        assert (await saved.find("a-name", lambda: cluster)).record.id == "store-1"


async def read(source):
    async with aclosing(source.shards_of(source.table.shards)) as parts:
        return [shard async for shards in parts for shard in shards]


async def test_shards_on_a_disk_with_longer_tables_are_refused_before_they_are_decoded():
    def shards(_, request):
        tables = state_tables([ShardState(0, 1, {})])
        tables[0] = np.resize(tables[0], 1 << 15)
        request.reply(pack(ShardStates(arrays=()), tables))

    lying = Lists(0, listed(), before=[Lists.answer, shards])
    async with lists(NETWORKS["local"](), lying) as (saved, cluster):
        (store,) = (await saved.survey("a-name", cluster)).stores
        store.copies = {key: {(1, 7): ["ps-0"]} for key in store.pieces()}
        with pytest.raises(CheckpointError, match="tables have 32768 elements, 16896 are the most"):
            await read(saved.shards(store, cluster))


async def test_a_failed_reading_leaves_its_caller_uncancelled():
    """A later failure of the caller would else count as its cancellation."""
    async with lists(NETWORKS["local"](), Lists(0, listed())) as (saved, cluster):
        (store,) = (await saved.survey("a-name", cluster)).stores
        store.copies = {key: {(1, 7): ["ps-0"]} for key in store.pieces()}
        with pytest.raises(CheckpointError, match="store 'a-name' cannot be read from the disks"):
            await read(saved.shards(store, cluster))  # the server answers each request with its list
        assert asyncio.current_task().cancelling() == 0
