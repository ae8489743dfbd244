"""The state of a bundle in pieces: a copy made of pieces is equal to the last bit."""

import msgspec
import numpy as np
import pytest

from adam_async.messages.group_sets import MOST_BOUNDS
from adam_async.model.rules import Adam, Sgd
from adam_async.parameter_server import shard_pieces
from adam_async.parameter_server.bundle import Bundle
from adam_async.parameter_server.gradients import DeltaPart
from adam_async.parameter_server.piece_states import piece_state
from adam_async.parameter_server.replay_log import OrderLog
from adam_async.parameter_server.replica_clocks import OVER_KEPT, REMEMBERED
from adam_async.parameter_server.shard import EARLY_KEPT, EXACT, MOST_REFUSALS, ShardTables
from adam_async.parameter_server.shard_pieces import (
    MOST_ENTRIES,
    copy_piece,
    load_piece,
    pieces_of,
    read_piece,
)
from adam_async.parameter_server.storage import own_shards
from tests.adam_async.parameter_server.copies import HERE, PIECES, TABLE, WEIGHT, Copy, RandomPrimary, spec_of
from transport import RemoteProtocolError

BSP = {"clocked": True, "summed_weight": WEIGHT}


def copied(bundle, specs):
    return [tensor.copy() for tensor in copy_piece(bundle, specs, has_log=True)]


def busy_primary(rule, seed=3, **options):
    primary = RandomPrimary(Copy(rule, **options), seed)
    primary.live()
    for _ in range(120):
        primary.step()
    primary.settle()
    return primary.copy


@pytest.mark.parametrize("options", [{}, {"clocked": True}, BSP], ids=["asp", "ssp", "bsp"])
@pytest.mark.parametrize("rule", [Sgd(), Sgd(momentum=0.9), Adam()], ids=repr)
@pytest.mark.parametrize("seed", range(3))
def test_a_copy_made_of_pieces_is_equal_to_the_last_bit(rule, options, seed):
    primary, other = busy_primary(rule, seed, **options), Copy(rule, **options)
    for specs in PIECES:
        load_piece(other.bundle, read_piece(other.bundle, specs, TABLE, copied(primary.bundle, specs)))
    assert other.digest() == primary.digest()
    other.bundle.check_invariants()
    other.state.lead()
    assert {n: dict(s.tables.ordered.whole()) for n, s in other.bundle.shards.items()} == {
        n: dict(s.tables.last_number.whole()) for n, s in other.bundle.shards.items()
    }


def test_a_piece_has_all_pending_contributions():
    waiting = [
        len(each)
        for seed in range(3)
        for shard in busy_primary(Sgd(), seed, **BSP).bundle.shards.values()
        for each in shard.pending.waiting.values()
    ]
    assert max(waiting) > 1, "a sum of several pushes travels in the test above"


@pytest.mark.parametrize("options", [{}, BSP], ids=["asp", "bsp"])
def test_the_groups_of_shards_travel_with_their_pieces(options):
    found = [
        shard.tables.groups
        for seed in range(3)
        for shard in busy_primary(Sgd(), seed, **options).bundle.shards.values()
    ]
    assert all(found), "the sets of every shard travel in the test above"
    assert any(len(kept) > 2 for groups in found for kept in groups.values())


def test_a_set_that_many_tables_share_travels_once_and_is_shared_by_the_copy():
    one, other = Copy(Sgd()), Copy(Sgd())
    shared = {1: tuple(range(1000, 9000)), 2: (0, 4)}
    specs = PIECES[-1]
    for number, spec in enumerate(specs):
        tables = one.bundle.shards[spec.id].separate()
        tables.groups, tables.duplicates = dict(shared), number
    tensors = copied(one.bundle, specs)
    assert len(specs) > 1
    assert tensors[0].nbytes < 2 * len(msgspec.msgpack.encode(shared))
    load_piece(other.bundle, read_piece(other.bundle, specs, TABLE, tensors))
    found = [other.bundle.shards[spec.id].tables for spec in specs]
    assert len({id(tables) for tables in found}) == len(specs)
    assert {id(tables.groups[1]) for tables in found} == {id(found[0].groups[1])}
    assert found[-1].groups == shared


@pytest.mark.parametrize("seed", range(3))
def test_a_piece_for_the_disk_shares_no_memory_with_the_bundle(seed):
    bundle = busy_primary(Sgd(momentum=0.9), seed, **BSP).bundle
    mine = [array for shard in bundle.shards.values() for array in (shard.values, *shard.rule_state.values())]
    for shard in bundle.shards.values():
        for waiting in shard.pending.waiting.values():
            for part in (part for each in waiting for part in each.push.gradients.parts):
                mine += [part.flat] if isinstance(part, DeltaPart) else [part.x_IK, part.errors_RK]
    for number, specs in enumerate(PIECES):
        state = piece_state(bundle, "ps-0", number, specs, order=(1, 1))
        found = [np.frombuffer(part, np.uint8) for part in state.parts]
        assert not any(np.shares_memory(part, array) for part in found for array in mine)


