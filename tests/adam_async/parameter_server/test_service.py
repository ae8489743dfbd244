"""A parameter server over real links: it refuses wrong questions by name, and goes on."""

import asyncio
import threading
from importlib.util import find_spec

import msgspec
import numpy as np
import pytest
from msgspec.msgpack import encode

from adam_async.checkpoint.tensors import WholeTensors
from adam_async.controller.client import Membership
from adam_async.driver.preparation import store_of
from adam_async.driver.takeover import submit, update_program
from adam_async.messages import (
    APPLIED,
    NOT_PRIMARY,
    REFUSED,
    BundleSets,
    GetRecord,
    GetStatistics,
    Loaded,
    LoadShards,
    Part,
    Pull,
    Pushed,
    ReadGroupSets,
    ReadShards,
    RecordPart,
    ReportSteps,
    ShardState,
    ShardStates,
    StepReport,
    StepsReported,
    Values,
    pack,
    read_group_sets,
    read_state_tables,
    read_text_tensor,
    role_table,
    state_tables,
    unpack,
)
from adam_async.messages.body import MOST_RANGES
from adam_async.model.kernels import make_batches
from adam_async.model.rules import Sgd
from adam_async.parameter_server import apply, piece_states, service, shard_group
from adam_async.parameter_server.at_once import ShortWay
from adam_async.parameter_server.events import EpochBegan, ReplicasChanged
from adam_async.parameter_server.replay_log import most_read_bytes, read_order_log
from adam_async.parameter_server.served_store import ServedStore
from adam_async.parameter_server.shard import Shard, ShardTables
from adam_async.run.cluster_map import NodeRecord
from adam_async.run.ids import Replica
from adam_async.run.partition import arrays_of
from adam_async.run.store_record import served_word
from adam_async.run.training_program import ResumeRecord, read_training
from adam_async.runtime.traffic import Traffic
from adam_async.worker.pusher import reads_type
from tests.adam_async.parameter_server.timelines import push_on, tick_on
from tests.adam_async.runs import NETWORKS, SHARDED, servers_of, until
from tests.adam_async.store.fleets import fleet
from tests.simulation.scenarios.valid_messages import fields_of
from transport import LinkConfig, LocalNetwork, Message, RemoteError, TransportError


def push_of(servers, shards, **fields):
    return push_on(shards, **{"generation": servers.map.generation, "rate": 1.0, **fields})


def shard_named(servers, tensor):
    (spec,) = servers.table.by_tensor[tensor]
    return spec


def talk(servers, *, role="worker"):
    """A bare link to the only server, as a role has it."""
    address = servers.map.nodes["ps-0"].address
    return servers.network.connect(address, servers.identity(role, 5), timeout_s=50.0)


async def refused(link, message, code, text):
    with pytest.raises(RemoteError, match=text) as failure:
        await link.call(message, timeout_s=50.0)
    assert failure.value.code == code


@pytest.mark.parametrize("network", NETWORKS)
async def test_a_malformed_push_is_refused_with_the_expected_shape_and_changes_nothing(network):
    async with servers_of(NETWORKS[network]()) as servers, talk(servers) as link:
        dense, bias = shard_named(servers, "fc2.weight"), shard_named(servers, "fc2.bias")
        before = {number: shard.values.copy() for number, shard in servers.shards().items()}
        good = np.zeros(dense.size, np.float32)
        one = push_of(servers, [dense.id])
        factors = (Part(True, 1),)
        x, errors = np.zeros((64, 3), np.float32), np.zeros((10, 3), np.float32)
        for message, text in (
            (pack(one, [good[:-1]]), r"deltas: expected float32\(640,\), got float32\(639,\)"),
            (pack(one, [good.astype(np.float64)]), r"expected float32\(640,\), got float64\(640,\)"),
            (pack(one, []), "fewer tensors than its parts need"),
            (pack(one, [good, good]), "do not cover its shards and tensors"),
            (pack(push_of(servers, [dense.id], numbers=(1, 2)), [good]), "differ in length"),
            (pack(push_of(servers, [dense.id], weight=0), [good]), r"malformed Push: .*>= 1 .*weight"),
            (pack(push_of(servers, [999]), [good]), "the model has no shard 999"),
            (pack(push_of(servers, [-1]), [good]), r"malformed Push: .*shards\[0\]"),
            (pack(push_of(servers, [dense.id], parts=(Part(False, 2),)), [good]), "do not cover"),
            (pack(push_of(servers, [dense.id], parts=factors), [x[:-1], errors]), "factors of fc2.weight"),
            (
                pack(push_of(servers, [dense.id], parts=factors), [x, errors[:, :2].copy()]),
                "factors of fc2.weight",
            ),
            (pack(push_of(servers, [dense.id], parts=factors), [x[0], errors]), "need activations"),
            (
                pack(push_of(servers, [dense.id, bias.id], parts=(Part(True, 2),)), [x, errors]),
                "shards of whole rows",
            ),
            (Message(type="Push", meta=encode({"store": "run"})), "malformed Push"),
        ):
            await refused(link, message, "malformed", text)
        for number, shard in servers.shards().items():
            np.testing.assert_array_equal(shard.values, before[number])
            assert (shard.version, shard.last_number) == (0, {})
        answer = unpack(await link.call(pack(one, [good]), timeout_s=50.0), Pushed)
        assert (answer.versions, answer.problems) == (1, ())
        assert APPLIED == 0


