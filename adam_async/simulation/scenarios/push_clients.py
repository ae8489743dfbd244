"""Clients that push to a store whose shards have several copies, with the shipped `StoreLink`.

Each client is a machine of its own. In each step the client makes one or several pushes at once, each to one
array, ends the step and pulls. Every push adds 1 to a column of its own in each row of its array
(`checkers.store_pushes`); a row is a shard of 256 bytes. A client whose store fails opens the next one.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from adam_async.errors import AdamError, first_cause
from adam_async.run.arrays import Factors
from adam_async.runtime.random_streams import RandomStream
from adam_async.simulation.checkers.store_pushes import Pulled, StorePushes
from adam_async.simulation.nodes import Node, World
from adam_async.simulation.plan import Setting
from adam_async.simulation.scenario import Ledger, Violation, settle
from adam_async.simulation.scenarios.pending_pushes import PendingPushes
from adam_async.simulation.scenarios.push_cluster import WAITS, PushCluster
from adam_async.simulation.scenarios.training_cluster import network_of
from adam_async.store.arrays import Gradient, InitialArrays, records_of
from adam_async.store.link import StoreLink
from adam_async.store.local_servers import ServerAccess
from adam_async.store.rules import Sgd
from adam_async.store.store import ParameterStore
from adam_async.store.values import PushOutcome
from adam_async.store.wish import StoreWish, slack_of
from transport import TransportError

PUSHERS = ("pusher-0", "pusher-1", "pusher-2")

NAME = "slots"
"""Name of the store."""

CONSISTENCIES = ("asp", "asp", "asp", "ssp:2", "bsp")
"""Consistencies to draw from."""

SHARD_BYTES = 256

ROWS, COLUMNS, ARRAYS = 5, SHARD_BYTES // 4, 16
"""Shape of an array, and number of arrays; a row of float32 is one shard. An array has more rows than there
are servers, so that factors have fewer bytes than their product and clients send factors."""

BEGUN_WITH = 2
"""Number of clients that the first step of a store with clocks waits for."""

INFINITE = 0.04
"""Share of pushes with a gradient that is not finite; none in bsp, where the servers would refuse the whole
sum."""

LARGE = 1e30
"""Value of the elements of two factors whose product is not finite in float32."""

MOMENTUM, MOST_MOMENTUM = 0.5, 2.25
"""Momentum of some stores, and largest value in the column of a push that was applied once with this
momentum. The sum of the powers of 0.5 is at most 2; a push that was applied twice gives at least 2.5."""

PACE_S = 0.08
"""Mean pause of a client between two steps, in seconds, if the plan does not say otherwise."""

OPEN_AGAIN_S = 0.2
"""Pause between the failure of a store and the next attempt to open it, in seconds."""

LEAVE_S = 30.0
"""Time limit for all clients to open the store, and then for their last steps, in seconds."""


def draw_store(dice: RandomStream) -> dict[str, Setting]:
    """Draw the settings of the store of a plan."""
    consistency = dice.choose(CONSISTENCIES)
    return {
        "copies": dice.choose([2, 3, 3]),
        "min_in_sync": dice.choose([0, 0, 1]),
        "consistency": consistency,
        "momentum": consistency != "bsp" and dice.chance(0.2),
    }


@dataclass(slots=True, eq=False)
class _Store:
    """The pushes to one store, by array."""

    arrays: dict[str, StorePushes]

    @property
    def full(self) -> bool:
        return all(self.arrays[name].full for name in array_names())


class PushClients:
    """All clients of a run, over all their incarnations.

    Args:
        settings: Settings from `draw_store`.

    Attributes:
        pending: Pushes without an answer.
        are_going_on: Whether the clients push: until `stop`, or until all columns are taken.
    """

    def __init__(
        self, world: World, cluster: PushCluster, ledger: Ledger, settings: Mapping[str, Setting]
    ) -> None:
        self._world = world
        self._controllers = ",".join(cluster.addresses.values())
        self._ledger = ledger
        self._slack = slack_of(str(settings["consistency"]))
        self._copies = int(settings["copies"])
        self._min_in_sync = int(settings["min_in_sync"])
        self._momentum = MOMENTUM if settings["momentum"] else 0.0
        self._pace_s = float(settings.get("pace_s", PACE_S))
        self._stores: dict[str, _Store] = {}
        """Pushes by the id of the store."""
        self.pending = PendingPushes(world, cluster.bundles)
        self._working: set[str] = set()
        self._dice = world.dice.fork("pushers")
        self.are_going_on = True
        for name in PUSHERS:
            world.node(name).start(self._run)

    async def _run(self, node: Node) -> None:
        dice = self._dice.fork(f"{node.name}/{node.incarnation}")
        self.pending.forget(node.name)
        self._working.discard(node.name)  # a killed incarnation leaves its name
        while self.are_going_on:
            self._working.add(node.name)
            try:
                await self._use(node, dice)
            except* (AdamError, TransportError) as errors:
                self._ledger.counts["stores opened again"] += 1
                self._ledger.note("store", node.name, str(first_cause(errors)))
            finally:
                self.pending.forget(node.name)
                self._working.discard(node.name)
            await asyncio.sleep(dice.around(OPEN_AGAIN_S))

    async def _use(self, node: Node, dice: RandomStream) -> None:
        """Open the store, work on it, and leave it."""
        access = ServerAccess(network=network_of(node), controllers=self._controllers, entropy=node.entropy)
        async with asyncio.TaskGroup() as group:
            link = StoreLink(self._wish(), access, group)
            await link.start()
            await self._work(node.name, link, dice)
            await link.leave()
            for task in link.tasks:
                task.cancel()

    def _wish(self) -> StoreWish:
        values = self._initial()
        records, rules = records_of(values, Sgd(rate=1.0, momentum=self._momentum))
        return StoreWish(
            name=NAME,
            create="auto",
            values=values,
            records=records,
            rules=rules,
            slack=self._slack,
            is_summed=self._slack == 0,
            replicas=BEGUN_WITH,
            copies=self._copies,
            min_in_sync=self._min_in_sync,
            servers=0,
            shard_bytes=SHARD_BYTES,
            reader=False,
            waits=WAITS,
        )

    def _initial(self) -> InitialArrays:
        """Return the arrays of a new store."""
        return {name: np.zeros((ROWS, COLUMNS), np.float32) for name in array_names()}

    def _pushes_to(self, link: StoreLink) -> _Store:
        store = self._stores.get(link.store.id)
        if store is None:
            store = self._stores[link.store.id] = _Store(self._new_pushes(link.store.id))
        return store

    def _new_pushes(self, id: str) -> dict[str, StorePushes]:
        """Return the pushes to each array of a new store."""
        summed = self._slack == 0
        return {
            name: StorePushes(f"{id}/{name}", rows=ROWS, columns=COLUMNS, summed=summed)
            for name in array_names()
        }

    # --- steps -------------------------------------------------------------------------------

    async def _work(self, name: str, link: StoreLink, dice: RandomStream) -> None:
        store = self._pushes_to(link)
        while self.are_going_on and not store.full:
            count = 1 + dice.below(4) if self._slack != 0 else 1
            async with asyncio.TaskGroup() as group:
                for _ in range(count):
                    array = self._draw_array(store.arrays, dice)
                    group.create_task(self._push(name, link, array, dice), name=f"{name}/push")
                if dice.chance(0.3):
                    group.create_task(
                        self._pull(name, link, dice.choose(list(store.arrays))), name=f"{name}/pull"
                    )
            await ParameterStore(link).tick()
            await self._pull(name, link, dice.choose(list(store.arrays)))
            await asyncio.sleep(dice.around(self._pace_s))
        self.are_going_on = self.are_going_on and not store.full

    def _draw_array(self, arrays: Mapping[str, StorePushes], dice: RandomStream) -> str:
        """Draw an array that is not full; at least one array must not be full."""
        return dice.choose([name for name in array_names() if not arrays[name].full])

    async def _push(self, name: str, link: StoreLink, array: str, dice: RandomStream) -> None:
        pushes = self._pushes_to(link).arrays[array]
        if pushes.full:
            return  # other clients took the last columns before this task began
        if self._slack != 0 and dice.chance(INFINITE):
            await self._push_infinity(name, link, array, pushes.rows)
            return
        weight = 1 + dice.below(3) if self._slack == 0 else 1
        clock = (
            link.calls.clock + 1 if self._slack == 0 else link.calls.clock
        )  # with bsp the push ends the step
        column = pushes.begin(name, clock=clock, weight=weight)
        row = np.zeros((1, COLUMNS), np.float32)
        row[0, column] = -1
        factors = Factors(row, np.ones((1, pushes.rows), np.float32))
        gradient: Gradient = factors if dice.chance(0.3) else np.repeat(row, pushes.rows, axis=0)
        with self.pending.noted(name):
            outcome = await ParameterStore(link).push({array: gradient}, weight=weight)
        pushes.acknowledged(column, _rows_of(outcome))
        self._ledger.operations += 1

    async def _push_infinity(self, name: str, link: StoreLink, array: str, rows: int) -> None:
        """Push finite factors whose product is not finite, which no server may apply."""
        factors = Factors(np.full((1, COLUMNS), LARGE, np.float32), np.full((1, rows), LARGE, np.float32))
        with self.pending.noted(name):
            outcome = await ParameterStore(link).push({array: factors})
        # A repetition is answered as a duplicate if the server has forgotten the refusal.
        self._ledger.counts["refused pushes"] += bool(outcome.refused)

    async def _pull(self, name: str, link: StoreLink, array: str) -> None:
        pushes = self._pushes_to(link).arrays[array]
        bound = max(link.calls.clock - self._slack, 0) if self._slack is not None else 0
        before = pushes.before()
        values = await ParameterStore(link).pull([array])
        rows: NDArray[np.float64] = values[array].astype(np.float64)
        if self._momentum:
            rows = np.where((rows >= 1) & (rows < MOST_MOMENTUM), 1.0, rows)
        versions = self._versions_of(array, values.read.of_shards)
        pushes.pulled(name, before, Pulled(rows=rows, versions=versions.tolist(), bound=bound))

    def _versions_of(self, array: str, of_shards: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the version of each row of an array, from those of all shards."""
        rows: NDArray[np.int64] = of_shards[: ARRAYS * ROWS].reshape(ARRAYS, ROWS)[array_names().index(array)]
        return rows

    # --- the end -----------------------------------------------------------------------------

    async def stop(self) -> None:
        """Let all clients end their step, and leave.

        Raises:
            Violation: A push is pending for too long, or a client goes on or stays away for `LEAVE_S`.
        """
        # With bsp the first step of a store that was opened again waits for `BEGUN_WITH` clients.
        await settle(self._world, self._absent, within_s=LEAVE_S, invariant="clients return")
        self.are_going_on = False
        await self.pending.answered()
        await settle(self._world, self._unfinished, within_s=LEAVE_S, invariant="clients are answered")

    def _check_known(self, id: str) -> None:
        """Check that a client has pushed to a store. Raises Violation."""
        if id not in self._stores:
            raise Violation("I1", f"the store is {id}, to which no client pushed")

    def _absent(self) -> str:
        away = sorted(set(PUSHERS) - self._working) if self.are_going_on else []
        return f"{', '.join(away)} did not open the store" if away else ""

    def _unfinished(self) -> str:
        return f"{', '.join(sorted(self._working))} went on" if self._working else ""

    async def read_all(self, node: Node) -> None:
        """Open the store once more, and check all arrays; each acknowledged push is in its array once.

        Raises:
            Violation: An acknowledged push is missing, or counts twice.
        """
        access = ServerAccess(network=network_of(node), controllers=self._controllers, entropy=node.entropy)
        async with asyncio.TaskGroup() as group:
            link = StoreLink(self._wish(), access, group)
            await link.start()
            self._check_known(link.store.id)
            for array in self._pushes_to(link).arrays:
                await self._pull(node.name, link, array)
            await link.leave()
            for task in link.tasks:
                task.cancel()


def array_names() -> list[str]:
    """Return the names of the arrays to which clients push all the time."""
    return [f"array-{number:02}" for number in range(ARRAYS)]


def _rows_of(outcome: PushOutcome) -> list[int]:
    """Return the rows that refused a push."""
    rows: list[int] = []
    for shard in outcome.refused:
        rows += range(shard.start // COLUMNS, shard.stop // COLUMNS)
    return rows
