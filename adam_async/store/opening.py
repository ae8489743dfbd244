"""A store's client: its opening, its place among the clients, its background task, and its end.

`calls.py` has its calls. The client is a member of the cluster, with the role `client` or `reader`; a reader
has no place in the clocks and may not push.

`ParameterStore.open("local",...)` uses the running loop's servers, one controller and one parameter server,
over local links. The first open store starts them, and when the last store ends, they end with all their
stores. Each folder (`dir`) has separate servers, which keep their stores there. Each nameless store also has
its own, whose memory is free once the store is closed.
"""

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Callable, Generator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, NoReturn, TypeVar
from weakref import WeakKeyDictionary

from msgspec.structs import replace

from adam_async.checkpoint.checkpoint import StoredPieces
from adam_async.checkpoint.shard_transfer import ClockPassed, ShardCopies
from adam_async.checkpoint.tensors import WholeTensors
from adam_async.client.parameter_client import ParameterClient, SessionIdentity
from adam_async.cluster.networks import cluster_network
from adam_async.cluster.roles.controller import controller
from adam_async.cluster.roles.parameter_server import parameter_server
from adam_async.cluster.roles.place import Place
from adam_async.controller.client import Membership
from adam_async.driver.events import RunEvents
from adam_async.errors import RunFailed, StoreError, first_cause
from adam_async.messages import role_table
from adam_async.model.rules import AnyRule, UserRule
from adam_async.parameter_server.bundle import Bundle
from adam_async.parameter_server.piece_states import Catalogue
from adam_async.persistence.records import StateName
from adam_async.report.stream import Caller, EventStream
from adam_async.run.addresses import check_addresses
from adam_async.run.cluster_map import NodeRecord, replica_generation
from adam_async.run.config import Waits
from adam_async.run.events import ClientCounted
from adam_async.run.shard_table import holders, shard_table
from adam_async.run.store_record import StoreRecord
from adam_async.run.user_rules import RuleSource
from adam_async.runtime.channel import Endpoint
from adam_async.runtime.clock import system_entropy
from adam_async.runtime.traffic import Traffic
from adam_async.store.arguments import LOCAL, OpenArguments, consistency_of
from adam_async.store.arrays import user_rules_in
from adam_async.store.calls import Calls, check_loop
from adam_async.store.joining import Joining
from adam_async.store.layout import StoreLayout
from adam_async.store.pins import StorePins
from transport import BufferPool, Identity, LocalNetwork, Network, TransportError


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ServerAccess:
    """Access to the servers of stores.

    Attributes:
        network: Links to the servers.
        controllers: Addresses of the controllers, joined by commas.
        entropy: Returns random bytes, for identities and sessions.
    """

    network: Network
    controllers: str
    entropy: Callable[[int], bytes] = system_entropy


