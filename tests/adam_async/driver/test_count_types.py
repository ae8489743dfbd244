"""A driver checks the counts that a role reports before it calculates with them."""

import pytest

from adam_async.driver.count_types import read_counts
from transport import RemoteProtocolError

PROCESS = {"host": "h", "pid": 1, "peak_rss_mb": 2.0}
COUNTED = {"process": PROCESS, "traffic": [{"payload_bytes": 1, "frame_bytes": 2, "more": "x"}]}


@pytest.mark.parametrize(
    ("role", "values"),
    [
        ("worker", {"staleness": {"x": 1}}),
        ("worker", {"staleness": [1]}),
        ("worker", {"traffic": 5}),
        ("worker", {"traffic": [{"payload_bytes": 1}]}),
        ("worker", {"process": None}),
        ("worker", {"parameters": {}}),
        ("worker", {"data": {"blocked_fetches": 1, "blocked_s": None}}),
        ("worker", {"clock_wait_s": "1"}),
        ("worker", {"refused": 1.5}),
        ("worker", {"kernels": "numpy"}),
        ("worker", {"kernels": {}}),
        ("worker", {"kernels": {"set": "numpy", "compiled": "3", "of": 3}}),
        ("data", {"term": "1", "epoch": 1, "finished": 0, "images": 1, "loss": 0.5}),
        ("data", {"term": 1, "epoch": 1, "finished": 0, "images": "1", "loss": 0.5}),
        ("ps", {"shards": 1}),
    ],
)
def test_counts_with_which_a_driver_cannot_calculate_are_refused(role, values):
    with pytest.raises(RemoteProtocolError, match=f"counts of a {role}"):
        read_counts({**COUNTED, **values}, role)


@pytest.mark.parametrize(
    ("role", "values"),
    [
        ("controller", {}),
        ("ps", {"shards": 2, "clock": 4, "staleness": {"0": 7}, "waiting_for": [1]}),
        ("data", {"term": 1, "epoch": 1, "finished": 0, "images": 0, "loss": None}),
    ],
)
def test_counts_of_every_role_are_taken(role, values):
    read_counts({**COUNTED, **values}, role)
