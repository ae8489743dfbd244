"""Checkpoints on their way to the disk: bounded memory, and pieces that are dropped or complete."""

import asyncio
import tracemalloc
from contextlib import aclosing

import pytest

from adam_async.checkpoint import writer
from adam_async.checkpoint.checkpoint import StoredPieces
from adam_async.checkpoint.files import CheckpointFolder, open_checkpoint
from adam_async.checkpoint.new_checkpoint import NewCheckpoint
from adam_async.checkpoint.writer import Checkpointer
from adam_async.model.named import mlp
from adam_async.parameter_server import shard_pieces
from adam_async.parameter_server.storage import StoragePool
from adam_async.persistence import written_once
from adam_async.persistence.records import FlushSettings
from adam_async.run.progress import Progress
from adam_async.run.training_program import ResumeRecord
from adam_async.runtime.disk import Disk
from tests.adam_async.checkpoint.checkpoints import checkpoint_of
from tests.adam_async.checkpoint.test_shard_transfer import copies_of
from tests.adam_async.runs import NETWORKS, PATIENT, servers_of, turns

MIB = 1 << 20


def arriving(most_bytes):
    """Return a new checkpoint, and the bundles of its pieces by name."""
    stored = StoredPieces(checkpoint_of().catalogue)
    bundles = {name: stored.bundle(specs) for name, specs in stored.specs.items()}
    assert len(bundles) == 2
    return NewCheckpoint(stored.catalogue, most_bytes), bundles


async def put_all(checkpoint, bundles):
    for name, bundle in bundles.items():
        await checkpoint.put(name, bundle)


async def test_a_piece_waits_until_the_ones_before_it_are_written():
    checkpoint, bundles = arriving(1)
    async with asyncio.TaskGroup() as group, aclosing(checkpoint.pieces()) as pieces:
        putting = group.create_task(put_all(checkpoint, bundles))
        await turns()
        first = await anext(pieces)
        await turns()
        assert not putting.done(), "the piece that is being written counts"
        second = await anext(pieces)
        await putting
    assert [first.key.name, second.key.name] == [*bundles]
    assert len(checkpoint.states) == sum(len(bundle.shards) for bundle in bundles.values())


async def test_a_dropped_checkpoint_takes_its_pieces_at_once_and_gives_none():
    checkpoint, bundles = arriving(1)
    async with asyncio.TaskGroup() as group:
        putting = group.create_task(put_all(checkpoint, bundles))
        await turns()
        assert checkpoint.drop()
        assert not checkpoint.drop()
        await putting
    example = checkpoint_of()
    checkpoint.complete(example.manifest, example.record)
    assert [piece async for piece in checkpoint.pieces()] == []
    assert (checkpoint.manifest, checkpoint.head()) == (None, [])


async def test_a_dropped_checkpoint_leaves_no_file(tmp_path):
    checkpoint, bundles = arriving(1)
    async with Disk() as disk, asyncio.TaskGroup() as group:
        folder = CheckpointFolder(tmp_path, disk)
        writing = group.create_task(folder.write(checkpoint))
        await put_all(checkpoint, bundles)
        assert await disk.names(tmp_path) == [".checkpoint-new.aside"]
        checkpoint.drop()
        assert await writing == 0
        assert await disk.names(tmp_path) == []


async def peak_of(work):
    """Return the result of some work, and the most bytes that it had allocated beyond those before it."""
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        result = await work
        return result, tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()


async def test_taking_and_resuming_a_checkpoint_holds_a_few_pieces_and_not_the_model(tmp_path, monkeypatch):
    """A model of 30 MiB has 60 MiB of rule state. The counted memory is that of the server, too."""
    monkeypatch.setattr(writer, "MOST_BYTES", 2 * MIB)
    monkeypatch.setattr(written_once, "FlushSettings", lambda: FlushSettings(segment_bytes=2 * MIB))
    monkeypatch.setattr(shard_pieces, "PIECE_BYTES", MIB // 4)
    # Without kernels, whose compilation on another thread would count.
    options = {"rule": "adam", "waits": PATIENT, "servers": 1, "shard_bytes": MIB // 4, "kernels": "numpy"}
    network = NETWORKS["tcp"]()
    model = mlp((784, 10_000, 10))
    async with (
        servers_of(network, spec=model, **options) as servers,
        Disk() as disk,
        asyncio.TaskGroup() as group,
    ):
        values = sum(spec.nbytes for spec in servers.table.shards)
        assert values > 30 * MIB
        checkpointer = Checkpointer(
            folder=CheckpointFolder(tmp_path, disk),
            copies=copies_of(servers),
            storage_pool=StoragePool(),
            config=servers.config,
            spawn=lambda name, work: group.create_task(work, name=name),
            note=pytest.fail,
            progress=Progress(consistency="asp"),
        )

        async def take():
            reading = await checkpointer.read(servers.map)
            checkpointer.write_within(reading, ResumeRecord(epoch=1, clock=0), [], groups=60)
            await checkpointer.settle()

        async def resume():
            found = await open_checkpoint(tmp_path, disk)
            await copies_of(servers).load(servers.map.run_store, found.source)

        _, to_take = await peak_of(take())
        (written,) = checkpointer.written
        assert written.bytes > 3 * values
        _, to_resume = await peak_of(resume())
    assert max(to_take, to_resume) < 12 * MIB
