"""One conversation, with moved clocks and no stream."""

import asyncio
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from transport.config import LinkConfig
from transport.decoder import FrameDecoder
from transport.errors import LinkBroken
from transport.frames import MESSAGE, PING, PONG, head
from transport.link import settle
from transport.messages import Message
from transport.protocol import Call, CallTable, Conversation, GiveUp, Outgoing, SendPing
from transport.tensors import BufferPool


def conversation(now: float = 0.0, **changes: int) -> Conversation:
    return Conversation(LinkConfig(**changes), BufferPool(), now=now)


def tick(one: Conversation, now: float, unsent: int = 0, sent: int = 0) -> list[str]:
    effects = one.tick(now=now, unsent_bytes=unsent, sent_bytes=sent)
    return [str(effect.error) if isinstance(effect, GiveUp) else "ping" for effect in effects]


def test_silence_is_answered_by_pings_and_ends_the_link_after_fifteen_seconds() -> None:
    one = conversation(now=100.0)
    assert one.next_deadline() == 105.0
    assert tick(one, 104.0) == []
    assert tick(one, 105.0) == ["ping"]
    assert tick(one, 110.0) == ["ping"]
    assert one.next_deadline() == 115.0
    assert tick(one, 115.0) == ["the peer sent nothing for 15.0 s"]


def test_a_peer_that_sends_gets_no_pings() -> None:
    one = conversation(now=0.0)
    one.last_heard = 4.0
    assert tick(one, 5.0) == []
    assert one.next_deadline() == 9.0
    assert tick(one, 9.0) == ["ping"]


def test_a_ping_is_a_frame() -> None:
    one = conversation()
    (effect,) = one.tick(now=5.0, unsent_bytes=0, sent_bytes=0)
    assert isinstance(effect, SendPing)
    decoder = FrameDecoder(LinkConfig(), BufferPool())
    decoder.get_buffer()[:32] = effect.frame
    assert decoder.updated(32)[0].kind == PING


def test_silence_is_no_fault_while_reading_is_paused() -> None:
    one = conversation(now=0.0)
    one.pause()
    assert tick(one, 60.0) == []
    one.resume(now=60.0)
    assert tick(one, 65.0) == ["ping"]


def test_a_peer_that_takes_nothing_ends_the_link_after_ten_seconds() -> None:
    one = conversation(now=0.0)
    one.pause()
    assert tick(one, 5.0, unsent=100, sent=1000) == []
    assert tick(one, 10.0, unsent=100, sent=1000) == []
    assert one.next_deadline() == 15.0
    (reason,) = tick(one, 15.0, unsent=100, sent=1000)
    assert reason == "the peer took none of 100 waiting bytes for 10.0 s"


def begin_message(one: Conversation) -> None:
    """Pass the first bytes of a large message to the conversation."""
    outgoing = one.encode(MESSAGE, 0, Message(type="push", tensors=(np.zeros(100_000, np.uint8),)))
    head = bytes(outgoing.buffers[0])
    one.decoder.get_buffer()[: len(head)] = head
    one.decoder.updated(len(head))


def test_an_unfinished_message_ends_the_link_of_a_peer_that_still_sends() -> None:
    one = conversation(now=0.0)
    begin_message(one)
    for now in (5.0, 9.0):
        one.last_heard = now
        assert tick(one, now) == []
    assert one.next_deadline() == 14.0  # bytes came again; the message has until 15
    one.decoder.updated(10)
    one.last_heard = 14.0
    assert tick(one, 14.0) == []
    one.last_heard = 24.0
    assert one.next_deadline() == 19.0
    (reason,) = tick(one, 24.0)
    assert reason == "the last 99990 bytes of a message did not come for 10.0 s"


def test_an_unfinished_message_is_no_fault_while_reading_is_paused() -> None:
    one = conversation(now=0.0)
    begin_message(one)
    assert tick(one, 5.0) == ["ping"]
    one.pause()
    assert tick(one, 60.0) == []
    one.resume(now=60.0)
    one.last_heard = 65.0
    assert tick(one, 65.0) == []
    one.last_heard = 75.0
    assert "did not come" in tick(one, 75.0)[0]


def test_slow_progress_is_progress() -> None:
    one = conversation(now=0.0)
    for step in range(1, 20):
        one.last_heard = step * 5.0
        assert tick(one, step * 5.0, unsent=100, sent=step) == []
    assert tick(one, 96.0) == []
    assert one.next_deadline() == 100.0


@given(
    begun=st.floats(0.0, 1e6), ping_s=st.floats(0.01, 10.0), reading=st.booleans(), unsent=st.integers(0, 1)
)
def test_at_a_deadline_tick_has_an_effect_or_the_next_one_is_later(
    begun: float, ping_s: float, reading: bool, unsent: int
) -> None:
    config = LinkConfig(ping_every_s=ping_s, dead_after_s=3.3 * ping_s, stalled_after_s=2.1 * ping_s)
    one = Conversation(config, BufferPool(), now=begun)
    if not reading:
        one.pause()
    for _ in range(8):
        deadline = one.next_deadline()
        effects = tick(one, deadline, unsent=unsent)
        if effects and effects != ["ping"]:
            break
        assert one.next_deadline() > deadline
    else:
        assert not reading
        assert not unsent


def test_a_large_message_leaves_in_chunks_and_in_order() -> None:
    one = conversation(chunk_bytes=65536)
    large = Message(type="push", tensors=(np.zeros(200_000, np.uint8),))
    outgoing = one.encode(MESSAGE, 0, large)
    total = outgoing.payload_bytes + outgoing.frame_bytes
    one.queue(outgoing)
    end = head(PONG, 0, b"", 0)
    one.queue(Outgoing([end], len(end), 0, len(end)))
    assert one.queuing
    sizes = []
    while buffers := one.next_frame():
        sizes.append(sum(map(len, buffers)))
    assert len(sizes) == 5
    assert sizes[1:] == [65536 + 32, 65536 + 32, 200_000 - 3 * 65536 + 32, 32]
    assert sum(sizes[:4]) == total
    assert one.queued_bytes == 0
    assert not one.queuing


def test_release_waits_for_the_last_buffer() -> None:
    fired: list[int] = []
    one = conversation(chunk_bytes=65536)
    array = np.zeros(200_000, np.uint8)
    one.queue(one.encode(MESSAGE, 0, Message(type="push", tensors=(array,)), lambda: fired.append(1)))
    held = [one.next_frame() for _ in range(4)]
    assert fired == []
    held.clear()
    assert fired == [1]


def test_dropping_the_queue_releases() -> None:
    fired: list[int] = []
    one = conversation()
    array = np.zeros(2 << 20, np.uint8)
    one.queue(one.encode(MESSAGE, 0, Message(type="push", tensors=(array,)), lambda: fired.append(1)))
    one.drop_queue()
    assert fired == [1]
    assert one.queued_bytes == 0


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("ping_every_s", 0),
        ("ping_every_s", 20),
        ("max_meta_bytes", 1 << 20),
        ("chunk_bytes", 2 << 20),
        ("chunk_bytes", 100_001),
        ("low_water_bytes", 1 << 30),
        ("shared_bytes", (128 << 20) + 1),
        ("checksum", "yes"),
    ],
)
def test_a_configuration_that_cannot_work_is_refused(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=field):
        LinkConfig(**{field: value})


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
