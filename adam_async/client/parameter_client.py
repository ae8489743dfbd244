"""The client of the parameter servers: pulls, ticks, and pushes that are applied exactly once.

A `ParameterClient` keeps a `BundleConnection` to each bundle, by its home (`connection.py`), which takes the
requests. Requests leave at once, many may be open, and answers are handled as they arrive. The owner passes
each cluster map to `map_changed`, because the primary of a bundle may move.

Requests never wait. `admit` waits while a bundle has as many unanswered pushes as its limit, at most
`MAX_UNACKNOWLEDGED`. The limit bounds the memory of push buffers.
"""

import asyncio
from collections.abc import Callable, Sequence

from adam_async.client.connection import MAX_UNACKNOWLEDGED, BundleConnection
from adam_async.client.session import SessionIdentity
from adam_async.errors import ShardUnavailable
from adam_async.run.cluster_map import ClusterMap
from adam_async.run.config import Waits
from adam_async.run.counts import PushCounts
from adam_async.run.run_copies import lacks_copies, primary_of
from adam_async.runtime.callbacks import Callbacks
from adam_async.runtime.channel import Endpoint
from adam_async.runtime.clock import Durations
from transport import LocalNetwork

__all__ = ["ParameterClient", "PushCounts", "SessionIdentity"]


class ParameterClient:
    """The requests of one worker, driver or store client, over all bundles of the store.

    Args:
        homes: Homes of the bundles with the shards that the client pushes or pulls.
        cluster: The cluster map.

    The owner runs `run` as a task of its group, and passes each newer map to `map_changed`.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        session: SessionIdentity,
        *,
        homes: Sequence[str],
        cluster: ClusterMap,
        waits: Waits,
    ) -> None:
        self._waits = waits
        self._session = session
        self._callbacks = Callbacks(endpoint.identity.node)
        store = cluster.store(session.store)
        # Without a copy, the logs of several servers, even lost ones, would keep the caller's memory; and in
        # bsp a server would read it after a client's push has returned.
        is_kept = store is not None and (store.copies > 1 or (store.summed_weight and not store.program))
        copies = bool(is_kept) and isinstance(endpoint.network, LocalNetwork)
        self.connections = {
            home: BundleConnection(
                endpoint,
                home=home,
                primary=primary_of(cluster, session.store, home),
                identity=session,
                waits=waits,
                callbacks=self._callbacks,
                copies=copies,
            )
            for home in homes
        }
        self._is_of_run = store is not None and bool(store.program)
        self._admission_waits = 0
        self._admission_waited = Durations()
        self.map_changed(cluster)

    async def run(self) -> None:
        """Keep the connections until cancelled.

        Raises:
            ShardUnavailable: For `patience_s`, a bundle had no primary, or its primary could not be reached
                or made no progress.
            Exception: An error in a callback of an answer.
        """
        async with asyncio.TaskGroup() as group:
            group.create_task(self._callbacks.failure(), name="connection-callbacks")
            for home, connection in self.connections.items():
                group.create_task(connection.run(), name=f"connection-{home}")

    def map_changed(self, cluster: ClusterMap) -> None:
        """Follow the primaries of a newer cluster map."""
        for home, connection in self.connections.items():
            primary = primary_of(cluster, self._session.store, home)
            if primary != connection.primary:
                connection.primary_changed(primary)
            if self._is_of_run:
                connection.wait_for_copies(lacks_copies(cluster, self._session.store, home))

    def answer_nothing(self, on_answered: Callable[[], None]) -> None:
        """Call back in a later iteration of the loop, in place of an answer to a question without shards."""
        self._callbacks.call_soon(on_answered)

    # --- waiting -----------------------------------------------------------------------------

    def allow_unacknowledged(self, pushes: int) -> None:
        """Set the limit of unanswered pushes to a bundle, `MAX_UNACKNOWLEDGED` at most."""
        for connection in self.connections.values():
            connection.limit = min(pushes, MAX_UNACKNOWLEDGED)

    @property
    def lacks_copies(self) -> bool:
        """Whether pushes of a run to any bundle wait for another copy, so that no replica may advance."""
        return any(connection.lacks_copies for connection in self.connections.values())

    @property
    def may_push(self) -> bool:
        """Whether each bundle has fewer unanswered pushes than the limit."""
        for connection in self.connections.values():
            if connection.open_pushes >= connection.limit:
                return False
        return True

    async def admit(self) -> None:
        """Wait until each bundle has fewer unanswered pushes than the limit.

        A cancelled wait loses nothing.

        Raises:
            ShardUnavailable: A bundle with unanswered pushes gave no answer for `patience_s`.
        """
        for connection in self.connections.values():
            if connection.open_pushes < connection.limit:
                continue
            loop = asyncio.get_running_loop()
            begin = loop.time()
            self._admission_waits += 1
            await self._wait(connection, lambda: connection.open_pushes < connection.limit)  # noqa: B023 - awaited here
            self._admission_waited.add(loop.time() - begin)

    async def flush(self) -> None:
        """Wait until all requests so far are answered. Cancelling the wait loses nothing.

        Raises:
            ShardUnavailable: A bundle with open requests gave no answer for `patience_s`.
        """
        for connection in self.connections.values():
            await self._wait(connection, lambda: not connection.open)  # noqa: B023 - awaited here

    async def _wait(self, connection: BundleConnection, done: Callable[[], bool]) -> None:
        # A bundle that answers is not given up, however long others keep the caller waiting.
        while not done():
            lacked_copies = connection.lacks_copies
            try:
                async with asyncio.timeout(self._waits.patience_s):
                    await connection.wait_progress()
            except TimeoutError:
                # While the bundle lacks copies, `run` limits the wait; after that the patience starts again.
                if not lacked_copies and not connection.lacks_copies:
                    text = f"answers of {connection}{connection.refusal}"
                    raise ShardUnavailable(text, self._waits.patience_s) from None

    def statistics(self) -> PushCounts:
        """Return the counts of acknowledgements, repetitions and waits."""
        sessions = self.connections.values()
        counts = [session.counts for session in sessions]
        return PushCounts(
            primaries={
                home: connection.primary.node if connection.primary is not None else ""
                for home, connection in self.connections.items()
            },
            moves=sum(connection.moves for connection in self.connections.values()),
            numbers={
                str(shard): number for session in sessions for shard, number in session.numbers.all().items()
            },
            unanswered=sum(session.open_pushes for session in sessions),
            acknowledged=sum(c.acknowledged for c in counts),
            duplicates=sum(c.duplicates for c in counts),
            refused=sum(c.refused for c in counts),
            resent=sum(c.resent for c in counts),
            reconnects=sum(max(connection.reconnects, 0) for connection in self.connections.values()),
            admission_waits=self._admission_waits,
            admission_wait_s=self._admission_waited.total_s,
            admission_wait_buckets=self._admission_waited.buckets,
        )

    def __repr__(self) -> str:
        return f"<ParameterClient of {self._session.store} {list(self.connections.values())}>"
