"""A whole cluster learns digits while controllers, workers and a data server are lost, and links break.

Every role is a machine of its own: three controllers with a disk each, two parameter servers, two data
servers, two replicas, a driver. Of what parameter servers and the driver hold there is one copy, so they are
only disturbed, and never lost. What must hold: the run ends in time; every epoch counts every image once; the
model has learnt; each push of which a worker was told is in the shards (I1), and none is in them twice (I2).
Gradients cross the network, so the replay hash of a seed is the same where BLAS gives the same last bits.

The digits are those inside the package. They are read as its code is, once in a process, and nothing of a run
depends on when.
"""

import asyncio
from collections import defaultdict
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from adam_async.checkpoint import Checkpoint
from adam_async.checkpoint_files import CheckpointFolder, load_checkpoint
from adam_async.cluster_map import ClusterMap
from adam_async.config import Config, Waits
from adam_async.controller.log_file import LogFile
from adam_async.controller.service import Controller
from adam_async.data_server.dataset import Dataset
from adam_async.data_server.datasets import DIGITS_FILE
from adam_async.data_server.npz import parse_npz
from adam_async.data_server.service import DataServer
from adam_async.driver import Driver
from adam_async.errors import AdamError
from adam_async.machine import ProcessMemory
from adam_async.messages import role_table
from adam_async.model_worker.service import ModelWorker
from adam_async.parameter_server.service import ParameterServer
from adam_async.run_result import EpochResult, RunResult
from adam_async.simulation.dice import Dice
from adam_async.simulation.faults import (
    KINDS,
    PATIENCE_S,
    Strike,
    check_noticed,
    freeze,
    is_running,
    kill,
    strike_all,
    waits,
)
from adam_async.simulation.nodes import Node, World
from adam_async.simulation.plan import Fault, Plan, draw_options, in_order
from adam_async.simulation.pool import SimulatedPool
from adam_async.simulation.scenario import Ledger, Scenario, Violation
from adam_async.simulation.scenarios.training_setups import draw_setup, setup_of
from adam_async.simulation.scenarios.training_visitors import Visitors
from adam_async.timeline import Timeline
from transport import BufferPool, Identity, LinkConfig, TcpNetwork, TransportError

CONTROLLERS = {f"controller-{number}": f"tcp://controller-{number}:7000" for number in (1, 2, 3)}
"""Where they listen, by name; all others are told all addresses."""

TOKEN = b"a token of the simulated cluster"
FOLDER, CHECKPOINTS = Path("/controller"), Path("/checkpoints")
LINKS = LinkConfig(ping_every_s=0.5, dead_after_s=2.0, stalled_after_s=2.0, handshake_s=2.0, close_s=1.0)

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
IMAGES = 300
"""How many digits are trained on, of 1 437; all 360 of the others are for testing."""

BEGUN_S, STRIKE_S = 1.0, 10.0
"""Faults strike from and to."""

LEARNT = 0.75
"""Share of the test images that the model tells apart at the end; guessing tells a tenth."""

LEARNT_OTHERWISE = 0.25
"""The same of a run whose options were drawn, not chosen to learn fast; 39 % is the least that was seen."""

END_S = 60.0
"""So long after the last fault the run is over at the latest."""

LEAST_S = 0.6
"""Shorter than between two pings nobody may notice what is wrong."""

BRIEF_S = 1.2
"""Who has the only copy of something stands still no longer: its links bear it."""

SETTLE_S = 2.0
"""So long after the end of the run servers have done all that was asked of them."""

LEAST_OPERATIONS = 100
"""Of a run that counts. Options that a plan draws make pushes rare: large groups, or a model that is cut,
take about 300 for a whole run, and fewer where only every other group is pushed as well."""

STEP_S, LOOK_S = 0.05, 0.2
"""How often a fault looks for its victim, and the world at everything."""

WORKERS = ("worker-0", "worker-1")
SERVERS = ("ps-0", "ps-1")
LENDERS = ("data-0", "data-1")

LATE = "worker-2"
"""It joins a run that has begun."""

LINK_KINDS = ("cut", "cut-one-way", "reset")
"""Faults of a link; those that name a worker alone are between it and one that it has to do with then."""

CONTROLLER_KINDS = ("controller-kill", "controller-crash", "controller-freeze")
"""Faults of a controller; half of them are for whoever leads."""


