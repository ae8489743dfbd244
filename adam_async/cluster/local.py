"""All roles in one event loop: `async with LocalCluster(config) as cluster`.

The roles are the objects that `adam_async.cluster.roles` runs, connected by local links: messages pass
references, and counts, clocks and staleness are as over TCP. All state belongs to the caller's loop and
block: no signal handlers, logging set-up, loop policy or global state; two clusters can train side by side.
"""

import dataclasses
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Any, Unpack
from weakref import WeakKeyDictionary

from adam_async.cluster.external_data import DataHosts
from adam_async.cluster.networks import LOOPBACK, SchemeNetworks, address_towards, network_for, slowed
from adam_async.cluster.setup import Cluster, ClusterInputs, ClusterSetup
from adam_async.controller.consensus_node import ConsensusSetup
from adam_async.controller.role import RoleSettings
from adam_async.controller.service import Controller
from adam_async.data_server.dataset import Dataset
from adam_async.data_server.service import DataServer
from adam_async.data_server.sources.datasets import load_dataset
from adam_async.driver.driver import Driver
from adam_async.driver.settings import DriverSettings
from adam_async.errors import ConfigError, RoleDied, RoleFailed, first_cause
from adam_async.messages import role_table
from adam_async.model.layer import Layer
from adam_async.model.layers import BUILTIN_LAYERS
from adam_async.parameter_server.server_disk import opened_disk
from adam_async.parameter_server.service import ParameterServer
from adam_async.parameter_server.storage import StoragePool
from adam_async.run.addresses import controller_names
from adam_async.run.config import Config
from adam_async.run.memory_sizes import cache_limits, room_for_whole
from adam_async.run.result import OnEpoch, RunResult
from adam_async.run.stragglers import pace_of
from adam_async.run.token_file import root_token
from adam_async.run.user_code import StepSource
from adam_async.run.user_rules import allow_rules
from adam_async.runtime.disk import Disk
from adam_async.runtime.machine import (
    ProcessMemory,
    apply_numerics,
    available_bytes,
    process_memory,
    usable_cores,
)
from adam_async.worker.run_session import ComputeSettings
from adam_async.worker.service import ModelWorker
from dataflow import ComputePool, MakePool
from transport import BufferPool, Identity, LocalNetwork, Network


