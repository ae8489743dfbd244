"""The controller role: one node of the group that agrees on the cluster map; while it leads, it serves the
map.

Theory of operation
-------------------
The leader answers requests about the map; the other controllers name the leader. A change becomes a log
command, and its answer waits until the command is applied here; by then a majority has the command on disk
(`consensus_node`). A read waits for a proof that no other controller leads (`ConsensusNode.read`). The
history of the map answers watches, each version once. A new leader answers watches only once it has all
versions that earlier leaders sent. A controller behind a watcher's version makes the watcher wait. So
versions never go back for a watcher.

Members keep a link to the leader. The leader suspects an incarnation whose last link breaks, or which has no
link to a new leader (`failure_detector`). At a deadline the leader proposes the loss, like any other change.

A single controller is a group of one, and runs the same code. Without a folder a controller may learn its
first map from servers of an earlier controller before it leads (`learned_map`).
"""

import asyncio
import logging
from collections.abc import Coroutine, Hashable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from adam_async.controller.consensus_node import Answer, ConsensusNode, ConsensusSetup
from adam_async.controller.failure_detector import FailureDetector, Incarnation
from adam_async.controller.learned_map import LearnedMap, StoresReport, most_version
from adam_async.controller.peer_controllers import read_agree
from adam_async.controller.permissions import FORBIDDEN, Attempt, PermissionTable, Permits, Refusal
from adam_async.controller.records import MAX_DEPTH, nests_too_deep, value_too_large
from adam_async.controller.replicated_state import (
    DONE,
    MAP_DEPTH,
    MAX_SESSIONS,
    Lost,
    Open,
    Outcome,
    ReplicatedState,
    Set,
)
from adam_async.controller.role import Role, RoleSettings, reply_when_room
from adam_async.controller.status_log import report_changes, report_learned
from adam_async.messages import (
    LEARNING,
    NOT_LEADER,
    SESSION_OVER,
    UNKNOWN,
    Body,
    CompareAndSet,
    GetMap,
    Introduce,
    MapChanges,
    MapState,
    OpenSession,
    ReportStores,
    SessionOpened,
    WatchMap,
    pack,
    read_text_tensor,
    text_tensor,
    unpack,
)
from adam_async.messages.body import MOST_MAP_BYTES, MOST_MAP_TEXT_BYTES, MOST_VALUE_BYTES
from adam_async.run.cluster_map import ClusterMap
from adam_async.run.counts import ControllerCounts
from adam_async.runtime import fault_points
from adam_async.runtime.channel import wait_set
from adam_async.runtime.clock import Clock, Timer
from transport import Identity, Link, Message, ProtocolError, Request, TransportError

logger = logging.getLogger(__name__)

FIND_S = 5.0
"""Time beyond `grace_s` that a node has to find a new leader, in seconds."""

STOOD_STILL_S = 1.0
"""Lateness of a timer that shows a stall of this process, in seconds."""

MOST_STALLS = 8
"""Maximum number of stalls for which a controller again waits for servers' reports: checks of false reports
stall it too, and must not keep it from its work."""

MOST_CHANGES_BYTES = MOST_MAP_BYTES // 2
"""Size of changes above which the controller sends the whole map instead, in bytes of JSON text."""

MOST_WAIT_S = 60.0
"""Maximum wait of a watch without changes, in seconds."""

WARN_EVERY_S = 10.0
"""Minimum interval in seconds between two warnings about one controller's invalid messages."""

MOST_WARNED = 64
"""Maximum number of controllers with a warning in `WARN_EVERY_S`, because a peer may use many names."""


@dataclass(slots=True)
class _Watch:
    """A watch that waits for changes."""

    after: int
    group: str
    until: float


