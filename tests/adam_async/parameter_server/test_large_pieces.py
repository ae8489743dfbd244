"""Pieces with many pending pushes, for a server that joins: none is larger than a member takes."""

import asyncio
from contextlib import AsyncExitStack, asynccontextmanager

import numpy as np
import pytest

from adam_async.model.rules import Sgd
from adam_async.parameter_server import bundle_copy, log_entries, members_watch
from adam_async.parameter_server.log_entries import PartCollector
from adam_async.parameter_server.service import ParameterServer
from adam_async.parameter_server.statistics import count_server
from tests.adam_async.store.fleets import fleet
from transport import RemoteProtocolError

NETWORKS = pytest.mark.parametrize("network", ["tcp", "local"])
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


@asynccontextmanager
async def waiting(monkeypatch, network):
    """A bundle with the pushes of all clients but one, and a server that waits for a piece of it.

    Yields the servers, the stores of the clients, the copy of the bundle, the steps and the refusals.
    """
    monkeypatch.setattr(members_watch, "INVITE_S", 0.1)
    bound(monkeypatch, MOST_BYTES)
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
        await servers.until(
            lambda: count_server([served.state]).pending_contributions == 3, "none is pending"
        )
        await servers.start("ps-1")
        await servers.until(lambda: served._copy._asked or refusals, "no piece is asked for")
        assert refusals == []
        assert servers.in_sync("ps-0") == ["ps-0"]
        yield servers, stores, served._copy, steps, refusals


def bound(monkeypatch, most_bytes):
    """Bound the size of entries and pieces."""
    for module in (log_entries, bundle_copy):
        monkeypatch.setattr(module, "MOST_BYTES", most_bytes, raising=False)


@NETWORKS
async def test_a_piece_with_too_many_pending_pushes_waits_for_their_sum(monkeypatch, network):
    async with waiting(monkeypatch, network) as (servers, stores, _, steps, refusals):
        found = await asyncio.gather(stores[0].push_pull(GRADIENT), *steps)
        await servers.until(lambda: len(servers.in_sync("ps-0")) == 2, "the second has not joined again")
        assert refusals == []
        assert [values["total"].tolist() for values in found] == [[1.0] * 1024] * CLIENTS


@NETWORKS
async def test_a_piece_that_waits_for_a_sum_is_dropped_once_its_member_has_left(monkeypatch, network):
    async with waiting(monkeypatch, network) as (servers, stores, copy, steps, _):
        (gone,) = {asked.to for asked in copy._asked}
        await servers.end("ps-1")
        await servers.until(lambda: gone not in copy.record.members, "the second is still a member")
        assert not copy._asked
        await asyncio.gather(stores[0].push_pull(GRADIENT), *steps)


@NETWORKS
async def test_a_shard_above_the_bound_is_not_sent_and_the_remedy_is_named_once(monkeypatch, network):
    monkeypatch.setattr(members_watch, "INVITE_S", 0.1)
    refusals, notices, dropped = Refusals(monkeypatch), [], []
    report = bundle_copy.BundleCopy._report_too_large

    def drop(copy, piece, nbytes):
        dropped.append(piece)
        report(copy, piece, nbytes)

    monkeypatch.setattr(bundle_copy.BundleCopy, "_report_too_large", drop)
    monkeypatch.setattr(ParameterServer, "_notice", lambda server, text: notices.append(text))
    async with fleet(monkeypatch, "ps-0", "ps-1", network=network) as servers:
        options = {"copies": 2, "min_in_sync": 1, "servers": 1, "rule": Sgd(rate=1.0)}
        async with servers.open(ARRAYS, name="a-name", **options) as store:
            await servers.until(lambda: len(servers.in_sync("ps-0")) == 2, "the second has not joined")
            bound(monkeypatch, ARRAYS["total"].nbytes - 1)
            joining = "ps-1"
            for times, another in enumerate(("ps-2", "ps-3"), start=1):
                await servers.end(joining)
                await servers.start(another)
                joining = another
                await servers.until(
                    lambda times=times: len(dropped) == times or refusals, "no piece is asked for"
                )
            assert (await store.pull())["total"].tolist() == [0.0] * 1024
    assert refusals == []
    (notice,) = [text for text in notices if "shard_bytes" in text]
    assert f" bytes, {ARRAYS['total'].nbytes - 1} are the most; begin the store anew with a " in notice
