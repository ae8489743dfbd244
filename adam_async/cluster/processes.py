"""Roles as processes, by default children over loopback TCP: `async with ProcessCluster(config) as cluster`.

The children have the command lines of roles started by hand, and find each other through the controller. The
cluster supervises them. The cluster reports a child's death at once, with its cause, to the caller and the
controller, so that no role waits for the dead child. The cluster restarts a worker, which loses only its
groups in flight; a data server if another one serves; a parameter server if each shard has another copy; and
one of several controllers, which continues from its folder, even an empty one. The death of a role with the
run's only copy of some state ends the run. The children end with this process, however it ends (see
`parent_pipe`).
"""

import asyncio
import itertools
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from types import TracebackType
from typing import Unpack

import msgspec

from adam_async.cluster.external_data import DataHosts
from adam_async.cluster.launcher import Launcher, LocalLauncher, RestartPolicy
from adam_async.cluster.networks import address_towards, network_for, slowed
from adam_async.cluster.parent_pipe import Orders
from adam_async.cluster.setup import Cluster, ClusterInputs, ClusterSetup
from adam_async.cluster.supervision import Supervisor
from adam_async.controller.role import RoleSettings
from adam_async.data_server.service import DataServer
from adam_async.driver.driver import Driver
from adam_async.driver.requests import AddedRole
from adam_async.driver.settings import DriverSettings, RunInputs
from adam_async.errors import AdamError, BindFailed, ConfigError, RoleDied, first_cause
from adam_async.report.stream import texts
from adam_async.run.addresses import controller_names
from adam_async.run.config import Config, Waits
from adam_async.run.image_size import image_size_text
from adam_async.run.memory_sizes import one_of
from adam_async.run.option_sources import for_children
from adam_async.run.result import OnEpoch, RunResult
from adam_async.run.stragglers import texts_for
from adam_async.run.token_file import derived_text
from adam_async.run.train_step import TrainStep
from adam_async.run.user_code import add_import_folder, import_layers, import_words, transform_words
from adam_async.run.user_rules import allow_rules, rule_words
from adam_async.runtime.channel import StackedTaskGroup
from adam_async.runtime.child_process import ChildProcess
from adam_async.runtime.machine import available_bytes, usable_cores
from adam_async.runtime.role_handle import RoleHandle
from transport import BufferPool, Identity, Network
from transport.unix import shares_memory

logger = logging.getLogger(__name__)

CHILDREN = ("controller", "data", "ps", "worker")
"""Roles that run as child processes."""

STARTED_AT_ONCE = 64
"""Maximum number of workers that one `scale` starts: a mistyped number must not overload the machine."""

MOST_ADDED = 16
"""Maximum number of roles of one kind that operators add, one after the other, to those in the options."""

PORT_CHOICES = 3
"""Maximum number of attempts to choose free ports for the controllers; another process may take a chosen port
before the controller listens."""


