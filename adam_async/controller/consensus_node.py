"""One controller's part in the group that agrees: the shell around its consensus core.

Theory of operation
-------------------
The core (`consensus.core`) says what to send, write and apply; this does it. Every event goes through
`_take`, one after the other, also those that an effect causes on the spot. What is to be written waits in
`_unwritten` while the disk is busy, and all of it is forced down at once then (group commit). Without a file
nothing survives the process, and what is written is durable at once: then a restarted controller is another
one, as far as the group is concerned, and is taken in again. Who the others are, and the links over which
they are told things, is known to `peers`; what happens to the core's time while this process does not run, to
`core_clock`; what is worth a line to whoever watches, to `herald`.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

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
    found,
    identity,
)
from adam_async.controller.consensus.messages import Snapshot, TakeOver
from adam_async.controller.consensus.records import WHAT_TO_DO, Ballot, Born, DamagedLog, Record
from adam_async.controller.contents import CONTENTS, log_problem
from adam_async.controller.log_file import LogFile
from adam_async.controller.peer_controllers import Peers
from adam_async.controller.replicated_state import DONE, Command, Machine, Outcome, command_bytes, first_state
from adam_async.controller.stall_aware_clock import CoreClock
from adam_async.controller.status_log import StatusLog
from adam_async.errors import ConfigError
from adam_async.messages import Introduced
from adam_async.messages.sizes import MOST_MAP_BYTES, MOST_VALUE_BYTES
from adam_async.runtime import fault_points
from adam_async.runtime.clock import Timer
from adam_async.runtime.traffic import Traffic
from transport import Identity, Network, RemoteProtocolError

logger = logging.getLogger(__name__)

SETTINGS = Settings(
    heartbeat_s=0.1,
    election_s=0.8,
    command_bytes=2 * MOST_VALUE_BYTES,
    state_bytes=4 * MOST_MAP_BYTES,
)
"""Consensus settings of all controllers. A follower starts an election after 0.8 to 1.6 s without a message
of its leader. A command holds a record of the map, names and numbers; a state holds the map, the run and up
to 16 MiB of sessions."""

ADMIT_S = 0.25
"""Between two looks of a leader at who is to be taken in."""

RESIGN_S = 1.0
"""What handing over to another leader may take at our end."""

SNAPSHOT_ENTRIES = 1000
"""After so many entries the state is written down in their place; it is written by every node for itself."""

SNAPSHOT_BYTES = 4 << 20
"""The same, by the commands in these entries."""

SLOW_S = 0.05
"""How long a simulated controller may hesitate before it writes."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What came of a question."""

    outcome: Outcome = DONE
    refused: str = ""
    """Why nothing was done, nor will be, where that is so."""
    unknown: bool = False
    """Whether it may have been done, or may yet be."""


Observe = Callable[[Core, Machine, Event | None, Sequence[Effect]], None]
"""Watches a group at work, as simulations do; it begins without an event."""


