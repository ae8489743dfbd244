"""Entries of a log on disk, applied to older pieces: the shards are those of the server that was lost."""

import msgspec
import numpy as np
import pytest

from adam_async.errors import DataError
from adam_async.model.rules import Adam, Sgd
from adam_async.parameter_server.entry_replay import EntryReplay
from adam_async.parameter_server.piece_states import (
    Catalogue,
    entry_parts,
    piece_state,
    read_entry,
    tensors_of,
)
from adam_async.run.store_record import StoreRecord
from adam_async.run.user_rules import RuleSource, record_of
from tests.adam_async.parameter_server.copies import PIECES, TABLE, USERS, WEIGHT, Copy, RandomPrimary
from tests.adam_async.rules import Picky

MODES = {
    "asp": (Sgd(), {}),
    "momentum": (Sgd(momentum=0.9), {}),
    "adam": (Adam(), {}),
    "scaled": (Sgd(), {"scales": True}),
    "ssp": (Sgd(), {"clocked": True}),
    "bsp": (Sgd(momentum=0.5), {"clocked": True, "summed_weight": WEIGHT}),
    "user": (record_of(Picky(most=1.5)), {}),
    "user in bsp": (record_of(Picky(most=1.5)), {"clocked": True, "summed_weight": WEIGHT}),
}


def catalogue_of(clocked=False, summed_weight=0, scales=False):
    record = StoreRecord(
        id="run",
        rules=(Sgd(),),
        arrays=1,
        nbytes=8,
        state_arrays=2,
        pieces=1,
        shard_bytes=64,
        slack=1 if clocked else None,
        summed_weight=summed_weight,
        scale_by_staleness=scales,
    )
    return Catalogue("run", record, (), 0.0)


def values_of(bundle_of):
    """Values, rule state and version of each shard; the function returns the bundle of a piece."""
    return {
        spec.id: (
            shard.values.tobytes(),
            {name: array.tobytes() for name, array in shard.rule_state.items()},
            shard.version,
        )
        for piece, specs in enumerate(PIECES)
        for spec in specs
        if (shard := bundle_of(piece).shards[spec.id]) is not None
    }


def on_disk(copy, piece):
    """The tensors of a piece, as its bytes bring them back."""
    state = piece_state(copy.bundle, "ps-0", piece, PIECES[piece], order=(1, copy.position))
    return tensors_of([memoryview(bytes(part)) for part in state.parts], "a test")


