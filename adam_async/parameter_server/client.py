"""The client of the parameter servers: pulls, ticks, and pushes that are applied exactly once.

A `ParameterClient` keeps a `BundleConnection` to each bundle, by its home (`connection.py`). Requests leave
at once, many may be open, and answers are handled as they arrive. The owner passes each cluster map to
`map_changed`, because the primary of a bundle may move.

Requests never wait; `admit` waits while a bundle has as many unanswered pushes as its limit,
`MAX_UNACKNOWLEDGED` at most. The limit bounds the memory of push buffers.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec
from numpy.typing import NDArray

from adam_async.errors import ShardUnavailable
from adam_async.messages import (
    Part,
    Pull,
    Push,
    Pushed,
    ReportSteps,
    StepReport,
    StepsReported,
    Tick,
    Ticked,
    Values,
    pack,
    unpack,
)
from adam_async.parameter_server.connection import MAX_UNACKNOWLEDGED, BundleConnection
from adam_async.parameter_server.session import Exchange
from adam_async.run.cluster_map import ClusterMap
from adam_async.run.config import Waits
from adam_async.run.ids import ShardId
from adam_async.run.primary import lacks_copies, primary_of
from adam_async.runtime.callbacks import Callbacks
from adam_async.runtime.channel import Endpoint
from transport import LocalNetwork, Message, RemoteProtocolError


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionIdentity:
    """Identity of a client, under which each of its pushes is applied exactly once."""

    store: str
    session: int
    incarnation: int
    replica: int
    generation: int


class StepPush(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """The part of a step's gradients for one bundle, in one message."""

    parts: tuple[Part, ...]
    shards: tuple[ShardId, ...]
    tensors: Sequence[NDArray[Any]]
    versions: tuple[int, ...]
    own_applied: tuple[int, ...]
    clock: int
    weight: int
    rate: float
    pull: bool = False
    epoch: int = 0
    """Epoch of the step's groups, in ssp and bsp; see `Push.epoch`."""
    assign: bool = False
    """Whether the tensors are values that replace those of the shards."""


OnValues = Callable[[Sequence[int], NDArray[Any], int], None]
"""Callback with the versions of the requested shards, their values in one flat array, and the clock up to
which the values contain all pushes of live replicas (0 in asp, which waits for no clock)."""

OnBehind = Callable[[Values], None]
"""Callback with an answer that has no values, but the slowest clock and the replicas that are behind."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientStatistics:
    """Counts of a client over all its bundles."""

    primaries: dict[str, str]
    """Primary of each bundle, by the bundle's home; empty text while there is none."""
    moves: int
    """Number of times that the primary of a bundle moved."""
    numbers: dict[str, int]
    """Number of the last push to each shard; a client numbers its pushes to a shard from 1."""
    unanswered: int
    """Number of pushes without an acknowledgement."""
    acknowledged: int
    duplicates: int
    refused: int
    resent: int
    reconnects: int
    admission_waits: int
    admission_wait_s: float


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Question:
    """A pull, sent again until an answer has the values.

    This is a class, because two functions with references to each other would keep the memory of the values
    until a garbage collection.
    """

    connection: BundleConnection
    message: Message
    into: tuple[NDArray[Any]] | None
    on_values: Callable[[Values, NDArray[Any]], None]
    on_behind: OnBehind | None
    is_wanted: Callable[[], bool] | None

    def ask(self) -> None:
        self.connection.send(Exchange(message=self.message, on_answer=self.answered, into=self.into))

    def answered(self, answer: Message) -> bool:
        """Pass the values on; after an answer without values, pull again while they are wanted."""
        values = unpack(answer, Values)
        if self.message.meta["shards"] and not values.versions:
            if not self.message.meta["clock"]:  # such a question would be asked again without an end
                raise RemoteProtocolError("values", "a Values has no values, and the Pull named no clock")
            if self.is_wanted is not None and not self.is_wanted():
                return True
            if self.on_behind is not None:
                self.on_behind(values)
            self.ask()
        else:
            self.on_values(values, _values_of(answer))
        return True


