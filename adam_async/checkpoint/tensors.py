"""Pure: all tensors of a run with their rule state, joined from shards and split into shards."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from adam_async.checkpoint.manifest import Checkpoint, CheckpointError
from adam_async.messages import check_tensor
from adam_async.model.rules import Rule
from adam_async.run.shard_table import ShardSpec, ShardTable
from adam_async.run.step_model import RunModel
from transport import RemoteProtocolError


class RunTensors:
    """Whole tensors, and the range of each shard in them; without a rule only the values."""

    def __init__(self, network: RunModel, table: ShardTable, rule: Rule | None) -> None:
        self.table = table
        self._state_names = rule.state_names if rule is not None else ()
        self._scalar_names = rule.scalar_names if rule is not None else ()
        self._dtype = network.dtype
        self.arrays = (*self._state_names, *self._scalar_names)
        """Names of the rule's arrays, in the order of a message."""
        self.weights: dict[str, NDArray[Any]] = {
            parameter.name: np.empty(parameter.shape, network.dtype) for parameter in network.parameters
        }
        self.state: dict[str, NDArray[Any]] = {}
        """Arrays of the rule: elementwise ones in the shape of their tensor, counts with one entry per shard
        of the tensor."""
        made = rule.new_state((1,), network.dtype) if rule is not None else {}
        for parameter in network.parameters:
            for name in self._state_names:
                self.state[f"{name}/{parameter.name}"] = np.empty(parameter.shape, made[name].dtype)
            for name in self._scalar_names:
                shards = len(table.by_tensor[parameter.name])
                self.state[f"{name}/{parameter.name}"] = np.empty(shards, made[name].dtype)
        self._place = {
            shard.id: place for shards in table.by_tensor.values() for place, shard in enumerate(shards)
        }

    def bytes_of(self, shard: ShardSpec) -> int:
        """Return the size of one shard with its rule state in bytes, without counts."""
        return shard.size * self._dtype.itemsize * (1 + len(self._state_names))

    def cut(self, shard: ShardSpec) -> list[NDArray[Any]]:
        """Return one shard in the form of a message: values, then the rule's arrays in order; flat views."""
        part = slice(shard.start, shard.stop)
        place = self._place[shard.id]
        return [
            self.weights[shard.tensor].reshape(-1)[part],
            *(self.state[f"{name}/{shard.tensor}"].reshape(-1)[part] for name in self._state_names),
            *(self.state[f"{name}/{shard.tensor}"][place : place + 1] for name in self._scalar_names),
        ]

    def put(self, shards: Sequence[int], arrays: Sequence[str], tensors: Sequence[NDArray[Any]]) -> None:
        """Take shards of a message.

        Args:
            tensors: The arrays of each shard in turn, as `cut` returns them.

        Raises:
            RemoteProtocolError: The run has other shards or arrays.
        """
        if tuple(arrays) != self.arrays:
            raise RemoteProtocolError("shards", f"the rule has arrays {self.arrays}, not {tuple(arrays)}")
        each = 1 + len(self.arrays)
        if len(tensors) != each * len(shards):
            raise RemoteProtocolError(
                "shards", f"{len(shards)} shards need {each * len(shards)} tensors, not {len(tensors)}"
            )
        for place, number in enumerate(shards):
            for to, tensor in zip(self.cut(self.table.shards[number]), tensors[place * each :], strict=False):
                check_tensor(tensor, f"shard {number}", to.shape, to.dtype)
                to[:] = tensor

    def fill(self, checkpoint: Checkpoint) -> None:
        """Take all tensors of a checkpoint. Raises CheckpointError: the run has other tensors."""
        for kind, ours, theirs in (
            ("parameter", self.weights, checkpoint.weights),
            ("rule state", self.state, checkpoint.state),
        ):
            _check_same(checkpoint, kind, ours, theirs)
            for name, array in ours.items():
                array[...] = theirs[name]


def _check_same(
    checkpoint: Checkpoint, kind: str, ours: Mapping[str, NDArray[Any]], theirs: Mapping[str, NDArray[Any]]
) -> None:
    for name in sorted(ours.keys() ^ theirs.keys()):
        lacks = "lacks" if name in ours else "has a superfluous"
        raise CheckpointError(f"{checkpoint.manifest.name} {lacks} {kind} {name}; it is of another model")
    for name, array in ours.items():
        there = theirs[name]
        if (there.shape, there.dtype) != (array.shape, array.dtype):
            raise CheckpointError(
                f"{checkpoint.manifest.name}: {kind} {name} is {there.dtype} of {list(there.shape)}, "
                f"but the run has {array.dtype} of {list(array.shape)}"
            )