def test_shards_of_a_piece_that_share_tables_share_them_again():
    specs = tuple(spec_of(number, f"s{number}", 0, 2) for number in range(500))
    primary, other = (Bundle(own_shards(specs, [Adam()])) for _ in range(2))
    pieces = pieces_of(specs, in_place=False)
    assert [len(piece) for piece in pieces] == [0, 500]
    first = primary.shards[specs[7].id]
    first.separate().version += 1
    primary.shards[specs[8].id].values[:] = 3
    for piece in pieces:
        load_piece(other, read_piece(other, piece, specs, copied(primary, piece)))
    tables = {id(shard.tables): shard.tables for shard in other.shards.values()}
    assert sorted(each.shards for each in tables.values()) == [1, 499]
    assert other.shards[specs[7].id].version == first.version
    assert other.shards[specs[8].id].values.tolist() == [3, 3]


def test_shards_of_several_pieces_share_tables_again_once_they_are_equal(monkeypatch):
    monkeypatch.setattr(shard_pieces, "PIECE_SHARDS", 100)
    specs = tuple(spec_of(number, f"s{number}", 0, 2) for number in range(250))
    primary, other = (Bundle(own_shards(specs, [Adam()])) for _ in range(2))
    pieces = pieces_of(specs, in_place=False)
    assert [len(piece) for piece in pieces] == [0, 100, 100, 50]
    alone = primary.shards[specs[7].id].separate()
    alone.refuse((3, 1), 1)
    group = primary.group(tuple(range(8, 250)))
    group.own_tables().last_number[3, 1] = 2
    for piece in pieces:
        load_piece(other, read_piece(other, piece, specs, copied(primary, piece)))
    assert other.group(tuple(range(8, 250))).own_tables() is None
    other.share_equal_tables()
    tables = other.group(tuple(range(8, 250))).own_tables()
    assert tables.shards == 242
    assert tables.last_number.whole() == {(3, 1): 2}
    found = {id(shard.tables): shard.tables for shard in other.shards.values()}
    assert sorted(each.shards for each in found.values()) == [1, 7, 242]
    assert all(other.shards[spec.id].tables.equals(primary.shards[spec.id].tables) for spec in specs)


def test_tables_with_clocks_in_another_order_are_not_equal():
    first, second = ShardTables(), ShardTables()
    for number in (1, 2):
        first.note_early(number, 1, 5)
        second.note_early(3 - number, 1, 5)
    assert not first.equals(second)
    assert first.equals(first.split(0))


def test_pieces_are_bounded_in_bytes_and_in_shards(monkeypatch):
    monkeypatch.setattr(shard_pieces, "PIECE_BYTES", 64)
    monkeypatch.setattr(shard_pieces, "PIECE_SHARDS", 3)
    pieces = pieces_of(
        [spec_of(number, f"t{number}", 0, size) for number, size in enumerate((9, 4, 4, 1))], in_place=False
    )
    assert [[spec.size for spec in piece] for piece in pieces] == [[], [9], [4, 4], [1]]
    pieces = pieces_of([spec_of(number, f"t{number}", 0, 1) for number in range(5)], in_place=False)
    assert [len(piece) for piece in pieces] == [0, 3, 2]


def test_in_place_all_shards_are_one_piece_unless_it_is_too_large_for_a_state_on_a_disk(monkeypatch):
    monkeypatch.setattr(shard_pieces, "PIECE_BYTES", 8)
    monkeypatch.setattr(shard_pieces, "IN_PLACE_BYTES", 80)
    specs = [spec_of(number, f"t{number}", 0, 2) for number in range(6)]
    assert pieces_of(specs[:5], in_place=True) == [(), tuple(specs[:5])]
    assert pieces_of(specs, in_place=True) == pieces_of(specs, in_place=False)
    assert pieces_of([], in_place=True) == [()]


def changed(tensors, **fields):
    """Change a field of the details."""
    details = msgspec.structs.replace(shard_pieces._shards.decode(tensors[0].tobytes()), **fields)
    return [np.frombuffer(msgspec.msgpack.encode(details), np.uint8), *tensors[1:]]


def with_shard(tensors, at=0, **fields):
    details = shard_pieces._shards.decode(tensors[0].tobytes())
    shards = list(details.shards)
    shards[at] = msgspec.structs.replace(shards[at], **fields)
    return changed(tensors, shards=shards)


