"""A driver's settings: its access to the cluster, and its runs' inputs."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from adam_async.checkpoint.checkpoint import CheckpointError, StoredCheckpoint, resumed_config
from adam_async.checkpoint.files import CheckpointFolder
from adam_async.checkpoint.trained_model import Model as TrainedModel
from adam_async.driver.takeover import Attach, SavedRun
from adam_async.errors import ConfigError
from adam_async.model.layer import Layer
from adam_async.model.layers import BUILTIN_LAYERS
from adam_async.model.spec import ModelSpec
from adam_async.option_types import check_modes
from adam_async.parameter_server.storage import StoragePool
from adam_async.report.stream import Callback
from adam_async.run.config import STEP, Config
from adam_async.run.step_model import arrays_of_step
from adam_async.run.user_code import NamedStep
from adam_async.run.user_rules import with_rule
from adam_async.runtime.clock import Clock, wall_clock
from adam_async.runtime.machine import ProcessMemory, process_memory
from adam_async.runtime.timeline import Timeline
from dataflow import ComputePool, MakePool
from transport import Identity, Network


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DriverSettings:
    """A driver's access to the cluster and to its own process.

    Attributes:
        controller: Address of the controller, or the addresses of several, joined by commas.
        threads: Threads that evaluate.
        available_bytes: Returns the memory for a run, in bytes, if all roles are on this machine.
        storage_pool: Memory of this process's servers, for runs in place.
        wall: Returns the time of events, in seconds since 1970.
    """

    network: Network
    controller: str
    identity: Identity
    threads: int
    timeline: Timeline | None = None
    make_pool: MakePool = ComputePool
    process_memory: Callable[[], ProcessMemory] = process_memory
    available_bytes: Callable[[], int] | None = None
    storage_pool: StoragePool = field(default_factory=StoragePool)
    wall: Clock = wall_clock


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RunInputs:
    """The inputs of a driver's runs, in addition to their configuration.

    Attributes:
        spec: The model; None: the model of `Config.model`.
        model_text: Content of the TOML file that `Config.model` names.
        transforms: Transforms of training images with `Config.augment`; None: defaults for the images.
        functions: Kinds of transforms that are user functions; see `Recipe.of`.
        layers: Kinds of layers that the model may use, the same in every role.
        checkpoints: Folder for the runs' checkpoints; None: no checkpoints.
        resume: Checkpoint, or run on its servers' disks, that the first run continues, with its model and
            rate.
        on_disks: Whether the servers keep their shards on disks. The first run continues the run that the
            servers have there, if any.
        init: Saved model with the first values of each run; see `fill_from`.
        step: Step of the user that the runs train instead of a network.
        attach: Request to take over a run that waits for a driver; None: begin a new run.
        replace: Whether a new run may take the place of one that waits for a driver.
        callbacks: Watch the runs.
    """

    spec: ModelSpec | None = None
    model_text: str | None = None
    transforms: Sequence[Mapping[str, Any]] | None = None
    functions: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    layers: Mapping[str, type[Layer]] = field(default_factory=lambda: BUILTIN_LAYERS)
    checkpoints: CheckpointFolder | None = None
    resume: StoredCheckpoint | SavedRun | None = None
    on_disks: bool = False
    init: TrainedModel | None = None
    step: NamedStep | None = None
    attach: Attach | None = None
    replace: bool = False
    callbacks: Sequence[Callback] = ()


def config_of(config: Config, inputs: RunInputs) -> Config:
    """Return the configuration of a driver's runs, checked against their inputs.

    Raises:
        CheckpointError: The run takes checkpoints with concurrent evaluation, or the resumed checkpoint does
            not fit.
        ConfigError: Two inputs set the first weights, an option contradicts a step, or the user's rule that
            the options name cannot be imported.
        StepFailed: The `arrays` of the step raised.
    """
    config = with_rule(config)
    if inputs.step is not None:
        check_modes(Config, msgspec.structs.asdict(config), outside={STEP: STEP.name})
        if inputs.spec is not None or inputs.init is not None:
            raise ConfigError(
                f"step {inputs.step.name} sets arrays and first values itself: leave spec and init out"
            )
        first = next(iter(arrays_of_step(inputs.step.name, inputs.step.step).values()))
        config = msgspec.structs.replace(config, dtype=first.dtype)
    if config.weights == "auto":  # a cluster that starts all roles has decided this already
        config = msgspec.structs.replace(config, weights="copy")
    if inputs.resume is not None:
        config = resumed_config(inputs.resume.manifest, config)
    if inputs.checkpoints is None:
        config = msgspec.structs.replace(config, checkpoint_every=0)
    if config.evaluation == "concurrent" and inputs.checkpoints is not None:
        raise CheckpointError(
            "evaluation=concurrent does not pause at the end of an epoch, where checkpoints are taken: leave "
            "it at wait, or do without"
        )
    if inputs.init is not None and (inputs.resume is not None or config.record):
        other = "resume continues" if inputs.resume is not None else "record repeats"
        raise ConfigError(f"init and {other} both set the first weights: leave one of them out")
    return config
