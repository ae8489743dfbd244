"""Client of the controllers for all other roles: membership in the cluster, and changes of the map.

A `Membership` watches the map, whichever controller leads, and keeps its node's record in the map under one
incarnation. The map advances version by version; a slow reader misses intermediate maps, but never the last.
A new group of controllers counts versions anew. The new group's members discard the old group's map, and join
again unless the new map has them (`learned_map`). A leader change within the group needs no action.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from typing import Any, Literal, TypedDict, Unpack

import msgspec

from adam_async.controller.bundle_rules import next_member, unready_copy
from adam_async.controller.leader_connection import parse_controllers as parse_controllers  # for other roles
from adam_async.controller.learned_map import StoresReport, stores_of
from adam_async.controller.map_client import MapClient, MapUpdate
from adam_async.errors import AdamError, DeadlineExceeded, RunFailed
from adam_async.messages import ReportStores, Standing, pack, text_tensor
from adam_async.run.cluster_map import ClusterMap, NodeRecord
from adam_async.run.config import Waits
from adam_async.run.map_changes import changed
from adam_async.run.store_record import (
    ArrayRecord,
    BundleRecord,
    Member,
    StoreRecord,
    VectorRecord,
    bundle_key,
    cut_arrays,
    store_key,
)
from adam_async.runtime.clock import Within, system_entropy
from adam_async.runtime.traffic import Traffic
from transport import Identity, Message, Network, RemoteError, RetrySchedule, TransportError

logger = logging.getLogger(__name__)

GOODBYE_S = 1.0
"""Maximum time in seconds to report to the controller that a node has left or its process has ended. Without
the report the controller counts the node as lost after `grace_s`."""

TAKEN = "taken"
"""Code of a refusal to join while another process is connected under the same node id."""

TAKEN_PAUSES = RetrySchedule(first_s=0.05, longest_s=1.0)
"""Pauses in seconds before the next attempt to join after the refusal `taken`."""

WARN_S = 0.3
"""Time of attempts to join under a taken node id after which a warning is logged, in seconds. A restarted
node joins faster, so after this time another process has the id."""


class NodeChanges(TypedDict, total=False):
    """Fields of a node's record that the node changes as a member."""

    ready: str
    failed: str
    info: dict[str, Any]
    serves: tuple[str, ...]
    store: str


Confirmation = Literal["confirmed", "conflict", "unknown"]
"""How a change of a bundle ended.

`confirmed`: the controllers made the change. `conflict`: they will never make it: the bundle has a newer
record, its store has failed or is deleted, or a new member is lost. `unknown`: the change may or may not be
made.
"""


