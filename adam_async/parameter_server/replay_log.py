"""Pure: the log of the order in which pushes were applied to each shard, and of their batches; for a replay.

A log is one run of bytes, all numbers little-endian:

    b"adamord1"
    uint32 clients, uint32 shards
    clients times  int32 replica, uint32 zero, uint64 session, uint64 incarnation
    shards times   uint32 shard, uint32 zero, uint64 entries
    for each shard, in that order, its entries of 8 bytes:
                   uint32 clock, uint16 client, uint8 flags, uint8 zero

A *client* is a pushing replica generation with its session (`ReplicaGeneration`); (client, clock) names a
push. In `ENTRY` the number of the client is the field `life`.

Flags: `JOINED`: applied in one batch with the entry before. `NOT_APPLIED`: refused; the shard did not change.
`SUMMED` (in bsp): a contribution to a sum; the entries of one sum are joined, in the order of addition. A sum
is one version, and so is each other applied push.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from struct import Struct
from typing import Any

import numpy as np
from numpy.typing import NDArray

MAGIC = b"adamord1"
JOINED, NOT_APPLIED, SUMMED = 1, 2, 4

_COUNTS = Struct("<II")
_REPLICA_GENERATION = Struct("<iIQQ")
_SHARD = Struct("<IIQ")
_ENTRY = Struct("<IHBx")

ENTRY = np.dtype([("clock", "<u4"), ("life", "<u2"), ("flags", "u1"), ("zero", "u1")])
"""Type of one entry."""


@dataclass(frozen=True, slots=True)
class ReplicaGeneration:
    """One pushing client."""

    replica: int
    session: int
    incarnation: int


class OrderLog:
    """The log of one bundle on one server."""

    def __init__(self, shards: Sequence[int]) -> None:
        self._replica_generations: dict[ReplicaGeneration, int] = {}
        self._entries: dict[int, bytearray] = {shard: bytearray() for shard in shards}
        self._packed = b""
        self._packed_entries = -1

    def replica_generation(self, replica: int, session: int, incarnation: int) -> int:
        """Return the number of a client in this log."""
        return self._replica_generations.setdefault(
            ReplicaGeneration(replica, session, incarnation), len(self._replica_generations)
        )

    def note(self, shard: int, clock: int, replica_generation: int, flags: int) -> None:
        """Append a push that was applied to a shard, or refused."""
        self._entries[shard] += _ENTRY.pack(clock, replica_generation, flags)

    def packed(self) -> bytes:
        """Return the log so far, in the layout above; the same object until the next entry."""
        entries = sum(map(len, self._entries.values()))
        if entries != self._packed_entries:
            replica_generations = [
                _REPLICA_GENERATION.pack(
                    replica_generation.replica, 0, replica_generation.session, replica_generation.incarnation
                )
                for replica_generation in self._replica_generations
            ]
            heads = [_SHARD.pack(n, 0, len(data) // _ENTRY.size) for n, data in self._entries.items()]
            head = _COUNTS.pack(len(replica_generations), len(heads))
            self._packed = b"".join([MAGIC, head, *replica_generations, *heads, *self._entries.values()])
            self._packed_entries = entries
        return self._packed


def read_order_log(data: bytes) -> tuple[tuple[ReplicaGeneration, ...], Mapping[int, NDArray[Any]]]:
    """Read a log: the pushing clients, and per shard its entries, of dtype `ENTRY`, read-only.

    Raises:
        ValueError: The data are no log, or a log of another version or of another length than its tables
            give.
    """
    if data[: len(MAGIC)] != MAGIC:
        raise ValueError(f"an order log begins with {MAGIC!r}, not {bytes(data[: len(MAGIC)])!r}")
    at = len(MAGIC)
    if len(data) < at + _COUNTS.size:
        raise ValueError(f"an order log of {len(data)} bytes has no counts")
    generations_count, shards_count = _COUNTS.unpack_from(data, at)
    at += _COUNTS.size
    body = at + generations_count * _REPLICA_GENERATION.size + shards_count * _SHARD.size
    if len(data) < body:
        raise ValueError(f"an order log of {len(data)} bytes ends in its tables, which take {body}")
    replica_generations = []
    for _ in range(generations_count):
        replica, _zero, session, incarnation = _REPLICA_GENERATION.unpack_from(data, at)
        replica_generations.append(ReplicaGeneration(replica, session, incarnation))
        at += _REPLICA_GENERATION.size
    heads = [_SHARD.unpack_from(data, at + n * _SHARD.size) for n in range(shards_count)]
    wanted = body + _ENTRY.size * sum(entries for _, _, entries in heads)
    if len(data) != wanted:
        raise ValueError(f"an order log should have {wanted} bytes by its tables, but has {len(data)}")
    found: dict[int, NDArray[Any]] = {}
    at = body
    for shard, _zero, entries in heads:
        found[shard] = np.frombuffer(data, ENTRY, entries, at)
        at += entries * _ENTRY.size
    return tuple(replica_generations), found
