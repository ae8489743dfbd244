"""Pieces with many pending pushes, for a server that joins: none is larger than a member takes."""

import asyncio
from contextlib import AsyncExitStack

import numpy as np
import pytest

from adam_async.parameter_server import bundle_copy, members_watch, part_collector
from adam_async.parameter_server.part_collector import PartCollector
from adam_async.store.rules import Sgd
from tests.adam_async.store.fleets import fleet
from transport import RemoteProtocolError

ARRAYS = {"total": np.zeros(1024)}
GRADIENT = {"total": -np.ones(1024)}
CLIENTS = 4
MOST_BYTES = CLIENTS * ARRAYS["total"].nbytes
"""Less than the values and the pushes of all clients but one, with the details."""


class Refusals(list):
    """The refusals of parts of entries and pieces."""

    def __init__(self, monkeypatch):
        super().__init__()
        whole = PartCollector.add

        def add(parts, sender, message, tensors):
            try:
                return whole(parts, sender, message, tensors)
            except RemoteProtocolError as error:
                self.append(str(error))
                raise

        monkeypatch.setattr(PartCollector, "add", add)


@pytest.mark.parametrize("network", ["tcp", "local"])
async def test_a_piece_with_too_many_pending_pushes_waits_for_their_sum(monkeypatch, network):
    monkeypatch.setattr(members_watch, "INVITE_S", 0.1)
    for module in (part_collector, bundle_copy):
        monkeypatch.setattr(module, "MOST_BYTES", MOST_BYTES, raising=False)
    refusals = Refusals(monkeypatch)
    async with fleet(monkeypatch, "ps-0", "ps-1", network=network) as servers, AsyncExitStack() as stack:
        options = {"copies": 2, "min_in_sync": 1, "servers": 1, "consistency": "bsp", "replicas": CLIENTS}
        stores = await asyncio.gather(
            *[
                stack.enter_async_context(servers.open(ARRAYS, name="a-name", rule=Sgd(rate=1.0), **options))
                for _ in range(CLIENTS)
            ]
        )
        await servers.until(lambda: len(servers.in_sync("ps-0")) == 2, "the second has not joined")
        await servers.end("ps-1")
        await servers.until(lambda: servers.in_sync("ps-0") == ["ps-0"], "the second is still a member")
        steps = [asyncio.create_task(store.push_pull(GRADIENT)) for store in stores[1:]]
        served = servers.copies()["ps-0", "ps-0"]
        await servers.until(lambda: served.state.statistics().pending_contributions == 3, "none is pending")
        await servers.start("ps-1")
        await servers.until(lambda: served._copy._asked or refusals, "no piece is asked for")
        assert refusals == []
        assert servers.in_sync("ps-0") == ["ps-0"]
        found = await asyncio.gather(stores[0].push_pull(GRADIENT), *steps)
        await servers.until(lambda: len(servers.in_sync("ps-0")) == 2, "the second has not joined again")
        assert refusals == []
        assert [values["total"].tolist() for values in found] == [[1.0] * 1024] * CLIENTS
