"""Asking controllers, whichever leads: what is asked again, what is done once, and what is missed never.

The controllers here are fronts of one mind: real links, the real state machine, and no agreement needed. So a
test can say who leads, who is silent, and which answers are lost.
"""

import asyncio
from contextlib import AsyncExitStack, aclosing, asynccontextmanager

import msgspec
import pytest

from adam_async.controller import leader_connection, map_client
from adam_async.controller.leader_connection import parse_controllers
from adam_async.controller.map_client import MapClient
from adam_async.controller.replicated_state import Open, ReplicatedState, Set, command_bytes, first_state
from adam_async.errors import ConfigError, DeadlineExceeded, Leaderless, RoleUnreachable
from adam_async.messages import (
    NOT_LEADER,
    UNKNOWN,
    CompareAndSet,
    GetMap,
    MapChanges,
    MapState,
    OpenSession,
    SessionOpened,
    WatchMap,
    pack,
    role_table,
    text_tensor,
    unpack_any,
)
from adam_async.run.cluster_map import NodeRecord
from adam_async.run.config import Waits
from adam_async.run.map_changes import Change, History, changed
from adam_async.runtime.traffic import Traffic
from tests.adam_async.runs import NETWORKS, address_of, entropy_of, turns, until
from transport import HandshakeRejected, Identity, LinkClosed, RemoteError, TcpNetwork

WAITS = Waits(dial_s=20.0, call_s=20.0, patience_s=20.0)


def record(name="x"):
    return NodeRecord(role="worker", address=f"local://{name}", incarnation=1)


class Mind:
    """The replicated state of one group of controllers, without the group."""

    def __init__(self, group="one"):
        self.replicated_state = ReplicatedState()
        self.replicated_state.restore(first_state(group))
        self.leader = None
        self.index = 0
        self.session = self.apply(Open()).at

    def apply(self, command):
        self.index += 1
        return self.replicated_state.apply(self.index, command_bytes(command))

    def change(self, count=1):
        """Others change the map."""
        for _ in range(count):
            self.set(self.session, self.index, "nodes/other", str(self.index))
        if self.leader is not None:
            self.leader.tell()

    def set(self, session, number, key, name):
        old = self.replicated_state.map.nodes.get(key.removeprefix("nodes/"))
        value = msgspec.json.encode(record(name))
        expected = old.changed if old else 0
        return self.apply(Set(session=session, number=number, key=key, expected=expected, value=value))


class Front:
    """One controller; `hooks` take questions of a kind out of its hands, once each."""

    def __init__(self, mind):
        self.mind = mind
        self.address = ""
        self.asked = []
        self.hooks = []
        self.links = []
        self.watches = []
        self.silent = False

    async def on_link(self, link):
        self.links.append(link)
        link.serve(self.on_request)
        await link.wait_closed()

    def hook(self, kind, act):
        """Have `act(request, body)` take the next question of a kind."""
        self.hooks.append((kind, act))

    def on_request(self, request):
        body = unpack_any(request.message)
        self.asked.append(body)
        if self.silent:
            return
        for hook in self.hooks:
            if isinstance(body, hook[0]):
                self.hooks.remove(hook)
                hook[1](request, body)
                return
        self.answer(request, body)

    def answer(self, request, body):
        mind, leader = self.mind, self.mind.leader
        if leader is not self:
            request.fail(NOT_LEADER, leader.address if leader else "")
        elif isinstance(body, GetMap):
            request.reply(self.whole())
        elif isinstance(body, OpenSession):
            request.reply(pack(SessionOpened(session=mind.apply(Open()).at)))
        elif isinstance(body, CompareAndSet):
            self.set(request, body)
        else:
            self.watch(request, body)

    def apply(self, request, body):
        value = request.message.tensors[0].tobytes()
        return self.mind.apply(
            Set(session=body.session, number=body.number, key=body.key, expected=body.expected, value=value)
        )

    def set(self, request, body):
        outcome = self.apply(request, body)
        if outcome.problem:
            request.fail(outcome.problem, outcome.text)
        else:
            request.reply(self.updates(body, done=outcome.done, at=outcome.at))

    def watch(self, request, body):
        news = (
            body.group != self.mind.replicated_state.group
            or body.after < self.mind.replicated_state.map.version
        )
        if news or not body.wait_s:
            request.reply(self.updates(body))
        else:
            self.watches.append((request, body))

    def tell(self):
        watches, self.watches = self.watches, []
        for request, body in watches:
            self.watch(request, body)

    def whole(self, **fields):
        replicated_state = self.mind.replicated_state
        state = MapState(version=replicated_state.map.version, group=replicated_state.group, **fields)
        return pack(state, [text_tensor(replicated_state.map)])

    def updates(self, body, **fields):
        replicated_state = self.mind.replicated_state
        changes = replicated_state.since(body.after, body.group)
        if changes is None:
            return self.whole(**fields)
        told = MapChanges(version=replicated_state.map.version, group=replicated_state.group, **fields)
        return pack(told, [text_tensor(changes)])

    def numbers(self):
        """Sessions and numbers of the questions that were asked here."""
        return [(body.session, body.number) for body in self.asked if isinstance(body, CompareAndSet)]

    def applies_and_breaks(self, request, body):
        """Do what is asked, and be gone before it is said."""
        self.apply(request, body)
        request.link.abort()


