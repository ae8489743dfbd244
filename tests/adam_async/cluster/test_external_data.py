"""External data servers: whole runs with them, and the errors of their absence."""

import asyncio
import re
from contextlib import AsyncExitStack

import numpy as np
import pytest

from adam_async.cluster.local import LocalCluster
from adam_async.controller.role import RoleSettings
from adam_async.data_server.service import DataServer
from adam_async.errors import AdamError, ConfigError, DeadlineExceeded, RoleDied, RoleFailed, RoleUnreachable
from adam_async.messages import role_table
from adam_async.model.named import digits
from adam_async.run.addresses import addresses_in
from adam_async.run.config import Config, Waits
from adam_async.run.option_sources import make_config
from adam_async.run.user_code import allow_functions
from adam_async.runtime.clock import system_entropy
from tests.adam_async.data_server.hosts import DATA, LOOPBACK, asker_of, controller_of, host_of, identity
from tests.adam_async.runs import PATIENT, tcp_network, tiny_dataset, until
from transport import HandshakeRejected, RemoteProtocolError, TcpNetwork

TOKEN = "a token of tests"  # that of `tcp_network`


def config_of(**options):
    return Config(**{"epochs": 2, "threads": 1, "rate": 0.05, "images_per_group": 4, **options})


def cluster_of(config, *hosts, **options):
    return LocalCluster(config, data=[host.address for host in hosts], token=TOKEN, spec=digits(), **options)


@pytest.fixture
def network():
    return tcp_network()


# --- whole runs ------------------------------------------------------------------------------


async def test_a_cluster_trains_with_data_from_elsewhere_and_all_else_is_as_if_they_were_its_own(network):
    async with host_of(network) as host, cluster_of(config_of(), host) as cluster:
        result = await cluster.train()
        assert [epoch.images for epoch in result.epochs] == [60, 60]
        assert result.data.items() >= DATA.info().items()
        assert cluster.config.weights == "aliased"
        assert cluster.workers[0].address.startswith("local://")
        assert cluster.data_servers == []


INVERT = "tests.adam_async.own_transform:invert"


async def test_a_host_serves_transforms_that_its_own_command_line_allows_and_no_others(network):
    config = config_of(augment=True)
    steps = [{"kind": INVERT}]
    async with host_of(network) as host, cluster_of(config, host, transforms=steps) as cluster:
        with pytest.raises(RoleFailed, match=f"cannot serve the run: host-1: .*--allow-transform {INVERT}"):
            await cluster.train()
        assert len(host.serving) == 1
    allowed = host_of(network, functions=allow_functions([INVERT]))
    async with allowed as host, cluster_of(config, host, transforms=steps) as cluster:
        result = await cluster.train()
        assert [epoch.images for epoch in result.epochs] == [60, 60]


@pytest.mark.thorough
async def test_a_data_host_joins_a_cluster_of_three_controllers(network):
    async with host_of(network) as host, cluster_of(config_of(controllers=3), host) as cluster:
        result = await cluster.train()
        assert [epoch.images for epoch in result.epochs] == [60, 60]
        (listeners,) = host.serving
        assert [listener.partition(":")[0] for listener in listeners.split(",")] == ["tcp"] * 3


async def test_the_workers_of_a_cut_model_take_their_rows_from_a_data_host(network):
    async with host_of(network) as host, cluster_of(config_of(partitions=2), host) as cluster:
        assert (await cluster.train()).epochs[-1].images == 60


async def test_two_clusters_train_from_one_host_at_a_time_and_one_after_the_other(network):
    async with host_of(network) as host:
        for _ in range(2):
            async with cluster_of(config_of(), host) as one, cluster_of(config_of(seed=1), host) as other:
                results = await asyncio.gather(one.train(), other.train())
                assert len(host.serving) == 2
            assert [result.epochs[-1].images for result in results] == [60, 60]
            await until(lambda: not host.serving)


