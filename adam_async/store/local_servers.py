"""The servers of stores in the caller's loop: one controller and one parameter server, over local links.

`ParameterStore.open("local",...)` uses the servers of the running loop: the first open store starts them, and
the end of the last store ends them with all their stores. Each folder (`dir`) has servers of its own, which
keep their stores there, and so has each store without a name, whose memory is free when it is closed.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from weakref import WeakKeyDictionary

from adam_async.cluster.roles.controller import controller
from adam_async.cluster.roles.parameter_server import parameter_server
from adam_async.cluster.roles.place import Place
from adam_async.messages import role_table
from adam_async.model.rules import UserRule
from adam_async.run.config import Waits
from adam_async.run.user_rules import RuleSource
from adam_async.runtime.clock import system_entropy
from transport import BufferPool, LocalNetwork, Network


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ServerAccess:
    """Access to the servers of stores.

    Attributes:
        network: Links to the servers.
        controllers: Addresses of the controllers, joined by commas.
        entropy: Returns random bytes, for identities and sessions.
    """

    network: Network
    controllers: str
    entropy: Callable[[int], bytes] = system_entropy


class _LocalServers:
    """The servers of one loop and one folder, while at least one store uses them.

    Args:
        folder: Folder in which the servers keep their stores; None: in memory only.
    """

    def __init__(self, folder: Path | None) -> None:
        self.users = 0
        self.rules = RuleSource()
        self._folder = folder
        self._access: asyncio.Future[ServerAccess] | None = None
        self._task: asyncio.Task[None] | None = None
        """Task of the servers, also while they end; None before the first start."""
        self._unused = asyncio.Event()

    @property
    def have_ended(self) -> bool:
        """Whether no store uses the servers, and they have ended."""
        return not self.users and (self._task is None or self._task.done())

    async def enter(self) -> ServerAccess:
        """Return the access for one more store; the first one starts the servers."""
        self.users += 1
        if self._access is None:
            self._access = asyncio.get_running_loop().create_future()
            self._unused = asyncio.Event()
            # The store that starts the servers may close before the others, so its groups must not own
            # this task: the last `leave` waits for it.
            run = self._run(self._access, self._unused, self._task)
            self._task = asyncio.create_task(run, name="local-servers")
        try:
            return await asyncio.shield(self._access)
        except BaseException:
            await self.leave()
            raise

    async def leave(self) -> None:
        """Remove one store from the count; after the last store, end the servers and wait for them."""
        self.users -= 1
        if not self.users and self._access is not None:
            assert self._task is not None
            self._access = None
            self._unused.set()
            await asyncio.shield(self._task)

    async def _run(
        self, access: "asyncio.Future[ServerAccess]", unused: asyncio.Event, before: asyncio.Task[None] | None
    ) -> None:
        """Run a controller and a server until no store uses them; `access` gets the access or an error.

        The task waits first for `before`, the task of the earlier servers, which may still hold the folder.
        """
        network, buffers, waits = LocalNetwork(rules=role_table()), BufferPool(), Waits()
        try:
            if before is not None:
                await asyncio.wait([before])
            place = Place(
                node="controller",
                bind="local://",
                network=network,
                buffers=buffers,
                waits=waits,
                entropy=system_entropy,
            )
            async with controller(place) as leader:
                place = replace(place, node="ps-0", controller=leader.address)
                async with parameter_server(place, folder=self._folder, rules=self.rules) as server:
                    await server.joined()
                    access.set_result(ServerAccess(network=network, controllers=leader.address))
                    await unused.wait()
        except BaseException as error:
            if access.done():
                raise
            access.set_exception(error)


_OF_LOOP: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[Path | str | None, _LocalServers]] = (
    WeakKeyDictionary()
)
"""Servers of each loop: by their folder, or by the name of the one store that has them, or under None."""


@asynccontextmanager
async def local_servers(
    folder: Path | None = None, name: str = "", *, is_own: bool = False, rules: Sequence[type[UserRule]] = ()
) -> AsyncIterator[ServerAccess]:
    """Use the servers of the running loop; the first user starts them, and the last user ends them.

    Args:
        folder: Folder in which the servers keep their stores; None: in memory only.
        name: Name of the store.
        is_own: Whether the store has servers of its own. Other clients find it there by its name.
        rules: Rules of the user that the servers may apply from now on.
    """
    loop = asyncio.get_running_loop()
    of_loop = _OF_LOOP.setdefault(loop, {})
    key = name if is_own or (folder is None and name in of_loop) else folder
    servers = of_loop.setdefault(key, _LocalServers(folder))
    try:
        for rule in rules:
            servers.rules.allow(rule)
        access = await servers.enter()
        try:
            yield access
        finally:
            await servers.leave()
    finally:
        # The servers refer to the loop, which would otherwise stay for ever.
        if servers.have_ended and of_loop.get(key) is servers:
            del of_loop[key]
        if not of_loop and _OF_LOOP.get(loop) is of_loop:
            del _OF_LOOP[loop]
