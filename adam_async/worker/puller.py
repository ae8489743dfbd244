"""Pulled values in transit to the worker's copy: requested per server, assembled per tensor, installed whole.

Answers to pushes contain values. Values that are too many for these answers come in answers to pulls. A
tensor that is whole in an answer is installed at its arrival: the answer's memory becomes the copy. A larger
tensor's ranges are collected in one new buffer; an answer with only one range arrives there directly from the
socket. The tensor is installed when its last range has arrived. The layout of each answer is fixed, so it is
planned once (`AnswerLayout`).

Theory of operation
-------------------
The worker's copy of the model is a dictionary from tensor to `TensorCopy`. A compute thread takes a snapshot
of the dictionary at the start of a group, and uses its arrays to the end. A pull arrives in new memory and is
*installed* by new entries in the dictionary. Installing copies no value and takes no lock. No reader sees a
tensor, or the tensors of one answer, half replaced. The old memory returns to its pool when the last group
that reads it has ended.

Local steps (plain SGD between pulls) write into the current arrays, from several threads at once and without
locks. Updates are additive, and the servers have the authoritative values (AD-11, AD-14). A local step into
an array that is being replaced is lost with the array; a later pull contains its push, as in Downpour.

In ssp and bsp each copy also has a clock: the values contain all pushes of live replicas up to it.
`WorkerWeights.clock` is the clock of the whole copy, and only rises: different servers' answers may arrive in
any order, and the values with the newer clock stay.

Answers also cross if steps overtake one another: the thread that first sent its piece of a split tensor may
send the next piece last. Then each of the two pulls has a newer version of one shard. The values of the first
complete pull stay, so that no shard returns to an older version, unless the second pull raises the tensor's
clock. The next step ends this state: an answer to a request made after a copy was installed is no older in
any shard, so it replaces the copy.

Only the event loop changes the dictionary; reading or copying it is one atomic operation.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from operator import le, lt
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from adam_async.client.parameter_client import ParameterClient
from adam_async.messages import OfEach, Values
from adam_async.model.network import Trainable
from adam_async.run.ids import ShardId
from adam_async.run.shard_table import ShardSpec, ShardTable
from adam_async.worker.push_plan import cut_messages
from transport import BufferPool, RemoteProtocolError


class TensorCopy(msgspec.Struct, eq=False):
    """One version of one tensor."""

    tensor: str
    array: NDArray[Any]
    versions: tuple[int, ...]
    """Version of each of the tensor's shards."""
    clock: int = 0
    """Clock up to which the tensor contains all pushes of live replicas; 0 in asp."""
    own_applied: int = 0
    """Number of own pushes that a local step has put into this array since its installation."""
    local: int = 0
    """Number of local steps in the array; exact with one compute thread."""


@dataclass(frozen=True, slots=True, eq=False)
class Snapshot:
    """The arrays that one group reads, and their age."""

    copies: dict[str, TensorCopy]
    own_applied: dict[str, int]
    """Values of `TensorCopy.own_applied` at the snapshot, by tensor."""
    clock: int
    """Clock up to which the arrays contain all pushes of live replicas; 0 in asp."""
    local: dict[str, int] | None = None
    """Values of `TensorCopy.local` at the snapshot, by tensor; None if the run is not recorded."""

    @property
    def arrays(self) -> dict[str, NDArray[Any]]:
        """Values of each tensor by its name, for the layers."""
        return {name: copy.array for name, copy in self.copies.items()}


class WorkerWeights:
    """The current copy of every tensor of the partition.

    Args:
        recorded: Whether snapshots also count local steps, for a record of the run.
    """

    def __init__(self, *, recorded: bool = False) -> None:
        self._current: dict[str, TensorCopy] = {}
        self._recorded = recorded
        self.installed = 0
        self.clock = 0
        """Clock up to which all trained copies contain all pushes of live replicas; 0 in asp."""
        self.newest = 0
        """Highest clock of any values that arrived."""

    def snapshot(self) -> Snapshot:
        """Take the current copies. Safe from any thread."""
        clock = self.clock  # read before the copies, whose clock is then equal or newer
        copies = self._current.copy()
        local = {name: copy.local for name, copy in copies.items()} if self._recorded else None
        return Snapshot(copies, {name: copy.own_applied for name, copy in copies.items()}, clock, local)

    def current(self, tensor: str) -> TensorCopy:
        """Return the newest copy of one tensor. Safe from any thread."""
        return self._current[tensor]

    def install(self, arrived: Iterable[TensorCopy]) -> None:
        """Replace tensors, except those that are not newer, or are older in some shard. For the loop only."""
        new: dict[str, TensorCopy] = {}
        for copy in arrived:
            versions, clock, old = copy.versions, copy.clock, self._current.get(copy.tensor)
            if old is not None:
                if all(map(le, versions, old.versions)):
                    old.clock = max(old.clock, clock)
                    continue
                if clock < old.clock or (clock == old.clock and any(map(lt, versions, old.versions))):
                    continue
            new[copy.tensor] = copy
        # One step: otherwise the shards of a message that a group read at different versions would split
        # their tables.
        self._current.update(new)
        self.installed += len(new)

    def landed(self, clock: int) -> None:
        """Raise the clock: values of all trained tensors up to it are installed. For the loop only."""
        self.clock = max(self.clock, clock)

    def count_local_steps(self, copies: Mapping[str, TensorCopy]) -> None:
        """Count a sent push whose local step changed these copies. For the loop only."""
        for copy in copies.values():
            copy.own_applied += 1

    def __repr__(self) -> str:
        return f"<WorkerWeights {len(self._current)} tensors, {self.installed} installed>"


