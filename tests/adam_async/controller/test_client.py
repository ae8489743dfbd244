"""A seat in the cluster: joining, losing the link, coming back, and what is refused."""

import asyncio
import contextlib
from contextlib import AsyncExitStack, asynccontextmanager

import msgspec
import pytest

from adam_async.controller.client import Membership
from adam_async.controller.consensus import Settings
from adam_async.controller.consensus_node import ConsensusSetup
from adam_async.controller.permissions import RIGHT, PermissionTable
from adam_async.controller.role import RoleSettings
from adam_async.controller.service import Controller
from adam_async.controller.state import CompareAndSet
from adam_async.driver.takeover import submit, update_program
from adam_async.errors import DeadlineExceeded, RoleDied, RoleUnreachable, RunFailed, first_cause
from adam_async.run.cluster_map import EpochRecord, NodeRecord
from adam_async.run.config import Waits
from adam_async.run.store_record import ArrayRecord
from adam_async.runtime.traffic import Traffic
from tests.adam_async.cluster_maps import ARRAYS, UnknownRule, run_record, store_record
from tests.adam_async.runs import NETWORKS, Rough, address_of, entropy_of, turns, until
from tests.transport.testing import Faults
from transport import Identity

WAITS = Waits(dial_s=20.0, call_s=20.0, patience_s=20.0, grace_s=0.05)
HASTY = msgspec.structs.replace(WAITS, dial_s=0.1, call_s=0.1)
FORGIVING = msgspec.structs.replace(WAITS, grace_s=60.0)


class Table:
    """Controllers, and members that sit down at them."""

    def __init__(self, network, controllers, group):
        self.network, self.controllers, self._group = network, controllers, group
        self.tasks = {}

    @property
    def controller(self):
        """The only one, or the first."""
        return self.controllers[0]

    @property
    def leader(self):
        (leader,) = [controller for controller in self.controllers if controller.group.leads]
        return leader

    async def lose_leader(self, *, crashed=False):
        """End the leader: in good order, or without handing over."""
        leader = self.leader
        if crashed:
            leader.group.resign = turns
        await leader.__aexit__(None, None, None)
        self.controllers.remove(leader)

    def member(self, name, *, incarnation=1, role="worker", waits=WAITS):
        identity = Identity(role=role, node=name, incarnation=incarnation)
        member = Membership(
            network=self.network,
            controller=",".join(controller.address for controller in self.controllers),
            identity=identity,
            record=NodeRecord(
                role=role,
                address="local://x",
                incarnation=incarnation,
                info={"train_images": 1} if role == "data" else {},
            ),
            waits=waits,
            traffic=Traffic(name),
        )
        self.tasks[member] = self._group.create_task(member.run(), name=name)
        return member

    async def joined(self, name, **how):
        member = self.member(name, **how)
        await member.wait_for(lambda _: member.joined, "joining", 20.0)
        return member

    async def leave(self, member):
        self.tasks[member].cancel()
        await turns(2)


def any_epoch(attempt, cluster):
    """The permissions of the map, but any data server may set the epoch."""
    table = PermissionTable()
    table.rows["epoch", "data"] = lambda attempt, cluster: RIGHT
    return table.refusal(attempt, cluster)


def controller_of(network, *, waits=WAITS, address="", incarnation=1, permits=None):
    identity = Identity(role="controller", node="controller", incarnation=incarnation)
    return Controller(
        RoleSettings(network=network, address=address or address_of(network), identity=identity, waits=waits),
        permits=permits,
    )


@asynccontextmanager
async def table_of(network, waits=WAITS, permits=None):
    async with AsyncExitStack() as stack:
        group = await stack.enter_async_context(asyncio.TaskGroup())
        controller = await stack.enter_async_context(controller_of(network, waits=waits, permits=permits))
        table = Table(network, [controller], group)
        stack.callback(lambda: [task.cancel() for task in table.tasks.values()])
        yield table