class _LocalServers:
    """The servers of one loop and one folder, while at least one store uses them.

    Args:
        folder: Folder in which the servers keep their stores; None: only in memory.
    """

    def __init__(self, folder: Path | None) -> None:
        self.users = 0
        self.rules = RuleSource()
        self._folder = folder
        self._access: asyncio.Future[ServerAccess] | None = None
        self._task: asyncio.Task[None] | None = None
        """Task of the servers, also while they end; None before the first start."""
        self._unused = asyncio.Event()

    @property
    def have_ended(self) -> bool:
        """Whether no store uses the servers, and they have ended."""
        return not self.users and (self._task is None or self._task.done())

    async def enter(self) -> ServerAccess:
        """Return the access for one more store; the first store starts the servers."""
        self.users += 1
        if self._access is None:
            self._access = asyncio.get_running_loop().create_future()
            self._unused = asyncio.Event()
            # The store that starts the servers may close before the others, so its groups must not own
            # this task: the last `leave` waits for it.
            run = self._run(self._access, self._unused, self._task)
            self._task = asyncio.create_task(run, name="local-servers")
        try:
            return await asyncio.shield(self._access)
        except BaseException:
            await self.leave()
            raise

    async def leave(self) -> None:
        """Remove one store from the count; after the last store, end the servers and wait for them."""
        self.users -= 1
        if not self.users and self._access is not None:
            assert self._task is not None
            self._access = None
            self._unused.set()
            await asyncio.shield(self._task)

    async def _run(
        self, access: "asyncio.Future[ServerAccess]", unused: asyncio.Event, before: asyncio.Task[None] | None
    ) -> None:
        """Run a controller and a server until no store uses them; `access` gets the access or an error.

        The task waits first for `before`, the task of the earlier servers, which may still hold the folder.
        """
        network, buffers, waits = LocalNetwork(rules=role_table()), BufferPool(), Waits()
        try:
            if before is not None:
                await asyncio.wait([before])
            place = Place(
                node="controller",
                bind="local://",
                network=network,
                buffers=buffers,
                waits=waits,
                entropy=system_entropy,
            )
            async with controller(place) as leader:
                place = dataclasses.replace(place, node="ps-0", controller=leader.address)
                async with parameter_server(place, folder=self._folder, rules=self.rules) as server:
                    await server.joined()
                    access.set_result(ServerAccess(network=network, controllers=leader.address))
                    await unused.wait()
        except BaseException as error:
            if access.done():
                raise
            access.set_exception(error)


_OF_LOOP: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[Path | str | None, _LocalServers]] = (
    WeakKeyDictionary()
)
"""Servers of each loop by folder, by the name of the one store on them, or under None."""


@asynccontextmanager
async def local_servers(
    folder: Path | None = None, name: str = "", *, is_own: bool = False, rules: Sequence[type[UserRule]] = ()
) -> AsyncIterator[ServerAccess]:
    """Use the servers of the running loop; the first user starts them, and the last user ends them.

    Args:
        folder: Folder in which the servers keep their stores; None: only in memory.
        name: Name of the store.
        is_own: Whether the store has separate servers. Other clients find it there by its name.
        rules: Rules of the user that the servers may apply from now on.
    """
    loop = asyncio.get_running_loop()
    of_loop = _OF_LOOP.setdefault(loop, {})
    key = name if is_own or (folder is None and name in of_loop) else folder
    servers = of_loop.setdefault(key, _LocalServers(folder))
    try:
        for rule in rules:
            servers.rules.allow(rule)
        access = await servers.enter()
        try:
            yield access
        finally:
            await servers.leave()
    finally:
        # The servers refer to the loop, which would otherwise stay for ever.
        if servers.have_ended and of_loop.get(key) is servers:
            del of_loop[key]
        if not of_loop and _OF_LOOP.get(loop) is of_loop:
            del _OF_LOOP[loop]


LEAVE_S = 2.0
"""Maximum time for open pushes at the end of a client, in seconds."""

REPORT_S = 1.0
"""Time between two events with the counts of a client, in seconds."""