def draw_plan(dice: Dice) -> Plan:
    """Draw a fault of each kind and some more."""
    kinds = [*TRAIN.kinds, *(dice.choose(TRAIN.kinds) for _ in range(dice.below(4)))]
    faults = [_draw_fault(dice, kind) for kind in kinds]
    settings = draw_setup(dice.fork("setup"), TRAINING)
    return Plan(options=draw_options(dice, settings), faults=in_order(faults))


def _draw_fault(dice: Dice, kind: str) -> Fault:
    worker = dice.choose(WORKERS)
    targets: tuple[str, ...] = (worker,)
    lasts_s, amount = dice.between(LEAST_S, 6.0), 0.0
    match kind:
        case "freeze":
            targets = (dice.choose([worker, *SERVERS, *LENDERS]),)
            if targets != (worker,):
                lasts_s = min(lasts_s, BRIEF_S)
        case _ if kind in LINK_KINDS:
            if kind == "reset":
                lasts_s = 0.0
            else:
                amount = float(dice.below(2))
        case _ if kind in CONTROLLER_KINDS:
            targets = () if dice.chance(0.5) else (dice.choose(list(CONTROLLERS)),)
        case "kill-lender":
            targets = ()
        case "visit":
            targets, lasts_s = (dice.choose(SERVERS),), 0.0
    at_s = dice.between(BEGUN_S, STRIKE_S)
    return Fault(at_s=round(at_s, 3), kind=kind, targets=targets, lasts_s=round(lasts_s, 3), amount=amount)


def process_memory() -> ProcessMemory:
    """What a simulated process says of itself."""
    return ProcessMemory(host="", pid=1, peak_rss_mb=1.0)


@lru_cache(maxsize=1)
def images() -> Dataset:
    """What is trained on; read once for all seeds."""
    digits = parse_npz(DIGITS_FILE.read_bytes(), str(DIGITS_FILE), name="digits", source="the package")
    some = digits.train_images[:IMAGES]
    assert isinstance(some, np.ndarray)
    return replace(digits, train_images=some, train_labels=digits.train_labels[:IMAGES])