@asynccontextmanager
async def group_table_of(network, waits=FORGIVING, permits=None):
    """Three controllers that agree, quickly."""
    async with AsyncExitStack() as stack:
        group = await stack.enter_async_context(asyncio.TaskGroup())
        controllers = []
        for number in (1, 2, 3):
            controller = Controller(
                RoleSettings(
                    network=network,
                    address=address_of(network),
                    identity=Identity(role="controller", node=f"controller-{number}", incarnation=1),
                    waits=waits,
                ),
                ConsensusSetup(
                    entropy=entropy_of(f"controller {number}"),
                    settings=Settings(heartbeat_s=0.02, election_s=0.1),
                ),
                alone=False,
                permits=permits,
            )
            controllers.append(await stack.enter_async_context(controller))
        for controller in controllers:
            controller.group.set_addresses(
                {f"controller-{n}": each.address for n, each in enumerate(controllers, 1)}
            )
        table = Table(network, controllers, group)
        stack.callback(lambda: [task.cancel() for task in table.tasks.values()])
        yield table


@pytest.mark.parametrize("network", NETWORKS)
async def test_every_member_sees_all_joins_and_departures(network):
    async with table_of(NETWORKS[network]()) as table:
        one, other = await table.joined("worker-0"), await table.joined("worker-1")
        await one.wait_for(lambda m: len(m.live("worker")) == 2, "the other", 20.0)
        await table.leave(other)
        await one.wait_for(lambda m: m.live("worker") == ["worker-0"], "the other to be missed", 20.0)
        assert not one.map.nodes["worker-1"].live


class SecondOnly:
    """Dice by which the second message of all meets with a fault."""

    def __init__(self):
        self.drawn = 0

    def random(self):
        self.drawn += 1
        return 0.0 if self.drawn == 2 else 0.9


@pytest.mark.parametrize("network", NETWORKS)
async def test_a_link_that_breaks_during_the_join_is_dialled_again(network):
    rough = Rough(NETWORKS[network](), Faults(cut=0.5), towards="controller")
    rough.dice = SecondOnly()  # the first asks for the map, the second for the seat
    async with table_of(rough) as table:
        await table.joined("worker-0")
        assert len(rough.links) == 2


@pytest.mark.parametrize("network", NETWORKS)
async def test_a_link_that_breaks_and_comes_back_within_the_grace_is_no_death(network):
    rough = Rough(NETWORKS[network](), Faults(), towards="controller")
    async with table_of(rough, FORGIVING) as table:
        member = await table.joined("worker-0")
        version = table.controller.map.version
        links = len(rough.links)
        rough.cut_all()
        await until(lambda: len(rough.links) > links)
        await member.set_node(ready="x")
        assert table.controller.map.nodes["worker-0"].live
        assert table.controller.map.version == version + 1


async def test_a_death_that_somebody_knows_of_is_believed_before_the_grace_is_over():
    async with table_of(NETWORKS["local"](), FORGIVING) as table:
        driver, worker = await table.joined("driver", role="driver"), await table.joined("worker-0")
        await driver.wait_for(lambda m: m.live("worker"), "the worker", 20.0)
        await table.leave(worker)
        assert table.controller.map.nodes["worker-0"].live

        await driver.report_death("worker-0", 1.7e9)
        assert not table.controller.map.nodes["worker-0"].live
        assert not table.controller.map.nodes["worker-0"].left
        assert table.controller.map.nodes["worker-0"].lost_at == 1.7e9


async def test_a_live_member_that_counted_as_lost_joins_again_and_says_why(caplog):
    async with table_of(NETWORKS["local"](), FORGIVING) as table:
        driver, worker = await table.joined("driver", role="driver"), await table.joined("worker-0")
        await driver.wait_for(lambda m: m.live("worker"), "the worker", 20.0)
        assert "joins again" not in caplog.text
        await driver.report_death("worker-0", 1.7e9)
        await until(lambda: worker.joined and "joins again" in caplog.text)
    lines = [line for line in caplog.messages if "joins again" in line]
    assert len(lines) == 1
    assert lines[0].startswith(
        "worker-0 counted as lost, because the controllers heard nothing of it: it was frozen"
    )


