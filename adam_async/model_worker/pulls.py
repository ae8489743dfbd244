"""How pulled values reach the worker's copy: asked per server, assembled per tensor, installed whole.

A tensor that is one shard is installed as it arrives: the answer's own memory becomes the copy. The
shards of a larger tensor land in the pieces of one fresh buffer, directly from the socket, and the
tensor is installed when the last of them is there.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray
from transport import BufferPool

from adam_async.ids import ShardId
from adam_async.messages import Values
from adam_async.model.network import Network
from adam_async.model_worker.weights import WorkerWeights
from adam_async.parameter_server.client import ParameterClient
from adam_async.placement import ShardSpec, ShardTable

MESSAGE_BYTES = 1 << 20
"""Values of one answer at most (or one shard), so that sending one overlaps with copying the next."""

MESSAGE_SHARDS = 256
"""Shards of one question at most; their numbers must fit into a frame's meta."""


@dataclass(slots=True, eq=False)
class _Assembly:
    """A tensor of several shards, on its way."""

    array: NDArray[Any]
    versions: list[int]
    missing: int


@dataclass(frozen=True, slots=True, eq=False)
class _Question:
    """One message of every pull."""

    server: str
    shards: tuple[ShardId, ...]
    specs: tuple[ShardSpec, ...]
    whole: bool
    """Whether each shard is a whole tensor, to be installed as it arrives."""


class Puller:
    """Pulls every tensor, again and again.

    Args:
        network: The model.
        table: Its shards.
        buckets: Primary of each bucket.
        client: How to reach them.
        weights: Where the values go.
        buffers: Memory for tensors of several shards.
    """

    def __init__(
        self,
        *,
        network: Network,
        table: ShardTable,
        buckets: Sequence[str],
        client: ParameterClient,
        weights: WorkerWeights,
        buffers: BufferPool,
    ) -> None:
        self._table = table
        self._client = client
        self._weights = weights
        self._buffers = buffers
        self._dtype = network.dtype
        self._shapes = {p.name: p.shape for p in network.parameters}
        self._places = {
            spec.id: place for shards in table.by_tensor.values() for place, spec in enumerate(shards)
        }
        self._split = tuple(name for name, shards in table.by_tensor.items() if len(shards) > 1)
        self._questions = _questions(table, buckets)
        self.clock = 0
        """Slowest clock among the shards of the last pull: where a joining replica starts."""

    def pull(self, on_landed: Callable[[], None]) -> None:
        """Ask every server for its shards. Never waits; `on_landed` is called when all are installed."""
        assemblies = {name: self._assembly(name) for name in self._split}
        missing = len(self._questions)
        clocks: list[int] = []

        def arrived(question: _Question, values: Values, tensors: Sequence[NDArray[Any]]) -> None:
            nonlocal missing
            clocks.append(values.clock)
            for spec, version, tensor in zip(question.specs, values.versions, tensors, strict=True):
                self._land(spec, version, tensor, assemblies)
            missing -= 1
            if not missing:
                self.clock = min(clocks)
                on_landed()

        for question in self._questions:
            into = None if question.whole else [self._piece(spec, assemblies) for spec in question.specs]
            self._client.pull(question.server, question.shards, partial(arrived, question), into=into)

    def _assembly(self, name: str) -> _Assembly:
        size = prod(self._shapes[name])
        array = self._buffers.acquire(size * self._dtype.itemsize).view(self._dtype)
        shards = len(self._table.by_tensor[name])
        return _Assembly(array, [0] * shards, shards)

    @staticmethod
    def _piece(spec: ShardSpec, assemblies: dict[str, _Assembly]) -> NDArray[Any]:
        return assemblies[spec.tensor].array[spec.start : spec.stop]

    def _land(
        self, spec: ShardSpec, version: int, tensor: NDArray[Any], assemblies: dict[str, _Assembly]
    ) -> None:
        shape = self._shapes[spec.tensor]
        assembly = assemblies.get(spec.tensor)
        if assembly is None:
            self._weights.install(spec.tensor, tensor.reshape(shape), (version,))
            return
        piece = self._piece(spec, assemblies)
        if not np.may_share_memory(piece, tensor):
            np.copyto(piece, tensor)
        assembly.versions[self._places[spec.id]] = version
        assembly.missing -= 1
        if not assembly.missing:
            self._weights.install(spec.tensor, assembly.array.reshape(shape), assembly.versions)


def _questions(table: ShardTable, buckets: Sequence[str]) -> tuple[_Question, ...]:
    groups: dict[tuple[str, bool], list[list[ShardSpec]]] = {}
    for spec in table.shards:
        key = (buckets[spec.bucket], len(table.by_tensor[spec.tensor]) == 1)
        lists = groups.setdefault(key, [[]])
        held = sum(s.size for s in lists[-1]) * table.item_bytes
        full = held + spec.size * table.item_bytes > MESSAGE_BYTES
        if lists[-1] and (full or len(lists[-1]) >= MESSAGE_SHARDS):
            lists.append([])
        lists[-1].append(spec)
    return tuple(
        _Question(server, tuple(spec.id for spec in specs), tuple(specs), whole)
        for (server, whole), lists in sorted(groups.items())
        for specs in lists
    )
