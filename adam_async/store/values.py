"""Pure: results of pulls and pushes: values with their versions, and outcomes."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from adam_async.store.layout import StorePlan


@dataclass(frozen=True, slots=True, eq=False)
class ReadVersions:
    """Versions of read values, by shard; a push names them, and they give its staleness.

    The object is small: keep it in place of the values, to free their memory.
    """

    store: str
    """Id of the store."""
    of_shards: NDArray[np.int64]
    """Version of each shard of the store; -1 for shards that were not read."""
    own: Mapping[str, int] = field(default_factory=dict)
    """Number of this client's later pushes that the caller has applied to its copy of each array."""


class Values(Mapping[str, NDArray[Any]]):
    """Read-only arrays by name, and their versions.

    An array that came whole in one message is made at its first use.

    Args:
        plan: The pulled arrays, and the places of those that came whole in one message.
        flats: Values of messages, by the number of the message.
        arrays: The arrays made before.
        read: Versions of the values.
        clock: Clock up to which the values contain the pushes of all clients; 0 in a store without clocks.
    """

    __slots__ = ("_arrays", "_flats", "_plan", "clock", "read")

    def __init__(
        self,
        plan: StorePlan,
        flats: Mapping[int, NDArray[Any]],
        arrays: dict[str, NDArray[Any]],
        read: ReadVersions,
        clock: int,
    ) -> None:
        self._plan = plan
        self._flats = flats
        self._arrays = arrays
        self.read = read
        self.clock = clock

    def __getitem__(self, name: str) -> NDArray[Any]:
        array = self._arrays.get(name)
        if array is None:
            number, start, stop, shape = self._plan.places[name]
            array = self._arrays[name] = self._flats[number][start:stop].reshape(shape)
        return array

    def __iter__(self) -> Iterator[str]:
        return iter(self._plan.names)

    def __len__(self) -> int:
        return len(self._plan.names)

    def __repr__(self) -> str:
        return f"<Values of {len(self)} arrays>"


@dataclass(frozen=True, slots=True, kw_only=True)
class RefusedShard:
    """A part of an array that a push did not change: its change was not finite, or came after its sum."""

    name: str
    start: int
    """First flat index of the part."""
    stop: int
    """Flat index after the last one of the part."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PushOutcome:
    """The outcome of a push.

    Attributes:
        versions: Name to the lowest version of the array's shards after the push. With bsp, the version
            before the sum of the step.
        refused: Parts that the push did not change.
    """

    versions: Mapping[str, int]
    refused: tuple[RefusedShard, ...] = field(default=())
