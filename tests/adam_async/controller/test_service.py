"""Answers of one controller of several: the leader, unknown requests, and the map, which never goes back."""

import asyncio
import math
from contextlib import suppress
from dataclasses import replace

import msgspec
import numpy as np
import pytest

from adam_async.controller import service
from adam_async.controller.consensus.messages import Append, AskVote
from adam_async.controller.records import MAX_DEPTH
from adam_async.messages import (
    NOT_LEADER,
    SESSION_OVER,
    UNKNOWN,
    Agree,
    CompareAndSet,
    GetMap,
    OpenSession,
    WatchMap,
    pack,
    packed_tensor,
)
from adam_async.messages.body import MOST_VALUE_BYTES
from adam_async.run.cluster_map import ClusterMap
from tests.adam_async.controller import simulated_group
from tests.adam_async.controller.simulated_group import CALL_S, SHORT, WAITS, record, simulated
from tests.worlds import inside
from transport import RemoteError, TransportError

seeds = pytest.mark.parametrize("seed", range(4))


async def refusal(asking):
    """The code and the text with which a question is refused."""
    with pytest.raises(RemoteError) as caught:
        await asking
    return caught.value.code, caught.value.text


@seeds
@inside(simulated)
async def test_a_follower_names_the_leader_or_none_if_it_knows_none(trio, seed):
    leader = await trio.settled()
    follower = trio.others(leader)[0]
    client = await trio.client(follower)
    for question in (GetMap(), OpenSession(), WatchMap(after=0, group="", wait_s=1.0)):
        assert await refusal(client.ask(question)) == (NOT_LEADER, trio.peers[leader])
    assert await refusal(client.set("nodes/w", 0, record())) == (NOT_LEADER, trio.peers[leader])
    trio.crash(*trio.others(follower))
    await asyncio.sleep(5.0)
    assert await refusal(client.map()) == (NOT_LEADER, "")


@inside(simulated)
async def test_before_there_is_a_group_nobody_leads(trio):
    await trio.until(lambda: "controller-1" in trio.running, "it does not run")
    trio.crash("controller-2", "controller-3")
    client = await trio.client("controller-1")
    assert await refusal(client.map()) == (NOT_LEADER, "")


@seeds
@inside(simulated)
async def test_a_deposed_leader_answers_unknown_and_the_same_number_later_gets_the_outcome(trio, seed):
    """The leader is cut off with a question under way. Asked again elsewhere it is done once."""

    leader = await trio.settled()
    client = await (await trio.client(leader)).open()
    assert (await client.set("nodes/w", 0, record(1))).at == 1
    for other in trio.others(leader):
        trio.world.network.cut(leader, other)
    code, _ = await refusal(client.set("nodes/w", 1, record(2)))
    assert code == UNKNOWN
    assert await refusal(client.map()) == (NOT_LEADER, "")
    again = await trio.client(await trio.led_without(leader), node="elsewhere")
    again.session = client.session
    answers = [await again.set("nodes/w", 1, record(2), number=client.number) for _ in range(2)]
    assert [(answer.done, answer.at) for answer in answers] == [(True, 2), (True, 2)]
    trio.world.network.heal_all()
    assert await trio.led() != leader
    assert (await again.map())[0].nodes["w"].info == {"number": 2}


@inside(simulated)
async def test_a_read_of_a_leader_that_was_deposed_and_does_not_know_it_is_not_answered_with_what_is_old(
    trio,
):
    leader = await trio.settled()
    client = await (await trio.client(leader)).open()
    assert (await client.set("nodes/w", 0, record(1))).done
    for other in trio.others(leader):
        trio.world.network.cut(leader, other)
    code, _ = await refusal(client.map())
    assert code == NOT_LEADER


@inside(simulated)
async def test_an_unknown_session_is_over(trio):
    client = await trio.client(await trio.settled())
    client.session = 12345
    code, _ = await refusal(client.set("nodes/w", 0, record()))
    assert code == SESSION_OVER


