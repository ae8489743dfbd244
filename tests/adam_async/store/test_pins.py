"""Pins: values of a store under names on the disks of its servers, amid pushes and losses of servers."""

import asyncio
import errno
import os
from collections.abc import Mapping
from functools import partial

import msgspec
import numpy as np
import pytest

from adam_async import ParameterStore, sync
from adam_async.errors import DeadlineExceeded, StoreError
from adam_async.messages import MOST_PINS, ListPins, PinFacts, PinShards, PinState, pack, pin_state_bytes
from adam_async.model.rules import Sgd
from adam_async.parameter_server import kept_shards, members_watch, pins, shard_pieces
from adam_async.parameter_server.pins import store_of
from adam_async.parameter_server.saved_stores import SavedStores
from adam_async.parameter_server.server_disk import is_saved
from adam_async.run.config import Waits
from adam_async.runtime.disk import Disk
from adam_async.store.pins import StorePins, pin_summaries
from adam_async.store.survey import join
from tests.adam_async.runs import turns, until
from tests.adam_async.store.fleets import WAITS, fleet
from transport import LinkClosed, LocalProtocolError, RemoteError

ARRAYS = {"w": np.zeros((40, 100), np.float32), "b": np.ones(3, np.float64)}
STEP = {"w": -np.ones((40, 100), np.float32), "b": -np.ones(3)}
NODES = ("ps-0", "ps-1", "ps-2")
OPTIONS = {"rule": Sgd(rate=1.0, momentum=0.5), "shard_bytes": 2048}


def same(mine: Mapping[str, np.ndarray], other: Mapping[str, np.ndarray]) -> bool:
    return mine.keys() == other.keys() and all(np.array_equal(mine[name], other[name]) for name in mine)


def copies_of(values):
    return {name: array.copy() for name, array in values.items()}


async def push_on(store, pushes):
    """Push while other tasks run."""
    for _ in range(pushes):
        await store.push(STEP)
        if store.consistency != "asp":
            await store.tick()


def folders(folder, *prefixes):
    """Names of the folders of pins, or of others, of one server or of all."""
    several = [each for each in (folder, *(folder / node for node in NODES)) if each.is_dir()]
    names = sorted(name for each in several for name in os.listdir(each))
    return [name for name in names if name.startswith(prefixes or "pin-")]


class StuckWrites:
    """Writes of pins that wait for the test.

    Attributes:
        begun: Set once a write waits.
        go_on: Lets all writes go on.
        append_made: The method as it was.
    """

    def __init__(self, monkeypatch, error=None):
        append_made = self.append_made = Disk.append_made
        self.begun, self.go_on = asyncio.Event(), asyncio.Event()

        async def append(disk, path, *args):
            if "pin-" in str(path):
                self.begun.set()
                await self.go_on.wait()
                if error is not None:
                    raise error
            return await append_made(disk, path, *args)

        monkeypatch.setattr(Disk, "append_made", append)


def small_copies(monkeypatch):
    """Give the copies of pins room for one shard, and return arrays of eight."""
    monkeypatch.setattr(kept_shards, "COPIES_BYTES", 2048)
    monkeypatch.setattr(shard_pieces, "PIECE_BYTES", 2048)
    return {f"w{number}": np.zeros(512, np.float32) for number in range(8)}


def _no_memory(shard, **_):
    raise MemoryError


@pytest.fixture(autouse=True)
def _invites_at_once(monkeypatch):
    monkeypatch.setattr(members_watch, "INVITE_S", 0.1)


@pytest.mark.parametrize("copies", [1, 3])
@pytest.mark.parametrize("options", [{}, {"consistency": "bsp", "replicas": 1}, {"durable": True}], ids=str)
async def test_a_pin_keeps_the_values_of_its_call_while_pushes_go_on(monkeypatch, tmp_path, options, copies):
    async with (
        fleet(monkeypatch, *NODES, network="local", disks=tmp_path) as running,
        running.open(ARRAYS, copies=copies, **OPTIONS, **options) as store,
    ):
        await push_on(store, 3)
        values = copies_of(await store.pull())
        await store.pin("first")
        assert same(await store.read_pin("first"), values)
        async with asyncio.TaskGroup() as group:
            group.create_task(push_on(store, 40))
            await store.pin("second")
        second = await store.read_pin("second")
        await push_on(store, 5)
        assert same(await store.read_pin("first"), values)
        assert same(await store.read_pin("second"), second)
        assert [pin.name for pin in await store.pins()] == ["first", "second"]
        assert all(pin.valid for pin in await store.pins())