async def test_a_late_report_of_a_death_does_not_touch_the_next_incarnation():
    async with table_of(NETWORKS["local"]()) as table:
        driver, old = await table.joined("driver", role="driver"), await table.joined("worker-0")
        await driver.wait_for(lambda m: m.live("worker"), "the worker", 20.0)
        await table.leave(old)
        telling = asyncio.ensure_future(driver.report_death("worker-0", 1.7e9))
        new = await table.joined("worker-0", incarnation=2)
        await telling
        await driver.report_death("nobody", 1.7e9)

        assert new.joined
        assert table.controller.map.nodes["worker-0"].live


async def test_a_restarted_node_joins_in_place_of_its_earlier_incarnation():
    async with table_of(NETWORKS["local"]()) as table:
        old = await table.joined("worker-0", incarnation=9)
        await table.leave(old)
        await table.joined("worker-0", incarnation=3)
        assert table.controller.map.nodes["worker-0"].incarnation == 3


@pytest.mark.parametrize(
    ("role", "said"),
    [
        ("worker", "another process is connected as twin; give this one another --id"),
        ("driver", "another train drives this cluster; one run at a time has the cluster"),
    ],
)
async def test_a_node_with_the_id_of_a_connected_one_gets_a_warning_at_once_and_a_refusal_in_the_end(
    role, said, caplog
):
    brief = msgspec.structs.replace(WAITS, dial_s=0.4, call_s=0.4)
    took_s = []

    async def join():
        async with table_of(NETWORKS["local"]()) as table:
            await table.joined("twin", role=role)
            begin = asyncio.get_running_loop().time()
            table.member("twin", incarnation=2, role=role, waits=brief)
            await until(lambda: any(said in record.message for record in caplog.records))
            took_s.append(asyncio.get_running_loop().time() - begin)
            await asyncio.Event().wait()

    with pytest.raises(ExceptionGroup) as failure:
        await join()
    assert f"twin cannot join: {said}" in str(first_cause(failure.value))
    assert took_s[0] < 1.0


@pytest.mark.parametrize("role", ["driver", "worker"])
@pytest.mark.parametrize("squatter", ["reader", "client"])
async def test_a_role_joins_under_its_name_and_a_program_that_stays_under_it_ends(role, squatter):
    joined = []

    async def join():
        async with table_of(NETWORKS["local"]()) as table:
            stays = await table.joined(f"{role}-1", role=squatter, incarnation=5)
            joined.append(await table.joined(f"{role}-1", role=role, incarnation=5))
            await stays.wait_for(lambda m: m.nodes[f"{role}-1"].role == role, "the map", 20.0)
            assert not stays.joined  # though the incarnation is the same
            await asyncio.Event().wait()

    with pytest.raises(ExceptionGroup) as failure:
        await join()
    assert joined[0].map.nodes[f"{role}-1"].role == role
    assert f"{role}-1 is the name of a {role}: choose another one" in str(first_cause(failure.value))


async def test_a_value_that_the_controller_refuses_is_an_error_with_its_reason():
    async with table_of(NETWORKS["local"]()) as table:
        member = await table.joined("worker-0")
        with pytest.raises(RunFailed, match=r"refused nodes/worker-0.*Expected `str`"):
            await member.set_node(address=7)


@pytest.mark.parametrize("network", NETWORKS)
async def test_a_store_is_created_once_seen_by_all_and_deleted(network):
    arrays = [ArrayRecord(f"layer-{number}/weights", (8, 8)) for number in range(5000)]
    async with table_of(NETWORKS[network]()) as table:
        client = await table.joined("client-0", role="client")
        other = await table.joined("client-1", role="client")
        await client.create_store("a", store_record("client-0-1", arrays, creator="client-0"), arrays)
        await other.wait_for(lambda m: "a" in m.stores, "the store", 20.0)
        await other.create_store("a", store_record("client-1-2", arrays, creator="client-1"), arrays)
        assert other.map.stores["a"].id == table.controller.map.stores["a"].id == "client-0-1"
        assert len(other.map.arrays) == client.map.stores["a"].pieces > 1
        await client.delete_store("a", "client-0-1")
        await other.wait_for(lambda m: not m.stores and not m.arrays, "the deletion", 20.0)


