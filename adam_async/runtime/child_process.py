"""Child processes: one kind runs a role, the other runs a module to its end."""

import asyncio
import errno
import logging
import os
import signal
import sys
import sysconfig
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from subprocess import DEVNULL, Popen
from tempfile import TemporaryFile

from adam_async.errors import RoleDied
from adam_async.runtime.clock import Within
from adam_async.runtime.role_handle import RoleHandle

logger = logging.getLogger(__name__)

COMMAND = (sys.executable, "-P", "-m", "adam_async")
"""Command line that starts this package's command without the working directory on its import path."""

REST_S = 1.0
"""Maximum time for the rest of a child's output after its end, in seconds."""

LOOK_S = 0.1
"""Seconds between two checks for the end of a child."""

OUTPUT_BYTES = 65536
"""Maximum number of bytes read from the end of a failed module's output."""

SPARE = 12
"""File descriptors needed to start a child: three pairs for its streams, and the loop's."""

PACKAGES = str(Path(__file__).resolve().parents[2])
"""Folder of this process's packages."""


class ChildProcess(RoleHandle):
    """``python -P -m adam_async ROLE ...`` as a child.

    Args:
        node: Node id of the child, and prefix of its lines.
        arguments: Arguments after ``adam-async``.
        orders: First line on the child's stdin; see `cluster/parent_pipe.py`.
        environment: Environment of the child, which `child_environment` extends.
        on_line: See `RoleHandle`.
        within: Words before the command that start it in a network namespace of this machine; empty for this
            process's namespace.
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
        super().__init__(node, on_line)
        self._command = (*within, *COMMAND, *arguments)
        self._orders = orders
        self._environment = environment
        self._process: asyncio.subprocess.Process | None = None
        self._ends = False

    @property
    def pid(self) -> int | None:
        """Process id of the child; None before it starts."""
        return self._process.pid if self._process is not None else None

    async def run(self) -> int:
        """Start the child, relay its output, and return its exit code; a negative code is a signal.

        Cancelling kills the child, with the processes of its group, and waits for its end. If another process
        of the group keeps the output open for `REST_S` after the child's end, the method kills the group.
        """
        try:
            check_spare_descriptors()
            process = self._process = await asyncio.create_subprocess_exec(
                *self._command,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                env=child_environment(self._environment),
                start_new_session=True,
            )
        except OSError as error:  # such as the limit of the user's processes: the other roles go on
            cure = "; raise the limit: ulimit -n 1024" if error.errno == errno.EMFILE else ""
            self.note_line(f"adam-async: the process cannot start: {error.strerror or error}{cure}")
            self._finish(RoleDied.exit_code)
            return RoleDied.exit_code
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        is_whole = False
        try:
            try:
                process.stdin.write(self._orders)
            except (OSError, RuntimeError):  # uvloop raises RuntimeError for a closed pipe
                logger.debug("%s ended before it read its orders", self.node)
            if self._ends:
                process.stdin.close()
            async with asyncio.TaskGroup() as group:
                relay = group.create_task(
                    self._relay(process.stdout, process.stderr), name=f"{self.node}/output"
                )
                await _wait_exit(process)
                await asyncio.wait([relay], timeout=REST_S)
                is_whole = relay.done()
                relay.cancel()
        finally:
            if not is_whole:
                _kill_group(process.pid)
            await _wait_exit(process)
            process.stdin.close()
            self._finish(process.returncode or 0)
        return process.returncode or 0

    def end(self) -> None:
        """Close the child's stdin, now or at its start, which asks it to end."""
        self._ends = True
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()

    def kill(self) -> None:
        """Kill the child, unless it has ended."""
        self._signal(signal.SIGKILL)

    def freeze(self) -> None:
        """Freeze the child until `wake`, unless it has ended: its links stay open, but it answers nothing."""
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

    def __repr__(self) -> str:
        return f"<ChildProcess {self.node} {self._process!r}>"


async def _wait_exit(process: asyncio.subprocess.Process) -> None:
    """Wait until a process has ended. With asyncio's loop `Process.wait` also waits until its pipes close."""
    async with asyncio.TaskGroup() as group:
        waiting = group.create_task(process.wait(), name=f"exit-{process.pid}")
        while process.returncode is None:
            await asyncio.wait([waiting], timeout=LOOK_S)
        waiting.cancel()


def check_spare_descriptors() -> None:
    """Check that a child can start: uvloop raises other errors about a start without free descriptors.

    Raises:
        OSError: Fewer than `SPARE` descriptors are free.
    """
    with ExitStack() as opened:
        for _ in range(SPARE // 2):
            for descriptor in os.pipe():
                opened.callback(os.close, descriptor)


async def run_module(words: Sequence[str], *, within_s: float) -> None:
    """Run ``python -P -m MODULE ARGUMENTS`` as a child until its end. Cancelling kills the child.

    Args:
        words: The module, and its arguments.
        within_s: Deadline in seconds, after which the child is killed.

    Raises:
        OSError: The child cannot start.
        RuntimeError: The child took longer, or failed; the error has the cause.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + within_s
    with TemporaryFile() as output:
        # Event loops watch children by a thread or from the main thread, and leave pipes open after a
        # cancellation. Polling ten times per second avoids a thread and open pipes.
        child = Popen(  # noqa: ASYNC220 - starting takes a millisecond
            (sys.executable, "-P", "-m", *words),
            stdin=DEVNULL,
            stdout=output,
            stderr=output,
            env=child_environment(os.environ),
        )
        try:
            while child.poll() is None:
                if loop.time() > deadline:
                    raise RuntimeError(f"it took longer than {within_s:.0f} s")
                await asyncio.sleep(LOOK_S)
        finally:
            child.kill()
            child.wait()
        if child.returncode == 0:
            return
        output.seek(max(output.seek(0, os.SEEK_END) - OUTPUT_BYTES, 0))
        lines = output.read().decode(errors="replace").strip().split("\n")
    raise RuntimeError(f"exit code {child.returncode}, {lines[-1]}")


class PeerProcess:
    """A process of this host that is no child of this one.

    Args:
        descriptor: Descriptor of the process, which `close` closes.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    async def kill(self, what: str, *, within_s: float) -> None:
        """Kill the process, and wait until it has ended.

        Raises:
            DeadlineExceeded: The process has not ended in time, for example because it waits for a device;
                `what` names the wait in the error.
        """
        ended = asyncio.Event()
        loop = asyncio.get_running_loop()
        with suppress(ProcessLookupError):  # the process has ended, but its parent has not noticed yet
            signal.pidfd_send_signal(self._descriptor, signal.SIGKILL)
        loop.add_reader(self._descriptor, ended.set)
        try:
            async with Within(within_s, what):
                await ended.wait()
        finally:
            loop.remove_reader(self._descriptor)

    def close(self) -> None:
        """Close the descriptor."""
        os.close(self._descriptor)


def _kill_group(pid: int) -> None:
    """Kill all processes of a child's process group."""
    try:
        os.killpg(pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):  # the group is empty, or belongs to another user
        return


def child_environment(environment: Mapping[str, str], packages: str = PACKAGES) -> dict[str, str]:
    """Return the environment in which a child that runs `COMMAND` finds this process's packages.

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
