"""A driver gets the counts of the dealer from its successor if the dealer is lost."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

import pytest

from adam_async.driver.events import RunEvents
from adam_async.driver.role_counts import RoleCounts
from adam_async.messages import Statistics, pack, text_tensor
from adam_async.report.stream import EventStream
from adam_async.run.cluster_map import ClusterMap, DealerRecord, EpochRecord
from adam_async.runtime.channel import Endpoint
from tests.adam_async.cluster_maps import node, run_record
from tests.adam_async.role_counts import counts_of
from tests.adam_async.runs import PATIENT, local_network
from transport import Identity, Link, LinkBroken, Request


def dealt_by(name: str) -> ClusterMap:
    """Map of two data servers; the named one is the dealer."""
    return ClusterMap(
        nodes={each: node("data", address=f"local://{each}") for each in ("data-0", "data-1")},
        run=run_record(phase="training"),
        epoch=EpochRecord(run="run-1", number=1, groups=8, shares={}),
        dealer=DealerRecord(run="run-1", term=1, node=name, incarnation=1),
    )


@dataclass
class Member:
    """A member of the cluster, as far as `RoleCounts` needs one: it has a map."""

    map: ClusterMap


@asynccontextmanager
async def dealers(lost_at: int) -> AsyncIterator[tuple[RoleCounts, list[str]]]:
    """Two data servers, and their names in the order of the requests.

    The dealer breaks each link at the request; at the request `lost_at` the map names its successor.
    """
    network, member, asked = local_network(), Member(dealt_by("data-0")), list[str]()

    async def on_link(link: Link) -> None:
        def on_request(request: Request) -> None:
            me = link.identity.node
            asked.append(me)
            if me == "data-1":
                counts = counts_of("data", me, term=1, epoch=1, finished=7)
                request.reply(pack(Statistics(node=me, role="data"), [text_tensor(counts)]))
                return
            if len(asked) == lost_at:
                member.map = dealt_by("data-1")
            link.abort()

        link.serve(on_request)
        await link.wait_closed()

    async with AsyncExitStack() as stack:
        for name in ("data-0", "data-1"):
            identity = Identity(role="data", node=name, incarnation=1)
            await stack.enter_async_context(network.listen(f"local://{name}", identity, on_link))
        driver, stream = Identity(role="driver", node="driver", incarnation=1), EventStream()
        counts = RoleCounts(
            Endpoint(network, driver),
            waits=PATIENT,
            membership=member,
            run=lambda: "run-1",
            events=RunEvents(stream),
            stream=stream,
        )
        yield counts, asked


@pytest.mark.parametrize("lost_at", [1, 2])
async def test_the_successor_of_a_lost_dealer_answers_in_its_place(lost_at: int) -> None:
    async with dealers(lost_at) as (counts, asked):
        assert (await counts.dealer()).finished == 7
    assert asked == ["data-0"] * lost_at + ["data-1"]


async def test_a_dealer_that_fails_twice_without_a_successor_is_an_error() -> None:
    async with dealers(lost_at=3) as (counts, asked):
        with pytest.raises(LinkBroken):
            await counts.dealer()
    assert asked == ["data-0", "data-0"]
