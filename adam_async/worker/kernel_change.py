"""The change from NumPy's kernels to compiled kernels during a run.

Compiling takes longer than many training runs. With kernels ``auto`` a worker therefore begins with NumPy's
kernels if the compiled ones are not ready. Recorded runs, bsp runs and runs with a cut model wait for the
compiled ones. A child process compiles, because a compilation in this process would hold the interpreter's
lock; the child leaves the kernels on the disk. If the disk cannot keep them, a compute thread compiles. Then
the network loads the kernels; a group in training keeps the kernels with which it began.
"""

import asyncio
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Event

from adam_async.model.context import Engine
from adam_async.model.network import Network
from adam_async.run.counts import KernelCounts
from adam_async.runtime.child_process import run_module
from dataflow import ComputePool

logger = logging.getLogger(__name__)

COMPILE_S = 600.0
"""Deadline of the child process in seconds; afterwards training continues with NumPy's kernels."""

NOTICE_S = 5.0
"""Seconds of a compilation after which the log has a line about it."""

SLOW = "training uses NumPy's slower kernels until others are compiled; the disk keeps these for the next run"

MODULE = "adam_async.model.fast.compiling"


class KernelChange:
    """The kernels that train a run on one worker, and how they change.

    Args:
        network: The whole model.
        waits: Whether the first group waits for compiled kernels, because results must not depend on the
            compile time, or the model is cut.
        cores: Number of cores that this process may use.
    """

    def __init__(self, network: Network, *, waits: bool, cores: int) -> None:
        self._cores = cores
        self._network = network
        self._engine = network.engine
        """Engine of the kernels that are compiled during training; None if none are."""
        if not waits:
            network.use_ready()
        self._only_reads = not waits and network.engine is not None and network.engine.is_ready
        """Whether the first group's kernels are read from the disk, and not compiled if that fails."""
        if network.kernels != "numpy":
            self._engine = None
        self._compiled = (0, 0)
        self._changed_at: int | None = None
        """Number of groups trained before the change; None before the change."""

    async def prepare(self, pool: ComputePool) -> None:
        """Compile the kernels of the first group, or read them from the disk."""
        engine = self._network.engine
        if engine is not None and not engine.is_ready:
            logger.warning(
                "training waits until its kernels are compiled; the disk keeps them for the next run"
            )
        if self._only_reads and not await pool.run(self._read, paced=False):
            self._network.use_ready()
            self._engine = engine if self._network.kernels == "numpy" else None
        await pool.run(self._network.warm_up, self._on_compiled, paced=False)

    def _read(self) -> bool:
        """Read the kernels from the disk. Returns whether the disk has all kernels."""
        from adam_async.model.fast.memory import NotOnDiskError, only_read  # an engine has imported numba

        try:
            with only_read():
                self._network.warm_up(self._on_compiled)
        except NotOnDiskError:
            return False
        return True

    async def run(self, pool: ComputePool, groups: Callable[[], int]) -> None:
        """Compile kernels in a child process during training, and change to them.

        If the kernels cannot be kept on the disk, a compute thread compiles them instead. Cancelling kills
        the child; its compiled kernels stay on the disk.

        Args:
            pool: Reads the kernels from the disk.
            groups: Returns the number of trained groups.
        """
        engine = self._engine
        if engine is None:
            return
        try:
            if engine.are_kept:
                with self._core_for_the_child(pool):
                    await self._compile(engine)
            # Without a child, this compiles.
            await pool.run(engine.warm_up, self._on_compiled, paced=False)
        except (OSError, RuntimeError) as error:
            logger.warning(
                "training goes on with NumPy's kernels, because compiling others failed: %s", error
            )
            return
        self._network.use_ready()
        self._changed_at = groups()

    @contextmanager
    def _core_for_the_child(self, pool: ComputePool) -> Iterator[None]:
        """Pause one of several compute threads if the threads use every core.

        Compiled kernels train several times as fast as NumPy's, so an earlier change is worth the pause.
        """
        over = Event()
        if 1 < pool.statistics().threads >= self._cores:
            pool.submit(over.wait, COMPILE_S, on_done=lambda job: None, cost="core for the compiler")
        try:
            yield
        finally:
            over.set()

    async def _compile(self, engine: Engine) -> None:
        """Compile in a child process; for errors see `run_module`."""
        codes = [str(code) for code in sorted(engine.kernels)]
        notice = asyncio.get_running_loop().call_later(NOTICE_S, logger.warning, SLOW)
        try:
            await run_module((MODULE, self._network.dtype.name, *codes), within_s=COMPILE_S)
        finally:
            notice.cancel()

    def _on_compiled(self, done: int, total: int) -> None:
        """Count kernels that a compute thread has compiled, or read from the disk."""
        self._compiled = (done, total)

    def statistics(self, groups: int) -> KernelCounts:
        """Return the set in use, and the numbers of compiled kernels and of groups trained without them.

        Args:
            groups: Number of trained groups.
        """
        done, total = self._compiled
        early = 0 if self._engine is None else groups if self._changed_at is None else self._changed_at
        return KernelCounts(set=self._network.kernels, compiled=done, of=total, numpy_groups=early)
