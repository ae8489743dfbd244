"""Clients of a store: programs that use the shipped client to open it, push, pull, tick, and leave or delete
it.

Each client runs on its own machine. A program whose store fails or ends opens the store with that name again.
In each step the client makes one or several pushes at once, each to one group of arrays, ends the step and
pulls a group. Every push adds 1 to its own column in each row of its group (`checkers.store_pushes`). A
`Workload` has the arrays, and the shares of everything that a client may do.

`PendingPushes` has the pushes that wait for their answers, and the time limit for these answers. A store with
`Losses` is on disks: it comes back after a loss of all servers, and clients use its pins, too.
"""

import asyncio
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from adam_async.errors import AdamError, StoreError, first_cause
from adam_async.model.rules import Sgd
from adam_async.run.arrays import ArraySpec, Factors
from adam_async.run.cluster_map import ClusterMap
from adam_async.run.config import Waits, slack_of
from adam_async.run.ids import Replica
from adam_async.store.arguments import OpenArguments
from adam_async.store.arrays import Gradient, InitialArrays
from adam_async.store.opening import ServerAccess, StoreLink
from adam_async.store.store import ParameterStore
from adam_async.store.values import PushOutcome, Values
from adam_async.store.vectors import Combine
from tests.simulation.checkers.saved_pins import SavedPins
from tests.simulation.checkers.saved_pushes import Losses, SavedPushes
from tests.simulation.checkers.store_pushes import Pulled, StorePushes
from tests.simulation.checkers.vector_sums import INBOX, TOTAL, VectorSums
from tests.simulation.plan import Setting
from tests.simulation.random_streams import RandomStream
from tests.simulation.scenario import Ledger, Node, Violation, World, settle
from tests.simulation.scenarios.bundle_watch import BundleWatch
from tests.simulation.scenarios.cluster import SERVERS, Cluster, network_of
from transport import TransportError

HEALED_S = 10.0
"""Time limit of all pending pushes after the end of the faults, in seconds."""


class PendingPushes:
    """Pending pushes of all clients, over all incarnations of their machines."""

    def __init__(self, world: World, bundles: BundleWatch) -> None:
        self._world = world
        self._bundles = bundles
        self._clients: dict[int, str] = {}
        """Client of each pending push, by the number of the push."""
        self._pushes = 0

    @contextmanager
    def noted(self, client: str) -> Iterator[None]:
        """Note a push as pending until the end of the block, and then as answered."""
        self._pushes += 1
        number = self._pushes
        self._clients[number] = client
        self._bundles.pending = len(self._clients)
        yield
        self._clients.pop(number, None)
        self._bundles.pending = len(self._clients)
        self._bundles.acknowledged += 1

    def forget(self, client: str) -> None:
        """Forget the pushes of a killed client incarnation, or of a failed store."""
        for number in [number for number, name in self._clients.items() if name == client]:
            del self._clients[number]
        self._bundles.pending = len(self._clients)

    async def answered(self, excused: Callable[[str], bool] = lambda client: False) -> None:
        """Wait for the answers to all pushes that are pending now.

        Args:
            excused: Whether a client waits for other events than answers of servers.

        Raises:
            Violation: A push is pending for `HEALED_S`.
        """
        pending = set(self._clients)

        def left() -> str:
            clients = {self._clients[number] for number in pending & self._clients.keys()}
            late = sorted(client for client in clients if not excused(client))
            return f"pushes of {', '.join(late)} are pending; {self._bundles.lacking()}" if late else ""

        await settle(self._world, left, within_s=HEALED_S, invariant="pending pushes end")


WAITS = Waits(
    dial_s=20.0, call_s=20.0, answer_s=0.5, patience_s=60.0, clock_s=60.0, prepare_s=60.0, checkpoint_s=5.0
)

BEGUN_WITH = 2
"""Number of clients that the first step of a store with clocks waits for."""

LARGE = 1e30
"""Value of the elements of two factors whose product is not finite in float32."""

