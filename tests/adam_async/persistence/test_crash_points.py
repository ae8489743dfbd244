"""A folder of segment files after a crash at any point of appends, rounds, compaction and repairs."""

import asyncio
import random
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from adam_async.persistence.records import ENTRIES, StateName
from adam_async.persistence.scan import segment_name
from tests.adam_async.crash_images import TracedDiskModel, crashed, disk_model_of
from tests.adam_async.persistence.owners import (
    HOME,
    OwnedBundle,
    Owner,
    check_states,
    contents_in,
    files_of,
    store_of,
)
from tests.simulation.scenario import simulate

OPERATIONS = 200
"""Number of entries."""

KILLS = 4
"""Number of times that the process is killed in between, with all that it gave to the disk."""

DURABLE, REPLICATED, LEFT = "durable", "replicated", "left"
"""Homes: with durable entries; without entries; without entries, and left in the middle."""


@dataclass(frozen=True)
class Noted:
    """The states that may be recovered at a moment."""

    confirmed: dict[StateName, int]
    """Position that each state on disk has at least."""
    applied: dict[str, int]
    """Position that each state has at most, by home."""
    acknowledged: int
    """Position up to which entries were acknowledged."""


@dataclass
class Account:
    """The promises of a server."""

    owner: Owner
    operations: int
    confirmed: dict[StateName, int] = field(default_factory=dict)
    acknowledged: int = 0
    compactions: int = 0

    def note(self) -> Noted:
        applied = {home: bundle.applied for home, bundle in self.owner.bundles.items()}
        return Noted(dict(self.confirmed), applied, self.acknowledged)


async def serve(node, account: Account, dice: random.Random) -> None:
    """Be a server: take up the states on disk, apply entries, and flush now and then."""
    owner = account.owner
    disk = node.open_disk()
    store = store_of(disk, owner, entries_disk=node.open_disk())
    async with store.opened(), asyncio.TaskGroup() as group:
        running = group.create_task(store.run())
        for bundle in owner.bundles.values():
            # Other copies of the bundle send the entries that its disk lacks.
            bundle.applied = len(bundle.history)
            for name in changed(bundle):
                known = store.recovery.states.get(name)
                if known is None or known.version < bundle.version(name.shard, bundle.applied):
                    store.mark(name, 1000)
        while len(owner.bundles[DURABLE].history) < account.operations:
            await step(store, account, dice)
            await asyncio.sleep(dice.uniform(0.0, 0.05))
        await flush(store, account)
        account.compactions += store.statistics().compaction_writes
        running.cancel()


def changed(bundle: OwnedBundle) -> list[StateName]:
    """Return the states that entries have changed."""
    return [name for name in bundle.names() if bundle.version(name.shard, bundle.applied)]


async def step(store, account: Account, dice: random.Random) -> None:
    """Append a few entries at once, apply them, and perhaps flush or leave a bundle."""
    owner = account.owner
    bundle = owner.bundles[DURABLE]
    positions = [bundle.grow(dice) for _ in range(dice.randrange(1, 5))]

    async def append(position):
        await store.append_durably(*bundle.entry(position))
        account.acknowledged = max(account.acknowledged, position)

    async with asyncio.TaskGroup() as group:
        for position in positions:
            group.create_task(append(position))
    for position in positions:
        owner.apply(store, DURABLE, position)
    for home in (REPLICATED, LEFT):
        owner.apply(store, home, owner.bundles[home].grow(dice))
    if dice.random() < 0.25:
        await flush(store, account)
    if dice.random() < 0.05:
        store.forget(LEFT)
        owner.bundles[LEFT].generation += 1
        account.confirmed = {name: at for name, at in account.confirmed.items() if name.home != LEFT}
        for name in changed(owner.bundles[LEFT]):
            store.mark(name, 1000)


async def flush(store, account: Account) -> None:
    """Flush, and note the promise."""
    marked = {name: bundle.applied for bundle in account.owner.bundles.values() for name in changed(bundle)}
    await store.flush()
    assert store.statistics().dirty == 0
    for name, applied in marked.items():
        bundle = account.owner.bundles[name.home]
        # A state that no later entry changes is promised at an earlier position.
        last = max(at for at in range(applied + 1) if not at or name.shard in bundle.history[at - 1])
        account.confirmed[name] = last


def traced(seed: int, *, operations: int = OPERATIONS):
    """Run a server, and keep images of its disk."""
    account = Account(Owner(DURABLE, REPLICATED, LEFT), operations)
    disk_model = TracedDiskModel(account.note)

    async def scenario(world):
        node = world.node("ps-0")
        node.disk_model = disk_model
        disk_model.make_folder(HOME.parent)
        disk_model.find(Path("/")).sync()
        node.start(lambda node: serve(node, account, random.Random(f"{seed} {node.incarnation}")))
        for _ in range(KILLS):
            await asyncio.sleep(world.dice.between(0.2, 0.6))
            if not node.host.up:
                break
            node.kill()
            node.restart()
        await node.task
        disk_model.look()

    simulate(scenario, seed=seed)
    return disk_model.images, account