async def test_all_copies_in_sync_keep_the_same_bytes(monkeypatch, tmp_path):
    async with (
        fleet(monkeypatch, *NODES, network="local", disks=tmp_path) as running,
        running.open(ARRAYS, copies=3, **OPTIONS) as store,
        asyncio.TaskGroup() as group,
    ):
        pushing = group.create_task(push_on(store, 1000))
        await store.pin("a-name")
        await running.until(lambda: len(folders(tmp_path)) == 9, "each server has the pin of each bundle")
        pushing.cancel()
        found = {}
        for node, server in running.servers.items():
            pins = server._saved.pins
            for pin, home in [*pins._found]:
                opened = await pins._open_now((pin, home))
                for name in opened.places.keys() & opened.pieces.keys():
                    numbers = [int(spec.id) for spec in opened.pieces[name]][:1]
                    _, tensors = await pins.read(store_of(pin), home, name.shard, numbers)
                    content = [each.tobytes() for each in tensors]
                    assert found.setdefault(name, content) == content, node
        assert len(found) >= 3


async def test_a_pin_outlasts_the_loss_of_all_servers_and_its_store(monkeypatch, tmp_path):
    async with fleet(monkeypatch, *NODES, network="local", disks=tmp_path) as running:
        async with running.open(ARRAYS, **OPTIONS) as store:
            await push_on(store, 2)
            values = copies_of(await store.pull())
            await store.pin("kept")
            await push_on(store, 2)
            await turns(20)
        for node in NODES:
            await running.end(node)
        await running.start(*NODES)
        async with running.open(None) as store:
            await push_on(store, 1)
            await running.until(lambda: len(folders(tmp_path, "store-")) == 3, "the old store is removed")
            assert same(await store.read_pin("kept"), values)
            await store.pin("later")
            await store.assign(await store.read_pin("kept"))
            assert same(await store.pull(), values)
            await store.unpin("kept")
            with pytest.raises(StoreError, match=r"no pin 'kept' .* its pins: 'later'"):
                await store.read_pin("kept")
            assert len(folders(tmp_path)) == 3


async def test_a_pin_stays_when_primaries_move_and_servers_end(monkeypatch, tmp_path):
    async with (
        fleet(monkeypatch, *NODES, network="local", disks=tmp_path) as running,
        running.open(ARRAYS, copies=3, **OPTIONS) as store,
    ):
        await push_on(store, 3)
        values = copies_of(await store.pull())
        await store.pin("kept")
        await running.until(lambda: len(folders(tmp_path)) == 9, "each server has the pin of each bundle")
        await running.end("ps-0")
        await push_on(store, 3)
        assert same(await store.read_pin("kept"), values)
        await store.pin("with-two")
        (kept, _) = await store.pins()
        assert kept.servers == ("ps-1", "ps-2")


async def test_a_server_that_was_away_removes_what_was_given_up(monkeypatch, tmp_path):
    async with (
        fleet(monkeypatch, *NODES, network="local", disks=tmp_path) as running,
        running.open(ARRAYS, copies=3, **OPTIONS) as store,
    ):
        await store.pin("gone")
        await running.until(lambda: len(folders(tmp_path)) == 9, "each server has the pin of each bundle")
        await running.end("ps-2")
        await push_on(store, 1)
        await store.unpin("gone")
        assert folders(tmp_path) == folders(tmp_path / "ps-2") != []
        await running.start("ps-2")
        await running.until(lambda: not folders(tmp_path), "the server removes it when it joins")
        assert await store.pins() == []


async def test_a_store_has_sixteen_pins_at_most_each_with_a_name_of_its_own(tmp_path):
    async with ParameterStore.open("local", ARRAYS, name="m", dir=tmp_path, **OPTIONS) as store:
        for number in range(MOST_PINS):
            await store.pin(f"pin-{number}")
        with pytest.raises(StoreError, match="has 16 pins, 16 are the most: remove one with unpin"):
            await store.pin("more")
        await store.unpin("pin-3")
        with pytest.raises(StoreError, match=r"has a pin 'pin-4'.*: choose another name"):
            await store.pin("pin-4")
        await store.pin("more")
        assert len(await store.pins()) == len(folders(tmp_path)) == MOST_PINS
        for name in ("", "a/b", ".hidden", "x" * 65, "tab\t", 7):
            with pytest.raises(StoreError, match="the name of a pin is 1 to 64 letters"):
                await store.pin(name)
        with pytest.raises(StoreError, match="no pin 'none'"):
            await store.unpin("none")
        await store.delete()
    assert folders(tmp_path) == []


