"""One controller's node of the consensus group: the shell around its core.

Theory of operation
-------------------
The core (`consensus.core`) decides the effects, and this shell carries them out. `_take` handles the events
one after the other, including events that an effect causes at once. Records wait in `_unwritten` while the
disk is busy; one sync then writes all of them (group commit). Without a file no record survives the process,
and records count as durable at once. A restarted controller then has a new identity, and the group adds it
again. `peer_controllers` has the links to the others and their identities, `status_log` the log lines about
the group.

A timer that fires late shows that this process did not run. Messages of the leader may then wait unread in
the sockets. If the whole host stalled, other controllers on it sent nothing either. So the silence shows no
failure: the core's time leaves out the stall (`CoreClock`). A pause follows, in which the shell reads queued
messages. A process that is late for the same deadline again is only slow, and continues. A leader makes no
pause, because the others would take its silence for a failure.
"""

import asyncio
import logging
import math
from collections import deque
from collections.abc import Awaitable, Callable, Hashable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass

from adam_async.controller.bootstrap import group_name, name_of
from adam_async.controller.consensus import (
    Apply,
    Change,
    Core,
    Done,
    Effect,
    Event,
    Led,
    Members,
    Message,
    Persist,
    Persisted,
    Propose,
    Read,
    ReadReady,
    Received,
    Refused,
    Restore,
    Role,
    Saved,
    Send,
    Settings,
    Snapshotted,
    Step,
    Tick,
    Transfer,
    Unknown,
    Violation,
    bootstrapped,
    identity,
)
from adam_async.controller.consensus.messages import Snapshot, TakeOver
from adam_async.controller.consensus.records import WHAT_TO_DO, Ballot, Born, DamagedLog, LogFileRecord
from adam_async.controller.log_file import LogFile
from adam_async.controller.peer_controllers import PeerControllers
from adam_async.controller.replicated_state import (
    CONTENTS,
    DONE,
    Command,
    Outcome,
    ReplicatedState,
    command_bytes,
    first_state,
    log_problem,
)
from adam_async.controller.status_log import StatusLog
from adam_async.errors import ConfigError
from adam_async.messages import Introduced
from adam_async.messages.body import MOST_MAP_BYTES, MOST_VALUE_BYTES
from adam_async.run.cluster_map import ClusterMap
from adam_async.run.counts import ControllerCounts
from adam_async.runtime import fault_points
from adam_async.runtime.channel import Endpoint, StackedTaskGroup
from adam_async.runtime.clock import Timer, system_entropy
from transport import RemoteProtocolError

LATE_S = 0.1
"""Lateness of a timer that shows a stall of this process, in seconds."""

PAUSE_S = 0.3
"""Pause of the core's clock after a stall, in seconds, in which this process reads queued messages."""


class CoreClock:
    """The clock of one core.

    Args:
        clock: Clock of the loop, in seconds.

    Attributes:
        latest_s: Latest time given to the core.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self.latest_s = -math.inf
        self._clock = clock
        self._stalled_s = 0.0
        """Sum of all stalls, in seconds: the core's delay behind the loop."""
        self._paused_for: float | None = None
        """Deadline of the last pause, in the core's time."""

    def now(self) -> float:
        """Return the core's time, which never goes back, even by rounding at a reached deadline."""
        return max(self._clock() - self._stalled_s, self.latest_s)

    def by_the_loop(self, core_s: float) -> float:
        """Return the loop's time at a time of the core."""
        return core_s + self._stalled_s

    def event_time(self, core: Core) -> float:
        """Return the core's time of a new event, without the time of a stall."""
        now = self.now()
        if now - core.next_deadline() > LATE_S:
            self.begins_pause(core)
            now = self.now()
        self.latest_s = now
        return now

    def begins_pause(self, core: Core) -> bool:
        """Leave a stall out of the core's time; return whether a pause before the core's deadline begins."""
        now, deadline = self.now(), core.next_deadline()
        if now - deadline <= LATE_S or self._paused_for == deadline:
            return False
        if core.role is Role.LEADER:
            self._stalled_s += now - max(deadline, self.latest_s)
            return False
        self._paused_for = deadline
        self._stalled_s += now - max(deadline - PAUSE_S, self.latest_s)
        return True

    def reached(self, deadline: float) -> None:
        """Note a reached deadline that begins no pause; leave a lateness above `LATE_S` out of the time."""
        late_s = self.now() - deadline
        if late_s > LATE_S:
            self._stalled_s += late_s
        self.latest_s = max(self.latest_s, deadline)


