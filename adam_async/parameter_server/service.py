"""The parameter-server role: shards in memory, pushes in, acknowledgements and values out.

Everything that touches shard values runs on the event loop's thread, one shard batch per turn: the
server is the single writer of its shards, reads between batches need no lock, and a shard is at most
1 MiB, so a heartbeat never waits for more than one shard's work. What arrives while a batch is being
applied is queued by the time the next turn comes, which is where batching comes from (AD-42).
"""

import asyncio
import logging
from collections.abc import Coroutine, Mapping, Sequence
from math import inf
from typing import Any

import numpy as np
from numpy.typing import NDArray

from adam_async.cluster_map import ClusterMap
from adam_async.config import Waits
from adam_async.dice import Dice
from adam_async.ids import Replica
from adam_async.messages import (
    Body,
    Pull,
    Push,
    Record,
    Recorded,
    Tick,
    Ticked,
    Values,
    check_tensor,
    pack,
)
from adam_async.model.layer import Layer
from adam_async.model.layers import BUILTIN_LAYERS
from adam_async.model.network import Network as Model
from adam_async.model.rules import make_rule
from adam_async.model.spec import ModelSpec
from adam_async.parameter_server.apply import (
    Applier,
    DeltaPart,
    FactorPart,
    PushGradients,
    product_bound,
    squares,
)
from adam_async.parameter_server.shard import Shard
from adam_async.parameter_server.state import (
    Acknowledge,
    AcknowledgeRecord,
    AcknowledgeTick,
    Applied,
    Apply,
    Effect,
    PullArrived,
    PushArrived,
    RecordArrived,
    Refuse,
    ReplicasChanged,
    SendValues,
    ServerState,
    TickArrived,
)
from adam_async.placement import ShardSpec, ShardTable, shard_table
from adam_async.role import Role
from adam_async.shard_storage import ShardStorage, StorageShelf, initial_values
from adam_async.timeline import Timeline
from transport import BufferPool, Identity, Link, Network, RemoteProtocolError, Request

logger = logging.getLogger(__name__)

TURN_VALUES = 1 << 18
"""Values of shards after which a turn of the loop ends: as many as the largest shard has."""


