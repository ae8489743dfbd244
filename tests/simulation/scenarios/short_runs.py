"""Short runs: workers of a scenario lease groups from data servers and report them as trained.

Workers compute no gradients. Short runs follow one another, each with its own options: how an epoch is shared
out, an early end, a warm start, a resume half way, a stop, and the number of partitions. A run that loses its
data servers waits for them. A finished epoch has counted or skipped every image once.

Instead of pushing, a worker adds a step's groups to its part's set, just before it reports these groups. A
machine in place of the parameter servers takes groups only of the replica generations in its map. The part
takes a step whole or refuses it whole, so it may not have only some groups of a step. The part sends the sets
to the dealer, in some runs on a slow way: meanwhile replicas push, and are lost. At the end of an epoch the
sets are compared with its result (`checkers.group_sets`).
"""

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import Any

import msgspec
import numpy as np

from adam_async.controller.client import Membership
from adam_async.controller.role import RoleSettings
from adam_async.data_server.client import DataClient, ImageGroup, WorkerSlot
from adam_async.data_server.dataset import Dataset, make_dataset
from adam_async.data_server.group_reader import GroupLimits
from adam_async.data_server.service import DataServer
from adam_async.driver.preparation import store_of
from adam_async.driver.takeover import submit, update_program
from adam_async.errors import AdamError, DeadlineExceeded
from adam_async.messages import (
    Body,
    BundleSets,
    Finished,
    HeldLease,
    Lease,
    LeaseGroups,
    ReadGroups,
    ReadGroupSets,
    pack,
    unpack,
)
from adam_async.messages.group_sets import LossSum, LossSums
from adam_async.model.named import mlp
from adam_async.run.cluster_map import ClusterMap, EpochRecord, ready_word
from adam_async.run.config import Config, Waits
from adam_async.run.counts import EpochCounts
from adam_async.run.group_ranges import GroupSets, has_groups, name_groups, with_groups, with_losses, without
from adam_async.run.store_record import ArrayRecord, served_word
from adam_async.run.training_program import ProgramRecord, ResumeRecord, TrainingProgram, read_training
from adam_async.runtime.channel import Endpoint
from adam_async.runtime.traffic import Traffic
from adam_async.worker.stepper import is_returned
from tests.simulation.checkers.group_sets import check_groups, check_losses, epoch_groups
from tests.simulation.plan import Setting
from tests.simulation.pool import SimulatedPool
from tests.simulation.random_streams import RandomStream
from tests.simulation.scenario import Ledger, Node, Violation, World
from tests.simulation.scenarios.cluster import network_of, process_memory
from tests.simulation.scenarios.map_user import INCARNATIONS, new_membership
from transport import Identity, Link, RemoteError, Request, TcpNetwork, TransportError

CONTROLLER = "controller"
ADDRESS = f"tcp://{CONTROLLER}:7000"

WAITS = Waits(dial_s=5.0, call_s=5.0, patience_s=120.0, prepare_s=20.0, grace_s=2.0)

DRIVER = "ps-0"
"""Machine of the parameter server and the driver, which no fault strikes."""

IMAGES, GROUP = 160, 2
"""Number of images in the dataset, and in a group."""

AHEAD = 8
"""Number of groups that a worker leases ahead."""

RUN_EPOCHS = 2
"""Number of epochs in a run."""

RUN_KINDS: tuple[Mapping[str, Setting], ...] = (
    {},
    {"push_every": 3},
    {"epoch_fraction": 0.6},
    {"epoch_fraction": 0.9, "epoch_rule": "images", "push_every": 2},
    {"consistency": "ssp:2", "push_every": 2},
    {"consistency": "bsp"},
)
"""Options that decide how a run shares out its groups, and how many groups a step has."""

RUN_EXTRAS: tuple[Mapping[str, Setting], ...] = ({}, {}, {"warm_start": 6})

