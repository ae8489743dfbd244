"""Several networks in one: each address goes to the one that knows it, and no other is asked."""

import pytest

from adam_async.cluster.networks import JitterSource, SchemeNetworks
from tests.adam_async.runs import local_network, tcp_network
from tests.transport.conformance import check_link
from tests.transport.testing import link_pair, open_rules
from transport import DialFailed


@pytest.fixture
def network():
    local, tcp = local_network(), tcp_network()
    local.rules = tcp.rules = open_rules()
    return SchemeNetworks(local=local, tcp=tcp)


@pytest.mark.parametrize(
    ("address", "kind"),
    [("local://", "LocalLink"), ("tcp://127.0.0.1:0", "StreamLink")],
    ids=["local", "tcp"],
)
async def test_each_scheme_has_the_links_of_its_network(network, address, kind):
    async with link_pair(network, address=address) as (near, far):
        assert type(near).__name__ == type(far).__name__ == kind


@pytest.mark.parametrize("address", ["local://", "tcp://127.0.0.1:0"], ids=["local", "tcp"])
async def test_its_links_keep_the_promises_of_links(network, address):
    await check_link(lambda: link_pair(network, address=address))


async def test_an_unreachable_address_is_not_tried_on_another_network(network):
    async with link_pair(network, address="tcp://127.0.0.1:0") as (near, _):
        with pytest.raises(DialFailed, match="no listener on local://far"):
            await network.dial("local://far", near.identity, timeout_s=0.001)


@pytest.mark.parametrize("address", ["udp://127.0.0.1:7", "127.0.0.1:7", ""])
async def test_an_address_of_no_network_is_refused_with_the_schemes_there_are(network, address):
    async with link_pair(network, address="local://") as (near, _):
        for kind, use in (
            (DialFailed, lambda: network.dial(address, near.identity)),
            (ValueError, lambda: network.listen(address, near.identity, lambda link: link.wait_closed())),
        ):
            with pytest.raises(kind, match="is of none of these networks: local://, tcp://"):
                await use()


def test_the_jitter_of_a_link_is_its_own_and_the_same_in_every_run() -> None:
    sources = (JitterSource(("a", "b")), JitterSource(("b", "a")), JitterSource(("a", "c")))
    drawn = [[source.random() for _ in range(5)] for source in sources]
    assert drawn[0] == drawn[1] != drawn[2]
    assert len(set(drawn[0])) == 5
    assert all(0 <= number < 1 for number in drawn[0])
