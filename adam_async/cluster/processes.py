"""Each role a child process over loopback TCP: `async with ProcessCluster(config) as cluster`.

The children have the command lines of roles started by hand, and find each other through the controller. The
cluster supervises them. It reports the death of a child at once, with its cause, to the caller and to the
controller, so that no role waits for its return. It restarts a worker, which loses only its groups in flight;
a data server if another one serves; a parameter server if each of its shards has another copy; and a
controller of several, which continues from its folder, even an empty one. The death of a role with the run's
only copy of some state ends the run. The children end with this process, however it ends (see `parent_pipe`).
"""

import asyncio
import logging
import os
import stat
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec

from adam_async.checkpoint.manifest import resumed_spec
from adam_async.checkpoint.trained_model import Model as TrainedModel
from adam_async.cluster.external_data import DataHosts, address_for, hosts_of
from adam_async.cluster.networks import LOOPBACK, network_for, slowed
from adam_async.cluster.parent_pipe import Orders
from adam_async.cluster.server_losses import ServerLosses, successors_text
from adam_async.cluster.setup import ClusterSetup
from adam_async.controller.role import RoleSettings
from adam_async.data_server.dataset import Dataset
from adam_async.data_server.service import DataServer
from adam_async.driver.driver import OUTSIDE, Driver
from adam_async.driver.readiness import LONGER
from adam_async.driver.settings import DriverSettings, RunInputs
from adam_async.errors import (
    LOST_SHARDS,
    BindFailed,
    DeadlineExceeded,
    RoleDied,
    RoleFailed,
    RunFailed,
    first_cause,
)
from adam_async.model.spec import ModelSpec
from adam_async.run.addresses import controller_names
from adam_async.run.cache_size import one_of
from adam_async.run.cluster_map import ClusterMap, failure_of
from adam_async.run.config import Config, Waits
from adam_async.run.option_sources import for_children
from adam_async.run.result import OnEpoch, RunResult
from adam_async.run.stragglers import texts_for
from adam_async.run.token_file import derived_text
from adam_async.run.user_code import add_import_folder, import_layers, import_words, named_step
from adam_async.runtime.child_process import ChildProcess, how_it_ended
from adam_async.runtime.clock import system_entropy
from adam_async.runtime.disk import Disk
from adam_async.runtime.machine import available_bytes, usable_cores
from adam_async.runtime.network_namespaces import NamespaceNetwork
from adam_async.runtime.timeline import Timeline
from transport import BufferPool, Identity, Link, Network

logger = logging.getLogger(__name__)

RESTARTS = 5
"""Maximum number of restarts of one child in a row; further restarts would not remove its error."""

SOUND_S = 10.0
"""Seconds of service that reset the count of a child's restarts."""

FOLDER_PREFIX = "adam-async-controllers-"
"""Prefix of the folder with the state of a cluster's controllers."""

LOCK = "lock"
"""Lock file in that folder; the cluster has its lock until it ends."""

CHILDREN = ("controller", "data", "ps", "worker")
"""Roles of child processes."""

PORT_CHOICES = 3
"""Maximum number of choices of ports for controllers; another process may take a chosen port."""


