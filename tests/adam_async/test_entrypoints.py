"""Roles are placed where others can find them, or the reason is said."""

import re

import pytest

from adam_async.config import Waits
from adam_async.entrypoints import (
    LOOPBACK,
    Place,
    address_towards,
    check_address,
    cluster_network,
    controller,
    parameter_server,
)
from adam_async.errors import BindFailed, ConfigError
from adam_async.ports import system_entropy
from transport import BindRefused, BufferPool


def place(bind: str, *, meet: str = "", token: str | None = None) -> Place:
    buffers = BufferPool()
    return Place(
        node="node",
        bind=bind,
        controller=meet,
        network=cluster_network(token, entropy=system_entropy, buffers=buffers),
        buffers=buffers,
        waits=Waits(),
        entropy=system_entropy,
    )


async def test_roles_join_the_controller_they_are_given() -> None:
    async with (
        controller(place(LOOPBACK)) as meeting,
        parameter_server(place(LOOPBACK, meet=meeting.address)) as server,
    ):
        assert re.fullmatch(r"tcp://127\.0\.0\.1:\d+", server.address)
        await meeting.joined()  # it has no seat to wait for
        await server.joined()
        assert meeting.map.live("ps") == ["node"]


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
        async with controller(place("tcp://192.0.2.1:7070")):
            pass

    assert raised.group_contains(BindRefused) or isinstance(raised.value, BindRefused)


def test_a_token_that_can_be_guessed_is_refused() -> None:
    with pytest.raises(ConfigError, match="token of 5 bytes"):
        place(LOOPBACK, token="short")


@pytest.mark.parametrize("address", ["127.0.0.1:70", "tcp://127.0.0.1", "tcp://host:port", "tcp://0.0.0.0:7"])
def test_an_address_that_nobody_can_dial_is_refused(address: str) -> None:
    with pytest.raises(ConfigError, match="--bind"):
        check_address(address, "--bind")


async def test_a_role_listens_on_the_way_to_its_controller() -> None:
    assert await address_towards("tcp://127.0.0.1:7070") == LOOPBACK
    assert await address_towards("tcp://[::1]:7070") in (LOOPBACK, "tcp://[::1]:0")
