"""A shard is loaded exactly as it was read, and a message that does not fit is refused as a whole."""

import math

import numpy as np
import pytest

from adam_async.messages import LoadShards, pack
from adam_async.messages.group_sets import LossSum
from adam_async.messages.shard_states import STATE_BYTES, StateTables
from adam_async.messages.tensors import decoder_of, packed_tensor
from adam_async.model.keyed_random import Dice
from adam_async.model.rules import Adagrad, Adam, AdamW, Sgd
from adam_async.parameter_server.bsp_barrier import PendingContributions
from adam_async.parameter_server.shard import Shard
from adam_async.parameter_server.shard_transfer import load_states, read_states
from adam_async.run.ids import BucketId, Replica, ShardId, Version
from adam_async.run.shard_table import ShardSpec
from transport import LinkConfig, RemoteProtocolError
from transport.frames import pack_meta
from transport.tensors import lay_out

RULES = [Sgd(), Sgd(momentum=0.9), Sgd(momentum=0.9, nesterov=True), Adagrad(), Adam(), AdamW()]


def shards_of(rule, *, seed=1, numbers=(3, 5), size=4):
    found = {}
    for number in numbers:
        spec = ShardSpec(id=ShardId(number), tensor="t", start=0, stop=size, row_size=1, bucket=BucketId(0))
        state = rule.new_state((size,), np.float32)
        for name, array in state.items():
            drawn = Dice(seed).normal(f"{name}{number}", count=array.size) * 100
            array[...] = abs(drawn) if name in rule.scalar_names else drawn
        values = Dice(seed).normal(f"{number}", count=size)
        found[spec.id] = Shard(spec=spec, values=values, rule_state=state)
    return found


def said(shards, rule):
    told, tensors = read_states(list(shards.values()), rule)
    return LoadShards(store="run", generation=1, arrays=told.arrays), tensors


@pytest.mark.parametrize("rule", RULES, ids=repr)
def test_shards_are_set_as_they_were_read(rule):
    source, target = shards_of(rule), shards_of(rule, seed=2)
    for number, shard in source.items():
        shard.version = Version(7)
        shard.clocks = {Replica(0): 4, Replica(2): 3}
        shard.tables.groups = {1: (0, 20), 2: (3, 9, 12, int(number) + 10)}
        shard.tables.losses = {1: LossSum(20, None), 2: LossSum(4 + int(number), -(number << 150))}
    body, tensors = said(source, rule)
    assert body.arrays == (*rule.state_names, *rule.scalar_names)
    assert load_states(target, body, tensors) == {3, 5}
    for number, shard in source.items():
        other = target[number]
        assert (other.version, other.clocks) == (7, shard.clocks)
        assert other.tables.groups == other.tables.ordered_groups == shard.tables.groups
        assert other.tables.losses == shard.tables.losses
        assert other.values.tobytes() == shard.values.tobytes()
        for name, array in shard.rule_state.items():
            assert other.rule_state[name].tobytes() == array.tobytes()
        other.check_invariants()


def test_reading_copies_shards_and_loading_keeps_their_memory():
    source, target = shards_of(Sgd()), shards_of(Sgd(), seed=2)
    memory = {number: shard.values for number, shard in target.items()}
    body, tensors = said(source, Sgd())
    kept = [tensor.copy() for tensor in tensors[2:]]
    for shard in source.values():
        shard.values += 1
    load_states(target, body, tensors)
    for (number, shard), was in zip(target.items(), kept, strict=True):
        assert shard.values is memory[number]
        np.testing.assert_array_equal(shard.values, was)