class LocalCluster(Cluster):
    """Controllers, data servers, parameter servers and workers in this event loop.

    Args:
        config: The run, with the number of each role.
        layers: Kinds of layers for its models; ``{**BUILTIN_LAYERS, "mine": Mine}`` adds one.
        functions: Kinds of transforms that are user functions, ``{"invert": invert}``; see `Recipe`.
        network: Links between the roles; None: local links. Other links must reach the data servers of `data`
            too. Tests pass faulty networks.
        address: Address on which every role listens, with port 0, such as ``tcp://127.0.0.1:0``.
        make_pool: Makes every role's compute pool; a simulation passes its own.
        process_memory: Returns the process and its memory use.
        available_bytes: Returns the memory available to this process.
        inputs: See `ClusterInputs`.

    `async with` starts the roles; the block's end ends them at once, and waits for compute threads to finish
    their group. The error of a failed role cancels the block and is raised by the block.

    Raises:
        ConfigError: `config.slow` names an unknown node, `config.weights` does not fit the network,
            `config.copies_bind` or `config.processes` is set, the arguments name two kinds of data,
            transforms would have no effect, or the step cannot be made or contradicts an option.
        DataError: On entering: `config.data` cannot be loaded.
        RunFailed: On entering: the cluster was entered before.
    """

    def __init__(
        self,
        config: Config,
        *,
        layers: Mapping[str, type[Layer]] = BUILTIN_LAYERS,
        functions: Mapping[str, Callable[..., Any]] = {},
        network: Network | None = None,
        address: str = "",
        make_pool: MakePool = ComputePool,
        process_memory: Callable[[], ProcessMemory] = process_memory,
        available_bytes: Callable[[], int] = available_bytes,
        **inputs: Unpack[ClusterInputs],
    ) -> None:
        _refuse_copies_path(config)
        if config.processes:
            raise ConfigError("processes=True starts a process for each role: use ProcessCluster(config)")
        one_process = network is None or isinstance(network, LocalNetwork)
        setup = ClusterSetup.of(config, inputs, layers=layers, functions=functions)
        setup = setup.with_weights("" if one_process else "the links of this cluster are not local")
        super().__init__(setup)
        self.dataset = setup.dataset
        self.buffers = BufferPool()
        self.network = self._network_of(network, one_process=one_process)
        self._address = address or ("local://" if one_process else LOOPBACK)
        self._make_pool = make_pool
        self._process_memory = process_memory
        self._available_bytes = available_bytes
        self._storage_pool = StoragePool()
        self.controllers: list[Controller] = []
        self.data_servers: list[DataServer] = []
        self.servers: list[ParameterServer] = []
        self.workers: list[ModelWorker] = []

    def _network_of(self, given: Network | None, *, one_process: bool) -> Network:
        """Return the links between the roles, and over TCP to the standalone data servers."""
        local = given or LocalNetwork(rules=role_table())
        if not one_process or not self._setup.hosts:
            return local
        token, entropy = self._setup.token, self._setup.entropy
        if token:
            root_token(token)  # each role started here needs its own keys
        tcp = network_for(self.config, token, entropy=entropy, buffers=self.buffers)
        return SchemeNetworks(local=local, tcp=tcp)

    @property
    def controller(self) -> Controller:
        """The leading controller, or the first one if none leads."""
        return next((each for each in self.controllers if each.group.leads), self.controllers[0])

    @property
    def data(self) -> DataServer:
        """The first data server of this process."""
        return self.data_servers[0]

    async def _open(self, stack: AsyncExitStack) -> Driver:
        config, setup = self.config, self._setup
        threads = config.threads_per_worker(usable_cores())
        if self.dataset is None and not setup.hosts:
            self.dataset = await self._load()
        inputs = await setup.with_checkpoints(stack)
        network = await stack.enter_async_context(slowed(self.network, config.slow))
        await self._open_controllers(stack, network)
        controller = ",".join(controller.address for controller in self.controllers)
        driver = setup.identity("driver", "driver")
        if setup.hosts:
            await self._open_hosts(stack, network, driver)
        else:
            await self._open_data(stack, network, controller)
        await self._open_servers(stack, network, controller)
        await self._open_workers(stack, network, controller, threads)
        settings = DriverSettings(
            network=network,
            controller=controller,
            identity=driver,
            threads=threads * config.workers,
            timeline=self.timeline,
            make_pool=self._make_pool,
            process_memory=self._process_memory,
            available_bytes=self._available_bytes,
            storage_pool=self._storage_pool,
        )
        return await stack.enter_async_context(Driver(config, settings, inputs))

    async def _load(self) -> Dataset:
        available = self._available_bytes()
        cache = cache_limits(self.config.cache, self.config.spill, available_bytes=available)
        async with Disk() as disk:
            dataset = await load_dataset(
                self.config.data,
                disk,
                damaged=self.config.damaged,
                cache=cache,
                room_bytes=room_for_whole(cache, available_bytes=available),
                size=self._setup.image_size(self._setup.inputs.spec),
            )
        return dataclasses.replace(
            dataset, cache=None
        )  # so that the data servers check the limits of the run

    def _settings(self, role: str, node: str, network: Network, controller: str = "") -> RoleSettings:
        return RoleSettings(
            network=network,
            address=self._address,
            identity=self._setup.identity(role, node),
            waits=self.config.waits,
            controller=controller,
            timeline=self.timeline if controller else None,  # a profile has no controllers
            process_memory=self._process_memory,
        )

    async def _open_controllers(self, stack: AsyncExitStack, network: Network) -> None:
        """Open the controllers. Several controllers get each other's addresses once all of them listen."""
        names = controller_names(self.config.controllers)
        for name in names:
            controller = Controller(
                self._settings("controller", name, network),
                ConsensusSetup(entropy=self._setup.entropy),
                alone=len(names) == 1,
            )
            self.controllers.append(await stack.enter_async_context(controller))
        if len(names) > 1:
            peers = {name: each.address for name, each in zip(names, self.controllers, strict=True)}
            for controller in self.controllers:
                controller.group.set_addresses(peers)

    async def _open_hosts(self, stack: AsyncExitStack, network: Network, driver: Identity) -> None:
        """Ask the standalone data servers to join."""
        setup = self._setup
        hosts = DataHosts(setup.hosts, network=network, identity=driver, waits=self.config.waits)
        await stack.enter_async_context(hosts)
        reached = await address_towards(",".join(setup.hosts))
        listeners = [await controller.listen_also(reached) for controller in self.controllers]
        await hosts.serve(",".join(listeners))

    async def _open_data(self, stack: AsyncExitStack, network: Network, controller: str) -> None:
        assert self.dataset is not None, "the images are here or elsewhere"
        functions = await self._setup.functions()
        for number in range(self.config.data_servers):
            server = DataServer(
                self._settings("data", f"data-{number}", network, controller),
                self.dataset,
                functions=functions,
                make_pool=self._make_pool,
                available_bytes=self._available_bytes,
            )
            self.data_servers.append(await stack.enter_async_context(server))

    async def _open_servers(self, stack: AsyncExitStack, network: Network, controller: str) -> None:
        # The dealer may be elsewhere, and asks the servers for their groups.
        elsewhere = await address_towards(",".join(self._setup.hosts)) if self._setup.hosts else ""
        rules = allow_rules(self._setup.rules)
        for number in range(self.config.servers):
            node, disk = f"ps-{number}", None
            if (folder := self._setup.server_folder(node)) is not None:
                opening = opened_disk(folder, flush_s=self.config.flush_s, rules=rules)
                disk = await stack.enter_async_context(opening)
            server = ParameterServer(
                self._settings("ps", node, network, controller),
                make_pool=self._make_pool,
                buffers=self.buffers,
                storage_pool=self._storage_pool,
                numerics=apply_numerics(),
                elsewhere=elsewhere,
                disk=disk,
                rules=rules,
            )
            self.servers.append(await stack.enter_async_context(server))

    async def _open_workers(
        self, stack: AsyncExitStack, network: Network, controller: str, threads: int
    ) -> None:
        """Open the workers, and one compute pool for each replica whose workers share a pool."""
        config, setup = self.config, self._setup
        for number in range(config.workers):
            if number % config.partitions == 0:
                pool = await self._replica_pool(stack, number // config.partitions, threads)
            name = f"worker-{number}"
            compute = ComputeSettings(
                threads=threads,
                in_flight=config.in_flight,
                pace=pace_of(config.slow, name),
                pool=pool,
                make_pool=self._make_pool,
            )
            worker = ModelWorker(
                self._settings("worker", name, network, controller),
                compute,
                buffers=self.buffers,
                entropy=setup.entropy,
                storage_pool=self._storage_pool,
                layers=setup.inputs.layers,
                steps=StepSource(given=setup.inputs.step),
            )
            self.workers.append(await stack.enter_async_context(worker))

    async def _replica_pool(self, stack: AsyncExitStack, replica: int, threads: int) -> ComputePool | None:
        """Open the pool that a replica's workers share; return None if each worker has its own."""
        partitions = self.config.partitions
        first = replica * partitions
        paced = any(pace_of(self.config.slow, f"worker-{first + n}") < 1 for n in range(partitions))
        if partitions == 1 or self.config.pin_threads or paced:
            # No pool is shared, or threads cannot be slow, or keep to cores, for one worker only.
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
            # The role's task group has wrapped the error; an error of the block itself passes unchanged.
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
            TransformFailed: A function of the caller failed on an image.
        """
        self._check_runs()
        try:
            return await self.driver.train(on_epoch)
        except (RoleFailed, ExceptionGroup) as error:
            cause = first_cause(error)
            if isinstance(cause, RoleFailed):
                # The function's error has its traceback; the cluster map has only its text.
                failures = [server.transform_failed for server in self.data_servers]
                cause = next((failure for failure in failures if failure is not None), cause)
            raise cause from cause.__cause__

    def __repr__(self) -> str:
        return f"<LocalCluster {len(self.servers)} servers {len(self.workers)} workers {self.network!r}>"


def _refuse_copies_path(config: Config) -> None:
    if config.copies_bind:
        raise ConfigError(
            f"copies_bind={config.copies_bind} is an address of processes, and the roles of this cluster "
            "are in one: train with processes, or leave copies_bind out"
        )


def _error_of_role(error: BaseException | None, errors: ExceptionGroup[Exception]) -> BaseException | None:
    """Return the error in this process that caused a reported death of a role; None if there is none."""
    if not isinstance(error, RoleDied):
        return None
    others = errors.subgroup(lambda inner: inner is not error and not isinstance(inner, RoleDied))
    return first_cause(others) if others is not None else None
