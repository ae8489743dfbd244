"""One server's copy of a bundle that has a log: its shell around the core of `replication`.

The core (`replication.BundleMember`) decides what is sent, committed and proposed to the controllers. This
shell carries out its effects: it encodes entries, sends them over `ServerLinks`, applies committed ones
through the state of the store, copies pieces for servers that join, and watches for silent members. The
primary's own entries keep their objects, so that its front can answer their requests. The others decode each
entry or piece first: an invalid one costs its link and changes nothing. Durable ones go to the disk before.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Sequence, Set
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec
from numpy.typing import NDArray

from adam_async.controller.client import Confirmation
from adam_async.messages import Body
from adam_async.messages.replication import Begin, Committed, Copy, PieceCopy
from adam_async.parameter_server.bundle import Bundle
from adam_async.parameter_server.bundle_saver import BundleSaver
from adam_async.parameter_server.bundle_shards import BundleShards
from adam_async.parameter_server.events import Entry
from adam_async.parameter_server.joining_members import JOIN_S, PAUSE_S, JoiningMembers
from adam_async.parameter_server.log_entries import (
    Part,
    decode_entry,
    encode_entry,
    entry_bytes,
    without_shards,
)
from adam_async.parameter_server.ordered_appends import OrderedAppends
from adam_async.parameter_server.part_collector import PartCollector
from adam_async.parameter_server.replication.effects import (
    Apply,
    BecamePrimary,
    CopyPiece,
    Effect,
    Message,
    ProposeRecord,
    ReadRecord,
    Removed,
    Send,
    StartAnew,
    Stopped,
    TakePiece,
)
from adam_async.parameter_server.replication.local_copy import Bundle as BundleFacts
from adam_async.parameter_server.replication.log import Entry as LogEntry
from adam_async.parameter_server.replication.log import Log
from adam_async.parameter_server.replication.member import BundleMember
from adam_async.parameter_server.replication.violations import Violation
from adam_async.parameter_server.server_links import ServerLinks
from adam_async.parameter_server.shard_pieces import copy_piece, cut_piece, load_piece, read_piece
from adam_async.run.bundle_record import BundleRecord, Member
from adam_async.run.ids import ShardId
from adam_async.run.shard_table import ShardSpec
from transport import RemoteProtocolError

logger = logging.getLogger(__name__)

SILENT_S = 1.0
"""Silence after which a primary strikes a member out, in seconds."""

TAKE_OVER_S = 1.3
"""Silence of the primary after which the first member in sync takes over, in seconds."""

RANK_S = 0.2
"""Further silence for which each later member waits, in seconds."""

INVITE_S = 5.0
"""Time for which a bundle lacks a member before its primary invites a new server, in seconds."""

RETURN_S = 0.3
"""Time for which a bundle lacks a member before its primary invites one that has come back, in seconds."""

HAND_OVER_S = 1.0
"""Maximum time for which a primary stops ordering for a handover, in seconds."""

LOG_BYTES = 256 << 20
"""Size of the log above which a primary strikes out the members that it keeps the entries for, in bytes."""

BACK_OFF_S = 0.2
"""Pause after a proposal without an outcome or with a conflict, in seconds."""

STUCK_TICKS = 10
"""Number of heartbeats without a commit after which the primary refuses questions and names the reason."""

STALLED_TICKS = 50
"""Number of heartbeats without a commit after which a primary strikes out members that take no entries."""


@dataclass(frozen=True, slots=True, eq=False)
class _Content:
    """The content of an entry, also as it travels."""

    entry: Entry
    parts: list[Part]


Observe = Callable[["BundleCopy", LogEntry, Sequence[Part]], None]
"""Follows the entries that a copy applies."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CopyHost:
    """The services of a server that a copy needs.

    Attributes:
        links: Links to the other members.
        now: Returns the time of the loop's clock, in seconds.
        call_soon: Calls a function in the next iteration of the loop.
        spawn: Starts a task of the server, by name.
        set_record: Sets the bundle's record in the map if it has the expected version still; None at the end.
        next_member: Returns the server to invite, of those that may join; None if there is none.
        is_live: Whether a server is live in the cluster map.
        notice: Reports a text to the operator: the controllers log it, and it is an event of a run.
        observe: Called before a committed entry is applied, with its copy, the entry and its parts.
    """

    links: ServerLinks
    now: Callable[[], float]
    call_soon: Callable[[Callable[[], None]], object]
    spawn: Callable[[str, Coroutine[Any, Any, None]], "asyncio.Task[None]"]
    set_record: Callable[[BundleRecord, int], Coroutine[Any, Any, Confirmation | None]]
    next_member: Callable[[Callable[[Member], bool]], Member | None]
    is_live: Callable[[Member], bool]
    notice: Callable[[str], None]
    observe: "Observe | None" = None