class ProcessCluster(Cluster):
    """Controllers, data servers, parameter servers and workers, each in a separate process.

    Args:
        layers: Further kinds of layers for its models, by import path: ``{"mine": "package.module:Mine"}``.
            Python has to find the module in `environment`.
        environment: Environment of the children; None: the environment of this process.
        step_path: Folders that this process and the workers add to their `sys.path`; data servers do so if
            `transforms` names functions, and servers if they may apply user rules.
        on_line: Called with each event, and with each line of a child's stderr; by default the cluster logs
            them.
        launcher: Starts the processes; None: as children of this process. With a launcher on other machines,
            variables that the roles get in addition to those of their machines.
        restarts: Limits on restarts of each role.
        allow_operations: Whether operators, such as a dashboard's visitors, may kill, freeze and add roles.
        inputs: See `ClusterInputs`; data servers in this process serve a `dataset`.

    `async with` starts the children and waits for their addresses; the block's end asks them to end, and
    after `drain_s` kills the remaining ones.

    Raises:
        ConfigError: `config.slow` names an unknown node, `config.copies_bind` is set with a launcher, an
            address in `data` is invalid, `layers` are not import paths or cannot be imported, transforms
            would have no effect, or the step is not an import path, cannot be made or contradicts an option.
        RunFailed: On entering: the cluster was entered before.
    """

    def __init__(
        self,
        config: Config,
        *,
        layers: Mapping[str, str] = {},
        environment: Mapping[str, str] | None = None,
        on_line: Callable[[str], None] = logger.warning,
        step_path: Sequence[Path] = (),
        launcher: Launcher | None = None,
        restarts: RestartPolicy = RestartPolicy(),
        allow_operations: bool = False,
        **inputs: Unpack[ClusterInputs],
    ) -> None:
        step, transforms = inputs.get("step"), inputs.get("transforms")
        _check_travels(config, launcher, layers, step)
        for folder in step_path:
            add_import_folder(folder)
        self._imports = import_words(layers, step if isinstance(step, str) else None, step_path)
        self._functions = transform_words(transforms if config.augment else None, step_path)
        setup = ClusterSetup.of(config, inputs, layers=import_layers(layers))
        setup = setup.with_weights(config.obstacle_of_memory(one_host=launcher is None and shares_memory()))
        config = setup.config
        allow_rules(setup.rules)  # a wrong one ends this call, not a server
        self._rules = rule_words(setup.rules, step_path)
        super().__init__(setup)
        inherited = os.environ if launcher is None else {}
        kept = for_children(inherited if environment is None else environment)
        self._launcher = launcher or LocalLauncher(kept, hosts=setup.hosts)
        self._on_line = on_line
        self._roles = Supervisor(config, self._launcher, environment=kept, restarts=restarts, on_line=on_line)
        self._worker: tuple[str, ...] = ()
        """Options of every worker's command."""
        self._server: tuple[str, ...] = ()
        """Options of every parameter server's command."""
        self._threads = 0
        self._allow_operations = allow_operations
        self._scaling = asyncio.Lock()
        self._frozen: set[str] = set()

    @property
    def children(self) -> Mapping[str, RoleHandle]:
        """The newest process of each role, by node id."""
        return self._roles.processes

    async def _open(self, stack: AsyncExitStack) -> Driver:
        config, setup = self.config, self._setup
        data_servers = 0 if setup.hosts or setup.dataset is not None else config.data_servers
        threads = self._threads = await self._launcher.prepare(config, data_servers=data_servers)
        # Standalone data servers accept only their own token, or no token if they have none.
        token = setup.token if setup.hosts or setup.token is not None else setup.entropy(32).hex()
        room = self.timeline.limit_events if self.timeline is not None else 0
        orders = orders_for(
            token or "", config.waits, profile_events=room, silence_s=self._launcher.silence_s
        )
        inputs = await setup.with_checkpoints(stack)
        state = ""
        if config.controllers > 1:
            name = setup.entropy(8).hex()
            state = await stack.enter_async_context(self._launcher.state_folder(name))
        self._roles.begin(await stack.enter_async_context(StackedTaskGroup()), orders)
        stack.push_async_callback(self._roles.stop)
        network = await stack.enter_async_context(
            slowed(
                network_for(config, token, entropy=setup.entropy, buffers=BufferPool()),
                texts_for(config.slow, "driver"),
            )
        )
        driver = setup.identity("driver", "driver")
        controller = await self._open_controllers(network, driver, state)
        await self._open_data(stack, network, controller)
        await self._start_members(controller, inputs, threads, data_servers)
        if setup.hosts:
            hosts = DataHosts(setup.hosts, network=network, identity=driver, waits=config.waits)
            await stack.enter_async_context(hosts)
            await hosts.serve(controller)
        settings = DriverSettings(
            network=network,
            controller=controller,
            identity=driver,
            threads=min(threads * config.workers or usable_cores(), usable_cores()),
            timeline=self.timeline,
            available_bytes=available_bytes,
        )
        opened = await stack.enter_async_context(Driver(config, settings, inputs))
        self._roles.driver = opened
        opened.events.listen(texts(self._on_line))
        opened.operate(self, allows_faults=self._allow_operations)
        return opened

    async def _start_members(
        self, controller: str, inputs: RunInputs, threads: int, data_servers: int
    ) -> None:
        """Start data servers, parameter servers and workers, and wait until they listen."""
        config, setup = self.config, self._setup
        common = ("--controller", controller)
        self._worker, self._server = (*common, *self._imports), (*common, *self._rules)
        spec = await setup.spec_of(inputs)
        size = image_size_text(setup.image_size(spec))
        images = msgspec.structs.replace(config, cache=one_of(config.cache, data_servers), size=size)
        start = self._roles.start
        started = [
            *(
                start("data", f"data-{n}", *common, *self._functions, config=images)
                for n in range(data_servers)
            ),
            *(
                start("ps", f"ps-{n}", *self._server, *self._disk_words(f"ps-{n}"))
                for n in range(config.servers)
            ),
            *(start("worker", f"worker-{n}", *self._worker, threads=threads) for n in range(config.workers)),
        ]
        for role in started:
            await self._roles.address_of(role)

    def _disk_words(self, node: str) -> tuple[str, ...]:
        """Return the options of a server that keeps its shards on a disk."""
        folder = self._setup.server_folder(node)
        if folder is None:
            return ()
        return "--dir", str(folder.absolute())

    async def _open_data(self, stack: AsyncExitStack, network: Network, controller: str) -> None:
        """Serve the caller's data set, if any, from the memory of this process."""
        if self._setup.dataset is None:
            return
        functions = await self._setup.functions()
        for number in range(self.config.data_servers):
            server = DataServer(
                RoleSettings(
                    network=network,
                    address=await address_towards(controller),
                    identity=self._setup.identity("data", f"data-{number}"),
                    waits=self.config.waits,
                    controller=controller,
                ),
                self._setup.dataset,
                functions=functions,
            )
            await stack.enter_async_context(server)

    async def _open_controllers(self, network: Network, driver: Identity, state: str) -> str:
        """Start the controllers; return their addresses, joined by commas.

        Several controllers get each other's addresses, and folders in `state`.

        Raises:
            RoleDied: A controller could not start.
        """
        nodes, roles = controller_names(self.config.controllers), self._roles
        addresses: list[str] = []
        for left in reversed(range(PORT_CHOICES)):
            addresses = await self._launcher.controller_addresses(nodes, network, driver)
            if len(nodes) == 1:
                return await roles.address_of(roles.start("controller", *nodes, bind=addresses[0]))
            peers = ",".join(f"{number}={address}" for number, address in enumerate(addresses, 1))
            for node, address in zip(nodes, addresses, strict=True):
                words = ("--peers", peers, "--dir", f"{state}/{node}")
                roles.start("controller", node, *words, bind=address)
            try:
                for node in nodes:
                    await roles.serves(node)
                break
            except RoleDied as error:
                if error.exit_code != BindFailed.exit_code or not left:
                    raise
            await roles.give_up(nodes)
        return ",".join(addresses)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        return await self._stack.__aexit__(kind, error, trace)

    async def train(self, on_epoch: OnEpoch | None = None) -> RunResult:
        """Run all epochs of the configuration. See `Driver.train`.

        Raises:
            RoleDied: A role that the run needs has died; the error has its name and the cause.
            RunFailed: The cluster's block was not entered, or has ended.
        """
        self._check_runs()
        try:
            async with asyncio.TaskGroup() as group:
                watch = group.create_task(self._roles.needed_one_died(), name="processes/deaths")
                result = await self.driver.train(on_epoch)
                if self.timeline is not None:
                    await self.driver.gather_profile()
                watch.cancel()
        except ExceptionGroup as errors:
            # Other errors follow from the death.
            cause = self._roles.death or first_cause(errors)
            raise cause from cause.__cause__
        return result

    # --- operation ---------------------------------------------------------------------------

    def last_lines(self, node: str) -> tuple[str, ...]:
        """Return the newest lines of a role's stderr, at most `role_handle.LAST_LINES`.

        Raises:
            ConfigError: The cluster has no role of this name.
        """
        return tuple(self._role(node).last_lines)

    def _role(self, node: str) -> RoleHandle:
        if node not in self.children:
            there = ", ".join(sorted(self.children)) or "none"
            raise ConfigError(f"{node!r} is no role of this cluster; its roles are {there}")
        return self.children[node]

    def kill(self, node: str) -> str:
        """Kill a role with SIGKILL. See `Operations.kill`."""
        self._role(node)
        if not self._roles.survives(node, frozen=self._frozen):
            raise ConfigError(f"the run would end with {node}, which has the only copy of some state")
        self._roles.kill(node)
        return f"{node} was killed"

    def freeze(self, node: str, seconds: float) -> str:
        """Stop a role with SIGSTOP for some seconds. See `Operations.freeze`."""
        process = self._role(node)
        if not isinstance(process, ChildProcess):
            raise ConfigError(f"{node} is no child of this process: stop and continue it on its machine")
        if not self._roles.spares(node, frozen=self._frozen):
            raise ConfigError(f"the run would not go on without {node}, which no other live role can replace")

        def wake() -> None:
            """Let the role go on."""
            self._frozen.discard(node)
            process.wake()

        self._frozen.add(node)
        process.freeze()
        asyncio.get_running_loop().call_later(seconds, wake)
        return f"{node} is frozen for {seconds:g} s"

    async def add(self, role: AddedRole) -> str:
        """Start one more worker, or parameter server, which takes copies. See `Operations.add`."""
        of_role = [node for node in self.children if node.startswith(f"{role}-")]
        most = MOST_ADDED + (
            self.config.servers if role == "ps" else self.config.replicas * self.config.partitions
        )
        if len(of_role) >= most:
            raise ConfigError(f"{len(of_role)} roles of kind {role} are the most, {MOST_ADDED} of them added")
        if role == "worker":
            return await self.scale(len(of_role) + 1)
        async with self._scaling:
            node = next(name for n in itertools.count() if (name := f"ps-{n}") not in self.children)
            process = self._roles.start("ps", node, *self._server, *self._disk_words(node))
            await self._roles.address_of(process)
        return f"started {node}"

    async def scale(self, workers: int) -> str:
        """Start or end workers until the cluster has this number; return what changed.

        New workers take part in the run at once; ended workers' groups go to the other workers.

        Raises:
            ConfigError: The run would have no complete replica, or would get more than `STARTED_AT_ONCE` new
                workers.
            DeadlineExceeded: A new worker did not listen within `prepare_s`.
            RoleDied: A new worker could not start.
            RunFailed: The cluster's block was not entered, or has ended.
        """
        self._check_runs()
        config = self.config
        if workers < config.partitions:
            raise ConfigError(
                f"{workers} workers are too few: one replica has {config.partitions}; stop ends the run"
            )
        run = self.driver.map.run
        needed = config.replicas * config.partitions
        if run is not None and run.phase == "preparing" and workers < needed:
            raise ConfigError(f"the run needs {needed} workers to begin: scale it when it trains")
        async with self._scaling:
            there = sorted((node for node in self.children if node.startswith("worker-")), key=_number)
            free = (f"worker-{n}" for n in itertools.count() if f"worker-{n}" not in there)
            missing = max(workers - len(there), 0)
            if missing > STARTED_AT_ONCE:
                raise ConfigError(
                    f"{missing} workers would start at once; {STARTED_AT_ONCE} are the most: scale in steps"
                )
            new = list(itertools.islice(free, missing))
            started = [
                self._roles.start("worker", node, *self._worker, threads=self._threads) for node in new
            ]
            old = there[workers:]
            try:
                for process in started:
                    await self._roles.address_of(process)
            except AdamError:
                await self._release(new)
                raise
            await self._release(old)
        parts = (("started", new), ("ended", old))
        changes = "; ".join(f"{what} {', '.join(nodes)}" for what, nodes in parts if nodes)
        return f"{workers} worker{'' if workers == 1 else 's'}: {changes or 'as before'}"

    async def _release(self, nodes: Sequence[str]) -> None:
        async with asyncio.TaskGroup() as group:
            for node in nodes:
                group.create_task(self._roles.release(node), name=f"processes/releases-{node}")

    def __repr__(self) -> str:
        return f"<ProcessCluster {', '.join(self._roles.processes) or 'not started'}>"


