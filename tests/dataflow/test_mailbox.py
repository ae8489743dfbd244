"""All items from threads reach the loop, in order, with few wake-ups."""

import asyncio
from threading import Thread

import pytest

from dataflow.jobs import Mailbox


async def test_many_items_wake_the_loop_once() -> None:
    got: list[list[int]] = []
    mailbox: Mailbox[int] = Mailbox(asyncio.get_running_loop(), got.append)
    for item in range(5):
        mailbox.post(item)
    assert got == []
    await asyncio.sleep(0)

    assert got == [[0, 1, 2, 3, 4]]
    assert mailbox.num_wakes == 1


async def test_an_item_posted_during_a_delivery_comes_next() -> None:
    got: list[int] = []
    done = asyncio.Event()

    def receive(items: list[int]) -> None:
        got.extend(items)
        if items[-1] < 3:
            mailbox.post(items[-1] + 1)
        else:
            done.set()

    mailbox: Mailbox[int] = Mailbox(asyncio.get_running_loop(), receive)
    mailbox.post(0)
    await done.wait()

    assert got == [0, 1, 2, 3]


async def test_no_item_is_lost_between_threads() -> None:
    per_thread, num_threads = 2000, 3
    got: list[tuple[int, int]] = []
    done = asyncio.Event()

    def receive(items: list[tuple[int, int]]) -> None:
        got.extend(items)
        if len(got) == per_thread * num_threads:
            done.set()

    mailbox: Mailbox[tuple[int, int]] = Mailbox(asyncio.get_running_loop(), receive)

    def work(thread: int) -> None:
        for item in range(per_thread):
            mailbox.post((thread, item))

    threads = [Thread(target=work, args=(index,)) for index in range(num_threads)]
    for thread in threads:
        thread.start()
    async with asyncio.timeout(10):
        await done.wait()
    for thread in threads:
        thread.join()

    for index in range(num_threads):
        assert [item for thread, item in got if thread == index] == list(range(per_thread))


def test_posting_to_a_closed_loop_is_an_error() -> None:
    loop = asyncio.new_event_loop()
    mailbox: Mailbox[int] = Mailbox(loop, lambda items: None)
    loop.close()

    with pytest.raises(RuntimeError, match="closed"):
        mailbox.post(1)
