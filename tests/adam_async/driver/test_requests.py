"""Requests of operators: their answers, their refusals, and requests that no driver can read."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import msgspec
import pytest

from adam_async.cluster.networks import cluster_network
from adam_async.controller.client import Membership, joined_as
from adam_async.driver import requests
from adam_async.driver.requests import (
    ANSWERS,
    MOST_ANSWER_BYTES,
    MOST_ANSWERS,
    REQUEST,
    OperatorRequests,
    Request,
    answer_in,
    ask,
    requests_in,
)
from adam_async.driver.takeover import submit, update_program
from adam_async.errors import ConfigError, DeadlineExceeded, RunFailed
from adam_async.run.cluster_map import ClusterMap
from adam_async.run.config import Waits
from adam_async.runtime.clock import system_entropy
from tests.adam_async.cluster_maps import node, run_record
from tests.adam_async.store.servers import servers
from transport import BufferPool

WAITS = Waits()
WITHIN_S = 20.0


class Cluster:
    """Operations that note their calls."""

    def __init__(self) -> None:
        self.scaled: list[int] = []

    def last_lines(self, node: str) -> tuple[str, ...]:
        if node != "ps-0":
            raise ConfigError(f"{node!r} is no role of this cluster")
        return tuple(f"line {number} {'é' * 100}" for number in range(200))

    async def scale(self, workers: int) -> str:
        self.scaled.append(workers)
        return f"{workers} workers"

    def kill(self, node: str) -> str:
        return f"{node} was killed"

    def freeze(self, node: str, seconds: float) -> str:
        return f"{node} is frozen for {seconds:g} s"

    async def add(self, role: str) -> str:
        return f"started one more {role}"


@asynccontextmanager
async def member(where: str, role: str = "driver") -> AsyncIterator[Membership]:
    network = cluster_network(None, entropy=system_entropy, buffers=BufferPool())
    async with joined_as(role, network, where, WAITS) as (membership, _):
        yield membership


@asynccontextmanager
async def driven_run(operations: Cluster | None) -> AsyncIterator[tuple[str, list[str], Membership]]:
    """A run in a controller's map whose driver answers; yields the address, the stops, and the driver."""
    stops: list[str] = []
    async with servers(0) as where, member(where) as driver, asyncio.TaskGroup() as group:
        requests = OperatorRequests(driver, run=lambda: "run-1", stop=lambda: stops.append("stop"))
        requests.operations = operations
        name, incarnation = driver.member
        await submit(driver, run_record("run-1", driver=name, incarnation=incarnation))
        serving = group.create_task(requests.serve())
        yield where, stops, driver
        serving.cancel()


async def test_a_driver_answers_with_the_last_lines_that_fit() -> None:
    async with driven_run(Cluster()) as (where, _, _driver), member(where) as operator:
        lines = await ask(operator, Request(run="run-1", action="logs", node="ps-0"), within_s=WITHIN_S)

    assert lines[-1].startswith("line 199 ")
    assert 10 < len(lines) < 200
    assert len(msgspec.json.encode(lines)) <= MOST_ANSWER_BYTES + 2


async def test_a_driver_scales_its_cluster_and_stops_its_run() -> None:
    operations = Cluster()
    async with driven_run(operations) as (where, stops, _):
        async with member(where) as operator:
            request = Request(run="run-1", action="scale", workers=4)
            assert await ask(operator, request, within_s=WITHIN_S) == ("4 workers",)
        async with member(where) as operator:
            (line,) = await ask(operator, Request(run="run-1", action="stop"), within_s=WITHIN_S)

    assert operations.scaled == [4]
    assert stops == ["stop"]
    assert line.startswith("the run ends after the groups in flight")


FAULTS = {
    "worker-1 was killed": Request(run="run-1", action="kill", node="worker-1"),
    "ps-0 is frozen for 2.5 s": Request(run="run-1", action="freeze", node="ps-0", seconds=2.5),
    "started one more ps": Request(run="run-1", action="add", role="ps"),
}


