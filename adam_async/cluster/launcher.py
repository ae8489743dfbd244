"""The interface between a cluster and the engine that starts its processes.

A cluster decides which roles run, and whether a lost role may come back (`cluster/supervision.py`). A
launcher decides on which machine a role runs, and starts its process there:

    async with asyncio.TaskGroup() as group:
        spec = RoleSpec(role="ps", node="ps-0", arguments=("--controller", found), ...)
        ps = launcher.start(spec, group, print)
        print(await ps.address)                      # its first line
        await ps.ended.wait()                        # then: ps.code, ps.how, ps.last_lines

The `LocalLauncher` starts child processes of this process, over loopback TCP.
"""

import asyncio
import os
import stat
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from adam_async.cluster.networks import LOOPBACK, address_towards
from adam_async.errors import ConfigError, failing_as
from adam_async.run.config import Config
from adam_async.run.memory_sizes import asked_bytes, check_room, read_memory
from adam_async.runtime.child_process import ChildProcess
from adam_async.runtime.disk import Disk
from adam_async.runtime.machine import available_bytes, usable_cores
from adam_async.runtime.role_handle import RoleHandle
from transport import Identity, Link, Network


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartPolicy:
    """Limits on restarts of a role. The state of the run decides whether the role may come back at all.

    Attributes:
        most: Maximum number of restarts in a row.
        sound_s: Time of service in seconds after which the count of restarts begins anew.
    """

    most: int = 5
    sound_s: float = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleSpec:
    """One role of a cluster, for any launcher.

    Attributes:
        role: ``controller``, ``ps``, ``data`` or ``worker``.
        node: Node id, unique in the cluster.
        arguments: Options of the role's command, except those of the other attributes.
        orders: First line on the process's stdin, with the role's keys. A machine's other users can read a
            process's arguments and environment, but not this line.
        environment: Variables of the process. A launcher on other machines adds these to the variables there.
        bind: Address to listen on; empty: any free port at its machine's address.
        threads: Compute threads of a worker; 0: its share of its machine's cores.
        memory_bytes: Memory that the engine reserves for the process, if it can; 0: the engine decides.
        restart: Limits of its restarts.
    """

    role: str
    node: str
    arguments: tuple[str, ...]
    orders: bytes
    environment: Mapping[str, str]
    bind: str = ""
    threads: int = 0
    memory_bytes: int = 0
    restart: RestartPolicy = field(default_factory=RestartPolicy)

    def words(self, *, bind: str, threads: int, copies_bind: str = "") -> tuple[str, ...]:
        """Return the words after ``adam-async`` that start the role.

        Args:
            bind: Address to listen on if the attribute `bind` is empty.
            threads: Number of compute threads if the attribute `threads` is 0.
            copies_bind: Address on which a parameter server listens for the other servers; empty: the address
                to listen on.
        """
        words: tuple[str, ...] = (self.role, "--id", self.node, "--supervised", "--bind", self.bind or bind)
        if self.role == "worker":
            words = (*words, "--threads", str(self.threads or threads))
        if self.role == "ps" and copies_bind:
            words = (*words, "--copies-bind", copies_bind)
        return (*words, *self.arguments)


class Launcher(Protocol):
    """An engine that starts the processes of a cluster, on one machine or on several.

    Attributes:
        silence_s: Time in seconds without a byte from the launcher after which a role ends; 0: no limit.
    """

    silence_s: float

    def start(self, spec: RoleSpec, group: asyncio.TaskGroup, on_line: Callable[[str], None]) -> RoleHandle:
        """Start a role, or start it again after its process has ended, perhaps on another machine.

        Args:
            spec: The role.
            group: Parent of the task that lasts as long as the process.
            on_line: Called with each line of its stderr.
        """

    async def prepare(self, config: Config, *, data_servers: int) -> int:
        """Reserve room for the roles of a run, which may take time; called before all other methods.

        Args:
            config: The run.
            data_servers: Number of data servers that the cluster will start; 0 if others serve the images.

        Returns:
            Compute threads of each worker; 0: the launcher decides worker by worker.

        Raises:
            ConfigError: The workers have too many threads for their machine, or the roles ask for more memory
                than it has.
            DeadlineExceeded: There was no room in time.
        """

    async def controller_addresses(
        self, nodes: Sequence[str], network: Network, driver: Identity
    ) -> list[str]:
        """Return each controller's address: with port 0 for one controller, with free ports for several.

        Args:
            nodes: Node ids of the controllers.
            network: Network of the cluster's driver.
            driver: Identity of the driver.

        Raises:
            ConfigError: A controller would have no address that others can dial.
        """

    def state_folder(self, name: str) -> AbstractAsyncContextManager[str]:
        """Return a folder for the controllers' state on their machines; the block removes it at its end.

        Args:
            name: Unique name of the cluster.
        """


