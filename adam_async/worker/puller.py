"""Pulled values in transit to the worker's copy: requested per server, assembled per tensor, installed whole.

Answers to pushes contain values. Values that are too many for these answers come in answers to pulls. A
tensor that is whole in an answer is installed at its arrival: the answer's memory becomes the copy. The
ranges of a larger tensor are collected in one new buffer; an answer with only one range arrives there
directly from the socket. The tensor is installed when its last range has arrived. The layout of each answer
is fixed, so it is planned once (`AnswerLayout`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from adam_async.client.parameter_client import ParameterClient
from adam_async.messages import Values
from adam_async.model.network import Trainable
from adam_async.run.ids import ShardId
from adam_async.run.shard_table import ShardSpec, ShardTable
from adam_async.worker.push_plan import cut_messages
from adam_async.worker.weights import WorkerWeights
from transport import BufferPool, RemoteProtocolError

OnBehind = Callable[[int, Values], None]
"""Function that takes the number of a request, and an answer without values, but with the slowest clock and
the replicas that are behind."""

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


class Landing:
    """One pull in progress, which takes answers and installs complete tensors.

    After the last answer the copy's clock rises to the pull's clock, and `on_landed` is called.

    Args:
        puller: The puller of the copy.
        layouts: Layout of each answer, by its number; None for a number without values.
        missing: Number of answers with values.
        on_landed: Called once, when all values are installed.
        on_behind: Called for each answer without values, because replicas are behind. Must not raise.
    """

    def __init__(
        self,
        puller: "Puller",
        layouts: Sequence[AnswerLayout | None],
        missing: int,
        on_landed: Callable[[], None] | None,
        on_behind: OnBehind | None = None,
    ) -> None:
        self._puller = puller
        self.layouts = layouts
        self._missing = missing
        self.on_landed = on_landed
        self._on_behind = on_behind
        self._clock: int | None = None
        """Clock up to which the arrived values contain all pushes of live replicas; None before the first
        answer, and in asp."""
        self._assemblies: dict[str, _Assembly] = {}

    def into(self, number: int) -> NDArray[Any] | None:
        """Return memory for an answer that is a part of one tensor; None for other answers."""
        layout = self.layouts[number]
        if layout is None or layout.part is None:
            return None
        start = layout.part.start
        return self._assembly(layout.part.tensor).array[start : start + layout.size]

    def pulled(self, number: int, answer: Values, values: NDArray[Any]) -> None:
        """See `PullReceiver`."""
        self._puller.clock = answer.clock
        self.arrived(number, answer.versions, values, answer.clock)

    def behind(self, number: int, answer: Values) -> bool:
        """See `PullReceiver`."""
        if self._on_behind is not None:
            self._on_behind(number, answer)
        return True

    def freed(self) -> None:
        """See `Receiver`."""

    def arrived(self, number: int, versions: tuple[int, ...], flat: NDArray[Any], clock: int) -> None:
        """Take one answer: the shards' versions, their concatenated values, and their clock.

        Raises:
            RemoteProtocolError: The answer has another number of shards or values.
        """
        layout, puller = self.layouts[number], self._puller
        weights = puller.weights
        assert layout is not None
        if len(versions) != len(layout.shards) or flat.shape != (layout.size,) or flat.dtype != puller.dtype:
            raise RemoteProtocolError(
                "values",
                f"{len(versions)} versions and values {flat.dtype}{flat.shape} do not fit "
                f"{len(layout.shards)} shards of {layout.size} values {puller.dtype}",
            )
        if not puller.clocked:
            clock = 0
        else:
            self._clock = clock if self._clock is None else min(self._clock, clock)
            weights.newest = max(weights.newest, clock)
        for piece in layout.ranges:
            values = flat[piece.values]
            if piece.whole:
                shaped = values.reshape(piece.shape)
                weights.install(piece.tensor, shaped, versions[piece.versions], clock)
            else:
                self._add(piece, versions[piece.versions], values, clock)
        self._missing -= 1
        if not self._missing:
            if self._clock is not None:
                weights.landed(self._clock)
            if self.on_landed is not None:
                self.on_landed()

    def _add(self, piece: AnswerRange, versions: tuple[int, ...], values: NDArray[Any], clock: int) -> None:
        """Add a range to its tensor, and install the tensor if it is the last range."""
        assembly = self._assembly(piece.tensor)
        assembly.clock = min(assembly.clock, clock)
        place = assembly.array[piece.start : piece.start + len(values)]
        if not np.may_share_memory(place, values):
            place[:] = values
        assembly.versions[piece.place : piece.place + len(versions)] = versions
        assembly.missing -= len(versions)
        if not assembly.missing:
            shaped = assembly.array.reshape(piece.shape)
            self._puller.weights.install(piece.tensor, shaped, assembly.versions, assembly.clock)

    def _assembly(self, tensor: str) -> _Assembly:
        found = self._assemblies.get(tensor)
        if found is None:
            shards = len(self._puller.table.by_tensor[tensor])
            found = _Assembly(self._puller.fresh(tensor), [0] * shards, shards, NO_CLOCK)
            self._assemblies[tensor] = found
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
        """Group shards into requests: a server, and the layout of its answer."""
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
        """Send one request of a pull, for the answer with this number."""
        layout = landing.layouts[number]
        assert layout is not None
        into = landing.into(number)
        self._client.pull(server, layout.shards, landing, number, clock=clock, into=into)

    def fresh(self, tensor: str) -> NDArray[Any]:
        """Return new memory for a whole tensor, flat."""
        size = prod(self._shapes[tensor])
        return self._buffers.acquire(size * self.dtype.itemsize).view(self.dtype)
