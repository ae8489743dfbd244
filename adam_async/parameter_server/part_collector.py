"""Pure: the parts of incomplete entries and pieces, by senders and classes of messages.

An entry and a piece of the primary may arrive at the same time, on two links. Only the parts of the primary
are kept, so the memory for one bundle is at most twice `MOST_BYTES`.
"""

from collections.abc import Container

from adam_async.messages.replication import Copy, PieceCopy
from adam_async.parameter_server.log_entries import Part, entry_bytes
from adam_async.run.bundle_record import Member
from transport import RemoteProtocolError

MOST_PARTS = 64
"""Maximum number of parts of an entry; a batch has fewer pushes."""

MOST_PIECE_PARTS = 1024
"""Maximum number of parts of a piece."""

MOST_BYTES = 1 << 30
"""Maximum size of an entry or a piece, in bytes."""


class PartCollector:
    """Joins the parts of messages between the members of a bundle."""

    def __init__(self) -> None:
        self._parts: dict[tuple[Member, type[Copy | PieceCopy]], list[Part]] = {}

    def __len__(self) -> int:
        """Return the number of incomplete messages."""
        return len(self._parts)

    def keep(self, members: Container[Member | None]) -> None:
        """Forget the parts of all other senders."""
        self._parts = {key: parts for key, parts in self._parts.items() if key[0] in members}

    def forget(self, sender: Member) -> None:
        """Forget the parts of a sender: its link has ended."""
        self._parts = {key: parts for key, parts in self._parts.items() if key[0] != sender}

    def add(self, sender: Member, message: Copy | PieceCopy, tensors: Part) -> list[Part] | None:
        """Add a part to those before it; return all of them with the last one.

        Raises:
            RemoteProtocolError: No correct member sends this part.
        """
        parts = self._parts.pop((sender, type(message)), [])
        if message.part == 0:
            parts = []  # those before it were of an earlier link
        most = MOST_PARTS if isinstance(message, Copy) else MOST_PIECE_PARTS
        if not tensors or message.part != len(parts) or not message.part < message.parts <= most:
            raise RemoteProtocolError(
                "replication", f"part {message.part} of {message.parts} after {len(parts)} parts"
            )
        parts.append(tensors)
        size, is_last = entry_bytes(parts), len(parts) == message.parts
        if not size <= message.nbytes <= MOST_BYTES or (is_last and size != message.nbytes):
            raise RemoteProtocolError(
                "replication", f"{size} bytes in {len(parts)} of {message.parts} parts, not {message.nbytes}"
            )
        if is_last:
            return parts
        self._parts[sender, type(message)] = parts
        return None
