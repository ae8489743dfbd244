"""The pieces of a bundle that a joining server already has on its disk, so the primary need not send them.

Theory of operation
-------------------
With each acknowledgement a joining member names the position at which its disk has the next piece. The
primary knows a position after which no entry has changed that piece's arrays. If the offered position is not
before this one, the primary sends the piece without its arrays: the tables, the pending pushes, and a digest
of the primary's arrays. The member reads the arrays from its disk, compares the digest, and then hands the
whole piece to its core. For the core the piece only arrives later, as on a slow link.

*Why the digest decides.* Equal digests mean equal bits, whichever primary, generation or entries led to them.
Positions only spare the primary the digests of changed pieces. A wrong position costs bytes, but never
changes a value. A disk has only committed entries in its pieces, but the values may come from another
arithmetic: see "Numerics" in decision 30.

The primary digests a piece in one round of its loop, so it sends a very large piece with its arrays.

*If the arrays cannot be read or their digest differs*, the member ends the link. The next session begins with
an empty copy, as always, and in it the member offers no piece.

*Bounds.* An offer is one number. A member reads at most one piece at a time, and the primary keeps at most
one offer per member.
"""

import asyncio
from collections.abc import Callable, Container, Coroutine
from typing import Any

import msgspec

from adam_async.errors import DataError
from adam_async.messages.replication import Held, PieceCopy
from adam_async.parameter_server.bundle_saver import BundleSaver
from adam_async.parameter_server.log_entries import Part
from adam_async.parameter_server.replication.local_copy import CopyPiece, Message
from adam_async.persistence.records import StateName
from adam_async.run.store_record import Member
from transport import RemoteProtocolError

READ_S = 20.0
"""Maximum time in seconds to open the store and read a piece; after it the primary sends all pieces."""


class OfferedPieces:
    """The offers of pieces in one bundle, both from this member and to it.

    Args:
        saver: Follows the changed pieces for the disk; None without a disk.
        spawn: Starts a task of the server, by name.

    Attributes:
        taken: Number of pieces whose arrays came from the disk.
    """

    def __init__(
        self,
        saver: BundleSaver | None,
        spawn: Callable[[str, Coroutine[Any, Any, None]], "asyncio.Task[None]"],
    ) -> None:
        self._saver = saver
        self._spawn = spawn
        self._is_offering = True
        self._reading: asyncio.Task[None] | None = None
        self._offers: dict[Member, Held] = {}
        self.taken = 0

    # --- of this member ----------------------------------------------------------------------

    def with_offer(self, message: Message) -> Message:
        """Return a message; to an acknowledgement, add the position of the next piece on the disk."""
        if self._saver is None or not self._is_offering or not isinstance(message, Held):
            return message
        if not message.pieces:
            return message  # piece 0 has no arrays
        offered = self._saver.disk.position_of(StateName(self._saver.home, message.pieces))
        return msgspec.structs.replace(message, offered=offered)

    def read(
        self, message: PieceCopy, arrays: int, then: Callable[[Part], None], failed: Callable[[str], None]
    ) -> None:
        """Read the arrays of a piece from the disk, and compare their digest with the primary's.

        Args:
            arrays: Number of arrays in the piece.
            then: Called with the arrays.
            failed: Called with the reason if the disk lacks these arrays.

        Raises:
            RemoteProtocolError: This member has not offered the piece.
        """
        if self._saver is None or not self._is_offering or self._reading is not None:
            raise RemoteProtocolError("piece", f"{message.piece} lacks its arrays, which were not offered")
        reading = self._read(self._saver, message, arrays, then, failed)
        self._reading = self._spawn(f"reads-piece-{message.piece}", reading)

    async def _read(
        self,
        saver: BundleSaver,
        message: PieceCopy,
        arrays: int,
        then: Callable[[Part], None],
        failed: Callable[[str], None],
    ) -> None:
        reason = f"it was not read in {READ_S:g} s"
        try:
            async with asyncio.timeout(READ_S):
                found, digest = await saver.disk.read_arrays(StateName(saver.home, message.piece), arrays)
            reason = "" if _is_same(digest, message.digest) else "it has other bits than the primary's"
        except TimeoutError:
            pass
        except DataError as error:
            reason = str(error)
        self._reading = None
        if reason:
            self._is_offering = False
            failed(reason)
            return
        self.taken += 1
        then(found)

    def drop(self) -> None:
        """Stop reading: another session begins, or this member leaves."""
        if self._reading is not None:
            self._reading.cancel()
            self._reading = None

    # --- to this member ----------------------------------------------------------------------

    def received(self, sender: Member, message: Message) -> None:
        """Record the offer in an accepted message, if the message is an acknowledgement."""
        if isinstance(message, Held):
            self._offers[sender] = message

    def keep(self, members: Container[Member]) -> None:
        """Forget the offers of all servers that are no members."""
        self._offers = {member: offer for member, offer in self._offers.items() if member in members}

    def is_unchanged(self, asked: CopyPiece, position: int) -> bool:
        """Return whether no entry has changed the arrays of an offered piece since the offered position.

        Args:
            asked: The piece, its receiving member, and their session.
            position: Position of the last entry in the piece on this server.
        """
        offer = self._offers.get(asked.to)
        if offer is None or self._saver is None or offer.offered is None:
            return False
        is_present = (offer.session, offer.pieces) == (asked.session, asked.piece)
        return is_present and self._saver.changed_at(asked.piece) <= offer.offered <= position


def _is_same(mine: bytes, theirs: bytes) -> bool:
    """Return whether the arrays on the disk have the digest of the primary's arrays."""
    return mine == theirs
