"""Roles as actors of a Ray cluster: `RayLauncher` as a launcher, `RayCluster` as a cluster of a program.

Ray places the actors: each kind of role except controllers has a placement group, and each role a bundle in
it. An actor runs the command of its role as a child process (`launch/ray_actor.py`). Ray never restarts an
actor, because only the cluster's supervisor knows whether a role may come back
(docs/decisions/0036-roles-as-ray-actors.md). A restarted role is a new actor in the same bundle. Ray moves
the bundles of a lost node to other nodes as soon as these have room. A lost node's role waits for that room,
and the run continues without the role if possible.

The actors end with the launching process: Ray kills the actors of an ended driver.

`RayConnection` connects this process to a Ray cluster; a thread makes Ray's blocking calls.
"""

import asyncio
import logging
import math
import os
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from types import TracebackType
from typing import Any, Self

from adam_async.cluster.launcher import RoleSpec
from adam_async.cluster.processes import ProcessCluster
from adam_async.errors import (
    AdamError,
    ConfigError,
    DeadlineExceeded,
    RoleUnreachable,
    first_cause,
    install_command,
)
from adam_async.launch.hosts import random_port
from adam_async.launch.ray_actor import CACHE, NODE_ADDRESS, RoleActor, remove_folder
from adam_async.launch.ray_resources import (
    KINDS,
    RaySettings,
    actor_options,
    ask_text,
    full_ask,
    largest_share,
    shortage_text,
    with_memory,
    without,
)
from adam_async.launch.settings import Training
from adam_async.run.config import Config
from adam_async.run.memory_sizes import read_memory
from adam_async.runtime.blocking_thread import BlockingThread
from adam_async.runtime.child_process import child_environment
from adam_async.runtime.clock import Within, system_entropy
from adam_async.runtime.role_handle import CUT_OFF, RemoteRole
from transport import Identity, Network

OLDEST = (2, 60)
"""Oldest version of Ray that this package's tests use."""

CONNECT_S = 20.0
"""Deadline of an attempt to join a Ray cluster, in seconds."""

START_S = 60.0
"""Deadline in seconds for starting or ending this process's Ray cluster."""

CALL_S = 30.0
"""Deadline of a call to the head node of Ray, in seconds."""

STORE_BYTES = 80 << 20
"""Memory in bytes for objects of this process's Ray cluster: near Ray's minimum, because the roles put no
objects there."""


