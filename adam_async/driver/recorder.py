"""A run's record for its replay: its epochs, and the logs of the bundles."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from adam_async.driver.replay.decode import Log, dump_record, make_recording
from adam_async.driver.replay.recording import Header, RecordedEpoch
from adam_async.driver.replay.run import digest
from adam_async.driver.role_queries import RoleQueries
from adam_async.errors import ConfigError, RecordError
from adam_async.run.cluster_map import ClusterMap
from adam_async.run.counts import Counts, WorkerCounts, of_kind
from adam_async.run.epoch_shares import Ranges
from adam_async.run.result import EpochResult
from adam_async.run.run_copies import primary_of
from adam_async.run.step_model import RunModel, StepModel
from adam_async.run.training_program import TrainingProgram
from adam_async.runtime.machine import numerics
from dataflow import ComputePool
from transport import TransportError


class Recorder:
    """Makes the record of one run.

    Args:
        run: Id of the run.

    Raises:
        ConfigError: The run continues another run.
    """

    def __init__(
        self,
        *,
        run: str,
        program: TrainingProgram,
        model: RunModel,
        data: Mapping[str, Any],
        queries: RoleQueries,
        pool: ComputePool,
    ) -> None:
        if program.resumed is not None:
            raise ConfigError(
                "a record begins with the first group of a run, and this one is resumed: leave out record"
            )
        self._run = run
        self._program = program
        self._model = model
        self._data = data
        self._queries = queries
        self._pool = pool
        self._epochs: list[RecordedEpoch] = []

    def evaluated(self, result: EpochResult, versions: Sequence[int], skipped: Ranges) -> None:
        """Add an epoch.

        Args:
            versions: Version of each shard in the weights of the result's accuracy.
        """
        finite = np.isfinite(result.train_loss)
        self._epochs.append(
            RecordedEpoch(
                epoch=result.epoch,
                images=result.images,
                train_loss=result.train_loss if finite else None,
                test_accuracy=result.test_accuracy,
                versions=tuple(versions),
                skipped_groups=tuple(skipped),
            )
        )

    async def gather(
        self, cluster: ClusterMap, weights: Mapping[str, NDArray[Any]], statistics: Mapping[str, Counts]
    ) -> bytes | RecordError:
        """Read the logs of all bundles; return the record file, or why there is none.

        Args:
            statistics: Counts by node id; workers' counts name their kernels.
        """
        logs: list[Log] = []
        for home in sorted(set(cluster.buckets)):
            primary = primary_of(cluster, self._run, home)
            if primary is None:
                return RecordError(f"the run was not recorded: bundle {home} has no primary")
            try:
                data = await self._queries.record(primary.address, self._run, home)
            except TransportError as error:
                text = f"{primary.node} did not send the log of bundle {home}: {error}"
                return RecordError(f"the run was not recorded: {text}")
            logs.append(Log(home=home, data=data))
        try:
            header = Header(
                config=msgspec.to_builtins(self._program.config),
                spec=self._program.spec,
                transforms=self._program.transforms,
                data=dict(self._data),
                buckets=cluster.buckets,
                kernels=self._kernels(statistics),
                machine=numerics(),
                epochs=tuple(self._epochs),
                weights=digest(self._model, weights),
            )
            await self._pool.run(make_recording, header, logs, self._model)
        except RecordError as error:
            return RecordError(f"the run was not recorded: {error}")
        return b"".join(dump_record(header, logs))

    def _kernels(self, statistics: Mapping[str, Counts]) -> str:
        """Return the kernels that all workers ran; with a step the configured ones, for the transforms."""
        if isinstance(self._model, StepModel):
            return self._program.config.kernels
        workers = of_kind(WorkerCounts, statistics.values())
        found = sorted({each.kernels.set for each in workers if each.kernels is not None})
        if not found:
            raise RecordError("no worker reported its kernels")
        if len(found) > 1:
            raise RecordError(f"workers ran different kernels ({', '.join(found)}); name one by kernels")
        return found[0]