SLOW_S = (0.0, 0.0, 0.3, 1.5)
"""Longest times in seconds that an answer with sets is on its way; each run draws one."""

STOPPED = 0.3
"""Share of the runs that are stopped within an epoch."""

TAKEN_UP = (0, 20, 31, 47)
"""Ranges of groups that are trained already in a resumed run."""

LACKING = (18, 20, 40, 41)
"""Ranges within these groups that the last of several parts lacks."""

SPEC = mlp((4, 2), input_shape=(1, 2, 2)).to_dict()


@lru_cache(maxsize=1)
def images() -> Dataset:
    """Return the dataset."""
    pixels = np.arange(IMAGES * 4, dtype=np.uint8).reshape(IMAGES, 1, 2, 2)
    labels = np.arange(IMAGES) % 2
    some = (pixels[:8], labels[:8])
    names = ("images", "labels", "test images", "test labels")
    return make_dataset(name="pixels", source="numbers", train=(pixels, labels), test=some, origins=names)


def draw_run(dice: RandomStream) -> TrainingProgram:
    """Draw the options of a run."""
    plain = Config(images_per_group=GROUP, servers=1, replicas=1, epochs=RUN_EPOCHS)
    options = {**dice.choose(RUN_KINDS), **dice.choose(RUN_EXTRAS), "partitions": 1 + dice.chance(0.4)}
    config = msgspec.structs.replace(plain, **options)
    resumed = None
    if dice.chance(0.3):
        resumed = ResumeRecord(epoch=1, clock=8, train_s=1.0)
    return TrainingProgram(config=config, spec=SPEC, resumed=resumed)


