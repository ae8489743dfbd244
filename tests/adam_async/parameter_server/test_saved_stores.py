"""The list of the stores on the disk of a server."""

import asyncio
from contextlib import asynccontextmanager
from types import SimpleNamespace

import msgspec
import pytest

from adam_async.messages import ListSaved, SavedList, unpack
from adam_async.messages.saved_shards import SavedStore
from adam_async.parameter_server import saved_stores
from adam_async.parameter_server.saved_stores import SavedStores
from adam_async.parameter_server.server_disk import opened_disk
from adam_async.run.cluster_map import ClusterMap
from tests.adam_async.parameter_server.test_server_disk import catalogue_of, joined
from tests.adam_async.runs import turns, until


class HeldRequest:
    """A request for which the budgets have no room until the test says so."""

    link = SimpleNamespace(peer=SimpleNamespace(node="a-client"))

    def __init__(self):
        self.charged, self.go_on, self.answer = 0, None, None

    def charge(self, nbytes, then):
        self.charged, self.go_on = nbytes, then

    def reply(self, message, *, lent=False):
        self.answer = message


class Membership:
    map = ClusterMap()


@asynccontextmanager
async def disk_of(folder):
    async with opened_disk(folder, flush_s=0.01) as disk, asyncio.TaskGroup() as group:
        yield disk, lambda name, work: group.create_task(work, name=name)


async def answered(stores, **question):
    """Ask for the list of stores, with room for it; return the request and the listed stores."""
    request = HeldRequest()
    stores.answer(request, ListSaved(name="a-name", **question))
    await until(lambda: request.go_on is not None)
    request.go_on()
    listed = msgspec.msgpack.decode(request.answer.tensors[0].tobytes(), type=tuple[SavedStore, ...])
    return request, listed


async def test_a_list_is_charged_before_it_is_packed(tmp_path, monkeypatch):
    async with disk_of(tmp_path) as (disk, spawn):
        store = disk.of("store-1")
        await store.reopen()
        store.begin(catalogue_of(buckets=("ps-" + "0" * 77,) * 64), spawn)
        joined(store, "ps-" + "0" * 77, ready={"ps-" + "0" * 77})
        await until(lambda: store.is_complete)
        await store.retire(is_over=True)

        packed = []
        saved = type(store).saved
        monkeypatch.setattr(type(store), "saved", lambda store: packed.append(store) or saved(store))
        stores = SavedStores(disk, node="ps-0", membership=Membership, spawn=spawn, notice=print)
        request = HeldRequest()
        stores.answer(request, ListSaved(name="a-name"))
        await until(lambda: request.go_on is not None)
        assert not packed
        request.go_on()
        (tensor,) = request.answer.tensors
        assert tensor.nbytes <= request.charged <= 2 * tensor.nbytes
        (listed,) = msgspec.msgpack.decode(tensor.tobytes(), type=tuple[SavedStore, ...])
        assert len(listed.pieces) == 4


async def test_stores_that_do_not_fit_into_a_list_are_in_the_next_one(monkeypatch):
    monkeypatch.setattr(saved_stores, "MOST_SAVED_BYTES", 25)

    def store(number, *, is_saved=True):
        saved = SavedStore("a-name", f"store-{number}", b"{}", b"[]", (), number)
        return SimpleNamespace(
            id=saved.id, is_saved=is_saved, saved_bytes=10, began=number, saved=lambda: saved, retire=stay
        )

    async def stay(*, is_over):
        """Leave the store to the server that follows it."""

    disk = SimpleNamespace(
        of_name=lambda _: [store(1), store(4, is_saved=False), store(3), store(2)], ports=SimpleNamespace()
    )
    lists, known, more = [], (), True
    async with asyncio.TaskGroup() as group:
        stores = SavedStores(
            disk,
            node="ps-0",
            membership=Membership,
            spawn=lambda name, work: group.create_task(work, name=name),
            notice=print,
        )
        while more:
            request, listed = await answered(stores, known=known)
            answer = unpack(request.answer, SavedList)
            lists.append(([each.id for each in listed], request.charged))
            known, more = (*known, *[each.id for each in listed]), answer.more
            assert answer.followed == ("store-4",)
    assert lists == [(["store-3", "store-2"], 20), (["store-1"], 10)]


async def test_a_list_names_a_store_that_the_disk_still_follows(tmp_path):
    """A map may be late: the asker may know that the store is over."""
    catalogue = catalogue_of(phase="open")
    membership = SimpleNamespace(map=ClusterMap(stores={"a-name": catalogue.record}))
    async with disk_of(tmp_path) as (disk, spawn):
        store = disk.of("store-1")
        await store.reopen()
        store.begin(catalogue, spawn)
        joined(store, "ps-0", ready={"ps-0"})
        await until(lambda: store.is_complete)
        stores = SavedStores(disk, node="ps-0", membership=lambda: membership, spawn=spawn, notice=print)
        for followed in (("store-1",), ()):
            request, listed = await answered(stores)
            assert unpack(request.answer, SavedList).followed == followed
            assert [each.id for each in listed] == ["store-1"] * (not followed)
            membership.map = ClusterMap()  # the store is over


async def test_a_list_names_a_store_whose_folder_is_being_read(tmp_path, monkeypatch):
    """An asker that takes such a store for absent would begin another one in its place."""
    async with disk_of(tmp_path) as (disk, spawn):
        states, reading, go_on = disk.ports.states, asyncio.Event(), asyncio.Event()
        make = states.make_folder

        async def make_later(folder):
            reading.set()
            await go_on.wait()
            await make(folder)

        store = disk.of("store-1")
        store.begin(catalogue_of(), spawn)
        saver = joined(store, "ps-0", ready={"ps-0"})
        await until(lambda: store.is_complete)
        assert store.left(saver)
        membership = SimpleNamespace(map=ClusterMap(stores={"a-name": catalogue_of(phase="open").record}))
        stores = SavedStores(disk, node="ps-0", membership=lambda: membership, spawn=spawn, notice=print)
        monkeypatch.setattr(states, "make_folder", make_later)
        retiring = spawn("retires", store.retire(is_over=False))
        await reading.wait()
        for is_read in (False, True):
            request, listed = await answered(stores)
            assert unpack(request.answer, SavedList).followed == ("store-1",) * (not is_read)
            assert [each.id for each in listed] == ["store-1"] * is_read
            go_on.set()
            await retiring


@pytest.mark.parametrize("after", [0, 6, 12])
async def test_a_list_during_the_last_write_has_all_pieces_or_names_the_store(tmp_path, after):
    """Another list may wait for the same write, and be answered before the folder is read."""
    async with disk_of(tmp_path) as (disk, spawn):
        store = disk.of("store-1")
        store.begin(catalogue_of(), spawn)
        saver = joined(store, "ps-0", ready={"ps-0"})
        await until(lambda: store.is_complete)
        assert store.left(saver)
        spawn("retires", store.retire(is_over=False))
        stores = SavedStores(disk, node="ps-0", membership=Membership, spawn=spawn, notice=print)
        await turns(after)
        for _ in range(3):
            request, listed = await answered(stores)
            followed = unpack(request.answer, SavedList).followed
            assert (followed, [len(each.pieces) for each in listed]) in ((("store-1",), []), ((), [4]))