@inside(simulated)
async def test_a_watch_without_changes_is_answered_when_its_time_is_over(trio):
    client = await trio.client(await trio.settled())
    cluster, group = await client.map()
    for wait_s, least, most in ((0.5, 0.5, 0.6), (2.0, 2.0, 2.1), (0.0, 0.0, 0.1)):
        begun = trio.world.now
        assert await client.watch(cluster.version, group, wait_s=wait_s) == []
        assert least <= trio.world.now - begun < most
    begun = trio.world.now
    watch = WatchMap(after=cluster.version, group=group, wait_s=1e9)
    await client.ask(watch, timeout_s=100.0)
    assert 60.0 <= trio.world.now - begun < 60.1
    for wait_s in (-3.0, math.nan, math.inf):
        with pytest.raises(RemoteError, match=r"malformed WatchMap: .*wait_s"):
            await client.watch(cluster.version, group, wait_s=wait_s)


@inside(simulated)
async def test_a_watch_is_answered_by_each_change_once_and_one_of_another_group_by_the_whole_map(trio):
    leader = await trio.settled()
    client = await (await trio.client(leader)).open()
    watcher = await trio.client(leader, node="watcher")
    cluster, group = await client.map()
    seen, version = [], cluster.version
    for number in range(5):
        watching = asyncio.ensure_future(watcher.watch(version, group))
        await asyncio.sleep(0.1)
        assert not watching.done()
        answer = await client.set("nodes/w", number, record(number))
        assert answer.done
        found = await watching
        seen += found
        version = found[-1]
    assert seen == list(range(cluster.version + 1, version + 1))
    assert isinstance(await watcher.watch(version, "another group"), ClusterMap)
    assert isinstance(await watcher.watch(-1, group), ClusterMap)


@seeds
@inside(simulated)
async def test_a_watcher_over_changes_of_leaders_sees_each_version_once_and_the_map_never_goes_back(
    trio, seed
):
    """The next leader is asked in the very moment in which it leads, before it knows what was committed."""

    leader = await trio.settled()
    client = await (await trio.client(leader)).open()
    _, group = await client.map()
    version, seen = 0, []
    for number in range(6):
        answer = await client.set("nodes/w", version, record(number))
        assert answer.done
        trio.crash(leader)
        await trio.until(lambda: trio.leaders, "nobody leads")
        leader = trio.leaders[0]
        watcher = await trio.client(leader, node="watcher")
        assert await watcher.watch(answer.version, group, wait_s=0.3) == []
        found = await watcher.watch(version, group)
        assert found == [answer.version]
        seen += found
        cluster, same = await watcher.map()
        assert (cluster.version, same) == (answer.version, group)
        version = answer.at
        for name in trio.peers:
            if name not in trio.running:
                await trio.restart(name)
        leader = await trio.settled()
        client = await (await trio.client(leader)).open()
    assert seen == list(range(1, 7))


@seeds
@inside(simulated)
async def test_a_new_leader_shows_nobody_a_map_that_is_older_than_what_was_answered_before_it(trio, seed):
    """The disks become so slow that it is asked long before it can know what was agreed on."""

    leader = await trio.settled()
    client = await (await trio.client(leader)).open()
    watchers = {name: await trio.client(name, node=f"at-{name}") for name in trio.others(leader)}
    answer = await client.set("nodes/w", 0, record())
    trio.crash(leader)
    for name in watchers:
        trio.node(name).disk_conditions.sync_s = 0.2
    await trio.until(lambda: trio.leaders, "nobody leads")
    leader = trio.leaders[0]
    assert trio.running[leader].map.version < answer.version
    cluster = await watchers[leader].watch(-1, "")
    assert cluster.version == answer.version


