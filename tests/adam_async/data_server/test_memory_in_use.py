"""Bytes that somebody still holds."""

import threading

import numpy as np

from adam_async.data_server.memory_in_use import Footprint


def test_an_array_counts_until_its_last_slice_is_let_go() -> None:
    footprint = Footprint()
    array = np.zeros((10, 5), np.uint8)
    footprint.watch(array)
    footprint.watch(np.zeros(7, np.uint8))
    piece = array[3:5][:1]
    del array

    assert footprint.bytes == 50
    del piece
    assert footprint.bytes == 0


def test_it_may_be_let_go_in_another_thread() -> None:
    footprint = Footprint()
    held = [np.zeros(3, np.uint8) for _ in range(100)]
    for array in held:
        footprint.watch(array)
    del array
    thread = threading.Thread(target=held.clear)
    thread.start()
    thread.join()

    assert footprint.bytes == 0
    assert repr(footprint) == "<Footprint of 0 arrays, 0 bytes>"
