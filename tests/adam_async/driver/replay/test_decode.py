"""Logs of bundles become a recording, or an error that names the log."""

import msgspec
import numpy as np
import pytest

from adam_async.driver.replay.decode import Log, make_recording
from adam_async.driver.replay.recording import Header
from adam_async.errors import RecordError
from adam_async.model.named import digits
from adam_async.model.network import Network
from adam_async.parameter_server.replay_log import JOINED, NOT_APPLIED, SKIPPED, SUMMED, OrderLog
from adam_async.run.config import Config
from adam_async.run.partition import table_of
from adam_async.worker.pusher import reads_type

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


SHARDS = tuple(spec.id for spec in TABLE.shards)
TYPE = reads_type(len(SHARDS), len(TABLE.by_tensor))


def step_of(number: int) -> np.ndarray:
    """The reads of a step of one group, as bytes: one more version for each group."""
    row = (1, number, number / 2, [number + 1] * len(SHARDS), [0] * len(TABLE.by_tensor))
    return np.array([row], TYPE).view(np.uint8)


def log_of(entries=(), *, home="ps-0", shards=SHARDS, clocks=(1, 2), session: int = 5) -> Log:
    """A bundle that noted the same entries (clock, flags) of replica 0 for each of its shards."""
    log = OrderLog([int(shard) for shard in shards])
    client = log.client(0, session, 6)
    for clock in clocks:
        log.note_reads(clock, client, step_of(clock - 1))
    for shard in shards:
        for clock, flags in entries:
            log.note(shard, clock, client, flags)
    return Log(home=home, data=log.packed())


def test_logs_are_joined() -> None:
    recording = make_recording(HEADER, [log_of([(1, 0), (2, JOINED)])], NETWORK)

    reads = recording.reads[0]
    assert reads.clocks.tolist() == [1, 2]
    assert reads.numbers.tolist() == [0, 1]
    assert reads.progress.tolist() == [0.0, 0.5]
    assert reads.versions.tolist() == [[1] * len(SHARDS), [2] * len(SHARDS)]
    assert [order.shard for order in recording.orders] == [*SHARDS]
    assert recording.orders[0].clocks.tolist() == [1, 2]


def test_steps_of_a_lost_worker_are_those_that_reached_any_bundle() -> None:
    logs = [
        log_of([(1, 0)], shards=SHARDS[:2], clocks=(1,)),
        log_of([(1, 0), (2, 0)], home="ps-1", shards=SHARDS[2:]),
        log_of([(1, 0)], home="ps-2", shards=(), clocks=(1,), session=9),
    ]

    recording = make_recording(HEADER, logs, NETWORK)

    assert [reads.clocks.tolist() for reads in recording.reads.values()] == [[1, 2], [1]]
    assert [order.clients.tolist() for order in recording.orders] == [[0]] * 2 + [[0, 0]] * (len(SHARDS) - 2)


@pytest.mark.parametrize(
    ("entries", "bounds", "versions", "refused"),
    [
        ([(1, NOT_APPLIED | SKIPPED), (2, 0)], [0, 1, 2], [0, 1], [True, False]),
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
    order = make_recording(HEADER, [log_of(entries)], NETWORK).orders[1]

    assert order.bounds.tolist() == bounds
    assert order.versions.tolist() == versions
    assert order.refused.tolist() == refused
    assert order.skipped.tolist() == [bool(flags & SKIPPED) for _, flags in entries]


def reads_of(data: bytes) -> Log:
    """A bundle with a step of other reads than those of the model."""
    log = OrderLog([int(shard) for shard in SHARDS])
    log.note_reads(1, log.client(0, 5, 6), np.frombuffer(data, np.uint8))
    return Log(home="ps-0", data=log.packed())


@pytest.mark.parametrize(
    ("logs", "claim"),
    [
        ([], r"no order of shards \[0, 1, 2, 3, 4, 5\]; a bundle's log is missing"),
        ([log_of(shards=SHARDS[1:])], r"no order of shards \[0\]; a bundle's log is missing"),
        ([log_of([(1, JOINED)])], "the log of ps-0 is damaged: shard 0 begins in the middle of a batch"),
        ([Log(home="ps-0", data=b"x")], "the log of ps-0 is damaged: an order log"),
        ([reads_of(b"")], r"the step of replica 0 with clock 1 has reads of 0 bytes, but each group"),
        ([reads_of(b"odd")], r"the step of replica 0 with clock 1 has reads of 3 bytes, but each group"),
    ],
)
def test_missing_and_damaged_logs_are_named(logs, claim) -> None:
    with pytest.raises(RecordError, match=claim):
        make_recording(HEADER, logs, NETWORK)


@pytest.mark.parametrize(
    ("field", "value"), [("epoch", 2), ("progress", np.nan), ("progress", -1), ("progress", np.inf)]
)
def test_a_step_of_several_epochs_or_at_an_impossible_time_is_refused(field, value) -> None:
    groups = np.concatenate([step_of(0), step_of(1)]).view(TYPE)
    groups[field][1] = value
    logs = [reads_of(groups.tobytes())]

    with pytest.raises(RecordError, match="replica 0 trained groups of several epochs in one step, or a"):
        make_recording(HEADER, logs, NETWORK)
