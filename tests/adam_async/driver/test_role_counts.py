"""A driver gets the counts of the ledger leader from its successor if the leader is lost."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

import pytest

from adam_async.driver.role_counts import RoleCounts
from adam_async.driver.role_queries import RoleQueries
from adam_async.messages import Statistics, pack, text_tensor
from adam_async.run.cluster_map import ClusterMap, LedgerRecord
from adam_async.runtime.channel import Endpoint
from tests.adam_async.cluster_maps import node, run_record
from tests.adam_async.runs import PATIENT, local_network
from transport import Identity, Link, LinkBroken, Request

COUNTS = {
    "process": {"host": "a", "pid": 1, "peak_rss_mb": 2.0},
    "traffic": [],
    "lending": {"leads": True},
    "epoch": 1,
    "finished": 7,
    "images": 0,
    "loss": None,
}


def led_by(name: str) -> ClusterMap:
    """Map of two data servers; the named one leads the ledger."""
    return ClusterMap(
        nodes={each: node("data", address=f"local://{each}") for each in ("data-0", "data-1")},
        run=run_record(phase="training"),
        ledger_record=LedgerRecord(run="run-1", term=1, ledger_replicas=((name, 1),)),
    )


@dataclass
class Member:
    """A member of the cluster, as far as `RoleCounts` needs one: it has a map."""

    map: ClusterMap


@asynccontextmanager
async def ledger(lost_at: int) -> AsyncIterator[tuple[RoleCounts, list[str]]]:
    """Two data servers, and their names in the order of the requests.

    The leader breaks each link at the request; at the request `lost_at` the map names its successor.
    """
    network, member, asked = local_network(), Member(led_by("data-0")), list[str]()

    async def on_link(link: Link) -> None:
        def on_request(request: Request) -> None:
            me = link.identity.node
            asked.append(me)
            if me == "data-1":
                request.reply(pack(Statistics(node=me, role="data"), [text_tensor(COUNTS)]))
                return
            if len(asked) == lost_at:
                member.map = led_by("data-1")
            link.abort()

        link.serve(on_request)
        await link.wait_closed()

    async with AsyncExitStack() as stack:
        for name in ("data-0", "data-1"):
            identity = Identity(role="data", node=name, incarnation=1)
            await stack.enter_async_context(network.listen(f"local://{name}", identity, on_link))
        driver = Identity(role="driver", node="driver", incarnation=1)
        counts = RoleCounts(
            membership=member,
            queries=RoleQueries(Endpoint(network, driver), waits=PATIENT),
            run=lambda: "run-1",
            note=lambda _: None,
            grace_s=PATIENT.grace_s,
        )
        yield counts, asked


@pytest.mark.parametrize("lost_at", [1, 2])
async def test_the_successor_of_a_lost_ledger_leader_answers_in_its_place(lost_at: int) -> None:
    async with ledger(lost_at) as (counts, asked):
        assert (await counts.ledger_leader()).finished == COUNTS["finished"]
    assert asked == ["data-0"] * lost_at + ["data-1"]


async def test_a_ledger_leader_that_fails_twice_without_a_successor_is_an_error() -> None:
    async with ledger(lost_at=3) as (counts, asked):
        with pytest.raises(LinkBroken):
            await counts.ledger_leader()
    assert asked == ["data-0", "data-0"]
