"""Groups that a data server produces: the same pixels within any memory, and requested groups first."""

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from adam_async.data_server import group_producer
from adam_async.data_server.dataset import Dataset, StoredImages
from adam_async.data_server.epoch import EpochOrders
from adam_async.data_server.group_producer import GroupProducer
from adam_async.data_server.image_cache import BLOCK_BYTES
from adam_async.data_server.transforms.recipe import Recipe
from adam_async.errors import ConfigError, DataError
from adam_async.model.keyed_random import Dice
from adam_async.run.config import Config
from adam_async.run.memory_sizes import CacheLimits
from adam_async.run.training_program import TrainingProgram
from tests.adam_async.runs import until

IMAGES, GROUP = 60, 3
SHAPE = (1, 64, 128)
IMAGE_BYTES = 64 * 128
"""So a block is two groups."""
GROUPS = range(IMAGES // GROUP)
STEPS = [{"kind": "shift", "pixels": 2}]
SMALL_CACHE = 1 << 10


def picture(number: int) -> np.ndarray:
    return (np.arange(IMAGE_BYTES) % 251 + number).astype(np.uint8).reshape(SHAPE)


def dataset_of(read=picture, *, cache: CacheLimits | None) -> Dataset:
    labels = np.arange(IMAGES) % 5
    test = np.stack([picture(0)])
    return Dataset(
        name="numbers",
        source="here",
        num_classes=5,
        train_images=StoredImages(read, image_shape=SHAPE, labels=labels, origin="shelf"),
        train_labels=labels,
        test_images=test,
        test_labels=labels[:1],
        cache=cache,
    )


def order_of(epoch: int):
    return EpochOrders(Dice(1), num_images=IMAGES, images_per_group=GROUP).order(epoch)


@asynccontextmanager
async def producer_of(
    dataset: Dataset, *, transforms=(), kernels="numpy", takers=1, **options
) -> AsyncIterator[tuple[GroupProducer, list[BaseException]]]:
    """A supply at work, in its first epoch, and what failed in it."""
    failures: list[BaseException] = []
    producer = GroupProducer(dataset, name="images", on_failure=failures.append)
    config = Config(seed=3, kernels=kernels, **options)
    program = TrainingProgram(config=config, spec={}, transforms=tuple(transforms))
    async with asyncio.timeout(20), asyncio.TaskGroup() as group:
        work = group.create_task(producer.run())
        await producer.take_up(program)
        producer.begin_epoch(order_of(1), takers=takers)
        yield producer, failures
        work.cancel()


async def taken(producer: GroupProducer, *numbers: int):
    ready = asyncio.get_running_loop().create_future()
    producer.when_ready(numbers, lambda: ready.set_result(producer.take(numbers)))
    images, labels = await ready
    return np.concatenate(images), labels


def expected(number: int, epoch: int, transforms=(), kernels="numpy"):
    chosen = order_of(epoch).group(number)
    images = np.stack([picture(int(number)) for number in chosen])
    if transforms:
        recipe = Recipe.of(transforms, SHAPE, kernels=kernels)
        images = recipe.apply(images, chosen, dice=Dice(3), epoch=epoch)
    return images


@pytest.mark.parametrize(("transforms", "kernels"), [((), "numpy"), (STEPS, "numba")])
@pytest.mark.parametrize("budget", [IMAGE_BYTES, 20 * IMAGE_BYTES, 200 * IMAGE_BYTES])
async def test_pixels_are_the_same_within_any_memory(
    budget: int, transforms, kernels: str, tmp_path: Path
) -> None:
    dataset = dataset_of(cache=CacheLimits(budget, spill=tmp_path))
    async with producer_of(dataset, transforms=transforms, kernels=kernels) as (producer, failures):
        for epoch in (1, 2, 3):
            producer.begin_epoch(order_of(epoch), takers=1)
            for number in GROUPS:
                producer.prepare(range(number, number + 4))
                images, labels = await taken(producer, number)
                assert np.array_equal(images, expected(number, epoch, transforms, kernels))
                assert np.array_equal(labels, order_of(epoch).group(number) % 5)
        told = producer.cache_statistics()
        assert told is not None
        assert told.budget_bytes == budget
        assert told.decoded == IMAGES
        assert told.hits + told.read_back + told.decoded >= 3 * IMAGES
        assert not failures


async def test_a_run_with_a_function_that_the_server_does_not_allow_is_refused_before_any_change() -> None:
    async with producer_of(dataset_of(cache=CacheLimits(1 << 30)), transforms=STEPS) as (producer, failures):
        foreign = TrainingProgram(config=Config(seed=4), spec={}, transforms=({"kind": "os:system"},))
        with pytest.raises(ConfigError, match="--allow-transform os:system"):
            await producer.take_up(foreign)
        images, _ = await taken(producer, 0)
        assert np.array_equal(images, expected(0, 1, STEPS))
        assert not failures


async def test_groups_that_are_taken_again_are_made_again_off_the_loop() -> None:
    async with producer_of(dataset_of(cache=CacheLimits(IMAGE_BYTES)), takers=2) as (producer, _):
        first = await asyncio.gather(*(taken(producer, 0, 5) for _ in range(4)))
        for images, _ in first:
            assert np.array_equal(images, np.concatenate([expected(0, 1), expected(5, 1)]))


async def test_groups_of_waiting_questions_go_before_groups_made_ahead() -> None:
    made: list[int] = []

    def noting(number: int):
        made.append(number)
        return picture(number)

    async with producer_of(dataset_of(noting, cache=CacheLimits(1 << 30))) as (producer, _):
        producer.prepare(GROUPS)
        await taken(producer, 19)
        before = made[: made.index(int(order_of(1).group(19)[-1])) + 1]
        assert len(before) <= 3 * 2 * GROUP  # two blocks that the thread had, and its own


async def test_groups_made_ahead_keep_to_the_memory_and_wanted_ones_are_never_refused() -> None:
    limit = 8 * BLOCK_BYTES
    async with producer_of(dataset_of(cache=CacheLimits(limit))) as (producer, _):
        held = []
        for number in GROUPS:
            producer.prepare(range(20))
            images, _ = await taken(producer, number)
            assert np.array_equal(images, expected(number, 1))
            held.append(images)  # as a link does whose worker does not read
            told = producer.cache_statistics()
            assert told is not None
            waiting = len({id(images.base) for images in held}) * 2 * GROUP * IMAGE_BYTES
            assert told.block_bytes <= max(limit // 4, waiting + 2 * BLOCK_BYTES)
        held.clear()
        del images
        told = producer.cache_statistics()
        assert told is not None
        assert told.block_bytes <= limit // 4


async def test_blocks_of_a_lost_worker_make_room_for_others() -> None:
    async with producer_of(dataset_of(cache=CacheLimits(8 * BLOCK_BYTES))) as (producer, _):
        producer.prepare(range(10, 20))
        for number in range(10):
            await taken(producer, number)
        for _ in range(6):
            await taken(producer, 0)
        told = producer.cache_statistics()
        assert told is not None
        assert told.evicted_blocks > 0
        images, _ = await taken(producer, 12)
        assert np.array_equal(images, expected(12, 1))


async def test_an_image_that_cannot_be_read_fails_with_its_name() -> None:
    def damaged(number: int):
        raise DataError(f"image {number} is damaged")

    async with producer_of(dataset_of(damaged, cache=CacheLimits(1 << 20))) as (producer, failures):
        producer.prepare([0])
        await until(lambda: bool(failures))
        assert isinstance(failures[0], DataError)


async def test_once_all_images_are_in_memory_groups_are_gathered_in_the_call() -> None:
    async with producer_of(dataset_of(cache=CacheLimits(1 << 30))) as (producer, _):
        for number in GROUPS:
            await taken(producer, number)
        producer.begin_epoch(order_of(2), takers=1)
        called = []
        producer.when_ready([7], lambda: called.append(producer.take([7])))
        assert np.array_equal(called[0][0][0], expected(7, 2))


async def test_the_options_of_the_run_hold_where_the_data_set_has_none() -> None:
    async with producer_of(dataset_of(cache=None), cache="64K") as (producer, _):
        told = producer.cache_statistics()
        assert told is not None
        assert told.budget_bytes == 1 << 16
        assert producer.answer_bytes == 1 << 10


async def test_an_epoch_that_begins_while_a_run_is_prepared_is_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with producer_of(dataset_of(cache=None)) as (producer, _):
        hold_back = producer._hold_back

        async def held_back(config: Config) -> None:
            producer.begin_epoch(order_of(1), takers=1)  # an event of the run before
            await hold_back(config)

        monkeypatch.setattr(producer, "_hold_back", held_back)
        await producer.take_up(TrainingProgram(config=Config(), spec={}))
        assert producer.epoch == 0


async def test_images_that_the_data_set_holds_itself_count_as_they_are() -> None:
    stored = dataset_of(cache=CacheLimits(1 << 30))
    dataset = replace(stored, train_images=stored.train_images[:])
    async with producer_of(dataset) as (producer, _):
        told = producer.cache_statistics()
        assert told is not None
        assert (told.resident_images, told.resident_bytes) == (IMAGES, IMAGES * IMAGE_BYTES)


async def test_copies_of_rows_count_until_they_are_freed_and_slices_count_once() -> None:
    async with producer_of(dataset_of(cache=CacheLimits(IMAGES * IMAGE_BYTES))) as (producer, _):

        def held_bytes() -> int:
            told = producer.cache_statistics()
            assert told is not None
            return told.block_bytes

        await taken(producer, 0)  # and group 1 lies in the same block
        (images,), _ = producer.take([1])
        before = held_bytes()
        copies = [np.concatenate([images[:, :, 8:40]])]
        producer.watch([*copies, images[:1]])

        assert before == 2 * GROUP * IMAGE_BYTES
        assert held_bytes() == before + GROUP * IMAGE_BYTES // 2
        copies.clear()
        assert held_bytes() == before


@pytest.mark.parametrize(("size", "warned"), [(SMALL_CACHE, True), (1 << 30, False)])
async def test_a_cache_without_room_for_a_block_says_what_it_costs(
    size: int, warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async with producer_of(dataset_of(cache=CacheLimits(size))) as (producer, _):
        producer.begin_epoch(order_of(2), takers=1)

    told = [record.getMessage() for record in caplog.records]
    assert len(told) == warned
    if warned:
        assert told[0].startswith(f"a cache of {size} bytes leaves ")
        assert "decoded again in each epoch; a larger --cache is faster" in told[0]


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """The kernels of transforms count as not compiled until something is in the list."""
    found: list[bool] = []
    monkeypatch.setattr(
        group_producer, "first_kernels", lambda kernels: ("numba", False) if found else ("numpy", True)
    )
    return found


def child(folder: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """Let the child run another module."""
    (folder / "another.py").write_text(text)
    monkeypatch.setattr(group_producer, "MODULE", "another")
    monkeypatch.setenv("PYTHONPATH", str(folder))


UNTIL = "import pathlib, threading\nwhile not pathlib.Path({!r}).exists(): threading.Event().wait(0.01)\n"
"""Text of a child that ends once a file exists."""


def kernels_of(producer: GroupProducer) -> str:
    assert producer._recipe is not None
    return producer._recipe.kernels


async def test_a_run_begins_with_numpys_kernels_and_changes_within_an_epoch_to_those_of_a_child(
    compiled: list[bool], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    child(tmp_path, monkeypatch, UNTIL.format(str(tmp_path / "end")))
    dataset = dataset_of(cache=CacheLimits(1 << 30))
    async with producer_of(dataset, transforms=STEPS, kernels="auto") as (producer, failures):
        for number in (0, 5):
            assert kernels_of(producer) == "numpy"
            images, _ = await taken(producer, number)
            assert np.array_equal(images, expected(number, 1, STEPS))
        compiled.append(True)
        (tmp_path / "end").touch()
        await until(lambda: kernels_of(producer) == "numba")
        for number in (10, 19):
            images, _ = await taken(producer, number)
            assert np.array_equal(images, expected(number, 1, STEPS))
        assert not failures


async def test_a_run_that_begins_while_a_child_compiles_gets_its_kernels_too(
    compiled: list[bool], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    child(tmp_path, monkeypatch, UNTIL.format(str(tmp_path / "end")))
    dataset = dataset_of(cache=CacheLimits(1 << 30))
    async with producer_of(dataset, transforms=STEPS, kernels="auto") as (producer, _):
        first = producer._recipe
        assert first is not None
        program = TrainingProgram(config=Config(seed=3), spec={}, transforms=({"kind": "flip"},))
        await producer.take_up(program)
        compiled.append(True)
        (tmp_path / "end").touch()
        await until(lambda: kernels_of(producer) == "numba")
        assert first.kernels == "numpy"
        producer.begin_epoch(order_of(1), takers=1)
        images, _ = await taken(producer, 3)
        assert np.array_equal(images, expected(3, 1, program.transforms))


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("raise SystemExit('no room on the disk')", "exit code 1, no room on the disk"),
        ("", "the disk has lost"),
    ],
)
async def test_if_the_child_fails_a_run_keeps_numpys_kernels_with_one_line_in_the_log(
    text: str,
    why: str,
    compiled: list[bool],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    child(tmp_path, monkeypatch, text)
    dataset = dataset_of(cache=CacheLimits(1 << 30))
    async with producer_of(dataset, transforms=STEPS, kernels="auto") as (producer, failures):
        await until(lambda: "keep NumPy's kernels" in caplog.text)
        images, _ = await taken(producer, 7)
        assert np.array_equal(images, expected(7, 1, STEPS))
        assert not failures
    (line,) = caplog.messages
    assert f"compiling others failed: {why}" in line


async def test_the_end_of_the_role_ends_the_child(
    compiled: list[bool], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = tmp_path / "pid"
    child(
        tmp_path,
        monkeypatch,
        "import os, pathlib, threading\n"
        f"pathlib.Path({str(tmp_path / 'new')!r}).write_text(str(os.getpid()))\n"
        f"os.rename({str(tmp_path / 'new')!r}, {str(begun)!r})\n"
        "threading.Event().wait()",
    )
    async with producer_of(dataset_of(cache=CacheLimits(1 << 30)), transforms=STEPS, kernels="auto"):
        await until(begun.exists)
    with pytest.raises(ProcessLookupError):
        os.kill(int(begun.read_text()), 0)