async def test_servers_without_a_folder_take_no_pin_and_the_error_has_the_cure(monkeypatch):
    async with (
        fleet(monkeypatch, "ps-0", network="local") as running,
        running.open(ARRAYS, **OPTIONS) as store,
    ):
        with pytest.raises(StoreError, match="ps-0 has no folder; start it again with --dir DIR"):
            await store.pin("a-name")
        assert await store.pins() == []


async def test_a_full_disk_refuses_a_pin_and_the_store_goes_on(monkeypatch, tmp_path):
    append_made, room = Disk.append_made, asyncio.Event()

    async def append(disk, path, *args):
        if "pin-" in str(path) and not room.is_set():
            raise OSError(errno.ENOSPC, "No space left on device")
        return await append_made(disk, path, *args)

    monkeypatch.setattr(Disk, "append_made", append)
    async with ParameterStore.open("local", ARRAYS, name="m", dir=tmp_path, **OPTIONS) as store:
        with pytest.raises(StoreError, match=r"cannot be pinned: ps-0: .* cannot take it: No space left"):
            await store.pin("a-name")
        assert await store.pins() == []
        await until(lambda: not folders(tmp_path, "pin-", "removed-"))
        await push_on(store, 2)
        room.set()
        await store.pin("a-name")
        assert same(await store.read_pin("a-name"), await store.pull())


async def test_a_disk_that_is_stuck_refuses_a_pin_by_its_deadline_and_pushes_go_on(monkeypatch, tmp_path):
    stuck, waits = StuckWrites(monkeypatch), Waits(checkpoint_s=0.2)
    async with ParameterStore.open("local", ARRAYS, name="m", dir=tmp_path, waits=waits, **OPTIONS) as store:
        with pytest.raises(DeadlineExceeded, match="the servers of store 'm' to save pin 'a-name'"):
            await store.pin("a-name")
        await push_on(store, 2)
        stuck.go_on.set()
        await until(lambda: not folders(tmp_path, "pin-", "removed-"))
        assert await store.pins() == []


async def test_pushes_wait_for_a_slow_disk_once_the_copies_fill_their_memory(monkeypatch, tmp_path):
    arrays, stuck = small_copies(monkeypatch), StuckWrites(monkeypatch)
    async with (
        ParameterStore.open("local", arrays, name="m", dir=tmp_path, shard_bytes=2048) as store,
        asyncio.TaskGroup() as group,
    ):
        pinning = group.create_task(store.pin("a-name"))
        await stuck.begun.wait()  # the disk has taken the first piece
        steps = [group.create_task(store.push({name: np.ones(512, np.float32)})) for name in arrays]
        await turns(50)
        assert [step.done() for step in steps].count(True) == 2, "a piece that is taken, and one copy"
        stuck.go_on.set()
        await pinning
        await asyncio.wait(steps)
        assert all(not array.any() for array in (await store.read_pin("a-name")).values())
        assert all(array.any() for array in (await store.pull()).values())


async def test_a_pin_that_is_sent_again_succeeds_while_its_server_writes_it_or_another(monkeypatch, tmp_path):
    stuck = StuckWrites(monkeypatch)
    async with (
        fleet(monkeypatch, "ps-0", network="local", disks=tmp_path) as running,
        running.open(ARRAYS, **OPTIONS) as store,
        store.link.endpoint.network.connect(
            running.servers["ps-0"].address, store._link._identity, timeout_s=5.0
        ) as link,
    ):

        async def send(pin):
            body = PinShards(store=store._link.store.id, home="ps-0", name=f"n{pin}", pin=pin)
            await link.call(pack(body), timeout_s=5.0)

        await send(7)
        await stuck.begun.wait()
        await send(7)
        with pytest.raises(RemoteError, match="ps-0 still writes another pin"):
            await send(8)
        stuck.go_on.set()
        (bundle,) = [served.bundle for served in running.copies().values()]
        await running.until(lambda: bundle.pinning is None, "the pin is there")
        stuck.go_on.clear()
        stuck.begun.clear()
        await send(8)
        await stuck.begun.wait()
        await send(7)
        stuck.go_on.set()
        await running.until(lambda: bundle.pinning is None, "both pins are there")
        assert [pin.valid for pin in await store.pins()] == [True, True]