class BundleCopy:
    """The copy of a bundle on one server.

    Args:
        facts: Facts of the bundle that never change.
        record: The bundle's record in the cluster map.
        copies: Number of copies that the bundle should have.
        shards: Its shards and its front on this server.
        pieces: Its shards, cut into pieces.
        table: All shards of the store, by number.
        saver: Copies pieces for the disk of this server; None without one.
    """

    def __init__(
        self,
        me: Member,
        facts: BundleFacts,
        record: BundleRecord,
        *,
        copies: int,
        shards: BundleShards,
        pieces: Sequence[Sequence[ShardSpec]],
        table: Sequence[ShardSpec],
        host: CopyHost,
        saver: BundleSaver | None = None,
    ) -> None:
        self._saver = saver
        self._appends: OrderedAppends | None = None
        """With durable pushes: entries on their way to the disk, and messages behind them."""
        if saver is not None and saver.journal is not None:
            self._appends = OrderedAppends(saver.journal, host.spawn)
        self._core = BundleMember(me, facts, record)
        self._facts = facts
        self._copies = copies
        self._shards = shards
        self._pieces = pieces
        self._table = table
        self._host = host
        self._effects: deque[Effect] = deque()
        self._is_running = False
        self._reports_soon = False
        self._unproposed: deque[Entry] = deque()
        """Entries of this primary that wait for the end of a handover."""
        self._to_apply: deque[LogEntry] = deque()
        self._applying = 0
        """Number of entries that the shards have and have not applied."""
        self._done = 0
        """Number of entries that the shards had applied when this was last looked at."""
        self._is_catching_up = False
        self._asked: deque[CopyPiece] = deque()
        """Pieces to copy once the shards are between two entries."""
        self._parts = PartCollector()
        self._committed = 0
        """Position up to which entries were committed at the last tick."""
        self._stuck_ticks = 0
        """Number of ticks since entries wait and none was committed."""
        self._proposing: asyncio.Task[None] | None = None
        self._joining = JoiningMembers(record.members)
        self._struck_out: set[Member] = set()
        """Members that this primary has asked the controllers to strike out."""
        self._lacks_since: float | None = None
        self._home_since: float | None = None
        """Time since which the home could take over, while another server is the primary."""

    def start(self) -> None:
        """Take up the links that are there, and carry out the first effects of the core."""
        for member in self._host.links.up:
            self._core.link_up(member)
        self._run()

    # --- questions ---------------------------------------------------------------------------

    @property
    def record(self) -> BundleRecord:
        """The newest record of the bundle that this server has seen."""
        return self._core.record

    @property
    def me(self) -> Member:
        """Node and incarnation of this server."""
        return self._core.me

    @property
    def home(self) -> str:
        """Name of the bundle."""
        return self._facts.home

    @property
    def is_primary(self) -> bool:
        """Whether this server is the primary, as far as it knows."""
        return self._core.is_primary

    @property
    def log(self) -> Log:
        """The log, for reading."""
        return self._core.log

    @property
    def state_position(self) -> int | None:
        """Position of the last applied entry; None while an entry is in work, or while pieces are missing."""
        if self._is_catching_up or not self._core.is_whole or not self._shards.bundle.idle:
            return None
        return self._core.log.applied

    @property
    def is_whole(self) -> bool:
        """Whether this server has all pieces of the state."""
        return self._core.is_whole

    @property
    def shards(self) -> Bundle:
        """The shards of this copy."""
        return self._shards.bundle

    @property
    def peers(self) -> Set[Member]:
        """The other members."""
        return {*self._core.record.members} - {self._core.me}

    @property
    def away(self) -> Set[Member]:
        """Live servers that the primary may invite once they answer again."""
        return {*filter(self._host.is_live, self._joining.away)} if self.is_primary else frozenset()

    @property
    def is_stuck(self) -> bool:
        """Whether entries of this primary have waited for a while, and none was committed."""
        return self._stuck_ticks >= STUCK_TICKS

    def why_not_committing(self) -> str:
        """Text that names what the last entry waits for; empty if it is committed."""
        return self._core.why_not_committing()

    # --- inputs ------------------------------------------------------------------------------

    def record_changed(self, record: BundleRecord) -> None:
        """Follow the bundle's record in the cluster map."""
        now, before = self._host.now(), self._core.record
        # A live server that was not struck out has left by itself, because it cannot hold its copy.
        left = {*before.joining} - {*record.members} - self._struck_out
        self._joining.pause(filter(self._host.is_live, left), now)
        self._struck_out.intersection_update(record.members)
        for member in sorted(self._joining.members_changed({*record.members}, now)):
            self._host.links.dial_again(member)
        for member in {*record.members} - {*before.members}:
            self._host.links.expect(member)
        self._core.record_changed(record)
        self._parts.keep(record.members)
        self._run()

    def link(self, member: Member, *, is_up: bool) -> None:
        """Note the begin or the end of a link for entries that this server dialled."""
        if is_up:
            self._core.link_up(member)
        else:
            self._parts.forget(member)
            self._core.link_lost(member)
        self._run()

    def propose(self, entry: Entry) -> None:
        """Put an entry of this primary into the log; during a handover it waits."""
        self._unproposed.append(entry)
        self._run()

    def _propose_all(self) -> None:
        while self._unproposed and self._core.is_ordering:
            entry = self._unproposed.popleft()
            content, core = _Content(entry, encode_entry(entry)), self._core
            if self._appends is None:
                core.propose(content, entry_bytes(content.parts))
                continue
            position = core.log.last + self._appends.ordered_here + 1
            written = partial(self._propose_written, content, position)
            self._appends.append(position, core.record.generation, content.parts, written, entry)

    def _propose_written(self, content: _Content, position: int) -> None:
        """Put an entry that is on the disk of this primary into the log, unless a handover has begun."""
        assert self._appends is not None
        if self._core.is_ordering and position == self._core.log.last + 1:
            self._core.propose(content, entry_bytes(content.parts))
        else:
            self._unproposed.extendleft(reversed([content.entry, *self._appends.drop_own()]))
        self._run()

    def received(self, sender: Member, message: Message, tensors: Sequence[NDArray[Any]]) -> None:
        """Take a message of another member.

        Raises:
            RemoteProtocolError: No correct member sends it.
        """
        parts: list[Part] = []
        if isinstance(message, Copy | PieceCopy):
            keeps = sender in self._core.record.members
            if (whole := self._parts.add(sender, message, list(tensors), keeps=keeps)) is None:
                return
            parts = whole
        record = self._core.record
        # The core refuses all other entries, which must not reach the disk.
        expected = record.primary, record.generation
        is_entry = isinstance(message, Copy) and (sender, message.generation) == expected
        # Messages of a primary follow one another; answers to this one do not wait.
        is_ordered = is_entry or isinstance(message, Begin | Committed | PieceCopy)
        take = partial(self._take_later, sender, message, parts)
        if self._appends is None or not is_ordered or not (self._appends or is_entry):
            self._take(sender, message, parts)
        elif isinstance(message, Copy):
            decode_entry(parts, self._shards.bundle, self._table)  # an invalid one would stop a recovery
            self._appends.append(message.position, message.origin, parts, take, None)
        else:
            self._appends.add(take)

    def _take_later(self, sender: Member, message: Message, parts: list[Part]) -> None:
        """Take a message that has waited for the disk; an invalid one costs its sender's links."""
        try:
            self._take(sender, message, parts)
        except RemoteProtocolError as error:
            logger.warning("%s: %s sent an invalid message: %s", self.me[0], sender[0], error)
            self._host.links.hang_up(sender)

    def _take(self, sender: Member, message: Message, parts: list[Part]) -> None:
        content: Any = None
        bundle = self._shards.bundle
        if isinstance(message, Copy):
            content = _Content(decode_entry(parts, bundle, self._table), parts)
        elif isinstance(message, PieceCopy) and message.piece < len(self._pieces):
            tensors = [tensor for part in parts for tensor in part]
            content = read_piece(bundle, self._pieces[message.piece], self._table, tensors)
        try:
            self._core.received(sender, message, content)
        except Violation as error:
            raise RemoteProtocolError("replication", str(error)) from None
        self._run()

    def tick(self) -> None:
        """Look for silent members; to be called with each heartbeat."""
        core, record, links = self._core, self._core.record, self._host.links
        if core.is_primary:
            silent = [
                member for member in record.members if member != core.me and links.silent_s(member) > SILENT_S
            ]
            self._joining.silent(silent)
            self._strike_out([*silent, *core.laggards(LOG_BYTES)])
            self._count_stuck_ticks()
            if self._stuck_ticks >= STALLED_TICKS:
                self._strike_out(core.waits_for())
            self._strike_out_stalled()
            self._invite()
            self._bring_home()
        elif core.me in record.in_sync and record.primary is not None:
            rank = record.in_sync.index(core.me) - 1
            silent_s = links.silent_s(record.primary)
            if silent_s > TAKE_OVER_S + RANK_S * rank:
                self._joining.silent([record.primary])
                core.take_over()
        self._run()

    def _strike_out(self, members: Iterable[Member]) -> None:
        for member in members:
            self._struck_out.add(member)
            self._core.strike_out(member)

    def _strike_out_stalled(self) -> None:
        """Strike out the joining members without progress, and name the reason and the remedy."""
        core, facts = self._core, self._facts
        pieces = core.joining_pieces()
        stalled = self._joining.stalled(pieces, facts.pieces, self._host.now())
        named = set(stalled) - self._struck_out
        self._strike_out(stalled)
        for member in sorted(named):
            self._host.notice(
                f"{member[0]} does not join the shards of {facts.home} in store {facts.store}: it has "
                f"{pieces[member]} of {facts.pieces} pieces, and none was new for {JOIN_S:g} s; its log may "
                f"have the reason; it is invited again after {PAUSE_S:g} s: start it again, or add a server"
            )

    def _count_stuck_ticks(self) -> None:
        log = self._core.log
        is_stuck = log.committed < log.last and log.committed == self._committed
        self._stuck_ticks = self._stuck_ticks + 1 if is_stuck else 0
        self._committed = log.committed

    def _invite(self) -> None:
        """Invite another server if the bundle has lacked a member for a while."""
        now, record = self._host.now(), self._core.record
        if len(record.members) >= self._copies:
            self._lacks_since = None
        elif self._lacks_since is None:
            self._lacks_since = now
        elif now - self._lacks_since > RETURN_S:
            barred = self._joining.barred(now, self._host.links.answers)
            # A server that was lost returns at once. Another one is invited after a while, because it would
            # keep the place of the lost one, or at once if pushes wait for it.
            takes_all = now - self._lacks_since > INVITE_S or len(record.in_sync) < self._facts.min_in_sync

            def may_join(server: Member) -> bool:
                return server not in barred and (takes_all or self._joining.is_back(server))

            member = self._host.next_member(may_join)
            if member is not None:
                self._lacks_since = now
                self._core.invite(member)

    def _bring_home(self) -> None:
        """Hand over to the home of the bundle once it was in sync for a while, so that loads stay even."""
        now, record = self._host.now(), self._core.record
        home = next((member for member in record.in_sync if member[0] == self._facts.home), None)
        if home is None or home == self._core.me or len(record.in_sync) < self._copies:
            self._home_since = None
        elif self._home_since is None:
            self._home_since = now
        elif now - self._home_since > HAND_OVER_S + INVITE_S:
            self._core.cancel_hand_over()
            self._home_since = now
        elif now - self._home_since > INVITE_S:
            self._core.hand_over(home)

    # --- effects -----------------------------------------------------------------------------

    def _run(self) -> None:
        """Carry out the effects of the core in their order, and what follows from them."""
        self._propose_all()  # a handover may have ended without an effect
        self._effects += self._core.take_effects()
        if self._is_running:
            return
        self._is_running = True
        try:
            while self._effects or self._advance():
                while self._effects:
                    self._perform(self._effects.popleft())
                    self._effects += self._core.take_effects()
                self._propose_all()
                self._effects += self._core.take_effects()
        finally:
            self._is_running = False
        self._host.links.yield_pieces()
        if not self._reports_soon:
            self._reports_soon = True
            self._host.call_soon(self._report)

    def _report(self) -> None:
        """Acknowledge, or send watermarks, once in an iteration of the loop."""
        self._reports_soon = False
        self._core.report()
        for effect in self._core.take_effects():
            self._perform(effect)

    def _perform(self, effect: Effect) -> None:
        match effect:
            case Send():
                self._send(effect)
            case Apply():
                self._to_apply += effect.entries
            case ProposeRecord():
                self._proposing = self._host.spawn(
                    f"record-{self._facts.home}", self._set_record(effect.record, effect.expected)
                )
            case BecamePrimary():
                self._shards.lead()
            case Stopped():
                self._asked.clear()
                self._unproposed.clear()
                if self._appends is not None:
                    self._appends.drop_own()
                self._stuck_ticks = 0
                self._shards.follow()
            case Removed():
                self._shards.leave()
            case StartAnew():
                self._to_apply.clear()
                self._applying = self._done = 0
                self._is_catching_up = True
                self._shards.reset()
            case CopyPiece():
                self._asked.append(effect)
            case TakePiece():
                load_piece(self._shards.bundle, effect.content)
            case ReadRecord():
                return  # the map is on its way

    def _send(self, effect: Send) -> None:
        links, message = self._host.links, effect.message
        as_primary = self._core.is_primary
        if isinstance(message, Copy | PieceCopy):
            parts = effect.content.parts if isinstance(message, Copy) else cut_piece(effect.content)
            for number, part in enumerate(parts):
                numbered: Body = message
                if len(parts) > 1:
                    numbered = msgspec.structs.replace(message, part=number, parts=len(parts))
                links.send(effect.to, numbered, part, as_primary=as_primary)
        else:
            links.send(effect.to, message, as_primary=as_primary)

    async def _set_record(self, record: BundleRecord, expected: int) -> None:
        outcome = await self._host.set_record(record, expected)
        if outcome in ("unknown", "conflict"):
            await asyncio.sleep(BACK_OFF_S)
            self._core.outcome_unknown() if outcome == "unknown" else self._core.conflicted(expected)
            self._run()

    # --- applying ----------------------------------------------------------------------------

    def work_done(self) -> None:
        """Go on after the shards have finished work."""
        self._run()

    def _advance(self) -> bool:
        """Give the shards the next entry if it is its turn, or copy a piece. Returns whether it did."""
        bundle = self._shards.bundle
        self._count_applied()
        is_between = bundle.idle and not self._applying
        # While a piece is to be copied, entries wait: with more and more of them the shards are never idle.
        copies = self._asked or (self._saver is not None and self._saver.has_request and self._core.is_whole)
        may_apply = is_between or (self._core.is_primary and not copies and not self._is_catching_up)
        if self._asked and is_between:
            self._copy_piece(self._asked.popleft(), bundle)
        elif copies and is_between and self._saver is not None:
            self._saver.copy_requested(bundle, self._core.position_of)
        elif self._to_apply and may_apply:
            self._applying += 1
            self._apply(self._to_apply.popleft(), bundle)
        else:
            self._effects += self._core.take_effects()
            return bool(self._effects)
        self._effects += self._core.take_effects()
        return True

    def _apply(self, logged: LogEntry, bundle: Bundle) -> None:
        absent: Set[ShardId] = frozenset()
        if self._is_catching_up:
            if not self._core.applies_to(0, logged.position):
                self._applying -= 1  # it is in all pieces already
                self._core.applied(self._core.log.applied + 1)
                return
            absent = {
                spec.id
                for piece, specs in enumerate(self._pieces)
                if not self._core.applies_to(piece, logged.position)
                for spec in specs
            }
            self._is_catching_up = bool(absent)
            if not absent:
                bundle.share_equal_tables()
        bundle.absent = absent
        content: _Content = logged.content
        if self._host.observe is not None:
            self._host.observe(self, logged, content.parts)
        if self._appends is not None and self._saver is not None:
            self._saver.entered(content.entry)  # a complete round drops the entry on the disk
        self._shards.committed(without_shards(content.entry, absent) if absent else content.entry)

    def _count_applied(self) -> None:
        new = self._shards.bundle.entries_applied - self._done
        self._done += new
        self._applying -= new
        for _ in range(new):
            self._core.applied(self._core.log.applied + 1)
        if new and self._appends is not None:
            self._appends.journal.applied(self._core.log.applied)

    def _copy_piece(self, asked: CopyPiece, bundle: Bundle) -> None:
        piece = copy_piece(bundle, self._pieces[asked.piece])
        self._core.piece_copied(asked, self._core.log.applied, piece, entry_bytes([piece]))

    def __repr__(self) -> str:
        return f"<BundleCopy {self._facts.home} {self._core!r}>"
