"""Pure: the keys of states and entries, the states that go to the disk, and the settings of a store."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, NamedTuple

import msgspec

from adam_async.errors import ConfigError

Part = bytes | bytearray | memoryview
"""Contiguous bytes. An array is passed as ``memoryview(array.reshape(-1)).cast("B")``, or as ``array.data``
if it is flat and not empty."""

Number = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
ShardNumber = Annotated[int, msgspec.Meta(ge=0, le=(1 << 31) - 1)]
Home = Annotated[str, msgspec.Meta(max_length=200)]
WallTime = Annotated[float, msgspec.Meta(ge=0, le=1e11)]
"""Finite time, in seconds since 1970."""


Order = tuple[int, int]
"""Generation and position of the last log entry in a state: of two states, the one with the greater order is
newer."""


LEADING = ""
"""Home of the states of the owner itself. A round writes a changed one before each state that it copies
later, so on the disk it is never older than the states of shards."""


class StateName(NamedTuple):
    """Name of a state: the home of its bundle, and the number of its shard.

    A parameter server writes pieces, and uses the number of a piece as the number of a shard.
    """

    home: str
    shard: int


class StateKey(msgspec.Struct, frozen=True, array_like=True):
    """Key of one state of a shard. Of two states with one name, the one with the greater `order` is newer."""

    home: Home
    shard: ShardNumber
    generation: Number
    """Generation of the primary that formed the last log entry in the state."""
    position: Number
    """Position of the last log entry in the state: a later entry is not in it."""
    version: Number
    """Number of pushes applied to the shard."""

    @property
    def name(self) -> StateName:
        """Name of the state."""
        return StateName(self.home, self.shard)

    @property
    def order(self) -> Order:
        """Generation and position."""
        return self.generation, self.position


class EntryKey(msgspec.Struct, frozen=True, array_like=True):
    """Key of one entry of a bundle's log."""

    home: Home
    position: Number
    generation: Number
    """Generation of the primary that formed the entry."""


@dataclass(frozen=True, slots=True, eq=False)
class State:
    """A state for the disk: its key, and its content in parts. A reader gets back the same parts.

    The parts must not change until they are written: hand over copies.
    """

    key: StateKey
    parts: Sequence[Part]

    @property
    def nbytes(self) -> int:
        """Size of the content, in bytes."""
        return sum([memoryview(part).nbytes for part in self.parts])


FORMAT = 2
"""Number of the format of segment files; a reader refuses others."""


class Identity(msgspec.Struct, frozen=True, kw_only=True):
    """Owner of a folder of segment files.

    Attributes:
        run: Id of the run or store whose states the folder has.
        contents: Version of the owner's encoding of states and entries, from 1.
    """

    run: str
    contents: int = 1


class OtherRun(ConfigError):
    """The folder has the states of another run. The message has both runs and the remedy."""


class OtherContents(ConfigError):
    """The folder has states in another encoding than this release's. The message has the remedy."""


class OtherFormat(ConfigError):
    """The folder has segment files of another release. The message has the remedy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FlushSettings:
    """Settings of a segment store.

    Attributes:
        flush_s: Time from the first update of a shard to the round that writes it, in seconds.
        dirty_bytes: Size of dirty states at which a round begins after half of `flush_s`, in bytes.
        segment_bytes: Size at which a segment file ends and another one begins, in bytes.
        batch_bytes: Size at which copied states are handed to the disk's thread, in bytes. One batch is
            in memory at a time, and at most one further state.
    """

    flush_s: float = 1.0
    dirty_bytes: int = 64 << 20
    segment_bytes: int = 64 << 20
    batch_bytes: int = 4 << 20
