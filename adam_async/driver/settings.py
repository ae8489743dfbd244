"""Settings of a driver: its access to the cluster, and the inputs of its runs."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from adam_async.checkpoint.files import CheckpointFolder
from adam_async.checkpoint.manifest import Checkpoint
from adam_async.checkpoint.trained_model import Model as TrainedModel
from adam_async.model.layer import Layer
from adam_async.model.layers import BUILTIN_LAYERS
from adam_async.model.spec import ModelSpec
from adam_async.run.user_code import NamedStep
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
        available_bytes: Returns the memory for a run if all roles are on this machine.
    """

    network: Network
    controller: str
    identity: Identity
    threads: int
    timeline: Timeline | None = None
    make_pool: MakePool = ComputePool
    process_memory: Callable[[], ProcessMemory] = process_memory
    available_bytes: Callable[[], int] | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RunInputs:
    """The inputs of a driver's runs, in addition to their configuration.

    Attributes:
        spec: The model; None: the model of `Config.model`.
        model_text: Content of the TOML file that `Config.model` names.
        transforms: Transforms of training images with `Config.augment`; None: defaults for the images.
        functions: Kinds of transforms that are functions of the user; see `Recipe.of`.
        layers: Kinds of layers that the model may use, the same in every role.
        checkpoints: Folder for the checkpoints of the runs; None: no checkpoints.
        resume: Checkpoint that the first run continues, with its model and rate.
        init: Saved model with the first values of each run; see `fill_from`.
        step: Step of the user's that the runs train in the place of a network.
        together: Whether the first worker of each replica trains all parts of a partitioned model.
    """

    spec: ModelSpec | None = None
    model_text: str | None = None
    transforms: Sequence[Mapping[str, Any]] | None = None
    functions: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    layers: Mapping[str, type[Layer]] = field(default_factory=lambda: BUILTIN_LAYERS)
    checkpoints: CheckpointFolder | None = None
    resume: Checkpoint | None = None
    init: TrainedModel | None = None
    step: NamedStep | None = None
    together: bool = False
