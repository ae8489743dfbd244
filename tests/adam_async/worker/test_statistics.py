"""The statistics of a worker in the report keep their names, and unset fields are left out."""

import msgspec

from adam_async.worker.statistics import (
    KernelStatistics,
    PartitionStatistics,
    PeerWorkerStatistics,
    WorkerStatistics,
)


def names(struct):
    return [field.encode_name for field in msgspec.structs.fields(struct)]


def test_the_report_has_the_names_that_readers_know():
    assert names(WorkerStatistics) == [
        "traffic",
        "process",
        "lag_s",
        "buffers",
        "refused_greets",
        "protocols",
        "push_buffers",
        "left_ahead",
        "clock",
        "clock_waits",
        "clock_wait_s",
        "waiting_for",
        "part",
        "kernels",
        "cpus",
        "parameters",
        "data",
        "neighbours",
        "pool",
        "engine",
    ]
    assert names(KernelStatistics) == ["set", "compiled", "of", "numpy_groups"]
    assert names(PartitionStatistics) == ["segments", "wires"]
    assert names(PeerWorkerStatistics) == [
        "links",
        "messages",
        "blocks_received",
        "blocks_duplicate",
        "blocks_said_again",
        "blocks_unconfirmed",
    ]


def test_unset_fields_are_left_out_of_the_report():
    counts = WorkerStatistics(clock=3, pool=None)
    assert msgspec.json.decode(msgspec.json.encode(counts)) == {"clock": 3, "pool": None}
