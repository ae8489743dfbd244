"""Pure: a checkpoint, and its shards as pieces of a store on a disk.

The pieces are those of a server's disk (`parameter_server/piece_states.py`): all shards of a run, as its
servers had them, without the sessions of its workers. Beside them are the record of the store and that of the
run. So a folder of them is all that a run needs to go on, on any number of servers.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from adam_async.checkpoint.manifest import Manifest
from adam_async.checkpoint.tensors import ShardSource, WholeTensors
from adam_async.errors import DataError
from adam_async.messages import ShardState, ShardStates
from adam_async.parameter_server.bundle import Bundle
from adam_async.parameter_server.piece_states import (
    Catalogue,
    load_tensors,
    new_bundle,
    pieces_by_name,
    tensors_of,
)
from adam_async.parameter_server.shard import Shard
from adam_async.parameter_server.shard_transfer import load_states
from adam_async.persistence.keys import StateName
from adam_async.run.ids import ShardId
from adam_async.run.run_record import RunRecord
from adam_async.run.shard_table import ShardSpec, shard_table
from adam_async.run.store_record import is_vector_key
from transport import RemoteProtocolError


class StoredPieces:
    """The pieces of a store, by its record."""

    def __init__(self, catalogue: Catalogue) -> None:
        record = catalogue.record
        self.catalogue = catalogue
        self.table = shard_table(catalogue.arrays, shard_bytes=record.shard_bytes)
        self.specs = pieces_by_name(record, self.table.shards)
        self._rules = record.rules

    @property
    def arrays(self) -> int:
        """Maximum number of arrays beside the values: of the state of a rule with its counts, and vectors."""
        return self.catalogue.record.arrays_per_value

    def home_of(self, spec: ShardSpec) -> str:
        """Return the home of the bundle with a shard."""
        return self.catalogue.record.buckets[spec.bucket]

    def piece_of(self) -> dict[ShardId, StateName]:
        """Return the name of the piece of each shard."""
        return {spec.id: name for name, specs in self.specs.items() for spec in specs}

    @property
    def nbytes(self) -> int:
        """Size of all values and of the elementwise arrays of their rules, in bytes."""
        return sum(
            [each.nbytes * (1 + len(self._rules[each.rule].state_names)) for each in self.catalogue.arrays]
        )

    def new_tensors(self) -> WholeTensors:
        """Allocate all tensors of the store, with the state of its rules, and its lasting vectors."""
        vectors = self.catalogue.record.lasting_vectors
        return WholeTensors(self.catalogue.arrays, self.table, self._rules, vectors=vectors)

    def bundle(self, specs: Sequence[ShardSpec]) -> Bundle:
        """Return a bundle with some new shards."""
        return new_bundle(self.catalogue.record, specs, self._rules)

    def shards(self, name: StateName, parts: Sequence[memoryview], origin: str) -> list[Shard]:
        """Return the shards of a piece on a disk.

        Args:
            origin: Name of the piece, for errors.

        Raises:
            DataError: The store has no such piece, or the parts do not fit it.
        """
        if name not in self.specs:
            raise DataError(f"{origin} is no piece of store {self.catalogue.record.id}")
        specs = self.specs[name]
        bundle = self.bundle(specs)
        try:
            load_tensors(bundle, specs, self.table.shards, tensors_of(parts, origin))
        except RemoteProtocolError as error:
            raise DataError(f"{origin} does not fit its store: {error}") from None
        return [bundle.shards[spec.id] for spec in specs]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StoredCheckpoint:
    """A checkpoint in its folder, or a run on the disks of its servers. Its shards are read when needed."""

    manifest: Manifest
    record: RunRecord
    pieces: StoredPieces
    states: tuple[ShardState, ...]
    """Versions, clocks and groups of the shards, in the order of their numbers."""
    source: ShardSource
    """The shards. For a checkpoint its disk must be open, for a run its servers must be there."""
    problems: tuple[str, ...] = ()
    """Damage of newer checkpoints in the same folder."""
    remarks: tuple[str, ...] = ()
    """Remarks on the other checkpoints of the folder, and on the choice of this one."""

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.manifest.name} of run {self.manifest.run}>"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class Checkpoint(StoredCheckpoint):
    """A checkpoint with its values and the state of its rules in memory."""

    tensors: WholeTensors

    @property
    def weights(self) -> Mapping[str, NDArray[Any]]:
        """Values by tensor, each in its shape."""
        return self.tensors.weights

    @property
    def state(self) -> Mapping[str, NDArray[Any]]:
        """Rule arrays by ``ARRAY/TENSOR``, in the tensor's shape, or one number per shard of it."""
        return self.tensors.state


def take_states(
    bundle: Bundle, numbers: Sequence[int], answer: ShardStates, tensors: Sequence[NDArray[Any]]
) -> None:
    """Take the shards of an answer into a bundle with new shards.

    Args:
        numbers: Numbers of the shards that were asked for, which have one rule.
        tensors: Tensors of the answer.

    Raises:
        RemoteProtocolError: The answer has other shards, arrays or shapes, or a malformed table.
    """
    shards = {ShardId(number): bundle.shards[ShardId(number)] for number in numbers}
    names = {name for name in next(iter(shards.values())).rule_state if not is_vector_key(name)}
    if {name for name in answer.arrays if not is_vector_key(name)} != names:
        raise RemoteProtocolError("shards", f"the rule has arrays {sorted(names)}, not {answer.arrays}")
    if load_states(shards, answer, tensors) != shards.keys():
        raise RemoteProtocolError("shards", f"asked for shards {tuple(numbers[:8])}, got others")
