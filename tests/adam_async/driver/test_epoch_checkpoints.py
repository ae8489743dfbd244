"""Checkpoints within the epochs of a run, beside a parameter server with wrong clocks."""

import asyncio

import msgspec

from adam_async.checkpoint import writer
from adam_async.checkpoint.writer import Checkpointer
from adam_async.driver import epoch_checkpoints
from adam_async.parameter_server import shard_pieces
from adam_async.parameter_server.bundle import Bundle
from adam_async.persistence.folder import SegmentWriter
from adam_async.run.config import Config
from tests.adam_async.runs import PATIENT, cluster_of, tiny_dataset, until


async def test_checkpoints_go_on_after_a_server_has_sent_a_clock_that_no_replica_reached(
    tmp_path, monkeypatch
):
    keep_clock, lies = Bundle.keep_clock, [1 << 40]
    monkeypatch.setattr(
        Bundle, "keep_clock", lambda *asked, **named: lies.pop() if lies else keep_clock(*asked, **named)
    )
    monkeypatch.setattr(epoch_checkpoints, "POLL_S", 0.01)
    config = Config(
        epochs=1000, threads=1, rate=0.05, images_per_group=1, consistency="bsp", checkpoint_every=20
    )
    async with cluster_of(config, checkpoint=tmp_path) as cluster, asyncio.TaskGroup() as group:
        training = group.create_task(cluster.train(), name="train")
        latest = tmp_path / "latest"
        # Each epoch has 60 groups, so this checkpoint is within an epoch.
        await until(lambda: training.done() or (latest.exists() and "-000060" not in latest.read_text()))
        assert not training.done()
        assert cluster.driver.progress.epochs == []
        training.cancel()


class Misses(list):
    """The misses within the first epoch, by their reasons."""

    def __init__(self, monkeypatch):
        super().__init__()
        miss = Checkpointer.miss

        def note(checkpointer, what):
            if not checkpointer._progress.epochs:
                self.append(what)
            miss(checkpointer, what)

        monkeypatch.setattr(Checkpointer, "miss", note)


def slowly(**options):
    """A run in bsp whose epochs of 60 groups last for a while."""
    return Config(
        epochs=1,
        threads=1,
        rate=0.05,
        images_per_group=1,
        consistency="bsp",
        slow=("worker-0~ps-0:10ms",),
        **options,
    )


async def test_a_server_that_refuses_each_reading_at_once_costs_no_more_checkpoints_than_are_due(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(Bundle, "keep_clock", lambda *asked, **named: 1 << 40)
    monkeypatch.setattr(epoch_checkpoints, "POLL_S", 0.01)
    misses = Misses(monkeypatch)
    async with cluster_of(slowly(checkpoint_every=20, checkpoint_misses=9), checkpoint=tmp_path) as cluster:
        await cluster.train()
    assert 1 <= len(misses) <= 4
    assert all(" is the most" in miss for miss in misses), misses


async def test_a_clock_that_the_epoch_never_reaches_costs_one_checkpoint_by_name(tmp_path, monkeypatch):
    keep_clock, lies = Bundle.keep_clock, [1 << 8]
    monkeypatch.setattr(
        Bundle, "keep_clock", lambda *asked, **named: lies.pop() if lies else keep_clock(*asked, **named)
    )
    monkeypatch.setattr(epoch_checkpoints, "POLL_S", 0.01)
    misses = Misses(monkeypatch)
    waits = msgspec.structs.replace(PATIENT, clock_s=0.2, answer_s=0.2)
    config = slowly(checkpoint_every=10, waits=waits)
    async with cluster_of(config, checkpoint=tmp_path) as cluster, asyncio.TaskGroup() as group:
        training = group.create_task(cluster.train(), name="train")
        latest = tmp_path / "latest"
        await until(lambda: training.done() or (latest.exists() and "-000060" not in latest.read_text()))
        assert not training.done()
        training.cancel()
    assert "the values of clock 257 wait for all replicas" in misses[0]


async def test_a_reading_at_a_clock_waits_for_the_disk_no_longer_than_the_servers_keep_the_clock(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(writer, "MOST_BYTES", 1)  # each piece waits for the one before
    monkeypatch.setattr(shard_pieces, "PIECE_BYTES", 4 << 10)
    read, append, is_read = Checkpointer.read, SegmentWriter.append, asyncio.Event()

    async def read_and_tell(*asked, **named):
        try:
            return await read(*asked, **named)
        finally:
            is_read.set()

    async def append_later(*pieces):
        await is_read.wait()
        return await append(*pieces)

    monkeypatch.setattr(Checkpointer, "read", read_and_tell)
    monkeypatch.setattr(SegmentWriter, "append", append_later)
    misses = Misses(monkeypatch)
    waits = msgspec.structs.replace(PATIENT, answer_s=0.2)
    config = slowly(checkpoint_every=10, shard_bytes=4 << 10, waits=waits)
    data = tiny_dataset(300)
    async with cluster_of(config, dataset=data, checkpoint=tmp_path) as cluster, asyncio.TaskGroup() as group:
        training = group.create_task(cluster.train(), name="train")
        latest, progress = tmp_path / "latest", cluster.driver.progress
        await until(lambda: training.done() or progress.epochs or latest.exists())
        assert latest.exists()
        assert progress.epochs == []
        training.cancel()
    assert misses == []
