"""Clients of stores beside a training run, which push, pull, tick, leave, and delete and create stores.

Each client runs on its own machine. The client's program opens the store of all clients, which the first one
creates, and works on it until the store is full or a draw ends the work. The program then leaves the store,
or deletes it, after which all clients open the next one. A program that fails opens the store again. One more
machine reads the store, and never delays the others.

Every push adds 1 to its own column (`checkers.store_pushes`). One array is float64 and one float32, so each
push has messages of two families. The seed draws the consistency.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from adam_async.errors import AdamError, first_cause
from adam_async.run.cluster_map import ClusterMap
from adam_async.run.config import Waits
from adam_async.run.ids import Replica
from adam_async.runtime.random_streams import RandomStream
from adam_async.simulation.checkers.store_pushes import Pulled, StorePushes
from adam_async.simulation.nodes import Node, World
from adam_async.simulation.plan import Setting
from adam_async.simulation.scenario import Ledger, settle
from adam_async.simulation.scenarios.pending_pushes import PendingPushes
from adam_async.simulation.scenarios.training_cluster import CONTROLLERS, TrainingCluster, network_of
from adam_async.store.arrays import InitialArrays, records_of
from adam_async.store.link import StoreLink
from adam_async.store.local_servers import ServerAccess
from adam_async.store.rules import Sgd
from adam_async.store.store import ParameterStore
from adam_async.store.values import PushOutcome, Values
from adam_async.store.wish import StoreWish, slack_of
from transport import TransportError

CLIENTS = ("client-0", "client-1", "client-2")
"""Machines of the clients."""

READER = "reader-0"
"""Machine of the reader."""

NAME = "counts"
"""Name of the store."""

CONSISTENCIES = ("asp", "ssp:2", "bsp")

COLUMNS = 80
"""Maximum number of pushes to a store, after which its clients delete it."""

HEIGHTS: Mapping[str, int] = {"wide": 4, "narrow": 2}
"""Rows of each array."""

ROWS = sum(HEIGHTS.values())

SHARD_BYTES = COLUMNS * 8
"""Size of a shard in bytes: a row of the float64 array, or two rows of the float32 array."""

BEGUN_WITH = 2
"""Number of clients that the first step of a store waits for."""

PACE_S = 0.3
"""Mean pause of a client between two steps, in seconds."""

READ_S = 0.6
"""Mean pause between two pulls of the reader, in seconds."""

OPEN_AGAIN_S = 0.2
"""Pause between the failure of a store and the next attempt to open it, in seconds."""

END_S = 30.0
"""Time limit of the last steps of all clients after the end of the run, in seconds."""

WAITS = Waits(dial_s=20.0, call_s=20.0, answer_s=0.5, patience_s=60.0, clock_s=60.0, prepare_s=60.0)


def draw_stores(dice: RandomStream) -> dict[str, Setting]:
    """Draw the settings of the stores of a plan."""
    return {"stores": dice.choose(CONSISTENCIES)}


@dataclass(slots=True, eq=False)
class _OpenStore:
    """One client's open store."""

    name: str
    link: StoreLink
    pushes: StorePushes
    dice: RandomStream
    step: int
    """Number of steps that the client has ended: by a tick or, with bsp, also by the push of a step."""


