"""One child process that runs a role: its orders, its address line, its words, its end."""

import asyncio
import logging
import os
import sys
import sysconfig
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path

from adam_async.errors import RoleDied
from adam_async.runtime.child_lines import LineSplitter

logger = logging.getLogger(__name__)

START_CODES = range(1, 9)
"""Exit codes that say why a role could not start; the parent ends with the same."""

COMMAND = (sys.executable, "-P", "-m", "adam_async")
"""Command line that starts this package's command without the working directory on its import path."""

PACKAGES = str(Path(__file__).resolve().parents[2])
"""Folder of the packages of this process."""

READ_BYTES = 65536
"""Maximum number of bytes of one read from a child's output."""


class ChildProcess:
    """``python -P -m adam_async ROLE ...`` as a child.

    Args:
        node: Its node id; prefixes what it says.
        arguments: After ``adam-async``.
        orders: The first line on its stdin; see `cli_parent`.
        environment: Environment of the child, which `child_environment` extends.
        say: Called with each line that the child writes to stderr, prefixed; `LineSplitter` cuts long ones.

    `run` is its life, `ended` is set after it. `address` is set by its first line, or fails with
    `RoleDied` if it ends before.
    """

    def __init__(
        self,
        node: str,
        arguments: Sequence[str],
        *,
        orders: bytes,
        environment: Mapping[str, str],
        say: Callable[[str], None],
    ) -> None:
        self.node = node
        self.address: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.ended = asyncio.Event()
        self.served_s = 0.0
        """How long it lived after it had said where it listens; told when it has ended."""
        self._listens_at: float | None = None
        self._arguments = arguments
        self._orders = orders
        self._environment = environment
        self._say = say
        self._process: asyncio.subprocess.Process | None = None
        self._last_words = ""
        self._let_go = False

    @property
    def pid(self) -> int | None:
        """Its process id, once it has one."""
        return self._process.pid if self._process is not None else None

    @property
    def serves(self) -> bool:
        """Whether it has said where it listens, and lives."""
        return self._listens_at is not None and not self.ended.is_set()

    async def run(self) -> int:
        """Start it, relay what it says, and return its exit code (negative: the signal that killed it).

        Cancelling kills it and waits until it is gone.
        """
        process = self._process = await asyncio.create_subprocess_exec(
            *COMMAND,
            *self._arguments,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=child_environment(self._environment),
            start_new_session=True,
        )
        assert process.stdin is not None
        try:
            try:
                process.stdin.write(self._orders)
            except (OSError, RuntimeError):  # uvloop's word for a closed pipe
                logger.debug("%s was gone before it had its orders", self.node)
            if self._let_go:
                process.stdin.close()
            async with asyncio.TaskGroup() as group:
                group.create_task(self._read_stdout(process), name=f"{self.node}/stdout")
                group.create_task(self._read_stderr(process), name=f"{self.node}/stderr")
            code = await process.wait()
        finally:
            self.kill()
            await process.wait()
            process.stdin.close()
            if self._listens_at is not None:
                self.served_s = asyncio.get_running_loop().time() - self._listens_at
            if not self.address.done():
                self._fail_start(process.returncode or 0)
            self.ended.set()
        return code

    def end(self) -> None:
        """Let it end in good order: its stdin ends, as soon as it has one."""
        self._let_go = True
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()

    def kill(self) -> None:
        """End it at once, if it is still there."""
        if self._process is not None and self._process.returncode is None:
            try:
                self._process.kill()
            except ProcessLookupError:  # it ended by itself, and nobody has told us yet
                return

    def _fail_start(self, code: int) -> None:
        error = RoleDied(self.node, f"{how_it_ended(code)} before it could listen")
        if code in START_CODES and self._last_words:
            error = RoleDied(self.node, self._last_words.removeprefix("adam-async: "))
            error.exit_code = code
        self.address.set_exception(error)
        self.address.exception()  # seen: whoever waits gets it all the same, and nobody need

    async def _read_stdout(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        async for line in _lines(process.stdout):
            address = address_in(line)
            if address and not self.address.done():
                self._listens_at = asyncio.get_running_loop().time()
                self.address.set_result(address)

    async def _read_stderr(self, process: asyncio.subprocess.Process) -> None:
        assert process.stderr is not None
        async for line in _lines(process.stderr):
            self._last_words = line
            self._say(f"{self.node} | {line}")

    def __repr__(self) -> str:
        return f"<ChildProcess {self.node} {self._process!r}>"


def child_environment(environment: Mapping[str, str], packages: str = PACKAGES) -> dict[str, str]:
    """The environment of a child that runs `COMMAND`: with it the child finds the packages of this process.

    Args:
        environment: Other variables of the child.
        packages: Folder of the packages. Python finds installed packages by itself, and packages of a source
            checkout at the end of ``PYTHONPATH``.
    """
    found = dict(environment)
    named = found.get("PYTHONPATH", "")
    installed = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    if packages not in installed and packages not in named.split(os.pathsep):
        found["PYTHONPATH"] = f"{named}{os.pathsep}{packages}" if named else packages
    return found


async def _lines(stream: asyncio.StreamReader) -> AsyncIterator[str]:
    splitter = LineSplitter()
    while data := await stream.read(READ_BYTES):
        for line in splitter.feed(data):
            yield line
    for line in splitter.end():
        yield line


def address_line(node: str, address: str, join: str) -> str:
    """The line that a role prints: where it is, and the command that joins it, if there is one."""
    return f"{node} listens on {address}" + (f"; join it with: {join}" if join else "")


def address_in(line: str) -> str:
    """The address in a role's line, or nothing."""
    _, found, rest = line.partition(" listens on ")
    return rest.partition(";")[0] if found else ""


def how_it_ended(code: int) -> str:
    """Say in words how a process ended."""
    return f"killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
