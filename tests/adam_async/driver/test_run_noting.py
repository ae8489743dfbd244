"""Notes of a run: a point counts once every server has the updates of that moment on its disk."""

import asyncio
from contextlib import asynccontextmanager

import pytest

from adam_async.checkpoint.manifest import Manifest
from adam_async.checkpoint.run_notes import RunNotesFile
from adam_async.driver.count_types import (
    DataCounts,
    DiskAge,
    LedgerState,
    ProcessCounts,
    RoleStatistics,
    ServerCounts,
)
from adam_async.driver.run_noting import RunNoting, note_begin
from adam_async.run.result import EpochResult
from adam_async.run.training_program import ResumeRecord
from adam_async.runtime.disk import Disk

GROUPS = 10
COMMON = {"process": ProcessCounts(host="here", pid=1, peak_rss_mb=1.0), "traffic": []}
MANIFEST = Manifest(
    run="run-2",
    config={"images_per_group": 4},
    spec={},
    data={"train_images": 40},
    epoch=1,
    groups=0,
    resume=ResumeRecord(epoch=1, finished=(), clock=0),
)


def data(epoch, stop):
    counts = DataCounts(
        **COMMON,
        epoch=epoch,
        finished=stop,
        images=4 * stop,
        loss=0.5,
        finished_ranges=((0, stop),) if stop else (),
        ledger=LedgerState(leads=True),
    )
    return RoleStatistics(node="data-0", counts=counts, values={})


def server(age_s, node="ps-0"):
    counts = ServerCounts(**COMMON, clock=0, disk=DiskAge(age_s=age_s))
    return RoleStatistics(node=node, counts=counts, values={})


def poll(noting, at, epoch, stop, *ages, results=(), epochs=()):
    answers = {"data-0": data(epoch, stop)}
    answers.update({f"ps-{n}": server(age, f"ps-{n}") for n, age in enumerate(ages)})
    ended = len(results)
    noting.polled(
        answers, asked_at=at, now=at + 0.01, groups=GROUPS, ended=ended, results=results, epochs=epochs
    )


@asynccontextmanager
async def noting_in(folder, *, is_new=True):
    async with Disk() as disk, RunNotesFile(folder, disk).opened() as file, asyncio.TaskGroup() as group:
        if is_new:
            await note_begin(file, MANIFEST, lambda: 1000.0)
        noting = RunNoting(
            file,
            MANIFEST,
            spawn=lambda name, work: group.create_task(work, name=name),
            warn=pytest.fail,
            wall_clock=lambda: 1000.0,
            timeout_s=10.0,
        )
        begin = asyncio.get_running_loop().time()
        yield noting, file, begin
        await noting.settle()


def newest(file):
    note = file.found.notes[0]
    return note.manifest.epoch, note.manifest.groups, note.is_on_disk


async def test_a_point_counts_once_all_servers_have_its_updates(tmp_path):
    async with noting_in(tmp_path) as (noting, file, begin):
        poll(noting, begin + 1.0, 1, 3, None, 0.5)
        await noting.settle()
        assert newest(file) == (1, 0, False), "a server lacks pieces"
        poll(noting, begin + 2.0, 1, 5, 0.2, 0.5)
        await noting.settle()
        assert newest(file) == (1, 3, True)
        poll(noting, begin + 3.0, 1, 7, 0.2, 1.5)
        await noting.settle()
        assert newest(file) == (1, 3, True), "the slowest disk decides"
        poll(noting, begin + 4.0, 1, 8, 0.0, 0.0)
        await noting.settle()
        assert newest(file) == (1, 7, True)
        assert file.found.seen.groups == 8


async def test_the_note_of_an_epoch_follows_its_evaluation(tmp_path):
    ended = {"images": 40, "loss": 0.5, "train_s": 1.0}
    result = EpochResult(epoch=1, images=40, skipped=0, train_loss=0.5, test_accuracy=0.5, train_s=1.0)
    async with noting_in(tmp_path) as (noting, file, begin):
        poll(noting, begin + 1.0, 1, 9, 0.0)
        poll(noting, begin + 2.0, 1, GROUPS, 0.0)
        poll(noting, begin + 3.0, 1, GROUPS, 0.0, results=(ended,))
        await noting.settle()
        assert newest(file) == (1, 9, True), "the epoch is not evaluated"
        noting.epoch_ended((ended,), (result,), now=begin + 3.5)
        poll(noting, begin + 5.0, 2, 0, 0.0, results=(ended,), epochs=(result,))
        await noting.settle()
        assert newest(file) == (2, 0, True)
        resume = file.found.notes[0].manifest.resume
        assert (resume.epoch, resume.finished, resume.results) == (2, (), (ended,))


async def test_the_note_of_the_run_before_stays_until_the_new_one_is_on_the_disks(tmp_path):
    async with noting_in(tmp_path) as (noting, file, begin):
        poll(noting, begin + 1.0, 1, 3, 0.0)
        poll(noting, begin + 2.0, 1, 4, 0.0)
    async with noting_in(tmp_path) as (noting, file, begin):
        assert [note.is_on_disk for note in file.found.notes] == [False, True]
        poll(noting, begin + 1.0, 1, 3, 0.0)
        poll(noting, begin + 2.0, 1, 4, 0.0)
        await noting.settle()
        assert [note.is_on_disk for note in file.found.notes] == [True]


async def test_a_run_that_was_taken_over_has_no_note_before_a_point_is_on_the_disks(tmp_path):
    async with noting_in(tmp_path, is_new=False) as (noting, file, begin):
        poll(noting, begin + 1.0, 1, 3, 5.0)
        assert file.found is None
        poll(noting, begin + 2.0, 1, 4, 0.0)
        await noting.settle()
        assert newest(file) == (1, 3, True)