class ParameterServer(Role):
    """One parameter server, from `async with` to its end.

    Args:
        network: Where it listens and how it reaches the controller.
        address: What it binds.
        controller: The controller's address.
        identity: Its role, node id and incarnation.
        waits: Deadlines.
        buffers: Memory for copies of values on their way out.
        shelf: Where the memory of the shards lies; roles of one process may share it.
        timeline: Where what is applied and recorded, and messages, are noted.

    Cancelling the block ends it between two batches; queued pushes are dropped unacknowledged.
    """

    def __init__(
        self,
        *,
        network: Network,
        address: str,
        controller: str,
        identity: Identity,
        waits: Waits,
        buffers: BufferPool,
        shelf: StorageShelf | None = None,
        timeline: Timeline | None = None,
        layers: Mapping[str, type[Layer]] = BUILTIN_LAYERS,
    ) -> None:
        super().__init__(
            network=network,
            address=address,
            identity=identity,
            waits=waits,
            controller=controller,
            timeline=timeline,
        )
        self._buffers = buffers
        self._layers = layers
        self._shelf = shelf or StorageShelf()
        self._storage: ShardStorage | None = None
        self._draining = False
        self._run = ""
        self._applier: Applier | None = None
        self._specs: tuple[ShardSpec, ...] = ()
        self._dtype: np.dtype[Any] = np.dtype(np.float32)
        self.state: ServerState | None = None

    def _tasks(self) -> Mapping[str, Coroutine[Any, Any, None]]:
        return {"follow": self._follow()}

    # --- the run -----------------------------------------------------------------------------

    async def _follow(self) -> None:
        """Take up each run that places buckets here; follow who is live in it."""
        live: tuple[int, ...] | None = None
        async for cluster in self._membership.changes():
            run = cluster.run
            if run is None or self._identity.node not in cluster.buckets:
                continue
            if run.id != self._run:
                await self._take_up(cluster)
                live = None
                await self._membership.set_node(ready=run.id)
            if cluster.live_replicas() != live:
                live = cluster.live_replicas()
                assert self.state is not None
                self.state.handle(ReplicasChanged(tuple(Replica(r) for r in live)))

    async def _take_up(self, cluster: ClusterMap) -> None:
        """Allocate and initialise the shards of the buckets whose primary we are."""
        run = cluster.run
        assert run is not None
        config = run.config
        self._dtype = np.dtype(str(config["dtype"]))
        model = Model(ModelSpec.from_dict(run.spec), dtype=self._dtype, layers=self._layers)
        table = shard_table(
            model.parameters, shard_bytes=int(config["shard_bytes"]), item_bytes=self._dtype.itemsize
        )
        rule = make_rule(
            str(config["rule"]),
            momentum=float(config["momentum"]),
            weight_decay=float(config["weight_decay"]),
        )
        in_place = config["weights"] == "aliased"
        storage = self._storage = self._shelf.provide(
            run.id, lambda: ShardStorage(model.parameters, rule, self._dtype, in_place=in_place)
        )
        dice = Dice(int(config["seed"]))
        shards = []
        for spec in _ours(table, cluster.buckets, self._identity.node):
            values = storage.values(spec)
            values[:] = initial_values(model, dice, spec)
            shards.append(Shard(spec=spec, values=values, rule_state=storage.rule_state(spec)))
            await asyncio.sleep(0)
        self._specs = table.shards
        self._applier = Applier(rule, [shard.spec for shard in shards], self._dtype)
        self.state = ServerState(run=run.id, generation=cluster.generation, shards=shards)
        self._run = run.id
        logger.info("%s holds %d shards of run %s", self._identity.node, len(shards), run.id)

    # --- questions ---------------------------------------------------------------------------

    def _answer(self, request: Request, body: Body) -> None:
        state, timeline = self.state, self._timeline
        if state is None:
            request.fail("not-ready", f"{self._identity.node} has not taken up a run")
            return
        begin = timeline.clock() if timeline is not None else 0.0
        match body:
            case Push():
                gradients = PushGradients()
                if body.run == state.run:
                    gradients = read_gradients(body, request.message.tensors, self._specs, self._dtype)
                effects = state.handle(PushArrived(request, body, gradients))
            case Pull():
                effects = state.handle(PullArrived(request, body))
            case Record():
                effects = state.handle(RecordArrived(request, body))
            case Tick():
                effects = state.handle(TickArrived(request, body))
            case _:
                super()._answer(request, body)
                return
        self._perform(effects)
        if timeline is not None and isinstance(body, Record):
            timeline.recorded(self._identity.node, body, begin)
        if not state.idle and not self._draining:
            self._draining = True
            self._loop.call_soon(self._drain)

    # --- effects -----------------------------------------------------------------------------

    def _drain(self) -> None:
        """Apply about a shard's worth of what is queued; come back in the next turn while there is more."""
        state = self.state
        assert state is not None
        room = TURN_VALUES
        while room > 0:
            batch, effects = state.take_batch()
            self._perform(effects)
            if batch is None:
                self._draining = False
                return
            room -= self._apply(state, batch)
        self._loop.call_soon(self._drain)

    def _apply(self, state: ServerState, batch: Apply) -> int:
        """Apply a batch. Returns how many values it covered."""
        applier, timeline = self._applier, self._timeline
        assert applier is not None
        begin = timeline.clock() if timeline is not None else 0.0
        pushes = batch.pushes
        shards = batch.shards()
        if len(shards) == len(pushes[0].push.shards):
            finite = applier.apply_pushes(shards, [queued.gradients for queued in pushes])
        else:
            each = [queued.gradients.each() for queued in pushes]
            finite = [
                applier.apply(shard, [gradients[place] for gradients in each])
                for place, shard in zip(pushes[0].accepted, shards, strict=True)
            ]
        self._perform(state.handle(Applied(batch, finite)))
        covered = sum([len(shard.values) for shard in shards])
        if timeline is not None:
            timeline.applied(self._identity.node, [queued.push for queued in pushes], covered, begin)
        return covered

    def _perform(self, effects: Sequence[Effect]) -> None:
        shared: dict[tuple[Link, tuple[Shard, ...]], NDArray[Any]] = {}
        for effect in effects:
            match effect:
                case Acknowledge() if effect.shards:
                    # Pushes of one client that were applied together bring back one and the same copy.
                    key = (effect.request.link, effect.shards)
                    values = shared.get(key)
                    if values is None:
                        values = shared[key] = self._copy(effect.shards)
                    effect.request.reply(pack(effect.body, [values]))
                case Acknowledge():
                    effect.request.reply(pack(effect.body))
                case SendValues():
                    body = Values(
                        versions=tuple([shard.version for shard in effect.shards]),
                        clock=min((shard.slowest_clock() for shard in effect.shards), default=0),
                    )
                    effect.request.reply(pack(body, [self._copy(effect.shards)]))
                case AcknowledgeRecord():
                    effect.request.reply(pack(Recorded()))
                case AcknowledgeTick():
                    effect.request.reply(pack(Ticked()))
                case Refuse():
                    effect.request.fail(effect.code, effect.text)

    def _copy(self, shards: Sequence[Shard]) -> NDArray[Any]:
        """Copy shards one after the other into pooled memory: live values never leave the server."""
        size = sum([len(shard.values) for shard in shards])
        copy: NDArray[Any] = self._buffers.acquire(size * self._dtype.itemsize).view(self._dtype)
        at = 0
        for shard in shards:
            end = at + len(shard.values)
            copy[at:end] = shard.values
            at = end
        return copy

    def statistics(self) -> dict[str, Any]:
        """Versions, staleness, clocks, refused pushes, and the traffic of each link."""
        return {**(self.state.statistics() if self.state is not None else {}), **super().statistics()}

    def __repr__(self) -> str:
        return f"<ParameterServer {self._identity.node} at {self.address} run {self._run or 'none'}>"


