"""One process of a role, as its cluster sees it: its address, its output, its end.

Each launcher makes handles for its kind of process. The process prints one line with its address on stdout,
and log lines on stderr.
"""

import asyncio
import re
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import Protocol

from adam_async.errors import RoleDied

START_CODES = range(1, 9)
"""Exit codes of a failed start; the parent ends with the same code."""

CUT_OFF = 255
"""Exit code of a role that its engine or connection lost; `ssh` uses the same code."""

READ_BYTES = 65536
"""Maximum number of bytes in one read of a child's output."""

LINE_BYTES = 8192
"""Maximum number of bytes kept of a line, half from its start and half from its end."""

_ENDS = re.compile(rb"[\r\n]+")

LAST_LINES = 20
"""Number of stderr lines that a handle keeps."""


class ByteStream(Protocol):
    """Output of a process."""

    async def read(self, n: int, /) -> bytes:
        """Return up to n bytes; none at the end of the output."""


class RoleHandle(ABC):
    """One process of a role. Subclasses start and end it.

    Args:
        node: Node id of the role, and prefix of its lines.
        on_line: Called with each line of the role's stderr, prefixed; `LineSplitter` cuts long lines.

    Attributes:
        address: Address of the role, set by its first line; fails with `RoleDied` if the process ends
            earlier.
        ended: Set at the end of the process.
        code: Exit code; a negative code is a signal. Valid after the end.
        served_s: Time in seconds from the address line to the end; set at the end.
        last_lines: The newest lines of stderr, at most `LAST_LINES`.
    """

    def __init__(self, node: str, on_line: Callable[[str], None]) -> None:
        self.node = node
        self.address: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.ended = asyncio.Event()
        self.code = 0
        self.served_s = 0.0
        self.last_lines: deque[str] = deque(maxlen=LAST_LINES)
        self._on_line = on_line
        self._listens_at: float | None = None

    @property
    def serves(self) -> bool:
        """Whether the process has printed its address and has not ended."""
        return self._listens_at is not None and not self.ended.is_set()

    @property
    def how(self) -> str:
        """The end of the process in words."""
        return how_it_ended(self.code)

    @abstractmethod
    async def run(self) -> int:
        """Start the process, relay its output, and return its exit code.

        Cancelling kills the process.
        """

    @abstractmethod
    def end(self) -> None:
        """Close the stdin of the process, now or at its start, which asks it to end."""

    @abstractmethod
    def kill(self) -> None:
        """Kill the process, unless it has ended."""

    async def _relay(self, stdout: ByteStream, stderr: ByteStream) -> None:
        """Read all output of the process."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._read_stdout(stdout), name=f"{self.node}/stdout")
            group.create_task(self._read_stderr(stderr), name=f"{self.node}/stderr")

    def _finish(self, code: int) -> None:
        """Note the end of the process."""
        self.code = code
        if self._listens_at is not None:
            self.served_s = asyncio.get_running_loop().time() - self._listens_at
        # Set before the address fails: a supervisor must note the end before the failed start ends the run.
        self.ended.set()
        if not self.address.done():
            self.address.set_exception(self._start_error())
            self.address.exception()  # mark the error retrieved: a caller need not wait for the address

    def _start_error(self) -> RoleDied:
        """Return the error of a process that ended before its address line."""
        if self.code not in START_CODES or not self.last_lines:
            return RoleDied(self.node, f"{self.how} before it could listen")
        error = RoleDied(self.node, self.last_lines[-1].removeprefix("adam-async: "))
        error.exit_code = self.code
        return error

    async def _read_stdout(self, stream: ByteStream) -> None:
        async for line in _lines(stream):
            self.note_address(address_in(line))

    async def _read_stderr(self, stream: ByteStream) -> None:
        async for line in _lines(stream):
            self.note_line(line)

    def note_address(self, address: str) -> None:
        """Record the role's address; an empty or second address has no effect."""
        if address and not self.address.done():
            self._listens_at = asyncio.get_running_loop().time()
            self.address.set_result(address)

    def note_line(self, line: str) -> None:
        """Note a line of stderr."""
        self.last_lines.append(line)
        self._on_line(f"{self.node} | {line}")


class RemoteRole(RoleHandle):
    """One process of a role on another machine, in a session that an engine can cut off."""

    def __init__(self, node: str, on_line: Callable[[str], None]) -> None:
        super().__init__(node, on_line)
        self._cut_off = ""
        self._killed = asyncio.Event()

    @property
    def how(self) -> str:
        """The end of the process in words."""
        return self._cut_off or super().how

    async def run(self) -> int:
        """Start the role, relay its output, and return its exit code. See `RoleHandle.run`."""
        code = CUT_OFF
        try:
            async with asyncio.TaskGroup() as group:
                killed = group.create_task(self._killed.wait(), name=f"{self.node}/killed")
                session = group.create_task(self._session(), name=f"{self.node}/session")
                await asyncio.wait((killed, session), return_when=asyncio.FIRST_COMPLETED)
                killed.cancel()
                session.cancel()
            code = session.result() if not session.cancelled() else CUT_OFF
        finally:
            self._finish(code)
        return code

    @abstractmethod
    async def _session(self) -> int:
        """Run the role and return its exit code; if the engine lost it, set `_cut_off` and return `CUT_OFF`.

        Cancelling kills the process.
        """

    def kill(self) -> None:
        """Cut off the session, which kills the role, unless it has ended."""
        self._killed.set()


class LineSplitter:
    """Cuts a stream of bytes into lines at newlines and carriage returns, and drops blank lines.

    A line of more than `LINE_BYTES` loses its middle: its start names its subject, and its end may be text
    after a progress bar.
    """

    def __init__(self) -> None:
        self._kept = bytearray()
        self._left_out = 0

    def feed(self, data: bytes) -> list[str]:
        """Return the lines that these bytes complete, without line ends."""
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


async def _lines(stream: ByteStream) -> AsyncIterator[str]:
    splitter = LineSplitter()
    while data := await stream.read(READ_BYTES):
        for line in splitter.feed(data):
            yield line
    for line in splitter.end():
        yield line


def address_line(node: str, address: str, join: str) -> str:
    """Return the line that a role prints: its address and, if any, the command that joins it."""
    return f"{node} listens on {address}" + (f"; join it with: {join}" if join else "")


def address_in(line: str) -> str:
    """Return the address in a role's line, or an empty text."""
    _, found, rest = line.partition(" listens on ")
    return rest.partition(";")[0] if found else ""


def how_it_ended(code: int) -> str:
    """Return the end of a process in words."""
    return f"killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