OnBehind = Callable[[int, Values], None]
"""Function that takes a request's number, and an answer without values that has the slowest clock and the
replicas that are behind."""

NO_CLOCK = 1 << 62
"""Clock of a tensor before its first range arrives: higher than any other clock."""


@dataclass(frozen=True, slots=True)
class AnswerRange:
    """Consecutive shards of one tensor in an answer."""

    tensor: str
    shape: tuple[int, ...]
    """Shape of the tensor."""
    values: slice
    """Position of the values in the answer."""
    versions: slice
    """Position of the shards in the answer."""
    start: int
    """Position of the first value in the flat tensor."""
    place: int
    """Position of the first shard among those of the tensor."""
    whole: bool
    """Whether these are all shards of the tensor."""


@dataclass(frozen=True, slots=True)
class AnswerLayout:
    """The values of one answer: shards in a fixed order, cut by tensor."""

    shards: tuple[ShardId, ...]
    size: int
    """Number of values."""
    ranges: tuple[AnswerRange, ...]
    part: AnswerRange | None
    """The only range, if it is a part of its tensor: such an answer arrives in the tensor's memory."""


@dataclass(slots=True, eq=False)
class _Assembly:
    """A tensor of several shards, some of which have arrived."""

    array: NDArray[Any]
    versions: list[int]
    missing: int
    clock: int
    """The lowest clock of the tensor's shards."""


class Landing(msgspec.Struct, eq=False):
    """One pull in progress, which takes answers and installs complete tensors.

    After the last answer the copy's clock rises to the pull's clock, and `on_landed` is called.
    """

    puller: "Puller"
    """The puller of the copy."""
    layouts: Sequence[AnswerLayout | None]
    """Layout of each answer, by its number; None for a number without values."""
    missing: int
    """Number of answers with values that have not arrived."""
    on_landed: Callable[[], None] | None
    """Called once, when all values are installed."""
    on_behind: OnBehind | None = None
    """Called for each answer without values, because replicas are behind. Must not raise."""
    clock: int | None = None
    """Clock up to which the arrived values contain all live replicas' pushes; None before the first answer,
    and in asp."""
    assemblies: dict[str, _Assembly] = {}

    def into(self, number: int) -> NDArray[Any] | None:
        """Return memory for an answer that is a part of one tensor; None for other answers."""
        layout = self.layouts[number]
        if layout is None or layout.part is None:
            return None
        start = layout.part.start
        return self._assembly(layout.part.tensor).array[start : start + layout.size]

    def pulled(self, number: int, answer: Values, values: NDArray[Any]) -> None:
        """See `PullReceiver`."""
        self.puller.clock = answer.clock
        self.arrived(number, answer.versions, values, answer.clock)

    def behind(self, number: int, answer: Values) -> bool:
        """See `PullReceiver`."""
        if self.on_behind is not None:
            self.on_behind(number, answer)
        return True

    def freed(self) -> None:
        """See `Receiver`."""

    def arrived(self, number: int, versions: OfEach, flat: NDArray[Any], clock: int) -> None:
        """Take one answer: the shards' versions, their concatenated values, and their clock.

        Raises:
            RemoteProtocolError: The answer has another number of shards or values.
        """
        layout, puller, weights = self.layouts[number], self.puller, self.puller.weights
        assert layout is not None
        if isinstance(versions, int):
            versions = (versions,) * len(layout.shards)
        if len(versions) != len(layout.shards) or flat.shape != (layout.size,) or flat.dtype != puller.dtype:
            raise RemoteProtocolError(
                "values",
                f"{len(versions)} versions and values {flat.dtype}{flat.shape} do not fit "
                f"{len(layout.shards)} shards of {layout.size} values {puller.dtype}",
            )
        if not puller.clocked:
            clock = 0
        else:
            self.clock = clock if self.clock is None else min(self.clock, clock)
            weights.newest = max(weights.newest, clock)
        new = []
        for piece in layout.ranges:
            values, read = flat[piece.values], versions[piece.versions]
            if piece.whole:
                new.append(TensorCopy(piece.tensor, values.reshape(piece.shape), read, clock))
            else:
                new += self._add(piece, read, values, clock)
        weights.install(new)
        self.missing -= 1
        if not self.missing:
            if self.clock is not None:
                weights.landed(self.clock)
            if self.on_landed is not None:
                self.on_landed()

    def _add(
        self, piece: AnswerRange, versions: tuple[int, ...], values: NDArray[Any], clock: int
    ) -> list[TensorCopy]:
        """Add a range to its tensor; return the tensor if this was its last range."""
        assembly = self._assembly(piece.tensor)
        assembly.clock = min(assembly.clock, clock)
        place = assembly.array[piece.start : piece.start + len(values)]
        if not np.may_share_memory(place, values):
            place[:] = values
        assembly.versions[piece.place : piece.place + len(versions)] = versions
        assembly.missing -= len(versions)
        if assembly.missing:
            return []
        shaped = assembly.array.reshape(piece.shape)
        return [TensorCopy(piece.tensor, shaped, tuple(assembly.versions), assembly.clock)]

    def _assembly(self, tensor: str) -> _Assembly:
        found = self.assemblies.get(tensor)
        if found is None:
            shards = len(self.puller.table.by_tensor[tensor])
            found = _Assembly(self.puller.fresh(tensor), [0] * shards, shards, NO_CLOCK)
            self.assemblies[tensor] = found
        return found


