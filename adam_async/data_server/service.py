"""The data-server role: image groups, ready before they are asked for.

The whole data set lies decoded in memory (AD-04). The order of an epoch is keyed by (seed, epoch), with what
the one before has skipped moved to the front (AD-24), so any server makes the same groups; the next groups of
every replica are gathered ahead of the request (AD-03), and a worker that is slow to ask delays no other:
answers are sent and forgotten (AD-05). The workers that a replica is cut over are all given its groups, each
the rows of the images that it needs.
"""

import logging
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, starmap
from math import prod
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from adam_async.cluster_map import ClusterMap, EpochRecord, RunRecord, skipped_groups
from adam_async.config import Config, Waits
from adam_async.data_server.dataset import Dataset
from adam_async.data_server.order import EpochOrders
from adam_async.data_server.state import (
    DataState,
    Effect,
    EpochBegan,
    EpochEnded,
    Event,
    Grant,
    GroupsReported,
    LeaseAsked,
    Paused,
    PauseEnded,
    ReplicasChanged,
)
from adam_async.data_server.supply import Supply
from adam_async.dice import Dice
from adam_async.ids import Replica
from adam_async.messages import (
    Body,
    Groups,
    Lease,
    LeaseGroups,
    ReadTest,
    Reported,
    ReportGroups,
    TestImages,
    pack,
)
from adam_async.role import Role
from adam_async.shares import Ranges, warm_groups
from adam_async.timeline import Timeline
from adam_async.timer import Timer
from transport import Identity, Network, Request

logger = logging.getLogger(__name__)

ANSWER_BYTES = 8 << 20
"""Images of one answer at most (or one group); a worker that wants more asks again."""

ANSWER_GROUPS = 64
"""Groups of one answer at most; what describes them must fit into a frame's meta."""


