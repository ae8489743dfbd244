"""The statistics of a server in the report keep their names, and unset fields are left out."""

import msgspec

from adam_async.parameter_server.state import ServerState
from adam_async.parameter_server.statistics import ServerStatistics
from tests.adam_async.parameter_server.test_state import shard_of


def test_the_report_has_the_names_that_readers_know():
    assert [field.encode_name for field in msgspec.structs.fields(ServerStatistics)] == [
        "traffic",
        "process",
        "shards",
        "versions",
        "staleness",
        "staleness_by_replica",
        "staleness_by_tensor",
        "clocks",
        "clock",
        "held",
        "refused",
        "duplicates",
        "parked",
        "waiting_for",
        "batches",
        "batched_pushes",
    ]


def test_a_server_without_a_run_reports_no_shards():
    counts = ServerStatistics(traffic=[])
    assert msgspec.json.decode(msgspec.json.encode(counts)) == {"traffic": []}


def test_clients_of_a_store_see_versions_and_each_client_with_its_clock_and_staleness():
    shards = [shard_of(0), shard_of(1)]
    for clock, shard in enumerate(shards, start=4):
        shard.clocks = {0: clock, 1: 9}
        shard.count_staleness(0, 2)
        shard.version = clock
    state = ServerState(store="s", generation=1, shards=shards)
    counts = msgspec.json.decode(msgspec.json.encode(state.store_statistics()))
    assert (counts["shards"], counts["bytes"], counts["state_bytes"]) == (2, 32, 0)
    assert counts["versions"] == {"0": 4, "1": 5}
    assert counts["clients"] == {
        "0": {"clock": 4, "pushes": 2, "staleness": {"2": 2}},
        "1": {"clock": 9, "pushes": 0, "staleness": {}},
    }
