"""Traffic counts each message of a node's links once, closed links included."""

import numpy as np
import pytest

from adam_async.messages import GetStatistics, Pull, Statistics, Values, pack, role_table, text_tensor
from adam_async.runtime.clock import system_entropy
from adam_async.runtime.traffic import PEERS_KEPT, Traffic
from tests.adam_async.runs import NETWORKS, address_of
from tests.transport.testing import link_pair
from transport import Identity, LinkConfig, TcpNetwork

NEAR = Identity(role="driver", node="driver-0", incarnation=1)
FAR = Identity(role="ps", node="ps-0", incarnation=2)


def answer(request):
    if request.message.type == "Pull":
        request.reply(pack(Values(versions=(1,), clock=0), [np.zeros(100, np.float32)]))
    else:
        request.reply(pack(Statistics(node="ps-0", role="ps"), [text_tensor({})]))


@pytest.mark.parametrize("network", NETWORKS)
async def test_each_end_counts_what_it_said_also_after_the_link_is_gone(network):
    links = NETWORKS[network]()
    mine, theirs = Traffic("driver-0"), Traffic("ps-0")
    for expected in (1, 2):
        async with link_pair(links, address=address_of(links), near=NEAR, far=FAR) as (near, far):
            mine.watch(near)
            theirs.watch(far)
            assert mine.links == [near]
            far.serve(answer)
            for _ in range(3):
                await near.call(pack(Pull(store="r", generation=1, shards=(1,))), timeout_s=50.0)
            await near.call(pack(GetStatistics(run="r")), timeout_s=50.0)
            open_rows = mine.rows()
            mine.gone(near)
            theirs.gone(far)
        assert mine.rows() == open_rows
        assert mine.links == []
        asked, pulled = mine.rows()
        assert (asked.type, asked.messages) == ("GetStatistics", expected)
        assert (pulled.type, pulled.messages, pulled.payload_bytes) == ("Pull", 3 * expected, 0)
        assert {row.sender for row in mine.rows()} == {"driver-0"}
        assert {row.receiver for row in mine.rows()} == {"ps-0"}
        values = theirs.rows()[1]
        assert (values.type, values.messages) == ("Values", 3 * expected)
        assert values.payload_bytes == 400 * 3 * expected
        assert (values.frame_bytes > 0) == (network == "tcp")  # by reference nothing is framed


async def test_a_row_says_whether_the_newest_link_shares_memory():
    traffic = Traffic("driver-0")
    for kind in ("auto", "tcp"):
        links = TcpNetwork(
            token=None, entropy=system_entropy, rules=role_table(), config=LinkConfig(link=kind)
        )
        async with link_pair(links, near=NEAR, far=FAR) as (near, far):
            traffic.watch(near)
            far.serve(answer)
            await near.call(pack(Pull(store="r", generation=1, shards=(1,))), timeout_s=50.0)
            traffic.gone(near)
        assert [row.shared for row in traffic.rows()] == [kind == "auto"]


async def test_earlier_peers_are_added_up_by_role_and_no_message_is_lost():
    links, traffic = NETWORKS["local"](), Traffic("driver-0")
    for number in range(PEERS_KEPT + 3):
        far = Identity(role="ps", node=f"ps-{number}", incarnation=number)
        async with link_pair(links, address="local://", near=NEAR, far=far) as (near, other):
            traffic.watch(near)
            other.serve(answer)
            await near.call(pack(Pull(store="r", generation=1, shards=(1,))), timeout_s=50.0)
            traffic.gone(near)
    rows = traffic.rows()
    assert len(rows) == PEERS_KEPT + 1
    assert [row.messages for row in rows] == [3] + [1] * PEERS_KEPT
    assert rows[0].receiver == "earlier ps"


def test_a_link_that_was_never_watched_leaves_nothing():
    traffic = Traffic("x")
    traffic.gone(object())
    assert traffic.rows() == []