class ParameterClient:
    """Requests of one worker, driver, or client of a store, over all bundles of the store.

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
        self.connections = {
            home: BundleConnection(
                endpoint,
                home=home,
                primary=primary_of(cluster, session.store, home),
                waits=waits,
                callbacks=self._callbacks,
            )
            for home in homes
        }
        self._all = tuple(self.connections.values())
        store = cluster.store(session.store)
        # Without a copy the caller's memory would stay in the logs of several servers, even of lost ones; and
        # in bsp a server would read it after the push of a client has returned.
        is_kept = store is not None and (store.copies > 1 or (store.summed_weight and not store.program))
        self._copies = bool(is_kept) and isinstance(endpoint.network, LocalNetwork)
        self._is_of_run = store is not None and bool(store.program)
        self._admission_waits = 0
        self._admission_wait_s = 0.0
        self.map_changed(cluster)

    async def run(self) -> None:
        """Keep the connections until cancelled.

        Raises:
            ShardUnavailable: A bundle had no primary, or its primary could not be reached or made no
                progress, for `patience_s`.
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

    # --- requests ------------------------------------------------------------------------------

    def push(
        self,
        home: str,
        step: StepPush,
        *,
        on_free: Callable[[], None],
        on_values: OnValues | None = None,
        on_outcome: Callable[[Pushed], None] | None = None,
        into: NDArray[Any] | None = None,
    ) -> None:
        """Push gradients under the next numbers. Never waits; see `admit`.

        Args:
            home: Home of the bundle of the shards.
            on_free: Called once, when every shard has acknowledged the push (or refused non-finite values)
                and no send reads the tensors any more. The caller may write to them again only then.
            on_values: Called once with the answered values of a push that pulls.
            on_outcome: Called once with the acknowledgement of every shard.
            into: Memory for the values; pooled memory without it.
        """
        session = self.connections[home].session
        body = Push(
            store=self._session.store,
            session=self._session.session,
            incarnation=self._session.incarnation,
            replica=self._session.replica,
            clock=step.clock,
            weight=step.weight,
            rate=step.rate,
            generation=self._session.generation,
            parts=step.parts,
            shards=step.shards,
            numbers=session.next_numbers(step.shards),
            versions=step.versions,
            own_applied=step.own_applied,
            pull=step.pull,
            epoch=step.epoch,
            assign=step.assign,
        )

        free = partial(self._callbacks.run, on_free)

        def on_answer(answer: Message) -> bool:
            """Settle the push once every shard has acknowledged it."""
            acknowledged = unpack(answer, Pushed)
            if not session.settle_push(acknowledged, len(body.shards)):
                return False
            if on_outcome is not None:
                on_outcome(acknowledged)
            if on_values is not None:
                on_values(acknowledged.versions, _values_of(answer), acknowledged.clock)
            if self._copies:
                free()
            return True

        self.connections[home].send(
            Exchange(
                message=pack(body, [each.copy() for each in step.tensors] if self._copies else step.tensors),
                on_answer=on_answer,
                on_free=None if self._copies else free,
                into=None if into is None else (into,),
                is_push=True,
            )
        )

    def report_steps(
        self,
        home: str,
        shards: tuple[ShardId, ...],
        steps: tuple[StepReport, ...],
        *,
        on_answer: Callable[[], None],
    ) -> None:
        """Report steps that were applied in place, under the next numbers. Never waits; see `admit`.

        Args:
            home: Home of a bundle.
            shards: All shards of this bundle; every step was applied to each of them.
            on_answer: Called once, when the primary has counted them.
        """
        session = self.connections[home].session
        body = ReportSteps(
            store=self._session.store,
            session=self._session.session,
            incarnation=self._session.incarnation,
            replica=self._session.replica,
            generation=self._session.generation,
            shards=shards,
            number=session.next_steps(shards, len(steps)),
            steps=steps,
        )

        def answered(answer: Message) -> bool:
            """Count the reported steps, and report their acknowledgement to the caller."""
            unpack(answer, StepsReported)
            session.counts.acknowledged += len(shards) * len(steps)
            session.counts.refused += sum(len(step.refused) for step in steps)
            on_answer()
            return True

        self.connections[home].send(Exchange(message=pack(body), on_answer=answered, is_push=True))

    def answer_nothing(self, on_answered: Callable[[], None]) -> None:
        """Call back in a later iteration of the loop, in place of an answer to a question without shards."""
        self._callbacks.call_soon(on_answered)

    def pull(
        self,
        home: str,
        shards: Sequence[ShardId],
        on_values: Callable[[Values, NDArray[Any]], None],
        *,
        clock: int = 0,
        into: NDArray[Any] | None = None,
        on_behind: OnBehind | None = None,
        is_wanted: Callable[[], bool] | None = None,
    ) -> None:
        """Ask for values with all earlier pushes of this client; in bsp, those up to `clock`. Never waits.

        Args:
            home: Home of the bundle of the shards.
            on_values: Called once with the answer and the values, one shard after the other, flat.
            clock: Clock up to which the values must contain all pushes of live replicas; 0 for the current
                values. The client pulls again until the values are available.
            into: Memory for the values; pooled memory without it.
            on_behind: Called for each answer without values, before the client pulls again. Such an answer
                comes within about half of `answer_s`. The function must not raise.
            is_wanted: Returns whether the caller still wants the values; None means always.
        """
        body = Pull(
            store=self._session.store,
            generation=self._session.generation,
            shards=tuple(shards),
            clock=clock,
            wait_s=self._waits.answer_s / 2 if clock else 0.0,
        )
        question = _Question(
            connection=self.connections[home],
            message=pack(body),
            into=None if into is None else (into,),
            on_values=on_values,
            on_behind=on_behind,
            is_wanted=is_wanted,
        )
        question.ask()

    def tick(self, home: str, shards: Sequence[ShardId], clock: int, *, epoch: int = 0) -> None:
        """Report to a bundle that this client has ended step `clock` on these shards. Never waits.

        Args:
            epoch: In ssp and bsp the epoch of the step, if known.
        """
        session = self.connections[home].session
        body = Tick(
            store=self._session.store,
            session=self._session.session,
            incarnation=self._session.incarnation,
            replica=self._session.replica,
            clock=clock,
            generation=self._session.generation,
            shards=tuple(shards),
            numbers=session.last_numbers(shards),
            epoch=epoch,
        )

        def on_answer(answer: Message) -> bool:
            unpack(answer, Ticked)
            return True

        self.connections[home].send(Exchange(message=pack(body), on_answer=on_answer))

    # --- waiting -----------------------------------------------------------------------------

    def allow_unacknowledged(self, pushes: int) -> None:
        """Set the limit of unanswered pushes to a bundle, `MAX_UNACKNOWLEDGED` at most."""
        for connection in self._all:
            connection.session.limit = min(pushes, MAX_UNACKNOWLEDGED)

    @property
    def lacks_copies(self) -> bool:
        """Whether pushes of a run to any bundle wait for another copy, so that no replica may advance."""
        return any(connection.lacks_copies for connection in self._all)

    @property
    def may_push(self) -> bool:
        """Whether each bundle has fewer unanswered pushes than the limit."""
        return all(connection.session.may_push for connection in self._all)

    async def admit(self) -> None:
        """Wait until each bundle has fewer unanswered pushes than the limit.

        A cancelled wait loses nothing.

        Raises:
            ShardUnavailable: A bundle with unanswered pushes gave no answer for `patience_s`.
        """
        for connection in self.connections.values():
            if connection.session.may_push:
                continue
            loop = asyncio.get_running_loop()
            begin = loop.time()
            self._admission_waits += 1
            await self._wait(connection, lambda: connection.session.may_push)  # noqa: B023 - awaited here
            self._admission_wait_s += loop.time() - begin

    async def flush(self) -> None:
        """Wait until all requests so far are answered. Cancelling the wait loses nothing.

        Raises:
            ShardUnavailable: A bundle with open requests gave no answer for `patience_s`.
        """
        for connection in self.connections.values():
            await self._wait(connection, lambda: not connection.session.open)  # noqa: B023 - awaited here

    async def _wait(self, connection: BundleConnection, done: Callable[[], bool]) -> None:
        # A bundle that answers is not given up, however long others keep the caller waiting.
        while not done():
            lacked_copies = connection.lacks_copies
            try:
                async with asyncio.timeout(self._waits.patience_s):
                    await connection.wait_progress()
            except TimeoutError:
                # While the bundle lacks copies, `run` bounds the wait; after that the patience begins anew.
                if not lacked_copies and not connection.lacks_copies:
                    text = f"answers of {connection}{connection.refusal}"
                    raise ShardUnavailable(text, self._waits.patience_s) from None

    def statistics(self) -> ClientStatistics:
        """Return the counts of acknowledgements, repetitions and waits."""
        sessions = [connection.session for connection in self.connections.values()]
        counts = [session.counts for session in sessions]
        return ClientStatistics(
            primaries={
                home: connection.primary.node if connection.primary is not None else ""
                for home, connection in self.connections.items()
            },
            moves=sum(connection.moves for connection in self.connections.values()),
            numbers={
                str(shard): number for session in sessions for shard, number in session.numbers().items()
            },
            unanswered=sum(session.open_pushes for session in sessions),
            acknowledged=sum(c.acknowledged for c in counts),
            duplicates=sum(c.duplicates for c in counts),
            refused=sum(c.refused for c in counts),
            resent=sum(c.resent for c in counts),
            reconnects=sum(max(connection.reconnects, 0) for connection in self.connections.values()),
            admission_waits=self._admission_waits,
            admission_wait_s=self._admission_wait_s,
        )

    def __repr__(self) -> str:
        return f"<ParameterClient of {self._session.store} {list(self.connections.values())}>"


def _values_of(answer: Message) -> NDArray[Any]:
    if len(answer.tensors) != 1:
        raise RemoteProtocolError("tensors", f"{answer.type} must carry the values as one tensor")
    return answer.tensors[0]
