"""Pure: the keys of states and entries, and the states that are handed to the disk."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, NamedTuple

import msgspec

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