def test_live_replicas_replace_those_of_the_checkpoint():
    source, target = shards_of(Sgd()), shards_of(Sgd())
    for shard in source.values():
        shard.clocks = {Replica(0): 8, Replica(1): 6}
    for shard in target.values():
        shard.clocks = {Replica(1): 0, Replica(2): 0}
        shard.pending = PendingContributions()
    load_states(target, *said(source, Sgd()))
    for shard in target.values():
        assert shard.clocks == {1: 6, 2: 6}
        assert shard.applied_clock() == 6


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda body, tensors: (body, tensors[:-1]), "2 shards of 2 arrays each need 4 tensors, not 3"),
        (
            lambda body, tensors: (body, [*tensors[:2], tensors[2][:3], *tensors[3:]]),
            "values of shard 3: expected",
        ),
        (
            lambda body, tensors: (body, [*tensors[:5], tensors[5][:3]]),
            "momentum of shard 5: expected float32",
        ),
        (
            lambda body, tensors: (body, [*tensors[:2], tensors[2].astype(np.float64), *tensors[3:]]),
            r"expected float32\(4,\), got float64",
        ),
        (lambda body, tensors: (body, tensors[:1]), "2 tensors with tables come first, got 1 tensors"),
        (lambda body, tensors: (body, tensors[1:]), r"tables: expected uint8\(n,\), got int64\(0,\)"),
        (
            lambda body, tensors: (body, [tensors[0], *tensors[2:]]),
            r"bounds: expected int64\(n,\), got float32",
        ),
        (lambda body, tensors: (body, [tensors[0][:-1], *tensors[1:]]), "tables: Input data was truncated"),
        (
            lambda body, tensors: (body, [packed_tensor([[[-1, 0, {}, 0, 0]], [{}], [{}]]), *tensors[1:]]),
            "tables: Expected `int` >= 0",
        ),
        (
            lambda body, tensors: (body, [packed_tensor([[[3, 0, {}, 0, 0]] * 2, [{}], [{}]]), *tensors[1:]]),
            "a shard is named twice",
        ),
        (
            lambda body, tensors: (body, [packed_tensor([[[3, 0, {}, 1, 0]], [{}], [{}]]), *tensors[1:]]),
            "a shard names sets or losses without a row",
        ),
    ],
)
def test_a_load_that_does_not_fit_is_refused_and_sets_nothing(change, message):
    rule = Sgd(momentum=0.9)
    target = shards_of(rule, seed=2)
    before = [shard.values.copy() for shard in target.values()]
    with pytest.raises(RemoteProtocolError, match=message):
        load_states(target, *change(*said(shards_of(rule), rule)))
    for shard, was in zip(target.values(), before, strict=True):
        np.testing.assert_array_equal(shard.values, was)
        assert shard.version == 0


@pytest.mark.parametrize("steps", [-1, -2, 1 << 53, (1 << 63) - 1])
def test_a_count_that_adam_cannot_calculate_with_is_refused(steps):
    """A server would end at the next push, with all its stores."""
    source, target = shards_of(Adam()), shards_of(Adam(), seed=2)
    before = [shard.values.copy() for shard in target.values()]
    source[ShardId(5)].rule_state["steps"][...] = steps
    with pytest.raises(RemoteProtocolError, match="steps of shard 5: counts are within 0 and"):
        load_states(target, *said(source, Adam()))
    for shard, was in zip(target.values(), before, strict=True):
        np.testing.assert_array_equal(shard.values, was)


def test_shards_of_another_server_and_of_another_rule_are_refused_by_name():
    with pytest.raises(RemoteProtocolError, match="shard 5 is not held here"):
        load_states(shards_of(Sgd(), numbers=(3, 4)), *said(shards_of(Sgd()), Sgd()))
    with pytest.raises(RemoteProtocolError, match=r"rule keeps \['squares'\], not \['momentum'\]"):
        rule = Sgd(momentum=0.5)
        load_states(shards_of(Adagrad()), *said(shards_of(rule), rule))


def test_the_states_of_many_shards_fit_a_frame_however_many_sessions_pushed():
    rule = Adam()
    shards = shards_of(rule, numbers=range(138))
    for shard in shards.values():
        shard.clocks = {Replica(0): 2**40}
        shard.separate().last_number = {
            (2**55 + replica_generation, 2**54 + replica_generation): 2**40
            for replica_generation in range(100)
        }
    body, tensors = read_states(list(shards.values()), rule)
    layout = lay_out(tuple(tensors), 1 << 30)
    config = LinkConfig()
    assert pack_meta(pack(body, tensors), layout.packed, config.max_meta_bytes)  # raises if it is too large


@pytest.mark.parametrize(("version", "value"), [(1, 0.0), (0, math.nan), (0, math.inf)])
def test_shards_of_a_new_store_have_finite_values_and_no_version(version, value):
    source, target = shards_of(Sgd()), shards_of(Sgd(), seed=2)
    assert load_states(target, *said(source, Sgd()), is_new=True) == {3, 5}
    source[3].version = Version(version)
    source[3].values[0] = value
    with pytest.raises(RemoteProtocolError, match=r"shard 3: a new store needs finite values of version 0"):
        load_states(target, *said(source, Sgd()), is_new=True)
    assert target[3].version == 0


def test_tables_that_are_longer_than_a_server_needs_are_refused_undecoded():
    body, tensors = said(shards_of(Sgd()), Sgd())
    most = 64 + 2 * STATE_BYTES
    for at, length, is_new, text in (
        (0, most + 1, False, f"tables have {most + 1} elements, {most} are the most"),
        (0, 193, True, "tables have 193 elements, 192 are the most"),
        (1, 1 << 21, False, "bounds have 2097152 elements, 1048576 are the most"),
        (1, 2, True, "bounds have 2 elements, 0 are the most"),
    ):
        long = np.full(length, 255, tensors[at].dtype)
        with pytest.raises(RemoteProtocolError, match=text):
            load_states(shards_of(Sgd()), body, [*tensors[:at], long, *tensors[at + 1 :]], is_new=is_new)


