"""Every kind of link passes the same suite, on every loop."""

import hashlib
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.transport.conformance import CHECKS, Check
from tests.transport.testing import FaultyNetwork, check_link, link_pair, open_rules
from transport import LinkConfig, LocalNetwork, Network, Region, Request, TcpNetwork
from transport.shared import SharedLink
from transport.tensors import Tensor


def entropy(count: int) -> bytes:
    return hashlib.shake_128(b"test").digest(count)


def tcp() -> Network:
    return TcpNetwork(token=b"a token of tests", entropy=entropy, rules=open_rules())


def shared() -> Network:
    config = LinkConfig(link="shared")
    return TcpNetwork(token=b"a token of tests", entropy=entropy, rules=open_rules(), config=config)


def local() -> Network:
    return LocalNetwork(rules=open_rules())


def faultless() -> Network:
    return FaultyNetwork(local(), random.Random(1))


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("make_network", [tcp, shared, local, faultless], ids=lambda make: make.__name__)
async def test_link_keeps_its_promise(make_network: Callable[[], Network], check: Check) -> None:
    async with link_pair(make_network()) as (near, far):
        await check(near, far)


class Regions:
    """NumPy, but filled arrays lie in memory that links hand over."""

    def __getattr__(self, name: str) -> Any:
        return getattr(np, name)

    def full(self, size: int, value: float, dtype: type[np.float32]) -> Tensor:
        array = Region.allocate(max(4 * size, 1))[: 4 * size].view(dtype)
        array[:] = value
        return array


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
async def test_a_link_keeps_its_promise_with_arrays_that_are_read_in_place(
    check: Check, monkeypatch: pytest.MonkeyPatch
) -> None:
    serve = SharedLink.serve

    def serve_in_place(link: SharedLink, handler: Callable[[Request], None], **options: Any) -> None:
        serve(link, handler, in_place=("ask",), **options)

    monkeypatch.setattr(SharedLink, "serve", serve_in_place)
    monkeypatch.setattr("tests.transport.conformance.np", Regions())
    async with link_pair(shared()) as (near, far):
        await check(near, far)


@pytest.mark.slow
async def test_check_link_runs_all_checks_on_tcp() -> None:
    network = tcp()
    await check_link(lambda: link_pair(network))


async def test_check_link_names_the_broken_promise() -> None:
    network = LocalNetwork(rules=open_rules("ask"))
    with pytest.raises(AssertionError, match="a_call_brings_back_its_reply"):
        await check_link(lambda: link_pair(network))