@pytest.mark.parametrize("network", NETWORKS)
async def test_other_runs_and_assignments_are_refused(network):
    async with servers_of(NETWORKS[network]()) as servers, talk(servers) as link:
        bias = shard_named(servers, "fc2.bias")
        delta = np.ones(bias.size, np.float32)
        await refused(link, pack(push_of(servers, [bias.id], store="old"), [delta]), "wrong-run", "not old")
        pull = Pull(store="old", generation=servers.map.generation, shards=(bias.id,))
        await refused(link, pack(pull), "wrong-run", "not old")
        await refused(link, pack(tick_on([bias.id], store="old")), "wrong-run", "not old")
        pull = Pull(store="run", generation=99, shards=(bias.id,))
        await refused(link, pack(pull), "wrong-run", "not run generation 99")
        tick = tick_on([bias.id], generation=99)
        await refused(link, pack(tick), "wrong-run", "not run generation 99")
        answer = await link.call(pack(push_of(servers, [bias.id], generation=99), [delta]), timeout_s=50.0)
        assert [problem.status for problem in unpack(answer, Pushed).problems] == [NOT_PRIMARY]


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("bad", [np.nan, np.inf])
async def test_a_push_that_is_not_finite_is_refused_counted_and_ticks(network, bad):
    async with servers_of(NETWORKS[network]()) as servers, talk(servers) as link:
        bias = shard_named(servers, "fc2.bias")
        before = servers.shards()[bias.id].values.copy()
        delta = np.full(bias.size, bad, np.float32)
        answer = await link.call(pack(push_of(servers, [bias.id], clock=7), [delta]), timeout_s=50.0)
        assert [problem.status for problem in unpack(answer, Pushed).problems] == [REFUSED]
        shard = servers.shards()[bias.id]
        np.testing.assert_array_equal(shard.values, before)
        assert (shard.version, shard.tables.refused, shard.clocks[0], shard.last_number[1, 1]) == (0, 1, 7, 1)


@pytest.mark.parametrize("network", NETWORKS)
async def test_values_are_copies_that_later_pushes_do_not_change(network):
    async with servers_of(NETWORKS[network]()) as servers, talk(servers) as link:
        bias = shard_named(servers, "fc2.bias")
        delta = np.ones(bias.size, np.float32)
        first = await link.call(pack(push_of(servers, [bias.id], pull=True), [delta]), timeout_s=50.0)
        kept = first.tensors[0].copy()
        assert not np.shares_memory(first.tensors[0], servers.shards()[bias.id].values)
        await link.call(pack(push_of(servers, [bias.id], numbers=2), [delta]), timeout_s=50.0)
        np.testing.assert_array_equal(first.tensors[0], kept)
        pull = Pull(store="run", generation=servers.map.generation, shards=(bias.id,))
        second = await link.call(pack(pull), timeout_s=50.0)
        assert unpack(second, Values).versions == 2
        np.testing.assert_array_equal(second.tensors[0], kept - 1)


@pytest.mark.parametrize("network", NETWORKS)
async def test_factors_of_several_shards_give_what_their_deltas_give(network):
    async with servers_of(NETWORKS[network](), **SHARDED, dtype="float64") as servers:
        shards = [
            shard for shard in servers.table.by_tensor["fc1.weight"] if shard.id in mine(servers, "ps-0")
        ]
        row, rows = shards[0].row_size, sum(shard.size for shard in shards) // shards[0].row_size
        dice = np.random.default_rng(1)
        x, errors = dice.normal(size=(row, 3)), dice.normal(size=(rows, 3))
        numbers = [shard.id for shard in shards]
        before = np.concatenate([servers.shards()[number].values for number in numbers])
        async with talk(servers) as link:
            push = push_of(servers, numbers, parts=(Part(True, len(shards)),), rate=0.5)
            await link.call(pack(push, [x, errors]), timeout_s=50.0)
        after = np.concatenate([servers.shards()[number].values for number in numbers])
        np.testing.assert_allclose(after, before - 0.5 * (errors @ x.T).reshape(-1), rtol=1e-12, atol=1e-12)


def mine(servers, name):
    return {spec.id for spec in servers.table.shards if servers.map.buckets[spec.bucket] == name}


ONE_STEP = (StepReport(1, 4, 0),)


def record_of(servers, shards, *, number=1, steps=ONE_STEP, **fields):
    fields = {"store": "run", "generation": servers.map.generation, **fields}
    return ReportSteps(
        session=1, incarnation=1, replica=0, shards=tuple(shards), number=number, steps=tuple(steps), **fields
    )