class Table:
    """Fronts that listen, and clients that are closed at the end."""

    def __init__(self, network, stack, mind, fronts):
        self.network, self.mind, self.fronts, self._stack = network, mind, fronts, stack

    @property
    def addresses(self):
        return ",".join(front.address for front in self.fronts)

    def client(self, *, controllers=None, waits=WAITS, node="worker-0"):
        client = MapClient(
            network=self.network,
            controllers=controllers or self.addresses,
            identity=Identity(role="worker", node=node, incarnation=1),
            waits=waits,
            traffic=Traffic(node),
        )
        self._stack.callback(client.close)
        return client


@asynccontextmanager
async def table_of(network, count=1, mind=None):
    mind = mind or Mind()
    async with AsyncExitStack() as stack:
        fronts = []
        for number in range(count):
            front = Front(mind)
            identity = Identity(role="controller", node=f"controller-{number}", incarnation=1)
            listener = await stack.enter_async_context(
                network.listen(address_of(network), identity, front.on_link)
            )
            front.address = listener.address
            fronts.append(front)
        mind.leader = fronts[0]
        yield Table(network, stack, mind, fronts)


@pytest.fixture
def hasty(monkeypatch):
    """Silence is noticed soon."""
    monkeypatch.setattr(map_client, "WATCH_S", 0.02)
    monkeypatch.setattr(leader_connection, "SILENT_S", 0.06)


# --- addresses ---------------------------------------------------------------------------------


def test_addresses_are_read_with_spaces_around_them():
    assert parse_controllers("tcp://a:1, tcp://b:2 ,tcp://c:3") == ("tcp://a:1", "tcp://b:2", "tcp://c:3")
    assert parse_controllers("local://c") == ("local://c",)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "'' in '' is no address of a controller: give one, such as tcp://10.0.0.1:7070, or several"),
        ("tcp://a:1,", "'' in 'tcp://a:1,' is no address"),
        ("tcp://a:1,b:2", "'b:2' in 'tcp://a:1,b:2' is no address"),
        ("tcp://a:1,tcp://b:2,tcp://a:1", "names the controller at tcp://a:1 twice"),
    ],
)
def test_an_invalid_list_of_addresses_is_refused_with_a_remedy(text, said):
    with pytest.raises(ConfigError, match=said):
        parse_controllers(text)


# --- finding the leader ------------------------------------------------------------------------


@pytest.mark.parametrize("network", NETWORKS)
async def test_a_follower_names_the_leader_and_no_other_controller_is_asked(network):
    async with table_of(NETWORKS[network](), 3) as table:
        first, other, leader = table.fronts
        table.mind.leader = leader
        client = table.client()
        assert (await client.compare_and_set("nodes/a", 0, record())).done
        assert client.address == leader.address
        assert (len(first.asked), other.asked) == (1, [])
        await until(lambda: first.links[0].closed)


