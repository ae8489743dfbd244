"""`ssp:S`: distances of replicas, their reads, and no wait without an end.

Two witnesses: the servers' own clock tables, looked at whenever a push comes in and a group is admitted;
and the record of the run, in which each group's reads stand beside the order in which pushes were applied.
"""

import asyncio
import dataclasses
from contextlib import AsyncExitStack, contextmanager

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adam_async.driver.replay.decode import load_record, make_recording
from adam_async.model.named import digits
from adam_async.model.network import Network
from adam_async.parameter_server.at_once import ShortWay
from adam_async.parameter_server.events import PushArrived
from adam_async.parameter_server.state import ServerState
from adam_async.run.config import Config
from adam_async.run.partition import table_of
from adam_async.worker.puller import WorkerWeights
from adam_async.worker.stepper import Stepper
from dataflow.errors import NodeFailed
from tests.adam_async.cluster.test_elastic import joiner
from tests.adam_async.runs import (
    NETWORKS,
    PATIENT,
    SHARDED,
    TRAP,
    TRAP_LAYERS,
    TRAPPED,
    Uneven,
    cluster_of,
    tiny_dataset,
    train,
    until,
    with_frozen,
)
from tests.transport.testing import Faults

WAITS = msgspec.structs.replace(PATIENT, clock_s=20.0)


@contextmanager
def watched_gaps(frozen=frozenset()):
    """Note, for each push and admission of any run, by how much it led the slowest live replica.

    Shards of frozen tensors are left out: what is read of them is the same at every clock.
    """
    pushes, admissions, servers = [], [], []
    handle, take, admit = ServerState.handle, ShortWay.take, Stepper.admit

    def leads(state, push):
        if not any(state is known for known in servers):
            servers.append(state)
        ours = [state.shards[number] for number in push.shards if number in state.shards]
        return [push.clock - shard.tables.slowest_clock() for shard in ours if shard.clocks]

    def handled(state, event):
        if isinstance(event, PushArrived):
            pushes.extend(leads(state, event.push))
        return handle(state, event)

    def taken(short, request, push, **options):
        found, is_taken = leads(short._state, push), take(short, request, push, **options)
        pushes.extend(found if is_taken else ())  # otherwise it is handled
        return is_taken

    def admitted(stepper, group):
        given = admit(stepper, group)
        shards = [shard for state in servers for shard in state.shards.values() if shard.clocks]
        slowest = [shard.tables.slowest_clock() for shard in shards if shard.spec.tensor not in frozen]
        admissions.append(given.step.number - min(slowest, default=0))
        return given

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(ServerState, "handle", handled)
        patched.setattr(ShortWay, "take", taken)
        patched.setattr(Stepper, "admit", admitted)
        yield pushes, admissions


def check_reads(result, slack):
    """From the record: what each group read has in it all pushes of all replicas below its bound."""
    header, logs = load_record(result.record, origin="the run")
    recording = make_recording(header, logs, result.model)
    checked = 0
    for order in recording.orders:
        if not len(order.clocks):
            continue  # of a frozen layer
        for reads in recording.reads.values():
            # How many pushes had been applied when the version that a group read was made.
            batches = np.searchsorted(order.versions, reads.versions[:, order.shard], side="right")
            applied = order.bounds[batches]
            for clock, count in zip(reads.clocks, applied, strict=True):
                bound = clock - 1 - slack
                missing = order.clocks[count:] <= bound
                assert not missing.any(), (order.shard, reads.replica, clock, order.clients[count:][missing])
                checked += 1
    return checked