@seeds
@inside(simulated)
async def test_a_deposed_leader_that_does_not_know_it_takes_nobody_back_to_an_older_map(trio, seed):
    """It stood still while another one was elected, and is cut off from the news of that."""

    old = await trio.settled()
    _, group = await (await trio.client(old)).map()
    for name in trio.others(old):
        trio.world.network.cut(old, name)
    trio.node(old).freeze()
    client = await (await trio.client(await trio.led_without(old))).open()
    answer = await client.set("nodes/w", 0, record())
    trio.node(old).thaw()
    watcher = await trio.client(old, node="watcher")
    assert await watcher.watch(answer.version, group, wait_s=0.1) == []
    assert trio.running[old].group.leads
    assert trio.running[old].map.version < answer.version


@inside(simulated)
async def test_watches_end_when_the_leader_does_and_say_so(trio):
    leader = await trio.settled()
    client = await trio.client(leader)
    cluster, group = await client.map()
    watching = asyncio.ensure_future(client.watch(cluster.version, group, wait_s=9.0))
    await asyncio.sleep(0.1)
    trio.leave[leader].set()
    with pytest.raises(TransportError) as caught:
        await watching
    if isinstance(caught.value, RemoteError):
        assert caught.value.code == NOT_LEADER


@seeds
@inside(simulated)
async def test_members_that_come_to_the_next_leader_in_time_are_not_lost_and_the_others_are(trio, seed):
    leader = await trio.settled()
    for node in ("comes", "stays-away"):
        client = await (await trio.client(leader, node=node)).open()
        assert (await client.set(f"nodes/{node}", 0, record(incarnation=1))).done
    trio.crash(leader)
    leader = await trio.led()
    client = await trio.client(leader, node="comes")
    cluster, group = await client.map()
    assert cluster.live("worker") == ["comes", "stays-away"]
    begun = trio.world.now
    while (await client.map())[0].live("worker") != ["comes"]:
        assert trio.world.now - begun < 20.0
        await client.watch(cluster.version, group, wait_s=1.0)
    assert trio.world.now - begun > WAITS.grace_s
    await asyncio.sleep(20.0)
    assert (await client.map())[0].live("worker") == ["comes"]


@inside(simulated)
async def test_a_controller_refuses_what_is_no_word_of_its_like_and_goes_on(trio):
    leader = await trio.settled()
    me, term = trio.running[leader].group.introduce().identity, trio.running[leader].group.term
    gap = Append(
        sender="controller-x/1", to=me, term=99, prev_index=1, prev_term=1, commit=0, round=0, entries=()
    )
    words = [
        packed_tensor({"type": "no message"}),
        np.frombuffer(b"\x81\xa4type\xa1\xff", np.uint8),
        packed_tensor({"type": "Append", **msgspec.to_builtins(gap), "entries": [(50, 99, b"x", None)]}),
    ]
    for number, word in enumerate(words):
        stranger = await trio.client(leader, role="controller", node="controller-x", incarnation=number)
        with suppress(TransportError):
            stranger.link.send_nowait(pack(Agree(group=""), [word]))
        await stranger.link.wait_closed()
    await asyncio.sleep(3.0)
    assert trio.leaders == [leader]
    assert trio.running[leader].group.term == term


@inside(simulated)
async def test_a_controller_that_is_none_of_the_group_is_not_listened_to(trio):
    leader = await trio.settled()
    me, term = trio.running[leader].group.introduce().identity, trio.running[leader].group.term
    stranger = await trio.client(leader, role="controller", node="controller-x")
    common = {"sender": "controller-x/1", "to": me, "term": 99}
    for word in (
        AskVote(last_index=99, last_term=99, pre=False, transfer=True, **common),
        Append(prev_index=1, prev_term=1, entries=(), commit=1, round=0, **common),
    ):
        stranger.link.send_nowait(pack(Agree(group=""), [packed_tensor(word)]))
    await asyncio.sleep(3.0)
    assert not stranger.link.closed
    assert trio.leaders == [leader]
    assert set(trio.terms.values()) == {term}


