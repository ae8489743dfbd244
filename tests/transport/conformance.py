"""Checks of the promises of a link, for any pair of links.

Each check is a short conversation over a fresh pair, with the message types ask, answer and note in both
directions, and default limits.
"""

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import Any

import numpy as np
from msgspec.msgpack import decode, encode

from transport.errors import (
    CallTimeout,
    LinkBroken,
    LinkClosed,
    LocalProtocolError,
    RemoteError,
    TransportError,
    WouldBlock,
)
from transport.link import Link, Request
from transport.messages import Message
from transport.tensors import Tensor

__all__ = ["CHECKS", "check_link"]

PATIENCE_S = 10.0

Pair = Callable[[], AbstractAsyncContextManager[tuple[Link, Link]]]
Check = Callable[[Link, Link], Coroutine[Any, Any, None]]


async def check_link(make_pair: Pair) -> None:
    """Run every check, each over a fresh pair of links.

    Raises:
        AssertionError: A promise is broken; the message names the check.
    """
    for check in CHECKS:
        try:
            async with asyncio.timeout(PATIENCE_S), make_pair() as (near, far):
                await check(near, far)
        except (AssertionError, TransportError, TimeoutError) as error:
            raise AssertionError(f"{check.__name__}: {type(error).__name__}: {error}") from error


def _ask(number: int = 0, *sizes: int) -> Message:
    tensors = tuple(np.full(size, number, np.float32) for size in sizes)
    return Message(type="ask", meta=encode(number), tensors=tensors)


def _echo(request: Request) -> None:
    message = request.message
    request.reply(Message(type="answer", meta=message.meta, tensors=message.tensors))


async def _raises(kind: type[BaseException], awaitable: Coroutine[Any, Any, Any]) -> BaseException:
    try:
        await awaitable
    except kind as error:
        return error
    raise AssertionError(f"{kind.__name__} was not raised")


async def a_call_brings_back_its_reply(near: Link, far: Link) -> None:
    far.serve(_echo)
    for sizes in (
        (),
        (0,),
        (1,),
        (3, 0, 5),
        (1 << 10,),
        (1 << 16, 7),
        ((1 << 18) + 1,),
        (1 << 20, 3, 1 << 19),
    ):
        reply = await near.call(_ask(5, *sizes), timeout_s=PATIENCE_S)
        assert reply.meta == encode(5)
        assert [tensor.shape for tensor in reply.tensors] == [(size,) for size in sizes]
        assert all((tensor == 5).all() for tensor in reply.tensors)


async def calls_go_both_ways_and_may_be_answered_in_any_order(near: Link, far: Link) -> None:
    held: list[Request] = []

    def hold(request: Request) -> None:
        held.append(request)
        if len(held) == 10:
            for waiting in reversed(held):
                _echo(waiting)

    for one, other in ((near, far), (far, near)):
        other.serve(hold)
        futures = [one.call_nowait(_ask(number, number), timeout_s=PATIENCE_S) for number in range(10)]
        replies = await asyncio.gather(*futures)
        assert [decode(reply.meta) for reply in replies] == list(range(10))
        held.clear()


async def messages_keep_their_order(near: Link, far: Link) -> None:
    for number in range(100):
        await near.send(Message(type="note", meta=encode(number)))
    for number in range(100):
        assert decode((await far.receive()).meta) == number


async def a_small_message_sent_ordered_does_not_pass_a_large_one(near: Link, far: Link) -> None:
    near.send_nowait(Message(type="note", meta=encode(1), tensors=(np.zeros(2 << 20, np.uint8),)))
    near.send_nowait(Message(type="note", meta=encode(2)), ordered=True)
    assert decode((await far.receive()).meta) == 1
    assert decode((await far.receive()).meta) == 2