class Group:
    """Agrees with other controllers on what is done to a state machine.

    Args:
        identity: Who we are; its node is our name in the group.
        machine: What agreed commands are applied to.
        network: How to reach the others.
        traffic: Where the links to them are counted.
        entropy: Dice, for our identity in the group and the spread of elections.
        file: Where it is kept what must not be forgotten; without it nothing is.
        told: Told what came of a question, by its tag.
        led: Told whenever another one leads, or nobody is known to.
        applied: Told after commands were applied, or a whole state was taken.
        settings: Times and sizes, the same for all.
        observe: Told after each event, when all that it led to is done.
        snapshot_entries: After so many entries the state is written down in their place.

    Run `run` as a task of the owner's group.
    """

    def __init__(
        self,
        *,
        identity: Identity,
        machine: Machine,
        network: Network,
        traffic: Traffic,
        entropy: Callable[[int], bytes],
        file: LogFile | None,
        told: Callable[[Hashable, Answer], None],
        led: Callable[[], None],
        applied: Callable[[], None],
        settings: Settings = SETTINGS,
        snapshot_entries: int = SNAPSHOT_ENTRIES,
        observe: Observe | None = None,
    ) -> None:
        self._identity = identity
        self._machine = machine
        self._entropy = entropy
        self._file = file
        self._told = told
        self._on_led = led
        self._on_applied = applied
        self._settings = settings
        self._snapshot_entries = snapshot_entries
        self._observe = observe
        self._peers = Peers(identity=identity, network=network, traffic=traffic, is_settled=self._is_counted)
        self._met = asyncio.Event()
        self._core: Core | None = None
        self._events: deque[Event] = deque()
        self._taking = False
        self._unwritten: list[Persist] = []
        self._writing = asyncio.Event()
        self._outcomes: dict[int, Outcome] = {}
        self._entries = self._entry_bytes = 0
        """Applied since the last snapshot."""
        self._resigned = asyncio.Event()
        self._leading = asyncio.Event()
        self._clock: CoreClock  # made by `run`
        self._status_log: StatusLog  # made with the core
        self._timer = Timer(self._next_deadline, self._due)

    # --- what the owner asks -----------------------------------------------------------------

    def meet(self, peers: Mapping[str, str]) -> None:
        """Say who founds the group: names and addresses, ours among them. Before that nothing happens.

        Raises:
            ValueError: We are not among them.
        """
        self._peers.meet(peers)
        self._met.set()

    @property
    def leads(self) -> bool:
        """Whether this controller leads, as far as it knows."""
        return self._core is not None and self._core.role is Role.LEADER

    @property
    def term(self) -> int:
        """The term that this controller is in; grows with each election."""
        return self._core.term if self._core is not None else 0

    @property
    def leader(self) -> str:
        """Address of who leads; empty if that is not known."""
        leader = self._core.leader if self._core is not None else None
        return self._peers.address(leader) if leader is not None else ""

    @property
    def addresses(self) -> tuple[str, ...]:
        """Where all its controllers listen, in the order of their names; empty where there is one alone."""
        return self._peers.addresses

    @property
    def is_cut_off(self) -> bool:
        """Whether nobody told us how to reach a majority of our group."""
        members = self._core.members if self._core is not None else Members()
        unknown = self._unknown()
        return bool(unknown) and len(members.voters) - len(unknown) < members.quorum

    def propose(self, tag: Hashable, command: Command) -> None:
        """Have a command applied everywhere; what comes of it is told once."""
        self._ask(Propose(tag, command_bytes(command)), tag)

    def read(self, tag: Hashable) -> None:
        """Have it told when the machine, as it is here, has all that was answered to anybody before now."""
        self._ask(Read(tag), tag)

    def _ask(self, question: Propose | Read, tag: Hashable) -> None:
        if self._core is None:
            self._told(tag, Answer(refused="this controller belongs to no group yet"))
        else:
            self._take(question)

    def introduce(self) -> Introduced | None:
        """Say who we are; None while we do not know it."""
        if not self._peers.me:
            return None
        members = self._core.members.all if self._core is not None else ()
        return Introduced(identity=self._peers.me, members=members)

    def introduced(self, name: str, identity: str) -> None:
        """Another controller said who it is."""
        self._peers.introduced(name, identity)

    def receive(self, name: str, group: str, message: Message) -> None:
        """Another controller's core says something, as one of a group; empty where it knows of none.

        A controller that `meet` did not name is ignored, whatever its messages say.

        Raises:
            RemoteProtocolError: No correct controller sends this; nothing has changed. Close its link.
        """
        if self._core is None or not self._peers.listens_to(name, message):
            return
        if group and self._machine.group and group != self._machine.group:
            self._status_log.of_another_group(name, theirs=group, ours=self._machine.group)
            return
        try:
            self._take(Received(message))
        except Violation as error:
            raise RemoteProtocolError(error.rule, f"{name}: {error.detail}") from None
        self._status_log.heard(name)

    def statistics(self) -> dict[str, Any]:
        """Where this controller stands in its group."""
        core = self._core
        if core is None:
            return {"group": "", "role": "founding"}
        return {
            "group": self._machine.group,
            "role": core.role.value,
            "term": core.term,
            "leader": name_of(core.leader) if core.leader else "",
            "commit": core.commit,
            "log": core.log.last_index - core.log.snapshot.index,
            "voters": sorted(core.members.voters),
            "learners": sorted(core.members.learners),
        }

    async def resign(self) -> None:
        """Hand over to another controller if we lead and there is one, for `RESIGN_S` at most."""
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
            logger.info("%s ends as the leader: nobody took over in %g s", self._identity.node, RESIGN_S)

    # --- life --------------------------------------------------------------------------------

    async def run(self) -> None:
        """Take part until cancelled.

        Raises:
            ConfigError: The file is another process's, or another controller's; or it could not be written.
            DamagedLog: What is in it was damaged, or is not for this release.
        """
        self._clock = CoreClock(asyncio.get_running_loop().time)
        await self._met.wait()
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
            group = await stack.enter_async_context(asyncio.TaskGroup())
            self._peers.begin(group, saved.me)
            await self._begin(saved)
            group.create_task(self._write(), name=f"{self._identity.node}/log")
            group.create_task(self._admit(), name=f"{self._identity.node}/members")
            await self._timer.run()

    async def _begin(self, saved: Saved) -> None:
        """Start the core; a founder first founds the group."""
        blank = not saved.snapshot.index and not saved.entries
        if blank and not saved.term:
            voters = await self._peers.founders()
            if voters:
                saved = found(saved.me, voters, first_state(group_name(voters)))
                await self._write_down((Ballot(saved.term, saved.vote), saved.snapshot))
        if saved.snapshot.index:
            self._machine.restore(saved.snapshot.state)
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
            self._observe(core, self._machine, None, ())
        if core.members.voters == (saved.me,):
            # Nobody else could lead: there is nothing to wait for.
            self._take(Received(TakeOver(sender=saved.me, to=saved.me, term=core.term)))

    def _unknown(self) -> list[str]:
        """The names of voters whose addresses nobody told us."""
        voters = self._core.members.voters if self._core is not None else ()
        return sorted(name_of(voter) for voter in voters if not self._peers.address(voter))

    def _warn_of_unknown(self) -> None:
        """Say so where nobody told us how to reach a majority: we would wait for it in silence."""
        if self.is_cut_off:
            logger.warning(
                "%s was one of a group with %s, whose addresses nobody gave: without a majority it waits; "
                "name them all in --peers",
                self._identity.node,
                ", ".join(self._unknown()),
            )

    async def _write_down(self, records: tuple[Record, ...]) -> None:
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
            self._clock.meets(core.next_deadline())
            self._take(Tick())

    def _take(self, event: Event) -> None:
        """Take an event, after those that came before it, and do what follows from it."""
        self._events.append(event)
        if self._taking:
            return
        core = self._core
        assert core is not None
        now = self._clock.tell(core)
        self._taking = True
        try:
            while self._events:
                event = self._events.popleft()
                effects = core.handle(event, now=now)
                for effect in effects:
                    self._carry_out(effect)
                if self._observe is not None:
                    self._observe(core, self._machine, event, effects)
            self._status_log.look(core, now=now)
        finally:
            self._taking = False
        self._timer.rearm()

    def _carry_out(self, effect: Effect) -> None:
        match effect:
            case Send(message):
                self._peers.send(message, group=self._machine.group)
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
                self._machine.restore(snapshot.state)
                self._entries = self._entry_bytes = 0
                self._on_applied()
            case Done("resign", _):
                self._resigned.set()
            case Done(tag, index):
                if not isinstance(tag, Step):
                    self._told(tag, Answer(self._outcomes[index]))
            case ReadReady(tag):
                self._told(tag, Answer())
            case Refused(tag, reason):
                if isinstance(tag, Step):
                    logger.debug("%s: %s %s later: %s", self._identity.node, tag.kind, tag.node, reason)
                elif tag != "resign":
                    self._told(tag, Answer(refused=reason))
            case Unknown(tag):
                if fault_points.ON:
                    fault_points.sometimes("leadership was lost with a question under way")
                if not isinstance(tag, Step):
                    self._told(tag, Answer(unknown=True))
            case Led():
                (self._leading.set if self.leads else self._leading.clear)()
                self._on_led()

    def _apply(self, effect: Apply) -> None:
        assert self._core is not None
        self._outcomes.clear()
        for entry in effect.entries:
            if entry.command is not None:
                self._outcomes[entry.index] = self._machine.apply(entry.index, entry.command)
                self._entry_bytes += len(entry.command)
        self._entries += len(effect.entries)
        self._on_applied()
        is_due = self._entries >= self._snapshot_entries or self._entry_bytes >= SNAPSHOT_BYTES
        if is_due or (fault_points.ON and fault_points.fires("controller.snapshot.early")):
            self._entries = self._entry_bytes = 0
            self._events.append(Snapshotted(effect.entries[-1].index, self._machine.snapshot()))

    async def _write(self) -> None:
        """Force down what the core wants written, all that waits at once."""
        file = self._file
        while file is not None:
            await self._writing.wait()
            if fault_points.ON and fault_points.fires("controller.log.late"):
                await asyncio.sleep(SLOW_S)
            self._writing.clear()
            core, batch = self._core, self._unwritten
            assert core is not None
            self._unwritten = []
            if any(isinstance(record, Snapshot) for persist in batch for record in persist.records):
                await file.begin_anew(core.saved.records())
            else:
                await file.append([persist.records for persist in batch])
            self._take(Persisted(batch[-1].number))

    # --- members -----------------------------------------------------------------------------

    def _is_counted(self) -> bool:
        """Whether we are one of the voters, and nobody has to be told any more who we are."""
        return self._core is not None and self._core.me in self._core.members.voters

    async def _admit(self) -> None:
        """While we lead, take in those who are not in the group, one step at a time."""
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
        return f"<Group {self._identity.node} {self._core!r}>"
