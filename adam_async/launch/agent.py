"""The agent of one node of a batch job: it starts roles as its children on the orders of the driver.

The agent dials the driver, and runs until the link to the driver ends. It forwards the lines and the ends of
its roles. When the link ends, for any reason, the agent kills the remaining roles. A driver ends all roles in
order before it ends its agents, so roles remain only if the driver is lost.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import version

import msgspec

from adam_async.cluster.local_launcher import LocalLauncher
from adam_async.cluster.networks import address_towards
from adam_async.cluster.parent_pipe import Orders
from adam_async.errors import ConfigError, RoleDied, RoleUnreachable
from adam_async.launch.agent_messages import (
    AGENT,
    DRIVER,
    LINE_CHARACTERS,
    EndRole,
    Finish,
    Hello,
    KillRole,
    RoleEnded,
    RoleLine,
    RoleListens,
    StartRole,
    agent_table,
)
from adam_async.launch.agents import STATE
from adam_async.messages import Body, pack, unpack
from adam_async.run.token_file import derived_text
from adam_async.runtime.child_process import ChildProcess
from transport import (
    DialFailed,
    Identity,
    Link,
    LinkBroken,
    LinkClosed,
    Message,
    RemoteProtocolError,
    TcpNetwork,
    TransportError,
    WouldBlock,
)
from transport.sockets import parse_tcp_address

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentSettings:
    """Settings of an agent.

    Attributes:
        name: Name of the agent, one of the names that the driver expects.
        driver: Address of the driver.
        token: Root token of driver and agents.
        machine: Name of the machine.
        folder: Working folder.
        cores: Number of cores for the roles of the agent.
        environment: Environment of the roles, without options and token.
        wait_s: Deadline of the driver's first answer, in seconds.
        remedy: Advice in the error of a driver that does not answer.
        entropy: Random bytes.
        package: Version of the package.
    """

    name: str
    driver: str
    token: str
    machine: str
    folder: str
    cores: int
    environment: Mapping[str, str]
    wait_s: float
    remedy: str
    entropy: Callable[[int], bytes]
    package: str = version("adam-async")


class DriverLost(RoleDied):
    """The driver of an agent is lost."""


class Agent:
    """The agent of one node. See the module."""

    def __init__(self, settings: AgentSettings) -> None:
        self._settings = settings
        self._children: dict[int, ChildProcess] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._left_out = 0

    async def run(self) -> int:
        """Run roles until the driver ends the run, and return the exit code of the run.

        Raises:
            ConfigError: The driver refuses this agent.
            HandshakeRejected: The driver has another token.
            DriverLost: The link ended without a last message.
            RoleUnreachable: The driver does not answer.
        """
        settings = self._settings
        identity = Identity(
            role=AGENT, node=settings.name, incarnation=int.from_bytes(settings.entropy(7), "little")
        )
        network = TcpNetwork(token=settings.token.encode(), entropy=settings.entropy, rules=agent_table())
        try:
            link = await network.dial(settings.driver, identity, timeout_s=settings.wait_s, peer_role=DRIVER)
        except DialFailed as error:
            raise RoleUnreachable(
                "the driver", settings.driver, f"{error.reason}; {settings.remedy}"
            ) from None
        async with link, LocalLauncher(settings.environment).state_folder(settings.entropy(8).hex()) as state:
            return await self._serve(link, state)

    async def _serve(self, link: Link, state: str) -> int:
        """Follow the orders of the driver until its last message, then kill the remaining roles."""
        settings = self._settings
        finish, why = None, ""
        async with asyncio.TaskGroup() as group:
            try:
                hello = Hello(
                    version=settings.package,
                    machine=settings.machine[:160],
                    folder=settings.folder[:4096],
                    host=parse_tcp_address(await address_towards(settings.driver))[0],
                    cores=settings.cores,
                )
                await link.send(pack(hello))
                while finish is None:
                    finish = self._obey(await link.receive(), link, state, group)
            except (LinkClosed, LinkBroken, RemoteProtocolError) as error:
                why = str(error)
            for task in self._tasks:
                task.cancel()
        if finish is None:
            raise DriverLost("the driver", f"the connection to it ended: {why}")
        if finish.reason:
            raise ConfigError(finish.reason)
        return finish.code

    def _obey(self, message: Message, link: Link, state: str, group: asyncio.TaskGroup) -> Finish | None:
        """Obey one order; return the order if it is `Finish`, the last message, else None.

        Raises:
            RemoteProtocolError: The order is invalid.
        """
        match message.type:
            case StartRole.__name__:
                self._start(unpack(message, StartRole), link, state, group)
            case EndRole.__name__:
                # An ended role needs no order.
                if child := self._children.get(unpack(message, EndRole).number):
                    child.end()
            case KillRole.__name__:
                if child := self._children.get(unpack(message, KillRole).number):
                    child.kill()
            case _:
                return unpack(message, Finish)
        return None

    def _start(self, order: StartRole, link: Link, state: str, group: asyncio.TaskGroup) -> None:
        settings, number = self._settings, order.number
        try:
            orders = msgspec.json.decode(order.orders, type=Orders)
            keys = derived_text(settings.token, order.role)
        except (msgspec.DecodeError, ConfigError) as error:
            raise RemoteProtocolError("message", f"malformed orders of {order.node}: {error}") from None
        orders = msgspec.structs.replace(orders, token=keys, ignores_sigterm=True)
        child = ChildProcess(
            order.node,
            [word.replace(STATE, state, 1) if word.startswith(STATE) else word for word in order.words],
            orders=msgspec.json.encode(orders) + b"\n",
            environment={**settings.environment, **order.environment},
            on_line=lambda line: self._forward(link, number, line.removeprefix(f"{order.node} | ")),
        )
        self._children[number] = child
        task = group.create_task(self._run(link, number, child), name=f"agent/{order.node}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run(self, link: Link, number: int, child: ChildProcess) -> None:
        """Run a role, and report its address and its end."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._report_address(link, number, child), name=f"{child.node}/address")
            code = await child.run()
        del self._children[number]
        await _send(link, RoleEnded(number=number, code=code))

    async def _report_address(self, link: Link, number: int, child: ChildProcess) -> None:
        with suppress(RoleDied):  # `_run` reports the end
            await _send(link, RoleListens(number=number, address=await child.address))

    def _forward(self, link: Link, number: int, line: str) -> None:
        """Forward a line; leave it out if the driver does not read as fast as the roles write."""
        text = f"[{self._left_out} lines left out] {line}" if self._left_out else line
        try:
            link.send_nowait(pack(RoleLine(number=number, text=text[:LINE_CHARACTERS])))
            self._left_out = 0
        except WouldBlock:
            self._left_out += 1
        except TransportError as error:
            logger.debug("a line was lost with the link: %s", error)

    def __repr__(self) -> str:
        return f"<Agent {self._settings.name} with {len(self._children)} roles>"


async def _send(link: Link, body: Body) -> None:
    """Send a message; drop it if the link has ended, because the agent then ends too."""
    with suppress(LinkClosed, LinkBroken, RemoteProtocolError):
        await link.send(pack(body))
