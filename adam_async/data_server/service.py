"""The data-server role, which prepares image groups before workers ask for them.

Decoded images stay in memory while the cache has room; the others are decoded again, or are in a scratch file
(AD-04, `image_cache`). Seed and epoch determine the order of an epoch, with the images that the previous
epoch skipped at the front (AD-24). So every server makes the same groups. A server gathers groups ahead for
its replicas (AD-03). A slow reader delays no other worker, because the server does not wait for sent answers
(AD-05). All workers of a replica get its groups; each gets the image rows that it needs.

One data server is the *dealer*, which leases the groups to the replicas (`dealer`). A question for leases
passes through `questions`; `_on_effects` answers it. Questions for images get their answers in `questions`.
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
from adam_async.controller.role import Role, RoleSettings
from adam_async.data_server.dataset import Dataset
from adam_async.data_server.dealer import Dealer
from adam_async.data_server.epoch import EpochOrders
from adam_async.data_server.group_producer import GroupProducer
from adam_async.data_server.questions import ImageQuestions, Questions, takers
from adam_async.data_server.state import DataState, Effect, EpochEnded, Grant
from adam_async.errors import AdamError, ConfigError, DataError, TransformFailed
from adam_async.messages import Body, LeaseGroups, ReadGroups, ReadTest, ReportGroups
from adam_async.messages.body import MOST_INFO_BYTES
from adam_async.model.keyed_random import Dice
from adam_async.run.cluster_map import DATA_FACTS, ClusterMap, EpochRecord, failed_word
from adam_async.run.counts import DataCounts, EpochCounts, skipped_groups
from adam_async.run.epoch_shares import Ranges
from adam_async.run.training_program import TrainingProgram, read_training
from adam_async.runtime.machine import available_bytes
from dataflow import ComputePool, MakePool
from transport import Link, Request

logger = logging.getLogger(__name__)

DIGESTED = 64
"""Maximum number of images that a data set's digest covers."""


