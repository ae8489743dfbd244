"""Values come back whole: asked per server, assembled per tensor, installed when the last shard is there."""

import asyncio
import sys
import threading

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from adam_async.run.ids import ShardId
from adam_async.worker import push_plan
from adam_async.worker.puller import Landing, Puller, TensorCopy, WorkerWeights
from adam_async.worker.push_plan import travels_apart
from tests.adam_async.runs import NETWORKS, PATIENT, SHARDED, servers_of, until
from transport import BufferPool, RemoteProtocolError


def flat_of(servers, specs):
    shards = servers.shards()
    return np.concatenate([shards[spec.id].values for spec in specs])


def landing_of(puller, *answers):
    """A pull of these shards, answer by answer."""
    landed, layouts = [], [puller.layout_of(specs) for specs in answers]
    return Landing(puller, layouts, len(layouts), lambda: landed.append(1)), landed


def arrive(landing, number, version, servers):
    """Let an answer arrive, with the servers' values under this version."""
    specs = [servers.table.shards[shard] for shard in landing.layouts[number].shards]
    landing.arrived(number, (version,) * len(specs), flat_of(servers, specs), 0)


@pytest.mark.parametrize("sharding", [{}, SHARDED, {"shard_bytes": 256}], ids=["whole", "sharded", "pieces"])
@pytest.mark.parametrize("network", NETWORKS)
async def test_a_pull_brings_every_tensor_as_the_servers_have_it(network, sharding):
    async with servers_of(NETWORKS[network](), **sharding) as servers:
        client = servers.client()
        for _ in range(2):
            arrays = await client.pull()
            assert arrays.keys() == {p.name for p in servers.model.parameters}
            for name, specs in servers.table.by_tensor.items():
                np.testing.assert_array_equal(arrays[name].reshape(-1), flat_of(servers, specs))
            client.push(1.0)
        assert client.weights.installed == 2 * len(arrays)


async def test_questions_name_every_shard_once_and_keep_tensors_too_large_for_a_message_apart(monkeypatch):
    monkeypatch.setattr(push_plan, "MESSAGE_BYTES", 8 << 10)
    monkeypatch.setattr(push_plan, "MESSAGE_SHARDS", 3)
    async with servers_of(NETWORKS["local"](), servers=2, shard_bytes=2 << 10) as servers:
        puller = servers.client().puller
        questions = puller.questions(servers.table.shards)
        assert sorted(shard for _, layout in questions for shard in layout.shards) == [
            s.id for s in servers.table.shards
        ]
        for server, layout in questions:
            specs = [servers.table.shards[shard] for shard in layout.shards]
            assert layout.size == sum(spec.size for spec in specs)
            assert {servers.map.buckets[spec.bucket] for spec in specs} == {server}
            assert len(specs) <= 3
            assert sum(spec.size for spec in specs) * 4 <= 8 << 10
            tensors = {spec.tensor for spec in specs}
            assert len(tensors) == 1 or not any(travels_apart(servers.table, name) for name in tensors)


async def test_a_tensor_of_several_shards_is_installed_when_the_last_of_them_is_there():
    async with servers_of(NETWORKS["local"](), **SHARDED) as servers:
        client = servers.client()
        specs = servers.table.by_tensor["fc1.weight"]
        landing, landed = landing_of(client.puller, *([spec] for spec in specs))
        for number, spec in reversed(list(enumerate(specs))):
            assert "fc1.weight" not in client.weights.snapshot().arrays
            assert landed == []
            landing.arrived(number, (spec.id + 10,), flat_of(servers, [spec]), 0)
        copy = client.weights.current("fc1.weight")
        assert copy.versions == tuple(spec.id + 10 for spec in specs)
        np.testing.assert_array_equal(copy.array.reshape(-1), flat_of(servers, specs))
        assert landed == [1]