@pytest.mark.parametrize("ended", ["by its deadline", "by unpin", "by its server"])
async def test_pushes_that_wait_for_a_stuck_disk_go_on_once_the_pin_has_ended(monkeypatch, tmp_path, ended):
    arrays, stuck = small_copies(monkeypatch), StuckWrites(monkeypatch)
    monkeypatch.setattr(pins, "PIECE_S", 0.5 if ended == "by its server" else 60.0)
    waits = Waits(checkpoint_s=0.5 if ended == "by its deadline" else 60.0)
    async with (
        ParameterStore.open("local", arrays, name="m", dir=tmp_path, shard_bytes=2048, waits=waits) as store,
        asyncio.TaskGroup() as group,
    ):
        pinning = asyncio.create_task(store.pin("a-name"))
        await stuck.begun.wait()
        steps = [group.create_task(store.push({name: np.ones(512, np.float32)})) for name in arrays]
        if ended == "by unpin":
            await turns(50)
            pinning.cancel()
            assert [(pin.name, pin.valid) for pin in await store.pins()] == [("a-name", False)]
            with pytest.raises(StoreError, match="has a pin 'a-name', perhaps an unfinished one"):
                await store.pin("a-name")
            await store.unpin("a-name")
        elif ended == "by its deadline":
            with pytest.raises(DeadlineExceeded, match="the servers of store 'm' to save pin 'a-name'"):
                await pinning
        else:
            with pytest.raises(
                StoreError, match=r"cannot take it: waited 0.5 s for the disk to take a piece"
            ):
                await pinning
        async with asyncio.timeout(10.0):
            await asyncio.wait(steps)
        stuck.go_on.set()
        await until(lambda: not folders(tmp_path, "pin-", "removed-"))
        assert await store.pins() == []


async def test_a_pin_that_was_given_up_leaves_no_fault_of_its_disk(monkeypatch, tmp_path):
    stuck = StuckWrites(monkeypatch, OSError(errno.ENOSPC, "No space left on device"))
    waits = Waits(checkpoint_s=0.2)
    async with ParameterStore.open("local", ARRAYS, name="m", dir=tmp_path, waits=waits, **OPTIONS) as store:
        with pytest.raises(DeadlineExceeded):
            await store.pin("a-name")
        stuck.go_on.set()
        await until(lambda: not folders(tmp_path, "removed-"))
        await turns(10)
        assert await store.pins() == []


async def test_a_server_without_memory_for_a_piece_refuses_the_pin_and_goes_on(monkeypatch, tmp_path):
    async with ParameterStore.open("local", ARRAYS, name="m", dir=tmp_path, **OPTIONS) as store:
        with monkeypatch.context() as patch:
            patch.setattr(kept_shards, "copy_shard", _no_memory)
            with pytest.raises(StoreError, match="cannot take it: no memory is left"):
                await store.pin("a-name")
        await until(lambda: not folders(tmp_path, "removed-"))
        await push_on(store, 2)
        await store.pin("a-name")
        assert same(await store.read_pin("a-name"), await store.pull())


@pytest.mark.parametrize("is_stuck", [True, False])
async def test_a_push_without_memory_for_its_copy_costs_the_pin_and_not_the_server(
    monkeypatch, tmp_path, is_stuck
):
    stuck, arrays = StuckWrites(monkeypatch), small_copies(monkeypatch)
    step = {name: -np.ones_like(array) for name, array in arrays.items()}
    async with ParameterStore.open("local", arrays, name="m", dir=tmp_path, **OPTIONS) as store:
        pinning = asyncio.create_task(store.pin("a-name"))
        await stuck.begun.wait()
        with monkeypatch.context() as patch:
            patch.setattr(kept_shards, "copy_shard", _no_memory)
            await store.push(step)
        if not is_stuck:
            stuck.go_on.set()
        with pytest.raises(StoreError, match=r"'m' cannot be pinned: ps-0: .*no memory is left"):
            await pinning
        stuck.go_on.set()
        await until(lambda: not folders(tmp_path, "removed-"))
        assert await store.pins() == []
        await store.push(step)
        await store.pin("a-name")
        assert same(await store.read_pin("a-name"), await store.pull())


