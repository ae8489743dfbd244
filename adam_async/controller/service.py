"""The controller role: serves the cluster map over links, and turns broken links into suspicion."""

import logging
from collections.abc import Coroutine, Mapping
from typing import Any

from adam_async.cluster_map import ClusterMap
from adam_async.config import Waits
from adam_async.controller.state import Changed, Command, CompareAndSet, ControllerState, Invalid
from adam_async.messages import (
    Body,
    GetMap,
    MapState,
    WatchMap,
    pack,
    read_text_tensor,
    text_tensor,
)
from adam_async.messages import (
    CompareAndSet as CompareAndSetMessage,
)
from adam_async.model.layer import Layer
from adam_async.model.layers import BUILTIN_LAYERS
from adam_async.role import Role
from adam_async.timer import Timer
from transport import Identity, Link, Message, Network, Request

logger = logging.getLogger(__name__)


class Controller(Role):
    """One controller, from `async with` to its end.

    Args:
        network: Where it listens.
        address: What it binds, such as ``tcp://127.0.0.1:0`` or ``local://controller``.
        identity: Its role, node id and incarnation.
        layers: Kinds of layers that models may use.
        waits: Deadlines; `grace_s` is how long a broken link may take to come back.

    Cancelling the block closes every link; members notice and dial again until their patience ends.
    """

    def __init__(
        self,
        *,
        network: Network,
        address: str,
        identity: Identity,
        waits: Waits,
        layers: Mapping[str, type[Layer]] = BUILTIN_LAYERS,
    ) -> None:
        super().__init__(network=network, address=address, identity=identity, waits=waits)
        self.state = ControllerState(grace_s=waits.grace_s, layers=layers)
        self._watchers: dict[Request, None] = {}
        self._links: dict[tuple[str, int], set[Link]] = {}
        self._timer = Timer(self.state.next_deadline, self._due)

    def _tasks(self) -> Mapping[str, Coroutine[Any, Any, None]]:
        return {"timer": self._timer.run()}

    @property
    def map(self) -> ClusterMap:
        """The map as it is now."""
        return self.state.map

    # --- links -------------------------------------------------------------------------------

    async def _on_link(self, link: Link) -> None:
        life = (link.peer.node, link.peer.incarnation)
        links = self._links.setdefault(life, set())
        links.add(link)
        self.state.link_back(*life)
        await super()._on_link(link)
        links.discard(link)
        if not links:  # a node may have several: its seat, and one to ask for statistics
            del self._links[life]
            self.state.link_lost(*life, now=self._loop.time())
            self._timer.rearm()
        for request in [r for r in self._watchers if r.link is link]:
            del self._watchers[request]

    def _answer(self, request: Request, body: Body) -> None:
        match body:
            case GetMap():
                request.reply(self._map_state())
            case WatchMap() if self.map.version > body.after:
                request.reply(self._map_state())
            case WatchMap():
                self._watchers[request] = None
            case CompareAndSetMessage():
                self._set(request, body, read_text_tensor(request.message, dict[str, Any]))
            case _:
                super()._answer(request, body)

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
        for command in self.state.due(now=self._loop.time()):
            self._apply(command)

    def _map_state(self, *, done: bool = True) -> Message:
        return pack(MapState(version=self.map.version, done=done), [text_tensor(self.map)])

    def statistics(self) -> dict[str, Any]:
        """Version of the map, the traffic of each link, and the process."""
        return {"version": self.map.version, **super().statistics()}

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