@pytest.mark.parametrize(("clocks", "sums"), [({0: 3}, {}), ({}, {1: (2, b"")})], ids=["clocks", "losses"])
def test_shards_of_a_new_store_have_no_clocks_and_no_losses(clocks, sums):
    body, (_, bounds, *values) = said(shards_of(Sgd()), Sgd())
    tables = packed_tensor([[[3, 0, clocks, 0, 0], [5, 0, {}, 0, 0]], [{}], [sums]])
    target = shards_of(Sgd(), seed=2)
    with pytest.raises(RemoteProtocolError, match="a new shard has no clocks, groups and losses"):
        load_states(target, body, [tables, bounds, *values], is_new=True)
    load_states(target, body, [tables, bounds, *values])


def tables_with(sets=({},), losses=({},)):
    return packed_tensor([[[number, 0, {}, 0, 0] for number in (3, 5)], sets, losses])


@pytest.mark.parametrize(
    ("sets", "bounds", "message"),
    [
        ({1: 4}, (5, 9, 2, 3), "bounds of ranges ascend"),
        ({1: 4}, (2, 5, 5, 9), "bounds of ranges ascend"),  # they touch
        ({1: 4}, (2, 6, 4, 9), "bounds of ranges ascend"),  # they overlap
        ({1: 2}, (-1, 3), "bounds of ranges ascend"),
        ({1: 2}, (0, (1 << 32) + 1), "bounds of ranges ascend"),
        ({1: 3}, (1, 4, 6), "tables: .* multiple"),
        ({1: (1 << 14) + 2}, range((1 << 14) + 2), "tables: Expected `int` <= 16384"),
        ({0: 2}, (0, 1), "tables: Expected `int` >= 1"),
        ({1: 2}, (0, 1, 3, 4), "other lengths than 4"),
        ({1: 4}, (0, 1), "other lengths than 2"),
        (dict.fromkeys(range(1, 5), 2), (0, 1) * 4, "tables: Expected `object` of length <= 3"),
    ],
)
def test_sets_that_no_shard_can_have_are_refused(sets, bounds, message):
    target = shards_of(Sgd(), seed=2)
    body, tensors = said(shards_of(Sgd()), Sgd())
    with pytest.raises(RemoteProtocolError, match=message):
        load_states(target, body, [tables_with([sets]), np.array(bounds, np.int64), *tensors[2:]])
    assert [shard.tables.groups for shard in target.values()] == [{}, {}]


@pytest.mark.parametrize(
    ("losses", "message"),
    [
        ({1: (0, b"\1")}, "0 images have none of this sum"),
        ({1: (2, b"\1" + bytes(23) + b"\2")}, "2 images have none of this sum"),
        ({1: (2, bytes(39) + b"\xff")}, "2 images have none of this sum"),
        ({1: (2, bytes(41))}, "tables: Expected `bytes` of length <= 40"),
        ({1: (-1, b"")}, "tables: Expected `int` >= 0"),
        (dict.fromkeys(range(1, 5), (1, b"")), "tables: Expected `object` of length <= 3"),
    ],
)
def test_losses_that_no_shard_can_have_are_refused(losses, message):
    target = shards_of(Sgd(), seed=2)
    body, tensors = said(shards_of(Sgd()), Sgd())
    tensors[0] = tables_with(losses=[losses])
    with pytest.raises(RemoteProtocolError, match=message):
        load_states(target, body, tensors)
    assert [shard.tables.losses for shard in target.values()] == [{}, {}]


def sets_in(tensors):
    return decoder_of(StateTables)(tensors[0].tobytes()).sets


def test_a_set_that_many_shards_share_is_compared_once():
    class Ranges(tuple):
        hashed = 0

        def __hash__(self):
            Ranges.hashed += 1
            return super().__hash__()

    source = shards_of(Sgd(), numbers=range(9))
    shared = {1: Ranges((0, 4))}
    for shard in source.values():
        shard.tables.groups = shared
    _, tensors = said(source, Sgd())
    assert sets_in(tensors) == [{1: 2}]
    assert Ranges.hashed <= 1


def test_equal_sets_are_sent_and_kept_once(monkeypatch):
    source, target = shards_of(Sgd(), numbers=range(9)), shards_of(Sgd(), numbers=range(9))
    for number, shard in source.items():
        shard.tables.groups = {1: (0, 4 + number % 2)}
    body, tensors = said(source, Sgd())
    assert sets_in(tensors) == [{1: 2}, {1: 2}]
    load_states(target, body, tensors)
    assert len({id(shard.tables.groups) for shard in target.values()}) == 2
    monkeypatch.setattr("adam_async.parameter_server.shard_transfer.MOST_SETS_BOUNDS", 4)
    load_states(target, body, tensors)
    (body, tensors), _ = said({0: source[0]}, Sgd()), source[0].tables
    target[1].tables.groups = {1: (0, 2)}  # as if another message had loaded it
    with pytest.raises(RemoteProtocolError, match="8 bounds of groups, 4 are the most"):
        load_states(target, body, tensors)
