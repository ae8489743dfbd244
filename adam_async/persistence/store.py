"""A write-back store of the states of shards, on disk behind a server (stub; see the docstrings)."""

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from adam_async.persistence.findings import Recovery
from adam_async.persistence.identity import Identity
from adam_async.persistence.keys import EntryKey, Part, State, StateKey, StateName
from adam_async.persistence.statistics import SegmentStatistics
from adam_async.runtime.clock import Clock
from adam_async.runtime.disk import Disk


@dataclass(frozen=True, slots=True, kw_only=True)
class FlushSettings:
    """Settings of a segment store.

    Attributes:
        flush_s: Time between the begins of two rounds, in seconds.
        dirty_bytes: Bytes of dirty states that begin a round after half of `flush_s` already.
        segment_bytes: Size of a segment file from which on another one follows, in bytes.
        batch_bytes: Size from which on copied states are handed to the disk's thread, in bytes. At most two
            batches are in memory at once.
    """

    flush_s: float = 1.0
    dirty_bytes: int = 64 << 20
    segment_bytes: int = 64 << 20
    batch_bytes: int = 4 << 20


Take = Callable[[StateName], Awaitable[State | None]]
"""Copies the newest state of a shard, on the loop, between two entries. None means: not now (an update comes
first, or the owner has not loaded the recovered state yet); the state on disk stays, and a dirty shard stays
dirty. The store awaits one call at a time, so that the owner may let other work pass in between."""


class SegmentStore:
    """The states of the shards of one store of arrays on one server, in a folder of its own.

    Args:
        disk: Disk of the states; a private one. The caller owns it.
        entries_disk: Disk, with a thread of its own, of the log entries, so that a durable append does not
            wait behind a round of states; `disk` itself works too.
        folder: Folder of this server and this store alone; it is made if absent.
        identity: Owner of the folder.
        take: Copies a state.
        clock: The loop's clock.
        wall_clock: Seconds since 1970.
        notice: Reports a text to the operator: damage, a full disk and its end, rounds that take too long.
    """

    def __init__(
        self,
        disk: Disk,
        entries_disk: Disk,
        folder: Path,
        identity: Identity,
        *,
        take: Take,
        clock: Clock,
        wall_clock: Clock,
        notice: Callable[[str], None],
        settings: FlushSettings | None = None,
    ) -> None:
        raise NotImplementedError

    @asynccontextmanager
    async def opened(self) -> AsyncIterator["SegmentStore"]:
        """Lock, read and repair the folder, for as long as the block lasts; see `recovery` then.

        All recovered states and entries are on disk again when the block begins. Run `run` in the block, as a
        task. The end of the block writes nothing: call `flush` before it, for an orderly end.

        Raises:
            OtherRun, OtherContents, NewerFormat: The folder is another owner's; it stays untouched.
            ConfigError: Another process has the folder, or it cannot be read or made.
            DiskFailed: A write failed.
        """
        raise NotImplementedError
        yield self

    @property
    def recovery(self) -> Recovery:
        """Contents of the folder at its opening."""
        raise NotImplementedError

    async def read_state(self, name: StateName) -> tuple[StateKey, list[memoryview]]:
        """Read the newest recovered state of a name; the parts have the borders of `State.parts`.

        Call this before the name is marked for the first time.

        Raises:
            KeyError: The folder has no state of this name.
            DamagedState: The bytes are damaged by now.
        """
        raise NotImplementedError

    async def read_entry(self, key: EntryKey) -> list[memoryview]:
        """Read an entry of `recovery`; before the first `applied` of its home.

        Raises:
            KeyError: The folder has no such entry.
            DamagedState: The bytes are damaged by now.
        """
        raise NotImplementedError

    def mark(self, name: StateName, nbytes: int, updates: int = 1) -> None:
        """Mark a shard dirty: its state has changed. Cheap; call it for each shard of an applied entry.

        Args:
            nbytes: Size of the shard's state, in bytes.
            updates: Number of updates, for the statistics.
        """
        raise NotImplementedError

    def applied(self, home: str, position: int) -> None:
        """Note that all entries of a bundle up to a position are applied, and their shards marked.

        A complete round makes the entries up to this position superfluous on disk. Only a user of
        `append_durably` needs it.
        """
        raise NotImplementedError

    def forget(self, home: str) -> None:
        """Forget a bundle: the server has left it. Its states and entries need no place on disk any more."""
        raise NotImplementedError

    async def append_durably(self, key: EntryKey, parts: Sequence[Part]) -> None:
        """Append a log entry; it is on disk on return. One ``fdatasync`` serves all calls that wait.

        Calls return in their order. On a full disk a call waits until there is room. Cancelling it drops the
        answer only. Not before `run`.

        Raises:
            DiskFailed: The fate of the entry is unknown; the process must acknowledge nothing any more.
        """
        raise NotImplementedError

    async def flush(self) -> None:
        """Write a round now; all shards marked before the call are on disk on return, if the disk has room.

        Not before `run`. `statistics().dirty` is 0 afterwards if all states could be taken and written.

        Raises:
            DiskFailed: As for `run`.
        """
        raise NotImplementedError

    async def run(self) -> None:
        """Write rounds and entries until cancelled.

        Raises:
            DiskFailed: A write or sync failed for another reason than a full disk. The caller ends its
                process: after a failed sync the fate of all unsynced bytes is unknown (I11).
        """
        raise NotImplementedError

    def statistics(self) -> SegmentStatistics:
        """Return the counts and ages now."""
        raise NotImplementedError


async def read_identity(disk: Disk, folder: Path) -> Identity | None:
    """Return the owner of a folder of segment files; None if it has none. Changes nothing.

    Raises:
        NewerFormat: The files are of a newer release.
        OSError: The folder cannot be read.
    """
    raise NotImplementedError
