"""A driver reads of the notes of a role only as much as a correct role can have noted."""

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import numpy as np
import pytest

from adam_async.controller.role import reply_when_room
from adam_async.driver.role_queries import MOST_PROFILE_EVENTS, PROFILE_CHUNK, RECORD_CHUNK, RoleQueries
from adam_async.messages import (
    GetProfile,
    GetRecord,
    Profile,
    RecordPart,
    Statistics,
    pack,
    text_tensor,
    unpack_any,
)
from adam_async.parameter_server.replay_log import MOST_PACKED_BYTES
from adam_async.runtime.channel import Endpoint
from adam_async.runtime.trace_events import Fired, Part
from tests.adam_async.role_counts import counts_of
from tests.adam_async.runs import PATIENT, local_network
from transport import Identity, Link, Message, RemoteProtocolError, Request

ADDRESS = "local://ps-0"
EVENT = Fired("worker-0", "run", "train", "thread", 1, 0, 1, 0.0, 0.0, 0.0)


@asynccontextmanager
async def answering(answer: Callable[[Any], Message]) -> AsyncIterator[RoleQueries]:
    """Questions to a server that gives these answers."""
    network = local_network()

    async def on_link(link: Link) -> None:
        def on_request(request: Request) -> None:
            reply_when_room(request, 20 << 20, lambda: answer(unpack_any(request.message)))

        link.serve(on_request)
        await link.wait_closed()

    server = Identity(role="ps", node="ps-0", incarnation=1)
    async with network.listen(ADDRESS, server, on_link):
        identity = Identity(role="driver", node="driver", incarnation=1)
        yield RoleQueries(Endpoint(network, identity), waits=PATIENT)


def profile(total: int, events: int) -> Message:
    return pack(Profile(total=total), [text_tensor(Part("worker-0", 0, [EVENT] * events))])


@pytest.mark.parametrize(
    ("total", "events"), [(1 << 50, 1), (MOST_PROFILE_EVENTS + 1, PROFILE_CHUNK), (PROFILE_CHUNK, 0), (0, 1)]
)
async def test_a_profile_without_an_end_is_refused(total: int, events: int) -> None:
    answer = profile(total, events)
    async with answering(lambda asked: answer) as queries:
        with pytest.raises(RemoteProtocolError, match="profile"):
            await queries.profile(ADDRESS)


async def test_a_profile_that_grows_as_it_is_read_is_read_once() -> None:
    asked: list[GetProfile] = []

    def answer(question: GetProfile) -> Message:
        asked.append(question)
        return profile(total=2 + len(asked), events=2 + len(asked))

    async with answering(answer) as queries:
        (part,) = await queries.profile(ADDRESS)
    assert len(part.events) == 3


@pytest.mark.parametrize(
    ("total", "size"), [(1 << 50, 1), (MOST_PACKED_BYTES + 1, RECORD_CHUNK), (9, 0), (9, 10), (0, 1)]
)
async def test_a_record_without_an_end_is_refused(total: int, size: int) -> None:
    answer = pack(RecordPart(total=total), [np.zeros(size, np.uint8)])
    async with answering(lambda asked: answer) as queries:
        with pytest.raises(RemoteProtocolError, match="record"):
            await queries.record(ADDRESS, "run", "ps-0")


async def test_a_record_is_read_part_by_part() -> None:
    data = bytes(RECORD_CHUNK) + b"end"

    def answer(asked: GetRecord) -> Message:
        return pack(RecordPart(total=len(data)), [np.frombuffer(data[asked.start : asked.stop], np.uint8)])

    async with answering(answer) as queries:
        assert await queries.record(ADDRESS, "run", "ps-0") == data


async def test_a_role_that_does_not_answer_keeps_no_other_answer_back() -> None:
    network = local_network()
    asked: list[str] = []

    def node(name: str, *, answers: bool) -> AbstractAsyncContextManager[object]:
        async def on_link(link: Link) -> None:
            def on_request(request: Request) -> None:
                asked.append(name)
                if answers:
                    counted = Statistics(node=name, role="worker"), [text_tensor(counts_of("worker", name))]
                    reply_when_room(request, 20 << 20, lambda: pack(*counted))

            link.serve(on_request)
            await link.wait_closed()

        return network.listen(f"local://{name}", Identity(role="worker", node=name, incarnation=1), on_link)

    async with node("worker-0", answers=False), node("worker-1", answers=True):
        driver = Identity(role="driver", node="driver", incarnation=1)
        queries = RoleQueries(Endpoint(network, driver), waits=PATIENT)
        addresses = [(name, f"local://{name}") for name in ("worker-0", "worker-1", "worker-2")]
        found = await queries.answers(addresses, "run", within_s=0.2)

    assert sorted(asked) == ["worker-0", "worker-1"]
    assert found == {"worker-1": counts_of("worker", "worker-1")}


async def test_an_answer_in_the_name_of_another_role_is_not_counted() -> None:
    noted: list[str] = []

    def counts(asked: Any) -> Message:
        return pack(Statistics(node="ps-0", role="ps"), [text_tensor(counts_of("ps", "ps-0"))])

    async with answering(counts) as queries:
        for node in ("ps-0", "ps-1", ""):  # an empty name asks a controller
            found = await queries.answers([(node, ADDRESS)], "", on_silence=noted.append)
            assert list(found) == (["ps-0"] if node == "ps-0" else [])
    assert [text.rpartition(": ")[2] for text in noted] == ["ps-0 answers for ps-1", "ps-0 answers for it"]


@pytest.mark.parametrize("counts", [{"node": "ps-0"}, {"node": "ps-1", "traffic": []}])
async def test_counts_without_traffic_or_of_another_node_are_refused(counts: dict[str, Any]) -> None:
    answer = pack(Statistics(node="ps-0", role="ps"), [text_tensor(counts)])
    async with answering(lambda asked: answer) as queries:
        with pytest.raises(RemoteProtocolError, match="the counts of ps-0 lack their traffic, or are of"):
            await queries.statistics(ADDRESS, "run")
