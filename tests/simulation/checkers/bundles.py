"""Pure: checks that the copies of a bundle apply the same entries, in one order, to the same values.

    bundles = Bundles()
    bundles.applies(copy, entry, parts)      # before each entry that a copy applies
    bundles.commits(copy, entry, others)     # if the copy is the primary
    bundles.compare(copy, store)             # between two entries

A bundle has one log: the members that apply a position apply the same entry (`one log`), each in the order of
the positions. A primary acknowledges each entry that it applies. So a generation has one primary (`one
primary`), and all members in sync have the entry (`committed`). With fewer than ``min_in_sync`` members a
primary applies no new entry (`min_in_sync`). No copy returns to an older generation (I4). Copies at the same
position have the same state, and a shard has one content for each version (`equal copies`). The clocks of a
store's live clients differ by no more than its mode permits (`staleness`).
"""

from collections.abc import Iterable, Sequence

import msgspec

from adam_async.parameter_server.bundle import Bundle
from adam_async.parameter_server.bundle_copy import BundleCopy
from adam_async.parameter_server.log_entries import Part
from adam_async.parameter_server.replication.local_copy import Entry
from adam_async.parameter_server.shard import Shard
from adam_async.run.store_record import Member, StoreRecord, is_vector_key
from tests.simulation.checkers.saved_pushes import digest_of
from tests.simulation.scenario import Violation

Digest = bytes

Key = tuple[str, str]
"""Id of the store and home of a bundle."""

NOT_LOGGED = ("ordered", "ordered_groups", "duplicates")
"""Fields of a shard's tables that the log does not decide: push order and repeats at the primary."""


class Bundles:
    """All copies of a run, over all their incarnations.

    Attributes:
        applied: Number of applied entries, of all copies.
        compared: Number of states that were compared with another copy's state.
    """

    def __init__(self) -> None:
        self.applied = self.compared = 0
        self._entries: dict[tuple[Key, int], tuple[int, Digest, Member]] = {}
        """By bundle and position: an entry's generation and digest, and the first member to apply it."""
        self._positions: dict[tuple[Key, Member], tuple[Bundle, int]] = {}
        """Shards and last applied position of each copy; a copy that joins again has new shards."""
        self._generations: dict[tuple[Key, Member], int] = {}
        self._primaries: dict[tuple[Key, int], Member] = {}
        self._states: dict[tuple[Key, int], tuple[Digest, Member]] = {}
        self._shards: dict[tuple[str, int, int], tuple[Digest, Member]] = {}
        """Digest of a shard and the first member with it, by store, shard and version."""
        self._compared: dict[tuple[Key, Member], tuple[Bundle, int]] = {}
        """Shards and last compared position of each copy."""
        self._alone: dict[tuple[Key, Member], tuple[int, int]] = {}
        """For each primary with too few members in sync: version of the bundle's record, and last position of
        the log when the record was new."""

    def applies(self, copy: BundleCopy, entry: Entry, parts: Sequence[Part]) -> None:
        """Check the next entry of a copy. Raises Violation."""
        self.applied += 1
        key, me = (copy.record.store, copy.home), copy.me
        self._check_generation(key, copy)
        digest = digest_of([each.tobytes() for part in parts for each in part])
        at = (key, entry.position)
        generation, first, other = self._entries.setdefault(at, (entry.generation, digest, me))
        if (generation, first) != (entry.generation, digest):
            text = f"{me} applied entry {entry.position} of {key[1]} of generation {entry.generation}"
            raise Violation("one log", f"{text}, and {other} another one, of generation {generation}")
        shards, last = self._positions.get((key, me), (copy.shards, 0))
        if shards is copy.shards and entry.position <= last:
            raise Violation("one log", f"{me} applied entry {entry.position} of {key[1]} after {last}")
        self._positions[key, me] = copy.shards, entry.position
        before = self._entries.get((key, entry.position - 1))
        if before is not None and before[0] > entry.generation:
            text = f"entry {entry.position} of {key[1]} has generation {entry.generation}"
            raise Violation("I4", f"{text}, and the one before it {before[0]}")

    def _check_generation(self, key: Key, copy: BundleCopy) -> None:
        me, generation = copy.me, copy.record.generation
        last = self._generations.get((key, me), 0)
        if generation < last:
            raise Violation("I4", f"{me} went back from generation {last} of {key[1]} to {generation}")
        self._generations[key, me] = generation
        if copy.is_primary:
            first = self._primaries.setdefault((key, generation), me)
            if first != me:
                text = f"{first} and {me} both acknowledged as the primary of {key[1]}"
                raise Violation("one primary", f"{text} in generation {generation}")

    def commits(self, primary: BundleCopy, entry: Entry, others: Iterable[BundleCopy]) -> None:
        """Check that other members in sync have an entry that a primary applies. Raises Violation."""
        for other in others:
            held = other.log.at(entry.position)
            is_dropped = other.log.start >= entry.position  # all members have applied it
            if not is_dropped and (held is None or held.generation != entry.generation):
                text = f"{primary.me} applied entry {entry.position} of {primary.home}"
                raise Violation("committed", f"{text}, and {other.me} does not hold it: {other.log}")

    def _check_members(self, copy: BundleCopy, key: Key, least: int) -> None:
        """Check that a primary with too few members applies no new entry."""
        changed, before = copy.record.changed, self._alone.pop((key, copy.me), None)
        if not copy.is_primary or len(copy.record.in_sync) >= least:
            return
        if before is None or before[0] != changed:
            before = changed, copy.log.last
        self._alone[key, copy.me] = before
        if copy.log.applied > before[1]:
            text = f"{copy.me} applied entry {copy.log.applied} of {key[1]}"
            raise Violation(
                "min_in_sync", f"{text} with {len(copy.record.in_sync)} of {least} members in sync"
            )

    def compare(self, copy: BundleCopy, store: StoreRecord) -> None:
        """Compare a copy's state with the other copies' at its position. Raises Violation."""
        bundle, me, key = copy.shards, copy.me, (copy.record.store, copy.home)
        self._check_members(copy, key, store.min_in_sync_in_force)
        position = copy.state_position
        if position is None or self._compared.get((key, me)) == (bundle, position):
            return
        self._compared[key, me] = bundle, position
        if store.slack is not None and not store.program:
            _check_clocks(bundle, store.slack, me)
        contents, tables = [], []
        for number, shard in sorted(bundle.shards.items()):
            content = _content_of(shard)
            contents.append(content)
            tables.append(_tables_of(shard))
            at = (key[0], int(number), int(shard.version))
            first, other = self._shards.setdefault(at, (content, me))
            if first != content:
                text = f"shard {number} in version {shard.version} differs between {other} and {me}"
                raise Violation("equal copies", text)
        digest = digest_of([msgspec.msgpack.encode((contents, tables, _clocks_of(bundle)))])
        first, other = self._states.setdefault((key, position), (digest, me))
        self.compared += other != me
        if first != digest:
            text = f"{other} and {me} differ after entry {position} of {key[1]}"
            raise Violation("equal copies", text)