class Membership:
    """A node's membership in the cluster.

    Args:
        controller: Address of one controller, or of several, separated by commas.
        record: The member's record in the map; `run` keeps it set.
        traffic: Counts of the links to the controllers.
        seen: Called with each received map version, in order; its error ends the receiving method.
        standings: Returns the logs of a server's bundles, by key, for a restarted controller.

    Run `run` as a task of the owner's group; the other methods need it.

    Raises:
        ConfigError: An address is invalid.
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
        standings: Callable[[], Mapping[str, Standing]] = dict,
    ) -> None:
        self._standings = standings
        self._identity = identity
        self._seen = seen
        self._record = record
        self._waits = waits
        self._client = MapClient(
            network=network,
            controllers=controller,
            identity=identity,
            waits=waits,
            traffic=traffic,
            report=self._stores_report if identity.role == "ps" else None,
        )
        self._group = ""
        self._joined_group: str | None = None
        """Group of the last join; None before the first."""
        self.map = ClusterMap()
        self._unready: tuple[ClusterMap, str] | None = None
        """Last map for which `unready_copy` was computed, with the result; None before any."""
        self._changed = asyncio.Condition()

    @property
    def node(self) -> str:
        """Node id of the member."""
        return self._identity.node

    @property
    def member(self) -> Member:
        """Node id and incarnation of the member."""
        return self._identity.node, self._identity.incarnation

    @property
    def joined(self) -> bool:
        """Whether the newest received map has this incarnation of the node as live."""
        node = self.map.nodes.get(self.node)
        own = self._identity
        return node is not None and node.live and (node.role, node.incarnation) == (own.role, own.incarnation)

    @property
    def leader(self) -> str:
        """Address of the known leader; empty during the search for it."""
        return self._client.address

    @property
    def leading(self) -> str:
        """Node id of the known leader; empty during the search for it."""
        return self._client.node

    @property
    def controllers(self) -> tuple[str, ...]:
        """Addresses of all controllers: the given ones or, if just one was given, the leader's list."""
        return self._client.addresses

    async def run(self) -> None:
        """Stay a member until cancelled.

        Raises:
            RoleUnreachable: No controller answered within `start_s`.
            RoleDied: No controller has led for `patience_s`, or `controller_s` for a server or client of
                stores.
            RunFailed: Another process stayed connected under this node id for `dial_s` and `call_s`, or the
                controller refused this node's record.
            HandshakeRejected: A controller refused the handshake.
        """
        try:
            await self._attend()
        finally:
            self._client.close()

    async def _attend(self) -> None:
        async with contextlib.aclosing(self._client.changes()) as updates:
            async for update in updates:
                await self._take(update)
                # Also after a new group's first map, or after the controllers reported this node lost.
                if not self.joined and not self._record.left:
                    if self._joined_group == self._group:
                        logger.warning(
                            "%s counted as lost, because the controllers heard nothing of it: it was frozen, "
                            "or its network was cut off; it joins again",
                            self.node,
                        )
                    await self._join()
                    self._joined_group = self._group

    async def _join(self) -> None:
        """Set this node's record; repeat while a controller sees the last incarnation's link as open."""
        key, loop = f"nodes/{self.node}", asyncio.get_running_loop()
        begin, patience_s = loop.time(), self._waits.dial_s + self._waits.call_s
        pauses, warned = TAKEN_PAUSES.waits(), False
        while not self.joined and not self._record.left:
            try:
                # The time counts also while no controller leads, as in `update`.
                await self._try_set(key, self._record, max(self._waits.call_s, self._waits.patience_s))
            except DeadlineExceeded:
                # Without a leader the client's own patience decides how long to wait.
                if self.leader:
                    raise
            except RemoteError as error:
                waited_s = loop.time() - begin
                left_s = patience_s - waited_s
                if error.code == TAKEN and left_s <= 0:
                    raise RunFailed(f"{self.node} cannot join: {self._other_holder()}") from error
                if error.code != TAKEN:
                    raise _refused(key, error) from error
                if waited_s >= WARN_S and not warned:
                    warned = True
                    why = self._other_holder()
                    logger.warning("%s cannot join, and tries for %.0f s: %s", self.node, left_s, why)
                await asyncio.sleep(min(next(pauses), left_s))

    def _other_holder(self) -> str:
        if self._identity.role == "driver":
            run = self.map.run
            used = f"run {run.id}" if run is not None and not run.over else "this cluster"
            return f"another train drives {used}; one run at a time has the cluster"
        return f"another process is connected as {self.node}; give this one another --id"

    async def _take(self, update: MapUpdate) -> None:
        """Advance the map; an update of a known version changes nothing."""
        if update.whole is not None:
            if update.group == self._group and update.version <= self.map.version:
                return
            if self._group not in ("", update.group):
                logger.warning("%s: the controller at %s was started again", self.node, self.leader)
            self._group = update.group
            await self._show(update.whole)
        elif update.change is not None and update.group == self._group and update.version > self.map.version:
            await self._show(changed(self.map, update.change))

    def _stores_report(self) -> Message:
        """Return the report of this server's stores to a controller that learns them."""
        report = StoresReport(map=stores_of(self.map), standings=dict(self._standings()))
        return pack(ReportStores(), [text_tensor(report)])

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
            DeadlineExceeded: The map did not satisfy `predicate` in time; `what` names the wait in the error.
        """
        async with Within(timeout_s, what), self._changed:
            await self._changed.wait_for(lambda: predicate(self.map))
            return self.map

    async def changes(self) -> AsyncGenerator[ClusterMap, None]:
        """Yield the map now and after every change, always the newest.

        The iteration ends only by cancellation. A loop whose body waits has to close the generator
        (`contextlib.aclosing`).
        """
        seen: ClusterMap | None = None
        while True:
            async with self._changed:
                while self.map is seen:
                    await self._changed.wait()
                seen = self.map
            yield seen

    # --- writing -----------------------------------------------------------------------------

    async def set_node(self, **changes: Unpack[NodeChanges]) -> None:
        """Change fields of this node's record, such as ``ready=run_id``."""
        self._record = msgspec.structs.replace(self._record, **changes)
        await self.update(f"nodes/{self.node}", lambda _: self._record)

    async def set_info(self, **facts: Any) -> None:
        """Change facts in the `info` of this node's record; the other facts stay."""
        await self.set_node(info={**self._record.info, **facts})

    async def leave(self) -> None:
        """Report this node's departure for at most `GOODBYE_S`, so that no node waits for its return.

        Without a link to the leader the node sends no report.
        """
        if not self.leader or not self.joined:
            return
        self._record = msgspec.structs.replace(self._record, live=False, left=True)
        try:
            async with asyncio.timeout(GOODBYE_S):
                await self.update(f"nodes/{self.node}", lambda _: self._record)
        except (TimeoutError, TransportError, AdamError) as error:
            logger.info("%s leaves unreported: %r", self.node, error)

    async def report_death(self, node: str, at: float) -> None:
        """Report for at most `GOODBYE_S` that another node's process has ended.

        The process's parent reports its end, so that no node waits for the process to return.

        Args:
            at: Time of the end, in seconds since 1970.
        """
        known = self.map.nodes.get(node)
        if known is None:
            return

        def gone(newest: ClusterMap) -> NodeRecord | None:
            """Return the node's record as no longer live; None unless this incarnation is live."""
            record = newest.nodes.get(node)
            # The map has the node as departed, or has a new incarnation: the old one's end needs no report.
            if record is None or not record.live or record.incarnation != known.incarnation:
                return None
            return msgspec.structs.replace(record, live=False, lost_at=at)

        try:
            async with asyncio.timeout(GOODBYE_S):
                await self.update(f"nodes/{node}", gone)
        except (TimeoutError, TransportError, AdamError) as error:
            logger.info("%s could not report the death of %s: %r", self.node, node, error)

    async def create_store(self, name: str, record: StoreRecord, arrays: Sequence[ArrayRecord]) -> None:
        """Create a store, unless a store of that name exists; replace a failed store.

        Raises:
            ConfigError: The name or the list of arrays is too long.
            RunFailed: The controller refused the store.
            DeadlineExceeded: No controller led, or answered, in time.
        """
        key, id = store_key(name), record.id

        def absent(cluster: ClusterMap) -> bool:
            """Return whether the name is free, or belongs to another store, which has failed."""
            there = cluster.stores.get(name)
            return there is None or (there.phase == "failed" and there.id != id)

        pieces = cut_arrays(id, arrays, creator=record.creator)
        for number, piece in enumerate(pieces):
            await self.update(
                f"{key}/{number}",
                lambda cluster, piece=piece: piece if absent(cluster) else None,  # type: ignore[misc]
            )
        whole = msgspec.structs.replace(record, pieces=len(pieces))
        await self.update(key, lambda cluster: whole if absent(cluster) else None)

    async def delete_store(self, name: str, id: str) -> None:
        """Delete the store with a name, if it still has this id; for errors see `create_store`."""

        def deleted(cluster: ClusterMap) -> StoreRecord | None:
            """Return the store's record as deleted; None if the name no longer belongs to the store."""
            store = cluster.stores.get(name)
            if store is None or store.id != id:
                return None
            return msgspec.structs.replace(store, phase="deleted")

        await self.update(store_key(name), deleted)

    async def change_vectors(
        self, name: str, id: str, change: Callable[[tuple[VectorRecord, ...]], tuple[VectorRecord, ...]]
    ) -> None:
        """Change a store's vectors, if the store still has this id; for errors see `create_store`."""

        def changed(cluster: ClusterMap) -> StoreRecord | None:
            """Return the store's record with other vectors; None if the store is gone or already has them."""
            store = cluster.stores.get(name)
            if store is None or store.id != id or (vectors := change(store.vectors)) == store.vectors:
                return None
            return msgspec.structs.replace(store, vectors=vectors)

        await self.update(store_key(name), changed)

    def next_member(self, store: str, home: str, may_join: Callable[[Member], bool]) -> Member | None:
        """Return the server that a bundle's primary should invite, or None; see `bundle_rules`."""
        return next_member(self.map, store, home, may_join)

    def unready_copy(self) -> str:
        """Return the home of a bundle whose copy this server lacks; empty if it lacks none."""
        if self._unready is None or self._unready[0] is not self.map:
            # Kept for each map, because clients of a health endpoint may ask at any rate.
            self._unready = self.map, unready_copy(self.map, self.member)
        return self._unready[1]

    async def update_bundle(
        self, home: str, expected: int, record: BundleRecord, *, timeout_s: float
    ) -> Confirmation:
        """Change a bundle, as a member of it, if its record still has version `expected`.

        Unless the outcome is unknown, the map of this member shows the outcome before this method returns.
        After an unknown outcome, a later version of the bundle in the map shows whether the change was made.

        Args:
            home: Home of the bundle.
            expected: Version of the record from which the new one was made.
            record: New record, with the store's id.

        Raises:
            RunFailed: The controller refused the record, which breaks a rule of bundles.
        """
        name = next((name for name, store in self.map.stores.items() if store.id == record.store), None)
        if name is None:
            return "conflict"  # the store was deleted
        key = bundle_key(name, home)
        try:
            outcome = await self._client.compare_and_set(
                key, expected, record, after=self.map.version, group=self._group, timeout_s=timeout_s
            )
        except DeadlineExceeded:
            return "unknown"
        except RemoteError as error:
            raise _refused(key, error) from error
        for update in outcome.updates:
            await self._take(update)
        if outcome.done is None:
            return "unknown"
        return "confirmed" if outcome.done else "conflict"

    async def update(self, key: str, change: Callable[[ClusterMap], msgspec.Struct | None]) -> None:
        """Repeat a compare-and-set of a key, with a record made from the newest map, until one succeeds.

        After another node's write, `change` runs again on the newer map. If `change` returns None, this
        method ends.

        Raises:
            DeadlineExceeded: No controller led, or answered, within the longer of `patience_s` and `call_s`.
            RunFailed: The controller refused the value.
        """
        # Without a leader, `run` fails after `patience_s`, with the better error; this wait must not end
        # earlier.
        timeout_s = max(self._waits.call_s, self._waits.patience_s)
        try:
            async with Within(timeout_s, f"the controller to set {key}"):
                while (value := change(self.map)) is not None:
                    if await self._try_set(key, value, timeout_s):
                        break
        except RemoteError as error:
            raise _refused(key, error) from error

    async def _try_set(self, key: str, value: msgspec.Struct, timeout_s: float) -> bool:
        """Try to set a key if its record is still that of `map`; return whether it surely succeeded."""
        outcome = await self._client.compare_and_set(
            key,
            self.map.version_of(key),
            value,
            after=self.map.version,
            group=self._group,
            timeout_s=timeout_s,
        )
        for update in outcome.updates:
            await self._take(update)
        return outcome.done is True

    def __repr__(self) -> str:
        state = "joined" if self.leader else "away"
        return f"<Membership {self.node} {state} map v{self.map.version}>"


@contextlib.asynccontextmanager
async def joined_as(
    role: str, network: Network, controllers: str, waits: Waits
) -> AsyncIterator[tuple[Membership, Identity]]:
    """Join a cluster during the block, under a new node id and without a listener.

    Raises:
        RoleUnreachable: No controller answered within `start_s`.
        HandshakeRejected: The token is wrong.
    """
    incarnation = int.from_bytes(system_entropy(7), "little")
    identity = Identity(role=role, node=f"{role}-{incarnation:014x}", incarnation=incarnation)
    membership = Membership(
        network=network,
        controller=controllers,
        identity=identity,
        record=NodeRecord(role=role, address="", incarnation=incarnation),
        waits=waits,
        traffic=Traffic(identity.node, timeline=None),
    )
    async with asyncio.TaskGroup() as group:
        running = group.create_task(membership.run(), name=f"{identity.node}/membership")
        what = "the controllers to accept this member"
        await membership.wait_for(lambda _: membership.joined, what, waits.start_s + waits.call_s)
        try:
            yield membership, identity
        finally:
            await membership.leave()
            running.cancel()


def _refused(key: str, error: RemoteError) -> RunFailed:
    return RunFailed(f"the controller refused {key}: {error}")