@pytest.fixture(scope="module")
def trace():
    return traced(3)


def check(files, noted: Noted, owner: Owner) -> None:
    """Assert that the files have what they must have, and nothing that was never there."""
    contents = contents_in(files)
    assert contents.damages == ()
    assert contents.lost == ()
    check_states(files, contents, owner)
    for name, position in noted.confirmed.items():
        assert name in contents.states, name
        assert contents.states[name][0].position >= position, name
    for name, (key, _) in contents.states.items():
        assert key.position <= noted.applied[name.home], name
    check_entries(contents, noted, owner)


def check_entries(contents, noted: Noted, owner: Owner) -> None:
    """Assert that states and entries together have all acknowledged entries."""
    positions = {key.position for key in contents.entries if key.home == DURABLE}
    bundle = owner.bundles[DURABLE]
    for position in range(1, noted.acknowledged + 1):
        if position in positions:
            continue
        for shard in bundle.history[position - 1]:
            known = contents.states.get(StateName(DURABLE, shard))
            assert known is not None, (position, shard)
            assert known[0].position >= position, (position, shard)


def reopened(disk_model):
    """Open a store on a disk; return its recovery, and its files then."""

    async def program(node):
        node.disk_model = disk_model
        disk = node.open_disk()
        async with store_of(disk, Owner(DURABLE)).opened() as store:
            read = {name: await store.read_state(name) for name in store.recovery.states}
            return store.recovery, read, files_of(disk_model)

    async def scenario(world):
        node = world.node("ps-0")
        node.start(program)
        return await node.task

    return simulate(scenario, seed=1).result


def test_the_trace_has_all_that_matters(trace):
    images, account = trace
    assert len(images) > 3 * OPERATIONS
    assert account.acknowledged == len(account.owner.bundles[DURABLE].history) >= OPERATIONS
    assert account.compactions > 5
    kinds = [segment_name(name) for name in files_of(disk_model_of(images[-1].root))]
    assert max(name.number for name in kinds if name.kind == ENTRIES) > 5
    assert max(name.number for name in kinds) > 10
    assert len(kinds) < 12  # superfluous files are removed


@pytest.mark.thorough
@pytest.mark.timeout(300)
def test_a_crash_at_any_point_loses_nothing_confirmed_and_leaves_whole_states(trace):
    images, account = trace
    dice = random.Random(1)
    points = torn = 0
    opened = set()
    for image in images:
        for disk_model in crashed(image, dice):
            files = files_of(disk_model)
            points += 1
            check(files, image.noted, account.owner)
            torn += bool(contents_in(files).torn)
            if points % 20 == 0 and (key := str(sorted(files.items()))) not in opened:
                opened.add(key)
                recovery, read, after = reopened(disk_model)
                expected = contents_in(files)
                assert recovery == expected.recovery()
                assert {name: key for name, (key, _) in read.items()} == recovery.states
                assert contents_in(after).torn == ()
                check(after, image.noted, account.owner)

    assert points > 8000
    assert torn > OPERATIONS
    assert len(opened) > 50


def damaged(image, dice: random.Random):
    """Return a disk with a flipped bit in a file that others rely on."""
    disk_model = disk_model_of(deepcopy(image.root))
    disk_model.crash()
    files = files_of(disk_model)
    while True:
        name = dice.choice([name for name, data in files.items() if data])
        data = bytearray(files[name])
        data[dice.randrange(len(data))] ^= 1 << dice.randrange(8)
        if contents_in({**files, name: bytes(data)}).damages:
            inode = disk_model.file(HOME / name)
            inode.data[:] = inode.kept[:] = data
            return disk_model


@pytest.mark.thorough
@pytest.mark.timeout(300)
def test_a_crash_at_any_point_of_a_repair_changes_no_state_and_hides_no_loss(trace):
    images, account = trace
    dice = random.Random(2)
    points = 0
    for image in dice.sample(images[len(images) // 3 :], 12):
        before = damaged(image, dice)
        contents = contents_in(files_of(before))
        states = {name: key for name, (key, _) in contents.states.items()}
        lost = {each.name for each in contents.lost}
        for repair in images_of_repair(before):
            for disk_model in crashed(repair, dice):
                points += 1
                files = files_of(disk_model)
                found = contents_in(files)
                check_states(files, found, account.owner)
                assert {name: key for name, (key, _) in found.states.items()} == states
                assert found.entries.keys() == contents.entries.keys()
                assert {each.name for each in found.lost} == lost

    assert points > 500


def images_of_repair(disk_model):
    """Open a store on a disk with damage; return images."""
    traced_model = TracedDiskModel(lambda: None)
    own, root = traced_model.find(Path("/")), disk_model.find(Path("/"))
    own.names, own.kept_names, own.pending = root.names, root.kept_names, root.pending

    async def program(node):
        node.disk_model = traced_model
        async with store_of(node.open_disk(), Owner(DURABLE)).opened():
            traced_model.look()

    async def scenario(world):
        node = world.node("ps-0")
        node.start(program)
        await node.task

    simulate(scenario, seed=1)
    return traced_model.images