async def test_one_address_is_enough_and_the_others_are_learnt():
    async with table_of(NETWORKS["local"](), 2) as table:
        given, leader = table.fronts
        table.mind.leader = leader
        client = table.client(controllers=given.address)
        await client.get()
        table.mind.leader = given
        assert (await client.compare_and_set("nodes/a", 0, record())).done
        assert client.address == given.address


async def test_where_nobody_knows_the_leader_all_are_asked_in_turn_until_there_is_one():
    async with table_of(NETWORKS["local"](), 3) as table:
        table.mind.leader = None
        asking = table.client().get()

        async def elect():
            await until(lambda: all(len(front.asked) >= 2 for front in table.fronts))
            table.mind.leader = table.fronts[1]

        news, _ = await asyncio.gather(asking, elect())
        assert news.whole == table.mind.replicated_state.map


async def test_two_that_name_each_other_are_not_asked_without_a_pause():
    async with table_of(NETWORKS["local"](), 2) as table:
        one, other = table.fronts
        for front, named in ((one, other), (other, one)):
            front.answer = lambda request, body, named=named: request.fail(NOT_LEADER, named.address)
        waits = msgspec.structs.replace(WAITS, patience_s=0.2)
        with pytest.raises(
            Leaderless, match=r"led for 0\.2 s.*: the controller at .* does not lead, nor does"
        ):
            await table.client(waits=waits).get()
        assert 2 <= len(one.asked) + len(other.asked) <= 12


@pytest.mark.parametrize("hint", ["tcp://10.0.0.1:1", "nonsense"])
async def test_a_leader_that_is_named_in_a_way_that_we_cannot_dial_is_passed_over(hint):
    async with table_of(NETWORKS["local"](), 2) as table:
        first, leader = table.fronts
        table.mind.leader = leader
        first.hook(WatchMap, lambda request, body: request.fail(NOT_LEADER, hint))
        await table.client().get()
        assert leader.asked


@pytest.mark.parametrize("given", [True, False], ids=["given", "named"])
async def test_another_program_at_a_named_address_is_passed_over_and_at_a_given_one_reported(given):
    alien = TcpNetwork(token=b"a token of others", entropy=entropy_of("alien"), rules=role_table())
    async with table_of(NETWORKS["tcp"](), 2) as table, AsyncExitStack() as stack:
        first, leader = table.fronts
        identity = Identity(role="controller", node="controller", incarnation=1)

        async def nobody(link):
            await link.wait_closed()

        stranger = await stack.enter_async_context(alien.listen("tcp://127.0.0.1:0", identity, nobody))
        table.mind.leader = leader
        first.hook(WatchMap, lambda request, body: request.fail(NOT_LEADER, stranger.address))
        others = [stranger] if given else []
        client = table.client(controllers=",".join(each.address for each in (first, *others, leader)))
        if given:
            with pytest.raises(HandshakeRejected):
                await client.get()
        else:
            await client.get()
            assert client.address == leader.address


async def test_a_controller_that_is_gone_is_passed_over():
    async with table_of(NETWORKS["tcp"](), 2) as table:
        async with table_of(table.network) as other:
            gone = other.addresses
        client = table.client(controllers=f"{gone},{table.addresses}")
        await client.get()
        assert client.address == table.fronts[0].address


@pytest.mark.parametrize("count", [1, 2])
async def test_controllers_that_were_never_there_are_named(count):
    network = NETWORKS["local"]()
    async with table_of(network, count) as table:
        addresses = table.addresses
    async with table_of(network) as table:
        client = table.client(controllers=addresses, waits=msgspec.structs.replace(WAITS, dial_s=0.01))
        with pytest.raises(RoleUnreachable, match=f"cannot reach the controller at {addresses}: ") as error:
            await client.get()
        assert str(error.value).endswith("; start it there, or check the address")