async def a_release_fires_exactly_once(near: Link, far: Link) -> None:
    for size in (0, 1, 1 << 10, 1 << 16, 3 << 19):
        fired = asyncio.Event()
        count: list[int] = []

        def release(count: list[int] = count, fired: asyncio.Event = fired) -> None:
            count.append(1)
            fired.set()

        array = np.ones(size, np.float32)
        await near.send(Message(type="note", tensors=(array, array)), release)
        received = await far.receive()
        assert all((tensor == 1).all() for tensor in received.tensors)
        del received
        await fired.wait()
        assert count == [1]


async def a_received_slice_keeps_its_values(near: Link, far: Link) -> None:
    for sizes in ((64,), (64, 64), (1 << 18, 3)):
        arrays = [np.full(size, 1, np.float32) for size in sizes]
        await near.send(Message(type="note", tensors=tuple(arrays)), partial(_spoil, arrays))
        kept = (await far.receive()).tensors[0][::2]
        for _ in range(3):
            await near.send(Message(type="note", tensors=tuple(np.zeros(size, np.float32) for size in sizes)))
            await far.receive()
        assert (kept == 1).all()


def _spoil(arrays: list[Tensor]) -> None:
    for array in arrays:
        array[:] = 2


async def a_release_fires_when_the_link_is_lost(near: Link, far: Link) -> None:
    fired = asyncio.Event()
    near.send_nowait(Message(type="note", tensors=(np.ones(4 << 20, np.float32),)), fired.set)
    near.abort()
    far.abort()
    await fired.wait()


async def lent_values_of_an_answer_may_change_at_once(near: Link, far: Link) -> None:
    def lend(request: Request) -> None:
        values = request.message.tensors[0].copy()
        request.reply(Message(type="answer", tensors=(values,)), lent=True)
        values[:] = -1

    far.serve(lend)
    # The last answers wait for one another: the kernel takes only a part of them.
    sizes = [3, 1 << 14, 1 << 15, 1 << 18, *[1 << 21] * 6]
    async with asyncio.TaskGroup() as group:
        calls = [group.create_task(near.call(_ask(7, size), timeout_s=PATIENCE_S)) for size in sizes]
    for call, size in zip(calls, sizes, strict=True):
        (values,) = call.result().tensors
        assert values.shape == (size,)
        assert (values == 7).all()


async def a_reply_lands_in_registered_arrays(near: Link, far: Link) -> None:
    far.serve(_echo)
    for sizes in ((3,), (3, 5), (1 << 16, 9), ((1 << 19) + 3, 5)):
        into = [np.zeros(size, np.float32) for size in sizes]
        reply = await near.call(_ask(7, *sizes), timeout_s=PATIENCE_S, into=into)
        assert all(one is other for one, other in zip(reply.tensors, into, strict=True))
        assert all((tensor == 7).all() for tensor in into)
    error = await _raises(LocalProtocolError, near.call(_ask(7, 3), timeout_s=PATIENCE_S, into=[np.zeros(4)]))
    assert "into" in str(error)
    await near.call(_ask(7, 3), timeout_s=PATIENCE_S)
    untouched = np.zeros(4, np.float32)
    reply = await near.call(_ask(7), timeout_s=PATIENCE_S, into=[untouched])
    assert reply.tensors == ()
    assert not untouched.any()


async def an_unanswered_call_times_out_and_a_late_reply_is_dropped(near: Link, far: Link) -> None:
    held: list[Request] = []
    far.serve(held.append)
    target = np.zeros(3, np.float32)
    error = await _raises(CallTimeout, near.call(_ask(1, 3), timeout_s=0.01, into=[target]))
    assert isinstance(error, TimeoutError)
    far.serve(_echo)
    for request in held:
        _echo(request)
    await near.call(_ask(), timeout_s=PATIENCE_S)
    assert (target == 0).all()


async def a_cancelled_call_leaves_the_link_usable(near: Link, far: Link) -> None:
    arrived = asyncio.Event()
    far.serve(lambda request: arrived.set())
    future = near.call_nowait(_ask(), timeout_s=PATIENCE_S)
    await arrived.wait()
    future.cancel()
    far.serve(_echo)
    assert decode((await near.call(_ask(3), timeout_s=PATIENCE_S)).meta) == 3


