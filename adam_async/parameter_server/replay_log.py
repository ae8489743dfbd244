"""Pure: the log of a bundle for a replay: the order of pushes on each shard, and the reads of each step.

A log is one run of bytes, all numbers little-endian:

    b"adamord2"
    uint32 clients, uint32 shards, uint64 bytes of the steps
    clients times  int32 replica, uint32 zero, uint64 session, uint64 incarnation
    shards times   uint32 shard, uint32 zero, uint64 entries
    for each shard, in that order, its entries of 8 bytes:
                   uint32 clock, uint16 client, uint8 flags, uint8 zero
    for each step of which a push arrived, in the order of arrival:
                   uint32 clock, uint16 client, uint16 zero, uint32 size, and its reads, so many bytes

A *client* is a pushing replica generation with its session (`ReplicaGeneration`); the pair (client, clock)
names a push. The workers make the reads (`worker/pusher.py`). Each message of a step has them, because a
worker may be lost before another bundle gets the step.

Flags: `JOINED`: applied in one batch with the entry before. `NOT_APPLIED`: refused; the shard did not change.
`SUMMED` (in bsp): a contribution to a sum. Entries of one sum are adjacent, in the order of addition. A sum
is one version, and so is each other applied push. `SKIPPED`: not applied, whatever the gradient is, because
the shard had the groups already or the contribution came too late for its sum.

The log depends only on the entries of the bundle, so every copy of the bundle has the same log. Only in bsp
copies may note a refused contribution before or after a sum in progress.
"""

from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from struct import Struct
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from adam_async.messages.body import MOST_RANGES

MAGIC = b"adamord2"
JOINED, NOT_APPLIED, SUMMED, SKIPPED = 1, 2, 4, 8

MOST_LOG_BYTES = 512 << 20
"""Maximum size of a bundle's log, in bytes; a run with a larger log has no record. A piece may be twice as
large, so a joining server can take the log."""

MOST_PACKED_BYTES = MOST_LOG_BYTES + (8 << 20)
"""Maximum size of a packed log, in bytes: a log, and its tables of clients and shards."""

MOST_CLIENTS = 1 << 16
"""Maximum number of clients in a log."""

MOST_CLOCK = (1 << 32) - 1
"""Highest clock that an entry holds."""

_COUNTS = Struct("<IIQ")
_REPLICA_GENERATION = Struct("<iIQQ")
_SHARD = Struct("<IIQ")
_ENTRY = Struct("<IHBx")
_STEP = Struct("<IHxxI")

ENTRY = np.dtype([("clock", "<u4"), ("client", "<u2"), ("flags", "u1"), ("zero", "u1")])
"""Type of one entry."""


@dataclass(frozen=True, slots=True, order=True)
class ReplicaGeneration:
    """One pushing client."""

    replica: int
    session: int
    incarnation: int


class LoggedStep(NamedTuple):
    """The reads of one step."""

    client: int
    clock: int
    reads: bytes


class LogContent(NamedTuple):
    """The content of a log."""

    clients: tuple[ReplicaGeneration, ...]
    entries: Mapping[int, NDArray[Any]]
    """Entries of each shard, of dtype `ENTRY`, read-only."""
    steps: tuple[LoggedStep, ...]


