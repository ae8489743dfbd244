"""Members of one controller crash, are killed, freeze and are cut off; the controller freezes.

Each worker but one writes numbers into its own record, one after the other, while faults strike. A number
whose write was acknowledged must be in the controller's map, that one or a later one (I6). Who is down for
long is missed; and when all faults are over everybody is a member again, in its newest life, with the newest
map.

Meanwhile these workers read groups from two or three data servers, that are struck too, and say that they
have trained them; nothing is computed. Short runs follow one another, each with options of its own: how
an epoch is shared out, whether it ends early, begins warm or pauses, is taken up half way, in how many parts
a model is cut. A run whose data servers are lost fails, and the next one begins. An epoch that ends has
counted every image once, or skipped it, and when all faults are over epochs end again.
"""

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import msgspec
import numpy as np

from adam_async.cluster_map import ClusterMap, NodeRecord, ResumeRecord, RunRecord, ready_word
from adam_async.config import Config, Waits
from adam_async.controller.client import Membership
from adam_async.controller.service import Controller
from adam_async.data_server.client import DataClient, ImageGroup
from adam_async.data_server.dataset import Dataset, make_dataset
from adam_async.data_server.service import DataServer
from adam_async.errors import AdamError, DeadlineExceeded, RoleDied, RunFailed
from adam_async.machine import ProcessMemory
from adam_async.messages import Body, Finished, LeaseGroups, pack, role_table
from adam_async.model.named import mlp
from adam_async.simulation.dice import Dice
from adam_async.simulation.faults import KINDS, Strike, strike_all
from adam_async.simulation.nodes import Node, World
from adam_async.simulation.plan import Fault, Plan, Setting, draw_options, in_order
from adam_async.simulation.pool import SimulatedPool
from adam_async.simulation.scenario import Ledger, Scenario, Violation
from adam_async.traffic import Traffic
from transport import (
    BufferPool,
    Identity,
    Link,
    LinkConfig,
    RemoteError,
    TcpNetwork,
    TransportError,
)

CONTROLLER = "controller"
ADDRESS = f"tcp://{CONTROLLER}:7000"
TOKEN = b"a token of the simulated cluster"

WAITS = Waits(dial_s=5.0, call_s=5.0, patience_s=120.0, grace_s=2.0)
LINKS = LinkConfig(ping_every_s=0.5, dead_after_s=2.0, stalled_after_s=2.0, handshake_s=2.0, close_s=1.0)

STRIKE_S = 14.0
"""Faults strike within so many seconds."""

WRITE_S = 0.6
"""Mean pause of a worker between two writes."""

DRIVER = "ps-0"
"""One machine stands for the parameter servers and the driver; it is not struck."""

IMAGES, GROUP = 160, 2
"""Images there are, and of a group."""

PACES_S = (0.05, 0.05, 0.2)
"""What a group takes one of the workers: some are slow."""

AHEAD = 8
"""Groups that a worker holds."""

LINK_KINDS = ("cut", "cut-one-way", "reset")

RUN_EPOCHS = 2

RUN_KINDS: tuple[Mapping[str, Setting], ...] = (
    {},
    {"epoch_fraction": 0.6},
    {"epoch_fraction": 0.9, "epoch_rule": "images"},
    {"consistency": "ssp:2", "push_every": 2},
    {"consistency": "bsp"},
)
"""How the groups of a run are shared out."""

RUN_EXTRAS: tuple[Mapping[str, Setting], ...] = ({}, {}, {"warm_start": 6}, {"checkpoint_every": 30})

TAKEN_UP = ((0, 20), (31, 47))
"""Groups that are trained already where a run is taken up half way."""

SPEC = mlp((4, 2), input_shape=(1, 2, 2)).to_dict()

MISSED_S = LINKS.dead_after_s + LINKS.ping_every_s + WAITS.grace_s + 1.0
"""Who is down for longer is no member any more."""