@pytest.mark.parametrize("network", NETWORKS)
async def test_a_record_is_counted_and_leaves_every_value_alone(network):
    async with servers_of(NETWORKS[network](), weights="aliased") as servers, talk(servers) as link:
        before = {number: shard.values.copy() for number, shard in servers.shards().items()}
        steps = (StepReport(1, 4, 0), StepReport(2, 4, 3, (0,)))
        message = pack(record_of(servers, before, steps=steps))
        for _ in range(2):
            assert unpack(await link.call(message, timeout_s=50.0), StepsReported) == StepsReported()
        first, *others = servers.shards().values()
        assert (first.version, first.tables.refused, dict(first.staleness)) == (1, 1, {0: 1})
        for shard in others:
            assert (shard.version, shard.tables.refused, dict(shard.staleness)) == (2, 0, {0: 1, 3: 1})
        for number, shard in servers.shards().items():
            shard.check_invariants()
            assert (shard.clocks[0], shard.last_number, shard.tables.duplicates) == (2, {(1, 1): 2}, 2)
            np.testing.assert_array_equal(shard.values, before[number])


@pytest.mark.parametrize("network", NETWORKS)
async def test_a_record_out_of_turn_is_refused_by_name_and_counts_nothing(network):
    async with servers_of(NETWORKS[network](), weights="aliased") as servers, talk(servers) as link:
        ours = list(servers.shards())
        fields = fields_of(pack(record_of(servers, ours)))
        nothing = Message(type="ReportSteps", meta=encode({**fields, "steps": []}))
        for message, code, text in (
            (pack(record_of(servers, ours, number=2)), "gap", "expected step 1, not 2"),
            (pack(record_of(servers, [*ours, 999])), "not-primary", "not the primary of all of"),
            (pack(record_of(servers, ours, store="old")), "wrong-run", "not old"),
            (pack(record_of(servers, ours, generation=99)), "wrong-run", "not run generation 99"),
            (nothing, "malformed", "malformed ReportSteps"),
        ):
            await refused(link, message, code, text)
        assert all((s.version, s.last_number) == (0, {}) for s in servers.shards().values())


@pytest.mark.parametrize("network", NETWORKS)
async def test_steps_are_reported_to_a_store_in_place_only(network):
    async with servers_of(NETWORKS[network](), weights="copy", kernels="numpy") as servers:
        async with talk(servers) as link:
            record = record_of(servers, servers.shards(), steps=(StepReport(1, 4, 0, (), (1, 0, 1)),))
            await refused(link, pack(record), "malformed", "store run is not trained in place")
        assert all((s.version, s.tables.groups) == (0, {}) for s in servers.shards().values())


@pytest.mark.parametrize("network", NETWORKS)
async def test_a_push_to_a_store_in_place_is_refused_and_changes_nothing(network):
    async with servers_of(NETWORKS[network](), weights="aliased") as servers, talk(servers) as link:
        bias = shard_named(servers, "fc2.bias")
        before = servers.shards()[bias.id].values.copy()
        push = pack(push_of(servers, [bias.id]), [np.ones(bias.size, np.float32)])
        await refused(link, push, "malformed", "store run is trained in place")
        shard = servers.shards()[bias.id]
        np.testing.assert_array_equal(shard.values, before)
        assert (shard.version, shard.last_number) == (0, {})


@pytest.mark.parametrize("network", NETWORKS)
async def test_values_are_copies_while_threads_write_in_place(network):
    async with servers_of(NETWORKS[network](), weights="aliased") as servers, talk(servers) as link:
        bias = shard_named(servers, "fc2.bias")
        memory, stop = servers.shards()[bias.id].values, threading.Event()

        def write():
            while not stop.is_set():
                np.add(memory, 1.0, out=memory)

        thread = threading.Thread(target=write, name="writes in place")
        thread.start()
        try:
            pull = pack(Pull(store="run", generation=servers.map.generation, shards=(bias.id,)))
            answers = [(await link.call(pull, timeout_s=50.0)).tensors[0] for _ in range(20)]
            kept = [answer.copy() for answer in answers]
            reached = memory[0]
            await until(lambda: memory[0] != reached)  # the thread goes on writing
        finally:
            stop.set()
            thread.join()
        for answer, was in zip(answers, kept, strict=True):
            assert not np.shares_memory(answer, memory)
            np.testing.assert_array_equal(answer, was)


async def test_statistics_are_plain_values():
    async with servers_of(NETWORKS["local"]()) as servers:
        client = servers.client()
        client.push(1.0)
        await client.client.flush()
        address = servers.map.nodes["ps-0"].address
        async with servers.network.connect(address, servers.identity("driver", 7), timeout_s=50.0) as link:
            reply = await link.call(pack(GetStatistics(run="run")), timeout_s=50.0)
        answer = read_text_tensor(reply, dict, 1 << 20)
        assert set(answer["versions"].values()) == {1}
        assert msgspec.json.decode(msgspec.json.encode(answer)) == answer


async def test_a_server_without_a_run_is_not_ready():
    async with servers_of(NETWORKS["local"](), servers=1) as servers:
        servers.servers[0].served.clear()
        async with talk(servers) as link:
            pull = pack(Pull(store="run", generation=1, shards=(0,)))
            await refused(link, pull, "not-ready", "ps-0 has not taken up a store")


# --- clocks and sums -------------------------------------------------------------------------