async def errors_reach_the_caller_as_code_and_text(near: Link, far: Link) -> None:
    # A name of a file whose bytes are not UTF-8 has lone surrogates.
    for text, shown in (("cannot do that", "cannot do that"), ("no \udcff.npy", "no \\udcff.npy")):
        far.serve(lambda request, text=text: request.fail("odd", text))  # type: ignore[misc]
        error = await _raises(RemoteError, near.call(_ask(), timeout_s=PATIENCE_S))
        assert isinstance(error, RemoteError)
        assert (error.code, error.text) == ("odd", shown)


async def a_request_is_answered_once(near: Link, far: Link) -> None:
    held: list[Request] = []

    def keep_and_echo(request: Request) -> None:
        held.append(request)
        _echo(request)

    far.serve(keep_and_echo)
    await near.call(_ask(), timeout_s=PATIENCE_S)
    try:
        _echo(held[0])
    except LocalProtocolError:
        return
    raise AssertionError("a second reply was not refused")


async def a_callback_runs_once_with_the_answer_or_the_error(near: Link, far: Link) -> None:
    answers: list[Message | TransportError] = []
    answered = asyncio.Event()

    def on_answer(answer: Message | TransportError) -> None:
        answers.append(answer)
        answered.set()

    async def ask(*, timeout_s: float = PATIENCE_S, into: tuple[Tensor, ...] | None = None) -> object:
        answered.clear()
        near.ask(_ask(3, 100), on_answer, timeout_s=timeout_s, into=into)
        await answered.wait()
        return answers[-1]

    far.serve(_echo)
    target = np.zeros(100, np.float32)
    answer = await ask(into=(target,))
    assert isinstance(answer, Message)
    assert answer.tensors[0] is target
    assert (target == 3).all()
    far.serve(lambda request: request.fail("odd", "cannot do that"))
    assert isinstance(await ask(into=(np.zeros(100, np.float32),)), RemoteError)
    far.serve(lambda request: None)
    assert isinstance(await ask(timeout_s=0.01), CallTimeout)
    near.ask(_ask(), on_answer, timeout_s=PATIENCE_S)
    far.abort()
    await near.wait_closed()
    await asyncio.sleep(0)
    assert isinstance(answers[-1], LinkBroken)
    assert len(answers) == 4


async def requests_wait_for_a_handler(near: Link, far: Link) -> None:
    future = near.call_nowait(_ask(4), timeout_s=PATIENCE_S)
    await near.send(Message(type="note"))
    await far.receive()
    far.serve(_echo)
    assert decode((await future).meta) == 4


async def a_reader_that_does_not_read_stops_the_sender(near: Link, far: Link) -> None:
    array = np.zeros(1 << 18, np.float32)
    sent = 0
    try:
        while sent < 1000:
            near.send_nowait(Message(type="note", tensors=(array,)))
            sent += 1
            await asyncio.sleep(0)
    except WouldBlock:
        pass
    assert sent < 1000, "a gigabyte was accepted for a peer that does not read"
    for _ in range(sent):
        await far.receive()
    await near.send(Message(type="note"))


async def a_message_without_a_row_is_refused(near: Link, far: Link) -> None:
    await _raises(LocalProtocolError, near.send(Message(type="unheard-of")))
    await _raises(LocalProtocolError, near.call(Message(type="unheard-of"), timeout_s=PATIENCE_S))
    assert not near.closed


async def an_unsupported_tensor_is_refused_and_the_link_stays_open(near: Link, far: Link) -> None:
    far.serve(_echo)
    strided = np.zeros((4, 4), np.float32)[:, ::2]
    for tensor in (strided, np.zeros(2, np.complex64), np.zeros((1,) * 9), np.zeros(2, ">f4")):
        await _raises(LocalProtocolError, near.send(Message(type="note", tensors=(tensor,))))
    await near.call(_ask(), timeout_s=PATIENCE_S)


