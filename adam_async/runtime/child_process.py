"""One child process that runs a role, with its orders, its address line, its output, and its end."""

import asyncio
import logging
import os
import re
import signal
import sys
import sysconfig
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path

from adam_async.errors import RoleDied

logger = logging.getLogger(__name__)

START_CODES = range(1, 9)
"""Exit codes of a failed start; the parent ends with the same code."""

COMMAND = (sys.executable, "-P", "-m", "adam_async")
"""Command line that starts this package's command without the working directory on its import path."""

PACKAGES = str(Path(__file__).resolve().parents[2])
"""Folder of the packages of this process."""

READ_BYTES = 65536
"""Maximum number of bytes of one read from a child's output."""

LINE_BYTES = 8192
"""Maximum number of bytes kept of one line, half from its start and half from its end."""

_ENDS = re.compile(rb"[\r\n]+")


class ChildProcess:
    """``python -P -m adam_async ROLE ...`` as a child.

    Args:
        node: Node id of the child, and prefix of its lines.
        arguments: Arguments after ``adam-async``.
        orders: First line on the child's stdin; see `cluster/parent_pipe.py`.
        environment: Environment of the child, which `child_environment` extends.
        on_line: Called with each line of the child's stderr, prefixed; `LineSplitter` cuts long lines.
        within: Words before the command that start it on another host of this machine.

    `run` lasts as long as the process, and sets `ended` at its end. The first line of the child sets
    `address`; an end before that line fails it with `RoleDied`.
    """

    def __init__(
        self,
        node: str,
        arguments: Sequence[str],
        *,
        orders: bytes,
        environment: Mapping[str, str],
        on_line: Callable[[str], None],
        within: Sequence[str] = (),
    ) -> None:
        self.node = node
        self.address: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.ended = asyncio.Event()
        self.served_s = 0.0
        """Time from the child's address line to its end, in seconds; set at its end."""
        self._listens_at: float | None = None
        self._command = (*within, *COMMAND, *arguments)
        self._orders = orders
        self._environment = environment
        self._on_line = on_line
        self._process: asyncio.subprocess.Process | None = None
        self._last_line = ""
        self._ends = False

    @property
    def pid(self) -> int | None:
        """Process id of the child; None before its start."""
        return self._process.pid if self._process is not None else None

    @property
    def serves(self) -> bool:
        """Whether the child has printed its address and has not ended."""
        return self._listens_at is not None and not self.ended.is_set()

    async def run(self) -> int:
        """Start the child, relay its output, and return its exit code; a negative code is a signal.

        Cancelling kills the child and waits for its end.
        """
        process = self._process = await asyncio.create_subprocess_exec(
            *self._command,
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
            except (OSError, RuntimeError):  # uvloop raises RuntimeError for a closed pipe
                logger.debug("%s ended before it read its orders", self.node)
            if self._ends:
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
        """Close the child's stdin, now or at its start, which asks it to end."""
        self._ends = True
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()

    def kill(self) -> None:
        """Kill the child, unless it has ended."""
        self._signal(signal.SIGKILL)

    def freeze(self) -> None:
        """Stop the child, unless it has ended, until `wake`: its links stay open, and it answers none."""
        self._signal(signal.SIGSTOP)

    def wake(self) -> None:
        """Continue a frozen child."""
        self._signal(signal.SIGCONT)

    def _signal(self, number: int) -> None:
        if self._process is not None and self._process.returncode is None:
            try:
                self._process.send_signal(number)
            except ProcessLookupError:  # the child has ended, and the loop does not know yet
                return

    def _fail_start(self, code: int) -> None:
        error = RoleDied(self.node, f"{how_it_ended(code)} before it could listen")
        if code in START_CODES and self._last_line:
            error = RoleDied(self.node, self._last_line.removeprefix("adam-async: "))
            error.exit_code = code
        self.address.set_exception(error)
        self.address.exception()  # mark it retrieved: a caller need not wait for the address

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
            self._last_line = line
            self._on_line(f"{self.node} | {line}")

    def __repr__(self) -> str:
        return f"<ChildProcess {self.node} {self._process!r}>"


def child_environment(environment: Mapping[str, str], packages: str = PACKAGES) -> dict[str, str]:
    """Return the environment with which a child that runs `COMMAND` finds the packages of this process.

    Args:
        packages: Folder of the packages. Python finds installed packages by itself, and packages of a source
            checkout at the end of ``PYTHONPATH``.
    """
    found = dict(environment)
    named = found.get("PYTHONPATH", "")
    installed = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    if packages not in installed and packages not in named.split(os.pathsep):
        found["PYTHONPATH"] = f"{named}{os.pathsep}{packages}" if named else packages
    return found


class LineSplitter:
    """Cuts a stream of bytes into lines at newlines and carriage returns, and drops blank lines.

    A line of more than `LINE_BYTES` loses its middle: its start names its subject, and its end may be text
    after a progress bar.
    """

    def __init__(self) -> None:
        self._kept = bytearray()
        self._left_out = 0

    def feed(self, data: bytes) -> list[str]:
        """Return the lines that these bytes complete, without their ends."""
        *complete, begun = _ENDS.split(data)
        lines = []
        for part in complete:
            self._add(part)
            lines += self.end()
        self._add(begun)
        return lines

    def end(self) -> list[str]:
        """Return the rest of the ended stream as a line, unless it is blank."""
        kept, left_out = bytes(self._kept), self._left_out
        self._kept.clear()
        self._left_out = 0
        if left_out:
            half = LINE_BYTES // 2
            line = f"{_text(kept[:half])} [{left_out} bytes left out] {_text(kept[half:])}".rstrip()
        else:
            line = _text(kept).rstrip()
        return [line] if line else []

    def _add(self, part: bytes) -> None:
        self._kept += part
        excess = len(self._kept) - LINE_BYTES
        if excess > 0:
            middle = LINE_BYTES // 2
            del self._kept[middle : middle + excess]
            self._left_out += excess

    def __repr__(self) -> str:
        return f"<LineSplitter {len(self._kept)} bytes of a line>"


def _text(data: bytes) -> str:
    return data.decode(errors="replace")


async def _lines(stream: asyncio.StreamReader) -> AsyncIterator[str]:
    splitter = LineSplitter()
    while data := await stream.read(READ_BYTES):
        for line in splitter.feed(data):
            yield line
    for line in splitter.end():
        yield line


def address_line(node: str, address: str, join: str) -> str:
    """Return the line that a role prints: its address, and the command that joins it, if any."""
    return f"{node} listens on {address}" + (f"; join it with: {join}" if join else "")


def address_in(line: str) -> str:
    """Return the address in a role's line, or an empty text."""
    _, found, rest = line.partition(" listens on ")
    return rest.partition(";")[0] if found else ""


def how_it_ended(code: int) -> str:
    """Return the end of a process in words."""
    return f"killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
