"""Logs of servers and workers become a recording, or an error that names the log."""

import msgspec
import numpy as np
import pytest

from adam_async.driver.replay.decode import make_recording
from adam_async.driver.replay.record_file import Log
from adam_async.driver.replay.recording import Header
from adam_async.errors import RecordError
from adam_async.messages import Lease
from adam_async.model.named import digits
from adam_async.model.network import Network
from adam_async.parameter_server.replay_log import JOINED, NOT_APPLIED, SUMMED, OrderLog
from adam_async.run.config import Config
from adam_async.run.partition import table_of
from adam_async.worker.puller import TensorCopy, WorkerWeights
from adam_async.worker.replay_log import Reader, ReadLog

NETWORK = Network(digits())
TABLE = table_of(NETWORK)
HEADER = Header(
    config=msgspec.to_builtins(Config(record=True)),
    spec=digits().to_dict(),
    data={},
    buckets=(),
    kernels="numpy",
    machine={},
    epochs=(),
    weights="none",
)


def read_log(replica: int = 0, *, tensors=TABLE.by_tensor) -> Log:
    """A worker that trained two groups, of one step each."""
    log = ReadLog(
        Reader(replica, 5, 6),
        {name: len(shards) for name, shards in tensors.items()},
        local=False,
        rated=True,
    )
    weights = WorkerWeights(recorded=True)
    for number in range(2):
        for name, shards in tensors.items():
            weights.install([TensorCopy(name, np.zeros(1), (number + 1,) * len(shards))])
        log.note(Lease(1, number, 0, 16, number / 2), number + 1, weights.snapshot())
    return Log(node=f"worker-{replica}", role="worker", data=bytes(log.data))


def order_log(entries, *, shards=tuple(spec.id for spec in TABLE.shards), session: int = 5) -> Log:
    """A server that noted the same entries (clock, flags) of replica 0 for each of its shards."""
    log = OrderLog([int(shard) for shard in shards])
    for shard in shards:
        for clock, flags in entries:
            log.note(shard, clock, log.replica_generation(0, session, 6), flags)
    return Log(node="ps-0", role="ps", data=log.packed())


def test_logs_are_joined() -> None:
    recording = make_recording(HEADER, [order_log([(1, 0), (2, JOINED)]), read_log()], NETWORK)

    reads = recording.reads[0]
    assert reads.clocks.tolist() == [1, 2]
    assert reads.numbers.tolist() == [0, 1]
    assert reads.progress.tolist() == [0.0, 0.5]
    assert reads.versions.tolist() == [[1] * len(TABLE.shards), [2] * len(TABLE.shards)]
    assert [order.shard for order in recording.orders] == [spec.id for spec in TABLE.shards]
    assert recording.orders[0].clocks.tolist() == [1, 2]


@pytest.mark.parametrize(
    ("entries", "bounds", "versions", "refused"),
    [
        ([(1, 0), (2, 0)], [0, 1, 2], [1, 2], [False, False]),
        ([(1, 0), (2, JOINED)], [0, 2], [2], [False, False]),
        ([(1, 0), (2, JOINED | NOT_APPLIED)], [0, 2], [1], [False, True]),
        ([(1, NOT_APPLIED), (2, 0)], [0, 1, 2], [0, 1], [True, False]),
        ([(1, SUMMED), (1, SUMMED | JOINED), (2, SUMMED)], [0, 2, 3], [1, 2], [False] * 3),
        ([(1, SUMMED | NOT_APPLIED), (2, SUMMED)], [0, 1, 2], [0, 1], [True, False]),
        ([], [0], [], []),
    ],
)
def test_batches_and_versions_follow_from_the_flags(entries, bounds, versions, refused) -> None:
    order = make_recording(HEADER, [order_log(entries), read_log()], NETWORK).orders[1]

    assert order.bounds.tolist() == bounds
    assert order.versions.tolist() == versions
    assert order.refused.tolist() == refused


@pytest.mark.parametrize(
    ("logs", "claim"),
    [
        ([read_log()], r"no order of shards \[0, 1, 2, 3, 4, 5\]; a server's log is missing"),
        (
            [order_log([(1, 0)])],
            "ps-0 applied pushes of a worker of replica 0 that left before the run",
        ),
        ([order_log([(1, 0)], session=9), read_log()], "of a worker of replica 0 that left before"),
        ([order_log([(1, JOINED)]), read_log()], "shard 0 begins in the middle of a batch"),
        ([Log(node="ps-0", role="ps", data=b"x"), read_log()], "the log of ps-0 is damaged: an order log"),
        ([Log(node="worker-3", role="worker", data=b"x")], "the log of worker-3 is damaged: a log of reads"),
        (
            [order_log([(1, 0)]), read_log(tensors={"other": TABLE.shards[:2]})],
            "worker-0 logged other tensors than the model has: {'other': 2}",
        ),
    ],
)
def test_missing_and_damaged_logs_are_named(logs, claim) -> None:
    with pytest.raises(RecordError, match=claim):
        make_recording(HEADER, logs, NETWORK)
