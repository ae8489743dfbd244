"""One client of a store: its joining, its place among the clients, and its end; `calls.py` has its calls.

The client is a member of the cluster, with the role `client` or `reader`; a reader has no place in the clocks
and may not push.
"""

import asyncio
from collections.abc import Mapping
from typing import Any

from adam_async.client.parameter_client import ParameterClient, SessionIdentity
from adam_async.controller.client import Membership
from adam_async.errors import StoreError
from adam_async.run.cluster_map import NodeRecord, replica_generation
from adam_async.run.shard_table import holders, shard_table
from adam_async.run.store_record import StoreRecord
from adam_async.runtime.channel import Endpoint
from adam_async.runtime.traffic import Traffic
from adam_async.store.calls import Calls
from adam_async.store.joining import Joining
from adam_async.store.layout import StoreLayout
from adam_async.store.local_servers import ServerAccess
from adam_async.store.rules import Rule, rule_of
from adam_async.store.wish import StoreWish, consistency_of
from transport import Identity

LEAVE_S = 2.0
"""Maximum time for open pushes at the end of a client, in seconds."""


class StoreLink:
    """One client of a store, from its join to its end.

    Args:
        wish: Arguments of the caller.
        access: Access to the servers.
        group: Runs the background tasks.
    """

    def __init__(self, wish: StoreWish, access: ServerAccess, group: asyncio.TaskGroup) -> None:
        self._wish = wish
        self._network = access.network
        self._entropy = access.entropy
        self._waits = wish.waits
        self._group = group
        self.tasks: list[asyncio.Task[None]] = []
        """Background tasks, which the owner of this object cancels at the end."""
        role = "reader" if wish.reader else "client"
        incarnation = int.from_bytes(access.entropy(7), "little")
        self._identity = Identity(role=role, node=f"{role}-{incarnation:014x}", incarnation=incarnation)
        traffic = Traffic(self._identity.node, timeline=None)
        self._endpoint = Endpoint(access.network, self._identity, traffic)
        self._membership = Membership(
            network=access.network,
            controller=access.controllers,
            identity=self._identity,
            record=NodeRecord(role=role, address="", incarnation=incarnation),
            waits=wish.waits,
            traffic=traffic,
        )
        self.name = wish.name
        self.closed = False
        self.rules: Mapping[str, Rule]
        """Rule of each array, with the rate of this client."""
        self.store: StoreRecord
        self.session: SessionIdentity
        """Identity of this client among the clients of the store."""
        self.calls: Calls
        """Calls of this client, once `start` has joined the store."""
        self._has_joined = False
        self._deleting = False

    @property
    def consistency(self) -> str:
        """See `ParameterStore.consistency`."""
        return consistency_of(self.store.slack, is_summed=self.store.summed_weight > 0)

    @property
    def clients(self) -> int:
        """See `ParameterStore.clients`."""
        return max(len(self._membership.map.pushers(self.store)), 1)

    async def start(self) -> None:
        """Join the cluster and the store, and begin to serve calls; for errors see `Joining.join`."""
        wish, membership = self._wish, self._membership
        self._spawn("membership", membership.run())
        joining = Joining(wish, self._endpoint, membership, self._entropy)
        store, arrays = await joining.join()
        table = shard_table(arrays, shard_bytes=store.shard_bytes)
        self.store = store
        rates = [rule.rate for rule in store.rules]
        mine = {record.name: wish.rules[record.rule].rate for record in wish.records}
        for array in arrays if mine else ():  # the rates of this client, for the rules of its arrays
            rates[array.rule] = mine[array.name]
        rules = [rule_of(record, rate) for record, rate in zip(store.rules, rates, strict=True)]
        self.rules = {array.name: rules[array.rule] for array in arrays}
        session = self.session = await joining.take_place(store)
        servers = ParameterClient(
            self._endpoint,
            session=session,
            homes=holders(table, store.buckets),
            cluster=membership.map,
            waits=self._waits,
        )
        layout = StoreLayout(arrays, table, store.buckets)
        self.calls = Calls(wish, store, layout, tuple(rates), servers, membership)
        self._has_joined = True
        self._spawn("servers", servers.run())
        self._spawn("queue", self.calls.run())
        self._spawn("follow", self._follow(session, servers))
        await self.calls.start()

    def _spawn(self, name: str, work: Any) -> None:
        self.tasks.append(self._group.create_task(work, name=f"{self._identity.node}/{name}"))

    async def _follow(self, session: SessionIdentity, servers: ParameterClient) -> None:
        """Follow the primaries of the store; fail if the store or this client's place ends."""
        name, node = self._wish.name, self._identity.node
        async for cluster in self._membership.changes():
            store = cluster.stores.get(name)
            if store is None or store.id != session.store:
                if self._deleting:  # `delete` closes this client next
                    return
                raise StoreError(f"store {name!r} was deleted")
            if store.phase == "failed":
                raise StoreError(f"store {name!r} failed: {store.reason}")
            servers.map_changed(cluster)
            mine = cluster.nodes.get(node)
            if mine is None or self._wish.reader:
                continue
            if (
                mine.placed
                and replica_generation([(mine.incarnation, mine.placed)], 1) != session.incarnation
            ):
                raise StoreError(
                    f"the controllers did not hear of this client of store {name!r} for too long, and gave "
                    "up its place: open the store again"
                )

    # --- the end -------------------------------------------------------------------------------

    async def delete(self) -> None:
        """See `ParameterStore.delete`."""
        self.calls.check()
        if self._wish.reader:
            raise StoreError("this client is a reader: open the store without reader=True to delete it")
        self._deleting = True
        try:
            await self._membership.delete_store(self._wish.name, self.store.id)
        except BaseException:
            self._deleting = False
            raise

    def fail(self, error: BaseException) -> None:
        """End all waits of calls with an error; only the first error counts."""
        if self._has_joined:
            self.calls.fail(error)

    async def leave(self) -> None:
        """Wait up to `LEAVE_S` for open pushes, and leave the cluster; then no client waits for this one."""
        try:
            async with asyncio.timeout(LEAVE_S):
                if self._has_joined:
                    await self.calls.until_settled()
        except TimeoutError:
            pass
        await self._membership.leave()