class ProcessCluster:
    """Controllers, data servers, parameter servers and workers, each in a process of its own.

    Other arguments are those of `local.LocalCluster`.

    Args:
        dataset: The images, which data servers in this process serve; None: the images of `config.data`.
        data: Addresses of standalone data servers, ``tcp://host:port``, which the cluster invites; empty: the
            addresses in `config.data`. If `config.data` names a data set, the cluster starts data servers.
        token: Token of the standalone data servers, and then of the whole cluster.
        layers: Further kinds of layers for its models, by import path: ``{"mine": "package.module:Mine"}``.
            Python has to find the module in `environment`.
        environment: Environment of the children; None: the environment of this process.
        step: Import path of the factory of a step to train in the place of a network,
            ``package.module:factory``. Workers may import this module.
        step_args: Arguments of the factory.
        step_path: Folders that this process and the workers add to their `sys.path`.
        on_line: Called with each event, and with each line of a child's stderr; by default the cluster logs
            them.
        entropy: Random bytes for the cluster's token and the driver's incarnation.
        timeline: Records the work of the driver; after a training it also has the profiles of the children.
        network: Hosts of the parameter servers, by node id; None: all children share the loopback interface.

    `async with` starts the children and waits for their addresses; the end of the block asks them to end, and
    kills the remaining ones after `drain_s`.

    Raises:
        ConfigError: `config.slow` names an unknown node, an address in `data` is invalid, `layers` cannot be
            imported, or the step cannot be made or contradicts an option.
    """

    def __init__(
        self,
        config: Config,
        *,
        dataset: Dataset | None = None,
        data: Sequence[str] = (),
        token: str | None = None,
        spec: ModelSpec | None = None,
        layers: Mapping[str, str] = {},
        model_text: str | None = None,
        transforms: Sequence[Mapping[str, Any]] | None = None,
        environment: Mapping[str, str] | None = None,
        on_line: Callable[[str], None] = logger.warning,
        entropy: Callable[[int], bytes] = system_entropy,
        timeline: Timeline | None = None,
        checkpoint: Path | None = None,
        resume: Path | None = None,
        init: TrainedModel | None = None,
        step: str | None = None,
        step_args: Mapping[str, Any] | None = None,
        step_path: Sequence[Path] = (),
        network: NamespaceNetwork | None = None,
    ) -> None:
        for folder in step_path:
            add_import_folder(folder)
        self._imports = import_words(layers, step, step_path)
        self._setup = ClusterSetup(
            config=config,
            inputs=RunInputs(
                spec=spec,
                model_text=model_text,
                transforms=transforms,
                layers=import_layers(layers),
                init=init,
                step=named_step(step, step_args),
            ),
            hosts=hosts_of(config, data, starts_own=dataset is not None),
            dataset=dataset,
            token=token,
            entropy=entropy,
            timeline=timeline,
            checkpoint=checkpoint,
            resume=resume,
        )
        self.config = config
        self.timeline = timeline
        self._network = network
        self._environment = for_children(os.environ if environment is None else environment)
        self._on_line = on_line
        self._controllers = controller_names(config.controllers)
        self._given_up: set[ChildProcess] = set()
        self._losses = ServerLosses()
        self._orders: dict[str, bytes] = {}
        self.children: dict[str, ChildProcess] = {}
        self._stack = AsyncExitStack()
        self._stopping = asyncio.Event()
        self._death: asyncio.Future[None] | None = None
        self._driver: Driver | None = None
        self._running = False

    @property
    def driver(self) -> Driver:
        """The driver, in this process."""
        assert self._driver is not None, "enter the cluster's block first"
        return self._driver

    async def __aenter__(self) -> Self:
        try:
            await self._open()
        except ExceptionGroup as errors:
            cause = first_cause(errors)
            raise cause from cause.__cause__
        return self

    async def _open(self) -> None:
        """Start the children in the order of their needs, then the driver; a failure ends them."""
        config, setup = self.config, self._setup
        threads = config.threads_per_worker(usable_cores())
        # Standalone data servers accept only their own token, or no token if they have none.
        token = setup.token if setup.hosts else setup.entropy(32).hex()
        room = self.timeline.limit_events if self.timeline is not None else 0
        self._orders = orders_for(token or "", config.waits, profile_events=room)
        self._death = asyncio.get_running_loop().create_future()
        async with AsyncExitStack() as stack:
            inputs = await setup.with_checkpoints(stack)
            state = await stack.enter_async_context(self._folder()) if config.controllers > 1 else None
            self._group = await stack.enter_async_context(asyncio.TaskGroup())
            stack.push_async_callback(self._stop)
            network = await stack.enter_async_context(
                slowed(
                    network_for(config, token, entropy=setup.entropy, buffers=BufferPool()),
                    texts_for(config.slow, "driver"),
                )
            )
            driver = setup.identity("driver", "driver")
            bind = await address_for(setup.hosts) if setup.hosts else LOOPBACK
            if self._network is not None:
                bind = f"tcp://{self._network.address}:0"
            if state is None:
                controller = await self._address(self._start("controller", "controller", "--bind", bind))
            else:
                controller = await self._open_controllers(network, driver, bind, state)
            await self._open_data(stack, network, controller)
            await self._start_members(controller, inputs, threads)
            if setup.hosts:
                hosts = DataHosts(setup.hosts, network=network, identity=driver, waits=config.waits)
                await stack.enter_async_context(hosts)
                await hosts.serve(controller)
            settings = DriverSettings(
                network=network,
                controller=controller,
                identity=driver,
                threads=min(threads * config.workers, usable_cores()),
                timeline=self.timeline,
                available_bytes=available_bytes,
            )
            opened = self._driver = await stack.enter_async_context(Driver(config, settings, inputs))
            opened.listen(self._on_line)
            stack.callback(setattr, self, "_running", False)
            self._running = True
            self._stack = stack.pop_all()

    async def _start_members(self, controller: str, inputs: RunInputs, threads: int) -> None:
        """Start data servers, parameter servers and workers, and wait until they listen."""
        config, setup = self.config, self._setup
        join = ("--controller", controller, "--bind")
        common = (*join, LOOPBACK)
        counts = ("--threads", str(threads), "--in-flight", str(config.in_flight))
        worker = (*common, *counts, *self._imports)
        data_servers = 0 if setup.hosts or setup.dataset is not None else config.data_servers
        cache = one_of(config.cache, data_servers)
        images = ["--data", config.data, "--damaged", config.damaged, "--cache", cache]
        images += ["--spill", config.spill] if config.spill else []
        resume = inputs.resume
        spec = resumed_spec(resume.manifest, inputs.spec) if resume is not None else inputs.spec
        if size := setup.image_size(spec):
            images += ["--size", f"{size[1]}x{size[0]}"]
        children = [
            *(self._start("data", f"data-{n}", *common, *images) for n in range(data_servers)),
            *(self._start("ps", f"ps-{n}", *join, self._bind_of(f"ps-{n}")) for n in range(config.servers)),
            *(self._start("worker", f"worker-{n}", *worker) for n in range(config.workers)),
        ]
        for child in children:
            await self._address(child)

    async def _open_data(self, stack: AsyncExitStack, network: Network, controller: str) -> None:
        """Serve the caller's data set, if any, from the memory of this process."""
        if self._setup.dataset is None:
            return
        for number in range(self.config.data_servers):
            server = DataServer(
                RoleSettings(
                    network=network,
                    address=LOOPBACK,
                    identity=self._setup.identity("data", f"data-{number}"),
                    waits=self.config.waits,
                    controller=controller,
                ),
                self._setup.dataset,
            )
            await stack.enter_async_context(server)

    @asynccontextmanager
    async def _folder(self) -> AsyncIterator[Path]:
        """The folder with the state of the controllers, for their restarts; removed with the cluster.

        The block also removes the folders of clusters whose process was killed: their locks are free. A
        folder gets its name after its lock, so no cluster removes the folder of a starting cluster.
        """
        place = Path(self._environment.get("TMPDIR") or "/tmp")
        folder = place / f"{FOLDER_PREFIX}{self._setup.entropy(8).hex()}"
        made = folder.with_name(f".{folder.name}")
        async with Disk(name="controllers") as disk, AsyncExitStack() as stack:
            try:
                await _remove_left_behind(disk, place)
                await disk.run(_make_own_folder, made)
                await stack.enter_async_context(disk.hold(made / LOCK))
                await disk.rename(made, folder)
                yield folder
            finally:
                await disk.remove_folder(made)
                await disk.remove_folder(folder)

    async def _open_controllers(self, network: Network, driver: Identity, bind: str, state: Path) -> str:
        """Start controllers with each other's addresses; returns the addresses, joined by commas.

        Raises:
            RoleDied: A controller could not start.
        """
        addresses: list[str] = []
        for left in reversed(range(PORT_CHOICES)):
            addresses = await free_addresses(network, driver, bind, count=len(self._controllers))
            peers = ",".join(f"{number}={address}" for number, address in enumerate(addresses, 1))
            for node in self._controllers:
                self._start("controller", node, "--peers", peers, "--dir", str(state / node))
            try:
                for node in self._controllers:
                    await self._controller_serves(node)
                break
            except RoleDied as error:
                if error.exit_code != BindFailed.exit_code or not left:
                    raise
            children = [self.children[node] for node in self._controllers]
            self._given_up.update(children)
            for child in children:
                child.kill()
                await child.ended.wait()
        return ",".join(addresses)

    async def _controller_serves(self, node: str) -> None:
        """Wait until one of several controllers listens, after restarts if necessary.

        Raises:
            RoleDied: The controller could not start, or no restart could listen.
        """
        while True:
            child = self.children[node]
            try:
                await self._address(child)
                return
            except RoleDied:
                if self.children[node] is child:  # `_supervise` has not restarted the child
                    raise

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
        if self._death is None or not self._running:
            raise RunFailed(OUTSIDE)
        try:
            async with asyncio.TaskGroup() as group:
                watch = group.create_task(_result_of(self._death), name="processes/deaths")
                result = await self.driver.train(on_epoch)
                if self.timeline is not None:
                    await self.driver.gather_profile()
                watch.cancel()
        except ExceptionGroup as errors:
            # Other errors are consequences of the death.
            cause = (self._death.exception() if self._death.done() else None) or first_cause(errors)
            raise cause from cause.__cause__
        return result

    def stop(self) -> None:
        """End the training in progress after the groups in flight. See `Driver.stop`."""
        if self._running:
            self.driver.stop()

    # --- children ----------------------------------------------------------------------------

    def _start(self, role: str, node: str, *arguments: str) -> ChildProcess:
        slow = (word for text in texts_for(self.config.slow, node) for word in ("--slow", text))
        held = ("--memory-budget", self.config.memory_budget, "--checksum", self.config.checksum)
        words = (role, "--id", node, "--supervised", *held, *arguments, *slow)
        child = self._child(role, node, words)
        self._group.create_task(self._supervise(role, node, words, child), name=f"processes/{node}")
        return child

    def _child(self, role: str, node: str, words: tuple[str, ...]) -> ChildProcess:
        orders = self._orders[role]
        network = self._network if role == "ps" else None
        child = ChildProcess(
            node,
            words,
            orders=orders,
            environment=self._environment,
            on_line=self._on_line,
            within=network.within(node) if network is not None else (),
        )
        self.children[node] = child
        return child

    def _bind_of(self, server: str) -> str:
        """Return the address on which a parameter server listens, with any free port."""
        return LOOPBACK if self._network is None else f"tcp://{self._network.address_of(server)}:0"

    async def _supervise(self, role: str, node: str, words: tuple[str, ...], child: ChildProcess) -> None:
        """Wait for the end of a child, and restart it; repeat until the child is not restarted."""
        assert self._death is not None
        left, served = RESTARTS, False
        while True:
            code = await child.run()
            if self._stopping.is_set() or child in self._given_up:
                return
            how = how_it_ended(code)
            if role == "ps":
                self._losses.note(self._map, node)
            refusal = self._refusal_of(node)
            served = served or child.served_s > 0
            if child.served_s >= SOUND_S:
                left = RESTARTS
            # A child that ended before it served cannot start; `_open` reports it. A killed controller can
            # start, and the other controllers need it to form their group.
            could_start = served or (code < 0 and role == "controller")
            restart = could_start and left > 0 and not refusal and self._may_restart(role, node)
            successors = successors_text(self._losses.successors(self._map, node)) if role == "ps" else ""
            self._note(f"{node} died: {how}{successors}{'; starting it again' if restart else ''}")
            if served and left == 0 and self._others_suffice(node):
                self._note(f"{node} was started again {RESTARTS} times and is left: the others go on")
                if self._driver is not None:
                    await self._driver.report_death(node)
                return
            if not restart:
                if left == 0:
                    how = f"{how}, after it had been started again {RESTARTS} times within a short time"
                if role == "ps":
                    loss = self._losses.loss(self._map) if self.config.copies_in_force > 1 else ""
                    how = f"{how}; {loss or LOST_SHARDS}"
                if served and not self._death.done():
                    died = (
                        RoleFailed(node, f"cannot train the run: {refusal}")
                        if refusal
                        else RoleDied(node, how)
                    )
                    self._death.set_exception(died)
                    self._death.exception()  # mark it retrieved: without a `train`, no wait does
                return
            left -= 1
            if self._driver is not None:
                await self._driver.report_death(node)
                if self._stopping.is_set():
                    return
            child = self._child(role, node, words)

    def _refusal_of(self, node: str) -> str:
        """Return the reason that a worker reported before its end, such as an error of the run's step.

        A restart would not remove the error.
        """
        cluster = self._map
        if cluster.run is None or node not in cluster.nodes:
            return ""
        return failure_of(cluster.nodes[node], cluster.run.id)

    def _may_restart(self, role: str, node: str) -> bool:
        """Whether the loss of a role loses no state of the run, so that the cluster can start it again."""
        if role == "data":
            others = (c for name, c in self.children.items() if name.startswith("data-") and name != node)
            return any(other.serves for other in others)
        if role == "ps" and self.config.copies_in_force > 1:
            return not self._losses.loss(self._map)
        # The state of a controller of several is in its folder, even if all of them die.
        return role == "worker" or (role == "controller" and len(self._controllers) > 1)

    def _others_suffice(self, node: str) -> bool:
        """Whether the others go on without a controller or server that is not started again."""
        if node.startswith("ps-"):
            return self.config.copies_in_force > 1 and self._losses.suffice(self._map)
        serving = [name for name in self._controllers if name != node and self.children[name].serves]
        return node in self._controllers and 2 * len(serving) > len(self._controllers)

    @property
    def _map(self) -> ClusterMap:
        """The newest map of the driver; empty before it is one."""
        return self._driver.map if self._driver is not None else ClusterMap()

    def _note(self, what: str) -> None:
        if self._driver is not None:
            self._driver.note(what)  # which calls `self._on_line`
        else:
            self._on_line(what)

    async def _address(self, child: ChildProcess) -> str:
        timeout_s = self.config.waits.prepare_s
        try:
            async with asyncio.timeout(timeout_s):
                return await child.address
        except TimeoutError:
            raise DeadlineExceeded(f"{child.node} to report its address{LONGER}", timeout_s) from None

    async def _stop(self) -> None:
        """End all children in good order within `drain_s`, then with force."""
        self._stopping.set()
        controllers = [child for child in self.children.values() if child.node in self._controllers]
        members = [child for child in self.children.values() if child not in controllers]
        for child in members:
            child.end()
        try:
            async with asyncio.timeout(self.config.waits.drain_s):
                for child in members:
                    await child.ended.wait()
                # Controllers end last, so no member loses them.
                for child in controllers:
                    child.end()
                for child in controllers:
                    await child.ended.wait()
        except TimeoutError:
            self._on_line("some roles did not end in time and are killed")
        finally:
            for child in self.children.values():
                child.kill()

    def __repr__(self) -> str:
        return f"<ProcessCluster {', '.join(self.children) or 'not started'}>"


def orders_for(token: str, waits: Waits, *, profile_events: int) -> dict[str, bytes]:
    """Return the first stdin line for the children of each role, with the keys of that role only.

    Raises:
        ConfigError: The token has the keys of one role, or is too short.
    """
    lines = {}
    for role in CHILDREN:
        keys = derived_text(token, role) if token else ""
        orders = Orders(token=keys, waits=waits, profile_events=profile_events)
        lines[role] = msgspec.json.encode(orders) + b"\n"
    return lines


async def _result_of(future: asyncio.Future[None]) -> None:
    # Shielded, because the cancellation of this wait must not cancel the future, which the next run awaits.
    await asyncio.shield(future)


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