@pytest.mark.parametrize("network", NETWORKS)
async def test_a_refused_store_costs_its_creator_no_link_and_others_nothing(network):
    async with table_of(NETWORKS[network]()) as table:
        client = await table.joined("client-0", role="client")
        huge = [ArrayRecord("w", (1 << 20, 1 << 20))]
        bad = {
            "Invalid value 'unknown' - at `..rules": store_record(
                "client-0-1", creator="client-0", rules=(UnknownRule(),)
            ),
            "shard_bytes must be within 8 and 1099511627776, not 1": store_record(
                "client-0-1", creator="client-0", shard_bytes=1
            ),
            "into 17179869184 shards; raise it": store_record("client-0-2", huge, creator="client-0"),
        }
        for said, record in bad.items():
            with pytest.raises(RunFailed, match=said):
                await client.create_store("a", record, huge if "shards" in said else ARRAYS)
        await client.create_store("a", store_record("client-0-1", creator="client-0"), ARRAYS)
        assert client.map.stores["a"].phase == "placing"


@asynccontextmanager
async def with_bundle(network):
    """A table with two servers that are members of the bundle of ps-0 in store a; ps-1 joins it."""
    async with table_of(NETWORKS[network]()) as table:
        client = await table.joined("client-0", role="client")
        servers = [await table.joined(f"ps-{number}", role="ps") for number in range(2)]
        record = store_record("client-0-1", creator="client-0", servers=1, copies=2)
        await client.create_store("a", record, ARRAYS)
        for server in servers:
            await server.wait_for(lambda m: bool(m.bundles), "the bundle", 20.0)
        yield table, *servers


def bundle_of(member):
    return member.map.bundles["bundles/a/ps-0"]


@pytest.mark.parametrize("network", NETWORKS)
async def test_a_change_of_a_bundle_is_confirmed_or_in_conflict_and_the_map_shows_which(network):
    async with with_bundle(network) as (_, first, second):
        seen = bundle_of(second)
        in_sync = msgspec.structs.replace(seen, in_sync=seen.members, joining=())
        assert await first.update_bundle("ps-0", seen.changed, in_sync, timeout_s=20.0) == "confirmed"
        assert bundle_of(first).in_sync == (("ps-0", 1), ("ps-1", 1))
        taken_over = msgspec.structs.replace(seen, in_sync=(("ps-1", 1),), joining=(), generation=2)
        assert await second.update_bundle("ps-0", seen.changed, taken_over, timeout_s=20.0) == "conflict"
        now = bundle_of(second)
        assert now == bundle_of(first)
        assert await second.update_bundle("ps-0", now.changed, taken_over, timeout_s=20.0) == "confirmed"
        assert bundle_of(second).primary == ("ps-1", 1)
        of_deleted = msgspec.structs.replace(now, store="client-0-0")
        assert await second.update_bundle("ps-0", now.changed, of_deleted, timeout_s=20.0) == "conflict"


@pytest.mark.parametrize("network", NETWORKS)
async def test_a_change_of_a_bundle_that_invites_a_lost_server_is_a_conflict(network):
    async with with_bundle(network) as (table, first, second):
        seen = bundle_of(first)
        alone = msgspec.structs.replace(seen, joining=())
        assert await first.update_bundle("ps-0", seen.changed, alone, timeout_s=20.0) == "confirmed"
        await table.leave(second)
        await first.wait_for(lambda m: not m.nodes["ps-1"].live, "the loss", 20.0)
        at = bundle_of(first).changed
        assert await first.update_bundle("ps-0", at, seen, timeout_s=20.0) == "conflict"


@pytest.mark.parametrize("network", NETWORKS)
async def test_a_change_of_a_bundle_that_breaks_a_rule_is_an_error_and_costs_no_link(network):
    async with with_bundle(network) as (_, first, _second):
        seen = bundle_of(first)
        bad = msgspec.structs.replace(seen, generation=7)
        with pytest.raises(RunFailed, match="generation is 7; it must be 1, because the primary stays"):
            await first.update_bundle("ps-0", seen.changed, bad, timeout_s=20.0)
        assert await first.update_bundle("ps-0", seen.changed, seen, timeout_s=20.0) == "confirmed"