@inside(simulated)
async def test_a_node_that_returns_while_all_controllers_stall_is_not_lost_when_they_go_on(trio):
    leader = await trio.settled()
    client = await (await trio.client(leader, node="w")).open()
    assert (await client.set("nodes/w", 0, record(incarnation=1))).done
    trio.node("w").kill()
    await asyncio.sleep(WAITS.grace_s / 2)
    for name in trio.peers:
        trio.node(name).freeze()
    await asyncio.sleep(300.0)
    begun = trio.world.now
    for name in trio.peers:
        trio.node(name).thaw()
    await asyncio.sleep(WAITS.grace_s / 2)
    assert trio.running[leader].map.nodes["w"].live
    await trio.until(lambda: not trio.running[leader].map.nodes["w"].live, "it is not missed")
    assert trio.world.now - begun < WAITS.grace_s + 1.0


def nested(depth):
    value = []
    for _ in range(depth - 3):  # beside the record, its info, and the innermost
        value = [value]
    return {**record(), "info": {"deep": value}}


@inside(simulated)
async def test_a_record_that_nests_too_deep_is_refused_before_it_is_in_the_log(trio):
    """In there it would be written by some and not be read by others, as far as each has stack left."""

    client = await (await trio.client(await trio.settled())).open()
    for depth in (MAX_DEPTH + 1, 200, 900):
        assert await refusal(client.set("nodes/w", 0, nested(depth))) == (
            "invalid",
            f"nodes/w nests over {MAX_DEPTH} deep",
        )
    assert (await client.set("nodes/w", 0, nested(MAX_DEPTH))).done


@inside(simulated)
async def test_a_record_of_two_megabytes_is_refused_undecoded(trio):
    client = await (await trio.client(await trio.settled())).open()
    for size in (MOST_VALUE_BYTES + 1, 2 << 20):
        no_json = np.frombuffer(b"{" * size, np.uint8)
        question = CompareAndSet(
            key="nodes/w", expected=0, session=client.session, number=1, after=-1, group=""
        )
        code, text = await refusal(client.ask(question, [no_json]))
        assert (code, text) == (
            "invalid",
            f"nodes/w of {size} bytes is above the limit of {MOST_VALUE_BYTES}: put less into it",
        )


@inside(simulated)
async def test_a_map_that_no_answer_can_hold_is_refused_and_ends_no_controller(trio, monkeypatch):
    monkeypatch.setattr(simulated_group, "SHORT", replace(SHORT, max_message_bytes=1 << 15))
    leader = await trio.settled()
    client = await (await trio.client(leader)).open()
    large = {**record(role="ps"), "info": {"text": "x" * 7000}}
    for number in range(4):
        assert (await client.set(f"nodes/w{number}", 0, large)).done
    code, text = await refusal(client.set("nodes/w4", 0, large))
    assert code == "too-large", text
    assert (await refusal(client.map()))[0] == "too-large"
    await asyncio.sleep(3.0)
    assert trio.leaders == [leader]


@inside(simulated)
async def test_changes_that_are_more_than_a_map_come_as_the_map(trio, monkeypatch):
    monkeypatch.setattr(service, "MOST_CHANGES_BYTES", 2000)
    client = await (await trio.client(await trio.settled())).open()
    _, group = await client.map()
    for number in range(20):
        assert (await client.set("nodes/w", number, record(number))).at == number + 1
    assert await client.watch(18, group) == [19, 20]
    assert (await client.watch(0, group)).version == 20


@inside(simulated)
async def test_a_node_gone_before_its_join_is_committed_is_lost_after_the_grace(trio):
    leader = await trio.settled()
    other = await trio.client(leader, node="other")
    cluster, group = await other.map()
    client = await (await trio.client(leader, node="w")).open()
    for name in trio.others(leader):
        trio.world.network.cut(leader, name)
    asking = asyncio.ensure_future(client.set("nodes/w", 0, record(incarnation=1)))
    await asyncio.sleep(0.1)
    trio.node("w").kill()
    asking.cancel()
    assert await other.watch(cluster.version, group, wait_s=0.1) == []
    trio.world.network.heal_all()
    await trio.until(lambda: "w" in trio.running[leader].map.nodes, "it has no seat")
    assert trio.leaders == [leader]
    await trio.until(lambda: not trio.running[leader].map.nodes["w"].live, "it is not missed")