class Puller:
    """Pulls the values of all tensors from their servers into the worker's copy.

    Args:
        network: The model.
        table: Shards of the model.
        buckets: Home of each bucket.
        client: Client of the servers.
        weights: The worker's copy.
        buffers: Memory for tensors of several shards.
        clocked: Whether the run needs the clock of the copy.
    """

    def __init__(
        self,
        *,
        network: Trainable,
        table: ShardTable,
        buckets: Sequence[str],
        client: ParameterClient,
        weights: WorkerWeights,
        buffers: BufferPool,
        clocked: bool = False,
    ) -> None:
        self.table = table
        self.clocked = clocked
        self.weights = weights
        self._client = client
        self._buffers = buffers
        self.dtype = network.dtype
        self._buckets = buckets
        self._shapes = {p.name: p.shape for p in network.parameters}
        self._everything = self.questions(table.shards)
        self._trained = self.questions([s for s in table.shards if s.tensor not in network.frozen])
        self.clock = 0
        """Lowest clock of the shards in the last answer; a joining replica starts at it."""

    def questions(self, specs: Sequence[ShardSpec]) -> tuple[tuple[str, AnswerLayout], ...]:
        """Group shards into requests: a server, and its answer's layout."""
        cut = cut_messages(specs, self._buckets, self.table)
        return tuple((server, self.layout_of(group)) for server, group in cut)

    def layout_of(self, specs: Sequence[ShardSpec]) -> AnswerLayout:
        """Plan the answer with the values of some shards, in this order."""
        ranges: list[AnswerRange] = []
        at = first = 0
        for index, spec in enumerate(specs, start=1):
            following = specs[index] if index < len(specs) else None
            if following is not None and (following.tensor, following.start) == (spec.tensor, spec.stop):
                continue
            shards, begin = self.table.by_tensor[spec.tensor], specs[first]
            end = at + spec.stop - begin.start
            ranges.append(
                AnswerRange(
                    tensor=spec.tensor,
                    shape=self._shapes[spec.tensor],
                    values=slice(at, end),
                    versions=slice(first, index),
                    start=begin.start,
                    place=begin.id - shards[0].id,  # a tensor's shards have consecutive numbers
                    whole=index - first == len(shards),
                )
            )
            at, first = end, index
        part = ranges[0] if len(ranges) == 1 and not ranges[0].whole else None
        return AnswerLayout(tuple(spec.id for spec in specs), at, tuple(ranges), part)

    def pull(
        self, on_landed: Callable[[], None], *, clock: int = 0, on_behind: OnBehind | None = None
    ) -> None:
        """Request all tensors, or with a clock only the trained tensors. Never waits.

        Args:
            on_landed: Called when all values are installed.
            clock: Clock up to which the values must contain all pushes of live replicas.
            on_behind: See `Landing`.
        """
        questions = self._trained if clock else self._everything
        if not questions:  # a partition without parameters has the values of every clock
            self._client.answer_nothing(partial(self._nothing_landed, clock, on_landed))
            return
        layouts = [layout for _, layout in questions]
        landing = Landing(self, layouts, len(layouts), on_landed, on_behind)
        for number, (server, _) in enumerate(questions):
            self.ask(landing, server, number, clock=clock)

    def _nothing_landed(self, clock: int, on_landed: Callable[[], None]) -> None:
        self.weights.newest = max(self.weights.newest, clock)
        self.weights.landed(clock)
        on_landed()

    def ask(self, landing: Landing, server: str, number: int, *, clock: int = 0) -> None:
        """Send one request of a pull; the answer has this number."""
        layout = landing.layouts[number]
        assert layout is not None
        into = landing.into(number)
        self._client.connections[server].pull(layout.shards, landing, number, clock, into)

    def fresh(self, tensor: str) -> NDArray[Any]:
        """Return new memory for a whole tensor, flat."""
        size = prod(self._shapes[tensor])
        return self._buffers.acquire(size * self.dtype.itemsize).view(self.dtype)
