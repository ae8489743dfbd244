"""The data-server role, which prepares image groups before workers ask for them.

Decoded images are in memory while the cache has room; the others are decoded again, or are in a scratch file
(AD-04, `image_cache`). The order of an epoch is keyed by (seed, epoch), with the skipped images of the epoch
before at the front (AD-24), so every server makes the same groups. A server gathers groups ahead for its
replicas (AD-03), and a slow reader delays no other worker, because the server does not wait for sent answers
(AD-05). All workers of a replica get its groups, each worker the image rows that it needs.

A question passes through `questions` into the ledger (`ledger_service`); `_on_settled` runs its effects.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
from functools import partial
from hashlib import blake2b
from itertools import chain, starmap
from math import prod
from typing import Any

import msgspec
import numpy as np

from adam_async.controller.client import GOODBYE_S
from adam_async.controller.role import STATISTICS_BYTES, Role, RoleSettings, reply_when_room
from adam_async.data_server.dataset import Dataset
from adam_async.data_server.epoch import EpochBegan
from adam_async.data_server.group_producer import GroupProducer
from adam_async.data_server.ledger import Settled
from adam_async.data_server.ledger_service import LedgerService
from adam_async.data_server.order import EpochOrders
from adam_async.data_server.question_checks import takers
from adam_async.data_server.questions import Questions
from adam_async.data_server.state import (
    DataState,
    DrainAsked,
    Effect,
    EpochEnded,
    Grant,
    GroupsReported,
    ReplicasChanged,
    TimePassed,
)
from adam_async.data_server.statistics import DataStatistics
from adam_async.errors import AdamError, ConfigError, DataError, TransformFailed
from adam_async.messages import (
    Body,
    CopyLedger,
    Enter,
    GetStatistics,
    LeaseGroups,
    ReadTest,
    ReportGroups,
)
from adam_async.messages.bounds import MOST_INFO_BYTES
from adam_async.model.keyed_random import Dice
from adam_async.run.cluster_map import ClusterMap, EpochRecord, failed_word, skipped_groups
from adam_async.run.epoch_shares import warm_groups
from adam_async.run.ids import Replica
from adam_async.run.training_program import MOST_RANGES, TrainingProgram, read_training
from adam_async.runtime.machine import available_bytes
from dataflow import ComputePool, MakePool
from transport import Message, Request

logger = logging.getLogger(__name__)

DIGESTED = 64
"""Maximum number of images in the digest of a data set."""


class DataServer(Role):
    """One data server, from `async with` to its end.

    Args:
        settings: The server's place in its cluster; the timeline records leases, too.
        dataset: Data to serve.
        functions: Kinds of transforms that are functions of the user; the server refuses a run with others.
        make_pool: See `GroupProducer`.
        available_bytes: See `GroupProducer`.
        observe: Called with the run and its leases, on each ledger replica, when an epoch has ended.

    Cancelling the block drops open questions; workers ask again when a data server is back.
    """

    def __init__(
        self,
        settings: RoleSettings,
        dataset: Dataset,
        *,
        functions: Mapping[str, Callable[..., Any]] = {},
        make_pool: MakePool = ComputePool,
        available_bytes: Callable[[], int] = available_bytes,
        observe: Callable[[str, DataState], None] = lambda run, state: None,
    ) -> None:
        super().__init__(settings, info=describe(dataset))
        self._dataset = dataset
        self._run = ""
        self._refused = ""
        """Id of a run that this server cannot serve."""
        self.transform_failed: TransformFailed | None = None
        """Error of a user's function on an image, for which this server refuses the run; None without such an
        error."""
        self._observe = observe
        self._partitions = 1
        self._read_ahead = 1
        self._producer = GroupProducer(
            dataset,
            name=f"{self._identity.node}/images",
            on_failure=lambda error: self._fail(error),
            functions=functions,
            make_pool=make_pool,
            available_bytes=available_bytes,
        )
        self._carried = b""
        """`EpochOrder.carried_images` of the producer's epoch."""
        self._began: EpochBegan | None = None
        self._first_as_ledger_leader: TimePassed | None = None
        """First event that this server has entered as ledger leader; None before."""
        self._reports: asyncio.Queue[Callable[[], Awaitable[None]]] = asyncio.Queue()
        """Reports to the controllers, in their order."""
        self._ledger = LedgerService(
            self._endpoint,
            self._waits,
            on_settled=self._on_settled,
            on_lead=self._on_lead,
            open_events=lambda: self._questions.events(),
        )
        self._questions = Questions(
            identity=self._identity,
            waits=self._waits,
            dataset=dataset,
            producer=self._producer,
            ledger=self._ledger,
            timeline=self._timeline,
        )

    def _tasks(self) -> Mapping[str, Coroutine[Any, Any, None]]:
        return {
            "ledger": self._ledger.run(self._membership),
            "follow": self._follow(),
            "images": self._producer.run(),
            "reports": self._report(),
        }

    @property
    def state(self) -> DataState:
        """Leases, up to the last entry that this server has."""
        return self._ledger.state

    def _fail(self, error: BaseException) -> None:
        """Refuse the run if its transforms failed or took all memory; end the server with any other error."""
        if not isinstance(error, TransformFailed | MemoryError):
            self._spawn("images-failed", self._end_with(error, self._run))
            return
        run = self._membership.map.run
        if run is None or run.id != self._run or run.id == self._refused:
            return  # the run is over, or refused already
        why = (
            str(error) if isinstance(error, TransformFailed) else f"no memory for a block of images: {error}"
        )
        self._refused = run.id
        self.transform_failed = error if isinstance(error, TransformFailed) else None
        self._spawn("run-refused", self._refuse(run.id, why))

    async def _end_with(self, error: BaseException, run: str) -> None:
        """End the server with an error in a run; report it to the cluster, within `GOODBYE_S`."""
        try:
            async with asyncio.timeout(GOODBYE_S):
                # Not ready: other data servers may go on with the run.
                await self._membership.set_node(ready="", failed=failed_word(run, str(error) or repr(error)))
        except (TimeoutError, AdamError) as unreported:
            logger.info("%s ends without a report: %r", self._identity.node, unreported)
        except asyncio.CancelledError:
            # The failed run may cancel this wait, but the error must still end the server.
            raise error from error.__cause__
        raise error

    # --- the run -----------------------------------------------------------------------------

    async def _follow(self) -> None:
        """Follow each run; as its ledger leader, enter its epochs and the live replicas."""
        async for cluster in self._membership.changes():
            run = cluster.run
            if run is None or run.id == self._refused:
                continue
            if run.id != self._run:
                self.transform_failed = None
                try:
                    program = read_training(run)
                except ConfigError as error:  # the server stays for the runs that it can serve
                    await self._refuse(run.id, str(error))
                    continue
                try:
                    self._check_data(cluster)
                    await self._take_up(cluster, run.id, program)
                except ConfigError as error:  # of the record alone: the images of this server are sound
                    await self._refuse(run.id, str(error))
                    continue
                except AdamError as error:
                    await self._end_with(error, run.id)
                await self._membership.set_node(ready=run.id, failed="")
                cluster = self._membership.map
            if cluster.ledger_leaders:
                self._check_data(cluster)
            self._questions.takers = takers(cluster)
            self._ledger.map_changed(cluster)
            if not self._ledger.keeps:
                self._questions.refuse_all(
                    "no-leases", f"{self._identity.node} has no leases of run {self._run}"
                )
            if self._ledger.leads and cluster.run is not None and cluster.run.id == self._run:
                self._enter_changes(cluster)

    def _check_data(self, cluster: ClusterMap) -> None:
        """Refuse to serve together with data servers that have other data."""
        for name in (cluster.ledger_leaders or cluster.live("data"))[:1]:
            theirs = cluster.nodes[name].info
            for key in ("train_images", "test_images", "shape", "classes", "digest"):
                if theirs.get(key) != self._info[key]:
                    raise DataError(
                        f"{self._identity.node} has other data than {name}: {key} is {self._info[key]}, not "
                        f"{theirs.get(key)}; data servers of one cluster need the same data set"
                    )

    async def _refuse(self, run: str, why: str) -> None:
        """Report in the cluster map that this server cannot serve a run."""
        self._refused = run
        self._questions.leave(f"this data server refuses run {run}")
        logger.warning("%s refuses run %s: %s", self._identity.node, run, why)
        await self._membership.set_node(failed=failed_word(run, why))

    async def _take_up(self, cluster: ClusterMap, run: str, program: TrainingProgram) -> None:
        self._questions.refuse_all("wrong-run", f"this data server has gone on to run {run}")
        await self._producer.take_up(program)
        self._program, self._config = program, program.config
        self._run, self._began = run, None
        self._read_ahead = self._config.groups_ahead(prod(self._dataset.image_shape))
        self._orders = EpochOrders(
            Dice(self._config.seed),
            num_images=len(self._dataset.train_labels) - self._config.validation,
            images_per_group=self._config.images_per_group,
        )
        if program.carried and len(program.carried) != -(-self._orders.num_images // 8):
            raise ConfigError(
                f"the record of the run names its first images in {len(program.carried)} bytes; this data "
                f"server has {self._orders.num_images:,} images to train on: give the data of the run"
            )
        self._partitions = cluster.takers
        self._questions.take_up(run, self._config, partitions=self._partitions)
        self._ledger.take_up(run, partitions=self._partitions, orders=self._orders)

    def _enter_changes(self, cluster: ClusterMap) -> None:
        """Enter the live replicas and the epoch, unless the ledger has them."""
        live = {
            Replica(replica): replica_generation
            for replica, replica_generation in cluster.replica_generations().items()
        }
        if live != self.state.replica_generations:
            self._ledger.enter(ReplicasChanged(live))
        epoch = cluster.epoch
        if epoch is not None and epoch.run == self._run and epoch.number > self.state.epoch:
            carried = self._carried_images(cluster, epoch.number)
            self._ledger.enter(_began(self._program, epoch, carried))
        if epoch is not None and epoch.run == self._run and epoch.drain and not self.state.draining:
            self._ledger.enter(DrainAsked(epoch.number))

    def _carried_images(self, cluster: ClusterMap, number: int) -> bytes:
        """Return the images at the front of an epoch, which the epoch before has skipped.

        Raises:
            DataError: The record of the run has images of other data.
            RunFailed: The map no longer has the results of all epochs since the ledger's.
        """
        if self._producer.epoch == number:  # prepared when the epoch before ended
            return self._carried
        if self.state.epoch:
            first, carried = self.state.epoch, self.state.carried_images
            results = [cluster.result(before) for before in range(first, number)]
        else:  # the first epoch of this run
            resumed = self._program.resumed
            results = list(resumed.results) if resumed is not None else []
            first, carried = number - len(results), self._program.carried
        skipped = skipped_groups(results)
        return self._orders.order(number, skipped, first=first, carried=carried).carried_images

    def _begin_epoch(self, began: EpochBegan) -> None:
        self._produce_epoch(began.number, began.carried_images)
        self._began = began
        for replica in began.shares:
            if self._serves(replica):
                self._callbacks.call_soon(self._read_on, replica)

    def _produce_epoch(self, number: int, carried: bytes) -> None:
        if (number, carried) != (self._producer.epoch, self._carried):
            self._carried = carried
            order = self._orders.order(number, first=number, carried=carried)
            self._producer.begin_epoch(order, takers=self._partitions)

    def _prepare_next(self, ended: EpochEnded) -> None:
        """Prepare the first groups of the next epoch, with the shares of the epoch that ended."""
        began, ahead = self._began, self._read_ahead
        if began is None or began.number != ended.number or ended.number >= self._config.epochs:
            return
        order = self._orders.order(ended.number, first=ended.number, carried=began.carried_images)
        self._produce_epoch(ended.number + 1, order.images_in(ended.skipped))
        if began.round_groups or began.pooled:
            self._producer.prepare(range(min(ahead * len(began.shares), began.groups)))
            return
        for replica, (start, stop) in began.shares.items():
            if self._serves(replica):
                self._producer.prepare(range(start, min(start + ahead, stop)))

    def _serves(self, replica: Replica) -> bool:
        """Return whether the workers of a replica ask this server."""
        return self._membership.map.ledger_leader_for(replica) == self.address

    def _on_lead(self) -> None:
        """Enter an event after all entries of the old leader; once the event is settled, this server repeats
        the old leader's report."""
        self._first_as_ledger_leader = TimePassed()
        self._ledger.enter(self._first_as_ledger_leader)

    # --- questions ---------------------------------------------------------------------------

    def _answer(self, request: Request, body: Body) -> None:
        match body:
            case LeaseGroups():
                if self._questions.ask(request, body):
                    self._callbacks.call_soon(self._read_on, Replica(body.replica))
            case ReportGroups():
                self._questions.ask(request, body)
            case Enter():
                self._ledger.answer_enter(request, body)
            case CopyLedger():
                self._ledger.answer_copy(request, body)
            case ReadTest():
                self._questions.read_test(request, body)
            case _:
                super()._answer(request, body)

    def _read_on(self, replica: Replica) -> None:
        if self.state.epoch == self._producer.epoch:
            self._producer.prepare(self.state.upcoming(replica, self._read_ahead))

    # --- effects -----------------------------------------------------------------------------

    def _on_settled(self, settled: Settled) -> None:
        event = settled.event
        if isinstance(event, EpochBegan):
            self._begin_epoch(event)
        elif isinstance(event, GroupsReported):
            self._questions.answer(event)
        for effect in settled.effects:
            self._perform(effect)
        if event is self._first_as_ledger_leader:
            unreported = self.state.unreported()
            if unreported is not None:
                self._perform(unreported)

    def _perform(self, effect: Effect) -> None:
        if isinstance(effect, EpochEnded):
            self._observe(self._run, self.state)
        match effect:
            case Grant():
                self._questions.answer(effect)
            case EpochEnded() if self._ledger.leads:
                result = self._result(effect)
                self._reports.put_nowait(partial(self._report_epoch, self._run, effect.number, result))
                self._prepare_next(effect)
            case EpochEnded():
                self._prepare_next(effect)

    def _result(self, ended: EpochEnded) -> dict[str, Any]:
        """Return the `EpochRecord.result` of an epoch."""
        skipped = chain.from_iterable(starmap(range, ended.skipped))
        return {
            "images": ended.images,
            "loss": ended.loss,
            "train_s": ended.train_s,
            "clock": ended.clock,
            "skipped": self._images_in(skipped),
            "skipped_groups": ended.skipped,
            "behind": ended.behind,
            "trained_again": self._images_in(ended.again),
        }

    def _images_in(self, numbers: Iterable[int]) -> int:
        return sum(map(self._producer.count, numbers))

    async def _report(self) -> None:
        """Send reports to the controllers, one after the other."""
        while True:
            send = await self._reports.get()
            await send()

    async def _report_epoch(self, run: str, number: int, result: Mapping[str, Any]) -> None:
        def end(newest: ClusterMap) -> EpochRecord | None:
            """Return the epoch as ended, with its result, if it is still open."""
            epoch = newest.epoch
            if epoch is None or (epoch.run, epoch.number) != (run, number) or epoch.ended:
                return None  # the old ledger leader has reported it, or another run has begun
            return msgspec.structs.replace(epoch, ended=True, result=dict(result))

        await self._membership.update("epoch", end)

    def _report_statistics(self, request: Request, body: GetStatistics) -> None:
        def make() -> Message:
            """Pack the counts, with the ranges of trained groups."""
            counts, state = self.statistics(), self.state
            trained = state.trained_at(body.clock) if body.clock else state.trained()
            if trained is not None:
                counts.images, counts.loss = trained.images, trained.loss
                counts.finished_ranges = trained.ranges[:MOST_RANGES]  # the driver takes no more
            return self._pack_statistics(counts)

        if body.ranges:
            reply_when_room(request, STATISTICS_BYTES, make)
        else:
            super()._report_statistics(request, body)

    def statistics(self) -> DataStatistics:
        """Return the progress of the epoch, leases, memory and traffic."""
        counts = self.state.statistics()
        counts.skipped = self._images_in(chain.from_iterable(starmap(range, counts.skipped_groups)))
        counts.transforms = self._producer.statistics()
        counts.cache = self._producer.cache_statistics()
        counts.ledger = self._ledger.statistics()
        return self._with_common(counts)

    def __repr__(self) -> str:
        return f"<DataServer {self._identity.node} at {self.address} {self._dataset!r}>"


def describe(dataset: Dataset) -> dict[str, Any]:
    """Describe a dataset for the cluster map; without the names of its classes if they are too long.

    Raises:
        DataError: The cluster map has no room for a description of this size.
    """
    info = {**dataset.info(), "digest": _digest(dataset)}
    size = len(msgspec.json.encode(info))
    if size > MOST_INFO_BYTES and (names := info.pop("class_names", None)):
        logger.warning(
            "the names of %d classes take more than the %d bytes that the description of the data may have: "
            "a model trained on them knows numbers only",
            len(names),
            MOST_INFO_BYTES,
        )
        size = len(msgspec.json.encode(info))
    if size > MOST_INFO_BYTES:
        raise DataError(
            f"the description of the data has {size} bytes, above the limit of {MOST_INFO_BYTES}: "
            f"shorten the name of the dataset ({len(dataset.name)} characters) or its source "
            f"({len(dataset.source)} characters)"
        )
    return info


def _began(program: TrainingProgram, epoch: EpochRecord, carried_images: bytes) -> EpochBegan:
    """Return the event of an epoch that the controllers have begun."""
    config, taken_up = program.config, program.resumed if epoch.finished else None
    return EpochBegan(
        number=epoch.number,
        groups=epoch.groups,
        shares={Replica(int(replica)): share for replica, share in epoch.shares.items()},
        round_groups=epoch.round_groups,
        first_clock=epoch.first_clock,
        finished=epoch.finished,
        images=taken_up.images if taken_up is not None else 0,
        loss=taken_up.loss if taken_up is not None else 0.0,
        train_s=taken_up.train_s if taken_up is not None else 0.0,
        warm=warm_groups(
            config.warm_start,
            epoch=epoch.number,
            groups=epoch.groups,
            finished=epoch.finished,
            round_groups=epoch.round_groups,
        ),
        carried=epoch.carried,
        behind=tuple(map(Replica, epoch.behind)),
        fraction=config.fraction_in_force,
        pooled=config.pooled,
        step=config.push_every,
        carried_images=carried_images,
    )


def _digest(dataset: Dataset) -> str:
    """Return a digest of all training labels, and of some training images unless these are decoded later."""
    found = blake2b(dataset.train_labels.tobytes(), digest_size=8)
    images = dataset.train_images
    if isinstance(images, np.ndarray):
        found.update(images[:: len(images) // DIGESTED + 1].tobytes())
    return found.hexdigest()