@pytest.mark.parametrize("line", FAULTS)
async def test_a_driver_kills_freezes_and_adds_roles_only_if_it_is_allowed(line: str) -> None:
    async with driven_run(Cluster()) as (where, _, driver), member(where) as operator:
        with pytest.raises(ConfigError, match="start train with --allow-operations"):
            await ask(operator, FAULTS[line], within_s=WITHIN_S)
        allowed = OperatorRequests(driver, run=lambda: "run-1", stop=lambda: None)
        allowed.operations, allowed.allows_faults = Cluster(), True
        assert (await allowed.answer(FAULTS[line])).lines == (line,)


@pytest.mark.parametrize(
    ("operations", "request_", "refusal"),
    [
        (Cluster(), Request(run="run-1", action="logs", node="x"), "'x' is no role of this cluster"),
        (None, Request(run="run-1", action="scale", workers=2), "did not start the roles of this run"),
        (None, Request(run="run-1", action="logs", node="ps-0"), "did not start the roles of this run"),
    ],
)
async def test_a_refusal_reaches_the_operator(operations: Any, request_: Request, refusal: str) -> None:
    async with driven_run(operations) as (where, _, _driver), member(where) as operator:
        with pytest.raises(ConfigError, match=refusal):
            await ask(operator, request_, within_s=WITHIN_S)


async def test_an_answer_leaves_the_map_with_its_operator_so_many_operators_can_ask() -> None:
    async with driven_run(Cluster()) as (where, _, driver):
        for _ in range(2 * MOST_ANSWERS):
            async with member(where) as operator:
                await ask(operator, Request(run="run-1", action="scale", workers=1), within_s=WITHIN_S)
        await driver.wait_for(
            lambda m: not m.nodes[driver.node].info[ANSWERS], "no answer to remain", WITHIN_S
        )


async def test_operators_at_the_same_time_all_get_their_answers() -> None:
    async with driven_run(Cluster()) as (where, _, _driver):

        async def one(workers: int) -> tuple[str, ...]:
            async with member(where) as operator:
                request = Request(run="run-1", action="scale", workers=workers)
                return await ask(operator, request, within_s=WITHIN_S)

        async with asyncio.TaskGroup() as group:
            asking = [group.create_task(one(n)) for n in range(1, 3 * MOST_ANSWERS)]

    assert [task.result() for task in asking] == [(f"{n} workers",) for n in range(1, 3 * MOST_ANSWERS)]


async def scaled(where: str, workers: int) -> tuple[str, ...]:
    """Ask for a number of workers as a new operator, which leaves after its answer."""
    async with member(where) as operator:
        request = Request(run="run-1", action="scale", workers=workers)
        return await ask(operator, request, within_s=WITHIN_S)


@asynccontextmanager
async def idle_operators(where: str) -> AsyncIterator[None]:
    """As many operators as there are answers, which stay after their answers."""
    async with AsyncExitStack() as stack:
        for workers in range(1, MOST_ANSWERS + 1):
            operator = await stack.enter_async_context(member(where))
            request = Request(run="run-1", action="scale", workers=workers)
            await ask(operator, request, within_s=WITHIN_S)
        yield


async def test_operators_that_stay_after_their_answers_hold_up_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(requests, "KEPT_S", 0.1)
    operations = Cluster()
    async with driven_run(operations) as (where, _, driver), idle_operators(where):
        for workers in range(10, 13):
            assert await scaled(where, workers) == (f"{workers} workers",)
        assert len(driver.map.nodes[driver.node].info[ANSWERS]) <= MOST_ANSWERS

    # An operator whose answer has made room is not answered again.
    assert operations.scaled == [1, 2, 3, 10, 11, 12]


async def test_an_operator_has_its_time_to_read_the_answer() -> None:
    request = Request(run="run-1", action="scale", workers=10)
    async with driven_run(Cluster()) as (where, _, _driver), idle_operators(where), member(where) as other:
        with pytest.raises(DeadlineExceeded, match="the driver of run run-1 to answer"):
            await ask(other, request, within_s=0.2)