class StoreLink:
    """One client of a store, from its join to its end.

    Args:
        name: Name of the store.
        arguments: Arguments of the caller.
        access: Access to the servers.
        group: Runs the background tasks.
    """

    def __init__(
        self, name: str, arguments: OpenArguments, access: ServerAccess, group: asyncio.TaskGroup
    ) -> None:
        self.arguments = arguments
        self._network = access.network
        self._entropy = access.entropy
        self._waits = arguments.waits
        self._group = group
        self.tasks: list[asyncio.Task[None]] = []
        """Background tasks, which the owner of this object cancels at the end."""
        role = "reader" if arguments.reader else "client"
        incarnation = int.from_bytes(access.entropy(7), "little")
        self._identity = Identity(role=role, node=f"{role}-{incarnation:014x}", incarnation=incarnation)
        traffic = Traffic(self._identity.node, timeline=None)
        self.endpoint = Endpoint(access.network, self._identity, traffic)
        self.membership = Membership(
            network=access.network,
            controller=access.controllers,
            identity=self._identity,
            record=NodeRecord(role=role, address="", incarnation=incarnation),
            waits=arguments.waits,
            traffic=traffic,
        )
        self.name = name
        self.closed = False
        self.rules: Mapping[str, AnyRule]
        """Rule of each array, with the rate of this client."""
        self.store: StoreRecord
        self.session: SessionIdentity
        """Identity of this client among the clients of the store."""
        self.calls: Calls
        """Calls of this client, once `start` has joined the store."""
        self.pins: StorePins
        self.events = EventStream()
        """Events of this client and its store, for the caller's callbacks."""
        self._callers = [Caller(self.events, each) for each in arguments.callbacks]
        self._has_joined = False
        self._deleting = False

    @property
    def consistency(self) -> str:
        """See `ParameterStore.consistency`."""
        return consistency_of(self.store.slack, is_summed=self.store.summed_weight > 0)

    @property
    def clients(self) -> int:
        """See `ParameterStore.clients`."""
        return max(len(self.membership.map.pushers(self.store)), 1)

    async def start(self) -> None:
        """Join the cluster and the store, and begin to serve calls; for errors see `Joining.join`."""
        arguments, membership = self.arguments, self.membership
        self._spawn("membership", membership.run())
        joining = Joining(self.name, arguments, self.endpoint, membership, self._entropy)
        store, arrays = await joining.join()
        table = shard_table(arrays, shard_bytes=store.shard_bytes)
        self.store = store
        rates = [rule.rate for rule in store.rules]
        mine = {record.name: arguments.rules[record.rule].rate for record in arguments.records}
        for array in arrays if mine else ():  # the rates of this client, for the rules of its arrays
            rates[array.rule] = mine[array.name]
        rules = [replace(rule, rate=rate) for rule, rate in zip(store.rules, rates, strict=True)]
        self.rules = {array.name: rules[array.rule] for array in arrays}
        session = self.session = await joining.take_place(store)
        servers = ParameterClient(
            self.endpoint,
            session=session,
            homes=holders(table, store.buckets),
            cluster=membership.map,
            waits=self._waits,
        )
        layout = StoreLayout(arrays, table, store.buckets)
        self.calls = Calls(self.name, arguments, store, layout, tuple(rates), servers, membership)
        self.pins = StorePins(
            self.name,
            store,
            table,
            endpoint=self.endpoint,
            membership=membership,
            waits=self._waits,
            entropy=self._entropy,
        )
        self._arrays = arrays
        self._has_joined = True
        self._spawn("servers", servers.run())
        self._spawn("queue", self.calls.run())
        self._spawn("follow", self._follow(session, servers))
        for caller in self._callers:
            self._spawn(caller.name, caller.run())
        if self._callers:
            incidents = RunEvents(self.events, stores=(self.name,))
            self._spawn("incidents", incidents.follow(membership.changes()))
            self._spawn("reports", self._report_counts())
        await self.calls.start()

    async def _report_counts(self) -> None:
        """Publish the counts of this client every `REPORT_S`."""
        while True:
            await asyncio.sleep(REPORT_S)
            self._publish_counts()

    def _publish_counts(self) -> None:
        calls, node = self.calls, self._identity.node
        counts = calls.servers.statistics()
        self.events.publish(ClientCounted(store=self.name, node=node, clock=calls.clock, counts=counts))

    async def read_all(self) -> WholeTensors:
        """Read all values with their rules' state, see `ParameterStore.save`."""
        self.calls.check_room(1 + self.store.state_arrays)
        await self.calls.until_settled()
        pieces = StoredPieces(Catalogue(self.name, self.calls.newest, self._arrays, 0.0))
        tensors = pieces.new_tensors()

        async def put(_: StateName, bundle: Bundle) -> None:
            for shard in bundle.shards.values():
                tensors.take(shard)

        membership, within_s = self.membership, self._waits.clock_s
        copies = ShardCopies(self.endpoint, changes=membership.changes, waits=self._waits)
        try:
            await copies.read(membership.map, pieces, put, clock=self.calls.bound, within_s=within_s)
        except (ClockPassed, TransportError) as error:
            raise StoreError(f"the rules of store {self.name!r} cannot be read: {error}") from error
        return tensors

    def _spawn(self, name: str, work: Any) -> None:
        self.tasks.append(self._group.create_task(work, name=f"{self._identity.node}/{name}"))

    async def _follow(self, session: SessionIdentity, servers: ParameterClient) -> None:
        """Follow the primaries of the store; fail if the store or this client's place ends."""
        name, node = self.name, self._identity.node
        async for cluster in self.membership.changes():
            store = cluster.stores.get(name)
            if store is None or store.id != session.store:
                if self._deleting:  # `delete` closes this client next
                    return
                raise StoreError(f"store {name!r} was deleted")
            if store.phase == "failed":
                raise StoreError(f"store {name!r} failed: {store.reason}")
            servers.map_changed(cluster)
            mine = cluster.nodes.get(node)
            if mine is None or self.arguments.reader:
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
        if self.arguments.reader:
            raise StoreError("this client is a reader: open the store without reader=True to delete it")
        self._deleting = True
        try:
            await self.membership.delete_store(self.name, self.store.id)
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
        if self._has_joined and self._callers:
            self._publish_counts()
        for caller in self._callers:
            await caller.finish()
        await self.membership.leave()


