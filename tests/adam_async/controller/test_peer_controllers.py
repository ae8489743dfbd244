"""The other controllers: their names, the links to them, and the steps in which one joins the group."""

import asyncio
import logging
from contextlib import asynccontextmanager

import pytest

from adam_async.controller.consensus.membership import Members
from adam_async.controller.consensus.messages import Chunk, TakeOver
from adam_async.controller.peer_controllers import PeerControllers, packed_agree, read_agree
from adam_async.messages import Agree, Introduce, Introduced, pack, unpack
from adam_async.runtime.channel import Endpoint
from adam_async.runtime.traffic import Traffic
from tests.adam_async.controller.consensus.small_group import SmallGroup
from tests.adam_async.runs import NETWORKS, address_of, local_network, until
from transport import Identity, RemoteProtocolError, TransportError

A, B, C = "controller-1/a", "controller-2/b", "controller-3/c"
NEW_B = "controller-2/bb"
SILENT_S = 1.0


def controller(number):
    return Identity(role="controller", node=f"controller-{number}", incarnation=1)


def peers_of(network, *, settled=True):
    return PeerControllers(
        Endpoint(network, controller(1), Traffic("controller-1")), is_settled=lambda: settled
    )


def told(*addresses):
    return {f"controller-{number}": address for number, address in enumerate(addresses, start=1)}


def met(network=None):
    peers = peers_of(network or local_network())
    peers.set_addresses(told("local://one", "local://two", "local://three"))
    return peers


class Other:
    """Another controller, as far as it is heard: answers who it is, and keeps what its core is told."""

    def __init__(self, answers):
        self.answers = list(answers)
        self.asked = []
        self.heard = []
        self.links = []

    async def on_link(self, link):
        self.links.append(link)
        link.serve(self._answer)
        try:
            while True:
                message = await link.receive()
                self.heard.append(read_agree(message))
        except TransportError:
            pass
        finally:
            link.abort()

    def _answer(self, request):
        self.asked.append(unpack(request.message, Introduce).identity)
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if answer is None:
            request.fail("starting", "ask again")
        else:
            request.reply(pack(answer))


@asynccontextmanager
async def linked(network, *answers, settled=True, node=2):
    """PeerControllers that dial one other controller, and that controller."""
    other = Other(answers)
    async with network.listen(address_of(network), controller(node), other.on_link) as listener:
        peers = peers_of(network, settled=settled)
        peers.set_addresses(told("local://nobody-dials-us", listener.address))
        async with asyncio.TaskGroup() as group:
            talking = group.create_task(_talk(peers), name="talking")
            yield peers, other
            talking.cancel()


async def _talk(peers):
    async with asyncio.TaskGroup() as group:
        peers.begin(group, A)


# --- names and identities ------------------------------------------------------------------------


def test_addresses_without_the_own_name_are_an_error():
    with pytest.raises(ValueError, match="controller-1 is not one of the controllers controller-2"):
        peers_of(local_network()).set_addresses({"controller-2": "local://two"})


def test_the_address_of_a_known_name_does_not_depend_on_its_disk():
    peers = met()
    assert peers.address(B) == peers.address(NEW_B) == "local://two"
    assert peers.address("stranger/b") == ""


def test_only_known_controllers_that_send_in_their_own_name_are_heard():
    peers = met()

    def says(name, sender):
        return peers.listens_to(name, TakeOver(sender=sender, to=A, term=1))

    assert says("controller-2", B)
    assert not says("controller-2", C)
    assert not says("stranger", "stranger/b")
    assert not peers_of(local_network()).listens_to("controller-2", TakeOver(sender=B, to=A, term=1))


# --- who is taken in -----------------------------------------------------------------------------


def leading(voters, *, joiners=()):
    """A group led by the first of its voters, whom the others have just heard."""
    group = SmallGroup(voters, joiners=joiners)
    group.elect(voters[0])
    return group


def next_step(peers, group, *, silent_s=SILENT_S):
    return peers.next_step(group[A], silent_s=silent_s, now=group.now)


def test_members_unknown_names_and_the_own_name_need_no_step():
    peers, group = met(), leading((A, B, C))
    for name, identity in (
        ("controller-2", B),
        ("controller-3", C),
        ("stranger", "stranger/f"),
        ("controller-2", "controller-3/f"),
        ("controller-1", "controller-1/f"),
    ):
        peers.introduced(name, identity)
        assert next_step(peers, group) is None


def test_one_with_a_new_disk_is_added_then_takes_the_old_place_then_counts():
    peers, group = met(), leading((A, B, C), joiners=(NEW_B,))
    peers.introduced("controller-2", NEW_B)
    for _ in range(10):
        group.beat(A, among={A, C})
    done = []
    while (step := next_step(peers, group)) is not None:
        done.append((step.kind, step.node))
        group.change(A, step.kind, step.node)
        group.deliver(among={A, C, NEW_B})
        group.beat(A, among={A, C, NEW_B})
    assert done == [("add", NEW_B), ("remove", B), ("promote", NEW_B)]
    assert set(group[A].members.voters) == {A, C, NEW_B}


