"""Groups of the current epoch, made on a separate thread if they need computing.

A data server asks for groups ahead (`prepare`), waits for groups of a request (`when_ready`), and takes them.
The event loop gathers images that are in memory and need no transform; a thread reads, decodes and transforms
all others. Groups of waiting requests come before groups made ahead, which keep to the granted memory. The
memory of a run is checked before its first group (`check_run_memory`).
"""

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import takewhile
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from adam_async.data_server.dataset import Dataset, StoredImages, ValidationSplit, check_validation, sample_of
from adam_async.data_server.epoch import EpochOrder
from adam_async.data_server.image_cache import (
    SHARE_OF_BLOCKS,
    CachedImages,
    GroupCache,
    Images,
    MemoryInUse,
    Pieces,
)
from adam_async.data_server.transforms.pipeline import first_kernels
from adam_async.data_server.transforms.recipe import Recipe
from adam_async.errors import ConfigError
from adam_async.model.keyed_random import Dice
from adam_async.run.config import Config
from adam_async.run.counts import CacheCounts, TransformCounts
from adam_async.run.memory_sizes import CacheLimits, cache_limits
from adam_async.run.train_step import StepSpec
from adam_async.run.training_program import TrainingProgram
from adam_async.run.user_code import check_allowed
from adam_async.runtime.child_process import run_module
from adam_async.runtime.clock import fine_clock
from adam_async.runtime.machine import available_bytes
from dataflow import ComputePool, Job, MakePool
from transport import LinkConfig

SHARE_OF_AVAILABLE = 2
"""Divisor of the available memory that gives the maximum memory of a run beside its cache."""

GROUPS_AT_ONCE = 3
"""Number of copies of a group in memory at a time: gathered, transformed, and in an answer."""

LABEL_BYTES = 8
"""Size of a label, in bytes."""


def check_run_memory(
    config: Config, step: StepSpec | None, recipe: Recipe | None, dataset: Dataset, *, available_bytes: int
) -> None:
    """Check that the images of a run fit into the memory of a data server.

    Raises:
        ConfigError: The images do not fit, or a group of images is larger than a message.
    """
    count, image_bytes = len(dataset.train_labels), prod(dataset.image_shape)
    group = min(config.images_per_group, count)
    group_bytes, most_bytes = group * (image_bytes + LABEL_BYTES), LinkConfig().max_message_bytes
    # Workers that each train a part of the model get only some rows of the images.
    if config.partitions == 1 and group_bytes > most_bytes:
        raise ConfigError(
            f"a group of {group:,} images has {group_bytes:,} bytes, above the {most_bytes:,} of a message: "
            f"images_per_group may be {most_bytes // (image_bytes + LABEL_BYTES):,} at most"
        )
    sample = step.sample if step is not None else 0
    parts = {
        f"images_per_group={config.images_per_group}": GROUPS_AT_ONCE * group_bytes,
        f"validation={config.validation}": config.validation * image_bytes,
        f"the sample of {sample} images of its step": min(sample, count) * image_bytes,
        "its transforms": recipe.work_bytes if recipe is not None else 0,
    }
    room, needed = available_bytes // SHARE_OF_AVAILABLE, sum(parts.values())
    if needed > room:
        largest = max(parts, key=parts.__getitem__)
        raise ConfigError(
            f"the run needs {needed:,} bytes of memory on a data server, {parts[largest]:,} of them for "
            f"{largest}, and this one has {room:,} for a run: make that smaller"
        )


def check_cache(limits: CacheLimits, *, available_bytes: int) -> None:
    """Check the size of the cache that a run asks for on a data server.

    Args:
        available_bytes: Memory available to the server, plus the memory that its images use, in bytes.

    Raises:
        ConfigError: The cache is larger.
    """
    if limits.asked and limits.size_bytes > available_bytes:
        raise ConfigError(
            f"the run asks for a cache of {limits.size_bytes:,} bytes, and this data server has "
            f"{available_bytes:,}: give --cache auto or a smaller size, or start the data server with its own"
        )


logger = logging.getLogger(__name__)

AT_ONCE = 2
"""Maximum number of blocks that the thread has at once: enough to keep it busy, but few, because an urgent
block waits for all of them."""