logger = logging.getLogger(__name__)

SETTINGS = Settings(
    heartbeat_s=0.1, election_s=0.8, command_bytes=2 * MOST_VALUE_BYTES, state_bytes=4 * MOST_MAP_BYTES
)
"""Consensus settings of all controllers. A follower starts an election after 0.8 to 1.6 s without a message
of its leader. A command holds a record of the map, names and numbers; a state holds the map and up to 16 MiB
of sessions."""

ADMIT_S = 0.25
"""Interval of a leader's checks for controllers to add to the group, in seconds."""

RESIGN_S = 1.0
"""Maximum time to hand over leadership before this controller ends, in seconds."""

SNAPSHOT_ENTRIES = 1000
"""Number of applied entries after which a node replaces them by its own snapshot."""

SNAPSHOT_BYTES = 4 << 20
"""Total size in bytes of applied commands after which a node replaces them by its own snapshot."""

SLOW_S = 0.05
"""Delay in seconds before a simulated controller writes."""


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to a request."""

    outcome: Outcome = DONE
    refused: str = ""
    """Why the request was refused, so that it never has an effect; empty without a refusal."""
    unknown: bool = False
    """Whether the outcome is unknown: the request may have taken effect, or may still take effect."""


Observe = Callable[[Core, ReplicatedState, Event | None, Sequence[Effect]], None]
"""Observer of a node's events and effects, for simulations; the first call has no event."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ConsensusSetup:
    """Resources and rules of one node in the group.

    Attributes:
        entropy: Random bytes, for the identity in the group and the election time-outs.
        file: File of the durable records; without a file, the group's state is lost once no majority runs.
        settings: Times and sizes, the same for all of the group.
        snapshot_entries: Number of applied entries after which a snapshot replaces them.
        observe: Called after each event and all its effects.
    """

    entropy: Callable[[int], bytes] = system_entropy
    file: LogFile | None = None
    settings: Settings = SETTINGS
    snapshot_entries: int = SNAPSHOT_ENTRIES
    observe: Observe | None = None


