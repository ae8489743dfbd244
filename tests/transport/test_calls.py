"""Calls expire and end, without a clock; a future gets one answer."""

import asyncio

import pytest

from transport.calls import Call, CallTable, settle
from transport.errors import LinkBroken
from transport.messages import Message


def table_of(*deadlines: float) -> CallTable:
    """Return a table with a call for each deadline; its ids count from 1."""
    table = CallTable()
    for deadline in deadlines:
        table.waiting[table.next_id()] = Call(print, "ask", 1.0, deadline)
    return table


def test_calls_end_oldest_first_and_ids_are_never_reused() -> None:
    table = table_of(5.0, 5.0, 5.0)
    del table.waiting[2]
    assert [request_id for request_id, _ in table.drain()] == [1, 3]
    assert table.next_deadline() is None
    assert table.next_id() == 4


def test_calls_expire_at_their_deadline() -> None:
    table = table_of(9.0, 5.0, 7.0)
    assert table.next_deadline() == 5.0
    assert table.expire(now=4.9) == []
    assert [request_id for request_id, _ in table.expire(now=7.0)] == [2, 3]
    assert table.next_deadline() == 9.0


async def test_a_future_gets_its_answer_unless_it_is_cancelled() -> None:
    answered, failed, cancelled = (asyncio.get_running_loop().create_future() for _ in range(3))
    answer, error = Message(type="answer"), LinkBroken("lost")
    cancelled.cancel()
    for future, result in ((answered, answer), (failed, error), (cancelled, answer), (answered, error)):
        settle(future, result)
    assert await answered is answer
    with pytest.raises(LinkBroken, match="lost"):
        await failed
    assert cancelled.cancelled()