class RayConnection:
    """Joins a Ray cluster, or starts one: `async with RayConnection("auto", entropy) as ray`.

    If the program has joined a cluster before the block, the block uses that connection with ``auto``, and
    keeps it open.

    Args:
        address: See `RaySettings.address`.
        entropy: Random bytes for the token of its own cluster.

    Raises:
        ConfigError: Ray is missing or too old, the cluster refuses this process, or the program has joined
            another cluster.
        RoleUnreachable: The address does not answer.
    """

    def __init__(self, address: str, entropy: Callable[[int], bytes]) -> None:
        self.address = address
        self._entropy = entropy
        self._thread = BlockingThread("ray")
        self._owns = False

    async def __aenter__(self) -> Self:
        try:
            await self._open()
        except BaseException:
            self._thread.end()
            raise
        return self

    async def __aexit__(self, *exc: object) -> None:
        try:
            if self._owns:
                await self.call("Ray to end", require_ray().shutdown, timeout_s=START_S)
        finally:
            self._thread.end()

    async def call(
        self,
        what: str,
        function: Callable[..., Any],
        *arguments: Any,
        timeout_s: float = CALL_S,
        **named: Any,
    ) -> Any:
        """Call a blocking function of Ray on the thread, and return its result.

        Raises:
            DeadlineExceeded: The call took too long; the call continues, and further calls wait.
        """
        loop = asyncio.get_running_loop()
        async with Within(timeout_s, what):
            return await loop.run_in_executor(self._thread, partial(function, *arguments, **named))

    async def _open(self) -> None:
        if "ray" not in sys.modules:  # Ray reads these variables at its import
            for name, value in self._variables().items():
                os.environ.setdefault(name, value)
        ray = await self.call("the import of Ray", require_ray)
        if ray.is_initialized():
            if self.address != "auto":
                raise ConfigError(
                    f"this program has joined the Ray cluster at {ray.get_runtime_context().gcs_address}, "
                    f"and --address is {self.address}: give auto to use it"
                )
            return
        logging.getLogger("ray").setLevel(logging.CRITICAL)
        options: dict[str, Any] = {"log_to_driver": False, "configure_logging": False}
        if self.address == "local":
            options |= {"include_dashboard": False, "object_store_memory": STORE_BYTES}
        else:
            options["address"] = await self._probe()
        # Set first: a failed start may leave processes.
        self._owns = True
        try:
            await self.call("Ray to start", ray.init, timeout_s=START_S, **options)
        except BaseException:
            with suppress(DeadlineExceeded):  # the start that takes too long has the only thread
                await self.call("Ray to end", ray.shutdown, timeout_s=START_S)
            raise

    def _variables(self) -> dict[str, str]:
        """Return settings of Ray for a program that uses Ray only for this launch."""
        # Ray would print the losses of nodes, which this launch reports by their roles.
        quiet = {"RAY_DEDUP_LOGS_SKIP_REGEX": "."}
        if self.address != "local":
            return quiet
        # Ray listens on all interfaces and runs any code of its peers.
        token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": self._entropy(32).hex()}
        return {**quiet, **token, "RAY_USAGE_STATS_ENABLED": "0"}

    async def _probe(self) -> str:
        """Try to join the cluster from a child process, and return the address of its head node."""
        child = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", "adam_async.launch.ray_probe", self.address),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            env=child_environment(os.environ),
        )
        try:
            async with asyncio.timeout(CONNECT_S):
                printed, _ = await child.communicate()
        except TimeoutError:
            why = f"no answer within {CONNECT_S:g} s; try `ray status --address {self.address}`"
            raise RoleUnreachable("Ray", self.address, why) from None
        finally:
            if child.returncode is None:
                child.kill()
                await child.wait()
        word, _, rest = (printed.decode(errors="replace").strip().splitlines() or [""])[-1].partition(" ")
        if word != "joined":
            raise ConfigError(refusal_text(self.address, rest or f"exit code {child.returncode}"))
        return rest

    def __repr__(self) -> str:
        return f"<RayConnection {self.address}>"


def require_ray() -> Any:
    """Import Ray.

    Raises:
        ConfigError: Ray is not installed, or older than `OLDEST`.
    """
    try:
        import ray
    except ModuleNotFoundError:
        raise ConfigError(f"launch ray needs Ray, of the extra `ray`: {install_command('ray')}") from None
    check_ray(version("ray"))
    return ray


def check_ray(found: str) -> None:
    """Check the version of Ray.

    Raises:
        ConfigError: The version is older than `OLDEST`.
    """
    numbers = tuple(int(part) if part.isdecimal() else 0 for part in found.split(".")[:2])
    if numbers < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise ConfigError(
            f"this Python has Ray {found[:40]}, older than {oldest}: {install_command('ray')} --upgrade "
            "on all nodes"
        )


def refusal_text(address: str, why: str) -> str:
    """Return the reason that this process cannot join a cluster, with the remedy."""
    if "Could not find any running Ray" in why:
        cure = (
            "start one with `ray start --head`, give its HOST:PORT, or give local for a Ray of this command"
        )
    elif "ersion mismatch" in why:
        cure = "install the same versions of Ray and Python on this machine and on all nodes"
    else:
        cure = f"make this machine a node: `ray start --address={address}`"
    return f"cannot join Ray at --address {address}: {why[:300]}; {cure}"


logger = logging.getLogger(__name__)

CHECK_S = 60.0
"""Deadline in seconds for checking a node's package; the node may have to start a process for the check."""

POLL_S = 1
"""Maximum wait, in whole seconds, of one Ray call until a placement group has room."""

PENDING_S = 15.0
"""Time in seconds after which a notice names a role that waits for a node."""

STATE = f"{CACHE}/launch"
"""Folder for the controllers' state, on their nodes."""


@dataclass(frozen=True, slots=True)
class Node:
    """A live node of the Ray cluster."""

    id: str
    address: str
    host: str
    cpus: float

    def listens_on(self, port: int) -> str:
        """Return the address of a role of the node."""
        return f"tcp://[{self.address}]:{port}" if ":" in self.address else f"tcp://{self.address}:{port}"

    def __str__(self) -> str:
        return f"node {self.host} ({self.address})"


