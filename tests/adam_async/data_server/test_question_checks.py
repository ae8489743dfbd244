"""Checks of a data server on questions, reports and events of another data server."""

import msgspec
import pytest

from adam_async.data_server.epoch import EpochBegan
from adam_async.data_server.ledger import Entry
from adam_async.data_server.ledger_replication import Part
from adam_async.data_server.question_checks import (
    check_entering,
    check_part,
    check_report,
    check_test_part,
)
from adam_async.data_server.state import GroupsReported, LeaseAsked, Opening, OpenLog
from adam_async.messages import Finished, ReadTest, ReportGroups
from adam_async.run.ids import Replica
from transport import Identity, RemoteProtocolError

DONE = Finished(2, 3, 1, 16, 0.5, 9)
REPORT = ReportGroups(run="r", replica=0, replica_generation=1, partition=0, finished=(DONE,))


def check(report):
    check_report(
        report, partitions=2, group_images=16, epoch=2, groups=5, count=lambda number: 16 - number % 2
    )


@pytest.mark.parametrize(
    ("partition", "finished", "said"),
    [
        (2, (DONE,), "parts 0 to 1, not 2"),
        (0, (Finished(1, 3, 1, 17, 0.5),), "16 images at most, not 17"),
        (0, (Finished(2, 5, 1, 16, 0.5),), "no group 5"),
        (0, (Finished(2, 3, 1, 16, 0.5),), "no group 3 of 16 images"),
        (0, (Finished(2, 2, 1, 16, 0.5), Finished(2, 2, 2, 16, 0.5)), "twice"),
    ],
)
def test_a_report_of_what_no_worker_can_have_finished_is_refused(partition, finished, said):
    report = msgspec.structs.replace(REPORT, partition=partition, finished=finished)
    with pytest.raises(RemoteProtocolError, match=said):
        check(report)


def test_reports_of_this_epoch_and_of_others_are_taken():
    check(msgspec.structs.replace(REPORT, finished=(Finished(2, 3, 1, 15, 0.5), Finished(1, 900, 1, 7, 0.5))))


def test_test_images_are_in_order_and_fit_into_a_message():
    assert check_test_part(ReadTest(start=0, stop=1 << 30), 10, image_bytes=28, most_bytes=1000) == ""
    assert check_test_part(ReadTest(start=50, stop=60), 10, image_bytes=28, most_bytes=1000) == ""
    assert "ask for fewer" in check_test_part(ReadTest(start=0, stop=11), 99, image_bytes=28, most_bytes=1000)
    with pytest.raises(RemoteProtocolError, match="none from 4 to 3"):
        check_test_part(ReadTest(start=4, stop=3), 10, image_bytes=28, most_bytes=1000)


def test_another_data_server_enters_what_its_own_workers_asked():
    peer = Identity(role="data", node="data-1", incarnation=1)
    fields = {"replica": Replica(0), "replica_generation": 1, "partition": 0, "position": 0, "heard": -1}
    asked = LeaseAsked(request=("data-1", 3), count=4, wait_s=1.0, **fields)
    check_entering(asked, peer)
    check_entering(GroupsReported(Replica(0), 1, 0, (), ("data-1", 4)), peer)
    for change in ({"request": ("data-0", 3)}, {"request": None}, {"count": 65}, {"wait_s": 1e9}):
        with pytest.raises(RemoteProtocolError):
            check_entering(msgspec.structs.replace(asked, **change), peer)


EPOCH = EpochBegan(1, 6, {Replica(0): (0, 2), Replica(1): (2, 6)}, carried_images=bytes(3))


@pytest.mark.parametrize(
    "change",
    [
        {"groups": 3_000_000, "shares": {Replica(0): (0, 3_000_000)}},
        {"groups": 0, "shares": {}},
        {"carried_images": bytes(2)},
        {"carried": 7},
        {"warm": 7},
        {"finished": ((0, 4), (3, 6))},
        {"finished": ((5, 7),)},
        {"shares": {}},
        {"shares": {Replica(0): (0, 6), Replica(1): (2, 6)}},
        {"shares": {Replica(0): (0, 1 << 31)}},
    ],
)
def test_a_ledger_holds_no_epoch_that_the_data_set_cannot_have(change):
    epoch = msgspec.structs.replace(EPOCH, **change)
    with pytest.raises(RemoteProtocolError, match="ledger"):
        check_part(Part(first=0, settled=0, entries=(Entry(0.0, epoch),)), partitions=2, images=24, groups=6)


def test_a_ledger_has_as_many_parts_of_replicas_as_the_run():
    log = OpenLog(Replica(0), 1, 0, (0, 0))
    for partitions, logs in ((2, (log,)), (2, ()), (1, ())):
        part = Part(
            first=0,
            settled=0,
            entries=(Entry(0.0, EPOCH),),
            opening=Opening(partitions=partitions, logs=logs),
        )
        check_part(part, partitions=partitions, images=24, groups=6)
        with pytest.raises(RemoteProtocolError, match="ledger"):
            check_part(part, partitions=3, images=24, groups=6)