async def test_a_controller_without_a_group_is_not_taken_for_a_leader():
    async with table_of(NETWORKS["local"](), 2) as table:
        stranger, leader = table.fronts
        stranger.mind = Mind("")
        stranger.mind.leader = stranger
        table.mind.leader = leader
        client = table.client()
        await client.get()
        assert client.address == leader.address


async def test_a_refused_handshake_ends_the_search():
    async with table_of(NETWORKS["tcp"](), 2) as table:
        table.network = TcpNetwork(
            token=b"another token of tests", entropy=entropy_of("x"), rules=role_table()
        )
        with pytest.raises(HandshakeRejected):
            await table.client().get()


async def test_another_role_that_answers_is_an_error():
    async with table_of(NETWORKS["local"]()) as table:
        table.fronts[0].hook(WatchMap, lambda request, body: request.fail("unexpected", "not here"))
        with pytest.raises(RemoteError, match="unexpected: not here"):
            await table.client().get()
        await until(lambda: table.fronts[0].links[0].closed)


# --- silence -----------------------------------------------------------------------------------


async def watch_until(client, version, seen, **position):
    async with aclosing(client.changes(**position)) as all_news:
        async for news in all_news:
            seen.append(news)
            if news.version >= version:
                return


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.usefixtures("hasty")
async def test_a_leader_that_falls_silent_is_left_for_another(network, caplog):
    caplog.set_level("INFO")
    async with table_of(NETWORKS[network](), 2) as table:
        frozen, other = table.fronts
        client, seen = table.client(), []
        table.mind.change()

        async def freeze():
            await until(lambda: len(frozen.asked) >= 2)
            frozen.silent = True
            table.mind.leader = other
            table.mind.change()

        await asyncio.gather(watch_until(client, 2, seen), freeze())
        assert client.address == other.address
        assert [news.version for news in seen] == [1, 2]
    (said,) = [each for each in caplog.records if "lost the controller" in each.getMessage()]
    assert said.getMessage().startswith(f"worker-0: lost the controller at {frozen.address} (")
    assert said.levelname == "INFO"  # another one leads already


@pytest.mark.usefixtures("hasty")
async def test_the_only_controller_is_not_left_for_its_silence():
    async with table_of(NETWORKS["local"]()) as table:
        (front,) = table.fronts
        asyncio.get_running_loop().call_later(0.2, lambda: table.mind.change())
        await watch_until(table.client(), 1, [])
        assert len(front.links) == 1


async def test_silence_while_our_own_loop_stands_still_is_nobodys(monkeypatch):
    monkeypatch.setattr(leader_connection, "SILENT_S", 0.02)
    monkeypatch.setattr(leader_connection, "PARTS", 1)
    monkeypatch.setattr(leader_connection, "LATE_S", 0.05)
    async with table_of(NETWORKS["local"](), 2) as table:
        leader, loop = table.fronts[0], asyncio.get_running_loop()

        def stand_still(request, body):
            end = loop.time() + 0.3
            while loop.time() < end:
                pass
            loop.call_soon(leader.answer, request, body)

        client = table.client()
        await client.get()
        monkeypatch.setattr(map_client, "WATCH_S", 0.0)
        leader.hook(GetMap, lambda request, body: loop.call_soon(stand_still, request, body))
        await client.get()
        assert len(leader.links) == 1


# --- compare and set ---------------------------------------------------------------------------


async def test_questions_are_numbered_and_asked_one_at_a_time():
    async with table_of(NETWORKS["local"]()) as table:
        (front,) = table.fronts
        client = table.client()
        held = []
        front.hook(CompareAndSet, lambda request, body: held.append((request, body)))
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(client.compare_and_set(f"nodes/{n}", 0, record())) for n in "ab"]
            await until(lambda: held)
            await turns(10)
            assert [number for _, number in front.numbers()] == [1]
            front.answer(*held[0])
        assert [task.result().at for task in tasks] == [1, 2]
        assert [number for _, number in front.numbers()] == [1, 2]


