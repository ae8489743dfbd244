"""The data-server role: image groups, ready before they are asked for.

Decoded images lie in memory as far as its cache has room; the others are read again, or lie in a file aside
(AD-04, `cache.py`). The order of an epoch is keyed by (seed, epoch), with what
the one before has skipped moved to the front (AD-24), so any server makes the same groups; a server gathers
groups ahead for the replicas that ask it (AD-03), and a worker that is slow to read delays no other:
answers are sent and forgotten (AD-05). The workers that a replica is cut over are all given its groups, each
the rows of the images that it needs.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from itertools import chain, starmap
from math import prod
from typing import Any
from weakref import WeakSet

import msgspec
import numpy as np
from numpy.typing import NDArray

from adam_async.controller.client import GOODBYE_S
from adam_async.controller.role import Role, reply_or_fail, reply_when_room
from adam_async.data_server.dataset import Dataset
from adam_async.data_server.group_producer import GroupProducer
from adam_async.data_server.ledger import Settled
from adam_async.data_server.ledger_service import LedgerService
from adam_async.data_server.order import EpochOrders
from adam_async.data_server.question_checks import (
    MOST_WAIT_S,
    Takers,
    check_report,
    check_test_part,
    lease_refusal,
    taker_refusal,
    takers,
)
from adam_async.data_server.state import (
    DataState,
    Effect,
    EpochBegan,
    EpochEnded,
    Grant,
    GroupsReported,
    LeaseAsked,
    Paused,
    PauseEnded,
    ReplicasChanged,
    TimePassed,
)
from adam_async.errors import AdamError, DataError
from adam_async.messages import (
    Body,
    CopyLedger,
    Enter,
    Groups,
    Lease,
    LeaseGroups,
    ReadTest,
    Reported,
    ReportGroups,
    TestImages,
    pack,
)
from adam_async.messages.sizes import MOST_INFO_BYTES
from adam_async.model.keyed_random import Dice
from adam_async.run.cluster_map import MOST_REASON, ClusterMap, EpochRecord, RunRecord, skipped_groups
from adam_async.run.config import Config, Waits
from adam_async.run.epoch_shares import warm_groups
from adam_async.run.ids import Replica
from adam_async.runtime.machine import ProcessMemory, available_bytes, process_memory
from adam_async.runtime.timeline import Timeline
from dataflow import ComputePool, MakePool
from transport import Identity, Link, Message, Network, Request

logger = logging.getLogger(__name__)

ANSWER_BYTES = 8 << 20
"""Images of one answer at most (or one group); a worker that wants more asks again."""

ANSWER_GROUPS = 64
"""Groups of one answer at most; what describes them must fit into a frame's meta."""

DIGESTED = 64
"""Images by which data sets are told apart."""

UNREAD_BYTES = 1 << 16
"""With more unsent on a link its worker is given no further groups: it has not read the last answer."""


@dataclass(frozen=True, slots=True, eq=False)
class _Question:
    """A question of a worker, until it is answered."""

    request: Request
    event: LeaseAsked | GroupsReported
    """What is to be entered for it."""
    rows: tuple[int, int] | None = None
    """Rows of the images that are wanted, if not all of them are."""


