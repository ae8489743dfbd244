"""Clients push to a store on disks, whose servers lose their power and come back with their disks.

There are three controllers, four servers with a folder each, and three clients. The clients open the store by
its name again whenever it fails. A seed draws when a push is acknowledged: with one copy in memory
(`single`), with several (`replicated`), or on disks (`durable`). All servers lose their power together or are
killed, once or several times, sometimes with the controllers. Single servers end, too, and disks are full,
slow, fail or rot. A crash loses unsynced writes or tears them. Bits rot on only one server's disk, while
other copies of its shards are whole. In half of the plans with copies one array is cold: clients seldom push
to it after the start. So servers that join again take its piece from their disks.

The invariants: the disks give back states that servers gave to them, none older than at the last start
(`checkers.saved_pushes`). The store comes back with each push once or never (`checkers.saved_pushes`). In
mode `durable` the disk has all acknowledged pushes. In the other modes it may lack those of at most the last
two writing intervals, counted back from the loss, or from an earlier loss of a primary that no other server
has replaced. After the return each push is applied at most once. As in `pushes`, the copies of a bundle are
equal. In bsp the loss of a store also loses its step in progress.
"""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

from adam_async.parameter_server.server_disk import is_saved
from adam_async.persistence.records import FlushSettings
from adam_async.persistence.scan import SUFFIX
from tests.simulation.checkers.saved_pushes import Losses
from tests.simulation.faults import STEP_S, Strike, check_noticed, is_running, strike_all, until
from tests.simulation.plan import Fault, Plan, Setting, draw_options, in_order
from tests.simulation.random_streams import RandomStream
from tests.simulation.scenario import Ledger, Node, Scenario, Violation, World
from tests.simulation.scenarios.bundle_watch import FAILOVERS, FROM_DISK
from tests.simulation.scenarios.cluster import CONTROLLERS, SERVERS, Cluster
from tests.simulation.scenarios.disk_faults import mend_disk
from tests.simulation.scenarios.disk_watch import QUARANTINE, READ_BACK, REPLAYED, TORN
from tests.simulation.scenarios.power_faults import BLACKOUT, FULL_DISKS, KILL_ALL, SLOW_DISKS, PowerFaults
from tests.simulation.scenarios.pushes import PUSHERS, SLOTS, end
from tests.simulation.scenarios.server_faults import POWER, ServerFaults
from tests.simulation.scenarios.store_clients import Array, StoreClients

ROT, STRAND, DISK_ERROR = "rot", "strand", "disk-error"

ALL_KINDS = (POWER, POWER, KILL_ALL, BLACKOUT, ROT)
"""Faults that end all servers at once; a power cut is drawn twice as often as each other fault."""

ONE_KINDS = ("kill", "crash", DISK_ERROR)
"""Faults that end one server."""

SPARING_KINDS = (STRAND, "isolate", "split", "freeze")
"""Faults of one server with copies, which may leave on its disk states or entries that the others lack."""

DISK_KINDS = (SLOW_DISKS, FULL_DISKS)
"""Faults of all disks that end no server."""

SEGMENT_BYTES = (4 << 10, 32 << 10, 64 << 20)
"""Sizes of a segment file to draw from, in bytes; the small ones make compaction frequent."""

SAVED_S = 40.0
"""Time limit until a store is on the disks, in seconds."""

DISK_ENDS_S = 5.0
"""Time limit in seconds for a server's end after its disk has failed."""

TAKEN_OVER_S = 6.0
"""Time limit in seconds until another server has taken over."""

ROTTEN = 0.02
"""Share of the sectors in segment files that rot."""

MOST_TRIES = 50
"""Maximum number of attempts to rot a sector of a small disk."""

SETTLE_S = 0.5
"""Time for the rounds of writing to catch up after disks keep up again, in seconds, in addition to two
intervals between rounds."""

LOOK_S = 0.05
"""Interval between two checks of the primaries, in seconds."""

COLD = "cold"
COLD_ROWS = 32
"""Name of the array to which clients seldom push, in some plans, and its number of rows, which is one shard.
The shard has more than a quarter of all arrays' bytes, so one of the four bundles has only this shard. The
bundle's piece seldom changes while a server is away."""


