"""The group cache: groups are those of the order, whatever is taken when."""

import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from adam_async.data_server.dataset import Dataset
from adam_async.data_server.epoch import EpochOrders
from adam_async.data_server.image_cache import BLOCK_BYTES, INSTANT_BLOCK_BYTES, GroupCache, MemoryInUse
from adam_async.model.keyed_random import Dice


def dataset(images: int, pixels: int = 4) -> Dataset:
    numbers = np.arange(images)
    pictures = np.broadcast_to((numbers % 251).astype(np.uint8)[:, None, None, None], (images, 1, 1, pixels))
    return Dataset(
        name="numbers",
        source="here",
        num_classes=images,
        train_images=np.ascontiguousarray(pictures),
        train_labels=numbers,
        test_images=np.ascontiguousarray(pictures[:1]),
        test_labels=numbers[:1],
    )


def order_of(images: int, group: int):
    return EpochOrders(Dice(1), num_images=images, images_per_group=group).order(1)


@given(
    images=st.integers(1, 300),
    group=st.integers(1, 40),
    pixels=st.sampled_from([1, 4, 20_000]),
    picks=st.lists(st.lists(st.integers(0, 299), min_size=1, max_size=5), max_size=8),
    neighbours=st.booleans(),
)
def test_groups_are_those_of_the_order_however_they_are_taken(images, group, pixels, picks, neighbours):
    data, order = dataset(images, pixels), order_of(images, group)
    group_cache = GroupCache(data, order)
    for pick in picks:
        first = pick[0] % order.num_groups
        numbers = [number % order.num_groups for number in pick]
        if neighbours:
            numbers = list(range(first, min(first + len(pick), order.num_groups)))
        group_cache.prepare(numbers[:2])
        pictures, labels = joined(group_cache.take(numbers))
        chosen = np.concatenate([order.group(number) for number in numbers])
        assert np.array_equal(pictures, data.train_images[chosen])
        assert np.array_equal(labels, data.train_labels[chosen])


def joined(taken):
    """The images of an answer as one array, and its labels."""
    images, labels = taken
    return np.concatenate(images), labels


def test_neighbours_are_slices_of_one_block_whose_memory_is_let_go_with_the_last_of_them():
    data, order = dataset(1000, pixels=INSTANT_BLOCK_BYTES // 64), order_of(1000, 16)
    group_cache = GroupCache(data, order)
    (first,), labels = group_cache.take([0, 1])
    (second,), _ = group_cache.take([2, 3])
    assert first.base is second.base
    assert first.ctypes.data + first.nbytes == second.ctypes.data
    assert len(labels) == 32
    assert repr(group_cache) == "<GroupCache of epoch 1, 0 groups>"
    across, _ = group_cache.take([7, 8])
    assert [len(images) for images in across] == [16, 16]
    assert repr(group_cache) == "<GroupCache of epoch 1, 6 groups>"


def test_small_pieces_are_joined_and_no_group_is_in_two_arrays():
    data, order = dataset(1000, pixels=INSTANT_BLOCK_BYTES // 64), order_of(1000, 1)
    group_cache = GroupCache(data, order)
    numbers = [0, 70, 140, 1, *range(2, 40), 200]
    images, labels = group_cache.take(numbers)
    assert [len(piece) for piece in images] == [3, 39, 1]
    assert np.array_equal(np.concatenate(images), data.train_images[[order.group(n)[0] for n in numbers]])
    assert len(labels) == len(numbers)


def test_groups_that_several_take_are_gathered_once():
    data, order = dataset(1000, pixels=INSTANT_BLOCK_BYTES // 64), order_of(1000, 16)
    group_cache = GroupCache(data, order, takers=2)
    (first,), _ = group_cache.take([0, 1, 2, 3])
    (again,), _ = group_cache.take([0, 1])
    assert again.base is first.base
    assert repr(group_cache) == "<GroupCache of epoch 1, 2 groups>"
    group_cache.take([2, 3])
    assert repr(group_cache) == "<GroupCache of epoch 1, 0 groups>"


def test_a_group_beyond_the_epoch_is_refused():
    group_cache = GroupCache(dataset(10), order_of(10, 4))
    with pytest.raises(IndexError, match="groups 0 to 2"):
        group_cache.take([9])


def brighter(images, numbers):
    """A transform that tells which images it was given."""
    return images + (numbers % 7 + 1).astype(np.uint8)[:, None, None, None]


def test_where_images_are_transformed_blocks_are_named_once_and_made_elsewhere():
    data, order = dataset(100, pixels=BLOCK_BYTES // 20), order_of(100, 5)
    group_cache = GroupCache(data, order, transform=brighter)
    blocks = group_cache.prepare(range(12))
    assert blocks == [0, 1, 2]
    assert group_cache.prepare(range(12)) == []
    assert not group_cache.has([0])
    group_cache.put(0, group_cache.make(0))
    assert group_cache.has([0, 3])
    assert not group_cache.has([3, 4])
    (pictures,), labels = group_cache.take([1, 2])
    chosen = np.concatenate([order.group(1), order.group(2)])
    assert np.array_equal(pictures, brighter(data.train_images[chosen], chosen))
    assert np.array_equal(labels, chosen)


def test_a_group_that_is_taken_again_is_transformed_as_before():
    data, order = dataset(20), order_of(20, 5)
    group_cache = GroupCache(data, order, transform=brighter)
    for block in group_cache.prepare([0]):
        group_cache.put(block, group_cache.make(block))
    first, _ = joined(group_cache.take([0]))
    again, _ = joined(group_cache.take([0]))
    assert np.array_equal(first, again)


def test_an_array_counts_until_its_last_slice_is_let_go() -> None:
    memory = MemoryInUse()
    array = np.zeros((10, 5), np.uint8)
    memory.watch(array)
    memory.watch(np.zeros(7, np.uint8))
    piece = array[3:5][:1]
    del array

    assert memory.bytes == 50
    del piece
    assert memory.bytes == 0


def test_it_may_be_let_go_in_another_thread() -> None:
    memory = MemoryInUse()
    held = [np.zeros(3, np.uint8) for _ in range(100)]
    for array in held:
        memory.watch(array)
    del array
    thread = threading.Thread(target=held.clear)
    thread.start()
    thread.join()

    assert memory.bytes == 0
    assert repr(memory) == "<MemoryInUse of 0 arrays, 0 bytes>"