class StoreClients:
    """All clients of a run, over all incarnations of their machines.

    Attributes:
        pending: Pushes without an answer.
    """

    def __init__(self, world: World, cluster: TrainingCluster, ledger: Ledger) -> None:
        setup = cluster.setup
        self._world = world
        self._cluster = cluster
        self._ledger = ledger
        self._slack = slack_of(setup.stores)
        self._copies = setup.config.copies_in_force
        self.pending = PendingPushes(world, cluster.bundles)
        self._stores: dict[str, StorePushes] = {}
        """Pushes to each store, by its id."""
        self._open: dict[str, _OpenStore] = {}
        """Open store of each client."""
        self._dice = world.dice.fork("stores")
        self._going_on = True
        self._working: set[str] = set()
        for name in CLIENTS:
            world.node(name).start(self._run_client)
        world.node(READER).start(self._run_reader)

    # --- programs ----------------------------------------------------------------------------

    async def _run_client(self, node: Node) -> None:
        dice = self._dice.fork(f"{node.name}/{node.incarnation}")
        self.pending.forget(node.name)  # a killed incarnation does not do so itself
        await self._serve_again(node, dice, reader=False)

    async def _run_reader(self, node: Node) -> None:
        dice = self._dice.fork(f"{node.name}/{node.incarnation}")
        await self._serve_again(node, dice, reader=True)

    async def _serve_again(self, node: Node, dice: RandomStream, *, reader: bool) -> None:
        while self._going_on:
            self._working.add(node.name)
            try:
                await self._use(node, dice, reader=reader)
            except* (AdamError, TransportError) as errors:
                self._ledger.counts["stores opened again"] += 1
                self._ledger.note("store", node.name, str(first_cause(errors)))
            finally:
                self._open.pop(node.name, None)
                self._working.discard(node.name)
                self.pending.forget(node.name)
            await asyncio.sleep(dice.around(OPEN_AGAIN_S))

    async def _use(self, node: Node, dice: RandomStream, *, reader: bool) -> None:
        """Open the store, work on it, and leave it."""
        access = ServerAccess(
            network=network_of(node), controllers=",".join(CONTROLLERS.values()), entropy=node.entropy
        )
        async with asyncio.TaskGroup() as group:
            link = StoreLink(self._wish(reader=reader), access, group)
            await link.start()
            pushes = self._pushes_to(link.store.id)
            if reader:
                await self._read(node.name, link, pushes, dice)
            else:
                opened = self._open[node.name] = _OpenStore(node.name, link, pushes, dice, link.calls.clock)
                await self._work(opened)
            self._open.pop(node.name, None)
            await link.leave()
            for task in link.tasks:
                task.cancel()

    def _wish(self, *, reader: bool) -> StoreWish:
        values: InitialArrays = {
            "wide": np.zeros((HEIGHTS["wide"], COLUMNS)),
            "narrow": np.zeros((HEIGHTS["narrow"], COLUMNS), np.float32),
        }
        records, rules = records_of(values, Sgd(rate=1.0))
        return StoreWish(
            name=NAME,
            create="never" if reader else "auto",
            values=None if reader else values,
            records=() if reader else records,
            rules=() if reader else rules,
            slack=self._slack,
            is_summed=self._slack == 0,
            replicas=BEGUN_WITH,
            copies=self._copies,
            servers=0,
            shard_bytes=SHARD_BYTES,
            reader=reader,
            waits=WAITS,
        )

    def _pushes_to(self, store: str) -> StorePushes:
        pushes = self._stores.get(store)
        if pushes is None:
            self._ledger.counts["stores created"] += 1
            pushes = self._stores[store] = StorePushes(
                store, rows=ROWS, columns=COLUMNS, summed=self._slack == 0
            )
        return pushes

    async def _work(self, opened: "_OpenStore") -> None:
        """Push, end the step and pull, repeatedly; several pushes at once if no step is summed."""
        link, pushes, dice = opened.link, opened.pushes, opened.dice
        while self._going_on:
            if pushes.full or dice.chance(0.005):
                await link.delete()
                self._ledger.counts["stores deleted"] += 1
                return
            if dice.chance(0.01):
                return  # the client leaves its number to the next one
            async with asyncio.TaskGroup() as group:
                count = 1 + dice.below(3) if self._slack != 0 else 1
                for _ in range(min(count, pushes.room)):
                    group.create_task(self._push(opened), name=f"{opened.name}/push")
            await ParameterStore(link).tick()
            opened.step = link.calls.clock
            await self._pull(opened)
            await asyncio.sleep(dice.around(PACE_S))

    async def _push(self, opened: "_OpenStore") -> None:
        link, pushes, weight = opened.link, opened.pushes, 1
        if pushes.full:
            return  # other clients took the last columns before this task began
        if self._slack == 0:
            weight += opened.dice.below(3)
            opened.step = link.calls.clock + 1  # with bsp the push ends the step on its shards
        column = pushes.begin(opened.name, clock=opened.step, weight=weight)
        gradients: dict[str, Any] = {
            "wide": np.zeros((HEIGHTS["wide"], COLUMNS)),
            "narrow": np.zeros((HEIGHTS["narrow"], COLUMNS), np.float32),
        }
        for gradient in gradients.values():
            gradient[:, column] = -1
        with self.pending.noted(opened.name):
            outcome = await ParameterStore(link).push(gradients, weight=weight)
        pushes.acknowledged(column, _rows_of(outcome))
        self._ledger.counts["pushes to stores"] += 1

    async def _pull(self, opened: "_OpenStore") -> None:
        link, pushes = opened.link, opened.pushes
        at, slack = link.calls.clock, self._slack
        known = [other for other in self._open.values() if other is not opened and self._is_known(other.link)]
        mine = self._is_known(link)
        before = pushes.before()
        values = await ParameterStore(link).pull()
        newest = self._cluster.map
        others = [(other.name, other.step) for other in known if _is_live(other.link, newest)]
        bound = max(at - slack, 0) if slack is not None else 0
        pulled = Pulled(
            rows=_rows(values),
            versions=_versions(values),
            bound=bound,
            at=at if mine and _is_live(link, newest) else None,
            others=others if mine else (),
        )
        pushes.pulled(opened.name, before, pulled)

    def _is_known(self, link: StoreLink) -> bool:
        """Return whether the primaries of all bundles of a store have a clock for a client."""
        session, newest = link.session, self._cluster.map
        for home in set(link.store.buckets):
            bundle = newest.bundle(session.store, home)
            if bundle is None or bundle.primary is None:
                return False
            served = self._cluster.servers[bundle.primary[0]].served.get((session.store, home))
            if served is None or served.state.live.get(Replica(session.replica)) != session.incarnation:
                return False
        return True

    async def _read(self, name: str, link: StoreLink, pushes: StorePushes, dice: RandomStream) -> None:
        while self._going_on:
            await self._look(name, link, pushes)
            await asyncio.sleep(dice.around(READ_S))
        await self._look(name, link, pushes)

    async def _look(self, name: str, link: StoreLink, pushes: StorePushes) -> None:
        before = pushes.before()
        values = await ParameterStore(link).pull()
        pulled = Pulled(rows=_rows(values), versions=_versions(values), bound=values.clock)
        pushes.pulled(name, before, pulled)
        self._ledger.counts["stores read"] += 1

    # --- the end -----------------------------------------------------------------------------

    async def stop(self) -> None:
        """Let all clients end their last step, and leave.

        Raises:
            Violation: A client continues for `END_S`.
        """
        self._going_on = False
        await settle(
            self._world, self._unfinished, within_s=END_S, invariant="clients of stores are answered"
        )

    def waits_for_others(self, name: str) -> bool:
        """Return whether the store of a client waits for further clients to begin the first step."""
        opened = self._open.get(name)
        store = self._cluster.map.store(opened.link.store.id) if opened is not None else None
        return self._slack is not None and store is not None and not store.epoch

    def _unfinished(self) -> str:
        """Return a text about the clients that still work; empty if none does."""
        left = [name for name in sorted(self._working) if not self.waits_for_others(name)]
        return f"{', '.join(left)} went on" if left else ""


def _is_live(link: StoreLink, cluster: ClusterMap) -> bool:
    """Return whether the controllers still keep the client's number."""
    store = cluster.store(link.store.id)
    if store is None:
        return False
    pushers = cluster.pushers(store)
    replica = link.session.replica
    return replica in pushers and pushers[replica][0] == link.session.incarnation


def _rows(values: Values) -> Any:
    return np.concatenate([values[name].astype(np.float64) for name in HEIGHTS])


def _versions(values: Values) -> list[int]:
    """Return the version of each row."""
    wide, narrow = HEIGHTS["wide"], HEIGHTS["narrow"]
    versions = values.read.of_shards.tolist()
    return [*versions[:wide], *versions[wide:] * narrow]


def _rows_of(outcome: PushOutcome) -> list[int]:
    """Return the rows that refused a push."""
    rows: list[int] = []
    for shard in outcome.refused:
        first = 0 if shard.name == "wide" else HEIGHTS["wide"]
        rows += range(first + shard.start // COLUMNS, first + shard.stop // COLUMNS)
    return rows
