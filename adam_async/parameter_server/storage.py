"""Pure: the memory of the shards of a store, with the state of their rules.

A server allocates its own shards (`own_shards`), and those of one rule and type one after the other, so that
a request for many small arrays reads and changes one range of memory. A large shard begins on a cache line.

In a run *in place* the servers of a process have views of the same whole tensors (`ShardStorage`), the
workers of the process use that memory as their weights, and their compute threads run the rule on it. Then no
other thread may write it, and a reader copies it first.

A step changes this memory before the servers count it. A reader that needs values and counts of the same
steps keeps the storage *still*: the compute threads stop after their present group, and the servers count all
steps.
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from math import prod
from typing import Any, Protocol
from weakref import WeakValueDictionary

import numpy as np
from numpy.typing import DTypeLike, NDArray

from adam_async.model.rules import Rule, RuleState
from adam_async.parameter_server.shard import FamilyMemory, Shard, ShardTables
from adam_async.run.shard_table import ShardSpec
from dataflow import Gate

ALIGNMENT = 64
"""Size of a cache line and of the widest vector register, in bytes."""


PAGE = 4096
"""Size of a page, in bytes, on which vectors of `PAGES` pages or more begin. The kernel of Linux copies sent
bytes by one instruction, which on some processors takes up to seven times as long if the target lies 1 to 15
bytes behind the source within their pages. The bytes follow the head of a frame, which has more than 15."""

PAGES = 16
"""Minimum size of a vector that begins on a page, in pages."""


def aligned_zeros(size: int, dtype: DTypeLike) -> NDArray[Any]:
    """Return a zeroed vector of `size` values that begins on a 64-byte boundary, and if large on a page."""
    nbytes = size * np.dtype(dtype).itemsize
    boundary = PAGE if nbytes >= PAGES * PAGE else ALIGNMENT
    raw = np.zeros(nbytes + boundary, np.uint8)
    offset = -raw.ctypes.data % boundary
    return raw[offset : offset + nbytes].view(dtype)


ALIGNED_BYTES = 4096
"""Minimum size of a shard that begins on a cache line, in bytes; smaller ones follow without a gap."""


def own_shards(specs: Sequence[ShardSpec], rules: Sequence[Rule]) -> list[Shard]:
    """Allocate shards, zeroed, each with a new state of its rule; in the order of `specs`.

    Args:
        specs: The shards of one bundle, or some of them.
        rules: The rules of the store.
    """
    shards: dict[int, Shard] = {}
    families: dict[tuple[int, str], list[ShardSpec]] = {}
    for spec in specs:
        families.setdefault((spec.rule, spec.dtype), []).append(spec)
    for (rule, dtype), members in families.items():
        item = np.dtype(dtype).itemsize
        starts, size = [], 0
        for spec in members:
            if spec.nbytes >= ALIGNED_BYTES:
                size += -size % (ALIGNMENT // item)
            starts.append(size)
            size += spec.size
        values = aligned_zeros(size, dtype)
        new = rules[rule].new_state((1,), dtype)
        state = {name: aligned_zeros(size, new[name].dtype) for name in rules[rule].state_names}
        for name, array in state.items():
            if new[name].any():
                array[:] = new[name][0]
        counts = {name: np.repeat(new[name], len(members)) for name in rules[rule].scalar_names}
        memory, tables = FamilyMemory(values, state, counts), ShardTables(shards=len(members))
        for at, (spec, start) in enumerate(zip(members, starts, strict=True)):
            part = slice(start, start + spec.size)
            shards[spec.id] = Shard(
                spec=spec,
                values=values[part],
                rule_state={
                    **{name: array[part] for name, array in state.items()},
                    **{name: array[at : at + 1] for name, array in counts.items()},
                },
                tables=tables,
                memory=memory,
                offset=start,
                place=at,
            )
    return [shards[spec.id] for spec in specs]


class Tensor(Protocol):
    """A named array of a shape."""

    @property
    def name(self) -> str:
        """Name of the tensor."""
        ...

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the tensor."""
        ...


