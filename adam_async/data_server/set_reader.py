"""Reads the groups that the shards of a run have, from the primaries of all bundles of its store.

The question names a version of the map. From this version on a bundle takes groups only of replica
generations in the map, so its answer is final for the generations that have ended. A bundle without a primary
is asked again when it has one: the reading waits, and logs the bundle that it waits for.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable
from operator import attrgetter

import numpy as np
from numpy.typing import NDArray

from adam_async.data_server.epoch import SetsRead
from adam_async.messages import BundleSets, ReadGroupSets, pack, read_group_sets, unpack
from adam_async.run.cluster_map import ELSEWHERE, ClusterMap
from adam_async.run.group_ranges import Ranges
from adam_async.runtime.channel import Channel, Endpoint
from transport import LocalProtocolError, TransportError

logger = logging.getLogger(__name__)

Answer = tuple[BundleSets, Ranges, Ranges]
"""Answer of one bundle: the groups that all its trainable shards have, and those that only some
have."""


class SetReader:
    """Asks the bundles of a run's store.

    Args:
        cluster: Returns the newest map.
        reach_s: Deadline of a dial, and of one question, in seconds.
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
            groups: Number of groups of the epoch.
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
            # A worker that lies about its clock can raise that of a server further than any replica can come.
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
        groups: Number of groups of the epoch; an answer may have others, which are left out.
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