class ConsensusNode:
    """One node of the group that agrees on the commands of a replicated state.

    Args:
        setup: Resources and rules of the node.
        endpoint: This controller; its node is its name in the group.
        state: State that applies the agreed commands.
        on_answer: Called with the tag of a request, and the answer.
        on_led: Called after each change of the known leader.
        on_applied: Called after commands were applied, or a whole state was restored.
        first_map: Returns the map with which a group begins; None: an empty map.

    Run `run` as a task of the owner's group.
    """

    def __init__(
        self,
        setup: ConsensusSetup,
        endpoint: Endpoint,
        *,
        state: ReplicatedState,
        on_answer: Callable[[Hashable, Answer], None],
        on_led: Callable[[], None],
        on_applied: Callable[[], None],
        first_map: Callable[[], Awaitable[ClusterMap]] | None = None,
    ) -> None:
        self._first_map = first_map
        self._identity = endpoint.identity
        self._state = state
        self._entropy = setup.entropy
        self._file = setup.file
        self._on_answer = on_answer
        self._on_led = on_led
        self._on_applied = on_applied
        self._settings = setup.settings
        self._snapshot_entries = setup.snapshot_entries
        self._observe = setup.observe
        self._peers = PeerControllers(endpoint, is_settled=self._is_counted)
        self._has_addresses = asyncio.Event()
        self._core: Core | None = None
        self._events: deque[Event] = deque()
        self._taking = False
        self._unwritten: list[Persist] = []
        self._writing = asyncio.Event()
        self._outcomes: dict[int, Outcome] = {}
        self._entries = self._entry_bytes = 0
        """Number and bytes of the entries applied since the last snapshot."""
        self._resigned = asyncio.Event()
        self._leading = asyncio.Event()
        self._clock: CoreClock  # made by `run`
        self._status_log: StatusLog  # made with the core
        self._timer = Timer(self._next_deadline, self._due)

    # --- requests of the owner ---------------------------------------------------------------

    def set_addresses(self, addresses: Mapping[str, str]) -> None:
        """Set names and addresses of all controllers, including this one; `run` waits for them.

        Raises:
            ValueError: This controller is not among them.
        """
        self._peers.set_addresses(addresses)
        self._has_addresses.set()

    @property
    def leads(self) -> bool:
        """Whether this controller leads; a newer leader may exist whose messages have not arrived."""
        return self._core is not None and self._core.role is Role.LEADER

    @property
    def term(self) -> int:
        """Term of this controller; grows with each election."""
        return self._core.term if self._core is not None else 0

    @property
    def leader(self) -> str:
        """Address of the leader; empty if unknown."""
        leader = self._core.leader if self._core is not None else None
        return self._peers.address(leader) if leader is not None else ""

    @property
    def addresses(self) -> tuple[str, ...]:
        """Addresses of all controllers sorted by name; empty for a single controller."""
        return self._peers.addresses

    @property
    def is_cut_off(self) -> bool:
        """Whether the known addresses lack a majority of the group."""
        members = self._core.members if self._core is not None else Members()
        unknown = self._unknown()
        return bool(unknown) and len(members.voters) - len(unknown) < members.quorum

    def propose(self, tag: Hashable, command: Command) -> None:
        """Propose a command; `on_answer` gets one answer."""
        self._ask(Propose(tag, command_bytes(command)), tag)

    def read(self, tag: Hashable) -> None:
        """Call `on_answer` once the state here has all changes acknowledged before now."""
        self._ask(Read(tag), tag)

    def _ask(self, question: Propose | Read, tag: Hashable) -> None:
        if self._core is None:
            self._on_answer(tag, Answer(refused="this controller belongs to no group yet"))
        else:
            self._take(question)

    def introduce(self) -> Introduced | None:
        """Return the identity of this controller; None before the identity is durable."""
        if not self._peers.me:
            return None
        members = self._core.members.all if self._core is not None else ()
        return Introduced(identity=self._peers.me, members=members)

    def introduced(self, name: str, identity: str) -> None:
        """Note the identity of another controller."""
        self._peers.introduced(name, identity)

    def receive(self, name: str, group: str, message: Message) -> None:
        """Take a message from another controller's core; `group` is its group, empty if it has none.

        Messages of a controller without a known address are ignored.

        Raises:
            RemoteProtocolError: No correct controller sends this, and the state is unchanged. Close the link
                of its sender.
        """
        if self._core is None or not self._peers.listens_to(name, message):
            return
        if group and self._state.group and group != self._state.group:
            self._status_log.of_another_group(name, theirs=group, ours=self._state.group)
            return
        try:
            self._take(Received(message))
        except Violation as error:
            raise RemoteProtocolError(error.rule, f"{name}: {error.detail}") from None
        self._status_log.heard(name)

    def statistics(self) -> ControllerCounts:
        """Return this controller's position in its group."""
        core = self._core
        if core is None:
            return ControllerCounts()
        return ControllerCounts(
            group=self._state.group,
            role=core.role.value,
            term=core.term,
            leader=name_of(core.leader) if core.leader else "",
            commit=core.commit,
            log=core.log.last_index - core.log.snapshot.index,
            voters=sorted(core.members.voters),
            learners=sorted(core.members.learners),
        )

    async def resign(self) -> None:
        """If this controller leads, hand leadership to a linked voter, if there is one, within `RESIGN_S`."""
        core = self._core
        if core is None or not self.leads:
            return
        now = self._clock.now()
        others = [node for node in core.members.voters if node != core.me]
        linked = self._peers.linked
        others = [
            node
            for node in others
            if name_of(node) in linked and core.silent_s(node, now=now) < self._settings.election_s
        ]
        if not others:
            return
        self._take(Transfer("resign", min(others, key=lambda node: core.silent_s(node, now=now))))
        try:
            async with asyncio.timeout(RESIGN_S):
                await self._resigned.wait()
        except TimeoutError:
            logger.info("%s ends as leader: no controller took over in %g s", self._identity.node, RESIGN_S)

    # --- run ---------------------------------------------------------------------------------

    async def run(self) -> None:
        """Take part until cancelled.

        Raises:
            ConfigError: The file belongs to another process or controller, or cannot be written.
            DamagedLog: The file is damaged, or of another release.
        """
        self._clock = CoreClock(asyncio.get_running_loop().time)
        await self._has_addresses.wait()
        async with AsyncExitStack() as stack:
            saved = await stack.enter_async_context(self._file.opened()) if self._file is not None else None
            if saved is None:
                saved = Saved(me=identity(self._identity.node, int.from_bytes(self._entropy(7), "little")))
                await self._write_down((Born(saved.me),))
            elif self._file is not None and name_of(saved.me) != self._identity.node:
                raise ConfigError(
                    f"{self._file.folder} is that of {name_of(saved.me)}, and this is {self._identity.node}: "
                    f"give the --id, and --peers, that {name_of(saved.me)} was started with, or another --dir"
                )
            problem = log_problem(saved)
            if problem and self._file is not None:
                raise DamagedLog(f"the log in {self._file.folder} cannot be used, {problem}; {WHAT_TO_DO}")
            group = await stack.enter_async_context(StackedTaskGroup())
            self._peers.begin(group, saved.me)
            await self._begin(saved)
            group.create_task(self._write(), name=f"{self._identity.node}/log")
            group.create_task(self._admit(), name=f"{self._identity.node}/members")
            await self._timer.run()

    async def _begin(self, saved: Saved) -> None:
        """Start the core; on empty disks the first controller by name begins the group."""
        blank = not saved.snapshot.index and not saved.entries
        if blank and not saved.term:
            voters = await self._peers.first_voters()
            if voters:
                first = await self._first_map() if self._first_map is not None else None
                saved = bootstrapped(saved.me, voters, first_state(group_name(voters), first))
                await self._write_down((Ballot(saved.term, saved.vote), saved.snapshot))
        if saved.snapshot.index:
            self._state.restore(saved.snapshot.state)
        core = self._core = Core(
            saved, self._settings, draw=self._draw, now=self._clock.now(), contents=CONTENTS
        )
        self._warn_of_unknown()
        self._status_log = StatusLog(
            self._identity.node,
            names=self._peers.names,
            linked=lambda: self._peers.linked,
            kept=not blank,
            now=self._clock.now(),
            is_cut_off=self.is_cut_off,
        )
        if self._observe is not None:
            self._observe(core, self._state, None, ())
        if core.members.voters == (saved.me,):
            # The only voter need not wait for an election time-out.
            self._take(Received(TakeOver(sender=saved.me, to=saved.me, term=core.term)))

    def _unknown(self) -> list[str]:
        """Return the names of voters without a known address."""
        voters = self._core.members.voters if self._core is not None else ()
        return sorted(name_of(voter) for voter in voters if not self._peers.address(voter))

    def _warn_of_unknown(self) -> None:
        """Warn if the known addresses lack a majority, because this controller then only waits."""
        if self.is_cut_off:
            logger.warning(
                "%s was one of a group with %s, whose addresses were not given: without a majority it waits; "
                "name them all in --peers",
                self._identity.node,
                ", ".join(self._unknown()),
            )

    async def _write_down(self, records: tuple[LogFileRecord, ...]) -> None:
        if self._file is not None:
            await self._file.append([records])

    # --- events and effects ------------------------------------------------------------------

    def _draw(self) -> float:
        return int.from_bytes(self._entropy(6), "little") / (1 << 48)

    def _next_deadline(self) -> float | None:
        return self._clock.by_the_loop(self._core.next_deadline()) if self._core is not None else None

    def _due(self) -> None:
        core = self._core
        assert core is not None
        if not self._clock.begins_pause(core):
            self._clock.reached(core.next_deadline())
            self._take(Tick())

    def _take(self, event: Event) -> None:
        """Handle an event after the earlier ones, and carry out its effects."""
        self._events.append(event)
        if self._taking:
            return  # the outer call handles it: an effect caused this event
        core = self._core
        assert core is not None
        now = self._clock.event_time(core)
        self._taking = True
        try:
            while self._events:
                event = self._events.popleft()
                effects = core.handle(event, now=now)
                for effect in effects:
                    self._carry_out(effect)
                if self._observe is not None:
                    self._observe(core, self._state, event, effects)
            self._status_log.update(core, now=now)
        finally:
            self._taking = False
        self._timer.rearm()

    def _carry_out(self, effect: Effect) -> None:
        match effect:
            case Send(message):
                self._peers.send(message, group=self._state.group)
            case Persist(number):
                if self._file is None:
                    self._events.append(Persisted(number))
                else:
                    self._unwritten.append(effect)
                    self._writing.set()
            case Apply():
                self._apply(effect)
            case Restore(snapshot):
                if fault_points.ON:
                    fault_points.sometimes("a controller was sent a whole state")
                self._state.restore(snapshot.state)
                self._entries = self._entry_bytes = 0
                self._on_applied()
            case Done("resign", _):
                self._resigned.set()
            case Done(tag, index):
                if not isinstance(tag, Step):
                    self._on_answer(tag, Answer(self._outcomes[index]))
            case ReadReady(tag):
                self._on_answer(tag, Answer())
            case Refused(tag, reason):
                if isinstance(tag, Step):
                    logger.debug("%s: %s %s later: %s", self._identity.node, tag.kind, tag.node, reason)
                elif tag != "resign":
                    self._on_answer(tag, Answer(refused=reason))
            case Unknown(tag):
                if fault_points.ON:
                    fault_points.sometimes("leadership was lost with a question under way")
                if not isinstance(tag, Step):
                    self._on_answer(tag, Answer(unknown=True))
            case Led():
                (self._leading.set if self.leads else self._leading.clear)()
                self._on_led()

    def _apply(self, effect: Apply) -> None:
        assert self._core is not None
        self._outcomes.clear()
        for entry in effect.entries:
            if entry.command is not None:
                self._outcomes[entry.index] = self._state.apply(entry.index, entry.command)
                self._entry_bytes += len(entry.command)
        self._entries += len(effect.entries)
        self._on_applied()
        is_due = self._entries >= self._snapshot_entries or self._entry_bytes >= SNAPSHOT_BYTES
        if is_due or (fault_points.ON and fault_points.fires("controller.snapshot.early")):
            self._entries = self._entry_bytes = 0
            self._events.append(Snapshotted(effect.entries[-1].index, self._state.snapshot()))

    async def _write(self) -> None:
        """Sync the core's records, all waiting ones at once."""
        file = self._file
        while file is not None:
            await self._writing.wait()
            if fault_points.ON and fault_points.fires("controller.log.late"):
                await asyncio.sleep(SLOW_S)
            self._writing.clear()
            core, batch = self._core, self._unwritten
            assert core is not None
            self._unwritten = []
            # A new file has the snapshot and what follows it, so the log needs no earlier entries.
            if any(isinstance(record, Snapshot) for persist in batch for record in persist.records):
                await file.begin_anew(core.saved.records())
            else:
                await file.append([persist.records for persist in batch])
            self._take(Persisted(batch[-1].number))

    # --- members -----------------------------------------------------------------------------

    def _is_counted(self) -> bool:
        """Return whether this identity is a voter, so that this controller need not send it any more."""
        return self._core is not None and self._core.me in self._core.members.voters

    async def _admit(self) -> None:
        """While this controller leads, add the other controllers to the group, one step at a time."""
        core = self._core
        assert core is not None
        while True:
            await self._leading.wait()
            if self.leads:
                step = self._peers.next_step(
                    core, silent_s=2 * self._settings.election_s, now=self._clock.now()
                )
                if step is not None:
                    self._take(Change(step, step))
            await asyncio.sleep(ADMIT_S)

    def __repr__(self) -> str:
        return f"<ConsensusNode {self._identity.node} {self._core!r}>"
