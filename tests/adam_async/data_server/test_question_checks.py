"""Checks of a data server on questions and reports."""

import msgspec
import pytest

from adam_async.data_server.question_checks import check_report, check_test_part, groups_refusal
from adam_async.messages import Finished, ReadGroups, ReadTest, ReportGroups
from transport import RemoteProtocolError

DONE = Finished(2, 3, 1, 16, 0.5, 9)
REPORT = ReportGroups(run="r", replica=0, replica_generation=1, partition=0, finished=(DONE,))


def check(report):
    check_report(report, partitions=2, images_of=lambda number: (number < 5) * (16 - number % 2))


@pytest.mark.parametrize(
    ("partition", "finished", "said"),
    [
        (2, (DONE,), "parts 0 to 1, not 2"),
        (0, (Finished(1, 3, 1, 17, 0.5),), "no group 3 of 17 images"),
        (0, (Finished(1, 5, 1, 0, 0.5),), "no group 5 of 0 images"),
        (0, (Finished(2, 5, 1, 16, 0.5),), "no group 5"),
        (0, (Finished(2, 3, 1, 16, 0.5),), "no group 3 of 16 images"),
        (0, (Finished(2, 2, 1, 16, 0.5), Finished(2, 2, 2, 16, 0.5)), "twice"),
    ],
)
def test_a_report_of_what_no_worker_can_have_finished_is_refused(partition, finished, said):
    report = msgspec.structs.replace(REPORT, partition=partition, finished=finished)
    with pytest.raises(RemoteProtocolError, match=said):
        check(report)


def test_reports_of_all_epochs_are_taken():
    check(msgspec.structs.replace(REPORT, finished=(Finished(2, 3, 1, 15, 0.5), Finished(1, 2, 1, 16, 0.5))))


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({}, ""),
        ({"numbers": (4, 0), "rows": (0, 0)}, ""),
        ({"numbers": (0, 5)}, "no-groups"),
        ({"numbers": (3, 3)}, "no-groups"),
        ({"rows": (0, 10)}, "no-rows"),
        ({"rows": (5, 4)}, "no-rows"),
    ],
)
def test_a_question_for_groups_that_no_epoch_has_is_refused(change, code):
    body = msgspec.structs.replace(ReadGroups(run="r", epoch=1, numbers=(0,)), **change)
    refused = groups_refusal(body, groups=5, height=9)
    assert (refused[0] if refused else "") == code


def test_test_images_are_in_order_and_fit_into_a_message():
    assert check_test_part(ReadTest(start=0, stop=1 << 30), 10, image_bytes=28, most_bytes=1000) == ""
    assert check_test_part(ReadTest(start=50, stop=60), 10, image_bytes=28, most_bytes=1000) == ""
    assert "ask for fewer" in check_test_part(ReadTest(start=0, stop=11), 99, image_bytes=28, most_bytes=1000)
    with pytest.raises(RemoteProtocolError, match="none from 4 to 3"):
        check_test_part(ReadTest(start=4, stop=3), 10, image_bytes=28, most_bytes=1000)