async def test_pulls_that_overtake_one_another_set_no_shard_back():
    async with servers_of(NETWORKS["local"](), **SHARDED) as servers:
        client = servers.client()
        first, *others = specs = servers.table.by_tensor["fc1.weight"]
        parts = [first], others
        slow, quick, later = (landing_of(client.puller, *parts)[0] for _ in range(3))
        for landing, number, version in (
            (slow, 0, 1),
            (quick, 0, 2),
            (quick, 1, 1),  # complete: the first shard is newer than in the slow one, the others are not
            (slow, 1, 2),
        ):
            arrive(landing, number, version, servers)
        assert client.weights.current("fc1.weight").versions == (2, *(1 for _ in others))
        arrive(later, 0, 3, servers)
        arrive(later, 1, 3, servers)
        assert client.weights.current("fc1.weight").versions == tuple(3 for _ in specs)


async def test_a_range_of_a_tensor_lands_in_its_place_without_a_copy():
    async with servers_of(NETWORKS["local"](), **SHARDED) as servers:
        client = servers.client()
        first, second, *others = servers.table.by_tensor["fc1.weight"]
        landing, _ = landing_of(client.puller, [first, second], others)
        place = landing.into(0)
        assert place is not None
        assert place.size == first.size + second.size
        place[:] = flat_of(servers, [first, second])
        landing.arrived(0, (1, 1), place, 0)
        arrive(landing, 1, 1, servers)
        copy = client.weights.current("fc1.weight")
        assert np.shares_memory(copy.array, place)
        np.testing.assert_array_equal(
            copy.array.reshape(-1), flat_of(servers, servers.table.by_tensor["fc1.weight"])
        )


async def test_shards_that_are_no_range_of_one_tensor_land_in_memory_of_their_own():
    async with servers_of(NETWORKS["local"](), **SHARDED) as servers:
        first, second, third, *_ = servers.table.by_tensor["fc1.weight"]
        (bias,) = servers.table.by_tensor["fc1.bias"]
        parts = [first, third], [second, first], [first, bias], [bias]
        landing, _ = landing_of(servers.client().puller, *parts)
        assert [landing.into(number) for number in range(4)] == [None] * 4


async def test_a_tensor_of_one_shard_is_the_answers_own_memory():
    async with servers_of(NETWORKS["local"]()) as servers:
        client = servers.client()
        (bias,) = servers.table.by_tensor["fc2.bias"]
        landing, landed = landing_of(client.puller, [bias])
        answer = np.arange(bias.size, dtype=np.float32)
        landing.arrived(0, (3,), answer, 0)
        assert np.shares_memory(client.weights.current("fc2.bias").array, answer)
        assert landed == [1]


@pytest.mark.parametrize(
    ("versions", "values"),
    [
        ((), np.zeros(10, np.float32)),
        ((1, 1), np.zeros(10, np.float32)),
        ((1,), np.zeros(9, np.float32)),
        ((1,), np.zeros(11, np.float32)),
        ((1,), np.zeros((1, 10), np.float32)),
        ((1,), np.zeros(10)),
    ],
    ids=["no versions", "versions", "short", "long", "shape", "dtype"],
)
async def test_an_answer_that_does_not_fit_its_question_is_an_invalid_message(versions, values):
    async with servers_of(NETWORKS["local"]()) as servers:
        client = servers.client()
        (bias,) = servers.table.by_tensor["fc2.bias"]
        assert bias.size == 10
        landing, landed = landing_of(client.puller, [bias])
        with pytest.raises(RemoteProtocolError, match="do not fit 1 shards of 10 values float32"):
            landing.arrived(0, versions, values, 0)
        assert landed == []
        assert client.weights.installed == 0


async def test_a_puller_tells_where_a_replica_that_joins_begins():
    async with servers_of(NETWORKS["local"]()) as servers:
        client = servers.client()
        client.client.connections["ps-0"].tick(tuple(ShardId(spec.id) for spec in servers.table.shards), 6)
        landed = asyncio.Event()
        client.puller.pull(landed.set)
        await client.client.flush()
        assert landed.is_set()
        assert client.puller.clock == 6