@pytest.mark.parametrize("network", NETWORKS)
async def test_a_change_of_a_bundle_without_an_answer_is_unknown(network):
    async with with_bundle(network) as (table, first, _):
        seen = bundle_of(first)
        await table.lose_leader()
        assert await first.update_bundle("ps-0", seen.changed, seen, timeout_s=0.05) == "unknown"
        assert bundle_of(first) == seen


@pytest.mark.parametrize("network", ["local", "tcp"])
async def test_a_run_that_is_too_long_for_one_value_is_submitted_in_pieces(network):
    record = msgspec.structs.replace(run_record(driver="driver-0"), blob=bytes(range(256)) * 700)
    async with table_of(NETWORKS[network]()) as table:
        driver = await table.joined("driver-0", role="driver")
        other = await table.joined("worker-0")
        await submit(driver, record)
        await update_program(driver, lambda run: msgspec.structs.replace(run, reason="a reason"))
        seen = await other.wait_for(lambda m: m.run is not None and m.run.reason, "the run", 20.0)
        for cluster in (seen, driver.map, table.controller.map):
            assert (cluster.run.blob, cluster.run.terms, cluster.pieces) == (record.blob, record.terms, {})
        with pytest.raises(RunFailed, match="its blob has 2097152 bytes, 1105920 are the most"):
            await submit(driver, msgspec.structs.replace(record, blob=bytes(1 << 21)))


def epoch_of(run, number):
    return EpochRecord(run=run, number=number, groups=1, shares={})


def count_up(cluster):
    return msgspec.structs.replace(cluster.epoch, number=cluster.epoch.number + 1)


async def test_changes_of_one_record_by_several_are_all_in_it():
    async with table_of(NETWORKS["local"](), permits=any_epoch) as table:
        members = [await table.joined(f"data-{n}", role="data") for n in range(3)]
        set_epoch_unseen(table.controller, epoch_of("r", 0))
        await members[0].set_node(ready="")  # makes the controller tell everybody
        async with asyncio.TaskGroup() as group:
            for member in members:
                await member.wait_for(lambda m: m.epoch is not None, "the epoch", 20.0)
                group.create_task(member.update("epoch", count_up))
        assert table.controller.map.epoch.number == 3


async def test_a_change_that_finds_another_record_than_it_expected_leaves_it_alone():
    def end_of_old(cluster):
        return count_up(cluster) if cluster.epoch.run == "old" else None

    async with table_of(NETWORKS["local"](), permits=any_epoch) as table:
        member = await table.joined("data-0", role="data")
        set_epoch_unseen(table.controller, epoch_of("old", 1))
        await member.set_node(ready="")
        await member.wait_for(lambda m: m.epoch is not None, "the epoch", 20.0)
        set_epoch_unseen(table.controller, epoch_of("new", 5))
        assert member.map.epoch.run == "old"  # what it knows when it begins
        await member.update("epoch", end_of_old)
        assert table.controller.map.epoch.run == "new"
        assert table.controller.map.epoch.number == 5


def set_epoch_unseen(controller, record):
    """Change the map without telling anybody."""
    old = controller.map.epoch
    value = msgspec.to_builtins(record)
    controller.replicated_state._change(
        CompareAndSet(key="epoch", expected=old.changed if old else 0, value=value)
    )


@pytest.mark.parametrize("network", NETWORKS)
async def test_a_node_with_a_second_link_is_missed_only_when_both_have_gone(network):
    async with table_of(NETWORKS[network]()) as table:
        member = await table.joined("driver", role="driver")
        watcher = await table.joined("worker-0")
        identity = Identity(role="driver", node="driver", incarnation=1)
        async with table.network.connect(table.controller.address, identity, timeout_s=20.0):
            pass
        assert table.controller._failure_detector.next_deadline() is None
        await table.leave(member)
        await watcher.wait_for(lambda m: not m.nodes["driver"].live, "the driver to be missed", 20.0)


