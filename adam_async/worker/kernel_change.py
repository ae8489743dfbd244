"""Lets a worker begin with NumPy's kernels while its compiled ones are made, and go on with those.

Compiling takes longer than many training runs. A child process does it, because here it would hold the
interpreter's lock, and leaves the kernels on the disk. Then the network takes them up: each group keeps those
that it was loaded with.
"""

import asyncio
import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from subprocess import DEVNULL, Popen
from tempfile import TemporaryFile
from threading import Event
from typing import Any

from adam_async.model.context import Engine
from adam_async.model.network import Network, Trainable
from adam_async.runtime.child_process import child_environment
from dataflow import ComputePool

logger = logging.getLogger(__name__)

COMPILE_S = 600.0
"""Seconds that a child may take; after that, training goes on with NumPy's kernels."""

LOOK_S = 0.1
"""Seconds between two checks whether the child has ended."""

SAID_BYTES = 65536
"""Bytes of the child's output that are read."""

MODULE = "adam_async.model.fast.compiling"


class KernelChange:
    """The kernels with which one worker trains a run, and their change.

    Args:
        network: The whole model.
        trained: What is trained: the model, or the parts of it.
        waits: Whether the first group waits for compiled kernels, because results must not depend on the time
            that compiling takes, or because the model is cut.
        cores: Cores that this process may use.
    """

    def __init__(self, network: Network, trained: Trainable, *, waits: bool, cores: int) -> None:
        self._cores = cores
        self._network = network
        self._trained = trained
        self._engine = network.engine
        """Runs the kernels that are compiled while training goes on; None if none are."""
        if not waits:
            network.use_ready()
        if network.kernels != "numpy":
            self._engine = None
        self._compiled = (0, 0)
        self._changed_at: int | None = None
        """Groups that were trained before the change."""

    async def prepare(self, pool: ComputePool) -> None:
        """Compile, or read from the disk, what the first group is trained with."""
        engine = self._network.engine
        if engine is not None and not engine.is_ready:
            logger.warning("training waits until its kernels are compiled; they are kept for the next time")
        await pool.run(self._trained.warm_up, self._on_compiled, paced=False)

    async def run(self, pool: ComputePool, groups: Callable[[], int]) -> None:
        """Compile in a child what the first groups did without, and take it up.

        Where the disk keeps nothing, a compute thread compiles instead. Cancelling kills the child. The
        kernels that it has compiled are kept.

        Args:
            pool: Reads the kernels from the disk.
            groups: Tells the number of groups that have been trained.
        """
        engine = self._engine
        if engine is None:
            return
        try:
            why = ""
            if engine.are_kept:
                with self._core_for_the_child(pool):
                    why = await self._compile(engine)
            if not why:  # without a child, this compiles
                await pool.run(engine.warm_up, self._on_compiled, paced=False)
        except (OSError, RuntimeError) as error:
            why = str(error)
        if why:
            logger.warning("training goes on with NumPy's kernels, because compiling others failed: %s", why)
            return
        self._network.use_ready()
        self._changed_at = groups()

    @contextmanager
    def _core_for_the_child(self, pool: ComputePool) -> Iterator[None]:
        """Let one of several compute threads wait where they need every core.

        Compiled kernels train several times as fast as NumPy's, so it pays to have them sooner.
        """
        over = Event()
        if 1 < pool.statistics().threads >= self._cores:
            pool.submit(over.wait, COMPILE_S, on_done=lambda job: None, cost="core for the compiler")
        try:
            yield
        finally:
            over.set()

    async def _compile(self, engine: Engine) -> str:
        """Compile in a child process. Returns why that failed."""
        codes = [str(code) for code in sorted(engine.kernels)]
        command = (sys.executable, "-P", "-m", MODULE, self._network.dtype.name, *codes)
        loop = asyncio.get_running_loop()
        deadline = loop.time() + COMPILE_S
        with TemporaryFile() as said:
            # Loops watch children by a thread or from the main thread, and leave pipes open where they are
            # cancelled; looking ten times in a second needs nothing.
            child = Popen(  # noqa: ASYNC220 - starting takes a millisecond
                command, stdin=DEVNULL, stdout=said, stderr=said, env=child_environment(os.environ)
            )
            try:
                while child.poll() is None:
                    if loop.time() > deadline:
                        return f"it took longer than {COMPILE_S:.0f} s"
                    await asyncio.sleep(LOOK_S)
            finally:
                child.kill()
                child.wait()
            if child.returncode == 0:
                return ""
            said.seek(0)
            lines = said.read(SAID_BYTES).decode(errors="replace").strip().split("\n")
        return f"exit code {child.returncode}, {lines[-1]}"

    def _on_compiled(self, done: int, total: int) -> None:
        """Kernels are compiled, or read from the disk, on a compute thread."""
        self._compiled = (done, total)

    def statistics(self, groups: int) -> dict[str, Any]:
        """The set in use, how many of its kernels are there, and how many groups did without.

        Args:
            groups: Number of groups that have been trained.
        """
        done, total = self._compiled
        early = 0 if self._engine is None else groups if self._changed_at is None else self._changed_at
        return {"set": self._network.kernels, "compiled": done, "of": total, "numpy_groups": early}
