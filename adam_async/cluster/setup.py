"""The setup of a cluster: all arguments of its caller, checked and in one value."""

from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from adam_async.checkpoint.files import open_checkpoints
from adam_async.checkpoint.run_notes import open_run_notes
from adam_async.checkpoint.trained_model import check_init
from adam_async.data_server.dataset import Dataset, check_dataset
from adam_async.driver.settings import RunInputs
from adam_async.errors import ConfigError
from adam_async.model.spec import ModelSpec
from adam_async.run.addresses import controller_names
from adam_async.run.config import Config
from adam_async.run.image_size import Size
from adam_async.run.model_selection import image_size
from adam_async.run.stragglers import check_names
from adam_async.run.user_code import imported_functions
from adam_async.runtime.timeline import Timeline
from transport import Identity


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ClusterSetup:
    """The setup of a cluster.

    Attributes:
        config: The run, with the number of each role.
        inputs: The run's inputs in addition to the configuration.
        hosts: Addresses of standalone data servers; empty: the cluster starts its own data servers.
        dataset: The images; None: the images of `Config.data`, or of the standalone data servers.
        token: Token of the cluster and of its standalone data servers.
        entropy: Random bytes for incarnations, session ids and tokens.
        timeline: Records the work of the roles.
        checkpoint: Folder for checkpoints; None: that of `resume`, or no checkpoints.
        resume: Folder of checkpoints, or one of them; the first training continues its run.
        store: Folder with a folder of shards for each server, and with the notes of the driver; the first
            training continues the run of the notes. None: in memory only.

    Raises:
        ConfigError: `Config.slow` names an unknown node, an input has the wrong type, transforms would have
            no effect, or functions of the caller would have to transform images elsewhere.
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

    def __post_init__(self) -> None:
        config, inputs = self.config, self.inputs
        if inputs.spec is not None and not isinstance(inputs.spec, ModelSpec):
            raise ConfigError(
                f"spec is a {type(inputs.spec).__name__}, expected a ModelSpec, such as named_model('digits')"
            )
        if self.resume is None and self.store is None:
            # A continued run has the transforms of its notes.
            if config.transforms and inputs.transforms is None:
                raise ConfigError(
                    f"transforms={config.transforms!r} of the Config names a file, which only commands read: "
                    "give its steps as transforms=[...] to LocalCluster or ProcessCluster"
                )
            if inputs.transforms is not None and not config.augment:
                raise ConfigError("transforms change the images of augment=True only, and augment is off")
        if self.hosts and self.inputs.functions:
            raise ConfigError(
                "functions that transform images do not travel to the data servers at "
                f"{', '.join(self.hosts)}: give the dataset here, or name them by import path"
            )
        check_dataset(self.dataset)
        check_init(self.inputs.init)
        check_names(
            config.slow,
            workers=config.workers,
            servers=config.servers,
            data_servers=0 if self.hosts else config.data_servers,
            controllers=controller_names(config.controllers),
        )

    def identity(self, role: str, node: str) -> Identity:
        """Return the identity of a new incarnation of a node."""
        return Identity(role=role, node=node, incarnation=int.from_bytes(self.entropy(7), "little"))

    def image_size(self, spec: ModelSpec | None) -> Size | None:
        """Return the size that encoded images get; `spec` is the model of the caller or of a checkpoint."""
        inputs, config = self.inputs, self.config
        init = inputs.init.network.spec if inputs.init is not None else None
        return image_size(config.size, config.model, text=inputs.model_text, spec=spec, init=init)

    async def functions(self) -> Mapping[str, Callable[..., Any]]:
        """Return the functions that the data servers of this process allow: those that the caller names.

        Raises:
            ConfigError: A function cannot be imported.
            DeadlineExceeded: An import took too long.
        """
        steps = self.inputs.transforms if self.config.augment else None
        return await imported_functions(steps or (), self.inputs.functions)

    async def with_checkpoints(self, stack: AsyncExitStack) -> RunInputs:
        """Open the folders of checkpoints and notes until the stack ends; return the inputs with them.

        Raises:
            CheckpointError: The folder has no checkpoint, or a damaged one, or notes that cannot be read; or
                a checkpoint and notes both name a run to continue.
        """
        folder, resume = await open_checkpoints(stack, self.checkpoint, self.resume)
        notes, saved = await open_run_notes(stack, self.store, resume)
        return replace(self.inputs, checkpoints=folder, resume=saved or resume, notes=notes)

    def server_folder(self, node: str) -> Path | None:
        """Return the folder in which a server keeps its shards; None for memory only."""
        return self.store / node if self.store is not None else None


def path_of(folder: str | Path | None) -> Path | None:
    """Return the path of a folder that a caller names by a text or a path."""
    return Path(folder) if folder else None
