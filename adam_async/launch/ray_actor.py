"""The actor of a role on a node of Ray: it runs the role's command as its child, and relays its output.

The child ends with the actor, however the actor ends (see `cluster/parent_pipe.py`). Ray keeps the lines that
the actor writes to stderr in its logs.
"""

import asyncio
import os
import shutil
import sys
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import suppress
from importlib.metadata import version

from adam_async.errors import ConfigError, RoleDied
from adam_async.run.option_sources import for_children
from adam_async.runtime.child_process import ChildProcess
from adam_async.runtime.kernel_cache import user_cache

CACHE = "~/.cache/adam-async"
"""Beginning of a path that stands for the user's cache of the actor's node."""

NODE_ADDRESS = "tcp://RAY-NODE:0"
"""Word in a command that is replaced by the address of the actor's node, with any free port. The launcher
does not know that address."""

MOST_EVENTS = 1000
"""Maximum number of events that wait for the launching process; further lines of the role are left out."""

Event = tuple[str, str]
"""``("placed", host)``, ``("address", address of the role)`` or ``("line", line of its stderr)``."""


class RoleActor:
    """One role. `run` lasts as long as the role, and `events` yields its events."""

    def __init__(self) -> None:
        self._events: asyncio.Queue[Event | None] = asyncio.Queue()
        self._left_out = 0
        self._child: ChildProcess | None = None
        self._ends = False

    async def run(
        self, node: str, words: Sequence[str], orders: bytes, environment: Mapping[str, str], package: str
    ) -> int:
        """Run ``adam-async WORDS`` as a child, and return its exit code.

        Args:
            node: Node id of the role.
            words: Arguments; `NODE_ADDRESS` and `CACHE` mean the address and the user's cache of this node.
            orders: First line on the child's stdin.
            environment: Variables in addition to those of this node.
            package: Version of the package in the launching process.
        """
        address, host = own_node()
        self._events.put_nowait(("placed", host))
        try:
            check_version(package, host)
            words = own_words(words, address)
            child = self._child = ChildProcess(
                node,
                words,
                orders=orders,
                environment={**for_children(os.environ), **environment},
                on_line=self._forward,
            )
            if self._ends:
                child.end()
            async with asyncio.TaskGroup() as group:
                group.create_task(self._report_address(child), name=f"{node}/address")
                return await child.run()
        except ConfigError as error:
            self._forward(f"{node} | adam-async: {error}")
            return ConfigError.exit_code
        finally:
            self._events.put_nowait(None)

    async def events(self) -> AsyncGenerator[Event, None]:
        """Yield the events of the role until its end."""
        while (event := await self._events.get()) is not None:
            yield event

    async def end(self) -> None:
        """Ask the child to end: close its stdin, now or as soon as the child starts."""
        self._ends = True
        if self._child is not None:
            self._child.end()

    async def _report_address(self, child: ChildProcess) -> None:
        with suppress(RoleDied):  # the exit code reports the end, too
            self._events.put_nowait(("address", await child.address))

    def _forward(self, line: str) -> None:
        """Forward a line; leave it out if the launching process reads more slowly than the role writes."""
        sys.stderr.write(f"{line}\n")
        if self._events.qsize() >= MOST_EVENTS:
            self._left_out += 1
            return
        if self._left_out:
            self._events.put_nowait(("line", f"{self._left_out} lines are left out"))
            self._left_out = 0
        self._events.put_nowait(("line", line))


def own_node() -> tuple[str, str]:
    """Return the address for this node's roles, and its host's name."""
    import ray

    own = ray.get_runtime_context().get_node_id()
    found = next(node for node in ray.nodes() if node["NodeID"] == own)
    name = found["NodeManagerAddress"]
    return (f"tcp://[{name}]:0" if ":" in name else f"tcp://{name}:0"), found["NodeManagerHostname"]


def own_words(words: Sequence[str], address: str) -> list[str]:
    """Return the words of a command with the address and the user's cache of this node."""
    return [address if word == NODE_ADDRESS else own_path(word) for word in words]


def own_path(path: str) -> str:
    """Return a path with the user's cache of this node in the place of `CACHE`."""
    return path.replace(CACHE, str(user_cache(os.environ)), 1) if path.startswith(f"{CACHE}/") else path


def check_version(package: str, host: str) -> None:
    """Check that this node has the launcher's version of the package.

    Raises:
        ConfigError: The node has another version.
    """
    if (own := version("adam-async")) != package:
        raise ConfigError(
            f"node {host} of Ray has adam-async {own!r}, and the launching process {package!r}: install the "
            "same version on all nodes"
        )


def remove_folder(folder: str) -> None:
    shutil.rmtree(own_path(folder), ignore_errors=True)