def tables_of(tensors):
    return shard_pieces._shards.decode(tensors[0].tobytes()).tables[0]


def with_tables(tensors, **fields):
    """Change fields of the first tables."""
    details = shard_pieces._shards.decode(tensors[0].tobytes())
    tables = [msgspec.structs.replace(details.tables[0], **fields), *details.tables[1:]]
    return changed(tensors, tables=tables)


def with_sets(tensors, first):
    """Change the first sets of groups."""
    details = shard_pieces._shards.decode(tensors[0].tobytes())
    return changed(tensors, sets=[first, *details.sets[1:]])


SESSION = (7, 9)
OTHER_LOG = np.frombuffer(OrderLog([2]).packed(), np.uint8)
NESTED = np.frombuffer(b"\x96\x90\x90\x90\x90\x00" + b"\x91" * 5000 + b"\xc0", np.uint8)


@pytest.mark.parametrize(
    ("spoil", "text"),
    [
        (lambda tensors: [], "its details"),
        (lambda tensors: [np.zeros(5, np.uint8)], "its details"),
        (lambda tensors: [NESTED], "its details: maximum recursion depth"),
        (lambda tensors: tensors[:2], "lacks arrays|of tensors|fewer tensors"),
        (lambda tensors: [*tensors, np.zeros(3)], "it has 2 tensors of its log, its details name 1"),
        (lambda tensors: tensors[:-1], "it has 0 tensors of its log, its details name 1"),
        (lambda tensors: [*tensors[:-1], np.zeros(9, np.uint8)], "an order log begins with"),
        (lambda tensors: [*tensors[:-1], OTHER_LOG], r"it has the log of shards \[2\]"),
        (lambda tensors: [tensors[0], tensors[1][:-1], *tensors[2:]], "shard 0"),
        (lambda tensors: [tensors[0], tensors[1].astype("float32"), *tensors[2:]], "shard 0"),
        (lambda tensors: changed(tensors, shards=[]), "it has 0 shards"),
        (lambda tensors: changed(tensors, tables=[]), "tables 0 of 0"),
        (lambda tensors: with_shard(tensors, tables=99), "tables 99"),
        (lambda tensors: with_shard(tensors, tables=-1), "its details"),
        (lambda tensors: changed(tensors, tables=[tables_of(tensors)] * 3), "3 tables for 2 shards"),
        (lambda tensors: with_tables(tensors, version=-1), "its details"),
        (lambda tensors: with_tables(tensors, duplicates=1 << 53), "its details"),
        (lambda tensors: with_tables(tensors, clocks={1 << 20: 1}), "its details"),
        (lambda tensors: with_tables(tensors, staleness={0: dict.fromkeys(range(EXACT + 65), 1)}), "length"),
        (lambda tensors: with_tables(tensors, early=[(0, 1, 1)] * (EARLY_KEPT + 1)), "length"),
        (lambda tensors: with_tables(tensors, last_number=[(SESSION, 1)] * (MOST_ENTRIES + 1)), "length"),
        (lambda tensors: with_tables(tensors, last_number=[(SESSION, 1 << 48)]), "its details"),
        (lambda tensors: with_tables(tensors, refusals=[(SESSION, (1,))] * (MOST_ENTRIES + 1)), "length"),
        (lambda tensors: with_tables(tensors, refusals=[(SESSION, (1,) * (MOST_REFUSALS + 1))]), "length"),
        (lambda tensors: with_sets(tensors, [(1, (0, 2, 1, 3))]), "ranges of groups"),
        (lambda tensors: with_sets(tensors, [(1, (0, 4, 6, 6))]), "ranges of groups"),
        (lambda tensors: with_sets(tensors, [(1, (0, 4, 5))]), "ranges of two numbers"),
        (lambda tensors: with_tables(tensors, losses=[(1, 0, b"\x01")]), "0 images have none of this sum"),
        (lambda tensors: with_sets(tensors, [(0, (0, 4))]), "an epoch from 1"),
        (lambda tensors: with_sets(tensors, [(1, (-1, 4))]), "its details"),
        (lambda tensors: with_sets(tensors, [(n, ()) for n in range(1, 5)]), "length"),
        (lambda tensors: with_sets(tensors, [(1, (0,) * (2 * MOST_BOUNDS + 1))]), "length"),
        (lambda tensors: with_tables(tensors, sets=99), "name more sets"),
        (lambda tensors: with_tables(tensors, sets=-1), "its details"),
        (lambda tensors: changed(tensors, sets=[]), "name more sets than its 0"),
        (lambda tensors: with_shard(tensors, contributions=[(1000, 77, 0)]), "push 77"),
        (lambda tensors: with_shard(tensors, contributions=[(1000, 0, -1)]), "its details"),
        (lambda tensors: with_shard(tensors, contributions=[(0, 0, 0)]), "reached|no place"),
    ],
)
def test_an_invalid_piece_is_refused_and_changes_nothing(spoil, text):
    primary, other = busy_primary(Sgd(momentum=0.9), **BSP), Copy(Sgd(momentum=0.9), **BSP)
    before, tensors = other.digest(), copied(primary.bundle, HERE[:2])
    with pytest.raises(RemoteProtocolError, match=text):
        read_piece(other.bundle, HERE[:2], TABLE, spoil(tensors))
    assert other.digest() == before


