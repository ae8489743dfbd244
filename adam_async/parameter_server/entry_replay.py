"""Pure: the entries of a bundle's log that are on a disk, applied to the pieces there.

A server with durable pushes acknowledges an entry that no piece on its disk has. After its loss the entries
behind each piece are applied to it again, as a member that joins applies them (`log_entries.py`).
"""

from collections.abc import Mapping, Sequence

from adam_async.errors import DataError
from adam_async.model.rules import Rule
from adam_async.parameter_server.apply import appliers_of
from adam_async.parameter_server.bundle import Bundle
from adam_async.parameter_server.events import Applied, Apply, ApplySum, SumApplied
from adam_async.parameter_server.log_entries import Part, decode_entry, without_shards
from adam_async.parameter_server.piece_states import Catalogue
from adam_async.parameter_server.shard_pieces import load_piece, read_piece
from adam_async.parameter_server.storage import own_shards
from adam_async.run.shard_table import ShardSpec
from transport import RemoteProtocolError


class EntryReplay:
    """One bundle, from its pieces on a disk.

    Args:
        catalogue: Its store.
        pieces: Its shards, cut into pieces.
        table: All shards of the store, by number.
        rules: The rules of the store.
        found: Position and tensors of each piece on the disk, by number.
        origin: Name of the bundle on the disk, for errors.

    Raises:
        DataError: A piece does not fit the store.
    """

    def __init__(
        self,
        catalogue: Catalogue,
        pieces: Sequence[Sequence[ShardSpec]],
        table: Sequence[ShardSpec],
        rules: Sequence[Rule],
        found: Mapping[int, tuple[int, Part]],
        origin: str,
    ) -> None:
        record = catalogue.record
        shards = own_shards([spec for specs in pieces for spec in specs], rules)
        self.bundle = Bundle(
            shards,
            clocked=record.slack is not None,
            summed_weight=record.summed_weight,
            scale_by_staleness=record.scale_by_staleness,
        )
        self._appliers = appliers_of(shards, rules)
        self._pieces = pieces
        self._table = table
        self._origin = origin
        self.positions = {piece: position for piece, (position, _) in found.items()}
        """Position of the last entry in each piece."""
        for piece, (_, tensors) in sorted(found.items()):
            try:
                load_piece(self.bundle, read_piece(self.bundle, pieces[piece], table, tensors))
            except RemoteProtocolError as error:
                raise DataError(f"piece {piece} of {origin} does not fit its store: {error}") from None

    def take(self, position: int, parts: list[Part]) -> bool:
        """Apply the next entry to the pieces that lack it; returns whether it follows all of them.

        Raises:
            DataError: No primary forms such an entry.
        """
        behind = [piece for piece, at in self.positions.items() if at < position]
        if any(self.positions[piece] < position - 1 for piece in behind):
            return False
        absent = frozenset(
            spec.id for piece, specs in enumerate(self._pieces) if piece not in behind for spec in specs
        )
        bundle = self.bundle
        try:
            entry = decode_entry(parts, bundle, self._table)
        except RemoteProtocolError as error:
            raise DataError(f"entry {position} of {self._origin}: {error}") from None
        bundle.absent = absent
        bundle.commit(without_shards(entry, absent) if absent else entry)
        while (work := bundle.take_work()) is not None:
            self._do(work)
        self.positions.update(dict.fromkeys(behind, position))
        return True

    def _do(self, work: Apply | ApplySum) -> None:
        if isinstance(work, ApplySum):
            spec = work.shards[0].spec
            gradients = [
                queued.gradients.only(places) for queued, places in zip(work.pushes, work.places, strict=True)
            ]
            applier = self._appliers[spec.rule, spec.dtype]
            finite = applier.apply_sum(work.shards, gradients, scale=work.scale, rate=work.rate)
            self.bundle.sum_applied(SumApplied(work, finite, 0))
            return
        shards = work.shards()
        spec = shards[0].spec
        applier = self._appliers[spec.rule, spec.dtype]
        gradients = [queued.gradients.only(queued.accepted) for queued in work.pushes]
        if work.pushes[0].push.assign:
            applier.work_on_assignment(shards, gradients[0]).run()
        else:
            applier.apply_pushes(shards, gradients, work.rates)
        self.bundle.applied(Applied(work))