async def test_no_server_that_lists_pins_is_an_error_with_its_wait(monkeypatch, tmp_path):
    waits, answer = msgspec.structs.replace(WAITS, call_s=0.1, patience_s=0.5), SavedStores.answer
    async with (
        fleet(monkeypatch, "ps-0", network="local", disks=tmp_path) as running,
        running.open(ARRAYS, waits=waits, **OPTIONS) as store,
    ):
        await store.pin("kept")

        def silent(saved, request, body):
            if not isinstance(body, ListPins):
                answer(saved, request, body)

        with monkeypatch.context() as patch:
            patch.setattr(SavedStores, "answer", silent)
            what = "waited 0.5 s for a server to list the pins of store 'model'"
            for call in (store.pins, partial(store.pin, "more"), partial(store.unpin, "kept")):
                with pytest.raises(DeadlineExceeded, match=what):
                    await call()
            silences = []
            async with (
                running.access() as access,
                join(access.network, access.controllers, "reader", waits) as survey,
            ):
                assert (await survey.details("model", silences.append)).pins == []
            assert silences == ["no server listed the pins, so they are missing"]
        assert [pin.name for pin in await store.pins()] == ["kept"]


@pytest.mark.parametrize(
    ("nodes", "is_writing", "error"),
    [
        (NODES[:2], False, "min_in_sync is 2, and the cluster has 1 live server: start one"),
        (NODES[:2], True, "ps-1: the copy was lost"),
        (NODES, True, "ps-1: the copy was lost"),
    ],
    ids=["before the pin", "while it is written", "beside another server"],
)
async def test_a_pin_that_too_few_servers_can_save_ends_early_with_the_reason(
    monkeypatch, tmp_path, nodes, is_writing, error
):
    waits = msgspec.structs.replace(WAITS, call_s=1.0)
    remove, answers, third_is_there = Disk.remove_folder, StorePins._answers, asyncio.Event()

    async def remove_late(disk, path):
        if "ps-0" in str(path) and folders(path.parent, path.name):
            await third_is_there.wait()
        await remove(disk, path)

    async def answers_late(store_pins):
        def has_joined():
            return all({"ps-0", "ps-2"} == store_pins._in_sync(home) for home in store_pins._homes())

        await running.until(has_joined, "another server has the copies")
        return await answers(store_pins)

    monkeypatch.setattr(Disk, "remove_folder", remove_late)
    async with (
        fleet(monkeypatch, *nodes, network="local", disks=tmp_path, waits=waits) as running,
        running.open(ARRAYS, copies=2, **OPTIONS) as store,
    ):
        await store.pin("first")
        stuck = StuckWrites(monkeypatch)
        if not is_writing:
            await running.end("ps-1")
        pinning = asyncio.create_task(store.pin("second"))
        if is_writing:
            await running.until(lambda: stuck.begun.is_set(), "a server writes the pin")
            if nodes == NODES:
                monkeypatch.setattr(StorePins, "_answers", answers_late)
            await running.end("ps-1")
        with pytest.raises(StoreError, match=f"store 'model' cannot be pinned: {error}"):
            async with asyncio.timeout(20):  # instead of two minutes
                await pinning
        stuck.go_on.set()
        await running.start("ps-1")
        await store.push(STEP)
        await store.pin("third")
        third_is_there.set()
        assert [pin.name for pin in await store.pins()] == ["first", "third"]
        await running.until(lambda: not folders(tmp_path, "removed-"), "the second pin leaves the disk")


@pytest.mark.parametrize("during", ["a write", "the rename"])
async def test_a_store_that_is_deleted_takes_the_pin_that_is_being_written(monkeypatch, tmp_path, during):
    rename, stuck = Disk.rename, StuckWrites(monkeypatch)

    async def stuck_rename(disk, old, new):
        await rename(disk, old, new)
        if old.name.startswith("removed-pin"):
            stuck.begun.set()
            await stuck.go_on.wait()

    if during == "the rename":
        stuck.go_on.set()
        monkeypatch.setattr(Disk, "rename", stuck_rename)
    async with (
        fleet(monkeypatch, "ps-0", network="local", disks=tmp_path) as running,
        running.open(ARRAYS, **OPTIONS) as store,
        running.open(None) as other,
    ):
        if during == "the rename":
            stuck.go_on.clear()
            monkeypatch.setattr(Disk, "append_made", stuck.append_made)
        pinning = asyncio.create_task(other.pin("a-name"))
        await stuck.begun.wait()
        await store.delete()
        await running.until(lambda: not running.copies(), "the store leaves the server")
        stuck.go_on.set()
        await running.until(lambda: not folders(tmp_path, "pin-", "removed-", "store-"), "nothing is left")
        pinning.cancel()
        await asyncio.wait([pinning])
        if not pinning.cancelled():
            assert isinstance(pinning.exception(), StoreError)


