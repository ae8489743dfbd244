"""Collects the answers of one pull of a store, into arrays by name."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from adam_async.errors import StoreError
from adam_async.messages import Values as ValuesMessage
from adam_async.run.store_record import ArrayRecord
from adam_async.store.layout import AnswerRange, StoreLayout, StorePlan
from adam_async.store.pushing import Collector, NoteVersions
from adam_async.store.values import ReadVersions, Values
from transport import RemoteProtocolError


class PullCollector(Collector):
    """Collects the answers of one pull, or of one push whose answers bring the values.

    Args:
        store: Id of the store.
        layout: Shards of the store.
        plan: Messages for the shards of the arrays.
        note_versions: Takes the versions of each answer, with their index.
        targets: Flat memory to fill, by name; the collector allocates the memory of other arrays.
        on_end: See `Collector`.
    """

    def __init__(
        self,
        store: str,
        layout: StoreLayout,
        plan: StorePlan,
        note_versions: NoteVersions,
        targets: dict[str, NDArray[Any]],
        on_end: Callable[[Collector], None],
    ) -> None:
        self.plan = plan
        super().__init__(len(self.plan.messages), on_end)
        self._store = store
        self._layout = layout
        self._note_versions = note_versions
        self._names = tuple([name for name, _, _ in plan.wanted])
        self._flats: dict[int, NDArray[Any]] = {}
        """Values of messages of whole arrays, by the number of the message."""
        self._targets = targets
        self._given = frozenset(targets)
        self._found: dict[str, NDArray[Any]] = {}
        self._arrays: dict[str, NDArray[Any]] = {}
        """Arrays made before the answers."""
        self._read = layout.unread.copy()
        self.clocks: list[int] = []
        """Clock of each answer."""
        self.late: tuple[int, ...] = ()
        self.is_wanted = True
        """Whether a caller still waits for the values."""

    def into(self, number: int) -> NDArray[Any] | None:
        """Return memory for the answer to a message of one range; None for pooled memory."""
        message = self.plan.messages[number]
        if len(message.ranges) != 1:
            return None
        only = message.ranges[0]
        return self._target(only.name)[only.start : only.stop]

    def _target(self, name: str) -> NDArray[Any]:
        flat = self._targets.get(name)
        if flat is None:
            record = self._layout.arrays[name]
            flat = self._targets[name] = np.empty(record.size, record.dtype)
        return flat

    def behind(self, answer: ValuesMessage) -> None:
        """Take an answer without values: it names the replicas that the server waits for."""
        self.late = tuple(answer.behind)

    def answered(self, number: int, versions: Sequence[int], flat: NDArray[Any], clock: int) -> None:
        """Take the answer to a message by its number: versions, flat values, and their clock.

        Raises:
            RemoteProtocolError: It has another number of versions or values, or values of another type.
        """
        message = self.plan.messages[number]
        if (
            len(versions) != len(message.shards)
            or flat.shape != (message.size,)
            or flat.dtype != message.dtype
        ):
            raise RemoteProtocolError(
                "values",
                f"{len(versions)} versions and values {flat.dtype}{flat.shape} do not fit "
                f"{len(message.shards)} shards of {message.size} values {message.dtype}",
            )
        self._note_versions(message.index, versions)
        self._read[message.index] = versions
        self.clocks.append(clock)
        arrays, given, at = self._layout.arrays, self._given, 0
        if message.whole and not given:
            flat.flags.writeable = False
            self._flats[number] = flat
        elif len(message.ranges) > 1:
            for each in message.ranges:
                end = at + each.stop - each.start
                if each.name not in given and end - at == arrays[each.name].size:
                    self._found[each.name] = flat[at:end]  # a small array stays in the memory of its message
                else:
                    self._target(each.name)[each.start : each.stop] = flat[at:end]
                at = end

    def prepare(self) -> None:
        """Make the arrays whose memory is known, while the answers are on their way."""
        targets = self._targets
        for name in self._names if targets else ():
            if name in targets:
                self._arrays[name] = self._array(name)

    def _array(self, name: str) -> NDArray[Any]:
        flat = self._found.get(name)
        array = (self._target(name) if flat is None else flat).reshape(self._layout.arrays[name].shape)
        array.setflags(write=False)
        return array

    def values(self) -> Values:
        """Return the values; call it when `done` has ended."""
        arrays = self._arrays
        ranges = {} if self._given else self.plan.answer_ranges
        if len(arrays) + len(ranges) < len(self._names):
            arrays = {name: self._array(name) for name in self._names if name not in ranges}
        clock = min(self.clocks, default=0)
        pulled = _PulledArrays(self._names, ranges, self._flats, arrays) if ranges else arrays
        return Values(pulled, ReadVersions(self._store, self._read), clock)


class _PulledArrays(Mapping[str, NDArray[Any]]):
    """Pulled arrays by name; an array of a message with several arrays is made at its first use."""

    def __init__(
        self,
        names: tuple[str, ...],
        ranges: Mapping[str, AnswerRange],
        flats: Mapping[int, NDArray[Any]],
        arrays: dict[str, NDArray[Any]],
    ) -> None:
        self._names = names
        self._ranges = ranges
        self._flats = flats
        self._arrays = arrays

    def __getitem__(self, name: str) -> NDArray[Any]:
        array = self._arrays.get(name)
        if array is None:
            found = self._ranges[name]
            array = self._flats[found.message][found.start : found.stop].reshape(found.shape)
            self._arrays[name] = array
        return array

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def pull_targets(
    arrays: Mapping[str, ArrayRecord], names: Sequence[str], out: Mapping[str, NDArray[Any]] | None
) -> dict[str, NDArray[Any]]:
    """Return the flat memory that a pull fills, for the arrays of `out`."""
    if out is None:
        return {}
    if not isinstance(out, Mapping):
        raise StoreError(f"out is a mapping of names to arrays, not {type(out).__name__}")
    found = {}
    for name, array in out.items():
        if name not in names:
            raise StoreError(f"out names array {str(name)[:80]!r}, which is not pulled")
        record = arrays[name]
        if not isinstance(array, np.ndarray) or (array.shape, array.dtype.name) != (
            record.shape,
            record.dtype,
        ):
            shown = f"{array.dtype}{array.shape}" if isinstance(array, np.ndarray) else type(array).__name__
            raise StoreError(f"out of {name[:80]!r} is {shown}, the array {record.dtype}{record.shape}")
        flags = array.flags
        is_plain = flags.c_contiguous and flags.writeable and array.dtype.isnative
        if not is_plain or isinstance(array, np.ma.MaskedArray):
            raise StoreError(
                f"out of {name[:80]!r} must be C-contiguous, writable, of native byte order and without a "
                "mask: give a plain array"
            )
        found[name] = np.asarray(array).reshape(-1)  # a matrix has two dimensions in each shape
    return found
