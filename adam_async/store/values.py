"""Pure: the values of a store's calls: gradients of a push, gathered into messages, and results by name.

`PushBuffers` has arrays for gradients in memory that servers on this host read, so that a push copies
nothing. A message's arrays are adjacent, in shard order, so that the message is one range of the memory. A
message with parts of an array that lie apart has copies.
"""

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from io import BytesIO
from math import isfinite, prod
from numbers import Real
from operator import attrgetter
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from adam_async.errors import StoreError
from adam_async.run.arrays import Factors
from adam_async.store.arrays import Gradient, flat_factors, flat_values, names_in
from adam_async.store.layout import FactorMessage, ShardMessage, StoreLayout, StorePlan
from transport import Region
from transport.tensors import ALIGNMENT

logger = logging.getLogger(__name__)


class PushBuffers(Mapping[str, NDArray[Any]]):
    """Writable arrays by name, for a store's gradients; `ParameterStore.buffers` makes them.

    Args:
        plan: The arrays, and their messages.
        shares: Whether the arrays are in memory that other processes can read.
    """

    __slots__ = ("_arrays", "flats", "plan")

    def __init__(self, plan: StorePlan, *, shares: bool) -> None:
        nbytes = {
            name: prod(shape) * dtype.itemsize
            for name, shape, dtype in zip(plan.names, plan.shapes, plan.dtypes, strict=True)
        }
        starts: dict[str, int] = {}
        end = 0
        for message in plan.messages:
            if message.ranges[0].name not in starts:
                end = -(-end // ALIGNMENT) * ALIGNMENT
            for each in message.ranges:
                if each.name not in starts:
                    starts[each.name] = end
                    end += nbytes[each.name]
        memory = _memory(max(end, 1), shares=shares)
        self.plan = plan
        self._arrays: dict[str, NDArray[Any]] = {}
        for name, shape, dtype in zip(plan.names, plan.shapes, plan.dtypes, strict=True):
            start = starts.get(name, 0)  # an empty array has no message
            self._arrays[name] = memory[start : start + nbytes[name]].view(dtype).reshape(shape)
        self.flats: list[NDArray[Any] | None] = []
        """Values of each message; None if they are not adjacent."""
        for message in plan.messages:
            dtype = message.dtype
            begins = {starts[each.name] + (each.start - each.at) * dtype.itemsize for each in message.ranges}
            begin = min(begins)
            flat = memory[begin : begin + message.size * dtype.itemsize].view(dtype)
            self.flats.append(flat if len(begins) == 1 else None)

    def __getitem__(self, name: str) -> NDArray[Any]:
        return self._arrays[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._arrays)

    def __len__(self) -> int:
        return len(self._arrays)

    def __repr__(self) -> str:
        return f"<PushBuffers of {len(self)} arrays>"


def _memory(nbytes: int, *, shares: bool) -> NDArray[Any]:
    """Return bytes of zeros, shared if this is possible."""
    if shares:
        try:
            return Region.allocate(nbytes)
        except (OSError, AttributeError) as error:  # no memory or descriptor is free, or the system has none
            logger.debug("%d bytes for gradients are not shared: %s", nbytes, error)
    return np.zeros(nbytes, np.uint8)


MOST_RATE = 1e12
"""Largest accepted learning rate."""

MOST_WEIGHT = (1 << 32) - 1
"""Largest accepted weight of a push."""


Rate = float | Mapping[str, float] | None
"""Learning rate of a push, or of its arrays by name; None for the rules' rates."""

_CheckedRate = float | dict[str, float] | None


class Outgoing(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """One message of a push."""

    shards: ShardMessage | FactorMessage
    """The shards, and their server."""
    tensors: Sequence[NDArray[Any]]
    rate: float


class PushMessages:
    """Makes the messages of pushes.

    Args:
        layout: Shards of the store.
        rates: Default rate of each rule.
        is_summed: Whether servers apply the mean of a step's gradients.
    """

    def __init__(self, layout: StoreLayout, rates: tuple[float, ...], *, is_summed: bool) -> None:
        self._layout = layout
        self._rates = rates
        self._is_summed = is_summed
        self._memory = GatherMemory()

    def _plan(self, names: Iterable[str], rate: _CheckedRate) -> StorePlan:
        """Return the messages for the shards of arrays; no message has arrays with different rates."""
        groups: tuple[tuple[str, ...], ...] = (tuple(names),)
        if isinstance(rate, dict):
            by_rate: dict[float | None, list[str]] = {}
            for name in groups[0]:
                by_rate.setdefault(rate.get(name), []).append(name)
            groups = tuple([tuple(group) for group in by_rate.values()])
        return self._layout.plan(*groups)

    def messages(
        self, gradients: Mapping[str, Gradient], rate: Rate, weight: int, assign: bool
    ) -> tuple[StorePlan | None, list[Outgoing]]:
        """Return the messages of a push, and their plan unless a message has `Factors`.

        Args:
            gradients: Names to gradients, or to values with `assign`.
            rate: Learning rate, for all arrays or by name; None, or an absent name, for the rule's rate.
            weight: Weight of the gradients in the mean of a step.
            assign: Whether the values replace the values of the store.

        Raises:
            StoreError: A name, shape, type or value does not fit.
        """
        if type(gradients) is not dict and not isinstance(gradients, Mapping):
            raise StoreError(f"a push takes a mapping of names to arrays, not {type(gradients).__name__}")
        checked = None if rate is None else self._checked_rates(rate)
        if not isinstance(weight, int) or not 1 <= weight <= MOST_WEIGHT:
            raise StoreError(f"weight is a whole number from 1 to {MOST_WEIGHT}, not {weight!r}")
        if checked is not None or (plan := self._layout.plans.get((tuple(gradients),))) is None:
            plan = self._plan(gradients, checked)
        written = gradients.flats if type(gradients) is PushBuffers and gradients.plan is plan else ()
        scale = weight if self._is_summed else 1
        is_ordered = type(gradients) is dict and not isinstance(checked, dict)
        given = [*gradients.values()] if is_ordered else [*map(gradients.__getitem__, plan.names)]
        gathered = self._gather_plain(plan, given, written)
        if gathered is not None:
            if scale != 1:
                gathered = [values * values.dtype.type(scale) for values in gathered]
            return plan, self._outgoing(plan, gathered, checked)
        flat: dict[str, NDArray[Any]] = {}
        found: list[Outgoing] = []
        for name, gradient in gradients.items():
            record = self._layout.arrays[name]
            if not isinstance(gradient, Factors) or assign:
                values = flat_values(record, gradient, "value" if assign else "gradient")
                flat[name] = values if scale == 1 else values * values.dtype.type(scale)
                continue
            activations, errors = flat_factors(record, gradient)
            if scale != 1:
                errors = errors * errors.dtype.type(scale)
            outgoing = self._factors_of(name, activations, errors, checked)
            sent = activations.nbytes * len(outgoing or ()) + errors.nbytes
            if outgoing is not None and sent <= record.nbytes:
                found += outgoing
            else:  # the product has fewer bytes, or shards cut its rows
                with np.errstate(over="ignore", invalid="ignore"):  # the server refuses the shard
                    flat[name] = (errors @ activations.T).reshape(-1)
        if found:
            plan = self._plan(flat, checked)
        dense = self._outgoing(plan, self._gather(plan, [*map(flat.__getitem__, plan.names)]), checked)
        return None if found else plan, found + dense

    def _checked_rates(self, rate: float | Mapping[str, float]) -> _CheckedRate:
        if not isinstance(rate, Mapping):
            return _checked_rate(rate)
        names_in(self._layout.arrays, tuple(rate))
        return {name: _checked_rate(each) for name, each in rate.items()}

    def _outgoing(
        self, plan: StorePlan, gathered: Sequence[NDArray[Any]], rate: _CheckedRate
    ) -> list[Outgoing]:
        found = []
        for message, values in zip(plan.messages, gathered, strict=True):
            # The arrays of a message have one rate.
            chosen = rate.get(message.names[0]) if isinstance(rate, dict) else rate
            chosen = self._rates[message.rule] if chosen is None else chosen
            found.append(Outgoing(shards=message, tensors=(values,), rate=chosen))
        return found

    def _factors_of(
        self, name: str, activations: NDArray[Any], errors: NDArray[Any], rate: _CheckedRate
    ) -> list[Outgoing] | None:
        """Return messages of all activations and the errors of a server's rows; None if shards cut rows."""
        messages = self._layout.factor_messages(name)
        if messages is None:
            return None
        chosen = rate.get(name) if isinstance(rate, dict) else rate
        found = []
        for message in messages:
            parts = [errors[part] for part in message.rows]
            rows = parts[0] if len(parts) == 1 else np.concatenate(parts)
            of_rule = self._rates[message.rule] if chosen is None else chosen
            found.append(Outgoing(shards=message, tensors=(activations, rows), rate=of_rule))
        return found

    def _gather_plain(
        self, plan: StorePlan, given: list[Any], written: Sequence[NDArray[Any] | None]
    ) -> list[NDArray[Any]] | None:
        """Return each message's values, after a fast check of all arrays in a plan.

        Args:
            written: Values of each message that are adjacent already; None, or absent, for other messages.

        Returns None if an array is not a plain one, has another shape or type, or may have a value that is
        not finite.
        """
        # A few C functions over all arrays: Python code for each of many small arrays would take most of a
        # push.
        if (
            [*map(type, given)].count(np.ndarray) < len(given)
            or [*map(_DTYPE, given)] != plan.dtypes
            or [*map(_SHAPE, given)] != plan.shapes
        ):
            return None
        gathered = self._gather(plan, given, written)
        for values in gathered:
            if not isfinite(np.vdot(values, values)):
                return None
        return gathered

    def _gather(
        self, plan: StorePlan, given: list[NDArray[Any]], written: Sequence[NDArray[Any] | None] = ()
    ) -> list[NDArray[Any]]:
        """Return each message's values, from the arrays of a plan; a view if they are one range."""
        found, positions, absent = [], plan.positions, [None] * len(plan.messages)
        for message, pick, flat in zip(plan.messages, plan.picks, written or absent, strict=True):
            ranges = message.ranges
            if flat is not None:
                values = flat
            elif pick is not None:
                values = self._memory.joined(pick(given), message.dtype, message.size)
            elif len(ranges) == 1:
                values = given[positions[ranges[0].name]].ravel()[ranges[0].start : ranges[0].stop]
            else:
                values = np.concatenate(
                    [given[positions[each.name]].ravel()[each.start : each.stop] for each in ranges]
                )
            found.append(values)
        return found


_DTYPE, _SHAPE = attrgetter("dtype"), attrgetter("shape")

MOST_BUFFERS = 4
"""Maximum number of buffers, of at most one message each, that a client keeps for the next pushes."""


class GatherMemory:
    """Reused memory for the values of messages with several arrays.

    A buffer is free again with its last view. A used buffer's pages exist already: fresh ones would take
    longer than copying the arrays. Writing to a file in memory works less for each array than
    `numpy.concatenate`.
    """

    def __init__(self) -> None:
        self._buffers: list[BytesIO] = []

    def joined(self, arrays: Sequence[Any], dtype: np.dtype[Any], size: int) -> NDArray[Any]:
        """Join the values of arrays of one type; ``size`` is their number."""
        buffer = next(filter(_is_free, self._buffers), None)
        if buffer is None:
            buffer = BytesIO()
            if len(self._buffers) < MOST_BUFFERS:
                self._buffers.append(buffer)
        buffer.seek(0)
        try:
            buffer.writelines(arrays)
        except ValueError:  # an array is not C-contiguous
            return np.concatenate([array.ravel() for array in arrays])
        return np.frombuffer(buffer.getbuffer(), dtype, size)


def _is_free(buffer: BytesIO) -> bool:
    try:
        buffer.write(b"")
    except BufferError:  # a view of it exists
        return False
    return True


def _checked_rate(rate: object) -> float:
    if isinstance(rate, Real) and 0 <= float(rate) <= MOST_RATE:
        return float(rate)
    raise StoreError(f"rate is a number from 0 to {MOST_RATE:g}, not {rate!r}")


@dataclass(frozen=True, slots=True, eq=False)
class ReadVersions:
    """Versions of read values, by shard; a push names them, and they decide its staleness.

    The object is small: keep it in place of the values, to free their memory.
    """

    store: str
    """Id of the store."""
    of_shards: NDArray[np.int64]
    """Version of each of the store's shards; -1 for shards that were not read."""
    own: Mapping[str, int] = field(default_factory=dict)
    """Number of this client's later pushes that the caller has applied to its copy of each array."""


class Values(Mapping[str, NDArray[Any]]):
    """Read-only arrays by name, and their versions.

    An array that arrived whole in one message is made at its first use.

    Args:
        plan: The pulled arrays, and the places of those that arrived whole in one message.
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
