"""What the other roles use of a controller: a seat in the cluster, and the map as it changes.

A `Membership` dials the controller, sets its own node record, and then watches. When the link
breaks it dials again and sets the record again, under the same incarnation, until `patience_s` is
over. Everything it learns is the newest whole map; a reader that is slow misses intermediate maps
and never the last one. A controller in another life counts its versions anew: its members forget what
they knew of the old one, and take their seats again.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec

from adam_async.cluster_map import ClusterMap, EpochRecord, LendingRecord, NodeRecord, RunRecord
from adam_async.config import Waits
from adam_async.errors import DeadlineExceeded, RoleDied, RoleUnreachable, RunFailed
from adam_async.messages import CompareAndSet, MapState, WatchMap, pack, read_text_tensor, text_tensor, unpack
from adam_async.traffic import Traffic
from transport import (
    CallTimeout,
    DialFailed,
    Identity,
    Link,
    LinkBroken,
    LinkClosed,
    Message,
    Network,
    RemoteError,
    RemoteProtocolError,
    TransportError,
)

logger = logging.getLogger(__name__)

GOODBYE_S = 1.0
"""How long who leaves, or knows of a death, waits for the controller to hear of it; without that it is missed
after the grace."""

WATCH_S = 300.0
"""A watch without news is asked again after this long; a dead controller is noticed by its silent link."""

Record = NodeRecord | RunRecord | EpochRecord | LendingRecord


class Membership:
    """A node's seat in the cluster.

    Args:
        network: How to reach the controller.
        controller: Its address.
        identity: Who we are.
        record: What the map shall say of this node; `run` keeps it set.
        waits: Deadlines.
        traffic: Where the links to the controller are counted.

    Run `run` as a task of the owner's group; everything else waits for what it learns.
    """

    def __init__(
        self,
        *,
        network: Network,
        controller: str,
        identity: Identity,
        record: NodeRecord,
        waits: Waits,
        traffic: Traffic,
    ) -> None:
        self._network = network
        self._controller = controller
        self._identity = identity
        self._record = record
        self._waits = waits
        self._traffic = traffic
        self._link: Link | None = None
        self._incarnation: int | None = None  # of the controller that we last heard
        self.map = ClusterMap()
        self._changed = asyncio.Condition()

    @property
    def node(self) -> str:
        """Our node id."""
        return self._identity.node

    @property
    def seated(self) -> bool:
        """Whether the map, as last heard, counts this life of our node as live."""
        node = self.map.nodes.get(self.node)
        return node is not None and node.live and node.incarnation == self._identity.incarnation

    async def run(self) -> None:
        """Stay a member until cancelled.

        Raises:
            RoleUnreachable: The controller was not there from the beginning.
            RoleDied: It could not be reached again for `patience_s`.
            HandshakeRejected: It refused us.
        """
        timeout_s = self._waits.dial_s
        while True:
            try:
                link = await self._network.dial(self._controller, self._identity, timeout_s=timeout_s)
            except DialFailed as error:
                if self._incarnation is None:
                    raise RoleUnreachable("the controller", error.address, error.reason) from error
                raise RoleDied("the controller", str(error)) from error
            self._traffic.watch(link)
            try:
                await self._attend(link)
            except (LinkClosed, LinkBroken, RemoteProtocolError) as error:
                logger.warning(
                    "%s: lost the controller at %s (%s); trying for %g s",
                    self.node,
                    self._controller,
                    error,
                    self._waits.patience_s,
                )
            finally:
                self._link = None
                link.abort()
                self._traffic.gone(link)
            timeout_s = self._waits.patience_s

    async def _attend(self, link: Link) -> None:
        if self._incarnation not in (None, link.peer.incarnation):
            await self._forget()
        self._incarnation = link.peer.incarnation
        self._link = link
        after = -1
        while True:
            try:
                watch = pack(WatchMap(after=after))
                await self._publish(await link.call(watch, timeout_s=WATCH_S))
            except CallTimeout:
                continue
            after = self.map.version
            if not self.seated and not self._record.left:
                await self._sit(link)

    async def _sit(self, link: Link) -> None:
        """Set our own record over this link. If it breaks, only our caller can dial another one."""
        key = f"nodes/{self.node}"
        try:
            async with asyncio.timeout(self._waits.call_s):
                while not await self._was_set(await self._ask_to_set(link, key, self._record)):
                    pass
        except TimeoutError:
            raise DeadlineExceeded(f"the controller to set {key}", self._waits.call_s) from None

    async def _publish(self, message: Message) -> None:
        state = unpack(message, MapState)
        if state.version >= self.map.version:
            await self._show(read_text_tensor(message, ClusterMap))

    async def _forget(self) -> None:
        """The controller lives again and knows nothing: what its old life said holds no more."""
        logger.warning("%s: the controller at %s was started again", self.node, self._controller)
        await self._show(ClusterMap())

    async def _show(self, newest: ClusterMap) -> None:
        self.map = newest
        async with self._changed:
            self._changed.notify_all()

    # --- reading -----------------------------------------------------------------------------

    async def wait_for(
        self, predicate: Callable[[ClusterMap], bool], what: str, timeout_s: float
    ) -> ClusterMap:
        """Wait until the map satisfies `predicate`. Cancelling it loses nothing.

        Raises:
            DeadlineExceeded: It did not in time; `what` names the wait.
        """
        try:
            async with asyncio.timeout(timeout_s), self._changed:
                await self._changed.wait_for(lambda: predicate(self.map))
                return self.map
        except TimeoutError:
            raise DeadlineExceeded(what, timeout_s) from None

    async def changes(self) -> AsyncIterator[ClusterMap]:
        """The map now and after every change, always the newest. Ends only by cancellation."""
        seen: ClusterMap | None = None
        while True:
            async with self._changed:
                while self.map is seen:
                    await self._changed.wait()
                seen = self.map
            yield seen

    # --- writing -----------------------------------------------------------------------------

    async def set_node(self, **changes: Any) -> None:
        """Change fields of our own node record, such as ``ready=run_id``."""
        self._record = msgspec.structs.replace(self._record, **changes)
        await self._update(f"nodes/{self.node}", lambda _: self._record)

    async def leave(self) -> None:
        """Say goodbye, for `GOODBYE_S` at most: others need not wait to see whether we come back.

        It is not said where there is no link to say it on.
        """
        link = self._link
        if link is None or not self.seated:
            return
        self._record = msgspec.structs.replace(self._record, live=False, left=True)
        try:
            async with asyncio.timeout(GOODBYE_S):
                while not await self._was_set(
                    await self._ask_to_set(link, f"nodes/{self.node}", self._record)
                ):
                    pass
        except (TimeoutError, TransportError, RunFailed) as error:
            logger.info("%s leaves without a goodbye: %r", self.node, error)

    async def report_death(self, node: str) -> None:
        """Say that the process of another node has ended, for `GOODBYE_S` at most.

        Who started it knows; nobody else need wait to see whether the node comes back.
        """
        known = self.map.nodes.get(node)
        if known is None:
            return

        def gone(newest: ClusterMap) -> NodeRecord | None:
            record = newest.nodes.get(node)
            if record is None or not record.live or record.incarnation != known.incarnation:
                return None
            return msgspec.structs.replace(record, live=False)

        try:
            async with asyncio.timeout(GOODBYE_S):
                await self._update(f"nodes/{node}", gone)
        except (TimeoutError, DeadlineExceeded, RunFailed) as error:
            logger.info("the controller did not hear from %s that %s is gone: %r", self.node, node, error)

    async def submit_run(self, record: RunRecord) -> None:
        """Begin a run, as its driver."""
        await self._update("run", lambda _: record)

    async def update_run(self, change: Callable[[RunRecord], RunRecord | None]) -> None:
        """Change the run, as its driver: `change` makes the new record of the newest, or None to leave it."""
        await self._update("run", lambda newest: change(newest.run) if newest.run is not None else None)

    async def update_epoch(self, change: Callable[[EpochRecord], EpochRecord | None]) -> None:
        """Change the epoch, as its data server: like `update_run`."""
        await self._update("epoch", lambda newest: change(newest.epoch) if newest.epoch is not None else None)

    async def update_lending(self, change: Callable[[LendingRecord], LendingRecord | None]) -> None:
        """Change who has the leases, as their lender: like `update_run`."""

        def changed(newest: ClusterMap) -> LendingRecord | None:
            return change(newest.lending) if newest.lending is not None else None

        await self._update("lending", changed)

    async def _update(self, key: str, change: Callable[[ClusterMap], Record | None]) -> None:
        """Read the map, make the new record of a key and compare-and-set it, until that takes.

        What others wrote meanwhile is never overwritten unseen: `change` is asked again with the newer
        map, and its None ends the attempt.

        Raises:
            DeadlineExceeded: The controller did not answer in `call_s`.
            RunFailed: It refused the value.
        """
        try:
            async with asyncio.timeout(self._waits.call_s):
                while (value := change(self.map)) is not None and not await self._try_set(key, value):
                    pass
        except TimeoutError:
            raise DeadlineExceeded(f"the controller to set {key}", self._waits.call_s) from None

    async def _try_set(self, key: str, value: Record) -> bool:
        link = self._link
        if link is None:
            async with self._changed:
                await self._changed.wait_for(lambda: self._link is not None)
            return False
        try:
            reply = await self._ask_to_set(link, key, value)
        except TransportError:
            # The link broke: whether it was set is unknown. The next map tells.
            self._link = None if self._link is link else self._link
            return False
        return await self._was_set(reply)

    async def _ask_to_set(self, link: Link, key: str, value: Record) -> Message:
        message = pack(CompareAndSet(key=key, expected=self._version_of(key)), [text_tensor(value)])
        try:
            return await link.call(message, timeout_s=self._waits.call_s)
        except RemoteError as error:
            raise RunFailed(f"the controller refused {key}: {error}") from error

    async def _was_set(self, reply: Message) -> bool:
        await self._publish(reply)
        return unpack(reply, MapState).done

    def _version_of(self, key: str) -> int:
        record: Record | None
        if key.startswith("nodes/"):
            record = self.map.nodes.get(key.removeprefix("nodes/"))
        else:
            named = {"run": self.map.run, "epoch": self.map.epoch, "lending": self.map.lending}
            record = named[key]
        return record.changed if record is not None else 0

    def __repr__(self) -> str:
        state = "joined" if self._link is not None else "away"
        return f"<Membership {self.node} {state} map v{self.map.version}>"
