"""Child processes of this process over loopback TCP, as a launcher."""

import asyncio
import os
import stat
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path

from adam_async.cluster.external_data import address_for
from adam_async.cluster.launcher import RoleSpec
from adam_async.cluster.networks import LOOPBACK
from adam_async.errors import ConfigError
from adam_async.run.config import Config
from adam_async.run.role_memory import asked_bytes, check_room, read_memory
from adam_async.runtime.child_process import ChildProcess
from adam_async.runtime.disk import Disk
from adam_async.runtime.machine import available_bytes, usable_cores
from adam_async.runtime.network_namespaces import NamespaceNetwork
from transport import Identity, Link, Network

FOLDER_PREFIX = "adam-async-controllers-"
"""Prefix of the folder with the state of a cluster's controllers."""

LOCK = "lock"
"""Name of the lock file in the folder of a cluster's controllers; the cluster holds the lock until the
cluster ends."""


class LocalLauncher:
    """Starts roles as child processes; they end with this process, however it ends (see `parent_pipe`).

    Args:
        environment: Environment of this process; its TMPDIR has the state of the controllers.
        hosts: Addresses of standalone data servers, which must reach the controllers.
        network: Hosts of the parameter servers, by node id; None: all roles share the loopback interface.
    """

    silence_s = 0.0

    def __init__(
        self,
        environment: Mapping[str, str],
        *,
        hosts: Sequence[str] = (),
        network: NamespaceNetwork | None = None,
    ) -> None:
        self._temporary = Path(environment.get("TMPDIR") or "/tmp")
        self._hosts = hosts
        self._network = network

    def start(self, spec: RoleSpec, group: asyncio.TaskGroup, on_line: Callable[[str], None]) -> ChildProcess:
        """Start a role as a child. See `Launcher.start`."""
        network = self._network if spec.role == "ps" else None
        bind = f"tcp://{network.address_of(spec.node)}:0" if network is not None else LOOPBACK
        child = ChildProcess(
            spec.node,
            spec.words(bind=bind, threads=usable_cores()),
            orders=spec.orders,
            environment=spec.environment,
            on_line=on_line,
            within=network.within(spec.node) if network is not None else (),
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
        bind = await address_for(self._hosts) if self._hosts else LOOPBACK
        if self._network is not None:
            bind = f"tcp://{self._network.address}:0"
        if len(nodes) == 1:
            return [bind]
        return await free_addresses(network, driver, bind, count=len(nodes))

    @asynccontextmanager
    async def state_folder(self, name: str) -> AsyncIterator[str]:
        """Make a folder for the state of the controllers, which restarts read; remove it after the block.

        The block also removes the folders of clusters whose process was killed; the locks of these folders
        are free. A folder is locked before it gets its name, so no cluster removes the folder of a starting
        cluster.
        """
        folder = self._temporary / f"{FOLDER_PREFIX}{name}"
        made = folder.with_name(f".{folder.name}")
        async with Disk(name="controllers") as disk, AsyncExitStack() as stack:
            try:
                try:
                    await _remove_left_behind(disk, self._temporary)
                    await disk.run(_make_own_folder, made)
                    await stack.enter_async_context(disk.hold(made / LOCK))
                    await disk.rename(made, folder)
                except OSError as error:
                    raise ConfigError(
                        f"the logs of the controllers cannot be kept in {self._temporary}: "
                        f"{error.strerror or error}; let TMPDIR name another folder"
                    ) from error
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