class RayLauncher:
    """Starts roles as actors.

    Args:
        settings: The Ray cluster, and the resources of the roles.
        entropy: Source of random bytes, for the token and the ports of controllers.

    `async with` joins or starts the Ray cluster, and checks the package of each node.

    Raises:
        ConfigError: Ray is missing or too old; the cluster refuses this process; a node lacks the package, or
            has another version.
        RoleUnreachable: The address does not answer.
        DeadlineExceeded: A node did not answer in time.
    """

    silence_s = 0.0

    def __init__(self, settings: RaySettings, *, entropy: Callable[[int], bytes]) -> None:
        self.settings = settings
        self.asks: dict[str, dict[str, float]] = {}
        self._entropy = entropy
        self._ray = RayConnection(settings.address, entropy)
        self._nodes: list[Node] = []
        self._groups: dict[str, Any] = {}
        self._controllers: dict[str, Node] = {}

    async def __aenter__(self) -> Self:
        await self._ray.__aenter__()
        try:
            self._nodes = await self._live_nodes()
            async with asyncio.TaskGroup() as group:
                for node in self._nodes:
                    group.create_task(self._check(node), name=f"launch/{node.id}")
        except BaseException as error:
            with suppress(DeadlineExceeded):
                await self._ray.__aexit__()
            raise first_cause(error) from None
        return self

    async def __aexit__(self, *exc: object) -> None:
        """Remove the placement groups, and leave the Ray cluster, or end it if this launch started it."""
        from ray.util import remove_placement_group

        try:
            for role, group in self._groups.items():
                await self._ray.call(f"Ray to remove the placement of {role}", remove_placement_group, group)
        except DeadlineExceeded as error:  # the cluster is lost, or removes the groups with this process
            logger.warning("%s", error)
        finally:
            await self._ray.__aexit__()

    async def prepare(self, config: Config, *, data_servers: int) -> int:
        """Place the bundles of all servers, data servers and workers. See `Launcher.prepare`."""
        asks, threads = self.settings.asks, 1 if config.record else config.threads
        memory = read_memory(config.memory)
        counts = {"ps": config.servers, "data": data_servers, "worker": config.workers}
        free = {node.id: node.cpus for node in self._nodes}
        fixed = [
            cpus for role, count in counts.items() for cpus in [asks.get(role, {}).get("CPU", 0.0)] * count
        ]
        rest = without(free.values(), fixed)
        share = min(1.0, largest_share(rest, fixed.count(0.0)))
        for role in KINDS:
            if role == "worker":
                share = min(threads or math.inf, largest_share(list(free.values()), config.workers))
            ask = self.asks[role] = with_memory(full_ask(asks, role, share), memory.get(role, 0))
            if counts[role]:
                for node in await self._place(role, counts[role], ask):
                    free[node] = free.get(node, 0.0) - ask["CPU"]
        return threads or max(1, int(self.asks["worker"]["CPU"]))

    def start(self, spec: RoleSpec, group: asyncio.TaskGroup, on_line: Callable[[str], None]) -> "RayRole":
        """Start a role in its bundle, or a controller on its node. See `Launcher.start`."""
        role = RayRole(self, spec, on_line)
        group.create_task(role.run(), name=f"launch/{spec.node}")
        return role

    async def controller_addresses(
        self, nodes: Sequence[str], network: Network, driver: Identity
    ) -> list[str]:
        """Return addresses on the nodes of Ray in turn; several controllers get ports drawn at random."""
        several = len(nodes) > 1
        addresses: list[str] = []
        for number, name in enumerate(nodes):
            node = self._controllers[name] = self._nodes[number % len(self._nodes)]
            address = node.listens_on(random_port(self._entropy) if several else 0)
            while address in addresses:
                address = node.listens_on(random_port(self._entropy))
            addresses.append(address)
        return addresses

    @asynccontextmanager
    async def state_folder(self, name: str) -> AsyncIterator[str]:
        """Yield the folder of the controllers' state, and remove it at the end from nodes that answer."""
        folder = f"{STATE}/{name}"
        try:
            yield folder
        finally:
            remove = require_ray().remote(remove_folder)
            for node in {node.id: node for node in self._controllers.values()}.values():
                with suppress(AdamError, _ray_error()):
                    await self._on(node, remove, folder)

    async def actor(self, spec: RoleSpec) -> Any:
        """Ask Ray for the actor of a role, and return the actor before Ray has placed it on a node."""
        from ray.util.scheduling_strategies import (
            NodeAffinitySchedulingStrategy,
            PlacementGroupSchedulingStrategy,
        )

        strategy: Any = "SPREAD"
        number = spec.node.rpartition("-")[2]
        group = self._groups.get(spec.role)
        if node := self._controllers.get(spec.node):
            # The other roles have the address of this node.
            strategy = NodeAffinitySchedulingStrategy(node.id, soft=False)
        elif group is not None and number.isdecimal() and int(number) < group.bundle_count:
            strategy = PlacementGroupSchedulingStrategy(group, int(number))
        options = actor_options(with_memory(self.ask_of(spec.role), spec.memory_bytes))
        made = require_ray().remote(RoleActor)
        made = made.options(scheduling_strategy=strategy, max_restarts=0, max_task_retries=0, **options)
        return await self._ray.call(f"Ray to accept the actor of {spec.node}", made.remote)

    def ask_of(self, role: str) -> dict[str, float]:
        return self.asks.get(role) or dict(self.settings.asks.get(role, {}))

    async def _live_nodes(self) -> list[Node]:
        """Return the live nodes, beginning with the head node, whose end is the end of the cluster."""
        found = await self._ray.call("Ray to name its nodes", require_ray().nodes)
        live = [node for node in found if node["Alive"]]
        live.sort(key=lambda node: ("node:__internal_head__" not in node["Resources"], node["NodeID"]))
        return [
            Node(
                node["NodeID"],
                node["NodeManagerAddress"],
                node["NodeManagerHostname"],
                node["Resources"].get("CPU", 0.0),
            )
            for node in live
        ]

    async def _check(self, node: Node) -> None:

        # Ray sends a local function whole, so a node without the package can run it.
        def installed() -> str:
            from importlib.metadata import PackageNotFoundError, version

            try:
                return version("adam-async")
            except PackageNotFoundError:
                return ""

        ours = version("adam-async")
        try:
            theirs = await self._on(node, require_ray().remote(installed))
        except _ray_error() as error:
            raise ConfigError(f"{node} of Ray cannot run a function: {last_line(error)}") from None
        if not theirs:
            raise ConfigError(
                f"{node} of Ray has no adam-async: install version {ours} in Ray's Python there"
            )
        if theirs != ours:
            raise ConfigError(
                f"{node} of Ray has adam-async {str(theirs)[:40]!r}, and this process {ours!r}: install the "
                "same version on all nodes, in the Python that runs Ray"
            )

    async def _on(self, node: Node, function: Any, *arguments: Any) -> Any:
        """Call a remote function on a node."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        strategy = NodeAffinitySchedulingStrategy(node.id, soft=False)
        call = function.options(num_cpus=0, max_retries=0, scheduling_strategy=strategy)
        async with Within(CHECK_S, f"an answer of {node} of Ray"):
            return await call.remote(*arguments)

    async def _place(self, role: str, count: int, ask: dict[str, float]) -> list[str]:
        """Make a role kind's placement group, and return the node of each bundle.

        Raises:
            ConfigError: Ray refuses the resources.
            DeadlineExceeded: Ray found no room in time; the text has the remedies.
        """
        from ray.util import placement_group, placement_group_table

        settings, ray = self.settings, require_ray()
        clock = asyncio.get_running_loop().time
        deadline = clock() + settings.wait_s
        try:
            group = self._groups[role] = await self._ray.call(
                f"Ray to accept the placement of {role}",
                placement_group,
                [ask] * count,
                strategy=settings.strategies[role],
                name=f"adam-async {role}",
            )
        except (ValueError, TypeError) as error:
            raise ConfigError(f"Ray refuses --ask {role}: {ask_text(ask)}: {last_line(error)}") from None
        while not await self._ray.call(f"the placement of {role}", group.wait, POLL_S):
            if clock() >= deadline:
                free = await self._ray.call("Ray to name its free resources", ray.available_resources)
                text = shortage_text(role, count, ask, free, len(self._nodes))
                raise DeadlineExceeded(text, settings.wait_s)
        table = await self._ray.call("Ray to name the places", placement_group_table, group)
        return list(table["bundles_to_node_id"].values())

    def __repr__(self) -> str:
        return f"<RayLauncher {self.settings.address} {len(self._nodes)} nodes>"


async def train(settings: RaySettings, training: Training) -> int:
    """Train with the roles as actors. See `RayLauncher`."""
    return await training.on(RayLauncher(settings, entropy=system_entropy))


class RayRole(RemoteRole):
    """One process of a role, the child of a separate actor."""

    def __init__(self, launcher: RayLauncher, spec: RoleSpec, on_line: Callable[[str], None]) -> None:
        super().__init__(spec.node, on_line)
        self._launcher = launcher
        self._spec = spec
        self._actor: Any = None
        self._host = ""
        self._ended_call: Any = None
        self._placed = asyncio.Event()

    async def _session(self) -> int:
        """Start the actor, and relay its events. See `RemoteRole._session`."""
        ray, spec, launcher = require_ray(), self._spec, self._launcher
        words = spec.words(bind=NODE_ADDRESS, threads=1)
        environment = {**launcher.settings.environment, **spec.environment}
        try:
            actor = self._actor = await launcher.actor(spec)
            try:
                code = actor.run.remote(spec.node, words, spec.orders, environment, version("adam-async"))
                async with asyncio.TaskGroup() as group:
                    notice = group.create_task(self._notice_wait(), name=f"{self.node}/placed")
                    try:
                        await self._follow(actor.events.options(num_returns="streaming").remote())
                    finally:
                        notice.cancel()
                return int(await code)
            finally:
                ray.kill(actor)
        except* (AdamError, _ray_error()) as errors:
            error = first_cause(errors)
            where = f"its actor on {self._host} is lost ({type(error).__name__})" if self._host else ""
            self._cut_off = where or f"Ray cannot run its actor: {last_line(error)}"
        return CUT_OFF

    async def _follow(self, events: Any) -> None:
        async for event in events:
            kind, text = await event
            if kind == "placed":
                self._host = text
                self._placed.set()
            elif kind == "address":
                self.note_address(text)
            else:
                self.note_line(text.removeprefix(f"{self.node} | "))

    async def _notice_wait(self) -> None:
        """Write a notice if the role waits for a node."""
        try:
            async with asyncio.timeout(PENDING_S):
                await self._placed.wait()
        except TimeoutError:
            ask = ask_text(self._launcher.ask_of(self._spec.role)) or "its node"
            self._on_line(f"{self.node} waits for room on Ray: {ask}; it starts once a node has these")

    def end(self) -> None:
        """Close the stdin of the role; a role that has no node yet ends at once."""
        if self._placed.is_set():
            self._ended_call = self._actor.end.remote()
        else:
            self.kill()

    def __repr__(self) -> str:
        return f"<RayRole {self.node}>"


def last_line(error: BaseException) -> str:
    """Return the last line of an error's text. Errors of Ray begin with many lines about the actor."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines or [type(error).__name__])[-1][:200]


