"""Groups of the epoch in progress, made ready on a thread of their own where that takes work.

A data server asks for what it will need (`prepare`), says what it needs now (`when_ready`), and takes it.
Images are gathered on the event loop where gathering is all there is to do; where they are transformed, a
thread does both.
"""

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from adam_async.cluster_map import RunRecord
from adam_async.config import Config
from adam_async.data_server.dataset import Dataset
from adam_async.data_server.order import EpochOrder
from adam_async.data_server.stock import Pictures, Stock
from adam_async.data_server.transforms.recipe import Recipe
from adam_async.dice import Dice
from dataflow import ComputePool, Job


@dataclass(frozen=True, slots=True, eq=False)
class _Wanted:
    """Groups that somebody waits for."""

    stock: Stock
    numbers: Sequence[int]
    then: Callable[[], None]


class Supply:
    """What one data server hands out.

    Args:
        dataset: Where the images are.
        name: Of its thread.
        functions: Kinds of transforms that are functions of the user; see `Recipe.of`.
        on_failure: Told what making images raised; it happens again for the same images.

    Run `run` as a task of the owner's group.
    """

    def __init__(
        self,
        dataset: Dataset,
        *,
        name: str,
        on_failure: Callable[[BaseException], None],
        functions: Mapping[str, Callable[..., Any]] = {},
    ) -> None:
        self._dataset = dataset
        self._name = name
        self._on_failure = on_failure
        self._functions = functions
        self._stock: Stock | None = None
        self._recipe: Recipe | None = None
        self._dice = Dice(0)
        self._pool: ComputePool | None = None
        self._has_thread = asyncio.Event()
        self._wanted: list[_Wanted] = []
        self._late = 0

    async def run(self) -> None:
        """Keep the thread until cancelled."""
        async with ComputePool(threads=1, name=self._name) as pool:
            self._pool = pool
            self._has_thread.set()
            await asyncio.get_running_loop().create_future()

    async def take_up(self, run: RunRecord, config: Config) -> None:
        """Make ready for a run: compiling what its transforms need may take seconds."""
        recipe = None
        if run.transforms:
            await self._has_thread.wait()
            assert self._pool is not None
            make = partial(
                Recipe.of,
                run.transforms,
                self._dataset.image_shape,
                kernels=config.kernels,
                functions=self._functions,
            )
            recipe = await self._pool.run(make, cost="compile")
        self._recipe, self._dice = recipe, Dice(config.seed)
        self._stock = None
        self._wanted.clear()

    def begin_epoch(self, order: EpochOrder, *, takers: int) -> None:
        """Hand out the groups of this epoch from now on, each to so many workers."""
        transform = None
        if self._recipe is not None:
            transform = partial(self._recipe.apply, dice=self._dice, epoch=order.epoch)
        self._stock = Stock(self._dataset, order, takers=takers, transform=transform)

    # --- groups ------------------------------------------------------------------------------

    def prepare(self, numbers: Iterable[int]) -> None:
        """Make these groups ready, unless they are; those behind the epoch's end are left out."""
        if self._stock is not None:
            self._prepare(self._stock, numbers)

    def when_ready(self, numbers: Sequence[int], then: Callable[[], None]) -> None:
        """Call `then` when these groups can be taken: at once or later; never if the epoch is over first."""
        stock = self._stock
        assert stock is not None, "there is no epoch"
        self._prepare(stock, numbers)
        if self._recipe is None or stock.has(numbers):
            then()
        else:
            self._late += 1
            self._wanted.append(_Wanted(stock, numbers, then))

    def take(self, numbers: Sequence[int]) -> Pictures:
        """Take groups that are ready. See `Stock.take`."""
        assert self._stock is not None, "there is no epoch"
        return self._stock.take(numbers)

    def count(self, number: int) -> int:
        """Images of a group; 0 while there is no epoch."""
        return self._stock.count(number) if self._stock is not None else 0

    # --- the thread --------------------------------------------------------------------------

    def _prepare(self, stock: Stock, numbers: Iterable[int]) -> None:
        for block in stock.prepare(numbers):
            self._make(stock, block)

    def _make(self, stock: Stock, block: int) -> None:
        """Have a block made on the thread, when that takes more work."""
        if stock is not self._stock:
            return  # its epoch is over
        assert self._pool is not None, "the thread is there before any run"
        made = partial(self._made, stock, block)
        if not self._pool.submit(stock.make, block, on_done=made, cost="transform"):
            self._pool.call_when_room(partial(self._make, stock, block))

    def _made(self, stock: Stock, block: int, job: Job) -> None:
        if job.error is not None:
            self._on_failure(job.error)
            return
        stock.put(block, job.result)
        ready = [wanted for wanted in self._wanted if wanted.stock.has(wanted.numbers)]
        self._wanted = [w for w in self._wanted if w not in ready and w.stock is self._stock]
        for wanted in ready:
            if wanted.stock is self._stock:
                wanted.then()

    def statistics(self) -> dict[str, Any] | None:
        """What transforming took; None without transforms. `late_answers`: answers that waited for it."""
        if self._recipe is None or self._pool is None:
            return None
        return {"late_answers": self._late, "pool": self._pool.statistics()}

    def __repr__(self) -> str:
        return f"<Supply of {self._stock!r}, {len(self._wanted)} questions wait>"