@pytest.mark.thorough  # the controllers wait two seconds for the return of one that never left
async def test_an_operator_that_is_cancelled_leaves_no_request_and_no_answer() -> None:
    operations = Cluster()
    async with driven_run(operations) as (where, _, driver), member(where) as watcher:
        for pauses in range(12):
            asking = asyncio.create_task(scaled(where, 1))
            for _ in range(2**pauses // 2):
                await asyncio.sleep(0)
            asking.cancel()
            await asyncio.wait((asking,))
        await watcher.wait_for(
            lambda m: set(m.live("driver")) == {driver.node, watcher.node}, "the operators to leave", WITHIN_S
        )
        await watcher.wait_for(
            lambda m: not m.nodes[driver.node].info.get(ANSWERS), "the answers to leave", WITHIN_S
        )
        assert await scaled(where, 2) == ("2 workers",)


@pytest.mark.parametrize(
    "request_",
    [
        7,
        {},
        {"run": 1, "action": "stop"},
        {"run": "run-1", "action": "explode"},
        {"run": "run-1", "action": "x" * 32_680},
        {"run": "r" * 9999},
    ],
    ids=lambda request: str(request)[:40],
)
async def test_an_unreadable_request_is_refused_and_the_next_one_is_answered(request_: Any) -> None:
    operations = Cluster()
    async with driven_run(operations) as (where, stops, _driver):
        async with member(where) as operator:
            await operator.set_info(**{REQUEST: request_})
            found = await operator.wait_for(
                lambda m: answer_in(m, "run-1", operator.member) is not None, "an answer", WITHIN_S
            )
            answer = answer_in(found, "run-1", operator.member)
            assert "cannot read the request" in answer.refusal  # type: ignore[union-attr]
        async with member(where) as operator:
            await ask(operator, Request(run="run-1", action="scale", workers=2), within_s=WITHIN_S)

    assert operations.scaled == [2]
    assert stops == []


async def test_a_run_that_ends_before_the_answer_ends_the_wait_with_its_reason() -> None:
    async with servers(0) as where, member(where) as driver, member(where) as operator:
        name, incarnation = driver.member
        await submit(driver, run_record("run-1", driver=name, incarnation=incarnation))
        await operator.wait_for(lambda m: m.run is not None, "the run", WITHIN_S)
        async with asyncio.TaskGroup() as group:
            request = Request(run="run-1", action="stop")
            asking = group.create_task(_outcome(ask(operator, request, within_s=WITHIN_S)))
            await driver.wait_for(lambda m: bool(requests_in(m, driver.member)), "the request", WITHIN_S)
            await update_program(
                driver, lambda run: msgspec.structs.replace(run, phase="failed", reason="no data")
            )
    assert isinstance(asking.result(), RunFailed)
    assert str(asking.result()) == "run run-1 is over: no data"


async def _outcome(work: Any) -> object:
    try:
        return await work
    except Exception as error:
        return error


def test_only_live_drivers_other_than_the_asked_one_have_requests() -> None:
    info = {REQUEST: {"run": "r", "action": "stop"}}
    cluster = ClusterMap(
        nodes={
            "driver": node("driver", info=info),
            "operator": node("driver", incarnation=5, info=info),
            "gone": node("driver", info=info, live=False),
            "worker-0": node("worker", info=info),
            "silent": node("driver"),
        }
    )

    assert requests_in(cluster, ("driver", 1)) == {("operator", 5): Request(run="r", action="stop")}


def test_there_is_no_answer_from_a_lost_driver() -> None:
    cluster = ClusterMap(nodes={"driver": node("driver", live=False)}, run=run_record("run-1"))

    why = answer_in(cluster, "run-1", ("operator", 5))
    assert why == "run run-1 has lost its driver, driver: first take it over, with train --attach"
    assert answer_in(cluster, "run-2", ("operator", 5)) == "run run-2 is no longer in the cluster map"
