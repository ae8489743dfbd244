"""Three controllers as processes that are killed, stopped and restarted under clients.

All answers agree with one order of all operations, and a watcher receives each version once.
"""

import asyncio
import hashlib
import random
import signal
from collections import Counter
from contextlib import ExitStack, aclosing, closing
from pathlib import Path

import msgspec
import pytest
import uvloop

from adam_async.cluster.networks import cluster_network
from adam_async.controller.map_client import MapClient
from adam_async.errors import DeadlineExceeded, RoleUnreachable
from adam_async.run.cluster_map import ClusterMap
from adam_async.run.config import Waits
from adam_async.run.map_changes import changed
from adam_async.runtime.clock import fine_clock, system_entropy
from adam_async.runtime.traffic import Traffic
from tests.processes.commands import Command
from tests.simulation.linearizability import (
    CompareAndSet,
    Conflict,
    Done,
    Get,
    History,
    Read,
    Sight,
    check,
    check_watch,
)
from transport import BufferPool, Identity, RemoteError

pytestmark = [pytest.mark.processes, pytest.mark.slow]

KEYS = tuple(f"nodes/key-{number}" for number in range(8))
CLIENTS = 5
SELDOM = 6
RECONNECTING = 3
RUN_S = 20.0
LEAST_PER_S = 100
"""Minimum number of answers per second while controllers are killed; a slower run does not count."""
ATTEMPTS = 3
WAITS = Waits(dial_s=30.0, call_s=30.0)


class Controllers:
    """The processes."""

    def __init__(self, ports, folder: Path) -> None:
        addresses = [f"tcp://127.0.0.1:{port}" for port in ports]
        self.addresses = ",".join(addresses)
        self._peers = ",".join(f"{number}={address}" for number, address in enumerate(addresses, start=1))
        self._folder = folder
        self._stack = ExitStack()
        self.commands: dict[int, Command] = {}

    def __enter__(self):
        for number in (1, 2, 3):
            self.start(number)
        for command in self.commands.values():
            command.wait_for(" listens on ")
        return self

    def __exit__(self, *exc):
        self._stack.close()

    def start(self, number: int) -> None:
        words = ("--id", str(number), "--peers", self._peers, "--dir", str(self._folder / str(number)))
        self.commands[number] = self._stack.enter_context(Command("controller", *words))

    def number(self, address: str) -> int:
        """Return the controller at an address."""
        return self.addresses.split(",").index(address) + 1

    def check_all_run(self) -> None:
        for number, command in self.commands.items():
            assert command.process.poll() is None, (
                f"controller {number} ended:\n{command.process.stdout.read()}"
            )


class Users:
    """Clients, each with a link and a session of its own, and their operations."""

    def __init__(self, controllers: str, seed: int) -> None:
        self._controllers = controllers
        self._seed = seed
        self.history = History(clock=fine_clock)
        self.sights: list[Sight] = []
        self.answered: Counter[str] = Counter()
        self.leader = controllers.partition(",")[0]
        """The last one that is known to have answered."""
        self._wanted = 0
        self._enough = asyncio.Event()

    async def answers(self, count: int) -> None:
        """Wait for a number of further answers."""
        self._wanted = self.answered.total() + count
        self._enough.clear()
        await self._enough.wait()

    def _count(self, what: str) -> None:
        self.answered[what] += 1
        if self.answered.total() >= self._wanted:
            self._enough.set()

    def _client(self, name: str, key: str = "nodes/watcher") -> MapClient:
        """Return a client that may set a key: its link has the identity of the record's node."""
        return MapClient(
            network=cluster_network(None, entropy=system_entropy, buffers=BufferPool()),
            controllers=self._controllers,
            identity=Identity(role="worker", node=key.removeprefix("nodes/"), incarnation=1),
            waits=WAITS,
            traffic=Traffic(name),
        )

    async def use(self, number: int, *, pause_s: float = 0.0) -> None:
        """Get and set keys at random until cancelled, with pauses of up to `pause_s`.

        After a pause the client may query a stopped leader whose successor has answered other clients.
        """
        name, dice = f"client-{number}", random.Random(f"{self._seed}/{number}")
        known = dict.fromkeys(KEYS, 0)
        with ExitStack() as stack:
            clients = {key: stack.enter_context(closing(self._client(name, key))) for key in KEYS}
            while True:
                await asyncio.sleep(dice.uniform(0.0, pause_s))
                key = dice.choice(KEYS)
                await self._ask(clients[key], name, key, dice, known)
                self.leader = clients[key].address or self.leader

    async def reconnect(self, number: int) -> None:
        """Do the same over new links: a client that connects while the leader is stopped finds the next."""
        name, dice = f"reconnecting-{number}", random.Random(f"{self._seed}/visitor/{number}")
        known = dict.fromkeys(KEYS, 0)
        while True:
            await asyncio.sleep(dice.uniform(0.0, 0.3))
            for key in KEYS:
                with closing(self._client(name, key)) as client:
                    await self._get(client, name, key, known)
                    await self._set(client, name, key, known[key], f"{name}/{self.answered.total()}", known)

    async def _ask(self, client, name, key, dice, known):
        if dice.random() < 0.5:
            await self._get(client, name, key, known)
        else:
            expected = known[key] if dice.random() < 0.9 else dice.randrange(known[key] + 1)
            await self._set(client, name, key, expected, f"{name}/{self.answered.total()}", known)

    async def _get(self, client, name, key, known):
        handle = self.history.begin(name, key, Get())
        try:
            news = await client.get()
        except (DeadlineExceeded, RoleUnreachable):
            self.history.unknown(handle)
            return
        node = news.whole.nodes.get(key.removeprefix("nodes/"))
        known[key] = node.changed if node else 0
        self.history.end(handle, Read(known[key], node.info["value"] if node else None))
        self._count("get")

    async def _set(self, client, name, key, expected, value, known):
        # No live node: the controllers never change its record by themselves.
        record = {"role": "worker", "address": "x", "incarnation": 1, "live": False, "info": {"value": value}}
        handle = self.history.begin(name, key, CompareAndSet(expected, value))
        try:
            outcome = await client.compare_and_set(key, expected, record)
        except (DeadlineExceeded, RoleUnreachable):
            self.history.unknown(handle)
            return
        except RemoteError:
            self.history.refused(handle)
            raise
        if outcome.done is None:
            self.history.unknown(handle)
            self._count("unknown")
            return
        known[key] = outcome.at
        self.history.end(handle, Done(outcome.at) if outcome.done else Conflict(outcome.at))
        self._count("set" if outcome.done else "conflict")

    async def watch(self, number: int) -> None:
        """Follow the map until cancelled."""
        name = f"watcher-{number}"
        cluster = ClusterMap()
        with closing(self._client(name)) as client:
            async with aclosing(client.changes()) as changes:
                async for news in changes:
                    cluster = news.whole if news.change is None else changed(cluster, news.change)
                    digest = hashlib.blake2b(msgspec.json.encode(cluster, order="sorted"), digest_size=8)
                    whole = news.change is None
                    sight = Sight(watcher=name, version=news.version, digest=digest.hexdigest(), whole=whole)
                    self.sights.append(sight)