def step_of(servers, values, number, clock=1, *, weight=4, rate=0.5):
    """A push to the only server: all shards, as deltas."""
    shards = list(servers.shards())
    return push_of(
        servers,
        shards,
        session=10 + number,
        replica=number,
        clock=clock,
        numbers=(clock,) * len(shards),
        weight=weight,
        rate=rate,
    ), [np.concatenate([np.full(servers.table.shards[s].size, values, np.float32) for s in shards])]


@pytest.mark.parametrize("network", NETWORKS)
async def test_contributions_wait_in_any_order_and_are_summed_once_all_have_arrived(network):
    async with servers_of(NETWORKS[network](), consistency="bsp", images_per_group=4) as servers:
        for server in servers.servers:
            server.state.handle(ReplicasChanged({0: 1, 1: 1}))
        before = {number: shard.values.copy() for number, shard in servers.shards().items()}
        every = tuple(servers.shards())
        async with talk(servers) as link:
            for number, gradient, weight in ((1, 3.0, 4), (0, 0.5, 2)):
                push, tensors = step_of(servers, gradient, number, weight=weight)
                answer = unpack(await link.call(pack(push, tensors), timeout_s=50.0), Pushed)
                assert (answer.versions, answer.problems) == (0, ())
            pull = Pull(store="run", generation=servers.map.generation, shards=every, clock=1, wait_s=50.0)
            answer = await link.call(pack(pull), timeout_s=50.0)
        assert unpack(answer, Values).clock == 1
        after = np.split(answer.tensors[0], np.cumsum([len(values) for values in before.values()])[:-1])
        mean = (np.float32(0.5) + np.float32(3.0)) * np.float32(4 / 6)
        for values, was in zip(after, before.values(), strict=True):
            np.testing.assert_array_equal(values, was - np.float32(0.5) * mean)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
@pytest.mark.parametrize("parts", [(2,), (1, 1)])
async def test_contributions_that_name_their_shards_in_different_orders_are_summed_shard_by_shard(
    order, parts
):
    async with servers_of(NETWORKS["local"](), consistency="bsp", images_per_group=4) as servers:
        servers.servers[0].state.handle(ReplicasChanged({0: 1, 1: 1}))
        one, other = shard_named(servers, "fc2.weight"), shard_named(servers, "fc2.bias")
        before = {spec.id: servers.shards()[spec.id].values.copy() for spec in (one, other)}
        pushes = []
        for replica, specs in enumerate(((one, other), (other, one))):
            flat = [np.full(spec.size, 1.0 + replica + spec.id, np.float32) for spec in specs]
            tensors = [np.concatenate(flat)] if parts == (2,) else flat
            fields = {"session": replica, "replica": replica, "weight": 4}
            cut = tuple(Part(False, count) for count in parts)
            pushes.append((push_of(servers, [spec.id for spec in specs], parts=cut, **fields), tensors))
        async with talk(servers) as link:
            for replica in order:
                push, tensors = pushes[replica]
                await link.call(pack(push, tensors), timeout_s=50.0)
        await until(lambda: all(servers.shards()[number].version == 1 for number in before))
        for number, was in before.items():
            mean = (1.0 + number + 2.0 + number) / 2
            np.testing.assert_array_equal(servers.shards()[number].values, was - np.float32(mean))


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("bad", [np.nan, np.inf])
async def test_a_contribution_that_is_not_finite_is_refused_at_once_and_the_others_are_summed(network, bad):
    async with servers_of(NETWORKS[network](), consistency="bsp", images_per_group=4) as servers:
        servers.servers[0].state.handle(ReplicasChanged({0: 1, 1: 1}))
        async with talk(servers) as link:
            push, tensors = step_of(servers, bad, 0)
            answer = unpack(await link.call(pack(push, tensors), timeout_s=50.0), Pushed)
            assert {problem.status for problem in answer.problems} == {REFUSED}
            push, tensors = step_of(servers, 1.0, 1)
            await link.call(pack(push, tensors), timeout_s=50.0)
        await until(lambda: all(shard.version == 1 for shard in servers.shards().values()))
        assert all(np.isfinite(shard.values).all() for shard in servers.shards().values())


@pytest.mark.parametrize("network", NETWORKS)
async def test_a_pull_for_an_unreached_clock_is_answered_in_time_with_the_replicas_behind(network):
    async with servers_of(NETWORKS[network](), consistency="ssp:1") as servers, talk(servers) as link:
        servers.servers[0].state.handle(ReplicasChanged({0: 1, 1: 1}))
        push, tensors = step_of(servers, 1.0, 1)
        await link.call(pack(push, tensors), timeout_s=50.0)
        every = tuple(servers.shards())
        pull = Pull(store="run", generation=servers.map.generation, shards=every, clock=1, wait_s=0.01)
        answer = await link.call(pack(pull), timeout_s=50.0)
        assert unpack(answer, Values) == Values(versions=(), clock=0, behind=(0,))
        assert answer.tensors == ()


