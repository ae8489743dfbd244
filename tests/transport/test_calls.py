"""Calls are matched, expire and end, without a clock."""

from transport.calls import Call, CallTable


def call(name: str, deadline: float) -> Call[str]:
    return Call(name, "ask", 1.0, deadline)


def test_replies_match_in_any_order_and_once() -> None:
    table: CallTable[str] = CallTable()
    ids = [table.next_id() for _ in range(3)]
    assert ids == [1, 2, 3]
    for request_id in ids:
        table.add(request_id, call(f"call {request_id}", 5.0))
    answered = table.pop(2)
    assert answered is not None
    assert answered.waiter == "call 2"
    assert table.pop(2) is None
    assert len(table) == 2
    assert [request_id for request_id, _ in table.drain()] == [1, 3]
    assert table.next_deadline() is None


def test_calls_expire_at_their_deadline() -> None:
    table: CallTable[str] = CallTable()
    for request_id, deadline in ((1, 9.0), (2, 5.0), (3, 7.0)):
        table.add(request_id, call("", deadline))
    assert table.next_deadline() == 5.0
    assert table.expire(now=4.9) == []
    assert [request_id for request_id, _ in table.expire(now=7.0)] == [2, 3]
    assert table.next_deadline() == 9.0


def test_the_deadline_is_never_late_after_an_answer() -> None:
    table: CallTable[str] = CallTable()
    table.add(1, call("", 5.0))
    table.add(2, call("", 8.0))
    table.pop(1)
    assert table.next_deadline() == 5.0
    assert table.expire(now=5.0) == []
    assert table.next_deadline() == 8.0
