"""Pure: what the nodes of a group say to each other, and what they agree on.

    AskVote   -> Vote        shall I lead? with `pre`: would you say yes, if I asked?
    Append    -> Appended    here are entries, or none: a heartbeat
    Chunk     -> Taken       here is a piece of a snapshot, for one whose entries are no longer kept
    TakeOver                 ask for votes now: I am leaving

Every message says who it is for. An answer has the term of the one who answers.
"""

import msgspec

from adam_async.controller.consensus.membership import Members


class Entry(msgspec.Struct, frozen=True, array_like=True):
    """One place of the log: a command, a new membership, or, with neither, the first word of a leader."""

    index: int
    term: int
    """Of the leader that put it there."""
    command: bytes | None = None
    members: Members | None = None


class Snapshot(msgspec.Struct, frozen=True, tag="snapshot"):
    """The state after all entries up to `index`, in place of these entries."""

    index: int = 0
    term: int = 0
    """Of the entry at `index`."""
    members: Members = Members()
    """In force at `index`."""
    state: bytes = b""


class Body(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Base of all messages."""

    sender: str
    to: str
    term: int


class AskVote(Body, frozen=True, kw_only=True):
    """The sender wants to lead in `term`; with `pre`, in the term after it, if that would succeed."""

    last_index: int
    last_term: int
    """Of the last entry of its log."""
    pre: bool
    transfer: bool = False
    """The leader wants this: a leader that is heard is no reason to say no."""


class Vote(Body, frozen=True, kw_only=True):
    """The answer to `AskVote`."""

    pre: bool
    granted: bool


class Append(Body, frozen=True, kw_only=True):
    """Entries that follow the one at `prev_index`. The sender leads in `term`.

    Raises:
        ValueError: They do not follow it.
    """

    prev_index: int
    prev_term: int
    entries: tuple[Entry, ...]
    commit: int
    """All entries up to here are committed."""
    round: int
    """Reads that wait for answers to this or a later round may be answered."""

    def __post_init__(self) -> None:
        for index, entry in enumerate(self.entries, self.prev_index + 1):
            if entry.index != index or entry.term > self.term:
                raise ValueError(
                    f"entry {entry.index} of term {entry.term} is not {index} of a term up to {self.term}"
                )


class Appended(Body, frozen=True, kw_only=True):
    """The answer to `Append`; also that to the last `Chunk`, and to one that is not needed."""

    ok: bool
    match: int
    """If `ok`, both logs are the same up to here, durably. If not, they may be."""
    prev_index: int = 0
    """Of the `Append` that did not fit."""
    round: int


class Chunk(Body, frozen=True, kw_only=True):
    """The bytes of a snapshot's state from `offset` on. The sender leads in `term`."""

    index: int
    index_term: int
    members: Members
    size: int
    crc: int
    """Size and CRC-32 of the whole state."""
    offset: int
    data: bytes
    round: int


class Taken(Body, frozen=True, kw_only=True):
    """The receiver has the first `offset` bytes of the snapshot at `index`."""

    index: int
    offset: int
    round: int


class TakeOver(Body, frozen=True, kw_only=True):
    """The leader wants the receiver, which has all entries, to lead."""


Message = AskVote | Vote | Append | Appended | Chunk | Taken | TakeOver
