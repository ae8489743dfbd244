"""Ctrl-C and SIGTERM: the first ends the command in good order, the second at once.

Before a loop runs, the process just ends. In a loop, the first signal cancels the command's task, and every
block then closes its resources. The second signal ends the process, and with it its children (see
`cluster/parent_pipe.py`). SIGTERM ends `train --attach` at once, because the next driver continues the run.
In a training with checkpoints a first SIGTERM stops the run with a checkpoint; the next signal cancels the
task.

The handlers are set by `signal`, not by the loop, so they also run while the loop is busy.
"""

import asyncio
import os
import select
import signal
import sys
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, NoReturn, TextIO

from adam_async.runtime.callbacks import ending_on_errors

SIGNALS = (signal.SIGINT, signal.SIGTERM)

SHOW_CURSOR = "\x1b[?25h"
"""Escape sequence that shows the cursor again, because a table hides it."""


class Signals:
    """The handlers of SIGINT and SIGTERM, and the first signal received."""

    def __init__(self) -> None:
        self.first: int | None = None
        self.interrupted = False
        """Whether a signal has cancelled the command; a SIGTERM that stops a run in good order cancels
        nothing."""
        self._at_once = ""
        self._cancel: Callable[[], None] | None = None
        self._stop: Callable[[], None] | None = None

    def install(self) -> None:
        """Install the handlers, except of signals that are ignored, as a shell does for background jobs.

        Only the main thread may call this method.
        """
        for number in SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self._on_signal)

    def end_at_once_on_sigterm(self, note: str) -> None:
        """Make the first SIGTERM end the process at once, like the second, with a last line on stderr.

        The command then neither cleans up nor changes the cluster, because another process continues
        its work.
        """
        self._at_once = note

    @contextmanager
    def calling_at_sigterm(self, stop: Callable[[], None]) -> Iterator[None]:
        """Let a first SIGTERM call a function in the running loop, instead of cancelling the task."""
        loop = asyncio.get_running_loop()

        def call() -> None:
            loop.call_soon_threadsafe(stop)

        self._stop = call
        try:
            yield
        finally:
            self._stop = None

    def cancel(self) -> None:
        """Cancel the command, unless it runs in no loop, or was cancelled before."""
        if self._cancel is not None:
            self.interrupted = True
            cancel, self._cancel = self._cancel, None
            cancel()

    def exit_code(self) -> int:
        """Return 130 for SIGINT, 143 for SIGTERM; call it after `first` is set."""
        return 128 + (self.first or 0)

    def leave(self, code: int) -> NoReturn:
        """End the process at once, without a flush or any cleanup."""
        os._exit(code)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGTERM and self._at_once:
            _write_now(sys.stderr, f"{self._at_once}\n")
        elif number == signal.SIGTERM and self._stop is not None and self.first is None:
            self.first = number
            self._stop()
            return
        elif self._cancel is not None:
            self.first = self.first or number
            self.cancel()
            return
        if sys.stdout.isatty():
            _write_now(sys.stdout, SHOW_CURSOR)
        self.leave(128 + number)

    def run(self, main: Callable[[], Coroutine[Any, Any, int]]) -> int:
        """Run a command's coroutine in its own loop until it returns or a signal ends it.

        Raises:
            Exception: The error of `main`, or of a callback of its loop. After a signal that cancelled `main`
                the method raises no error, and returns the exit code of the signal.
        """
        import uvloop  # after the handlers of signals are installed

        try:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                return runner.run(self._main(main))
        except (asyncio.CancelledError, Exception):
            if not self.interrupted:
                raise
            return self.exit_code()
        finally:
            self._cancel = None

    async def _main(self, main: Callable[[], Coroutine[Any, Any, int]]) -> int:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None

        def cancel() -> None:
            loop.call_soon_threadsafe(task.cancel)

        self._cancel = cancel
        with ending_on_errors():
            code = await main()
        # A command may have caught the cancellation and returned; it was still interrupted.
        return code if self.first is None else self.exit_code()


def _write_now(stream: TextIO, text: str) -> None:
    """Write a short text, unless its reader does not read: a handler must not wait for that."""
    if select.select([], [stream], [], 0)[1]:
        os.write(stream.fileno(), text.encode())


EARLY = Signals()
"""The only handlers of the process; `cli/main.py` installs them."""