@pytest.mark.parametrize("network", NETWORKS)
async def test_a_pull_that_waited_behind_a_push_is_answered_in_time_too(network):
    async with servers_of(NETWORKS[network](), consistency="ssp:1") as servers, talk(servers) as link:
        servers.servers[0].state.handle(ReplicasChanged({0: 1, 1: 1}))
        push, tensors = step_of(servers, 1.0, 1)
        pushed = link.call_nowait(pack(push, tensors), timeout_s=50.0, ordered=True)
        pull = Pull(store="run", generation=servers.map.generation, shards=push.shards, clock=1, wait_s=0.01)
        answer = await link.call_nowait(pack(pull), timeout_s=50.0, ordered=True)
        assert unpack(answer, Values) == Values(versions=(), clock=0, behind=(0,))
        await pushed


@pytest.mark.parametrize("network", NETWORKS)
async def test_rates_are_divided_by_one_plus_the_staleness_of_the_push(network):
    options = {"scale_by_staleness": True, "dtype": "float64"}
    async with servers_of(NETWORKS[network](), **options) as servers, talk(servers) as link:
        bias = shard_named(servers, "fc2.bias")
        values = servers.shards()[bias.id].values
        expected = values.copy()
        for number in range(1, 4):
            delta = np.full(bias.size, 0.3)
            push = push_of(servers, [bias.id], numbers=(number,), clock=number, rate=0.5)
            await link.call(pack(push, [delta]), timeout_s=50.0)
            expected -= 0.5 / number * delta
            np.testing.assert_allclose(values, expected, rtol=1e-15, atol=1e-15)
        assert servers.shards()[bias.id].staleness == {0: 1, 1: 1, 2: 1}


# --- reading, loading, records ---------------------------------------------------------------


async def resume(servers):
    """End the servers' first run as its driver, and let another driver resume it."""
    identity = servers.identity("driver", 1)
    member = Membership(
        network=servers.network,
        controller=servers.controller.address,
        identity=identity,
        record=NodeRecord(role="driver", address="", incarnation=identity.incarnation),
        waits=servers.waits,
        traffic=Traffic(identity.node),
    )
    servers.tasks.append(servers._group.create_task(member.run(), name="another driver"))
    await member.wait_for(lambda m: "driver-1" in m.nodes and m.run is not None, "the driver to join", 30.0)
    await update_program(
        servers.member,
        lambda record: (
            None if record.phase == "finished" else msgspec.structs.replace(record, phase="finished")
        ),
    )
    await member.wait_for(lambda m: m.run is not None and m.run.over, "the end of the first run", 30.0)
    resumed = ResumeRecord(epoch=1, clock=7)
    program = msgspec.structs.replace(read_training(member.map.run), resumed=resumed)
    again = program.record("again", member.member)
    await submit(member, again)
    arrays = arrays_of(servers.model, None)
    await member.create_store("again", store_of(again, program, arrays), arrays)
    await until(lambda: all({id for id, _ in server.served} == {"again"} for server in servers.servers))
    return member


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("rule", ["sgd", "adam"])
async def test_a_store_serves_when_all_shards_are_set_and_then_is_what_was_read(network, rule):
    options = {"rule": rule, "servers": 1}
    async with servers_of(NETWORKS[network](), **options) as servers, talk(servers) as worker:
        push, tensors = step_of(servers, 0.5, 3, clock=1)
        await worker.call(pack(push, tensors), timeout_s=50.0)
        address = servers.map.nodes["ps-0"].address
        driver = servers.identity("driver", 1)
        every = list(servers.shards())
        async with servers.network.connect(address, driver, timeout_s=50.0) as link:
            generation = servers.map.generation
            read = pack(ReadShards(store="run", generation=generation, shards=tuple(every)))
            answer = await link.call(read, timeout_s=50.0)
            states = unpack(answer, ShardStates)
            kept = [tensor.copy() for tensor in answer.tensors]
            member = await resume(servers)
            generation = member.map.generation
            pull = pack(Pull(store="again", generation=generation, shards=tuple(every)))
            waits = f"ps-0 lacks values of {len(every)} shards of store again"
            await refused(worker, pull, "not-ready", waits)
            word = served_word(member.map.store("again"))
            assert word not in member.map.nodes["ps-0"].serves
            arrays = 1 + len(states.arrays)
            found, values = read_state_tables(kept, most_shards=len(kept))
            for at, state in enumerate(found):
                load = LoadShards(store="again", generation=generation, arrays=states.arrays)
                tensors = [*state_tables([state]), *values[at * arrays : (at + 1) * arrays]]
                message = pack(load, tensors)
                for _ in range(2):  # the second time as if the answer had been lost
                    answer = unpack(await link.call(message, timeout_s=50.0), Loaded)
                    assert answer.left == len(every) - at - 1
            serves = "the server to serve the store"
            await member.wait_for(lambda m: word in m.nodes["ps-0"].serves, serves, 30.0)
            again = await link.call(
                pack(ReadShards(store="again", generation=generation, shards=tuple(every))), timeout_s=50.0
            )
            assert unpack(again, ShardStates) == states
            for one, other in zip(again.tensors, kept, strict=True):
                assert one.tobytes() == other.tobytes()
            assert unpack(await worker.call(pull, timeout_s=50.0), Values).versions == 1