class ShortRuns:
    """One run after the other, in a world of members."""

    def __init__(self, world: World, ledger: Ledger) -> None:
        self._world = world
        self._ledger = ledger
        self.data_servers: dict[str, DataServer] = {}
        self.ended: dict[tuple[str, int], None] = {}
        self._programs: dict[str, TrainingProgram] = {}
        self._sets: dict[tuple[str, int], GroupSets] = {}
        """Groups that workers have trained, by run and part."""
        self._losses: dict[str, LossSums] = {}
        """By run, losses that the last part has counted; an image's loss is its group's number."""
        self._whole: dict[tuple[str, int, int], int] = {}
        """Replica generation that pushed a group of a run and epoch when the last part got it."""
        self._slow_s: dict[str, float] = {}
        """By run, longest time in seconds that an answer with sets is on its way."""
        self._dice = world.dice.fork("ways of sets")
        self._clocks: dict[str, int] = {}
        """Highest clock of these groups, by run."""
        self._store: Membership | None = None
        """Membership of the machine that takes groups."""
        self.going_on = True

    async def run_data_server(self, node: Node) -> None:
        """Run a data server; after an error start it again, as a supervisor would."""
        for attempt in range(INCARNATIONS):
            server = DataServer(
                RoleSettings(
                    network=network_of(node),
                    address=f"tcp://{node.name}:1",
                    identity=Identity(
                        role="data", node=node.name, incarnation=node.incarnation * INCARNATIONS + attempt
                    ),
                    waits=WAITS,
                    controller=ADDRESS,
                    process_memory=process_memory,
                ),
                images(),
                make_pool=SimulatedPool,
                available_bytes=lambda: 1 << 30,
            )
            self.data_servers[node.name] = server
            try:
                async with server:
                    await asyncio.Event().wait()
            except* (AdamError, TransportError):
                self._ledger.counts["started again"] += 1
            await asyncio.sleep(0.5)

    async def run_driver(self, node: Node) -> None:
        """Submit one run after the other, start their epochs, and serve their stores without values."""
        network = network_of(node)
        identity = Identity(role="ps", node=node.name, incarnation=node.incarnation)
        membership = new_membership(network, ADDRESS, identity, WAITS)
        self._store = membership
        listens = network.listen(f"tcp://{node.name}:1", identity, self._serve_sets)
        async with listens, asyncio.TaskGroup() as group:
            group.create_task(membership.run(), name="membership")
            runs = 0
            dealer = ""
            async for cluster in membership.changes():
                run = cluster.run
                self._ledger.counts["dealers lost"] += dealer != "" and not cluster.dealing
                dealer = cluster.dealing
                if not self.going_on or not membership.joined:
                    continue
                with suppress(DeadlineExceeded):  # the controller is frozen; the map shows the outcome later
                    if run is None or run.over:
                        self._ledger.counts["runs failed"] += run is not None and run.phase == "failed"
                        runs += 1
                        dice = self._world.dice.fork(f"run-{runs}")
                        program = draw_run(dice)
                        run = program.record(f"run-{runs}", membership.member)
                        self._programs[run.id] = program
                        self._slow_s[run.id] = dice.choose(SLOW_S)
                        self._load_sets(run.id, program)
                        if dice.chance(STOPPED):
                            work = self._stop(membership, run.id, after_s=dice.between(0.5, 8.0))
                            group.create_task(work, name=f"stop-{run.id}")
                        await submit(membership, run)
                        await self._create_store(membership, run)
                    elif cluster.run_store is None:
                        await self._create_store(membership, run)  # the controller was frozen before
                    elif served_word(cluster.run_store) not in cluster.nodes[node.name].serves:
                        await membership.set_node(serves=(served_word(cluster.run_store),))
                    elif run.phase == "between":
                        assert cluster.epoch is not None
                        self._end_epoch(run, cluster.epoch, cluster.results[-1])
                        await update_program(membership, _next_epoch)

    async def _serve_sets(self, link: Link) -> None:
        link.serve(self._send_sets, receives=False)
        await link.wait_closed()

    def _send_sets(self, request: Request) -> None:
        """Answer which groups all parts of a run have, and which only some."""
        assert self._store is not None
        body, version = unpack(request.message, ReadGroupSets), self._store.map.version
        if version < body.map_version:
            request.fail("busy", f"version {version} is known, not {body.map_version}")
            return
        config = self._programs[body.store].config
        sets = [self._numbers(body.store, part, body.epoch) for part in range(config.partitions)]
        every, some = set.intersection(*sets), set.union(*sets)
        clock = self._clocks.get(body.store, 0) if config.slack is not None else 0
        tensors = [np.array(name_groups(1, found)[1:], np.int64) for found in (every, some - every)]
        counted = self._losses.get(body.store, {}).get(body.epoch, LossSum())
        answer = BundleSets(trainable=True, clock=clock, images=counted.images, loss_sum=counted.total)
        slow_s = self._slow_s[body.store]
        if not slow_s:
            request.reply(pack(answer, tensors))
            return
        # The present groups, which are final for the generations that ended earlier.
        way_s = self._dice.between(0.0, slow_s)
        asyncio.get_running_loop().call_later(way_s, request.reply, pack(answer, tensors))

    def _numbers(self, run: str, part: int, epoch: int) -> set[int]:
        ranges = self._sets.get((run, part), {}).get(epoch, ())
        pairs = zip(ranges[::2], ranges[1::2], strict=True)
        return {number for start, stop in pairs for number in range(start, stop)}

    def _load_sets(self, run: str, program: TrainingProgram) -> None:
        """Begin a resumed run with its checkpoint's groups; the last of several parts lacks some.

        Their mean loss is 1.
        """
        if program.resumed is None:
            return
        parts = program.config.partitions
        for part in range(parts):
            lacking = LACKING if 0 < part == parts - 1 else ()
            self._sets[run, part] = {1: without(TAKEN_UP, lacking)}
        for number in self._numbers(run, parts - 1, 1):
            self._whole[run, 1, number] = 0  # no generation of this run may push the group
        images = GROUP * len(self._numbers(run, parts - 1, 1))
        self._losses[run] = with_losses({}, 1, images, float(images))

    async def _create_store(self, membership: Membership, run: ProgramRecord) -> None:
        """Create a run's store; this machine serves it without values."""
        arrays = (ArrayRecord("w", (4,)),)
        await membership.create_store(run.id, store_of(run, read_training(run), arrays), arrays)

    async def _stop(self, membership: Membership, run: str, *, after_s: float) -> None:
        """Stop a run within an epoch, and end the run when no group is leased any more.

        Raises:
            Violation: A drained epoch leased a group.
        """
        await asyncio.sleep(after_s)
        with suppress(DeadlineExceeded):
            await membership.update("epoch", lambda cluster: _drained(cluster, run))
        while (cluster := membership.map).run is not None and cluster.run.id == run and not cluster.run.over:
            if cluster.epoch is not None and not cluster.epoch.drain:
                return  # the epoch has ended, or the controller was frozen
            leased = self._leased(cluster)
            await asyncio.sleep(0.5)
            if leased is None or membership.map.dealer != cluster.dealer:
                continue
            if self._leased(membership.map) not in (leased, None):
                raise Violation("a drained epoch leases no group", f"{leased}, then {self._leased(cluster)}")
            self._ledger.counts["stops"] += 1
            with suppress(DeadlineExceeded):
                await update_program(membership, lambda record: _finished(record, run))

    def _leased(self, cluster: ClusterMap) -> int | None:
        """Return the total number of groups that the dealer has leased, once its epoch is drained; else
        None."""
        server = self.data_servers.get(cluster.dealing)
        counts = server.statistics() if server is not None else None
        return counts.leased if counts is not None and counts.term and counts.drained else None

    def _end_epoch(self, run: ProgramRecord, epoch: EpochRecord, result: EpochCounts) -> None:
        """Check that a finished epoch counted or skipped every image once, and that each part has its groups;
        count its trained groups. Raises Violation."""
        if (run.id, run.epoch) in self.ended:
            return  # checked already, but then the next epoch failed to start
        self.ended[run.id, run.epoch] = None
        self._ledger.counts["epochs cut short"] += result.skipped > 0
        returned = [server.state.returned for server in self.data_servers.values()]
        self._ledger.counts["epochs with returned leases"] += any(returned)
        if result.images + result.skipped != IMAGES:
            raise Violation("every image once", f"an epoch of {IMAGES} images counted {result}")
        loaded = [key for key, generation in self._whole.items() if not generation]
        before = GROUP * len([key for key in loaded if key[:2] == (run.id, run.epoch)])
        self._ledger.operations += (result.images - before) // GROUP
        for name, server in self.data_servers.items():
            if self._world.node(name).host.up:
                server.state.check_invariants()

        sets = {
            f"part {part}": self._sets.get((run.id, part), {}).get(epoch.number, ())
            for part in range(self._programs[run.id].config.partitions)
        }
        groups = epoch_groups(epoch, result)
        check_groups(f"{run.id}/{epoch.number}", groups, sets, self._ledger.counts)
        pairs = zip(groups.trained[::2], groups.trained[1::2], strict=True)
        numbers = [number for start, stop in pairs for number in range(start, stop)]
        numbers = [number for number in numbers if self._whole.get((run.id, epoch.number, number))]
        loss = float(GROUP * sum(numbers) + before)  # a resumed run begins with a mean of 1
        check_losses(f"{run.id}/{epoch.number}", result, least=loss, most=loss)

    async def train(
        self, node: Node, membership: Membership, network: TcpNetwork, identity: Identity, *, pace_s: float
    ) -> None:
        """Take part in each run and each generation of its replica."""
        slot: WorkerSlot | None = None
        task: asyncio.Task[None] | None = None
        client: DataClient | None = None
        async with asyncio.TaskGroup() as group:
            async for cluster in membership.changes():
                before, slot = slot, _slot(cluster, membership)
                if slot == before:
                    if client is not None:
                        client.map_changed()
                    continue
                if task is not None:
                    task.cancel()
                    task = client = None
                if slot is not None:
                    client = self._client(membership, slot, network, identity)
                    work = self._train_in(pace_s, membership, slot, client)
                    task = group.create_task(work, name=f"{node.name}/{slot.run}")

    def _client(
        self, membership: Membership, slot: WorkerSlot, network: TcpNetwork, identity: Identity
    ) -> DataClient:
        return DataClient(
            Endpoint(network, identity, Traffic(membership.node)),
            slot,
            address=lambda: membership.map.dealer_address,
            servers=lambda: membership.map.data_servers_for(slot.replica),
            ahead=AHEAD,
            limits=GroupLimits(
                images=GROUP,
                shape=(1, (2, 1)[slot.partition], 2),
                classes=2,
                epochs=RUN_EPOCHS,
                train_images=IMAGES,
            ),
            rows=(None, (0, 1))[slot.partition],
            waits=WAITS,
        )

    async def _train_in(
        self, pace_s: float, membership: Membership, slot: WorkerSlot, client: DataClient
    ) -> None:
        """Take groups and report them as trained, half of the leased ones at a time."""
        async with asyncio.TaskGroup() as group:
            group.create_task(client.run(), name=f"{membership.node}/groups")
            await membership.set_node(ready=ready_word(slot.run, slot.replica_generation))
            clock = 0
            most = self._programs[slot.run].config.push_every
            while True:
                await client.wait_group()
                taken: list[ImageGroup] = []
                while client.has_group and len(taken) < AHEAD // 2:
                    taken.append(client.take())
                await asyncio.sleep(pace_s * len(taken))
                reports: list[Finished] = []
                for step in steps_of(taken, most):
                    clock = max(clock, step[0].clock, step[0].sync_clock) + 1
                    await self._push(slot, [each.lease for each in step], clock)
                    for each in step:
                        epoch, number, attempt, count = msgspec.structs.astuple(each.lease)[:4]
                        reports.append(Finished(epoch, number, attempt, count, 1.0, clock))
                await asyncio.sleep(pace_s)  # a worker that is lost now has pushed without a report
                for report in reports:
                    client.finished(report)

    async def _push(self, slot: WorkerSlot, step: Sequence[Lease], clock: int) -> None:
        """Add the groups of a step to the set of a part, once the machine that takes them knows the
        generation.

        Raises:
            Violation: The part has some of the groups, or all parts have one of the groups.
        """
        assert self._store is not None, "a run has a store"
        await self._store.wait_for(
            lambda newest: newest.replica_generations().get(slot.replica) == slot.replica_generation,
            f"generation {slot.replica_generation} at {DRIVER}",
            WAITS.patience_s,
        )
        epoch, numbers = step[0].epoch, sorted(lease.number for lease in step)
        parts = range(self._programs[slot.run].config.partitions)
        sets, named = self._sets.get((slot.run, slot.partition), {}), name_groups(epoch, numbers)
        known = has_groups(sets, named)
        if known is None:
            text = f"part {slot.partition} of {slot.run} has some groups of the step {named}"
            raise Violation("steps are taken whole", text)
        self._sets[slot.run, slot.partition] = with_groups(sets, named)
        if slot.partition == len(parts) - 1 and not known:
            losses = self._losses.get(slot.run, {})
            loss = float(sum(lease.images * lease.number for lease in step))
            self._losses[slot.run] = with_losses(losses, epoch, sum(lease.images for lease in step), loss)
        for number in numbers:
            key, generation = (slot.run, epoch, number), slot.replica_generation
            if self._whole.setdefault(key, generation) != generation:
                raise Violation("each group once", f"group {key} comes again, and all parts have it")
            if not all(number in self._numbers(slot.run, part, epoch) for part in parts):
                del self._whole[key]
        self._clocks[slot.run] = max(self._clocks.get(slot.run, 0), clock)

    async def ask_wrongly(self, membership: Membership, network: TcpNetwork, identity: Identity) -> None:
        """Send invalid questions to data servers; each must be refused with a specific code."""
        while True:
            await asyncio.sleep(2.0)
            run, address = membership.map.run, membership.map.dealer_address
            if run is None or not address:
                continue
            plain = LeaseGroups(
                run=run.id,
                replica=0,
                replica_generation=1,
                partition=0,
                epoch=0,
                position=0,
                count=1,
                wait_s=1.0,
            )
            replace = msgspec.structs.replace
            wrong = {
                "no-part": replace(plain, partition=9),
                "no-groups": replace(plain, held=(HeldLease(0, 1),)),
                "no-rows": ReadGroups(run=run.id, epoch=1, numbers=(0,), rows=(0, 9)),
                "wrong-run": replace(plain, run="run-0"),
            }
            with suppress(TransportError):
                async with network.connect(address, identity, timeout_s=2.0) as link:
                    first = link.call_nowait(pack(plain), timeout_s=2.0)
                    for code, question in wrong.items():
                        await self._be_refused(link, code, question)
                    if not first.done():
                        await self._be_refused(link, "busy", plain, unless=first)
                    await first

    async def _be_refused(
        self, link: Link, code: str, question: Body, *, unless: "asyncio.Future[Any] | None" = None
    ) -> None:
        """Send a question that must be refused: with this code, or because the run is over or has no leases
        here. An answer is right only if the answer to `unless` came before."""
        try:
            answer = await link.call(pack(question), timeout_s=2.0)
        except RemoteError as error:
            if error.code not in (code, "wrong-run", "no-leases"):
                raise Violation("wrong questions", f"{question!r}: {error.code!r}, not {code!r}") from None
            self._ledger.counts["refused"] += 1
        else:
            if unless is None or not unless.done():
                raise Violation("wrong questions", f"{question!r} was answered with {answer!r}")


