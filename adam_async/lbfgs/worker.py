"""A worker: it computes the gradients of pieces, keeps them until its turn, and pushes them.

A worker pulls the parameters once in an evaluation, with its first piece ("Large Scale Distributed Deep
Networks", 4.2). Two tasks ask the coordinator beside each other, so a worker pushes while it computes the
next piece.
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
"""Function of the values of all arrays and a batch; returns the batch's part of the objective and its
gradient."""

Ask = Callable[[AskPieces], Awaitable[Pieces]]
"""Function that asks the coordinator."""


class GradientWorker:
    """Computes the gradients of batches on the threads of a pool, and pushes them; piece i is the batch i."""

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
        self._kept: dict[tuple[int, int], Arrays] = {}
        """Gradients that wait for their turn, by evaluation and piece."""
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
            piece = pieces.first
            if piece >= len(self._batches):
                raise StoreError(
                    f"the coordinator has more than {piece} batches, and this worker has "
                    f"{len(self._batches)}: give all workers the same batches"
                )
            if pieces.evaluation != evaluation:
                evaluation, self._values = pieces.evaluation, await self._store.pull()
                self._kept.clear()
            loss, gradient = await self._pool.run(self._evaluate, self._values, piece, cost="gradient")
            self._kept[evaluation, piece] = gradient
            asked = AskPieces(store=store, pushes=False, evaluation=evaluation, piece=piece, loss=loss)

    def _evaluate(self, values: Arrays, piece: int) -> tuple[float, Arrays]:
        """Return the loss and the gradient of a piece, on a thread of the pool."""
        answer = self._function(values, self._batches[piece])
        if not isinstance(answer, tuple) or len(answer) != 2:
            raise StoreError(f"loss_and_gradient returns (loss, gradients by name), not {answer!r:.80}")
        loss, given = answer
        arrays = self._store.arrays
        if given.keys() != arrays.keys():
            raise StoreError(
                f"loss_and_gradient returned gradients of {sorted(given)}, and the store has arrays "
                f"{sorted(arrays)}: return one of each"
            )
        # Copied, because the function may use its arrays again for the next piece.
        gradient = {name: np.array(given[name], spec.dtype) for name, spec in arrays.items()}
        is_finite = isfinite(loss) and all(np.isfinite(each).all() for each in gradient.values())
        if not is_finite:  # a point that is too far; servers count the piece, and take no such gradient
            return nan, {name: np.zeros_like(each) for name, each in gradient.items()}
        return float(loss), gradient

    async def _push(self) -> None:
        store, kept = self._store.link.store.id, self._kept
        asked = AskPieces(store=store, pushes=True)
        while True:
            pieces = await self._ask(asked)
            evaluation = pieces.evaluation
            for piece in range(pieces.first, pieces.stop):
                named = (evaluation, piece, piece + 1)
                gradient = kept.pop((evaluation, piece), None)
                if gradient is None:
                    break  # another worker had this turn, too, and the evaluation is over
                await self._store.push(gradient, vector=stored_name(GRADIENT), groups=named)
            asked = AskPieces(store=store, pushes=True, evaluation=evaluation, piece=pieces.stop)
            for key in [key for key in kept if key < (evaluation, pieces.stop)]:
                del kept[key]  # another worker's gradient of the same piece counted
