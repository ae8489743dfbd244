"""A training run as a program: roles read the blob, or refuse it with a sentence; rules read the terms."""

from random import Random
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from adam_async.errors import ConfigError
from adam_async.messages.body import MOST_VALUE_BYTES
from adam_async.option_types import fault_of
from adam_async.run.config import Config
from adam_async.run.counts import EpochCounts
from adam_async.run.training_program import (
    PIECE_BYTES,
    PROGRAM_PIECES,
    ProgramPiece,
    ProgramRecord,
    ResumeRecord,
    StartTerms,
    TrainingProgram,
    TrainingTerms,
    cut_blob,
    is_piece,
    joined_blob,
    program_prefix,
    read_training,
)

COUNTS = EpochCounts(skipped=31, behind=(1,), clock=5)
RESUMED = ResumeRecord(epoch=2, clock=9, results=(COUNTS,), runs=("q",))
PROGRAM = TrainingProgram(
    config=Config(replicas=3, partitions=2, push_every=4, consistency="ssp:1"),
    spec={"name": "m"},
    plan={"kind": "layers"},
    transforms=({"kind": "flip"},),
    resumed=RESUMED,
)


def altered(**changes: Any) -> ProgramRecord:
    """Return the record of the program with other values in its blob."""
    record = PROGRAM.record("r", ("d", 1))
    blob = msgspec.msgpack.decode(record.blob)
    for key, value in changes.items():
        blob[key] = {**blob[key], **value} if key == "config" else value
    return msgspec.structs.replace(record, blob=msgspec.msgpack.encode(blob))


def resumed_after(skipped_groups: list[list[Any]]) -> dict[str, Any]:
    """Return the starting point of a run whose first epoch has skipped these ranges of groups."""
    return {"epoch": 2, "finished": [], "clock": 0, "results": [{"skipped_groups": skipped_groups}]}


def test_a_role_reads_what_the_driver_wrote() -> None:
    assert read_training(PROGRAM.record("r", ("d", 1))) == PROGRAM


def test_the_terms_are_those_of_the_options_and_of_the_starting_point() -> None:
    record = PROGRAM.record("r", ("d", 1))
    terms = msgspec.convert(msgspec.json.decode(msgspec.json.encode(record.terms)), TrainingTerms)
    assert terms == TrainingTerms(
        replicas=3,
        partitions=2,
        epochs=PROGRAM.config.epochs,
        images_per_group=PROGRAM.config.images_per_group,
        round_groups=4,
        start=StartTerms(epoch=2, clock=9, skipped=31, behind=(1,), runs=("q",)),
    )


@pytest.mark.parametrize(
    ("record", "said"),
    [
        (altered(config={"rate": -1.0}), "rate must be a number of at least"),
        (altered(config={"replicas": 4}), "the terms of run r are not those of its options"),
        (
            altered(spec=7),
            r"run r cannot be read: Expected `object`, got `int` - at `\$.spec`; use one release",
        ),
        (
            altered(resumed={"epoch": 3, "finished": [], "clock": 0}),
            "r resumes epoch 3, and has the results of 0",
        ),
        (
            altered(resumed={"epoch": 2, "finished": [], "clock": 0, "results": [{"skipped": "many"}]}),
            "run r cannot be read: Expected `int`, got `str`",
        ),
        (
            altered(resumed=resumed_after([[4, 8], [0, 4]])),
            "the results that run r resumes cannot be read: ranges of skipped groups overlap",
        ),
        (altered(resumed=resumed_after([[0, "4"]])), "run r cannot be read: Expected `int`, got `str`"),
        (
            altered(resumed={**resumed_after([]), "skipped": [[[4, 8], [0, 4]]]}),
            "the results that run r resumes cannot be read: ranges of skipped groups overlap",
        ),
        (
            altered(resumed={**resumed_after([]), "skipped": [[[-4, 8]]]}),
            "run r cannot be read: Expected `int`",
        ),
        (ProgramRecord(id="r", driver="d", incarnation=1), "run r cannot be read: "),
        (
            msgspec.structs.replace(PROGRAM.record("r", ("d", 1)), terms={"replicas": 0}),
            r"run r cannot be read: Expected `int` >= 1 - at `\$.replicas`",
        ),
    ],
)
def test_a_blob_of_another_shape_is_refused_with_a_sentence(record: ProgramRecord, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        read_training(record)


def test_an_option_that_this_release_knows_and_the_blob_lacks_is_named() -> None:
    record = PROGRAM.record("r", ("d", 1))
    blob = msgspec.msgpack.decode(record.blob)
    del blob["config"]["push_every"]
    with pytest.raises(ConfigError, match="the config of run r lacks push_every"):
        read_training(msgspec.structs.replace(record, blob=msgspec.msgpack.encode(blob)))


@given(st.binary(max_size=200))
def test_a_blob_of_garbage_is_a_config_error(blob: bytes) -> None:
    with pytest.raises(ConfigError):
        read_training(msgspec.structs.replace(PROGRAM.record("r", ("d", 1)), blob=blob))


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
    assert fault_of(record(b"", pieces=pieces)) == f"pieces must be within 0 and 24, not {pieces}"


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
    ] == ["run/0", "run/23"]


def test_two_drivers_share_no_prefix() -> None:
    assert program_prefix("driver", 255) == "driver-ff-"
    assert not program_prefix("driver", 0x10).startswith(program_prefix("driver", 1))


def _nested(depth: int, *, keys: bool = False) -> Any:
    value: Any = "x"
    for _ in range(depth):
        value = (value,) if keys else [value]
    return {value: 1} if keys else value


@pytest.mark.parametrize("where", ["model", "slow", "waits"])
def test_options_nested_to_any_depth_are_refused_with_a_short_sentence(where: str) -> None:
    record = altered(config={where: "HERE"})
    for depth in (70, *range(800, 1000)):  # the decoder reads most of them
        blob = record.blob.replace(msgspec.msgpack.encode("HERE"), b"\x91" * depth + b"\x01")
        with pytest.raises(ConfigError, match="cannot be read") as refused:
            read_training(msgspec.structs.replace(record, blob=blob))
        assert len(str(refused.value)) < 300


@pytest.mark.parametrize("part", ["spec", "plan", "data", "config"])
def test_values_of_a_blob_are_refused_beyond_a_depth(part: str) -> None:
    for value in ({"x": _nested(64)}, {"x": _nested(64, keys=True)}):
        with pytest.raises(ConfigError, match="its values are nested deeper than 64"):
            read_training(altered(**{part: value}))


@pytest.mark.parametrize(
    "forged",
    [
        {"kernels": "k" * 900_000},
        {"x" * 900_000: 1},
        {"waits": {"x" * 900_000: 1}},
        {"slow": ["s" * 900_000]},
        {"slow": "s" * 900_000},
        {"replicas": "9" * 900_000},
        {"cache": "9" * 900_000},
        {"size": "9" * 900_000},
        {"memory": ["worker=" + "9" * 900_000]},
        {"memory_budget": "9" * 900_000},
        {"consistency": "ssp:" + "9" * 900_000},
        {"copies_bind": "tcp://" + "a" * 900_000},
        {"betas": [0.5] * 100_000},
    ],
    ids=lambda forged: next(iter(forged))[:20],
)
def test_a_megabyte_in_an_option_is_refused_with_a_short_sentence(forged: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as refused:
        read_training(altered(config=forged))
    assert len(str(refused.value)) < 2000