@dataclass(frozen=True, slots=True, eq=False)
class _Question:
    """A question for groups, while the state decides on it."""

    request: Request
    rows: tuple[int, int] | None
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
    ) -> None:
        super().__init__(
            network=network,
            address=address,
            identity=identity,
            waits=waits,
            controller=controller,
            info=dataset.info(),
            timeline=timeline,
        )
        self._dataset = dataset
        self.state = DataState()
        self._run = ""
        self._most_groups = 1
        self._partitions = 1
        self._read_ahead = 1
        self._supply = Supply(
            dataset,
            name=f"{identity.node}/images",
            on_failure=lambda error: self._fail(error),
            functions=functions,
        )
        self._timer = Timer(lambda: self.state.next_deadline(), self._due)

    def _tasks(self) -> Mapping[str, Coroutine[Any, Any, None]]:
        return {"timer": self._timer.run(), "follow": self._follow(), "images": self._supply.run()}

    def _fail(self, error: BaseException) -> None:
        """End the server with what making images raised."""

        async def fail() -> None:
            raise error

        self._spawn("images-failed", fail())

    # --- the run -----------------------------------------------------------------------------

    async def _follow(self) -> None:
        """Take up each run and each of its epochs; follow who is live."""
        live: dict[Replica, int] | None = None
        epoch = 0
        async for cluster in self._membership.changes():
            run = cluster.run
            if run is None:
                continue
            if run.id != self._run:
                await self._take_up(cluster, run)
                epoch, live = 0, None
                await self._membership.set_node(ready=run.id)
            before, live = live, {Replica(replica): life for replica, life in cluster.lives().items()}
            if live != before:
                self._tell(ReplicasChanged(live))
            if cluster.epoch is not None and cluster.epoch.run == run.id and cluster.epoch.number > epoch:
                epoch = cluster.epoch.number
                self._begin_epoch(run, cluster.epoch, skipped_groups(cluster.results[: epoch - 1]))

    async def _take_up(self, cluster: ClusterMap, run: RunRecord) -> None:
        self._config = msgspec.convert(run.config, Config)
        await self._supply.take_up(run, self._config)
        self._run = run.id
        self._read_ahead = self._config.read_ahead
        group_bytes = self._config.images_per_group * prod(self._dataset.image_shape)
        self._most_groups = min(max(ANSWER_BYTES // group_bytes, 1), ANSWER_GROUPS)
        self._orders = EpochOrders(
            Dice(self._config.seed),
            num_images=len(self._dataset.train_labels),
            images_per_group=self._config.images_per_group,
        )
        self._partitions = cluster.takers
        self.state = DataState(partitions=self._partitions)

    def _begin_epoch(self, run: RunRecord, epoch: EpochRecord, skipped: Sequence[Ranges]) -> None:
        self._supply.begin_epoch(self._orders.order(epoch.number, skipped), takers=self._partitions)
        shares = {Replica(int(replica)): share for replica, share in epoch.shares.items()}
        taken_up = run.resumed if epoch.finished else None
        began = EpochBegan(
            number=epoch.number,
            groups=epoch.groups,
            shares=shares,
            turn=epoch.turn,
            first_clock=epoch.first_clock,
            finished=epoch.finished,
            images=taken_up.images if taken_up is not None else 0,
            loss=taken_up.loss if taken_up is not None else 0.0,
            train_s=taken_up.train_s if taken_up is not None else 0.0,
            warm=warm_groups(
                int(run.config["warm_start"]),
                epoch=epoch.number,
                groups=epoch.groups,
                finished=epoch.finished,
                turn=epoch.turn,
            ),
            every=int(run.config["checkpoint_every"]),
            carried=epoch.carried,
            behind=tuple(map(Replica, epoch.behind)),
            fraction=self._config.fraction_in_force,
            pooled=self._config.pooled,
            step=self._config.push_every,
        )
        self._tell(began)
        for replica in shares:
            self._loop.call_soon(self._read_on, replica)

    # --- questions ---------------------------------------------------------------------------

    def _answer(self, request: Request, body: Body) -> None:
        match body:
            case LeaseGroups() | ReportGroups() if body.run != self._run:
                request.fail("wrong-run", f"this data server is on run {self._run}, not {body.run}")
            case LeaseGroups():
                self._asked(request, body)
            case ReportGroups():
                self._tell(GroupsReported(Replica(body.replica), body.life, body.partition, body.finished))
                request.reply(pack(Reported()))
            case ReadTest():
                part = slice(body.start, body.stop)
                tensors: list[NDArray[Any]] = [
                    self._dataset.test_images[part],
                    self._dataset.test_labels[part],
                ]
                request.reply(pack(TestImages(total=len(self._dataset.test_labels)), tensors))
            case _:
                super()._answer(request, body)

    def _asked(self, request: Request, body: LeaseGroups) -> None:
        if not 0 <= body.partition < self._partitions:
            request.fail("no-part", f"replicas have parts 0 to {self._partitions - 1}, not {body.partition}")
            return
        height = self._dataset.image_shape[1]
        first, stop = body.rows or (0, height)
        if not 0 <= first <= stop <= height:
            request.fail(
                "no-rows", f"images have rows 0 to {height - 1}: there are no rows {first} to {stop}"
            )
            return
        self._tell(
            LeaseAsked(
                request=_Question(request, None if (first, stop) == (0, height) else (first, stop)),
                replica=Replica(body.replica),
                life=body.life,
                partition=body.partition,
                position=body.position,
                heard=body.heard,
                count=min(body.count, self._most_groups),
                deadline=self._loop.time() + min(body.wait_s, self._waits.call_s / 2),
            )
        )
        self._timer.rearm()
        self._loop.call_soon(self._read_on, Replica(body.replica))

    def _read_on(self, replica: Replica) -> None:
        self._supply.prepare(self.state.upcoming(replica, self._read_ahead))

    def _tell(self, event: Event) -> None:
        self._perform(self.state.handle(event, now=self._loop.time()))

    def _due(self) -> None:
        self._perform(self.state.tick(now=self._loop.time()))

    def _perform(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case Grant():
                    numbers = [number for number, _ in effect.groups]
                    if numbers:
                        self._supply.when_ready(numbers, partial(self._send_groups, effect))
                    else:
                        self._send_groups(effect)
                case EpochEnded():
                    self._spawn(
                        f"epoch-{effect.number}",
                        self._report_epoch(self._run, effect.number, self._result(effect)),
                    )
                case Paused():
                    self._spawn(f"pause-{effect.number}", self._pause(self._run, effect))

    def _send_groups(self, grant: Grant) -> None:
        timeline = self._timeline
        begin = timeline.clock() if timeline is not None else 0.0
        leases: list[Lease] = []
        tensors: tuple[NDArray[Any], ...] = ()
        if grant.groups:
            count, progress = self._supply.count, self.state.progress
            leases = [
                Lease(grant.epoch, number, attempt, count(number), progress(number))
                for number, attempt in grant.groups
            ]
            images, labels = self._supply.take([number for number, _ in grant.groups])
            tensors = _cut(images, labels, grant.request.rows)
        groups = Groups(leases=tuple(leases), last=grant.last, clock=grant.clock, end=grant.end)
        request: Request = grant.request.request
        request.reply(pack(groups, tensors))
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
        return sum(map(self._supply.count, numbers))

    async def _report_epoch(self, run: str, number: int, result: Mapping[str, Any]) -> None:
        def end(epoch: EpochRecord) -> EpochRecord | None:
            if (epoch.run, epoch.number) != (run, number):
                return None  # the run was replaced by another while its last report came in
            return msgspec.structs.replace(epoch, ended=True, result=dict(result))

        await self._membership.update_epoch(end)

    async def _pause(self, run: str, paused: Paused) -> None:
        """Tell the driver that nothing is leased, and wait until it lets the epoch go on.

        That has no deadline of its own: a driver that is gone ends the run.
        """

        def pause(epoch: EpochRecord) -> EpochRecord | None:
            if (epoch.run, epoch.number) != (run, paused.number):
                return None
            return msgspec.structs.replace(epoch, paused=paused.finished)

        await self._membership.update_epoch(pause)
        async for cluster in self._membership.changes():
            epoch = cluster.epoch
            if cluster.run is None or epoch is None or (epoch.run, epoch.number) != (run, paused.number):
                return
            if cluster.run.phase in ("finished", "failed"):
                return
            if not epoch.paused:
                break
        if self._run == run:
            self._tell(PauseEnded())

    def statistics(self) -> dict[str, Any]:
        """Progress of the epoch, groups trained again, and the traffic of each link."""
        told = self.state.statistics()
        skipped = self._images_in(chain.from_iterable(starmap(range, told["skipped_groups"])))
        return {
            **told,
            "skipped": skipped,
            "transforms": self._supply.statistics(),
            **super().statistics(),
        }

    def __repr__(self) -> str:
        return f"<DataServer {self._identity.node} at {self.address} {self._dataset!r}>"


def _cut(
    images: NDArray[Any], labels: NDArray[Any], rows: tuple[int, int] | None
) -> tuple[NDArray[Any], ...]:
    """What travels of some images (n, C, H, W): copied if only some rows of them do."""
    if rows is None:
        return images, labels
    first, stop = rows
    if first == stop:
        return (labels,)
    return np.ascontiguousarray(images[:, :, first:stop]), labels