MOMENTUM, MOST_MOMENTUM = 0.5, 2.25
"""Momentum of some stores, and largest value in the column of a push that was applied once with this
momentum. The powers of 0.5 sum to at most 2; a push that was applied twice gives at least 2.5."""

TORN, TORN_S = 0.1, 0.02
"""Share of steps in which a client's links break, and the latest time in seconds after its pushes begin.
Several pushes without an answer are then repeated on the next link."""

READ_S = 0.6
"""Mean pause between two pulls of the reader, in seconds."""

OPEN_AGAIN_S = 0.2
"""Pause in seconds between the failure of a store and the next attempt to open it."""

END_S = 30.0
"""Time limit in seconds for all clients to open the store, and then for their last steps."""

PIN_CHANCE, GIVE_UP, PINS_OF_CLIENT = 0.4, 0.3, 3
"""Share of steps after which a client uses a pin of a store on disks, share of these steps in which it gives
one up, and number of names per client."""

FIRST, WARM_SHARE, COLD_SHARE = 3, 0.2, 0.002
"""Number of pushes to a cold group soon after the start, share of the pushes that go to the group until then,
and share afterwards. The first pushes make its values differ from the initial ones."""

PUSHED = "pushes to stores"
"""Name of the acknowledged pushes' count."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Array:
    """One array of a store; all arrays have the columns of the workload."""

    rows: int
    dtype: str = "float32"
    split: bool = True
    """Whether each shard has some rows; else one shard has all."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """The store of a scenario, and the work of its clients.

    Attributes:
        store: Name of the store.
        machines: Machines of the clients.
        reader: Machine of a client that only reads; empty for none.
        groups: Arrays that a push has together, by name of the group.
        cold: Group to which clients seldom push; empty for none.
        columns: Number of columns: the maximum number of pushes to a group.
        pace_s: Mean pause of a client between two steps, in seconds.
        infinite: Share of pushes with a gradient that is not finite; none in bsp, where the servers would
            refuse the whole sum.
        factors: Share of pushes with factors. Factors need arrays with more rows than there are servers, so
            that factors have fewer bytes than their product.
        pulls: Share of steps with a pull beside the pushes.
        deletes: Share of steps at which the client deletes the store, as it does once the store is full; 0: a
            full store ends all clients' work.
        leaves: Share of steps at which the program ends, and leaves its number to the next program.
        vectors: Share of steps with a push to a vector or a step on vectors; none in bsp.
    """

    store: str
    machines: tuple[str, ...]
    reader: str = ""
    groups: Mapping[str, Mapping[str, Array]]
    cold: str = ""
    columns: int
    shard_bytes: int
    pace_s: float
    infinite: float = 0.0
    factors: float = 0.0
    pulls: float = 0.0
    deletes: float = 0.0
    leaves: float = 0.0
    vectors: float = 0.0

    @cached_property
    def arrays(self) -> dict[str, Array]:
        """All arrays by name, in the order of the store."""
        return dict(chain.from_iterable(group.items() for group in self.groups.values()))

    def rows(self, group: str) -> int:
        """Return the number of rows in a group."""
        return sum(array.rows for array in self.groups[group].values())

    @cached_property
    def shards(self) -> dict[str, list[int]]:
        """By group, index of each row's shard."""
        found: dict[str, list[int]] = {group: [] for group in self.groups}
        first = 0
        for group, arrays in self.groups.items():
            for array in arrays.values():
                row_bytes = self.columns * np.dtype(array.dtype).itemsize
                rows = self.shard_bytes // row_bytes if array.split else array.rows
                found[group] += [first + row // rows for row in range(array.rows)]
                first += -(-array.rows // rows)
        return found


@dataclass(slots=True, eq=False)
class OpenStore:
    """One client's open store."""

    name: str
    link: StoreLink
    pushes: dict[str, StorePushes]
    """Pushes by group."""
    dice: RandomStream
    step: int
    """Number of steps that the client has ended: by a tick or, with bsp, also by the push of a step."""
    begun: int = -1
    """Clock at which the servers began to count the client, above its own if they heard of it late; -1 until
    all primaries count it."""

    @property
    def left(self) -> list[str]:
        """Names of the groups that are not full."""
        return [group for group, pushes in self.pushes.items() if not pushes.full]


class StoreClients:
    """All clients of a run, over all incarnations of their machines.

    Args:
        settings: `consistency`, `copies`, `min_in_sync`, `momentum`, and with disks `ack`.
        losses: The losses of all servers, and the pushes that they may cost; None: servers have no disks.

    Attributes:
        pending: Pushes without an answer.
        pins: All clients' pins of a store on disks.
        deletes_next: Whether the next client that begins a step deletes the store.
        are_going_on: Whether the clients work: until `stop`, or until a store is full that none of them may
            delete.
    """

    def __init__(
        self,
        world: World,
        cluster: Cluster,
        ledger: Ledger,
        settings: Mapping[str, Setting],
        workload: Workload,
        losses: Losses | None = None,
    ) -> None:
        self._world = world
        self._cluster = cluster
        self._ledger = ledger
        self._workload = workload
        self._consistency = str(settings["consistency"])
        self._slack = slack_of(self._consistency)
        self._copies = int(settings["copies"])
        self._min_in_sync = int(settings["min_in_sync"])
        self._momentum = MOMENTUM if settings["momentum"] else 0.0
        self._losses = losses
        self._is_durable = losses is not None and settings["ack"] == "durable"
        self._newest: dict[str, SavedPushes] = {}
        """Pushes to each group since the newest return of a store on disks."""
        self.pending = PendingPushes(world, cluster.bundles)
        self.pins = SavedPins()
        self._pin_dice = world.dice.fork("pins")
        self._stores: dict[str, dict[str, StorePushes]] = {}
        """Pushes by id of the store and group."""
        self._sums: dict[str, VectorSums] = {}
        """Pushes to each store's vectors, by the store's id, or by its name if it comes back from disks."""
        self._open: dict[str, OpenStore] = {}
        """Open store of each client."""
        self._working: set[str] = set()
        self._dice = world.dice.fork("stores")
        self.are_going_on = True
        self.deletes_next = False
        for name in workload.machines:
            world.node(name).start(self._run)
        if workload.reader:
            world.node(workload.reader).start(self._run)

    # --- programs ----------------------------------------------------------------------------

    async def _run(self, node: Node) -> None:
        dice = self._dice.fork(f"{node.name}/{node.incarnation}")
        self._ended(node.name)  # a killed incarnation leaves the client's name
        while self.are_going_on:
            self._working.add(node.name)
            try:
                await self._use(node, dice)
            except* (AdamError, TransportError) as errors:
                self._ledger.counts["stores opened again"] += 1
                self._ledger.note("store", node.name, str(first_cause(errors)))
            finally:
                self._ended(node.name)
            await asyncio.sleep(dice.around(OPEN_AGAIN_S))

    def _ended(self, name: str) -> None:
        """Forget the open store of a client."""
        self._open.pop(name, None)
        self._working.discard(name)
        self.pending.forget(name)

    async def _use(self, node: Node, dice: RandomStream) -> None:
        """Open the store, work on it, and leave it; other machines read the whole store once."""
        is_reader = node.name == self._workload.reader
        controllers = ",".join(self._cluster.addresses.values())
        access = ServerAccess(network=network_of(node), controllers=controllers, entropy=node.entropy)
        async with asyncio.TaskGroup() as group:
            link = StoreLink(
                self._workload.store, self._arguments(controllers, reader=is_reader), access, group
            )
            await link.start()
            pushes = self._pushes_to(link.store.id, node.name)
            opened = OpenStore(node.name, link, pushes, dice, link.calls.clock)
            if is_reader:
                await self._read(opened)
            elif node.name in self._workload.machines:
                self._open[node.name] = opened
                await self._work(opened)
                self._open.pop(node.name, None)
            else:
                await self._read_once(opened)
            await link.leave()
            for task in link.tasks:
                task.cancel()

    def _arguments(self, controllers: str, *, reader: bool) -> OpenArguments:
        if reader:
            return OpenArguments(
                where=controllers, name=self._workload.store, create="never", reader=True, waits=WAITS
            )
        values: InitialArrays = {
            name: np.zeros((array.rows, self._workload.columns), array.dtype)
            if array.split
            else ArraySpec((array.rows, self._workload.columns), split=False)
            for name, array in self._workload.arrays.items()
        }
        return OpenArguments(
            where=controllers,
            arrays=values,
            name=self._workload.store,
            rule=Sgd(rate=1.0, momentum=self._momentum),
            consistency=self._consistency,
            replicas=BEGUN_WITH,
            copies=self._copies,
            min_in_sync=self._min_in_sync,
            shard_bytes=self._workload.shard_bytes,
            durable=self._is_durable,
            # The newest states may be on any disk, so all servers must be back before the store is.
            servers=len(SERVERS) if self._losses is not None else 0,
            waits=WAITS,
        )

    def _pushes_to(self, id: str, name: str) -> dict[str, StorePushes]:
        """Return the pushes to a store that a client has opened. Raises Violation."""
        pushes = self._stores.get(id)
        if pushes is None:
            is_last = name not in (*self._workload.machines, self._workload.reader)
            if is_last and self._losses is None:  # a client may be the first to open a returned store
                raise Violation("I1", f"the store is {id}, to which no client pushed")
            self._ledger.counts["stores created"] += 1
            pushes = self._stores[id] = self._new_pushes(id)
        return pushes

    def _new_pushes(self, id: str) -> dict[str, StorePushes]:
        """Return the pushes to each group of a new or returned store."""
        shapes: dict[str, dict[str, Any]] = {
            group: {
                "rows": self._workload.rows(group),
                "columns": self._workload.columns,
                "summed": self._slack == 0,
            }
            for group in self._workload.groups
        }
        if self._losses is None:
            return {group: StorePushes(f"{id}/{group}", **shape) for group, shape in shapes.items()}
        self._newest = {
            group: SavedPushes(id, group, losses=self._losses, before=self._newest.get(group), **shape)
            for group, shape in shapes.items()
        }
        return {**self._newest}

    # --- steps -------------------------------------------------------------------------------

    async def _work(self, opened: OpenStore) -> None:
        link, dice, workload = opened.link, opened.dice, self._workload
        while self.are_going_on:
            is_full = workload.deletes > 0 and not opened.left
            if self.deletes_next or is_full or (workload.deletes and dice.chance(workload.deletes)):
                self.deletes_next = False
                await link.delete()
                self._ledger.counts["stores deleted"] += 1
                return
            if not opened.left:
                self.are_going_on = False
                return
            if dice.chance(workload.leaves):
                return
            async with asyncio.TaskGroup() as group:
                for _ in range(1 + dice.below(4) if self._slack != 0 else 1):
                    pushed = self._draw_group(opened)
                    group.create_task(self._push(opened, pushed), name=f"{opened.name}/push")
                if dice.chance(workload.pulls):
                    pulled = dice.choose(list(opened.pushes))
                    group.create_task(self._pull(opened, pulled), name=f"{opened.name}/pull")
                if self._slack != 0 and dice.chance(workload.vectors):
                    group.create_task(self._use_vectors(opened), name=f"{opened.name}/vectors")
                if dice.chance(TORN):
                    group.create_task(self._tear(opened), name=f"{opened.name}/tear")
            await ParameterStore(link).tick()
            opened.step = link.calls.clock
            await self._pull_alone(opened)
            if self._losses is not None and self._pin_dice.chance(PIN_CHANCE):
                try:
                    await self._use_pins(opened)
                except (AdamError, TransportError) as error:
                    self._ledger.note("pin", opened.name, str(error))
            await asyncio.sleep(dice.around(workload.pace_s))

    async def _tear(self, opened: OpenStore) -> None:
        """Reset the links of a client to the servers, perhaps between its pushes and their answers."""
        await asyncio.sleep(opened.dice.between(0.0, TORN_S))
        for server in self._cluster.servers:
            self._world.network.reset(opened.name, server)

    def _draw_group(self, opened: OpenStore) -> str:
        """Draw a group that is not full; at least one must not be full."""
        cold = self._workload.cold
        warm = [group for group in opened.left if group != cold]
        if cold in opened.left:
            begun = self._workload.columns - opened.pushes[cold].room
            if not warm or opened.dice.chance(WARM_SHARE if begun < FIRST else COLD_SHARE):
                return cold
        return opened.dice.choose(warm)

    async def _push(self, opened: OpenStore, group: str) -> None:
        link, pushes, dice, workload = opened.link, opened.pushes[group], opened.dice, self._workload
        if pushes.full:
            return  # other clients took the last columns before this task began
        if self._slack != 0 and dice.chance(workload.infinite):
            await self._push_infinity(opened, group)
            return
        weight = 1
        if self._slack == 0:
            weight += dice.below(3)
            opened.step = link.calls.clock + 1  # with bsp the push ends the step on its shards
        column = pushes.begin(opened.name, clock=opened.step, weight=weight)
        has_factors = dice.chance(workload.factors)
        gradients: dict[str, Gradient] = {}
        for name, array in workload.groups[group].items():
            row = np.zeros((1, workload.columns), array.dtype)
            row[0, column] = -1
            factors = Factors(row, np.ones((1, array.rows), array.dtype))
            gradients[name] = factors if has_factors else np.repeat(row, array.rows, axis=0)
        with self.pending.noted(opened.name):
            outcome = await ParameterStore(link).push(gradients, weight=weight)
        pushes.acknowledged(column, self._refused_rows(group, outcome))
        self._ledger.counts[PUSHED] += 1

    async def _use_vectors(self, opened: OpenStore) -> None:
        """Add ones to a vector, or move it to another one; see `checkers.vector_sums`."""
        store, array = ParameterStore(opened.link), next(iter(self._workload.arrays))
        for name in (INBOX, TOTAL):
            if name not in store.vectors:
                await store.add_vector(name, like=array, temporary=name == INBOX)
        sums = self._sums_of(opened)
        with self.pending.noted(opened.name):
            if opened.dice.chance(0.6):
                sums.begun += 1
                shape = opened.link.calls.layout.arrays[array].shape
                outcome = await store.push({array: np.ones(shape, np.float32)}, vector=INBOX)
                if outcome.refused:
                    raise Violation(
                        "conservation of vectors", f"a push of ones was refused: {outcome.refused}"
                    )
                sums.acknowledged += 1
            else:
                before = sums.acknowledged
                move = Combine(TOTAL, ((1.0, TOTAL), (1.0, INBOX)))
                (square,) = await store.step([move, Combine(INBOX, ())], [(TOTAL, TOTAL)])
                sums.check_square(square, acknowledged=before)
        self._ledger.counts["vectors used"] += 1

    def _sums_of(self, opened: OpenStore) -> VectorSums:
        # A store that comes back from disks has another id, and may lack the last pushes.
        keeps_all = self._losses is None
        key = opened.link.store.id if keeps_all else opened.link.calls.name
        if key not in self._sums:
            array = next(iter(self._workload.arrays.values()))
            self._sums[key] = VectorSums(key, array.rows * self._workload.columns, keeps_all=keeps_all)
        return self._sums[key]

    async def _push_infinity(self, opened: OpenStore, group: str) -> None:
        """Push finite factors whose product is not finite, which no server may apply."""
        large = {
            name: Factors(
                np.full((1, self._workload.columns), LARGE, array.dtype),
                np.full((1, array.rows), LARGE, array.dtype),
            )
            for name, array in self._workload.groups[group].items()
        }
        with self.pending.noted(opened.name):
            outcome = await ParameterStore(opened.link).push(large)
        # A repetition is answered as a duplicate if the server has forgotten the refusal.
        self._ledger.counts["refused pushes"] += bool(outcome.refused)

    def _refused_rows(self, group: str, outcome: PushOutcome) -> list[int]:
        """Return the rows of a group that refused a push."""
        first, firsts = 0, dict[str, int]()
        for name, array in self._workload.groups[group].items():
            firsts[name], first = first, first + array.rows
        columns = self._workload.columns
        return [
            firsts[shard.name] + row
            for shard in outcome.refused
            for row in range(shard.start // columns, shard.stop // columns)
        ]

    async def _pull_alone(self, opened: OpenStore) -> None:
        """Pull a group while the client makes no push, and compare the clients' steps, too.

        Clients' steps are compared only if a push has all arrays: a client that joined late has no refused
        push in another group.
        """
        link, group = opened.link, opened.dice.choose(list(opened.pushes))
        if len(opened.pushes) > 1:
            await self._pull(opened, group)
            return
        at = link.calls.clock
        known = [other for other in self._open.values() if other is not opened and self._is_known(other)]
        mine = self._is_known(opened)
        before = opened.pushes[group].before()
        values = await ParameterStore(link).pull()
        newest = self._cluster.map
        pulled = self._pulled(
            group,
            values,
            bound=self._bound(at),
            at=at if mine and _is_live(link, newest) else None,
            others=[
                (each.name, max(each.step, each.begun))
                for each in known
                if mine and _is_live(each.link, newest)
            ],
        )
        opened.pushes[group].pulled(opened.name, before, pulled)

    async def _pull(self, opened: OpenStore, group: str) -> None:
        bound, before = self._bound(opened.link.calls.clock), opened.pushes[group].before()
        values = await ParameterStore(opened.link).pull(list(self._workload.groups[group]))
        opened.pushes[group].pulled(opened.name, before, self._pulled(group, values, bound=bound))

    def _bound(self, clock: int) -> int:
        """Return the step up to which a pull of a client at a clock must contain all pushes."""
        return max(clock - self._slack, 0) if self._slack is not None else 0

    def _pulled(self, group: str, values: Values, *, bound: int, **more: Any) -> Pulled:
        """Return pulled values in the form of the checker."""
        rows = self._rows(group, values)
        if self._momentum:
            rows = np.where((rows >= 1) & (rows < MOST_MOMENTUM), 1.0, rows)
        versions = values.read.of_shards[self._workload.shards[group]].tolist()
        return Pulled(rows=rows, versions=versions, bound=bound, **more)

    def _rows(self, group: str, values: Mapping[str, NDArray[Any]]) -> NDArray[np.float64]:
        """Return the rows of a group in pulled or pinned values."""
        arrays = [values[name].astype(np.float64) for name in self._workload.groups[group]]
        return np.concatenate(arrays)

    def _is_known(self, opened: OpenStore) -> bool:
        """Return whether the primaries of all bundles in a store have a clock for a client."""
        link, session, newest = opened.link, opened.link.session, self._cluster.map
        clocks: list[int] = []
        for home in set(link.store.buckets):
            bundle = newest.bundle(session.store, home)
            if bundle is None or bundle.primary is None:
                return False
            served = self._cluster.servers[bundle.primary[0]].served.get((session.store, home))
            if served is None or served.state.live.get(Replica(session.replica)) != session.incarnation:
                return False
            clocks += [tables.clocks[Replica(session.replica)] for tables in served.state.bundle.tables()]
        if opened.begun < 0:
            opened.begun = min(clocks, default=0)
        return True

    async def _read_once(self, opened: OpenStore) -> None:
        """Read all groups, pins and vectors, after the end of all pushes."""
        for each in opened.pushes:
            await self._pull(opened, each)
        rotten = len(self._cluster.disks.rotten)
        for name in self.pins.names:
            try:
                await self._read_pin(opened, name)
            except StoreError as error:
                if self.pins.must_be_there(name, rotten):
                    raise Violation("pin kept", f"pin {name} cannot be read: {error}") from error
        store, array = ParameterStore(opened.link), next(iter(self._workload.arrays))
        if {INBOX, TOTAL} <= store.vectors.keys():
            both = [(await store.pull(vector=name))[array] for name in (INBOX, TOTAL)]
            self._sums_of(opened).check_values((both[0] + both[1]).reshape(-1).tolist())
            self._ledger.counts["vectors read"] += 1

    async def _read(self, opened: OpenStore) -> None:
        (group,) = opened.pushes
        is_last = False
        while not is_last:
            is_last = not self.are_going_on
            before = opened.pushes[group].before()
            values = await ParameterStore(opened.link).pull()
            pulled = self._pulled(group, values, bound=values.clock)
            opened.pushes[group].pulled(opened.name, before, pulled)
            self._ledger.counts["stores read"] += 1
            await asyncio.sleep(opened.dice.around(READ_S))

    # --- pins --------------------------------------------------------------------------------

    async def _use_pins(self, opened: OpenStore) -> None:
        """Make a pin of this client, read any client's pin, or give one of this client's up."""
        dice, store = self._pin_dice, ParameterStore(opened.link)
        name = f"{opened.name}-{dice.below(PINS_OF_CLIENT)}"
        if name not in self.pins.names:
            await self._make_pin(opened, store, name)
        elif dice.chance(GIVE_UP):
            self.pins.forget(name)
            await store.unpin(name)
        elif self.pins.names:
            await self._read_pin(opened, dice.choose(self.pins.names))

    async def _make_pin(self, opened: OpenStore, store: ParameterStore, name: str) -> None:
        if any(pin.name == name for pin in await store.pins()):
            await store.unpin(name)  # the outcome of an earlier call is unknown
        acknowledged = {group: pushes.before().acknowledged for group, pushes in opened.pushes.items()}
        rotten = len(self._cluster.disks.rotten)
        await store.pin(name)
        begun = {
            group: frozenset(range(self._workload.columns - pushes.room))
            for group, pushes in opened.pushes.items()
        }
        self.pins.returned(
            name,
            servers=opened.link.store.min_in_sync_in_force,
            rotten=rotten,
            acknowledged={} if self._slack == 0 else acknowledged,
            begun=begun,
        )
        await self._read_pin(opened, name)

    async def _read_pin(self, opened: OpenStore, name: str) -> None:
        values = await ParameterStore(opened.link).read_pin(name)
        self.pins.values(name, {group: self._rows(group, values) for group in self._workload.groups})

    # --- the end -----------------------------------------------------------------------------

    async def answered(self) -> None:
        """Wait for the answers to all pushes that are pending now. Raises Violation."""
        await self.pending.answered(self._waits_for_others)

    async def stop(self) -> None:
        """Let all clients end their step, and leave.

        Raises:
            Violation: A client goes on, or stays away from a store that none deletes, for `END_S`.
        """
        if not self._workload.deletes:
            # With bsp the first step of a store that was opened again waits for `BEGUN_WITH` clients.
            await settle(self._world, self._absent, within_s=END_S, invariant="clients return")
        self.are_going_on = False
        await self.answered()
        await settle(self._world, self._unfinished, within_s=END_S, invariant="clients are answered")

    async def read_all(self) -> None:
        """Open the store once more, and check all groups; each acknowledged push is in its group once.

        Raises:
            Violation: An acknowledged push is missing, or counts twice.
        """
        reader = self._world.node("last-reader")
        reader.start(lambda node: self._use(node, self._dice))
        assert reader.task is not None
        await reader.task

    def _waits_for_others(self, name: str) -> bool:
        """Return whether the store of a client waits for further clients to begin the first step."""
        opened = self._open.get(name)
        store = self._cluster.map.store(opened.link.store.id) if opened is not None else None
        return self._slack is not None and store is not None and not store.epoch

    def _absent(self) -> str:
        away = sorted({*self._workload.machines} - self._working) if self.are_going_on else []
        return f"{', '.join(away)} did not open the store" if away else ""

    def _unfinished(self) -> str:
        """Return a text about the clients that still work; empty if none does."""
        left = [name for name in sorted(self._working) if not self._waits_for_others(name)]
        return f"{', '.join(left)} went on" if left else ""


def _is_live(link: StoreLink, cluster: ClusterMap) -> bool:
    """Return whether the controllers still keep the client's number."""
    store = cluster.store(link.store.id)
    if store is None:
        return False
    pushers = cluster.pushers(store)
    replica = link.session.replica
    return replica in pushers and pushers[replica][0] == link.session.incarnation