def test_a_name_stays_with_the_identity_that_was_heard_lately():
    peers, group = met(), leading((A, B, C))
    peers.introduced("controller-2", NEW_B)
    group.now += SILENT_S
    assert next_step(peers, group, silent_s=SILENT_S + 1.0) is None
    assert next_step(peers, group, silent_s=SILENT_S - 0.1).node == NEW_B


def test_the_latest_identity_of_a_name_is_the_one_to_take_in():
    peers, group = met(), leading((A, C))
    for identity in (B, NEW_B):
        peers.introduced("controller-2", identity)
    assert next_step(peers, group).node == NEW_B


# --- links ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("network", NETWORKS)
async def test_both_exchange_identities_before_messages_of_the_core(network):
    async with linked(NETWORKS[network](), Introduced(identity=B, members=(B,))) as (peers, other):
        word = TakeOver(sender=A, to=B, term=3)
        peers.send(word, group="g")  # there is no link yet: it is dropped
        await until(lambda: peers.linked and other.asked)
        peers.send(word, group="g")
        await until(lambda: other.heard)
        assert (peers.linked, other.asked, other.heard) == ({"controller-2"}, [A], [("g", word)])
        peers.send(TakeOver(sender=A, to=C, term=3), group="g")  # nobody dialled that one


async def test_the_first_controller_asks_again_until_all_identities_are_known(monkeypatch):
    monkeypatch.setattr("adam_async.controller.peer_controllers.ASK_S", 0.01)
    answers = (None, None, Introduced(identity=B, members=()))
    async with linked(local_network(), *answers, settled=False) as (peers, other):
        await until(lambda: other.asked)
        assert await peers.first_voters() == (A, B)
        assert len(other.asked) == 3


async def test_a_controller_that_finds_a_group_begins_none():
    async with linked(local_network(), Introduced(identity=B, members=(B,))) as (peers, other):
        await until(lambda: peers.linked and other.asked)
        assert await peers.first_voters() == ()


async def test_a_link_that_breaks_is_dialled_again():
    async with linked(local_network(), Introduced(identity=B, members=(B,))) as (peers, other):
        await until(lambda: peers.linked and other.asked)
        other.links[0].abort()
        await until(lambda: len(other.asked) == 2)
        assert peers.linked == {"controller-2"}


async def test_another_controller_at_that_address_gets_no_message_and_is_named_once(monkeypatch, caplog):
    monkeypatch.setattr("adam_async.controller.peer_controllers.REFUSED_S", 0.01)
    with caplog.at_level(logging.WARNING):
        async with linked(local_network(), Introduced(identity=C, members=(C,)), node=3) as (peers, other):
            await until(lambda: "instead of" in caplog.text)
            peers.send(TakeOver(sender=A, to=B, term=3), group="g")
            assert (peers.linked, other.asked, other.heard) == (set(), [], [])
            await until(lambda: len(other.links) > 3)
    assert caplog.text.count("is controller-3 instead of controller-2") == 1


async def test_a_message_that_no_link_can_take_is_named_once(caplog):
    with caplog.at_level(logging.WARNING):
        async with linked(NETWORKS["tcp"](), Introduced(identity=B, members=(B,))) as (peers, other):
            await until(lambda: peers.linked and other.asked)
            for _ in range(3):
                peers.send(TakeOver(sender=A, to=B, term=3), group="g" * (1 << 20))
            assert peers.linked == {"controller-2"}
    assert caplog.text.count("no link can take TakeOver: meta-length") == 1


@pytest.mark.parametrize("size", [10, 100_000])
def test_a_message_of_a_core_arrives_unchanged_whatever_its_size(size):
    snapshot = Chunk(
        sender="a-1", to="b-2", term=3, index=4, index_term=2, members=Members(("a-1",)),
        size=size, crc=5, offset=0, data=bytes(size), round=6,
    )  # fmt: skip
    message = packed_agree(snapshot, group="g")
    assert bool(message.tensors) == (size > 4096)
    assert read_agree(message) == ("g", snapshot)


@pytest.mark.parametrize("said", [b"\xc1", b"\x91\x01"])
def test_an_invalid_message_of_a_core_is_refused(said):
    with pytest.raises(RemoteProtocolError, match="malformed bytes beside Agree"):
        read_agree(pack(Agree(group="g", packed=said)))
    with pytest.raises(RemoteProtocolError, match="must carry one packed tensor"):
        read_agree(pack(Agree(group="g")))
