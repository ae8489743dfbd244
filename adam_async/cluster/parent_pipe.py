"""The pipe from a parent process to a child: orders arrive on stdin, and the child ends with the pipe.

The parent writes one line, the `Orders`, and then keeps the pipe open. The end of the file tells the child to
end, or shows that its parent is gone: the system also closes a killed parent's pipe. On a pipe from another
machine the parent writes empty lines, because no system reports a lost machine. The pipe carries the keys of
the child's role, because other users can read arguments and environments. On Linux the kernel also kills the
child when its parent dies, in case the child is too busy to read. The child itself calls `prctl`, so that no
code runs between fork and exec.

A child runs in its own session: the terminal's Ctrl-C reaches only the parent, which then ends its children.
"""

import asyncio
import ctypes
import logging
import signal
import sys
from typing import TypeVar

import msgspec

from adam_async.errors import ConfigError
from adam_async.run.config import Waits

logger = logging.getLogger(__name__)

_Orders = TypeVar("_Orders", bound=msgspec.Struct)

PR_SET_PDEATHSIG = 1
"""Option of `prctl` from linux/prctl.h: the signal at the death of the parent."""

ORDERS_S = 10.0
"""Deadline of the first line in seconds; the parent writes the line as soon as the process exists."""


class Orders(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of a child that its command line must not show, or has no room for."""

    token: str
    """Keys of the child's role, in the form of `read_token_text`; empty if the cluster has no token."""
    waits: Waits
    profile_events: int = 0
    """Maximum number of profile events; 0: no profile."""
    silence_s: float = 0.0
    """Time in seconds without a byte on the pipe after which the parent counts as lost; 0: no limit."""
    ignores_sigterm: bool = False
    """Whether this process ignores SIGTERM. An engine may send SIGTERM to all processes of a job. The parent
    also gets it, and needs this process until the run has ended in order."""


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent dies, on Linux."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


class Parent:
    """The pipe from the parent, as `async with`."""

    async def __aenter__(self) -> "Parent":
        loop = asyncio.get_running_loop()
        self._reader = asyncio.StreamReader()
        self._pipe, _ = await loop.connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(self._reader), sys.stdin
        )
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._pipe.close()

    async def orders(self, kind: type[_Orders]) -> _Orders | None:
        """Read the first line; None if the parent closed the pipe without a line.

        Args:
            kind: Type of the orders.

        Raises:
            ConfigError: The line did not arrive in `ORDERS_S`, or is invalid.
        """
        try:
            async with asyncio.timeout(ORDERS_S):
                line = await self._reader.readline()
                return msgspec.json.decode(line, type=kind) if line else None
        except (TimeoutError, msgspec.DecodeError) as error:
            raise ConfigError(f"--supervised is for child processes: no orders on stdin ({error})") from None

    async def gone(self, silence_s: float) -> None:
        """Wait until the pipe ends, or is silent for `silence_s`: the parent is lost, or ends this process.

        Args:
            silence_s: See `Orders`.
        """
        silent = 0
        # After a stall of this process a deadline may pass before the bytes that wait in the pipe are read.
        while silent < 2:
            try:
                async with asyncio.timeout(silence_s / 2 if silence_s else None):
                    if not await self._reader.read(4096):
                        return
                silent = 0
            except TimeoutError:
                silent += 1
        logger.error("the launching process is lost: it has sent nothing for %g s", silence_s)