SETTLED_S = 60.0
"""So long after the last fault all is well at the latest."""

LIVES = 1000
"""A program that starts itself again takes the next incarnation; a machine's lives are so far apart."""


def draw_plan(dice: Dice) -> Plan:
    """Draw four to six workers and two or three data servers, a fault of each kind and some more."""
    workers = [f"worker-{number}" for number in range(4 + dice.below(3))]
    kinds = [*MEMBERS.kinds, *(dice.choose(MEMBERS.kinds) for _ in range(dice.below(4)))]
    faults = [_draw_fault(dice, kind, dice.choose(workers), CONTROLLER) for kind in kinds]
    lenders = [f"data-{number}" for number in range(2 + dice.below(2))]
    for kind in (dice.choose(MEMBERS.kinds) for _ in range(3)):
        dice.shuffle(lenders)
        faults.append(_draw_fault(dice, kind, lenders[0], lenders[1]))
    settings: dict[str, Setting] = {"members": len(workers), "lenders": len(lenders)}
    return Plan(options=draw_options(dice, settings), faults=in_order(faults))


def _draw_fault(dice: Dice, kind: str, member: str, other: str) -> Fault:
    """Draw a fault of a machine, or of its link to another one."""
    at_s, lasts_s, amount = dice.between(1.0, STRIKE_S), dice.between(0.1, 7.0), 0.0
    targets: tuple[str, ...] = (member,)
    match kind:
        case "freeze":
            targets = (dice.choose([member, other]),)
        case "cut":
            targets, amount = (member, other), float(dice.below(2))
        case "cut-one-way":
            ends = [member, other]
            dice.shuffle(ends)
            targets = (ends[0], ends[1])
        case "reset":
            targets, lasts_s = (member, other), 0.0
        case "slow":
            amount = dice.choose([0.001, 0.02])
    return Fault(at_s=round(at_s, 3), kind=kind, targets=targets, lasts_s=round(lasts_s, 3), amount=amount)


@lru_cache(maxsize=1)
def images() -> Dataset:
    """What is trained on."""
    pixels = np.arange(IMAGES * 4, dtype=np.uint8).reshape(IMAGES, 1, 2, 2)
    labels = np.arange(IMAGES) % 2
    some = (pixels[:8], labels[:8])
    names = ("images", "labels", "test images", "test labels")
    return make_dataset(name="pixels", source="numbers", train=(pixels, labels), test=some, origins=names)


def draw_run(dice: Dice, number: int) -> RunRecord:
    """Draw the options of a run."""
    plain = Config(images_per_group=GROUP, servers=1, replicas=1, epochs=RUN_EPOCHS)
    options = {**dice.choose(RUN_KINDS), **dice.choose(RUN_EXTRAS), "partitions": 1 + dice.chance(0.4)}
    config = msgspec.structs.replace(plain, **options)
    resumed = None
    if dice.chance(0.3):
        done = GROUP * sum(stop - start for start, stop in TAKEN_UP)
        resumed = ResumeRecord(epoch=1, finished=TAKEN_UP, clock=8, images=done, loss=1.0, train_s=1.0)
    return RunRecord(
        id=f"run-{number}",
        driver=DRIVER,
        config=msgspec.to_builtins(config),
        spec=SPEC,
        resumed=resumed,
    )


@dataclass(slots=True)
class _Member:
    """What the world knows of a worker, over all its lives."""

    seat: Membership | None = None
    incarnation: int = 0
    written: int = 0
    """The newest number that it began to write."""
    acknowledged: int = 0
    down_s: float = 0.0
    """Since when it is down while the controller runs."""
    pace_s: float = 0.0


Place = tuple[str, int, int, int]
"""Run, replica, its life, and the part."""