@pytest.mark.slow
@settings(max_examples=6)
@given(
    slack=st.integers(0, 3),
    replicas=st.integers(2, 4),
    push_every=st.integers(1, 3),
    pull_every=st.integers(1, 3),
    images_per_group=st.sampled_from([1, 4, 7, 40]),
    in_flight=st.integers(1, 4),
    slow=st.integers(0, 3),
    frozen=st.booleans(),
    sharded=st.booleans(),
)
async def test_no_replica_leads_by_more_than_the_bound_and_reads_have_all_that_is_below_it(
    slack, replicas, push_every, pull_every, images_per_group, in_flight, slow, frozen, sharded
):
    config = Config(
        consistency=f"ssp:{slack}",
        epochs=2,
        threads=1,
        rate=0.01,
        record=True,
        replicas=replicas,
        push_every=push_every,
        pull_every=pull_every,
        images_per_group=images_per_group,
        in_flight=in_flight,
        waits=WAITS,
        **(SHARDED if sharded else {}),
    )
    faults = {
        f"worker-{replica}": Faults(delay=0.8 if replica == slow else 0.1, delay_s=0.001)
        for replica in range(replicas)
    }
    spec = with_frozen(digits(), "conv2d") if frozen else digits()
    with watched_gaps(Network(spec).frozen) as (pushes, admissions):
        result = await train(config, Uneven(NETWORKS["local"](), faults), spec=spec)
    assert [epoch.images for epoch in result.epochs] == [60, 60]
    groups = 2 * -(-60 // images_per_group)
    assert len(admissions) == groups
    assert max(admissions) <= slack
    assert max(pushes) <= slack + 1
    trained = [shard for shard in _shards(config, result.model) if shard.tensor not in result.model.frozen]
    assert check_reads(result, slack) == groups * len(trained)


def _shards(config, model):
    table = table_of(model, shard_bytes=config.shard_bytes)
    return table.shards


async def _unheard():
    """Die without a goodbye."""


@pytest.mark.slow
@settings(max_examples=6)
@given(
    mode=st.sampled_from(
        [
            {"consistency": "ssp:0"},
            {"consistency": "ssp:2"},
            {"consistency": "bsp"},
            {"consistency": "bsp", "lag": 1},
        ]
    ),
    push_every=st.integers(1, 3),
    threads=st.integers(1, 2),
    leaves_at=st.integers(0, 50),
    joins_at=st.integers(0, 50),
    victim=st.integers(0, 2),
    slow=st.integers(0, 2),
    says_goodbye=st.booleans(),
)
async def test_replicas_that_come_and_go_delay_no_other_and_every_image_is_trained_once(
    mode, push_every, threads, leaves_at, joins_at, victim, slow, says_goodbye
):
    config = Config(
        epochs=2,
        threads=threads,
        rate=0.01,
        replicas=3,
        push_every=push_every,
        images_per_group=2,
        read_ahead=4,
        waits=msgspec.structs.replace(WAITS, grace_s=0.02),
        **mode,
        **SHARDED,
    )
    network = Uneven(NETWORKS["local"](), {f"worker-{slow}": Faults(delay=0.5, delay_s=0.001)})
    with watched_gaps() as (pushes, admissions):
        async with AsyncExitStack() as stack:
            cluster = await stack.enter_async_context(cluster_of(config, network))
            group = await stack.enter_async_context(asyncio.TaskGroup())
            training = group.create_task(cluster.train(), name="train")

            def reached(groups):
                told = cluster.data.state.statistics()
                return training.done() or (told.epoch - 1) * 30 + told.finished >= groups

            for at, comes in sorted([(leaves_at, False), (joins_at, True)]):
                await until(lambda at=at: reached(at))
                if comes:
                    await stack.enter_async_context(joiner(cluster, "worker-9"))
                else:
                    worker = cluster.workers[victim]
                    if not says_goodbye:
                        worker._goodbye = _unheard
                    await worker.__aexit__(None, None, None)
            result = await training
            cluster.data.state.check_invariants()
    assert [epoch.images for epoch in result.epochs] == [60, 60]
    assert len(admissions) >= 60
    assert max(admissions) <= config.slack
    assert max(pushes) <= config.slack + 1


@pytest.mark.thorough
@pytest.mark.parametrize("mode", ["asp", "ssp:0", "ssp:2", "bsp"])
async def test_refused_pushes_delay_no_replica(mode):
    dataset = tiny_dataset()
    dataset.train_images[17].reshape(-1)[0] = TRAP
    config = Config(
        consistency=mode,
        epochs=2,
        threads=1,
        rate=0.01,
        replicas=3,
        images_per_group=4,
        weights="copy",
        keep_going=True,
        waits=WAITS,
        **SHARDED,
    )
    with watched_gaps() as (pushes, _):
        result = await train(config, dataset=dataset, spec=TRAPPED, layers=TRAP_LAYERS)
    assert [epoch.images for epoch in result.epochs] == [60, 60]
    servers = [told for node, told in result.statistics.items() if node.startswith("ps-")]
    assert sum(told.refused for told in servers) == 2 * sum(len(told.versions) for told in servers)
    assert all(np.isfinite(values).all() for values in result.weights.values())
    if config.slack is not None:
        assert max(pushes) <= config.slack + 1


async def test_without_a_bound_replicas_do_get_farther_apart():
    config = Config(
        epochs=1,
        threads=1,
        rate=0.01,
        replicas=2,
        images_per_group=1,
        weights="copy",
        waits=WAITS,
        in_flight=1,
    )
    network = Uneven(NETWORKS["local"](), {"worker-1": Faults(delay=1.0, delay_s=0.005)})
    with watched_gaps() as (pushes, admissions):
        await train(config, network)
    assert max(pushes) > 4
    assert admissions == []


@pytest.mark.parametrize("mode", ["ssp:1", "bsp"])
async def test_a_group_that_read_too_little_ends_the_run_instead_of_being_pushed(mode, monkeypatch):
    take = WorkerWeights.snapshot

    def late(weights):
        snapshot = take(weights)
        return dataclasses.replace(snapshot, clock=min(snapshot.clock, 2))

    monkeypatch.setattr(WorkerWeights, "snapshot", late)
    config = Config(
        epochs=1, threads=1, rate=0.01, replicas=2, images_per_group=2, waits=WAITS, consistency=mode
    )
    claim = r"step \d+ of replica [01] read values of clock 2, and needs those of \d+"
    with pytest.raises(NodeFailed, match=f"RunFailed: {claim}"):
        await train(config)