class StoreFaults(PowerFaults):
    """Carries out the faults of a plan.

    Args:
        is_over: Returns whether the workload has ended.
        settings: `copies` and `flush_s`.

    Attributes:
        strikes: Faults by kind, for `faults.strike_all`.
    """

    def __init__(
        self,
        world: World,
        cluster: Cluster,
        is_over: Callable[[], bool],
        ledger: Ledger,
        losses: Losses,
        settings: Mapping[str, Setting],
    ) -> None:
        super().__init__(world, cluster, SERVERS)
        self._is_over = is_over
        self._losses = losses
        self._copies = int(settings["copies"])
        self._flush_s = float(settings["flush_s"])
        self._was_saved = self._rots = False
        self._rotten = 0
        """Number of sectors that the last rot has damaged."""
        self._of_one = ServerFaults(
            world, cluster.bundles, ledger, servers=SERVERS, peers=PUSHERS, is_over=is_over
        )
        own: dict[str, Strike] = {
            **dict.fromkeys(set(ALL_KINDS), self._lose_all),
            **dict.fromkeys(SPARING_KINDS, self._spare),
            **dict.fromkeys(DISK_KINDS, self._disks),
            STRAND: self._strand,
            "kill": self._end_one,
            "crash": self._end_one,
            DISK_ERROR: self._disk_error,
        }
        self.strikes: dict[str, Strike] = {kind: self._alone(strike) for kind, strike in own.items()}

    def _alone(self, strike: Strike) -> Strike:
        """Return a fault that waits until the others have ended and the first store is on the disks."""

        async def strike_alone(world: World, fault: Fault) -> None:
            async with self._one:
                if not self._was_saved:
                    await self._until_saved()
                check_noticed(not self._is_over())
                await strike(world, fault)

        return strike_alone

    def _is_saved(self) -> bool:
        """Return whether the primaries of an open store have reported that the store is on their disks."""
        cluster = self._cluster.bundles.map
        stores = [store for store in cluster.stores.values() if store.phase == "open"]
        return any(is_saved(cluster, store) and not self._losses.has_ended(store.id) for store in stores)

    async def _until_saved(self) -> None:
        """Wait until the open store is on the disks. Raises Missed if the workload has ended."""
        until = self._world.now + SAVED_S
        while not self._is_saved():
            check_noticed(not self._is_over())
            if self._world.now > until:
                problem = self._cluster.bundles.lacking() or "its servers have not reported that"
                raise Violation("a store comes back", f"it is not on the disks: {problem}")
            await asyncio.sleep(STEP_S)
        self._was_saved = True

    async def watch_primaries(self) -> None:
        """Note at intervals whether all shards of the open stores have their primaries."""
        bundles = self._cluster.bundles
        while True:
            await asyncio.sleep(LOOK_S)
            stores = {store.id for store in bundles.map.stores.values() if store.phase == "open"}
            primaries = [each.primary for each in bundles.map.bundles.values() if each.store in stores]
            self._losses.looked(all_led=all(each is not None and bundles.is_well(each) for each in primaries))

    # --- losses ------------------------------------------------------------------------------

    def _note_loss(self) -> None:
        """Record that the stores in the map have lost servers that they cannot spare."""
        for store in self._cluster.bundles.map.stores.values():
            self._losses.ended(store.id)

    def _lost(self, fault: Fault) -> None:
        self._rots = fault.kind == ROT and self._copies > 1 and not self._cluster.bundles.lacking()
        self._note_loss()
        self._losses.healed()

    def _without_power(self) -> None:
        self._rotten = self._rot(self._world.node(self._dice.choose(list(SERVERS)))) if self._rots else 0

    async def _lose_all(self, world: World, fault: Fault) -> None:
        """End all servers at once; one server's disk may rot."""
        await self._end_all(fault)
        if self._rots:  # a disk reports its damage until the repair
            check_noticed(bool(self._rotten))
            await self._until_saved()
            self._cluster.disks.failing.clear()

    def _rot(self, node: Node) -> int:
        """Flip a bit in some sectors of a server's disk; return how many."""
        disks = self._cluster.disks
        disks.failing.add(node.name)
        disks.rotten.add(node.name)
        disks.states.forget(node.name)
        flipped = 0
        for _ in range(MOST_TRIES):
            flipped = flipped or node.disk_model.rot(partial(self._may_rot, node))
        return flipped

    def _may_rot(self, node: Node, path: Path, sector: int) -> bool:
        """Decide whether a sector of a server's disk rots.

        The start of a folder's only file stays whole: if no file has a valid start, a server refuses the
        folder until an operator moves it away.
        """
        if path.suffix != SUFFIX or not self._dice.chance(ROTTEN):
            return False
        files = [name for name in node.disk_model.folder(path.parent)[1] if name.endswith(SUFFIX)]
        return sector > 0 or len(files) > 1

    async def _end_one(self, world: World, fault: Fault) -> None:
        """End one server, and start it again with its disk."""
        if self._copies > 1:
            await self._of_one.strikes[fault.kind](world, fault)
            return
        node = self._running(fault)
        self._note_loss()
        node.crash() if fault.kind == "crash" else node.kill()
        await asyncio.sleep(fault.lasts_s)
        node.restart()

    async def _spare(self, world: World, fault: Fault) -> None:
        check_noticed(self._copies > 1)
        await self._of_one.strikes[fault.kind](world, fault)

    async def _strand(self, world: World, fault: Fault) -> None:
        """Cut a primary off from servers and controllers, and end all servers after another one took over.

        Clients still reach the old primary, so its disk gets entries that are never committed.
        """
        check_noticed(self._copies > 1)
        others = [*SERVERS, *CONTROLLERS]
        async with self._of_one.victim(fault, leads=True) as name:
            others.remove(name)
            led = set(self._cluster.bundles.led_by(name))
            for other in others:
                world.network.cut(name, other)
            await until(world, lambda: led.isdisjoint(self._cluster.bundles.led_by(name)), TAKEN_OVER_S)
            await asyncio.sleep(fault.lasts_s)

            def heal() -> None:
                for other in others:
                    world.network.heal(name, other)

            await self._end_all(fault, heal)

    def _running(self, fault: Fault) -> Node:
        node = self._world.node(fault.targets[0] if fault.targets else self._dice.choose(list(SERVERS)))
        check_noticed(is_running(node))
        return node

    # --- disks -------------------------------------------------------------------------------

    async def _disk_error(self, world: World, fault: Fault) -> None:
        """Make a disk fail, with `amount` 1 only its syncs; its server must end, and later restarts."""
        if self._copies > 1:
            async with self._of_one.victim(fault) as name:
                await self._fail_disk(world.node(name), fault)
            return
        node = self._running(fault)
        self._note_loss()
        await self._fail_disk(node, fault)

    async def _fail_disk(self, node: Node, fault: Fault) -> None:
        assert node.task is not None
        self._cluster.disks.failing.add(node.name)
        if fault.amount:
            node.disk_conditions.fail_syncs = 1.0
        else:
            node.disk_conditions.fail = 1.0
        await asyncio.wait([node.task], timeout=DISK_ENDS_S)
        ended = node.task.done()
        if not ended and not self._is_over():
            raise Violation("I11", f"{node.name} goes on {DISK_ENDS_S:g} s after its disk failed")
        node.kill()
        await asyncio.sleep(fault.lasts_s)
        mend_disk(node)
        node.restart()
        self._cluster.disks.failing.discard(node.name)
        check_noticed(ended)

    async def _disks(self, world: World, fault: Fault) -> None:
        """Slow down all disks, whose syncs take `amount` seconds longer, or fill them."""
        self._losses.troubled()
        nodes = [world.node(name) for name in SERVERS]
        if await self._trouble(fault, nodes):
            check_noticed(any(map(is_running, nodes)))
            await asyncio.sleep(2 * self._flush_s + SETTLE_S + 4 * fault.amount)
            self._losses.healed()


