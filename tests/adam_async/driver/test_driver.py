"""Errors of a driver in a cluster that does not fit its run, and its requests."""

import asyncio
import re
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace

import msgspec
import numpy as np
import pytest

from adam_async.controller.client import Membership
from adam_async.controller.role import RoleSettings
from adam_async.controller.service import Controller
from adam_async.data_server.service import DataServer
from adam_async.driver.driver import Driver
from adam_async.driver.readiness import joined_roles
from adam_async.driver.settings import DriverSettings
from adam_async.errors import LOST_SHARDS, DeadlineExceeded, RoleDied, RunFailed, first_cause
from adam_async.model.named import digits
from adam_async.model.network import Network
from adam_async.parameter_server.service import ParameterServer
from adam_async.run.cluster_map import ClusterMap, NodeRecord, ready_word, replica_generation
from adam_async.run.config import Config, Waits
from adam_async.runtime.traffic import Traffic
from adam_async.worker.run_session import ComputeSettings
from adam_async.worker.service import ModelWorker
from tests.adam_async.runs import (
    NETWORKS,
    address_of,
    cluster_of,
    entropy_of,
    local_network,
    tiny_dataset,
    until,
)
from transport import BufferPool, Identity

SHORT = Waits(dial_s=0.1, call_s=30.0, patience_s=30.0, prepare_s=0.2, drain_s=30.0)
OWN = Identity(role="driver", node="driver-2", incarnation=9)


def config_of(**options):
    return Config(**{"epochs": 1, "threads": 1, "images_per_group": 10, "rate": 0.05, **options})


def driver_of(network, controller, config, identity=OWN):
    settings = DriverSettings(network=network, controller=controller, identity=identity, threads=1)
    return Driver(config, settings)


async def failure_of(driver, *, begin=lambda: True):
    """Train with a driver of its own, and return the error."""
    with pytest.raises(Exception) as failure:
        async with driver:
            await until(begin)
            await driver.train()
    return first_cause(failure.value)


async def test_without_a_data_server_the_wait_is_named():
    network = local_network()
    identity = Identity(role="controller", node="controller", incarnation=1)
    async with Controller(
        RoleSettings(network=network, address="local://", identity=identity, waits=SHORT)
    ) as controller:
        error = await failure_of(driver_of(network, controller.address, config_of(waits=SHORT)))
    assert isinstance(error, DeadlineExceeded)
    assert str(error) == "waited 0.2 s for a data server to join"


async def test_a_driver_leaves_the_cluster_after_its_run():
    async with cluster_of(config_of()) as cluster:
        async with driver_of(cluster.network, cluster.controller.address, config_of()) as driver:
            await driver.train()
        await until(lambda: not cluster.driver.map.nodes[OWN.node].live)
        assert cluster.driver.map.nodes[OWN.node].left


async def test_missing_roles_are_named_with_the_joined_ones():
    async with cluster_of(config_of()) as cluster:
        wanting = config_of(replicas=3, servers=2, waits=SHORT)
        driver = driver_of(cluster.network, cluster.controller.address, wanting)
        error = await failure_of(driver, begin=lambda: OWN.node in driver.map.nodes)
    assert isinstance(error, DeadlineExceeded)
    # The data server is ready without other roles; a slow machine may be late.
    assert re.fullmatch(
        r"waited 0\.2 s for 2 parameter server\(s\), a data server and 3 worker\(s\); joined so far: "
        r"data-0 \((not )?ready\), ps-0 \(not ready\), worker-0 \(not ready\)",
        str(error),
    )


async def test_a_run_of_cut_replicas_waits_for_all_their_workers():
    async with cluster_of(config_of()) as cluster:
        wanting = config_of(replicas=2, partitions=3, waits=SHORT)
        driver = driver_of(cluster.network, cluster.controller.address, wanting)
        error = await failure_of(driver, begin=lambda: OWN.node in driver.map.nodes)
    assert isinstance(error, DeadlineExceeded)
    assert "a data server and 6 worker(s) (3 for each of 2 replica(s)); joined so far" in str(error)


