"""A run in bsp loses the power of all its machines, again and again, and ends with the bits of a calm run.

The cluster is that of `training`, with disks in its servers and the workers of three or two replicas. A seed
draws the time between two cuts, the number of servers and the rule. The driver trains twice. Nothing disturbs
the first run. In the second run all servers, workers and data servers lose their power at drawn times
together with the driver, sometimes with the controllers, and come back with their disks. The driver that
starts again continues the run. Disks are full or slow meanwhile.

The invariants: the second run ends with the values of the first, bit by bit, and each epoch counts all
images. A cut that the map showed as complete stays, and a disk has few cuts (`checkers.cuts`).
"""

import asyncio

import numpy as np

from adam_async.driver.driver import Driver
from adam_async.driver.settings import DriverSettings, RunInputs
from adam_async.driver.takeover import Attach
from adam_async.errors import AdamError, first_cause
from adam_async.parameter_server.server_disk import ServerDisk
from adam_async.parameter_server.store_cuts import NO_CLOCK, complete_clock, reports_in_sync
from adam_async.run.config import Config, Waits
from adam_async.run.result import RunResult
from tests.simulation.checkers.cuts import KeptCuts
from tests.simulation.faults import check_noticed, strike_all, until
from tests.simulation.plan import Fault, Plan, Setting, draw_options, in_order
from tests.simulation.pool import SimulatedPool
from tests.simulation.random_streams import RandomStream
from tests.simulation.scenario import Ledger, Node, Scenario, Violation, World
from tests.simulation.scenarios.power_faults import BLACKOUT, FULL_DISKS, SLOW_DISKS, PowerFaults
from tests.simulation.scenarios.server_faults import POWER
from tests.simulation.scenarios.training import run_result
from tests.simulation.scenarios.training_cluster import DATA_SERVERS, IMAGES, WORKERS, TrainingCluster, images
from tests.simulation.scenarios.training_setups import Setup, setup_of
from transport import TransportError

TRAINED = Config(
    epochs=3,
    replicas=2,
    servers=2,
    data_servers=2,
    images_per_group=6,
    consistency="bsp",
    shard_bytes=4 << 10,
    threads=1,
    rate=0.1,
    kernels="numpy",
    waits=Waits(dial_s=20.0, call_s=20.0, answer_s=0.5, patience_s=60.0),
)

FLUSH_S = (0.1, 0.3, 1.0)
"""Times between two cuts to draw from, in seconds."""

SERVERS = (2, 3)
"""Numbers of servers to draw from."""

RULES: tuple[dict[str, Setting], ...] = ({}, {"momentum": 0.9, "rate": 0.02}, {"rule": "adam", "rate": 0.001})
"""Rules to draw from."""

SAVED_S = 60.0
"""Time limit until the disks have a cut of the second run, in seconds."""

LAST_S = 4.0
"""Latest start in seconds of a fault after the previous one."""

AGAIN_S = 0.5
"""Pause of the driver after an error, in seconds."""

LOOK_S = 0.02
"""Interval between two looks at the map, in seconds."""

GOES_ON = "runs that go on from disks"
CUTS_READ = "cuts read"


class CutsCluster(TrainingCluster):
    """The machines of both runs.

    Attributes:
        cuts: The cuts on the disks.
        calm: Result of the first run; None before its end.
    """

    def __init__(self, world: World, setup: Setup, ledger: Ledger) -> None:
        self.cuts = KeptCuts()
        self.calm: RunResult | None = None
        super().__init__(world, setup, ledger, on_disks=True)

    async def _opened(self, name: str, disk: ServerDisk) -> None:
        await super()._opened(name, disk)
        self.cuts.opened(name, disk)
        self._ledger.counts[CUTS_READ] = self.cuts.read

    async def _run_driver(self, node: Node) -> RunResult:
        """Train both runs; after a loss continue the second one, even after an error."""
        is_first = node.incarnation == 1
        while not is_first:
            try:
                result = await self._train_on(node, Attach())
            except* (AdamError, TransportError) as errors:
                self._ledger.note("ended", node.name, str(first_cause(errors)))
            else:
                return result
            await asyncio.sleep(AGAIN_S)
        return await self._train_on(node, None)

    async def _train_on(self, node: Node, attach: Attach | None) -> RunResult:
        inputs = RunInputs(spec=self.setup.spec, attach=attach)
        settings = DriverSettings(threads=1, make_pool=SimulatedPool, **self._place("driver", node))
        async with Driver(self.setup.config, settings, inputs) as driver:
            if self.calm is None:
                self.calm = await driver.train(self._on_epoch)
            result = await driver.train(self._on_epoch)
        events = [event["event"] for event in result.events]
        self._ledger.counts[GOES_ON] += sum(["goes on from the disks" in event for event in events])
        return result

    @property
    def complete(self) -> int:
        """The second run's newest complete clock in the map; `NO_CLOCK` before it has one."""
        store = self.map.run_store if self.calm is not None else None
        if store is None or not store.buckets:
            return NO_CLOCK
        reports = reports_in_sync(self.map, store, {*store.buckets})
        clock = complete_clock(reports, disks=1) if all(reports.values()) else NO_CLOCK
        if clock != NO_CLOCK:
            self.cuts.complete(store.id, clock)
        return clock

    async def watch_cuts(self) -> None:
        """Follow the complete clocks. Raises Violation."""
        while True:
            await asyncio.sleep(LOOK_S)
            assert self.complete >= NO_CLOCK


