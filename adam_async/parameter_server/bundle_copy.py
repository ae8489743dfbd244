"""One server's copy of a bundle that has a log: the shell around the core in `replication`.

The core (`replication.BundleMember`) decides what is sent, committed and proposed to the controllers. The
shell carries out the core's effects. The shell encodes and sends entries (`ServerLinks`), applies committed
entries to the store's state, copies pieces for joining servers, and watches for silent members. On the
primary, its own entries stay Python objects, so that the front can answer their requests. Other members first
decode each entry or piece; an invalid one ends its link and changes nothing. With durable pushes, an entry is
on the disk before the core takes it.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Sequence, Set
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec
from numpy.typing import NDArray

from adam_async.messages import Body, Standing
from adam_async.messages.replication import Begin, Committed, Copy, PieceCopy
from adam_async.parameter_server.bundle import Bundle
from adam_async.parameter_server.bundle_saver import BundleSaver, OrderedAppends
from adam_async.parameter_server.events import Entry, QueuedPin
from adam_async.parameter_server.log_entries import (
    MOST_BYTES,
    Part,
    PartCollector,
    decode_entry,
    encode_entry,
    entry_bytes,
    without_shards,
)
from adam_async.parameter_server.members_watch import MembersWatch
from adam_async.parameter_server.offered_pieces import OfferedPieces
from adam_async.parameter_server.replication.local_copy import (
    Apply,
    BecamePrimary,
    CopyPiece,
    Effect,
    Log,
    Message,
    ProposeRecord,
    Removed,
    Send,
    StartAnew,
    Stopped,
    TakePiece,
    Violation,
)
from adam_async.parameter_server.replication.local_copy import Bundle as BundleFacts
from adam_async.parameter_server.replication.local_copy import Entry as LogEntry
from adam_async.parameter_server.replication.member import BundleMember
from adam_async.parameter_server.replication.primary import Primary
from adam_async.parameter_server.shard_pieces import (
    Piece,
    copy_piece,
    count_arrays,
    cut_piece,
    digest_of,
    load_piece,
    piece_arrays,
    read_piece,
    with_arrays,
)
from adam_async.parameter_server.store_host import BundleShards, StoreHost
from adam_async.persistence.records import Order
from adam_async.run.ids import ShardId
from adam_async.run.shard_table import ShardSpec
from adam_async.run.store_record import BundleRecord, Member
from transport import RemoteProtocolError

logger = logging.getLogger(__name__)

DIGEST_BYTES = 8 << 20
"""Maximum size of a piece's arrays that the primary compares by digest, in bytes: about 5 ms in one round of
the loop, during which the primary sends no heartbeat. A larger piece is sent with its arrays."""

BACK_OFF_S = 0.2
"""Pause after a proposal without an outcome or with a conflict, in seconds."""


@dataclass(frozen=True, slots=True, eq=False)
class _Content:
    """An entry, and its parts as they are sent."""

    entry: Entry
    parts: list[Part]


@dataclass(frozen=True, slots=True, eq=False)
class _CopiedPiece:
    """A piece that is being sent to another member."""

    tensors: Part
    origin: int
    changed: int
    digest: bytes


@dataclass(frozen=True, slots=True, eq=False)
class _ArrivedPiece:
    """A piece from the primary."""

    piece: Piece
    origin: int
    changed: int


class BundleCopy:
    """The copy of a bundle on one server.

    Args:
        facts: Facts of the bundle that never change.
        record: The bundle's record in the cluster map.
        copies: Number of copies that the bundle should have.
        shards: Shards of the bundle on this server, and their front.
        pieces: Its shards, cut into pieces.
        table: All shards of the store, by number.
        saver: Copies pieces for the disk of this server; None without a disk.
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
        host: StoreHost,
        saver: BundleSaver | None = None,
    ) -> None:
        self._saver = saver
        self._appends: OrderedAppends | None = None
        """Entries on their way to the disk, and the messages that wait for them; None without durable
        pushes."""
        if saver is not None and saver.is_durable:
            self._appends = OrderedAppends(saver.disk, facts.home, host.spawn)
        self._core = BundleMember(me, facts, record)
        self._facts = facts
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
        """Number of entries that the shards have received and not applied yet."""
        self._done = 0
        """Number of applied entries that the core has been told of."""
        self._is_catching_up = False
        self._asked: deque[CopyPiece] = deque()
        """Pieces to copy once the shards are between two entries."""
        self._has_too_large = False
        """Whether some piece is too large for any message; a notice reports the first such piece."""
        self._parts = PartCollector()
        self._offers = OfferedPieces(saver, host.spawn)
        self._generation = 0
        """Generation of the last applied entry; 0 before any entry."""
        self._origins = [0] * facts.pieces
        """For each piece, the generation of its last entry when it arrived from a primary; 0 if it did not
        arrive."""
        self._proposing: asyncio.Task[None] | None = None
        self._watch = MembersWatch(self._core, facts, host, copies)

    def start(self) -> None:
        """Report the existing links to the core, and carry out its first effects."""
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
        """Whether this server believes that it is the primary."""
        return self._core.is_primary

    @property
    def standing(self) -> Standing:
        """Generation and positions of the log, for a restarted controller."""
        log = self._core.log
        return Standing(
            generation=self.record.generation, last=log.last, start=log.start, committed=log.committed
        )

    @property
    def log(self) -> Log:
        """The log, for reading."""
        return self._core.log

    @property
    def state_position(self) -> int | None:
        """Position of the last applied entry; None while an entry is being applied, or pieces are missing."""
        if self._is_catching_up or not self._core.is_whole or not self._shards.bundle.idle:
            return None
        return self._core.log.applied

    @property
    def is_whole(self) -> bool:
        """Whether this server has all pieces of the state."""
        return self._core.is_whole

    @property
    def pieces_from_disk(self) -> int:
        """Number of pieces whose arrays this server had on its disk when it joined."""
        return self._offers.taken

    @property
    def shards(self) -> Bundle:
        return self._shards.bundle

    @property
    def peers(self) -> Set[Member]:
        return {*self._core.record.members} - {self._core.me}

    @property
    def away(self) -> Set[Member]:
        """Live servers that the primary may invite once they answer again."""
        return self._watch.away if self.is_primary else frozenset()

    @property
    def is_stuck(self) -> bool:
        """Whether entries of this primary have waited for a while, and none was committed."""
        return self._watch.is_stuck

    @property
    def is_sending(self) -> bool:
        """Whether a member in sync lacks the last entry of this primary."""
        primary = self._core.primary
        return primary is not None and bool(primary.waits_for())

    def why_not_committing(self) -> str:
        """Return why the last entry is not committed; empty if it is."""
        return self._core.primary.why_not_committing() if self._core.primary is not None else ""

    # --- inputs ------------------------------------------------------------------------------

    def record_changed(self, record: BundleRecord) -> None:
        """Follow the bundle's record in the cluster map."""
        self._watch.record_changed(record)
        self._core.record_changed(record)
        self._parts.keep((record.primary,))
        self._offers.keep(record.members)
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
        """Put an entry of this primary into the log. During a handover the entry waits."""
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
        """Put an entry that is on the disk of this primary into the log.

        During a handover the entry waits again.
        """
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
            record = self._core.record
            if (sender, message.generation) != (record.primary, record.generation):
                self._deliver(sender, message, None)  # the core refuses the message whatever its content is
                return
            if (whole := self._parts.add(sender, message, list(tensors))) is None:
                return
            parts = whole
        is_entry = isinstance(message, Copy)
        # Messages from a primary keep their order; answers to this primary need not wait.
        is_ordered = is_entry or isinstance(message, Begin | Committed | PieceCopy)
        take = partial(self._take_later, sender, message, parts)
        if self._appends is None or not is_ordered or not (self._appends or is_entry):
            self._take(sender, message, parts)
        elif isinstance(message, Copy):
            decode_entry(parts, self._shards.bundle, self._table)  # an invalid entry would stop a recovery
            self._appends.append(message.position, message.origin, parts, take, None)
        else:
            self._appends.add(take)

    def _take_later(self, sender: Member, message: Message, parts: list[Part]) -> None:
        """Take a message that has waited for the disk; an invalid message ends its sender's link."""
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
            specs = self._pieces[message.piece]
            if message.digest and not self._core.expects_piece(message):
                self._deliver(sender, message, None)  # refused in any case, so nothing is read
                return
            if message.digest:
                whole = partial(self._take_offered, sender, message, tensors)
                failed = partial(self._refuse_offered, sender, message)
                self._offers.read(message, count_arrays(bundle, specs, tensors), whole, failed)
                return
            piece = read_piece(bundle, specs, self._table, tensors)
            if message.origin > message.generation:
                raise RemoteProtocolError("origin", f"{message.origin}, of generation {message.generation}")
            content = _ArrivedPiece(piece, message.origin, message.changed)
        self._deliver(sender, message, content)

    def _deliver(self, sender: Member, message: Message, content: Any) -> None:
        """Give the core a message with its whole content. Raises RemoteProtocolError: see `received`."""
        try:
            self._core.received(sender, message, content)
        except Violation as error:
            raise RemoteProtocolError("replication", str(error)) from None
        if sender in self._core.record.members:
            self._offers.received(sender, message)
        self._run()

    def _take_offered(self, sender: Member, message: PieceCopy, tensors: Part, arrays: Part) -> None:
        """Take a piece whose arrays this server had on its disk."""
        message = msgspec.structs.replace(message, digest=b"")
        self._take_later(sender, message, [with_arrays(tensors, arrays)])

    def _refuse_offered(self, sender: Member, message: PieceCopy, why: str) -> None:
        """End the link, so that the next session brings all pieces."""
        logger.warning(
            "%s joins the shards of %s in store %s anew, without its disk: piece %d: %s",
            *(self.me[0], self._facts.home, self._facts.store, message.piece, why),
        )
        self._host.links.hang_up(sender)

    def tick(self) -> None:
        """Look for silent members; to be called with each heartbeat."""
        self._watch.tick()
        self._run()

    # --- effects -----------------------------------------------------------------------------

    def _run(self) -> None:
        """Carry out the core's effects in order, and the effects that follow from them."""
        self._effects += self._core.take_effects()
        if self._is_running:
            return
        self._is_running = True
        try:
            is_going_on = True
            while is_going_on:
                while self._effects:
                    self._perform(self._effects.popleft())
                    self._effects += self._core.take_effects()
                # Do this last: a `Stopped` drops the waiting entries, and here it refuses their requests.
                self._propose_all()
                self._effects += self._core.take_effects()
                is_going_on = bool(self._effects) or self._advance()
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
                self._watch.stopped()
                self._shards.follow()
            case Removed():
                self._offers.drop()
                self._shards.leave()
            case StartAnew():
                self._offers.drop()
                self._unproposed.clear()  # their shards are replaced
                self._generation = 0
                self._begin_log_anew()
                self._to_apply.clear()
                self._applying = self._done = 0
                self._is_catching_up = True
                self._shards.reset()
            case CopyPiece():
                self._asked.append(effect)
            case TakePiece():
                load_piece(self._shards.bundle, effect.content.piece)
                self._origins[effect.piece] = effect.content.origin
                if not effect.piece:
                    self._shards.took_pins()
                if self._saver is not None:
                    self._saver.arrived(effect.piece, effect.content.changed)

    def _send(self, effect: Send) -> None:
        links, message = self._host.links, effect.message
        as_primary = self._core.is_primary
        if isinstance(message, Copy | PieceCopy):
            content, parts = effect.content, []
            if isinstance(message, PieceCopy):
                parts = cut_piece(content.tensors)
                message = msgspec.structs.replace(
                    message, origin=content.origin, changed=content.changed, digest=content.digest
                )
            else:
                parts = content.parts
            for number, part in enumerate(parts):
                numbered: Body = message
                if len(parts) > 1:
                    numbered = msgspec.structs.replace(message, part=number, parts=len(parts))
                links.send(effect.to, numbered, part, as_primary=as_primary)
        else:
            links.send(effect.to, self._offers.with_offer(message), as_primary=as_primary)

    async def _set_record(self, record: BundleRecord, expected: int) -> None:
        outcome = await self._host.set_record(record, expected)
        if outcome in ("unknown", "conflict"):
            await asyncio.sleep(BACK_OFF_S)
            self._core.repeat_proposal() if outcome == "unknown" else self._core.conflicted(expected)
            self._run()

    # --- applying ----------------------------------------------------------------------------

    def work_done(self) -> None:
        """Go on after the shards have finished work."""
        self._run()

    def _advance(self) -> bool:
        """Give the shards the next entry, or copy a piece. Returns False if neither is possible now."""
        bundle, primary = self._shards.bundle, self._core.primary
        self._count_applied()
        while self._asked and not (primary is not None and primary.wants_piece(self._asked[0])):
            self._asked.popleft()  # the piece's member has left, or the session has ended
        is_between = bundle.idle and not self._applying
        # While a piece is to be copied, entries wait: the shards would never be idle in a steady stream.
        saves = self._saver is not None and self._saver.has_request and self._core.is_whole
        copies = self._asked or saves
        may_apply = is_between or (primary is not None and not copies and not self._is_catching_up)
        takes = self._asked and is_between
        if takes and primary is not None and self._copy_piece(self._asked[0], primary, bundle):
            self._asked.popleft()
        elif saves and is_between and self._saver is not None:
            self._saver.copy_requested(bundle, self._order_of)
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
                self._applying -= 1  # all pieces have the entry, or arrive with it
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
        if self._saver is not None:
            self._saver.entry = logged.position
        self._generation = logged.generation
        content: _Content = logged.content
        if self._saver is not None and isinstance(content.entry, QueuedPin):
            self._saver.pinned_at[content.entry.pin.pin] = logged.generation, logged.position
        if self._host.observe is not None:
            self._host.observe(self, logged, content.parts)
        if self._appends is not None and self._saver is not None:
            self._saver.entered(content.entry)  # after a complete round the disk drops the entry
        self._shards.committed(without_shards(content.entry, absent) if absent else content.entry)

    def _begin_log_anew(self) -> None:
        """Note on the disk that the log begins anew: later entries do not apply to older pieces there."""
        if self._appends is not None:
            log, generation = self._core.log, self._core.record.generation
            self._appends.append(log.start, generation, [], _nothing, None)

    def _count_applied(self) -> None:
        new = self._shards.bundle.entries_applied - self._done
        self._done += new
        self._applying -= new
        for _ in range(new):
            self._core.applied(self._core.log.applied + 1)
        if new and self._saver is not None and self._saver.is_durable:
            self._saver.disk.applied(self._facts.home, self._core.log.applied)

    def _order_of(self, piece: int) -> Order:
        """Return the generation and the position of the last entry in a piece.

        Call it between two entries.
        """
        return max(self._generation, self._origins[piece]), self._core.position_of(piece)

    def _copy_piece(self, asked: CopyPiece, primary: Primary, bundle: Bundle) -> bool:
        """Copy a piece for another member; return False if no message has room for it now."""
        specs, position = self._pieces[asked.piece], self._core.log.applied
        arrays = piece_arrays(bundle, specs)
        is_there = entry_bytes([arrays]) <= DIGEST_BYTES and self._offers.is_unchanged(asked, position)
        tensors = copy_piece(bundle, specs, has_arrays=False, has_log=True)
        nbytes = entry_bytes([tensors] if is_there else [tensors, arrays])
        if nbytes > MOST_BYTES:  # the other member takes no more
            if len(tensors) > 1 and entry_bytes([arrays]) <= MOST_BYTES:
                return False  # the next complete sums free the pushes
            self._report_too_large(asked.piece, nbytes)
            return True
        if not is_there:
            tensors = with_arrays(tensors, [array.copy() for array in arrays])
        digest = digest_of(arrays) if is_there else b""
        changed = self._saver.changed_at(asked.piece) if self._saver is not None else position
        origin, _ = self._order_of(asked.piece)
        content = _CopiedPiece(tensors, origin, changed, digest)
        primary.piece_copied(asked, position, content, nbytes)
        return True

    def _report_too_large(self, piece: int, nbytes: int) -> None:
        """Report the first piece that no other member can take, and the remedy."""
        if not self._has_too_large:
            self._has_too_large = True
            self._host.notice(
                f"no other server can copy the shards of {self._facts.home} in store {self._facts.store}: "
                f"piece {piece} has {nbytes} bytes, {MOST_BYTES} are the most; begin the store anew with a "
                "smaller shard_bytes"
            )

    def __repr__(self) -> str:
        return f"<BundleCopy {self._facts.home} {self._core!r}>"


def _nothing() -> None:
    """Do nothing when an empty entry is on the disk."""