async def a_close_ends_the_other_side_after_all_sent_messages(near: Link, far: Link) -> None:
    held: list[Request] = []
    far.serve(held.append)
    call = far.call_nowait(_ask(), timeout_s=PATIENCE_S)
    unanswered = near.call_nowait(_ask(), timeout_s=PATIENCE_S)
    near.send_nowait(Message(type="note", meta=encode(1), tensors=(np.ones(1 << 19, np.float32),)))
    await near.aclose()
    assert near.closed
    await _raises(LinkClosed, near.send(Message(type="note")))
    await _raises(LinkClosed, _result(unanswered))
    assert decode((await far.receive()).meta) == 1
    await _raises(LinkClosed, far.receive())
    await far.wait_closed()
    await _raises(LinkClosed, _result(call))
    if held:
        _echo(held[0])  # an answer after the end is no error
    await near.aclose()


async def an_abort_breaks_the_other_side(near: Link, far: Link) -> None:
    call = far.call_nowait(_ask(), timeout_s=PATIENCE_S)
    near.abort()
    await _raises(LinkBroken, _result(call))
    await _raises(LinkBroken, far.receive())
    await far.wait_closed()


async def traffic_is_counted(near: Link, far: Link) -> None:
    far.serve(_echo)
    await near.call(_ask(1, 1 << 16), timeout_s=PATIENCE_S)
    for link, out, into in ((near, "ask", "answer"), (far, "answer", "ask")):
        traffic = link.statistics().by_type
        assert traffic[out].messages_out == traffic[into].messages_in == 1
        assert traffic[out].payload_bytes_out == traffic[into].payload_bytes_in == 4 << 16
        assert traffic[out].frame_bytes_out < 0.02 * (4 << 16)


async def an_observer_gets_each_message_as_it_is_counted(near: Link, far: Link) -> None:
    await near.send(Message(type="note"))
    seen_by: dict[Link, list[tuple[bool, str, int, int]]] = {near: [], far: []}
    for link, seen in seen_by.items():
        link.observe(lambda *message, seen=seen: seen.append(message))
    far.serve(_echo)
    await near.call(_ask(1, 1 << 10), timeout_s=PATIENCE_S)
    assert [message[:3] for message in seen_by[near]] == [(True, "ask", 4096), (False, "answer", 4096)]
    # A message sent before the observation may still arrive.
    assert [m[:3] for m in seen_by[far] if m[1] != "note"] == [(False, "ask", 4096), (True, "answer", 4096)]
    for link, seen in seen_by.items():
        traffic = link.statistics().by_type
        for sent, kind, _, frame_bytes in seen:
            row = traffic[kind]
            assert frame_bytes == (row.frame_bytes_out if sent else row.frame_bytes_in)


async def _result(future: "asyncio.Future[Message]") -> Message:
    return await future


CHECKS: tuple[Check, ...] = (
    a_call_brings_back_its_reply,
    calls_go_both_ways_and_may_be_answered_in_any_order,
    messages_keep_their_order,
    a_small_message_sent_ordered_does_not_pass_a_large_one,
    a_release_fires_exactly_once,
    a_received_slice_keeps_its_values,
    a_release_fires_when_the_link_is_lost,
    lent_values_of_an_answer_may_change_at_once,
    a_reply_lands_in_registered_arrays,
    an_unanswered_call_times_out_and_a_late_reply_is_dropped,
    a_cancelled_call_leaves_the_link_usable,
    errors_reach_the_caller_as_code_and_text,
    a_request_is_answered_once,
    a_callback_runs_once_with_the_answer_or_the_error,
    requests_wait_for_a_handler,
    a_reader_that_does_not_read_stops_the_sender,
    a_message_without_a_row_is_refused,
    an_unsupported_tensor_is_refused_and_the_link_stays_open,
    a_close_ends_the_other_side_after_all_sent_messages,
    an_abort_breaks_the_other_side,
    traffic_is_counted,
    an_observer_gets_each_message_as_it_is_counted,
)
