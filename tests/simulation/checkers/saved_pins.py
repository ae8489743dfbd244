"""Pure: checks of pins, the states of a store that its servers keep under names.

`LoggedStates` applies each log's entries once more, one after the other, to separate shards. A state that a
server saves for a pin has the bytes that these shards have at the pin's place (`pinned state`), whatever
entries the server was working on. Stores with one copy and without durable pushes have no log.

`SavedPins` has the pins of all clients. A pin contains the pushes that were acknowledged before its call, and
no push that began after its return (`pin`). Each reader gets the same values, even after losses of all
servers, until a client gives the pin up (`pin kept`).

    logged = LoggedStates()
    logged.applies(copy, store, entry, parts)    # before each entry that a copy applies
    logged.saved(state)                          # each state of a pin that goes to a disk
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from msgspec import structs
from numpy.typing import NDArray

from adam_async.parameter_server.bundle import Bundle
from adam_async.parameter_server.bundle_copy import BundleCopy
from adam_async.parameter_server.events import Applied, ApplySum, QueuedPin, SumApplied
from adam_async.parameter_server.log_entries import Part, decode_entry
from adam_async.parameter_server.piece_states import load_tensors, new_bundle, tensors_of
from adam_async.parameter_server.pins import store_of
from adam_async.parameter_server.replication.local_copy import Entry
from adam_async.parameter_server.shard import Shard
from adam_async.parameter_server.store_work import begin_work
from adam_async.parameter_server.user_applier import appliers_of
from adam_async.persistence.records import State
from adam_async.run.shard_table import ShardSpec
from adam_async.run.store_record import StoreRecord, VectorRecord, is_vector_key
from adam_async.run.user_rules import RuleSource
from tests.simulation.checkers.saved_pushes import digest_of
from tests.simulation.scenario import Violation


@dataclass(slots=True, eq=False)
class _Model:
    """One bundle, computed from its log."""

    store: StoreRecord
    bundle: Bundle
    pieces: Sequence[Sequence[ShardSpec]]
    table: Sequence[ShardSpec]
    position: int = 0
    pins: dict[str, dict[int, list[bytes]]] = field(default_factory=dict)
    """Digests of each piece's shards at each pin, by the id of its states."""
    vectors: dict[str, tuple[VectorRecord, ...]] = field(default_factory=dict)
    """Vectors of each pin, without temporary vectors."""

    def apply(self, parts: list[Part]) -> None:
        """Apply the next entry."""
        self.position += 1
        bundle, rules = self.bundle, self.store.rules
        entry = decode_entry(parts, bundle, self.table)
        if isinstance(entry, QueuedPin) and not entry.pin.removes:
            lasting = tuple([vector for vector in bundle.vectors if not vector.temporary])
            of_pieces = {
                at: [_digest(bundle.shards[spec.id], lasting) for spec in specs]
                for at, specs in enumerate(self.pieces)
            }
            self.pins.setdefault(store_of(entry.pin.pin), of_pieces)
            self.vectors.setdefault(store_of(entry.pin.pin), lasting)
        bundle.commit(entry)
        appliers = appliers_of([*bundle.shards.values()], rules, RuleSource())
        while (work := bundle.take_work()) is not None:
            begun = begin_work(work, lambda spec: appliers[spec.rule, spec.dtype], 0.0)
            begun.work.run()
            if isinstance(work, ApplySum):
                bundle.sum_applied(SumApplied(work, [finite for (finite,) in begun.work.finite], 0))
            else:
                bundle.applied(Applied(work))


