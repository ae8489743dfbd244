"""Code of the user runs beside the event loop, within a deadline, and its errors are the caller's."""

import asyncio
import threading

import pytest

from adam_async.errors import DeadlineExceeded
from adam_async.runtime.loop_thread import on_user_thread


def join_threads() -> None:
    for thread in threading.enumerate():
        if thread.name == "user-code":
            thread.join(20.0)


async def test_the_loop_goes_on_while_the_code_blocks() -> None:
    release = threading.Event()

    def work() -> str:
        assert release.wait(20.0)
        return threading.current_thread().name

    made = asyncio.create_task(on_user_thread(work, "the work", within_s=20.0))
    for _ in range(3):
        await asyncio.sleep(0)
    assert not made.done()
    release.set()
    assert await made == "user-code"


async def test_code_that_hangs_ends_the_wait_by_its_name_and_its_late_result_is_ignored() -> None:
    release = threading.Event()
    with pytest.raises(DeadlineExceeded, match="waited 0 s for the import of mine:make"):
        await on_user_thread(lambda: release.wait(20.0), "the import of mine:make", within_s=0.0)
    release.set()
    join_threads()
    await asyncio.sleep(0)


@pytest.mark.parametrize("error", [ZeroDivisionError("by hand"), TimeoutError("of the code")])
async def test_an_error_of_the_code_is_the_callers(error: Exception) -> None:
    def work() -> None:
        raise error

    with pytest.raises(type(error)) as failure:
        await on_user_thread(work, "the work", within_s=20.0)
    assert failure.value.args == error.args
