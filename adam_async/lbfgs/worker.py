"""A worker: it computes the gradients of pieces, keeps them until its turn, and pushes them.

A worker pulls the parameters once in an evaluation, with its first piece ("Large Scale Distributed Deep
Networks", 4.2). Two tasks ask the coordinator in parallel, so a worker pushes while it computes the next
piece.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from math import isfinite, nan
from typing import Any

import numpy as np
from numpy.typing import NDArray

from adam_async.errors import StoreError
from adam_async.lbfgs.minimiser import GRADIENT, stored_name
from adam_async.messages import AskPieces, Pieces
from adam_async.store.store import ParameterStore
from dataflow import ComputePool

Arrays = Mapping[str, NDArray[Any]]

LossAndGradient = Callable[[Arrays, Any], tuple[float, Arrays]]
"""Function of all arrays' values and a batch; returns the batch's part of the objective and its gradient."""

Ask = Callable[[AskPieces], Awaitable[Pieces]]
"""Function that asks the coordinator."""


class GradientWorker:
    """Computes the gradients of pieces on a pool's threads, and pushes them.

    A piece is some batches. The pieces' gradients are summed here in order, and sent once.
    """

    def __init__(
        self,
        store: ParameterStore,
        function: LossAndGradient,
        batches: Sequence[Any],
        ask: Ask,
        pool: ComputePool,
    ) -> None:
        self._store = store
        self._function = function
        self._batches = batches
        self._ask = ask
        self._pool = pool
        self._kept: dict[tuple[int, int], tuple[int, Arrays]] = {}
        """By evaluation and first batch: gradients that wait for their turn, and one past their last
        batch."""
        self._values: Arrays = {}

    async def run(self) -> None:
        """Work until cancelled. For errors see `ParameterStore.push` and the function of the user."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._compute(), name=f"lbfgs-{self._store.name}/compute")
            group.create_task(self._push(), name=f"lbfgs-{self._store.name}/push")

    async def _compute(self) -> None:
        store, evaluation = self._store.link.store.id, 0
        asked = AskPieces(store=store, pushes=False)
        while True:
            pieces = await self._ask(asked)
            first, stop = pieces.first, pieces.stop
            if not first < stop <= len(self._batches):
                raise StoreError(
                    f"the coordinator has {stop} batches or more, and this worker has {len(self._batches)}: "
                    "give all workers the same batches"
                )
            if pieces.evaluation != evaluation:
                evaluation, self._values = pieces.evaluation, await self._store.pull()
                self._kept.clear()
            loss, gradient = await self._pool.run(
                self._sum, self._values, range(first, stop), cost="gradient"
            )
            self._kept[evaluation, first] = stop, gradient
            asked = AskPieces(store=store, pushes=False, evaluation=evaluation, batch=first, loss=loss)

    def _sum(self, values: Arrays, batches: range) -> tuple[float, Arrays]:
        """On a pool thread, return the sums of batches' losses and gradients."""
        loss, given = self._evaluate(values, batches[0])
        # Copied, because the function may use its arrays again for the next batch.
        gradient = {name: each.copy() for name, each in given.items()}
        for batch in batches[1:]:
            more, given = self._evaluate(values, batch)
            loss += more
            with np.errstate(over="ignore", invalid="ignore"):
                for name, each in gradient.items():
                    each += given[name]
        if isfinite(loss) and all(np.isfinite(each).all() for each in gradient.values()):
            return loss, gradient
        # A point that is too far; servers count the piece, but take no such gradient.
        return nan, {name: np.zeros_like(each) for name, each in gradient.items()}

    def _evaluate(self, values: Arrays, batch: int) -> tuple[float, Arrays]:
        """Return the loss and the gradient of a batch."""
        answer = self._function(values, self._batches[batch])
        if not isinstance(answer, tuple) or len(answer) != 2:
            raise StoreError(f"loss_and_gradient returns (loss, gradients by name), not {answer!r:.80}")
        loss, given = answer
        shapes = {name: np.shape(each) for name, each in given.items()}
        wanted = {name: spec.shape for name, spec in self._store.arrays.items()}
        if shapes != wanted:  # another shape could be added, too, but the function would not mean this
            raise StoreError(
                f"loss_and_gradient returned gradients of shapes {shapes}, and the arrays of the store have "
                f"{wanted}: return one for each array"
            )
        dtypes = {name: spec.dtype for name, spec in self._store.arrays.items()}
        return float(loss), {name: np.asarray(given[name], dtype) for name, dtype in dtypes.items()}

    async def _push(self) -> None:
        store, kept = self._store.link.store.id, self._kept
        asked = AskPieces(store=store, pushes=True)
        while True:
            pieces = await self._ask(asked)
            evaluation = pieces.evaluation
            first = pieces.first
            # Without the next gradient another worker had this turn, too, and the evaluation is over.
            while first < pieces.stop and (found := kept.pop((evaluation, first), None)) is not None:
                stop, gradient = found
                named = (evaluation, first, stop)
                await self._store.push(gradient, vector=stored_name(GRADIENT), groups=named)
                first = stop
            asked = AskPieces(store=store, pushes=True, evaluation=evaluation, batch=pieces.stop)
            for key in [key for key in kept if key < (evaluation, pieces.stop)]:
                del kept[key]  # another worker's gradient of the same piece counted
