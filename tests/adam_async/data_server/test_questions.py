"""Checks of a data server on reports of groups."""

import msgspec
import pytest

from adam_async.data_server.questions import check_report
from adam_async.messages import Finished, ReportGroups
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