class DataServer(Role):
    """One data server, from `async with` to its end.

    Args:
        network: Where it listens and how it reaches the controller.
        address: What it binds.
        controller: The controller's address.
        identity: Its role, node id and incarnation.
        waits: Deadlines.
        dataset: What it serves.
        functions: Kinds of transforms that are functions of the user; see `Recipe.of`.
        timeline: Where leases and messages are noted.
        make_pool: See `Supply`.
        available_bytes: The same.
        process_memory: See `Role`.

    Cancelling the block drops open questions; workers ask again when a data server is back.
    """

    def __init__(
        self,
        *,
        network: Network,
        address: str,
        controller: str,
        identity: Identity,
        waits: Waits,
        dataset: Dataset,
        functions: Mapping[str, Callable[..., Any]] = {},
        timeline: Timeline | None = None,
        make_pool: MakePool = ComputePool,
        available_bytes: Callable[[], int] = available_bytes,
        process_memory: Callable[[], ProcessMemory] = process_memory,
    ) -> None:
        super().__init__(
            network=network,
            address=address,
            identity=identity,
            waits=waits,
            controller=controller,
            info=describe(dataset),
            timeline=timeline,
            process_memory=process_memory,
        )
        self._dataset = dataset
        self._run = ""
        self._most_groups = 1
        self._partitions = 1
        self._takers: Takers = {}
        self._read_ahead = 1
        self._producer = GroupProducer(
            dataset,
            name=f"{identity.node}/images",
            on_failure=lambda error: self._fail(error),
            functions=functions,
            make_pool=make_pool,
            available_bytes=available_bytes,
        )
        self._supplied: tuple[int, bytes] = (0, b"")
        """Epoch of the supplied groups, in progress or after its end the next one, and its first images."""
        self._began: EpochBegan | None = None
        self._first_as_ledger_leader: TimePassed | None = None
        """What we entered when we became the lender."""
        self._pausing: tuple[str, int] | None = None
        """Run and epoch in whose pause we are, as the lender."""
        self._pause_told = False
        self._untold: asyncio.Queue[Callable[[], Awaitable[None]]] = asyncio.Queue()
        """What the controllers are to hear."""
        self._questions: dict[int, _Question] = {}
        """Those that are open, by number, oldest first."""
        self._asking: WeakSet[Link] = WeakSet()
        """Links with a question for groups that is not answered."""
        self._asked_so_far = first_question(identity.incarnation)
        self._ledger = LedgerService(
            network=network,
            identity=identity,
            waits=waits,
            traffic=self._traffic,
            on_settled=self._on_settled,
            on_lead=self._on_lead,
            open_events=lambda: [question.event for question in self._questions.values()],
        )

    def _tasks(self) -> Mapping[str, Coroutine[Any, Any, None]]:
        return {
            "lending": self._ledger.run(self._membership),
            "follow": self._follow(),
            "images": self._producer.run(),
            "tell": self._tell(),
        }

    @property
    def state(self) -> DataState:
        """Who has which groups, as far as we have heard."""
        return self._ledger.state

    def _fail(self, error: BaseException) -> None:
        """End the server with what making images raised."""
        self._spawn("images-failed", self._end_with(error))

    async def _end_with(self, error: BaseException) -> None:
        """End the server, and let the cluster know by what, if it can be told within a moment."""
        try:
            async with asyncio.timeout(GOODBYE_S):
                await self._membership.set_node(failed=(str(error) or repr(error))[:MOST_REASON])
        except (TimeoutError, AdamError) as untold:
            logger.info("%s ends, and cannot say so: %r", self._identity.node, untold)
        except asyncio.CancelledError:
            # The run has failed by it already. The error is the news still, not that this wait ended.
            raise error from error.__cause__
        raise error

    # --- the run -----------------------------------------------------------------------------

    async def _follow(self) -> None:
        """Take up each run; as its lender, enter each of its epochs and who is live."""
        async for cluster in self._membership.changes():
            run = cluster.run
            if run is None:
                continue
            if run.id != self._run:
                try:
                    self._check_data(cluster)
                    await self._take_up(cluster, run)
                except AdamError as error:
                    await self._end_with(error)
                await self._membership.set_node(ready=run.id)
                cluster = self._membership.map
            if cluster.ledger_leaders:
                self._check_data(cluster)
            self._takers = takers(cluster)
            self._ledger.map_changed(cluster)
            if not self._ledger.keeps:
                self._refuse_all("not-lending", f"{self._identity.node} has no leases of run {self._run}")
            if self._ledger.leads and cluster.run is not None and cluster.run.id == self._run:
                self._enter_changes(cluster, cluster.run)

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

    async def _take_up(self, cluster: ClusterMap, run: RunRecord) -> None:
        self._refuse_all("wrong-run", f"this data server has gone on to run {run.id}")
        self._config = msgspec.convert(run.config, Config)
        await self._producer.take_up(run, self._config)
        self._run, self._supplied, self._began = run.id, (0, b""), None
        self._read_ahead = self._config.groups_ahead(prod(self._dataset.image_shape))
        most = min(ANSWER_BYTES, self._producer.answer_bytes)
        group_bytes = self._config.images_per_group * prod(self._dataset.image_shape)
        self._most_groups = min(max(most // group_bytes, 1), ANSWER_GROUPS)
        self._orders = EpochOrders(
            Dice(self._config.seed),
            num_images=len(self._dataset.train_labels) - self._config.validation,
            images_per_group=self._config.images_per_group,
        )
        self._partitions = cluster.takers
        self._ledger.take_up(run.id, partitions=self._partitions, orders=self._orders)

    def _enter_changes(self, cluster: ClusterMap, run: RunRecord) -> None:
        """Enter who is live, and the epoch that began, where the ledger does not have it."""
        live = {
            Replica(replica): replica_generation
            for replica, replica_generation in cluster.replica_generations().items()
        }
        if live != self.state.replica_generations:
            self._ledger.enter(ReplicasChanged(live))
        self._end_pause(cluster)
        epoch = cluster.epoch
        if epoch is not None and epoch.run == run.id and epoch.number > self.state.epoch:
            carried = self._carried_images(cluster, run, epoch.number)
            self._ledger.enter(_began(run, self._config, epoch, carried))

    def _carried_images(self, cluster: ClusterMap, run: RunRecord, number: int) -> bytes:
        """The images with which an epoch begins because the one before has skipped them.

        Raises:
            DataError: The run's record has those of other data.
            RunFailed: The map no longer holds the results of all epochs since the ledger's.
        """
        if self._supplied[0] == number:  # foreseen when the epoch before ended
            return self._supplied[1]
        if self.state.epoch:
            first, carried = self.state.epoch, self.state.carried_images
            results = [cluster.result(before) for before in range(first, number)]
        else:  # the first epoch of this run
            results = list(run.resumed.results) if run.resumed is not None else []
            first, carried = number - len(results), run.carried
        skipped = skipped_groups(results)
        return self._orders.order(number, skipped, first=first, carried=carried).carried_images

    def _begin_epoch(self, began: EpochBegan) -> None:
        self._produce_epoch(began.number, began.carried_images)
        self._began = began
        for replica in began.shares:
            if self._serves(replica):
                self._callbacks.call_soon(self._read_on, replica)

    def _produce_epoch(self, number: int, carried: bytes) -> None:
        if (number, carried) != self._supplied:
            self._supplied = (number, carried)
            order = self._orders.order(number, first=number, carried=carried)
            self._producer.begin_epoch(order, takers=self._partitions)

    def _foresee(self, ended: EpochEnded) -> None:
        """Make the first groups of the next epoch ready, as if it were shared out like the one that ended."""
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
        """Whether the replica's workers ask us."""
        return self._membership.map.ledger_leader_for(replica) == self.address

    def _on_lead(self) -> None:
        """Who lent before us may not have told the controllers all: see, when all that we have is settled."""
        self._pausing = None
        self._first_as_ledger_leader = TimePassed()
        self._ledger.enter(self._first_as_ledger_leader)

    # --- questions ---------------------------------------------------------------------------

    def _answer(self, request: Request, body: Body) -> None:
        match body:
            case LeaseGroups() | ReportGroups() if body.run != self._run:
                request.fail("wrong-run", f"this data server is on run {self._run}, not {body.run}")
            case LeaseGroups() | ReportGroups() if not self._ledger.keeps:
                request.fail("not-lending", f"{self._identity.node} has no leases of run {self._run}")
            case LeaseGroups() | ReportGroups() if text := taker_refusal(
                body, request.link.peer, self._takers
            ):
                request.fail("not-yours", text)
            case LeaseGroups():
                self._asked(request, body)
            case ReportGroups():
                self._reported(request, body)
            case Enter():
                self._ledger.answer_enter(request, body)
            case CopyLedger():
                self._ledger.answer_copy(request, body)
            case ReadTest():
                self._send_test(request, body)
            case _:
                super()._answer(request, body)

    def _images_bytes(self, images: int) -> int:
        """Return the size of so many images with their labels, in bytes."""
        return images * (prod(self._dataset.image_shape) + self._dataset.test_labels.itemsize)

    def _test_images(self, images: NDArray[np.uint8], labels: NDArray[np.int64], part: slice) -> Message:
        tensors: list[NDArray[Any]] = [images[part], labels[part]]
        return pack(TestImages(total=len(labels)), tensors)

    def _asked(self, request: Request, body: LeaseGroups) -> None:
        height = self._dataset.image_shape[1]
        refused = lease_refusal(body, partitions=self._partitions, height=height)
        if refused is not None:
            request.fail(*refused)
            return
        first, stop = body.rows or (0, height)
        if request.link in self._asking or request.link.statistics().unsent_bytes > UNREAD_BYTES:
            # Otherwise who asks and does not read would have us hold answers without bound.
            request.fail("busy", "one question for groups at a time: read the answer to the last one first")
            return
        self._asking.add(request.link)
        event = LeaseAsked(
            request=self._next_request(),
            replica=Replica(body.replica),
            replica_generation=body.replica_generation,
            partition=body.partition,
            position=body.position,
            heard=body.heard,
            count=min(body.count, self._most_groups),
            wait_s=min(body.wait_s, self._waits.call_s / 2, MOST_WAIT_S),
        )
        rows = None if (first, stop) == (0, height) else (first, stop)
        self._enter(_Question(request, event, rows))
        self._callbacks.call_soon(self._read_on, Replica(body.replica))

    def _send_test(self, request: Request, body: ReadTest) -> None:
        of_test = self._dataset.test_images, self._dataset.test_labels
        images, labels = self._producer.validation if body.validation else of_test
        total = len(labels)
        size, most = prod(self._dataset.image_shape), request.link.max_message_bytes
        refused = check_test_part(body, total, image_bytes=size, most_bytes=most)
        if refused:
            request.fail("too-large", refused)
            return
        part = slice(body.start, body.stop)
        count = len(range(total)[part])
        reply_when_room(request, self._images_bytes(count), partial(self._test_images, images, labels, part))

    def _reported(self, request: Request, body: ReportGroups) -> None:
        began, images = self._began, self._config.images_per_group
        known = began is not None and began.number == self.state.epoch == self._supplied[0]
        epoch, groups = (began.number, began.groups) if began is not None and known else (0, 0)
        count = self._producer.count
        check_report(body, self._partitions, group_images=images, epoch=epoch, groups=groups, count=count)
        event = GroupsReported(
            Replica(body.replica),
            body.replica_generation,
            body.partition,
            body.finished,
            self._next_request(),
        )
        self._enter(_Question(request, event))

    def _next_request(self) -> tuple[str, int]:
        self._asked_so_far += 1
        return self._identity.node, self._asked_so_far

    def _enter(self, question: _Question) -> None:
        self._questions[self._asked_so_far] = question
        self._ledger.enter(question.event)

    def _close(self, request: tuple[str, int] | None) -> _Question | None:
        """The question that is answered now; None if it is not ours, or is answered."""
        if request is None or request[0] != self._identity.node:
            return None
        return self._questions.pop(request[1], None)

    def _refuse_all(self, code: str, text: str) -> None:
        for question in self._questions.values():
            question.request.fail(code, text)
        self._questions.clear()
        self._asking.clear()

    def _read_on(self, replica: Replica) -> None:
        if self.state.epoch == self._supplied[0]:
            self._producer.prepare(self.state.upcoming(replica, self._read_ahead))

    # --- what follows ------------------------------------------------------------------------

    def _on_settled(self, settled: Settled) -> None:
        event = settled.event
        if isinstance(event, EpochBegan):
            self._begin_epoch(event)
        elif isinstance(event, GroupsReported):
            question = self._close(event.request)
            if question is not None:
                reply_or_fail(question.request, pack(Reported()))
        for effect in settled.effects:
            self._perform(effect)
        if event is self._first_as_ledger_leader:
            untold = self.state.untold()
            if untold is not None:
                self._perform(untold)

    def _perform(self, effect: Effect) -> None:
        match effect:
            case Grant():
                question = self._close(effect.request)
                if question is not None:
                    self._charge_groups(question, effect)
            case EpochEnded() if self._ledger.leads:
                result = self._result(effect)
                self._untold.put_nowait(partial(self._report_epoch, self._run, effect.number, result))
                self._foresee(effect)
            case EpochEnded():
                self._foresee(effect)
            case Paused() if self._ledger.leads and self._pausing != (self._run, effect.number):
                self._pausing, self._pause_told = (self._run, effect.number), False
                self._untold.put_nowait(partial(self._pause, self._run, effect))

    def _charge_groups(self, question: _Question, grant: Grant) -> None:
        """Charge for an answer of groups before the server makes it; it goes out when there is room."""
        images = self._images_bytes(sum([self._producer.count(number) for number, _ in grant.groups]))
        if question.rows is not None:
            first, stop = question.rows
            images = images * (stop - first) // self._dataset.image_shape[1]
        question.request.charge(images, partial(self._send_when_ready, question, grant))

    def _send_when_ready(self, question: _Question, grant: Grant) -> None:
        numbers = [number for number, _ in grant.groups]
        if numbers and grant.epoch == self._supplied[0]:
            self._producer.when_ready(numbers, partial(self._send_groups, question, grant))
        elif not numbers:
            self._send_groups(question, grant)
        else:
            self._asking.discard(question.request.link)
            question.request.fail("epoch-over", f"epoch {grant.epoch} is over")

    def _send_groups(self, question: _Question, grant: Grant) -> None:
        timeline, request = self._timeline, question.request
        begin = timeline.clock() if timeline is not None else 0.0
        leases: list[Lease] = []
        tensors: tuple[NDArray[Any], ...] = ()
        if grant.groups:
            count = self._producer.count
            leases = [
                Lease(grant.epoch, number, attempt, count(number), progress)
                for (number, attempt), progress in zip(grant.groups, grant.progress, strict=True)
            ]
            images, labels = self._producer.take([number for number, _ in grant.groups])
            tensors = _cut(images, labels, question.rows)
            if question.rows is not None:
                self._producer.watch(tensors[:-1])
        groups = Groups(leases=tuple(leases), last=grant.last, clock=grant.clock, end=grant.end)
        self._asking.discard(request.link)
        reply_or_fail(request, pack(groups, tensors))
        if timeline is not None and leases:
            timeline.leased(self._identity.node, self._run, request.link.peer.node, leases, begin)

    def _result(self, ended: EpochEnded) -> dict[str, Any]:
        """What `EpochRecord.result` says of an epoch."""
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

    async def _tell(self) -> None:
        """Tell the controllers what they are to know, one thing after the other."""
        while True:
            telling = await self._untold.get()
            await telling()

    async def _report_epoch(self, run: str, number: int, result: Mapping[str, Any]) -> None:
        def end(epoch: EpochRecord) -> EpochRecord | None:
            if (epoch.run, epoch.number) != (run, number) or epoch.ended:
                return None  # who lent before us has said it, or the run was replaced by another meanwhile
            return msgspec.structs.replace(epoch, ended=True, result=dict(result))

        await self._membership.update_epoch(end)

    async def _pause(self, run: str, paused: Paused) -> None:
        """Tell the driver that nothing is leased, and go on once it lets the epoch go on.

        That has no deadline of its own: a driver that is gone ends the run.
        """

        def pause(epoch: EpochRecord) -> EpochRecord | None:
            if (epoch.run, epoch.number) != (run, paused.number):
                return None
            return msgspec.structs.replace(epoch, paused=paused.finished)

        await self._membership.update_epoch(pause)
        self._pause_told = True
        self._end_pause(self._membership.map)

    def _end_pause(self, cluster: ClusterMap) -> None:
        """Go on leasing if the driver has taken its checkpoint."""
        epoch = cluster.epoch
        if self._pausing is not None and epoch is not None and not epoch.paused:
            if self._ledger.leads and self._pausing == (epoch.run, epoch.number) == (
                self._run,
                epoch.number,
            ):
                self._ledger.enter(PauseEnded())
            self._pausing = None

    def statistics(self) -> dict[str, Any]:
        """Progress of the epoch, groups trained again, and the traffic of each link."""
        told = self.state.statistics()
        skipped = self._images_in(chain.from_iterable(starmap(range, told["skipped_groups"])))
        return {
            **told,
            "skipped": skipped,
            "transforms": self._producer.statistics(),
            "cache": self._producer.cache_statistics(),
            "lending": self._ledger.statistics(),
            **super().statistics(),
        }

    def __repr__(self) -> str:
        return f"<DataServer {self._identity.node} at {self.address} {self._dataset!r}>"


def describe(dataset: Dataset) -> dict[str, Any]:
    """Describe a dataset for the cluster map; without the names of its classes if they do not fit.

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


def _began(run: RunRecord, config: Config, epoch: EpochRecord, carried_images: bytes) -> EpochBegan:
    """What the controllers say of an epoch, for the ledger."""
    taken_up = run.resumed if epoch.finished else None
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
        every=config.checkpoint_every,
        carried=epoch.carried,
        behind=tuple(map(Replica, epoch.behind)),
        fraction=config.fraction_in_force,
        pooled=config.pooled,
        step=config.push_every,
        carried_images=carried_images,
    )


def _digest(dataset: Dataset) -> str:
    """What tells data sets apart that look alike: all labels, and some images if these lie in memory."""
    found = blake2b(dataset.train_labels.tobytes(), digest_size=8)
    images = dataset.train_images
    if isinstance(images, np.ndarray):
        found.update(images[:: len(images) // DIGESTED + 1].tobytes())
    return found.hexdigest()


def _cut(
    images: tuple[NDArray[Any], ...], labels: NDArray[Any], rows: tuple[int, int] | None
) -> tuple[NDArray[Any], ...]:
    """What travels of some images (n, C, H, W): copied if only some rows of them do."""
    if rows is None:
        return *images, labels
    first, stop = rows
    if first == stop:
        return (labels,)
    return *(np.ascontiguousarray(piece[:, :, first:stop]) for piece in images), labels


def first_question(incarnation: int) -> int:
    """Number below the first question of an incarnation.

    The ledger names a question by node and number, and a restarted server reads the answers to the questions
    of its earlier incarnation. Ranges of 2**24 numbers, one for each incarnation, keep those apart.
    """
    return incarnation % (1 << 28) << 24
