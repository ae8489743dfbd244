"""A synchronous interface for scripts and notebooks.

    with sync.LocalCluster(config) as cluster:
        cluster.train()

The cluster runs on a thread with its own event loop, so it works in a program with a running loop, such as a
notebook. The caller's thread only waits: a queue passes it each epoch and the outcome. So `on_epoch` runs in
the caller's thread and may plot, print or raise. The cluster's loop waits for the callback's answer, and
awaits the coroutine of an async `on_epoch`.

An interrupt (Ctrl-C) or an error in `on_epoch` cancels the training, waits until it has ended, and leaves the
block, whose end closes the cluster and ends the thread. A second interrupt during this time ends the wait;
the thread is a daemon, so it does not keep the program alive.
"""

import asyncio
import inspect
import queue
from collections.abc import Callable, Mapping
from concurrent.futures import FIRST_COMPLETED, CancelledError, Future, ThreadPoolExecutor, wait
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Self, Unpack

import uvloop

from adam_async.checkpoint import files
from adam_async.checkpoint.checkpoint import Checkpoint
from adam_async.checkpoint.trained_model import check_init
from adam_async.cluster import local
from adam_async.cluster.setup import ClusterInputs
from adam_async.data_server.dataset import check_dataset
from adam_async.errors import DeadlineExceeded, RunFailed, first_cause
from adam_async.model.layer import Layer
from adam_async.model.layers import BUILTIN_LAYERS
from adam_async.run.config import Config
from adam_async.run.result import EpochResult, RunResult
from adam_async.runtime.callbacks import ending_on_errors
from adam_async.runtime.channel import StackedTaskGroup
from adam_async.runtime.disk import Disk
from adam_async.runtime.loop_thread import CLOSE_S, Call, LoopThread

_News = queue.SimpleQueue[tuple[EpochResult, "asyncio.Future[object]"] | None]
"""Finished epochs, each with the future on the cluster's loop for the callback's answer; None at the end."""


def _settle(waiting: "asyncio.Future[object]", answer: object) -> None:
    """Pass on the answer to an epoch, on the cluster's loop; a cancelled training needs no answer."""
    if not waiting.done():
        waiting.set_result(answer)
    elif inspect.iscoroutine(answer):
        answer.close()


def load_checkpoint(folder: Path) -> Checkpoint:
    """Read a folder's newest whole checkpoint, or one checkpoint in it, with its weights.

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
    """All roles of a run, on a separate thread.

    Args:
        loop_factory: Makes the thread's event loop. All other arguments are those of `local.LocalCluster`.

    One thread at a time may call its methods, except `stop`, which any thread may call.
    """

    def __init__(
        self,
        config: Config,
        *,
        layers: Mapping[str, type[Layer]] = BUILTIN_LAYERS,
        loop_factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop,
        **inputs: Unpack[ClusterInputs],
    ) -> None:
        check_dataset(inputs.get("dataset"))
        check_init(inputs.get("init"))
        self.config = config
        self._make = partial(local.LocalCluster, config, layers=layers, **inputs)
        self._loop_factory = loop_factory
        self._thread: LoopThread | None = None
        self._running: Call[None]
        """The cluster on the thread, while it runs."""
        self._started = Future[None]()
        self._cluster: local.LocalCluster | None = None
        self._group: asyncio.TaskGroup | None = None

    def __enter__(self) -> Self:
        """Start the thread and the roles.

        Raises:
            DataError: `config.data` cannot be loaded.
            CheckpointError: The folder has no checkpoint, or the checkpoint is from another run.
            ConfigError: The configuration has too many threads.
            DeadlineExceeded: The start took longer than `prepare_s`.
            RunFailed: The cluster was entered before.
        """
        if self._thread is not None:
            raise RunFailed("a cluster can be entered once: make another LocalCluster")
        thread = self._thread = LoopThread("adam-cluster", self._loop_factory)
        self._running = thread.begin(self._run(), RunFailed("the cluster was closed"))
        start_s = self.config.waits.prepare_s
        try:
            if not wait([self._started, self._running], start_s, FIRST_COMPLETED).done:
                raise DeadlineExceeded("the cluster to start", start_s)
            if not self._started.done():
                raise self._reason()
        except BaseException as failure:
            self._close(failure)
            raise
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
        if self._thread is None or self._running.done():
            raise RunFailed(f"the cluster is not running: {self._reason()}")
        news = _News()
        call = self._thread.begin(self._train(news), CancelledError(), self._group)
        for each in (call, self._running):
            each.add_done_callback(lambda _: news.put(None))
        try:
            while (epoch := news.get()) is not None:
                result, waiting = epoch
                answer = on_epoch(result) if on_epoch is not None else None
                self._thread.call(_settle, waiting, answer)
        except BaseException as failure:  # an interrupt, or an error of on_epoch
            if not call.stop():
                failure.add_note(str(DeadlineExceeded("training to end", CLOSE_S)))
            raise
        error = call.exception() if call.done() else CancelledError()
        if isinstance(error, CancelledError):  # the cluster has ended
            error = self._reason()
        if error is not None:
            raise first_cause(error)
        return call.result()

    def stop(self) -> None:
        """End the training in progress after the groups in flight, from any thread. See `Driver.stop`."""

        def stop() -> None:
            if self._cluster is not None:
                self._cluster.stop()

        if self._thread is not None:
            self._thread.call(stop)

    def _reason(self) -> BaseException:
        """Return the reason why the cluster does not run, once it has ended."""
        if self._thread is None:
            return RunFailed("it was not entered")
        error = self._running.exception()
        if error is None or isinstance(error, CancelledError):
            return RunFailed("the cluster was closed")
        return first_cause(error)

    def _close(self, failure: BaseException | None) -> None:
        """End the cluster. If the thread does not end in time, add a note to the failure, or
        raise."""
        assert self._thread is not None
        self._running.cancel()
        try:
            self._thread.end()
        except DeadlineExceeded as late:
            if failure is None:
                raise
            failure.add_note(str(late))

    # --- on the cluster's thread -------------------------------------------------------------

    async def _run(self) -> None:
        with ending_on_errors():
            async with self._make() as self._cluster, StackedTaskGroup() as self._group:
                self._started.set_result(None)
                await asyncio.get_running_loop().create_future()  # until `_close`

    async def _train(self, news: _News) -> RunResult:
        async def ask(result: EpochResult) -> object:
            waiting: asyncio.Future[object] = asyncio.get_running_loop().create_future()
            news.put((result, waiting))
            answer = await waiting
            return await answer if inspect.iscoroutine(answer) else answer

        assert self._cluster is not None
        try:
            return await self._cluster.train(ask)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            assert task is not None, "a task trains"
            if task.cancelling():
                raise
            raise RunFailed("on_epoch was cancelled") from None

    def __repr__(self) -> str:
        is_alive = self._thread is not None and not self._running.done()
        return f"<sync.LocalCluster {'alive' if is_alive else self._reason()}>"