@pytest.mark.parametrize("role", ["reader", "client", "data"])
@inside(simulated)
async def test_a_peer_of_another_role_under_the_name_of_a_node_does_not_hide_its_loss(trio, role):
    """The peer keeps its link to the leader before the node joins, and when the node is lost."""

    leader = await trio.settled()
    await trio.client(leader, role=role, node="w", incarnation=5, machine="early")
    client = await (await trio.client(leader, node="w", incarnation=5)).open()
    assert (await client.set("nodes/w", 0, record(incarnation=5))).done
    await trio.client(leader, role=role, node="w", incarnation=5, machine="late")
    trio.node("w").kill()
    await trio.until(lambda: not trio.running[leader].map.nodes["w"].live, "it is not missed")


@inside(simulated)
async def test_a_peer_of_another_role_under_the_name_of_a_node_does_not_lose_it(trio):
    leader = await trio.settled()
    client = await (await trio.client(leader, node="w", incarnation=5)).open()
    assert (await client.set("nodes/w", 0, record(incarnation=5))).done
    await trio.client(leader, role="reader", node="w", incarnation=5, machine="other")
    trio.node("other").kill()
    await asyncio.sleep(3 * WAITS.grace_s)
    assert trio.running[leader].map.nodes["w"].live


@inside(simulated)
async def test_a_peer_of_another_role_under_the_name_of_a_node_does_not_keep_out_the_next_incarnation(trio):
    leader = await trio.settled()
    client = await (await trio.client(leader, node="w", incarnation=5)).open()
    assert (await client.set("nodes/w", 0, record(incarnation=5))).done
    await trio.client(leader, role="reader", node="w", incarnation=5, machine="other")
    trio.node("w").kill()
    await trio.until(lambda: len(trio.running[leader]._links) == 1, "its link is there")
    again = await (await trio.client(leader, node="w", incarnation=6)).open()
    now = trio.running[leader].map.nodes["w"].changed
    assert (await again.set("nodes/w", now, record(incarnation=6))).done


@inside(simulated)
async def test_a_loss_takes_effect_only_once_it_is_committed(trio):
    """The disks of the others are so slow that this takes a while."""

    leader = await trio.settled()
    client = await (await trio.client(leader, node="w")).open()
    assert (await client.set("nodes/w", 0, record(incarnation=1))).done
    for name in trio.others(leader):
        trio.node(name).disk_conditions.sync_s = 0.4
    trio.node("w").kill()
    await asyncio.sleep(WAITS.grace_s + 0.2)
    assert trio.running[leader].map.nodes["w"].live
    await trio.until(lambda: not trio.running[leader].map.nodes["w"].live, "it is not missed", seconds=0.5)
    assert trio.leaders == [leader]


@inside(simulated)
async def test_a_controller_that_leaves_answers_what_was_asked_or_ends_the_link(trio):
    """No question waits for its deadline when a controller is stopped."""

    leader = await trio.settled()
    client = await (await trio.client(leader)).open()
    trio.leave[leader].set()
    begun = trio.world.now
    with suppress(TransportError):
        await client.set("nodes/w", 0, record())
    assert trio.world.now - begun < CALL_S / 2


@inside(simulated)
async def test_the_first_asker_after_a_restart_gets_a_map_of_over_a_mebibyte(trio):
    client = await (await trio.client(await trio.settled())).open()
    large = {**record(role="ps"), "info": {"text": "x" * 8000}}
    for number in range(132):
        assert (await client.set(f"nodes/w{number}", 0, large)).done
    trio.crash(*trio.peers)
    await trio.restart()
    cluster, _ = await (await trio.client(await trio.settled())).map()
    assert len(cluster.nodes) == 132