def through_a_disk(parts):
    """An entry, as its bytes bring it back."""
    return read_entry([memoryview(bytes(part)) for part in entry_parts(parts)], "a test")


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("mode", MODES)
def test_pieces_of_different_moments_and_all_later_entries_make_the_newest_state(mode, seed):
    rule, options = MODES[mode]
    primary = RandomPrimary(Copy(rule, **options), seed)
    found = {}
    for step in range(260):
        primary.step()
        if step % 40 == 39:
            primary.settle()
            piece = (step // 40) % len(PIECES)
            found[piece] = (1, primary.copy.position), on_disk(primary.copy, piece)
    primary.settle()
    assert len(found) == len(PIECES)
    assert len({order for order, _ in found.values()}) > 1

    replay = EntryReplay(catalogue_of(**options), PIECES, TABLE, [rule], found, "a test", RuleSource(USERS))
    _, first = min(order for order, _ in found.values())
    for position, parts in enumerate(primary.log[first:], start=first + 1):
        assert replay.take((1, position), through_a_disk(parts))
    assert values_of(replay.bundle_of) == values_of(lambda _: primary.copy.bundle)
    assert set(replay.orders.values()) == {(1, primary.copy.position)}


def test_an_entry_behind_a_gap_is_not_applied():
    primary = RandomPrimary(Copy(Sgd()), 1)
    found = {piece: ((1, 0), on_disk(primary.copy, piece)) for piece in range(len(PIECES))}
    for _ in range(60):
        primary.step()
    primary.settle()
    replay = EntryReplay(catalogue_of(), PIECES, TABLE, [Sgd()], found, "a test")
    assert replay.take((1, 1), primary.log[0])
    assert not replay.take((1, 3), primary.log[2])
    assert set(replay.orders.values()) == {(1, 1)}


def test_an_entry_of_an_older_generation_than_that_of_a_piece_is_not_applied_to_it():
    """The entry was never committed: a later primary has put others at its position."""
    primary = RandomPrimary(Copy(Sgd()), 1)
    found = {piece: ((1 + piece % 2, 0), on_disk(primary.copy, piece)) for piece in range(len(PIECES))}
    for _ in range(60):
        primary.step()
    primary.settle()
    replay = EntryReplay(catalogue_of(), PIECES, TABLE, [Sgd()], found, "a test")
    for position, parts in enumerate(primary.log, start=1):
        assert replay.take((1, position), parts)
    last = 1, len(primary.log)
    assert replay.orders == {0: last, 1: (2, 0), 2: last, 3: (2, 0)}
    values = replay.bundle_of(1).shards
    assert all(not values[spec.id].values.any() for piece in (1, 3) for spec in PIECES[piece])


def test_entries_after_a_new_begin_of_the_log_follow_only_pieces_at_or_after_it():
    primary = RandomPrimary(Copy(Sgd()), 1)
    found = {piece: ((1, 0), on_disk(primary.copy, piece)) for piece in (0, 1)}
    for _ in range(60):
        primary.step()
        if 2 not in found and primary.copy.position == 4 and primary.copy.bundle.idle:
            found.update({piece: ((1, 4), on_disk(primary.copy, piece)) for piece in (2, 3)})
    primary.settle()
    replay = EntryReplay(catalogue_of(), PIECES, TABLE, [Sgd()], found, "a test")
    for position, parts in enumerate(primary.log, start=1):
        assert replay.take((1, position), parts if position != 4 else through_a_disk([]))
    assert len(found) == len(PIECES)
    last = 1, len(primary.log)
    assert replay.orders == {0: (1, 3), 1: (1, 3), 2: last, 3: last}


def test_bytes_that_are_no_entry_are_refused():
    with pytest.raises(DataError, match="a test is no entry"):
        read_entry([memoryview(b"\xc1")], "a test")
    head = msgspec.msgpack.encode([[("|u1", (4,))]])
    with pytest.raises(DataError, match="a test is no piece"):
        read_entry([memoryview(head), memoryview(b"123")], "a test")
    replay = EntryReplay(
        catalogue_of(), PIECES, TABLE, [Sgd()], {1: ((1, 0), on_disk(Copy(Sgd()), 1))}, "a test"
    )
    with pytest.raises(DataError, match="entry 1 of a test"):
        replay.take((1, 1), [[np.frombuffer(b"nothing", np.uint8)]])


def test_a_piece_that_is_not_replayed_is_refused_by_name():
    copy = Copy(MODES["bsp"][0], **MODES["bsp"][1])
    found = {piece: ((1, 0), on_disk(copy, piece)) for piece in range(len(PIECES) - 1)}
    replay = EntryReplay(catalogue_of(**MODES["bsp"][1]), PIECES, TABLE, [MODES["bsp"][0]], found, "a test")
    for piece in (0, len(PIECES) - 1):
        with pytest.raises(DataError, match=f"piece {piece} of a test is not on the disk"):
            replay.bundle_of(piece)


def test_entries_of_a_rule_that_is_not_allowed_name_it_and_pieces_are_read_without_its_code():
    rule = record_of(Picky())
    primary = RandomPrimary(Copy(rule), 1)
    found = {piece: ((1, 0), on_disk(primary.copy, piece)) for piece in range(len(PIECES))}
    for _ in range(60):
        primary.step()
    primary.settle()
    replay = EntryReplay(catalogue_of(), PIECES, TABLE, [rule], found, "a test")
    assert replay.bundle_of(0).shards
    with pytest.raises(DataError, match=r"entry \d+ of a test cannot be applied: .*--allow-rule tests\."):
        for position, parts in enumerate(primary.log, start=1):
            replay.take((1, position), through_a_disk(parts))