@pytest.mark.parametrize("network", NETWORKS)
async def test_the_id_of_a_node_that_is_connected_is_refused_to_another(network):
    async def sit():
        async with table_of(NETWORKS[network]()) as table:
            await table.joined("worker-0", incarnation=1)
            table.member("worker-0", incarnation=2, waits=HASTY)
            await asyncio.Event().wait()

    with pytest.raises(ExceptionGroup) as failure:
        await sit()
    cause = first_cause(failure.value)
    assert isinstance(cause, RunFailed)
    assert "another process is connected as worker-0" in str(cause)


@pytest.mark.parametrize("network", NETWORKS)
async def test_a_node_tries_to_join_until_the_link_of_its_earlier_incarnation_has_ended(network):
    async with table_of(NETWORKS[network]()) as table:
        old = await table.joined("worker-0", incarnation=1)
        new = table.member("worker-0", incarnation=2)
        await until(lambda: any(row.type == "CompareAndSet" for row in new._client._endpoint.traffic.rows()))
        await new.wait_for(lambda m: m.version > 0, "the map", 20.0)
        assert not new.joined
        await table.leave(old)
        await new.wait_for(lambda _: new.joined, "the seat", 20.0)
        assert table.controller.map.nodes["worker-0"].incarnation == 2


# --- several controllers -----------------------------------------------------------------------


@pytest.mark.parametrize(("network", "crashed"), [("local", False), ("local", True), ("tcp", True)])
async def test_members_go_on_under_another_leader_and_forget_nothing(network, crashed, caplog):
    async with group_table_of(NETWORKS[network]()) as table:
        members = [await table.joined(f"worker-{n}") for n in range(3)]
        seen = []
        following = table._group.create_task(follow(members[0], seen), name="follow")
        await table.lose_leader(crashed=crashed)
        for member in members:
            await member.set_node(ready="again")
        newest = max(member.map.version for member in members)
        for member in members:
            await member.wait_for(lambda m: m.version >= newest, "the newest map", 20.0)
            assert all(node.live and node.ready == "again" for node in member.map.nodes.values())
            assert member.leader == table.leader.address
        following.cancel()
    assert [cluster.version for cluster in seen] == sorted(cluster.version for cluster in seen)
    assert all(cluster.nodes["worker-0"].live for cluster in seen)
    assert "was started again" not in caplog.text


async def follow(member, seen):
    async for cluster in member.changes():
        seen.append(cluster)


@pytest.mark.parametrize("network", NETWORKS)
async def test_counts_of_several_members_over_changes_of_leaders_are_each_counted_once(network):
    async def count(member, times):
        for _ in range(times):
            await member.update("epoch", count_up)

    async with group_table_of(NETWORKS[network](), permits=any_epoch) as table:
        members = [await table.joined(f"data-{n}", role="data") for n in range(3)]
        client = members[0]._client
        await client.compare_and_set("epoch", 0, epoch_of("r", 0))
        for member in members:
            await member.wait_for(lambda m: m.epoch is not None, "the epoch", 20.0)
        async with asyncio.TaskGroup() as group:
            for member in members:
                group.create_task(count(member, 10))
            await members[0].wait_for(lambda m: m.epoch.number >= 5, "some of it", 20.0)
            await table.lose_leader()
        assert (await client.get()).whole.epoch.number == 30


async def watch(client, seen):
    async with contextlib.aclosing(client.changes()) as all_news:
        async for news in all_news:
            seen.append(news)


async def test_every_version_is_seen_once_while_leaders_end():
    async with group_table_of(NETWORKS["local"]()) as table:
        member, watcher = await table.joined("worker-0"), await table.joined("worker-1")
        seen = []
        watching = table._group.create_task(watch(watcher._client, seen), name="watch")
        for number in range(12):
            await member.set_node(ready=str(number))
            if number == 5:
                await table.lose_leader()
        await until(lambda: seen and seen[-1].version == member.map.version)
        watching.cancel()
        versions = [news.version for news in seen]
        assert versions == list(range(versions[0], versions[-1] + 1))
        assert all(news.whole is None for news in seen[1:])


