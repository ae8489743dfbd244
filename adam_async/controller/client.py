"""What the other roles use of the controllers: a seat in the cluster, and the map as it changes.

A `Membership` watches the map, whichever controller leads, and keeps its own node record set in it under one
incarnation. The map advances version by version; a reader that is slow misses intermediate maps and never the
last one. A group of controllers that was founded anew counts its versions anew: its members forget what they
knew of the old one, and take their seats again. Another leader of the same group is no news.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec

from adam_async.controller.leader_connection import parse_controllers as parse_controllers  # for other roles
from adam_async.controller.map_client import MapClient, News, version_of
from adam_async.controller.map_history import changed
from adam_async.controller.records import cut
from adam_async.errors import AdamError, DeadlineExceeded, RunFailed
from adam_async.run.cluster_map import (
    ClusterMap,
    EpochRecord,
    LedgerRecord,
    NodeRecord,
    RunInPieces,
    RunPiece,
    RunRecord,
)
from adam_async.run.config import Waits
from adam_async.runtime.traffic import Traffic
from transport import Identity, Network, RemoteError, RetrySchedule, TransportError

logger = logging.getLogger(__name__)

GOODBYE_S = 1.0
"""How long who leaves, or knows of a death, waits for the controller to hear of it; without that it is missed
after the grace."""

TAKEN = "taken"
"""Refusal of a seat on which a node of the same id is believed to sit."""

TAKEN_PAUSES = RetrySchedule(first_s=0.05, longest_s=1.0)
"""Before a seat that was taken is asked for again."""

SAID_S = 0.3
"""A node that was started again joins within less; a longer wait is for another process, and is logged."""

Record = NodeRecord | RunRecord | RunInPieces | RunPiece | EpochRecord | LedgerRecord


class Membership:
    """A node's seat in the cluster.

    Args:
        network: How to reach the controllers.
        controller: The address of one, or of several with commas between them.
        identity: Who we are.
        record: What the map shall say of this node; `run` keeps it set.
        waits: Deadlines.
        traffic: Where the links to the controllers are counted.
        seen: Called with each received version of the map, in order; an error in it ends `run`.

    Run `run` as a task of the owner's group; everything else waits for what it learns.

    Raises:
        ConfigError: The addresses are none.
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
        seen: Callable[[ClusterMap], None] = lambda _: None,
    ) -> None:
        self._identity = identity
        self._seen = seen
        self._record = record
        self._waits = waits
        self._client = MapClient(
            network=network, controllers=controller, identity=identity, waits=waits, traffic=traffic
        )
        self._group = ""
        self.map = ClusterMap()
        self._changed = asyncio.Condition()

    @property
    def node(self) -> str:
        """Our node id."""
        return self._identity.node

    @property
    def joined(self) -> bool:
        """Whether the map, as last heard, counts this life of our node as live."""
        node = self.map.nodes.get(self.node)
        return node is not None and node.live and node.incarnation == self._identity.incarnation

    @property
    def leader(self) -> str:
        """Address of the controller that leads, as far as we know; empty while we look for it."""
        return self._client.leader

    @property
    def leading(self) -> str:
        """Node id of the controller that leads, as far as we know; empty while we look for it."""
        return self._client.leading

    @property
    def controllers(self) -> tuple[str, ...]:
        """Addresses of all controllers: those that we were given, or if that was one, what a leader named."""
        return self._client.controllers

    async def run(self) -> None:
        """Stay a member until cancelled.

        Raises:
            RoleUnreachable: No controller was there from the beginning.
            RoleDied: None has led for `patience_s`.
            RunFailed: Another process has our seat, and kept it for `dial_s` and `call_s`.
            HandshakeRejected: A controller refused us.
        """
        try:
            await self._attend()
        finally:
            self._client.close()

    async def _attend(self) -> None:
        async with contextlib.aclosing(self._client.changes()) as all_news:
            async for news in all_news:
                await self._take(news)
                if not self.joined and not self._record.left:
                    await self._sit()

    async def _sit(self) -> None:
        """Set our own record. A controller may still believe in the link of our last life for a while."""
        key, loop = f"nodes/{self.node}", asyncio.get_running_loop()
        begin, patience_s = loop.time(), self._waits.dial_s + self._waits.call_s
        pauses, said = TAKEN_PAUSES.waits(), False
        while not self.joined and not self._record.left:
            try:
                await self._try_set(key, self._record, self._waits.call_s)
            except DeadlineExceeded:
                if self.leader:  # else none leads, and how long that may take is for the client to say
                    raise
            except RemoteError as error:
                waited_s = loop.time() - begin
                left_s = patience_s - waited_s
                if error.code == TAKEN and left_s <= 0:
                    raise RunFailed(f"{self.node} cannot join: {self._other_holder()}") from error
                if error.code != TAKEN:
                    raise _refused(key, error) from error
                if waited_s >= SAID_S and not said:
                    said = True
                    why = self._other_holder()
                    logger.warning("%s cannot join, and tries for %.0f s: %s", self.node, left_s, why)
                await asyncio.sleep(min(next(pauses), left_s))

    def _other_holder(self) -> str:
        if self._identity.role == "driver":
            return "another train drives this cluster; one run at a time has it"
        return f"another process is connected as {self.node}; give this one another --id"

    async def _take(self, news: News) -> None:
        """Bring the map forward, by what was not known yet."""
        if news.whole is not None:
            if news.group == self._group and news.version <= self.map.version:
                return
            if self._group not in ("", news.group):
                logger.warning("%s: the controller at %s was started again", self.node, self.leader)
            self._group = news.group
            await self._show(news.whole)
        elif news.change is not None and news.group == self._group and news.version > self.map.version:
            await self._show(changed(self.map, news.change))

    async def _show(self, newest: ClusterMap) -> None:
        self.map = newest
        self._seen(newest)
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
        if not self.leader or not self.joined:
            return
        self._record = msgspec.structs.replace(self._record, live=False, left=True)
        try:
            async with asyncio.timeout(GOODBYE_S):
                await self._update(f"nodes/{self.node}", lambda _: self._record)
        except (TimeoutError, TransportError, AdamError) as error:
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
        except (TimeoutError, TransportError, AdamError) as error:
            logger.info("the controller did not hear from %s that %s is gone: %r", self.node, node, error)

    async def submit_run(self, record: RunRecord) -> None:
        """Begin a run, as its driver; in pieces if one value of the map cannot hold its record.

        Raises:
            RunFailed: The record is too long even in pieces, or the controller refused it.
            DeadlineExceeded: No controller led, or answered.
        """
        try:
            pieces = cut(record)
        except ValueError as error:
            raise RunFailed(str(error)) from None
        for number, piece in enumerate(pieces):
            await self._update(f"run/{number}", lambda _, piece=piece: piece)  # type: ignore[misc]
        whole = RunInPieces(id=record.id, pieces=len(pieces)) if pieces else record
        await self._update("run", lambda _: whole)

    async def update_run(self, change: Callable[[RunRecord], RunRecord | None]) -> None:
        """Change the run, as its driver: `change` returns the new record from the newest, or None to keep it.

        Fields in `cluster_map.FIXED` keep their submitted values.
        """

        def changed(newest: ClusterMap) -> RunRecord | None:
            record = change(newest.run) if newest.run is not None else None
            return record.without_fixed() if record is not None else None

        await self._update("run", changed)

    async def update_epoch(self, change: Callable[[EpochRecord], EpochRecord | None]) -> None:
        """Change the epoch, as its data server: like `update_run`."""
        await self._update("epoch", lambda newest: change(newest.epoch) if newest.epoch is not None else None)

    async def update_ledger_record(self, change: Callable[[LedgerRecord], LedgerRecord | None]) -> None:
        """Change who has the leases, as their lender: like `update_run`."""

        def changed(newest: ClusterMap) -> LedgerRecord | None:
            return change(newest.ledger_record) if newest.ledger_record is not None else None

        await self._update("lending", changed)

    async def _update(self, key: str, change: Callable[[ClusterMap], Record | None]) -> None:
        """Read the map, make the new record of a key and compare-and-set it, until that takes.

        What others wrote meanwhile is never overwritten unseen: `change` is asked again with the newer
        map, and its None ends the attempt.

        Raises:
            DeadlineExceeded: No controller led, or answered, in `patience_s`; in `call_s` if that is longer.
            RunFailed: It refused the value.
        """
        # While none leads, who waits for a leader ends after `patience_s`; a change must not end before that.
        timeout_s = max(self._waits.call_s, self._waits.patience_s)
        try:
            async with asyncio.timeout(timeout_s):
                while (value := change(self.map)) is not None:
                    if await self._try_set(key, value, timeout_s):
                        break
        except RemoteError as error:
            raise _refused(key, error) from error
        except TimeoutError:
            raise DeadlineExceeded(f"the controller to set {key}", timeout_s) from None

    async def _try_set(self, key: str, value: Record, timeout_s: float) -> bool:
        """Set a key if it is as we know it. If nobody can tell whether it was set, the newest map does."""
        outcome = await self._client.compare_and_set(
            key,
            version_of(self.map, key),
            value,
            after=self.map.version,
            group=self._group,
            timeout_s=timeout_s,
        )
        for news in outcome.news:
            await self._take(news)
        return outcome.done is True

    def __repr__(self) -> str:
        state = "joined" if self.leader else "away"
        return f"<Membership {self.node} {state} map v{self.map.version}>"


def _refused(key: str, error: RemoteError) -> RunFailed:
    return RunFailed(f"the controller refused {key}: {error}")