async def disturb(controllers: Controllers, users: Users, dice: random.Random, done: Counter[str]) -> None:
    """Kill and stop controllers, leaders above all, until the time is over; then all run again."""
    loop = asyncio.get_running_loop()
    until = loop.time() + RUN_S
    while loop.time() < until:
        number = dice.choice((1, 2, 3, *[controllers.number(users.leader)] * 3))
        command = controllers.commands[number]
        controllers.check_all_run()
        if dice.random() < 0.5:
            command.signal(signal.SIGKILL)
            command.process.wait()
            await asyncio.sleep(dice.uniform(0.0, 0.5))
            controllers.start(number)
            done["killed"] += 1
        else:
            command.signal(signal.SIGSTOP)
            await asyncio.sleep(dice.uniform(0.2, 3.5))
            command.signal(signal.SIGCONT)
            done["stopped"] += 1
        await asyncio.sleep(dice.uniform(0.2, 1.5))


async def play(controllers: Controllers, users: Users, dice: random.Random) -> tuple[Counter[str], float]:
    """Kill and stop controllers under clients; returns these actions, and the answers per second."""
    done: Counter[str] = Counter()
    loop = asyncio.get_running_loop()
    tasks = [asyncio.create_task(users.use(number)) for number in range(CLIENTS)]
    tasks += [asyncio.create_task(users.use(CLIENTS + number, pause_s=3.0)) for number in range(SELDOM)]
    tasks += [asyncio.create_task(users.reconnect(number)) for number in range(RECONNECTING)]
    tasks += [asyncio.create_task(users.watch(number)) for number in range(2)]
    await users.answers(CLIENTS)
    begun, before = loop.time(), users.answered.total()
    try:
        await disturb(controllers, users, dice, done)
        rate = (users.answered.total() - before) / (loop.time() - begun)
        # All run again: every client gets an answer, and the watchers reach the last version.
        await users.answers(10 * CLIENTS)
    finally:
        for task in tasks:
            task.cancel()
        ended = await asyncio.gather(*tasks, return_exceptions=True)
    assert [error for error in ended if not isinstance(error, asyncio.CancelledError)] == []
    return done, rate


@pytest.mark.timeout(240)
def test_answers_of_killed_and_stopped_controllers_are_linearizable(
    tmp_path: Path, unused_tcp_port_factory
) -> None:
    rates = []
    for seed in range(ATTEMPTS):
        ports = [unused_tcp_port_factory() for _ in range(3)]
        with Controllers(ports, tmp_path / str(seed)) as controllers:
            users = Users(controllers.addresses, seed)
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                done, rate = runner.run(play(controllers, users, random.Random(seed)))
            controllers.check_all_run()
        check(users.history.operations())
        check_watch(users.sights)
        assert min(done["killed"], done["stopped"]) >= 2
        assert len(users.sights) > users.answered["set"]
        rates.append(rate)
        if rate >= LEAST_PER_S:
            return
    pytest.fail(f"{rates} operations a second are fewer than {LEAST_PER_S}: no run counts")
