"""Entries of a bundle's log on the wire: they arrive as they left, and an invalid one changes nothing."""

import msgspec
import numpy as np
import pytest

from adam_async.messages import Part
from adam_async.model.rules import Sgd
from adam_async.parameter_server.events import (
    Apply,
    Contribute,
    EpochBegan,
    ForgetSessions,
    QueuedPush,
    QueuedTick,
    ReplicasChanged,
)
from adam_async.parameter_server.gradients import read_gradients
from adam_async.parameter_server.log_entries import (
    PushDetails,
    decode_entry,
    encode_entry,
    entry_bytes,
    without_shards,
)
from adam_async.run.ids import Replica
from tests.adam_async.parameter_server.copies import MATRIX, TABLE, VECTORS, WEIGHT, Copy
from tests.adam_async.parameter_server.timelines import push_on, tick_on
from transport import RemoteProtocolError

ENCODER = msgspec.msgpack.Encoder()


def push_of(shards, parts, **fields):
    return push_on(shards, **{"session": 5, "weight": 2, "rate": 0.5, "parts": parts, **fields})


def queued(bundle, shards=VECTORS, *, factors=False, accepted=None, refused=(), **fields):
    sizes = [TABLE[number].size for number in shards]
    push = push_of(shards, (Part(factors, len(shards)),), **fields)
    tensors = [np.arange(float(sum(sizes)))]
    if factors:
        tensors = [np.arange(12.0).reshape(4, 3), np.ones((sum(sizes) // 4, 3))]
    gradients = read_gradients(push, tensors, TABLE, np.dtype("float64"))
    found = tuple([bundle.shards.get(number) for number in shards])
    places = tuple(range(len(shards))) if accepted is None else accepted
    return QueuedPush("request", push, found, gradients, places, [], refused)


def carried(entry, bundle):
    parts = [[tensor.copy() for tensor in part] for part in encode_entry(entry)]
    assert entry_bytes(parts) == sum(tensor.nbytes for part in parts for tensor in part)
    return decode_entry(parts, bundle, TABLE)


@pytest.mark.parametrize("summed", [False, True])
@pytest.mark.parametrize("factors", [False, True])
def test_a_push_arrives_with_its_places_and_the_bits_of_its_gradients(summed, factors):
    bundle = Copy(Sgd(), summed_weight=WEIGHT * summed).bundle
    shards = (*MATRIX, 4) if not factors else MATRIX
    push = queued(bundle, shards, factors=factors, accepted=(1,), refused=(0,))
    sent = Contribute(push) if summed else Apply((push, push))
    arrived = carried(sent, bundle)
    assert type(arrived) is type(sent)
    for each in (arrived.queued,) if summed else arrived.pushes:
        assert (each.push, each.accepted, each.refused) == (push.push, (1,), (0,))
        assert each.shards == push.shards
        for mine, theirs in zip(each.gradients.parts, push.gradients.parts, strict=True):
            assert type(mine) is type(theirs)
            for name in ("flat",) if not factors else ("x_IK", "errors_RK"):
                assert getattr(mine, name).tobytes() == getattr(theirs, name).tobytes()


def test_the_verdict_of_the_primary_travels():
    bundle = Copy(Sgd()).bundle
    push = queued(bundle)
    push.gradients = push.gradients.trusted()
    assert carried(Apply((push,)), bundle).pushes[0].gradients.checked
    push.gradients = msgspec.structs.replace(push.gradients, checked=False)
    assert not carried(Apply((push,)), bundle).pushes[0].gradients.checked


@pytest.mark.parametrize(
    "entry",
    [
        ReplicasChanged({Replica(0): 7, Replica(3): 1}),
        ReplicasChanged({}),
        EpochBegan(3, 40),
        QueuedTick(None, tick_on((0, 2), clock=4)),
    ],
    ids=lambda entry: type(entry).__name__,
)
def test_entries_without_gradients_arrive_as_they_left(entry):
    assert carried(entry, Copy(Sgd()).bundle) == entry or isinstance(entry, QueuedTick)
    if isinstance(entry, QueuedTick):
        assert carried(entry, Copy(Sgd()).bundle).tick == entry.tick


def test_forgotten_sessions_arrive():
    sessions = [(5, 1), (6, 2)]
    arrived = carried(ForgetSessions(sessions), Copy(Sgd()).bundle)
    assert [tuple(each) for each in arrived.sessions] == sessions


def test_an_entry_without_some_shards_keeps_the_places_of_the_others():
    bundle = Copy(Sgd()).bundle
    entry = Apply((queued(bundle, accepted=(0, 2), refused=(1,)),))
    (left,) = without_shards(entry, {VECTORS[0], VECTORS[1]}).pushes
    assert (left.accepted, left.refused) == ((2,), ())
    tick = EpochBegan(1, 0)
    assert without_shards(tick, {0}) is tick


@pytest.mark.parametrize("shards", [VECTORS, (*VECTORS, 4)], ids=["all here", "one elsewhere"])
def test_places_in_another_order_are_applied_to_their_own_shards(shards):
    found = []
    for places in (0, 1, 2), (2, 0, 1):
        copy = Copy(Sgd(), scales=True)
        push = queued(copy.bundle, shards, accepted=places, numbers=(3, 4, 5, 1)[: len(shards)])
        copy.take(encode_entry(Apply((push,))))
        found.append(copy.digest())
    assert found[0] == found[1]


def packed(push, *, accepted=(0, 1, 2), refused=(), sums=False):
    return np.frombuffer(ENCODER.encode(PushDetails(push, accepted, refused, False, sums)), np.uint8)


DELTAS = np.zeros(sum(TABLE[number].size for number in VECTORS))
PUSH = push_of(VECTORS, (Part(False, 3),))
TICK = np.frombuffer(ENCODER.encode(["epoch", 1, 0]), np.uint8)
NESTED = np.frombuffer(b"\x94\xa5epoch\x01\x00" + b"\x91" * 5000 + b"\xc0", np.uint8)
NOT_UTF8 = np.frombuffer(packed(PUSH).tobytes().replace(b"\xa3run", b"\xa3\xff\xfe\xfd"), np.uint8)


@pytest.mark.parametrize(
    ("parts", "text"),
    [
        ([], "it has no part"),
        ([[]], "its details"),
        ([[np.zeros(3, np.uint8)]], "its details"),
        ([[np.frombuffer(b"\xff" * 40, np.uint8)]], "its details"),
        ([[NESTED]], "its details: maximum recursion depth"),
        ([[NOT_UTF8, DELTAS]], "its details: .*(utf|UTF)-8"),
        ([[TICK, DELTAS]], "1 parts of a EpochBegan"),
        ([[TICK], [TICK]], "2 parts of a EpochBegan"),
        ([[packed(PUSH), DELTAS], [TICK]], "several kinds"),
        ([[packed(PUSH)]], "fewer tensors"),
        ([[packed(PUSH), DELTAS, DELTAS]], "do not cover"),
        ([[packed(PUSH), DELTAS[:-1]]], "deltas"),
        ([[packed(PUSH), DELTAS.astype("float32")]], "deltas"),
        ([[packed(PUSH, accepted=(0, 3)), DELTAS]], "place 3"),
        ([[packed(PUSH, accepted=(-1,)), DELTAS]], "its details: .*>= 0"),
        ([[packed(PUSH, accepted=(0, 0)), DELTAS]], "counts twice"),
        ([[packed(PUSH, accepted=(0, 1), refused=(1,)), DELTAS]], "counts twice"),
        ([[packed(push_of((2, 2, 3), PUSH.parts)), np.zeros(11)]], "counts twice"),
        ([[packed(push_of((2, 3, 77), PUSH.parts)), DELTAS]], "no shard 77"),
        ([[packed(push_of((2, 3, 4), PUSH.parts)), np.zeros(9)]], "place 2"),
        ([[packed(push_of(VECTORS, PUSH.parts, numbers=(1,))), DELTAS]], "differ in length"),
        ([[packed(push_of(VECTORS, PUSH.parts, weight=0)), DELTAS]], "weight"),
        ([[packed(PUSH, sums=True), DELTAS]], "only in bsp"),
        ([[packed(push_of(VECTORS, PUSH.parts, groups=(1, 3, 2))), DELTAS]], "ranges of groups ascend"),
        ([[packed(push_of(VECTORS, PUSH.parts, groups=(1, 3))), DELTAS]], "ranges of two numbers"),
        ([[packed(PUSH), DELTAS], [packed(PUSH, accepted=(0,)), DELTAS]], "different shards"),
        ([[packed(PUSH), DELTAS], [packed(push_of((2, 5, 3), PUSH.parts)), DELTAS]], "different shards"),
        ([[packed(push_of(VECTORS, PUSH.parts, assign=True)), DELTAS]], "no clock"),
        ([[packed(push_of(VECTORS, PUSH.parts, assign=True, clock=0)), DELTAS]] * 2, "of their own"),
    ],
)
def test_an_invalid_entry_is_refused_and_changes_nothing(parts, text):
    copy = Copy(Sgd())
    before = copy.digest()
    with pytest.raises(RemoteProtocolError, match=text):
        decode_entry(parts, copy.bundle, TABLE)
    assert copy.digest() == before
    copy.take([[packed(PUSH), DELTAS]])
    assert copy.position == 1


def test_gradients_that_are_not_added_up_are_refused_in_bsp():
    bundle = Copy(Sgd(), clocked=True, summed_weight=WEIGHT).bundle
    with pytest.raises(RemoteProtocolError, match="only in bsp"):
        decode_entry([[packed(PUSH), DELTAS]], bundle, TABLE)
