"""Roles listen at reachable addresses, or fail with the reason."""

import re
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from adam_async.cluster.networks import LOOPBACK, address_towards, cluster_network, memory_budget, network_for
from adam_async.cluster.roles.controller import controller
from adam_async.cluster.roles.parameter_server import parameter_server
from adam_async.cluster.roles.place import Place
from adam_async.controller.log_file import LogFile
from adam_async.errors import BindFailed, ConfigError
from adam_async.run.config import Config, Waits
from adam_async.runtime.clock import system_entropy
from adam_async.runtime.disk import Disk
from transport import BindRefused, BufferPool


def place(bind: str, *, controllers: str = "", token: str | None = None, node: str = "node") -> Place:
    buffers = BufferPool()
    return Place(
        node=node,
        bind=bind,
        controller=controllers,
        network=cluster_network(token, entropy=system_entropy, buffers=buffers),
        buffers=buffers,
        waits=Waits(),
        entropy=system_entropy,
    )


async def test_roles_join_the_controller_they_are_given() -> None:
    async with (
        controller(place(LOOPBACK)) as leader,
        parameter_server(place(LOOPBACK, controllers=leader.address)) as server,
    ):
        assert re.fullmatch(r"tcp://127\.0\.0\.1:\d+", server.address)
        await leader.joined()  # a controller is no member
        await server.joined()
        assert leader.map.live("ps") == ["node"]


async def test_a_taken_address_is_named() -> None:
    async with controller(place(LOOPBACK)) as first:
        with pytest.raises(BindFailed) as raised:
            async with controller(place(first.address)):
                pass

    assert str(raised.value) == (
        f"cannot listen on {first.address}: address already in use; choose another with --bind"
    )


async def test_an_address_that_others_reach_needs_a_token() -> None:
    with pytest.raises((BindRefused, ExceptionGroup)) as raised:
        async with controller(place("tcp://0.0.0.0:0")):
            pass

    assert raised.group_contains(BindRefused) or isinstance(raised.value, BindRefused)


def test_a_token_that_can_be_guessed_is_refused() -> None:
    with pytest.raises(ConfigError, match="token of 5 bytes"):
        place(LOOPBACK, token="short")


async def test_a_role_listens_on_the_way_to_its_controller() -> None:
    assert await address_towards("tcp://127.0.0.1:7070") == LOOPBACK
    assert await address_towards("tcp://[::1]:7070") in (LOOPBACK, "tcp://[::1]:0")
    assert await address_towards("tcp://127.0.0.1:7070,tcp://127.0.0.1:7071") == LOOPBACK


async def test_a_controller_on_another_machine_decides_where_a_role_listens() -> None:
    try:
        alone = await address_towards("tcp://192.0.2.1:7070")
    except ConfigError:
        pytest.skip("this machine has no way to other networks")
    assert await address_towards("tcp://127.0.0.1:7070,tcp://192.0.2.1:7070") == alone


@pytest.mark.thorough
async def test_three_controllers_form_one_group(tmp_path: Path) -> None:
    names = ["controller-1", "controller-2", "controller-3"]
    async with AsyncExitStack() as stack:
        disk = await stack.enter_async_context(Disk())
        group = [
            await stack.enter_async_context(
                controller(place(LOOPBACK, node=name), alone=False, file=LogFile(disk, tmp_path / name))
            )
            for name in names
        ]
        peers = {name: each.address for name, each in zip(names, group, strict=True)}
        for each in group:
            each.group.set_addresses(peers)
        controllers = ",".join(peers.values())
        server = await stack.enter_async_context(parameter_server(place(LOOPBACK, controllers=controllers)))
        await server.joined()
        leading = [each for each in group if each.group.leads]
        assert [each.map.live("ps") for each in leading] == [["node"]]
    assert all((tmp_path / name / "controller.log").stat().st_size for name in names)


async def test_a_controller_with_a_file_goes_on_where_it_was(tmp_path: Path) -> None:
    versions = []
    async with Disk() as disk:
        for _ in range(2):
            async with (
                controller(place(LOOPBACK, node="c"), file=LogFile(disk, tmp_path)) as leader,
                parameter_server(place(LOOPBACK, controllers=leader.address)) as server,
            ):
                await server.joined()
                versions.append(leader.map.version)
                assert leader.map.live("ps") == ["node"]
    assert versions[1] > versions[0]


def test_the_links_of_a_role_have_checksums_by_option() -> None:
    for checksum in ("auto", "on", "off"):
        network = cluster_network(None, entropy=system_entropy, buffers=BufferPool(), checksum=checksum)
        assert network.config.checksum == checksum


def test_a_run_sets_the_checksums_and_the_budget_of_its_links() -> None:
    config = Config(memory_budget="2M", checksum="on")
    network = network_for(config, None, entropy=system_entropy, buffers=BufferPool())
    assert (network.config.checksum, network.budget.limit_bytes) == ("on", 2 << 20)
    with pytest.raises(ConfigError, match=r"^memory_budget must be at least 1M, not '1K'"):
        Config(memory_budget="1K")


def test_the_links_of_a_role_share_its_budget() -> None:
    for budget, limit in ((None, 512 << 20), (memory_budget("1G"), 1 << 30)):
        network = cluster_network(None, entropy=system_entropy, buffers=BufferPool(), budget=budget)
        assert network.budget.limit_bytes == limit
    with pytest.raises(ConfigError, match=r"^--memory-budget must be a size such as 512M or 4G, not 'much'"):
        memory_budget("much")
    for few in ("0", "1K"):
        with pytest.raises(ConfigError, match=f"^--memory-budget must be at least 1M, not '{few}'"):
            memory_budget(few)