async def test_the_clock_of_a_pull_is_the_lowest_of_its_answers_and_counts_when_all_are_there():
    async with servers_of(NETWORKS["local"](), consistency="ssp:0", **SHARDED) as servers:
        client = servers.client()
        puller = Puller(
            network=servers.model,
            table=servers.table,
            buckets=servers.map.buckets,
            client=client.client,
            weights=client.weights,
            buffers=BufferPool(),
            clocked=True,
        )
        specs = servers.table.by_tensor["fc1.weight"]
        landing, landed = landing_of(puller, *([spec] for spec in specs))
        for number, spec in enumerate(specs):
            assert client.weights.clock == 0
            landing.arrived(number, (1,), flat_of(servers, [spec]), 6 + number)
        assert landed == [1]
        assert client.weights.clock == client.weights.current("fc1.weight").clock == 6
        assert client.weights.newest == 5 + len(specs)


async def test_a_pull_of_a_later_clock_waits_for_the_replicas_behind_and_names_them():
    waits = msgspec.structs.replace(PATIENT, answer_s=0.1)
    async with servers_of(NETWORKS["local"](), consistency="ssp:0", waits=waits) as servers:
        client, behind = servers.client(), []
        landed = asyncio.Event()

        def on_behind(place, values):
            behind.append((place, values.clock))

        client.puller.pull(landed.set, clock=2, on_behind=on_behind)
        await until(lambda: len(behind) >= 2)
        assert not landed.is_set()
        assert set(behind) == {(0, 0)}
        client.client.connections["ps-0"].tick(tuple(ShardId(spec.id) for spec in servers.table.shards), 2)
        await landed.wait()


def weights_of(**versions):
    weights = WorkerWeights()
    for name, version in versions.items():
        weights.install([TensorCopy(name, np.full(3, float(version)), (version,))])
    return weights


def test_a_snapshot_stays_as_it_was_when_something_newer_is_installed():
    weights = weights_of(a=1, b=1)
    read = weights.snapshot()
    weights.install([TensorCopy("a", np.full(3, 2.0), (2,))])
    assert read.arrays["a"].tolist() == [1.0] * 3
    assert weights.snapshot().arrays["a"].tolist() == [2.0] * 3
    assert weights.snapshot().arrays["b"] is read.arrays["b"], "what did not change is shared"
    assert weights.installed == 3


def test_installed_values_are_the_very_array():
    weights, values = WorkerWeights(), np.ones(2)
    weights.install([TensorCopy("a", values, (1,))])
    assert weights.current("a").array is values


def test_values_that_are_newer_in_no_shard_are_not_installed():
    weights = WorkerWeights()
    weights.install([TensorCopy("a", np.zeros(2), (3, 5))])
    for versions, taken in (
        ((3, 5), False),
        ((2, 4), False),
        ((3, 6), True),
        ((4, 6), True),
        ((4, 6), False),
    ):
        before = weights.current("a")
        weights.install([TensorCopy("a", np.zeros(2), versions)])
        assert (weights.current("a") is not before) == taken, versions


def test_own_pushes_are_counted_in_the_copy_that_they_went_into_and_end_with_it():
    weights = weights_of(a=1, b=1)
    stepped = {"a": weights.current("a")}
    weights.count_local_steps(stepped)
    weights.count_local_steps(stepped)
    read = weights.snapshot()
    assert read.own_applied == {"a": 2, "b": 0}
    weights.count_local_steps(stepped)
    assert read.own_applied == {"a": 2, "b": 0}, "a snapshot is of its moment"
    weights.install([TensorCopy("a", np.zeros(3), (2,))])
    assert weights.snapshot().own_applied == {"a": 0, "b": 0}
    weights.count_local_steps(stepped)
    assert weights.snapshot().own_applied == {"a": 0, "b": 0}, "the step went into a copy that is gone"