def _number(node: str) -> int:
    """Return the number at the end of a node id."""
    return int(node.rpartition("-")[2])


def orders_for(
    token: str, waits: Waits, *, profile_events: int, silence_s: float = 0.0, ignores_sigterm: bool = False
) -> dict[str, bytes]:
    """Return the first stdin line for the children of each role, with the keys of that role only.

    Raises:
        ConfigError: The token is a line of keys of one role, or is too short.
    """
    lines = {}
    for role in CHILDREN:
        keys = derived_text(token, role) if token else ""
        orders = Orders(
            token=keys,
            waits=waits,
            profile_events=profile_events,
            silence_s=silence_s,
            ignores_sigterm=ignores_sigterm,
        )
        lines[role] = msgspec.json.encode(orders) + b"\n"
    return lines


def _check_travels(
    config: Config, launcher: Launcher | None, layers: Mapping[str, str], step: TrainStep | str | None
) -> None:
    """Check that the options mean the same in other processes and on their machines. Raises ConfigError."""
    if launcher is not None and config.copies_bind:
        raise ConfigError(
            f"copies_bind={config.copies_bind} is an address of this machine, and the roles start on "
            "others: leave it out, and give each host its own (`copies` in the file of hosts)"
        )
    if step is not None and not isinstance(step, str):
        raise ConfigError(
            f"step is a {type(step).__name__}, which does not travel to other processes: give its import "
            "path, 'package.module:name'"
        )
    if objects := [kind for kind, path in layers.items() if not isinstance(path, str)]:
        raise ConfigError(
            f"layer {objects[0]!r} is no text, and classes do not travel to other processes: give its "
            "import path, 'package.module:Class'"
        )