@pytest.mark.parametrize("network", NETWORKS)
async def test_a_request_with_a_lost_answer_is_applied_once_whichever_controller_leads_then(network):
    async with table_of(NETWORKS[network](), 2) as table:
        old, new = table.fronts

        def apply_and_break(request, body):
            old.applies_and_breaks(request, body)
            table.mind.leader = new

        client = table.client()
        old.hook(CompareAndSet, apply_and_break)
        outcome = await client.compare_and_set("nodes/a", 0, record())
        assert (outcome.done, outcome.at) == (True, 1)
        assert old.numbers() == new.numbers()
        assert table.mind.replicated_state.map.version == 1


async def test_an_answer_whose_link_is_lost_is_asked_for_again_and_brings_the_map(monkeypatch):
    async with table_of(NETWORKS["local"]()) as table:
        (front,) = table.fronts
        client, call, lost = table.client(), MapClient.call, []

        async def loses(client, link, message, wait_s):
            answer = await call(client, link, message, wait_s)
            if message.type == CompareAndSet.__name__ and not lost:
                lost.append(link)
                client.lose(link, LinkClosed("by this test"))
            return answer

        monkeypatch.setattr(MapClient, "call", loses)
        outcome = await client.compare_and_set("nodes/a", 0, record(), after=0, group="one")
        assert (outcome.done, outcome.at) == (True, 1)
        assert [update.version for update in outcome.updates] == [1]
        assert front.numbers() == [front.numbers()[0]] * 2
        assert table.mind.replicated_state.map.version == 1


async def test_a_question_that_was_under_way_when_leadership_was_lost_keeps_its_number():
    async with table_of(NETWORKS["local"](), 2) as table:
        old, new = table.fronts

        def resign(request, body):
            old.apply(request, body)
            table.mind.leader = new
            request.fail(UNKNOWN, "leadership was lost")

        client = table.client()
        old.hook(CompareAndSet, resign)
        assert (await client.compare_and_set("nodes/a", 0, record())).done
        assert old.numbers() == new.numbers()
        assert table.mind.replicated_state.map.version == 1


async def test_a_busy_leader_is_asked_again_on_the_same_link():
    async with table_of(NETWORKS["local"]()) as table:
        (front,) = table.fronts
        for kind in (OpenSession, CompareAndSet, GetMap):
            front.hook(kind, lambda request, body: request.fail("busy", "handing over"))
        client = table.client()
        assert (await client.compare_and_set("nodes/a", 0, record())).done
        await client.get()
        assert len(front.links) == 1
        assert len(set(front.numbers())) == 1


async def test_a_conflict_has_the_present_record():
    async with table_of(NETWORKS["local"]()) as table:
        table.mind.change(2)
        outcome = await table.client().compare_and_set("nodes/other", 1, record(), after=1, group="one")
        assert (outcome.done, outcome.at) == (False, 2)
        assert [news.version for news in outcome.updates] == [2]
        assert outcome.updates[0].change.nodes.keys() == {"other"}


async def test_a_refused_value_is_an_error_with_its_reason_and_the_next_question_is_another():
    async with table_of(NETWORKS["local"]()) as table:
        client = table.client()
        with pytest.raises(RemoteError, match=r"invalid: .*no key 'colour'"):
            await client.compare_and_set("colour", 0, {})
        assert (await client.compare_and_set("nodes/a", 0, record())).done


async def test_a_session_that_is_over_before_it_was_used_is_replaced():
    async with table_of(NETWORKS["local"]()) as table:
        client = table.client()
        await client.compare_and_set("nodes/a", 0, record())
        table.mind.replicated_state._sessions.clear()
        assert (await client.compare_and_set("nodes/b", 0, record())).done
        assert table.mind.replicated_state.map.version == 2