ACKS = ("single", "replicated", "durable")
"""Moments of acknowledgement to draw from."""

CONSISTENCIES = ("asp", "asp", "ssp:2", "bsp")
"""Consistencies to draw from."""

FLUSH_S = (0.2, 0.5, 1.0)
"""Possible times in seconds between two rounds of writing."""

PACES_S = (0.08, 0.2, 0.4)
"""Mean pauses of a client between two steps to draw from, in seconds."""

COLD_SHARE = 0.5
"""Share of the plans with copies in which an array is cold."""

COLD_SERVER = SERVERS[0]
"""Server with the cold array, which is the largest shard."""

RETURNING_KINDS = ("kill", "crash")
"""Faults after which the server with the cold array joins again with its disk."""

BEGUN_S, STRIKE_S = 1.5, 9.0
"""Earliest and latest start of a fault, in seconds."""

LEAST_PUSHES = 40
"""Minimum number of acknowledged pushes before the clients end."""

RECOVERED = "arrays recovered with pushes"
LOST = "acknowledged pushes lost"
PINS = "pins made"
PINNED_STATES = "states of pins compared with the log"


def draw_plan(dice: RandomStream) -> Plan:
    """Draw losses of all servers, and further faults."""
    settings = _draw_store(dice)
    kinds = [dice.choose(ALL_KINDS) for _ in range(1 + dice.below(3))]
    kinds += [dice.choose(_further_kinds(settings)) for _ in range(dice.below(4))]
    options, faults = draw_options(dice, settings), [_draw_fault(dice, kind) for kind in kinds]
    if settings["cold"]:
        faults.append(_draw_fault(dice, dice.choose(RETURNING_KINDS), server=COLD_SERVER))
    return Plan(options=options, faults=in_order(faults))


