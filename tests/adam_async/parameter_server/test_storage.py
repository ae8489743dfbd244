"""The memory of shards: one aligned vector per tensor, shared by the roles of a run in a process."""

import gc

import numpy as np
import pytest

from adam_async.model.named import digits
from adam_async.model.network import Network
from adam_async.model.rules import Adam, Sgd
from adam_async.parameter_server.storage import ALIGNMENT, PAGE, ShardStorage, StoragePool, aligned_zeros
from adam_async.run.partition import arrays_of
from adam_async.run.shard_table import shard_table

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


def storage():
    return ShardStorage(PARAMETERS, Sgd())


def test_a_run_has_one_storage_for_all_roles():
    storage_pool = StoragePool()
    one = storage_pool.provide("run", storage)
    assert storage_pool.provide("run", storage) is one
    assert storage_pool.find("run") is one
    assert storage_pool.find("another") is None


def test_a_late_server_takes_no_storage_from_roles_that_have_gone_on():
    storage_pool = StoragePool()
    old, new = storage_pool.provide("old", storage), storage_pool.provide("new", storage)
    assert storage_pool.provide("old", storage) is old
    assert storage_pool.provide("new", storage) is new
    assert not any(np.shares_memory(old.weights[name], new.weights[name]) for name in old.weights)


def test_a_storage_that_no_role_keeps_is_freed():
    storage_pool = StoragePool()
    kept, left = storage_pool.provide("kept", storage), storage_pool.provide("left", storage)
    del left
    gc.collect()
    assert storage_pool.find("left") is None
    assert storage_pool.find("kept") is kept


def test_a_shelf_tells_a_process_without_servers_from_one_whose_servers_have_left_a_run():
    storage_pool = StoragePool()
    assert not storage_pool.has_servers
    storage_pool.provide("run", storage)
    assert storage_pool.find("run") is None
    assert storage_pool.has_servers