@pytest.mark.parametrize(("applied", "done"), [(False, True), (True, None)])
async def test_the_outcome_of_a_lost_session_is_read_off_the_map_or_unknown(applied, done):
    async with table_of(NETWORKS["local"]()) as table:
        (front,) = table.fronts

        def be_gone(request, body):
            if applied:
                front.apply(request, body)
            table.mind.replicated_state._sessions.clear()
            request.link.abort()

        front.hook(CompareAndSet, be_gone)
        outcome = await table.client().compare_and_set("nodes/a", 0, record())
        assert (outcome.done, outcome.at) == (done, 1)
        assert outcome.updates[-1].version == 1
        assert table.mind.replicated_state.map.version == 1


def found_anew(front):
    """Let the same controller belong to another group, in which the old sessions' numbers are others'."""
    front.mind = mind = Mind("two")
    mind.leader = front
    for _ in range(5):
        mind.apply(Open())
    for link in front.links:
        link.abort()
    return mind


async def test_another_group_is_not_asked_what_was_meant_for_the_old_one():
    async with table_of(NETWORKS["local"]()) as table:
        (front,) = table.fronts
        client = table.client()
        assert (await client.compare_and_set("nodes/a", 0, record(), group="one")).done
        mind = found_anew(front)
        mind.set(2, 1, "nodes/a", "another's")
        await client.get()  # else the question might have reached the old one, for all we know
        asked = len(front.numbers())
        outcome = await client.compare_and_set("nodes/a", 1, record(), after=1, group="one")
        assert outcome.done is False
        assert (outcome.updates[0].group, outcome.updates[0].whole) == ("two", mind.replicated_state.map)
        assert len(front.numbers()) == asked
        assert (await client.compare_and_set("nodes/a", 1, record(), group="two")).done
        assert front.numbers()[-1] == (mind.index - 1, 1)


async def test_the_outcome_of_a_request_in_a_vanished_group_is_unknown():
    async with table_of(NETWORKS["local"]()) as table:
        (front,) = table.fronts
        client = table.client()

        def be_gone(request, body):
            front.mind = Mind("two")
            front.mind.leader = front
            request.link.abort()

        front.hook(CompareAndSet, be_gone)
        outcome = await client.compare_and_set("nodes/a", 0, record())
        assert outcome.done is None
        assert outcome.updates[0].group == "two"
        assert front.mind.replicated_state.map.version == 0


@pytest.mark.parametrize("count", [1, 2])
async def test_a_question_without_an_answer_ends_with_the_name_of_the_wait(count):
    async with table_of(NETWORKS["local"](), count) as table:
        client = table.client()
        await client.get()
        for front in table.fronts:
            front.silent = True
        with pytest.raises(DeadlineExceeded, match=r"waited 0\.01 s for the controller to set nodes/a"):
            await client.compare_and_set("nodes/a", 0, record(), timeout_s=0.01)
        with pytest.raises(
            DeadlineExceeded, match=r"waited 0\.01 s for the controller to send the cluster map"
        ):
            await client.get(timeout_s=0.01)


async def test_a_question_that_was_given_up_does_not_become_the_next_one():
    async with table_of(NETWORKS["local"]()) as table:
        (front,) = table.fronts
        client = table.client()
        late = []
        front.hook(CompareAndSet, lambda request, body: late.append((request, body)))
        with pytest.raises(DeadlineExceeded):
            await client.compare_and_set("nodes/a", 0, record("given up"), timeout_s=0.05)
        assert (await client.compare_and_set("nodes/b", 0, record())).done
        assert front.apply(*late[0]).problem == "late"
        assert table.mind.replicated_state.map.nodes.keys() == {"b"}


# --- changes -----------------------------------------------------------------------------------


def move(table, leader):
    """Another one leads; who waits at the old one is told."""
    old, table.mind.leader = table.mind.leader, leader
    watches, old.watches = old.watches, []
    for request, _ in watches:
        request.fail(NOT_LEADER, leader.address)


def newest_of(seen):
    """The map that these news make."""
    newest = None
    for news in seen:
        newest = news.whole if news.whole is not None else changed(newest, news.change)
    return newest


