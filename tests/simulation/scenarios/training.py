"""A whole cluster learns digits while controllers, workers and servers are lost, and links break.

Clients of a store beside the run are lost, too (`store_clients.py`).

Every role runs on its own machine: three controllers with a disk each, parameter servers, two data servers,
two replicas, a driver. In almost half of the seeds three or four servers keep two or three copies of each
shard, and are lost one after the other (`server_faults.py`). In the others two servers keep one copy, and
faults only delay them. In a third of the seeds the driver is lost, too; the next driver takes the run over or
replaces it. In half of the seeds a worker is lost within a step, of which only some servers have a message.
The invariants: the run ends in time; a driver takes over the run that waits for it; every epoch counts or
skips every image once; the model learns; each acknowledged push is in the shards (I1), and no push counts
twice (I2); the groups on the shards are those that the epochs count (`checkers.group_sets`). Checkpoints are
exact in bsp, and complete in every mode. The copies of a bundle have one log and equal values
(`checkers.bundles`); after the last fault the pending pushes of clients end, and all copies return. Gradients
cross the network, so a seed has the same replay hash only on machines whose BLAS gives the same bits.
"""

import asyncio

from adam_async.run.config import Config, Waits
from adam_async.run.result import RunResult
from tests.simulation.faults import strike_all
from tests.simulation.plan import Fault, Plan, Setting, draw_options, in_order
from tests.simulation.random_streams import RandomStream
from tests.simulation.scenario import Ledger, Scenario, Violation, World, settle
from tests.simulation.scenarios.bundle_watch import EVENTS, ROUND_OTHERWISE
from tests.simulation.scenarios.cluster import CONTROLLERS
from tests.simulation.scenarios.fence_watch import ANSWERED
from tests.simulation.scenarios.group_watch import GroupWatch
from tests.simulation.scenarios.store_clients import PUSHED, Array, StoreClients, Workload
from tests.simulation.scenarios.training_cluster import (
    CLIENTS,
    DATA_SERVERS,
    IMAGES,
    SERVERS,
    WORKERS,
    TrainingCluster,
    images,
)
from tests.simulation.scenarios.training_faults import (
    CLIENT_KINDS,
    CONTROLLER_KINDS,
    DRIVER_KINDS,
    LEAST_S,
    LINK_KINDS,
    SERVER_KINDS,
    TORN_KIND,
    TrainingFaults,
)
from tests.simulation.scenarios.training_setups import draw_copies, draw_setup, setup_of

TRAINING = Config(
    epochs=4,
    replicas=2,
    servers=2,
    data_servers=2,
    images_per_group=6,
    in_flight=2,
    shard_bytes=4 << 10,
    threads=1,
    epoch_fraction=1.0,
    rate=0.1,
    kernels="numpy",
    waits=Waits(dial_s=20.0, call_s=20.0, answer_s=0.5, patience_s=60.0),
)

COUNTS = Workload(
    store="counts",
    machines=CLIENTS,
    reader="reader-0",
    groups={"all": {"wide": Array(rows=4, dtype="float64"), "narrow": Array(rows=2)}},
    columns=80,
    shard_bytes=640,  # a row of float64, or two of float32
    pace_s=0.3,
    deletes=0.005,
    leaves=0.01,
)
"""The store beside the run. This store's two families of arrays make two messages of each push."""

CONSISTENCIES = ("asp", "ssp:2", "bsp")
"""Consistencies of this store."""

BEGUN_S, STRIKE_S = 1.0, 10.0
"""Earliest and latest start of a fault, in seconds."""

LEARNT = 0.75
"""Minimum test accuracy at the end, as a share; guessing gives 0.1."""

LEARNT_OTHERWISE = 0.25
"""Minimum test accuracy of a run with drawn options, which may learn slowly; the lowest observed value was
0.39."""

WHOLE_S = 30.0
"""Time limit until all bundles have all copies in sync after the last fault, in seconds."""

END_S = 60.0
"""Time limit in seconds for the run's end after the last fault."""

SERVER_S = 3.0
"""Maximum duration in seconds of a fault of a server with copies: several strike within a run."""

LOSSES = ("server-kill", "server-crash", "server-split", "server-successors")
"""Faults that cost a server's memory; each seed with copies has at least one."""

DRIVER_LOST, DRIVER_REPLACED = 0.35, 0.3
"""Share of the seeds that lose the driver, and share of these that then replace the run, where permitted."""

TORN = 0.5
"""Share of the seeds that lose a worker within a step."""

BRIEF_S = 1.2
"""Maximum freeze in seconds of a role with the only copy of its state: its links survive such a freeze."""

