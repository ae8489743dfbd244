"""Records of stores: names, lists of arrays in pieces, and the checks of each field."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from adam_async.errors import ConfigError
from adam_async.run.store_record import (
    MOST_ARRAYS,
    MOST_CUTS,
    MOST_DIMENSIONS,
    MOST_NAME,
    MOST_VALUES,
    STORE_PIECE_BYTES,
    STORE_PIECES,
    ArrayRecord,
    StoreRecord,
    check_arrays,
    cut_arrays,
    joined_arrays,
    store_key,
)
from tests.adam_async.cluster_maps import store_record

records = st.builds(
    ArrayRecord,
    st.text(max_size=20),
    st.lists(st.integers(0, 9), max_size=4).map(tuple),
    st.sampled_from(["float32", "float64"]),
    st.just(0),
    st.booleans(),
)


def joined(store, pieces):
    return joined_arrays("s", store, {f"stores/s/{n}": piece for n, piece in enumerate(pieces) if piece})


@given(st.lists(records, min_size=1, max_size=20, unique_by=lambda record: record.name))
def test_a_list_of_arrays_survives_its_cut_into_pieces(arrays):
    store = store_record("s", arrays)
    assert joined(store, cut_arrays("s", arrays)) == tuple(arrays)


def test_a_long_list_has_several_pieces_that_each_fit_into_a_record_of_the_map():
    arrays = [ArrayRecord(f"{number}/{'n' * 30}", (4, 4)) for number in range(MOST_ARRAYS)]
    store, pieces = store_record("s", arrays), cut_arrays("s", arrays)
    assert len(pieces) > 8
    assert max(len(msgspec.json.encode(piece)) for piece in pieces) < 64 << 10
    assert joined(store, pieces) == tuple(arrays)
    with pytest.raises(ConfigError, match="store s lacks 1 pieces: create it again"):
        joined(store, [None, *pieces[1:]])
    with pytest.raises(ConfigError, match="store s lacks 1 pieces"):
        joined(store, [msgspec.structs.replace(pieces[0], store="other"), *pieces[1:]])
    with pytest.raises(msgspec.ValidationError, match="Expected `int` <= 64"):
        msgspec.convert({**msgspec.to_builtins(store), "pieces": 65}, StoreRecord)


def test_a_list_that_is_too_long_for_all_pieces_is_refused_with_its_bytes():
    arrays = [ArrayRecord(f"{number:04}" + "n" * 900, (4,)) for number in range(4000)]
    most = STORE_PIECES * STORE_PIECE_BYTES
    with pytest.raises(ConfigError, match=rf"have \d+ bytes, {most} are the most: use shorter names"):
        cut_arrays("s", arrays)


@pytest.mark.parametrize(
    ("array", "said"),
    [
        (ArrayRecord("n" * 10_000, (1,)), f"its name has 10000 bytes, {MOST_NAME} are the most"),
        (ArrayRecord("é" * 513, (1,)), "its name has 1026 bytes"),
        (ArrayRecord("first", (1,)), "array 'first' is named twice"),
        (ArrayRecord("w", (1,), "int8"), "values of type int8; use float32 or float64"),
        (ArrayRecord("w", (1,), "x" * 1000), "array 'w': values of type x"),
        (ArrayRecord("w", (3, -1)), r"shape (3, -1) has the negative length -1"),
        (ArrayRecord("w", (1,) * (MOST_DIMENSIONS + 1)), "has 33 dimensions, 32 are the most"),
        (ArrayRecord("w", (1,) * 100_000), "has 100000 dimensions, 32 are the most"),
        (ArrayRecord("w", (MOST_VALUES + 1,)), f"too many values, {MOST_VALUES} are the most"),
        (ArrayRecord("w", (1 << 62,) * 32), "too many values"),
        (ArrayRecord("w", (0, 1 << 62)), "too many values"),
        (ArrayRecord("w", (1,), rule=1), "no rule 1, the store has 1"),
        (ArrayRecord("w", (1,), rule=-1), "no rule -1"),
        (ArrayRecord("w", (4,), cuts=(0,)), "cuts (0,) are not rising rows within 4"),
        (ArrayRecord("w", (4,), cuts=(4,)), "cuts (4,) are not rising rows"),
        (ArrayRecord("w", (4,), cuts=(2, 1)), "cuts (2, 1) are not rising rows"),
        (ArrayRecord("w", (4,), cuts=(2, 2)), "cuts (2, 2) are not rising rows"),
        (ArrayRecord("w", (), cuts=(1,)), "cuts (1,) are not rising rows within 1"),
    ],
    ids=lambda value: str(value)[:40] if isinstance(value, str) else "",
)
def test_a_bad_array_is_refused_with_its_name_value_and_limit(array, said):
    with pytest.raises(ConfigError) as raised:
        check_arrays([ArrayRecord("first", (2,)), array], rules=1)
    assert said in str(raised.value)
    assert len(str(raised.value)) < 400


@pytest.mark.parametrize("count", [0, MOST_ARRAYS + 1])
def test_a_store_without_arrays_or_with_too_many_is_refused(count):
    with pytest.raises(ConfigError, match=f"a store has 1 to {MOST_ARRAYS} arrays, not {count}"):
        check_arrays([ArrayRecord(str(number), (1,)) for number in range(count)], rules=1)


def test_any_text_names_an_array():
    names = ["", "/", "a b", "ü" * 512, "\n", "\x00", "😀"]
    check_arrays([ArrayRecord(name, ()) for name in names], rules=1)


@pytest.mark.parametrize("name", ["", "a/b", "n" * 129, "é" * 65, "a\n", "\x00"])
def test_a_bad_name_of_a_store_is_refused_with_the_name(name):
    with pytest.raises(ConfigError, match="a store's name has 1 to 128 bytes of printable characters"):
        store_key(name)


def test_the_number_of_cuts_of_empty_arrays_is_bounded():
    arrays = [ArrayRecord(str(n), (MOST_CUTS, 0), cuts=tuple(range(1, MOST_CUTS))) for n in range(2)]
    check_arrays(arrays[:1], rules=1)
    with pytest.raises(ConfigError, match="the arrays have 199998 cuts, 100000 are the most"):
        check_arrays(arrays, rules=1)