class DataServer(Role):
    """One data server, for the duration of its `async with`.

    Args:
        settings: The server's place in its cluster; its timeline also records leases.
        dataset: Data to serve.
        functions: Kinds of transforms that are user functions; the server refuses a run that names others.
        make_pool: See `GroupProducer`.
        available_bytes: See `GroupProducer`.

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
    ) -> None:
        super().__init__(settings, info=describe(dataset))
        self._dataset = dataset
        self._run = ""
        self._refused = ""
        """Id of a run that this server cannot serve."""
        self.transform_failed: TransformFailed | None = None
        """Error of a user's function on an image, which makes this server refuse the run; None without an
        error."""
        self._partitions = 1
        self._read_ahead = 1
        self._began = 0
        """Newest epoch of the run that this server has followed."""
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
        self._reports: asyncio.Queue[Callable[[], Awaitable[None]]] = asyncio.Queue()
        """Reports to the controllers, in order."""
        self._dealer = Dealer(
            self._endpoint, self._waits, cluster=lambda: self._membership.map, on_effects=self._on_effects
        )
        self._questions = Questions(
            identity=self._identity, waits=self._waits, dealer=self._dealer, timeline=self._timeline
        )
        self._images = ImageQuestions(dataset, self._producer)

    def _tasks(self) -> Mapping[str, Coroutine[Any, Any, None]]:
        return {
            "dealer": self._dealer.run(),
            "follow": self._follow(),
            "images": self._producer.run(),
            "reports": self._report(),
        }

    @property
    def state(self) -> DataState:
        """Leases of this server's current or last term as the dealer."""
        return self._dealer.state

    def _fail(self, error: BaseException) -> None:
        """Refuse the run if its transforms failed or took all memory; any other error ends the server."""
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
        """End the server because of an error in a run; report the error to the cluster within `GOODBYE_S`."""
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
        """Follow each run and its epochs."""
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
            if cluster.dealer is not None:
                self._check_data(cluster)
            self._questions.takers = takers(cluster)
            if cluster.run is not None and cluster.run.id == self._run:
                self._follow_epoch(cluster)
            self._images.map_changed(self._questions.takers)
            term = self._dealer.term
            if cluster.run is not None and cluster.run.id == self._run:
                self._dealer.map_changed(cluster)
            if not self._dealer.deals or self._dealer.term != term:
                self._questions.refuse_all(
                    "no-leases", f"{self._identity.node} does not deal out the groups of run {self._run}"
                )

    def _check_data(self, cluster: ClusterMap) -> None:
        """Refuse to serve a run, or together with data servers, that have other data."""
        dealer, first = cluster.dealer, next(iter(cluster.live("data")), "")
        name, theirs = first, cluster.nodes[first].info if first else self._info
        if dealer is not None and cluster.run is not None and dealer.run == cluster.run.id:
            name, theirs = dealer.node, dealer.data
        for key in DATA_FACTS:
            if theirs.get(key) != self._info[key]:
                raise DataError(
                    f"{self._identity.node} has other data than {name}: {key} is {self._info[key]}, not "
                    f"{theirs.get(key)}; data servers of one cluster need the same data set"
                )

    async def _refuse(self, run: str, why: str) -> None:
        """Report in the cluster map that this server cannot serve a run."""
        self._refused = run
        self._questions.leave(f"this data server refuses run {run}")
        self._images.leave(f"this data server refuses run {run}")
        logger.warning("%s refuses run %s: %s", self._identity.node, run, why)
        await self._membership.set_node(failed=failed_word(run, why))

    async def _take_up(self, cluster: ClusterMap, run: str, program: TrainingProgram) -> None:
        self._questions.refuse_all("wrong-run", f"this data server has gone on to run {run}")
        self._images.leave(f"this data server has gone on to run {run}")
        await self._producer.take_up(program)
        self._program, self._config = program, program.config
        self._run, self._began = run, 0
        self._read_ahead = self._config.groups_ahead(prod(self._dataset.image_shape))
        self._orders = EpochOrders(
            Dice(self._config.seed),
            num_images=len(self._dataset.train_labels) - self._config.validation,
            images_per_group=self._config.images_per_group,
        )
        self._partitions = cluster.partitions
        self._questions.take_up(run, self._orders, partitions=self._partitions)
        self._images.take_up(run, self._orders)
        self._dealer.take_up(run, program, images=self._orders.num_images)

    def _follow_epoch(self, cluster: ClusterMap) -> None:
        """Make the groups of the epoch in progress, or after its end the first ones of the next epoch."""
        epoch = cluster.epoch
        if epoch is None or epoch.run != self._run:
            return
        if epoch.ended:
            self._prepare_next(epoch, epoch.result.skipped_groups)
        elif epoch.number > self._began:
            self._began = epoch.number
            self._produce_epoch(epoch.number, self._carried_images(cluster, epoch.number))
            # The dealer of a resumed epoch deals out the groups that are left, perhaps none of the first.
            if self._program.resumed is None or epoch.number > self._program.resumed.epoch:
                self._prepare_first(epoch)

    def _carried_images(self, cluster: ClusterMap, number: int) -> bytes:
        """Return the images at the front of an epoch, which the epoch before has skipped.

        Raises:
            RunFailed: The map no longer has the results of all epochs since the newest one of this server.
        """
        if self._producer.epoch == number:  # prepared when the epoch before ended
            return self._carried
        resumed = self._program.resumed
        before = list(resumed.results) if resumed is not None and not self._producer.epoch else []
        first, carried = self._producer.epoch, self._carried
        if not first:  # the first epoch of this server in the run
            first = (resumed.epoch if resumed is not None else 1) - len(before)
            carried = b""
        oldest = cluster.ended - len(cluster.results) + 1
        if first + len(before) < oldest:
            # One result in the map has no skipped groups (`must_train_all`), and the order starts there.
            first, carried, before = oldest, b"", []
        results = before + [cluster.result(each) for each in range(first + len(before), number)]
        return self._orders.order(
            number, skipped_groups(results), first=first, carried=carried
        ).carried_images

    def _produce_epoch(self, number: int, carried: bytes) -> None:
        if (number, carried) != (self._producer.epoch, self._carried):
            self._carried = carried
            order = self._orders.order(number, first=number, carried=carried)
            self._producer.begin_epoch(order, takers=self._partitions)

    def _prepare_next(self, epoch: EpochRecord, skipped: Ranges) -> None:
        """Prepare the first groups of the next epoch, with the shares of the epoch that ended."""
        if self._producer.epoch == epoch.number < self._config.epochs:
            order = self._orders.order(epoch.number, first=epoch.number, carried=self._carried)
            self._produce_epoch(epoch.number + 1, order.images_in(skipped))
            self._prepare_first(epoch)

    def _prepare_first(self, epoch: EpochRecord) -> None:
        """Make the first groups of an epoch with these shares, for the replicas that ask this server."""
        ahead, cluster = self._read_ahead, self._membership.map
        if epoch.round_groups or self._config.pooled:
            self._producer.prepare(range(min(ahead * len(epoch.shares), epoch.groups)))
            return
        for replica, (start, stop) in epoch.shares.items():
            if cluster.data_servers_for(int(replica))[:1] == (self.address,):
                self._producer.prepare(range(start, min(start + ahead, stop)))

    # --- questions ---------------------------------------------------------------------------

    async def _on_link(self, link: Link) -> None:
        try:
            await super()._on_link(link)
        finally:
            self._images.link_closed()

    def _answer(self, request: Request, body: Body) -> None:
        match body:
            case LeaseGroups() | ReportGroups():
                self._questions.ask(request, body)
            case ReadGroups():
                self._images.read_groups(request, body)
            case ReadTest():
                self._images.read_test(request, body)
            case _:
                super()._answer(request, body)

    # --- effects -----------------------------------------------------------------------------

    def _on_effects(self, effects: Iterable[Effect]) -> None:
        for effect in effects:
            match effect:
                case Grant():
                    self._questions.answer(effect)
                case EpochEnded():
                    skipped = self._images_in(effect.counts.skipped_groups)
                    result = msgspec.structs.replace(effect.counts, skipped=skipped)
                    report = partial(self._report_epoch, self._run, self._dealer.term, effect.number, result)
                    self._reports.put_nowait(report)

    def _images_in(self, ranges: Iterable[tuple[int, int]]) -> int:
        numbers = chain.from_iterable(starmap(range, ranges))
        return sum(self._orders.images_of(number) for number in numbers)

    async def _report(self) -> None:
        """Send reports to the controllers, one after the other."""
        while True:
            send = await self._reports.get()
            await send()

    async def _report_epoch(self, run: str, term: int, number: int, result: EpochCounts) -> None:
        def end(newest: ClusterMap) -> EpochRecord | None:
            """Return the epoch as ended, with its result, if it is open and this server is its dealer."""
            epoch, dealer = newest.epoch, newest.dealer
            if epoch is None or (epoch.run, epoch.number) != (run, number) or epoch.ended:
                return None
            if dealer is None or (dealer.term, dealer.node) != (term, self._identity.node):
                return None  # the next dealer ends the epoch
            return msgspec.structs.replace(epoch, ended=True, result=result)

        await self._membership.update("epoch", end)

    def statistics(self) -> DataCounts:
        """Return the progress of the epoch, leases, memory and traffic."""
        counts = self.state.statistics()
        counts.skipped = self._images_in(counts.skipped_groups)
        counts.transforms = self._producer.statistics()
        counts.cache = self._producer.cache_statistics()
        if counts.cache is not None:
            counts.cache.name = self._identity.node
        counts.term = self._dealer.term
        return self._with_common(counts)

    def __repr__(self) -> str:
        return f"<DataServer {self._identity.node} at {self.address} {self._dataset!r}>"


def describe(dataset: Dataset) -> dict[str, Any]:
    """Describe a dataset for the cluster map; leave out the class names if they are too long.

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


def _digest(dataset: Dataset) -> str:
    """Return a digest of all training labels, and of some training images unless these are decoded later."""
    found = blake2b(dataset.train_labels.tobytes(), digest_size=8)
    images = dataset.train_images
    if isinstance(images, np.ndarray):
        found.update(images[:: len(images) // DIGESTED + 1].tobytes())
    return found.hexdigest()