async def test_shards_of_a_store_that_serves_cannot_be_set():
    async with servers_of(NETWORKS["local"](), servers=1) as servers:
        address = servers.map.nodes["ps-0"].address
        before = {number: shard.values.copy() for number, shard in servers.shards().items()}
        async with servers.network.connect(address, servers.identity("driver", 1), timeout_s=50.0) as link:
            load = LoadShards(store="run", generation=servers.map.generation, arrays=())
            (number, values), *_ = before.items()
            tables = state_tables([ShardState(shard=number, version=0, clocks={})])
            answer = await link.call(pack(load, [*tables, values + 1]), timeout_s=50.0)
            assert unpack(answer, Loaded).left == 0
            load = msgspec.structs.replace(load, generation=99)
            await refused(link, pack(load), "wrong-run", "store run is in generation 1 here")
            load = msgspec.structs.replace(load, store="old")
            await refused(link, pack(load), "wrong-run", "has stores run, not old")
        for number, values in before.items():
            np.testing.assert_array_equal(servers.shards()[number].values, values)


@pytest.mark.parametrize("network", NETWORKS)
async def test_shards_of_a_resumed_run_share_equal_tables_and_their_pushes_take_the_short_way(
    network, monkeypatch
):
    async def resumed(tensors, specs):
        for spec in specs:
            late = int(spec.id == at)
            tables = ShardTables(version=7 + late, clocks={0: 7}, groups={1: (0, 3 + late)})
            yield [Shard(spec=spec, values=tensors.values_of(spec), rule_state={}, tables=tables)]

    ways, take, at = [], ShortWay.take, None
    monkeypatch.setattr(WholeTensors, "shards_of", resumed)
    monkeypatch.setattr(
        ShortWay, "take", lambda *args, **options: ways.append(take(*args, **options)) or ways[-1]
    )
    async with servers_of(NETWORKS[network](), shard_bytes=1 << 10) as servers:
        assert len({id(shard.tables) for shard in servers.shards().values()}) == 1
        hand = servers.client(is_live=True)
        for _ in range(3):
            hand.push(0.5, read=7)
            await hand.client.flush()
        assert ways == [False, True, True]
        assert {shard.version for shard in servers.shards().values()} == {10}
    at = 2  # a reading of this shard came later
    async with servers_of(NETWORKS[network](), shard_bytes=1 << 10) as servers:
        shards = servers.shards()
        assert len({id(shard.tables) for number, shard in shards.items() if number != at}) == 1
        assert shards[at].tables is not shards[0].tables


READS = np.frombuffer(b"reads", np.uint8)


@pytest.mark.parametrize("network", NETWORKS)
async def test_the_log_of_a_bundle_is_read_in_pieces(network):
    async with servers_of(NETWORKS[network](), record=True) as servers, talk(servers) as worker:
        for clock in (1, 2):
            push, tensors = step_of(servers, 0.5, 3, clock=clock)
            push = msgspec.structs.replace(push, recorded=True)
            await worker.call(pack(push, [*tensors, READS]), timeout_s=50.0)
        address = servers.map.nodes["ps-0"].address
        async with servers.network.connect(address, servers.identity("driver", 1), timeout_s=50.0) as link:
            data, total = b"", 1
            while len(data) < total:
                ask = GetRecord(run="run", home="ps-0", start=len(data), stop=len(data) + 50)
                answer = await link.call(pack(ask), timeout_s=50.0)
                data, total = data + answer.tensors[0].tobytes(), unpack(answer, RecordPart).total
            other = GetRecord(run="old", home="ps-0", start=0, stop=9)
            await refused(link, pack(other), "wrong-run", "has stores run, not old")
        log = read_order_log(data)
        (client,) = log.clients
        assert (client.replica, client.session) == (3, 13)
        assert sorted(log.entries) == list(servers.shards())
        for found in log.entries.values():
            assert found["clock"].tolist() == [1, 2]
        assert [(step.clock, step.reads) for step in log.steps] == [(1, b"reads"), (2, b"reads")]


@pytest.mark.parametrize("network", NETWORKS)
async def test_reads_beyond_the_groups_of_a_step_or_without_a_record_are_refused(network):
    async with servers_of(NETWORKS[network](), record=True) as servers, talk(servers) as link:
        bias = shard_named(servers, "fc2.bias")
        delta = np.ones(bias.size, np.float32)
        shards, arrays = len(servers.table.shards), len(servers.table.by_tensor)
        most = reads_type(shards, arrays).itemsize
        assert most == most_read_bytes((), shards=shards, arrays=arrays)
        assert 3 * most == most_read_bytes((1, 4, 6, 9, 10), shards=shards, arrays=arrays)
        assert MOST_RANGES * most == most_read_bytes((1, 0, 1 << 32), shards=shards, arrays=arrays)
        push = push_of(servers, [bias.id], recorded=True)
        long = pack(push, [delta, np.zeros(most + 1, np.uint8)])
        await refused(link, long, "malformed", f"reads of {most + 1} bytes, and those of its groups have at")
        answer = await link.call(pack(push, [delta, np.zeros(most, np.uint8)]), timeout_s=50.0)
        assert unpack(answer, Pushed).versions == 1
    async with servers_of(NETWORKS[network]()) as servers, talk(servers) as link:
        push = push_of(servers, [bias.id], recorded=True)
        text = "a Push with reads, and store run is not recorded"
        await refused(link, pack(push, [delta, READS]), "malformed", text)


