"""Pure: a queue that keeps each message until the records made before it are on disk."""

from collections import deque

from adam_async.controller.consensus.events import Persist
from adam_async.controller.consensus.messages import Message
from adam_async.controller.consensus.records import LogFileRecord


class Outbox:
    """Records that are not on disk yet, and the messages that wait for them, both in order."""

    def __init__(self) -> None:
        self._records: list[LogFileRecord] = []
        self._written = 0
        """Number of the last `Persist`."""
        self._durable = 0
        self._held: deque[tuple[int, Message]] = deque()
        """Pairs of the number of a `Persist` and a message that waits for it."""

    def record(self, record: LogFileRecord) -> None:
        """Put a record into the next `Persist`."""
        self._records.append(record)

    def hold(self, message: Message) -> None:
        """Send a message once all records made so far are on disk."""
        self._held.append((self._written + bool(self._records), message))

    def persist(self) -> Persist | None:
        """Take the new records; None if there are none."""
        if not self._records:
            return None
        self._written += 1
        records, self._records = tuple(self._records), []
        return Persist(self._written, records)

    def persisted(self, number: int) -> None:
        """Note that all records up to this `Persist` are on disk."""
        assert number <= self._written, (number, self._written)
        self._durable = max(self._durable, number)

    def next(self) -> Message | None:
        """Take the first message whose records are on disk; None if there is none."""
        if not self._held or self._held[0][0] > self._durable:
            return None
        return self._held.popleft()[1]

    @property
    def is_settled(self) -> bool:
        """Whether no record and no message is due."""
        return not self._records and (not self._held or self._held[0][0] > self._durable)