class CutsFaults(PowerFaults):
    """Carries out the faults of a plan.

    Attributes:
        strikes: Faults by kind, for `faults.strike_all`.
    """

    def __init__(self, world: World, cluster: CutsCluster) -> None:
        super().__init__(world, cluster, cluster.setup.servers, (*WORKERS, *DATA_SERVERS, "driver"))
        self._cuts = cluster
        self.strikes = dict.fromkeys((POWER, BLACKOUT, FULL_DISKS, SLOW_DISKS), self._strike)

    def _lost(self, fault: Fault) -> None:
        self._cuts.cuts.lost()

    async def _strike(self, world: World, fault: Fault) -> None:
        """End all machines, or trouble some disks, once the disks have a cut of the second run."""
        async with self._one:
            cluster = self._cuts
            await until(world, lambda: cluster.is_over or cluster.complete != NO_CLOCK, SAVED_S)
            await asyncio.sleep(self._dice.between(0.0, LAST_S / 4))
            check_noticed(not cluster.is_over)
            if fault.kind in (FULL_DISKS, SLOW_DISKS):
                await self._trouble(
                    fault, [world.node(name) for name in self._servers if self._dice.chance(0.7)]
                )
            else:
                await self._end_all(fault)


def draw_plan(dice: RandomStream) -> Plan:
    """Draw two or three losses of power, and disk trouble before one loss."""
    settings: dict[str, Setting] = {
        "flush_s": dice.choose(FLUSH_S),
        "servers": dice.choose(SERVERS),
        **dice.choose(RULES),
    }
    kinds = [POWER, dice.choose((POWER, BLACKOUT)), dice.choose((POWER, FULL_DISKS, SLOW_DISKS))]
    faults = [
        Fault(
            at_s=round(1.0 + dice.between(0.0, LAST_S), 3),
            kind=kind,
            lasts_s=round(dice.between(0.3, 3.0), 3),
            amount=round(dice.between(0.05, 0.5), 3) if kind == SLOW_DISKS else float(dice.chance(0.7)),
        )
        for kind in kinds
    ]
    return Plan(options=draw_options(dice, settings), faults=in_order(faults))


def check_result(cluster: CutsCluster, result: RunResult, ledger: Ledger) -> None:
    """Compare the result of the second run with that of the first. Raises Violation."""
    calm = cluster.calm
    assert calm is not None
    counted = [(epoch.images, epoch.skipped) for epoch in result.epochs]
    if counted != [(IMAGES, 0)] * cluster.setup.config.epochs:
        raise Violation("every image once", f"epochs counted {counted} (images, skipped) of {IMAGES}")
    if not all(np.array_equal(calm.weights[name], result.weights[name]) for name in calm.weights):
        raise Violation("bits", "the values differ from those of the run that nothing disturbed")
    losses = [[epoch.train_loss for epoch in each.epochs] for each in (calm, result)]
    if losses[0] != losses[1]:
        raise Violation("bits", f"the losses are {losses[1]}, not {losses[0]}")
    ledger.operations = sum([images for images, _ in counted])


async def run(world: World, plan: Plan, ledger: Ledger) -> None:
    """Carry out a plan."""
    images()
    cluster = CutsCluster(world, setup_of(plan.options.settings, TRAINED), ledger)
    async with asyncio.TaskGroup() as group:
        watch = group.create_task(cluster.watch_cuts(), name="cuts")
        await strike_all(world, plan.faults, ledger, own=CutsFaults(world, cluster).strikes)
        result = await run_result(cluster)
        watch.cancel()
    check_result(cluster, result, ledger)


CUTS = Scenario(
    name="cuts",
    about="a run in bsp on disks loses the power of all machines, and has the bits of a calm run",
    kinds=(POWER,),
    least_operations=IMAGES,
    limit_s=600.0,
    marks=(GOES_ON, CUTS_READ, BLACKOUT, FULL_DISKS, SLOW_DISKS),
    plan=draw_plan,
    run=run,
)
