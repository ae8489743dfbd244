"""The memory of shards: one aligned vector per tensor, shared by the roles of a run in a process."""

import gc
import weakref
from functools import partial
from itertools import accumulate

import numpy as np
import pytest

from adam_async.model.context import BEGUN
from adam_async.model.named import digits
from adam_async.model.network import Network
from adam_async.model.rules import Adagrad, Adam, Sgd
from adam_async.parameter_server.shard_group import ShardGroup
from adam_async.parameter_server.storage import (
    ALIGNMENT,
    PAGE,
    NotedStep,
    ShardStorage,
    StepNotes,
    StoragePool,
    aligned_zeros,
    own_shards,
    storage_bytes,
)
from adam_async.run.partition import arrays_of
from adam_async.run.shard_table import shard_table
from adam_async.run.store_record import ArrayRecord
from transport import Region

PARAMETERS = arrays_of(Network(digits()), None)
TABLE = shard_table(PARAMETERS, shard_bytes=16 << 10)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("size", [0, 1, 15, 16, 4097, 1 << 14, (1 << 18) + 1])
def test_memory_begins_on_a_cache_line_or_if_large_on_a_page_and_is_zero(size, dtype):
    made = [aligned_zeros(size, dtype) for _ in range(5)]
    for vector in made:
        assert (vector.shape, vector.dtype) == ((size,), dtype)
        assert not vector.any()
        assert vector.ctypes.data % (PAGE if vector.nbytes >= 64 << 10 else ALIGNMENT) == 0 or not size


def test_shards_are_views_that_cover_every_tensor_once():
    storage = ShardStorage(PARAMETERS, Sgd())
    for spec in TABLE.shards:
        storage.values(spec)[:] += spec.id + 1
    for name, weights in storage.weights.items():
        expected = np.concatenate([np.full(spec.size, spec.id + 1) for spec in TABLE.by_tensor[name]])
        np.testing.assert_array_equal(weights.reshape(-1), expected)
        assert weights.flags.c_contiguous
    assert len(TABLE.by_tensor["fc1.weight"]) > 1


def test_shards_of_odd_sizes_are_one_range_of_a_server_s_memory():
    table = shard_table(
        [ArrayRecord(name="w", shape=(40, 1061)), ArrayRecord(name="b", shape=(3,))], shard_bytes=16 << 10
    )
    shards = own_shards(table.shards, [Sgd()])
    assert len(shards) > 2
    assert [shard.offset for shard in shards] == [0, *accumulate([len(each.values) for each in shards[:-1]])]
    group = ShardGroup(shards)
    assert group.flat is not None
    assert group.may_lend


def test_the_state_of_a_shard_is_its_range_of_the_tensors_state():
    storage = ShardStorage(PARAMETERS, Sgd(momentum=0.9), np.float64)
    for spec in TABLE.by_tensor["fc1.weight"]:
        storage.rule_state(spec)["momentum"][:] = spec.id
    state = storage.states["fc1.weight"]["momentum"]
    assert (state.shape, state.dtype) == (storage.weights["fc1.weight"].shape, np.float64)
    expected = np.concatenate([np.full(spec.size, spec.id) for spec in TABLE.by_tensor["fc1.weight"]])
    np.testing.assert_array_equal(state.reshape(-1), expected)


def test_counts_of_a_rule_are_one_per_shard_unless_whole_tensors_are_stepped():
    (name,) = Adam().scalar_names
    first, second, *_ = TABLE.by_tensor["fc1.weight"]
    apart = ShardStorage(PARAMETERS, Adam())
    apart.rule_state(first)[name][...] += 3
    assert apart.rule_state(second)[name] == apart.states["fc1.weight"][name] == 0
    together = ShardStorage(PARAMETERS, Adam(), in_place=True)
    together.rule_state(first)[name][...] += 3
    assert together.rule_state(second)[name] == together.states["fc1.weight"][name] == 3


STORAGE = (PARAMETERS, Sgd(), np.float32)


def test_a_run_has_one_storage_for_all_roles():
    storage_pool = StoragePool()
    one = storage_pool.provide("run", *STORAGE)
    assert storage_pool.provide("run", *STORAGE) is one
    assert storage_pool.find("run") is one
    assert storage_pool.find("another") is None


