"""The statistics of a server in the report keep their names, and unset fields are left out."""

import msgspec

from adam_async.parameter_server.statistics import ServerStatistics


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