@pytest.mark.parametrize("network", NETWORKS)
async def test_every_version_arrives_once_and_in_order_whichever_controller_leads(network):
    async with table_of(NETWORKS[network](), 3) as table:
        client, seen, last = table.client(), [], 40
        table.mind.change()
        async with asyncio.TaskGroup() as group:
            group.create_task(watch_until(client, last, seen))
            await until(lambda: seen)
            for number in range(2, last + 1):
                table.mind.change()
                if number % 4 == 0:
                    move(table, table.fronts[number // 4 % 3])
                elif number % 6 == 0:
                    for link in table.mind.leader.links:
                        link.abort()
                await turns(number % 5 * 5)
        assert [news.version for news in seen] == list(range(1, last + 1))
        assert [news.whole is not None for news in seen] == [True] + [False] * (last - 1)
        assert newest_of(seen) == table.mind.replicated_state.map


async def test_a_watcher_with_a_version_gets_the_changes_after_it():
    async with table_of(NETWORKS["local"]()) as table:
        table.mind.change(5)
        seen = []
        await watch_until(table.client(), 5, seen, after=2, group="one")
        assert [(news.version, news.whole) for news in seen] == [(3, None), (4, None), (5, None)]


@pytest.mark.parametrize(("after", "group"), [(2, "another"), (-1, ""), (1, "one")])
async def test_versions_that_are_no_longer_kept_come_as_a_whole_map(after, group):
    async with table_of(NETWORKS["local"]()) as table:
        table.mind.change(5)
        history = table.mind.replicated_state.history = History(2)
        for change in (Change(version=3), Change(version=4), Change(version=5)):
            history.add(change)
        seen = []
        await watch_until(table.client(), 5, seen, after=after, group=group)
        (news,) = seen
        assert (news.version, news.group, news.change) == (5, "one", None)
        assert news.whole == table.mind.replicated_state.map


async def test_a_group_that_was_founded_anew_begins_with_its_whole_map():
    async with table_of(NETWORKS["local"]()) as table:
        (front,) = table.fronts
        table.mind.change(3)
        async with aclosing(table.client().changes()) as all_news:
            assert (await anext(all_news)).version == 3
            mind = found_anew(front)
            mind.change()
            news = await anext(all_news)
            assert (news.group, news.version, news.whole) == ("two", 1, mind.replicated_state.map)


def gap(front):
    """Changes that do not begin where they should."""
    body = MapChanges(version=9, group="one")
    return pack(body, [text_tensor([Change(version=9)])])


def foreign(front):
    """Changes of another group's map."""
    body = MapChanges(version=2, group="two")
    return pack(body, [text_tensor([Change(version=2)])])


def textless(front):
    """An answer without what it is about."""
    return pack(MapState(version=9, group="one"))


@pytest.mark.parametrize("malformed", [gap, foreign, textless])
async def test_an_answer_that_breaks_the_rules_is_not_taken_and_asked_for_again(malformed):
    async with table_of(NETWORKS["local"]()) as table:
        (front,) = table.fronts
        table.mind.change()
        client, seen = table.client(), []

        def answer(request, body):
            request.reply(malformed(front))
            table.mind.change()

        await client.get()
        front.hook(WatchMap, answer)
        await watch_until(client, 2, seen, after=1, group="one")
        assert [news.version for news in seen] == [2]
        assert len(front.links) == 2


async def test_a_leader_that_is_behind_does_not_take_the_map_back():
    async with table_of(NETWORKS["local"]()) as table:
        (front,) = table.fronts
        table.mind.change(3)
        old = pack(MapState(version=1, group="one"), [text_tensor(table.mind.replicated_state.map)])
        client, seen = table.client(), []
        await client.get()
        front.hook(WatchMap, lambda request, body: (request.reply(old), table.mind.change()))
        await watch_until(client, 4, seen, after=3, group="one")
        assert [news.version for news in seen] == [4]


# --- the end -----------------------------------------------------------------------------------


async def test_no_leader_for_too_long_is_a_death():
    async with table_of(NETWORKS["local"](), 3) as table:
        client = table.client(waits=msgspec.structs.replace(WAITS, patience_s=0.1))
        await client.get()
        table.mind.leader = None
        with pytest.raises(
            Leaderless,
            match=r"none of the controllers .*, .*, .* led for 0\.1 s.*: the controller at .* does not",
        ):
            await client.get()


async def test_a_long_search_warns_once_and_names_the_found_leader(monkeypatch, caplog):
    monkeypatch.setattr("adam_async.controller.leader_connection.WARN_S", 0.01)
    async with table_of(NETWORKS["local"](), 3) as table:
        client = table.client()
        await client.get()
        leader, table.mind.leader = table.mind.leader, None
        asking = asyncio.create_task(client.get())
        await until(lambda: "to lead" in caplog.text)
        asked = len(leader.asked)
        await until(lambda: len(leader.asked) > asked + 2)
        table.mind.leader = leader
        await asking
    said = [each.getMessage() for each in caplog.records if each.levelname == "WARNING"]
    assert len(said) == 2
    assert "worker-0 waits for one of 3 controllers to lead, for which more than half must run" in said[0]
    assert said[0].count("does not lead, nor does any other") >= 1
    assert all(f"{address}: " in said[0] for address in table.addresses.split(","))
    assert said[1].endswith(f"the controller at {leader.address} leads")


async def test_a_search_without_any_contact_soon_names_the_tried_addresses(monkeypatch, caplog):
    monkeypatch.setattr("adam_async.controller.leader_connection.WARN_S", 0.01)
    addresses = ",".join(f"local://nobody-{number}" for number in (1, 2, 3))
    client = MapClient(
        network=NETWORKS["local"](),
        controllers=addresses,
        identity=Identity(role="worker", node="x", incarnation=1),
        waits=msgspec.structs.replace(WAITS, dial_s=0.2),
        traffic=Traffic("x"),
    )
    with pytest.raises(RoleUnreachable):
        await client.get()
    (said,) = [each.getMessage() for each in caplog.records if each.levelname == "WARNING"]
    assert "x waits for one of 3 controllers to lead" in said
    assert all(f"{address}: " in said for address in addresses.split(","))


async def test_a_request_long_after_a_given_up_search_searches_at_least_once():
    async with table_of(NETWORKS["local"](), 2) as table:
        client = table.client(waits=msgspec.structs.replace(WAITS, patience_s=0.02))
        leader, table.mind.leader = table.mind.leader, None
        with pytest.raises(DeadlineExceeded):
            await client.get(timeout_s=0.01)
        begin = asyncio.get_running_loop().time()
        await until(lambda: asyncio.get_running_loop().time() > begin + 0.05)
        table.mind.leader = leader
        assert (await client.get()).whole == table.mind.replicated_state.map


async def test_a_client_that_is_closed_holds_no_link_and_makes_no_other():
    async with table_of(NETWORKS["local"]()) as table:
        (front,) = table.fronts
        client = table.client()
        await client.get()
        client.close()
        await until(lambda: front.links[0].closed)
        with pytest.raises(LinkClosed, match="worker-0 asks the controllers no more"):
            await client.get()
        assert client.address == ""
        assert len(front.links) == 1


async def test_a_client_that_is_closed_while_it_looks_for_the_leader_keeps_none():
    async with table_of(NETWORKS["local"]()) as table:
        (front,) = table.fronts
        client = table.client()

        def close_first(request, body):
            client.close()
            front.answer(request, body)

        front.hook(WatchMap, close_first)
        with pytest.raises(LinkClosed):
            await client.get()
        await until(lambda: front.links[0].closed)
        assert len(front.links) == 1


@pytest.mark.parametrize("network", NETWORKS)
async def test_a_given_up_search_leaves_no_link_behind(network):
    async with table_of(NETWORKS[network]()) as table:
        (front,) = table.fronts
        front.silent = True
        with pytest.raises(DeadlineExceeded):
            await table.client().get(timeout_s=0.05)
        await until(lambda: front.links and all(link.closed for link in front.links))