def test_a_late_server_takes_no_storage_from_roles_that_have_gone_on():
    storage_pool = StoragePool()
    old, new = storage_pool.provide("old", *STORAGE), storage_pool.provide("new", *STORAGE)
    assert storage_pool.provide("old", *STORAGE) is old
    assert storage_pool.provide("new", *STORAGE) is new
    assert not any(np.shares_memory(old.weights[name], new.weights[name]) for name in old.weights)


def test_a_storage_that_no_role_keeps_is_freed():
    storage_pool = StoragePool()
    kept, left = storage_pool.provide("kept", *STORAGE), storage_pool.provide("left", *STORAGE)
    del left
    gc.collect()
    assert storage_pool.find("left") is None
    assert storage_pool.find("kept") is kept


def test_common_memory_of_an_earlier_run_is_freed_before_that_of_the_next_one_also_in_a_cycle():
    storage_pool = StoragePool(partial(Region.allocate, is_common=True))
    gc.disable()
    try:
        earlier = [storage_pool.provide("earlier", *STORAGE)]
        earlier.append(earlier)
        freed = weakref.ref(earlier[0].region.base)
        del earlier
        kept = storage_pool.provide("next", *STORAGE)
        assert freed() is None
        assert storage_pool.find("next") is kept
    finally:
        gc.enable()


def test_a_shelf_tells_a_process_without_servers_from_one_whose_servers_have_left_a_run():
    storage_pool = StoragePool()
    assert not storage_pool.has_servers
    storage_pool.provide("run", *STORAGE)
    assert storage_pool.find("run") is None
    assert storage_pool.has_servers


@pytest.mark.parametrize("rule", [Sgd(momentum=0.9), Adagrad(initial_accumulator_value=0.5), Adam()], ids=str)
def test_two_processes_lay_the_same_arrays_out_in_common_memory(rule):
    region = np.zeros(storage_bytes(PARAMETERS, rule, np.float32), np.uint8)
    server = ShardStorage(PARAMETERS, rule, in_place=True, region=region)
    own = ShardStorage(PARAMETERS, rule, in_place=True)
    for name, state in own.states.items():
        server.weights[name][...] = 3
        for key, array in state.items():
            np.testing.assert_array_equal(server.states[name][key], array)
            server.states[name][key][...] += 2
    server.steps[0] = 7
    worker = ShardStorage(PARAMETERS, rule, in_place=True, region=region, is_new=False)
    assert worker.steps[0] == 7
    for name, weights in server.weights.items():
        assert (worker.weights[name] == 3).all()
        assert (weights.shape, weights.dtype) == (own.weights[name].shape, np.float32)
        for key, array in server.states[name].items():
            np.testing.assert_array_equal(worker.states[name][key], array)


def test_notes_of_too_many_steps_are_refused():
    memory = np.zeros(0, np.uint8)
    with pytest.raises(ValueError, match="notes of 4294967296 steps, 2097152 are allowed"):
        StepNotes.of_worker(memory, 1 << 16, 1 << 16, 1)


def test_notes_have_the_begun_steps_of_the_newest_jobs_of_each_thread():
    memory = np.zeros(StepNotes.nbytes(2, 3, 4), np.uint8)
    mine, other = StepNotes.of_worker(memory, 2, 3, 4)
    for number in range(5):
        notes = mine.begin([(1, 2 * number, 16), (1, 2 * number + 1, 9)])
        assert (notes.done.tolist(), len(notes.losses)) == ([0, 0], 2)
        notes.losses[:], notes.done[:] = 0.25, 1 + number
    other.begin([(1, 90, 16), (1, 91, 16), (1, 92, 16)]).done[:2] = 1, BEGUN
    read, others = StepNotes.of_worker(memory, 2, 3, 4)
    assert {step.group for step in read.steps()} == {4, 5, 6, 7, 8, 9}
    assert NotedStep(1, 9, 9, 0.25, 4) in [*read.steps()]
    assert [*others.steps()] == [NotedStep(1, 90, 16, 0.0, 0), NotedStep(1, 91, 16, None, 0)]


def test_a_server_without_memory_for_workers_of_other_processes_refuses_the_run():
    def allocate(nbytes):
        raise OSError(28, "no memory")

    with pytest.raises(MemoryError, match="no memory"):
        StoragePool(allocate).provide("run", *STORAGE)
