"""The list of saved stores, as a server with forged files on its disk may send it."""

import tracemalloc

import msgspec
import pytest

from adam_async.messages import SavedList, SavedPiece, SavedStore, pack, packed_tensor, saved_shards
from adam_async.messages.saved_shards import MOST_FAULTY_PIECES, MOST_SAVED_STORES, read_saved_list
from transport import RemoteProtocolError

PIECES = (SavedPiece("ps-0", 0, 1, 7), SavedPiece("ps-0", 1, 1, 7), SavedPiece("ps-0", 2, 1, 8))
STORE = SavedStore("a-name", "store-1", b"{}", b"[]", PIECES, 1)
FORGED = [SavedPiece("ps-0", 1, 1, 1 << 60), SavedPiece("x" * 200, 1, 1, 7), ("ps-0", 1)]


def listed(*stores):
    return read_saved_list(pack(SavedList(keeps=True), [packed_tensor(stores)]))


def with_pieces(*pieces):
    return msgspec.structs.replace(STORE, pieces=pieces)


@pytest.mark.parametrize("forged", FORGED, ids=["position", "home", "fields"])
def test_an_invalid_piece_costs_no_other_one_and_is_named(forged):
    stores, (fault,) = listed(with_pieces(PIECES[0], forged, PIECES[2]), STORE)
    assert stores == (with_pieces(PIECES[0], PIECES[2]), STORE)
    assert fault.startswith("store 'store-1': piece 1 of its list: ")
    _, (fault,) = listed(with_pieces(forged, forged, PIECES[0], forged))
    assert fault.endswith(", and 2 more pieces")


@pytest.mark.parametrize("forged", [msgspec.structs.replace(STORE, id="x" * 200), 7, {"name": "a-name"}])
def test_an_invalid_store_costs_no_other_one_and_is_named(forged):
    stores, (fault,) = listed(STORE, forged)
    assert stores == (STORE,)
    assert fault.startswith("store 1 of its list: ")


def test_a_list_with_too_many_stores_is_refused():
    with pytest.raises(RemoteProtocolError, match=f"length <= {MOST_SAVED_STORES}"):
        listed(*[STORE] * (MOST_SAVED_STORES + 1))


def test_a_list_with_too_many_stores_costs_no_memory_for_each():
    message = pack(SavedList(keeps=True), [packed_tensor([0] * (1 << 18))])
    tracemalloc.start()
    try:
        with pytest.raises(RemoteProtocolError):
            read_saved_list(message)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 4 << 18  # its bytes are copied once


class Decodings:
    """A decoder that counts."""

    def __init__(self, decoder):
        self.count, self._decoder = 0, decoder

    def decode(self, packed):
        self.count += 1
        return self._decoder.decode(packed)


@pytest.mark.parametrize("stores", [1, 8])
def test_the_work_for_invalid_pieces_of_all_stores_is_bounded(monkeypatch, stores):
    decodings = Decodings(saved_shards._PIECE)
    monkeypatch.setattr(saved_shards, "_PIECE", decodings)
    each = MOST_FAULTY_PIECES // stores
    found, faults = listed(*[with_pieces(*[7] * each)] * stores)
    assert (len(found), len(faults), decodings.count) == (stores, stores, each * stores)
    decodings.count = 0
    with pytest.raises(RemoteProtocolError, match=f"above {MOST_FAULTY_PIECES} invalid pieces"):
        listed(*[with_pieces(*[7] * each)] * stores, *[with_pieces(*[7] * 9999)] * 9)
    assert decodings.count == each * stores + 1
