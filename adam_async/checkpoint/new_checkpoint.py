"""A checkpoint that is being taken: its pieces on their way from the servers to the disk.

A reader puts in each piece on arrival, and a writer takes the pieces out. So a checkpoint needs memory for a
few pieces, not for the model. The records of the checkpoint follow after the last piece.
"""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator
from contextlib import suppress

from adam_async.checkpoint.checkpoint import Manifest
from adam_async.messages import ShardState
from adam_async.parameter_server.bundle import Bundle
from adam_async.parameter_server.piece_states import Catalogue, catalogue_state, piece_state, run_state
from adam_async.parameter_server.shard_transfer import state_of
from adam_async.persistence.records import State, StateName
from adam_async.run.run_record import RunRecord

MOST_BYTES = 64 << 20
"""Maximum total size in bytes of arrived but unwritten pieces, unless one alone is larger."""


class NewCheckpoint:
    """The pieces and records of one checkpoint, for one writer.

    Args:
        catalogue: The record of the store.
        most_bytes: Size of the waiting pieces from which on `put` waits, in bytes.

    Attributes:
        states: Tables of the shards so far, by number.
        manifest: The checkpoint, once it is complete; None before, and if it is dropped.
        read_s: Duration of the reading in seconds, once the reader has set it.
        busy_s: Time in which the writer has worked on pieces, in seconds.
        read_out_at: Time of the loop at which the writer had all pieces, in seconds.
    """

    def __init__(self, catalogue: Catalogue, most_bytes: float = MOST_BYTES) -> None:
        self.catalogue = catalogue
        self.states: dict[int, ShardState] = {}
        self.manifest: Manifest | None = None
        self.read_s = self.busy_s = self.read_out_at = 0.0
        self._record: RunRecord | None = None
        self._most_bytes = most_bytes
        self._pieces: deque[State] = deque()
        self._nbytes = 0
        """Size of the pieces that are not written, in bytes."""
        self._has_ended = False
        """Whether no piece follows."""
        self._changed = asyncio.Event()
        """Event that is set, and replaced, at each change."""

    async def put(self, name: StateName, bundle: Bundle, *, within_s: float | None = None) -> None:
        """Add a piece that has all shards of a bundle, as soon as there is room for it.

        Args:
            within_s: Time in seconds after which the piece is added without room; None: never.
        """
        specs = [shard.spec for shard in bundle.shards.values()]
        bundle.share_equal_tables()
        version = max(shard.version for shard in bundle.shards.values())
        state = piece_state(bundle, *name, specs, order=(0, version), is_copy=False)
        with suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                while not self._has_ended and self._nbytes and self._nbytes + state.nbytes > self._most_bytes:
                    await self._changed.wait()
        self.states.update({int(spec.id): state_of(bundle.shards[spec.id]) for spec in specs})
        if not self._has_ended:
            self._pieces.append(state)
            self._nbytes += state.nbytes
            self._announce()

    def complete(self, manifest: Manifest, record: RunRecord) -> None:
        """Add the records after the last piece; a dropped checkpoint stays dropped."""
        if not self._has_ended:
            self.manifest, self._record, self._has_ended = manifest, record, True
            self._announce()

    def drop(self) -> bool:
        """Give the checkpoint up, and take further pieces without effect.

        Returns False if the checkpoint is complete, or was dropped before.
        """
        if self._has_ended:
            return False
        self._has_ended = True
        self._pieces.clear()
        self._announce()
        return True

    def _announce(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def has_pieces(self) -> bool:
        """Wait for the first piece; returns False if the checkpoint is dropped before."""
        while not self._pieces and not self._has_ended:
            await self._changed.wait()
        return bool(self._pieces)

    async def pieces(self) -> AsyncGenerator[State, None]:
        """Yield the pieces as they arrive, until the checkpoint is complete or dropped."""
        loop = asyncio.get_running_loop()
        while await self.has_pieces():
            state, begin = self._pieces.popleft(), loop.time()
            yield state
            self.busy_s += loop.time() - begin
            self._nbytes -= state.nbytes
            self._announce()
        self.read_out_at = loop.time()

    def head(self) -> list[State]:
        """Return the records of the store and of the run; none for a dropped checkpoint."""
        if self._record is None:
            return []
        return [catalogue_state(self.catalogue), run_state(self._record, (1, self._record.ended))]

    def __repr__(self) -> str:
        return f"<NewCheckpoint {len(self.states)} shards, {self._nbytes} bytes>"