class _Story:
    """One run."""

    def __init__(self, world: World, plan: Plan, ledger: Ledger) -> None:
        self.world = world
        self.ledger = ledger
        self.controller: Controller | None = None
        count = int(plan.options.settings["members"])
        self.members = {
            f"worker-{number}": _Member(pace_s=world.dice.choose(PACES_S)) for number in range(count)
        }
        self.lenders: dict[str, DataServer] = {}
        self.ended: dict[tuple[str, int], None] = {}
        """Epochs that have ended: run and number."""
        self.silent = [*self.members][-1]
        """It never writes: a write sets the whole record, and so gives back a seat that was lost."""
        self.writing = True
        world.node(CONTROLLER).start(self._serve)
        world.node(DRIVER).start(self._drive)
        for number in range(int(plan.options.settings["lenders"])):
            world.node(f"data-{number}").start(self._lend)
        for name in self.members:
            world.node(name).start(self._stay)

    def _network(self, node: Node) -> TcpNetwork:
        return TcpNetwork(
            token=TOKEN, entropy=node.entropy, rules=role_table(), config=LINKS, pool=BufferPool()
        )

    async def _serve(self, node: Node) -> None:
        identity = Identity(role="controller", node=CONTROLLER, incarnation=node.life)
        controller = Controller(
            network=self._network(node),
            address=ADDRESS,
            identity=identity,
            waits=WAITS,
            entropy=node.entropy,
        )
        async with controller:
            self.controller = controller
            await asyncio.Event().wait()

    async def _stay(self, node: Node) -> None:
        """Be a member. What ends by an error starts again, as a role's supervisor would do it."""
        network, member = self._network(node), self.members[node.name]
        for attempt in range(LIVES):
            member.incarnation = incarnation = node.life * LIVES + attempt
            identity = Identity(role="worker", node=node.name, incarnation=incarnation)
            record = NodeRecord(
                role="worker",
                address=f"tcp://{node.name}:1",
                incarnation=incarnation,
                info={"number": member.written},
            )
            member.seat = seat = Membership(
                network=network,
                controller=ADDRESS,
                identity=identity,
                record=record,
                waits=WAITS,
                traffic=Traffic(node.name),
            )
            try:
                async with asyncio.TaskGroup() as group:
                    group.create_task(seat.run(), name="seat")
                    if node.name != self.silent:
                        group.create_task(self._write(member, seat), name="writer")
                        group.create_task(self._train(node, seat, network, identity), name="trainer")
                    else:
                        group.create_task(self._ask_wrongly(seat, network, identity), name="asker")
            except* (RunFailed, RoleDied, DeadlineExceeded):
                self.ledger.counts["started again"] += 1
            await asyncio.sleep(0.5)

    # --- runs ----------------------------------------------------------------------------------

    async def _lend(self, node: Node) -> None:
        """Be a data server, as one that a supervisor starts again."""
        for attempt in range(LIVES):
            server = DataServer(
                network=self._network(node),
                address=f"tcp://{node.name}:1",
                controller=ADDRESS,
                identity=Identity(role="data", node=node.name, incarnation=node.life * LIVES + attempt),
                waits=WAITS,
                dataset=images(),
                make_pool=SimulatedPool,
                available_bytes=lambda: 1 << 30,
                process_memory=lambda: ProcessMemory(host="", pid=1, peak_rss_mb=1.0),
            )
            self.lenders[node.name] = server
            try:
                async with server:
                    await asyncio.Event().wait()
            except* (AdamError, TransportError):
                self.ledger.counts["started again"] += 1
            await asyncio.sleep(0.5)

    async def _drive(self, node: Node) -> None:
        """Have one run follow the other, and each of their epochs begin; be ready for all of them."""
        network = self._network(node)
        identity = Identity(role="ps", node=node.name, incarnation=node.life)
        record = NodeRecord(role="ps", address=f"tcp://{node.name}:1", incarnation=node.life)
        seat = Membership(
            network=network,
            controller=ADDRESS,
            identity=identity,
            record=record,
            waits=WAITS,
            traffic=Traffic(node.name),
        )
        async with asyncio.TaskGroup() as group:
            group.create_task(seat.run(), name="seat")
            runs = 0
            async for cluster in seat.changes():
                run = cluster.run
                if not self.writing or not seat.seated:
                    continue
                with suppress(DeadlineExceeded):  # the controller stands still; the map says what was done
                    if run is None or run.phase in ("finished", "failed"):
                        self.ledger.counts["runs failed"] += run is not None and run.phase == "failed"
                        runs += 1
                        await seat.submit_run(draw_run(self.world.dice.fork(f"run-{runs}"), runs))
                    elif cluster.nodes[node.name].ready != run.id:
                        await seat.set_node(ready=run.id)
                    elif run.phase == "between":
                        self._end_epoch(run, cluster.results[-1])
                        await seat.update_run(_next_epoch)
                    elif cluster.epoch is not None and cluster.epoch.paused:
                        self.ledger.counts["pauses"] += 1
                        await seat.update_epoch(lambda epoch: msgspec.structs.replace(epoch, paused=0))

    def _end_epoch(self, run: RunRecord, result: Mapping[str, Any]) -> None:
        """An epoch has ended: see that every image is counted once, and count its trained groups."""
        if (run.id, run.epoch) in self.ended:
            return  # we have seen it, and could not have the next one begin
        self.ended[run.id, run.epoch] = None
        self.ledger.counts["epochs cut short"] += result["skipped"] > 0
        if result["images"] + result["skipped"] != IMAGES:
            raise Violation("every image once", f"an epoch of {IMAGES} images counted {result}")
        resumed = run.resumed
        before = resumed.images if resumed is not None and resumed.epoch == run.epoch else 0
        self.ledger.operations += (result["images"] - before) // GROUP
        for name, server in self.lenders.items():
            if self.world.node(name).host.up:
                server.state.check_invariants()

    async def _train(self, node: Node, seat: Membership, network: TcpNetwork, identity: Identity) -> None:
        """Take part in each run, and in each life of our replica in it."""
        place: Place | None = None
        task: asyncio.Task[None] | None = None
        client: DataClient | None = None
        async with asyncio.TaskGroup() as group:
            async for cluster in seat.changes():
                before, place = place, _place(cluster, seat)
                if place == before:
                    if client is not None:
                        client.look()
                    continue
                if task is not None:
                    task.cancel()
                    task = client = None
                if place is not None:
                    client = self._client(seat, place, network, identity)
                    work = self._train_in(self.members[node.name], seat, place, client)
                    task = group.create_task(work, name=f"{node.name}/{place[0]}")

    def _client(self, seat: Membership, place: Place, network: TcpNetwork, identity: Identity) -> DataClient:
        run, replica, life, part = place
        return DataClient(
            network=network,
            address=lambda attempt: seat.map.lender_for(replica, attempt),
            identity=identity,
            run=run,
            replica=replica,
            life=life,
            partition=part,
            ahead=AHEAD,
            rows=(None, (0, 1))[part],
            waits=WAITS,
            traffic=Traffic(seat.node),
        )

    async def _train_in(self, member: _Member, seat: Membership, place: Place, client: DataClient) -> None:
        """Take groups, and say that they are trained, half of what is held at a time."""
        async with asyncio.TaskGroup() as group:
            group.create_task(client.run(), name=f"{seat.node}/groups")
            await seat.set_node(ready=ready_word(place[0], place[2]))
            clock = 0
            while True:
                await client.wait_group()
                taken: list[ImageGroup] = []
                while client.has_group and len(taken) < AHEAD // 2:
                    taken.append(client.take())
                await asyncio.sleep(member.pace_s * len(taken))
                for each in taken:
                    clock = max(clock, each.clock, each.met) + 1
                    epoch, number, attempt, count = msgspec.structs.astuple(each.lease)[:4]
                    client.finished(Finished(epoch, number, attempt, count, 1.0, clock))

    async def _ask_wrongly(self, seat: Membership, network: TcpNetwork, identity: Identity) -> None:
        """Ask data servers for what there is not: each question is refused by its name."""
        while True:
            await asyncio.sleep(2.0)
            run, address = seat.map.run, seat.map.lender_for(0)
            if run is None or not address:
                continue
            plain = LeaseGroups(run=run.id, replica=0, life=1, partition=0, position=0, count=1, wait_s=1.0)
            replace = msgspec.structs.replace
            wrong = {
                "no-part": replace(plain, partition=9),
                "no-groups": replace(plain, count=0),
                "no-rows": replace(plain, rows=(0, 9)),
                "wrong-run": replace(plain, run="run-0"),
            }
            with suppress(TransportError):
                async with network.connect(address, identity, timeout_s=2.0) as link:
                    first = link.call_nowait(pack(plain), timeout_s=2.0)
                    for code, question in {**wrong, "busy": plain}.items():
                        await self._be_refused(link, code, question)
                    await first

    async def _be_refused(self, link: Link, code: str, question: Body) -> None:
        try:
            told = await link.call(pack(question), timeout_s=2.0)
        except RemoteError as error:
            if error.code not in (code, "wrong-run", "not-lending"):
                raise Violation("wrong questions", f"{question!r}: {error.code!r}, not {code!r}") from None
            self.ledger.counts["refused"] += 1
        else:
            raise Violation("wrong questions", f"{question!r} was answered with {told!r}")

    # --- what is seen --------------------------------------------------------------------------

    async def _write(self, member: _Member, seat: Membership) -> None:
        await seat.wait_for(lambda _: seat.seated, "a seat", WAITS.patience_s)
        dice = self.world.dice.fork(f"{seat.node}/{member.incarnation}")
        while self.writing:
            member.written += 1
            number = member.written
            try:
                await seat.set_node(info={"number": number})
            except DeadlineExceeded:
                continue  # whether it was written is unknown
            self.ledger.operations += 1
            member.acknowledged = max(member.acknowledged, number)
            self.check_written(seat.node)
            await asyncio.sleep(dice.around(WRITE_S))

    def check_written(self, name: str) -> None:
        """What was acknowledged to a member is in the controller's map."""
        assert self.controller is not None
        record, acknowledged = self.controller.map.nodes.get(name), self.members[name].acknowledged
        held = record.info["number"] if record is not None else 0
        if held < acknowledged:
            raise Violation("I6", f"{name} was told that {acknowledged} is written; the map holds {held}")

    async def watch(self) -> None:
        """See that maps never go back, and that who is down for long is missed."""
        versions: dict[str, tuple[int, int]] = {}
        while True:
            await asyncio.sleep(STEP_S)
            controller = self.world.node(CONTROLLER)
            for name, member in self.members.items():
                self.check_written(name) if self.controller is not None else None
                seat = member.seat
                if seat is not None:
                    before = versions.get(name, (0, 0))
                    versions[name] = now = (member.incarnation, seat.map.version)
                    if now < before:
                        raise Violation("I7", f"the map of {name} went back from {before} to {now}")
                runs = self.world.node(name).host.up
                member.down_s = 0.0 if runs or controller.host.frozen else member.down_s + STEP_S
                if member.down_s > MISSED_S and name in self.live:
                    raise Violation("missed", f"{name} is down for {member.down_s:.1f} s and counts as live")

    @property
    def live(self) -> list[str]:
        """Who is a member."""
        return self.controller.map.live("worker") if self.controller is not None else []

    @property
    def unsettled(self) -> str:
        """What is not yet as it must be when all faults are over; nothing if all is."""
        if self.controller is None:
            return "the controller has not begun"
        newest = self.controller.map
        if lost := self.lenders.keys() - set(newest.live("data")):
            return f"{min(lost)} is no member"
        for name, member in self.members.items():
            record, seat = newest.nodes.get(name), member.seat
            if record is None or not record.live:
                return f"{name} is no member"
            if record.incarnation != member.incarnation:
                return f"{name} is a member as {record.incarnation}, and lives as {member.incarnation}"
            if seat is None or seat.map.version != newest.version:
                return f"{name} has not the newest map"
        return ""

    async def settle(self) -> None:
        """Wait until all is as it must be."""
        by = self.world.now + SETTLED_S
        while self.unsettled:
            if self.world.now > by:
                raise Violation("all return", f"{SETTLED_S:g} s after the last fault {self.unsettled}")
            await asyncio.sleep(STEP_S)

    async def strike_link(self, world: World, fault: Fault) -> None:
        """Cut or reset a link; of data servers, that of the lender to the next keeper once there is one.

        Raises:
            Violation: There is none for long.
        """
        if fault.targets[0] in self.lenders:
            keepers: tuple[str, ...] = ()
            by = world.now + SETTLED_S
            while len(keepers) < 2:
                if world.now > by:
                    text = f"{SETTLED_S:g} s after {fault} was due they are with {keepers or 'nobody'} alone"
                    raise Violation("leases are kept twice", text)
                await asyncio.sleep(STEP_S)
                keepers = self.controller.map.lenders if self.controller is not None else ()
            ends = keepers[:2] if fault.targets[0] < fault.targets[1] else keepers[1::-1]
            fault = msgspec.structs.replace(fault, targets=tuple(ends))
        await KINDS[fault.kind](world, fault)

    async def end_an_epoch(self) -> None:
        """Wait until another epoch has ended."""
        by, before = self.world.now + SETTLED_S, len(self.ended)
        while len(self.ended) == before:
            if self.world.now > by:
                problem = self.unsettled  # who is not there may be why
                text = f"{SETTLED_S:g} s after the last fault {problem or 'no epoch has ended'}"
                raise Violation("all return" if problem else "epochs end", text)
            await asyncio.sleep(STEP_S)


