"""A simulated training cluster, with each role on its own machine, observed from outside.

The cluster has three controllers with a disk each, two to four parameter servers, two data servers, two or
three workers and a driver. The roles learn the digits of the package, which are read once in a process; no
run depends on the time of the read.
"""

import asyncio
from collections import defaultdict
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from adam_async.checkpoint.checkpoint import Checkpoint
from adam_async.checkpoint.files import CheckpointFolder, load_checkpoint
from adam_async.checkpoint.names import age_order, is_folder_name
from adam_async.data_server.dataset import Dataset
from adam_async.data_server.service import DataServer
from adam_async.data_server.sources.datasets import DIGITS_FILE
from adam_async.data_server.sources.numpy_files import parse_npz
from adam_async.driver.driver import Driver
from adam_async.driver.settings import DriverSettings, RunInputs
from adam_async.driver.takeover import Attach
from adam_async.errors import AdamError, first_cause
from adam_async.parameter_server.shard_group import each_tables
from adam_async.parameter_server.state import ServerState
from adam_async.persistence.records import FlushSettings
from adam_async.run.config import Config
from adam_async.run.group_ranges import GroupSets
from adam_async.run.result import EpochResult, RunResult
from adam_async.runtime.disk import Disk
from adam_async.runtime.timeline import Timeline
from adam_async.worker.run_session import ComputeSettings
from adam_async.worker.service import ModelWorker
from adam_async.worker.training import Trained
from tests.simulation.checkers.checkpoints import CheckedFolder
from tests.simulation.faults import is_running
from tests.simulation.pool import SimulatedPool
from tests.simulation.scenario import Ledger, Node, Violation, World
from tests.simulation.scenarios.cluster import Cluster
from tests.simulation.scenarios.training_setups import Setup
from transport import BufferPool, TransportError

CHECKPOINTS = Path("/checkpoints")

IMAGES = 300
"""Number of training images in use, out of 1,437; all 360 test images are used."""

WORKERS = ("worker-0", "worker-1")
SERVERS = ("ps-0", "ps-1")
DATA_SERVERS = ("data-0", "data-1")

CLIENTS = ("client-0", "client-1", "client-2")
"""Machines of the clients of stores."""

LATE = "worker-2"
"""Machine of the worker that joins a running run."""

APPLY_S = 15.0
"""Maximum time until a new primary has applied all acknowledged pushes, in seconds. A primary with fewer than
`min_in_sync` members first waits at most 3 s for the fault's end, and for a new member, which the primary
invites after 5 s."""

DAMAGE_S = 6.0
"""Maximum time in seconds that a connection stays open after damage on it."""


@lru_cache(maxsize=1)
def images() -> Dataset:
    """Return the dataset, read once for all seeds."""
    digits = parse_npz(DIGITS_FILE.read_bytes(), str(DIGITS_FILE), name="digits", source="the package")
    some = digits.train_images[:IMAGES]
    assert isinstance(some, np.ndarray)
    return replace(digits, train_images=some, train_labels=digits.train_labels[:IMAGES])