COMPILE_S = 600.0
"""Deadline of the child process that compiles the kernels of transforms, in seconds."""

MODULE = "adam_async.data_server.transforms.compiling"
"""Module of that process."""

SHARE_OF_ANSWER = 64
"""Divisor of the cache size that gives an answer's maximum size: several unread answers must fit."""


_NO_IMAGES, _NO_LABELS = np.empty((0, 1, 1, 1), np.uint8), np.empty(0, np.int64)


@dataclass(frozen=True, slots=True, eq=False)
class _Wanted:
    """Groups of a waiting question."""

    numbers: Sequence[int]
    then: Callable[[], None]
    is_open: Callable[[], bool]


class GroupProducer:
    """The groups that one data server sends.

    Args:
        functions: Kinds of transforms that are user functions; a run may name no other functions.
        on_failure: Receives an error from the thread; the same images raise it again.

    Run `run` as a task of the owner's group.
    """

    def __init__(
        self,
        dataset: Dataset,
        *,
        name: str,
        on_failure: Callable[[BaseException], None],
        functions: Mapping[str, Callable[..., Any]] = {},
        make_pool: MakePool = ComputePool,
        available_bytes: Callable[[], int] = available_bytes,
    ) -> None:
        self._dataset = dataset
        self._name = name
        self._on_failure = on_failure
        self._functions = functions
        self._make_pool = make_pool
        self._available_bytes = available_bytes
        self._limits: CacheLimits | None = None
        self._warned: CacheLimits | None = None
        self._cache: CachedImages | None = None
        self._memory = MemoryInUse()
        self._group_cache: GroupCache | None = None
        self.epoch = 0
        """Epoch of the groups; 0: none."""
        self._recipe: Recipe | None = None
        self._compiled: Callable[[], Recipe] | None = None
        """Makes the recipe with compiled kernels; None for a recipe that keeps its kernels."""
        self._has_slow_recipe = asyncio.Event()
        self._dice = Dice(0)
        self._trained: NDArray[np.int64] | None = None
        """Numbers of the images to train on; None: all."""
        self.validation: tuple[NDArray[np.uint8], NDArray[np.int64]] = (_NO_IMAGES, _NO_LABELS)
        """Images (n, C, H, W) and labels (n,) that the run holds back."""
        self.sample: tuple[NDArray[np.uint8], NDArray[np.int64]] = (_NO_IMAGES, _NO_LABELS)
        """Sample of the run's step (`StepSpec.sample`): training images without transforms, and labels."""
        self._pool: ComputePool | None = None
        self._has_thread = asyncio.Event()
        self._wanted: list[_Wanted] = []
        self._urgent: dict[int, None] = {}
        self._ahead: dict[int, None] = {}
        """Blocks to make, in this order: for waiting requests, and ahead of need."""
        self._given = 0
        """Number of blocks that the thread has and has not made yet."""
        self._late = self._evicted = 0

    async def run(self) -> None:
        """Run the thread until cancelled."""
        try:
            async with self._make_pool(threads=1, name=self._name) as pool:
                self._pool = pool
                self._has_thread.set()
                try:
                    await self._change_kernels(pool)
                finally:
                    self._forget_epoch()
        finally:
            if self._cache is not None:
                self._cache.close()

    async def take_up(self, program: TrainingProgram) -> None:
        """Prepare a run. A refused run changes nothing.

        Raises:
            ConfigError: The run's record asks for a function that this server does not allow, or for sizes
                that do not fit into memory; or it has an invalid transform, step or number of images.
            DataError: Images cannot be read.
        """
        config = program.config
        recipe, compiled = await self._make_recipe(program)
        limits = self._limits_of(config)
        step = self._step_of(program)
        check_validation(config.validation, self._dataset.info())
        check_run_memory(config, step, recipe, self._dataset, available_bytes=self._available_bytes())
        self._forget_epoch()
        self._recipe, self._compiled, self._dice = recipe, compiled, Dice(config.seed)
        if compiled is not None:
            self._has_slow_recipe.set()
        await self._hold_back(config)
        await self._read_sample(step, config)
        assert self._pool is not None
        if limits != self._limits:
            if self._cache is not None:
                await self._pool.run(self._cache.close, cost="close")
            self._limits, self._cache = limits, self._make_cache(limits)
        # Events of the run before may have begun an epoch during the waits above.
        self._forget_epoch()

    async def _make_recipe(
        self, program: TrainingProgram
    ) -> tuple[Recipe | None, Callable[[], Recipe] | None]:
        """Make a run's recipe; None without transforms.

        Returns:
            Also returns a function that makes the recipe with compiled kernels; None if its kernels are
                final.
        """
        check_allowed(program.transforms, self._functions)
        await self._has_thread.wait()
        if not program.transforms:
            return None, None
        assert self._pool is not None
        make = partial(Recipe.of, program.transforms, self._dataset.image_shape, functions=self._functions)
        kernels, stands_in = await self._pool.run(
            partial(first_kernels, program.config.kernels), cost="compile"
        )
        recipe = await self._pool.run(partial(make, kernels=kernels), cost="compile")
        recipe.check_shape_kept()
        return recipe, partial(make, kernels="numba") if stands_in else None

    async def _change_kernels(self, pool: ComputePool) -> None:
        """Compile recipes' kernels in a child process and switch the recipes to them; runs forever."""
        while True:
            await self._has_slow_recipe.wait()
            self._has_slow_recipe.clear()
            if self._compiled is None:  # the last child compiled for this run, too
                continue
            try:
                await run_module((MODULE,), within_s=COMPILE_S)
                if (await pool.run(partial(first_kernels, "auto"), cost="compile"))[1]:
                    raise RuntimeError("the disk has lost them")
                if (compiled := self._compiled) is not None:
                    made = await pool.run(compiled, cost="compile")
                    if compiled is self._compiled and self._recipe is not None:  # no other run has begun
                        self._recipe.change_kernels(made)
                        self._compiled = None
            except (OSError, RuntimeError) as error:
                logger.warning("transforms keep NumPy's kernels, because compiling others failed: %s", error)

    def _limits_of(self, config: Config) -> CacheLimits:
        """Return the limits of the cache: the server's own, else those of the run."""
        if self._dataset.cache is not None:
            return self._dataset.cache
        available = self._available_bytes()
        limits = cache_limits(config.cache, config.spill, available_bytes=available)
        if limits != self._limits:
            held = self._held_bytes if self._cache is None else self._cache.reserved_bytes
            check_cache(limits, available_bytes=available + held)
        return limits

    def _step_of(self, program: TrainingProgram) -> StepSpec | None:
        """Return the record of the run's step; None if the run has no step."""
        step, data = StepSpec.from_dict(program.spec), self._dataset
        # The bound of the sample is for images of the step's shape.
        if step is not None and step.sample and step.shape != data.image_shape:
            raise ConfigError(
                f"the record of step {step.name[:80]!r} is for images of {list(step.shape)}, and this data "
                f"server has images of {list(data.image_shape)}: submit the run again"
            )
        return step

    async def _hold_back(self, config: Config) -> None:
        """Read the images that a run holds back from training; like test images, they stay in memory."""
        self._trained, self.validation = None, (_NO_IMAGES, _NO_LABELS)
        if not config.validation:
            return
        data = self._dataset
        split = ValidationSplit.of(data.train_labels, count=config.validation, seed=config.seed)
        assert self._pool is not None

        def read() -> NDArray[np.uint8]:
            return data.train_images[split.held_back]

        self.validation = (await self._pool.run(read, cost="validation"), data.train_labels[split.held_back])
        self._trained = split.trained

    async def _read_sample(self, step: StepSpec | None, config: Config) -> None:
        """Read the sample of the run's step, which stays in memory."""
        self.sample = (_NO_IMAGES, _NO_LABELS)
        if step is None or not step.sample:
            return
        data = self._dataset
        trained = np.arange(len(data.train_labels)) if self._trained is None else self._trained
        chosen = sample_of(trained, step.sample, seed=config.seed)
        assert self._pool is not None

        def read() -> NDArray[np.uint8]:
            return data.train_images[chosen]

        self.sample = (await self._pool.run(read, cost="sample"), data.train_labels[chosen])

    def _make_cache(self, limits: CacheLimits) -> CachedImages | None:
        """Make the cache for images that are not in memory; None if all are."""
        stored = self._dataset.train_images
        if not isinstance(stored, StoredImages):
            return None
        size = limits.size_bytes - limits.size_bytes // SHARE_OF_BLOCKS
        return CachedImages(stored, size_bytes=size, spill=limits.spill, clock=fine_clock)

    def begin_epoch(self, order: EpochOrder, *, takers: int) -> None:
        """Begin the groups of an epoch, each for this many workers.

        The order numbers the images to train on; held-back images have no number in it.
        """
        self._forget_epoch()
        self.epoch = order.epoch
        if self._trained is not None:
            order = replace(order, indices=self._trained[order.indices])
        transform = None
        if self._recipe is not None:
            transform = partial(self._recipe.apply, dice=self._dice, epoch=order.epoch)
        images: Images = self._dataset.train_images if self._cache is None else self._cache
        self._group_cache = GroupCache(
            self._dataset,
            order,
            takers=takers,
            transform=transform,
            images=images,
            instant=transform is None and (self._cache is None or self._cache.complete),
            memory=self._memory,
            limit_bytes=self._limit_bytes(),
        )
        self._warn_of_small_cache(self._group_cache.block_bytes)

    def _warn_of_small_cache(self, block_bytes: int) -> None:
        """Log a warning about a cache without room for one block, once for each cache."""
        limits, room = self._limits, self._limit_bytes()
        if limits is None or room is None or room >= block_bytes:
            return
        if not limits.asked or limits == self._warned:
            return
        self._warned = limits
        again = "" if self._cache is None else ", and most images are read and decoded again in each epoch"
        logger.warning(
            "a cache of %d bytes leaves %d for groups that are made ahead, less than the %d of one block: "
            "workers wait for each group%s; a larger --cache is faster",
            limits.size_bytes,
            room,
            block_bytes,
            again,
        )

    def _limit_bytes(self) -> int | None:
        """Return the memory for blocks and answers, in bytes: the memory that images and transforms leave,
        but at least a fixed share. None before the first run."""
        if self._limits is None:
            return None
        size = self._limits.size_bytes
        held = self._held_bytes if self._cache is None else self._cache.reserved_bytes
        work = self._recipe.work_bytes if self._recipe is not None else 0
        return max(size - held - work, size // SHARE_OF_BLOCKS)

    @property
    def _held_bytes(self) -> int:
        """Size of the data set's images in memory, in bytes; mapped files do not count."""
        images = self._dataset.train_images
        mapped = isinstance(images, np.memmap) or isinstance(getattr(images, "base", None), np.memmap)
        return 0 if mapped or isinstance(images, StoredImages) else images.nbytes

    @property
    def answer_bytes(self) -> int:
        """Maximum size of the images in an answer, in bytes, once a run has begun."""
        assert self._limits is not None, "there is no run"
        return max(self._limits.size_bytes // SHARE_OF_ANSWER, 1)

    def _forget_epoch(self) -> None:
        if self._group_cache is not None:
            self._evicted += self._group_cache.evicted
        self._group_cache, self.epoch = None, 0
        self._wanted.clear()
        self._urgent.clear()
        self._ahead.clear()

    # --- groups ------------------------------------------------------------------------------

    def prepare(self, numbers: Iterable[int]) -> None:
        """Make groups ahead of need, except groups beyond the epoch's end."""
        if self._group_cache is not None:
            self._ahead.update(dict.fromkeys(self._group_cache.prepare(numbers)))
            self._feed()

    def when_ready(
        self, numbers: Sequence[int], then: Callable[[], None], *, is_open: Callable[[], bool] = lambda: True
    ) -> None:
        """Call `then` once these groups can be taken, perhaps at once; never if the epoch ends first.

        `then` must take the groups before it returns, because they may be dropped later.

        Args:
            is_open: Whether the question still has an answer; see `drop_closed`.
        """
        group_cache = self._group_cache
        assert group_cache is not None, "there is no epoch"
        if group_cache.instant or group_cache.has(numbers):
            then()
        else:
            self._late += 1
            self._wanted.append(_Wanted(numbers, then, is_open))
            self._want(group_cache, numbers)

    def drop_closed(self) -> None:
        """Drop the waiting questions whose answer is closed, and the blocks that only they need."""
        group_cache = self._group_cache
        if group_cache is None or all(wanted.is_open() for wanted in self._wanted):
            return
        self._wanted = [wanted for wanted in self._wanted if wanted.is_open()]
        needed = {block for wanted in self._wanted for block in group_cache.blocks(wanted.numbers)}
        for block in self._urgent.keys() - needed:
            del self._urgent[block]
            group_cache.forget(block)

    @property
    def instant(self) -> bool:
        """Whether all groups of the epoch can be taken at once."""
        return self._group_cache is not None and self._group_cache.instant

    def ready(self, numbers: Sequence[int]) -> Sequence[int]:
        """Return the first ones of these groups, up to the first one that is not ready."""
        group_cache = self._group_cache
        assert group_cache is not None, "there is no epoch"
        if group_cache.instant:
            return numbers
        return tuple(takewhile(lambda number: group_cache.has((number,)), numbers))

    def take(self, numbers: Sequence[int]) -> Pieces:
        """Take groups that are ready. See `GroupCache.take`."""
        assert self._group_cache is not None, "there is no epoch"
        return self._group_cache.take(numbers)

    def watch(self, copies: Iterable[NDArray[np.uint8]]) -> None:
        """Count copies of parts of taken groups until they are freed."""
        for copy in copies:
            if copy.base is None:  # the array's count includes its slices
                self._memory.watch(copy)

    # --- the thread --------------------------------------------------------------------------

    def _want(self, group_cache: GroupCache, numbers: Sequence[int]) -> None:
        """Make these groups before all groups made ahead."""
        early = [block for block in group_cache.blocks(numbers) if block in self._ahead]
        for block in early:
            del self._ahead[block]
        self._urgent.update(dict.fromkeys([*early, *group_cache.want(numbers)]))
        self._feed()

    def _feed(self) -> None:
        """Give the thread its next blocks."""
        group_cache = self._group_cache
        if group_cache is None:
            return
        assert self._pool is not None, "the thread is there before any run"
        while self._given < AT_ONCE and (self._urgent or self._ahead):
            if not self._urgent and not group_cache.has_room(self._given):
                for block in self._ahead:  # the groups are named again with the next question of their worker
                    group_cache.forget(block)
                self._ahead.clear()
                return
            queue = self._urgent or self._ahead
            block = next(iter(queue))
            del queue[block]
            made = partial(self._made, group_cache, block)
            taken = self._pool.submit(group_cache.make, block, on_done=made, cost="images")
            assert taken, "the thread has room for these few"
            self._given += 1

    def _made(self, group_cache: GroupCache, block: int, job: Job) -> None:
        self._given -= 1
        if group_cache is self._group_cache:
            if job.error is not None:
                self._on_failure(job.error)
                return
            group_cache.put(block, job.result)
            self._call_ready(group_cache)
        self._feed()

    def _call_ready(self, group_cache: GroupCache) -> None:
        """Call `then` of each request whose groups are ready. A request waits again if an earlier request has
        taken its block."""
        waiting, self._wanted = self._wanted, []
        for wanted in waiting:
            if group_cache is not self._group_cache:
                return  # a callback has ended the epoch
            if group_cache.has(wanted.numbers):
                wanted.then()
            else:
                self._wanted.append(wanted)
        for wanted in self._wanted:
            self._want(group_cache, wanted.numbers)
        group_cache.evict({block for wanted in self._wanted for block in group_cache.blocks(wanted.numbers)})

    def statistics(self) -> TransformCounts | None:
        """Return the statistics of the transforming thread; None without transforms."""
        if self._recipe is None or self._pool is None:
            return None
        return TransformCounts(late_answers=self._late, pool=self._pool.statistics())

    def cache_statistics(self) -> CacheCounts | None:
        """Return the memory statistics of images and groups; None before the first run."""
        if self._limits is None:
            return None
        if self._cache is not None:
            counts = self._cache.statistics()
        else:
            size = self._held_bytes
            count = len(self._dataset.train_labels) if size else 0
            counts = CacheCounts(resident_images=count, resident_bytes=size)
        evicted = self._group_cache.evicted if self._group_cache is not None else 0
        counts.budget_bytes = self._limits.size_bytes
        counts.block_bytes = self._memory.bytes
        counts.evicted_blocks = self._evicted + evicted
        return counts
