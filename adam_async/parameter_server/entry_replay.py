"""Pure: the entries of a bundle's log that are on a disk, applied to the pieces there.

A server with durable pushes acknowledges an entry before a piece on its disk has it. After a loss of the
server, each piece gets its later entries, as on a member that joins (`log_entries.py`).
"""

from collections.abc import Mapping, Sequence, Set
from functools import cached_property

from adam_async.errors import ConfigError, DataError
from adam_async.model.rules import Rule
from adam_async.parameter_server.apply import Applier
from adam_async.parameter_server.bundle import Bundle
from adam_async.parameter_server.events import Applied, Apply, ApplySum, SumApplied
from adam_async.parameter_server.log_entries import Part, decode_entry, without_shards
from adam_async.parameter_server.piece_states import Catalogue, load_tensors, new_bundle
from adam_async.parameter_server.store_work import begin_work
from adam_async.parameter_server.user_applier import appliers_of
from adam_async.persistence.records import Order
from adam_async.run.shard_table import ShardSpec
from adam_async.run.user_rules import RuleSource
from transport import RemoteProtocolError


class EntryReplay:
    """One bundle, restored from the pieces and entries of a disk.

    In bsp an entry completes sums that depend on the live replicas. So pieces copied at different positions
    are replayed separately, each with its own live replicas. In other modes only clocks depend on the live
    replicas.

    Args:
        catalogue: Store of the bundle.
        pieces: Its shards, cut into pieces.
        table: All shards of the store, by number.
        rules: The rules of the store.
        found: For each piece on the disk, by number: generation and position of its last entry, and its
            tensors.
        origin: Name of the bundle on the disk, for errors.
        source: User rules that this server may apply; None: none.

    Raises:
        DataError: A piece does not fit the store.
    """

    def __init__(
        self,
        catalogue: Catalogue,
        pieces: Sequence[Sequence[ShardSpec]],
        table: Sequence[ShardSpec],
        rules: Sequence[Rule],
        found: Mapping[int, tuple[Order, Part]],
        origin: str,
        source: RuleSource | None = None,
    ) -> None:
        self._table = table
        self._origin = origin
        self.orders = {piece: order for piece, (order, _) in found.items()}
        """Generation and position of the last entry in each piece."""
        self._ended: set[int] = set()
        """Pieces older than a new beginning of the log: later entries on the disk do not apply to them."""
        together: dict[int, list[int]] = {}
        for piece, ((_, position), _) in sorted(found.items()):
            if catalogue.record.summed_weight and not pieces[piece]:
                continue  # each piece has the replicas of its moment
            together.setdefault(position if catalogue.record.summed_weight else 0, []).append(piece)
        self._parts = [
            _Part(catalogue, {piece: pieces[piece] for piece in numbers}, rules, source or RuleSource())
            for numbers in together.values()
        ]
        for part in self._parts:
            for piece, specs in part.pieces.items():
                try:
                    load_tensors(part.bundle, specs, table, found[piece][1])
                except RemoteProtocolError as error:
                    raise DataError(f"piece {piece} of {origin} does not fit its store: {error}") from None

    def bundle_of(self, piece: int) -> Bundle:
        """Return a bundle with the shards of a piece.

        Raises:
            DataError: The disk has no such piece, or in bsp the piece has no shards.
        """
        for part in self._parts:
            if piece in part.pieces:
                return part.bundle
        raise DataError(f"piece {piece} of {self._origin} is not on the disk")

    def take(self, order: Order, parts: list[Part]) -> bool:
        """Apply the next entry to the pieces that lack it. Returns False if an earlier entry is missing.

        Args:
            order: Generation and position of the entry.
            parts: Content of the entry; empty if this server's log began anew after the position.

        Raises:
            DataError: No primary forms such an entry, or this server does not allow the rule of the store.
        """
        generation, position = order
        # An entry of an older generation than the piece's last one was never committed.
        behind = {
            piece
            for piece, (newest, at) in self.orders.items()
            if at < position and newest <= generation and piece not in self._ended
        }
        if not parts:
            self._ended |= behind
            return True
        if any(self.orders[piece][1] < position - 1 for piece in behind):
            return False
        for part in self._parts:
            if not behind.isdisjoint(part.pieces):
                self._apply(part, behind, position, parts)
        self.orders.update(dict.fromkeys(behind, order))
        return True

    def _apply(self, part: "_Part", behind: Set[int], position: int, parts: list[Part]) -> None:
        absent = frozenset(
            spec.id for piece, specs in part.pieces.items() if piece not in behind for spec in specs
        )
        try:
            entry = decode_entry(parts, part.bundle, self._table, is_partial=True)
        except RemoteProtocolError as error:
            raise DataError(f"entry {position} of {self._origin}: {error}") from None
        part.bundle.absent = absent
        part.bundle.commit(without_shards(entry, absent) if absent else entry)
        while (work := part.bundle.take_work()) is not None:
            try:
                part.do(work)
            except ConfigError as error:
                raise DataError(f"entry {position} of {self._origin} cannot be applied: {error}") from None


class _Part:
    """Pieces that are replayed together."""

    def __init__(
        self,
        catalogue: Catalogue,
        pieces: Mapping[int, Sequence[ShardSpec]],
        rules: Sequence[Rule],
        source: RuleSource,
    ) -> None:
        self.pieces = pieces
        specs = [spec for specs in pieces.values() for spec in specs]
        self.bundle = new_bundle(catalogue.record, specs, rules)
        self._rules = rules
        self._source = source

    @cached_property
    def _appliers(self) -> Mapping[tuple[int, str], Applier]:
        """Return the appliers; pieces without entries need no applier, and so no code of a user's rule."""
        return appliers_of([*self.bundle.shards.values()], self._rules, self._source)

    def do(self, work: Apply | ApplySum) -> None:
        """Apply a batch or a sum. Raises ConfigError: a rule of the user is not allowed here."""
        begun = begin_work(work, lambda spec: self._appliers[spec.rule, spec.dtype], 0.0)
        begun.work.run()
        if isinstance(work, ApplySum):
            self.bundle.sum_applied(SumApplied(work, [finite for (finite,) in begun.work.finite], 0))
        else:
            self.bundle.applied(Applied(work, begun.outcomes))