SETTLE_S = 2.0
"""Time after the end of the run until servers have done all requests, in seconds."""

LEAST_OPERATIONS = 100
"""Minimum number of acknowledged pushes in a run that counts. Drawn options can make pushes rare: a whole run
with large groups or a partitioned model has about 300, and fewer if it pushes every second group."""


def draw_plan(dice: RandomStream) -> Plan:
    """Draw a fault of each kind and some more."""
    kinds = [*TRAIN.kinds, *(dice.choose(TRAIN.kinds) for _ in range(dice.below(4)))]
    faults = [_draw_fault(dice, kind) for kind in kinds]
    setup = draw_setup(dice.fork("setup"), TRAINING)
    copies = draw_copies(dice.fork("copies"), setup)
    if copies:
        losses = dice.fork("losses")
        kinds = [losses.choose(LOSSES), *(losses.choose(SERVER_KINDS) for _ in range(1 + losses.below(3)))]
        faults += [_draw_fault(losses, kind) for kind in kinds]
    faults += _draw_driver_faults(dice.fork("driver"), may_replace=not setup.get("resumed"))
    faults += _draw_torn_steps(dice.fork("torn"))
    settings = setup | copies | draw_stores(dice.fork("stores"))
    return Plan(options=draw_options(dice, settings), faults=in_order(faults))


def draw_stores(dice: RandomStream) -> dict[str, Setting]:
    """Draw the settings of the stores of a plan."""
    return {"stores": dice.choose(CONSISTENCIES)}


def new_clients(world: World, cluster: TrainingCluster, ledger: Ledger) -> StoreClients:
    """Start the clients of the store beside a run."""
    settings: dict[str, Setting] = {
        "consistency": cluster.setup.stores,
        "copies": cluster.setup.config.copies_in_force,
        "min_in_sync": 0,
        "momentum": False,
    }
    return StoreClients(world, cluster, ledger, settings, COUNTS)


def _draw_driver_faults(dice: RandomStream, *, may_replace: bool) -> list[Fault]:
    """Draw the losses of the driver, if any.

    Args:
        may_replace: Whether a new driver may begin another run: a folder of checkpoints belongs to one run.
    """
    if not dice.chance(DRIVER_LOST):
        return []
    return [
        Fault(
            at_s=round(dice.between(BEGUN_S, STRIKE_S), 3),
            kind=dice.choose(DRIVER_KINDS),
            targets=("driver",),
            lasts_s=round(dice.between(LEAST_S, 6.0), 3),
            amount=float(may_replace and dice.chance(DRIVER_REPLACED)),
        )
        for _ in range(1 + dice.below(2))
    ]


def _draw_torn_steps(dice: RandomStream) -> list[Fault]:
    """Draw the losses of workers within a step, if any."""
    if not dice.chance(TORN):
        return []
    return [
        Fault(
            at_s=round(dice.between(BEGUN_S, STRIKE_S), 3),
            kind=TORN_KIND,
            targets=(dice.choose(WORKERS),),
            lasts_s=round(dice.between(LEAST_S, 3.0), 3),
            amount=float(dice.below(2)),
        )
    ]


def _draw_fault(dice: RandomStream, kind: str) -> Fault:
    worker = dice.choose(CLIENTS if kind in CLIENT_KINDS else WORKERS)
    targets: tuple[str, ...] = (worker,)
    lasts_s, amount = dice.between(LEAST_S, 6.0), 0.0
    match kind:
        case "freeze":
            targets = (dice.choose([worker, *SERVERS, *DATA_SERVERS]),)
            if targets != (worker,):
                lasts_s = min(lasts_s, BRIEF_S)
        case _ if kind in LINK_KINDS:
            if kind in ("reset", "damage"):
                lasts_s = 0.0
            else:
                amount = float(dice.below(2))
        case "client-cut" | "client-reset":
            amount = float(dice.below(2))
        case _ if kind in SERVER_KINDS:
            targets, lasts_s, amount = (), min(lasts_s, SERVER_S), float(dice.below(2))
        case _ if kind in CONTROLLER_KINDS:
            targets = () if dice.chance(0.5) else (dice.choose(list(CONTROLLERS)),)
        case "kill-dealer":
            targets, amount = (), float(dice.below(2))
    at_s = dice.between(BEGUN_S, STRIKE_S)
    return Fault(at_s=round(at_s, 3), kind=kind, targets=targets, lasts_s=round(lasts_s, 3), amount=amount)