def test_joined_roles_are_listed_with_their_readiness_and_lost_ones_left_out():
    def node(role, *, ready="", live=True, replica=-1):
        return NodeRecord(
            role=role, address="local://x", incarnation=1, ready=ready, live=live, replica=replica
        )

    here = ClusterMap(
        nodes={
            "worker-0": node(
                "worker", ready=ready_word("an older run", replica_generation([(1, 0)], 1)), replica=0
            ),
            "worker-1": node("worker", ready=ready_word("run", replica_generation([(1, 0)], 1)), replica=1),
            "data-0": node("data", ready="run"),
            "ps-0": node("ps", live=False),
            "driver": node("driver"),
        }
    )
    assert joined_roles(here, "run") == (
        "joined so far: data-0 (ready), worker-0 (not ready), worker-1 (ready)"
    )
    assert joined_roles(ClusterMap(), "run") == "joined so far: none"


@pytest.mark.parametrize("network", NETWORKS)
async def test_without_a_controller_the_error_names_its_address(network):
    address = {"local": "local://nobody", "tcp": "tcp://127.0.0.1:1"}[network]
    waits = msgspec.structs.replace(SHORT, prepare_s=30.0)
    error = await failure_of(driver_of(NETWORKS[network](), address, config_of(waits=waits)))
    assert isinstance(error, RoleDied)
    assert str(error).startswith(f"cannot reach the controller at {address}: ")
    assert "died" not in str(error)


async def test_a_second_driver_is_refused_while_a_run_is_in_progress_and_the_run_goes_on():
    async with cluster_of(config_of(epochs=10_000)) as cluster, asyncio.TaskGroup() as group:
        training = group.create_task(cluster.train(), name="train")
        await until(lambda: bool(cluster.controller.map.results))
        error = await failure_of(driver_of(cluster.network, cluster.controller.address, config_of()))
        assert isinstance(error, RunFailed)
        assert re.search("run driver-.*-1 is in progress, and its driver driver is live", str(error))
        epochs = len(cluster.controller.map.results)
        await until(lambda: len(cluster.controller.map.results) > epochs)
        training.cancel()


async def test_a_second_driver_trains_on_the_same_roles_after_the_first():
    config = config_of(in_flight=1, weights="copy")
    async with cluster_of(config) as cluster:
        first = await cluster.train()
        async with driver_of(cluster.network, cluster.controller.address, config) as other:
            second = await other.train()
    for name, values in first.weights.items():
        np.testing.assert_array_equal(second.weights[name], values)


@asynccontextmanager
async def roles_of(network, address, waits):
    """A data server, a parameter server and a worker with one controller."""
    scheme = address.partition("://")[0]

    def settings(role):
        return RoleSettings(
            network=network,
            address={"local": "local://", "tcp": "tcp://127.0.0.1:0"}[scheme],
            identity=Identity(role=role, node=f"{role}-0", incarnation=7),
            waits=waits,
            controller=address,
        )

    compute = ComputeSettings(threads=1, in_flight=1)
    async with (
        DataServer(settings("data"), tiny_dataset()),
        ParameterServer(settings("ps"), buffers=BufferPool()),
        ModelWorker(settings("worker"), compute, buffers=BufferPool(), entropy=entropy_of("worker")),
    ):
        yield


