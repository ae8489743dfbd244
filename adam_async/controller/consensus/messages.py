"""Pure: the messages between the nodes of a group, and the entries of their log.

    AskVote   -> Vote        request for a vote; with `pre` for a pre-vote
    Append    -> Appended    entries, or a heartbeat without any
    Chunk     -> Taken       piece of a snapshot, for a node whose next entries are no longer kept
    TakeOver                 request to start an election at once, because the leader steps down

Every message names its receiver's identity. An answer has the answering node's term.
"""

import msgspec

from adam_async.controller.consensus.membership import Members


class Entry(msgspec.Struct, frozen=True, array_like=True):
    """One log entry: a command, a new membership, or neither, as in the first entry of a leader's term."""

    index: int
    term: int
    """Term of the leader that appended the entry."""
    command: bytes | None = None
    members: Members | None = None


class Snapshot(msgspec.Struct, frozen=True, tag="snapshot"):
    """The state after all entries up to `index`, in place of these entries."""

    index: int = 0
    term: int = 0
    """Term of the entry at `index`."""
    members: Members = Members()
    """Membership in force at `index`."""
    state: bytes = b""


class Body(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Base of all messages."""

    sender: str
    to: str
    term: int


class AskVote(Body, frozen=True, kw_only=True):
    """Request for a vote in `term`; with `pre`, only the question whether the next term would get a vote."""

    last_index: int
    last_term: int
    """Term of the last entry in the sender's log."""
    pre: bool
    transfer: bool = False
    """Whether the leader asked for this election; a node then votes even if it receives messages from a
    leader."""


class Vote(Body, frozen=True, kw_only=True):
    """The answer to `AskVote`."""

    pre: bool
    granted: bool


class Append(Body, frozen=True, kw_only=True):
    """Entries that follow the one at `prev_index`. The sender leads in `term`.

    Raises:
        ValueError: The entries do not follow `prev_index`, or an entry has a later term than the message.
    """

    prev_index: int
    prev_term: int
    entries: tuple[Entry, ...]
    commit: int
    """Commit index of the leader."""
    round: int
    """Latest round of reads; an answer repeats the number."""

    def __post_init__(self) -> None:
        for index, entry in enumerate(self.entries, self.prev_index + 1):
            if entry.index != index or entry.term > self.term:
                raise ValueError(
                    f"entry {entry.index} of term {entry.term} is not {index} of a term up to {self.term}"
                )


class Appended(Body, frozen=True, kw_only=True):
    """The answer to an `Append`, and to a `Chunk` that completes a state, is unneeded or has an old term."""

    ok: bool
    match: int
    """Last index up to which both logs are durably equal; without `ok`, up to which they may be equal."""
    prev_index: int = 0
    """`prev_index` of the answered `Append`; otherwise 0."""
    round: int


class Chunk(Body, frozen=True, kw_only=True):
    """A piece of a snapshot's state, which begins at `offset`. The sender leads in `term`."""

    index: int
    index_term: int
    members: Members
    size: int
    crc: int
    """CRC-32 of the whole state, which has `size` bytes."""
    offset: int
    data: bytes
    round: int


class Taken(Body, frozen=True, kw_only=True):
    """The answer to a `Chunk`: its sender has the first `offset` bytes of the state at `index`."""

    index: int
    offset: int
    round: int


class TakeOver(Body, frozen=True, kw_only=True):
    """Request of the leader to the receiver, which has all entries, to start an election at once."""


Message = AskVote | Vote | Append | Appended | Chunk | Taken | TakeOver
