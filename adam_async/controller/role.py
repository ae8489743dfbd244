"""The common part of all roles: a listener, the membership in the cluster, tasks and counts.

Theory of operation
-------------------
A role is an `async with` block. The start of the block opens a task group, a listener whose links are counted
and, for every role but the controller, the membership. Then it starts the role's own tasks. The block's end
cancels the tasks, closes the listener and waits for the remaining links. An error in any task ends the block,
and so does an error in a callback of the role (`callbacks.py`).

This module decodes requests. The base answers requests that every role answers, and passes the others to the
role. The base refuses a request for another role, and a request that it cannot decode; the link stays open.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self, TypeVar

import msgspec

from adam_async.controller.client import Membership
from adam_async.messages import (
    Body,
    GetProfile,
    GetStatistics,
    Standing,
    Statistics,
    pack,
    text_tensor,
    unpack_any,
)
from adam_async.run.cluster_map import ClusterMap, NodeRecord
from adam_async.run.config import Waits
from adam_async.run.counts import Counts
from adam_async.runtime.callbacks import Callbacks
from adam_async.runtime.channel import Endpoint, StackedTaskGroup
from adam_async.runtime.machine import ProcessMemory, process_memory
from adam_async.runtime.timeline import Timeline, answer_profile
from adam_async.runtime.traffic import Traffic
from transport import Identity, Link, LocalProtocolError, Message, Network, ProtocolError, Request

_Counts = TypeVar("_Counts", bound=Counts)

STATISTICS_BYTES = 1 << 20
"""Memory that a role reserves in advance for an answer with statistics, in bytes."""


STORES_LOGGED = 8
"""Maximum number of stores in a log line."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RoleSettings:
    """The place of a role in a cluster and in its process.

    Attributes:
        network: The role's listener, and its links to other roles.
        address: Address to listen on.
        identity: The role, its node id and its incarnation.
        waits: Deadlines.
        controller: Address of the controller, or of several joined by commas; empty for a role that is not a
            member.
        timeline: Records the messages of its links.
        process_memory: Describes the role's process and peak memory.
    """

    network: Network
    address: str
    identity: Identity
    waits: Waits
    controller: str = ""
    timeline: Timeline | None = None
    process_memory: Callable[[], ProcessMemory] = process_memory