@pytest.mark.parametrize("evaluation", ["wait", "concurrent"])
@pytest.mark.parametrize("links", NETWORKS)
async def test_a_controller_that_is_started_again_ends_the_run_at_once_and_serves_the_next(links, evaluation):
    network = NETWORKS[links]()
    waits = msgspec.structs.replace(SHORT, dial_s=30.0, prepare_s=30.0, grace_s=30.0)

    def controller_of(address, incarnation):
        identity = Identity(role="controller", node="controller", incarnation=incarnation)
        return Controller(RoleSettings(network=network, address=address, identity=identity, waits=waits))

    async with AsyncExitStack() as stack:
        first = await stack.enter_async_context(controller_of(address_of(network), 1))
        address = first.address
        await stack.enter_async_context(roles_of(network, address, waits))
        endless = config_of(epochs=10_000, waits=waits, evaluation=evaluation)
        driver = await stack.enter_async_context(driver_of(network, address, endless))
        async with asyncio.TaskGroup() as group:
            training = group.create_task(outcome_of(driver.train()), name="train")
            await until(lambda: bool(first.map.results))
            await first.__aexit__(None, None, None)
            second = await stack.enter_async_context(controller_of(address, 2))
        error = training.result()
        assert isinstance(error, RunFailed)
        assert "was replaced by none: the controller was started again" in str(error)
        other = replace(OWN, node="driver-3")
        another = driver_of(network, address, config_of(waits=waits), other)
        result = await (await stack.enter_async_context(another)).train()
        assert [epoch.images for epoch in result.epochs] == [60]
        assert second.map.run.driver == "driver-3"


async def outcome_of(work):
    """Return the first error of a coroutine, or its result."""
    try:
        return await work
    except Exception as error:
        return first_cause(error)


@asynccontextmanager
async def ghost_of(cluster):
    """Membership of a parameter server that never gets ready; the first one by name."""
    identity = Identity(role="ps", node="a-ghost", incarnation=3)
    nowhere = {"local": "local://nobody", "tcp": "tcp://127.0.0.1:1"}
    address = nowhere[cluster.controller.address.partition("://")[0]]
    membership = Membership(
        network=cluster.network,
        controller=cluster.controller.address,
        identity=identity,
        record=NodeRecord(role="ps", address=address, incarnation=3),
        waits=SHORT,
        traffic=Traffic(identity.node),
    )
    async with asyncio.TaskGroup() as group:
        sitting = group.create_task(membership.run(), name="ghost")
        await until(lambda: membership.joined)
        yield
        sitting.cancel()


@pytest.mark.parametrize("resumes", [False, True], ids=["anew", "resumed"])
@pytest.mark.parametrize("network", NETWORKS)
async def test_a_server_that_is_lost_before_training_is_replaced_by_another(network, resumes, tmp_path):
    waits = Waits(grace_s=0.05, dial_s=30.0)
    # One form of gradients, because TCP would send factors, whose products have other roundings.
    config = config_of(
        epochs=2, weights="copy", in_flight=1, schedule="constant", protocol="delta", waits=waits
    )
    async with cluster_of(config) as cluster:
        whole = await cluster.train()
    if resumes:
        async with cluster_of(msgspec.structs.replace(config, epochs=1), checkpoint=tmp_path) as cluster:
            await cluster.train()
    cluster = cluster_of(config, NETWORKS[network](), **({"resume": tmp_path} if resumes else {}))
    async with cluster, asyncio.TaskGroup() as group:
        async with ghost_of(cluster):
            training = group.create_task(cluster.train(), name="train")
            await until(lambda: "a-ghost" in cluster.controller.map.buckets)
        result = await training
    assert result.epochs[0].images == result.epochs[1].images == 60
    for name, values in whole.weights.items():
        np.testing.assert_array_equal(result.weights[name], values)
    events = {event["event"] for event in result.events}
    assert events >= {"a-ghost died", "a-ghost was lost before training began: the run is placed anew"}


async def test_a_server_lost_before_training_is_named_if_no_other_takes_its_place():
    waits = Waits(grace_s=0.05, prepare_s=2.0)
    async with cluster_of(config_of(weights="copy", waits=waits)) as cluster, asyncio.TaskGroup() as group:
        await cluster.servers[0].joined()
        await cluster.servers[0].__aexit__(None, None, None)
        async with ghost_of(cluster):
            training = group.create_task(outcome_of(cluster.train()), name="train")
            await until(lambda: "a-ghost" in cluster.controller.map.buckets)
        error = await training
    assert isinstance(error, RoleDied)
    assert str(error).startswith(
        "a-ghost died: and no other server took its place: waited 2 s for 1 parameter server(s), a data "
        "server and "
    )


