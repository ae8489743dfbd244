"""Project Adam (OSDI 2014) for asyncio: programs share arrays through parameter servers, and train networks.

Importing this package sets up and loads nothing; the first use of a name below loads its module.

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
    from adam_async import sync as sync
    from adam_async.checkpoint.checkpoint import Checkpoint as Checkpoint
    from adam_async.checkpoint.checkpoint import CheckpointError as CheckpointError
    from adam_async.checkpoint.files import load_checkpoint as load_checkpoint
    from adam_async.checkpoint.trained_model import Model as Model
    from adam_async.checkpoint.trained_model import Predictions as Predictions
    from adam_async.cluster.local import LocalCluster as LocalCluster
    from adam_async.cluster.processes import ProcessCluster as ProcessCluster
    from adam_async.data_server.dataset import Dataset as Dataset
    from adam_async.data_server.dataset import make_dataset as make_dataset
    from adam_async.data_server.sources.datasets import load_dataset as load_dataset
    from adam_async.data_server.sources.objects import from_object as from_object
    from adam_async.data_server.sources.ray_data import from_ray as from_ray
    from adam_async.data_server.sources.synthetic import synthetic as synthetic
    from adam_async.errors import AdamError as AdamError
    from adam_async.errors import ConfigError as ConfigError
    from adam_async.errors import DataError as DataError
    from adam_async.errors import DeadlineExceeded as DeadlineExceeded
    from adam_async.errors import Diverged as Diverged
    from adam_async.errors import RoleDied as RoleDied
    from adam_async.errors import RunFailed as RunFailed
    from adam_async.errors import ShardUnavailable as ShardUnavailable
    from adam_async.errors import StepFailed as StepFailed
    from adam_async.errors import StoreError as StoreError
    from adam_async.launch.ray import RayCluster as RayCluster
    from adam_async.launch.ray_resources import RaySettings as RaySettings
    from adam_async.lbfgs.image_loss import ImageLoss as ImageLoss
    from adam_async.lbfgs.optimizer import LBFGS as LBFGS
    from adam_async.lbfgs.optimizer import Iteration as Iteration
    from adam_async.model.rules import Adagrad as Adagrad
    from adam_async.model.rules import Adam as Adam
    from adam_async.model.rules import AdamW as AdamW
    from adam_async.model.rules import Sgd as Sgd
    from adam_async.model.rules import UserRule as UserRule
    from adam_async.model.spec import ModelSpec as ModelSpec
    from adam_async.report.stream import Callback as Callback
    from adam_async.run.arrays import ArraySpec as ArraySpec
    from adam_async.run.arrays import Factors as Factors
    from adam_async.run.config import Config as Config
    from adam_async.run.config import Waits as Waits
    from adam_async.run.option_sources import make_config as make_config
    from adam_async.run.result import EpochResult as EpochResult
    from adam_async.run.result import RunResult as RunResult
    from adam_async.run.store_record import PARAMETERS as PARAMETERS
    from adam_async.run.store_record import VectorRecord as VectorRecord
    from adam_async.run.train_step import Batch as Batch
    from adam_async.run.train_step import Gradients as Gradients
    from adam_async.run.train_step import Metrics as Metrics
    from adam_async.run.train_step import StepOutcome as StepOutcome
    from adam_async.run.train_step import TrainStep as TrainStep
    from adam_async.runtime.disk import Disk as Disk
    from adam_async.runtime.timeline import Timeline as Timeline
    from adam_async.store.store import ParameterStore as ParameterStore
    from adam_async.store.values import PushOutcome as PushOutcome
    from adam_async.store.values import ReadVersions as ReadVersions
    from adam_async.store.values import Values as Values
    from adam_async.store.vectors import Combine as Combine

    __version__: str

_HOMES = {
    "store.store": ("ParameterStore",),
    "model.rules": ("Adagrad", "Adam", "AdamW", "Sgd", "UserRule"),
    "store.values": ("PushOutcome", "ReadVersions", "Values"),
    "store.vectors": ("Combine",),
    "run.store_record": ("PARAMETERS", "VectorRecord"),
    "checkpoint.checkpoint": ("Checkpoint", "CheckpointError"),
    "checkpoint.files": ("load_checkpoint",),
    "cluster.local": ("LocalCluster",),
    "cluster.processes": ("ProcessCluster",),
    "run.arrays": ("ArraySpec", "Factors"),
    "run.config": ("Config", "Waits"),
    "run.option_sources": ("make_config",),
    "report.stream": ("Callback",),
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
    "lbfgs.image_loss": ("ImageLoss",),
    "lbfgs.optimizer": ("LBFGS", "Iteration"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}
__all__ = ["sync", *_HOME_OF]


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
    value = getattr(import_module(f"adam_async.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
