"""Each role a child process over loopback TCP: `async with ProcessCluster(config) as cluster`.

The children are started under the words that a user would start them with by hand, and find each other
through the controller like any others. What is added here is care: a child that dies is named at once
with how it ended, and to the controller too, so that nobody waits whether it comes back; a worker is
started again, since all it loses are the groups in its hands, and so is a data server while there is another,
and a controller of several, which goes on where it was with what is in its folder, even if that is nothing
yet; the death of a role that holds the run's only copy of something ends the run. When this process goes, in
whatever way, its children go too (see `cli_parent`).
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

from adam_async.checkpoint.files import open_checkpoints
from adam_async.checkpoint.manifest import resumed_spec
from adam_async.checkpoint.trained_model import Model as TrainedModel
from adam_async.checkpoint.trained_model import check_init
from adam_async.cluster.external_data import DataHosts, address_for, hosts_of
from adam_async.cluster.parent_pipe import Orders
from adam_async.cluster.roles import LOOPBACK, network_for, slowed
from adam_async.data_server.dataset import Dataset, check_dataset
from adam_async.data_server.service import DataServer
from adam_async.driver.driver import OUTSIDE, Driver
from adam_async.driver.readiness import LONGER
from adam_async.errors import LOST_SHARDS, BindFailed, DeadlineExceeded, RoleDied, RunFailed, first_cause
from adam_async.model.spec import ModelSpec
from adam_async.run.addresses import controller_names
from adam_async.run.cache_size import one_of
from adam_async.run.config import Config, Waits
from adam_async.run.model_selection import image_size
from adam_async.run.option_sources import for_children
from adam_async.run.result import OnEpoch, RunResult
from adam_async.run.stragglers import check_names, texts_for
from adam_async.run.token_file import derived_text
from adam_async.run.user_code import import_layers
from adam_async.runtime.child_process import ChildProcess, how_it_ended
from adam_async.runtime.clock import system_entropy
from adam_async.runtime.disk import Disk
from adam_async.runtime.machine import available_bytes, usable_cores
from adam_async.runtime.timeline import Timeline
from transport import BufferPool, Identity, Link, Network

logger = logging.getLogger(__name__)

RESTARTS = 5
"""How often in a row one worker is started again; then something is wrong that a restart does not cure."""

SOUND_S = 10.0
"""A worker that lived this long after it had joined was well: restarts before it count no more."""


KEPT = "adam-async-controllers-"
"""How the folder begins in which the controllers of a cluster keep what they must not forget."""

LOCK = "lock"
"""A file in it whose lock is held for as long as the cluster is there."""

CHILDREN = ("controller", "data", "ps", "worker")
"""Roles of child processes."""

CHOICES = 3
"""How often ports are chosen for controllers, should somebody take one before they listen."""


class ProcessCluster:
    """Controllers, data servers, parameter servers and workers, each in a process of its own.

    Args:
        config: The run, and how many of each role.
        dataset: The images, which data servers in this process then serve; without it those of `config.data`.
        data: Addresses of data servers that stand alone, ``tcp://host:port``, which are asked to join; if
            there are none, those of `config.data`, and if that names a data set, data servers are started.
        token: Of the data servers that stand alone, if they have one; it is the whole cluster's then.
        spec: The model; without it `config.model` says.
        layers: Kinds of layers that it may use beside those of this package, by import path:
            ``{"mine": "package.module:Mine"}``. The module is one that Python finds in `environment`.
        model_text: What the TOML file that `config.model` names holds.
        transforms: What becomes of training images where `config.augment` is set, as `Recipe.of` takes it;
            None is what suits them.
        environment: Of the children; without it that of this process.
        say: Told of deaths, and of each line that a child writes to stderr; without it they are logged.
        entropy: Dice for the cluster's token and the driver's incarnation.
        timeline: Notes what the driver does; what the children noted is added when a training has ended.
        checkpoint: Folder for checkpoints; without it that of `resume`, or none are taken.
        resume: Folder of checkpoints whose run the first training continues.
        init: Saved model that each training begins with: tensors with the name and shape of one of the run's.

    `async with` starts the children and waits for their addresses; leaving the block ends them in good
    order, and kills what is still there after `drain_s`.

    Raises:
        ConfigError: `config.slow` names a node that there is not, `data` what cannot be dialled, or `layers`
            what cannot be imported.
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
        say: Callable[[str], None] = logger.warning,
        entropy: Callable[[int], bytes] = system_entropy,
        timeline: Timeline | None = None,
        checkpoint: Path | None = None,
        resume: Path | None = None,
        init: TrainedModel | None = None,
    ) -> None:
        check_dataset(dataset)
        self._hosts = hosts_of(config, data, starts_own=dataset is not None)
        self._dataset = dataset
        self._layer_names, self._layers = dict(layers), import_layers(layers)
        check_names(
            config.slow,
            workers=config.workers,
            servers=config.servers,
            data_servers=0 if self._hosts else config.data_servers,
            controllers=controller_names(config.controllers),
        )
        self.config = config
        self._controllers = controller_names(config.controllers)
        self._given_up: set[ChildProcess] = set()
        self._orders: dict[str, bytes] = {}
        self._token = token
        self.children: dict[str, ChildProcess] = {}
        self._spec = spec
        self._model_text = model_text
        self._transforms = transforms
        self._environment = for_children(os.environ if environment is None else environment)
        self._say = say
        self._entropy = entropy
        self.timeline = timeline
        self._checkpoint = checkpoint
        self._resume = resume
        check_init(init)
        self._init = init
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
        config = self.config
        threads = config.threads_per_worker(usable_cores())
        # Data servers that stand alone let in only who has their token, or none if they have none.
        token = self._token if self._hosts else self._entropy(32).hex()
        room = self.timeline.limit_events if self.timeline is not None else 0
        self._orders = orders_for(token or "", config.waits, profile_events=room, layers=self._layer_names)
        self._death = asyncio.get_running_loop().create_future()
        async with AsyncExitStack() as stack:
            folder, resume = await open_checkpoints(stack, self._checkpoint, self._resume)
            kept = await stack.enter_async_context(self._folder()) if config.controllers > 1 else None
            self._group = await stack.enter_async_context(asyncio.TaskGroup())
            stack.push_async_callback(self._stop)
            buffers = BufferPool()
            network = await stack.enter_async_context(
                slowed(
                    network_for(config, token, entropy=self._entropy, buffers=buffers),
                    texts_for(config.slow, "driver"),
                )
            )
            driver = Identity(
                role="driver", node="driver", incarnation=int.from_bytes(self._entropy(7), "little")
            )
            meet = await address_for(self._hosts) if self._hosts else LOOPBACK
            if kept is None:
                controller = await self._address(self._start("controller", "controller", "--bind", meet))
            else:
                controller = await self._open_controllers(network, driver, meet, kept)
            common = ("--controller", controller, "--bind", LOOPBACK)
            counts = ("--threads", str(threads), "--in-flight", str(config.in_flight))
            if self._dataset is not None:
                await self._open_data(stack, network, controller, self._dataset)
            data_servers = 0 if self._hosts or self._dataset is not None else config.data_servers
            cache = one_of(config.cache, data_servers)
            images = ["--data", config.data, "--damaged", config.damaged, "--cache", cache]
            images += ["--spill", config.spill] if config.spill else []
            spec = resumed_spec(resume.manifest, self._spec) if resume is not None else self._spec
            init = self._init.network.spec if self._init is not None else None
            if size := image_size(config.size, config.model, text=self._model_text, spec=spec, init=init):
                images += ["--size", f"{size[1]}x{size[0]}"]
            children = [
                *(self._start("data", f"data-{n}", *common, *images) for n in range(data_servers)),
                *(self._start("ps", f"ps-{n}", *common) for n in range(config.servers)),
                *(self._start("worker", f"worker-{n}", *common, *counts) for n in range(config.workers)),
            ]
            for child in children:
                await self._address(child)
            if self._hosts:
                hosts = DataHosts(self._hosts, network=network, identity=driver, waits=config.waits)
                await stack.enter_async_context(hosts)
                await hosts.serve(controller)
            self._driver = await stack.enter_async_context(
                Driver(
                    network=network,
                    controller=controller,
                    identity=driver,
                    config=config,
                    buffers=buffers,
                    threads=min(threads * config.workers, usable_cores()),
                    spec=self._spec,
                    layers=self._layers,
                    model_text=self._model_text,
                    transforms=self._transforms,
                    timeline=self.timeline,
                    checkpoints=folder,
                    resume=resume,
                    init=self._init,
                    available_bytes=available_bytes,
                )
            )
            self._driver.listen(self._say)
            stack.callback(setattr, self, "_running", False)
            self._running = True
            self._stack = stack.pop_all()

    async def _open_data(
        self, stack: AsyncExitStack, network: Network, controller: str, dataset: Dataset
    ) -> None:
        """Serve a data set of the caller from this process, whose memory it is in."""
        for number in range(self.config.data_servers):
            incarnation = int.from_bytes(self._entropy(7), "little")
            server = DataServer(
                network=network,
                address=LOOPBACK,
                controller=controller,
                identity=Identity(role="data", node=f"data-{number}", incarnation=incarnation),
                waits=self.config.waits,
                dataset=dataset,
            )
            await stack.enter_async_context(server)

    @asynccontextmanager
    async def _folder(self) -> AsyncIterator[Path]:
        """A folder for what controllers keep from one life to the next; it ends with the cluster.

        Those of clusters whose process was killed, and could not remove them, end here, too: nobody holds
        their locks. As a folder has its name only when its lock is held, none is taken for one of these.
        """
        place = Path(self._environment.get("TMPDIR") or "/tmp")
        folder = place / f"{KEPT}{self._entropy(8).hex()}"
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

    async def _open_controllers(self, network: Network, who: Identity, meet: str, kept: Path) -> str:
        """Start controllers that know each other's addresses from the beginning; returns these, joined.

        Raises:
            RoleDied: One could not start.
        """
        addresses: list[str] = []
        for left in reversed(range(CHOICES)):
            addresses = await _free_addresses(network, who, meet, count=len(self._controllers))
            peers = ",".join(f"{number}={address}" for number, address in enumerate(addresses, 1))
            for node in self._controllers:
                self._start("controller", node, "--peers", peers, "--dir", str(kept / node))
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
        """Wait until one of several listens, in its first life or, if that was cut short, in a later one.

        Raises:
            RoleDied: It could not start, or did not live to listen however often it was started.
        """
        while True:
            child = self.children[node]
            try:
                await self._address(child)
                return
            except RoleDied:
                if self.children[node] is child:  # `_keep` has put nobody in its place
                    raise

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        return await self._stack.__aexit__(kind, error, trace)

    async def train(self, on_epoch: OnEpoch | None = None) -> RunResult:
        """Run all epochs of the configuration. See `Driver.train`.

        Raises:
            RoleDied: A role ended that the run cannot go on without; names it and how it ended.
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
            # Whatever else went wrong followed from the death.
            cause = (self._death.exception() if self._death.done() else None) or first_cause(errors)
            raise cause from cause.__cause__
        return result

    def stop(self) -> None:
        """End the training in progress after the groups at hand. See `Driver.stop`."""
        if self._running:
            self.driver.stop()

    # --- children ----------------------------------------------------------------------------

    def _start(self, role: str, node: str, *arguments: str) -> ChildProcess:
        slow = (word for text in texts_for(self.config.slow, node) for word in ("--slow", text))
        held = ("--memory-budget", self.config.memory_budget, "--checksum", self.config.checksum)
        words = (role, "--id", node, "--supervised", *held, *arguments, *slow)
        child = self._child(role, node, words)
        self._group.create_task(self._keep(role, node, words, child), name=f"processes/{node}")
        return child

    def _child(self, role: str, node: str, words: tuple[str, ...]) -> ChildProcess:
        orders = self._orders[role]
        child = ChildProcess(node, words, orders=orders, environment=self._environment, on_line=self._say)
        self.children[node] = child
        return child

    async def _keep(self, role: str, node: str, words: tuple[str, ...], child: ChildProcess) -> None:
        """Attend a child from life to life."""
        assert self._death is not None
        left, served = RESTARTS, False
        while True:
            code = await child.run()
            if self._stopping.is_set() or child in self._given_up:
                return
            how = how_it_ended(code)
            served = served or child.served_s > 0
            if child.served_s >= SOUND_S:
                left = RESTARTS
            # What ended by itself before it served cannot start: `_open` says so. A controller that was
            # killed could have, and the others wait for it to found their group.
            could_start = served or (code < 0 and role == "controller")
            restart = could_start and left > 0 and self._goes_on_without(role, node)
            self._incident(f"{node} died: {how}{'; starting it again' if restart else ''}")
            if served and left == 0 and self._others_suffice(node):
                self._incident(f"{node} was started again {RESTARTS} times and is left: the others go on")
                return
            if not restart:
                if left == 0:
                    how = f"{how}, after it had been started again {RESTARTS} times within a short time"
                if role == "ps":
                    how = f"{how}; {LOST_SHARDS}"
                if served and not self._death.done():
                    self._death.set_exception(RoleDied(node, how))
                    self._death.exception()  # seen; `train` raises it, and there may be none
                return
            left -= 1
            if self._driver is not None:
                await self._driver.report_death(node)
                if self._stopping.is_set():
                    return
            child = self._child(role, node, words)

    def _goes_on_without(self, role: str, node: str) -> bool:
        """Whether nothing is lost with a role, so that it can be started again."""
        if role == "data":
            others = (c for name, c in self.children.items() if name.startswith("data-") and name != node)
            return any(other.serves for other in others)
        # What a controller of several knows is in its folder, even if all of them die.
        return role == "worker" or (role == "controller" and len(self._controllers) > 1)

    def _others_suffice(self, node: str) -> bool:
        """Whether this is a controller, and a majority of all is there without it."""
        serving = [name for name in self._controllers if name != node and self.children[name].serves]
        return node in self._controllers and 2 * len(serving) > len(self._controllers)

    def _incident(self, what: str) -> None:
        if self._driver is not None:
            self._driver.note(what)  # which is told to `self._say`
        else:
            self._say(what)

    async def _address(self, child: ChildProcess) -> str:
        timeout_s = self.config.waits.prepare_s
        try:
            async with asyncio.timeout(timeout_s):
                return await child.address
        except TimeoutError:
            raise DeadlineExceeded(f"{child.node} to say where it listens{LONGER}", timeout_s) from None

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
                # Last, so that nobody misses them.
                for child in controllers:
                    child.end()
                for child in controllers:
                    await child.ended.wait()
        except TimeoutError:
            self._say("some roles did not end in time and are killed")
        finally:
            for child in self.children.values():
                child.kill()

    def __repr__(self) -> str:
        return f"<ProcessCluster {', '.join(self.children) or 'not started'}>"


def orders_for(
    token: str, waits: Waits, *, profile_events: int, layers: Mapping[str, str] = {}
) -> dict[str, bytes]:
    """Return the first stdin line for the children of each role, with the keys of that role only.

    Raises:
        ConfigError: The token holds the keys of one role, or is too short.
    """
    lines = {}
    for role in CHILDREN:
        keys = derived_text(token, role) if token else ""
        orders = Orders(token=keys, waits=waits, profile_events=profile_events, layers=dict(layers))
        lines[role] = msgspec.json.encode(orders) + b"\n"
    return lines


async def _result_of(future: asyncio.Future[None]) -> None:
    # Shielded: giving up this wait must not cancel what the next run waits for.
    await asyncio.shield(future)


async def _free_addresses(network: Network, who: Identity, meet: str, *, count: int) -> list[str]:
    """Where several can listen who have to know each other's addresses before they do."""

    async def turn_away(link: Link) -> None:
        link.abort()

    async with AsyncExitStack() as stack:
        listeners = [
            await stack.enter_async_context(network.listen(meet, who, turn_away)) for _ in range(count)
        ]
        return [listener.address for listener in listeners]


def _make_own_folder(folder: Path) -> None:
    os.makedirs(folder, mode=0o700)


async def _remove_left_behind(disk: Disk, place: Path) -> None:
    """Remove the folders of clusters that are no more. What is not ours, or not to be had, is left."""
    names: list[str] = []
    with suppress(OSError):  # who may write there need not be one who may list it
        names = await disk.names(place)
    for name in names:
        folder = place / name
        if not name.removeprefix(".").startswith(KEPT) or not await disk.run(_is_own_folder, folder):
            continue
        with suppress(OSError):  # somebody holds it, or removes it at the same time
            if LOCK in await disk.names(folder):
                async with disk.hold(folder / LOCK):
                    await disk.remove_folder(folder)


def _is_own_folder(folder: Path) -> bool:
    try:
        found = os.lstat(folder)
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()
