"""A synchronous interface for scripts and notebooks.

    with sync.LocalCluster(config) as cluster:
        cluster.train()

The cluster runs on a thread with its own event loop, so it works in a program with a running loop, such as a
notebook. The caller's thread only waits: a queue passes it each epoch and the outcome, so `on_epoch` runs in
the caller's thread and may plot, print or raise. The cluster's loop waits for the callback's answer, and
awaits the coroutine of an async `on_epoch`.

An interrupt (Ctrl-C) or an error of `on_epoch` cancels the training, waits until it has ended, and leaves the
block, whose end closes the cluster and ends the thread. A second interrupt during this time ends the wait;
the thread is a daemon, so it does not keep the program alive.
"""

import asyncio
import inspect
import queue
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import uvloop

from adam_async.checkpoint import files
from adam_async.checkpoint.manifest import Checkpoint
from adam_async.checkpoint.trained_model import Model, check_init
from adam_async.cluster import local
from adam_async.data_server.dataset import Dataset, check_dataset
from adam_async.errors import DeadlineExceeded, RunFailed, first_cause
from adam_async.model.layer import Layer
from adam_async.model.layers import BUILTIN_LAYERS
from adam_async.model.spec import ModelSpec
from adam_async.run.config import Config
from adam_async.run.result import EpochResult, RunResult
from adam_async.run.train_step import TrainStep
from adam_async.runtime.callbacks import ending_on_errors
from adam_async.runtime.disk import Disk
from adam_async.runtime.standard_streams import hold_descriptors
from adam_async.runtime.task_group import StackedTaskGroup

CLOSE_S = 30.0
"""Deadline of the end of the block, in which compute threads finish their groups, in seconds."""


@dataclass(frozen=True, slots=True, eq=False)
class _Outcome:
    """Outcome of a start or a training; both fields are None after a successful start or a cancellation."""

    result: RunResult | None = None
    error: BaseException | None = None


@dataclass(frozen=True, slots=True, eq=False)
class _Epoch:
    """A finished epoch, and the future on the cluster's loop for the callback's answer."""

    result: EpochResult
    answer: asyncio.Future[object]

    def settle(self, answer: object) -> None:
        """Pass on the answer, on the cluster's loop; a cancelled training needs no answer."""
        if not self.answer.done():
            self.answer.set_result(answer)
        elif inspect.iscoroutine(answer):
            answer.close()


_News = queue.SimpleQueue[_Epoch | _Outcome]


def load_checkpoint(folder: Path) -> Checkpoint:
    """Read the newest whole checkpoint of a folder, or one checkpoint in it, with its weights.

    Raises:
        CheckpointError: The folder has no whole checkpoint; the error names the damage of each checkpoint.
    """

    async def load() -> Checkpoint:
        async with Disk() as disk:
            return await files.load_checkpoint(folder, disk)

    # On its own thread, because the caller's thread may run a loop.
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="adam-load") as executor:
        return executor.submit(lambda: asyncio.run(load())).result()