async def test_the_addresses_may_stand_in_the_configuration(network):
    async with host_of(network) as host:
        config = config_of(data=host.address)
        async with LocalCluster(config, token=TOKEN, spec=digits()) as cluster:
            assert len((await cluster.train()).epochs) == 2


async def test_all_hosts_that_are_named_join(network):
    async with (
        host_of(network, node="one") as one,
        host_of(network, node="two") as two,
        cluster_of(config_of(), one, two) as cluster,
    ):
        assert cluster.controller.map.live("data") == ["one-1", "two-1"]
        assert len((await cluster.train()).epochs) == 2


async def test_a_cluster_over_tcp_takes_data_from_elsewhere_too(network):
    async with (
        host_of(network) as host,
        cluster_of(config_of(), host, network=network, address=LOOPBACK) as cluster,
    ):
        assert cluster.config.weights == "copy"
        assert len((await cluster.train()).epochs) == 2


async def test_a_cluster_that_ends_in_the_middle_closes_its_links(network):
    async with host_of(network) as host:
        async with cluster_of(config_of(epochs=10_000), host) as cluster, asyncio.TaskGroup() as group:
            training = group.create_task(cluster.train(), name="training")
            await until(lambda: len(cluster.driver.progress.epochs) > 1)
            training.cancel()
        await until(lambda: not host.serving)


async def test_several_data_servers_of_one_cluster_have_one_data_set():
    async with LocalCluster(config_of(data_servers=3), dataset=DATA, spec=digits()) as cluster:
        await until(lambda: len(cluster.controller.map.live("data")) == 3)
        assert cluster.controller.map.live("data") == ["data-0", "data-1", "data-2"]
        assert all(isinstance(server, DataServer) for server in cluster.data_servers)
        assert cluster.data is cluster.data_servers[0]
        assert {id(server._dataset) for server in cluster.data_servers} == {id(DATA)}
        result = await cluster.train()
    assert [epoch.images for epoch in result.epochs] == [60, 60]


# --- errors ----------------------------------------------------------------------------------


async def test_an_address_without_a_listener_is_an_error(network):
    async with host_of(network) as host:
        gone = host.address
    waits = Waits(dial_s=0.05)
    with pytest.raises(RoleUnreachable) as raised:
        async with cluster_of(config_of(waits=waits), host):
            pass
    assert str(raised.value).startswith(f"cannot reach a data server at {gone}: ")
    assert str(raised.value).endswith(f"; start one there with: adam-async data --bind {gone}")


async def test_another_role_at_the_address_is_an_error(network):
    async with controller_of(network) as controller:
        with pytest.raises(HandshakeRejected, match=re.escape(f"check the address, at {controller.address}")):
            async with asker_of(network, controller):
                pass


async def test_another_program_at_the_address_is_an_error(network):
    def talk(reader, writer):
        writer.write(b"HTTP/1.0 400 Bad Request\r\n" * 40)
        writer.close()

    async with await asyncio.start_server(talk, "127.0.0.1", 0) as server:
        address = f"tcp://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        with pytest.raises((RemoteProtocolError, RoleUnreachable), match=re.escape(address)):
            async with asker_of(network, address, waits=Waits(dial_s=0.05)):
                pass


@pytest.mark.parametrize("token", [b"another secret, as long", None])
async def test_it_refuses_another_token(network, token):
    stranger = TcpNetwork(token=token, entropy=system_entropy, rules=role_table())
    async with host_of(network) as host:
        with pytest.raises(HandshakeRejected, match="token") as raised:
            async with asker_of(stranger, host):
                pass
    assert raised.value.code == "token"
    assert host.address in str(raised.value)


async def test_it_belongs_to_a_cluster_already(network):
    async with (
        controller_of(network) as controller,
        DataServer(
            RoleSettings(
                network=network,
                address=LOOPBACK,
                identity=identity("data"),
                waits=PATIENT,
                controller=controller.address,
            ),
            DATA,
        ) as server,
        asker_of(network, server) as asker,
    ):
        with pytest.raises(
            ConfigError, match="belongs to a cluster already; name one that was started without"
        ):
            await asker.serve(controller.address)