async def run_result(cluster: TrainingCluster) -> RunResult:
    """Wait for the result of the run.

    Raises:
        Violation: The run failed, or did not end within `END_S`.
    """
    task = cluster.driver.task
    assert task is not None
    done, _ = await asyncio.wait([task], timeout=END_S)
    if not done:
        run = cluster.map.run
        phase = run.phase if run is not None else "not begun"
        raise Violation("the run ends", f"{END_S:g} s after the last fault it is {phase}")
    error = task.exception()
    if error is not None:
        raise Violation("the run ends", f"{error!r}")
    result = task.result()
    assert isinstance(result, RunResult)
    return result


def lacking(cluster: TrainingCluster) -> str:
    """Return a text about bundles that lack copies; empty after the run, whose bundles get no new copies."""
    return cluster.bundles.lacking() if not cluster.is_over else ""


def check_result(cluster: TrainingCluster, result: RunResult, ledger: Ledger) -> None:
    """Check the result of the run, and the shards at its end.

    Raises:
        Violation: The run lost or double-counted an image or a push, or the model has not learnt.
    """
    config = cluster.setup.config
    counted = [(epoch.images, epoch.skipped) for epoch in result.epochs]
    least = IMAGES if config.fraction_in_force == 1 else 1
    if len(counted) != config.epochs or any(
        images < least or images + skipped != IMAGES for images, skipped in counted
    ):
        raise Violation("every image once", f"epochs counted {counted} (images, skipped) of {IMAGES}")
    cluster.check_takeover()
    cluster.check_acknowledged()
    for state in cluster.states():
        for shard in state.shards.values():
            shard.check_invariants()
            pushed, applied = sum(shard.last_number.values()), shard.staleness.total()
            refused, known = shard.tables.refused, shard.tables.known
            total = applied + refused + known
            if total != pushed:
                invariant = "I1" if total < pushed else "I2"
                text = f"of {pushed} pushes {applied} were applied, {refused} refused, {known} known"
                raise Violation(invariant, f"{shard!r}: {text}")
            ledger.counts["pushes of known groups"] += known
    accuracy = result.epochs[-1].test_accuracy
    learnt = LEARNT if cluster.setup.plain else LEARNT_OTHERWISE
    if accuracy < learnt:
        raise Violation("it learns", f"the test accuracy is {accuracy:.0%}, not {learnt:.0%}")
    ledger.operations = sum(cluster.acknowledged.values())
    ledger.counts["accuracy"] = round(100 * accuracy)
    ledger.counts["returned leases"] = sum(
        getattr(each, "returned", 0) for each in result.statistics.values()
    )


async def run(world: World, plan: Plan, ledger: Ledger) -> None:
    """Carry out a plan."""
    images()
    setup = setup_of(plan.options.settings, TRAINING)
    cluster = TrainingCluster(world, setup, ledger)
    clients = new_clients(world, cluster, ledger)
    groups = GroupWatch(world, cluster, ledger)
    async with asyncio.TaskGroup() as group:
        watch = group.create_task(cluster.watch(), name="watch")
        compares = group.create_task(groups.watch(), name="groups")
        strikes = TrainingFaults(world, cluster, ledger).strikes
        await strike_all(world, plan.faults, ledger, own=strikes)
        await clients.answered()
        if setup.has_copies:
            await settle(world, lambda: lacking(cluster), within_s=WHOLE_S, invariant="all copies return")
        result = await run_result(cluster)
        await clients.stop()
        await asyncio.sleep(SETTLE_S)
        watch.cancel()
        compares.cancel()
    groups.check_end()
    check_result(cluster, result, ledger)


TRAIN = Scenario(
    name="training",
    about="a cluster learns digits while controllers, workers and servers are lost, and links break",
    kinds=(
        "crash",
        "kill",
        "freeze",
        "isolate",
        *LINK_KINDS,
        "kill-dealer",
        *CONTROLLER_KINDS,
        *CLIENT_KINDS,
    ),
    least_operations=LEAST_OPERATIONS,
    limit_s=400.0,
    marks=(
        "leaders struck",
        "returned leases",
        "pushes of known groups",
        ANSWERED,
        "drivers lost",
        "steps torn",
        "runs resumed within an epoch",
        "runs taken over",
        "checkpoints within an epoch",
        "stores created",
        "stores deleted",
        "stores read",
        PUSHED,
        *EVENTS,
        ROUND_OTHERWISE,
        "a controller was sent a whole state",
        "controller.busy",
        "controller.message.twice",
        "controller.snapshot.early",
        "controller.log.late",
    ),
    plan=draw_plan,
    run=run,
)
