"""Operators that are killed or interrupted within a command: the run and the next operator go on."""

import asyncio
import re
import signal
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

import pytest

from adam_async.cluster.networks import cluster_network
from adam_async.controller.client import Membership, joined_as
from adam_async.driver.requests import ANSWERS, requests_in
from adam_async.run.cluster_map import ClusterMap
from adam_async.run.config import Waits
from adam_async.runtime.clock import system_entropy
from tests.processes.commands import RUN_S, Command, children_of, run, watched
from transport import BufferPool

pytestmark = [pytest.mark.processes, pytest.mark.timeout(180)]

SECRET = "a token that nobody guesses"
TOKEN = {"ADAM_TOKEN": SECRET}
RUN = ("--data", "digits", "--servers", "1", "--replicas", "1", "--epochs", "100000")
WITHIN_S = 30.0


@contextmanager
def training() -> Iterator[tuple[Command, str]]:
    """A run in processes, with the address of its controller."""
    with Command("train", "--processes", *RUN, environment=TOKEN) as train:
        where = re.search(r"status --controller (\S+)", train.wait_for("status --controller"))
        assert where is not None
        train.wait_for("epoch 1/100000")
        yield train, where[1]


def watching(where: str, look: Callable[[Membership], Awaitable[None]]) -> None:
    """Join the cluster, and look at its map."""

    async def join() -> None:
        network = cluster_network(SECRET, entropy=system_entropy, buffers=BufferPool())
        async with joined_as("driver", network, where, Waits()) as (membership, _):
            await look(membership)

    asyncio.run(join())


def operators(cluster: ClusterMap, watcher: str) -> list[str]:
    """Return the live operators except the test."""
    return [name for name in cluster.live("driver") if name not in ("driver", watcher)]


async def left(membership: Membership) -> None:
    """Wait until the map has no live operator except the test."""
    what = "the operator to leave the map"
    await membership.wait_for(lambda m: not operators(m, membership.node), what, WITHIN_S)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_an_operator_that_ends_before_its_answer_leaves_nothing_in_the_map(number: int) -> None:
    with training() as (train, where):
        there = ("--controller", where)

        async def end_one(membership: Membership, *words: str, driver_sees_it: bool) -> None:
            train.signal(signal.SIGSTOP)  # the driver, which now answers nothing
            try:
                with Command(*words, *there, environment=TOKEN) as operator:
                    await membership.wait_for(
                        lambda m: bool(requests_in(m, m.run.driven_by)) if m.run else False,
                        "the request",
                        WITHIN_S,
                    )
                    operator.signal(number)
                    await asyncio.to_thread(operator.finish)
                if not driver_sees_it:
                    await left(membership)
            finally:
                train.signal(signal.SIGCONT)
            await left(membership)
            await membership.wait_for(
                lambda m: not m.nodes["driver"].info.get(ANSWERS), "its answer to leave the map", WITHIN_S
            )
            assert membership.map.driven

        async def look(membership: Membership) -> None:
            for words in (("logs", "ps-0"), ("scale", "2"), ("logs", "data-0")):
                await end_one(membership, *words, driver_sees_it=True)
            await end_one(membership, "stop", driver_sees_it=False)

        with watched(list(children_of(train.pid))) as all_end:
            watching(where, look)
            run("logs", "ps-0", *there, environment=TOKEN)
            assert "ends after the groups in flight" in run("stop", *there, environment=TOKEN)
            assert train.finish(seconds=RUN_S) == 0, train.output
            all_end(RUN_S)
    assert re.search(r"after \d{1,5} epochs", train.output), train.output


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_a_status_that_ends_while_it_asks_leaves_nothing_in_the_map(number: int) -> None:
    with training() as (train, where):

        async def look(membership: Membership) -> None:
            with Command("status", "--controller", where, environment=TOKEN) as status:
                await membership.wait_for(
                    lambda m: bool(operators(m, membership.node)), "the operator to join", WITHIN_S
                )
                status.signal(number)
                await asyncio.to_thread(status.finish)
            await left(membership)

        watching(where, look)
        text = run("status", "--controller", where, environment=TOKEN)
        assert "\ndriver-" not in text, text
        run("stop", "--controller", where, environment=TOKEN)
        assert train.finish(seconds=RUN_S) == 0, train.output
