"""The record of a program, and its blob in pieces."""

from random import Random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from adam_async.messages.bounds import MOST_VALUE_BYTES
from adam_async.run.program_record import (
    PIECE_BYTES,
    PROGRAM_PIECES,
    ProgramPiece,
    ProgramRecord,
    cut_blob,
    is_piece,
    joined_blob,
    program_prefix,
)


def record(blob: bytes, **fields: int) -> ProgramRecord:
    return ProgramRecord(id="p", driver="d", incarnation=1, blob=blob, terms={"replicas": 2}, **fields)


def keyed(pieces: list[ProgramPiece]) -> dict[str, ProgramPiece]:
    return {f"run/{number}": piece for number, piece in enumerate(pieces)}


@given(st.integers(0, PROGRAM_PIECES * PIECE_BYTES))
def test_a_blob_of_any_length_arrives_as_it_was_and_each_value_fits(length: int) -> None:
    whole = record(Random(length).randbytes(length))
    sent, pieces = cut_blob(whole)
    assert max(len(msgspec.json.encode(value)) for value in (sent, *pieces)) <= MOST_VALUE_BYTES
    assert joined_blob(sent, keyed(pieces)) == whole
    assert bool(pieces) == (sent.blob != whole.blob)


def test_a_blob_that_is_too_long_is_refused_with_both_lengths() -> None:
    with pytest.raises(ValueError, match="its blob has 1105921 bytes, 1105920 are the most"):
        cut_blob(record(bytes(PROGRAM_PIECES * PIECE_BYTES + 1)))


def test_a_missing_piece_and_one_of_another_program_are_named() -> None:
    sent, pieces = cut_blob(record(bytes(3 * PIECE_BYTES)))
    there = keyed(pieces)
    assert joined_blob(sent, {**there, "run/1": ProgramPiece(run="q", data=b"")}) == (
        "of program p piece 1 of 3 is not there: submit it again"
    )
    del there["run/2"]
    assert joined_blob(sent, there) == "of program p piece 2 of 3 is not there: submit it again"


@pytest.mark.parametrize("pieces", [-1, PROGRAM_PIECES + 1, 1 << 60])
def test_another_number_of_pieces_is_refused(pieces: int) -> None:
    assert joined_blob(record(b"", pieces=pieces), {}) == f"a program has up to 24 pieces, not {pieces}"


def test_a_record_without_its_fixed_fields_gets_them_back() -> None:
    whole = record(b"blob")
    later = msgspec.structs.replace(whole, phase="training", epoch=3).without_fixed()
    assert (later.blob, later.terms) == (b"", {})
    again = later.with_fixed_of(whole)
    assert again.has_fixed_of(whole)
    assert (again.phase, again.epoch) == ("training", 3)


def test_the_keys_of_pieces_are_those_of_their_numbers() -> None:
    assert [
        key for key in ("run", "run/", "run/0", "run/23", "run/24", "run/00", "epoch/0") if is_piece(key)
    ] == [
        "run/0",
        "run/23",
    ]


def test_two_drivers_share_no_prefix() -> None:
    assert program_prefix("driver", 255) == "driver-ff-"
    assert not program_prefix("driver", 0x10).startswith(program_prefix("driver", 1))
