"""Pure: what is said waits for what is written before it."""

from collections import deque

from adam_async.controller.consensus.events import Persist
from adam_async.controller.consensus.messages import Message
from adam_async.controller.consensus.records import Record


class Outbox:
    """Records on their way to the disk, and messages that wait for them, both in order."""

    def __init__(self) -> None:
        self._records: list[Record] = []
        self._written = 0
        """Number of the last `Persist`."""
        self._durable = 0
        self._held: deque[tuple[int, Message]] = deque()
        """Messages, each with the number of the `Persist` that it waits for."""

    def record(self, record: Record) -> None:
        """Write this down with the next `Persist`."""
        self._records.append(record)

    def hold(self, message: Message) -> None:
        """Say this when all that was recorded until now is on disk."""
        self._held.append((self._written + bool(self._records), message))

    def persist(self) -> Persist | None:
        """Take what is to be written now; None if there is nothing."""
        if not self._records:
            return None
        self._written += 1
        records, self._records = tuple(self._records), []
        return Persist(self._written, records)

    def persisted(self, number: int) -> None:
        """All up to this `Persist` is on disk."""
        assert number <= self._written, (number, self._written)
        self._durable = max(self._durable, number)

    def next(self) -> Message | None:
        """Take the first message that waits for nothing any more; None if there is none."""
        if not self._held or self._held[0][0] > self._durable:
            return None
        return self._held.popleft()[1]

    @property
    def is_settled(self) -> bool:
        """Whether there is nothing to be written or said now."""
        return not self._records and (not self._held or self._held[0][0] > self._durable)
