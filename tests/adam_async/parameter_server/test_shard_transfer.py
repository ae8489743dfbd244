"""A shard is loaded exactly as it was read, and a message that does not fit is refused as a whole."""

import math

import numpy as np
import pytest

from adam_async.messages import LoadShards, pack
from adam_async.messages.shard_states import TABLES
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
            array[...] = Dice(seed).normal(f"{name}{number}", count=array.size) * 100
        values = Dice(seed).normal(f"{number}", count=size)
        found[spec.id] = Shard(spec=spec, values=values, rule_state=state)
    return found


def said(shards, rule):
    told, tensors = read_states(list(shards.values()), rule)
    return LoadShards(store="run", generation=1, arrays=told.arrays), tensors


@pytest.mark.parametrize("rule", RULES, ids=repr)
def test_shards_are_set_as_they_were_read(rule):
    source, target = shards_of(rule), shards_of(rule, seed=2)
    for shard in source.values():
        shard.version = Version(7)
        shard.clocks = {Replica(0): 4, Replica(2): 3}
    body, tensors = said(source, rule)
    assert body.arrays == (*rule.state_names, *rule.scalar_names)
    assert load_states(target, body, tensors) == {3, 5}
    for number, shard in source.items():
        other = target[number]
        assert (other.version, other.clocks) == (7, shard.clocks)
        assert other.values.tobytes() == shard.values.tobytes()
        for name, array in shard.rule_state.items():
            assert other.rule_state[name].tobytes() == array.tobytes()
        other.check_invariants()


def test_reading_copies_shards_and_loading_keeps_their_memory():
    source, target = shards_of(Sgd()), shards_of(Sgd(), seed=2)
    memory = {number: shard.values for number, shard in target.items()}
    body, tensors = said(source, Sgd())
    kept = [tensor.copy() for tensor in tensors[TABLES:]]
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
        (lambda body, tensors: (body, tensors[:1]), "2 tables come first, got 1 tensors"),
        (lambda body, tensors: (body, tensors[1:]), r"versions: expected int64\(n, 2\), got int64\(0, 3\)"),
        (
            lambda body, tensors: (body, [-tensors[0], *tensors[1:]]),
            "versions or clocks: Expected `int` >= 0",
        ),
        (lambda body, tensors: (body, [tensors[0][[0, 0]], *tensors[1:]]), "a shard is named twice"),
        (
            lambda body, tensors: (body, [tensors[0], np.array([[4, 0, 1]]), *tensors[2:]]),
            "clocks: shard 4 is not in this message",
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


def test_tables_with_more_rows_than_a_server_needs_are_refused_undecoded():
    body, (versions, clocks, *arrays) = said(shards_of(Sgd()), Sgd())
    long = np.full((1 << 20, 3), -1)
    for tables, is_new, text in (
        ((versions, long), False, "clocks has 1048576 rows, 2048 are the most"),
        ((versions, long[:1]), True, "clocks has 1 rows, 0 are the most"),
        ((long[:, :2], clocks), False, "versions has 1048576 rows, 2 are the most"),
    ):
        with pytest.raises(RemoteProtocolError, match=text):
            load_states(shards_of(Sgd()), body, [*tables, *arrays], is_new=is_new)