def _ray_error() -> type[Exception]:
    found: type[Exception] = require_ray().exceptions.RayError
    return found


class RayCluster(ProcessCluster):
    """A `ProcessCluster` whose roles are Ray actors; the driver is in this process.

        async with RayCluster(Config(servers=2, replicas=4, data="mnist")) as cluster:
            result = await cluster.train()

    Args:
        config: The run.
        ray: The Ray cluster, and the resources of the roles. The nodes read `Config.data`, unless `dataset`
            is given, such as a data set of `from_ray`.
        inputs: Further arguments of `ProcessCluster`, except `launcher` and `environment`.

    Raises:
        ConfigError: See `ProcessCluster` and `RayLauncher`.
        DeadlineExceeded: Ray has no room for the roles.
    """

    def __init__(self, config: Config, *, ray: RaySettings | None = None, **inputs: Any) -> None:
        entropy = inputs.get("entropy", system_entropy)
        self._ray = RayLauncher(ray or RaySettings(), entropy=entropy)
        super().__init__(config, launcher=self._ray, **inputs)
        self._around = AsyncExitStack()

    async def __aenter__(self) -> Self:
        self._check_entry()
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(self._ray)
            await super().__aenter__()
            self._around = stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        async with self._around:
            return await super().__aexit__(kind, error, trace)
