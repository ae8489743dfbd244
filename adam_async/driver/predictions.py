"""Sample images of another driver's run: its newest weights on the first test images, for an operator.

The operator reads the images once, and pulls the weights after each epoch that the driver has evaluated. The
run may be an epoch ahead by then, so the predictions come from the present weights.
"""

import logging

from msgspec.structs import replace

from adam_async.controller.client import Membership
from adam_async.driver.evaluator import MOST_LOOKED_AT, Evaluator, pull_snapshot, reading_client, running
from adam_async.errors import AdamError, ConfigError, first_cause
from adam_async.model.network import Network
from adam_async.model.spec import ModelSpec
from adam_async.report.stream import EventStream
from adam_async.run.cluster_map import MOST_REASON, ClusterMap
from adam_async.run.config import Waits
from adam_async.run.events import Noted
from adam_async.run.partition import table_of
from adam_async.run.train_step import StepSpec
from adam_async.run.training_program import read_training
from adam_async.runtime.channel import Endpoint
from adam_async.runtime.traffic import Traffic
from dataflow import ComputePool
from transport import TransportError

logger = logging.getLogger(__name__)

MOST_PULLED_BYTES = 256 << 20
"""Maximum size of a model that an operator pulls after each epoch, in bytes."""


class Predictions:
    """Publishes predictions for a stream. The caller runs `run` as a task of its group.

    Args:
        endpoint: The operator's end of its links.
    """

    def __init__(
        self, endpoint: Endpoint, membership: Membership, stream: EventStream, *, waits: Waits
    ) -> None:
        self._endpoint = endpoint
        self._membership = membership
        self._stream = stream
        self._waits = waits
        self._evaluators: dict[str, Evaluator] = {}
        """Evaluator of the newest run, by run id; another run may have other images."""

    async def run(self) -> None:
        """Publish predictions after each evaluated epoch, until cancelled."""
        shown = "", 0
        async with ComputePool(threads=1, name=f"{self._membership.node}-predict") as pool:
            async for cluster in self._membership.changes():
                run = cluster.run
                if run is None or not run.evaluated or shown == (run.id, run.evaluated[-1].epoch):
                    continue
                try:
                    await self._publish(cluster, pool)
                except Exception as error:  # a peer may send what does not fit, and the page goes on
                    cause = first_cause(error)
                    unknown = None if isinstance(cause, AdamError | TransportError) else error
                    level = logging.INFO if unknown is None else logging.WARNING
                    epoch = run.evaluated[-1].epoch
                    logger.log(level, "no predictions after epoch %d: %s", epoch, cause, exc_info=unknown)
                    if shown[0] != run.id:
                        self._stream.publish(Noted(text=f"no predictions: {cause!s:.{MOST_REASON}}"))
                shown = run.id, run.evaluated[-1].epoch

    async def _publish(self, cluster: ClusterMap, pool: ComputePool) -> None:
        """Publish the predictions of the present weights; none for a step, or after the run's end.

        Raises:
            AdamError, TransportError: The run cannot be read, or is too large, or a role is silent.
        """
        run, store = cluster.run, cluster.run_store
        if run is None or store is None or not cluster.in_progress:
            return
        if store.nbytes > MOST_PULLED_BYTES:
            size, most = store.nbytes >> 20, MOST_PULLED_BYTES >> 20
            raise ConfigError(f"the model has {size} MB, and a page pulls {most} MB at most")
        program = read_training(run)
        if StepSpec.from_dict(program.spec) is not None:
            return
        model = await pool.run(Network, ModelSpec.from_dict(program.spec), program.config.dtype, cost="model")
        table = table_of(model, shard_bytes=program.config.shard_bytes, plan=program.plan)
        client = reading_client(
            cluster,
            table,
            network=self._endpoint.network,
            identity=self._endpoint.identity,
            waits=self._waits,
            traffic=Traffic(self._membership.node, timeline=None),
        )
        async with running(client, self._membership.changes(), node=self._membership.node):
            pulled = await pull_snapshot(model, table, cluster, client)
        if run.id not in self._evaluators:
            found = Evaluator(self._endpoint, waits=self._waits, pool=pool, threads=1, most=MOST_LOOKED_AT)
            self._evaluators = {run.id: found}
        evaluator = self._evaluators[run.id]
        await evaluator.accuracy(model, pulled.weights, self._data_address)
        if (predicted := await evaluator.predicted(run.evaluated[-1].epoch)) is not None:
            self._stream.publish(replace(predicted, is_later=True))

    def _data_address(self) -> str:
        """Return a data server's address; empty without one."""
        cluster = self._membership.map
        return next((cluster.nodes[node].address for node in cluster.live("data")), "")
