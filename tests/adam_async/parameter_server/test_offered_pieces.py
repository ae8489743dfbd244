"""A server that was started again offers the pieces on its disk, and is sent only what it lacks."""

import asyncio
from contextlib import asynccontextmanager

import numpy as np
import pytest

from adam_async.messages import pack
from adam_async.messages.replication import Held, PieceCopy
from adam_async.model.rules import Sgd
from adam_async.parameter_server import bundle_copy, members_watch, shard_pieces
from adam_async.parameter_server.bundle_saver import BundleSaver
from adam_async.parameter_server.offered_pieces import OfferedPieces
from adam_async.parameter_server.replication.local_copy import CopyPiece
from adam_async.parameter_server.server_links import ServerLinks
from tests.adam_async.parameter_server.copies import PIECES
from tests.adam_async.parameter_server.test_bundle_copies import of_role, raw_link
from tests.adam_async.store.fleets import fleet
from transport import RemoteProtocolError

FIRST, SECOND, CLIENT = "ps-0", "ps-1", "a-client"
PIECE_BYTES = 16 << 10
ARRAYS = {f"array-{number}": np.zeros(PIECE_BYTES // 8) for number in range(10)}
"""Arrays of a piece each."""

OVERHEAD_BYTES = 1 << 10
"""Maximum size of the tables of a piece here, in bytes."""


def values(number):
    """Distinct values of an array, with all bits of their mantissas."""
    return np.random.default_rng(number).standard_normal(PIECE_BYTES // 8)


class SentPieces(list):
    """The pieces that servers have sent: number and size in bytes."""

    def __init__(self, monkeypatch):
        super().__init__()
        whole = ServerLinks.send

        def send(links, to, body, tensors=(), *, as_primary):
            if isinstance(body, PieceCopy):
                self.append((body.piece, sum(tensor.nbytes for tensor in tensors)))
            whole(links, to, body, tensors, as_primary=as_primary)

        monkeypatch.setattr(ServerLinks, "send", send)

    @property
    def whole(self):
        """Numbers of the pieces that had their arrays."""
        return sorted(piece for piece, nbytes in self if nbytes >= PIECE_BYTES)

    @property
    def nbytes(self):
        return sum(nbytes for _, nbytes in self)


@asynccontextmanager
async def two_copies(monkeypatch, folder, **options):
    """Two servers with all arrays, on both disks; yields the fleet, the store and the sent pieces."""
    monkeypatch.setattr(members_watch, "INVITE_S", 0.3)
    monkeypatch.setattr(members_watch, "RETURN_S", 0.0)
    monkeypatch.setattr(shard_pieces, "PIECE_BYTES", PIECE_BYTES)
    sent = SentPieces(monkeypatch)
    options = {"copies": 2, "servers": 1, "min_in_sync": 1, "rule": Sgd(rate=1.0), **options}
    async with fleet(monkeypatch, FIRST, SECOND, network="local", disks=folder) as servers:
        async with servers.open(ARRAYS, **options) as store:
            await servers.until(lambda: len(servers.in_sync(FIRST)) == 2, "the second has not joined")
            await store.push({name: values(number) for number, name in enumerate(ARRAYS)})
            await on_disks(servers)
            sent.clear()
            yield servers, store, sent


async def on_disks(servers):
    """Wait until each server has written all its changes."""
    (disks,) = [[served._host.disk for served in servers.copies().values()]]

    def are_clean():
        counts = [disk.statistics() for disk in disks if disk.is_complete]
        return len(counts) == len(disks) and not any(each.dirty or each.in_round for each in counts)

    await servers.until(are_clean, "a disk lacks changes")


async def start_again(servers, node, meanwhile):
    """End a server, await a change of the store, and start the server again; it joins."""
    await servers.end(node)
    await servers.until(lambda: node not in servers.in_sync(FIRST), f"{node} is in sync")
    await meanwhile
    await servers.start(node)
    await servers.until(lambda: node in servers.in_sync(FIRST), f"{node} has not joined")


def values_of(servers, node):
    shards = servers.copies()[FIRST, node].state.shards
    return {int(number): shard.values.tobytes() for number, shard in shards.items()}


def from_disk(servers, node):
    return servers.copies()[FIRST, node].copy.pieces_from_disk


async def nothing():
    """Change nothing."""


@pytest.mark.parametrize("durable", [False, True])
async def test_a_restarted_server_is_sent_only_the_pieces_that_have_changed(monkeypatch, tmp_path, durable):
    async with two_copies(monkeypatch, tmp_path, durable=durable) as (servers, store, sent):
        await start_again(servers, SECOND, store.push({"array-3": values(33)}))
        assert sent.whole == [4], "one array has changed, and piece 0 has none"
        assert PIECE_BYTES < sent.nbytes < PIECE_BYTES + len(sent) * OVERHEAD_BYTES
        assert from_disk(servers, SECOND) == 9
        assert values_of(servers, SECOND) == values_of(servers, FIRST)


@pytest.mark.parametrize("size", [PIECE_BYTES, PIECE_BYTES - 1])
async def test_a_piece_whose_digest_would_take_too_long_is_sent_whole(monkeypatch, tmp_path, size):
    monkeypatch.setattr(bundle_copy, "DIGEST_BYTES", size)
    async with two_copies(monkeypatch, tmp_path) as (servers, _, sent):
        await start_again(servers, SECOND, nothing())
        pieces = [] if size == PIECE_BYTES else list(range(1, 11))
        assert sent.whole == pieces
        assert from_disk(servers, SECOND) == 10 - len(pieces)
        assert values_of(servers, SECOND) == values_of(servers, FIRST)


async def test_a_server_that_joined_from_its_disk_knows_what_has_not_changed(monkeypatch, tmp_path):
    async with two_copies(monkeypatch, tmp_path) as (servers, store, sent):
        await start_again(servers, SECOND, store.push({"array-3": values(33)}))
        await on_disks(servers)
        sent.clear()
        await start_again(servers, FIRST, store.push({"array-5": values(55)}))
        assert sent.whole == [6]
        assert values_of(servers, SECOND) == values_of(servers, FIRST)


async def test_a_disk_with_other_bits_at_the_same_position_is_not_used(monkeypatch, tmp_path):
    async with two_copies(monkeypatch, tmp_path) as (servers, store, sent):
        for shard in servers.copies()[FIRST, SECOND].state.shards.values():
            shard.values *= 1 + 1e-15  # as another arithmetic would
        await store.push({name: values(number) for number, name in enumerate(ARRAYS)})
        await on_disks(servers)
        await start_again(servers, SECOND, nothing())
        assert values_of(servers, SECOND) == values_of(servers, FIRST)
        assert from_disk(servers, SECOND) == 0
        assert sent.whole == list(range(1, 11)), "the digest of the first differs, so all are sent"


async def test_a_damaged_disk_offers_less(monkeypatch, tmp_path):
    async with two_copies(monkeypatch, tmp_path) as (servers, _, sent):

        async def damage():
            newest = values_of(servers, FIRST)[5]
            (file,) = [
                file for file in (tmp_path / SECOND).rglob("states-*.segment") if newest in file.read_bytes()
            ]
            data = bytearray(file.read_bytes())
            at = data.rindex(newest)
            data[at] ^= 1
            file.write_bytes(data)

        await start_again(servers, SECOND, damage())
        assert 6 in sent.whole
        assert 0 < from_disk(servers, SECOND) < 10
        assert values_of(servers, SECOND) == values_of(servers, FIRST)


async def test_only_the_primary_makes_a_server_read_its_disk(monkeypatch, tmp_path):
    async with two_copies(monkeypatch, tmp_path) as (servers, store, _):
        copy = servers.copies()[FIRST, SECOND].copy
        forged = piece(store=copy._facts.store, generation=copy.record.generation, digest=b"d" * 32)
        async with await raw_link(servers, SECOND, of_role("ps-9")) as link:
            await link.send(pack(forged, [np.zeros(1, np.uint8)]))
            async with asyncio.timeout(20):
                await link.wait_closed()
        await store.push({"array-0": values(0)})
        assert copy._offers._is_offering
        assert copy._offers._reading is None


async def test_without_a_disk_all_pieces_are_sent(monkeypatch, tmp_path):
    async with two_copies(monkeypatch, tmp_path) as (servers, _, sent):
        servers._disks = tmp_path / "others"
        await start_again(servers, SECOND, nothing())
        assert sent.whole == list(range(1, 11))
        assert values_of(servers, SECOND) == values_of(servers, FIRST)


# --- one member ----------------------------------------------------------------------------------


class Stored:
    """A disk with the pieces at some positions."""

    def __init__(self, positions):
        self.positions = positions

    def position_of(self, name):
        return self.positions.get(name.shard)


def held(**fields):
    known = {"store": "s", "home": FIRST, "generation": 1, "session": 7, "position": 9, "applied": 9}
    return Held(**{**known, "pieces": 2, **fields})


def piece(**fields):
    known = {
        "store": "s",
        "home": FIRST,
        "generation": 1,
        "session": 7,
        "piece": 2,
        "position": 9,
        "nbytes": 1,
    }
    return PieceCopy(**{**known, **fields})


def offers_of(stored=None):
    saver = BundleSaver(FIRST, PIECES, state_arrays=0, mark=lambda *_: None, disk=stored)
    saver.arrived(2, 5)
    return OfferedPieces(saver, lambda name, work: work.close())


def test_an_acknowledgement_offers_the_next_piece_if_the_disk_has_it():
    offers = offers_of(Stored({0: 3, 2: 4}))
    assert [offers.with_offer(held(pieces=count)).offered for count in range(4)] == [None, None, 4, None]


@pytest.mark.parametrize(
    ("offer", "position", "is_unchanged"),
    [
        (held(offered=4), 9, False),
        (held(offered=5), 9, True),
        (held(offered=9), 9, True),
        (held(offered=10), 9, False),
        (held(offered=1 << 52), 9, False),
        (held(), 9, False),
        (held(offered=9, session=6), 9, False),
        (held(offered=9, pieces=3), 9, False),
    ],
)
def test_only_an_offer_at_or_after_the_last_change_counts(offer, position, is_unchanged):
    offers = offers_of()
    member = (SECOND, 1)
    offers.received(member, offer)
    assert offers.is_unchanged(CopyPiece(member, 7, 2), position) is is_unchanged
    offers.keep(())
    assert not offers.is_unchanged(CopyPiece(member, 7, 2), position)


def test_a_piece_without_arrays_is_refused_if_the_member_has_not_offered_any():
    with pytest.raises(RemoteProtocolError, match="not offered"):
        OfferedPieces(None, pytest.fail).read(piece(digest=b"d" * 32), 1, pytest.fail, pytest.fail)


async def test_a_member_reads_one_piece_at_a_time_and_none_of_an_earlier_session():
    class Endless(Stored):
        async def read_arrays(self, name, arrays):
            await asyncio.Event().wait()

    saver = BundleSaver(FIRST, PIECES, state_arrays=0, mark=lambda *_: None, disk=Endless({2: 4}))
    tasks = []

    def spawn(name, work):
        tasks.append(asyncio.ensure_future(work))
        return tasks[-1]

    offers = OfferedPieces(saver, spawn)
    offers.read(piece(digest=b"d" * 32), 1, pytest.fail, pytest.fail)
    with pytest.raises(RemoteProtocolError):
        offers.read(piece(digest=b"d" * 32), 1, pytest.fail, pytest.fail)
    offers.drop()
    await asyncio.wait(tasks)
    assert tasks[0].cancelled()
    offers.read(piece(digest=b"d" * 32), 1, pytest.fail, pytest.fail)
    offers.drop()
    await asyncio.wait(tasks)