class OrderLog:
    """The log of one bundle on one server.

    Attributes:
        fault: Reason why the log ended before the run; empty if it has not ended.
    """

    def __init__(self, shards: Sequence[int]) -> None:
        self.fault = ""
        self._clients: dict[ReplicaGeneration, int] = {}
        self._entries: dict[int, bytearray] = {shard: bytearray() for shard in shards}
        self._steps = bytearray()
        self._clocks: dict[int, int] = {}
        """For each client whose reads are in the log, the clock of its last step."""
        self._nbytes = 0
        self._packed = b""
        self._packed_bytes = -1

    def client(self, replica: int, session: int, incarnation: int) -> int:
        """Return the number of a client in this log."""
        client = ReplicaGeneration(replica, session, incarnation)
        number = self._clients.setdefault(client, len(self._clients))
        if number >= MOST_CLIENTS:
            self.end(f"more than {MOST_CLIENTS} replica generations pushed")
            return 0
        return number

    def note(self, shard: int, clock: int, client: int, flags: int) -> None:
        """Append a push that was applied to a shard, or refused."""
        if self._has_room(clock, _ENTRY.size):
            self._entries[shard] += _ENTRY.pack(clock, client, flags)

    def note_reads(self, clock: int, client: int, reads: NDArray[Any]) -> None:
        """Append the reads of a step when the first of its messages reaches the bundle."""
        # Push numbers have no gaps, so the steps of a client begin in the order of their clocks.
        if clock > self._clocks.get(client, -1) and self._has_room(clock, _STEP.size + reads.nbytes):
            self._clocks[client] = clock
            self._steps += _STEP.pack(clock, client, reads.nbytes)
            self._steps += reads.tobytes()

    def _has_room(self, clock: int, nbytes: int) -> bool:
        """Count bytes that the log grows by. Returns False if the log has ended, perhaps now."""
        if self._nbytes + nbytes > MOST_LOG_BYTES:
            self.end(f"it would exceed {MOST_LOG_BYTES >> 20} MiB: record fewer epochs, or larger groups")
        if clock > MOST_CLOCK:
            self.end(f"a push has clock {clock}, {MOST_CLOCK} is the highest")
        if self.fault:
            return False
        self._nbytes += nbytes
        return True

    def end(self, fault: str) -> None:
        """Give up the log, and its memory: the run has no record. The first fault stays."""
        self.fault = self.fault or fault
        self._clients.clear()
        self._steps.clear()
        self._clocks.clear()
        for entries in self._entries.values():
            entries.clear()

    def take(self, part: LogContent | None) -> None:
        """Take the log of some shards, or the steps, from a piece that the primary sent; see `part`."""
        if part is None:
            self.end("it had ended on the primary that this copy was taken from")
            return
        # Each copy numbers clients in the order in which it saw them.
        numbers = np.array([self.client(*astuple(each)) for each in part.clients], "<u2")
        for shard, entries in part.entries.items():
            if self._has_room(0, entries.nbytes - len(self._entries[shard])):
                mine = entries.copy()
                mine["client"] = numbers[entries["client"]]
                self._entries[shard] = bytearray(mine.tobytes())
        for step in part.steps:
            self.note_reads(step.clock, int(numbers[step.client]), np.frombuffer(step.reads, np.uint8))

    def part(self, shards: Sequence[int]) -> bytes:
        """Return the log of some shards for a joining server; without shards, the steps.

        Empty if the log has ended.
        """
        if self.fault:
            return b""
        return self._pack({shard: self._entries[shard] for shard in shards}, b"" if shards else self._steps)

    def packed(self) -> bytes:
        """Return the log so far, in the layout above; until the next entry, always the same object."""
        if self._nbytes != self._packed_bytes:
            self._packed, self._packed_bytes = self._pack(self._entries, self._steps), self._nbytes
        return self._packed

    def _pack(self, of_shards: Mapping[int, bytearray], steps: bytes | bytearray) -> bytes:
        clients = [
            _REPLICA_GENERATION.pack(each.replica, 0, each.session, each.incarnation)
            for each in self._clients
        ]
        heads = [_SHARD.pack(n, 0, len(data) // _ENTRY.size) for n, data in of_shards.items()]
        head = _COUNTS.pack(len(clients), len(heads), len(steps))
        return b"".join([MAGIC, head, *clients, *heads, *of_shards.values(), steps])


def most_read_bytes(groups: Sequence[int], *, shards: int, arrays: int) -> int:
    """Return the maximum size of a step's reads, in bytes; see `worker/pusher.py`.

    Args:
        groups: Groups of the step, as in `Push.groups`; a step without groups counts as one group.
        shards: Number of shards in the store.
        arrays: Number of its arrays.
    """
    count = sum(groups[2::2]) - sum(groups[1::2])
    return max(min(count, MOST_RANGES), 1) * (16 + 4 * (shards + arrays))


def read_order_log(data: bytes) -> LogContent:
    """Read a log.

    Raises:
        ValueError: The data are not a log, have another version, or have a length that does not fit their
            tables; or they name a client that they do not list.
    """
    if data[: len(MAGIC)] != MAGIC:
        raise ValueError(f"an order log begins with {MAGIC!r}, not {bytes(data[: len(MAGIC)])!r}")
    at = len(MAGIC)
    if len(data) < at + _COUNTS.size:
        raise ValueError(f"an order log of {len(data)} bytes has no counts")
    clients_count, shards_count, steps_bytes = _COUNTS.unpack_from(data, at)
    at += _COUNTS.size
    body = at + clients_count * _REPLICA_GENERATION.size + shards_count * _SHARD.size
    if clients_count > MOST_CLIENTS:
        raise ValueError(f"an order log has {clients_count} clients, and {MOST_CLIENTS} are the most")
    if len(data) < body:
        raise ValueError(f"an order log of {len(data)} bytes ends in its tables, which take {body}")
    clients = []
    for _ in range(clients_count):
        replica, _zero, session, incarnation = _REPLICA_GENERATION.unpack_from(data, at)
        clients.append(ReplicaGeneration(replica, session, incarnation))
        at += _REPLICA_GENERATION.size
    heads = [_SHARD.unpack_from(data, at + n * _SHARD.size) for n in range(shards_count)]
    wanted = body + _ENTRY.size * sum(entries for _, _, entries in heads) + steps_bytes
    if len(data) != wanted:
        raise ValueError(f"an order log should have {wanted} bytes by its tables, but has {len(data)}")
    found: dict[int, NDArray[Any]] = {}
    at = body
    for shard, _zero, entries in heads:
        found[shard] = np.frombuffer(data, ENTRY, entries, at)
        at += entries * _ENTRY.size
        if entries and int(found[shard]["client"].max()) >= clients_count:
            raise ValueError(f"the pushes of shard {shard} are of a client that an order log does not list")
    return LogContent(tuple(clients), found, _read_steps(data, at, clients_count))


def _read_steps(data: bytes, at: int, clients: int) -> tuple[LoggedStep, ...]:
    steps = []
    while at < len(data):
        if len(data) - at < _STEP.size:
            raise ValueError(f"an order log of {len(data)} bytes ends in the head of a step")
        clock, client, size = _STEP.unpack_from(data, at)
        at += _STEP.size + size
        if at > len(data) or client >= clients:
            raise ValueError(f"the step of client {client} with clock {clock} does not fit an order log")
        steps.append(LoggedStep(client, clock, data[at - size : at]))
    return tuple(steps)
