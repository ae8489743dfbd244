"""Bad messages: each differs from a valid one in one field, and every field of every message has one."""

import math
from typing import get_args

import msgspec
import numpy as np
import pytest

from adam_async.controller.consensus.messages import Message as ConsensusMessage
from adam_async.messages import TABLE, pack, read_packed, read_packed_tensor, read_text_tensor, unpack_any
from adam_async.messages.body import MOST_MAP_BYTES
from tests.simulation.scenarios.bad_fields import BadMessage, bad_messages
from tests.simulation.scenarios.valid_messages import Facts, fields_of, valid_messages
from transport import LinkConfig

FACTS = Facts()
EXAMPLES = valid_messages(FACTS)
BAD = list(bad_messages(EXAMPLES, meant=FACTS.meant()))


def of(name: str) -> list[BadMessage]:
    return [bad for bad in BAD if bad.message.type == name]


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda each: f"{type(each.body).__name__}{each.of}")
def test_an_example_is_valid(example) -> None:
    message = pack(example.body, example.tensors)
    ride = example.ride

    assert unpack_any(message) == example.body
    if ride is not None and ride.field:
        assert read_packed(getattr(example.body, ride.field), ride.kind, of=message) == ride.record
    elif ride is not None:
        read = read_text_tensor if ride.is_text else read_packed_tensor
        assert msgspec.to_builtins(read(message, ride.kind, MOST_MAP_BYTES)) == msgspec.to_builtins(
            ride.record
        )


def test_every_message_has_an_example_and_so_has_each_of_consensus() -> None:
    assert {type(example.body) for example in EXAMPLES} == set(TABLE)
    said = {type(example.ride.record) for example in EXAMPLES if example.ride and example.ride.field}
    assert said == set(get_args(ConsensusMessage))


@pytest.mark.parametrize("kind", TABLE, ids=lambda kind: kind.__name__)
def test_every_field_of_a_message_is_spoilt_and_its_tensors_are(kind) -> None:
    fields = {field.name for field in msgspec.structs.fields(kind)}

    spoilt = {bad.field.split("[")[0].split(".")[0] for bad in of(kind.__name__)}

    assert spoilt >= fields | {"tensors"}
    assert all(bad.pairs == TABLE[kind] for bad in of(kind.__name__))


def test_names_are_unique_and_come_in_the_same_order() -> None:
    names = [bad.name for bad in BAD]

    assert len(set(names)) == len(names)
    assert [bad.name for bad in bad_messages(EXAMPLES, meant=FACTS.meant())] == names


@pytest.mark.parametrize(
    "name",
    [
        "Pull.wait_s=nan",
        "Pull.shards=repeated",
        "Pull.shards=long",
        "Push.rate=inf",
        "Push.store=wrong-run",
        "Push.generation=older",
        "Push.session=anothers",
        "Push.parts[0].count=below",
        "Push.tensors=nan",
        "ReportSteps.steps[0].staleness=-1",
        "Tick.epoch=two-ahead",
        "Tick.clock=2**40",
        "ReadGroups.rows[0]=-1",
        "ReportGroups.finished[0].loss=nan",
        "LoadShards.generation=older",
        "CompareAndSet(node).key=another-nodes",
        "CompareAndSet(run).tensor.phase=empty",
        "CompareAndSet(epoch).tensor.shares.0[1]=2**40",
        "CompareAndSet(node).tensor=large",
        "CompareAndSet(node).tensor=deep",
        "Agree(Append).packed.entries[0].command=garbage",
        "Agree(AskVote).packed.type=unknown-tag",
        "Agree(tensor).tensor.commit=2**40",
        "MapState.tensor.version=-1",
    ],
)
def test_a_field_is_spoilt_at_any_depth(name: str) -> None:
    assert sum(bad.name == name for bad in BAD) == 1


def test_only_the_field_that_is_named_differs_from_the_example() -> None:
    (bad,) = (bad for bad in BAD if bad.name == "Pull.wait_s=nan")
    (example,) = (each for each in EXAMPLES if type(each.body).__name__ == "Pull")

    assert math.isnan(fields_of(bad.message)["wait_s"])
    assert {**fields_of(bad.message), "wait_s": 0.1} == example.meta()


def test_every_bad_message_fits_a_frame() -> None:
    for bad in BAD:
        assert len(bad.message.meta) < LinkConfig().max_meta_bytes - 100, bad.name
        assert sum(np.asarray(tensor).nbytes for tensor in bad.message.tensors) < 1 << 20
