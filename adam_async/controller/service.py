"""The controller role: serves the cluster map over links, and turns broken links into suspicion."""

import asyncio
import logging
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Any, Self

from adam_async.cluster_map import ClusterMap
from adam_async.config import Waits
from adam_async.controller.state import Changed, Command, CompareAndSet, ControllerState, Invalid
from adam_async.machine import process_memory
from adam_async.messages import (
    CompareAndSet as CompareAndSetMessage,
)
from adam_async.messages import (
    GetMap,
    GetStatistics,
    MapState,
    Statistics,
    WatchMap,
    pack,
    read_text_tensor,
    text_tensor,
    unpack_any,
)
from adam_async.timer import Timer
from adam_async.traffic import Traffic
from transport import Identity, Link, Message, Network, ProtocolError, Request

logger = logging.getLogger(__name__)


class Controller:
    """One controller, from `async with` to its end.

    Args:
        network: Where it listens.
        address: What it binds, such as ``tcp://127.0.0.1:0`` or ``local://controller``.
        identity: Its role, node id and incarnation.
        waits: Deadlines; `grace_s` is how long a broken link may take to come back.

    Cancelling the block closes every link; members notice and dial again until their patience ends.
    """

    def __init__(self, *, network: Network, address: str, identity: Identity, waits: Waits) -> None:
        self._network = network
        self._bind = address
        self._identity = identity
        self.state = ControllerState(grace_s=waits.grace_s)
        self._watchers: dict[Request, None] = {}
        self._links: dict[tuple[str, int], set[Link]] = {}
        self._traffic = Traffic(identity.node)
        self._stack = AsyncExitStack()
        self.address = ""

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            group = await stack.enter_async_context(asyncio.TaskGroup())
            self._timer = Timer(self.state.next_deadline, self._due)
            timer = group.create_task(self._timer.run(), name=f"{self._identity.node}/timer")
            stack.callback(timer.cancel)
            listener = await stack.enter_async_context(
                self._network.listen(self._bind, self._identity, self._on_link)
            )
            self.address = listener.address
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        return await self._stack.__aexit__(kind, error, trace)

    @property
    def map(self) -> ClusterMap:
        """The map as it is now."""
        return self.state.map

    # --- links -------------------------------------------------------------------------------

    async def _on_link(self, link: Link) -> None:
        life = (link.peer.node, link.peer.incarnation)
        links = self._links.setdefault(life, set())
        links.add(link)
        self._traffic.watch(link)
        self.state.link_back(*life)
        link.serve(self._on_request)
        try:
            await link.wait_closed()
        finally:
            self._traffic.gone(link)
        links.discard(link)
        if not links:  # a node may have several: its seat, and one to ask for statistics
            del self._links[life]
            self.state.link_lost(*life, now=asyncio.get_running_loop().time())
            self._timer.rearm()
        for request in [r for r in self._watchers if r.link is link]:
            del self._watchers[request]

    def _on_request(self, request: Request) -> None:
        try:
            asked = unpack_any(request.message)
            match asked:
                case GetMap():
                    request.reply(self._map_state())
                case WatchMap() if self.map.version > asked.after:
                    request.reply(self._map_state())
                case WatchMap():
                    self._watchers[request] = None
                case CompareAndSetMessage():
                    value = read_text_tensor(request.message, dict[str, Any])
                    self._set(request, asked, value)
                case GetStatistics():
                    body = Statistics(node=self._identity.node, role="controller")
                    request.reply(pack(body, [text_tensor(self.statistics())]))
                case _:
                    request.fail("unexpected", f"a controller does not answer {request.message.type}")
        except ProtocolError as error:
            request.fail("malformed", str(error))

    def _set(self, request: Request, body: CompareAndSetMessage, value: dict[str, Any]) -> None:
        if self._is_taken(body.key, request.link.peer):
            text = f"{body.key} is another process that is connected: give this one an id of its own"
            request.fail("taken", text)
            return
        events = self._apply(CompareAndSet(key=body.key, expected=body.expected, value=value))
        for event in events:
            if isinstance(event, Invalid):
                request.fail("invalid", event.reason)
                return
        request.reply(self._map_state(done=any(isinstance(event, Changed) for event in events)))

    def _is_taken(self, key: str, peer: Identity) -> bool:
        """Whether a node asks for the seat of one that sits there and is heard."""
        node = self.map.nodes.get(key.removeprefix("nodes/"))
        if node is None or not node.live or node.incarnation == peer.incarnation:
            return False
        return key == f"nodes/{peer.node}" and (peer.node, node.incarnation) in self._links

    def _apply(self, command: Command) -> list[Any]:
        before = self.map
        events = self.state.apply(command)
        if self.map is not before:
            self._log(before, self.map)
            watchers, self._watchers = self._watchers, {}
            for watcher in watchers:
                watcher.reply(self._map_state())
        return events

    def _due(self) -> None:
        for command in self.state.due(now=asyncio.get_running_loop().time()):
            self._apply(command)

    def _map_state(self, *, done: bool = True) -> Message:
        return pack(MapState(version=self.map.version, done=done), [text_tensor(self.map)])

    def statistics(self) -> dict[str, Any]:
        """Version of the map, the traffic of each link, and the process."""
        return {
            "version": self.map.version,
            "traffic": self._traffic.rows(),
            "process": process_memory(),
        }

    @staticmethod
    def _log(before: ClusterMap, after: ClusterMap) -> None:
        for name, node in after.nodes.items():
            was = before.nodes.get(name)
            if was is None or was.live != node.live or was.incarnation != node.incarnation:
                logger.info("%s %s", name, "joined" if node.live else "is lost")
        if after.run is not None and (before.run is None or before.run.phase != after.run.phase):
            logger.info("run %s is %s %s", after.run.id, after.run.phase, after.run.reason)

    def __repr__(self) -> str:
        return f"<Controller {self._identity.node} at {self.address} map v{self.map.version}>"
