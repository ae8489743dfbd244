"""The thread for blocking calls: order, results, its end, and that it never keeps a process."""

import subprocess
import sys
import threading
from concurrent.futures import CancelledError

import pytest

from adam_async.runtime.blocking_thread import BlockingThread


def test_calls_run_in_order_and_have_results_and_errors() -> None:
    thread, order = BlockingThread("calls"), list[int]()
    calls = [thread.submit(order.append, number) for number in range(5)]
    failed = thread.submit(int, "no number")
    name = thread.submit(lambda: threading.current_thread().name)
    assert [call.result(5) for call in calls] == [None] * 5
    assert order == [0, 1, 2, 3, 4]
    with pytest.raises(ValueError, match="no number"):
        failed.result(5)
    assert name.result(5) == "calls"
    thread.end()


def test_an_end_cancels_what_waits_and_takes_nothing_more() -> None:
    thread, released = BlockingThread("ends"), threading.Event()
    current, waiting = thread.submit(released.wait, 5), thread.submit(int)
    refusals: list[BaseException | None] = []

    def submit_again(_: object) -> None:
        try:
            thread.submit(int)
        except RuntimeError as error:
            refusals.append(error)

    waiting.add_done_callback(submit_again)
    while not current.running():
        pass
    thread.end()
    thread.end()
    released.set()
    assert current.result(5) is True
    with pytest.raises(CancelledError):
        waiting.result(5)
    assert "thread ends was ended" in str(refusals[0])


def test_a_call_that_hangs_does_not_keep_its_process() -> None:
    program = """
import threading
from adam_async.runtime.blocking_thread import BlockingThread
thread = BlockingThread("hangs")
thread.submit(threading.Event().wait)
thread.end()
"""
    assert subprocess.run([sys.executable, "-c", program], timeout=10, check=False).returncode == 0