class _Story:
    """One run."""

    def __init__(self, world: World, plan: Plan, ledger: Ledger) -> None:
        self.world = world
        self.ledger = ledger
        self.setup = setup_of(plan.options.settings, TRAINING)
        self.controllers: dict[str, Controller] = {}
        """Those that run."""
        self.locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        """A controller has one fault at a time."""
        self.term = 0
        """The newest term in which one was seen to lead."""
        self.servers: dict[str, ParameterServer] = {}
        self.lenders: dict[str, DataServer] = {}
        self.workers: dict[str, ModelWorker] = {}
        self.sessions: dict[str, int] = {}
        """The newest session of each worker's newest life."""
        self.acknowledged: dict[int, int] = {}
        """Of how many pushes to single shards each session was told."""
        self.over: set[int] = set()
        """Sessions of a run that has ended: servers have forgotten them."""
        for name in CONTROLLERS:
            world.node(name).start(self._control)
        for name in SERVERS:
            world.node(name).start(self._serve)
        for name in LENDERS:
            world.node(name).start(self._lend)
        for name in WORKERS:
            world.node(name).start(self._work)
        if self.setup.late_s:
            world.node(LATE).start(self._join_late)
        self.visitors = Visitors(
            cluster=lambda: self.map,
            servers=self.servers,
            network_of=self._network,
            config=self.setup.config,
        )
        self.driver = world.node("driver")
        self.driver.start(self._drive, may_fail=True)

    # --- roles -------------------------------------------------------------------------------

    def _network(self, node: Node) -> TcpNetwork:
        return TcpNetwork(
            token=TOKEN, entropy=node.entropy, rules=role_table(), config=LINKS, pool=BufferPool()
        )

    def _place(self, role: str, node: Node) -> dict[str, Any]:
        incarnation = int.from_bytes(node.entropy(7), "little")
        timeline = Timeline(node.name, clock=asyncio.get_running_loop().time) if self.setup.profiled else None
        return {
            "network": self._network(node),
            "timeline": timeline,
            "controller": ",".join(CONTROLLERS.values()),
            "identity": Identity(role=role, node=node.name, incarnation=incarnation),
            "process_memory": process_memory,
        }

    def _member(self, role: str, node: Node) -> dict[str, Any]:
        return {**self._place(role, node), "address": f"tcp://{node.name}:1", "waits": TRAINING.waits}

    async def _control(self, node: Node) -> None:
        controller = Controller(
            network=self._network(node),
            address=CONTROLLERS[node.name],
            identity=Identity(role="controller", node=node.name, incarnation=node.life),
            waits=TRAINING.waits,
            peers=CONTROLLERS,
            file=LogFile(node.open_disk(), FOLDER),
            entropy=node.entropy,
        )
        controller.process_memory = process_memory
        async with controller:
            self.controllers[node.name] = controller
            await asyncio.Event().wait()

    async def _serve(self, node: Node) -> None:
        server = ParameterServer(buffers=BufferPool(), **self._member("ps", node))
        self.servers[node.name] = server
        async with server:
            await asyncio.Event().wait()

    async def _lend(self, node: Node) -> None:
        while True:
            server = DataServer(
                dataset=images(),
                make_pool=SimulatedPool,
                available_bytes=lambda: 1 << 30,
                **self._member("data", node),
            )
            self.lenders[node.name] = server
            await self._stay(node, server)

    async def _work(self, node: Node) -> None:
        def entropy(count: int) -> bytes:
            drawn = node.entropy(count)
            self.look(node.name)
            self.sessions[node.name] = int.from_bytes(drawn, "little")
            return drawn

        while True:
            worker = ModelWorker(
                buffers=BufferPool(),
                threads=1,
                in_flight=self.setup.config.in_flight,
                entropy=entropy,
                pace=self.setup.pace,
                make_pool=SimulatedPool,
                **self._member("worker", node),
            )
            self.sessions.pop(node.name, None)
            self.workers[node.name] = worker
            await self._stay(node, worker)

    async def _join_late(self, node: Node) -> None:
        await asyncio.sleep(self.setup.late_s)
        await self._work(node)

    async def _stay(self, node: Node, role: AbstractAsyncContextManager[object]) -> None:
        """Run a role until it ends by an error; its supervisor starts it again."""
        try:
            async with role:
                await asyncio.Event().wait()
        except* (AdamError, TransportError) as errors:
            self.ledger.counts["started again"] += 1
            self.ledger.note("ended", node.name, str(errors.exceptions[0]))
        await asyncio.sleep(0.5)

    async def _drive(self, node: Node) -> RunResult:
        config = self.setup.config
        if not self.setup.resumed:
            return await self._train(node, config)
        half = msgspec.structs.replace(config, epochs=config.epochs // 2)
        async with node.open_disk() as disk:
            folder = CheckpointFolder(CHECKPOINTS, disk)
            await self._train(node, half, folder)
            self.check_acknowledged()
            self.over = {*self.sessions.values(), *self.acknowledged}
            self.ledger.note("resumed", node.name, "the run is resumed")
            return await self._train(node, config, folder, await load_checkpoint(CHECKPOINTS, disk))

    async def _train(
        self,
        node: Node,
        config: Config,
        checkpoints: CheckpointFolder | None = None,
        resume: Checkpoint | None = None,
    ) -> RunResult:
        driver = Driver(
            config=config,
            buffers=BufferPool(),
            threads=1,
            spec=self.setup.spec,
            checkpoints=checkpoints,
            resume=resume,
            make_pool=SimulatedPool,
            **self._place("driver", node),
        )
        async with driver:
            result = await driver.train(self._on_epoch)
            if self.setup.profiled:
                await driver.gather_profile()
            return result

    def _on_epoch(self, result: EpochResult) -> None:
        self.ledger.note("epoch", "driver", f"epoch {result.epoch}: {result.test_accuracy:.0%}")

    # --- what is seen ------------------------------------------------------------------------

    @property
    def map(self) -> ClusterMap:
        """The newest cluster map that a controller has."""
        maps = [controller.map for controller in self.controllers.values()]
        return max(maps, key=lambda each: each.version, default=ClusterMap())

    @property
    def leader(self) -> str:
        """Which controller leads, in the newest term; empty if none that runs does."""
        led = [(it.group.term, name) for name, it in self.controllers.items() if it.group.leads]
        return max(led, default=(0, ""))[1]

    def look_who_leads(self) -> None:
        """Note who leads, if it is news."""
        name = self.leader
        term = self.controllers[name].group.term if name else 0
        if term > self.term:
            self.ledger.leader_changes += self.term > 0
            self.ledger.note("leader", name, f"leads in term {term}")
            self.term = term

    def look(self, name: str) -> None:
        """Note of how many pushes the session of a worker was told so far."""
        session = self.sessions.get(name)
        counts = self.workers[name].statistics().get("parameters") if session is not None else None
        if session is not None and counts is not None:
            self.acknowledged[session] = max(self.acknowledged.get(session, 0), counts.acknowledged)

    async def watch(self) -> None:
        """Look at controllers, workers, and what servers hold, again and again."""
        while True:
            await asyncio.sleep(LOOK_S)
            self.look_who_leads()
            for name in self.workers:
                self.look(name)
            self.check_acknowledged()

    def ordered(self) -> dict[int, int]:
        """How many pushes to single shards the servers took of each session."""
        counts: dict[int, int] = {}
        for server in self.servers.values():
            for shard in server.state.shards.values() if server.state is not None else ():
                for (session, _), number in shard.last_number.items():
                    counts[session] = counts.get(session, 0) + number
        return counts

    def check_acknowledged(self) -> None:
        """What a worker was told is in the shards."""
        ordered = self.ordered()
        for session, told in self.acknowledged.items():
            if session not in self.over and told > ordered.get(session, 0):
                text = (
                    f"session {session:x} was told of {told} pushes; servers have {ordered.get(session, 0)}"
                )
                raise Violation("I1", text)

    # --- faults ------------------------------------------------------------------------------

    async def strike_controller(self, world: World, fault: Fault) -> None:
        """Kill, crash or freeze a controller; without a target, the one that leads as soon as one does."""
        if not fault.targets:
            await _find_victim(
                fault,
                lambda: bool(self.leader) and not self.locks[self.leader].locked(),
                "no controller led that no other fault was at",
            )
        name = fault.targets[0] if fault.targets else self.leader
        kind = fault.kind.removeprefix("controller-")
        async with self.locks[name]:
            if name == self.leader:
                self.ledger.counts["leaders struck"] += 1
            if kind != "freeze":
                self.controllers.pop(name, None)
            await KINDS[kind](world, msgspec.structs.replace(fault, kind=kind, targets=(name,)))

    async def strike_link(self, world: World, fault: Fault) -> None:
        """Cut or reset a link; of a worker alone, one of those that it has then."""
        if len(fault.targets) > 1:
            await KINDS[fault.kind](world, fault)
            return
        (worker,) = fault.targets
        with suppress(TimeoutError):
            async with asyncio.timeout(PATIENCE_S):
                await _until(lambda: bool(self.leader) and self.takes_part(worker))
        dice = world.dice.fork(str(fault))
        first = dice.choose([*SERVERS, self.leader or "controller-1", *self.map.lenders[:1]])
        rest = [name for name in (*SERVERS, *CONTROLLERS, *LENDERS) if name != first]
        dice.shuffle(rest)
        others = [first, *rest]
        if fault.kind == "reset":
            await _find_victim(
                fault,
                lambda: any(world.network.reset(worker, other) for other in others),
                f"{worker} had no connection to any of {', '.join(others)}",
            )
            return
        inwards = fault.kind == "cut-one-way" and dice.chance(0.5)
        ways = [(other, worker) if inwards else (worker, other) for other in others]
        await self._cut(fault, ways, both=fault.kind == "cut")

    async def _cut(self, fault: Fault, ways: list[tuple[str, str]], *, both: bool) -> None:
        """Cut the first of these; as long as nobody notices, one more after the other."""
        network, pairs = self.world.network, list[tuple[str, str]]()
        noticed, lasts_s = False, fault.lasts_s
        for source, target in ways:
            pairs += [(source, target), (target, source)] if both else [(source, target)]
            network.cut(source, target, both=both)
            await asyncio.sleep(lasts_s)
            noticed, lasts_s = waits(self.world, pairs), LEAST_S
            if noticed:
                break
        for source, target in pairs:
            network.heal(source, target, both=False, reset=fault.amount > 0)
        check_noticed(noticed)

    def takes_part(self, worker: str) -> bool:
        """Whether a worker trains, and so has links to all whom it needs."""
        record, run = self.map.nodes.get(worker), self.map.run
        return record is not None and record.live and run is not None and record.ready.startswith(run.id)

    async def strike_freeze(self, world: World, fault: Fault) -> None:
        """Let a machine stand still as soon as it runs."""
        (name,) = fault.targets
        await _find_victim(fault, lambda: is_running(world.nodes[name]), f"{name} did not run")
        await freeze(world, fault)

    async def kill_lender(self, world: World, fault: Fault) -> None:
        """Kill the data server that lends as soon as another has all that it knows; it returns."""

        def has_two() -> bool:
            lending = self.map.lending
            return lending is not None and len(lending.keepers) == len(LENDERS)

        await _find_victim(fault, has_two, "what one data server knows was not kept by another")
        struck = Fault(at_s=fault.at_s, kind="kill", targets=self.map.lenders[:1], lasts_s=fault.lasts_s)
        await kill(world, struck)

    # --- what must hold ----------------------------------------------------------------------

    async def ends(self) -> RunResult:
        """Wait for what the run comes to."""
        task = self.driver.task
        assert task is not None
        done, _ = await asyncio.wait([task], timeout=END_S)
        if not done:
            run = self.map.run
            phase = run.phase if run is not None else "not begun"
            raise Violation("the run ends", f"{END_S:g} s after the last fault it is {phase}")
        error = task.exception()
        if error is not None:
            raise Violation("the run ends", f"{error!r}")
        result = task.result()
        assert isinstance(result, RunResult)
        return result

    def check(self, result: RunResult) -> None:
        """Check what the run came to."""
        config = self.setup.config
        told = [(epoch.images, epoch.skipped) for epoch in result.epochs]
        least = IMAGES if config.fraction_in_force == 1 else 1
        if len(told) != config.epochs or any(
            images < least or images + skipped != IMAGES for images, skipped in told
        ):
            raise Violation("every image once", f"epochs counted {told} (images, skipped) of {IMAGES}")
        self.check_acknowledged()
        for server in self.servers.values():
            assert server.state is not None
            for shard in server.state.shards.values():
                shard.check_invariants()
                said, applied = sum(shard.last_number.values()), shard.staleness.total()
                if applied + shard.refused != said:
                    invariant = "I1" if applied + shard.refused < said else "I2"
                    text = f"of {said} pushes {applied} were applied and {shard.refused} refused"
                    raise Violation(invariant, f"{shard!r}: {text}")
        accuracy = result.epochs[-1].test_accuracy
        learnt = LEARNT if self.setup.plain else LEARNT_OTHERWISE
        if accuracy < learnt:
            raise Violation("it learns", f"the model tells {accuracy:.0%} apart, not {learnt:.0%}")
        self.ledger.operations = sum(self.acknowledged.values())
        self.ledger.counts["accuracy"] = round(100 * accuracy)
        self.ledger.counts["trained again"] = sum(epoch.trained_again for epoch in result.epochs)


async def _until(happened: Callable[[], bool]) -> None:
    while True:
        if happened():
            return
        await asyncio.sleep(STEP_S)


async def _find_victim(fault: Fault, found: Callable[[], bool], missing: str) -> None:
    """Wait until a fault can strike.

    Raises:
        Violation: For so long it cannot that something must have gone wrong; `missing` says what.
    """
    try:
        async with asyncio.timeout(END_S):
            await _until(found)
    except TimeoutError:
        raise Violation("faults find their victims", f"{fault}: for {END_S:g} s {missing}") from None


async def run(world: World, plan: Plan, ledger: Ledger) -> None:
    """Go through a plan."""
    images()
    story = _Story(world, plan, ledger)
    async with asyncio.TaskGroup() as group:
        watch = group.create_task(story.watch(), name="watch")
        own: dict[str, Strike] = {
            **dict.fromkeys(CONTROLLER_KINDS, story.strike_controller),
            **dict.fromkeys(LINK_KINDS, story.strike_link),
            "freeze": story.strike_freeze,
            "kill-lender": story.kill_lender,
            "visit": story.visitors.strike,
        }
        await strike_all(world, plan.faults, ledger, own=own)
        result = await story.ends()
        await asyncio.sleep(SETTLE_S)
        watch.cancel()
    story.check(result)


TRAIN = Scenario(
    name="training",
    about="a cluster learns digits while controllers, workers and a data server are lost, and links break",
    kinds=(
        "crash",
        "kill",
        "freeze",
        "isolate",
        *LINK_KINDS,
        "kill-lender",
        *CONTROLLER_KINDS,
        "visit",
    ),
    least_operations=LEAST_OPERATIONS,
    limit_s=400.0,
    marks=(
        "leaders struck",
        "trained again",
        "a controller was sent a whole state",
        "controller.busy",
        "controller.message.twice",
        "controller.snapshot.early",
        "controller.log.late",
    ),
    plan=draw_plan,
    run=run,
)
