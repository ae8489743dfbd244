"""All roles in one event loop: `async with LocalCluster(config) as cluster`.

The roles are the same objects that the entrypoints run, joined by local links: messages hand over
references, and counts, clocks and staleness are the same as over TCP. Everything lives in the caller's
loop and block: no signal handlers, no logging set-up, no loop policy, no global state; two clusters
may live side by side.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from weakref import WeakKeyDictionary

import msgspec

from adam_async.checkpoint.files import open_checkpoints
from adam_async.checkpoint.trained_model import Model as TrainedModel
from adam_async.checkpoint.trained_model import check_init
from adam_async.cluster.external_data import DataHosts, address_for, hosts_of
from adam_async.cluster.roles import LOOPBACK, network_for, slowed
from adam_async.cluster.scheme_networks import SchemeNetworks
from adam_async.controller.service import Controller
from adam_async.data_server.dataset import Dataset, check_dataset
from adam_async.data_server.service import DataServer
from adam_async.data_server.sources.datasets import load
from adam_async.driver.driver import OUTSIDE, Driver
from adam_async.errors import ConfigError, RoleDied, RunFailed, first_cause
from adam_async.messages import role_table
from adam_async.model.layer import Layer
from adam_async.model.layers import BUILTIN_LAYERS
from adam_async.model.spec import ModelSpec
from adam_async.parameter_server.service import ParameterServer
from adam_async.parameter_server.storage import StoragePool
from adam_async.run.addresses import controller_names
from adam_async.run.cache_size import room_for_whole
from adam_async.run.config import Config
from adam_async.run.model_selection import image_size
from adam_async.run.result import OnEpoch, RunResult
from adam_async.run.stragglers import check_names, pace_of
from adam_async.run.token_file import root_token
from adam_async.runtime.clock import system_entropy
from adam_async.runtime.disk import Disk
from adam_async.runtime.machine import ProcessMemory, available_bytes, process_memory, usable_cores
from adam_async.runtime.timeline import Timeline
from adam_async.worker.service import ModelWorker
from dataflow import ComputePool, MakePool
from transport import BufferPool, Identity, LocalNetwork, Network


class LocalCluster:
    """Controllers, data servers, parameter servers and workers in this event loop.

    Args:
        config: The run, and how many of each role.
        dataset: The images; without them `config.data` is loaded, downloading nothing.
        data: Addresses of data servers that stand alone, ``tcp://host:port``, which are asked to join; if
            there are none, those of `config.data`. All other roles are started here.
        token: Of those data servers, if they have one.
        spec: The model; without it `config.model` says.
        layers: Kinds of layers that it may use; ``{**BUILTIN_LAYERS, "mine": Mine}`` adds one.
        model_text: What the TOML file that `config.model` names holds.
        transforms: What becomes of training images where `config.augment` is set, as `Recipe.of` takes it;
            None is what suits them.
        functions: Kinds of transforms that are functions of the user, ``{"invert": invert}``; see `Recipe`.
        network: Links between the roles; without it local ones. Tests hand in faulty ones. Unless it makes
            local links, it has to reach the data servers of `data` too.
        address: Where every role listens: one that lets the network choose, such as ``tcp://127.0.0.1:0``.
        entropy: Dice for incarnations and session ids.
        timeline: Notes what all roles do; see docs/profile.md.
        checkpoint: Folder for checkpoints; without it that of `resume`, or none are taken.
        resume: Folder of checkpoints whose run the first training continues.
        init: Saved model that each training begins with: tensors with the name and shape of one of the run's.
        make_pool: Makes every role's compute pool; a simulation hands in its own.
        process_memory: Says which process this is, and what that has held.
        available_bytes: Memory that this process could use.

    `async with` starts the roles; leaving the block ends them, whatever they are doing, and waits for
    compute threads to finish the group that they are in. A role that fails cancels the block and
    raises its error there.

    Raises:
        ConfigError: `config.slow` names a node that there is not, weights cannot be held as it says, or there
            are two kinds of data.
        DataError: On entering: `config.data` cannot be loaded.
    """

    def __init__(
        self,
        config: Config,
        *,
        dataset: Dataset | None = None,
        data: Sequence[str] = (),
        token: str | None = None,
        spec: ModelSpec | None = None,
        layers: Mapping[str, type[Layer]] = BUILTIN_LAYERS,
        model_text: str | None = None,
        transforms: Sequence[Mapping[str, Any]] | None = None,
        functions: Mapping[str, Callable[..., Any]] = {},
        network: Network | None = None,
        address: str = "",
        entropy: Callable[[int], bytes] = system_entropy,
        timeline: Timeline | None = None,
        checkpoint: Path | None = None,
        resume: Path | None = None,
        init: TrainedModel | None = None,
        make_pool: MakePool = ComputePool,
        process_memory: Callable[[], ProcessMemory] = process_memory,
        available_bytes: Callable[[], int] = available_bytes,
    ) -> None:
        check_dataset(dataset)
        check_init(init)
        self._hosts = hosts_of(config, data, starts_own=dataset is not None)
        if self._hosts and functions:
            raise ConfigError(
                "functions that transform images do not travel to the data servers at "
                f"{', '.join(self._hosts)}: give the dataset here, or name them by import path"
            )
        check_names(
            config.slow,
            workers=config.workers,
            servers=config.servers,
            data_servers=0 if self._hosts else config.data_servers,
            controllers=controller_names(config.controllers),
        )
        one_process = network is None or isinstance(network, LocalNetwork)
        self.config = msgspec.structs.replace(config, weights=config.weights_in(one_process=one_process))
        self.dataset = dataset
        self.buffers = BufferPool()
        self.network = network or LocalNetwork(rules=role_table())
        self._address = address or ("local://" if one_process else LOOPBACK)
        if self._hosts and one_process:
            if token:
                root_token(token)  # each role started here needs its own keys
            tcp = network_for(config, token, entropy=entropy, buffers=self.buffers)
            self.network = SchemeNetworks(local=self.network, tcp=tcp)
        self._spec = spec
        self._layers = layers
        self._model_text = model_text
        self._transforms = transforms
        self._functions = functions
        self._entropy = entropy
        self.timeline = timeline
        self._checkpoint = checkpoint
        self._resume = resume
        self._init = init
        self._make_pool = make_pool
        self._process_memory = process_memory
        self._available_bytes = available_bytes
        self._stack = AsyncExitStack()
        self._running = False
        self._storage_pool = StoragePool()
        # What somebody else put between the workers, or slows down on purpose, is to be felt.
        self._together = config.partitions > 1 and network is None and not config.slow
        self.controllers: list[Controller] = []
        self.data_servers: list[DataServer] = []
        self.servers: list[ParameterServer] = []
        self.workers: list[ModelWorker] = []

    @property
    def controller(self) -> Controller:
        """The controller that leads; while none does, the first."""
        return next((each for each in self.controllers if each.group.leads), self.controllers[0])

    @property
    def data(self) -> DataServer:
        """The first data server that was started here."""
        return self.data_servers[0]

    async def __aenter__(self) -> Self:
        try:
            await self._open()
        except ExceptionGroup as errors:  # a role's task group has wrapped it
            cause = first_cause(errors)
            raise cause from cause.__cause__
        return self

    async def _open(self) -> None:
        config, waits = self.config, self.config.waits
        threads = config.threads_per_worker(usable_cores())
        if self.dataset is None and not self._hosts:
            self.dataset = await self._load()
        async with AsyncExitStack() as stack:
            folder, resume = await open_checkpoints(stack, self._checkpoint, self._resume)
            network = await stack.enter_async_context(slowed(self.network, config.slow))
            await self._open_controllers(stack, network)
            meet = ",".join(controller.address for controller in self.controllers)
            common: dict[str, Any] = {
                "network": network,
                "controller": meet,
                "waits": waits,
                "timeline": self.timeline,
                "process_memory": self._process_memory,
            }
            driver = self._identity("driver", "driver")
            if self._hosts:
                hosts = DataHosts(self._hosts, network=network, identity=driver, waits=waits)
                await stack.enter_async_context(hosts)
                reached = await address_for(self._hosts)
                listeners = [await controller.listen_also(reached) for controller in self.controllers]
                await hosts.serve(",".join(listeners))
            else:
                await self._open_data(stack, common)
            for number in range(config.servers):
                server = ParameterServer(
                    make_pool=self._make_pool,
                    address=self._address,
                    identity=self._identity("ps", f"ps-{number}"),
                    buffers=self.buffers,
                    storage_pool=self._storage_pool,
                    layers=self._layers,
                    **common,
                )
                self.servers.append(await stack.enter_async_context(server))
            for number in range(config.workers):
                if number % config.partitions == 0:
                    pool = await self._replica_pool(stack, number // config.partitions, threads)
                worker = ModelWorker(
                    address=self._address,
                    identity=self._identity("worker", f"worker-{number}"),
                    pace=pace_of(config.slow, f"worker-{number}"),
                    buffers=self.buffers,
                    threads=threads,
                    pool=pool,
                    make_pool=self._make_pool,
                    in_flight=config.in_flight,
                    entropy=self._entropy,
                    storage_pool=self._storage_pool,
                    layers=self._layers,
                    **common,
                )
                self.workers.append(await stack.enter_async_context(worker))
            self.driver = await stack.enter_async_context(
                Driver(
                    network=network,
                    controller=meet,
                    identity=driver,
                    config=config,
                    buffers=self.buffers,
                    threads=threads * config.workers,
                    spec=self._spec,
                    layers=self._layers,
                    model_text=self._model_text,
                    transforms=self._transforms,
                    functions=self._functions,
                    timeline=self.timeline,
                    checkpoints=folder,
                    resume=resume,
                    init=self._init,
                    together=self._together,
                    make_pool=self._make_pool,
                    process_memory=self._process_memory,
                    available_bytes=self._available_bytes,
                )
            )
            stack.callback(setattr, self, "_running", False)
            self._stack = stack.pop_all()
            self._running = True

    async def _load(self) -> Dataset:
        init = self._init.network.spec if self._init is not None else None
        async with Disk() as disk:
            return await load(
                self.config.data,
                disk,
                damaged=self.config.damaged,
                room_bytes=room_for_whole(None, available_bytes=self._available_bytes()),
                size=image_size(self.config.size, self.config.model, spec=self._spec, init=init),
            )

    async def _open_controllers(self, stack: AsyncExitStack, network: Network) -> None:
        names = controller_names(self.config.controllers)
        for name in names:
            controller = Controller(
                network=network,
                address=self._address,
                identity=self._identity("controller", name),
                waits=self.config.waits,
                alone=len(names) == 1,
                layers=self._layers,
                entropy=self._entropy,
            )
            controller.process_memory = self._process_memory
            self.controllers.append(await stack.enter_async_context(controller))
        if len(names) > 1:
            peers = {name: each.address for name, each in zip(names, self.controllers, strict=True)}
            for controller in self.controllers:
                controller.group.meet(peers)

    async def _open_data(self, stack: AsyncExitStack, common: Mapping[str, Any]) -> None:
        assert self.dataset is not None, "the images are here or elsewhere"
        for number in range(self.config.data_servers):
            server = DataServer(
                address=self._address,
                identity=self._identity("data", f"data-{number}"),
                dataset=self.dataset,
                functions=self._functions,
                make_pool=self._make_pool,
                available_bytes=self._available_bytes,
                **common,
            )
            self.data_servers.append(await stack.enter_async_context(server))

    async def _replica_pool(self, stack: AsyncExitStack, replica: int, threads: int) -> ComputePool | None:
        """Where the workers of one replica compute together; None where a worker has a pool of its own."""
        partitions = self.config.partitions
        first = replica * partitions
        paced = any(pace_of(self.config.slow, f"worker-{first + n}") < 1 for n in range(partitions))
        if partitions == 1 or self._together or paced:
            # Nothing to share, or threads that cannot be slow for one worker only.
            return None
        pool = self._make_pool(
            threads=threads * partitions, name=f"replica-{replica}", contexts=WeakKeyDictionary
        )
        return await stack.enter_async_context(pool)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        try:
            return await self._stack.__aexit__(kind, error, trace)
        except ExceptionGroup as errors:
            # A task group per role has wrapped it; what the block itself raised goes on as it was.
            if errors.subgroup(lambda inner: inner is error) is not None:
                cause = _error_of_role(error, errors)
                if cause is None:
                    return False
            else:
                cause = first_cause(errors)
            raise cause from cause.__cause__

    async def train(self, on_epoch: OnEpoch | None = None) -> RunResult:
        """Run all epochs of the configuration. See `Driver.train`.

        Raises:
            RunFailed: The cluster's block was not entered, or has ended.
        """
        if not self._running:
            raise RunFailed(OUTSIDE)
        try:
            return await self.driver.train(on_epoch)
        except ExceptionGroup as errors:
            cause = first_cause(errors)
            raise cause from cause.__cause__

    def stop(self) -> None:
        """End the training in progress after the groups at hand. See `Driver.stop`."""
        if self._running:
            self.driver.stop()

    def _identity(self, role: str, node: str) -> Identity:
        return Identity(role=role, node=node, incarnation=int.from_bytes(self._entropy(7), "little"))

    def __repr__(self) -> str:
        return f"<LocalCluster {len(self.servers)} servers {len(self.workers)} workers {self.network!r}>"


def _error_of_role(error: BaseException | None, errors: ExceptionGroup[Exception]) -> BaseException | None:
    """The error by which a role in this process ended, if the block raised that the role died."""
    if not isinstance(error, RoleDied):
        return None
    others = errors.subgroup(lambda inner: inner is not error and not isinstance(inner, RoleDied))
    return first_cause(others) if others is not None else None
