"""A child process's tie to the process that started it: orders come in by stdin, and its end means ours.

The parent writes one line, the `Orders`, and then keeps the pipe open and silent. End of file says both
"you may go" and "I am gone": the system closes the pipe of a parent that was killed, too. The keys of the
child's role travel this way because other users can read arguments and environments. Where the system has
it (Linux), the kernel is also asked to kill the child when its parent dies, for a child that is too busy to
read; `prctl` is asked by the child itself, so that nothing runs between fork and exec.

A child runs in a session of its own: the terminal's Ctrl-C reaches the parent alone, which then ends its
children in their order.
"""

import asyncio
import ctypes
import signal
import sys

import msgspec

from adam_async.errors import ConfigError
from adam_async.run.config import Waits

PR_SET_PDEATHSIG = 1
"""linux/prctl.h."""

ORDERS_S = 10.0
"""For the first line to arrive; the parent writes it as soon as the process exists."""


class Orders(msgspec.Struct, frozen=True, kw_only=True):
    """What a child must know and its command line must not show."""

    token: str
    """Keys of the child's role, as `token_text` reads them; empty if the cluster has no token."""
    waits: Waits
    profile_events: int = 0
    """Events of a profile to note at most; 0 for no profile."""
    layers: dict[str, str] = {}
    """Kinds of layers to import, as `import_layers` takes them."""


def die_with_parent() -> None:
    """Ask the kernel, where it can, to kill this process when its parent dies."""
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

    async def orders(self) -> Orders | None:
        """Read the first line; None if the parent let go of us before it.

        Raises:
            ConfigError: It did not come in `ORDERS_S`, or is something else.
        """
        try:
            async with asyncio.timeout(ORDERS_S):
                line = await self._reader.readline()
                return msgspec.json.decode(line, type=Orders) if line else None
        except (TimeoutError, msgspec.DecodeError) as error:
            raise ConfigError(f"--supervised is for child processes: no orders on stdin ({error})") from None

    async def gone(self) -> None:
        """Wait for the end of the pipe: the parent wants us to end, or is no more."""
        while await self._reader.read(4096):
            pass