FOLDER_PREFIX = "adam-async-controllers-"
"""Prefix of the folder with the state of a cluster's controllers."""

LOCK = "lock"
"""Name of the lock file in the folder of a cluster's controllers; the cluster holds the lock until the
cluster ends."""


class LocalLauncher:
    """Starts roles as child processes; they end with this process, however it ends (see `parent_pipe`).

    Args:
        environment: Environment of this process; its TMPDIR has the controllers' state.
        hosts: Addresses of standalone data servers, which must reach the controllers.
    """

    silence_s = 0.0

    def __init__(self, environment: Mapping[str, str], *, hosts: Sequence[str] = ()) -> None:
        self._temporary = Path(environment.get("TMPDIR") or "/tmp")
        self._hosts = hosts

    def start(self, spec: RoleSpec, group: asyncio.TaskGroup, on_line: Callable[[str], None]) -> ChildProcess:
        """Start a role as a child. See `Launcher.start`."""
        child = ChildProcess(
            spec.node,
            spec.words(bind=LOOPBACK, threads=usable_cores()),
            orders=spec.orders,
            environment=spec.environment,
            on_line=on_line,
        )
        group.create_task(child.run(), name=f"processes/{spec.node}/run")
        return child

    async def prepare(self, config: Config, *, data_servers: int) -> int:
        """Check the memory of this machine, and return the threads of each worker. See `Launcher.prepare`."""
        counts = {
            "controller": config.controllers,
            "data": data_servers,
            "ps": config.servers,
            "worker": config.workers,
        }
        roles = (role for role, count in counts.items() for _ in range(count))
        asked = asked_bytes(read_memory(config.memory), roles)
        check_room("this machine", asked, available_bytes())
        return config.threads_per_worker(usable_cores())

    async def controller_addresses(
        self, nodes: Sequence[str], network: Network, driver: Identity
    ) -> list[str]:
        """Return addresses that all roles reach. See `Launcher.controller_addresses`."""
        bind = await address_towards(",".join(self._hosts)) if self._hosts else LOOPBACK
        if len(nodes) == 1:
            return [bind]
        return await free_addresses(network, driver, bind, count=len(nodes))

    @asynccontextmanager
    async def state_folder(self, name: str) -> AsyncIterator[str]:
        """Make a folder for the controllers' state, which restarts read; remove it after the block.

        The block also removes the folders of clusters whose process was killed; the locks of these folders
        are free. A folder is locked before it gets its name, so no cluster removes the folder of a starting
        cluster.
        """
        folder = self._temporary / f"{FOLDER_PREFIX}{name}"
        made = folder.with_name(f".{folder.name}")
        async with Disk(name="controllers") as disk, AsyncExitStack() as stack:
            what = f"the logs of the controllers cannot be kept in {self._temporary}"
            try:
                with failing_as(ConfigError, what, "; let TMPDIR name another folder"):
                    await _remove_left_behind(disk, self._temporary)
                    await disk.run(_make_own_folder, made)
                    await stack.enter_async_context(disk.hold(made / LOCK))
                    await disk.rename(made, folder)
                yield str(folder)
            finally:
                for each in (made, folder):
                    with suppress(OSError):  # the next cluster tries again
                        await disk.remove_folder(each)


async def free_addresses(network: Network, driver: Identity, bind: str, *, count: int) -> list[str]:
    """Return free addresses for controllers, which need each other's addresses before they listen."""

    async def refuse(link: Link) -> None:
        link.abort()

    async with AsyncExitStack() as stack:
        listeners = [
            await stack.enter_async_context(network.listen(bind, driver, refuse)) for _ in range(count)
        ]
        return [listener.address for listener in listeners]


def _make_own_folder(folder: Path) -> None:
    os.makedirs(folder, mode=0o700)


async def _remove_left_behind(disk: Disk, place: Path) -> None:
    """Remove the folders of ended clusters, except folders of other users and unreadable ones."""
    names: list[str] = []
    with suppress(OSError):  # a user may be able to write into a folder and not to list it
        names = await disk.names(place)
    for name in names:
        folder = place / name
        if not name.removeprefix(".").startswith(FOLDER_PREFIX) or not await disk.run(_is_own_folder, folder):
            continue
        with suppress(OSError):  # another process has the lock, or removes the folder now
            if LOCK in await disk.names(folder):
                async with disk.hold(folder / LOCK):
                    await disk.remove_folder(folder)


def _is_own_folder(folder: Path) -> bool:
    try:
        found = os.lstat(folder)
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()
