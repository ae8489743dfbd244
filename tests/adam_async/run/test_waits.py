"""Waits of a worker are read out of what it counted."""

from adam_async.run.waits import WaitReport, waits_of

PUSHES = {"admission_waits": 3, "admission_wait_s": 0.5}
FETCHES = {"blocked_fetches": 2, "blocked_s": 0.25}


def test_all_kinds_of_waits_are_read_and_added() -> None:
    waits = waits_of(
        "worker-1", {"parameters": PUSHES, "data": FETCHES, "clock_waits": 7, "clock_wait_s": 1.5}
    )

    assert waits == WaitReport(
        worker="worker-1",
        admission_waits=3,
        admission_wait_s=0.5,
        blocked_fetches=2,
        blocked_s=0.25,
        clock_waits=7,
        clock_wait_s=1.5,
    )
    assert waits.total_s == 2.25


def test_a_worker_that_waits_for_no_clocks_has_waited_for_none() -> None:
    waits = waits_of("worker-0", {"parameters": PUSHES, "data": FETCHES})

    assert waits is not None
    assert (waits.clock_waits, waits.clock_wait_s) == (0, 0.0)


def test_a_node_that_never_trained_has_no_waits() -> None:
    assert waits_of("worker-0", {"role": "worker"}) is None
    assert waits_of("ps-0", {"role": "ps", "staleness": {}}) is None
