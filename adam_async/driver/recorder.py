"""What a driver keeps and gathers of a run that is recorded, for its replay."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from adam_async.driver.replay.decode import make_recording
from adam_async.driver.replay.record_file import Log, dump_record
from adam_async.driver.replay.recording import Header, RecordedEpoch
from adam_async.driver.replay.run import digest
from adam_async.driver.role_queries import Inquiries
from adam_async.errors import ConfigError, RecordError
from adam_async.model.network import Network
from adam_async.run.cluster_map import ClusterMap, RunRecord
from adam_async.run.epoch_shares import Ranges
from adam_async.run.result import EpochResult
from adam_async.runtime.machine import numerics
from dataflow import ComputePool
from transport import TransportError

NOTING = ("ps", "worker")
"""Roles that note what a replay needs."""


class Recorder:
    """Makes the record of one run.

    Args:
        run: As it was submitted.
        model: Its network.
        data: What the data server says of its data.
        inquiries: Asks the roles.
        pool: Looks through what they noted, beside the loop.

    Raises:
        ConfigError: The run continues another one.
    """

    def __init__(
        self,
        *,
        run: RunRecord,
        model: Network,
        data: Mapping[str, Any],
        inquiries: Inquiries,
        pool: ComputePool,
    ) -> None:
        if run.resumed is not None:
            raise ConfigError(
                "a record begins with the first group of a run, and this one is resumed: leave out record"
            )
        self._run = run
        self._model = model
        self._data = data
        self._inquiries = inquiries
        self._pool = pool
        self._epochs: list[RecordedEpoch] = []

    def evaluated(self, result: EpochResult, versions: Sequence[int], skipped: Ranges) -> None:
        """Note an epoch: the version of each shard of which its accuracy is, and the groups it skipped."""
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
        self,
        cluster: ClusterMap,
        weights: Mapping[str, NDArray[Any]],
        statistics: Mapping[str, Mapping[str, Any]],
    ) -> bytes | RecordError:
        """Read what all servers and workers noted, and make a record's file of it; or say why there is none.

        Args:
            cluster: Where they are.
            weights: The final values.
            statistics: What each node counted; workers say which kernels they ran.
        """
        logs: list[Log] = []
        try:
            for role in NOTING:
                for node in cluster.live(role):
                    data = await self._inquiries.record(cluster.nodes[node].address, self._run.id)
                    logs.append(Log(node=node, role=role, data=data))
        except TransportError as error:
            return RecordError(f"the run was not recorded: {node} did not say what it noted: {error}")
        try:
            header = Header(
                config=self._run.config,
                spec=self._run.spec,
                transforms=self._run.transforms,
                data=dict(self._data),
                buckets=cluster.buckets,
                kernels=_kernels(statistics),
                machine=numerics(),
                epochs=tuple(self._epochs),
                weights=digest(self._model, weights),
            )
            await self._pool.run(make_recording, header, logs, self._model)
        except RecordError as error:
            return RecordError(f"the run was not recorded: {error}")
        return b"".join(dump_record(header, logs))


def _kernels(statistics: Mapping[str, Mapping[str, Any]]) -> str:
    """Which implementation of the layers all workers ran."""
    try:
        found = {str(node["kernels"]["set"]) for node in statistics.values() if "kernels" in node}
    except (LookupError, TypeError) as error:
        raise RecordError(f"a worker did not say which kernels it ran: {error!r}") from None
    if len(found) != 1:
        raise RecordError(f"workers ran different kernels ({', '.join(sorted(found))}); name one by kernels")
    return found.pop()
