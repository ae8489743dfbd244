"""Shards and buckets: complete, small enough, whole rows, balanced, and the same every time."""

from collections import Counter
from dataclasses import dataclass, replace
from itertools import pairwise
from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adam_async.model.named import mnist_adam
from adam_async.model.network import Network
from adam_async.run.ids import NodeId
from adam_async.run.partition import table_of
from adam_async.run.shard_table import (
    assign_buckets,
    bytes_of_buckets,
    bytes_of_vectors,
    cut_tensor,
    holders,
    part_table,
    shard_sizes,
    shard_table,
    spread,
)
from adam_async.run.store_record import NUM_BUCKETS, ArrayRecord, VectorRecord

shapes = st.lists(st.integers(1, 12), min_size=1, max_size=3).map(tuple)
limits = st.integers(1, 300)


@dataclass(frozen=True)
class Rows:
    """Rows of an array, which one worker has."""

    name: str
    first_row: int
    size: int
    row_size: int


def rows_of(array, start, stop):
    return Rows(array.name, start, (stop - start) * array.row_size, array.row_size)


def arrays(*sizes):
    return [ArrayRecord(f"t{n}", shape) for n, shape in enumerate(sizes)]


@given(shape=shapes, limit=limits)
def test_ranges_cover_a_tensor_exactly_and_none_is_over_the_limit(shape, limit):
    ranges = cut_tensor(shape, limit)
    assert ranges[0][0] == 0
    assert ranges[-1][1] == prod(shape)
    assert all(one[1] == other[0] for one, other in pairwise(ranges))
    assert all(0 < stop - start <= limit for start, stop in ranges)


@given(shape=shapes, limit=limits)
def test_ranges_are_whole_rows_where_rows_fit_and_within_one_row_elsewhere(shape, limit):
    row = prod(shape[1:])
    for start, stop in cut_tensor(shape, limit):
        if row <= limit:
            assert start % row == stop % row == 0
        else:
            assert start // row == (stop - 1) // row


