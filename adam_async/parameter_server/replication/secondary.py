"""Pure: a member that is not the primary: it holds entries, and applies the committed ones."""

import msgspec

from adam_async.messages.replication import Begin, Begun, Committed, Copy, Held, PieceCopy
from adam_async.parameter_server.replication.local_copy import (
    Apply,
    Entry,
    LocalCopy,
    StartAnew,
    TakePiece,
    Violation,
)


class Secondary:
    """Role of a member that is not the primary, in one generation: in sync, joining or struck out."""

    def __init__(self, copy: LocalCopy) -> None:
        self._copy = copy
        self._generation = copy.record.generation
        self._session = 0
        """The newest session that the primary has begun in this generation."""
        self._is_open = False
        """Whether messages of the newest session are expected."""
        self._equal = copy.log.committed
        """Position up to which the log surely equals the log of the primary."""
        self._watermark = 0
        """Position up to which the primary lets this member apply its entries."""
        self._reported: tuple[int, int, int] | None = None
        """Position, applied position and number of pieces in the last `Held`; None before the first."""

    def record_changed(self) -> None:
        """Take over a record of the same generation."""
        record = self._copy.record
        if record.primary is None or self._copy.me not in record.members:
            self._is_open = False

    def take_over(self) -> None:
        """Propose to become the primary and leave the present one out; only a member in sync can."""
        copy, record = self._copy, self._copy.record
        if copy.me not in record.in_sync or copy.proposed is not None:
            return
        others = (each for each in record.in_sync[1:] if each != copy.me)
        copy.propose_record(
            msgspec.structs.replace(record, generation=record.generation + 1, in_sync=(copy.me, *others))
        )

    def begin(self, begin: Begin) -> None:
        """Open a session. The record here is at least as new as the primary's was.

        Raises:
            Violation: The record does not permit this session.
        """
        copy = self._copy
        if begin.session <= self._session:
            return  # of an earlier link
        if not self._may_begin(begin):
            # A primary with an older record may have sent this `Begin` before it struck this member out.
            if begin.version == copy.record.changed:
                raise Violation("begin", f"anew is {begin.anew}, with {copy.record}")
            return
        if begin.anew:
            copy.drop(begin.start)
            copy.effects.append(StartAnew())
            self._equal = begin.start
        self._equal = max(self._equal, copy.log.committed)
        self._session, self._is_open = begin.session, True
        # A new primary may know less than this member of the entries that are committed.
        self._watermark, self._reported = 0, None
        copy.send(
            copy.record.in_sync[0],
            Begun(**copy.of_bundle, session=self._session, position=self._equal, applied=copy.log.applied),
        )

    def _may_begin(self, begin: Begin) -> bool:
        copy = self._copy
        if begin.anew:
            return copy.me in copy.record.joining
        # A joining member with all pieces may already be in sync in a record that it has not received.
        joined = copy.me in copy.record.joining and self._session > 0 and copy.is_whole
        return copy.me in copy.record.in_sync or joined

    def received(self, message: Copy | Committed | PieceCopy, content: object) -> None:
        """Take a message of the primary.

        Raises:
            Violation: The message contradicts the earlier ones. The state is unchanged.
        """
        if message.session > self._session:
            raise Violation("session", f"{message.session} has not begun, after {self._session}")
        if message.session < self._session or not self._is_open:
            return
        if isinstance(message, PieceCopy):
            self._take_piece(message, content)
            return
        self._check_watermarks(message)
        if isinstance(message, Copy):
            self._take_entry(message, content)
        self._watermark = message.committed
        log = self._copy.log
        entries = log.commit(min(self._watermark, self._equal))
        if entries:
            self._copy.effects.append(Apply(entries))
        log.truncate(message.applied_by_all)

    def _check_watermarks(self, message: Copy | Committed) -> None:
        if message.committed < self._watermark:
            raise Violation("committed", f"{message.committed} after {self._watermark}")
        if message.applied_by_all > message.committed:
            raise Violation("applied", f"{message.applied_by_all}, of {message.committed} that are committed")

    def _take_entry(self, message: Copy, content: object) -> None:
        if message.position != self._equal + 1:
            raise Violation("position", f"{message.position} after {self._equal}")
        before = self._copy.log.at(self._equal)
        oldest = before.generation if before is not None else 0
        if not oldest <= message.origin <= self._generation:
            raise Violation("origin", f"{message.origin}, not within {oldest} and {self._generation}")
        self._copy.log.put(Entry(message.position, message.origin, content, message.nbytes))
        self._equal = message.position

    def expects_piece(self, message: PieceCopy) -> bool:
        """Return whether a piece is the next one that this member lacks in the present session."""
        is_next = message.piece == len(self._copy.pieces) and not self._copy.is_whole
        return is_next and self._is_open and message.session == self._session

    def _take_piece(self, message: PieceCopy, content: object) -> None:
        copy = self._copy
        if message.piece != len(copy.pieces) or copy.is_whole:
            raise Violation("piece", f"{message.piece}, after {len(copy.pieces)} of {copy.bundle.pieces}")
        if not copy.log.applied <= message.position <= self._equal:
            raise Violation(
                "piece", f"at {message.position}, not within {copy.log.applied} and {self._equal}"
            )
        copy.pieces.append(message.position)
        copy.effects.append(TakePiece(message.piece, message.position, content))

    def report(self) -> None:
        """Send the primary a `Held` that has changed."""
        copy = self._copy
        held = (self._equal, copy.log.applied, len(copy.pieces))
        if not self._is_open or held == self._reported:
            return
        self._reported = held
        copy.send(
            copy.record.in_sync[0],
            Held(**copy.of_bundle, session=self._session, position=held[0], applied=held[1], pieces=held[2]),
        )