class LocalCluster:
    """All roles of a run, on a thread of their own.

    Args:
        loop_factory: Makes the thread's event loop. All other arguments are those of `local.LocalCluster`.

    One thread at a time may call its methods, except `stop`, which any thread may call.
    """

    def __init__(
        self,
        config: Config,
        *,
        dataset: Dataset | None = None,
        spec: ModelSpec | None = None,
        layers: Mapping[str, type[Layer]] = BUILTIN_LAYERS,
        loop_factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop,
        checkpoint: str | Path | None = None,
        resume: str | Path | None = None,
        store: str | Path | None = None,
        init: Model | None = None,
        step: TrainStep | str | None = None,
        step_args: Mapping[str, Any] | None = None,
    ) -> None:
        check_dataset(dataset)
        check_init(init)
        self.config = config
        self._make = partial(
            local.LocalCluster,
            config,
            dataset=dataset,
            spec=spec,
            layers=layers,
            checkpoint=checkpoint,
            resume=resume,
            store=store,
            init=init,
            step=step,
            step_args=step_args,
        )
        self._loop_factory = loop_factory
        self._news = _News()
        self._thread = threading.Thread(target=self._run, name="adam-cluster", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._cluster: local.LocalCluster | None = None
        self._training: asyncio.Task[None] | None = None
        self._main: asyncio.Task[None] | None = None
        self._cancelled = False
        self._leaving = False
        self._why = "it was not entered"

    def __enter__(self) -> Self:
        """Start the thread and the roles.

        Raises:
            DataError: `config.data` cannot be loaded.
            CheckpointError: The folder has no checkpoint, or the checkpoint is from another run.
            ConfigError: The configuration has too many threads.
            DeadlineExceeded: The start took longer than `prepare_s`.
            RunFailed: The cluster was entered before.
        """
        if self._thread.ident is not None:
            raise RunFailed("a cluster can be entered once: make another LocalCluster")
        hold_descriptors()
        self._thread.start()
        try:
            outcome = self._wait_outcome("the cluster to start", self.config.waits.prepare_s)
        except BaseException as failure:
            self._close(failure)
            raise
        if outcome.error is not None:
            self._close(outcome.error)
            raise outcome.error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close(error)

    def train(self, on_epoch: Callable[[EpochResult], object] | None = None) -> RunResult:
        """Run all epochs of the configuration.

        Args:
            on_epoch: Called in this thread after each epoch; the next epoch begins after its answer
                (not with ``evaluation="concurrent"``). The answer False ends the run with that epoch. The
                cluster's loop awaits an async callback.

        Raises:
            RoleDied: A role that the run needs was lost.
            RunFailed: The run ended early for another reason, or the cluster is not running.
            DeadlineExceeded: The roles were not ready in time.
            KeyboardInterrupt: Ctrl-C ended the training.
        """
        received = self._news = _News()  # one queue per training, so it has no item of an earlier one
        try:
            if not self._call(self._begin):
                raise RunFailed(f"the cluster is not running: {self._why}")
            while isinstance(news := received.get(), _Epoch):
                answer = on_epoch(news.result) if on_epoch is not None else None
                self._call(partial(news.settle, answer))
        except BaseException as failure:  # an interrupt, or an error of on_epoch
            if self._call(self._cancel):
                try:
                    self._wait_outcome("training to end", CLOSE_S)
                except DeadlineExceeded as late:
                    failure.add_note(str(late))
            raise
        if news.error is not None:
            raise news.error
        assert news.result is not None
        return news.result

    def stop(self) -> None:
        """End the training in progress after the groups in flight, from any thread. See `Driver.stop`."""

        def stop() -> None:
            if self._cluster is not None:
                self._cluster.stop()

        self._call(stop)

    def _wait_outcome(self, what: str, timeout_s: float) -> _Outcome:
        while True:
            try:
                news = self._news.get(timeout=timeout_s)
            except queue.Empty:
                raise DeadlineExceeded(what, timeout_s) from None
            if isinstance(news, _Outcome):
                return news

    def _call(self, function: Callable[[], None]) -> bool:
        """Call a function on the cluster's loop. Returns False if the loop has not begun, or has ended."""
        if self._loop is None:
            return False
        try:
            self._loop.call_soon_threadsafe(function)
        except RuntimeError:  # closed
            return False
        return True

    def _close(self, failure: BaseException | None) -> None:
        """End the cluster. If its thread does not end in time, add a note to the failure, or raise."""
        self._leaving = True
        self._call(self._leave)
        self._thread.join(CLOSE_S)
        if self._thread.is_alive():
            late = DeadlineExceeded("the cluster's thread to end", CLOSE_S)
            if failure is None:
                raise late
            failure.add_note(str(late))

    # --- on the cluster's thread -------------------------------------------------------------

    def _run(self) -> None:
        """Run the cluster until `_leave`; the queue then gets the reason of the end."""
        error: BaseException = RunFailed("the cluster was closed")
        try:
            with asyncio.Runner(loop_factory=self._loop_factory) as runner:
                runner.run(self._live())
        except asyncio.CancelledError:  # by `_leave`
            pass
        except BaseException as failure:
            error = first_cause(failure)
        self._why = str(error)
        self._news.put(_Outcome(error=error))

    async def _live(self) -> None:
        self._main = asyncio.current_task()
        self._loop = asyncio.get_running_loop()
        with ending_on_errors():
            await self._serve()

    async def _serve(self) -> None:
        assert self._loop is not None
        if self._leaving:  # set before the loop existed
            return
        async with AsyncExitStack() as stack:
            self._cluster = await stack.enter_async_context(self._make())
            self._group = await stack.enter_async_context(StackedTaskGroup())
            self._news.put(_Outcome())
            await self._loop.create_future()  # until `_leave`

    def _leave(self) -> None:
        assert self._main is not None
        self._main.cancel()

    def _begin(self) -> None:
        self._cancelled = False
        training = self._train(self._news)
        try:
            self._training = self._group.create_task(training, name="adam-cluster/train")
        except RuntimeError:  # the group has ended with the cluster; `_run` reports the reason
            training.close()

    def _cancel(self) -> None:
        self._cancelled = True
        if self._training is None or not self._training.cancel():
            self._news.put(_Outcome())

    async def _train(self, news: _News) -> None:
        """Train and report the outcome.

        A failure of the cluster cancels this task. Its cause is known only after the end of the cluster, so
        `_run` reports it.
        """

        async def ask(result: EpochResult) -> object:
            epoch = _Epoch(result, asyncio.get_running_loop().create_future())
            news.put(epoch)
            answer = await epoch.answer
            return await answer if inspect.iscoroutine(answer) else answer

        assert self._cluster is not None
        try:
            outcome = _Outcome(result=await self._cluster.train(ask))
        except asyncio.CancelledError:
            task = asyncio.current_task()
            assert task is not None, "a task trains"
            if not self._cancelled and task.cancelling():
                raise
            outcome = _Outcome() if self._cancelled else _Outcome(error=RunFailed("on_epoch was cancelled"))
        except Exception as failure:
            outcome = _Outcome(error=first_cause(failure))
        news.put(outcome)

    def __repr__(self) -> str:
        return f"<sync.LocalCluster {self._thread.name} {'alive' if self._thread.is_alive() else self._why}>"
