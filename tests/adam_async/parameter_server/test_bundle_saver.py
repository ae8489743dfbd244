"""The changed pieces of a bundle: marked by updates, copied between two entries."""

import asyncio

import numpy as np
import pytest

from adam_async.model.rules import Sgd
from adam_async.parameter_server.bundle_saver import BundleSaver
from adam_async.parameter_server.entry_replay import EntryReplay
from adam_async.parameter_server.piece_states import Catalogue, tensors_of
from adam_async.parameter_server.shard_pieces import pieces_of
from adam_async.run.store_record import StoreRecord
from tests.adam_async.parameter_server.copies import HERE, PIECES, TABLE, Copy


class Marks(list):
    def __call__(self, piece, nbytes, updates):
        self.append((piece, nbytes, updates))


def saver_of(marks=None, *, state_arrays=0):
    saver = BundleSaver(
        "ps-0", PIECES, state_arrays=state_arrays, mark=Marks() if marks is None else marks, disk=None
    )
    saver.is_ready = lambda: True
    return saver


def test_an_update_marks_each_of_its_pieces_once():
    marks = Marks()
    saver = saver_of(marks, state_arrays=1)
    saver.touched([HERE[0].id, HERE[1].id, HERE[3].id], 5)
    assert sorted(marks) == [(1, 2 * (8 + 12) * 8, 5), (3, 2 * (1 + 1) * 8, 5)]


def test_all_pieces_are_marked_without_updates():
    marks = Marks()
    saver_of(marks).all_touched()
    assert [(piece, updates) for piece, _, updates in marks] == [(0, 0), (1, 0), (2, 0), (3, 0)]


async def test_a_piece_is_copied_at_the_next_moment_between_two_entries():
    copy, saver = Copy(Sgd()), saver_of()
    copy.bundle.shards[HERE[0].id].values[:] = 7.0
    taking = asyncio.ensure_future(saver.take(1))
    await asyncio.sleep(0)
    assert saver.has_request
    saver.copy_requested(copy.bundle, lambda piece: (2, 40 + piece))
    assert not saver.has_request
    copy.bundle.shards[HERE[0].id].values[:] = 8.0
    state = await taking
    assert (state.key.name, state.key.order) == (("ps-0", 1), (2, 41))
    tensors = tensors_of([memoryview(part) for part in state.parts], "a test")
    np.testing.assert_array_equal(tensors[1], np.full(8, 7.0))


async def test_an_update_between_lets_the_owner_know_that_an_entry_has_ended():
    copy, saver = Copy(Sgd()), saver_of()
    saver.wake = lambda: None
    taking = asyncio.ensure_future(saver.take(2))
    await asyncio.sleep(0)
    saver.wake = lambda: saver.copy_requested(copy.bundle, lambda _: (1, 1))
    saver.touched([HERE[0].id], 1)
    assert (await taking).key.shard == 2


async def test_a_bundle_without_values_is_not_copied():
    saver = saver_of()
    saver.is_ready = lambda: False
    assert await saver.take(1) is None


async def test_a_bundle_that_leaves_answers_that_it_cannot_be_copied():
    saver = saver_of()
    taking = asyncio.ensure_future(saver.take(1))
    await asyncio.sleep(0)
    saver.drop()
    assert await taking is None


async def test_a_cancelled_request_leaves_no_wish_behind():
    copy, saver = Copy(Sgd()), saver_of()
    taking = asyncio.ensure_future(saver.take(1))
    await asyncio.sleep(0)
    taking.cancel()
    await asyncio.wait([taking])
    assert not saver.has_request
    saver.copy_requested(copy.bundle, lambda _: (1, 1))


@pytest.mark.parametrize("piece", [1, 2, 3])
async def test_a_piece_comes_back_from_its_bytes(piece):
    copy, saver = Copy(Sgd(momentum=0.9)), saver_of()
    for number, spec in enumerate(HERE):
        shard = copy.bundle.shards[spec.id]
        shard.values[:] = np.arange(spec.size) + number
        shard.rule_state["momentum"][:] = -number
        shard.separate().version = 5 + number
    saver.wake = lambda: saver.copy_requested(copy.bundle, lambda _: (1, 1))
    state = await saver.take(piece)
    parts = [memoryview(bytes(part)) for part in state.parts]
    on_disk = {piece: ((1, 1), tensors_of(parts, ""))}
    found = EntryReplay(catalogue(), PIECES, TABLE, [Sgd(momentum=0.9)], on_disk, "").bundle_of(piece)
    for spec in PIECES[piece]:
        ours, theirs = found.shards[spec.id], copy.bundle.shards[spec.id]
        np.testing.assert_array_equal(ours.values, theirs.values)
        np.testing.assert_array_equal(ours.rule_state["momentum"], theirs.rule_state["momentum"])
        assert ours.version == theirs.version


def catalogue():
    record = StoreRecord(
        id="run", rules=(Sgd(momentum=0.9),), arrays=1, nbytes=8, state_arrays=1, pieces=1, shard_bytes=64
    )
    return Catalogue("run", record, (), 0.0)


def test_the_pieces_of_a_store_hold_about_a_mebibyte_each():
    assert [len(piece) for piece in pieces_of(HERE, in_place=False)] == [0, len(HERE)]