def _place(cluster: ClusterMap, seat: Membership) -> Place | None:
    """Where a worker takes part; nowhere while it has no seat, or its replica lacks others."""
    run, record = cluster.run, cluster.nodes.get(seat.node)
    if run is None or record is None or not seat.seated or run.phase in ("finished", "failed"):
        return None
    life = cluster.life(record.replica) if record.replica >= 0 else 0
    return (run.id, record.replica, life, record.partition) if life else None


def _next_epoch(run: RunRecord) -> RunRecord | None:
    if run.phase != "between":
        return None
    over: dict[str, Any] = {"phase": "finished"}
    more: dict[str, Any] = {"phase": "training", "epoch": run.epoch + 1}
    return msgspec.structs.replace(run, **(over if run.epoch == RUN_EPOCHS else more))


STEP_S = 0.05
"""How often the world looks."""


async def run(world: World, plan: Plan, ledger: Ledger) -> None:
    """Go through a plan."""
    story = _Story(world, plan, ledger)
    async with asyncio.TaskGroup() as group:
        watch = group.create_task(story.watch(), name="watch")
        own: dict[str, Strike] = dict.fromkeys(LINK_KINDS, story.strike_link)
        await strike_all(world, plan.faults, ledger, own=own)
        await asyncio.sleep(max(0.0, STRIKE_S - world.now))
        await story.end_an_epoch()
        story.writing = False
        await story.settle()
        watch.cancel()
    for name in story.members:
        story.check_written(name)


MEMBERS = Scenario(
    name="members",
    about="members of one controller crash, freeze and are cut off, and return",
    kinds=("crash", "kill", "freeze", "cut", "cut-one-way", "reset", "slow"),
    least_operations=100,  # of groups only those count whose epoch has ended, and few writes are made
    limit_s=300.0,
    marks=("pauses", "epochs cut short", "runs failed", "refused"),
    plan=draw_plan,
    run=run,
)