async def test_a_server_without_a_record_refuses_to_send_one():
    async with servers_of(NETWORKS["local"](), servers=1) as servers:
        address = servers.map.nodes["ps-0"].address
        async with servers.network.connect(address, servers.identity("driver", 1), timeout_s=50.0) as link:
            ask = pack(GetRecord(run="run", home="ps-0", start=0, stop=9))
            await refused(link, ask, "no-record", "bundle ps-0 has no log: run run is not recorded")


async def test_an_answer_that_is_too_large_fails_its_own_request_behind_a_push_too(monkeypatch):
    """The pull comes behind a push that is not applied yet, and is refused before anything is copied."""
    network = LocalNetwork(rules=role_table(), config=LinkConfig(max_message_bytes=60 << 10))
    monkeypatch.setattr(piece_states, "PART_BYTES", 16 << 10)
    small_shards = servers_of(network, shard_bytes=16 << 10)
    async with asyncio.timeout(60), small_shards as servers, talk(servers) as link:
        shards = servers.shards()
        assert sum(shard.values.nbytes for shard in shards.values()) > 60 << 10
        small = min(shards.values(), key=lambda shard: len(shard.values))
        one = np.ones(len(small.values), np.float32)
        push = push_of(servers, [small.spec.id])
        pull = Pull(store="run", generation=servers.map.generation, shards=tuple(shards), clock=0, wait_s=0.0)
        for number in (1, 2):
            pushed = link.call_nowait(
                pack(msgspec.structs.replace(push, numbers=number), [one]), timeout_s=50.0
            )
            with pytest.raises(RemoteError, match="too-large: the answer would have"):
                await link.call(pack(pull), timeout_s=50.0)
            assert unpack(await pushed, Pushed).versions == number


@pytest.mark.parametrize("network", NETWORKS)
async def test_a_push_in_a_session_of_another_peer_is_refused_and_changes_nothing(network):
    async with servers_of(NETWORKS[network]()) as servers, talk(servers) as link:
        bias = shard_named(servers, "fc2.bias")
        delta, push = np.ones(bias.size, np.float32), push_of(servers, [bias.id])
        assert unpack(await link.call(pack(push, [delta]), timeout_s=50.0), Pushed).versions == 1
        async with talk(servers) as other:
            second = msgspec.structs.replace(push, numbers=2)
            with pytest.raises(RemoteError, match="not-yours: this session is "):
                await other.call(pack(second, [delta]), timeout_s=50.0)
            await asyncio.wait_for(other.wait_closed(), 50.0)
        assert unpack(await link.call(pack(second, [delta]), timeout_s=50.0), Pushed).versions == 2


@pytest.mark.parametrize("network", NETWORKS)
async def test_a_client_reads_no_shards_of_a_run_and_a_driver_does(network):
    async with servers_of(NETWORKS[network]()) as servers:
        generation, every = servers.map.generation, tuple(servers.shards())
        read = pack(ReadShards(store="run", generation=generation, shards=every))
        async with talk(servers, role="driver") as link:
            await link.call(read, timeout_s=50.0)
        async with talk(servers, role="client") as link:
            with pytest.raises(RemoteError, match=r"not-yours: client .* has no part in a store of a run"):
                await link.call(read, timeout_s=50.0)
            await asyncio.wait_for(link.wait_closed(), 50.0)


@pytest.mark.parametrize("network", NETWORKS)
async def test_only_its_own_workers_send_for_a_live_replica(network):
    async with servers_of(NETWORKS[network]()) as servers, talk(servers) as link:
        (server,) = servers.servers
        member = frozenset({(link.identity.node, link.identity.incarnation)})
        server.store("run")._sender_checks.replica_generations_changed(
            {(Replica(0), 1): frozenset({("worker-0", 1)}), (Replica(1), 1): member}
        )
        bias = shard_named(servers, "fc2.bias")
        delta, push = np.ones(bias.size, np.float32), push_of(servers, [bias.id])
        own_applied = msgspec.structs.replace(push, replica=1)
        assert unpack(await link.call(pack(own_applied, [delta]), timeout_s=50.0), Pushed).versions == 1
        with pytest.raises(RemoteError, match=r"not-yours: .* is no worker of replica 0"):
            await link.call(pack(msgspec.structs.replace(push, session=2), [delta]), timeout_s=50.0)
        await asyncio.wait_for(link.wait_closed(), 50.0)
        assert servers.shards()[bias.id].version == 1