async def test_a_store_without_clients_that_is_deleted_takes_its_pins(monkeypatch, tmp_path):
    async with fleet(monkeypatch, *NODES, network="tcp", disks=tmp_path) as running:
        async with running.open(ARRAYS, **OPTIONS) as store:
            await store.pin("a-name")
            (record,) = running.leader.map.stores.values()
            await running.until(lambda: is_saved(running.leader.map, record), "the store is on the disks")
        async with (
            running.access() as access,
            join(access.network, running._address, "driver", WAITS) as survey,
        ):
            await survey.delete("model")
            await running.until(
                lambda: not folders(tmp_path, "pin-", "removed-", "store-"), "nothing is left"
            )


async def test_a_server_ends_although_its_disk_hangs_in_a_pin(monkeypatch, tmp_path):
    stuck = StuckWrites(monkeypatch)
    async with asyncio.timeout(20.0), asyncio.TaskGroup() as group:
        async with ParameterStore.open("local", ARRAYS, name="m", dir=tmp_path, **OPTIONS) as store:
            pinning = group.create_task(store.pin("a-name"))
            await stuck.begun.wait()
            pinning.cancel()
    assert folders(tmp_path) == []


@pytest.mark.parametrize("cut", ["head", "pieces", "half"])
async def test_an_unfinished_pin_goes_at_the_next_start_and_a_damaged_one_counts_for_none(
    tmp_path, cut, caplog
):
    async with ParameterStore.open("local", ARRAYS, name="m", dir=tmp_path, **OPTIONS) as store:
        await store.pin("a-name")
    (folder,) = tmp_path.glob("pin-*")
    files = sorted(folder.glob("states-*"))
    if cut == "half":  # a crash before the rename
        folder.rename(tmp_path / f"removed-{folder.name}")
    else:
        files[-1 if cut == "head" else 0].write_bytes(files[0].read_bytes()[:-1])
    async with ParameterStore.open("local", name="m", dir=tmp_path) as store:
        assert [pin.name for pin in await store.pins() if pin.valid] == []
        with pytest.raises(StoreError, match="no pin 'a-name'"):
            await store.read_pin("a-name")
        await store.pin("a-name")
        assert [pin.name for pin in await store.pins() if pin.valid] == ["a-name"]
    assert ("cannot be read" in caplog.text) == (cut != "half")
    assert not list(tmp_path.glob("removed-*"))


async def test_damage_that_is_found_while_a_pin_is_read_is_an_error_with_its_place(tmp_path):
    async with ParameterStore.open("local", ARRAYS, name="m", dir=tmp_path, **OPTIONS) as store:
        await store.pin("a-name")
        path = min(next(tmp_path.glob("pin-*")).glob("states-*"))
        data = bytearray(path.read_bytes())
        data[-5] ^= 1
        path.write_bytes(data)
        with pytest.raises(StoreError, match=f"ps-0.*{path.name} is damaged at byte"):
            await store.read_pin("a-name")


@pytest.mark.parametrize("harm", ["damaged", "removed", "other files on each"])
async def test_a_damaged_copy_of_a_pin_costs_nothing_while_another_server_has_it(monkeypatch, tmp_path, harm):
    monkeypatch.setattr(shard_pieces, "PIECE_BYTES", 2048)
    arrays = {f"w{number}": np.zeros(512, np.float32) for number in range(8)}
    step = {name: -np.ones(512, np.float32) for name in arrays}
    async with (
        fleet(monkeypatch, "ps-0", "ps-1", network="local", disks=tmp_path) as running,
        running.open(arrays, copies=2, **OPTIONS) as store,
    ):
        await store.push(step)
        values = copies_of(await store.pull())
        await store.pin("kept")
        await running.until(lambda: len(folders(tmp_path)) == 4, "each server has the pin of each bundle")
        for at, path in enumerate(sorted(tmp_path.glob("ps-*/pin-*/states-*01.segment"))):
            is_second = path.parts[-3] == "ps-1"
            if is_second == bool(at % 2) if harm == "other files on each" else not is_second:
                data = bytearray(path.read_bytes())
                data[-5] ^= 1
                path.write_bytes(data) if harm != "removed" else path.unlink()
        assert same(await store.read_pin("kept"), values)
        async with running.open(None, name="branch", pin="model/kept") as branch:
            assert same(await branch.pull(), values)