def steps_of(groups: Sequence[ImageGroup], most: int) -> list[list[ImageGroup]]:
    """Cut groups into steps of at most `most`; a group that was leased before is a separate step."""
    steps: list[list[ImageGroup]] = []
    is_open = False
    for each in groups:
        alone = is_returned(each.lease)
        joins = is_open and not alone and not each.clock and len(steps[-1]) < most
        if joins and each.lease.epoch == steps[-1][0].lease.epoch:
            steps[-1].append(each)
        else:
            steps.append([each])
        is_open = not alone
    return steps


def _slot(cluster: ClusterMap, membership: Membership) -> WorkerSlot | None:
    """Return a worker's slot in the run; None before it joined, or if its replica is incomplete."""
    run, record = cluster.run, cluster.nodes.get(membership.node)
    if run is None or record is None or not membership.joined or run.over:
        return None
    replica_generation = cluster.replica_generation(record.replica) if record.replica >= 0 else 0
    if not replica_generation:
        return None
    return WorkerSlot(run.id, record.replica, replica_generation, record.partition)


def _drained(cluster: ClusterMap, run: str) -> EpochRecord | None:
    epoch = cluster.epoch
    if epoch is None or epoch.run != run or epoch.ended:
        return None
    return msgspec.structs.replace(epoch, drain=True)


def _finished(record: ProgramRecord, run: str) -> ProgramRecord | None:
    return msgspec.structs.replace(record, phase="finished") if record.id == run and not record.over else None


def _next_epoch(run: ProgramRecord) -> ProgramRecord | None:
    if run.phase != "between":
        return None
    over: dict[str, Any] = {"phase": "finished"}
    more: dict[str, Any] = {"phase": "training", "epoch": run.epoch + 1}
    return msgspec.structs.replace(run, **(over if run.epoch == RUN_EPOCHS else more))
