"""A cluster on Ray in a program: `async with RayCluster(config) as cluster`.

async with RayCluster(Config(servers=2, replicas=4, data="mnist")) as cluster:
    result = await cluster.fit()
print(result.metrics["test_accuracy"], result.checkpoint, result.error)
"""

import inspect
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from adam_async.checkpoint.files import newest_manifest, written_folder
from adam_async.checkpoint.manifest import CheckpointError
from adam_async.cluster.processes import ProcessCluster
from adam_async.errors import AdamError
from adam_async.launch.ray import RayLauncher
from adam_async.launch.ray_resources import RaySettings
from adam_async.run.config import Config
from adam_async.run.result import EpochResult, OnEpoch
from adam_async.runtime.clock import system_entropy
from adam_async.runtime.disk import Disk


@dataclass(frozen=True, slots=True, kw_only=True)
class RayResult:
    """The result of a training, with the attributes of the `Result` of Ray Train.

    Attributes:
        metrics: Metrics of the last finished epoch, such as `train_loss`, `test_accuracy`, `images_per_s` and
            `training_iteration`, the number of finished epochs; empty before the end of the first epoch.
        history: Metrics of each epoch, in order.
        checkpoint: Folder of checkpoints for `resume`; None without a folder, or if it has no whole
            checkpoint.
        error: The error that ended the training; None for a complete training.
    """

    metrics: Mapping[str, Any]
    history: tuple[Mapping[str, Any], ...]
    checkpoint: Path | None
    error: AdamError | None


class RayCluster(ProcessCluster):
    """A `ProcessCluster` with its roles as actors of Ray; the driver is in this process.

    Args:
        config: The run.
        ray: The Ray cluster, and the resources of the roles. The nodes read `Config.data`, unless `dataset`
            is given, such as a data set of `from_ray`.
        options: Further arguments of `ProcessCluster`, except `launcher` and `environment`.

    Raises:
        ConfigError: See `ProcessCluster` and `RayLauncher`.
        DeadlineExceeded: Ray has no room for the roles.
    """

    def __init__(self, config: Config, *, ray: RaySettings | None = None, **options: Any) -> None:
        entropy = options.get("entropy", system_entropy)
        self._ray = RayLauncher(ray or RaySettings(), entropy=entropy)
        super().__init__(config, launcher=self._ray, **options)
        self._around = AsyncExitStack()

    async def __aenter__(self) -> Self:
        self._check_entry()
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(self._ray)
            await super().__aenter__()
            self._around = stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        async with self._around:
            return await super().__aexit__(kind, error, trace)

    async def fit(self, on_epoch: OnEpoch | None = None) -> RayResult:
        """Run all epochs, and return the result, which has the error of a failed training. See `train`."""
        history: list[Mapping[str, Any]] = []
        failure: AdamError | None = None

        async def note(epoch: EpochResult) -> object:
            history.append(metrics_of(epoch))
            answer = on_epoch(epoch) if on_epoch is not None else None
            return await answer if inspect.isawaitable(answer) else answer

        try:
            await self.train(note)
        except AdamError as error:
            failure = error
        return RayResult(
            metrics=history[-1] if history else {},
            history=tuple(history),
            checkpoint=await self._checkpoint(),
            error=failure,
        )

    async def _checkpoint(self) -> Path | None:
        """Return the folder of checkpoints; None without a folder, or if it has no whole checkpoint."""
        folder = written_folder(self._setup.checkpoint, self._setup.resume)
        if folder is None:
            return None
        async with Disk() as disk:
            try:
                await newest_manifest(folder, disk)
            except CheckpointError:
                return None
        return folder


def metrics_of(epoch: EpochResult) -> dict[str, Any]:
    """Return the metrics of an epoch, by name."""
    return {**asdict(epoch), "images_per_s": epoch.images_per_s, "training_iteration": epoch.epoch}