class ShardStorage:
    """Values and rule state of every tensor of a run; shards are views into them.

    Args:
        rule: The update rule, which defines its state.
        in_place: Whether the rule is applied to whole tensors; its counts are then per tensor instead of per
            shard. A replay applies it to shards.
    """

    def __init__(
        self,
        parameters: Iterable[Tensor],
        rule: Rule,
        dtype: DTypeLike = np.float32,
        *,
        in_place: bool = False,
    ) -> None:
        self.dtype = np.dtype(dtype)
        self.in_place = in_place
        self._rule = rule
        parameters = tuple(parameters)
        self._flat = {p.name: aligned_zeros(prod(p.shape), self.dtype) for p in parameters}
        self.weights: Mapping[str, NDArray[Any]] = {
            p.name: self._flat[p.name].reshape(p.shape) for p in parameters
        }
        """Values of each tensor, in its shape, by name."""
        self.states: Mapping[str, RuleState] = {
            p.name: rule.new_state(p.shape, self.dtype) for p in parameters
        }
        """Rule state of each tensor, by name."""
        self.gate = Gate()
        """Gate of the compute threads that apply steps in place, between two groups."""
        self._settling: list[Callable[[], Awaitable[None]]] = []
        """Functions that wait until the servers have counted the steps of a worker."""
        self.steps = np.zeros(1, np.int64)
        """Number of steps applied in place; an addition to it is one operation under the interpreter's
        lock."""

    def values(self, shard: ShardSpec) -> NDArray[Any]:
        """Return the memory of one shard, flat."""
        return self._flat[shard.tensor][shard.start : shard.stop]

    def rule_state(self, shard: ShardSpec) -> RuleState:
        """Return the rule state of one shard: views, flat, and the rule's counts."""
        state = self.states[shard.tensor]
        views = {name: state[name].reshape(-1)[shard.start : shard.stop] for name in self._rule.state_names}
        counts = {
            name: state[name] if self.in_place else state[name].copy() for name in self._rule.scalar_names
        }
        return {**views, **counts}

    @contextmanager
    def counted_by(self, settle: Callable[[], Awaitable[None]]) -> Iterator[None]:
        """Name the function that waits until the servers have counted the steps of a worker, for a block."""
        self._settling.append(settle)
        try:
            yield
        finally:
            self._settling.remove(settle)

    @asynccontextmanager
    async def still(self) -> AsyncIterator[None]:
        """Keep the values for as long as the block lasts. The servers have counted all steps in them.

        A step stays uncounted if its worker ended before it reported the step.
        """
        async with self.gate.closed():
            for settle in tuple(self._settling):
                if settle in self._settling:  # else its worker has ended meanwhile
                    await settle()
            yield

    def __repr__(self) -> str:
        total = sum(flat.nbytes for flat in self._flat.values())
        return f"<ShardStorage {len(self._flat)} tensors {total} bytes {self.dtype}>"


class StoragePool:
    """The storages of the runs of a process, for all its roles. A storage lives as long as a role keeps it.

    Servers and workers learn of a new run at different times, so for a while one role may ask for a run that
    another role has left. All roles of a run get the same storage, in any order of their requests.
    """

    def __init__(self) -> None:
        self._storages: WeakValueDictionary[str, ShardStorage] = WeakValueDictionary()
        self.has_servers = False
        """Whether a server of this process has opened a run."""

    def provide(self, run: str, make: Callable[[], ShardStorage]) -> ShardStorage:
        """Return the storage of a run for a server, made at the first call. The server must keep it."""
        storage = self._storages.get(run)
        if storage is None:
            storage = self._storages[run] = make()
        self.has_servers = True
        return storage

    def find(self, run: str) -> ShardStorage | None:
        """Return the storage of a run for a worker; None if no role of this process keeps it."""
        return self._storages.get(run)

    @asynccontextmanager
    async def still(self, run: str) -> AsyncIterator[None]:
        """Keep the storage of a run still for as long as the block lasts; does nothing without a storage."""
        storage = self.find(run)
        if storage is None:
            yield
            return
        async with storage.still():
            yield