def _ours(table: ShardTable, buckets: Sequence[str], node: str) -> list[ShardSpec]:
    return [spec for spec in table.shards if buckets[spec.bucket] == node]


def read_gradients(
    push: Push, tensors: Sequence[NDArray[Any]], table: Sequence[ShardSpec], dtype: np.dtype[Any]
) -> PushGradients:
    """Make out the gradients of a push, without copying.

    Raises:
        RemoteProtocolError: Counts, shapes or types do not fit the shards named.
    """
    if not len(push.shards) == len(push.numbers) == len(push.versions) == len(push.own):
        raise RemoteProtocolError("push", "shards, numbers, versions and own of a Push differ in length")
    parts: list[DeltaPart | FactorPart] = []
    rest = iter(tensors)
    at = 0
    try:
        for part in push.parts:
            shards = [_spec(table, number) for number in push.shards[at : at + part.count]]
            at += part.count
            if part.factors:
                parts.append(_read_factors(shards, next(rest), next(rest), push.rate, dtype))
            else:
                parts.append(_read_deltas(shards, next(rest), push.rate, dtype))
    except StopIteration:
        raise RemoteProtocolError("push", "a Push carries fewer tensors than its parts need") from None
    if at != len(push.shards) or next(rest, None) is not None:
        raise RemoteProtocolError("push", "the parts of a Push do not cover its shards and tensors")
    return PushGradients(tuple(parts))


def _spec(table: Sequence[ShardSpec], number: int) -> ShardSpec:
    if not 0 <= number < len(table):
        raise RemoteProtocolError("push", f"the model has no shard {number}")
    return table[number]


def _read_deltas(
    shards: Sequence[ShardSpec], flat: NDArray[Any], rate: float, dtype: np.dtype[Any]
) -> DeltaPart:
    sizes = tuple([shard.size for shard in shards])
    check_tensor(flat, "deltas", (sum(sizes),), dtype)
    return DeltaPart(flat, sizes, rate, squares(flat) < inf)


def _read_factors(
    shards: Sequence[ShardSpec],
    x_IK: NDArray[Any],
    errors_RK: NDArray[Any],
    rate: float,
    dtype: np.dtype[Any],
) -> FactorPart:
    if not shards:
        raise RemoteProtocolError("push", "factors need at least one shard")
    row = shards[0].row_size
    what = f"factors of {shards[0].tensor}"
    if x_IK.ndim != 2 or any(not s.whole_rows or s.row_size != row for s in shards):
        raise RemoteProtocolError("push", f"{what}: need activations ({row}, K) and shards of whole rows")
    images = x_IK.shape[1]
    rows = tuple([shard.size // row for shard in shards])
    check_tensor(x_IK, what, (row, images), dtype)
    check_tensor(errors_RK, what, (sum(rows), images), dtype)
    return FactorPart(x_IK, errors_RK, rows, rate, product_bound(x_IK, errors_RK))