class LoggedStates:
    """The bundles of all stores with a log.

    Attributes:
        compared: Number of pin states that were compared.
    """

    def __init__(self) -> None:
        self.compared = 0
        self._models: dict[tuple[str, str], _Model] = {}

    def applies(self, copy: BundleCopy, store: StoreRecord, entry: Entry, parts: Sequence[Part]) -> None:
        """Follow a copy's next entry; the first copy that applies an entry has applied all before it."""
        key = store.id, copy.home
        model = self._models.get(key)
        if model is None and entry.position == copy.log.start + 1 and copy.is_primary:
            model = self._models[key] = self._first(copy, store, entry.position - 1)
        if model is not None and entry.position == model.position + 1:
            model.apply([*parts])

    @staticmethod
    def _first(copy: BundleCopy, store: StoreRecord, position: int) -> _Model:
        """Return the bundle before its first entry, with the values that its primary loaded."""
        specs = [spec for piece in copy._pieces for spec in piece]
        bundle = new_bundle(store, specs, store.rules)
        for number, shard in bundle.shards.items():
            first = copy.shards.shards[number]
            np.copyto(shard.values, first.values)
            for name, array in first.rule_state.items():
                if name not in shard.rule_state:  # a vector that came back from a disk; the log tells later
                    shard.rule_state[name] = np.empty_like(array)
                np.copyto(shard.rule_state[name], array)
        bundle.share_equal_tables()
        return _Model(store, bundle, copy._pieces, copy._table, position)

    def saved(self, state: State, pin: str) -> None:
        """Compare a state of a pin with the log. Raises Violation."""
        for (_, home), model in self._models.items():
            expected = model.pins.get(pin, {}).get(state.key.shard)
            if home != state.key.home or expected is None:
                continue
            specs = model.pieces[state.key.shard]
            lasting = model.vectors[pin]
            bundle = new_bundle(structs.replace(model.store, vectors=lasting), specs, model.store.rules)
            tensors = tensors_of([memoryview(part).cast("B") for part in state.parts], pin)
            load_tensors(bundle, specs, model.table, tensors)
            self.compared += 1
            found = [_digest(bundle.shards[spec.id], lasting) for spec in specs]
            if found != expected:
                wrong = [
                    spec.id for spec, one, other in zip(specs, found, expected, strict=True) if one != other
                ]
                text = f"shards {wrong} of {home} in {pin}, at {state.key.order}, are not those of the log"
                raise Violation("pinned state", text)


def _digest(shard: Shard, vectors: Sequence[VectorRecord]) -> bytes:
    """Return the digest of a shard with its rule state and some of its vectors."""
    kept = {vector.key for vector in vectors}
    names = [name for name in sorted(shard.rule_state) if not is_vector_key(name) or name in kept]
    arrays = [shard.values, *(shard.rule_state[name] for name in names)]
    return digest_of([b"%d" % shard.version, *(array.tobytes() for array in arrays)])


Rows = Mapping[str, NDArray[np.float64]]
"""Values of a pin by group, as rows and columns."""


@dataclass(slots=True, eq=False)
class _Made:
    """A pin that a client has made."""

    servers: int
    """Number of servers that had each of its bundles on return."""
    rotten: int
    """Number of servers whose disk had lost bytes before."""
    acknowledged: Mapping[str, frozenset[int]]
    """Pushes to each group that were acknowledged before its call."""
    begun: Mapping[str, frozenset[int]]
    """Pushes to each group that had begun on its return; None in bsp."""
    digest: bytes = b""
    """Digest of the values at their first reading."""


class SavedPins:
    """The pins of a store, over all its returns.

    Attributes:
        made: Number of pins that were made.
        read: Number of readings.
    """

    def __init__(self) -> None:
        self.made = self.read = 0
        self._pins: dict[str, _Made] = {}

    @property
    def names(self) -> list[str]:
        """Names of made pins that no client has begun to give up."""
        return list(self._pins)

    def returned(self, name: str, **facts: Any) -> None:
        """Record a pin that a client has made; for the facts see `_Made`."""
        self.made += 1
        self._pins[name] = _Made(**facts)

    def forget(self, name: str) -> None:
        """Note that a client begins to give a pin up."""
        self._pins.pop(name, None)

    def must_be_there(self, name: str, rotten: int) -> bool:
        """Return whether a pin must be on the disks once all servers are there."""
        made = self._pins.get(name)
        return made is not None and rotten - made.rotten < made.servers

    def values(self, name: str, rows: Rows) -> None:
        """Check the values of a pin. Raises Violation."""
        made = self._pins.get(name)
        if made is None:
            return
        self.read += 1
        digest = digest_of([rows[group].tobytes() for group in sorted(rows)])
        if made.digest and made.digest != digest:
            raise Violation("pin kept", f"pin {name} has other values than at its first reading")
        if made.digest:
            return
        made.digest = digest
        for group, found in rows.items():
            mine = sorted(made.acknowledged.get(group, ()))
            if (found[:, mine] == 0).any():
                lost = [column for column in mine if (found[:, column] == 0).any()]
                raise Violation("pin", f"pin {name} lacks pushes {lost} of {group}, acknowledged before it")
            late = [*np.flatnonzero(found.any(axis=0))]
            late = [int(column) for column in late if made.begun and column not in made.begun.get(group, ())]
            if late:
                raise Violation("pin", f"pin {name} has pushes {late} of {group}, which began after it")
