"""Roles on the nodes of a batch job, as a launcher: `async with AgentLauncher(...) as launcher`.

Each node has an *agent* (`launch/agent.py`), a process that the engine of the job has started. The agents
dial the driver; once all have arrived, the driver orders them to start roles. The end of an agent's link
counts as the loss of its node: the agent's roles are dead, and their next processes are on other nodes. Only
one of several controllers cannot move, because its address is fixed.
"""

import asyncio
import ipaddress
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from importlib.metadata import version
from types import TracebackType
from typing import Self

import msgspec

from adam_async.cluster.launcher import RoleSpec
from adam_async.cluster.networks import address_towards
from adam_async.cluster.parent_pipe import Orders
from adam_async.errors import AdamError, BindFailed, ConfigError, DeadlineExceeded, RunFailed, listed
from adam_async.launch.agent_messages import (
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
from adam_async.launch.hosts import Host, Placement
from adam_async.launch.ssh import has_peers
from adam_async.messages import Body, pack, unpack
from adam_async.run.config import Config
from adam_async.runtime.role_handle import RoleHandle
from transport import (
    Identity,
    Link,
    Listener,
    Message,
    Network,
    RemoteProtocolError,
    Secret,
    TcpNetwork,
    TransportError,
)
from transport.sockets import is_loopback, parse_tcp_address

logger = logging.getLogger(__name__)

HELLO_S = 10.0
"""Deadline of the first message of an agent, in seconds."""

LOST = 255
"""Exit code of a role whose node is lost; `ssh` has the same code for a lost connection."""

STATE = "@state"
"""Placeholder for the folder of a controller's state in the words of a role; each agent replaces it by its
own folder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gathering:
    """The agents that a driver waits for.

    Attributes:
        names: Their names, in the order in which roles are spread; the first is on the driver's machine.
        wait_s: Deadline of their arrival, in seconds.
        remedy: Advice in the error of a missing agent.
        folder: Working folder that all agents must have; empty: any folder.
        port_remedy: Advice in the error of a port in use.
    """

    names: tuple[str, ...]
    wait_s: float
    remedy: str
    folder: str = ""
    port_remedy: str = ""


class _Agent:
    """An agent that has arrived."""

    def __init__(self, hello: Hello, link: Link) -> None:
        self.hello = hello
        self.link = link
        self.roles: dict[int, AgentRole] = {}

    def send(self, body: Body) -> None:
        """Send a message, unless the link has ended. End a full link, because its agent does not read."""
        try:
            self.link.send_nowait(pack(body))
        except TransportError as error:
            logger.debug("%s: %s", self.link.peer.node, error)
            self.link.abort()


class AgentLauncher:
    """Starts roles through the agents of a batch job.

    Args:
        gathering: The agents, and the deadline of their arrival.
        token: Token of driver and agents, from which the agents derive the keys of the roles.
        bind: Address on which the driver listens for the agents.
        entropy: Source of random bytes, for handshakes, the driver's incarnation and ports of controllers.

    `async with` listens; `gathered` waits for the agents; the end of the block ends them.

    Raises:
        BindFailed: The address is not available.
    """

    silence_s = 0.0

    def __init__(
        self, gathering: Gathering, *, token: Secret, bind: str, entropy: Callable[[int], bytes]
    ) -> None:
        self._gathering = gathering
        self._bind = bind
        self._entropy = entropy
        self._identity = Identity(role=DRIVER, node=DRIVER, incarnation=int.from_bytes(entropy(7), "little"))
        self._network = TcpNetwork(token=token, entropy=entropy, rules=agent_table())
        self._agents: dict[str, _Agent] = {}
        self._hosts: dict[str, Host] = {}
        self._placement = Placement(())
        self._started = 0
        self._stack = AsyncExitStack()
        self._listener: Listener | None = None

    async def __aenter__(self) -> Self:
        self._all_arrived: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        async with AsyncExitStack() as stack:
            try:
                self._listener = await stack.enter_async_context(
                    self._network.listen(self._bind, self._identity, self._serve)
                )
            except OSError as error:
                why = error.strerror or str(error)
                raise BindFailed(self._bind, why, remedy=self._gathering.port_remedy) from None
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        code = 0 if error is None else error.exit_code if isinstance(error, AdamError) else 1
        for agent in self._agents.values():
            agent.send(Finish(code=code))
        await self._stack.aclose()

    @property
    def port(self) -> int:
        """Port at which the agents dial this process."""
        assert self._listener is not None, "enter the block first"
        return parse_tcp_address(self._listener.address)[1]

    async def gathered(self) -> None:
        """Wait for all agents.

        Raises:
            ConfigError: An agent has another version of the package, or another working folder.
            DeadlineExceeded: An agent did not arrive in time.
            RunFailed: See `give_up`.
        """
        gathering = self._gathering
        try:
            async with asyncio.timeout(gathering.wait_s):
                await asyncio.shield(self._all_arrived)
        except TimeoutError:
            missing = [name for name in gathering.names if name not in self._agents]
            arrived = f"{listed([*self._agents])} arrived" if self._agents else "none arrived"
            raise DeadlineExceeded(
                f"the agents of {listed(missing)}; {arrived}; {gathering.remedy}", gathering.wait_s
            ) from None
        await self._place()

    def give_up(self, reason: str) -> None:
        """End the wait for agents that cannot arrive any more."""
        if not self._all_arrived.done():
            self._all_arrived.set_exception(RunFailed(reason))
            self._all_arrived.exception()  # mark it as retrieved, in case no task waits for it

    async def _place(self) -> None:
        """Note the address at which other nodes dial each node."""
        agents = self._agents
        hosts = {name: agents[name].hello.host for name in self._gathering.names if name in agents}
        remote = next((host for host in hosts.values() if not is_loopback(host)), "")
        if remote:
            # An agent on the driver's machine may have dialled over loopback.
            own = parse_tcp_address(await address_towards(f"tcp://{_bracketed(remote)}:9"))[0]
            hosts = {name: own if is_loopback(host) else host for name, host in hosts.items()}
        self._hosts = {name: Host(name=name, address=host) for name, host in hosts.items()}
        self._placement = Placement([*self._hosts.values()])

    # --- the launcher ------------------------------------------------------------------------

    def start(self, spec: RoleSpec, group: asyncio.TaskGroup, on_line: Callable[[str], None]) -> "AgentRole":
        """Start a role on its node, or on another node if its node is lost. See `Launcher.start`."""
        host = self._placement.place(spec.role, spec.node, moves=not has_peers(spec))
        agent = self._agents.get(host.name)
        self._started += 1
        role = AgentRole(self._started, host.name, agent, spec.node, on_line)
        if agent is None:
            self._placement.note(host, answers=False)
            role.lose()
        else:
            agent.roles[role.number] = role
            share = max(1, agent.hello.cores // max(1, self._placement.workers_on(host)))
            orders = msgspec.structs.replace(msgspec.json.decode(spec.orders, type=Orders), token="")
            agent.send(
                StartRole(
                    number=role.number,
                    role=spec.role,
                    node=spec.node,
                    words=spec.words(bind=host.listens_on(0), threads=share),
                    environment=dict(spec.environment),
                    orders=msgspec.json.encode(orders),
                )
            )
        group.create_task(role.run(), name=f"launch/{spec.node}")
        return role

    async def prepare(self, config: Config, *, data_servers: int) -> int:
        """Return the threads of each worker if the options name them. See `Launcher.prepare`."""
        return 1 if config.record else config.threads

    async def controller_addresses(
        self, nodes: Sequence[str], network: Network, driver: Identity
    ) -> list[str]:
        """Return addresses on the controllers' nodes; several controllers get ports drawn at random."""
        return self._placement.controller_addresses(nodes, self._entropy)

    @asynccontextmanager
    async def state_folder(self, name: str) -> AsyncIterator[str]:
        """Yield the placeholder for the state folder; each agent removes its folder at its own end."""
        yield STATE

    # --- the agents --------------------------------------------------------------------------

    async def _serve(self, link: Link) -> None:
        """Take the messages of one agent until its link ends."""
        try:
            async with asyncio.timeout(HELLO_S):
                hello = unpack(await link.receive(), Hello)
            ipaddress.ip_address(hello.host)
        except TimeoutError:
            return
        except ValueError as error:
            raise RemoteProtocolError("message", f"host of an agent: {error}") from None
        name = link.peer.node
        if refusal := self._refusal_of(name, hello):
            await link.send(pack(Finish(code=ConfigError.exit_code, reason=refusal[:LINE_CHARACTERS])))
            return
        agent = self._agents[name] = _Agent(hello, link)
        if len(self._agents) == len(self._gathering.names) and not self._all_arrived.done():
            self._all_arrived.set_result(None)
        try:
            while True:
                _take(agent, await link.receive())
        finally:
            del self._agents[name]
            if name in self._hosts:
                self._placement.note(self._hosts[name], answers=False)
            for role in agent.roles.values():
                role.lose()

    def _refusal_of(self, name: str, hello: Hello) -> str:
        """Return the reason to refuse an agent; a reason in the setup of its node also ends the gathering."""
        if name not in self._gathering.names or name in self._agents or self._hosts:
            return f"the driver expects no further agent {name}"
        ours, folder, reason = version("adam-async"), self._gathering.folder, ""
        if hello.version != ours:
            reason = (
                f"{name} on {hello.machine} has adam-async {hello.version[:40]!r}, and the driver {ours!r}: "
                "install the same version"
            )
        elif folder and hello.folder != folder:
            reason = (
                f"{name} on {hello.machine} works in {hello.folder}, and the driver in {folder}, which that "
                "machine lacks: submit from a folder of a file system that all nodes share"
            )
        if reason and not self._all_arrived.done():
            self._all_arrived.set_exception(ConfigError(reason))
            self._all_arrived.exception()  # mark it as retrieved, in case no task waits for it
        return reason

    def __repr__(self) -> str:
        return f"<AgentLauncher {len(self._agents)} of {len(self._gathering.names)} agents>"


class AgentRole(RoleHandle):
    """One process of a role, a child of an agent.

    Attributes:
        number: Number of the process, unique in the run.
        name: Name of the agent.
    """

    def __init__(
        self, number: int, name: str, agent: _Agent | None, node: str, on_line: Callable[[str], None]
    ) -> None:
        super().__init__(node, on_line)
        self.number = number
        self.name = name
        self._agent = agent
        self._lost = False
        self._reported: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    @property
    def how(self) -> str:
        """The end of the process in words."""
        return f"its node {self.name} is lost" if self._lost else super().how

    async def run(self) -> int:
        """Wait for the end of the process; returns its exit code. See `RoleHandle.run`."""
        code = LOST
        try:
            code = await self._reported
        finally:
            self.kill()
            self._finish(code)
        return code

    def end(self) -> None:
        """Order the agent to close the role's stdin."""
        self._order(EndRole(number=self.number))

    def kill(self) -> None:
        """Order the agent to kill the role, unless it has ended."""
        self._order(KillRole(number=self.number))

    def report(self, code: int) -> None:
        """Note the exit code of the process."""
        if not self._reported.done():
            self._reported.set_result(code)

    def lose(self) -> None:
        """Note the loss of the node."""
        if not self._reported.done():
            self._lost = True
            self._reported.set_result(LOST)

    def _order(self, body: Body) -> None:
        ended = self._reported.done() and not self._reported.cancelled()
        if self._agent is not None and not ended:
            self._agent.send(body)

    def __repr__(self) -> str:
        return f"<AgentRole {self.node} on {self.name}>"


def _take(agent: _Agent, message: Message) -> None:
    """Take one message of an agent about its roles.

    Raises:
        RemoteProtocolError: The message is invalid, or is about no role of the agent.
    """
    match message.type:
        case RoleListens.__name__:
            listens = unpack(message, RoleListens)
            _role_of(agent, listens.number).note_address(listens.address)
        case RoleLine.__name__:
            line = unpack(message, RoleLine)
            _role_of(agent, line.number).note_line(line.text)
        case _:
            ended = unpack(message, RoleEnded)
            _role_of(agent, ended.number).report(ended.code)
            del agent.roles[ended.number]


def _role_of(agent: _Agent, number: int) -> AgentRole:
    role = agent.roles.get(number)
    if role is None:
        raise RemoteProtocolError("message", f"a message about role {number}, which is none of the sender")
    return role


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
