"""The setup of a cluster: all arguments of its caller in one checked value; and the block of a cluster."""

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self, TypedDict

from msgspec import structs

from adam_async.checkpoint.checkpoint import kept_model
from adam_async.checkpoint.files import open_checkpoints
from adam_async.checkpoint.trained_model import Model as TrainedModel
from adam_async.checkpoint.trained_model import check_init
from adam_async.data_server.dataset import Dataset, check_dataset
from adam_async.driver.driver import OUTSIDE, Driver
from adam_async.driver.saved_run import manifest_in
from adam_async.driver.settings import RunInputs
from adam_async.errors import ConfigError, RunFailed, first_cause
from adam_async.model.layer import Layer
from adam_async.model.spec import ModelSpec
from adam_async.option_types import check_modes
from adam_async.report.stream import Callback, check_callbacks
from adam_async.run.addresses import controller_names
from adam_async.run.config import STEP, Config
from adam_async.run.image_size import Size
from adam_async.run.model_selection import image_size
from adam_async.run.stragglers import check_names
from adam_async.run.train_step import TrainStep
from adam_async.run.user_code import imported_functions, named_step
from adam_async.run.user_rules import with_rule
from adam_async.runtime.clock import system_entropy
from adam_async.runtime.disk import Disk
from adam_async.runtime.timeline import Timeline
from transport import Identity


