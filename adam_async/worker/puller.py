"""Pulled values in transit to the worker's copy: requested per server, assembled per tensor, installed whole.

Answers to pushes contain values. Values that are too many for these answers come in answers to pulls. A
tensor of one shard is installed at its arrival: the answer's memory becomes the copy. The shards of a larger
tensor are collected in one new buffer; an answer whose shards form a range of the tensor arrives there
directly from the socket. The tensor is installed when its last shard has arrived.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from adam_async.messages import Values
from adam_async.model.network import Trainable
from adam_async.parameter_server.client import OnBehind, ParameterClient
from adam_async.run.ids import ShardId
from adam_async.run.shard_table import ShardSpec, ShardTable
from adam_async.worker.push_plan import MESSAGE_BYTES, MESSAGE_SHARDS, travels_apart
from adam_async.worker.weights import WorkerWeights
from transport import BufferPool

OnPlaceBehind = Callable[[int, Values], None]

NO_CLOCK = 1 << 62
"""Clock of a tensor before its first shard arrives: higher than any other clock."""


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

    The pull is complete after `expected` answers; the copy's clock then rises to the pull's clock, and
    `on_landed` is called.
    """

    def __init__(self, puller: "Puller", expected: int, on_landed: Callable[[], None]) -> None:
        self._puller = puller
        self._missing = expected
        self._on_landed = on_landed
        self.clock: int | None = None
        """Clock up to which the arrived values contain all pushes of live replicas; None before the first
        answer, and in asp."""
        self._assemblies: dict[str, _Assembly] = {}

    def into(self, specs: Sequence[ShardSpec]) -> NDArray[Any] | None:
        """Return memory for an answer whose shards form a range of a tensor of several shards; else None."""
        first, last = specs[0], specs[-1]
        if first.tensor not in self._puller.split:
            return None
        together = all(a.stop == b.start for a, b in pairwise(specs))
        if first.tensor != last.tensor or not together:
            return None
        return self._assembly(first.tensor).array[first.start : last.stop]

    def arrived(
        self, specs: Sequence[ShardSpec], versions: Sequence[int], flat: NDArray[Any], clock: int
    ) -> None:
        """Take one answer: the shards' versions, their concatenated values, and their clock."""
        if self._puller.clocked:
            self.clock = clock if self.clock is None else min(self.clock, clock)
            self._puller.weights.newest = max(self._puller.weights.newest, clock)
        else:
            clock = 0
        at = place = 0
        while place < len(specs):
            spec, shards = specs[place], self._puller.together(specs, place)
            end = at + (specs[place + shards - 1].stop - spec.start)
            if shards > 1:
                values = flat[at:end].reshape(self._puller.shapes[spec.tensor])
                self._puller.weights.install(spec.tensor, values, versions[place : place + shards], clock)
            else:
                self._land(spec, versions[place], flat[at:end], clock)
            at, place = end, place + shards
        self._missing -= 1
        if not self._missing:
            if self.clock is not None:
                self._puller.weights.landed(self.clock)
            self.over()

    def over(self) -> None:
        """End the pull: all values are installed."""
        self._on_landed()

    def _land(self, spec: ShardSpec, version: int, values: NDArray[Any], clock: int) -> None:
        puller = self._puller
        shape = puller.shapes[spec.tensor]
        if spec.tensor not in puller.split:
            puller.weights.install(spec.tensor, values.reshape(shape), (version,), clock)
            return
        assembly = self._assembly(spec.tensor)
        assembly.clock = min(assembly.clock, clock)
        place = assembly.array[spec.start : spec.stop]
        if not np.may_share_memory(place, values):
            place[:] = values
        assembly.versions[puller.places[spec.id]] = version
        assembly.missing -= 1
        if not assembly.missing:
            puller.weights.install(
                spec.tensor, assembly.array.reshape(shape), assembly.versions, assembly.clock
            )

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
        self._dtype = network.dtype
        self._buckets = buckets
        self.shapes = {p.name: p.shape for p in network.parameters}
        self.places = {
            spec.id: place for shards in table.by_tensor.values() for place, spec in enumerate(shards)
        }
        self.split = frozenset(name for name, shards in table.by_tensor.items() if len(shards) > 1)
        self._everything = self.questions(table.shards)
        self._trained = self.questions([s for s in table.shards if s.tensor not in network.frozen])
        self.clock = 0
        """Lowest clock of the shards in the last answer; a joining replica starts at it."""

    def questions(self, specs: Sequence[ShardSpec]) -> tuple[tuple[str, tuple[ShardSpec, ...]], ...]:
        """Group shards into requests: a server, and the shards to request in one message."""
        found: list[tuple[str, list[ShardSpec]]] = []
        room: dict[str, int] = {}
        open_: dict[str, list[ShardSpec]] = {}
        for spec in specs:
            server = self._buckets[spec.bucket]
            size = spec.size * self.table.item_bytes
            group = open_.get(server)
            # A large tensor of several shards has its own requests, so that its values arrive in place.
            apart = (
                group is not None
                and spec.tensor != group[-1].tensor
                and any(travels_apart(self.table, tensor) for tensor in (spec.tensor, group[-1].tensor))
            )
            if group is None or apart or size > room[server] or len(group) >= MESSAGE_SHARDS:
                group = open_[server] = []
                found.append((server, group))
                room[server] = MESSAGE_BYTES
            group.append(spec)
            room[server] -= size
        return tuple((server, tuple(group)) for server, group in found)

    def together(self, specs: Sequence[ShardSpec], place: int) -> int:
        """Return the number of shards from an index on that are all shards of one tensor in order; else 1."""
        spec = specs[place]
        if spec.tensor not in self.split or spec.start:
            return 1
        shards = self.table.by_tensor[spec.tensor]
        return len(shards) if tuple(specs[place : place + len(shards)]) == tuple(shards) else 1

    def pull(
        self, on_landed: Callable[[], None], *, clock: int = 0, on_behind: OnPlaceBehind | None = None
    ) -> None:
        """Request all tensors, or with a clock only the trained tensors. Never waits.

        Args:
            on_landed: Called when all values are installed.
            clock: Clock up to which the values must contain all pushes of live replicas.
            on_behind: Called if the values are missing at the server's deadline, with the index of the
                request and the server's answer.
        """
        questions = self._trained if clock else self._everything
        if not questions:  # a partition without parameters has the values of every clock
            self._client.answer_nothing(partial(self._nothing_landed, clock, on_landed))
            return
        landing = Landing(self, len(questions), on_landed)
        for place, (server, specs) in enumerate(questions):
            behind = partial(on_behind, place) if on_behind is not None else None
            self.ask(landing, server, specs, clock=clock, on_behind=behind)

    def _nothing_landed(self, clock: int, on_landed: Callable[[], None]) -> None:
        self.weights.newest = max(self.weights.newest, clock)
        self.weights.landed(clock)
        on_landed()

    def ask(
        self,
        landing: Landing,
        server: str,
        specs: tuple[ShardSpec, ...],
        *,
        clock: int = 0,
        on_behind: OnBehind | None = None,
    ) -> None:
        """Send one request of a pull."""
        self._client.pull(
            server,
            tuple(ShardId(spec.id) for spec in specs),
            partial(self._answered, landing, specs),
            clock=clock,
            into=landing.into(specs),
            on_behind=on_behind,
        )

    def _answered(
        self, landing: Landing, specs: tuple[ShardSpec, ...], values: Values, flat: NDArray[Any]
    ) -> None:
        self.clock = values.clock
        landing.arrived(specs, values.versions, flat, values.clock)

    def fresh(self, tensor: str) -> NDArray[Any]:
        """Return new memory for a whole tensor, flat."""
        size = prod(self.shapes[tensor])
        return self._buffers.acquire(size * self._dtype.itemsize).view(self._dtype)