async def test_a_server_that_is_lost_in_training_ends_the_run():
    config = config_of(epochs=10_000, servers=2, weights="copy", waits=Waits(grace_s=0.05))
    async with cluster_of(config) as cluster, asyncio.TaskGroup() as group:
        training = group.create_task(outcome_of(cluster.train()), name="train")
        await until(lambda: bool(cluster.controller.map.results))
        await cluster.servers[1].__aexit__(None, None, None)
        error = await training
    assert isinstance(error, RoleDied)
    assert str(error) == f"ps-1 died: {LOST_SHARDS}"


async def test_a_driver_that_leaves_ends_its_run():
    async with cluster_of(config_of(epochs=10_000, waits=Waits(grace_s=0.05))) as cluster:
        driver = driver_of(cluster.network, cluster.controller.address, config_of(epochs=10_000))
        async with driver, asyncio.TaskGroup() as group:
            training = group.create_task(driver.train(), name="train")
            await until(lambda: bool(cluster.controller.map.results))
            training.cancel()
        assert cluster.controller.map.run.phase == "finished"


async def test_evaluation_returns_the_share_of_correctly_classified_images():
    dataset = tiny_dataset()
    async with cluster_of(config_of(threads=3)) as cluster:
        result = await cluster.train()
        model = Network(digits())
        again = await cluster.driver.evaluate(model, result.weights)
    expected = np.mean(model.predict(result.weights, dataset.test_images) == dataset.test_labels)
    assert result.test_accuracy == again == pytest.approx(float(expected))


async def test_an_evaluation_waits_for_a_data_server_and_then_names_it():
    network, waits = local_network(), msgspec.structs.replace(SHORT, replica_s=0.1)
    identity = Identity(role="controller", node="controller", incarnation=1)
    async with (
        Controller(
            RoleSettings(network=network, address="local://", identity=identity, waits=SHORT)
        ) as controller,
        driver_of(network, controller.address, config_of(waits=waits)) as driver,
    ):
        with pytest.raises(RoleDied, match=r"the data server died: no other was live for 0\.1 s"):
            await driver.evaluate(Network(digits()), {})


async def test_a_worker_with_an_invalid_address_does_not_end_the_run():
    stray = Identity(role="worker", node="worker-9", incarnation=9)
    async with cluster_of(config_of(epochs=3)) as cluster, asyncio.TaskGroup() as group:
        member = Membership(
            network=cluster.network,
            controller=cluster.controller.address,
            identity=stray,
            record=NodeRecord(role="worker", address="tcp://127.0.0.1:1", incarnation=9),
            waits=cluster.config.waits,
            traffic=Traffic("worker-9"),
        )
        joined = group.create_task(member.run(), name="worker-9")
        await until(lambda: "worker-9" in cluster.controller.map.nodes)
        result = await cluster.train()
        joined.cancel()
    assert len(result.epochs) == 3


async def test_every_node_is_heard_in_the_statistics():
    async with cluster_of(config_of(replicas=2, servers=2)) as cluster:
        result = await cluster.train()
    assert set(result.statistics) >= {"driver", "data-0", "ps-0", "ps-1", "worker-0", "worker-1"}
    assert {node: counts.node for node, counts in result.statistics.items()} == {
        node: node for node in result.statistics
    }


async def test_results_can_be_printed():
    async with cluster_of(config_of()) as cluster:
        result = await cluster.train()
    (epoch,) = result.epochs
    assert re.fullmatch(
        r"epoch 1: loss \d\.\d{4}, test accuracy \d+\.\d\d%, 60 images in \d\.\d\d s", str(epoch)
    )
    assert re.fullmatch(r"<RunResult digits 1 epochs, test accuracy \d+\.\d\d%>", repr(result))
