"""Pure: the memory of the shards: one contiguous aligned buffer per tensor, shared by the roles of a process.

A server gets its storage and does not allocate it, so that servers of one process have views of the same
tensors. 64-byte alignment keeps every row start on a cache line for vector units.

In a run *in place* the workers of the process use the same memory as their weights, and their compute threads
run the rule on it. Then no other thread may write it, and a reader copies it first.
"""

from collections.abc import Callable, Iterable, Mapping
from math import prod
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
from numpy.typing import DTypeLike, NDArray

from adam_async.model.keyed_random import Dice
from adam_async.model.layer import ParameterSpec
from adam_async.model.network import Network
from adam_async.model.rules import Rule, RuleState
from adam_async.run.shard_table import ShardSpec

ALIGNMENT = 64
"""Bytes of a cache line and of the widest vector register."""


def aligned_zeros(size: int, dtype: DTypeLike) -> NDArray[Any]:
    """Return a zeroed vector of `size` values whose first byte lies on a 64-byte boundary."""
    item = np.dtype(dtype).itemsize
    raw = np.zeros(size * item + ALIGNMENT, np.uint8)
    offset = -raw.ctypes.data % ALIGNMENT
    return raw[offset : offset + size * item].view(dtype)


def initial_values(network: Network, dice: Dice, spec: ShardSpec) -> NDArray[Any]:
    """The keyed initial values of one shard: drawn for its rows, and cut to its range."""
    first, last = spec.start // spec.row_size, -(-spec.stop // spec.row_size)
    rows = network.initial_values(dice, spec.tensor, first, last).reshape(-1)
    return rows[spec.start - first * spec.row_size : spec.stop - first * spec.row_size]


class ShardStorage:
    """Values and rule state of every tensor of a run; shards are views into them.

    Args:
        rule: The update rule, which defines its state.
        in_place: Whether whole tensors are stepped at once. The rule's per-shard counts then are per tensor.
    """

    def __init__(
        self,
        parameters: Iterable[ParameterSpec],
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
        """Tensor name to the memory of its values, in its shape."""
        self.states: Mapping[str, RuleState] = {
            p.name: rule.new_state(p.shape, self.dtype) for p in parameters
        }
        """Tensor name to its rule state."""
        self.steps = np.zeros(1, np.int64)
        """Steps applied in place so far; adding to it is one operation under the interpreter's lock."""

    def values(self, shard: ShardSpec) -> NDArray[Any]:
        """The memory of one shard, flat."""
        return self._flat[shard.tensor][shard.start : shard.stop]

    def rule_state(self, shard: ShardSpec) -> RuleState:
        """The rule state of one shard: views, flat, and the rule's counts."""
        state = self.states[shard.tensor]
        views = {name: state[name].reshape(-1)[shard.start : shard.stop] for name in self._rule.state_names}
        counts = {
            name: state[name] if self.in_place else state[name].copy() for name in self._rule.scalar_names
        }
        return {**views, **counts}

    def __repr__(self) -> str:
        total = sum(flat.nbytes for flat in self._flat.values())
        return f"<ShardStorage {len(self._flat)} tensors {total} bytes {self.dtype}>"


class StoragePool:
    """The storages of the runs of a process, for all its roles. A storage lives as long as a role keeps it.

    Servers and workers learn of a new run at different times, so for a while one may ask for a run that
    another has left. A run has one storage, in whatever order roles ask for it.
    """

    def __init__(self) -> None:
        self._storages: WeakValueDictionary[str, ShardStorage] = WeakValueDictionary()
        self.has_servers = False
        """Whether a server of this process has opened a run."""

    def provide(self, run: str, make: Callable[[], ShardStorage]) -> ShardStorage:
        """The storage of a run for a server, made at the first call. The server must keep it."""
        storage = self._storages.get(run)
        if storage is None:
            storage = self._storages[run] = make()
        self.has_servers = True
        return storage

    def find(self, run: str) -> ShardStorage | None:
        """The storage of a run for a worker; None if no role of this process keeps it."""
        return self._storages.get(run)
