"""The leases of a run on its dealer, the data server that the cluster map names: a shell of `state`.

The dealer applies live replicas, the map's epochs, and workers' questions to one state, which exists only in
memory. Two events need the *sets*, the groups that the shards have (`SetReader`). After the loss of a replica
they settle its leases. The other event is the begin of an epoch whose groups the shards may have already.
An epoch that shards have in part began under an earlier dealer, or belongs to a resumed run, where shards
from disks may be ahead of others. Groups that all shards have are finished; each group that only some shards
have becomes a separate step.

The workers keep their leases from an earlier dealer and continue. So the dealer reads the sets only after the
workers of all live replicas have sent their leases. If a replica is lost during the reading, the dealer reads
the sets again.

The question for sets names a version of the map. From this map version on, a bundle takes groups only of
replica generations in the map. So its answer is final for the ended generations. The dealer waits for a
bundle without a primary, logs this wait, and asks again when the bundle has a primary.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter

import numpy as np
from numpy.typing import NDArray

from adam_async.data_server.epoch import EpochBegan, SetsRead
from adam_async.data_server.state import (
    DataState,
    DrainAsked,
    Effect,
    Event,
    LeaseAsked,
    ReplicasChanged,
    TimePassed,
    joined,
)
from adam_async.messages import BundleSets, ReadGroupSets, pack, read_group_sets, unpack
from adam_async.run.cluster_map import ELSEWHERE, ClusterMap, EpochRecord, must_train_all
from adam_async.run.config import Waits
from adam_async.run.epoch_shares import most_clock, share_out, warm_groups
from adam_async.run.group_ranges import Ranges
from adam_async.run.ids import Replica
from adam_async.run.training_program import TrainingProgram
from adam_async.runtime.channel import Channel, Endpoint
from adam_async.runtime.clock import Timer
from transport import LocalProtocolError, TransportError

logger = logging.getLogger(__name__)

Answer = tuple[BundleSets, Ranges, Ranges]
"""Answer of one bundle: the groups that all its trainable shards have, and the groups that only some have."""


class SetReader:
    """Asks the bundles of a run's store.

    Args:
        cluster: Returns the newest map.
        reach_s: Deadline of a dial and of one question, in seconds.
    """

    def __init__(self, endpoint: Endpoint, cluster: Callable[[], ClusterMap], *, reach_s: float) -> None:
        self._endpoint = endpoint
        self._cluster = cluster
        self._reach_s = reach_s

    async def read(
        self, epoch: int, homes: Iterable[str], *, groups: int, version: int, most_clock: int
    ) -> SetsRead:
        """Read the sets of an epoch; waits until each bundle has answered.

        Args:
            homes: Names of the bundles.
            groups: Number of groups in the epoch.
            version: See `SetsRead.version`.
            most_clock: Highest clock that a replica can reach.
        """
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(self._ask(home, epoch, version), name=f"sets of {home}") for home in homes
            ]
        answers = [task.result() for task in tasks]
        every, some, clock = merged(answers, groups)
        # The first bundle counts, unless another part of a cut replica pushes its shards.
        counted = max((body for body, _, _ in answers), key=attrgetter("images"))
        return SetsRead(
            epoch=epoch,
            version=version,
            every=every,
            some=some,
            # A worker with a false clock can raise a server's clock further than any replica can get.
            clock=min(clock, most_clock),
            images=counted.images,
            loss_sum=counted.loss_sum,
        )

    async def _ask(self, home: str, epoch: int, version: int) -> Answer:
        channel = Channel(self._endpoint, peer=home, address="", peer_role="ps")
        problem = ""
        try:
            while True:
                cluster = self._cluster()
                store = cluster.run_store
                primary = cluster.primary(store.id, home) if store is not None else None
                if store is not None and primary is not None:
                    body = ReadGroupSets(
                        store=store.id,
                        generation=store.generation,
                        home=home,
                        epoch=epoch,
                        map_version=version,
                    )
                    try:
                        channel.address = str(primary.info.get(ELSEWHERE) or primary.address)
                        link = await channel.dial(self._reach_s)
                        reply = await link.call(pack(body), timeout_s=self._reach_s)
                        return unpack(reply, BundleSets), *read_group_sets(reply.tensors)
                    except LocalProtocolError:
                        raise  # no other link would take the message
                    except TransportError as error:
                        now = str(error)
                else:
                    now = "it has no primary"
                if now != problem:
                    problem = now
                    node = self._endpoint.identity.node
                    logger.info("%s waits for the groups of the shards of %s: %s", node, home, problem)
                await channel.pause()
        finally:
            channel.drop()


def merged(answers: Iterable[Answer], groups: int) -> tuple[frozenset[int], frozenset[int], int]:
    """Return the groups that all trainable shards have, those that only some have, and the highest clock.

    Args:
        groups: Number of groups in the epoch; any others in an answer are left out.
    """
    trainable = [(every, some) for body, every, some in answers if body.trainable]
    clock = max((body.clock for body, _, _ in answers), default=0)
    whole = np.full(groups, bool(trainable))
    part = np.zeros(groups, np.bool_)
    for every, some in trainable:
        has = _mask(every, groups)
        whole &= has
        part |= has | _mask(some, groups)
    return _numbers(whole), _numbers(part & ~whole), clock


def _mask(ranges: Ranges, groups: int) -> NDArray[np.bool_]:
    # Without a loop, because a server chooses the number of ranges. Bounds beyond the groups do not matter.
    bounds = np.minimum(np.array(ranges, np.int64), groups)
    steps = np.zeros(groups + 1, np.int8)
    steps[bounds[::2]], steps[bounds[1::2]] = 1, -1
    return np.cumsum(steps[:groups], dtype=np.int8).astype(np.bool_)


def _numbers(mask: NDArray[np.bool_]) -> frozenset[int]:
    return frozenset(np.flatnonzero(mask).tolist())


class Dealer:
    """Deals out the groups of a run while the map names this server.

    Args:
        cluster: Returns the newest map.
        on_effects: Takes the effects of the state.

    Attributes:
        state: Leases of the term in progress, or of the last term.
        deals: Whether this server is the dealer of the run that it serves.
        term: Term in which this server is the dealer; 0: it is not.

    Run `run` as a task of the owner's group.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        waits: Waits,
        *,
        cluster: Callable[[], ClusterMap],
        on_effects: Callable[[Iterable[Effect]], None],
    ) -> None:
        self._identity = endpoint.identity
        self._cluster = cluster
        self._on_effects = on_effects
        self._reader = SetReader(endpoint, cluster, reach_s=min(waits.grace_s, waits.call_s))
        self.state = DataState()
        self.term = 0
        self._program: TrainingProgram
        self._run = ""
        self._images = 0
        self._seen: tuple[int, float] = 0, 0.0
        """Newest epoch in the map, and when this server first saw it."""
        self._group: asyncio.TaskGroup
        self._reading: asyncio.Task[None] | None = None
        self._timer = Timer(lambda: self.state.next_deadline(), lambda: self.enter(TimePassed()))

    async def run(self) -> None:
        """Read sets and keep deadlines, until cancelled."""
        async with asyncio.TaskGroup() as group:
            self._group = group
            try:
                await self._timer.run()
            finally:
                self._end_term()  # a link may still bring a report, after which the group starts no task

    @property
    def deals(self) -> bool:
        """Whether this server is the dealer of the run that it serves."""
        return self.term > 0

    def take_up(self, run: str, program: TrainingProgram, *, images: int) -> None:
        """Begin to serve a run, whose epochs have this many images."""
        self._end_term()
        self._run, self._program, self._images = run, program, images
        self.state = DataState()
        self._seen = 0, 0.0

    def map_changed(self, cluster: ClusterMap) -> None:
        """Follow the map: the dealer, and as the dealer the live replicas and the epoch."""
        epoch = cluster.epoch if cluster.epoch is not None and cluster.epoch.run == self._run else None
        if epoch is not None and epoch.number > self._seen[0]:
            self._seen = epoch.number, _now()
        dealer, me = cluster.dealer, self._identity
        if dealer is None or (dealer.run, cluster.dealing, dealer.incarnation) != (
            self._run,
            me.node,
            me.incarnation,
        ):
            self._end_term()
            return
        if dealer.term != self.term:
            self._end_term()
            self.term = dealer.term
            self.state = DataState(partitions=cluster.partitions, follows=self.term > 1)
            logger.info("%s deals out the groups of run %s, term %d", me.node, self._run, self.term)
        live = {
            Replica(replica): replica_generation
            for replica, replica_generation in cluster.replica_generations().items()
        }
        if not cluster.in_progress:
            self._cancel_reading()  # the store leaves the map with its run
        if live != self.state.replica_generations:
            if self.state.needs_held:
                self._cancel_reading()  # the sets are final for replicas that were lost before the reading
            self.enter(ReplicasChanged(live, cluster.version))
        if epoch is None or epoch.ended:
            return
        if epoch.number > self.state.epoch and not self._needs_sets:
            self._begin(epoch, None)
        if epoch.drain and epoch.number == self.state.epoch and not self.state.draining:
            self.enter(DrainAsked(epoch.number))
        self._read_if_due()

    def enter(self, event: Event) -> None:
        """Enter an event, and run its effects."""
        self._on_effects(self.state.handle(event, now=_now()))
        if isinstance(event, LeaseAsked):
            self._timer.rearm()
        self._read_if_due()

    def _end_term(self) -> None:
        self.term = 0
        self._cancel_reading()

    def _cancel_reading(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
            self._reading = None

    # --- sets ----------------------------------------------------------------------------------

    @property
    def _needs_sets(self) -> bool:
        """Whether shards may have groups of the next epoch that this dealer begins."""
        return self._program.resumed is not None or self.state.needs_held

    def _read_if_due(self) -> None:
        """Begin to read the sets if an epoch, its result or unsettled leases need them."""
        version, ends = self.state.lost_at, self.state.awaits_losses
        if not (version or ends or self._needs_sets):
            return  # every question of a worker comes here
        cluster = self._cluster()
        epoch, dealer = cluster.epoch, cluster.dealer
        if not self.deals or self._reading is not None or dealer is None:
            return
        store = cluster.run_store
        if epoch is None or epoch.run != self._run or epoch.ended or not cluster.in_progress or store is None:
            return
        if epoch.number > self.state.epoch:
            # Replicas that this map version lacks send no leases.
            version = cluster.version if not self.state.lacks_held else 0
        if version or ends:
            name, homes = f"{self._identity.node}/sets-{version}", sorted(set(store.buckets))
            self._reading = self._group.create_task(self._read(epoch, homes, version), name=name)

    async def _read(self, epoch: EpochRecord, homes: Sequence[str], version: int) -> None:
        most = most_clock(stands_at=epoch.first_clock, epochs=1, groups=epoch.groups)
        sets = await self._reader.read(
            epoch.number, homes, groups=epoch.groups, version=version, most_clock=most
        )
        self._reading = None
        newest = self._cluster().epoch
        if epoch.number == self.state.epoch:
            self.enter(sets)
        elif newest is not None and (newest.run, newest.number) == (epoch.run, epoch.number):
            # A worker that sends its leases again begins the next reading.
            if not newest.ended and not self.state.lacks_held:
                self._begin(newest, sets)
                self.map_changed(self._cluster())

    def _begin(self, epoch: EpochRecord, sets: SetsRead | None) -> None:
        """Begin an epoch; with sets, the groups that all shards have are finished."""
        config, resumed = self._program.config, self._program.resumed
        results = (*(resumed.results if resumed is not None else ()), *self._cluster().results)
        ends = resumed.skipped_from(epoch.number) if resumed is not None else ()
        if resumed is not None and resumed.epoch != epoch.number:
            resumed = None
        train_s = resumed.train_s if resumed is not None else 0.0
        named = ends[0] if ends else ()
        # A false record may name groups that no epoch has; each of them would take memory.
        skipped = tuple([(start, min(stop, epoch.groups)) for start, stop in named if start < epoch.groups])
        # A shard that has dropped the epoch's set answers that it has all groups.
        absent = {number for each in skipped for number in range(*each)}
        finished = joined(sets.every - absent) if sets is not None else ()
        warm = warm_groups(
            config.warm_start, epoch=epoch.number, groups=epoch.groups, round_groups=epoch.round_groups
        )
        shares = epoch.shares
        if finished or skipped:  # equal parts of the groups left
            shares = share_out(
                tuple(map(int, shares)),
                groups=epoch.groups,
                round_groups=epoch.round_groups,
                warm=warm,
                finished=(*finished, *skipped),
                carried=epoch.carried,
            )
        if self.term > 1 and not self.state.epoch:
            train_s += _now() - self._seen[1]  # the previous dealer began it
        self.enter(
            EpochBegan(
                number=epoch.number,
                groups=epoch.groups,
                shares={Replica(int(replica)): share for replica, share in shares.items()},
                round_groups=epoch.round_groups,
                first_clock=epoch.first_clock,
                clock=sets.clock if sets is not None else 0,
                finished=finished,
                skipped=skipped,
                ragged=sets.some if sets is not None else (),
                loss_images=sets.images if sets is not None else 0,
                loss_sum=sets.loss_sum if sets is not None else 0.0,
                train_s=train_s,
                warm=warm,
                carried=epoch.carried,
                behind=tuple(map(Replica, epoch.behind)),
                fraction=1.0 if ends or must_train_all(results) else config.fraction_in_force,
                pooled=config.pooled,
                step=config.push_every,
                images_per_group=config.images_per_group,
                num_images=self._images,
            )
        )


def _now() -> float:
    return asyncio.get_running_loop().time()