async def test_a_reader_that_is_slow_misses_maps_but_never_the_last():
    async with table_of(NETWORKS["local"]()) as table:
        member = await table.joined("worker-0")
        changes = member.changes()
        await anext(changes)
        for number in range(5):
            await member.set_node(ready=str(number))
        seen = await anext(changes)
        assert seen.nodes["worker-0"].ready == "4"
        await changes.aclose()


async def test_a_wait_that_is_too_long_is_named():
    async with table_of(NETWORKS["local"]()) as table:
        member = await table.joined("worker-0")
        with pytest.raises(DeadlineExceeded, match=r"waited 0\.01 s for a miracle"):
            await member.wait_for(lambda m: False, "a miracle", 0.01)


@pytest.mark.parametrize("network", NETWORKS)
async def test_a_controller_that_is_gone_for_good_ends_its_members(network):
    async def sit():
        links = NETWORKS[network]()
        waits = msgspec.structs.replace(WAITS, patience_s=0.1)
        async with table_of(links) as table:
            await table.joined("worker-0", waits=waits)
            await table.controller.__aexit__(None, None, None)
            await asyncio.Event().wait()

    with pytest.raises(ExceptionGroup) as failure:
        await sit()
    cause = first_cause(failure.value)
    assert isinstance(cause, RoleDied)
    assert str(cause).startswith("the controller died: ")


@pytest.mark.parametrize("network", NETWORKS)
async def test_members_of_a_controller_that_was_started_again_forget_the_old_one_and_sit_again(
    network, caplog
):
    links = NETWORKS[network]()
    async with table_of(links) as table:
        members = [await table.joined(f"worker-{n}") for n in range(2)]
        for number in range(5):
            await members[0].set_node(ready=str(number))
        await table.controller.__aexit__(None, None, None)
        async with controller_of(links, address=table.controller.address, incarnation=2) as second:
            await until(lambda: second.map.live("worker") == ["worker-0", "worker-1"])
            for member in members:
                await member.wait_for(lambda m: m.version == second.map.version, "the new map", 20.0)
                assert member.map == second.map
            await members[1].set_node(ready="again")
            assert second.map.nodes["worker-1"].ready == "again"
    said = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert any(
        f"worker-0: lost the controller at {table.controller.address} (" in line
        and line.endswith("trying for 20 s")
        for line in said
    )


async def test_a_change_waits_for_a_leader_longer_than_for_one_answer():
    links, loop = NETWORKS["local"](), asyncio.get_running_loop()
    async with table_of(links) as table:
        member = await table.joined("data-0", waits=msgspec.structs.replace(WAITS, call_s=0.05))
        await table.controller.__aexit__(None, None, None)
        begun = loop.time()
        change = asyncio.create_task(member.set_node(ready="again"))
        await until(lambda: loop.time() > begun + 0.2)
        assert not change.done()
        async with controller_of(links, address=table.controller.address, incarnation=2) as second:
            await change
            assert second.map.nodes["data-0"].ready == "again"


async def test_a_member_that_joins_outwaits_one_answer_while_the_leader_has_no_majority():
    loop, waits = asyncio.get_running_loop(), msgspec.structs.replace(WAITS, call_s=0.05)
    async with group_table_of(NETWORKS["local"]()) as table:
        await table.joined("data-0")
        for follower in [each for each in table.controllers if each is not table.leader]:
            await follower.__aexit__(None, None, None)
        begun, member = loop.time(), table.member("worker-0", waits=waits)
        await until(lambda: loop.time() > begun + 0.3)
        assert not member.joined
        assert not table.tasks[member].done()


async def test_a_controller_that_was_never_there_is_not_called_dead():
    async def sit():
        async with table_of(NETWORKS["local"]()) as table:
            await table.controller.__aexit__(None, None, None)
            table.member("worker-0", waits=msgspec.structs.replace(WAITS, dial_s=0.01))
            await asyncio.Event().wait()

    with pytest.raises(ExceptionGroup) as failure:
        await sit()
    cause = first_cause(failure.value)
    assert isinstance(cause, RoleUnreachable)
    assert str(cause).startswith("cannot reach the controller at local://")