def _check_clocks(bundle: Bundle, slack: int, me: Member) -> None:
    """Check that no live client of a store is too far ahead of another one. Raises Violation.

    A client may end the step that its last pull admitted. A client makes its first step without a pull, from
    the highest clock that it has on any bundle. Training runs have no such bound, because a replica without
    groups skips to an epoch's last clock.
    """
    for tables in bundle.tables():
        clocks = [clock for replica, clock in tables.clocks.items() if replica in bundle.replicas.live]
        if clocks and max(clocks) > min(clocks) + slack + 2:
            raise Violation("staleness", f"the clocks of {me} are {tables.clocks} with a slack of {slack}")


def _content_of(shard: Shard) -> Digest:
    # No version counts the changes of vectors.
    names = [name for name in sorted(shard.rule_state) if not is_vector_key(name)]
    return digest_of([shard.values.tobytes(), *(shard.rule_state[name].tobytes() for name in names)])


def _tables_of(shard: Shard) -> list[object]:
    """Return all tables of a shard that the log determines."""
    tables, pending = shard.tables, shard.pending
    # A digest is of messages, whose integers have 64 bits.
    losses = {epoch: (each.images, each.packed) for epoch, each in tables.losses.items()}
    content = {**tables.content(), "losses": losses}
    found = [_in_order(value) for name, value in content.items() if name not in NOT_LOGGED]
    vectors = {name: digest_of([a.tobytes()]) for name, a in shard.rule_state.items() if is_vector_key(name)}
    found += [_in_order(vectors), _in_order(shard.dots)]
    if pending is not None:
        waiting = {
            clock: [(int(each.replica), each.place) for each in contributions]
            for clock, contributions in pending.waiting.items()
        }
        found += [_in_order(waiting), pending.reached]
    return found


def _clocks_of(bundle: Bundle) -> list[object]:
    """Return the epoch and the replica generations of a bundle."""
    return [bundle.epoch, *map(_in_order, msgspec.structs.astuple(bundle.replicas.state()))]


def _in_order(value: object) -> object:
    """Return a value with its dictionaries as sorted pairs; lists in it contain no dictionaries."""
    if not isinstance(value, dict):
        return value
    # Most values are numbers: no call for these.
    return [(key, each if type(each) is int else _in_order(each)) for key, each in sorted(value.items())]