class Controller(Role):
    """One controller, for the duration of its `async with`.

    Args:
        settings: The controller's place; `Waits.grace_s` is the time for a node to return after its link
            broke.
        setup: The controller's part in the group's consensus.
        peers: Node ids and addresses of all controllers in the group, including this one. Without addresses,
            and with `alone` false, `group.set_addresses` sets them later.
        alone: Whether the controller is a group of one if `peers` is empty.
        most_sessions: Maximum number of client sessions; the same throughout a group.
        permits: Permissions for the map's keys; by default a `PermissionTable`.
        learns: Whether a single controller without a file learns its first map from servers.
        wall: Returns the seconds since 1970, for the versions of a learned map and for the times of losses;
            these are unknown if it returns 0.

    Attributes:
        group: The controller's node of the consensus group.
        replicated_state: The controller's copy of the replicated state.

    Cancelling the block closes every link; members notice and dial again until their patience ends.
    """

    def __init__(
        self,
        settings: RoleSettings,
        setup: ConsensusSetup | None = None,
        *,
        peers: Mapping[str, str] = {},
        alone: bool = True,
        most_sessions: int = MAX_SESSIONS,
        permits: Permits | None = None,
        learns: bool = False,
        wall: Clock = lambda: 0.0,
    ) -> None:
        super().__init__(settings)
        setup = setup or ConsensusSetup()
        # A majority of several controllers has the map, and so has a file.
        is_alone = len(peers) <= 1 and alone and setup.file is None
        self._wall = wall
        self._learned: LearnedMap | None = None
        """Reports of servers; None except during the wait for them."""
        self._learned_more = asyncio.Event()
        self.replicated_state = ReplicatedState(most_sessions=most_sessions)
        self.group = ConsensusNode(
            setup,
            self._endpoint,
            state=self.replicated_state,
            on_answer=self._on_answer,
            on_led=self._on_led,
            on_applied=self._on_applied,
            first_map=self._learn if is_alone and learns else None,
        )
        self._file = setup.file
        if peers or alone:
            self.group.set_addresses(peers or {self._identity.node: self._bind})
        self._ready = False
        """Whether this controller leads and has applied all that earlier leaders acknowledged."""
        self._shown = self.replicated_state.map
        self._watches: dict[Request, _Watch] = {}
        self._permits = permits or PermissionTable().refusal
        self._links: dict[Incarnation, set[Link]] = {}
        self._warn_again: dict[str, float] = {}
        """Earliest time of the next warning about each controller that sent an invalid message."""
        self._leaving: set[Link] = set()
        """Links that are being closed after a forbidden attempt."""
        self._failure_detector = FailureDetector(grace_s=self._waits.grace_s, find_s=FIND_S)
        self._timer = Timer(self._next_deadline, self._due)

    def _tasks(self) -> Mapping[str, Coroutine[Any, Any, None]]:
        return {"timer": self._timer.run(), "group": self.group.run()}

    async def _goodbye(self) -> None:
        await self.group.resign()

    async def joined(self) -> None:
        """Wait until the controller has read its file and has an identity; the others need not run."""
        if self._file is not None:
            await self._file.begun.wait()
            if self.group.introduce() is None:
                # The group's task has refused the file, for example another controller's; its error ends this
                # block. There is no other cause, because the identity follows the read without a wait.
                await asyncio.Event().wait()

    def unready(self) -> str:
        """Return the reason why the controllers do not serve; empty if a leader is known."""
        return "" if self.group.leader else f"{self._identity.node} knows no leader of the controllers"

    @property
    def map(self) -> ClusterMap:
        """This controller's copy of the map; a follower's may be behind the leader's."""
        return self.replicated_state.map

    # --- the first map -----------------------------------------------------------------------

    async def _learn(self) -> ClusterMap:
        """Wait for the reports of an earlier controller's servers, and return the first map."""
        longest_s = self._waits.grace_s + FIND_S
        learned = LearnedMap(self._loop.time(), longest_s, most_version(self._wall()))
        self._learned = learned
        stalls = 0
        while (left_s := learned.ends_at - self._loop.time()) > 0:
            self._learned_more.clear()
            await wait_set(self._learned_more, left_s)
            if self._loop.time() > learned.ends_at + STOOD_STILL_S and stalls < MOST_STALLS:
                stalls += 1
                # Servers' dials during a stall of this process may still be queued.
                learned.begun_at = self._loop.time()
        self._learned = None
        first = learned.first_map()
        report_learned(self._identity.node, first, [node for node, _ in learned.missing()])
        return first

    def _refuse_early(self, request: Request, body: Body) -> None:
        """Refuse a request while this controller does not lead; ask a server for its unreported stores."""
        peer, learned = request.link.peer, self._learned
        if learned is not None and isinstance(body, WatchMap) and body.group:
            learned.is_restart = True
            self._learned_more.set()
            if peer.role == "ps" and (peer.node, peer.incarnation) not in learned.standings:
                request.fail(LEARNING, f"{self._identity.node} learns the stores from their servers")
                return
        request.fail(NOT_LEADER, self.group.leader)

    def _take_report(self, request: Request) -> None:
        """Take the stores of a server into the first map of this controller."""
        peer, learned = request.link.peer, self._learned
        if learned is None:  # the wait is over, or a majority of controllers or a file has the map
            request.fail(NOT_LEADER, self.group.leader)
            return
        text = request.message.tensors[0].tobytes() if request.message.tensors else b""
        if len(text) > MOST_MAP_TEXT_BYTES or nests_too_deep(text, MAP_DEPTH):
            fault = f"its text has {len(text)} bytes, or nests over {MAP_DEPTH} deep"
        else:
            report: StoresReport = read_text_tensor(request.message, StoresReport, MOST_MAP_TEXT_BYTES)
            fault = learned.report((peer.node, peer.incarnation), report)
        if fault:
            logger.warning("%s refused the stores of %s: %s", self._identity.node, peer.node, fault)
            request.fail("invalid", f"the report of {peer.node}: {fault}")
            return
        self._learned_more.set()
        request.fail(NOT_LEADER, "")

    # --- links -------------------------------------------------------------------------------

    async def _on_link(self, link: Link) -> None:
        if link.peer.role == "controller":
            await self._on_controller(link)
            return
        node = (link.peer.role, link.peer.node, link.peer.incarnation)
        links = self._links.setdefault(node, set())
        links.add(link)
        self._failure_detector.link_back(node)
        await super()._on_link(link)
        links.discard(link)
        if not links:  # a node may have several: its membership's, and one for statistics
            del self._links[node]
            if self._ready:
                self._failure_detector.link_lost(node, now=self._loop.time())
                self._timer.rearm()
        for request in [r for r in self._watches if r.link is link]:
            del self._watches[request]

    async def _on_controller(self, link: Link) -> None:
        self._traffic.watch(link)
        link.serve(self._on_request)
        try:
            while True:
                message = await link.receive()
                self.group.receive(link.peer.node, *read_agree(message))
        except ProtocolError as error:
            # A peer that breaks a rule loses its link; this controller stays unchanged.
            self._warn_of(link.peer.node, error)
        except TransportError:
            pass  # the link has ended, and the other controller dials again
        finally:
            link.abort()
            self._traffic.gone(link)

    def _warn_of(self, name: str, error: ProtocolError) -> None:
        now = self._loop.time()
        if now < self._warn_again.get(name, now):
            return
        self._warn_again = {other: at for other, at in self._warn_again.items() if at > now}
        if len(self._warn_again) >= MOST_WARNED:
            return
        self._warn_again[name] = now + WARN_EVERY_S
        logger.warning(
            "%s: %s sent an invalid message: %s; its link is closed", self._identity.node, name, error
        )

    def _answer(self, request: Request, body: Body) -> None:
        match body:
            case Introduce():
                self._introduce(request, body)
            case ReportStores():
                self._take_report(request)
            case GetMap() | OpenSession() | CompareAndSet() | WatchMap() if not self.group.leads:
                self._refuse_early(request, body)
            case GetMap():
                self.group.read(request)
            case OpenSession():
                self.group.propose(request, Open(role=request.link.peer.role))
            case CompareAndSet():
                self._set(request, body)
            case WatchMap():
                self._watch(request, body)
            case _:
                super()._answer(request, body)

    def _introduce(self, request: Request, body: Introduce) -> None:
        self.group.introduced(request.link.peer.node, body.identity)
        answer = self.group.introduce()
        if answer is None:
            request.fail("starting", f"{self._identity.node} has no identity yet: ask again")
        else:
            request.reply(pack(answer))

    def _set(self, request: Request, body: CompareAndSet) -> None:
        if fault_points.ON and fault_points.fires("controller.busy"):
            request.fail("busy", "a simulated controller has too much to do")
            return
        if self._is_taken(body.key, request.link.peer):
            text = f"{body.key} is another process that is connected: give this one an id of its own"
            request.fail("taken", text)
            return
        if body.group not in ("", self.replicated_state.group):
            text = f"group {body.group} is not this one, {self.replicated_state.group}"
            request.fail(SESSION_OVER, text)
            return
        size = sum(tensor.nbytes for tensor in request.message.tensors)
        if size > MOST_VALUE_BYTES:  # decoding the request would block this controller
            request.fail("invalid", value_too_large(body.key, size))
            return
        record = read_text_tensor(request.message, dict[str, Any], MOST_VALUE_BYTES)
        value = request.message.tensors[0].tobytes()
        if nests_too_deep(value):
            request.fail("invalid", f"{body.key} nests over {MAX_DEPTH} deep")
            return
        attempt = Attempt(peer=request.link.peer, key=body.key, value=record, expected=body.expected)
        refusal = self._permits(attempt, self.map)
        if refusal is not None:
            self._refuse(request, refusal)
            return
        self.group.propose(
            request,
            Set(session=body.session, number=body.number, key=body.key, expected=body.expected, value=value),
        )

    def _refuse(self, request: Request, refusal: Refusal) -> None:
        """Refuse an attempt; if the attempt is forbidden, also close its link."""
        request.fail(refusal.code, refusal.text)
        link = request.link
        if refusal.code == FORBIDDEN and link not in self._leaving:
            self._leaving.add(link)
            logger.warning("%s: %s; its link is closed", self._identity.node, refusal.text)
            closing = self._spawn(f"closes {link.peer.node}", link.aclose())
            closing.add_done_callback(lambda _: self._leaving.discard(link))

    def _is_taken(self, key: str, peer: Identity) -> bool:
        """Return whether another connected process has the peer's node id."""
        node = self.map.nodes.get(peer.node)
        if key != f"nodes/{peer.node}" or node is None or not node.live:
            return False
        # The rules of the map decide between nodes of different roles.
        is_other = node.role == peer.role and node.incarnation != peer.incarnation
        return is_other and (node.role, peer.node, node.incarnation) in self._links

    # --- answers -----------------------------------------------------------------------------

    def _on_answer(self, tag: Hashable, answer: Answer) -> None:
        if isinstance(tag, Request):
            self._reply(tag, answer)
        # A read at the beginning of a term: its answer shows that all that earlier leaders sent is applied.
        elif tag == "first" and not answer.refused and self.group.leads:
            self._ready = True
            self._failure_detector.led(self.map, self._links, now=self._loop.time())
            self._timer.rearm()
            self._answer_watches()

    def _reply(self, request: Request, answer: Answer) -> None:
        outcome = answer.outcome
        if answer.refused and self.group.leads:
            request.fail("busy", answer.refused)
        elif answer.refused:
            request.fail(NOT_LEADER, self.group.leader)
        elif answer.unknown:
            request.fail(UNKNOWN, "leadership was lost while the request was under way")
        elif outcome.problem:
            request.fail(outcome.problem, outcome.text)
        elif request.message.type == GetMap.__name__:
            reply_when_room(request, self.replicated_state.size.most_text, self._whole)
        elif request.message.type == OpenSession.__name__:
            request.reply(pack(SessionOpened(session=outcome.at)))
        else:
            body = unpack(request.message, CompareAndSet)
            self._reply_changes(request, body.after, body.group, outcome)

    def _whole(self, outcome: Outcome = DONE) -> Message:
        state = MapState(
            version=self.map.version,
            group=self.replicated_state.group,
            done=outcome.done,
            at=outcome.at,
            controllers=self.group.addresses,
        )
        return pack(state, [text_tensor(self.map)])

    def _reply_changes(self, request: Request, after: int, group: str, outcome: Outcome = DONE) -> None:
        """Answer with the changes since a version, or with the whole map, and reserve the answer's size."""
        changes = self.replicated_state.since(after, group)
        size = MOST_CHANGES_BYTES + 1 if changes is None else text_tensor(changes).nbytes
        if size > MOST_CHANGES_BYTES:
            size = self.replicated_state.size.most_text
        # The answer makes the text again later, so that it needs no memory while it waits for room.
        reply_when_room(request, size, partial(self._changes, after, group, outcome))

    def _changes(self, after: int, group: str, outcome: Outcome = DONE) -> Message:
        """Return the changes since a version, or the whole map."""
        changes = self.replicated_state.since(after, group)
        if fault_points.ON and after >= 0 and fault_points.fires("controller.history.short"):
            changes = None
        if fault_points.ON and changes is None and after >= 0:
            fault_points.sometimes("a watcher was sent the whole map again")
        if changes is None:
            return self._whole(outcome)
        text = text_tensor(changes)
        if text.nbytes > MOST_CHANGES_BYTES:
            return self._whole(outcome)
        body = MapChanges(
            version=after + len(changes), group=self.replicated_state.group, done=outcome.done, at=outcome.at
        )
        return pack(body, [text])

    # --- watches -----------------------------------------------------------------------------

    def _watch(self, request: Request, body: WatchMap) -> None:
        until = self._loop.time() + min(body.wait_s, MOST_WAIT_S)
        watch = _Watch(body.after, body.group, until)
        if self._has_changes(watch):
            self._reply_changes(request, watch.after, watch.group)
        else:
            self._watches[request] = watch
            self._timer.rearm()

    def _has_changes(self, watch: _Watch) -> bool:
        return self._ready and (watch.group != self.replicated_state.group or watch.after < self.map.version)

    def _answer_watches(self) -> None:
        for request, watch in list(self._watches.items()):
            if self._has_changes(watch):
                del self._watches[request]
                self._reply_changes(request, watch.after, watch.group)

    def _on_led(self) -> None:
        if self.group.leads:
            self.group.read("first")
            return
        self._ready = False
        self._failure_detector.resigned()
        watches, self._watches = self._watches, {}
        for request in watches:
            request.fail(NOT_LEADER, self.group.leader)

    def _on_applied(self) -> None:
        before, self._shown = self._shown, self.map
        if self._shown is not before:
            if self.group.leads:
                report_changes(before, self._shown)
            self._answer_watches()

    # --- time --------------------------------------------------------------------------------

    def _next_deadline(self) -> float | None:
        suspected = self._failure_detector.next_deadline()
        deadlines = [watch.until for watch in self._watches.values()]
        return min((*deadlines, suspected) if suspected is not None else deadlines, default=None)

    def _due(self) -> None:
        now, deadline = self._loop.time(), self._next_deadline()
        if deadline is not None and now > deadline + STOOD_STILL_S:
            self._failure_detector.stood_still(now=now)
        for request, watch in list(self._watches.items()):
            if watch.until <= now:
                del self._watches[request]
                if not self._ready:
                    request.fail(NOT_LEADER, "")
                    continue
                same = MapChanges(version=watch.after, group=watch.group)
                request.reply(pack(same, [text_tensor([])]))
        for incarnation in self._failure_detector.due(self.map, now=now):
            # The new deadline repeats a failed proposal.
            self._failure_detector.link_lost(incarnation, now=now)
            _, name, number = incarnation
            self.group.propose(("lost", name), Lost(name, number, self._wall()))

    def led_map(self) -> ClusterMap | None:
        """Return the map, if this controller leads."""
        return self.map if self.group.leads else None

    def statistics(self) -> ControllerCounts:
        """Return the map's version, the group, the traffic of each link, and facts of the process."""
        counts = self.group.statistics()
        counts.version = self.map.version
        return self._with_common(counts)

    def __repr__(self) -> str:
        return f"<Controller {self._identity.node} at {self.address} map v{self.map.version}>"