def test_threads_see_whole_versions_while_the_loop_installs():
    weights, torn, stop = weights_of(a=0), [], threading.Event()

    def read():
        while not stop.is_set():
            copy = weights.snapshot().copies["a"]
            if copy.array.min() != copy.array.max() or copy.array[0] != copy.versions[0]:
                torn.append(copy)

    threads = [threading.Thread(target=read) for _ in range(2)]
    for thread in threads:
        thread.start()
    for version in range(1, 500):
        weights.install([TensorCopy("a", np.full(3, float(version)), (version,))])
    stop.set()
    for thread in threads:
        thread.join()
    assert torn == []
    assert weights.installed == 500


def test_the_copy_with_the_newer_clock_stays_when_answers_cross():
    weights = WorkerWeights()
    weights.install([TensorCopy("w", np.full(2, 5.0), (4, 4), clock=3)])
    weights.install([TensorCopy("w", np.full(2, 9.0), (5, 2), clock=2)])
    assert weights.current("w").versions == (4, 4), "one shard is newer, but the whole is behind"
    weights.install([TensorCopy("w", np.full(2, 7.0), (5, 3), clock=3)])
    assert weights.current("w").versions == (4, 4), "of the same clock, and a shard would go back"
    weights.install([TensorCopy("w", np.full(2, 7.0), (5, 3), clock=4)])
    assert weights.current("w").versions == (5, 3), "who waits for a clock gets what has it"


@given(questions=st.permutations([(step, shard) for step in range(8) for shard in range(3)]))
def test_no_shard_goes_back_and_a_step_that_began_after_the_copy_came_replaces_it(questions):
    """Steps push to three shards, and are answered, in any order."""
    weights = WorkerWeights()
    weights.install([TensorCopy("w", np.zeros(3), (0, 0, 0))])
    applied, begun, answers, installed = [0] * 3, {}, {}, -1
    for moment, (step, shard) in enumerate(questions):
        applied[shard] += 1
        begun.setdefault(step, moment)
        answer = answers.setdefault(step, {})
        answer[shard] = applied[shard]
        if len(answer) < 3:
            continue
        before, came = weights.current("w").versions, tuple(answer[place] for place in range(3))
        weights.install([TensorCopy("w", np.zeros(3), came)])
        now = weights.current("w").versions
        assert all(new >= was for new, was in zip(now, before, strict=True))
        if begun[step] > installed:
            assert now == came
        if now != before:
            installed = moment


def test_a_copy_that_has_all_that_came_takes_its_clock_and_keeps_its_local_steps():
    weights = WorkerWeights()
    weights.install([TensorCopy("w", np.zeros(2), (4,), clock=3)])
    copy = weights.current("w")
    weights.install([TensorCopy("w", np.ones(2), (4,), clock=7)])
    assert weights.current("w") is copy
    assert copy.clock == 7


def test_the_clock_of_the_whole_only_rises_and_is_no_newer_than_the_copies_of_a_snapshot():
    weights = WorkerWeights()
    weights.install([TensorCopy("w", np.zeros(2), (1,), clock=4)])
    assert weights.snapshot().clock == 0, "other tensors of that clock have not landed"
    weights.landed(4)
    weights.landed(3)
    assert weights.snapshot().clock == 4


def test_no_snapshot_has_some_tensors_of_an_answer_without_the_others():
    weights, torn, stop = weights_of(**{f"t{n}": 0 for n in range(40)}), [], threading.Event()

    def read():
        while not stop.is_set():
            versions = {copy.versions for copy in weights.snapshot().copies.values()}
            if len(versions) > 1:
                torn.append(versions)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    thread = threading.Thread(target=read)
    thread.start()
    for version in range(1, 500):
        weights.install([TensorCopy(f"t{n}", np.zeros(1), (version,)) for n in range(40)])
    stop.set()
    thread.join()
    sys.setswitchinterval(interval)
    assert torn == []