async def test_what_a_loss_of_all_servers_left_unfinished_goes_with_the_next_pin(monkeypatch, tmp_path):
    async with fleet(monkeypatch, *NODES, network="local", disks=tmp_path) as running:
        async with running.open(ARRAYS, **OPTIONS) as store:
            await store.pin("half")
            await turns(20)
        for node in NODES:
            await running.end(node)
        (folder,) = (tmp_path / "ps-1").glob("pin-*")  # the bundle of this server was not saved
        folder.rename(folder.with_name(f"removed-{folder.name}"))
        await running.start("ps-0", "ps-1", "ps-2")
        async with running.open(None) as store:
            (half,) = await store.pins()
            assert not half.valid
            with pytest.raises(StoreError, match="the disks lack the shards of ps-1 of pin 'half'"):
                await store.read_pin("half")
            await store.pin("next")
            assert [(pin.name, pin.valid) for pin in await store.pins()] == [("next", True)]
            assert len(folders(tmp_path)) == 3


async def test_a_reader_lists_pins_and_neither_makes_nor_reads_them(monkeypatch, tmp_path):
    async with (
        fleet(monkeypatch, "ps-0", network="tcp", disks=tmp_path) as running,
        running.open(ARRAYS, **OPTIONS) as store,
        running.open(None, reader=True) as reader,
    ):
        await store.pin("a-name")
        assert [pin.name for pin in await reader.pins()] == ["a-name"]
        for call in (reader.pin, reader.unpin, reader.read_pin):
            with pytest.raises(StoreError, match="this client is a reader"):
                await call("a-name")
        network, address = reader.link.endpoint.network, running.servers["ps-0"].address
        async with network.connect(address, reader._link._identity, timeout_s=5.0) as link:
            body = PinShards(store=store._link.store.id, home="ps-0", name="forged", pin=1)
            with pytest.raises(LocalProtocolError, match="no row for 'PinShards' from reader"):
                await link.call(pack(body), timeout_s=5.0)
        assert [pin.name for pin in await store.pins()] == ["a-name"]
        async with join(network, running._address, "reader", WAITS) as survey:
            details = await survey.details("model", print)
        assert [(pin.name, pin.valid, pin.servers) for pin in details.pins] == [("a-name", True, ("ps-0",))]


async def test_a_forged_pin_costs_its_link_or_is_refused(monkeypatch, tmp_path):
    async with (
        fleet(monkeypatch, "ps-0", network="tcp", disks=tmp_path) as running,
        running.open(ARRAYS, **OPTIONS) as store,
    ):
        network, address = store.link.endpoint.network, running.servers["ps-0"].address
        known = {"store": store._link.store.id, "home": "ps-0"}
        for forged in (
            {**known, "name": "../../etc", "pin": 1},
            {**known, "name": "a-name", "pin": 1 << 60},
            {"store": "other", "home": "ps-0", "name": "a-name", "pin": 1},
            {**known, "home": "ps-9", "name": "a-name", "pin": 1},
        ):
            async with network.connect(address, store._link._identity, timeout_s=5.0) as link:
                with pytest.raises((RemoteError, LinkClosed)):
                    await link.call(pack(PinShards(**forged)), timeout_s=5.0)
        await push_on(store, 1)
        assert folders(tmp_path) == []
        await store.pin("a-name")


def test_the_synchronous_store_has_pins(tmp_path):
    with sync.ParameterStore.open("local", ARRAYS, name="m", dir=tmp_path, **OPTIONS) as store:
        store.push(STEP)
        values = copies_of(store.pull())
        store.pin("a-name")
        store.push(STEP)
        assert same(store.read_pin("a-name"), values)
        assert [pin.name for pin in store.pins()] == ["a-name"]
        store.unpin("a-name")
        assert store.pins() == []


def test_of_several_pins_of_a_name_the_newest_valid_one_is_listed():
    def state(pin, made, *, home="ps-0", fault=""):
        facts = PinFacts(
            name="n", pin=pin, store="s", home=home, homes=("ps-0", "ps-1"), servers=("ps-0",), began_ms=made
        )
        return PinState(facts=msgspec.structs.replace(facts, nbytes=8), fault=fault)

    whole = [state(1, 5), state(1, 6, home="ps-1")]
    (found,) = pin_summaries({"ps-0": [*whole, state(2, 9)], "ps-1": [*whole, state(2, 9, fault="full")]})
    assert (found.valid, found.made_ms, found.bytes, found.servers) == (True, 5, 16, ("ps-0", "ps-1"))
    (found,) = pin_summaries({"ps-0": [state(2, 9)], "ps-1": [state(2, 9, home="ps-1", fault="full")]})
    assert (found.valid, found.bytes, found.servers) == (False, 8, ("ps-0",))


async def asked(store, server, body):
    """The answer of a server to one message of the client of a store."""
    network, identity = store.link.endpoint.network, store._link._identity
    async with network.connect(server.address, identity, timeout_s=5.0) as link:
        return await link.call(pack(body), timeout_s=5.0)