async def test_hosts_with_different_data_are_an_error(network):
    async with (
        host_of(network, node="one") as one,
        host_of(network, node="two", dataset=tiny_dataset(50)) as two,
    ):
        with pytest.raises(ConfigError) as raised:
            async with cluster_of(config_of(), one, two):
                pass
        assert re.fullmatch(
            f"data: {one.address} has train_images 60, digest .*, but {two.address} has train_images 50, "
            "digest .*; start all data servers over the same data",
            str(raised.value),
        )
        await until(lambda: not one.serving and not two.serving)


async def test_a_host_that_does_not_answer_in_time_is_named(network):
    async def silent(link):
        link.serve(lambda request: None)
        await link.wait_closed()

    async with network.listen(LOOPBACK, identity("data"), silent) as listener:
        async with asker_of(network, listener.address, waits=Waits(prepare_s=0.05)) as asker:
            with pytest.raises(DeadlineExceeded, match=f"for the data server at {listener.address} to join"):
                await asker.serve("tcp://127.0.0.1:1")


async def test_the_loss_of_the_only_host_ends_the_run_with_its_name(network):
    host = host_of(network)
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(host)
        cluster = cluster_of(config_of(epochs=10_000, waits=Waits(grace_s=0.05, replica_s=0.3)), host)
        async with cluster, asyncio.TaskGroup() as group:
            training = group.create_task(_end_of(cluster), name="training")
            await until(lambda: len(cluster.driver.progress.epochs) > 0)
            await stack.aclose()
            error = await training
    assert isinstance(error, RoleDied)
    assert "data server died" in str(error)


async def _end_of(cluster):
    """Return the error of a training."""
    try:
        return await cluster.train()
    except AdamError as error:
        return error


# --- addresses -------------------------------------------------------------------------------


def test_addresses_are_distinguished_from_data_sets():
    assert addresses_in("digits") == addresses_in("/some/folder") == addresses_in("auto") == ()
    assert addresses_in("tcp://a:1, tcp://b:2") == ("tcp://a:1", "tcp://b:2")


@pytest.mark.parametrize(
    ("data", "claim"),
    [
        ("tcp://a:1,tcp://a:1", "data: tcp://a:1 is named twice"),
        ("tcp://a:1,digits", "data: address 'digits' is not of the form tcp://host:port"),
        ("tcp://0.0.0.0:7", "stands for every interface"),
        ("tcp://a:1,", "data: address '' is not"),
    ],
)
def test_addresses_that_cannot_be_dialled_are_refused(data, claim):
    with pytest.raises(ConfigError, match=re.escape(claim)):
        addresses_in(data)


@pytest.mark.parametrize(
    ("options", "given", "claim"),
    [
        ({}, {"dataset": DATA, "data": ["tcp://a:1"]}, "there is a dataset, and data names tcp://a:1"),
        ({"cache": "1G", "damaged": "skip"}, {"data": ["tcp://a:1"]}, "damaged=skip excludes data servers"),
        ({"data_servers": 2}, {"data": ["tcp://a:1"]}, "data_servers=2 excludes data servers at"),
        ({}, {"data": "tcp://a:1"}, "data is a list of addresses, not 'tcp://a:1'"),
        (
            {},
            {"data": ["tcp://a:1"], "functions": {"invert": np.invert}},
            "do not travel to the data servers at",
        ),
        ({"slow": ("worker-0~data-0:5ms",)}, {"data": ["tcp://a:1"]}, "there is no node 'data-0' here"),
        ({"slow": ("worker-0~data-1:5ms",)}, {"dataset": DATA}, "there is no node 'data-1' here"),
    ],
)
def test_options_that_exclude_each_other_are_refused(options, given, claim):
    with pytest.raises(ConfigError, match=claim):
        LocalCluster(make_config(options), **given)
