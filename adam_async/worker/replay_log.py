"""Pure: the log of the reads of a worker's groups, in a few bytes each, for a replay.

A log is one run of bytes, all numbers little-endian:

    b"adamrea1"
    int32 replica, uint32 zero, uint64 session, uint64 incarnation
    uint32 tensors
    tensors times  uint16 shards, uint16 length, and the tensor's name, so many bytes of UTF-8
    for each group that was pushed, in the order in which the worker's one thread trained them:
                   uint8 flags
      FULL         uint32 epoch, uint32 number; without it the group is the next one of the same epoch
      STEP         uint32 clock that its push carries; without it the group belongs to the step before
      RATED        float64 progress, if rates depend on it; without it that of the group before
      CHANGED      uint16 changes, and for each
                   uint16 tensor, uint8 local steps, uint32 version of each of its shards

A group reads the same tensors as the group before it, except for the *changes*, tensors that a pull had
replaced. In a run with local steps each tensor that was not replaced has one more local step, that of the
group before; the log does not note this step. A tensor replaced during the training of a group may already
contain that group's local step when the next group reads it: `local steps` counts such steps, all of them by
the groups right before.

The entry of a push takes at most 22 bytes for one group and one shard, 30 with a schedule; each further shard
takes at most 7 more.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from struct import Struct, error

from adam_async.messages import Lease
from adam_async.worker.puller import Snapshot, TensorCopy

MAGIC = b"adamrea1"
FULL, STEP, RATED, CHANGED = 1, 2, 4, 8

_HEAD = Struct("<iIQQI")
_TENSOR = Struct("<HH")
_FULL = Struct("<II")
_STEP = Struct("<I")
_RATED = Struct("<d")
_CHANGES = Struct("<H")
_CHANGE = Struct("<HB")


@dataclass(frozen=True, slots=True)
class Reader:
    """The pushing client of the groups."""

    replica: int
    session: int
    incarnation: int


@dataclass(frozen=True, slots=True)
class GroupRead:
    """One group, and the versions that it read."""

    epoch: int
    number: int
    clock: int
    """Clock of the group's push; consecutive groups with one clock are one step."""
    progress: float
    """Progress of the run at the group's lease; 0 if no rate depends on it."""
    versions: Mapping[str, tuple[int, ...]]
    """Version of each shard of each tensor."""
    local: Mapping[str, int]
    """Number of local steps on top of the versions: those of as many groups directly before this group."""


class ReadLog:
    """The log of one worker.

    Args:
        reader: The worker's pushing client.
        shards: Number of shards of each tensor.
        local: Whether groups make local steps.
        rated: Whether rates depend on progress.
    """

    def __init__(self, reader: Reader, shards: Mapping[str, int], *, local: bool, rated: bool) -> None:
        self._tensors = {name: index for index, name in enumerate(shards)}
        self._local = local
        self._rated = rated
        self._last: Lease | None = None
        self._clock = -1
        self._copies: Mapping[str, TensorCopy] = {}
        head = _HEAD.pack(reader.replica, 0, reader.session, reader.incarnation, len(shards))
        self.data = bytearray(MAGIC + head)
        for name, count in shards.items():
            text = name.encode()
            self.data += _TENSOR.pack(count, len(text)) + text

    def note(self, lease: Lease, clock: int, read: Snapshot) -> None:
        """Append a group that is pushed in the step of this clock; groups come in the order of training."""
        flags, parts = 0, [b""]
        last, self._last = self._last, lease
        if last is None or (last.epoch, last.number + 1) != (lease.epoch, lease.number):
            flags |= FULL
            parts.append(_FULL.pack(lease.epoch, lease.number))
        if clock != self._clock:
            self._clock = clock
            flags |= STEP
            parts.append(_STEP.pack(clock))
        if self._rated and (last is None or last.progress != lease.progress):
            flags |= RATED
            parts.append(_RATED.pack(lease.progress))
        changed = [
            self._change(name, copy, read)
            for name, copy in read.copies.items()
            if self._copies.get(name) is not copy
        ]
        self._copies = read.copies
        if changed:
            flags |= CHANGED
            parts += [_CHANGES.pack(len(changed)), *changed]
        parts[0] = bytes((flags,))
        self.data += b"".join(parts)

    def _change(self, name: str, copy: TensorCopy, read: Snapshot) -> bytes:
        local = read.local[name] if self._local and read.local is not None else 0
        versions = copy.versions
        return _CHANGE.pack(self._tensors[name], local) + Struct(f"<{len(versions)}I").pack(*versions)


def read_read_log(data: bytes, *, frozen: frozenset[str], local: bool) -> tuple[Reader, Iterator[GroupRead]]:
    """Read a log: its pushing client, and its groups in order.

    Args:
        frozen: Tensors that make no local steps.
        local: Whether groups make local steps.

    Raises:
        ValueError: The data are not a log, have another version, or are cut off; raised at once or by the
            iterator.
    """
    if data[: len(MAGIC)] != MAGIC:
        raise ValueError(f"a log of reads begins with {MAGIC!r}, not {bytes(data[: len(MAGIC)])!r}")
    at = len(MAGIC)
    tensors: list[tuple[str, int]] = []
    try:
        replica, _, session, incarnation, count = _HEAD.unpack_from(data, at)
        at += _HEAD.size
        for _ in range(count):
            shards, length = _TENSOR.unpack_from(data, at)
            at += _TENSOR.size + length
            tensors.append((bytes(data[at - length : at]).decode(), shards))
    except (error, UnicodeDecodeError) as broken:
        raise ValueError(f"a log of reads of {len(data)} bytes ends in its table: {broken}") from None
    return Reader(replica, session, incarnation), _groups(data, at, tensors, frozen if local else None)


def _groups(
    data: bytes, at: int, tensors: Sequence[tuple[str, int]], frozen: frozenset[str] | None
) -> Iterator[GroupRead]:
    epoch, number, clock, progress = 0, -1, 0, 0.0
    versions: dict[str, tuple[int, ...]] = {}
    local: dict[str, int] = {}
    while at < len(data):
        flags = data[at]
        at += 1
        number += 1
        if frozen is not None:
            local = {name: steps + (name not in frozen) for name, steps in local.items()}
        try:
            if flags & FULL:
                epoch, number = _FULL.unpack_from(data, at)
                at += _FULL.size
            if flags & STEP:
                (clock,) = _STEP.unpack_from(data, at)
                at += _STEP.size
            if flags & RATED:
                (progress,) = _RATED.unpack_from(data, at)
                at += _RATED.size
            if flags & CHANGED:
                (changes,) = _CHANGES.unpack_from(data, at)
                at += _CHANGES.size
                for _ in range(changes):
                    index, steps = _CHANGE.unpack_from(data, at)
                    at += _CHANGE.size
                    name, shards = tensors[index]
                    read = Struct(f"<{shards}I")
                    versions[name] = read.unpack_from(data, at)
                    at += read.size
                    local[name] = steps
        except (error, IndexError) as broken:
            raise ValueError(f"a log of reads is broken at byte {at} of {len(data)}: {broken}") from None
        yield GroupRead(epoch, number, clock, progress, dict(versions), dict(local))