@pytest.mark.parametrize("specs", [(), HERE[:2]], ids=["piece 0", "shards"])
@pytest.mark.parametrize("is_recorded", [False, True])
def test_a_log_that_is_too_long_or_of_no_recorded_run_is_refused_undecoded(monkeypatch, specs, is_recorded):
    primary, other = busy_primary(Sgd()), Copy(Sgd())
    monkeypatch.setattr(shard_pieces, "read_order_log", lambda data: pytest.fail("it was decoded"))
    if is_recorded:
        monkeypatch.setattr(shard_pieces, "MOST_PACKED_BYTES", 20)
    else:
        other.bundle.log = None
    with pytest.raises(RemoteProtocolError, match=r"a log of \d+ bytes, or of a run without a record"):
        read_piece(other.bundle, specs, TABLE, copied(primary.bundle, specs))


def test_a_piece_with_a_count_that_adam_cannot_calculate_with_is_refused():
    primary, other = busy_primary(Adam()), Copy(Adam())
    primary.bundle.shards[HERE[1].id].rule_state["steps"][...] = -2
    with pytest.raises(RemoteProtocolError, match="shard 1: counts are within 0 and"):
        read_piece(other.bundle, HERE[:2], TABLE, copied(primary.bundle, HERE[:2]))


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"live": {1 << 20: 1}}, "its details"),
        ({"known": {0: 1 << 56}}, "its details"),
        ({"first_clock": 1 << 48}, "its details"),
        ({"over": [(0, n) for n in range(OVER_KEPT + 1)], "newest": {0: []}}, "length"),
        ({"newest": {0: [1] * (REMEMBERED + 1)}}, "length"),
        ({"over": [(7, 1)], "newest": {}}, "ended generations of a replica without the newest"),
        ({"forgotten": -1}, "its details"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_an_invalid_state_of_the_replicas_is_refused_before_it_changes_any(fields, text):
    bundle = busy_primary(Sgd(), **BSP).bundle
    tensor, *log = copied(bundle, ())
    state = shard_pieces._replicas.decode(tensor.tobytes())
    state = msgspec.structs.replace(state, clocks=msgspec.structs.replace(state.clocks, **fields))
    other = Copy(Sgd(), **BSP)
    before = other.digest()
    with pytest.raises(RemoteProtocolError, match=text):
        read_piece(other.bundle, (), TABLE, [np.frombuffer(msgspec.msgpack.encode(state), np.uint8), *log])
    assert other.digest() == before


def test_a_log_travels_in_parts_and_only_to_servers(monkeypatch):
    monkeypatch.setattr(shard_pieces, "PART_BYTES", 100)
    primary, other = busy_primary(Sgd()), Copy(Sgd())
    assert len(copied(primary.bundle, ())) > 3
    for specs in PIECES:
        of_disk, tensors = copy_piece(primary.bundle, specs), copied(primary.bundle, specs)
        assert len(tensors) > len(of_disk)
        load_piece(other.bundle, read_piece(other.bundle, specs, TABLE, tensors))
    assert other.digest_of_log() == primary.digest_of_log()


def test_a_copy_of_a_primary_whose_log_has_ended_has_none_either():
    primary, other = busy_primary(Sgd()), Copy(Sgd())
    primary.bundle.log.end("it is too long")
    load_piece(other.bundle, read_piece(other.bundle, (), TABLE, copied(primary.bundle, ())))
    assert other.bundle.log.fault == "it had ended on the primary that this copy was taken from"


def test_contributions_are_refused_in_a_store_that_adds_nothing_up():
    other = Copy(Sgd(), clocked=True)
    with pytest.raises(RemoteProtocolError, match="only bsp"):
        for seed in range(3):
            primary = busy_primary(Sgd(), seed, **BSP)
            for specs in PIECES[1:]:
                read_piece(other.bundle, specs, TABLE, copied(primary.bundle, specs))