@given(shape=shapes, limit=limits)
def test_no_cut_is_made_without_need(shape, limit):
    row = prod(shape[1:])
    per_range = limit // row * row
    least = -(-prod(shape) // per_range) if per_range else shape[0] * -(-row // limit)
    assert len(cut_tensor(shape, limit)) == least


@given(sizes=st.lists(shapes, min_size=1, max_size=5), limit=st.integers(16, 400))
def test_a_table_numbers_shards_in_the_order_of_tensors_and_elements(sizes, limit):
    table = shard_table(arrays(*sizes), shard_bytes=4 * limit)
    assert [shard.id for shard in table.shards] == list(range(len(table.shards)))
    assert [shard for shards in table.by_tensor.values() for shard in shards] == list(table.shards)
    for name, shape in ((f"t{n}", shape) for n, shape in enumerate(sizes)):
        shards = table.by_tensor[name]
        assert sum(shard.size for shard in shards) == prod(shape)
        for shard in shards:
            assert shard.size <= limit
            assert shard.row_size == prod(shape[1:])
            if shard.whole_rows:
                assert shard.rows == slice(shard.start // shard.row_size, shard.stop // shard.row_size)


@given(sizes=st.lists(shapes, min_size=1, max_size=5), servers=st.integers(1, 6))
def test_the_same_model_is_placed_the_same_way_every_time(sizes, servers):
    names = [NodeId(f"ps-{n}") for n in range(servers)]
    tables = [shard_table(arrays(*sizes), shard_bytes=256) for _ in range(2)]
    assert tables[0] == tables[1]
    assert assign_buckets(tables[0], names) == assign_buckets(tables[1], names)


@given(weights=st.lists(st.integers(0, 100), max_size=40), bins=st.integers(1, 8))
def test_spreading_is_balanced_to_the_largest_item(weights, bins):
    placed = spread(weights, bins)
    loads = [0] * bins
    for weight, place in zip(weights, placed, strict=True):
        loads[place] += weight
    assert max(loads) - min(loads) <= max(weights, default=0)


@given(sizes=st.lists(shapes, min_size=1, max_size=6), servers=st.integers(1, 5))
def test_servers_are_balanced_by_bytes_to_the_heaviest_bucket(sizes, servers):
    table = shard_table(arrays(*sizes), shard_bytes=256)
    names = [NodeId(f"ps-{n}") for n in range(servers)]
    primaries = assign_buckets(table, names)
    assert len(primaries) == NUM_BUCKETS
    bytes_of = dict.fromkeys(names, 0)
    buckets = [0] * NUM_BUCKETS
    for shard in table.shards:
        buckets[shard.bucket] += shard.size * 4
        bytes_of[primaries[shard.bucket]] += shard.size * 4
    assert max(bytes_of.values()) - min(bytes_of.values()) <= max(buckets)


def test_the_paper_model_is_spread_over_three_servers_within_a_tenth():
    table = table_of(Network(mnist_adam()), shard_bytes=16 << 10)
    assert max(shard.size * 4 for shard in table.shards) <= 16 << 10
    names = [NodeId("a"), NodeId("b"), NodeId("c")]
    primaries = assign_buckets(table, names)
    held = {name: sum(s.size for s in table.shards if primaries[s.bucket] == name) for name in names}
    assert sum(held.values()) == 298_090
    assert max(held.values()) < 1.1 * min(held.values())


@given(sizes=st.lists(shapes, min_size=1, max_size=6), servers=st.integers(1, 5))
def test_holders_are_those_whose_buckets_hold_a_shard_and_no_others(sizes, servers):
    table = shard_table(arrays(*sizes), shard_bytes=256)
    primaries = assign_buckets(table, [NodeId(f"ps-{n}") for n in range(servers)])
    found = holders(table, primaries)
    assert list(found) == sorted(set(found))
    for name in set(primaries):
        assert (name in found) == any(primaries[shard.bucket] == name for shard in table.shards)


@st.composite
def cut_tensors(draw):
    """A tensor, and the rows before which it is cut."""
    shape = draw(shapes)
    rows = draw(st.sets(st.integers(1, shape[0] - 1))) if shape[0] > 1 else set()
    return shape, tuple(sorted(rows))


@given(cut=cut_tensors(), limit=limits)
def test_a_range_ends_before_each_row_at_which_a_tensor_is_cut(cut, limit):
    shape, rows = cut
    ranges = cut_tensor(shape, limit, rows)
    assert ranges[0][0] == 0
    assert ranges[-1][1] == prod(shape)
    assert all(one[1] == other[0] for one, other in pairwise(ranges))
    assert all(0 < stop - start <= limit for start, stop in ranges)
    assert {row * prod(shape[1:]) for row in rows} <= {start for start, _ in ranges}


@given(cuts=st.lists(cut_tensors(), min_size=1, max_size=4), limit=st.integers(16, 400))
def test_the_tables_of_all_parts_hold_each_shard_once_with_its_number_and_bucket(cuts, limit):
    whole = [ArrayRecord(f"t{n}", shape, cuts=rows) for n, (shape, rows) in enumerate(cuts)]
    table = shard_table(whole, shard_bytes=4 * limit)
    seen = []
    for part in range(1 + max(len(array.cuts) for array in whole)):
        mine = []
        for array in whole:
            edges = (0, *array.cuts, array.shape[0])
            if part < len(edges) - 1:
                mine.append(rows_of(array, edges[part], edges[part + 1]))
        cut = part_table(table, mine)
        for parameter in mine:
            ranges = [(spec.start, spec.stop) for spec in cut.by_tensor[parameter.name]]
            assert ranges[0][0] == 0
            assert ranges[-1][1] == parameter.size
            assert all(one[1] == other[0] for one, other in pairwise(ranges))
            for spec in cut.by_tensor[parameter.name]:
                first = parameter.first_row * spec.row_size
                assert (
                    replace(spec, start=spec.start + first, stop=spec.stop + first) == table.shards[spec.id]
                )
        seen += [spec.id for spec in cut.shards]
    assert sorted(seen) == list(range(len(table.shards)))


@given(cut=cut_tensors(), limit=limits, dtype=st.sampled_from(["float32", "float64"]), split=st.booleans())
def test_the_sizes_of_shards_of_an_array_are_those_of_its_table(cut, limit, dtype, split):
    shape, rows = cut
    array = ArrayRecord("t", shape, dtype, split=split, cuts=rows)
    shards = shard_table([array], shard_bytes=8 * limit).shards
    assert shard_sizes([array], 8 * limit) == Counter(shard.nbytes for shard in shards)


@pytest.mark.parametrize(("shape", "count"), [((), 1), ((0,), 0), ((0, 5), 0), ((5, 0), 0)])
def test_a_scalar_has_one_shard_and_an_empty_array_none(shape, count):
    array = ArrayRecord("t", shape)
    assert len(shard_table([array]).shards) == shard_sizes([array], 64).total() == count


@given(sizes=st.lists(shapes, min_size=1, max_size=5), limit=limits)
def test_the_bytes_of_buckets_are_those_of_the_table(sizes, limit):
    loads = [0] * NUM_BUCKETS
    for shard in shard_table(arrays(*sizes), shard_bytes=4 * limit).shards:
        loads[shard.bucket] += shard.nbytes
    assert bytes_of_buckets(shard_sizes(arrays(*sizes), 4 * limit)) == tuple(loads)


@given(
    sizes=st.lists(st.tuples(st.integers(1, 3000), st.booleans()), min_size=1, max_size=8),
    limit=st.integers(1, 40),
    like=st.lists(st.sets(st.integers(0, 7), max_size=3), min_size=1, max_size=3),
)
def test_the_bytes_of_vectors_are_those_of_the_table(sizes, limit, like):
    several = [
        ArrayRecord(f"t{number}", (size,), frozen=is_frozen) for number, (size, is_frozen) in enumerate(sizes)
    ]
    vectors = [
        VectorRecord(f"v{at}", tuple([f"t{each}" for each in sorted(names)]), number=at + 1)
        for at, names in enumerate(like)
    ]
    loads = [0] * NUM_BUCKETS
    for shard in shard_table(several, shard_bytes=4 * limit).shards:
        for vector in vectors:
            loads[shard.bucket] += shard.nbytes * vector.covers(shard.tensor, frozen=shard.frozen)
    assert bytes_of_vectors(vectors, several, 4 * limit) == tuple(loads)


@given(st.dictionaries(st.integers(1, 40), st.integers(1, 200), max_size=5))
def test_shards_of_equal_size_are_dealt_out_as_one_by_one(sizes):
    weights = [size for size, count in sizes.items() for _ in range(count)]
    loads = [0] * NUM_BUCKETS
    for weight, target in zip(weights, spread(weights, NUM_BUCKETS), strict=True):
        loads[target] += weight
    assert bytes_of_buckets(sizes) == tuple(loads)


def test_a_part_that_has_all_rows_has_the_shards_of_the_whole():
    whole = arrays((7, 3), (4,))
    table = shard_table(whole, shard_bytes=64)
    assert part_table(table, [rows_of(array, 0, array.shape[0]) for array in whole]) == table


def test_impossible_placements_are_refused():
    with pytest.raises(ValueError, match="at least one value of 8 bytes, not 7"):
        shard_table([ArrayRecord("t", (3,), "float64")], shard_bytes=7)
    with pytest.raises(ValueError, match="at least one server"):
        assign_buckets(shard_table(arrays((3,))), [])
