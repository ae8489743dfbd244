"""The interface between a cluster and the engine that starts its processes.

A cluster decides which roles run, and whether a lost role may come back (`cluster/supervision.py`). A
launcher decides on which machine a role runs, and starts its process there:

    async with asyncio.TaskGroup() as group:
        spec = RoleSpec(role="ps", node="ps-0", arguments=("--controller", found), ...)
        ps = launcher.start(spec, group, print)
        print(await ps.address)                      # its first line
        await ps.ended.wait()                        # then: ps.code, ps.how, ps.last_lines
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Protocol

from adam_async.run.config import Config
from adam_async.run.image_size import Size
from adam_async.runtime.role_handle import RoleHandle
from transport import Identity, Network


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartPolicy:
    """Limits of the restarts of a role. The state of the run decides whether the role may come back at all.

    Attributes:
        most: Maximum number of restarts in a row.
        sound_s: Time of service after which the count of restarts begins anew, in seconds.
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
        orders: First line on the stdin of the process, with the keys of the role. Other users of a machine
            can read the arguments and the environment of a process, but not this line.
        environment: Variables of the process. A launcher on other machines adds these to the variables there.
        bind: Address to listen on; empty: any free port at the address of its machine.
        threads: Compute threads of a worker; 0: its share of the cores of its machine.
        memory_bytes: Memory that the engine reserves for the process, if it can reserve memory; 0: the engine
            decides.
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


def data_words(config: Config, *, cache: str, size: Size | None) -> tuple[str, ...]:
    """Return the options of a data server for the images of a run.

    Args:
        config: The run.
        cache: Memory of this data server for images.
        size: Columns and rows of encoded images; None: the images decide.
    """
    words: tuple[str, ...] = ("--data", config.data, "--damaged", config.damaged, "--cache", cache)
    if config.spill:
        words = (*words, "--spill", config.spill)
    return (*words, "--size", f"{size[1]}x{size[0]}") if size else words


class Launcher(Protocol):
    """An engine that starts the processes of a cluster, on one machine or on several.

    Attributes:
        silence_s: Time without a byte from the launcher after which a role ends, in seconds; 0: no limit.
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
        """Return the address of each controller: with port 0 for one controller, with free ports for several.

        Args:
            nodes: Node ids of the controllers.
            network: Network of the cluster's driver.
            driver: Identity of the driver.

        Raises:
            ConfigError: A controller would have no address that others can dial.
        """

    def state_folder(self, name: str) -> AbstractAsyncContextManager[str]:
        """Return a folder for the state of the controllers on their machines; the block removes it at its
        end.

        Args:
            name: Unique name of the cluster.
        """
