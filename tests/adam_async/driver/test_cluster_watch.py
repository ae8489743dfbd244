"""A watch notes silences of roles, and asks all roles at once."""

import msgspec
import numpy as np

from adam_async import ParameterStore
from adam_async.cluster.networks import cluster_network
from adam_async.controller.client import joined_as
from adam_async.driver.cluster_watch import ClusterWatch, Silence
from adam_async.driver.events import RunEvents
from adam_async.driver.role_queries import RoleQueries
from adam_async.report.stream import EventStream, texts
from adam_async.run.events import AnyEvent, ServerCounted, StatusSeen, StoreCounted, read_event
from adam_async.runtime.channel import Endpoint
from adam_async.runtime.clock import system_entropy
from tests.adam_async.runs import PATIENT
from tests.adam_async.store.servers import servers
from transport import BufferPool

NODES = ("ps-0", "worker-0")


def silence() -> tuple[Silence, list[str]]:
    stream, noted = EventStream(), list[str]()
    stream.listen(texts(noted.append))
    return Silence(RunEvents(stream)), noted


async def test_a_silent_role_is_noted_once_and_noted_again_when_it_is_back() -> None:
    watched, noted = silence()
    watched.observe(NODES, NODES, asked_at=9.0, now=9.1)
    watched.observe(NODES, ["worker-0"], asked_at=10.0, now=11.0)
    assert (noted, watched.shown(11.0)) == ([], ())
    watched.observe(NODES, ["worker-0"], asked_at=12.0, now=13.0)
    watched.observe(NODES, ["worker-0"], asked_at=14.0, now=15.0)
    assert noted == ["ps-0 has not answered for 3 s"]
    assert watched.shown(15.0) == ("ps-0 for 5 s",)
    watched.observe(NODES, NODES, asked_at=20.0, now=20.1)
    assert noted[1:] == ["ps-0 answers again, after 10 s"]
    assert watched.shown(20.1) == ()


async def test_one_poll_without_an_answer_is_no_event() -> None:
    watched, noted = silence()
    for answered in ((), NODES, ()):
        watched.observe(NODES, answered, asked_at=1.0, now=2.0)
    assert noted == []


async def test_a_lost_role_is_not_silent_any_more() -> None:
    watched, noted = silence()
    for _ in range(2):
        watched.observe(NODES, (), asked_at=1.0, now=2.0)
    noted.clear()
    watched.observe(["worker-0"], ["worker-0"], asked_at=3.0, now=3.0)
    assert noted == ["worker-0 answers again, after 2 s"]
    assert watched.shown(3.0) == ()


async def test_an_operator_gets_the_counts_of_roles_and_stores_and_the_status() -> None:
    found: list[AnyEvent] = []
    stream = EventStream()
    stream.listen(found.append)
    arrays = {"w": np.zeros(8, np.float32)}
    network = cluster_network(None, entropy=system_entropy, buffers=BufferPool())
    async with servers(2) as where, ParameterStore.open(where, arrays, name="net", copies=2) as store:
        await store.push({"w": np.ones(8, np.float32)})
        async with joined_as("driver", network, where, PATIENT) as (membership, identity):
            queries = RoleQueries(Endpoint(network, identity), waits=PATIENT)
            watch = ClusterWatch(
                queries,
                membership,
                run=str,
                events=RunEvents(stream, stores=None),
                stream=stream,
                waits=PATIENT,
                asks_stores=True,
            )
            status = await watch.poll()
    assert (status.condition.verdict, status.condition.survives) == ("well", 0), "of one controller"
    assert status.condition.weakest == "the controllers"
    assert {each.counts.node for each in found if isinstance(each, ServerCounted)} == {"ps-0", "ps-1"}
    (counted,) = [each for each in found if isinstance(each, StoreCounted)]
    assert (counted.store, counted.counts.shards) == ("net", 1)
    assert sum(sum(each.staleness.values()) for each in counted.counts.clients.values()) == 1
    assert [each.status for each in found if isinstance(each, StatusSeen)] == [status]
    lines = [msgspec.json.encode(each) for each in found]
    assert all(type(read_event(line)) is type(each) for line, each in zip(lines, found, strict=True))