@pytest.mark.parametrize("network", NETWORKS)
async def test_a_data_server_reads_the_groups_that_a_bundle_has_at_a_version_of_the_map(network):
    async with servers_of(NETWORKS[network](), kernels="numpy") as servers, talk(servers) as link:
        served = servers.servers[0].store("run")
        served._follow_up(served.state.handle(ReplicasChanged({Replica(0): 1})))
        bias = shard_named(servers, "fc2.bias")
        push = push_of(servers, [bias.id], groups=(1, 3, 5))
        await link.call(pack(push, [np.ones(bias.size, np.float32)]), timeout_s=50.0)
        version, address = servers.map.version, servers.map.nodes["ps-0"].address
        fields = {"store": "run", "generation": servers.map.generation, "home": "ps-0", "epoch": 1}
        ask = ReadGroupSets(**fields, map_version=version)
        async with servers.network.connect(address, servers.identity("data", 6), timeout_s=50.0) as data:
            answer = await data.call(pack(ask), timeout_s=50.0)
            assert unpack(answer, BundleSets) == BundleSets(trainable=True, clock=0, images=1, loss_sum=7.0)
            assert read_group_sets(answer.tensors) == ((), (3, 5))
            for change, code, text in (
                ({"map_version": version + 9}, "busy", f"follows map version .*, not {version + 9} yet"),
                ({"generation": 99}, "wrong-run", "not 99"),
                ({"store": "old"}, "wrong-run", "not old"),
                ({"home": "ps-7"}, "not-primary", "no copy of bundle ps-7"),
                ({"epoch": 0}, "malformed", "no epoch has the number 0"),
                ({"epoch": 2}, "malformed", "epoch 2, and 1 is the next one"),
            ):
                await refused(data, pack(msgspec.structs.replace(ask, **change)), code, text)


async def test_pushes_that_wait_for_an_epoch_go_with_their_link():
    network = NETWORKS["local"]()
    async with servers_of(network) as servers:
        bias, server = shard_named(servers, "fc2.bias"), servers.servers[0]
        address, worker = servers.map.nodes["ps-0"].address, servers.identity("worker", 5)
        push = pack(push_of(servers, [bias.id], epoch=1), [np.ones(bias.size, np.float32)])
        async with network.connect(address, worker) as link:
            lost = link.call_nowait(push, timeout_s=20.0)
            await until(lambda: (1, 1) in server.state.epoch_gate)
        with pytest.raises(TransportError):
            await lost
        await until(lambda: (1, 1) not in server.state.epoch_gate)
        async with network.connect(address, worker) as link:
            again = link.call_nowait(push, timeout_s=20.0)
            await until(lambda: (1, 1) in server.state.epoch_gate)
            served = server.store("run")
            served._follow_up(served.state.handle(EpochBegan(1, 0)))
            assert unpack(await again, Pushed).versions == 1


async def test_a_turn_of_the_loop_does_a_bounded_part_of_what_is_queued(monkeypatch):
    turns = []
    monkeypatch.setattr(service, "TURN_WORK", 40)
    monkeypatch.setattr(apply, "PIECE_WORK", 40)
    monkeypatch.setattr(shard_group, "STRIP_VALUES", 40)
    step, some = ServedStore._step, ServedStore.apply_some

    def counted(served, state, work, room):
        turns[-1].append(step(served, state, work, room))
        return turns[-1][-1]

    def turn(served, room):
        turns.append([])
        return some(served, room)

    monkeypatch.setattr(ServedStore, "_step", counted)
    monkeypatch.setattr(ServedStore, "apply_some", turn)
    async with servers_of(NETWORKS["local"]()) as servers, talk(servers) as link:
        weight, bias = shard_named(servers, "fc2.weight"), shard_named(servers, "fc2.bias")
        before = servers.shards()[weight.id].values.copy()
        ones = np.ones(weight.size + bias.size, np.float32)
        shards = [weight.id, bias.id]
        pushes = [pack(push_of(servers, shards, numbers=(n, n), rate=2.0**n), [ones]) for n in (1, 2, 3)]
        pull = Pull(store="run", generation=servers.map.generation, shards=(weight.id,))
        *pushed, pulled = await asyncio.gather(
            *(link.call(message, timeout_s=50.0) for message in [*pushes, pack(pull)])
        )
        assert [unpack(answer, Pushed).problems for answer in pushed] == [()] * 3
        assert unpack(pulled, Values).versions == 3
        for rate in (2.0, 4.0, 8.0):
            before -= np.float32(rate)
        np.testing.assert_array_equal(pulled.tensors[0], before)
    worked = [works for works in turns if any(works)]
    assert len(worked) > 1
    assert all(sum(works[:-1]) < 40 for works in worked)  # a turn ends with the step that reaches its bound
    assert max(max(works) for works in worked) <= 3 * weight.size


@pytest.mark.skipif(find_spec("numba") is None, reason="needs the extra fast")
async def test_the_rule_is_applied_by_compiled_kernels_once_they_are_there():
    make_batches(Sgd(), np.dtype(np.float32), "numba")  # not in a thread beside a loop that never rests
    async with servers_of(NETWORKS["local"]()) as servers:
        (server,) = servers.servers
        await until(lambda: type(server.store("run")._applier.batches).__name__ == "CompiledBatches")


async def test_a_server_that_ends_only_logs_a_notice_of_its_last_work(monkeypatch, caplog):
    async with fleet(monkeypatch, "ps-0") as servers:
        server = servers.servers["ps-0"]

        async def last_round():
            try:
                await asyncio.Event().wait()
            finally:
                server._notice("the last round took 3 s")

        server._spawn("disk", last_round())
        await asyncio.sleep(0)
        await servers.end("ps-0")
    assert "the last round took 3 s" in caplog.text