class Role:
    """One role of a cluster, for the duration of its `async with`.

    A subclass has tasks (`_tasks`), answers (`_answer`) and counts (`statistics`).

    Args:
        settings: Its place in the cluster.
        info: Facts about the role for the cluster map (`NodeRecord.info`).
    """

    in_place: Collection[str] = ()
    """Types of the requests whose tensors the role reads in memory of the peer; see `Link.serve`."""

    def __init__(self, settings: RoleSettings, *, info: Mapping[str, Any] | None = None) -> None:
        self._network = settings.network
        self._bind = settings.address
        self._identity = settings.identity
        self._waits = settings.waits
        self._controller = settings.controller
        self._info = dict(info or {})
        self._timeline = settings.timeline
        self.process_memory = settings.process_memory
        self._traffic = Traffic(self._identity.node, timeline=self._timeline)
        self._endpoint = Endpoint(self._network, self._identity, self._traffic)
        self._callbacks = Callbacks(self._identity.node)
        self._stack = AsyncExitStack()
        self.address = ""
        """Address of the role's listener; empty before the role listens."""

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            self._loop = asyncio.get_running_loop()
            self._group = await stack.enter_async_context(StackedTaskGroup())
            listener = await stack.enter_async_context(
                self._network.listen(self._bind, self._identity, self._on_link)
            )
            self.address = listener.address
            await self._listen_further(stack)
            if self._controller:
                self._membership = self._joined_membership()
                stack.callback(self._spawn("membership", self._membership.run()).cancel)
            stack.callback(self._spawn("callbacks", self._callbacks.failure()).cancel)
            for name, work in self._tasks().items():
                stack.callback(self._spawn(name, work).cancel)
            stack.push_async_callback(self._goodbye)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        return await self._stack.__aexit__(kind, error, trace)

    async def _listen_further(self, stack: AsyncExitStack) -> None:
        """Open the role's further listeners before it joins with its entry in the cluster map."""

    def _joined_membership(self) -> Membership:
        identity = self._identity
        record = NodeRecord(
            role=identity.role, address=self.address, incarnation=identity.incarnation, info=self._info
        )
        return Membership(
            network=self._network,
            controller=self._controller,
            identity=identity,
            record=record,
            waits=self._waits,
            traffic=self._traffic,
            standings=self._standings,
        )

    def _standings(self) -> Mapping[str, Standing]:
        """Return the logs of the role's bundles, by key; for parameter servers only."""
        return {}

    def _tasks(self) -> Mapping[str, Coroutine[Any, Any, None]]:
        """Return the tasks of the block by name."""
        return {}

    async def _goodbye(self) -> None:
        """Leave the cluster before the tasks end, so that no role waits for this one.

        During a run the role reports no departure; the controllers then report its loss.
        """
        if self._controller:
            if not self._membership.map.in_progress:
                await self._membership.leave()

    def _spawn(self, name: str, work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        """Start a task of the block."""
        return self._group.create_task(work, name=f"{self._identity.node}/{name}")

    async def joined(self) -> None:
        """Wait until the role is a member of the cluster; without a controller's address, do not wait.

        Raises:
            DeadlineExceeded: The controller did not accept it within `start_s` and `call_s`.
        """
        if self._controller:
            membership, waits = self._membership, self._waits
            what = f"the controller at {self._controller} to accept {self._identity.node}"
            await membership.wait_for(lambda _: membership.joined, what, waits.start_s + waits.call_s)

    def unready(self) -> str:
        """Return why the role does not serve now, for probes; empty if it serves."""
        if not self._controller:
            return ""
        if not self._membership.joined:
            return f"{self._identity.node} is no member of the cluster"
        return "" if self._membership.leader else f"{self._identity.node} finds no leader of the controllers"

    def store_counts(self) -> Mapping[str, Counts]:
        """Return, by name, the counts of the client stores that this role leads; for servers only."""
        return {}

    def led_map(self) -> ClusterMap | None:
        """Return the map of the cluster that this role leads; None except on the leading controller."""
        return None

    def log_facts(self) -> dict[str, Any]:
        """Return role, run and stores of clients, for the lines of a log."""
        cluster = self._membership.map if self._controller else ClusterMap()
        stores = [name for name, store in sorted(cluster.stores.items()) if not store.program]
        return {
            "role": self._identity.role,
            "run": cluster.run.id if cluster.run is not None else "",
            "stores": stores[:STORES_LOGGED],
        }

    @property
    def info(self) -> Mapping[str, Any]:
        """Facts about the role in the cluster map (`NodeRecord.info`)."""
        return self._info

    def changes(self) -> AsyncIterator[ClusterMap]:
        """Yield the cluster map now and after every change, always the newest; for members only."""
        return self._membership.changes()

    async def listen_also(self, address: str) -> str:
        """Until the block ends, open a second listener for peers that cannot reach the first.

        Returns the listener's address; for errors see `Network.listen`.
        """
        return await self._listen_at(address, self._stack)

    async def _listen_at(self, address: str, stack: AsyncExitStack) -> str:
        """Open a listener until a stack ends; return its address."""
        listener = await stack.enter_async_context(
            self._network.listen(address, self._identity, self._on_link)
        )
        return listener.address

    # --- links -------------------------------------------------------------------------------

    async def _on_link(self, link: Link) -> None:
        self._traffic.watch(link)
        link.serve(self._on_request, receives=False, in_place=self.in_place)
        try:
            await link.wait_closed()
        finally:
            self._traffic.gone(link)

    def _on_request(self, request: Request) -> None:
        try:
            body = unpack_any(request.message)
            if isinstance(body, GetStatistics):
                self._report_statistics(request, body)
            elif isinstance(body, GetProfile):
                answer_profile(request, body, self._timeline)
            else:
                self._answer(request, body)
        except ProtocolError as error:
            request.fail("malformed", str(error))

    def _report_statistics(self, request: Request, body: GetStatistics) -> None:
        reply_when_room(request, STATISTICS_BYTES, lambda: self._pack_statistics(self.statistics()))

    def _pack_statistics(self, statistics: Counts) -> Message:
        sender = Statistics(node=self._identity.node, role=self._identity.role)
        return pack(sender, [text_tensor(statistics)])

    def _answer(self, request: Request, body: Body) -> None:
        """Answer a request, at once or later; a `ProtocolError` refuses it as malformed."""
        request.fail("unexpected", f"{self._identity.node} does not answer {request.message.type}")

    def statistics(self) -> Counts:
        """Return the traffic of each link, and facts of the process such as its peak memory."""
        return self._with_common(Counts())

    def _with_common(self, counts: _Counts) -> _Counts:
        """Fill in the statistics that every role has."""
        process = msgspec.structs.asdict(self.process_memory())
        return msgspec.structs.replace(
            counts, node=self._identity.node, traffic=self._traffic.rows(), **process
        )


def reply_when_room(request: Request, nbytes: int, make: Callable[[], Message]) -> None:
    """Answer a request with about `nbytes` bytes, made and sent as soon as the budgets have room."""
    request.charge(nbytes, lambda: reply_or_fail(request, make()))


def reply_or_fail(request: Request, message: Message, *, lent: bool = False) -> None:
    """Answer a request, or refuse it if the answer cannot be sent, for example because it is too large.

    Args:
        lent: See `Request.reply`.
    """
    try:
        request.reply(message, lent=lent)
    except LocalProtocolError as error:
        request.fail("too-large", f"the answer to {request.message.type} cannot travel: {error}")