class TrainingCluster(Cluster):
    """The machines of a run, over all their incarnations.

    Attributes:
        workers: Newest incarnation of each worker, by name.
        acknowledged: Number of acknowledged pushes to single shards, by session.
        losses: Losses of each trained group, summed over its images, in all runs, by epoch and number.
        driver: Machine of the driver, whose program ends with the run.
        replaces: Whether the next incarnation of the driver begins a new run, instead of taking one over.
    """

    def __init__(self, world: World, setup: Setup, ledger: Ledger, *, on_disks: bool = False) -> None:
        self.setup = setup
        self.workers: dict[str, ModelWorker] = {}
        self.acknowledged: dict[int, int] = {}
        self.losses: defaultdict[tuple[int, int], list[float]] = defaultdict(list)
        self._sessions: dict[str, int] = {}
        """Newest session of each worker's newest incarnation."""
        self._late: dict[int, float] = {}
        """Time since which the shards lack acknowledged pushes, by session."""
        self._over: set[int] = set()
        """Sessions of earlier runs, which servers have forgotten."""
        self._run = ""
        """Newest observed run."""
        self._awaited = ""
        """Run that the newest driver has to take over; empty if it begins a new run."""
        self._has_half = False
        """Whether the first half of a resumed run has ended."""
        self._first = self._resumed = ""
        """Run of this half, and name of the checkpoint that the second run resumes."""
        self.loaded: dict[int, GroupSets] = {}
        """Groups that the shards of the second run begin with, by number of the shard."""
        self.replaces = False
        super().__init__(
            world,
            ledger,
            servers=setup.servers,
            waits=setup.config.waits,
            may_be_apart=False,
            flush=FlushSettings(flush_s=setup.config.flush_s) if on_disks else None,
        )
        for name in DATA_SERVERS:
            world.node(name).start(self._run_data_server)
        for name in WORKERS:
            world.node(name).start(self._run_worker)
        if setup.late_s:
            world.node(LATE).start(self._join_late)
        self.driver = world.node("driver")
        self.driver.start(self._run_driver, may_fail=True)

    # --- roles -------------------------------------------------------------------------------

    def _place(self, role: str, node: Node) -> dict[str, Any]:
        timeline = Timeline(node.name, clock=asyncio.get_running_loop().time) if self.setup.profiled else None
        return {**super()._place(role, node), "timeline": timeline}

    async def _run_data_server(self, node: Node) -> None:
        while True:
            server = DataServer(
                self._member("data", node), images(), make_pool=SimulatedPool, available_bytes=lambda: 1 << 30
            )
            await self._supervise(node, server)

    async def _run_worker(self, node: Node) -> None:
        def entropy(count: int) -> bytes:
            """Draw the identity of a session, and note the acknowledged pushes of the last one."""
            drawn = node.entropy(count)
            self.note_acknowledged(node.name)
            self._note_run()
            self._sessions[node.name] = int.from_bytes(drawn, "little")
            return drawn

        while True:
            compute = ComputeSettings(
                threads=1,
                in_flight=self.setup.config.in_flight,
                pace=self.setup.pace,
                make_pool=partial(SimulatedPool, on_result=self._note_loss),
            )
            worker = ModelWorker(self._member("worker", node), compute, buffers=BufferPool(), entropy=entropy)
            self._sessions.pop(node.name, None)
            self.workers[node.name] = worker
            await self._supervise(node, worker)

    def _note_loss(self, result: object) -> None:
        """Note the loss of a job's group, if the job has ended one and computes the loss."""
        trained = result[0] if isinstance(result, tuple) else result
        if isinstance(trained, Trained) and trained.loss is not None:
            lease = trained.lease
            self.losses[lease.epoch, lease.number].append(trained.loss * lease.images)

    async def _join_late(self, node: Node) -> None:
        await asyncio.sleep(self.setup.late_s)
        await self._run_worker(node)

    async def _supervise(self, node: Node, role: AbstractAsyncContextManager[object]) -> None:
        """Run a role until an error ends it; the caller starts it again, as a supervisor would."""
        try:
            async with role:
                await asyncio.Event().wait()
        except* (AdamError, TransportError) as errors:
            self._ledger.counts["started again"] += 1
            self._ledger.note("ended", node.name, str(first_cause(errors)))
        await asyncio.sleep(0.5)

    async def _run_driver(self, node: Node) -> RunResult:
        config = self.setup.config
        if not self.setup.resumed:
            return await self._train(node, config)
        half = msgspec.structs.replace(config, epochs=config.epochs // 2)
        async with node.open_disk() as disk:
            folder = CheckedFolder(CHECKPOINTS, disk, config, self._ledger)
            if not self._has_half:
                await self._train(node, half, folder)
                self.check_acknowledged(within_s=APPLY_S if self.setup.has_copies else 0.0)
                await self._note_half(node, disk)
            there = self._resumed in await disk.names(CHECKPOINTS)
            path = CHECKPOINTS / self._resumed if there else CHECKPOINTS
            return await self._train(node, config, folder, await load_checkpoint(path, disk))

    async def _note_half(self, node: Node, disk: Disk) -> None:
        """Choose the checkpoint that the second run resumes, and note the groups of its shards."""
        names = sorted(filter(is_folder_name, await disk.names(CHECKPOINTS)), key=age_order)
        self._resumed = names[-min(self.setup.resumed, len(names))]
        checkpoint = await load_checkpoint(CHECKPOINTS / self._resumed, disk)
        self.loaded = {state.shard: state.groups for state in checkpoint.states}
        manifest = checkpoint.manifest
        self._ledger.counts["runs resumed within an epoch"] += manifest.epoch == manifest.resume.epoch
        self._first = self._run
        self._has_half = True
        self._forget_sessions()
        self._ledger.note("resumed", node.name, f"the run is resumed from {self._resumed}")

    async def _train(
        self,
        node: Node,
        config: Config,
        checkpoints: CheckpointFolder | None = None,
        resume: Checkpoint | None = None,
    ) -> RunResult:
        again = node.incarnation > 1
        inputs = RunInputs(
            spec=self.setup.spec,
            checkpoints=checkpoints,
            resume=resume,
            attach=Attach() if again and not self.replaces else None,
            replace=again and self.replaces,
        )
        run = self.map.run
        self._awaited = run.id if inputs.attach is not None and run is not None and not run.over else ""
        settings = DriverSettings(threads=1, make_pool=SimulatedPool, **self._place("driver", node))
        async with Driver(config, settings, inputs) as driver:
            result = await driver.train(self._on_epoch)
            taken = [event for event in result.events if event["event"].startswith("took over run")]
            self._ledger.counts["runs taken over"] += len(taken)
            if self.setup.profiled:
                await driver.gather_profile()
            return result

    def loaded_groups(self, run: str, shard: int) -> GroupSets:
        """Return the groups that a shard of a run began with."""
        return self.loaded.get(shard, {}) if run != self._first else {}

    def _on_epoch(self, result: EpochResult) -> None:
        self._ledger.note("epoch", "driver", f"epoch {result.epoch}: {result.test_accuracy:.0%}")

    # --- observations ------------------------------------------------------------------------

    @property
    def is_over(self) -> bool:
        """Whether the driver has ended by itself; a lost driver starts again."""
        return self.driver.task is not None and self.driver.task.done()

    @property
    def newest_session(self) -> int:
        """Push session of a worker's newest incarnation; 0 before any."""
        return next(iter(self._sessions.values()), 0)

    def _note_run(self) -> None:
        """Forget the sessions of an earlier run as soon as the map has another one."""
        run = self.map.run
        if run is not None and run.id != self._run:
            self._run = run.id
            self._forget_sessions()

    def _forget_sessions(self) -> None:
        self._over = {*self._sessions.values(), *self.acknowledged}

    def check_takeover(self) -> None:
        """Check that the result is that of the run which waited for its driver.

        Raises:
            Violation: The driver began another run.
        """
        if self._awaited and self._awaited != self._run:
            raise Violation("a run is taken over", f"{self._awaited} waited, and {self._run} has the result")

    def note_acknowledged(self, name: str) -> None:
        """Record the number of acknowledged pushes in a worker's session."""
        session = self._sessions.get(name)
        counts = self.workers[name].statistics().parameters if session is not None else None
        if session is not None and counts is not None:
            self.acknowledged[session] = max(self.acknowledged.get(session, 0), counts.acknowledged)

    def check(self) -> None:
        """Check controllers, workers and servers. Raises Violation."""
        self._note_run()
        super().check()
        for name in self.workers:
            self.note_acknowledged(name)
        self.check_acknowledged(within_s=APPLY_S if self.setup.has_copies else 0.0)
        end = self._world.network.unnoticed_damage(after_s=DAMAGE_S)
        if end is not None:
            raise Violation("damage is noticed", f"{end!r} goes on {DAMAGE_S:g} s after a damaged piece")

    def states(self) -> list[ServerState]:
        """Return all copies, on running servers, of the newest run's bundles."""
        run = self.map.run
        return [
            served.state
            for name, server in self.servers.items()
            if is_running(self._world.node(name))
            for served in server.served.values()
            if run is not None and served.store.program == run.id and (served.complete or served.copy)
        ]

    def ordered(self) -> dict[int, int]:
        """Return the number of pushes to single shards that servers have ordered, by session."""
        numbers: dict[tuple[int, int], int] = {}
        for state in self.states():
            for shard in state.shards.values():
                for (session, _), number in shard.last_number.items():
                    key = (session, int(shard.spec.id))
                    numbers[key] = max(numbers.get(key, 0), number)
        counts: dict[int, int] = {}
        for (session, _), number in numbers.items():
            counts[session] = counts.get(session, 0) + number
        return counts

    def check_acknowledged(self, *, within_s: float = 0.0) -> None:
        """Check that the shards have all acknowledged pushes.

        Args:
            within_s: Time in seconds for which they may lack one: after a primary's loss the others have its
                entries, and apply them later.

        Raises:
            Violation: A push is missing.
        """
        if self.map.run is None:  # no controller runs, or one that knows no entry yet has begun anew
            return
        ordered, now = self.ordered(), self._world.now
        late = {
            session: self._late.get(session, now)
            for session, count in self.acknowledged.items()
            if session not in self._over
            and count > ordered.get(session, 0)
            # Servers drop the push numbers of generations that ended long ago.
            and (
                session in ordered
                or not any(state.bundle.replicas.ended.forgotten for state in self.states())
            )
        }
        self._late = late
        for session, since in late.items():
            if now >= since + within_s:
                text = f"session {session:x} has {self.acknowledged[session]} acknowledged pushes"
                raise Violation("I1", f"{text}; servers have {ordered.get(session, 0)}")

    def ahead_of_others(self, worker: str) -> list[str]:
        """Return the primaries that have a message of a worker's step, if others lack theirs."""
        session, run = self._sessions.get(worker), self.map.run
        newest: dict[str, int] = {}
        behind = 1 << 53
        for name, server in self.servers.items() if run is not None else ():
            for served in server.served.values() if is_running(self._world.node(name)) else ():
                if run is None or served.store.program != run.id or not served.is_primary:
                    continue
                for tables in each_tables(served.state.shards.values()):
                    # A part of a cut replica pushes its own shards only.
                    numbers = [n for (of, _), n in tables.last_number.whole().items() if of == session]
                    newest[name] = max([newest.get(name, 0), *numbers])
                    behind = min([behind, *numbers])
        return sorted(name for name, number in newest.items() if number > behind)

    def takes_part(self, worker: str) -> bool:
        """Return whether a worker trains, and so has links to all roles that it needs."""
        record, run = self.map.nodes.get(worker), self.map.run
        return record is not None and record.live and run is not None and record.ready.startswith(run.id)
