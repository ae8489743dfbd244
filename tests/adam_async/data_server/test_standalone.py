"""A data host serves each cluster that asks, for as long as it is wanted, and is hurt by none."""

import asyncio
import re
from dataclasses import replace

import msgspec
import pytest

from adam_async.controller.client import Membership
from adam_async.data_server import standalone as host_module
from adam_async.data_server.service import describe
from adam_async.errors import DataError, RunFailed
from adam_async.messages import GetStatistics, Statistics, pack, read_text_tensor, unpack
from adam_async.run.cluster_map import NodeRecord
from adam_async.runtime.traffic import Traffic
from tests.adam_async.data_server.hosts import DATA, asked_host, asker_of, controller_of, host_of, identity
from tests.adam_async.runs import PATIENT, tcp_network, until


@pytest.fixture
def network():
    return tcp_network()


async def test_an_asker_has_a_data_server_in_its_cluster(network):
    async with asked_host(network) as (host, controller, _):
        (node,) = controller.map.live("data")
        record = controller.map.nodes[node]
    assert node == "host-1"
    assert record.info.items() >= DATA.info().items()
    assert re.fullmatch(r"tcp://127\.0\.0\.1:\d+", record.address)
    assert record.address != host.address


async def test_a_goodbye_ends_the_data_server_and_not_the_host(network):
    async with asked_host(network) as (host, controller, asker):
        await asker.__aexit__(None, None, None)
        await until(lambda: not host.serving)
        async with asker_of(network, host) as again:
            told = await again.serve(controller.address)
            assert told == controller.map.nodes["host-2"].info


async def test_clusters_are_served_side_by_side(network):
    async with (
        host_of(network) as host,
        controller_of(network) as one,
        controller_of(network) as other,
        asker_of(network, host) as first,
    ):
        async with asker_of(network, host) as second:
            await asyncio.gather(first.serve(one.address), second.serve(other.address))
            assert len(one.map.live("data")) == len(other.map.live("data")) == 1
            assert set(host.serving) == {one.address, other.address}
        await until(lambda: set(host.serving) == {one.address})


async def test_a_link_that_breaks_ends_nothing_while_the_asker_is_in_its_cluster(network):
    driver = identity("driver")
    async with (
        host_of(network) as host,
        controller_of(network, waits=msgspec.structs.replace(PATIENT, grace_s=0.01)) as controller,
        asyncio.TaskGroup() as group,
        asker_of(network, host, driver=driver) as asker,
    ):
        membership = Membership(
            network=network,
            controller=controller.address,
            identity=driver,
            record=NodeRecord(role="driver", address="", incarnation=driver.incarnation),
            waits=PATIENT,
            traffic=Traffic("driver"),
        )
        task = group.create_task(membership.run(), name="driver")
        await membership.wait_for(lambda _: membership.joined, "the driver's seat", 30.0)
        await asker.serve(controller.address)
        (server,) = host.serving.values()

        for link in asker._links.values():
            link.abort()
        await membership.wait_for(lambda m: "host-1" in m.live("data"), "the data server", 30.0)
        async for cluster in server.changes():
            if "driver" in cluster.nodes:
                break
        assert list(host.serving.values()) == [server]

        task.cancel()
        await until(lambda: not host.serving)


async def test_a_controller_that_stays_away_ends_its_data_server_only(network, caplog):
    waits = msgspec.structs.replace(PATIENT, patience_s=0.05)
    async with host_of(network, waits=waits) as host, asker_of(network, host) as asker:
        async with controller_of(network) as controller:
            await asker.serve(controller.address)
        await until(lambda: not host.serving)
        assert "ended its service for the cluster at" in caplog.text
        assert "the controller died" in caplog.text
        async with controller_of(network) as controller:
            await asker.serve(controller.address)
            assert controller.map.live("data") == ["host-2"]


async def test_an_asker_gets_the_reason_why_its_cluster_cannot_be_joined(network):
    waits = msgspec.structs.replace(PATIENT, dial_s=0.05)
    async with host_of(network, waits=waits) as host, asker_of(network, host) as asker:
        async with controller_of(network) as controller:
            gone = controller.address
        with pytest.raises(
            RunFailed, match=f"{host.address} cannot serve: cannot reach the controller at {gone}"
        ):
            await asker.serve(gone)
        await until(lambda: not host.serving)


async def test_an_invalid_address_of_a_controller_is_refused(network):
    async with host_of(network) as host, asker_of(network, host) as asker:
        with pytest.raises(
            RunFailed, match="the controller's address 'local://controller' is not of the form"
        ):
            await asker.serve("local://controller")
        assert not host.serving


async def test_a_cluster_is_served_once_by_each_host_and_only_so_many_are(network, monkeypatch):
    async with asked_host(network) as (host, controller, _), asker_of(network, host) as other:
        with pytest.raises(RunFailed, match=r"host serves the cluster at .* already"):
            await other.serve(controller.address)
        monkeypatch.setattr(host_module, "MOST_CLUSTERS", 1)
        async with controller_of(network) as second:
            with pytest.raises(RunFailed, match="host serves 1 clusters, the maximum"):
                await other.serve(second.address)


async def test_a_hosts_statistics_name_the_clusters_that_it_serves(network):
    async with asked_host(network) as (host, controller, _):
        async with network.connect(host.address, identity("driver", "curious"), timeout_s=50.0) as link:
            reply = await link.call(pack(GetStatistics(run="")), timeout_s=50.0)
        assert unpack(reply, Statistics).node == "host"
        told = read_text_tensor(reply, dict, 1 << 20)
        assert told["serving"] == {controller.address: controller.map.nodes["host-1"].address}


async def test_the_end_of_a_host_ends_its_data_servers(network):
    async with controller_of(network) as controller:
        host = host_of(network)
        async with host, asker_of(network, host) as asker:
            await asker.serve(controller.address)
        assert not host.serving
        await until(lambda: not controller.map.live("data"))


async def test_a_data_server_that_fails_is_logged_and_leaves_the_host_alone(network, caplog):
    async with asked_host(network) as (host, _, asker):
        (server,) = host.serving.values()

        async def fail():
            raise RunFailed("its disk is gone")

        server._spawn("failing", fail())
        await until(lambda: not host.serving)
        assert "its disk is gone" in caplog.text
        async with controller_of(network) as second:
            await asker.serve(second.address)
            assert second.map.live("data") == ["host-2"]


def test_a_description_of_the_data_that_no_map_has_room_for_is_refused_at_once(network):
    dataset = replace(DATA, source="x" * 33_000)
    with pytest.raises(
        DataError, match=r"above the limit of 32768: shorten .* its source \(33000 characters\)"
    ):
        host_of(network, dataset=dataset)


def test_names_of_classes_that_no_map_has_room_for_are_left_out_with_a_warning(network, caplog):
    few, many = (tuple(f"class {n}" for n in range(classes)) for classes in (1000, 9000))

    assert describe(replace(DATA, num_classes=1000, class_names=few))["class_names"] == list(few)
    assert "class_names" not in describe(replace(DATA, num_classes=9000, class_names=many))
    assert "the names of 9000 classes take more than the 32768 bytes" in caplog.text
