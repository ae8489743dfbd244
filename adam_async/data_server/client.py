"""A worker's client of the data servers, which requests groups ahead of need and reports finished ones.

A `DataClient` keeps a few groups ahead, so a compute thread seldom waits for input (AD-06). A worker waits at
the start of an epoch, and if it trains faster than data servers prepare groups. The client counts these
waits.

One data server leases all groups of the run. Two tasks share the link to the data server. One requests leases
when it has room, and the server may delay the answer; the other reports finished groups. After the link
breaks, or after a change of the data server, both tasks begin again on a new link. The client first sends the
leases that it holds, so that another data server can continue from them. A request contains the number of
received leases, so a lost answer loses none. A third task reads the images of the leased groups from any data
server (`group_reader`).

From a pool the client asks for a *piece*, the groups of one answer: half a second of its measured work
(`PieceSize`). The client asks for the next piece when it begins its newest one. So it asks about twice a
second, however fast it trains, and has more leases than groups. The dealer may grant fewer groups
(`Epoch.most_piece`). Before the rate is known, each piece may be twice as large as the one before.

In ssp and bsp the data server sends the clock at which the groups begin. With the last groups it sends the
sync clock that all replicas reach after them. The trainer of the groups gets both clocks, and sends the
ticks.

The rate counts groups with acknowledged pushes, over times in which the worker has groups. A period of
measurement is at least half a piece long, because acknowledgements come in bursts.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import modf
from operator import attrgetter
from typing import Any

from numpy.typing import NDArray

from adam_async.data_server.group_reader import GroupLimits, GroupReader
from adam_async.errors import RoleFailed
from adam_async.messages import (
    MOST_GROUPS,
    MOST_HELD,
    MOST_LEASES,
    MOST_REPORTED,
    Finished,
    HeldLease,
    Lease,
    LeaseGroups,
    Leases,
    Reported,
    ReportGroups,
    pack,
    unpack,
)
from adam_async.run.config import Waits
from adam_async.run.counts import FetchCounts
from adam_async.runtime.channel import Channel, Endpoint
from adam_async.runtime.clock import Durations
from transport import DialFailed, Link, LocalProtocolError, RemoteProtocolError, TransportError

PIECE_S = 0.5
"""Measured work in a piece, in seconds."""


class PieceSize:
    """Rate and piece size of one worker. Times are seconds on the caller's clock.

    Args:
        first: Number of groups in the first piece, at least 1.
        most: Maximum number of groups in a piece.
    """

    def __init__(self, *, first: int, most: int) -> None:
        self._size = float(min(first, most))
        """Number of groups in a piece, including a fraction."""
        self._left = 0.0
        """Fraction of a group that rounding has left over from earlier pieces."""
        self._most = most
        self._is_known = False
        self._finished = 0
        self._since: float | None = None
        """Begin of the measured period; None before the first group."""
        self._waits_since: float | None = None

    def waits(self, now: float) -> None:
        """Stop the clock of the measurement: the worker has no groups."""
        if self._waits_since is None:
            self._waits_since = now

    def goes_on(self, now: float) -> None:
        """Continue the clock of the measurement: the worker has groups."""
        if self._waits_since is not None and self._since is not None:
            self._since += now - self._waits_since
        self._waits_since = None
        if self._since is None:
            self._since = now

    def finished(self) -> None:
        """Count a group with an acknowledged push."""
        self._finished += 1

    def next(self, now: float) -> int:
        """Return the number of groups to ask for now."""
        if self._since is not None and self._finished:
            ends = now if self._waits_since is None else self._waits_since
            took_s = ends - self._since
            if took_s >= PIECE_S / 2:
                self._size = min(max(self._finished * PIECE_S / took_s, 1.0), float(self._most))
                self._is_known = True
                self._finished, self._since = 0, ends
            elif not self._is_known:
                self._size = min(2 * self._size, float(self._most))
        # Without the fraction the worker would ask for smaller pieces, more often than twice a second.
        self._left, whole = modf(self._size + self._left)
        return int(whole)


logger = logging.getLogger(__name__)

DIAL_S = 1.0
"""Deadline in seconds of a dial, after which the client looks for another server."""


@dataclass(frozen=True, slots=True, eq=False)
class ImageGroup:
    """One leased group: its lease, the requested rows of its images (n, C, H, W), and its labels (n,)."""

    lease: Lease
    images: NDArray[Any] | None
    """Requested rows of the images, (n, C, H, W); None if only labels were requested."""
    labels: NDArray[Any]
    clock: int = 0
    """Minimum clock at which the group begins; 0 if the server sent no clock."""
    sync_clock: int = 0
    """Sync clock of all replicas before the group; 0 if the server sent none."""


@dataclass(frozen=True, slots=True)
class WorkerSlot:
    """Slot of a worker in a run: its replica, and its part of the model."""

    run: str
    replica: int
    replica_generation: int
    partition: int


class DataClient:
    """Reads ahead of need the groups of one worker in a replica.

    Args:
        address: Returns the address of the data server that leases groups; an empty text while the run has
            none. Call `map_changed` after a change.
        servers: Returns the addresses of the ready data servers, first the one to read images from.
        ahead: Maximum number of groups in memory.
        first_piece: Number of groups in the first piece from a pool; None: the replicas have shares.
        rows: First needed row of the images, and the row after the last one; ``(0, 0)``: labels only. None:
            whole images.

    Run `run` as a task of the owner's group.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        slot: WorkerSlot,
        *,
        address: Callable[[], str],
        servers: Callable[[], Sequence[str]],
        ahead: int,
        limits: GroupLimits,
        waits: Waits,
        first_piece: int | None = None,
        rows: tuple[int, int] | None = None,
    ) -> None:
        self._channel = Channel(endpoint, peer="the data server", address="", patience_s=waits.patience_s)
        self._address = address
        self._reader = GroupReader(
            endpoint, run=slot.run, servers=servers, rows=rows, limits=limits, waits=waits
        )
        self._changed = asyncio.Event()
        self._identity = endpoint.identity
        self._slot = slot
        self._ahead = ahead
        self._pieces = PieceSize(first=first_piece, most=MOST_LEASES) if first_piece is not None else None
        self._ask_at = ahead // 2 if first_piece is None else 0
        """Number of untaken groups at which the client asks for more. The number is half of the groups ahead,
        because one request for them costs less than one per group; from a pool, the newest piece."""
        self._report_at = max(ahead // 2, 1)
        """Number of finished groups that are reported together."""
        self._limits = limits
        self._waits = waits
        self._leased: list[tuple[Lease, int, int]] = []
        """Leased groups without images yet, oldest first, each with `clock` and `sync_clock`."""
        self._groups: deque[ImageGroup] = deque()
        self._epoch = self._position = 0
        self._held: dict[tuple[int, int, int], HeldLease] = {}
        """By epoch, number and attempt: the epoch's unsettled leases, and the newest lease."""
        self._reported: dict[tuple[int, int, int], Finished] = {}
        """Acknowledged reports of held groups, which another data server does not have."""
        self._known_end = -1
        self._reports: list[Finished] = []
        self._has_leases = asyncio.Event()
        self._has_group = asyncio.Event()
        self._has_room = asyncio.Event()
        self._has_reports = asyncio.Event()
        self._is_known = asyncio.Event()
        """Whether the server at the link knows what this client holds."""
        self._received = 0
        self._blocked_fetches = 0
        self._blocked = Durations()
        self._last = False
        self.end = 0
        """Sync clock of all replicas after the replica's last group; 0 if the server sent none."""
        self._answered = False
        self._refused = ""
        """Fault of an impossible answer on this link; otherwise empty."""

    async def run(self) -> None:
        """Read ahead until cancelled.

        Raises:
            RoleFailed: For `patience_s`, the client could not reach a data server, or got no correct answer.
        """
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._read(), name=f"{self._identity.node}/images")
                group.create_task(self._lease(), name=f"{self._identity.node}/leases")
        finally:
            self._reader.close()

    async def _lease(self) -> None:
        """Request leases and report groups, on one link after the other."""
        channel, problem = self._channel, ""
        channel.renew()
        while (left_s := channel.left_s) > 0:
            self._changed.clear()
            channel.address = self._address()
            if not channel.address:
                # The run waits for a data server; the run's driver limits this wait.
                await self._changed.wait()
                channel.renew()
                continue
            try:
                link = await channel.dial(min(left_s, DIAL_S))
            except DialFailed as error:
                problem = str(error)
                continue
            if self._address() != channel.address:  # the address has changed during the dial
                channel.drop()
            elif await self._attend(link):
                channel.progressed()
            else:
                problem = self._refused or problem
                await channel.pause(self._changed)
        what = "a correct answer" if self._refused else "an answer"
        why = f": {problem}" if problem else ""
        raise RoleFailed(channel.peer, f"did not give {what} for {self._waits.patience_s:g} s{why}")

    def map_changed(self) -> None:
        """Follow the cluster map: the data server that leases groups, and the ready ones."""
        self._reader.map_changed()
        if self._address() != self._channel.address:
            self._changed.set()
            if self._channel.link is not None:
                self._channel.link.abort()

    async def _attend(self, link: Link) -> bool:
        """Run both tasks until the link ends.

        Returns whether the link had an answer, and all answers were correct.
        """
        self._answered, self._refused = False, ""
        self._is_known.clear()
        node = self._identity.node
        try:
            async with asyncio.TaskGroup() as group:
                tasks = (
                    group.create_task(self._use(link, self._lease_on), name=f"{node}/lease"),
                    group.create_task(self._use(link, self._report), name=f"{node}/report"),
                )
                await link.wait_closed()
                for task in tasks:
                    task.cancel()
        finally:
            self._channel.drop()
        return self._answered and not self._refused

    async def _use(self, link: Link, work: Callable[[Link], Awaitable[None]]) -> None:
        """Run one of the two tasks; an error in it ends the link, and so the other task.

        The function does not raise the error. In Python 3.11 and 3.12 a task group with a failed task leaves
        a caller that waits for its end marked as cancelled.
        """
        try:
            await work(link)
        except LocalProtocolError:
            raise  # no other link would take the message
        except TransportError as error:
            logger.info("%s: link to the data server broke: %s", self._identity.node, error)
            # A server with impossible answers is replaced, like a silent server.
            if isinstance(error, RemoteProtocolError):
                self._refused = self._refused or str(error)
            link.abort()

    async def _ask(self, link: Link, count: int) -> Leases:
        body = LeaseGroups(
            run=self._slot.run,
            replica=self._slot.replica,
            replica_generation=self._slot.replica_generation,
            partition=self._slot.partition,
            epoch=self._epoch,
            position=self._position,
            count=count,
            wait_s=self._waits.call_s / 2,
            heard=self._known_end,
            held=() if count else tuple(self._held.values()),
        )
        answer = unpack(await link.call(pack(body), timeout_s=self._waits.call_s), Leases)
        self._answered = True
        return answer

    async def _lease_on(self, link: Link) -> None:
        while (await self._ask(link, 0)).settled < 0:
            pass  # it waits for other workers
        self._reports[:0] = self._reported.values()
        self._reported.clear()
        self._is_known.set()
        while True:
            while (untaken := len(self._leased) + len(self._groups)) > self._ask_at:
                self._has_room.clear()
                await self._has_room.wait()
            if self._pieces is not None:
                count = self._pieces.next(asyncio.get_running_loop().time())
            else:
                # After the last group the next groups arrive only after the training of all received ones.
                count = self._ahead - (0 if self._last else untaken)
            self._take_up(count, await self._ask(link, count))

    def _take_up(self, asked: int, answer: Leases) -> None:
        self._limits.check_leases(answer.leases)
        tags = [(lease.epoch, lease.number, lease.attempt) for lease in answer.leases]
        epochs = {lease.epoch for lease in answer.leases} - {self._epoch}
        if len(tags) > asked or len({*tags, *self._held}) < len(tags) + len(self._held) or len(epochs) > 1:
            raise RemoteProtocolError("groups", f"{asked} requested groups are not held")
        if not answer.leases and not answer.last:
            return
        self._leased += [(lease, answer.clock, self.end) for lease in answer.leases[:1]]
        self._leased += [(lease, 0, 0) for lease in answer.leases[1:]]
        if self._pieces is not None:
            self._ask_at, self._report_at = len(tags), min(max(len(tags), 1), MOST_REPORTED)
        self._hold(tags, answer)
        self._known_end = answer.end if answer.last else -1
        self._last = answer.last
        self.end = answer.end if answer.last else 0
        if answer.last:
            self._has_reports.set()
        if answer.leases:
            self._has_leases.set()
        else:
            self._has_group.set()

    def _hold(self, tags: Sequence[tuple[int, int, int]], answer: Leases) -> None:
        """Keep new leases for another data server, and forget settled ones."""
        for tag in tags:
            if tag[0] != self._epoch:
                self._epoch, self._position = tag[0], 0
                self._held.clear()
                self._reported.clear()
            _, number, attempt = tag
            sync_clock = self._known_end if tag == tags[0] else -1
            self._held[tag] = HeldLease(number, attempt, answer.clock, sync_clock)
            self._position += 1
        while len(self._held) > 1 and self._position - len(self._held) < answer.settled:
            tag = next(iter(self._held))
            del self._held[tag]
            self._reported.pop(tag, None)
        if len(self._held) > MOST_HELD:
            raise RemoteProtocolError("groups", f"{len(self._held)} groups are not settled")

    async def _read(self) -> None:
        """Read the images of the leased groups in their order, until cancelled."""
        leased = self._leased
        while True:
            while not leased or self._lacks_room:
                self._has_leases.clear()
                await self._has_leases.wait()
            most = min(MOST_GROUPS, self._ahead - len(self._groups))
            first = [lease for lease, *_ in leased[:most]]
            leases = list(next(groupby(first, attrgetter("epoch")))[1])
            # A few answers bring the groups ahead, because each costs as much as a few groups.
            least = min(len(leases), max(self._ahead // 4, 1))
            read = await self._reader.read(leases, least=least)
            groups = zip(leased, read, strict=False)
            self._groups += [ImageGroup(lease, *images, *clocks) for (lease, *clocks), images in groups]
            del leased[: len(read)]
            self._received += len(read)
            self._has_group.set()

    @property
    def _lacks_room(self) -> bool:
        """Whether the leased groups do not fit into memory, and less than half of the memory is free."""
        room = self._ahead - len(self._groups)
        return room < min(len(self._leased), -(-self._ahead // 2))

    async def _report(self, link: Link) -> None:
        await self._is_known.wait()
        while True:
            # Report a few at a time; at once if the epoch or further groups may wait for these reports.
            while not self._reports or not self._reports_due:
                self._has_reports.clear()
                await self._has_reports.wait()
            reports = tuple(self._reports[:MOST_REPORTED])
            body = ReportGroups(
                run=self._slot.run,
                replica=self._slot.replica,
                replica_generation=self._slot.replica_generation,
                partition=self._slot.partition,
                finished=reports,
            )
            unpack(await link.call(pack(body), timeout_s=self._waits.call_s), Reported)
            self._answered = True
            del self._reports[: len(reports)]
            tagged = {(report.epoch, report.number, report.attempt): report for report in reports}
            self._reported |= {tag: report for tag, report in tagged.items() if tag in self._held}

    @property
    def exhausted(self) -> bool:
        """Whether the worker has taken all groups for this replica."""
        return self._last and not (self._groups or self._leased)

    async def wait_group(self) -> None:
        """Wait for a group, or for the answer that the replica has no more groups; then check `has_group`.

        The wait has no deadline: the epoch may be over, or other replicas busy. Cancelling the wait loses no
        group.
        """
        if self._groups:
            return
        # The dealer may lease more groups only after the reports of those whose steps are complete.
        if self._reports_due:
            self._has_reports.set()
        loop = asyncio.get_running_loop()
        begin = loop.time()
        over = self._last and not self._leased
        self._has_group.clear()
        if self._pieces is not None:
            self._pieces.waits(begin)
        await self._has_group.wait()
        if self._groups and not over:
            # Waiting for the next epoch is not waiting for a slow data server.
            self._blocked_fetches += 1
            self._blocked.add(loop.time() - begin)

    @property
    def has_group(self) -> bool:
        """Whether a group can be taken."""
        return bool(self._groups)

    @property
    def first(self) -> ImageGroup:
        """The next group; raises IndexError if there is none."""
        return self._groups[0]

    def take(self) -> ImageGroup:
        """Take the next group. Raises IndexError without one."""
        group = self._groups.popleft()
        if self._pieces is not None:
            self._pieces.goes_on(asyncio.get_running_loop().time())
        # Without a pool, too, leases may exceed the memory: a request after the last group asks for `ahead`.
        if self._leased and not self._lacks_room:
            self._has_leases.set()
        if len(self._groups) + len(self._leased) <= self._ask_at:
            self._has_room.set()
        return group

    def finished(self, report: Finished) -> None:
        """Record a trained group with an acknowledged push; the client reports the group soon."""
        self._reports.append(report)
        if self._pieces is not None:
            self._pieces.finished()
        if self._reports_due:
            self._has_reports.set()

    @property
    def _reports_due(self) -> bool:
        """Whether the reports are sent now."""
        # At once if the replica has no more groups, or if the client has none left.
        is_short = self._last or not (self._groups or self._leased)
        return is_short or len(self._reports) >= self._report_at

    def statistics(self) -> FetchCounts:
        """Return the counts of groups, and of waits for groups."""
        return FetchCounts(
            groups=self._received - len(self._groups),
            blocked_fetches=self._blocked_fetches,
            blocked_s=self._blocked.total_s,
            blocked_buckets=self._blocked.buckets,
        )
