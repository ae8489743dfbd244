"""Pure: all arrays of a store with the state of their rules, joined from shards and split into shards."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from adam_async.messages import ShardState, check_tensor
from adam_async.model.rules import Rule
from adam_async.run.shard_table import ShardSpec, ShardTable
from adam_async.run.store_record import ArrayRecord
from transport import RemoteProtocolError


class WholeTensors:
    """Whole tensors, and the range of each shard in them.

    Args:
        table: Shards of the arrays.
        rules: The rules of the store; none for values alone.
        values: Contiguous values by array; by default new arrays, which are not filled.
    """

    def __init__(
        self,
        arrays: Sequence[ArrayRecord],
        table: ShardTable,
        rules: Sequence[Rule] = (),
        values: Mapping[str, NDArray[Any]] | None = None,
    ) -> None:
        self.table = table
        self._rules = rules
        self.weights: dict[str, NDArray[Any]] = {
            each.name: np.empty(each.shape, each.dtype) if values is None else values[each.name]
            for each in arrays
        }
        self.state: dict[str, NDArray[Any]] = {}
        """Arrays of the rules: elementwise ones in the shape of their tensor, counts with one entry per shard
        of the tensor."""
        for each in arrays if rules else ():
            rule = rules[each.rule]
            made = rule.new_state((1,), np.dtype(each.dtype))
            for name in rule.state_names:
                self.state[f"{name}/{each.name}"] = np.empty(each.shape, made[name].dtype)
            for name in rule.scalar_names:
                shards = len(table.by_tensor.get(each.name, ()))
                self.state[f"{name}/{each.name}"] = np.empty(shards, made[name].dtype)
        self._place = {
            shard.id: place for shards in table.by_tensor.values() for place, shard in enumerate(shards)
        }

    def arrays_of(self, shard: ShardSpec) -> tuple[str, ...]:
        """Return the names of the arrays of a shard's rule, in the order of a message."""
        return self._names(shard, "state_names") + self._names(shard, "scalar_names")

    def _names(self, shard: ShardSpec, kind: str) -> tuple[str, ...]:
        return getattr(self._rules[shard.rule], kind) if self._rules else ()

    def bytes_of(self, shard: ShardSpec) -> int:
        """Return the size of one shard with its rule state in bytes, without counts."""
        return shard.nbytes * (1 + len(self._names(shard, "state_names")))

    def cut(self, shard: ShardSpec) -> list[NDArray[Any]]:
        """Return one shard in the form of a message: values, then the rule's arrays in order; flat views."""
        part, place, tensor = slice(shard.start, shard.stop), self._place[shard.id], shard.tensor
        return [
            self.weights[tensor].reshape(-1)[part],
            *(self.state[f"{name}/{tensor}"].reshape(-1)[part] for name in self._names(shard, "state_names")),
            *(
                self.state[f"{name}/{tensor}"][place : place + 1]
                for name in self._names(shard, "scalar_names")
            ),
        ]

    def put(self, shards: Sequence[int], arrays: Sequence[str], tensors: Sequence[NDArray[Any]]) -> None:
        """Take shards of a message, which have the same rule.

        Args:
            tensors: The arrays of each shard in turn, as `cut` returns them.

        Raises:
            RemoteProtocolError: The store has other shards or arrays.
        """
        each = 1 + len(arrays)
        if len(tensors) != each * len(shards):
            raise RemoteProtocolError(
                "shards", f"{len(shards)} shards need {each * len(shards)} tensors, not {len(tensors)}"
            )
        for place, number in enumerate(shards):
            shard = self.table.shards[number]
            if tuple(arrays) != self.arrays_of(shard):
                raise RemoteProtocolError(
                    "shards", f"the rule has arrays {self.arrays_of(shard)}, not {tuple(arrays)}"
                )
            for to, tensor in zip(self.cut(shard), tensors[place * each :], strict=False):
                check_tensor(tensor, f"shard {number}", to.shape, to.dtype)
                to[:] = tensor


def first_states(tensors: WholeTensors) -> tuple[ShardState, ...]:
    """Return the states of all shards before any push."""
    return tuple(ShardState(shard=int(shard.id), version=0, clocks={}) for shard in tensors.table.shards)