S = TypeVar("S")

NO_COPY = (
    "store {name!r} cannot be copied or pickled, because it is one client with links of its own: pass its "
    "address and name on, and open it there again; a store at 'local' is for one process"
)
"""Text that refuses a copy."""

HOW_TO_OPEN = "use `async with` or `await`; without an event loop use adam_async.sync"


class Opening(Generic[S]):
    """A store before its opening: `async with` or `await` opens it.

    `async with` and `await` raise:
        StoreError: The store differs from the arguments, is absent or present against `create`, or failed,
        for example because it exceeds its servers' memory; or this client would create it with bsp and has no
        `replicas`.
        RoleUnreachable: No controller answers at `where` within `start_s`.
        HandshakeRejected: The controllers have another token.
        DeadlineExceeded: A wait that the error names exceeded its deadline, for example `prepare_s` for
            enough servers.
    """

    if not TYPE_CHECKING:  # type checkers refuse these uses themselves

        def __getattr__(self, name: str) -> NoReturn:
            if hasattr(self._store, name) and not name.startswith("_"):
                raise AttributeError(f"store {self._name!r} is not open for {name!r}: {HOW_TO_OPEN}")
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

        def __enter__(self) -> NoReturn:
            raise TypeError(f"store {self._name!r} is not open: {HOW_TO_OPEN}")

        def __exit__(self, *_: object) -> None:
            """Do nothing: Python only looks up this method before it calls `__enter__`."""

    def __init__(self, store: "Callable[[StoreLink, Opening[S]], S]", arguments: OpenArguments) -> None:
        self._store = store
        self._arguments = arguments
        self._name = arguments.name or f"unnamed-{system_entropy(6).hex()}"
        folder = None if arguments.dir is None else Path(arguments.dir).resolve()
        self._servers = local_servers(
            folder, self._name, is_own=arguments.name is None, rules=user_rules_in(arguments.rule)
        )
        self._task: asyncio.Task[None] | None = None
        self._closing = asyncio.Event()

    def __await__(self) -> Generator[Any, None, S]:
        return self._open().__await__()

    async def __aenter__(self) -> S:
        return await self._open()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def __getstate__(self) -> NoReturn:
        raise TypeError(NO_COPY.format(name=self._name))

    def __repr__(self) -> str:
        return f"<Opening of store {self._name!r}: {HOW_TO_OPEN}>"

    async def _open(self) -> S:
        """Start the background work, and wait until the store is open.

        A cancellation closes the store again.
        """
        if self._task is not None:
            raise StoreError("this store was opened before: call ParameterStore.open again")
        opened: asyncio.Future[StoreLink] = asyncio.get_running_loop().create_future()
        # `await` has no block, so `close` ends the task in place of a group. A group that this call enters
        # would cancel the caller at any later `await` if a link fails, and `close` may run in another task.
        self._task = asyncio.create_task(self._run(opened), name=f"store-{self._name}")
        try:
            link = await asyncio.shield(opened)
        except asyncio.CancelledError:
            await self.close()
            if opened.done() and not opened.cancelled():
                opened.exception()  # otherwise the loop would log an unread error
            raise
        return self._store(link, self)

    async def close(self) -> None:
        """End the background work. A second call waits for the first."""
        if self._task is not None and (self._task.done() or self._task.get_loop().is_closed()):
            return
        if self._task is not None:
            check_loop(self._name, self._task.get_loop())
        self._closing.set()
        if self._task is not None:
            await asyncio.shield(self._task)

    async def _run(self, opened: "asyncio.Future[StoreLink]") -> None:
        """Do the background work of the store, from its opening to its end."""
        link: StoreLink | None = None
        try:
            access_to = _access_to(self._arguments, self._servers)
            async with access_to as access, asyncio.TaskGroup() as group:
                link = StoreLink(self._name, self._arguments, access, group)
                await self._serve(link, opened, group)
        except BaseException as error:
            cause = _shown(first_cause(error))
            if isinstance(cause, asyncio.CancelledError):  # no caller of the store is cancelled
                cause = StoreError(
                    f"store {self._name!r} ended with its event loop, or its task was cancelled: open "
                    "it again, in the loop that uses it"
                )
            if link is not None:
                link.fail(cause)
            if not opened.done():
                opened.set_exception(cause)
            elif not isinstance(error, Exception):
                raise
        finally:
            if link is not None:
                link.closed = True
                link.fail(StoreError(f"store {self._name!r} is closed: open it again"))

    async def _serve(
        self, link: StoreLink, opened: "asyncio.Future[StoreLink]", group: asyncio.TaskGroup
    ) -> None:
        """Open the store, wait until it is closed, and leave it; a failed attempt leaves too."""
        failures: list[Exception] = []

        async def attempt() -> None:
            try:
                await link.start()
            except Exception as error:
                failures.append(error)

        stopping = group.create_task(self._closing.wait(), name=f"store-{self._name}/closing")
        opening = group.create_task(attempt(), name=f"store-{self._name}/open")
        await asyncio.wait({stopping, opening}, return_when=asyncio.FIRST_COMPLETED)
        if not opening.done():
            opening.cancel()
        elif not failures:
            opened.set_result(link)
            await self._closing.wait()
        await link.leave()
        for task in link.tasks:
            task.cancel()
        stopping.cancel()
        for failure in failures:
            raise failure
        if not opened.done():
            opened.cancel()


def _shown(cause: BaseException) -> BaseException:
    """Return the error that the caller of a store gets: a StoreError for a refusal of a controller."""
    if not isinstance(cause, RunFailed):
        return cause
    refusal = StoreError(str(cause))
    refusal.__cause__ = cause
    return refusal


@asynccontextmanager
async def _access_to(
    arguments: OpenArguments, local: AbstractAsyncContextManager[ServerAccess]
) -> AsyncIterator[ServerAccess]:
    """Give access to servers: this loop's, or those of the cluster whose controllers have these addresses."""
    if arguments.where == LOCAL:
        async with local as access:
            yield access
        return
    network = cluster_network(
        arguments.token, entropy=system_entropy, buffers=BufferPool(), link=arguments.link
    )
    yield ServerAccess(network=network, controllers=check_addresses(arguments.where, "where"))