async def test_a_store_that_leaves_while_its_pin_is_written_leaves_no_files(monkeypatch, tmp_path):
    append_made, begun, goes_on = Disk.append_made, asyncio.Event(), asyncio.Event()

    async def append(disk, path, *args):
        if "pin-" in str(path):
            begun.set()
            await goes_on.wait()
        return await append_made(disk, path, *args)

    monkeypatch.setattr(Disk, "append_made", append)
    async with fleet(monkeypatch, "ps-0", network="tcp", disks=tmp_path) as running:
        async with running.open(ARRAYS, **OPTIONS) as store:
            body = PinShards(store=store._link.store.id, home="ps-0", name="a-name", pin=1)
            await asked(store, running.servers["ps-0"], body)
            await begun.wait()
            await store.delete()
        server = running.servers["ps-0"]
        await running.until(lambda: not server.served, "the store leaves")
        goes_on.set()
        await running.until(lambda: not server._saved.pins._writing, "the disk ends its write")
        assert folders(tmp_path, "pin-", "removed-pin-") == []


async def test_the_id_of_a_pin_of_another_store_is_refused(monkeypatch, tmp_path):
    async with (
        fleet(monkeypatch, "ps-0", network="tcp", disks=tmp_path) as running,
        running.open(ARRAYS, **OPTIONS) as store,
        running.open(ARRAYS, name="other", **OPTIONS) as other,
    ):
        await store.pin("a-name")
        server = running.servers["ps-0"]
        ((pin, _),) = server._saved.pins._found
        forged = PinShards(store=other._link.store.id, home="ps-0", name="a-name", pin=pin)
        with pytest.raises(RemoteError, match="another store has a pin of this id"):
            await asked(other, server, forged)
        assert [pin.valid for pin in await store.pins()] == [True]
        assert await other.pins() == []


async def test_a_pin_waits_for_a_server_that_still_writes_another_one(monkeypatch, tmp_path):
    stuck = StuckWrites(monkeypatch)
    async with (
        fleet(monkeypatch, "ps-0", network="local", disks=tmp_path) as running,
        running.open(ARRAYS, **OPTIONS) as store,
        asyncio.TaskGroup() as group,
    ):
        group.create_task(store.pin("first"))
        await stuck.begun.wait()
        second = group.create_task(store.pin("second"))
        await turns(50)
        assert not second.done()
        stuck.go_on.set()
        await second
        assert [(pin.name, pin.valid) for pin in await store.pins()] == [("first", True), ("second", True)]


async def test_lists_of_pins_are_charged_with_at_least_their_size(monkeypatch, tmp_path):
    async with (
        fleet(monkeypatch, *NODES, network="tcp", disks=tmp_path) as running,
        running.open(ARRAYS, **OPTIONS) as store,
    ):
        await store.pin("a-name")
        for start in ("of the write", "of the next start"):
            for node in NODES:
                pins = running.servers[node]._saved.pins
                found = await pins.saved("model", "a-name")
                assert len(found) == 1
                assert len(msgspec.msgpack.encode(found)) <= pins.listed_bytes("model", "a-name"), start
                for state in pins.states("model"):
                    assert len(msgspec.msgpack.encode(state)) <= pin_state_bytes(state) <= 512
            for node in NODES:
                await running.end(node)
            await running.start(*NODES)
    facts = PinFacts(
        name="n" * 64,
        pin=(1 << 56) - 1,
        store="é" * 160,
        home="h" * 80,
        homes=("h" * 80,) * 64,
        servers=("s" * 80,) * 512,
        began_ms=(1 << 53) - 1,
        nbytes=(1 << 53) - 1,
    )
    most = PinState(facts=facts, fault="é" * 512)
    assert len(msgspec.msgpack.encode(most)) <= pin_state_bytes(most)


async def test_no_server_alone_has_a_client_remove_a_pin_of_others(monkeypatch, tmp_path):
    async with (
        fleet(monkeypatch, *NODES, network="local", disks=tmp_path) as running,
        running.open(ARRAYS, **OPTIONS) as store,
    ):
        await store.pin("a-name")
        pins = running.servers["ps-0"]._saved.pins
        for key, saved in pins._found.items():
            forged = msgspec.structs.replace(saved.facts, store="earlier", homes=(), servers=())
            pins._found[key] = saved._replace(facts=forged)
        await store.pin("next")
        assert {pin.name: pin.valid for pin in await store.pins()} == {"a-name": True, "next": True}