def _draw_store(dice: RandomStream) -> dict[str, Setting]:
    ack, consistency = dice.choose(ACKS), dice.choose(CONSISTENCIES)
    copies = {"single": 1, "replicated": dice.choose([2, 3]), "durable": dice.choose([1, 2, 3])}[ack]
    return {
        "ack": ack,
        "copies": copies,
        "min_in_sync": 0 if copies == 1 else dice.choose([0, 0, 1]),
        "consistency": consistency,
        "momentum": dice.chance(0.2) and consistency != "bsp",
        "flush_s": dice.choose(FLUSH_S),
        "pace_s": dice.choose(PACES_S),
        "segment_bytes": dice.choose(SEGMENT_BYTES),
        "cold": copies != 1 and dice.fork("cold").chance(COLD_SHARE),
    }


def _further_kinds(settings: dict[str, Setting]) -> tuple[str, ...]:
    sparing = SPARING_KINDS if settings["copies"] != 1 else ()
    return (*ALL_KINDS, *ONE_KINDS, *DISK_KINDS, *sparing, *sparing)


def _draw_fault(dice: RandomStream, kind: str, *, server: str = "") -> Fault:
    targets: tuple[str, ...] = (server,) if server else ()
    if not server and kind in ONE_KINDS and dice.chance(0.5):
        targets = (dice.choose(SERVERS),)
    amount = 0.0
    if kind == SLOW_DISKS:
        amount = dice.choose([0.05, 0.2, 0.5])
    elif kind in (*ALL_KINDS, DISK_ERROR, "split"):
        amount = float(dice.below(2))
    least_s, most_s = {FULL_DISKS: (0.3, 4.0), STRAND: (0.05, 0.6)}.get(kind, (0.3, 2.0))
    lasts_s = dice.between(least_s, most_s)
    at_s = dice.between(BEGUN_S, STRIKE_S)
    return Fault(at_s=round(at_s, 3), kind=kind, targets=targets, lasts_s=round(lasts_s, 3), amount=amount)


async def run(world: World, plan: Plan, ledger: Ledger) -> None:
    """Carry out a plan."""
    settings = plan.options.settings
    permitted_s = None if settings["ack"] == "durable" else 2 * float(settings["flush_s"])
    losses = Losses(permitted_s=permitted_s, now=lambda: world.now)
    flush = FlushSettings(flush_s=float(settings["flush_s"]), segment_bytes=int(settings["segment_bytes"]))
    cold = {COLD: {COLD: Array(rows=COLD_ROWS, split=False)}} if settings["cold"] else {}
    workload = replace(
        SLOTS,
        groups={**SLOTS.groups, **cold},
        cold=COLD if cold else "",
        pace_s=float(settings["pace_s"]),
        vectors=0.0 if cold else SLOTS.vectors,  # the numbers of a step change every shard
    )
    cluster = Cluster(world, ledger, flush=flush)
    clients = StoreClients(world, cluster, ledger, settings, workload, losses)
    async with asyncio.TaskGroup() as group:
        watch = group.create_task(cluster.watch(), name="watch")
        faults = StoreFaults(world, cluster, lambda: not clients.are_going_on, ledger, losses, settings)
        looks = group.create_task(faults.watch_primaries(), name="primaries")
        await strike_all(world, plan.faults, ledger, own=faults.strikes)
        await end(world, cluster, clients, ledger, least_pushes=LEAST_PUSHES)
        watch.cancel()
        looks.cancel()
    ledger.counts[RECOVERED], ledger.counts[LOST] = losses.recovered, losses.lost
    ledger.counts[PINS], ledger.counts[PINNED_STATES] = clients.pins.made, cluster.disks.logged.compared


POWER_CUTS = Scenario(
    name="power",
    about="servers with disks lose their power, all at once or one by one, and their store comes back",
    kinds=(),
    least_operations=LEAST_PUSHES,
    events=(RECOVERED,),
    limit_s=600.0,
    marks=(RECOVERED, LOST, TORN, QUARANTINE, REPLAYED, READ_BACK, FAILOVERS, FROM_DISK, PINS, PINNED_STATES),
    plan=draw_plan,
    run=run,
)