class ClusterInputs(TypedDict, total=False):
    """Arguments of every cluster in addition to its `Config`; each may be left out."""

    dataset: Dataset | None
    """The images; None: the images of `config.data`, without a download."""
    data: Sequence[str]
    """Addresses of standalone data servers, ``tcp://host:port``, which the cluster invites; empty: the
    addresses in `config.data`. The cluster starts all other roles."""
    token: str | None
    """Token of the cluster and of these data servers; None: between processes a random one."""
    spec: ModelSpec | None
    """The model; None: the model of `config.model`."""
    model_text: str | None
    """Content of the TOML file that `config.model` names."""
    transforms: Sequence[Mapping[str, Any]] | None
    """Transforms of training images with `config.augment`, in the form of `Recipe.of`; None: defaults for the
    images."""
    entropy: Callable[[int], bytes]
    """Random bytes for tokens, incarnations and session ids."""
    timeline: Timeline | None
    """Records the work of the roles in this process, and after a training in others; see
    docs/how-to/profile.md."""
    checkpoint: str | Path | None
    """Folder for checkpoints; None: the folder of `resume`, or no checkpoints."""
    resume: str | Path | None
    """Folder of checkpoints, or one of them; the first training continues its run."""
    store: str | Path | None
    """Folder with one folder per server, which keeps its shards and the run's record there; the first
    training continues that run. None: in memory only."""
    init: TrainedModel | None
    """Saved model, from which each training takes the tensors with equal names and shapes."""
    step: TrainStep | str | None
    """Step to train instead of a network, or its factory's import path, ``package.module:factory``. All
    replicas of one process share the object; processes take only a path, and workers may import its
    module."""
    step_args: Mapping[str, Any] | None
    """Arguments of the factory."""
    allow_rules: Sequence[str]
    """Further rules of yours that the servers may apply, ``package.module:Class``, besides `config.rule`: for
    stores of clients."""
    callbacks: Sequence[Callback]
    """Objects that get the events of the runs (`adam_async.run.events`), each in a separate thread."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ClusterSetup:
    """The setup of a cluster; for attributes without a line below see `ClusterInputs`.

    Attributes:
        config: The run, with the number of each role.
        inputs: The run's inputs in addition to the configuration.
        hosts: Addresses of standalone data servers; empty: the cluster starts its own data servers.
        rules: Rules of the user that the servers may apply, by import path.

    Raises:
        ConfigError: `Config.slow` names an unknown node, an input has the wrong type, transforms would have
            no effect, the caller's functions would have to transform images elsewhere, or `ack=durable` lacks
            disks.
    """

    config: Config
    inputs: RunInputs
    hosts: tuple[str, ...]
    dataset: Dataset | None
    token: str | None
    entropy: Callable[[int], bytes]
    timeline: Timeline | None
    checkpoint: Path | None
    resume: Path | None
    store: Path | None = None
    rules: tuple[str, ...] = ()

    def with_weights(self, obstacle: str) -> Self:
        """Return the setup with `weights` set: copies for a step; for other runs see `Config.weights_in`.

        Raises:
            ConfigError: Training in place is wanted and impossible, or an option does not go with a step.
        """
        config, weights = self.config, "copy"
        if self.inputs.step is not None:
            check_modes(Config, structs.asdict(config), outside={STEP: STEP.name})
        else:
            weights = config.weights_in(obstacle)
        return replace(self, config=structs.replace(config, weights=weights))

    def __post_init__(self) -> None:
        config, inputs = self.config, self.inputs
        if inputs.spec is not None and not isinstance(inputs.spec, ModelSpec):
            raise ConfigError(
                f"spec is a {type(inputs.spec).__name__}, expected a ModelSpec, such as named_model('digits')"
            )
        if self.resume is None and self.store is None:
            # A continued run has the transforms of its record.
            if config.transforms and inputs.transforms is None:
                raise ConfigError(
                    f"transforms={config.transforms!r} of the Config names a file, which only commands read: "
                    "give its steps as transforms=[...] to LocalCluster or ProcessCluster"
                )
            if inputs.transforms is not None and not config.augment:
                raise ConfigError("transforms change the images of augment=True only, and augment is off")
        if config.ack == "durable" and self.store is None:
            raise ConfigError(
                "ack=durable needs servers with disks: give a folder for their shards (--store DIR)"
            )
        if self.hosts and self.inputs.functions:
            raise ConfigError(
                "functions that transform images do not travel to the data servers at "
                f"{', '.join(self.hosts)}: give the dataset here, or name them by import path"
            )
        check_dataset(self.dataset)
        check_init(self.inputs.init)
        check_callbacks(self.inputs.callbacks)
        check_names(
            config.slow,
            workers=config.workers,
            servers=config.servers,
            data_servers=0 if self.hosts else config.data_servers,
            controllers=controller_names(config.controllers),
        )

    @classmethod
    def of(
        cls,
        config: Config,
        given: ClusterInputs,
        *,
        layers: Mapping[str, type[Layer]],
        functions: Mapping[str, Callable[..., Any]] = {},
    ) -> Self:
        """Return the setup of a cluster with these arguments.

        Args:
            layers: Kinds of layers for its models.
            functions: Kinds of transforms that are user functions.
        """
        dataset = given.get("dataset")
        config = with_rule(config)
        return cls(
            config=config,
            inputs=RunInputs(
                spec=given.get("spec"),
                model_text=given.get("model_text"),
                transforms=given.get("transforms"),
                functions=functions,
                layers=layers,
                init=given.get("init"),
                step=named_step(given.get("step"), given.get("step_args")),
                callbacks=given.get("callbacks", ()),
            ),
            hosts=config.hosts(given.get("data", ()), starts_own=dataset is not None),
            dataset=dataset,
            token=given.get("token"),
            entropy=given.get("entropy", system_entropy),
            timeline=given.get("timeline"),
            checkpoint=path_of(given.get("checkpoint")),
            resume=path_of(given.get("resume")),
            store=path_of(given.get("store")),
            rules=(*([config.rule] if config.has_user_rule else []), *given.get("allow_rules", ())),
        )

    def identity(self, role: str, node: str) -> Identity:
        """Return the identity of a new incarnation of a node."""
        return Identity(role=role, node=node, incarnation=int.from_bytes(self.entropy(7), "little"))

    def image_size(self, spec: ModelSpec | None) -> Size | None:
        """Return the size that encoded images get; `spec` is the caller's or a checkpoint's model."""
        inputs, config = self.inputs, self.config
        init = inputs.init.network.spec if inputs.init is not None else None
        return image_size(config.size, config.model, text=inputs.model_text, spec=spec, init=init)

    async def functions(self) -> Mapping[str, Callable[..., Any]]:
        """Return the functions that this process's data servers allow: those that the caller names.

        Raises:
            ConfigError: A function cannot be imported.
            DeadlineExceeded: An import took too long.
        """
        steps = self.inputs.transforms if self.config.augment else None
        return await imported_functions(steps or (), self.inputs.functions)

    async def with_checkpoints(self, stack: AsyncExitStack) -> RunInputs:
        """Open the folder of checkpoints until the stack ends; return the inputs with it.

        Raises:
            CheckpointError: The folder has no checkpoint, or a damaged one.
        """
        folder, resume = await open_checkpoints(stack, self.checkpoint, self.resume)
        return replace(self.inputs, checkpoints=folder, resume=resume, on_disks=self.store is not None)

    async def spec_of(self, inputs: RunInputs) -> ModelSpec | None:
        """Return the model of the run that the first training continues, or else the caller's.

        Raises:
            CheckpointError: The caller has another model.
            ConfigError, DataError, RunFailed: The record of the run on the disks cannot be read.
        """
        manifest = inputs.resume.manifest if inputs.resume is not None else None
        if self.store is not None:
            async with Disk() as disk:
                manifest = await manifest_in(self.store, disk) or manifest
        return kept_model(manifest.spec, inputs.spec, manifest.title) if manifest is not None else inputs.spec

    def server_folder(self, node: str) -> Path | None:
        """Return the folder in which a server keeps its shards; None for memory only."""
        return self.store / node if self.store is not None else None


class Cluster:
    """The block of a cluster, which is entered once; training is possible only within it."""

    def __init__(self, setup: ClusterSetup) -> None:
        self._setup = setup
        self.config = setup.config
        self.timeline = setup.timeline
        self._stack = AsyncExitStack()
        self._driver: Driver | None = None
        self._entered = self._running = False

    @property
    def driver(self) -> Driver:
        """The driver, in this process."""
        assert self._driver is not None, "enter the cluster's block first"
        return self._driver

    async def __aenter__(self) -> Self:
        self._check_entry()
        self._entered = True
        try:
            async with AsyncExitStack() as stack:
                self._driver = await self._open(stack)
                stack.callback(setattr, self, "_running", False)
                self._stack = stack.pop_all()
                self._running = True
        except ExceptionGroup as errors:  # the role's task group has wrapped the error
            cause = first_cause(errors)
            raise cause from cause.__cause__
        return self

    @abstractmethod
    async def _open(self, stack: AsyncExitStack) -> Driver:
        """Open all roles in the order of their needs, the driver last; a failure closes the stack."""

    def _check_entry(self) -> None:
        if self._entered:
            raise RunFailed(f"a cluster can be entered once: make another {type(self).__name__}")

    def _check_runs(self) -> None:
        if not self._running:
            raise RunFailed(OUTSIDE)

    def stop(self) -> None:
        """End the training in progress after the groups in flight. See `Driver.stop`."""
        if self._running:
            self.driver.stop()


def path_of(folder: str | Path | None) -> Path | None:
    """Return the path of a folder that a caller names by a text or a path."""
    return Path(folder) if folder else None
