"""A training run as a program: roles read the blob, or refuse it with a sentence; rules read the terms."""

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from adam_async.errors import ConfigError
from adam_async.run.config import Config
from adam_async.run.program_record import ProgramRecord
from adam_async.run.training_program import (
    ResumeRecord,
    StartTerms,
    TrainingProgram,
    TrainingTerms,
    read_training,
)

RESUMED = ResumeRecord(
    epoch=2, finished=((0, 4),), clock=9, results=({"skipped": 31, "behind": [1], "clock": 5},), images=40
)
PROGRAM = TrainingProgram(
    config=Config(replicas=3, partitions=2, push_every=4, consistency="ssp:1"),
    spec={"name": "m"},
    plan={"kind": "layers"},
    transforms=({"kind": "flip"},),
    resumed=RESUMED,
    carried=b"\x01\x02",
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
    assert read_training(PROGRAM.record("r", ("d", 1), together=True)) == PROGRAM


def test_the_terms_are_those_of_the_options_and_of_the_starting_point() -> None:
    record = PROGRAM.record("r", ("d", 1), together=True)
    terms = msgspec.convert(msgspec.json.decode(msgspec.json.encode(record.terms)), TrainingTerms)
    assert terms == TrainingTerms(
        replicas=3,
        partitions=2,
        together=True,
        epochs=PROGRAM.config.epochs,
        images_per_group=PROGRAM.config.images_per_group,
        round_groups=4,
        start=StartTerms(epoch=2, finished=((0, 4),), clock=9, skipped=31, behind=(1,)),
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
            "the results that run r resumes cannot be read",
        ),
        (
            altered(resumed=resumed_after([[4, 8], [0, 4]])),
            "the results that run r resumes cannot be read: ranges of skipped groups overlap",
        ),
        (altered(resumed=resumed_after([[0, "4"]])), "the results that run r resumes cannot be read"),
        (ProgramRecord(id="r", driver="d", incarnation=1, kind="cooking"), "program r is of kind 'cooking'"),
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
