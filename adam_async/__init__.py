"""Project Adam (OSDI 2014) for asyncio: programs share arrays through parameter servers, and train networks.

The import of this package sets up and loads nothing; the first use of a name below loads its module.

    async with ParameterStore.open("local", {"w": np.zeros(784)}, rule=Sgd(rate=0.05)) as store:
        values = await store.pull()
        await store.push({"w": gradient(values["w"])}, read=values)

A store is a set of named arrays with update rules on parameter servers. The training of networks uses a
store:

    async with Disk() as disk:
        digits = await load_dataset("digits", disk)
    async with LocalCluster(Config(epochs=3), dataset=digits) as cluster:
        result = await cluster.train(print)

`adam_async.sync` has stores, local clusters and `load_checkpoint` for programs without an event loop.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from adam_async import sync
    from adam_async.checkpoint.checkpoint import Checkpoint
    from adam_async.checkpoint.files import load_checkpoint
    from adam_async.checkpoint.manifest import CheckpointError
    from adam_async.checkpoint.trained_model import Model, Predictions
    from adam_async.cluster.local import LocalCluster
    from adam_async.cluster.processes import ProcessCluster
    from adam_async.data_server.dataset import Dataset, make_dataset
    from adam_async.data_server.sources.datasets import load as load_dataset
    from adam_async.data_server.sources.objects import from_object
    from adam_async.data_server.sources.ray_data import from_ray
    from adam_async.data_server.sources.synthetic import synthetic
    from adam_async.errors import (
        AdamError,
        ConfigError,
        DataError,
        DeadlineExceeded,
        Diverged,
        RoleDied,
        RunFailed,
        ShardUnavailable,
        StepFailed,
        StoreError,
    )
    from adam_async.launch.ray import RayCluster
    from adam_async.launch.ray_resources import RaySettings
    from adam_async.model.rules import Adagrad, Adam, AdamW, Sgd
    from adam_async.model.spec import ModelSpec
    from adam_async.run.arrays import ArraySpec, Factors
    from adam_async.run.config import Config, Waits
    from adam_async.run.option_sources import make_config
    from adam_async.run.result import EpochResult, RunResult
    from adam_async.run.train_step import Batch, Gradients, Metrics, StepOutcome, TrainStep
    from adam_async.runtime.disk import Disk
    from adam_async.runtime.timeline import Timeline
    from adam_async.store.store import ParameterStore
    from adam_async.store.values import PushOutcome, ReadVersions, Values

    __version__: str

__all__ = [
    "Adagrad",
    "Adam",
    "AdamError",
    "AdamW",
    "ArraySpec",
    "Batch",
    "Checkpoint",
    "CheckpointError",
    "Config",
    "ConfigError",
    "DataError",
    "Dataset",
    "DeadlineExceeded",
    "Disk",
    "Diverged",
    "EpochResult",
    "Factors",
    "Gradients",
    "LocalCluster",
    "Metrics",
    "Model",
    "ModelSpec",
    "ParameterStore",
    "Predictions",
    "ProcessCluster",
    "PushOutcome",
    "RayCluster",
    "RaySettings",
    "ReadVersions",
    "RoleDied",
    "RunFailed",
    "RunResult",
    "Sgd",
    "ShardUnavailable",
    "StepFailed",
    "StepOutcome",
    "StoreError",
    "Timeline",
    "TrainStep",
    "Values",
    "Waits",
    "from_object",
    "from_ray",
    "load_checkpoint",
    "load_dataset",
    "make_config",
    "make_dataset",
    "sync",
    "synthetic",
]

_HOMES = {
    "store.store": ("ParameterStore",),
    "model.rules": ("Adagrad", "Adam", "AdamW", "Sgd"),
    "store.values": ("PushOutcome", "ReadVersions", "Values"),
    "checkpoint.checkpoint": ("Checkpoint",),
    "checkpoint.manifest": ("CheckpointError",),
    "checkpoint.files": ("load_checkpoint",),
    "cluster.local": ("LocalCluster",),
    "cluster.processes": ("ProcessCluster",),
    "run.arrays": ("ArraySpec", "Factors"),
    "run.config": ("Config", "Waits"),
    "run.option_sources": ("make_config",),
    "data_server.dataset": ("Dataset", "make_dataset"),
    "data_server.sources.datasets": ("load_dataset",),
    "data_server.sources.objects": ("from_object",),
    "data_server.sources.ray_data": ("from_ray",),
    "launch.ray": ("RayCluster",),
    "launch.ray_resources": ("RaySettings",),
    "data_server.sources.synthetic": ("synthetic",),
    "run.result": ("EpochResult", "RunResult"),
    "run.train_step": ("Batch", "Gradients", "Metrics", "StepOutcome", "TrainStep"),
    "errors": (
        "AdamError",
        "ConfigError",
        "DataError",
        "DeadlineExceeded",
        "Diverged",
        "RoleDied",
        "RunFailed",
        "ShardUnavailable",
        "StepFailed",
        "StoreError",
    ),
    "model.spec": ("ModelSpec",),
    "runtime.disk": ("Disk",),
    "runtime.timeline": ("Timeline",),
    "checkpoint.trained_model": ("Model", "Predictions"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}
_NAME_AT_HOME = {"load_dataset": "load"}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        # Imported here, because this import takes longer than the rest of the package's import.
        from importlib.metadata import version

        return version("adam-async")
    if name == "sync":
        return import_module("adam_async.sync")
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module 'adam_async' has no attribute {name!r}")
    value = getattr(import_module(f"adam_async.{home}"), _NAME_AT_HOME.get(name, name))
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
