"""What a worker uses of a data server: groups ahead of need, reports behind.

A `DataClient` holds a few groups ahead, so that a compute thread never waits for input in steady state
(AD-06); it counts the times that one did. Two conversations share its link: one asks for groups when
there is room and may be parked at the server, the other reports what is finished. When the link breaks, or
another data server is to be asked, both begin again on a new one. A question says how many groups have come
before it, so that none is missing whatever became of an answer, and whoever it came from.

Where replicas' clocks may not drift apart, the data server says with the groups at which clock they begin,
and with the last ones where all replicas meet then; both go on to whoever trains the groups, who ticks.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from adam_async.errors import RoleFailed
from adam_async.messages import Finished, Groups, Lease, LeaseGroups, Reported, ReportGroups, pack, unpack
from adam_async.run.config import Waits
from adam_async.run.group_limits import GroupLimits
from adam_async.runtime.channel import Channel, wait_set
from adam_async.runtime.traffic import Traffic
from transport import DialFailed, Identity, Link, Network, RemoteProtocolError, TransportError

logger = logging.getLogger(__name__)

DIAL_S = 1.0
"""How long one server is dialled before we look whether another one is to be asked."""


@dataclass(frozen=True, slots=True, eq=False)
class ImageGroup:
    """One leased group: its tag's numbers, images (n, C, H, W) with the rows asked for, and labels (n,)."""

    lease: Lease
    images: NDArray[Any] | None
    """None where none were asked for."""
    labels: NDArray[Any]
    clock: int = 0
    """It begins no earlier than this clock; 0 where that was not said."""
    sync_clock: int = 0
    """Where all replicas met before it; 0 where they did not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataClientStatistics:
    """How often training waited for input."""

    groups: int
    blocked_fetches: int
    blocked_s: float


class DataClient:
    """Reads the groups of one worker of a replica ahead of need.

    Args:
        network: How to reach data servers.
        address: That of the one to ask, after so many in a row that did not answer; empty while there is
            none. After a change, `look`.
        identity: Who we are.
        run: Id of the run.
        replica: Whose share we read.
        life: The life of the replica in which we do.
        partition: Our part of it.
        ahead: Groups to hold.
        limits: Limits of the run's groups.
        rows: First row of the images that we need, and the one behind the last; ``(0, 0)``: labels only.
            None: whole images.
        waits: Deadlines.
        traffic: Where the links are counted.

    Run `run` as a task of the owner's group.
    """

    def __init__(
        self,
        *,
        network: Network,
        address: Callable[[int], str],
        identity: Identity,
        run: str,
        replica: int,
        replica_generation: int,
        partition: int,
        ahead: int,
        limits: GroupLimits,
        waits: Waits,
        traffic: Traffic,
        rows: tuple[int, int] | None = None,
    ) -> None:
        self._channel = Channel(
            peer="the data server",
            address="",
            network=network,
            identity=identity,
            traffic=traffic,
            patience_s=waits.patience_s,
        )
        self._address = address
        self._silent = 0
        """How many that we asked in a row did not answer; the one that does is stayed with."""
        self._looked = asyncio.Event()
        self._identity = identity
        self._run = run
        self._replica = replica
        self._replica_generation = replica_generation
        self._partition = partition
        self._rows = rows
        self._ahead = ahead
        self._limits = limits
        self._waits = waits
        self._groups: deque[ImageGroup] = deque()
        self._position = 0
        self._open: set[tuple[int, int, int]] = set()
        """Epoch, number and attempt of the groups that are not finished."""
        self._heard = -1
        self._reports: list[Finished] = []
        self._has_group = asyncio.Event()
        self._has_room = asyncio.Event()
        self._has_reports = asyncio.Event()
        self._taken = 0
        self._blocked_fetches = 0
        self._blocked_s = 0.0
        self._last = False
        self._end = 0
        self._answered = False
        self._refused = ""
        """The fault of an impossible answer on this link."""

    async def run(self) -> None:
        """Read ahead until cancelled.

        Raises:
            RoleFailed: No data server could be reached, or none gave a correct answer, for `patience_s`.
        """
        channel, problem = self._channel, ""
        channel.renew()
        while (left_s := channel.left_s) > 0:
            self._looked.clear()
            channel.address = self._address(self._silent)
            if not channel.address:
                await wait_set(self._looked, left_s)
                continue
            try:
                link = await channel.dial(min(left_s, DIAL_S))
            except DialFailed as error:
                problem = str(error)
                self._silent += 1
                continue
            if self._address(self._silent) != channel.address:  # it has changed during the dial
                channel.drop()
            elif await self._attend(link):
                channel.progressed()
            else:
                problem = self._refused or problem
                self._silent += not self._looked.is_set()
                await channel.pause(self._looked)
        what = "a correct answer" if self._refused else "an answer"
        why = f": {problem}" if problem else ""
        raise RoleFailed(channel.peer, f"did not give {what} for {self._waits.patience_s:g} s{why}")

    def look(self) -> None:
        """See whether another data server is to be asked."""
        if self._address(self._silent) != self._channel.address:
            self._looked.set()
            if self._channel.link is not None:
                self._channel.link.abort()

    async def _attend(self, link: Link) -> bool:
        """Hold both conversations until the link ends. Returns whether all answers on it, one at least, were
        correct."""
        self._answered, self._refused = False, ""
        node = self._identity.node
        try:
            async with asyncio.TaskGroup() as group:
                talks = (
                    group.create_task(self._talk(link, self._read), name=f"{node}/read-ahead"),
                    group.create_task(self._talk(link, self._report), name=f"{node}/report"),
                )
                await link.wait_closed()
                for talk in talks:
                    talk.cancel()
        finally:
            self._channel.drop()
        return self._answered and not self._refused

    async def _talk(self, link: Link, talk: Callable[[Link], Awaitable[None]]) -> None:
        """Hold one of the conversations; whatever breaks it ends the link, and with it the other one.

        The error goes no further: a task group that hears of one while its owner waits for the end
        leaves the owner marked as cancelled (in Python 3.11 and 3.12).
        """
        try:
            await talk(link)
        except TransportError as error:
            logger.info("%s: link to the data server broke: %s", self._identity.node, error)
            # A server with impossible answers is left for the next one, like a silent server.
            if isinstance(error, RemoteProtocolError):
                self._refused = self._refused or str(error)
            link.abort()

    async def _read(self, link: Link) -> None:
        while True:
            # Ask when half of what we hold is used up, not for every single group.
            while len(self._groups) > self._ahead // 2:
                self._has_room.clear()
                await self._has_room.wait()
            body = LeaseGroups(
                run=self._run,
                replica=self._replica,
                replica_generation=self._replica_generation,
                partition=self._partition,
                position=self._position,
                # Where nothing more waits, what comes next comes when all that we hold is trained.
                count=self._ahead - (0 if self._last else len(self._groups)),
                wait_s=self._waits.call_s / 2,
                heard=self._heard,
                rows=self._rows,
            )
            reply = await link.call(pack(body), timeout_s=self._waits.call_s)
            self._take_up(body.count, unpack(reply, Groups), reply.tensors)
            self._answered = True

    def _take_up(self, asked: int, answer: Groups, tensors: Sequence[NDArray[Any]]) -> None:
        self._limits.check(answer.leases, tensors)
        tags = {(lease.epoch, lease.number, lease.attempt) for lease in answer.leases}
        if len(answer.leases) > asked or len(tags) < len(answer.leases) or not tags.isdisjoint(self._open):
            raise RemoteProtocolError("groups", f"{asked} groups that are not held were asked for")
        images = _images_of(answer.leases, tensors, labels_only=self._rows == (0, 0))
        if not answer.leases and not answer.last:
            return
        clock, sync_clock = answer.clock, self._end
        for lease, (pictures, labels) in zip(answer.leases, images, strict=True):
            self._groups.append(ImageGroup(lease, pictures, labels, clock, sync_clock))
            clock = sync_clock = 0
        self._open |= tags
        self._position += len(answer.leases)
        self._heard = answer.end if answer.last else -1
        self._last = answer.last
        self._end = answer.end if answer.last else 0
        if answer.last:
            self._has_reports.set()
        self._has_group.set()

    async def _report(self, link: Link) -> None:
        while True:
            # A few at a time; but at once where the epoch, or more groups for us, may wait for these.
            while not self._reports or not (len(self._reports) >= self._ahead // 2 or self._is_short):
                self._has_reports.clear()
                await self._has_reports.wait()
            reports = tuple(self._reports)
            body = ReportGroups(
                run=self._run,
                replica=self._replica,
                replica_generation=self._replica_generation,
                partition=self._partition,
                finished=reports,
            )
            unpack(await link.call(pack(body), timeout_s=self._waits.call_s), Reported)
            self._answered = True
            del self._reports[: len(reports)]

    @property
    def exhausted(self) -> bool:
        """Whether everything that waited for this replica has been taken."""
        return self._last and not self._groups

    @property
    def end(self) -> int:
        """Where all replicas meet when everything that waited for this one is pushed; 0 if not said."""
        return self._end

    async def wait_group(self) -> None:
        """Wait for a group to take, or for word that none waits for this replica: look which it is.

        Without a deadline: an epoch may be over, or others still busy. Cancelling it loses nothing.
        """
        if self._groups:
            return
        loop = asyncio.get_running_loop()
        begin = loop.time()
        over = self._last
        self._has_group.clear()
        await self._has_group.wait()
        if self._groups and not over:
            # Waiting for the next epoch is not waiting for a slow data server.
            self._blocked_fetches += 1
            self._blocked_s += loop.time() - begin

    @property
    def has_group(self) -> bool:
        """Whether there is a group to take."""
        return bool(self._groups)

    @property
    def first(self) -> ImageGroup:
        """The next group; there must be one."""
        return self._groups[0]

    def take(self) -> ImageGroup:
        """Take the next group; there must be one."""
        self._taken += 1
        group = self._groups.popleft()
        if len(self._groups) <= self._ahead // 2:
            self._has_room.set()
        return group

    def finished(self, report: Finished) -> None:
        """A group was trained and its push acknowledged; tell the data server soon."""
        self._open.discard((report.epoch, report.number, report.attempt))
        self._reports.append(report)
        if self._is_short or len(self._reports) >= self._ahead // 2:
            self._has_reports.set()

    @property
    def _is_short(self) -> bool:
        """Whether we hold nothing ahead: all is taken, or more is given only for reports."""
        return self._last or not self._groups

    def statistics(self) -> DataClientStatistics:
        """Count groups and waits for them."""
        return DataClientStatistics(
            groups=self._taken, blocked_fetches=self._blocked_fetches, blocked_s=self._blocked_s
        )

    def __repr__(self) -> str:
        return f"<DataClient of replica {self._replica}, {len(self._groups)} groups ahead>"


def _images_of(
    leases: Sequence[Lease], tensors: Sequence[NDArray[Any]], *, labels_only: bool
) -> list[tuple[NDArray[Any] | None, NDArray[Any]]]:
    """Cut what rides beside leases into the images and labels of each; views.

    Raises:
        RemoteProtocolError: There are not as many images and labels as the leases say, or a group is in two
            tensors.
    """
    if not leases and not tensors:
        return []
    *pieces, labels = tensors or (None,)
    counts = [lease.images for lease in leases]
    if labels is None or len(labels) != sum(counts) or bool(pieces) == labels_only:
        what = "labels" if labels_only else "images and as many labels"
        raise RemoteProtocolError("groups", f"a Groups needs {sum(counts) or 'no'} {what}")
    found: list[tuple[NDArray[Any] | None, NDArray[Any]]] = []
    at = first = 0
    images: NDArray[Any] | None = None
    left = iter(pieces)
    for count in counts:
        if not labels_only and (images is None or first == len(images)):
            images, first = next(left, None), 0
        if (images is not None and first + count > len(images)) or (images is None) != labels_only:
            raise RemoteProtocolError(
                "groups", f"a Groups needs {sum(counts)} images, whole groups in each tensor"
            )
        found.append((None if images is None else images[first : first + count], labels[at : at + count]))
        first, at = first + count, at + count
    if next(left, None) is not None or (images is not None and first != len(images)):
        raise RemoteProtocolError("groups", f"a Groups needs {sum(counts)} images, and there are more")
    return found
